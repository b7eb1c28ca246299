"""What a plan of a convergence run is predicted to cost and to show: its power by seeds, in nat and hours of the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from te_bench.reports.convergence.earlier_runs import Machine
from te_bench.reports.convergence.power import fewest

#: True gaps to give the power for, as shares of the margin, beside the gap that was measured so far.
GAPS = (0.0, 1 / 3, 1 / 2)
ENOUGH = 0.97  # power at the largest of GAPS that more seeds or rounds hardly raise


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A number of rounds, its cost and its power; None if time or spread is unknown."""

    rounds: int
    runs: int
    seconds: float | None  # if one run follows another
    power: tuple[float, ...] | None  # at the plan's gaps, by the planned spread
    power_of_others: tuple[float, ...] | None = None  # of the hardest recipe after the one that is judged first

    @property
    def at_half(self) -> float:
        """The power where the true gap is the largest of GAPS, half the margin."""
        return self.power[len(GAPS) - 1] if self.power else 0.0


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a plan costs and can show, and what other numbers of its seeds, or rounds of a pool, would."""

    margin: float
    trial_s: Mapping[str, float | None]  # of each configuration, by Trial.cell
    machine: Machine
    pilot: bool = False
    fixed: str | None = None  # a sentence: what was asked differs, and the first plan counts
    rest: str | None = None  # a sentence: what the rest of a budget would buy
    unseen_fault: str | None = None  # a sentence: no record shows the planted fault's gap
    time_from: str | None = None  # a sentence about estimated seconds
    gap: float | None = None  # that was measured so far

    @property
    def gaps(self) -> tuple[float, ...]:
        return gaps_of(self.margin, self.gap)

    @property
    def known(self) -> bool:
        """Whether the spread is known, without which there is no power."""
        raise NotImplementedError

    @property
    def least(self) -> int:
        """The fewest seeds that a budget may choose."""
        raise NotImplementedError

    def option(self, seeds: int) -> Option:
        """Return the runs, cost and power of a number of seeds."""
        raise NotImplementedError

    def at_half(self, seeds: int) -> float:
        """Return the power at the largest of GAPS."""
        return self.option(seeds).at_half

    def enough(self, most: int) -> int:
        """Return the fewest seeds, up to `most`, with a power of ENOUGH at the largest of GAPS."""
        found = fewest(lambda seeds: self.at_half(seeds) > ENOUGH, self.least, most) if self.known else None
        return most if found is None else min(found, most)


def gaps_of(margin: float, measured: float | None) -> tuple[float, ...]:
    """Return the true gaps to give the power for: GAPS of the margin, and the gap measured so far, if it is known."""
    return (*(share * margin for share in GAPS), *(() if measured is None else (measured,)))


def nat(gap: float) -> str:
    """Return a gap with two figures and without an exponent: 0.000033."""
    return np.format_float_positional(gap, precision=2, fractional=False, trim="-")


def counted(number: int, unit: str) -> str:
    """Return a number of what `unit` names in the singular: 1 round, 2 rounds."""
    return f"{number} {unit}{'s' * (number != 1)}"


def listed(power: Sequence[float] | None) -> str:
    """Return the power at each gap in words: 99%, 93%, 74%."""
    return ", ".join(f"{share:.0%}" for share in power or ())


def measured(gap: float | None) -> str:
    """Return words that follow "where the true gap is": which of the gaps is by what was measured."""
    return "" if gap is None else f" (the last, {nat(gap)}, is what published studies make likely)"


def warn_of_half(plan: Option, margin: float) -> list[str]:
    """Return a warning, indented, if the plan would rather not show a gap of half the margin."""
    if plan.power is None or plan.at_half >= 0.5:
        return []
    half = nat(margin / 2)
    return [f"  warning: where the true gap is half the margin, {half} nat, {plan.at_half:.0%} of such studies show it"]


def power_table(
    rows: Sequence[Option], machine: Machine, *, gaps: Sequence[float], planned: int, unit: str
) -> list[str]:
    """Return table lines: rounds or seeds, runs, hours of the device, and power at the gaps; * marks the plan.

    Behind a bar stands the power of recipes that are judged after the first, if there are any.
    """
    hours = "GPU h" if machine.device == "cuda" else "CPU h"
    named = [nat(gap) for gap in gaps]
    width = max(7, *map(len, named))
    heads = " ".join(f"{name:>{width}}" for name in named)
    after = f" | {heads}" if any(one.power_of_others for one in rows) else ""
    lines = [f"  {unit:>8} {'runs':>6} {hours:>7}  {heads}{after}"]
    for one in rows:
        cost = "-" if one.seconds is None else f"{machine.device_s(one.seconds) / 3600:.3g}"
        shown = (" ".join(f"{p:>{width}.0%}" for p in each) for each in (one.power, one.power_of_others) if each)
        mark = " *" if one.rounds == planned else ""
        lines.append(f"  {one.rounds:>8} {one.runs:>6} {cost:>7}  {' | '.join(shown)}{mark}")
    return lines
