"""Make the tables of a convergence verdict: gaps against the margin, and reasons."""

import dataclasses
from collections.abc import Iterable
from statistics import fmean

from te_bench.reports.analysis.measures import Ratio
from te_bench.reports.convergence.effort import Effort, effort_of
from te_bench.reports.convergence.equivalence import compare, level
from te_bench.reports.convergence.speedup import Speedup
from te_bench.reports.convergence.study_verdict import ArmVerdict, StudyVerdict
from te_bench.reports.convergence.verdict import judge_study
from te_bench.reports.page import text
from te_bench.reports.page.table import Table, Value, number, speedup, table_of, word


def gaps(found: StudyVerdict) -> Table | None:
    """Return the table of final losses against the control's: gap, intervals, p-values, verdict; a row a configuration."""
    pool = found.study.pool is not None
    whose = found.study.whose
    against = f"the mean of {whose} runs" if pool else f"{whose} on the same seeds"
    if found.study.two_bf16_runs:
        against = f"the mean of {whose} two runs on the same seed"
    note = (
        f"Gap: final validation loss less {against}, both evaluated in bf16; above 0 is worse; in per cent of {whose} loss. "
        f"{effort(found)}. The test uses the {level(found.alpha)} interval; ±: half of the 95 % one. Power: to show "
        "equivalence at a true gap of 0, at the hardest step of Holm's procedure. Detectable: the smallest margin with 80 % "
        "power there. By t: Student's interval, too narrow where gaps are skewed. Natively: evaluated as it trains. "
        "Training loss: over the last tenth of the steps, and its gap. "
    )
    if found.study.two_bf16_runs:
        note += f"A/A is the second of {whose} two runs; its gap and the planted fault's are to the first. "
    if any(finding.speedup for finding in found.findings):
        note += f"To equal loss: how many times as fast it comes to {whose} final loss, with 95 %. "
    if (first := found.study.primary) is not None:
        note += f"{first.name} is judged first, by itself; another recipe passes only where it does. "
    note += f"{found.study.assumption}."
    shown = [_gap_row(finding, found) for finding in found.findings]
    notes = " ".join([note, *(f"{n}." for n in found.notes)])
    return table_of(
        "verdict", f"{found.study.title}: gaps against {found.study.reference}", shown, notes, text_columns=2
    )


def effort(found: StudyVerdict) -> str:
    """Return the margin, the pairs, their power, and what the study cost: a sentence without its full stop."""
    judged, cost = [c for finding in found.recipes if (c := finding.judgement.comparison)], effort_of(found.study)
    said = f"Margin {found.margin:g} nat"
    if judged:
        runs = [f"{c.n}" for c in sorted(judged, key=lambda c: c.n)]
        said += f", {text.span(runs[0], runs[-1])} {'rounds' if found.study.pool else 'pairs'}"
    said += f", power {shown} at a true gap of 0" if (shown := powers(found.recipes)) else ""
    every = "" if cost.done == cost.planned else f" of {cost.planned}"
    return f"{said}; {cost.done}{every} runs, {hours(cost)}"


def tighter(found: StudyVerdict) -> str | None:
    """Return the verdicts by the tighter margin that the plan states beside its own: a sentence; None without one."""
    margin = found.study.number("tighter")
    if margin in (None, found.margin) or found.exploration or not found.stands:
        return None
    by_it = judge_study(found.study, margin=margin)
    said = [f"{one.arm.name} {by_it.label(one)}{_alone(one)}" for one in by_it.recipes if one.judgement.comparison]
    return f"At {margin:g} nat, also fixed beforehand: {'; '.join(said)}." if said else None


def _alone(finding: ArmVerdict) -> str:
    """Return a recipe's own verdict in parentheses, if what it is judged with changes that; else nothing."""
    c = finding.judgement.comparison
    if c is None or c.verdict is finding.verdict:
        return ""
    why = "the recipe that is judged first does not pass" if finding.judgement.waits else "not after Holm's correction"
    return f" ({c.verdict} alone, {why})"


def powers(findings: Iterable[ArmVerdict]) -> str | None:
    """Return the least and the largest power at a true gap of 0: 64 to 82 %; None if none is known."""
    known = sorted(c.power for finding in findings if (c := finding.judgement.comparison) and c.power is not None)
    return f"{text.span(f'{100 * known[0]:.0f}', f'{100 * known[-1]:.0f}')} %" if known else None


def hours(cost: Effort) -> str:
    """Return what a study took, of what its plan takes: 1.1 of about 5.7 GPU hours."""
    spent, unit = text.hours(cost.spent_s), "GPU hours" if cost.on_gpu else "CPU hours"
    if cost.done == cost.planned or cost.planned_s is None:
        return f"{spent} {unit}"
    return f"{spent} of about {text.hours(cost.planned_s)} {unit}"


