"""Every figure of a group of records, in the order of the report."""

from collections.abc import Callable

from matplotlib.figure import Figure

from te_bench.reports import curves, figures, layer_figures
from te_bench.reports.rows import Group, printable


def of_group(group: Group, suffix: str) -> list[figures.Drawing]:
    """Every figure of a group; names end in `suffix`, which sets groups apart."""
    where = f"{group.title} on {group.where}"
    builders: list[tuple[str, str, Callable[[], Figure] | None]] = [
        ("ladder", "Time per training step", figures.ladder(group)),
        ("memory", "Peak memory of a training step", figures.memory(group)),
        ("max_batch", "Largest batch that fits", figures.max_batch(group)),
        ("attention_forward", "Attention forward", figures.attention(group, "forward")),
        ("attention_backward", "Attention backward", figures.attention(group, "backward")),
        ("numerics", "Error of attention by where q is scaled", figures.numerics(group)),
    ]
    for number, comparison in enumerate(curves.comparisons(group), start=1):
        place = "" if number == 1 else f"-{number}"
        builders.append(
            (f"loss_step{place}", f"Loss against step: {comparison.title}", figures.losses(comparison, "step"))
        )
        builders.append(
            (f"loss_time{place}", f"Loss against time: {comparison.title}", figures.losses(comparison, "time_s"))
        )
    for number, (variant, build) in enumerate(layer_figures.breakdowns(group), start=1):
        place = "" if number == 1 else f"-{number}"
        builders.append((f"layer_time{place}", f"Time of a transformer layer by kind of kernel, {variant}", build))
    return [
        figures.draw(kind + suffix, kind.split("-")[0], printable(caption), printable(where), build)
        for kind, caption, build in builders
        if build
    ]
