"""The tables of a convergence verdict: the gaps against the margin, what was unstable, and the learning-rate ladder."""

import dataclasses
import functools
from collections.abc import Sequence

from te_bench.reports.analysis.rows import Cell, Group
from te_bench.reports.convergence.equivalence import Comparison, Verdict
from te_bench.reports.convergence.skewed import ASSUMPTION
from te_bench.reports.convergence.stability import SPIKE, rate_bound
from te_bench.reports.convergence.study import Run, studies
from te_bench.reports.convergence.verdict import Finding, Verdicts, divergence_p_value, verdicts
from te_bench.reports.page import text
from te_bench.reports.page.table import Table, Value, number, table_of, word

POINTS = 1000  # logged points that spikes are counted per


@functools.lru_cache(maxsize=8)  # asked for by headlines, figures and tables
def of_group(group: Group) -> list[Verdicts]:
    """The verdict of each study of a group that has a control and recipes."""
    return [verdicts(study) for study in studies(group) if study.whole]


def all_gaps(group: Group) -> list[Table]:
    return [table for found in of_group(group) if (table := gaps(found))]


def all_reasons(group: Group) -> list[Table]:
    return [table for found in of_group(group) if (table := reasons(found))]


def gaps(found: Verdicts) -> Table | None:
    """Final losses against the control's: gap, intervals, p-values, verdict; one line an arm."""
    shown = [_gap_row(finding, found) for finding in found.findings]
    level = _level(found.alpha)
    tested = ("Gap, nat", level, "By t", "p, Holm", "Pairs", "Correlation", "Power", "Detectable")
    columns = ("Arm", "Verdict", *tested, "Gap natively", "Gap in training", "Less time", "95 % of it")
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


def _gap_row(finding: Finding, found: Verdicts) -> tuple[Value, ...]:
    judgement, c, speed = finding.judgement, finding.judgement.comparison, finding.speedup
    p = judgement.p_equivalence
    return (
        word(finding.arm.name),
        word(f"{finding.verdict}{' (void)' if found.void and finding in found.recipes else ''}"),
        number(c.gap if c else None, signed),
        word(_interval(c.interval if c else None)),
        word(_interval(c.t_interval if c else None)),
        number(p, probability),
        number(len(finding.seeds), text.count),
        number(c.correlation if c else None, signed),
        number(c.power if c else None, text.percent),
        number(c.detectable if c else None),
        number(finding.native.gap if finding.native else None, signed),
        number(finding.trained.gap if finding.trained else None, signed),
        number(speed.less_time if speed else None, text.percent),
        word(_percents(speed.less_time_interval if speed else None)),
    )


def reasons(found: Verdicts) -> Table | None:
    """Why each verdict is what it is, in words."""
    shown = [(word(f.arm.name), word(f.verdict), word(f.missing or f.judgement.reason)) for f in found.findings]
    return table_of("verdict_reasons", "Why", ("Arm", "Verdict", "Reason"), shown, text_columns=3)


def losses(c: Comparison, verdict: Verdict) -> Table:
    """A comparison that comes without a study: a user's own losses."""
    level = _level(c.alpha)
    rows = (
        ("Verdict", word(verdict)),
        ("Runs", word(f"{c.n} pairs" if c.paired else f"{c.n} against {c.n_control}, unpaired")),
        ("Mean gap, above 0 is worse", number(c.gap, signed)),
        (f"{level} interval", word(_interval(c.interval))),
        (f"{level} interval, Student's t", word(_interval(c.t_interval))),
        ("Margin", number(c.margin)),
        ("p: within the margin", number(c.p_equivalence, probability)),
        ("p: not worse by the margin", number(c.p_non_inferior, probability)),
        ("p: worse by the margin", number(c.p_inferior, probability)),
        ("Correlation of the pairs", number(c.correlation, signed)),
        ("Power at a true gap of 0", number(c.power, text.percent)),
        ("Smallest margin with 80 % power", number(c.detectable)),
        ("Runs needed for 80 % power", number(c.seeds_needed, text.count)),
        ("To show what the measured gap is", number(c.seeds_needed_at_gap, text.count)),
    )
    table = table_of("losses", "Final losses", ("What", "Value"), [(word(name), value) for name, value in rows])
    assert table is not None
    return table


