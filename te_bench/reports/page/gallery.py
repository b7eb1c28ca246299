"""Draw every figure of a group, in the order of the report."""

from matplotlib.figure import Figure

from te_bench.reports.analysis.rows import Group, printable
from te_bench.reports.group_result import GroupResult
from te_bench.reports.page import (
    attention_figures,
    equal_loss,
    loss_figures,
    scaled_figures,
    step_figures,
    text,
    verdict_figures,
)
from te_bench.reports.page.drawing import Drawing, draw, styled

Named = tuple[str, str, Figure | None]  # name, caption


@styled
def figures_of(result: GroupResult, suffix: str) -> list[Drawing]:
    """Return every figure of a group; names end in `suffix`, which distinguishes groups."""
    figures: list[Named] = [
        ("ladder", "Time per training step", step_figures.ladder(result)),
        ("memory", "Peak memory of a training step", step_figures.memory(result)),
        ("scaling", "Tokens a second of each GPU, and its efficiency", scaled_figures.throughput(result)),
        ("floor_kinds", "The step and its floor by kind of kernel", step_figures.against_floor(result)),
        ("max_batch", "Largest batch that fits", step_figures.largest_batch(result)),
        *_attention(result),
        ("numerics", "Error of attention by where q is scaled", attention_figures.scaling_errors(result)),
        *_ladders(result),
        *_losses(result),
        *_layers(result),
        *_verdicts(result),
    ]
    return [
        draw(kind + suffix, kind.split("-")[0], printable(caption), printable(_alt(caption, result.group)), figure)
        for kind, caption, figure in figures
        if figure
    ]


def _alt(caption: str, group: Group) -> str:
    """Return the caption with the group's title, if neither says what the other does, and with where it ran."""
    title = group.title.removeprefix(f"{caption}: ")
    return f"{caption}, on {group.where}" if ": " in caption else f"{caption}: {title} on {group.where}"


def _attention(result: GroupResult) -> list[Named]:
    return [
        (f"attention{_place(number)}", f"Fastest attention first, both passes: {family}", figure)
        for number, (family, figure) in enumerate(attention_figures.times(result).items(), start=1)
    ]


def _ladders(result: GroupResult) -> list[Named]:
    return [
        (f"stress{_place(number)}", f"Final loss against learning rate: {ladder.title}", loss_figures.finals(ladder))
        for number, ladder in enumerate(result.stress, start=1)
    ]


def _losses(result: GroupResult) -> list[Named]:
    found: list[Named] = []
    for number, comparison in enumerate(result.trainings, start=1):
        place, title = _place(number), comparison.title
        found.append((f"loss_step{place}", f"Loss against step: {title}", loss_figures.losses(comparison, "step")))
        if comparison.timed:
            by_time = loss_figures.losses(comparison, "time_s")
            found.append((f"loss_time{place}", f"Loss against time: {title}", by_time))
    return found


def _layers(result: GroupResult) -> list[Named]:
    drawn = [(one.name, figure) for one in result.layers if (figure := step_figures.layer_times(one.layers))]
    return [
        (f"layer_time{_place(number)}", f"Time of a transformer layer by kind of kernel, {name}", figure)
        for number, (name, figure) in enumerate(drawn, start=1)
    ]


def _verdicts(result: GroupResult) -> list[Named]:
    """Return the figures of each convergence study, and the numerics of each of its FP8 configurations."""
    found: list[Named] = []
    for number, verdict in enumerate(result.studies, start=1):
        place, title, like = _place(number), verdict.study.title, verdict.study.reference
        found.append((f"verdict_forest{place}", f"Final gaps against {like}: {title}", verdict_figures.forest(verdict)))
        found.append((f"verdict_time{place}", f"Time to equal loss: {title}", equal_loss.figure(verdict)))
        found.append(
            (f"verdict_gap{place}", f"Gap against {like} by step: {title}", verdict_figures.gap_curves(verdict))
        )
        found.append((f"verdict_spikes{place}", f"Spikes and divergences: {title}", verdict_figures.spikes(verdict)))
        for arm in verdict.study.recipes:
            caption = f"FP8 numerics over the training, {arm.name}: {title}"
            found.append((f"verdict_numerics-{text.slug(arm.name)}{place}", caption, verdict_figures.numerics(arm)))
    return found


def _place(number: int) -> str:
    """Return the suffix that distinguishes figures of a kind; "" for the first."""
    return "" if number == 1 else f"-{number}"
