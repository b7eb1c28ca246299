"""The options that verbs share: those of a run, as experiments.run_options declares them, and the GPUs to run on."""

import inspect
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from te_bench.experiments.run_options import OPTIONS, Options, between, fewer_bits, read


class Once(TyperCommand):
    """A command that refuses an option of values between commas given twice, of which click takes the last in silence.

    Raises ValueError. An option of one value may be given again, and then has the last.
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        *_, given = self.make_parser(ctx).parse_args(args=list(args))
        for option in given:
            if isinstance(option, TyperOption) and "," in (option.metavar or "") and given.count(option) > 1:
                raise ValueError(f"{option.opts[-1]} is given twice: give it once, its values between commas")
        return super().parse_args(ctx, args)


def _said(name: str) -> Any:
    """Typer's word for an option of a run."""
    option = OPTIONS[name]
    return typer.Option(option.flag, help=option.help, metavar=option.metavar)


def integer(help: str, least: int, most: float = math.inf) -> Any:
    """Typer's word for a verb's own option of whole numbers in such a range."""
    check = between(least, most)

    def of_it(parameter: typer.CallbackParam, value: int | None) -> int | None:
        if value is not None:
            check(parameter.opts[-1], value)
        return value

    return typer.Option(help=help, callback=of_it)


def _some_time(seconds: float) -> float:
    if not 0 < seconds < math.inf:  # nor is NaN
        raise ValueError(f"--timeout {seconds:g}: give seconds greater than 0")
    return seconds


Suite = Annotated[str, typer.Argument(help="A suite's name; `te-bench list suites` shows them.")]
Device = Annotated[str | None, _said("device")]
Data = Annotated[list[str] | None, _said("data")]
Cache = Annotated[Path | None, _said("cache")]
Margin = Annotated[float | None, _said("margin")]
Alpha = Annotated[float | None, _said("alpha")]
_ONLY = "Only trials whose name matches, e.g. '*/flash/*' or '*-liger/*,*/bf16/*'."
Only = Annotated[str | None, typer.Option(metavar="GLOB[,GLOB]", help=_ONLY)]
Timings = Annotated[
    list[Path] | None,
    typer.Option(
        "--pilot",
        "--timings",
        metavar="DIR",
        help="Results that tell how long steps take and runs vary; their means stay hidden.",
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        metavar="I,J", help="Indices such as 0,1, as in nvidia-smi, or all: one trial on each at a time, or --share."
    ),
]
_ON = "Where trials run: on the hosts of a Ray cluster, or of one that is started here for the run."
On = Annotated[str | None, typer.Option(metavar="ray", help=_ON)]
RayAddress = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="The Ray cluster of --on ray. Default: the one that runs here, if any."),
]
_WITHIN = (
    "Begin no trial that would end later than this, 20min for instance, and leave it for the same command. One that no "
    "record says the time of may begin; 0s begins none."
)
Within = Annotated[str | None, typer.Option(metavar="TIME", help=_WITHIN)]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="Limit of one trial.", callback=_some_time)]
Fresh = Annotated[bool, typer.Option("--fresh", help="Set earlier results in DIR aside and start anew.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def with_options(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with a parameter for each option of a run in place of its `asked`, which is all of them as Options."""
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
    """Where a run's results go: a report compares all that its folder holds, so that each study has its own."""
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
    """Those of the options that the command line gives, as it gives them: "--head, --exitfirst"; "" without any."""
    options = {option.name: option.opts[-1] for option in context.command.params}
    given = [name for name in names if str(context.get_parameter_source(name)).endswith("COMMANDLINE")]
    return ", ".join(options[name] for name in given)


def say(sentence: str, indent: str = "") -> None:
    """Print it in as many lines of the reports' width as it takes, those after the first indented."""
    from te_bench.reports.page.tables import TERMINAL_WIDTH

    print("\n".join(textwrap.wrap(sentence, TERMINAL_WIDTH, subsequent_indent=indent)))


def warn(line: str) -> None:
    """Print it to stderr at once."""
    print(line, file=sys.stderr, flush=True)


def check_on(on: str | None, ray_address: str | None, gpus: str | None) -> None:
    """Raise ValueError for another place than Ray, and for options that do not go with it."""
    if on not in (None, "ray"):
        raise ValueError(f"--on {on}: trials run here, or on a Ray cluster: leave it out, or say --on ray")
    if on is None and ray_address is not None:
        raise ValueError(f"--ray-address {ray_address}: it goes with --on ray; add that, or leave it out")
    if on is not None and gpus is not None:
        raise ValueError(f"--gpus {gpus}: with --on ray the cluster says which GPUs there are; leave it out")


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
    indices = [index.strip() for index in gpus.split(",")]
    if set(indices) - set(here) or len(set(indices)) < len(indices):
        raise ValueError(f"--gpus {gpus}: the GPUs here are {', '.join(here)}; write all, or each index once")
    return [here[index] for index in indices]


def places(gpus: list[str], per_trial: int | None) -> list[str]:
    """The GPUs in sets of so many, each as CUDA_VISIBLE_DEVICES says it; a rest stays idle. Raises ValueError for no set."""
    size = per_trial or 1
    if 0 < len(gpus) < size:
        raise ValueError(f"--gpus-per-trial {size}: {len(gpus)} GPUs are to be had here; give fewer, or --device cpu")
    return [",".join(gpus[first : first + size]) for first in range(0, len(gpus) - size + 1, size)]
