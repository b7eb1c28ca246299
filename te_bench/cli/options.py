"""Options that commands share: those of a run, declared in experiments.run_options, and the GPUs to run on."""

import inspect
import math
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from te_bench.experiments.run_options import OPTIONS, Options, between, fewer_bits, read
from te_bench.reports.page import screen


class Once(TyperCommand):
    """A command that refuses a repeated option of comma-separated values, of which click would silently take the last.

    Raise ValueError. Other options may be repeated; the last one wins.
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        *_, given = self.make_parser(ctx).parse_args(args=list(args))
        for option in given:
            if isinstance(option, TyperOption) and "," in (option.metavar or "") and given.count(option) > 1:
                raise ValueError(f"{option.opts[-1]} is given twice: give it once, its values between commas")
        return super().parse_args(ctx, args)


def _said(name: str) -> Any:
    """Return Typer's declaration of an option of a run."""
    option = OPTIONS[name]
    return typer.Option(option.flag, help=option.help, metavar=option.metavar)


def integer(help: str, least: int, most: float = math.inf) -> Any:
    """Return Typer's declaration of an integer option within a range."""
    check = between(least, most)

    def of_it(parameter: typer.CallbackParam, value: int | None) -> int | None:
        if value is not None:
            check(parameter.opts[-1], value)
        return value

    return typer.Option(help=help, callback=of_it)


def _some_time(seconds: float) -> float:
    if not 0 < seconds < math.inf:  # also refuses NaN
        raise ValueError(f"--timeout {seconds:g}: give seconds greater than 0")
    return seconds


Suite = Annotated[str, typer.Argument(help="A suite's name; `te-bench list suites` shows them.")]
Device = Annotated[str | None, _said("device")]
Data = Annotated[list[str] | None, _said("data")]
Cache = Annotated[Path | None, _said("cache")]
Margin = Annotated[float | None, _said("margin")]
Alpha = Annotated[float | None, _said("alpha")]
_ONLY = "Only trials whose name matches, such as '*/flash/*' or '*-liger/*,*/bf16/*'."
Only = Annotated[str | None, typer.Option(metavar="GLOB[,GLOB]", help=_ONLY)]
Timings = Annotated[
    list[Path] | None,
    typer.Option(
        "--pilot",
        metavar="DIR",
        help="Earlier results that tell the time of a step and the spread of runs; their means stay hidden.",
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        metavar="I,J",
        help="GPUs, by index as in nvidia-smi: 0,1 or all. Each runs one trial at a time, unless `run` has --share.",
    ),
]
_ON = "Run trials on the hosts of a Ray cluster; without a cluster, te-bench starts one here for the run."
On = Annotated[str | None, typer.Option(metavar="ray", help=_ON)]
RayAddress = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Ray cluster of --on ray. Default: the one that runs here, if any."),
]
_WITHIN = (
    "Begin only trials that end within this time, such as 20min; the same command runs the others later. A trial of unknown "
    "duration may begin; 0s begins none."
)
Within = Annotated[str | None, typer.Option(metavar="TIME", help=_WITHIN)]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="Time limit of one trial.", callback=_some_time)]
Fresh = Annotated[bool, typer.Option("--fresh", help="Set earlier results in DIR aside and start again.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def with_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command: replace its parameter `asked`, an Options, with one parameter for each option of a run."""
    own = inspect.signature(verb)
    first, *others = [parameter for name, parameter in own.parameters.items() if name != "asked"]
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if option.type is bool else None,
            annotation=Annotated[bool if option.type is bool else option.type | None, _said(name)],
        )
        for name, option in OPTIONS.items()
    ]
    others = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in others]

    def take(**given: Any) -> None:
        from te_bench.experiments import environment

        said = {name: given.pop(name) for name in OPTIONS}
        verb(asked=read(said, said["device"] or environment.default_device()), **given)

    take.__name__, take.__doc__, take.__module__ = verb.__name__, verb.__doc__, verb.__module__
    take.__signature__ = own.replace(parameters=[first, *options, *others])  # type: ignore[attr-defined]
    take.__annotations__ = {}
    return take


def results_of(suite: str, asked: Options, out: Path | None) -> Path:
    """Return the directory of a run's results. A report compares all results in a directory, so each study has its own."""
    if out is not None:
        return out
    words = [suite]
    if asked.model is not None:
        path = Path(asked.model)
        folder = path.resolve().parent if path.name == "config.json" else path.resolve()
        name = folder.name if path.exists() else asked.model.rpartition("/")[2]
        words.append(re.sub(r"[^A-Za-z0-9._-]", "-", name))
    return Path("runs") / "-".join([*words, *(f"{name}-{value}" for name, value in fewer_bits(asked).items())])


def said(context: typer.Context, *names: str) -> str:
    """Return those of the options that the command line gives, such as "--head, --exitfirst"; "" for none."""
    options = {option.name: option.opts[-1] for option in context.command.params}
    given = [name for name in names if str(context.get_parameter_source(name)).endswith("COMMANDLINE")]
    return ", ".join(options[name] for name in given)


def again(*without: str) -> str:
    """Return this command for another time: without --fresh, which would set aside what it has measured, and `without`."""
    return f"te-bench {shlex.join(word for word in sys.argv[1:] if word not in ('--fresh', *without))}"


def say(sentence: str, indent: str = "") -> None:
    """Print a sentence wrapped to the terminal, at most to the reports' width; lines after the first are indented."""
    width = screen.columns(screen.WIDTH)
    print("\n".join(textwrap.wrap(sentence, width, subsequent_indent=indent, break_on_hyphens=False)))


def warn(line: str) -> None:
    """Print a line to stderr at once."""
    print(line, file=sys.stderr, flush=True)


def check_on(on: str | None, ray_address: str | None, gpus: str | None) -> None:
    """Raise ValueError for a place other than Ray, and for options that do not fit it."""
    if on not in (None, "ray"):
        raise ValueError(f"--on {on}: trials run here, or on a Ray cluster: leave it out, or give --on ray")
    if on is None and ray_address is not None:
        raise ValueError(f"--ray-address {ray_address}: it goes with --on ray; add that, or leave it out")
    if on is not None and gpus is not None:
        raise ValueError(f"--gpus {gpus}: with --on ray the cluster says which GPUs there are; leave it out")


def find_gpus(device: str, gpus: str | None) -> list[dict[str, Any]]:
    """Return the GPUs to run on, [] on a CPU. Raise ValueError for GPUs that are not here or that torch cannot use."""
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
        if why := environment.names_mig():
            raise ValueError(why)
        listed = os.environ["CUDA_VISIBLE_DEVICES"]
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={listed!r} leaves no GPU; unset it, or choose with --gpus or --device cpu"
        )
    indices = [index.strip() for index in gpus.split(",")]
    if set(indices) - set(here) or len(set(indices)) < len(indices):
        raise ValueError(f"--gpus {gpus}: the GPUs here are {', '.join(here)}; write all, or each index once")
    return [here[index] for index in indices]


def places(gpus: list[str], per_trial: int | None) -> list[str]:
    """Return the GPUs in sets of `per_trial`, in the form of CUDA_VISIBLE_DEVICES; a remainder stays idle.

    Raise ValueError if there are too few GPUs for one set.
    """
    size = per_trial or 1
    if 0 < len(gpus) < size:
        raise ValueError(f"--gpus-per-trial {size}: only {len(gpus)} GPUs are here; give fewer, or --device cpu")
    return [",".join(gpus[first : first + size]) for first in range(0, len(gpus) - size + 1, size)]
