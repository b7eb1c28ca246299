"""The tables of parts of a step alone: heads, norms and activations, each beside its baseline at the same shape."""

import dataclasses

from te_bench.reports.analysis.measures import Ratio, beyond_held, finite, of_processes, paired_ratio
from te_bench.reports.analysis.naming import COMPILED, EAGER, HEADS, TE_BENCH
from te_bench.reports.analysis.rows import Configuration
from te_bench.reports.group_result import GroupResult
from te_bench.reports.page import text
from te_bench.reports.page.table import (
    ENERGY_NOTE,
    Table,
    Value,
    interval_note,
    number,
    repetitions,
    speedup,
    table_of,
    word,
)

PLAIN = "reference"  # a head of all the logits, a piece in plain PyTorch: the baselines
LIGER = "Liger"
OF_HEADS = {PLAIN: "all logits", "liger": LIGER}
OF_PIECES = {"triton": TE_BENCH, "liger": LIGER, "torch": "PyTorch's operator"}
KINDS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "swiglu": "SwiGLU", "gelu": "tanh GELU", "gelu_erf": "GELU"}


def heads(result: GroupResult) -> Table | None:
    """Time, rate, memory beyond the operands and energy of each head, loss and both gradients."""
    sizes = ("n", "d", "vocab")
    measured, ratios = _by_shape(result, "linear_cross_entropy", (*sizes, "padded"), "head")
    shown = [
        {
            "Tokens x width x classes": word(" x ".join(str(one.trial.problem.get(key)) for key in sizes)),
            "Head": _named(one, _head(one)),
            "ms": number(seconds := of_processes(one.ok, "kernel_s"), text.milliseconds),
            "Speed-up": speedup(ratios.get(one.id)),
            "TFLOP/s": _rate(one, "flop", seconds),
            "GiB": number(beyond_held(one.ok), text.gib),
            "J": number(of_processes(one.ok, "energy_j")),
            "ok/planned": repetitions(one),
        }
        for one in measured
    ]
    notes = ["Speed-up: over the head of all the logits."]
    notes += ["GiB: at the peak, beyond x, W and targets."] if any(beyond_held(one.ok) for one in measured) else []
    return table_of("heads", "Heads alone", shown, _note(measured, ratios, notes), 2)


def pieces(result: GroupResult) -> Table | None:
    """Time, rate and energy of each norm and activation."""
    measured, ratios = _by_shape(result, "piece", ("kind", "call", "m", "n"), "backend")
    shown = [
        {
            "Piece": word(_piece(one)),
            "Tokens x width": word(" x ".join(str(one.trial.problem.get(key)) for key in ("m", "n"))),
            "By": _named(one, _backend(one)),
            "ms": number(seconds := of_processes(one.ok, "kernel_s"), text.milliseconds),
            "Speed-up": speedup(ratios.get(one.id)),
            "TB/s": _rate(one, "bytes", seconds),
            "mJ": number((joules := of_processes(one.ok, "energy_j")) and 1e3 * joules),
            "ok/planned": repetitions(one),
        }
        for one in measured
    ]
    moved = "TB/s: of all operands, read once, and all results, written once, by the median call."
    notes = ["Speed-up: over the same in plain PyTorch, on a GPU compiled.", moved]
    return table_of("pieces", "Norms and activations alone", shown, _note(measured, ratios, notes), 3)


def _by_shape(
    result: GroupResult, workload: str, settings: tuple[str, ...], backend: str
) -> tuple[list[Configuration], dict[str, Ratio | None]]:
    """What a workload measured, shape after shape, and by its id how many times as fast each is as the baseline there."""

    def shape(one: Configuration) -> tuple[object, ...]:
        return one.trial.precision, *map(one.trial.problem.get, settings)

    measured = result.group.of(workload)
    shapes = list(dict.fromkeys(map(shape, measured)))
    found = sorted(measured, key=lambda one: shapes.index(shape(one)))
    baselines = {shape(one): one for one in found if one.trial.problem.get(backend) == PLAIN}
    ratios = {
        one.id: paired_ratio(other, one, "kernel_s")
        for one in found
        if (other := baselines.get(shape(one))) is not None and other is not one
    }
    return found, ratios


def _note(measured: list[Configuration], ratios: dict[str, Ratio | None], own: list[str]) -> str:
    pairs = [ratio.n for ratio in ratios.values() if ratio is not None]
    notes = [interval_note(pairs)] if pairs else []
    notes += [*own, *([ENERGY_NOTE] if any(of_processes(one.ok, "energy_j") for one in measured) else [])]
    return " ".join(notes)


def _rate(one: Configuration, work: str, seconds: float | None) -> Value:
    """TFLOP/s or TB/s."""
    return number(found / seconds if seconds and (found := finite(one.ok[0].work.get(work))) else None, text.tera)


def _named(one: Configuration, name: str) -> Value:
    outcome = "" if one.outcome == "ok" else f" ({one.outcome})"
    return dataclasses.replace(word(f"{name}{outcome}"), detail=one.specification)


def _head(one: Configuration) -> str:
    head = str(one.trial.problem.get("head"))
    compiled = f", {COMPILED}" if one.trial.mode == "compile" else ""
    return f"{OF_HEADS.get(head) or HEADS.get(head, head)}{compiled}"


def _backend(one: Configuration) -> str:
    name = str(one.trial.problem.get("backend"))
    return (COMPILED if one.trial.mode == "compile" else EAGER) if name == PLAIN else OF_PIECES.get(name, name)


def _piece(one: Configuration) -> str:
    """RMSNorm forward; sum and RMSNorm forward with the FP8 cast; SwiGLU backward."""
    kind, call = (str(one.trial.problem.get(key)) for key in ("kind", "call"))
    added = "sum and " if call.startswith("add_") else ""
    fp8 = " with the FP8 cast" if call.endswith("_quantized") else ""
    return f"{added}{KINDS.get(kind, kind)} {call.removeprefix('add_').removesuffix('_quantized')}{fp8}"