def losses(found: StudyVerdict) -> Table | None:
    """Return the table of final validation losses, a row a configuration, a column a seed; not what is hidden."""
    hidden = {finding.arm.name for finding in found.findings if finding.hidden}
    arms = [arm for arm in found.study.arms if arm.finals and arm.name not in hidden and not found.study.pilot]
    seeds = sorted({seed for arm in arms for seed in arm.finals})
    shown = [
        {"Configuration": word(arm.name)} | {f"Seed {seed}": number(arm.finals.get(seed), text.loss) for seed in seeds}
        for arm in arms
    ]
    return table_of("losses", f"{found.study.title}: final validation losses", shown, "In nat, evaluated in bf16.")


def _gap_row(finding: ArmVerdict, found: StudyVerdict) -> dict[str, Value]:
    c, claims, speed = finding.judgement.comparison, finding.judgement.claims, finding.speedup
    percent = found.gap_percent(finding)
    trained = list(finding.arm.trained.values()) if c else []
    numbers = {
        "Pairs": number(len(finding.seeds), text.count),
        "Correlation": number(c.correlation if c else None, text.signed),
    }
    if found.study.pool is not None:
        numbers = {
            "Runs": number(c.n if c else None, text.count),
            f"Of {found.study.reference}": number(c.n_control if c else None, text.count),
        }
    return {
        "Configuration": word(finding.arm.name),
        "Verdict": word(found.label(finding)),
        "Gap, nat": number(c.gap if c else None, text.signed),
        "Gap, %": number(percent, lambda value: text.MISSING if value is None else f"{value:+.2f}"),
        level(found.alpha): word(interval(c.interval if c else None)),
        "95 %": word(interval(c.interval_95 if c else None)),
        "± of 95 %": number(half(c.interval_95) if c else None, text.loss),
        "By t": word(interval(c.t_interval if c else None)),
        "p, Holm": number(claims.equivalent if claims else None, text.probability),
        **numbers,
        "Power": number(c.power if c else None, text.percent),
        "Detectable": number(c.detectable if c else None),
        "Gap natively": number(finding.native_gap, text.signed),
        "Training loss": number(fmean(trained) if trained else None, text.loss),
        "Gap in training": number(finding.trained_gap, text.signed),
        "To equal loss": within_hosts(speed.to_equal_loss, speed) if speed else word(None),
    }


def within_hosts(ratio: Ratio | None, speed: Speedup) -> Value:
    """Return a ratio of step times; if pairs ran on two hosts, with the number of pairs that count."""
    if speed.step_time is None:
        return word(speed.within_hosts)
    return speedup(ratio, f" ({speed.within_hosts})" if speed.within_hosts else "")


def reasons(found: StudyVerdict) -> Table | None:
    """Return the table of each verdict's reason; configurations that only have trials to go are left out."""
    shown = [
        {"Configuration": word(one.arm.name), "Verdict": word(found.label(one))} | {"Reason": word(reason)}
        for one in found.findings
        if (reason := found.reason(one)) is not None
    ]
    return table_of("verdict_reasons", "Why", shown, text_columns=3)


def between(found: StudyVerdict) -> Table | None:
    """Return the table of each recipe beside the first, seed by seed, of those whose runs are done; not of a pool's."""
    done = [one for one in found.recipes if one.judgement.comparison and found.study.pool is None]
    shown = []
    for one in done[1:]:
        seeds = [seed for seed in one.seeds if seed in done[0].seeds]
        if len(seeds) < 2:
            continue
        sides = ([side.arm.finals[seed] for seed in seeds] for side in (one, done[0]))
        c = compare(*sides, margin=found.margin, alpha=found.alpha)
        shown.append(
            {
                "Configuration": word(one.arm.name),
                "Above it, nat": number(c.gap, text.signed),
                "95 %": word(interval(c.interval_95)),
                "Pairs": number(c.n, text.count),
            }
        )
    title = f"{found.study.title}: beside {done[0].arm.name}" if shown else ""
    return table_of("between", title, shown, "Mean difference of the final losses on the same seeds; no planned test.")


def brief(found: StudyVerdict) -> Table | None:
    """Return the columns of `gaps` that fit on a terminal and a telephone."""
    whole = gaps(found)
    if whole is None:
        return None
    runs = "Pairs" if found.study.pool is None else "Runs"
    narrow = ("Configuration", "Verdict", "Gap, nat", level(found.alpha), runs, "To equal loss")
    note = " ".join(filter(None, [f"{effort(found)}.", tighter(found)]))
    return dataclasses.replace(whole.only(narrow), name="verdict_brief", note=note)


def half(ends: tuple[float, float] | None) -> float | None:
    """Return half of an interval's width."""
    return None if ends is None else (ends[1] - ends[0]) / 2


def interval(ends: tuple[float, float] | None) -> str | None:
    return None if ends is None else f"[{text.signed(ends[0])}, {text.signed(ends[1])}]"
