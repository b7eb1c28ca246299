"""Looks at pairs while they arrive: a verdict as soon as the runs carry one, at the error rate of a single look.

Lan & DeMets 1983, Biometrika 70:659: alpha is spent over the looks as an O'Brien-Fleming-like function of the
information, so early looks claim only what is overwhelming and the last has almost all of alpha left.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri, stdtr, stdtrit

from te_bench.reports.convergence import skewed
from te_bench.reports.convergence.equivalence import CLAIMS, Verdict, check_test

Array = NDArray[np.float64]

MOST_LOOKS = 5  # of more, the early ones hold almost no alpha and the late ones cost what they could save
HOPELESS = 0.05  # the chance of a verdict, by the gaps so far, below which the seeds to come are not worth running
SAME = 1e-9  # a spread below this share of the margin is rounding of the subtraction

# So many cells and directions hold every look to its share of alpha within 2 %, as far as 1,000,000 simulations can tell.
_CELLS = 2400
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(400)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoppingDecision:
    """Where to stop: the verdict after n seeds, and a plain sentence."""

    verdict: Verdict
    n: int
    reason: str


def looks(n_min: int, n_max: int) -> tuple[int, ...]:
    """The numbers of seeds at which to look: n_min, n_max and at most three between them, evenly spaced.

    Raises ValueError for n_min below 2, where a standard deviation does not exist, and n_max below n_min.
    """
    if not 2 <= n_min <= n_max:
        raise ValueError(f"looks from {n_min} to {n_max} seeds: the first needs 2 at least, and the last no fewer")
    count = min(MOST_LOOKS, n_max - n_min + 1)
    return tuple(dict.fromkeys(round(float(n)) for n in np.linspace(n_min, n_max, count)))


def spent(fraction: Array, alpha: float) -> Array:
    """2 - 2 Phi(z / sqrt(fraction)), z the 1 - alpha / 2 quantile: alpha that may be used up by an information fraction."""
    return np.asarray(2 * ndtr(ndtri(alpha / 2) / np.sqrt(fraction)))


@lru_cache(maxsize=64)
def t_levels(looks: tuple[int, ...], alpha: float = 0.05) -> tuple[float, ...]:
    """One-sided levels, look by look, that together reject a true null hypothesis in `alpha` of cases.

    They are for t statistics of the first n gaps, n in `looks`, exact for normal gaps of any variance. With the levels for a
    known variance (Armitage, McPherson & Rowe 1969, J. R. Stat. Soc. A 132:235) looks at 3, 4 ... 8 seeds reject it in 5.8 %
    of cases instead of 5 % (200,000 simulations). But the statistic depends on the direction of the vector of gaps alone,
    c = sum x / sqrt(n sum x^2) = sin psi with t = sqrt(n - 1) tan psi, which is independent of its length, so c over n
    is a Markov chain: with one more gap c' = (sqrt(n) sin psi cos theta + sin theta) / sqrt(n + 1), the density of
    theta proportional to cos^(n-1). Their recursion thus runs in psi, one gap at a time, on cells of equal width.
    Raises ValueError for looks that do not rise from 2 or more, and alpha outside (0, 0.5).
    """
    check_test(1.0, alpha)
    if not looks or looks[0] < 2 or any(b <= a for a, b in pairwise(looks)):
        raise ValueError(f"looks at {list(looks)} seeds: give numbers that rise, from 2 seeds or more")
    budgets = np.diff(spent(np.array(looks) / looks[-1], alpha), prepend=0.0)
    edges = np.linspace(-math.pi / 2, math.pi / 2, _CELLS + 1)
    n, levels = looks[0], [float(budgets[0])]
    # the first look is Student's t itself
    bound = math.atan(-float(stdtrit(n - 1, budgets[0])) / math.sqrt(n - 1))
    mass = np.diff(stdtr(n - 1, math.sqrt(n - 1) * np.tan(np.minimum(edges, bound))))
    for look, budget in zip(looks[1:], budgets[1:], strict=True):
        for size in range(n, look):
            mass = _one_more(mass, edges, size)
        n = look
        bound, mass = _cut(mass, edges, float(budget))
        levels.append(float(stdtr(n - 1, -math.sqrt(n - 1) * math.tan(bound))))
    return tuple(levels)


def _one_more(mass: Array, edges: Array, n: int) -> Array:
    """The distribution of psi over the cells after gap n + 1: each cell's mass goes to where the new gap moves it."""
    theta = math.pi / 2 * _NODES
    weights = _WEIGHTS * np.cos(theta) ** (n - 1)
    sine = np.sin((edges[:-1] + edges[1:]) / 2)[:, None]
    moved = np.arcsin(np.clip((math.sqrt(n) * sine * np.cos(theta) + np.sin(theta)) / math.sqrt(n + 1), -1, 1))
    # shared between the two cells whose centres are nearest, in proportion
    place = np.clip((moved - edges[0]) / (edges[1] - edges[0]) - 0.5, 0, _CELLS - 1)
    left = np.minimum(place.astype(np.int64), _CELLS - 2)
    share = mass[:, None] * (weights / weights.sum())
    part = share * (place - left)
    to_left = np.bincount(left.ravel(), (share - part).ravel(), _CELLS)
    return np.asarray(to_left + np.bincount(left.ravel() + 1, part.ravel(), _CELLS))


