"""The options of a run. Each is declared once here, for the command line, the checks, the plan and the reports.

A suite lists the options that it obeys in Experiment.heeds, and sets its problems by them. The plan applies the remaining
options to the trials of any suite (plan.ASKED).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from te_bench import plugins
from te_bench.training import fewer_bits as bits
from te_bench.training import parallel as parallels

MOST_SEEDS = 1000  # far more than any study needs; planning them takes seconds
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}

#: Options that the trials themselves show to a report, and folders of this machine.
TOLD_BY_TRIALS = ("device", "seeds", "data", "budget_s", "cache")

WHOLE = "float32"  # the default of --weights and --states; may be given, and changes nothing

#: Settings by which options change the trials that a convergence study judges.
JUDGED = ("blocks", "optimizer", "head", "weights", "states", "bf16_from")

BF16_HEAD = "bf16 head"  # of a fused FP8 step, and beside te.convert's parts in FP8

# Checks raise ValueError, naming the flag, for a value that no suite can obey.


def _where(legal: Callable[[Any], bool], said: str) -> Callable[[str, Any], None]:
    """Return a check that refuses other values, also NaN, and names the legal ones."""

    def check(flag: str, value: Any) -> None:
        if not legal(value):
            shown = f"{value:g}" if isinstance(value, float) else value
            raise ValueError(f"{flag} {shown}: give {said}")

    return check


def between(least: int, most: float = math.inf) -> Callable[[str, int], None]:
    """Return a check that refuses values outside least..most, both included."""
    return _where(lambda value: least <= value <= most, f"{least} {'or more' if most == math.inf else f'to {most}'}")


_one_or_more = between(1)


def _seeds(flag: str, value: int) -> None:
    _one_or_more(flag, value)
    if value > MOST_SEEDS:
        raise ValueError(f"{flag} {value}: give at most {MOST_SEEDS}")


def _a_branch(flag: str, value: int) -> None:
    if value < 1:
        raise ValueError(
            f"{flag} {value}: bf16 trains that many steps before FP8 does: give 1 or more, or leave it out for FP8 from the "
            "first step"
        )


def _a_model(flag: str, value: str) -> None:
    from te_bench.models.sources import check

    check(value)


def _some_recipes(flag: str, value: tuple[str, ...]) -> None:
    known = plugins.names("te_bench.models.recipe")
    if not value:
        raise ValueError(f"{flag} names none; known: {', '.join(known)}")
    for name in value:
        plugins.check("recipe", name, known)
        if value.count(name) > 1:
            raise ValueError(f"{flag}: {name} is named twice; name each once")


# Functions from the command line's text to an option's value.


def seconds(budget: str, option: str = "--budget", *, or_none: bool = False) -> float:
    """Return the seconds of a time: 90s, 30m, 30min or 2h. Raise ValueError for anything else; 0 needs or_none.

    A bare number is refused, because its unit could be minutes or seconds. option: the beginning of the message.
    """
    text = budget.strip()
    text = text.removesuffix("in") if text.endswith("min") else text
    unit = _UNITS.get(text[-1:].lower())
    try:
        value = float(text[:-1] if unit else text) * (unit or 1.0)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf or not (value or or_none):  # also refuses NaN
        more = "" if or_none else " greater than 0"
        raise ValueError(f"{option} {budget}: give a time{more} with its unit: 90s, 10min or 2h")
    if unit is None:
        raise ValueError(f"{option} {budget}: say the unit, {text}min or {text}s")
    return value


def data_sets(specs: list[str]) -> dict[str, str]:
    """Return {model or "": data set} of the --data options. A = before any colon ends a model's name.

    Raise ValueError for a model with two data sets.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """The declaration of one option."""

    help: str
    flag: str = ""  # default: from the option's name
    type: Any  # of the given text; bool: a flag without a value
    metavar: str | None = None
    read: Callable[[Any], Any] | None = None  # from the given text to the value
    check: Callable[[str, Any], None] | None = None
    unheeded: str | None = (
        None  # ends "the suite X ..." if a suite ignores it; None: no message, or check_ranks gives one
    )
    instead: str = ""  # alternative to leaving the option out


def _said(help: str, type: Any = int, **more: Any) -> dict[str, Option]:
    return {"option": Option(help=help, type=type, **more)}


_NO_FACTORY, _NO_STEP = "takes no model of yours", "has no training step that heeds it"
_KEEPING = "give it to convergence or speed, or "  # they have such steps on every device
#: Options of a user's --model: a suite that obeys --model obeys them.
WITH_MODEL = frozenset({"model_args", "inputs", "loss"})


