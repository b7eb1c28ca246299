"""Make tables of the predictions of `te-bench plan scaling`, and of published figures beside predictions."""

from collections.abc import Sequence

from te_bench.experiments.scaling.predict import Prediction
from te_bench.experiments.scaling.published import MORE, OTHER, Compared, errors
from te_bench.reports.page import text
from te_bench.reports.page.table import Table, Value, filled, number, word


def predictions(found: Sequence[Prediction], alone: Prediction, caption: str) -> Table:
    """Return a row for each number of GPUs; efficiency: against one GPU alone."""
    rows = [
        {
            "GPUs": Value(text=f"{one.layout.world:,}", sort=one.layout.world),
            "ms/step": number(one.seconds * 1e3),
            "tok/s/GPU": number(one.tokens_per_second, text.count),
            "Efficiency": number(one.tokens_per_second / alone.tokens_per_second, text.percent),
            "Comm., ms": number(one.communication_s * 1e3),
            "Exposed, ms": number(one.exposed_s * 1e3),
            "Sent, GB": number(one.sent / 1e9),
            "Memory, GiB": number(sum(one.memory.values()), text.gib),
            "Bound by": word(one.bound),
        }
        for one in found
    ]
    note = (
        "Efficiency: tokens a second and GPU, against one GPU alone, whose memory is taken to suffice; above 100 % where "
        "the optimizer's update is shared. Comm.: all collectives of a step, hidden or not; exposed: what no compute hides. "
        "Sent and memory: of one rank, the latter an estimate."
    )
    return filled("scaling", caption, rows, note)  # never empty, because one GPU is always included


def published(found: Sequence[Compared]) -> Table:
    """Return a row for each published figure."""
    rows = [
        {
            "Published": word(f"{one.family.name}: {one.figure.what}"),
            "GPUs": Value(text=f"{one.figure.layout.world:,}", sort=one.figure.layout.world),
            "tok/s/GPU": number(one.figure.tokens_per_second, text.count),
            "Predicted": number(one.predicted, text.count),
            "Error": Value(text=one.kind, sort=None) if one.fitted else number(one.error, text.signed_percent),
        }
        for one in found
    ]
    return filled("plan_scaling", "Published tokens a second and GPU", rows, said(found))


def said(found: Sequence[Compared]) -> str:
    """Return a sentence on the errors of each kind of prediction."""
    lines = []
    for kind, what in ((MORE, "the same model on more GPUs"), (OTHER, "another model or layout than was fitted")):
        size = errors(found, (kind,))
        lines.append(
            f"{size.number} predictions of {what}: median error {100 * size.median:.1f} %, worst {100 * size.worst:.0f} %."
        )
    return " ".join(lines)
