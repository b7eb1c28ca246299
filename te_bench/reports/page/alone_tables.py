"""The tables of parts of a step alone: heads, norms and activations, each beside its baseline at the same shape."""

import dataclasses

from te_bench.reports.analysis.alone import TimeAlone
from te_bench.reports.analysis.measures import beyond_held, finite, of_processes
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


def heads(result: GroupResult) -> Table | None:
    """Time, rate, memory beyond the operands and energy of each head, loss and both gradients."""
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
    """Time, rate and energy of each norm and activation."""
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


def _note(times: tuple[TimeAlone, ...], own: list[str]) -> str:
    pairs = [time.speedup.n for time in times if time.speedup is not None]
    notes = [interval_note(pairs)] if pairs else []
    notes += [*own, *([ENERGY_NOTE] if any(map(_joules, times)) else [])]
    return " ".join(notes)


def _joules(time: TimeAlone) -> float | None:
    return of_processes(time.configuration.ok, "energy_j")


def _rate(time: TimeAlone, work: str) -> Value:
    """TFLOP/s or TB/s."""
    found = finite(time.configuration.ok[0].work.get(work)) if time.seconds else None
    return number(found / time.seconds if found and time.seconds else None, text.tera)


def _named(time: TimeAlone) -> Value:
    one = time.configuration
    outcome = "" if one.outcome == "ok" else f" ({one.outcome})"
    return dataclasses.replace(word(f"{time.name}{outcome}"), detail=one.specification)
