"""te-bench plan scaling --world N: predict a step's time on more GPUs than are here, by calculation."""

import json
import re
import statistics
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from te_bench.cli.options import Json, Once, integer, said, say

if TYPE_CHECKING:
    from te_bench.experiments.scaling.layout import Rate, Work
    from te_bench.experiments.scaling.one_gpu import Measured
    from te_bench.experiments.scaling.predict import Prediction

NAME = "scaling"
STEPS = ("train_step", "scaling")  # workloads
_LINK = re.compile(r"(\d+(?:\.\d+)?) ?([GT])([bB])/s")


class Plan(Once):
    """`plan`, or `scaling` below if the command line has an option that only `scaling` knows.

    Without one, `te-bench plan scaling` plans the suite of that name.
    """

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        other = _prediction()
        own = {name for parameter in other.params for name in parameter.opts}
        own -= {name for parameter in self.params for name in parameter.opts}
        if NAME in args and any(word.partition("=")[0] in own for word in args):
            place = args.index(NAME)
            rest = [*args[:place], *args[place + 1 :]]
            return other.make_context(f"{info_name} {NAME}", rest, parent=parent, **extra)
        return super().make_context(info_name, args, parent=parent, **extra)


def _prediction() -> Any:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(NAME)(scaling)
    return typer.main.get_command(app)


