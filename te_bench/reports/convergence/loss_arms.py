"""Compare two arms of a user's losses: pair them, check for divergence, and check that their gap had settled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from te_bench.reports.analysis.naming import first_of
from te_bench.reports.convergence.loss_csv import Curve, Losses, broken, why_short
from te_bench.reports.convergence.skewed import FEWEST
from te_bench.reports.convergence.stability import RISE, SURE, overfitting
from te_bench.reports.logs.names import MORE_IS_BETTER, alike, is_loss, plain, precision

Array = NDArray[np.float64]

_OWN_RUNS = "of one table for both, its runs: --baseline 'both.csv:bf16-*' --candidate 'both.csv:fp8-*'"
NAMED = 5  # seeds that a message names at most
FEWEST_POINTS = 3  # the first is often the loss of the initial weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Matched:
    """Two arms to compare; if paired, place i of both has the seed `seeds[i]`."""

    seeds: tuple[str, ...]
    baseline: tuple[float, ...]
    candidate: tuple[float, ...]


def match_runs(baseline: Losses, candidate: Losses, *, paired: bool | None) -> Matched:
    """Return the two arms' final losses, paired by seed, or by row if neither source names its seeds.

    Seeds of only one arm are left out of pairs. paired: None pairs if most runs of the smaller arm have a partner, and
    FEWEST of them. Raises ValueError for a file that is in both arms, an arm with runs of both precisions, losses of
    different names, a diverged baseline, and runs that end at different steps, which have not seen the same data; in
    pairs also for arms without a common seed, repeated names, and unequal numbers of runs without seeds.
    """
    arms = baseline, candidate
    for same in baseline.digests.keys() & candidate.digests.keys():
        both = " and ".join(dict.fromkeys(arm.digests[same] for arm in arms))
        raise ValueError(
            f"baseline and candidate hold the same file, byte for byte ({both}): give each its own; {_OWN_RUNS}"
        )
    for arm in arms:
        runs = {precision(name): name for name in arm.final}
        if {"low", "high"} <= runs.keys():
            raise ValueError(
                f"{arm.source} holds runs of both sides, {runs['high']} and {runs['low']}: give each side its own; "
                f"{_OWN_RUNS}"
            )
    if alike(baseline.metric, candidate.metric) is False:
        raise ValueError(
            f"{baseline.source} has the loss {baseline.metric} and {candidate.source} {candidate.metric}: compare one loss"
        )
    if broke := broken(baseline):
        raise ValueError(
            f"{baseline.source}: the baseline itself diverged, {_named(baseline, broke)}. Nothing can be concluded from a "
            "baseline that does not train: fix it, and run both again"
        )
    ends = [arm.stops or {arm.curves[seed].step[-1] for seed in set(arm.curves) - set(broken(arm))} for arm in arms]
    if all(ends) and ends[0] != ends[1]:
        ended = " and ".join(f"at step {max(end):g} in {arm.source}" for end, arm in zip(ends, arms, strict=True))
        raise ValueError(f"the curves end {ended}: compare runs of one length{''.join(map(why_short, arms))}")
    common = tuple(seed for seed in baseline.final if seed in candidate.final)
    if paired is None:
        fewer, more = sorted(len(arm.final) for arm in arms)
        told = all(arm.seeded and not arm.repeated for arm in arms)
        paired = told and 2 * len(common) > fewer and len(common) >= min(FEWEST, more)
    if not paired:
        return Matched(seeds=(), baseline=tuple(baseline.final.values()), candidate=tuple(candidate.final.values()))
    for arm in arms:
        if arm.repeated:
            raise ValueError(
                f"{arm.source}: several runs have the name {', '.join(arm.repeated)}, so they have no pairs: rename them, "
                "with their seeds (bf16-seed3), or compare unpaired"
            )
    if baseline.seeded != candidate.seeded:
        named, rows = arms if baseline.seeded else arms[::-1]
        raise ValueError(
            f"{named.source} names its seeds and {rows.source} does not: name them in both, or compare unpaired"
        )
    if not baseline.seeded and len(baseline.final) != len(candidate.final):
        raise ValueError(
            f"{len(baseline.final)} losses in {baseline.source} and {len(candidate.final)} in {candidate.source} cannot be "
            "paired: give both the same seeds, or compare unpaired"
        )
    if not common:
        theirs = " and ".join(f"{_called(list(arm.final))} of {arm.source}" for arm in arms)
        raise ValueError(
            f"no run of one side has its seed in the other: {theirs}; name pairs alike, or compare unpaired"
        )
    one, other = (tuple(arm.final[seed] for seed in common) for arm in arms)
    return Matched(seeds=common, baseline=one, candidate=other)


def only_pairs(arm: Losses, matched: Matched) -> Losses:
    """Return the arm with the curves of its pairs alone, or all of them where there are no pairs."""
    if not matched.seeds:
        return arm
    kept = frozenset(matched.seeds)
    return replace(arm, curves={seed: curve for seed, curve in arm.curves.items() if seed in kept})


def note_left_out(baseline: Losses, candidate: Losses, matched: Matched) -> str | None:
    """Return a note on runs without a partner, or None; a run that the candidate lacks may have diverged."""
    of_pairs = frozenset(matched.seeds)
    lone = [[seed for seed in arm.final if seed not in of_pairs] for arm in (baseline, candidate)]
    if not matched.seeds or not any(lone):
        return None
    arms = zip(lone, (baseline, candidate), strict=True)
    named = " and ".join(f"{_called(seeds)} of {arm.source}" for seeds, arm in arms if seeds)
    verb = "has no partner and is" if sum(map(len, lone)) == 1 else "have no partner and are"
    said = f"{named} {verb} left out; --no-paired judges all runs"
    if not lone[0]:
        return said
    return f"{said}. If a run of {candidate.source} is missing because it diverged, the verdict is DIVERGED"


def why_diverged(candidate: Losses) -> str | None:
    """Return how many of the candidate's runs diverged, which, and why the first did; None if none did."""
    broke = broken(candidate)
    return f"{len(broke)} of {len(candidate.final)} runs, {_named(candidate, broke)}" if broke else None


