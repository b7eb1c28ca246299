"""Every figure of a group of records, in the order of the report."""

from collections.abc import Callable

from matplotlib.figure import Figure

from te_bench.reports.analysis import curves
from te_bench.reports.analysis.rows import Group, printable
from te_bench.reports.page import (
    figures,
    floor_figures,
    layer_figures,
    loss_figures,
    text,
    verdict_figures,
    verdict_tables,
)


def of_group(group: Group, suffix: str) -> list[figures.Drawing]:
    """Every figure of a group; names end in `suffix`, which sets groups apart."""
    where = f"{group.title} on {group.where}"
    builders: list[tuple[str, str, Callable[[], Figure] | None]] = [
        ("ladder", "Time per training step", figures.ladder(group)),
        ("memory", "Peak memory of a training step", figures.memory(group)),
        ("floor_kinds", "The step and its floor by kind of kernel", floor_figures.against_floor(group)),
        ("max_batch", "Largest batch that fits", figures.max_batch(group)),
        ("attention_forward", "Attention forward", figures.attention(group, "forward")),
        ("attention_backward", "Attention backward", figures.attention(group, "backward")),
        ("numerics", "Error of attention by where q is scaled", figures.numerics(group)),
    ]
    for number, comparison in enumerate(curves.comparisons(group), start=1):
        place = "" if number == 1 else f"-{number}"
        builders.append(
            (f"loss_step{place}", f"Loss against step: {comparison.title}", loss_figures.losses(comparison, "step"))
        )
        if comparison.timed:
            by_time = loss_figures.losses(comparison, "time_s")
            builders.append((f"loss_time{place}", f"Loss against time: {comparison.title}", by_time))
    for number, (variant, build) in enumerate(layer_figures.breakdowns(group), start=1):
        place = "" if number == 1 else f"-{number}"
        builders.append((f"layer_time{place}", f"Time of a transformer layer by kind of kernel, {variant}", build))
    builders += _verdicts(group)
    return [
        figures.draw(kind + suffix, kind.split("-")[0], printable(caption), printable(where), build)
        for kind, caption, build in builders
        if build
    ]


def _verdicts(group: Group) -> list[tuple[str, str, Callable[[], Figure] | None]]:
    """The figures of each convergence study, and the numerics of each of its FP8 arms."""
    found: list[tuple[str, str, Callable[[], Figure] | None]] = []
    for number, study in enumerate(verdict_tables.of_group(group), start=1):
        place, title = "" if number == 1 else f"-{number}", study.study.title
        found.append((f"verdict_forest{place}", f"Final gaps against bf16: {title}", verdict_figures.forest(study)))
        found.append((f"verdict_gap{place}", f"Gap against bf16 by step: {title}", verdict_figures.gap_curves(study)))
        found.append((f"verdict_spikes{place}", f"Spikes and divergences: {title}", verdict_figures.spikes(study)))
        for arm in study.study.recipes:
            caption = f"FP8 numerics over the training, {arm.name}: {title}"
            found.append((f"verdict_numerics-{text.slug(arm.name)}{place}", caption, verdict_figures.numerics(arm)))
    return found
