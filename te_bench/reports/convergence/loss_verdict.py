"""Answer for two arms of a user's losses: the verdict, how sure it is, and what more certainty costs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from te_bench.reports.convergence import loss_arms, power
from te_bench.reports.convergence.equivalence import LossComparison, Verdict, check_test, compare, level
from te_bench.reports.convergence.loss_arms import Matched
from te_bench.reports.convergence.loss_csv import Losses
from te_bench.reports.convergence.skewed import ASSUMPTION, FEWEST

EXIT_CODES: Mapping[Verdict, int] = {
    Verdict.EQUIVALENT: 0,
    Verdict.NON_INFERIOR: 0,
    Verdict.INFERIOR: 1,
    Verdict.DIVERGED: 1,
    Verdict.INCONCLUSIVE: 3,
}
PLAIN = {
    Verdict.EQUIVALENT: "The candidate trains like the baseline: it ends within {margin:g} nat of it",
    Verdict.NON_INFERIOR: "The candidate does not end {margin:g} nat or more above the baseline",
    Verdict.INFERIOR: "The candidate trains worse than the baseline: it ends more than {margin:g} nat above it",
    Verdict.DIVERGED: "The candidate diverged",
    Verdict.INCONCLUSIVE: "These runs do not show whether the candidate trains like the baseline",
}
TENTH = 0.1  # of the loss: what trains worse by so much is another model
SMALL = 0.01  # nat: a margin that is one, however low the loss
SEEDS = (3, 5, 8, 12, 20, 40)  # that the price of certainty is told for
#: Where the runs themselves do not tell: the least and the largest known standard deviations, in nat, with their source, of
#: runs over seeds and of the gaps of pairs. The first is of 40 runs (modded-nanogpt, 2024-12-10_MFUTweaks).
RUNS_SD = ((0.0024, "modded-nanogpt's 124M GPT"), (0.02, "results/h200/convergence-short"))
GAPS_SD = ((0.002, "convergence-e4m3"), (0.014, "convergence-short"))


@dataclass(frozen=True, kw_only=True, slots=True)
class LossVerdict:
    """The verdict on two arms; comparison: None if the candidate diverged, or a side has one run."""

    verdict: Verdict
    reason: str
    baseline: Losses
    candidate: Losses
    matched: Matched
    margin: float
    alpha: float
    comparison: LossComparison | None
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    @property
    def judged(self) -> str:
        """The name of the compared loss."""
        ours, theirs = self.candidate.judged, self.baseline.judged
        return ours if ours == theirs else f"{ours}; of the baseline {theirs}"

    @property
    def runs(self) -> int:
        """The number of runs of the side with fewer."""
        return min(len(self.matched.baseline), len(self.matched.candidate))

    @property
    def plain(self) -> str:
        """The verdict as a sentence without its full stop."""
        return PLAIN[self.verdict].format(margin=self.margin)

    @property
    def level(self) -> float:
        """The baseline's mean final loss; percentages are shares of it."""
        return sum(self.matched.baseline) / len(self.matched.baseline)

    def relative(self, gap: float) -> float:
        """Return a gap as a share of the baseline's loss."""
        return gap / self.level if self.level else math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What so many seeds a side can show with 80 % power at a true gap of 0, by the measured spread."""

    seeds: int
    margin: float
    cautious: float  # by the spread's upper bound of 80 % confidence


def judge_losses(
    baseline: Losses, candidate: Losses, *, margin: float, alpha: float = 0.05, paired: bool | None = None
) -> LossVerdict:
    """Return the verdict on the candidate's final losses by `compare`, unless it diverged or the curves forbid a verdict.

    `paired` None: by seed where most runs have a partner. Raises what `match_runs` and `compare` raise, and ValueError
    for a margin of a TENTH of the loss or more.
    """
    check_test(margin, alpha)
    matched = loss_arms.match_runs(baseline, candidate, paired=paired)
    _check_size(margin, matched.baseline)
    arms = baseline, candidate
    of_both = (loss_arms.note_order, loss_arms.note_names, loss_arms.note_measure, loss_arms.note_intervals)
    notes = [note for find in of_both if (note := find(*arms))]
    notes += [note for arm in arms for note in arm.notes]
    notes += [alone] if (alone := loss_arms.note_left_out(*arms, matched)) else []
    verdict, comparison = Verdict.DIVERGED, None
    reason = loss_arms.why_diverged(candidate)  # comes first, because the surviving runs are a biased choice
    if reason is None and min(len(matched.baseline), len(matched.candidate)) < 2:
        verdict, reason = Verdict.INCONCLUSIVE, "one run says nothing of how far seeds alone move the loss"
    elif reason is None:
        comparison = compare(
            matched.candidate,
            matched.baseline,
            margin=margin,
            alpha=alpha,
            paired=bool(matched.seeds),
            called="baseline",
        )
        pairs = [loss_arms.only_pairs(arm, matched) for arm in arms]
        moving = loss_arms.why_moving(pairs[0], pairs[1], margin)
        known = all(arm.curves for arm in arms)
        why_not = loss_arms.why_overfitted(baseline, margin) or (moving if known else None)
        verdict = Verdict.INCONCLUSIVE if why_not else comparison.verdict
        reason = why_not or comparison.reason
        notes += [moving] if moving and not known else []
        notes += [loss_arms.note_far(matched, place) for place in comparison.outliers]
        notes += [loss_arms.note_unpaired(*arms)] if paired is None and not matched.seeds else []
        notes += [ASSUMPTION] if comparison.interval else []
        notes += [far for arm in arms if (far := loss_arms.note_outlying(arm))]
        notes += [fall for arm in arms if (fall := loss_arms.note_falling(arm, margin))]
        notes += ["training losses are judged, which do not show overfitting"] if baseline.training else []
    return LossVerdict(
        verdict=verdict,
        reason=reason,
        baseline=baseline,
        candidate=candidate,
        matched=matched,
        margin=margin,
        alpha=alpha,
        comparison=comparison,
        notes=tuple(notes),
    )


def _check_size(margin: float, losses: Sequence[float]) -> None:
    """Raises ValueError for a margin that any candidate would meet; losses about 0 tell none, below it there is no share."""
    level = sum(losses) / len(losses)
    if min(losses) <= 0 or margin < TENTH * level or margin < min(SMALL, level):
        return
    meant = f": {margin:g} % of this loss is {margin / 100 * level:.2g} nat" if margin / 100 < TENTH else ""
    raise ValueError(
        f"--margin {margin:g} is {_short(100 * margin / level)} % of the loss {level:.3g}. A margin is in nat, not in per "
        f"cent{meant}"
    )


def prices(found: LossVerdict) -> list[Price]:
    """Return the smallest margins that SEEDS and the given number can show; [] if the spread is unknown."""
    c = found.comparison
    if c is None or c.interval is None:
        return []
    return [_price(seeds, c) for seeds in sorted({*SEEDS, c.n})]


def _price(seeds: int, c: LossComparison) -> Price:
    df = seeds - 1 if c.paired else (2 * seeds - 2) * c.df / (c.n + c.n_control - 2)  # fewer with unequal spreads
    margins = [
        power.detectable(se=sd / math.sqrt(seeds), df=df, alpha=c.alpha) or math.inf
        for sd in (c.sd, power.at_most(c.sd, c.df))
    ]
    return Price(seeds=seeds, margin=margins[0], cautious=margins[1])


def answers(found: LossVerdict) -> list[str]:
    """Return sentences on how sure the verdict is and what more certainty costs, for a reader who has not seen the runs."""
    c = found.comparison
    if found.verdict is Verdict.DIVERGED:
        return [
            f"{found.reason[0].upper()}{found.reason[1:]}. A run that broke has no final loss, so no gap is judged."
        ]
    if c is not None and c.interval is not None:
        return [_gap(found, c), _needed(found, c), _shown(found, c)]
    return [_gap(found, c), *([_typical(found)] if found.runs < FEWEST else [])]


def _typical(found: LossVerdict) -> str:
    def takes(gap_sd: float, *, paired: bool) -> str:
        needed = power.seeds_needed(gap_sd, found.margin, alpha=found.alpha, paired=paired)
        return f"{max(FEWEST, needed):,}" if needed else f"more than {power.MOST_SEEDS:,}"

    (least, few), (largest, many) = RUNS_SD
    (near, alike), (far, unlike) = GAPS_SD
    runs, pairs = (
        " to ".join(takes(sd, paired=paired) for sd in ends)
        for ends, paired in (((power.gap_sd(least), power.gap_sd(largest)), False), ((near, far), True))
    )
    return (
        f"A verdict takes {FEWEST} seeds a side, and is worth much with 8. The margin {found.margin:g} takes {runs} runs a "
        f"side, as runs vary by {least} (sd, {few}) to {largest} nat ({many}); or {pairs} pairs of one seed and the same "
        f"batches, as gaps vary by {near} ({alike}) to {far} ({unlike})."
    )


def _gap(found: LossVerdict, c: LossComparison | None) -> str:
    n, control = len(found.matched.candidate), len(found.matched.baseline)
    runs = f"{n} pairs of one seed each" if found.matched.seeds and n > 1 else f"runs: {n} against {control}"
    gap = sum(found.matched.candidate) / n - found.level if c is None else c.gap
    where = "below" if gap < 0 else "above"
    size = f"{_short(abs(gap))} nat ({_short(100 * abs(found.relative(gap)))} %)"
    said = f"The candidate ends {size} {where} the baseline's {found.level:.4f} ({runs})"
    if c is None or c.interval_95 is None:
        return f"{said}; these runs do not show how sure that is."
    low, high = c.interval_95
    said = f"{said}; 95 % interval {_nat(low, found)} to {_nat(high, found)}. Above 0 is worse."
    assert c.interval is not None
    low, high = c.interval
    return f"{said} The verdict goes by the {level(c.alpha)} interval, {_short(low, '+')} to {_short(high, '+')} nat."


def _nat(gap: float, found: LossVerdict) -> str:
    return f"{_short(gap, '+')} nat ({_short(100 * found.relative(gap), '+')} %)"


def _short(value: float, sign: str = "") -> str:
    """Two significant digits, without an exponent below a million: 0.035, 330."""
    return f"{float(f'{value:.2g}'):{sign}g}"


def _needed(found: LossVerdict, c: LossComparison) -> str:
    if found.verdict is not Verdict.INCONCLUSIVE:
        runs = f"{c.n} pairs" if c.paired else f"{c.n} runs against {c.n_control}"
        said = f"A verdict stands with {runs}."
        if c.seeds_needed_at_gap is None:
            return said
        anew = f"{max(FEWEST, c.seeds_needed_at_gap)}{'' if c.paired else ' a side'}"
        return f"{said} Planned anew, a study would take {anew} to reach one in 80 % of cases, by this gap and spread."
    if found.reason != c.reason:  # the curves forbid a verdict, whatever their ends show
        return f"More seeds alone do not help: {found.reason}."
    few, each = c.seeds_needed_at_gap, "pairs" if c.paired else "seeds a side"
    if few is None:
        return f"No number of seeds would distinguish this gap from the margin {c.margin:g}: it is about as large."
    if (more := few - min(c.n, c.n_control)) <= 0:
        return (
            f"{few} {each} decide it in 80 % of cases by the gap and spread as measured; these did not. Run some more."
        )
    return (
        f"About {more} more {each}, {few} in all, would decide it in 80 % of cases, if the true gap and spread are what was "
        "measured."
    )


def _shown(found: LossVerdict, c: LossComparison) -> str:
    assert c.detectable is not None
    runs = f"{c.n} pairs" if c.paired else f"{c.n} runs against {c.n_control}"
    smallest = f"{_short(c.detectable)} nat ({_short(100 * found.relative(c.detectable))} %)"
    said = f"{runs} of this spread can show a margin of {smallest} in 80 % of cases"
    each = "pairs" if c.paired else "a side"
    decided = found.verdict is not Verdict.INCONCLUSIVE
    takes = "" if decided or c.seeds_needed is None else f"; the margin {c.margin:g} takes {c.seeds_needed} {each}"
    return f"{said}, where there is no gap{takes}."