def note_outlying(arm: Losses) -> str | None:
    """Return a note on runs that end more than RISE above the median of the arm, in case they diverged, or None."""
    middle = float(np.median(list(arm.final.values())))
    far = {seed: final for seed, final in arm.final.items() if final > middle + RISE}
    if not far:
        return None
    what, seed = "seed" if arm.seeded else "row", next(iter(far))
    return (
        f"{arm.source}: {what} {seed} ends {far[seed] - middle:.3g} above the median of its runs; write nan if it diverged: "
        "such a configuration is DIVERGED, whatever its mean"
    )


def why_moving(baseline: Losses, candidate: Losses, margin: float) -> str | None:
    """Return None if the gap has settled, else why not: over the last tenth of training it moved by `margin` or more.

    The gap is that of the arms' mean curves, for pairs their mean gap. Its move is that of a line through the last tenth,
    or from the second last evaluation on if that is earlier. A gap of training losses moves only if its line does by SURE
    standard errors, too. `margin` has the unit of the losses.
    """
    curves = [*baseline.curves.values(), *candidate.curves.values()]
    if not (baseline.curves and candidate.curves):
        return "a configuration has no curves: final losses do not show whether the gap had settled"
    if (fewest := min(len(curve.step) for curve in curves)) < FEWEST_POINTS:
        points = "1 point" if fewest == 1 else f"{fewest} points"
        other = "" if baseline.training else ", or judge a loss that was logged more often (--metric)"
        return f"{points} a curve: too few to show whether the gap had settled; log at least {FEWEST_POINTS}{other}"
    at = _late(curves)
    move, error = _moved(at, _mean(candidate, at) - _mean(baseline, at))
    if abs(move) < margin or (baseline.training and abs(move) < SURE * error):
        return None
    return (
        f"the gap still moves: by {move:+.2g} over the last {_reach(at)} steps, which is not below the margin "
        f"{margin:g}; decay the learning rate to the end, or train longer"
    )


def why_overfitted(baseline: Losses, margin: float) -> str | None:
    """Return why final losses prove nothing if the baseline's mean curve ends more than `margin` above its minimum."""
    fewest = min((len(curve.step) for curve in baseline.curves.values()), default=0)
    if baseline.training or not baseline.judges_loss or fewest < FEWEST_POINTS:
        return None
    first = max(curve.step[0] for curve in baseline.curves.values())
    at = np.array(sorted({step for curve in baseline.curves.values() for step in curve.step if step >= first}))
    rise = overfitting(at, _curves(baseline, at))
    if rise <= margin:
        return None
    return (
        f"{baseline.source}: the baseline overfits: its loss ends {rise:.2g} above its least, more than the margin "
        f"{margin:g}. A lower final loss may then only mean less overfitting: train for fewer steps, or on data that is "
        "seen once"
    )


def note_far(arms: Matched, place: int) -> str:
    """Return a note on a pair whose gap lies far from the others'."""
    gap = arms.candidate[place] - arms.baseline[place]
    return (
        f"seed {arms.seeds[place]}: its gap {gap:+.2g} lies far from the others; where such outliers are common the error "
        "rate may not hold"
    )


