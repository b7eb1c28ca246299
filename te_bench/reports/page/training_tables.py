"""The tables of trainings: what each reached, how stable it was, and the learning-rate ladder."""

from collections.abc import Sequence

from te_bench.reports.analysis.curves import Training, TrainingComparison
from te_bench.reports.convergence.stability import SPIKE, rate_bound, rate_p_value
from te_bench.reports.convergence.stress import LOST, StressLadder, StressResult
from te_bench.reports.convergence.study import StudyArm
from te_bench.reports.convergence.study_verdict import StudyVerdict
from te_bench.reports.page import text
from te_bench.reports.page.table import Table, Value, label, number, repetitions, table_of, word

POINTS = 1000  # spikes are counted per so many logged points


def curves(comparison: TrainingComparison) -> Table | None:
    """Return the table of what each configuration of a training comparison reached."""
    study = any(training.configuration.trial.problem.get("arm") == "aa" for training in comparison.trainings)
    shown = [
        {
            "Configuration": label(training.configuration),
            "Best validation loss": _best(training),
            "Less the control's" if study else "Less bf16's": number(comparison.behind(training), _signed),
            "Steps": number(training.steps_done, text.count),
            "Batch": number(training.batch, text.count),
            "Tokens": number(training.tokens, text.thousands),
            "tokens/s": number(training.tokens_per_s, text.thousands),
            "ok/planned": repetitions(training.configuration),
        }
        for training in comparison.trainings
    ]
    against = comparison.reference.configuration.label if comparison.reference else None
    hidden = any(training.hidden for training in comparison.trainings)
    if study:
        said = f"The control is {against}; a verdict's gap may be to the mean of it and of A/A."
    else:
        said = f"bf16's is that of {against}."
    note = said if against else "" if hidden else "No bf16 configuration to compare with."
    if any(training.deviation is not None for training in comparison.trainings):
        note += " ± is the standard deviation over seeds."
    if hidden:
        note += " Hidden: until the planned runs of a configuration are done, so that no interim answer is seen."
    return table_of("curves", f"Training: {comparison.title}", shown, note)


def _best(training: Training) -> Value:
    if training.hidden and training.deviation is not None:
        return word(f"hidden ± {training.deviation:.4f}")
    return Value(text=text.loss(training.best, training.deviation), sort=training.best)


def _signed(value: float | None) -> str:
    return text.MISSING if value is None else f"{value:+.4f}".replace("-", "−")


def stability(found: StudyVerdict) -> Table | None:
    """Return the table of divergences and spikes by configuration."""
    compared = [verdict.arm for verdict in found.findings if not verdict.hidden]
    shown = [
        _stability(arm, found.study.control if arm in compared else None, found.study.reference)
        for arm in found.study.arms
    ]
    note = (
        "Diverged: not finite, or a median of the loss 0.5 above its minimum that did not come back. Rate below: "
        f"exact, 95 %. Spikes per {POINTS:,} logged points, robust z above {SPIKE:g}. Rise: sustained, above the "
        "running minimum."
    )
    return table_of("stability", f"{found.study.title}: stability", shown, note)


def _stability(arm: StudyArm, control: StudyArm | None, reference: str) -> dict[str, Value]:
    """Return an arm's row; control: the arm to compare its rate of divergence with by Fisher's exact test, or None.

    reference: the name of what the study compares with.
    """
    events, ended = len(arm.diverged), len(arm.ended)
    runs = [run.stability for run in arm.runs.values() if run.stability]
    others = (len(control.diverged), len(control.ended)) if control else (0, 0)
    spikes = (
        _rate([(len(run.loss_spikes), run.loss_judged) for run in runs]),
        _rate([(len(run.grad_spikes), run.grad_judged) for run in runs]),
    )
    rise = max((rise.height for run in runs for rise in run.rises), default=0.0) if runs else None
    return {
        "Configuration": word(arm.name),
        "Diverged": word(f"{events} of {ended}"),
        "Rate below": number(rate_bound(events, ended) if ended else None, text.percent),
        f"p against {reference}": number(
            rate_p_value((events, ended), others) if ended and others[1] else None, text.probability
        ),
        "Loss spikes": number(spikes[0]),
        "Gradient spikes": number(spikes[1]),
        "Highest rise, nat": number(rise),
    }


def _rate(counts: Sequence[tuple[int, int]]) -> float | None:
    judged = sum(n for _, n in counts)
    return POINTS * sum(k for k, _ in counts) / judged if judged else None


def stress(ladder: StressLadder) -> Table | None:
    """Return the table of a learning-rate ladder: where each precision breaks."""
    shown = [
        {"Precision": word(name), **_breaks(ladder, name)}
        | {f"{factor:g} x": _stressed(found.get(factor)) for factor in ladder.factors}
        for name, found in ladder.results.items()
    ]
    note = (
        "A run breaks if it diverges, or ends above the best bf16 run at its learning rate or a lower one by more than "
        f"{100 * LOST:g} % of what bf16 learnt. Breaks: the two learning rates between which the median seed breaks. "
        "Interval: of that median, for any distribution over seeds, with the confidence that this number of seeds gives. "
        f"The other columns: the mean final validation loss at a multiple of {ladder.rate:g}, and how many runs broke "
        "(1/6: one of six) or diverged."
    )
    if ladder.unseen:
        note += f" Not seen, so a recipe that seems to hold may be broken, too: {', '.join(ladder.unseen)}."
    return table_of("stress", f"Learning-rate ladder: {ladder.title}", shown, note)


def _breaks(ladder: StressLadder, name: str) -> dict[str, Value]:
    found = ladder.breaking.get(name)
    if found is None:
        return {"Breaks": word(None), "Interval": word(None)}
    said = f"{ladder.rates(found.interval)} ({100 * found.confidence:.3g} %, {found.seeds} seeds)"
    return {
        "Breaks": Value(text=ladder.rates(found.median), sort=found.median[0]),
        "Interval": Value(text=said if found.seeds > 1 else text.MISSING, sort=found.interval[0]),
    }


def _stressed(found: StressResult | None) -> Value:
    if found is None:
        return word(None)
    if found.diverged:
        return Value(text=f"{found.diverged} of {found.runs} diverged", sort=float("inf"))
    if found.final is None:
        return word(found.outcome)
    said = f" ({found.broke}/{found.whole})" if found.broke else ""
    return Value(text=f"{text.loss(found.final)}{said}", sort=found.final)
