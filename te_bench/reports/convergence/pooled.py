"""Test runs of a recipe against a pool of bf16 runs that all recipes share, with looks while runs arrive.

The statistic is (gap - margin) / se. Each side's spread is the pooled one, or its own if that is larger. With every test
held to its error rate for every shape below, this one shows smaller margins than always pooling, pooling unless Brown and
Forsythe's test objects, or Welch's test. Looks spend alpha like O'Brien and Fleming's bounds, by Lan and DeMets 1983,
Biometrika 70:659. Critical values come from simulated runs: `pooled.json` holds them, and `python -m
te_bench.reports.convergence.pooled` writes it.
"""

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from te_bench.reports.convergence.equivalence import Claims
from te_bench.reports.convergence.power import fewest
from te_bench.reports.convergence.sequential import spent
from te_bench.reports.convergence.skewed import FEWEST, Shape, exponential, normal, one_in_ten

Array = NDArray[np.float64]

#: The text that accompanies every claim of this design.
ASSUMPTION = (
    "The error rate holds where a recipe's runs are normal, vary twice as much as bf16's, are as skewed as an exponential "
    "distribution, or lie 4 standard deviations off in one case of ten, whether or not bf16's do"
)
#: Shares of all rounds. Earlier looks get almost no alpha; these cost at most 3 % more runs (O'Brien-Fleming, normal runs).
LOOKS = (0.4, 0.7, 1.0)
RATIOS = (1, 2, 3, 4)  # bf16 runs for each run of a recipe
MOST = 100  # more rounds use the critical values of so many, which are a little too large
TABLE = Path(__file__).with_name("pooled.json")

_NUMBERS = (*range(3, 25), 27, 30, 35, 40, 50, 60, 80, MOST)  # rounds
_LEVELS = (1e-4, 2e-4, 5e-4, 1e-3, 0.0025, 0.005, 0.00714, 0.00833, 0.01, 0.0125, 0.0167, 0.025, 0.05, 0.1, 0.2, 0.4)
LEAST_ALPHA = _LEVELS[0]  # no claims at smaller levels
_TABLED = 400_000  # cases, which give a level of 0.05 / 7 within 2 % of itself
_CHUNK = 20_000
DRAWS = 20_000  # gives a power of 80 % within 0.6 points


