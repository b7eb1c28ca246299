"""The tables of the layer benchmark: its variants, and where the time of an iteration goes."""

from te_bench.reports.analysis import layers, ranking
from te_bench.reports.analysis.ranking import ranked
from te_bench.reports.analysis.rows import Group
from te_bench.reports.page import text
from te_bench.reports.page.table import Table, Value, interval_note, label, number, repetitions, table_of, word

KERNELS_SHOWN = 8  # of a layer, the longest


def layer(group: Group) -> list[Table]:
    """Time and memory of a transformer layer, a table for each variant."""
    tables = []
    for variant in layers.variants(group):
        shown = []
        standing = ranking.standing([rung for rung in variant.rungs if variant.comparable(rung)])
        for rung in variant.rungs:
            speedup = text.speedup(rung.speedup) + ("" if variant.comparable(rung) else " (another mask)")
            shown.append(
                (
                    label(rung.cell, baseline=rung.is_baseline),
                    number(rung.latency_s, text.milliseconds),
                    Value(text=speedup, sort=rung.speedup.value) if rung.speedup else word(None),
                    ranked(standing, rung),
                    number(rung.flop_per_s, text.tera),
                    number(rung.peak_allocated or rung.peak_rss, text.gib),
                    number(rung.peak_reserved, text.gib),
                    repetitions(rung.cell),
                )
            )
        columns = (
            "Layer",
            "ms",
            "Speed-up",
            ranking.COLUMN,
            "TFLOP/s",
            "Peak, GiB",
            "Peak reserved, GiB",
            "ok/planned",
        )
        notes = ["Forward and backward, geometric mean over runs of each run's median of 50 iterations."]
        if not all(variant.comparable(rung) for rung in variant.rungs):
            notes.append("Another mask: the layer computes another function, with half or twice the attention work.")
        pairs = [rung.speedup.n for rung in variant.rungs if rung.speedup and not rung.is_baseline]
        notes += [interval_note(pairs)] if pairs else []
        notes += standing.notes()
        table = table_of("layer", f"One transformer layer, {variant.name}", columns, shown, " ".join(notes))
        tables += [table] if table else []
    return tables


def kinds(group: Group) -> list[Table]:
    """Where a layer's time goes, by kind of kernel."""
    tables = []
    for variant in layers.variants(group):
        found = [(rung, seconds) for rung in variant.rungs if (seconds := layers.by_kind(rung.cell))]
        shown = [
            (
                word(rung.cell.label),
                *(number(value, text.milliseconds) for value in seconds.values()),
                number(sum(seconds.values()), text.milliseconds),
                number(rung.latency_s, text.milliseconds),
                number(layers.gemm_flop_per_s(rung.cell), text.tera),
            )
            for rung, seconds in found
        ]
        columns = ("Layer", *(found[0][1] if found else ()), "Sum", "Measured", "GEMM, TFLOP/s")
        note = "Sums under the profiler; measured less sum: gaps, and clocks that sink under sustained load. "
        note += "Norms and casts: activations, fused kernels too. "
        note += "Written-out attention's products count as GEMM."
        table = table_of("layer_kinds", f"Kernels by kind, {variant.name}, ms an iteration", columns, shown, note)
        tables += [table] if table else []
    return tables


def kernels(group: Group) -> list[Table]:
    """The longest kernels of the fastest layers: ours in FP8 and without, and the peers'."""
    tables = []
    for variant in layers.variants(group):
        shown = [
            (
                word(rung.cell.label),
                word(layers.kind(kernel)),
                word(text.shortened(kernel, 80)),
                number(seconds, text.milliseconds),
            )
            for rung in layers.compared(variant)
            for kernel, seconds in list(layers.kernels(rung.cell).items())[:KERNELS_SHOWN]
        ]
        columns = ("Layer", "Kind", "Kernel", "ms")
        caption = f"The longest kernels, {variant.name}"
        table = table_of("layer_kernels", caption, columns, shown, text_columns=3)
        tables += [table] if table else []
    return tables
