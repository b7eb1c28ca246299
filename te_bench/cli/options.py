"""The options that verbs share, and what they mean: spec.Options and the GPUs to run on."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from te_bench.experiments.spec import Experiment, Options

Suite = Annotated[str, typer.Argument(help="A suite's name; `te-bench list suites` shows them.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda where there is a GPU.")]
Only = Annotated[str | None, typer.Option(metavar="GLOB", help="Only trials whose name matches, e.g. '*/flash/*'.")]
Seeds = Annotated[int | None, typer.Option(help="Repetitions of every trial. Default: the suite's own number.")]
Data = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[MODEL=]SPEC", help="Data set to train on: stdlib, text:PATH, hf:NAME[:CONFIG][:COLUMN], random."
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="90s, 30m or 2h: of each time-budget trial; of a whole convergence run, whose seeds it decides.",
    ),
]
Model = Annotated[str | None, typer.Option(help="Model to train, where the suite lets you; `te-bench list models`.")]
Batch = Annotated[int | None, typer.Option(help="Sequences of a training step, where the suite lets you.")]
Recipes = Annotated[str | None, typer.Option(metavar="A,B", help="FP8 recipes to judge; `te-bench list recipes`.")]
Preset = Annotated[
    str | None, typer.Option(help="A suite's named settings: cpu, char, gpt2, gpt2-low-rate, gpt2-short.")
]
Steps = Annotated[int | None, typer.Option(help="Training steps of each run.")]
Tokens = Annotated[int | None, typer.Option(help="Training tokens of each run, in place of --steps.")]
Margin = Annotated[float | None, typer.Option(metavar="NATS", help="Largest gap in final loss that counts as none.")]
Alpha = Annotated[float | None, typer.Option(help="Error rate of the verdict's tests. Default: 0.05.")]
StopEarly = Annotated[
    bool, typer.Option("--stop-early", help="Spare configurations the seeds that a sequential test no longer needs.")
]
Fused = Annotated[
    bool, typer.Option("--fused", help="Judge each recipe's fused step too, with a bf16 and with an FP8 head.")
]
Share = Annotated[
    int | None,
    typer.Option(min=1, max=16, help="Trials at a time on each GPU, where losses are judged and no times."),
]
Timings = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Results, of a pilot say, that tell how long steps take and seeds vary."),
]
Cache = Annotated[Path | None, typer.Option(metavar="DIR", help="Where token files are cached.")]
Gpus = Annotated[
    str | None,
    typer.Option(help="Indices such as 0,1, as in nvidia-smi, or all: one trial on each at a time, or --share."),
]
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


#: Arguments of verbs that are fields of Options as they are.
_AS_THEY_ARE = ("seeds", "cache", "model", "batch", "preset", "steps", "tokens", "margin", "alpha", "share")


def options(given: Mapping[str, Any]) -> "Options":
    """The suite's options among a verb's arguments, which are its `locals()`; what is no option of a suite is left alone."""
    from te_bench.experiments import environment
    from te_bench.experiments.spec import Options

    budget, recipes = given.get("budget"), given.get("recipes")
    return Options(
        device=given.get("device") or environment.default_device(),
        data=data_sets(given.get("data") or []),
        budget_s=None if budget is None else seconds(budget),
        recipes=None if recipes is None else tuple(name.strip() for name in recipes.split(",") if name.strip()),
        stop_early=given.get("stop_early") or None,
        fused=given.get("fused") or None,
        **{name: given.get(name) for name in _AS_THEY_ARE},
    )


def seconds(budget: str) -> float:
    """Seconds of a --budget: 90, 90s, 30m or 2h. Raises ValueError for anything else, and for no time at all."""
    text = budget.strip()
    unit = _UNITS.get(text[-1:].lower())
    try:
        value = float(text[:-1] if unit else text) * (unit or 1.0)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:  # nor is NaN
        raise ValueError(f"--budget {budget}: give a time greater than 0: 90 or 90s, 30m, 2h")
    return value


def data_sets(specs: list[str]) -> dict[str, str]:
    """{model or "": data set} of the --data options; MODEL= is recognised by the sign before any colon.

    Raises ValueError for a model that is given two.
    """
    chosen: dict[str, str] = {}
    for spec in specs:
        head = spec.split(":", 1)[0]
        model, _, name = spec.partition("=") if "=" in head else ("", "", spec)
        if model in chosen:
            whose = f"the model {model}" if model else "every model"
            raise ValueError(f"--data {spec}: {whose} has the data set {chosen[model]} already; give each model one")
        chosen[model] = name
    return chosen


def resolve(suite: str, only: str | None, options: "Options") -> "Experiment":
    from te_bench.experiments import plan

    return plan.resolve(suite, options, only=only)


def find_gpus(device: str, gpus: str | None) -> list[dict[str, Any]]:
    """The GPUs to run on, [] on a CPU. Raises ValueError for GPUs that are not here or that torch can't use."""
    from te_bench.experiments import environment

    if device != "cuda":
        if gpus is not None:
            raise ValueError(f"--gpus {gpus}: this run is on the {device}; leave it out, or add --device cuda")
        return []
    here = {str(gpu["index"]): gpu for gpu in environment.nvidia_gpus()}
    if not here:
        raise ValueError(
            "--device cuda: the NVIDIA driver reports no GPU here. Use --device cpu; `te-bench doctor` says more."
        )
    if why := environment.no_cuda():
        raise ValueError(f"--device cuda: {why}")
    if gpus in (None, "all"):
        if visible := environment.visible_gpus():
            return visible
        listed = os.environ["CUDA_VISIBLE_DEVICES"]
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={listed!r} leaves no GPU; unset it, or choose with --gpus or --device cpu"
        )
    wanted = [index.strip() for index in gpus.split(",")]
    if set(wanted) - set(here) or len(set(wanted)) < len(wanted):
        raise ValueError(f"--gpus {gpus}: the GPUs here are {', '.join(here)}; write all, or each index once")
    return [here[index] for index in wanted]