def looks(rounds: int) -> tuple[int, ...]:
    """Return the rounds after which a plan is looked at: two fifths of all, seven tenths, and all."""
    return tuple(sorted({min(rounds, max(FEWEST, round(share * rounds))) for share in LOOKS}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """The mean and the sum of squared deviations of the first n runs of one side, of one case or many."""

    n: int
    mean: Array
    squares: Array


def side(runs: Array) -> Side:
    """Return the side of these runs, over the last axis."""
    return Side(n=runs.shape[-1], mean=runs.mean(axis=-1), squares=runs.var(axis=-1) * runs.shape[-1])


def standard_error(one: Side, other: Side) -> Array:
    """Return the standard error of the gap, with each side's variance the pooled one, or its own if that is larger."""
    pooled = (one.squares + other.squares) / (one.n + other.n - 2)
    parts = [np.maximum(each.squares / max(each.n - 1, 1), pooled) / each.n for each in (one, other)]
    return np.asarray(np.sqrt(parts[0] + parts[1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """The gap and its standard error after so many rounds, of one study or many."""

    gap: Array
    se: Array


def looks_at(candidate: Sequence[float] | Array, pool: Sequence[float] | Array, rounds: int, ratio: int) -> list[Look]:
    """Return the looks that the runs have reached; runs are in the order of rounds, `ratio` pool runs for each round.

    A plan of fewer rounds than FEWEST has no looks.
    """
    if rounds < FEWEST:
        return []
    ours, theirs = (np.asarray(runs, dtype=np.float64) for runs in (candidate, pool))
    found = []
    for n in looks(rounds):
        if ours.shape[-1] >= n and theirs.shape[-1] >= ratio * n:
            found.append(_look(side(ours[..., :n]), side(theirs[..., : ratio * n])))
    return found


def claims(looked: Sequence[Look], margin: float, rounds: int, ratio: int) -> Claims:
    """Return p-values over all looks so far: the least alpha whose bounds one of them crosses; 1 before the first.

    A claim that a look has shown stays shown. So Holm over such p-values of several recipes holds at any time, with each
    recipe at its own look (Maurer & Bretz 2013, Stat. Biopharm. Res. 5:311).
    """
    below, above = p_below(looked, margin, rounds, ratio), p_below(_mirrored(looked), margin, rounds, ratio)
    worse = p_below(_mirrored(looked), -margin, rounds, ratio)
    return Claims(max(float(below), float(above)), float(below), float(worse))


def _mirrored(looked: Sequence[Look]) -> list[Look]:
    return [Look(gap=-look.gap, se=look.se) for look in looked]


def p_below(looked: Sequence[Look], bound: float, rounds: int, ratio: int) -> Array:
    """Return p-values of the claim that the true gap lies below `bound`."""
    p = np.ones(np.shape(looked[0].gap) if looked else ())
    levels = np.log(_LEVELS)
    for look, values in zip(looked, _tabled(rounds, ratio), strict=False):
        known = np.isfinite(values)
        if known.any():
            found = np.interp((look.gap - bound) / look.se, values[known], levels[known], right=0.0)
            p = np.minimum(p, (1 - 1e-12) * np.exp(found))  # exp(log(alpha)) may be above alpha
    return np.asarray(p)


def critical(rounds: int, ratio: int, alpha: float) -> tuple[float, ...]:
    """Return what (gap - margin) / se must not exceed at each look for a claim at the level alpha; -inf: no claim."""
    if alpha < LEAST_ALPHA:
        return (-math.inf,) * len(looks(rounds))
    log = math.log(alpha)
    found = []
    for values in _tabled(rounds, ratio):
        known = np.isfinite(values)
        reached = known.any() and alpha >= np.array(_LEVELS)[known][0]
        found.append(float(np.interp(log, np.log(_LEVELS)[known], values[known])) if reached else -math.inf)
    return tuple(found)


def _tabled(rounds: int, ratio: int) -> Array:
    """Return (looks, levels) of the table's next smaller number of rounds, FEWEST at least; ratio: one of RATIOS."""
    return _table()[max(n for n in _NUMBERS if n <= rounds), ratio]


@functools.cache
def _table() -> dict[tuple[int, int], Array]:
    found = {}
    for name, values in json.loads(TABLE.read_text()).items():
        n, ratio = map(int, name.split(":"))
        found[n, ratio] = np.array([[-math.inf if x is None else x for x in look] for look in values])
    return found


# ---- what a design can show


@functools.lru_cache(maxsize=32)
def _simulated(rounds: int, ratio: int, recipes: int, draws: int) -> tuple[list[list[Look]], list[Look]]:
    """Return each recipe's looks and A/A's in `draws` studies: normal runs of variance 1, all true gaps 0, one common pool.

    A/A's are its runs against the rest of the pool; [] for one bf16 run a round.
    """
    draw, at = np.random.default_rng(3), looks(rounds)
    pool, aa_looks = _normal_sides(draw, at, draws), list[Look]()
    if ratio > 1:
        aa, control = pool, _normal_sides(draw, [(ratio - 1) * n for n in at], draws)
        aa_looks = list(map(_look, aa, control))
        pool = list(map(_together, aa, control))
    arms = [_normal_sides(draw, at, draws) for _ in range(recipes)]
    return [list(map(_look, arm, pool)) for arm in arms], aa_looks


def _look(one: Side, other: Side) -> Look:
    return Look(gap=one.mean - other.mean, se=standard_error(one, other))


def _together(one: Side, other: Side) -> Side:
    """Return the side of the runs of both."""
    n = one.n + other.n
    between = (one.mean - other.mean) ** 2 * (one.n * other.n / n)
    return Side(
        n=n,
        mean=(one.n * one.mean + other.n * other.mean) / n,
        squares=one.squares + other.squares + between,
    )


@functools.lru_cache(maxsize=1024)  # searches and tables of one plan ask for the same designs again and again
def power(
    rounds: int,
    sd: float,
    margin: float,
    *,
    ratio: int,
    recipes: int = 1,
    gap: float = 0.0,
    alpha: float = 0.05,
    draws: int = DRAWS,
    with_aa: bool = False,
) -> float:
    """Return P(EQUIVALENT after Holm), if all recipes have this true gap and single runs vary by sd.

    It is the mean over the recipes. with_aa: of studies whose A/A, of a true gap of 0, is EQUIVALENT too; 0 for one
    bf16 run a round, which is A/A's and has none to be compared with. Runs are normal; their shape does not affect the error
    rate, and the power only little.
    """
    if rounds < FEWEST or (with_aa and ratio == 1):
        return 0.0
    looked, aa = _simulated(rounds, ratio, recipes, draws)
    shown = [_p_within(one, sd, gap, margin, rounds, ratio) for one in looked]
    ordered = np.sort(np.array(shown), axis=0)
    steps = alpha / np.arange(recipes, 0, -1)
    good = np.cumprod(ordered <= steps[:, None], axis=0)
    if with_aa:
        good = good * (_p_within(aa, sd, 0.0, margin, rounds, ratio - 1) <= alpha)
    return float(np.mean(good))


def _p_within(looked: Sequence[Look], sd: float, gap: float, margin: float, rounds: int, ratio: int) -> Array:
    """Return p-values of EQUIVALENT for looks of variance 1 and gap 0, scaled to this sd and gap."""
    moved = [Look(gap=sd * look.gap + gap, se=sd * look.se) for look in looked]
    return np.maximum(*(p_below(one, margin, rounds, ratio) for one in (moved, _mirrored(moved))))


@functools.lru_cache(maxsize=256)
def least_margin(rounds: int, ratio: int, alpha: float, share: float) -> float:
    """Return the smallest margin, in standard deviations of a run, with a power of `share` at a true gap of 0."""
    [looked], _ = _simulated(rounds, ratio, 1, DRAWS)
    bounds = critical(rounds, ratio, alpha)
    sides = [
        np.min([sign * look.gap - bound * look.se for look, bound in zip(looked, bounds, strict=True)], axis=0)
        for sign in (1, -1)
    ]
    return float(np.quantile(np.maximum(*sides), share))


def rounds_needed(
    sd: float,
    margin: float,
    *,
    ratio: int,
    share: float,
    recipes: int = 1,
    gap: float = 0.0,
    alpha: float = 0.05,
    most: int = 1000,
) -> int | None:
    """Return the fewest rounds with a power of `share`; None if `most` do not suffice."""
    if abs(gap) >= margin:
        return None

    def enough(rounds: int) -> bool:
        found = power(rounds, sd, margin, ratio=ratio, recipes=recipes, gap=gap, alpha=alpha, draws=DRAWS // 2)
        return found >= share

    return fewest(enough, FEWEST, most)


# ---- the table, by simulation


#: Shapes of a recipe's runs against normal bf16 runs. If bf16's have the same shape or another, fewer claims are wrong,
#: except in FEW rounds against bf16 runs with a long lower tail.
SHAPES: tuple[Shape, ...] = (normal, lambda draw, size: 2 * normal(draw, size), exponential, one_in_ten)
FEW = 12


def _normal_sides(draw: np.random.Generator, at: Sequence[int], draws: int) -> list[Side]:
    """Return the first n normal runs, n in `at`, of `draws` cases, by means and sums of squares between two looks."""
    found, n = [], 0
    mean, squares = np.zeros(draws), np.zeros(draws)
    for look in at:
        more = look - n
        new = draw.standard_normal(draws) / math.sqrt(more)
        within = draw.chisquare(more - 1, draws) if more > 1 else np.zeros(draws)
        squares = squares + within + (new - mean) ** 2 * n * more / look
        mean = (n * mean + more * new) / look
        n = look
        found.append(Side(n=n, mean=mean, squares=squares))
    return found


def _sides(shape: Shape, draw: np.random.Generator, at: Sequence[int], draws: int) -> list[Side]:
    parts = []
    for first in range(0, draws, _CHUNK):
        runs = shape(draw, (min(_CHUNK, draws - first), at[-1]))
        parts.append([side(runs[:, :n]) for n in at])
    return [
        Side(
            n=n, mean=np.concatenate([p[i].mean for p in parts]), squares=np.concatenate([p[i].squares for p in parts])
        )
        for i, n in enumerate(at)
    ]


def tabulate(rounds: int, ratio: int, draws: int = _TABLED) -> list[list[float | None]]:
    """Return the critical values at each look by level: the least over the SHAPES, so that none exceeds its error rate."""
    draw, at = np.random.default_rng([rounds, ratio]), looks(rounds)
    found = np.full((len(at), len(_LEVELS)), math.inf)

    def tail_below(draw: np.random.Generator, size: tuple[int, ...]) -> Array:
        return -exponential(draw, size)

    of_pool = [ratio * n for n in at]
    cases = [(_sides(shape, draw, at, draws), _normal_sides(draw, of_pool, draws)) for shape in SHAPES]
    if rounds <= FEW:
        cases.append((_normal_sides(draw, at, draws), _sides(tail_below, draw, of_pool, draws)))
    for arm, pool in cases:
        statistics = [(a.mean - p.mean) / standard_error(a, p) for a, p in zip(arm, pool, strict=True)]
        for place, level in enumerate(_LEVELS):
            gone = np.zeros(draws, dtype=bool)
            for k, budget in enumerate(spent(np.array(at) / rounds, level)):
                left = int(budget * draws) - int(gone.sum())  # cases that may be claimed wrongly at this look
                limit = float(np.partition(statistics[k][~gone], left - 1)[left - 1]) if left > 0 else -math.inf
                gone |= statistics[k] <= limit
                found[k, place] = min(found[k, place], limit)
    found = np.minimum.accumulate(found[:, ::-1], axis=1)[:, ::-1]  # larger levels are never stricter
    return [[None if math.isinf(x) else round(float(x), 3) for x in look] for look in found]


if __name__ == "__main__":
    tables = {f"{n}:{ratio}": tabulate(n, ratio) for n in _NUMBERS for ratio in RATIOS}
    TABLE.write_text("{\n" + ",\n".join(f'"{k}": {json.dumps(v)}' for k, v in tables.items()) + "\n}\n")
