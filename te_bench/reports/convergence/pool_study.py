"""Judge a study whose recipes share a pool of bf16 runs: what its looks show of each configuration, by `pooled`'s test.

Round r has one run of every recipe, of seed r * pool, and `pool` runs of bf16, of this seed and the following; the last
one is A/A's, an ulp away. Runs are compared unpaired, so fewer claims are made the more alike runs of one seed are.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.special import ndtr, stdtrit

from te_bench.reports.convergence import pooled, power
from te_bench.reports.convergence.equivalence import (
    CLAIMS,
    UNCLAIMED,
    CandidateVerdict,
    Claims,
    LossComparison,
    Verdict,
    after_holm,
    copies,
    in_words,
    outliers,
)
from te_bench.reports.convergence.prediction import counted
from te_bench.reports.convergence.skewed import FEWEST
from te_bench.reports.convergence.study import Study, StudyArm

HOPELESS = 0.05  # if the chance of a verdict, by the gap so far, is below this, more rounds are not worth running


def _of_rounds(study: Study, arm: StudyArm) -> list[float]:
    ratio = study.pool or 1
    first = ratio - 1 if arm.kind == "aa" else 0
    return _in_order(arm.finals, range(first, ratio * study.rounds, ratio))


def _in_order(finals: dict[int, float], seeds: Sequence[int]) -> list[float]:
    """Return the losses up to the first seed without one; later runs that ended earlier do not replace it."""
    found = []
    for seed in seeds:
        if seed not in finals:
            break
        found.append(finals[seed])
    return found


def judge_recipes(
    study: Study, margin: float, alpha: float, unfit: dict[str, CandidateVerdict]
) -> dict[str, CandidateVerdict]:
    """Return a verdict on every recipe after Holm; those `unfit` for a test stay in the family with p = 1."""
    assert study.pool is not None
    bf16 = {**(study.control.finals if study.control else {}), **(study.aa.finals if study.aa else {})}
    pool, names = _in_order(bf16, range(study.pool * study.rounds)), [arm.name for arm in study.recipes]
    shown = {
        arm.name: _compared(study, _of_rounds(study, arm), pool, study.pool, margin, alpha, len(names))
        for arm in study.recipes
        if arm.name not in unfit
    }
    adjusted = after_holm({name: c.claims if (c := shown.get(name)) else UNCLAIMED for name in names})
    return {
        arm: unfit.get(arm) or _judged(study, shown[arm], claims, len(names), study.pool)
        for arm, claims in adjusted.items()
    }


def judge_aa(study: Study, margin: float, alpha: float) -> CandidateVerdict:
    """Return A/A's own verdict against the control's runs."""
    assert study.aa is not None
    assert study.control is not None
    assert study.pool is not None
    ratio = study.pool - 1
    control = [seed for seed in range(study.pool * study.rounds) if seed % study.pool != ratio]
    pool = _in_order(study.control.finals, control)
    c = _compared(study, _of_rounds(study, study.aa), pool, ratio, margin, alpha, 1)
    return _judged(study, c, c.claims if c else UNCLAIMED, 1, ratio)


def _judged(study: Study, c: LossComparison | None, claims: Claims, family: int, ratio: int) -> CandidateVerdict:
    if c is None:
        first = pooled.looks(study.rounds)[0]
        why = f"fewer than {first} of {study.rounds} rounds have ended, and the first look is after {first}"
        if study.rounds < FEWEST:
            why = f"a plan of {counted(study.rounds, 'round')}: of fewer than {FEWEST} no spread is known"
        return CandidateVerdict(verdict=Verdict.INCONCLUSIVE, reason=why, family=family)
    verdict = claims.verdict(c.alpha)
    needed = _needed(c, ratio, c.alpha / family) if verdict is Verdict.INCONCLUSIVE else None
    return CandidateVerdict(
        verdict=verdict,
        reason=_reason(study, c, verdict, needed, family),
        family=family,
        comparison=c,
        claims=claims,
        seeds_needed=needed,
    )


def _compared(
    study: Study,
    candidate: Sequence[float],
    pool: Sequence[float],
    ratio: int,
    margin: float,
    alpha: float,
    family: int,
) -> LossComparison | None:
    """Return what the looks so far show; None before the first."""
    looked = pooled.looks_at(candidate, pool, study.rounds, ratio)
    if not looked:
        return None
    n = pooled.looks(study.rounds)[len(looked) - 1]
    ours, theirs, last = np.array(candidate[:n]), np.array(pool[: ratio * n]), looked[-1]
    gap, se, df = float(last.gap), float(last.se), n + ratio * n - 2
    untold = LossComparison(
        n=n,
        n_control=ratio * n,
        paired=False,
        margin=margin,
        alpha=alpha,
        gap=gap,
        verdict=Verdict.INCONCLUSIVE,
        reason="two of its runs ended on the very same loss: they are one run",
    )
    if se == 0 or copies(ours) or copies(theirs):
        return untold
    sd = se / math.sqrt(1 / n + 1 / (ratio * n))  # of one run, as the test takes it
    bound = -pooled.critical(study.rounds, ratio, alpha)[len(looked) - 1]
    student, hardest = float(stdtrit(df, 1 - alpha)) * se, alpha / family
    claims = pooled.claims(looked, margin, study.rounds, ratio)
    return replace(
        untold,
        verdict=claims.verdict(alpha),
        sd=sd * math.sqrt(2),
        df=df,
        interval=(gap - bound * se, gap + bound * se) if math.isfinite(bound) else None,
        t_interval=(gap - student, gap + student),
        claims=claims,
        power=pooled.power(study.rounds, sd, margin, ratio=ratio, alpha=hardest),
        detectable=sd * pooled.least_margin(study.rounds, ratio, hardest, power.POWER),
        outliers=outliers(ours),
        reason="",
    )


def _needed(c: LossComparison, ratio: int, alpha: float) -> int | None:
    """Return the rounds for 80 % power if the measured gap is the true one; None if it is not within the margin."""
    if not c.sd or abs(c.gap) >= c.margin:
        return None
    sd = c.sd / math.sqrt(2)
    return pooled.rounds_needed(sd, c.margin, ratio=ratio, share=power.POWER, gap=c.gap, alpha=alpha)


def _reason(study: Study, c: LossComparison, verdict: Verdict, needed: int | None, family: int) -> str:
    if c.interval is None:
        return c.reason or f"after {c.n} of {study.rounds} rounds no claim is possible yet"
    measured = f"{in_words(c.gap, c.interval, c.alpha)}, after {c.n} of {study.rounds} rounds"
    if verdict is not Verdict.INCONCLUSIVE:
        return f"ends {CLAIMS[verdict].format(margin=c.margin, control='control')}: {measured}"
    said = f"not distinguished from the margin {c.margin:g}: {measured}"
    if c.verdict is not Verdict.INCONCLUSIVE:
        said = f"{c.verdict} on its own, not after Holm over {family} candidates: {measured}"
    if needed is None:
        return said
    return f"{said}; {needed} rounds would show it EQUIVALENT in 80 % of cases if that is its true gap"


# ---- when no more runs are needed


def why_decided(study: Study, judged: CandidateVerdict, *, recipe: bool) -> str | None:
    """Return a sentence that says what the looks have decided, or None while more rounds may change it."""
    c, said = judged.comparison, f"{judged.verdict} {judged.reason}"
    if judged.verdict in (Verdict.EQUIVALENT, Verdict.INFERIOR, Verdict.DIVERGED):
        return said
    if c is None or c.t_interval is None:
        return None
    if c.n == study.rounds:
        return said
    ratio = (study.pool or 1) - (0 if recipe else 1)
    chance = _chance(c, study.rounds, ratio, known=judged.verdict)
    return f"{said}; the other {counted(study.rounds - c.n, 'round')} would hardly tell" if chance < HOPELESS else None


def _chance(c: LossComparison, rounds: int, ratio: int, *, known: Verdict) -> float:
    """Return the probability, by the gap so far, that the last look shows more than is `known`, at Holm's easiest step.

    More than NON_INFERIOR is EQUIVALENT. The final gap is predicted around that of the first n rounds, with variance
    sd^2 (1 / n - 1 / rounds) (1 + 1 / ratio).
    """
    one = c.sd / math.sqrt(2) * math.sqrt(1 + 1 / ratio)
    off, reach = one * math.sqrt(1 / c.n - 1 / rounds), -pooled.critical(rounds, ratio, c.alpha)[-1] * one
    reach /= math.sqrt(rounds)
    below, beyond = (float(ndtr((bound - c.gap) / off)) for bound in (c.margin - reach, reach - c.margin))
    if known is Verdict.NON_INFERIOR:
        return max(below - beyond, 0.0)
    return below + float(ndtr((c.gap - c.margin - reach) / off))