def _cut(mass: Array, edges: Array, budget: float) -> tuple[float, Array]:
    """The psi above which `budget` lies, and the mass below it."""
    above = np.append(np.cumsum(mass[::-1])[::-1], 0.0)
    bound = float(np.interp(-budget, -above, edges))
    kept = np.clip((bound - edges[:-1]) / (edges[1] - edges[0]), 0, 1)
    return bound, mass * kept


def decide(
    gaps: Sequence[float], *, looks: Sequence[int], margin: float, alpha: float = 0.05
) -> StoppingDecision | None:
    """The verdict at the first look that reached one, on paired gaps in the order of their seeds; None: go on.

    gap < margin, gap > -margin and gap > margin are each tested as `skewed` does, at critical values that spend alpha over
    the looks, and what was rejected stays so: over all looks each is claimed wrongly in at most alpha of cases, for gaps as
    `skewed.ASSUMPTION` says. EQUIVALENT when the first two hold, NON_INFERIOR when the first does and the gap is below
    -margin or the seeds are up, INFERIOR when the third does. INCONCLUSIVE at the last look, or earlier where the seeds to
    come have less than a HOPELESS chance of a verdict; going on all the same does the error rate no harm, for no level
    counts on that stop. `alpha` is for one candidate: give each of k candidates alpha / k.

    Raises ValueError for a gap that is not finite, looks that do not rise from 3 or more, and as check_test.
    """
    check_test(margin, alpha)
    if not looks or looks[0] < skewed.FEWEST or any(b <= a for a, b in pairwise(looks)):
        raise ValueError(f"looks at {list(looks)} seeds: give numbers that rise, from {skewed.FEWEST} seeds or more")
    budgets = tuple(float(budget) for budget in spent(np.array(looks) / looks[-1], alpha))
    bounds = skewed.bounds(tuple(looks), budgets)
    values = np.asarray(gaps, dtype=np.float64)
    for place in np.flatnonzero(~np.isfinite(values)):
        raise ValueError(f"gap {place + 1} of {values.size} is {values[place]}: a run that broke is judged as diverged")
    less, more = False, False  # gap < margin and gap > -margin have been shown
    for n, bound, budget in zip(looks, bounds, budgets, strict=True):
        if n > values.size:
            return None
        look = _look(values[:n], margin, bound)
        less, more = less or look.less, more or look.more
        verdict = None
        if look.worse:
            verdict = Verdict.INFERIOR
        elif less and more:
            verdict = Verdict.EQUIVALENT
        elif less and (n == looks[-1] or look.better):
            verdict = Verdict.NON_INFERIOR
        elif not less and (n == looks[-1] or _chance(look, n, looks[-1], bounds[-1], margin) < HOPELESS):
            verdict = Verdict.INCONCLUSIVE
        if verdict:
            reason = _reason(verdict, look, n, looks[-1], margin, budget)
            return StoppingDecision(verdict=verdict, n=n, reason=reason)
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Look:
    """Mean and spread of the gaps so far; whether they show that gap < margin, > -margin, > margin and < -margin."""

    gap: float
    sd: float
    less: bool
    more: bool
    worse: bool
    better: bool


def _look(gaps: Array, margin: float, bound: float) -> _Look:
    gap, sd = float(gaps.mean()), float(gaps.std(ddof=1))
    if sd <= SAME * margin:  # no spread, no test; but gaps of exactly 0 are one and the same computation
        shown = not np.any(gaps)
        return _Look(gap=gap, sd=0.0, less=shown, more=shown, worse=False, better=False)
    mean = skewed.mean_of(gaps)
    return _Look(
        gap=gap,
        sd=sd,
        less=mean.below(margin, bound),
        more=mean.above(-margin, bound),
        worse=mean.above(margin, bound),
        better=mean.below(-margin, bound),
    )


def _chance(look: _Look, n: int, planned: int, bound: float, margin: float) -> float:
    """Probability, by the gaps so far, that the last look will tell the gap from the margin, one way or the other.

    The mean of all planned gaps is predicted around that of the first n, with sd sqrt(1 / n - 1 / planned).
    """
    if look.sd == 0:
        return 1.0
    off = look.sd * math.sqrt(1 / n - 1 / planned)
    reach = -bound * look.sd / math.sqrt(planned)
    return float(stdtr(n - 1, (margin - reach - look.gap) / off) + stdtr(n - 1, (look.gap - margin - reach) / off))


def _reason(verdict: Verdict, look: _Look, n: int, planned: int, margin: float, budget: float) -> str:
    after = f"after {n} of {planned} seeds: mean gap {look.gap:+.2g}, alpha spent so far {budget:.2g}"
    if verdict is Verdict.INCONCLUSIVE and n < planned:
        return f"{after}; the other {planned - n} seeds would hardly tell it from the margin {margin:g}"
    return f"{CLAIMS[verdict].format(margin=margin)} {after}"
