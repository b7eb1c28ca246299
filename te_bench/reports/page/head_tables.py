"""The table of heads alone: loss and both gradients, beside the head of all the logits at the same shape."""

import dataclasses

from te_bench.reports.analysis.measures import beyond_held, finite, of_processes, paired_ratio
from te_bench.reports.analysis.naming import HEADS
from te_bench.reports.analysis.rows import Configuration
from te_bench.reports.group_result import GroupResult
from te_bench.reports.page import text
from te_bench.reports.page.table import (
    ENERGY_NOTE,
    Table,
    interval_note,
    number,
    repetitions,
    speedup,
    table_of,
    word,
)

ALL_LOGITS = "reference"
SIZES = ("n", "d", "vocab")
NAMES = {ALL_LOGITS: "all logits", "liger": "Liger"}


def times(result: GroupResult) -> Table | None:
    """Time, rate, memory beyond the operands and energy."""
    measured = result.group.of("linear_cross_entropy")
    shapes = list(dict.fromkeys(map(_shape, measured)))
    heads = sorted(measured, key=lambda one: shapes.index(_shape(one)))
    baselines = {_shape(one): one for one in heads if one.trial.problem.get("head") == ALL_LOGITS}
    ratios = {
        one.id: paired_ratio(other, one, "kernel_s")
        for one in heads
        if (other := baselines.get(_shape(one))) is not None and other is not one
    }
    shown = [
        {
            "Tokens x width x classes": word(" x ".join(str(one.trial.problem.get(key)) for key in SIZES)),
            "Head": dataclasses.replace(word(_name(one)), detail=one.specification),
            "ms": number(seconds := of_processes(one.ok, "kernel_s"), text.milliseconds),
            "Speed-up": speedup(ratios.get(one.id)),
            "TFLOP/s": number(
                flop / seconds if seconds and (flop := finite(one.ok[0].work.get("flop"))) else None, text.tera
            ),
            "GiB": number(beyond_held(one.ok), text.gib),
            "J": number(of_processes(one.ok, "energy_j")),
            "ok/planned": repetitions(one),
        }
        for one in heads
    ]
    found = [ratio.n for ratio in ratios.values() if ratio is not None]
    notes = [interval_note(found)] if found else []
    notes += ["Speed-up: over the head of all the logits."]
    notes += ["GiB: at the peak, beyond x, W and targets."] if any(beyond_held(one.ok) for one in heads) else []
    notes += [ENERGY_NOTE] if any(of_processes(one.ok, "energy_j") for one in heads) else []
    return table_of("heads", "Heads alone", shown, " ".join(notes), 2)


def _shape(one: Configuration) -> tuple[object, ...]:
    return one.trial.precision, *map(one.trial.problem.get, (*SIZES, "padded"))


def _name(one: Configuration) -> str:
    head = str(one.trial.problem.get("head"))
    compiled = ", torch.compile" if one.trial.mode == "compile" else ""
    outcome = "" if one.outcome == "ok" else f" ({one.outcome})"
    return f"{NAMES.get(head) or HEADS.get(head, head)}{compiled}{outcome}"