def note_unpaired(baseline: Losses, candidate: Losses) -> str:
    """Return a note that says why runs are not paired, for users who did not ask for pairs."""
    if not (baseline.seeded and candidate.seeded):
        return "the runs are not paired, because their seeds have no names: --paired pairs them row by row"
    if baseline.repeated or candidate.repeated:
        return "the runs are not paired, because several have the same name"
    if common := [seed for seed in baseline.final if seed in candidate.final]:
        return f"the runs are not paired, because few seeds are in both: --paired pairs {_called(common)} alone"
    names = " and ".join(f"{_called(list(arm.final))} of {arm.source}" for arm in (baseline, candidate))
    return f"the runs are not paired, because no name is in both: {names}"


def note_names(baseline: Losses, candidate: Losses) -> str | None:
    """Return a note on two losses whose names do not show that they are the same, or None."""
    names = baseline.metric, candidate.metric
    if None in names or alike(*names) is not None:
        return None
    return f"the baseline's loss is called {names[0]} and the candidate's {names[1]}: see that they are one loss"


def note_measure(baseline: Losses, candidate: Losses) -> str | None:
    """Return a note on a metric whose name is not a loss's, or None. Raises ValueError for one of which more is better."""
    called = next((arm.metric for arm in (baseline, candidate) if arm.metric and not is_loss(arm.metric)), None)
    if called and set(plain(called).split("_")) & MORE_IS_BETTER:
        raise ValueError(f"{called}: more of it is better, and te-bench judges what is better where it is less: a loss")
    return f"{called} is judged as a loss is: more is worse; read its unit for nat" if called else None


def note_intervals(baseline: Losses, candidate: Losses) -> str | None:
    """Return a note on training losses that were logged at different steps, so that their means have other batches."""
    late = [
        {step for curve in arm.curves.values() for step in curve.step if step >= curve.late}
        for arm in (baseline, candidate)
    ]
    if not baseline.training or not all(late) or late[0] == late[1]:
        return None
    few, many = sorted(map(len, late))
    counts = f"{few} and {many}" if few != many else f"{few} other"
    return f"the sides logged the training loss at {counts} steps of the last tenth: their means are of other batches"


def note_order(baseline: Losses, candidate: Losses) -> str | None:
    """Return a note if the baseline's name says FP8 and the candidate's bf16, or None."""
    if [precision(arm.source) for arm in (baseline, candidate)] != ["low", "high"]:
        return None
    return f"the baseline is {baseline.source} and the candidate {candidate.source}: is that the right way round?"


def note_falling(arm: Losses, margin: float) -> str | None:
    """Return a note on an arm whose mean loss fell by `margin` or more over the steps of `why_moving`, or None."""
    if min((len(curve.step) for curve in arm.curves.values()), default=0) < FEWEST_POINTS:
        return None
    at = _late(list(arm.curves.values()))
    fall, error = _moved(at, -_mean(arm, at))
    if fall < margin or (arm.training and fall < SURE * error):
        return None
    return f"{arm.source}: the loss still falls, by {fall:.2g} over the last {_reach(at)} steps"


def _reach(at: Array) -> str:
    """How many steps lie between the ends, in whole ones where there are any: 5, where a tenth of 49 is meant."""
    steps = float(at[-1] - at[0])
    return f"{round(steps) if steps >= 1 else steps:g}"


def _late(curves: Sequence[Curve]) -> Array:
    end = min(curve.step[-1] for curve in curves)
    start = min(at for curve in curves for at in (curve.late, curve.step[-2]))
    start = max(start, *(curve.step[0] for curve in curves))
    return np.array([start, *sorted({step for curve in curves for step in curve.step if start < step <= end})])


def _curves(arm: Losses, at: Array) -> Array:
    return np.array([np.interp(at, curve.step, curve.loss) for curve in arm.curves.values()])


def _mean(arm: Losses, at: Array) -> Array:
    return np.asarray(_curves(arm, at).mean(axis=0))


def _moved(at: Array, values: Array) -> tuple[float, float]:
    """Return the rise of the least-squares line from end to end, and its standard error."""
    off, reach = at - at.mean(), float(at[-1] - at[0])
    slope = float(off @ values / (off @ off))
    rest = values - values.mean() - slope * off
    error = float(np.sqrt(rest @ rest / max(at.size - 2, 1) / (off @ off)))
    return slope * reach, error * reach


def _called(seeds: Sequence[str]) -> str:
    """Return seeds in words; runs whose names have no seed are called by them, two at most, because they are long."""
    if not all(map(str.isdecimal, seeds)):
        return first_of(seeds, 2)
    return ("seed " if len(seeds) == 1 else "seeds ") + first_of(seeds, NAMED)


def _named(arm: Losses, broke: Mapping[str, str]) -> str:
    what = "seed" if arm.seeded else "row"
    return f"{what}{'s' if len(broke) > 1 else ''} {', '.join(broke)}: {next(iter(broke.values()))}"