def _option(help: str, type: Any = int, **more: Any) -> Any:
    """Declare a field that is None if the option is not given."""
    return field(default=None, metadata=_said(help, type, **more))


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of a run of any suite. `data` maps a model's name, or "" for all models, to a data set's name."""

    device: str = field(metadata=_said("cpu or cuda. Default: cuda if there is a GPU.", str))
    seeds: int | None = _option("Repetitions of every trial. Default: the suite's own number.", check=_seeds)
    first_seed: int | None = _option(
        "First of the --seeds. In a study, choose seeds that you have not explored on.",
        metavar="SEED",
        check=between(0, 2**31),
        unheeded="begins with seed 0",
    )
    data: Mapping[str, str] = field(
        default_factory=dict,
        metadata=_said(
            "Data set to train on: stdlib, text:PATH, hf:NAME[:CONFIG][:COLUMN], random.",
            list[str],
            metavar="[MODEL=]SPEC",
            read=data_sets,
            unheeded="trains on no data set",
        ),
    )
    budget_s: float | None = _option(
        "90s, 10min or 2h: for each time-budget trial, or for a whole convergence run, whose number of seeds it sets.",
        str,
        flag="--budget",
        metavar="TIME",
        read=seconds,
        unheeded="has no time-budget trial",
    )
    cache: Path | None = field(default=None, metadata=_said("Folder for token files.", Path, metavar="DIR"))
    model: str | None = _option(
        "Model to train: a name of `te-bench list models`, package.module:factory, a Hugging Face folder or config.json.",
        str,
        metavar="NAME",
        check=_a_model,
        unheeded="chooses its models itself",
    )
    model_args: tuple[str, ...] | None = _option(
        "Argument of the factory that --model names; repeatable.",
        list[str],
        metavar="KEY=VALUE",
        read=tuple,
        unheeded=_NO_FACTORY,
    )
    inputs: str | None = _option(
        "Function that draws a batch for your model: (batch, tokens, generator, device) -> (inputs, targets).",
        str,
        metavar="MODULE:FUNCTION",
        unheeded=_NO_FACTORY,
    )
    loss: str | None = _option(
        "Function from (what your model returns, targets) to the loss.",
        str,
        metavar="MODULE:FUNCTION",
        unheeded=_NO_FACTORY,
    )
    batch: int | None = _option(
        "Sequences of a training step, in suites that allow it.",
        check=between(1, 2**24),
        unheeded="chooses its batches itself",
    )
    recipes: tuple[str, ...] | None = _option(
        "FP8 recipes to judge; see `te-bench list recipes`.",
        str,
        metavar="A,B",
        read=lambda said: tuple(name.strip() for name in said.split(",") if name.strip()),
        check=_some_recipes,
        unheeded="chooses its recipes itself",
    )
    preset: str | None = _option(
        "A suite's named settings: cpu, cpu-pool, char, gpt2, llama, gpt2-short.", str, unheeded="has no presets"
    )
    steps: int | None = _option(
        "Training steps of each run.", check=_one_or_more, unheeded="chooses itself how long it trains"
    )
    tokens: int | None = _option(
        "Tokens of a sequence. For convergence and stress: training tokens of each run, in place of --steps.",
        check=_one_or_more,
        unheeded="chooses itself how long its sequences are",
    )
    learning_rate: float | None = _option(
        "Largest learning rate of each run. If the schedule ends above 0, its last rate changes in proportion.",
        float,
        metavar="RATE",
        check=_where(lambda value: 0 < value < math.inf, "a number greater than 0, such as 3e-4"),
        unheeded="chooses its learning rates itself",
    )
    warmup: int | None = _option(
        "Steps over which the learning rate rises; fewer than the steps of a run.",
        metavar="STEPS",
        check=_where(lambda value: value >= 0, "0, for none, or more"),
        unheeded="chooses its learning rates itself",
    )
    accumulate: int | None = _option(
        "Micro-batches of a training step, each of --batch sequences.",
        metavar="N",
        check=_one_or_more,
        unheeded="chooses its batches itself",
    )
    margin: float | None = _option(
        "Largest difference in final loss that counts as none.",
        float,
        metavar="NATS",
        check=_where(lambda value: 0 < value < math.inf, "nats greater than 0; no two losses are ever equal"),
        unheeded="gives no verdict on convergence",
    )
    alpha: float | None = _option(
        "Error rate of the verdict's tests. Default: 0.05.",
        float,
        check=_where(lambda value: 1e-5 <= value < 0.5, "a probability from 0.00001 to below 0.5, such as 0.05"),
        unheeded="gives no verdict on convergence",
    )
    branch_at: int | None = _option(
        "Judge FP8 from this step on only: bf16 trains up to this step, and each configuration continues from its weights.",
        metavar="STEP",
        check=_a_branch,
        unheeded="trains every run from its first step",
    )
    bf16_from: int | None = _option(
        "Also judge each recipe's training that continues in bf16 from this step on.",
        metavar="STEP",
        check=_one_or_more,
        unheeded="changes no precision while it trains",
    )
    design: str | None = _option(
        "What a recipe's run is compared with: pairs, the bf16 run of the same seed; pool, the mean of more bf16 runs.",
        str,
        check=lambda flag, value: plugins.check(flag, value, ["pairs", "pool"]),
        unheeded="gives no verdict on convergence",
    )
    as_pilot: bool | None = _option(
        "Run only the first rounds of a plan, to measure their spread; their means stay hidden.",
        bool,
        unheeded="has no plan that a pilot could shape",
    )
    fused: bool | None = _option(
        "Also judge each recipe's fused step, with a bf16 and with an FP8 head.",
        bool,
        unheeded="chooses its kernels itself",
    )
    head: str | None = _option(
        "With --fused: judge only the fused step with this head, bf16 or fp8, and no plain modules.",
        str,
        check=lambda flag, value: plugins.check(flag, value, ["bf16", "fp8"]),
        unheeded="chooses its heads itself",
    )
    share: int | None = _option(
        "Trials at a time on each GPU, for suites that judge losses and no times.",
        check=between(1, 16),
        unheeded="measures times, which trials side by side would falsify",
    )
    gpus_per_trial: int | None = _option(
        "GPUs of each training step, 2 to 1024, or processes on a CPU. They divide the step's batch.",
        check=_where(lambda value: 2 <= value <= 1024, "2 to 1024; for one GPU leave it out, and --parallel"),
    )
    parallel: str | None = _option(
        "How the GPUs of --gpus-per-trial divide a step: ddp, fsdp2, fsdp2+tp, hsdp, tp or zero1.",
        str,
        metavar="MODE",
        check=lambda flag, value: plugins.check("mode of parallelism", value, parallels.names()),
        unheeded=_NO_STEP,
    )
    shard: int | None = _option(
        "GPUs of a group. With hsdp a group shares the weights, with fsdp2+tp each layer.",
        check=between(2, 512),
    )
    sequence_parallel: bool | None = _option(
        "GPUs that share layers (tp, fsdp2+tp) also share the tokens between layers: less memory, equal communication.",
        bool,
        unheeded="has no step whose ranks share layers",
        instead=f"give --gpus-per-trial N --parallel {' or '.join(parallels.SHARING)}, or ",
    )
    overlap: str | None = _option(
        "Overlap the collectives of --sequence-parallel with GEMMs, by: symmetric (torch's symmetric memory).",
        str,
        metavar="BY",
        check=lambda flag, value: plugins.check(flag, value, list(parallels.OVERLAPS)),
        unheeded="has no step at a fixed batch",
    )
    gather: str | None = _option(
        "Format in which fsdp2 and hsdp gather the weights of FP8 trials: fp8, one byte an element.",
        str,
        metavar="FORMAT",
        check=lambda flag, value: plugins.check(flag, value, ["fp8"]),
        unheeded="has no step in FP8 at a fixed batch",
    )
    checkpointing: bool | None = _option(
        "Gradient checkpointing: training steps keep only their blocks' inputs and recompute the rest.",
        bool,
        unheeded=_NO_STEP,
    )
    weights: str | None = _option(
        "Format in which te-bench's models train matrices: bf16, without float32 masters. Default: float32.",
        str,
        metavar="FORMAT",
        check=lambda flag, value: plugins.check(flag, value, [WHOLE, "bf16"]),
        unheeded=_NO_STEP,
        instead=_KEEPING,
    )
    states: str | None = _option(
        "Format of the matrices' moments in te-bench's AdamW: bf16 or fp8. Default: float32; in torch's: as the weights.",
        str,
        metavar="FORMAT",
        check=lambda flag, value: plugins.check(flag, value, [WHOLE, "bf16", "fp8"]),
        unheeded=_NO_STEP,
        instead=_KEEPING,
    )

    def data_for(self, model: str) -> str:
        return self.data.get(model, self.data.get("", "stdlib"))


#: {option: its declaration}, in the order of the command line's help.
OPTIONS: Mapping[str, Option] = {
    f.name: dataclasses.replace(option, flag=option.flag or f"--{f.name.replace('_', '-')}")
    for f in dataclasses.fields(Options)
    if (option := f.metadata["option"])
}


def check(options: Options) -> None:
    """Raise ValueError for a value that no suite can obey."""
    for name, option in OPTIONS.items():
        value = getattr(options, name)
        if option.check is not None and value is not None:
            option.check(option.flag, value)
    for name in sorted(WITH_MODEL):
        if getattr(options, name) is not None and options.model is None:
            raise ValueError(f"{OPTIONS[name].flag}: it goes with --model package.module:factory; name one")
    if options.gather is not None and options.parallel not in parallels.GATHERING:
        modes = " or ".join(parallels.GATHERING)
        raise ValueError(f"--gather fp8 goes with --gpus-per-trial N --parallel {modes}: no other mode gathers weights")
    if options.overlap is not None and not options.sequence_parallel:
        raise ValueError(f"--overlap {options.overlap} goes with --sequence-parallel, whose collectives it overlaps")
    fewer = fewer_bits(options)
    if reason := bits.unsupported(fewer.get("weights"), fewer.get("states"), ranks=options.parallel is not None):
        flags = " ".join(f"--{name} {value}" for name, value in fewer.items())
        raise ValueError(f"{flags}: {reason}; leave --parallel out")
    if options.steps is not None and options.tokens is not None:
        raise ValueError(f"--steps {options.steps} and --tokens {options.tokens} both say how long to train: give one")


def fewer_bits(options: Options) -> dict[str, str]:
    """Return what --weights and --states ask of a step."""
    said = {name: getattr(options, name) for name in ("weights", "states")}
    return {name: value for name, value in said.items() if value not in (None, WHOLE)}


def check_ranks(options: Options) -> None:
    """Raise ValueError unless a mode has its number of ranks, and exactly the modes with groups have a number of groups."""
    shard, parallel, world = options.shard, options.parallel, options.gpus_per_trial
    if (world is None) != (parallel is None):
        raise ValueError("--gpus-per-trial N goes with --parallel ddp, fsdp2, fsdp2+tp, hsdp, tp or zero1: give both")
    if parallel not in parallels.GROUPED:
        if shard is not None:
            modes = " or ".join(parallels.GROUPED)
            raise ValueError(
                f"--shard {shard} goes with --gpus-per-trial N --parallel {modes}: no other mode has groups"
            )
        return
    assert world is not None
    divisors = [n for n in range(2, world) if world % n == 0]
    if not divisors:
        raise ValueError(
            f"--parallel {parallel}: --gpus-per-trial {world} make no groups of equal size; choose fsdp2 or ddp"
        )
    if shard not in divisors:
        what = "the weights" if parallel == "hsdp" else "each layer"
        legal, got = " or ".join(map(str, divisors)), "" if shard is None else f"; got {shard}"
        raise ValueError(
            f"--parallel {parallel}: give --shard {legal}, how many of --gpus-per-trial {world} share {what}{got}"
        )


def words(options: Options, only: str | None = None) -> tuple[str, ...]:
    """Return the words that give these options on the command line, without those that the trials show to a report."""
    found = []
    for name, option in OPTIONS.items():
        value = getattr(options, name)
        if name not in TOLD_BY_TRIALS and value is not None:
            if option.type is bool:
                found.append(option.flag)
            elif option.type == list[str]:
                found += [word for text in value for word in (option.flag, text)]
            else:
                found += [option.flag, ",".join(value) if isinstance(value, tuple) else str(value)]
    return (*found, *(() if only is None else ("--only", only)))


def read(said: Mapping[str, Any], device: str) -> Options:
    """Return the options from the command line's values; None and False: not given. device: the default one."""
    values: dict[str, Any] = {"device": device}
    for name, option in OPTIONS.items():
        value = said.get(name)
        if value is not None and value is not False:
            values[name] = option.read(value) if option.read else value
    return Options(**values)


def shown(settings: Mapping[str, Any], *, in_fp8: bool = False) -> str:
    """Return what a report adds to a recipe's name for such settings: ", fused, FP8 head", ", bf16 weights, FP8 states".

    in_fp8: whether the step has a recipe; a fused one then says which head it has.
    """
    said = [str(settings["blocks"])] if settings.get("blocks") else []
    said += ["te-bench's kernels"] if settings.get("parts") else []
    if said and settings.get("head") == "fp8":
        said.append("FP8 head")
    elif (settings.get("blocks") and in_fp8) or (settings.get("parts") and settings.get("head")):
        said.append(BF16_HEAD)
    said += [f"bf16 from step {settings['bf16_from']:,}"] if settings.get("bf16_from") else []
    return "".join(f", {word}" for word in (*said, *fewer_words(settings)))


def fewer_words(settings: Mapping[str, Any]) -> list[str]:
    """Return what a name says of weights and states with fewer bits than float32."""
    said = {name: value for name in ("weights", "states") if (value := settings.get(name))}
    if len(said) == 2 and len(set(said.values())) == 1:
        return [f"{said['weights']} weights and states"]
    return [f"{'FP8' if value == 'fp8' else value} {name}" for name, value in said.items()]
