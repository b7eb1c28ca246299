"""The tables of a convergence verdict: the gaps against the margin, and the reasons."""

from te_bench.reports.convergence.equivalence import LossComparison, Verdict
from te_bench.reports.convergence.skewed import ASSUMPTION
from te_bench.reports.convergence.study_verdict import ArmVerdict, StudyVerdict
from te_bench.reports.group_result import GroupResult
from te_bench.reports.page import text
from te_bench.reports.page.table import Table, Value, number, table_of, word


def all_gaps(result: GroupResult) -> list[Table | None]:
    return [gaps(study.verdict) for study in result.studies]


def all_reasons(result: GroupResult) -> list[Table | None]:
    return [reasons(study.verdict) for study in result.studies]


def gaps(found: StudyVerdict) -> Table | None:
    """Final losses against the control's: gap, intervals, p-values, verdict; one line a configuration."""
    shown = [_gap_row(finding, found) for finding in found.findings]
    level = _level(found.alpha)
    tested = ("Gap, nat", level, "By t", "p, Holm", "Pairs", "Correlation", "Power", "Detectable")
    columns = ("Configuration", "Verdict", *tested, "Gap natively", "Gap in training", "Less time", "95 % of it")
    note = (
        f"Gap: final validation loss less bf16's on the same seeds, both evaluated in bf16; above 0 is worse. Margin "
        f"{found.margin:g} nat. Power: to show equivalence at a true gap of 0. Detectable: the smallest margin with 80 % "
        "power. By t: Student's interval, too narrow where gaps are skewed. Natively: evaluated as it trains. In training: "
        "of the training loss over the last tenth of the steps. Less time: to bf16's final loss, steps that make up the gap "
        f"included. {ASSUMPTION}."
    )
    caption = f"{found.study.title}: gaps against bf16"
    return table_of(
        "verdict", caption, columns, shown, " ".join([note, *(f"{n}." for n in found.notes)]), text_columns=2
    )


def _gap_row(finding: ArmVerdict, found: StudyVerdict) -> tuple[Value, ...]:
    judgement, c, speed = finding.judgement, finding.judgement.comparison, finding.speedup
    p = judgement.p_equivalence
    return (
        word(finding.arm.name),
        word(f"{finding.verdict}{' (void)' if found.void and finding in found.recipes else ''}"),
        number(c.gap if c else None, text.signed),
        word(_interval(c.interval if c else None)),
        word(_interval(c.t_interval if c else None)),
        number(p, text.probability),
        number(len(finding.seeds), text.count),
        number(c.correlation if c else None, text.signed),
        number(c.power if c else None, text.percent),
        number(c.detectable if c else None),
        number(finding.native.gap if finding.native else None, text.signed),
        number(finding.trained.gap if finding.trained else None, text.signed),
        number(speed.less_time if speed else None, text.percent),
        word(_percents(speed.less_time_interval if speed else None)),
    )


def reasons(found: StudyVerdict) -> Table | None:
    """Why each verdict is what it is, in words."""
    shown = [(word(f.arm.name), word(f.verdict), word(f.missing or f.judgement.reason)) for f in found.findings]
    return table_of("verdict_reasons", "Why", ("Configuration", "Verdict", "Reason"), shown, text_columns=3)


def losses(c: LossComparison, verdict: Verdict) -> Table:
    """A comparison that comes without a study: a user's own losses."""
    level = _level(c.alpha)
    rows = (
        ("Verdict", word(verdict)),
        ("Runs", word(f"{c.n} pairs" if c.paired else f"{c.n} against {c.n_control}, unpaired")),
        ("Mean gap, above 0 is worse", number(c.gap, text.signed)),
        (f"{level} interval", word(_interval(c.interval))),
        (f"{level} interval, Student's t", word(_interval(c.t_interval))),
        ("Margin", number(c.margin)),
        ("p: within the margin", number(c.p_equivalence, text.probability)),
        ("p: not worse by the margin", number(c.p_non_inferior, text.probability)),
        ("p: worse by the margin", number(c.p_inferior, text.probability)),
        ("Correlation of the pairs", number(c.correlation, text.signed)),
        ("Power at a true gap of 0", number(c.power, text.percent)),
        ("Smallest margin with 80 % power", number(c.detectable)),
        ("Runs needed for 80 % power", number(c.seeds_needed, text.count)),
        ("To show what the measured gap is", number(c.seeds_needed_at_gap, text.count)),
    )
    table = table_of("losses", "Final losses", ("What", "Value"), [(word(name), value) for name, value in rows])
    assert table is not None
    return table


def brief(found: StudyVerdict) -> Table | None:
    """What a terminal has room for of `gaps`."""
    whole = gaps(found)
    if whole is None:
        return None
    narrow = ("Configuration", "Verdict", "Gap, nat", _level(found.alpha), "p, Holm", "Pairs", "Less time")
    return whole.only(narrow)


def _level(alpha: float) -> str:
    return f"{100 * (1 - 2 * alpha):.3g} %"


def _interval(ends: tuple[float, float] | None) -> str | None:
    return None if ends is None else f"[{text.signed(ends[0])}, {text.signed(ends[1])}]"


def _percents(ends: tuple[float, float] | None) -> str | None:
    return None if ends is None else f"[{100 * ends[0]:.1f}, {100 * ends[1]:.1f}] %"