def stability(group: Group) -> list[Table]:
    """Divergences and spikes by arm, apart from the final losses."""
    tables = []
    for found in of_group(group):
        control = found.study.control
        assert control is not None
        shown = []
        for arm in found.study.arms:
            finding = next((f for f in found.findings if f.arm is arm), None)
            ended = len(arm.ended)
            runs = [run.stability for run in arm.runs.values() if run.stability]
            shown.append(
                (
                    word(arm.name),
                    word(f"{len(arm.diverged)} of {ended}"),
                    number(rate_bound(len(arm.diverged), ended) if ended else None, text.percent),
                    number(divergence_p_value(finding, control) if finding else None, probability),
                    number(_rate([(len(r.loss_spikes), r.loss_judged) for r in runs]), text.plain),
                    number(_rate([(len(r.grad_spikes), r.grad_judged) for r in runs]), text.plain),
                    number(max((rise.height for r in runs for rise in r.rises), default=0.0) if runs else None),
                )
            )
        columns = (
            "Arm",
            "Diverged",
            "Rate below",
            "p against bf16",
            "Loss spikes",
            "Gradient spikes",
            "Highest rise, nat",
        )
        note = (
            "Diverged: not finite, or a median of the loss 0.5 above its minimum that did not come back. Rate below: "
            f"exact, 95 %. Spikes per {POINTS:,} logged points, robust z above {SPIKE:g}. Rise: sustained, above the "
            "running minimum."
        )
        table = table_of("stability", f"{found.study.title}: stability", columns, shown, note)
        tables += [table] if table else []
    return tables


def _rate(counts: Sequence[tuple[int, int]]) -> float | None:
    judged = sum(n for _, n in counts)
    return POINTS * sum(k for k, _ in counts) / judged if judged else None


def stress(group: Group) -> list[Table]:
    """The learning-rate ladder of each model and length: where each precision breaks."""
    together: dict[tuple[object, ...], list[Cell]] = {}
    for cell in group.of("training"):
        if "lr_factor" in cell.trial.problem:
            together.setdefault(cell.course, []).append(cell)
    return [table for cells in together.values() if (table := _ladder(cells))]


def _ladder(cells: Sequence[Cell]) -> Table | None:
    rungs: dict[str, dict[float, Cell]] = {}
    for cell in cells:
        factor = float(str(cell.trial.problem["lr_factor"]))
        rungs.setdefault(cell.trial.recipe or cell.trial.precision, {})[factor] = cell
    factors = sorted({factor for by_factor in rungs.values() for factor in by_factor})
    shown = [(word(name), *(_rung(found.get(factor)) for factor in factors)) for name, found in rungs.items()]
    problem = cells[0].trial.problem
    title = f"Learning-rate ladder: {problem.get('model')}, {problem.get('data')}, {problem.get('steps')} steps"
    note = "Final validation loss at so many times the learning rate; else how many runs diverged."
    return table_of("stress", title, ("Precision", *(f"{factor:g} x" for factor in factors)), shown, note)


def _rung(cell: Cell | None) -> Value:
    if cell is None:
        return word(None)
    runs = [Run(row) for row in cell.rows]
    diverged = sum(1 for run in runs if run.diverged)
    finals = [run.final for run in runs if run.final is not None]
    if diverged:
        return Value(text=f"{diverged} of {len(runs)} diverged", sort=float("inf"))
    return number(sum(finals) / len(finals), text.loss) if finals else word(cell.outcome)


def brief(found: Verdicts) -> Table | None:
    """What a terminal has room for of `gaps`."""
    whole = gaps(found)
    if whole is None:
        return None
    wanted = ("Arm", "Verdict", "Gap, nat", _level(found.alpha), "p, Holm", "Pairs", "Less time")
    kept = [i for i, column in enumerate(whole.columns) if column.title in wanted]
    return dataclasses.replace(
        whole,
        columns=tuple(whole.columns[i] for i in kept),
        rows=tuple(tuple(row[i] for i in kept) for row in whole.rows),
    )


def _level(alpha: float) -> str:
    return f"{100 * (1 - 2 * alpha):.3g} %"


def signed(value: float | None) -> str:
    return text.MISSING if value is None else f"{value:+.4f}" if abs(value) < 1e4 else f"{value:+.3g}"


def probability(value: float | None) -> str:
    return text.MISSING if value is None else "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def _interval(ends: tuple[float, float] | None) -> str | None:
    return None if ends is None else f"[{signed(ends[0])}, {signed(ends[1])}]"


def _percents(ends: tuple[float, float] | None) -> str | None:
    return None if ends is None else f"[{100 * ends[0]:.1f}, {100 * ends[1]:.1f}] %"
