"""The tables of trainings: what each reached, how stable it was, and the learning-rate ladder."""

from te_bench.reports.analysis.curves import TrainingComparison
from te_bench.reports.convergence.arm_stability import POINTS
from te_bench.reports.convergence.stability import SPIKE
from te_bench.reports.convergence.stress import StressLadder, StressResult
from te_bench.reports.group_result import GroupResult, StudyResult
from te_bench.reports.page import text
from te_bench.reports.page.table import Table, Value, label, number, repetitions, table_of, word


def curves(result: GroupResult) -> list[Table | None]:
    """What each configuration of each training comparison reached."""
    return [_curves(comparison) for comparison in result.trainings]


def _curves(comparison: TrainingComparison) -> Table | None:
    shown = [
        (
            label(training.cell),
            Value(text=text.loss(training.best, training.deviation), sort=training.best),
            number(comparison.behind(training), _signed),
            number(training.steps_done, text.count),
            number(training.batch, text.count),
            number(training.tokens, text.thousands),
            number(training.tokens_per_s, text.thousands),
            repetitions(training.cell),
        )
        for training in comparison.trainings
    ]
    loss = ("Best validation loss", "Less BF16's")
    columns = ("Configuration", *loss, "Steps", "Batch", "Tokens", "tokens/s", "ok/planned")
    against = comparison.reference.cell.label if comparison.reference else None
    note = f"BF16's is that of {against}." if against else "No BF16 configuration to compare with."
    if any(training.deviation is not None for training in comparison.trainings):
        note += " ± is the standard deviation over seeds."
    return table_of("curves", f"Training: {comparison.title}", columns, shown, note)


def _signed(value: float | None) -> str:
    return text.MISSING if value is None else f"{value:+.4f}".replace("-", "−")


def stability(result: GroupResult) -> list[Table | None]:
    """Divergences and spikes by configuration, apart from the final losses."""
    return [_stability(study) for study in result.studies]


def _stability(study: StudyResult) -> Table | None:
    shown = [
        (
            word(arm.name),
            word(f"{arm.diverged} of {arm.ended}"),
            number(arm.rate_below, text.percent),
            number(arm.p_value, text.probability),
            number(arm.loss_spikes),
            number(arm.grad_spikes),
            number(arm.highest_rise),
        )
        for arm in study.stability
    ]
    spikes = ("Loss spikes", "Gradient spikes")
    columns = ("Configuration", "Diverged", "Rate below", "p against bf16", *spikes, "Highest rise, nat")
    note = (
        "Diverged: not finite, or a median of the loss 0.5 above its minimum that did not come back. Rate below: "
        f"exact, 95 %. Spikes per {POINTS:,} logged points, robust z above {SPIKE:g}. Rise: sustained, above the "
        "running minimum."
    )
    return table_of("stability", f"{study.verdict.study.title}: stability", columns, shown, note)


def stress(result: GroupResult) -> list[Table | None]:
    """The learning-rate ladder of each model and length: where each precision breaks."""
    return [_ladder(ladder) for ladder in result.stress]


def _ladder(ladder: StressLadder) -> Table | None:
    shown = [(word(name), *map(_stressed, map(found.get, ladder.factors))) for name, found in ladder.results.items()]
    columns = ("Precision", *(f"{factor:g} x" for factor in ladder.factors))
    note = "Final validation loss at so many times the learning rate; else how many runs diverged."
    return table_of("stress", f"Learning-rate ladder: {ladder.title}", columns, shown, note)


def _stressed(found: StressResult | None) -> Value:
    if found is None:
        return word(None)
    if found.diverged:
        return Value(text=f"{found.diverged} of {found.runs} diverged", sort=float("inf"))
    return word(found.outcome) if found.final is None else number(found.final, text.loss)
