"""Make the tables of the layer benchmark: its variants, and the time of each kernel in an iteration."""

from te_bench.reports.analysis.layers import LayerVariant, kind_of
from te_bench.reports.analysis.measures import beyond_held
from te_bench.reports.page import text
from te_bench.reports.page.table import (
    ENERGY_NOTE,
    Table,
    kernel_rows,
    label,
    number,
    rank,
    ranking_notes,
    repetitions,
    speedup,
    table_of,
    word,
)

KERNELS_SHOWN = 8  # the longest of a layer


def times(variant: LayerVariant) -> Table | None:
    """Return the table of a variant's layers: time, energy and memory."""
    counted = any(measured.step.energy_j for measured in variant.layers)
    shown = [
        {
            "Layer": label(step.configuration, baseline=step.is_baseline),
            "ms": number(step.latency_s, text.milliseconds),
            "Speed-up": speedup(step.speedup, "" if measured.comparable else " (another mask)"),
            "Ranking": rank(variant.ranking, step),
            **({"J": number(step.energy_j)} if counted else {}),
            "TFLOP/s": number(step.flop_per_s, text.tera),
            "Peak, GiB": number(step.peak_allocated or step.peak_rss, text.gib),
            "Activations, GiB": number(beyond_held(step.configuration.ok), text.gib),
            "Peak reserved, GiB": number(step.peak_reserved, text.gib),
            "ok/planned": repetitions(step.configuration),
        }
        for measured in variant.layers
        for step in [measured.step]
    ]
    held = any("held_bytes" in record.work for measured in variant.layers for record in measured.step.configuration.ok)
    notes = ["Forward and backward, geometric mean over runs of each run's median of 50 iterations."]
    if not variant.comparable:
        notes.append("Another mask: the layer computes another function, with half or twice the attention work.")
    notes += ["Activations: at the peak, beyond weights, gradients, x and dy."] if held else []
    notes += [ENERGY_NOTE] if counted else []
    notes += ranking_notes(variant.ranking, [measured.step for measured in variant.layers])
    return table_of("layer", f"One transformer layer, {variant.name}", shown, " ".join(notes))


def kinds(variant: LayerVariant) -> Table | None:
    """Return the table of layers' time by kind of kernel."""
    shown = [
        {
            "Layer": word(measured.step.configuration.label),
            **{kind: number(value, text.milliseconds) for kind, value in measured.by_kind.items()},
            "Sum": number(sum(measured.by_kind.values()), text.milliseconds),
            "Measured": number(measured.step.latency_s, text.milliseconds),
            "GEMM, TFLOP/s": number(measured.gemm_flop_per_s, text.tera),
        }
        for measured in variant.layers
        if measured.by_kind
    ]
    note = "Sums under the profiler; measured less sum: gaps, and clocks that sink under sustained load. "
    note += "Norms and casts: activations, fused kernels too. "
    note += "Written-out attention's products count as GEMM."
    return table_of("layer_kinds", f"Kernels by kind, {variant.name}, ms an iteration", shown, note)


def kernels(variant: LayerVariant) -> Table | None:
    """Return the longest kernels of the fastest layers: te-bench's with and without FP8, and the peers'."""
    shown = [
        row
        for measured in variant.compared
        for row in kernel_rows(measured.step.configuration, measured.kernels, kind_of, KERNELS_SHOWN, ("Layer", "ms"))
    ]
    return table_of("layer_kernels", f"The longest kernels, {variant.name}", shown, text_columns=3)
