"""Make the tables of steps over several GPUs: their speed, and what a rank's memory holds."""

import statistics
from collections.abc import Sequence

from te_bench.reports.analysis import rows
from te_bench.reports.analysis.measures import Ratio
from te_bench.reports.analysis.scaled import ScaledStep
from te_bench.reports.group_result import GroupResult
from te_bench.reports.page import text
from te_bench.reports.page.table import Table, Value, label, number, repetitions, table_of

NOT_RUN = "not run"
MIB = 2**20
TITLES = {"weights": "Weights", "gradients": "Gradients", "states": "States"}
TITLES |= {"fp8_copies": "FP8 copies", "fp8_operands": "FP8 operands"}


def times(result: GroupResult) -> Table | None:
    """Return the table of each GPU's throughput, efficiency, cost of collectives, memory, energy and link."""
    steps = [step for step in result.scaled if step.configuration.outcome != rows.NOT_RUN]
    shown = [
        {
            "Configuration": label(step.configuration),
            "GPUs": Value(text=str(step.world), sort=step.world),
            "ms/step": number(step.latency_s, text.milliseconds),
            "Predicted, ms": number(step.predicted_s, text.milliseconds),
            "tok/s/GPU": number(step.tokens_per_s, text.count),
            "Efficiency": _efficiency(step),
            "Compute, ms": number(step.compute_s, text.milliseconds),
            "Collectives, ms": number(step.collectives_s, text.milliseconds),
            "Exposed, ms": number(step.exposed_s, text.milliseconds),
            "Idle, ms": number(step.idle_s, text.milliseconds),
            "Peak, GiB": number(step.memory.get("peak"), text.gib),
            "mJ/token": number(None if step.energy_per_token is None else step.energy_per_token * 1e3),
            "Link, GB/s": number(None if step.busbw is None else step.busbw / 1e9),
            "ok/planned": repetitions(step.configuration),
        }
        for step in steps
    ]
    notes = _notes(steps)
    if left := len(result.scaled) - len(steps):
        notes.append(f"{left} planned step{'s have' if left > 1 else ' has'} not run yet.")
    return table_of("scaling", "A training step on one GPU and on several", shown, " ".join(notes))


def _efficiency(step: ScaledStep) -> Value:
    if step.latency_s is None:
        return Value(text=NOT_RUN if step.configuration.outcome == "unsupported" else text.MISSING, sort=None)
    return Value(text=_percent(step.efficiency), sort=step.efficiency.value if step.efficiency else None)


def _percent(ratio: Ratio | None) -> str:
    """Return for example: 93.1 % [92.8, 93.4]."""
    if ratio is None or ratio.low is None or ratio.high is None:
        return text.percent(ratio.value if ratio else None)
    return f"{text.percent(ratio.value)} [{100 * ratio.low:.1f}, {100 * ratio.high:.1f}]"


def _notes(steps: Sequence[ScaledStep]) -> list[str]:
    notes = [
        "Efficiency: tokens/s of each GPU as a share of the same project's step on one GPU with as many sequences."
    ]
    if any(step.efficiency and step.efficiency.low is not None for step in steps):
        notes.append("Its interval is a 95 % t-interval over paired seeds.")
    notes += _predictions(steps)
    traced = [step for step in steps if step.exposed_s is not None]
    if traced:
        waits = [step for step in traced if step.waiting_s is None and step.world > 1]
        when = "once all ranks have begun" if len(waits) < len(traced) else "waits for other ranks included"
        some = f" ({len(waits)} rows: waits for other ranks included)" if 0 < len(waits) < len(traced) else ""
        notes.append(
            f"Collectives: how long NCCL's kernels run, {when}{some}. Exposed: how long of that the GPU computes nothing. "
            "Both are means over ranks, by a trace of three steps."
        )
    if any(step.idle_s is not None for step in steps):
        notes.append(
            "Idle: the rest of the step. The GPU waits for its host's launches or for another rank. A captured graph, a "
            "larger batch or a faster host shortens it; a faster link does not."
        )
    if any("peak" in step.memory for step in steps):
        notes.append("Peak: the most memory that PyTorch had allocated, on the rank with the most.")
    if any(step.energy_per_token is not None for step in steps):
        notes.append("mJ/token: energy of all the step's GPUs by their own counters, over all its tokens.")
    if any(step.busbw is not None for step in steps):
        notes.append("Link: bus bandwidth of a large all-reduce over the step's ranks, as nccl-tests counts it.")
    if any(step.latency_s and step.configuration.trial.device == "cpu" for step in steps):
        notes.append(
            "On a CPU each rank is a process of one thread, and all share its memory. Their efficiency says nothing about "
            "GPUs. Exposed communication is not measured."
        )
    return notes


def _predictions(steps: Sequence[ScaledStep]) -> list[str]:
    """Return a note on the predictions' errors, for captured steps and for others, which may wait for their host."""
    found = [step for step in steps if step.predicted_s and step.latency_s]
    if not found:
        return []
    said = []
    for captured, what in ((True, "captured"), (False, "other")):
        alike = [step for step in found if (step.configuration.trial.mode == "cudagraph") is captured]
        errors = [
            100 * (step.predicted_s / step.latency_s - 1) for step in alike if step.predicted_s and step.latency_s
        ]
        if errors:
            many = f"{len(errors)} {what} step{'s' if len(errors) > 1 else ''}"
            median, worst = statistics.median(errors), max(errors, key=abs)
            said.append(f"{median:+.0f} % in the median and {worst:+.0f} % at worst for {many}")
    return [
        "Predicted: by te-bench plan scaling, from the same step on one GPU. Its error, below 0 where it is too short: "
        f"{'; '.join(said)}."
    ]


def memory(result: GroupResult) -> Table | None:
    """Return the table of what a rank's memory holds."""
    held = [step for step in result.scaled if step.memory]
    shown = [
        {
            "Configuration": label(step.configuration),
            "GPUs": Value(text=str(step.world), sort=step.world),
            **{title: _mib(step.memory.get(kind)) for kind, title in TITLES.items()},
            "Rest": _mib(step.rest),
            "Peak": _mib(step.memory.get("peak")),
        }
        for step in held
    ]
    notes = ["Of the rank that holds the most. Weights, gradients and optimizer states are counted by their sizes."]
    if any("fp8_copies" in step.memory for step in held):
        notes.append(
            "FP8 copies: weights in FP8 that an eager pass keeps for its backward pass. FP8 operands: all else that it "
            "keeps in FP8."
        )
    if any("peak" in step.memory for step in held):
        notes.append(
            "Rest: the peak less all these: other activations, gathered weights, buckets and workspaces. If the peak comes "
            "before all gradients exist, the rest is larger than shown."
        )
    return table_of("scaling_memory", "Memory of a rank, MiB", shown, " ".join(notes))


def _mib(size: float | None) -> Value:
    return number(None if size is None else size / MIB)
