"""Make the tables of parts timed alone: attention, where to scale its q, heads, norms, activations and GEMMs."""

import dataclasses

from te_bench.reports.analysis import ranking
from te_bench.reports.analysis.alone import TimeAlone
from te_bench.reports.analysis.attention import AttentionChoice
from te_bench.reports.analysis.measures import beyond_held, finite, geometric_mean, median, of_processes
from te_bench.reports.analysis.naming import kernel_name
from te_bench.reports.group_result import GroupResult
from te_bench.reports.page import text
from te_bench.reports.page.table import (
    ENERGY_NOTE,
    Table,
    Value,
    interval_note,
    label,
    number,
    repetitions,
    speedup,
    table_of,
    word,
)

IN_FP8 = "In FP8, which computes with other numbers"


def choices(result: GroupResult) -> list[Table | None]:
    """Return the tables of the attention to take for each shape; attention in FP8 has its own."""
    return [
        _choices(result, "The kernel to take, both passes", "Take", fp8=False),
        _choices(result, IN_FP8, "Fastest in FP8", fp8=True),
    ]


def _choices(result: GroupResult, caption: str, take: str, *, fp8: bool) -> Table | None:
    found = [one for one in result.attention.choices if one.fp8 == fp8]
    over_peer = [one.times[0].speedups.get("both") for one in found]
    shown = [
        {
            "Shape": word(one.times[0].configuration.shape),
            take: word(" or ".join(label(time.configuration).text for time in one.times[: max(1, one.best)])),
            "How sure": word(_how_sure(one)),
            "ms": number(one.times[0].both_s, text.milliseconds),
            "Over the next": speedup(one.over_next, f", {one.times[1].configuration.label}" if one.over_next else ""),
            f"Over {kernel_name(result.attention.peer or '')}": speedup(ratio),
        }
        for one, ratio in zip(found, over_peer, strict=True)
    ]
    pairs = [ratio.n for ratio in (*over_peer, *(one.over_next for one in found)) if ratio]
    notes = ["Over: how many times as fast as another.", interval_note(pairs)] if pairs else []
    if any(one.best > 1 for one in found):
        notes.append("Not distinguished: by paired t-tests at 5 % over all comparisons of a shape.")
    return table_of("attention_choice", caption, shown, " ".join(notes), text_columns=3)


def _how_sure(choice: AttentionChoice) -> str:
    if len(choice.times) == 1:
        return "the only one timed"
    said = ranking.FASTEST if choice.best == 1 else ranking.TIED
    return f"{said} in {choice.over_next.n} runs" if choice.best and choice.over_next else ranking.ALONE


def times(result: GroupResult) -> Table | None:
    """Return the table of attention's time and TFLOP/s, forward and backward, and millijoules of both."""
    measured = result.attention.times
    shown = [
        {
            "Shape": word(time.configuration.shape),
            "Kernel": label(time.configuration),
            "Forward, ms": number(time.forward_s, text.milliseconds),
            "Backward, ms": number(time.backward_s, text.milliseconds),
            "Forward, TFLOP/s": number(time.forward_flop_per_s, text.tera),
            "Backward, TFLOP/s": number(time.backward_flop_per_s, text.tera),
            "Both, mJ": number(time.energy_j and 1e3 * time.energy_j),
            "ok/planned": repetitions(time.configuration),
        }
        for time in measured
    ]
    note = ENERGY_NOTE if any(time.energy_j for time in measured) else ""
    return table_of("attention", "Attention alone", shown, note, text_columns=2)


def ratios(result: GroupResult) -> Table | None:
    """Return the table of each attention's speed-up over its peer."""
    found = [time for time in result.attention.times if time.speedups]
    shown = [
        {"Shape": word(time.configuration.shape), "Kernel": label(time.configuration)}
        | {way.capitalize(): speedup(time.speedups.get(way)) for way in ("forward", "backward", "both")}
        for time in found
    ]
    note = interval_note([ratio.n for time in found for ratio in time.speedups.values()]) if found else ""
    title = f"How many times as fast as {kernel_name(result.attention.peer or '')}"
    return table_of("attention_ratios", title, shown, note, text_columns=2)


