"""The tables of the layer benchmark: its variants, and where the time of an iteration goes."""

from te_bench.reports.analysis.layers import LayerVariant, kind_of
from te_bench.reports.group_result import GroupResult
from te_bench.reports.page import text
from te_bench.reports.page.table import (
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

KERNELS_SHOWN = 8  # of a layer, the longest


def layer(result: GroupResult) -> list[Table | None]:
    """Time and memory of a transformer layer, a table for each variant."""
    return [_times(variant) for variant in result.layers]


def _times(variant: LayerVariant) -> Table | None:
    shown = [
        (
            label(step.cell, baseline=step.is_baseline),
            number(step.latency_s, text.milliseconds),
            speedup(step.speedup, "" if measured.comparable else " (another mask)"),
            rank(variant.ranking, step),
            number(step.flop_per_s, text.tera),
            number(step.peak_allocated or step.peak_rss, text.gib),
            number(step.peak_reserved, text.gib),
            repetitions(step.cell),
        )
        for measured in variant.layers
        for step in [measured.step]
    ]
    columns = ("Layer", "ms", "Speed-up", "Ranking", "TFLOP/s", "Peak, GiB", "Peak reserved, GiB", "ok/planned")
    notes = ["Forward and backward, geometric mean over runs of each run's median of 50 iterations."]
    if not variant.comparable:
        notes.append("Another mask: the layer computes another function, with half or twice the attention work.")
    notes += ranking_notes(variant.ranking, [measured.step for measured in variant.layers])
    return table_of("layer", f"One transformer layer, {variant.name}", columns, shown, " ".join(notes))


def kinds(result: GroupResult) -> list[Table | None]:
    """Where a layer's time goes, by kind of kernel."""
    return [_kinds(variant) for variant in result.layers]


def _kinds(variant: LayerVariant) -> Table | None:
    profiled = [measured for measured in variant.layers if measured.by_kind]
    shown = [
        (
            word(measured.step.cell.label),
            *(number(value, text.milliseconds) for value in measured.by_kind.values()),
            number(sum(measured.by_kind.values()), text.milliseconds),
            number(measured.step.latency_s, text.milliseconds),
            number(measured.gemm_flop_per_s, text.tera),
        )
        for measured in profiled
    ]
    columns = ("Layer", *(profiled[0].by_kind if profiled else ()), "Sum", "Measured", "GEMM, TFLOP/s")
    note = "Sums under the profiler; measured less sum: gaps, and clocks that sink under sustained load. "
    note += "Norms and casts: activations, fused kernels too. "
    note += "Written-out attention's products count as GEMM."
    return table_of("layer_kinds", f"Kernels by kind, {variant.name}, ms an iteration", columns, shown, note)


def kernels(result: GroupResult) -> list[Table | None]:
    """The longest kernels of the fastest layers: ours in FP8 and without, and the peers'."""
    return [
        table_of(
            "layer_kernels",
            f"The longest kernels, {variant.name}",
            ("Layer", "Kind", "Kernel", "ms"),
            [row for m in variant.compared for row in kernel_rows(m.step.cell, m.kernels, kind_of, KERNELS_SHOWN)],
            text_columns=3,
        )
        for variant in result.layers
    ]