def scaling(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(help="A name of `te-bench list models`, or llama3-70b, llama3-405b, mpt-1b, mpt-13b, mpt-70b."),
    ] = "llama3-8b",
    world: Annotated[
        int, integer("Largest number of GPUs; the table has a row for each power of two.", 1, 2**17)
    ] = 1024,
    gpus_per_node: Annotated[int, integer("GPUs that share NVLink.", 1, 72)] = 8,
    link: Annotated[str, typer.Option(metavar="BANDWIDTH", help="Bandwidth of each GPU to other nodes.")] = "400Gb/s",
    parallel: Annotated[str, typer.Option(help="Mode: ddp, fsdp2, tp, fsdp2+tp or hsdp.")] = "fsdp2",
    tp: Annotated[int | None, integer("Ranks that share a layer under fsdp2+tp. Default: a node.", 1)] = None,
    async_tp: Annotated[
        bool, typer.Option("--async-tp", help="Tensor parallelism overlaps its communication with GEMMs.")
    ] = False,
    batch: Annotated[int, integer("Sequences in a micro-batch of each copy of the model.", 1, 2**20)] = 1,
    micro_batches: Annotated[int, integer("Micro-batches of a step, one after the other.", 1, 2**20)] = 1,
    tokens: Annotated[int | None, integer("Tokens of a sequence. Default: the model's longest.", 1, 2**20)] = None,
    precision: Annotated[str, typer.Option(help="bf16 or fp8.")] = "bf16",
    recompute: Annotated[
        str, typer.Option(help="Recomputed part of the forward pass: none, selective (half) or full.")
    ] = "none",
    gpu: Annotated[str, typer.Option(help="h100 or h200: its memory, and its measured speed.")] = "h200",
    measured: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Results of `speed` or `scaling` with the speed of one GPU."),
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="GLOB[,GLOB]", help="With --from: only trials whose name matches.")
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(help="TFLOP/s of one GPU over a whole step, instead of a measured step.")
    ] = None,
    validate: Annotated[
        bool, typer.Option("--validate", help="Predict nothing; compare the model with published figures.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Predict training throughput on more GPUs than are here."""
    from te_bench import plugins
    from te_bench.experiments.scaling import layout, shapes
    from te_bench.experiments.scaling.predict import predict

    if validate:
        others = said(context, *(name for name in context.params if name not in ("validate", "as_json")))
        if others:
            raise ValueError(f"--validate compares with published figures and takes no {others}: leave it out")
        _validate(as_json)
        return
    if parallel == "zero1":
        raise ValueError(
            "--parallel zero1 is not predicted: its communication after the update is not modelled. It sends gradients "
            "like ddp: give --parallel ddp, or fsdp2 if the states do not fit"
        )
    plugins.check("mode of parallelism", parallel, list(layout.MODES))
    plugins.check("precision", precision, list(layout.PRECISIONS))
    plugins.check("recompute", recompute, list(layout.RECOMPUTE))
    plugins.check("GPU", gpu, list(layout.GPUS))
    config = shapes.model(model, tokens)
    ranks = _tensor_ranks(parallel, tp, world, gpus_per_node)
    _fits(model, config.shape.groups, world, gpus_per_node, ranks, parallel, async_tp)
    work = layout.Work(
        config=config, batch=batch, precision=precision, micro_batches=micro_batches, recompute=recompute
    )
    rate, basis = _one_gpu(model, work, gpu, measured, only, tflops)
    over = partial(layout.Layout, mode=parallel, gpus_per_node=gpus_per_node, link=_bandwidth(link), sliced=async_tp)
    found = [
        predict(work, over(world=number, tp=min(number, ranks)), rate, layout.GPUS[gpu].memory)
        for number in _worlds(world, gpus_per_node, 1 if parallel == "tp" else ranks)
    ]
    if as_json:
        print(json.dumps({"one_gpu": basis, "rows": [_row(one, found[0]) for one in found]}, indent=2))
        return
    ways = f"{parallel}, TP {ranks}" if parallel == "fsdp2+tp" else parallel
    name = layout.GPUS[gpu].name
    _show(f"{model}, {batch} x {config.block_size} tokens, {precision}, {ways}, {name}, {link} a GPU", found, basis)


def _show(title: str, found: "list[Prediction]", basis: str) -> None:
    from te_bench.experiments.scaling import published
    from te_bench.reports.page import scaling_tables, tables

    table = scaling_tables.predictions(found, found[0], title)
    print("\n".join([title, *tables.terminal(table)]))
    say(f"One GPU: {basis}.")
    say(table.note)
    say(f"Against published figures (--validate): {scaling_tables.said(published.validate())}")


def _validate(as_json: bool) -> None:
    from te_bench.experiments.scaling import published
    from te_bench.reports.page import scaling_tables, tables

    found = published.validate()
    if as_json:
        rows = [
            {"family": one.family.name, "source": one.family.source, "what": one.figure.what}
            | {"world": one.figure.layout.world, "published": one.figure.tokens_per_second}
            | {name: getattr(one, name) for name in ("predicted", "error", "kind", "efficiency")}
            for one in found
        ]
        print(json.dumps(rows, indent=2))
        return
    table = scaling_tables.published(found)
    print("\n".join(tables.terminal(table)))
    say(table.note)
    for family in published.FAMILIES:
        peak = 100 * next(one.efficiency for one in found if one.family is family)
        say(f"{family.name}: {peak:.1f} % of the peak, fitted on the first row. {family.source}", indent="    ")


def _row(one: "Prediction", alone: "Prediction") -> dict[str, Any]:
    return {
        "world": one.layout.world,
        "step_s": one.seconds,
        "tokens_per_s_per_gpu": one.tokens_per_second,
        "efficiency": one.tokens_per_second / alone.tokens_per_second,
        "compute_s": one.compute_s,
        "communication_s": one.communication_s,
        "exposed_s": one.exposed_s,
        "sent_bytes": one.sent,
        "memory_bytes": dict(one.memory),
        "bound": one.bound,
    }


def _bandwidth(link: str) -> float:
    """Return bytes per second. Raise ValueError for anything else."""
    found = _LINK.fullmatch(link.strip())
    if not found or not float(found[1]):
        raise ValueError(f"--link {link}: give the bandwidth of one GPU to other nodes, such as 400Gb/s or 50GB/s")
    return float(found[1]) * {"G": 1e9, "T": 1e12}[found[2]] / (8 if found[3] == "b" else 1)


def _tensor_ranks(parallel: str, tp: int | None, world: int, gpus_per_node: int) -> int:
    if parallel == "tp":
        if tp not in (None, world):
            raise ValueError(f"--tp {tp}: under --parallel tp all of --world {world} share a layer; leave it out")
        return world
    if parallel == "fsdp2+tp":
        return min(gpus_per_node, world) if tp is None else tp
    if tp is not None:
        raise ValueError(f"--tp {tp} goes with --parallel fsdp2+tp; {parallel} cuts no layer")
    return 1


def _fits(model: str, groups: int, world: int, gpus_per_node: int, tp: int, parallel: str, async_tp: bool) -> None:
    """Raise ValueError for an impossible layout."""
    if world > gpus_per_node and world % gpus_per_node:
        raise ValueError(f"--world {world} is no multiple of --gpus-per-node {gpus_per_node}: give whole nodes")
    if async_tp and parallel not in ("tp", "fsdp2+tp"):
        raise ValueError(f"--async-tp goes with --parallel tp or fsdp2+tp; {parallel} cuts no layer")
    cut = f"--parallel tp --world {tp}" if parallel == "tp" else f"--tp {tp}"
    if tp > gpus_per_node:
        raise ValueError(
            f"{cut} is more than --gpus-per-node {gpus_per_node}: a layer's collectives over nodes are not predicted, "
            "use fsdp2+tp with a --tp within a node"
        )
    for what, number in (
        (f"the {groups} groups of keys and values of {model}", groups),
        (f"--world {world}", world),
        (f"--gpus-per-node {gpus_per_node}", gpus_per_node),
    ):
        if number % tp and not (parallel == "tp" and number == gpus_per_node):
            raise ValueError(f"{cut} does not divide {what}: give a divisor")


def _worlds(world: int, gpus_per_node: int, tp: int) -> list[int]:
    """Return 1, then powers of two within a node, or of nodes, up to the world."""
    start = gpus_per_node if world > gpus_per_node else 2
    doubled = [start << i for i in range(world.bit_length()) if start << i < world]
    return [1, *(number for number in doubled if number % tp == 0), *([world] if world > 1 else [])]


def _one_gpu(
    model: str, work: "Work", gpu: str, measured: Path | None, only: str | None, tflops: float | None
) -> "tuple[Rate, str]":
    from te_bench.experiments.scaling import layout, one_gpu

    precision = work.precision
    if measured is not None and tflops is not None:
        raise ValueError("--from and --tflops both give the speed of one GPU: give one of them")
    if only is not None and measured is None:
        raise ValueError(f"--only {only} chooses among the trials of --from DIR: give that, too")
    if tflops is not None:
        peak = layout.GPUS[gpu].peak(precision) / one_gpu.TERA
        if not 0 < tflops <= peak:
            raise ValueError(
                f"--tflops {tflops:g}: give more than 0 and at most the {peak:.4g} of an {gpu} in {precision}"
            )
        return one_gpu.stated(tflops), f"{tflops:g} TFLOP/s over a whole step without its update, as given"
    steps = [one_gpu.KNOWN[gpu, precision]] if measured is None else _recorded(measured, only)
    chosen = one_gpu.nearest(steps, model, precision)
    if chosen is None:
        what = f" like {only}" if only else ""
        raise ValueError(
            f"{measured} holds no training step in {precision}{what} on one GPU that ended ok: run te-bench run speed "
            f"--model {model}, or give --tflops"
        )
    asked = (model, work.batch, work.config.block_size)
    scaled = "" if asked == (chosen.model, chosen.batch, chosen.tokens) else ", scaled to the asked step by FLOP"
    return chosen.rate, chosen.said + scaled


def _recorded(directory: Path, only: str | None) -> "list[Measured]":
    """Return the steps of one GPU in a journal, by their median time."""
    from te_bench.experiments import spec, store
    from te_bench.experiments.scaling import layout, one_gpu, shapes
    from te_bench.reports.analysis.measures import seconds_of

    journal = store.load(directory)
    known = shapes.known()
    found = []
    for record in journal.records.values():
        trial, times = record.trial, seconds_of(record, "latency_s")
        alone = trial.workload in STEPS and trial.device == "cuda" and not trial.problem.get("parallel")
        if not (alone and times and record.outcome == "ok" and spec.matches(trial.name, only)):
            continue
        name, batch, tokens = (trial.problem.get(key) for key in ("model", "batch", "block"))
        if name not in known or trial.precision not in layout.PRECISIONS:
            continue
        gpu = journal.environments[record.environment]["identity"].get("gpu")
        asked: dict[str, Any] = {"model": name, "batch": batch, "tokens": tokens, "precision": trial.precision}
        how = f"{trial.name} of {directory} on one {gpu}"
        found.append(one_gpu.Measured(**asked, seconds=statistics.median(times), how=how))
    return found