def scaling_errors(result: GroupResult) -> Table | None:
    """Return the table of attention's errors with q scaled before or after QK^T."""
    shown = [
        {
            "Shape": word(found.configuration.shape),
            "Kernel": label(found.configuration),
            "Scaled before": number(median(found.before), text.scientific),
            "Scaled after": number(median(found.after), text.scientific),
            "SDPA": number(median(found.sdpa), text.scientific),
            "allclose": word({True: "yes", False: "no", None: ""}[found.allclose]),
            "Draws": Value(text=str(len(found.before) or text.MISSING), sort=len(found.before) or None),
        }
        for found in result.scaling_errors
    ]
    note = "Largest relative error against FP64, median over draws. allclose: SDPA against the manual formula."
    return table_of("numerics", "Error of attention by where q is scaled", shown, note, text_columns=2)


def heads(result: GroupResult) -> Table | None:
    """Return the table of heads, loss and both gradients: time, rate, memory beyond the operands, and energy."""
    times = result.alone["heads"].times
    shown = [
        {
            "Tokens x width x classes": word(time.sizes),
            "Head": _named(time),
            "ms": number(time.seconds, text.milliseconds),
            "Speed-up": speedup(time.speedup),
            "TFLOP/s": _rate(time, "flop"),
            "GiB": number(beyond_held(time.configuration.ok), text.gib),
            "J": number(_joules(time)),
            "ok/planned": repetitions(time.configuration),
        }
        for time in times
    ]
    notes = ["Speed-up: over the head of all the logits."]
    held = any(beyond_held(time.configuration.ok) for time in times)
    notes += ["GiB: at the peak, beyond x, W and targets."] if held else []
    return table_of("heads", "Heads alone", shown, _note(times, notes), 2)


def pieces(result: GroupResult) -> Table | None:
    """Return the table of norms and activations: time, rate and energy."""
    times = result.alone["pieces"].times
    shown = [
        {
            "Piece": word(time.part),
            "Tokens x width": word(time.sizes),
            "By": _named(time),
            "ms": number(time.seconds, text.milliseconds),
            "Speed-up": speedup(time.speedup),
            "TB/s": _rate(time, "bytes"),
            "mJ": number((joules := _joules(time)) and 1e3 * joules),
            "ok/planned": repetitions(time.configuration),
        }
        for time in times
    ]
    moved = "TB/s: of all operands, read once, and all results, written once, by the median call."
    notes = ["Speed-up: over the same in plain PyTorch, on a GPU compiled.", moved]
    return table_of("pieces", "Norms and activations alone", shown, _note(times, notes), 3)


def gemms(result: GroupResult) -> Table | None:
    """Return the table of GEMMs, D (M, N) = a (M, K) b (N, K)^T: time, rate and energy."""
    times = result.alone["gemms"].times
    shown = [
        {
            "GEMM": word(time.part),
            "M x N x K": word(time.sizes),
            "By": _named(time),
            "ms": number(time.seconds, text.milliseconds),
            "Speed-up": speedup(time.speedup),
            "TFLOP/s": _rate(time, "flop"),
            "mJ": number((joules := _joules(time)) and 1e3 * joules),
            "ok/planned": repetitions(time.configuration),
        }
        for time in times
    ]
    by: dict[str, list[float]] = {}
    for time in times:
        if time.speedup is not None:
            by.setdefault(f"{time.name}, {time.part}", []).append(time.speedup.value)
    means = [
        f"{name}: {text.speedup(mean)}, {len(ratios)} shapes."
        for name, ratios in by.items()
        if (mean := geometric_mean(ratios)) is not None
    ]
    notes = ["FP8 operands are E4M3, in gradients, too."]
    notes += ["Speed-up: over cuBLASLt. Geometric means over shapes, 95 %:", *means] if means else []
    return table_of("gemms", "GEMMs alone", shown, _note(times, notes), 3)


def _note(times: tuple[TimeAlone, ...], own: list[str]) -> str:
    pairs = [time.speedup.n for time in times if time.speedup is not None]
    notes = [interval_note(pairs)] if pairs else []
    notes += [*own, *([ENERGY_NOTE] if any(map(_joules, times)) else [])]
    return " ".join(notes)


def _joules(time: TimeAlone) -> float | None:
    return of_processes(time.configuration.ok, "energy_j")


def _rate(time: TimeAlone, work: str) -> Value:
    """Return TFLOP/s or TB/s."""
    found = finite(time.configuration.ok[0].work.get(work)) if time.seconds else None
    return number(found / time.seconds if found and time.seconds else None, text.tera)


def _named(time: TimeAlone) -> Value:
    one = time.configuration
    outcome = "" if one.outcome == "ok" else f" ({one.outcome})"
    return dataclasses.replace(word(f"{time.name}{outcome}"), detail=one.specification)
