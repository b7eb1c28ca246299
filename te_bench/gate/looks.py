"""The claims that a trial's pairs allow, at which look and for how many trials at once; decision.py explains the method."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

from te_bench.gate.slowdown import Estimate, detectable, estimate, plan_pairs
from te_bench.reports.convergence.sequential import t_levels

#: Holm's divisors of alpha. The next larger one is used, because a level takes 0.3 s to compute and is cached.
_DIVISORS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
HUGE = math.log(1000)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRatio:
    """A ratio and its bounds at the one-sided level of the trial's look and Holm's step.

    low lies above the bar in REGRESSION, high below it in PASS. detectable: the smallest slow-down (0.03 is 3 %) that 80 %
    of gates with this noise find; with the pairs so far or, for a trial decided early, with all planned pairs. None: too
    few pairs, as when a bound is off by a factor of 1,000 or more.
    """

    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    detectable: float | None = None


@dataclass(frozen=True, kw_only=True)
class LogRatios:
    """The log-ratios of one kind, their planned looks and their bar."""

    logs: tuple[float, ...]
    looks: tuple[int, ...]
    bar: float
    trim: bool
    alike: float  # bound on the autocorrelation of the log-ratios

    @cached_property
    def reached(self) -> tuple[Estimate, ...]:
        return tuple(
            estimate(self.logs[:n], trim=self.trim, alike=self.alike) for n in self.looks if n <= len(self.logs)
        )

    @cached_property
    def latest(self) -> Estimate:
        return estimate(self.logs, trim=self.trim, alike=self.alike)

    def at(self, look: int) -> Estimate:
        return self.reached[look] if self.reached else self.latest

    def claimed(self, p_value: Callable[[Estimate], float], alpha: float) -> int | None:
        """Return the first look at which the claim can be made at this level, or None."""
        at = zip(self.reached, t_levels(self.looks, alpha), strict=False)
        return next((k for k, (found, level) in enumerate(at) if p_value(found) <= level), None)

    def measured(self, look: int, slower: float, passes: float, final: float, *, undecided: bool) -> MeasuredRatio:
        """Return ratio and bounds at a look, by the alpha of each claim; final: the alpha of `detectable`."""
        found = self.at(look)
        if not found.se:
            return MeasuredRatio(ratio=found.ratio)
        bounds = [found.bound(t_levels(self.looks, alpha)[look]) for alpha in (slower, passes)]
        below, above = bounds if max(bounds) < HUGE else (None, None)
        n = found.n if undecided else self.looks[-1]
        away = detectable(found.sd, n, alpha=self.final(final), alike=self.alike)
        return MeasuredRatio(
            ratio=found.ratio,
            low=None if below is None else math.exp(found.log_ratio - below),
            high=None if above is None else math.exp(found.log_ratio + above),
            detectable=None if away is None or away > HUGE else math.expm1(self.bar + away),
        )

    def needed(self, look: int, alpha: float, finest: float) -> int | None:
        """Return the number of pairs that would tell the ratio from its bar, or None."""
        found = self.at(look)
        if not found.se:
            return None
        away = max(abs(found.log_ratio - self.bar), finest)
        return plan_pairs(found.sd, away, alpha=self.final(alpha), alike=self.alike)

    def final(self, alpha: float) -> float:
        return t_levels(self.looks, alpha)[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRatios:
    """The series of one trial: its typical times and, if means are judged, the means over all calls.

    Each claim returns the first look at which it can be made when `left` hypotheses share alpha.
    """

    times: tuple[LogRatios, ...]
    alpha: float

    def shares(self, left: int) -> tuple[float, ...]:
        """Return the alpha of each time for the claim "slower": two thirds and one third, rounded down."""
        parts = (1.5, 3.0) if len(self.times) == 2 else (1.0,)
        return tuple(self.alpha / divisor(part * left) for part in parts)

    def slower_by(self, left: int) -> list[int | None]:
        """Return the first look at which each time is slower than its bar."""
        each = zip(self.times, self.shares(left), strict=True)
        return [one.claimed(partial(Estimate.p_above, x=one.bar), alpha) for one, alpha in each]

    def passes_by(self, left: int) -> list[int | None]:
        return [one.claimed(partial(Estimate.p_below, x=one.bar), self.alpha / divisor(left)) for one in self.times]

    def slower(self, left: int) -> int | None:
        return min((look for look in self.slower_by(left) if look is not None), default=None)

    def passes(self, left: int) -> int | None:
        looks = [look for look in self.passes_by(left) if look is not None]
        return max(looks) if len(looks) == len(self.times) else None

    def faster(self, left: int) -> int | None:
        return self.times[0].claimed(partial(Estimate.p_below, x=0.0), self.alpha / divisor(left))


@dataclass(frozen=True, kw_only=True, slots=True)
class HolmClaim:
    """One claim over the family: the look at which each trial made it, and how many hypotheses then shared alpha."""

    made: Mapping[str, int]
    left: Mapping[str, int]


def divisor(hypotheses: float) -> float:
    return next((known for known in _DIVISORS if known >= hypotheses), hypotheses)


def holm(trials: Mapping[str, TrialRatios], claim: Callable[[TrialRatios, int], int | None]) -> HolmClaim:
    """Make one claim for as many trials as Holm's procedure allows at the looks reached."""
    made: dict[str, int] = {}
    left: dict[str, int] = {}
    while len(made) < len(trials):
        among = len(trials) - len(made)
        left |= {name: among for name in trials if name not in made}
        looks = {name: claim(trials[name], among) for name in trials.keys() - made.keys()}
        new = {name: look for name, look in looks.items() if look is not None}
        if not new:
            break
        made |= new
    return HolmClaim(made=made, left=left)
