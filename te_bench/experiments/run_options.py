"""The options of a run, each declared once: the command line, the checks, the plan and the reports go by this table.

A suite names in Experiment.heeds those that it obeys, and sets the settings of its problems by them; the plan sets others
in the trials of any suite (plan.ASKED).
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

MOST_SEEDS = 1000  # far beyond any study, and planned in seconds
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}

#: Options that a report tells from the trials, and where this machine keeps its files.
TOLD_BY_TRIALS = ("device", "seeds", "data", "budget_s", "cache")

WHOLE = "float32"  # the default of --weights and --states, which may be said and asks for nothing

#: Settings that options give what a study of convergence judges.
JUDGED = ("blocks", "optimizer", "head", "weights", "states", "bf16_from")

# Raise ValueError, naming the flag, for a value that no suite could obey.


def _where(legal: Callable[[Any], bool], said: str) -> Callable[[str, Any], None]:
    """The check that refuses other values, NaN among them, and says which are legal."""

    def check(flag: str, value: Any) -> None:
        if not legal(value):
            shown = f"{value:g}" if isinstance(value, float) else value
            raise ValueError(f"{flag} {shown}: give {said}")

    return check


def between(least: int, most: float = math.inf) -> Callable[[str, int], None]:
    """A check that refuses what is out of this range, both ends included."""
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


# From what is said on the command line to an option's value.


def seconds(budget: str, option: str = "--budget", *, or_none: bool = False) -> float:
    """Seconds of a --budget: 90s, 30m, 30min or 2h. Raises ValueError for anything else, and for none unless or_none.

    A bare number is refused: who means minutes would get seconds. option: what the message begins with.
    """
    text = budget.strip()
    text = text.removesuffix("in") if text.endswith("min") else text
    unit = _UNITS.get(text[-1:].lower())
    try:
        value = float(text[:-1] if unit else text) * (unit or 1.0)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf or not (value or or_none):  # nor is NaN
        more = "" if or_none else " greater than 0"
        raise ValueError(f"{option} {budget}: give a time{more} with its unit: 90s, 10min or 2h")
    if unit is None:
        raise ValueError(f"{option} {budget}: say the unit, {text}min or {text}s")
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """How one option is said, and what it may be."""

    help: str
    flag: str = ""  # by default the option's name
    type: Any  # of what is said; bool: a flag that is said or not
    metavar: str | None = None
    read: Callable[[Any], Any] | None = None  # from what is said to the value
    check: Callable[[str, Any], None] | None = None
    unheeded: str | None = None  # what is said of a suite that does not obey it; None: nothing, or check_ranks says it
    instead: str = ""  # what else can be done then than leave it out


def _said(help: str, type: Any = int, **more: Any) -> dict[str, Option]:
    return {"option": Option(help=help, type=type, **more)}


_NO_FACTORY, _NO_STEP = "takes no model of yours", "has no training step that heeds it"
_KEEPING = "give it to convergence or speed, or "  # which have such steps on every device
#: Options that go with a user's --model: a suite that obeys the one obeys the others.
WITH_MODEL = frozenset({"model_args", "inputs", "loss"})


def _option(help: str, type: Any = int, **more: Any) -> Any:
    """A field that is None where the option is not said."""
    return field(default=None, metadata=_said(help, type, **more))


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the user may say about any suite. `data` maps a model's name, or "" for all, to a data set's name."""

    device: str = field(metadata=_said("cpu or cuda. Default: cuda where there is a GPU.", str))
    seeds: int | None = _option("Repetitions of every trial. Default: the suite's own number.", check=_seeds)
    first_seed: int | None = _option(
        "The first of --seeds: a study takes fresh ones where you explored on 0 and those after it.",
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
        "90s, 10min or 2h: of each time-budget trial; of a whole convergence run, whose seeds it decides.",
        str,
        flag="--budget",
        metavar="TIME",
        read=seconds,
        unheeded="has no time-budget trial",
    )
    cache: Path | None = field(default=None, metadata=_said("Where token files are cached.", Path, metavar="DIR"))
    model: str | None = _option(
        "Model to train: a name of `te-bench list models`, package.module:factory, a Hugging Face folder or config.json.",
        str,
        metavar="NAME",
        check=_a_model,
        unheeded="chooses its models itself",
    )
    model_args: tuple[str, ...] | None = _option(
        "Argument of the factory that --model names; say it once for each.",
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
        "Function (what your model returns, targets) -> loss.", str, metavar="MODULE:FUNCTION", unheeded=_NO_FACTORY
    )
    batch: int | None = _option(
        "Sequences of a training step, where the suite lets you.",
        check=_one_or_more,
        unheeded="chooses its batches itself",
    )
    recipes: tuple[str, ...] | None = _option(
        "FP8 recipes to judge; `te-bench list recipes`.",
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
        "Tokens of a sequence. Of convergence and stress: training tokens of each run, in place of --steps.",
        check=_one_or_more,
        unheeded="chooses itself how long its sequences are",
    )
    learning_rate: float | None = _option(
        "Largest learning rate of each run; where it does not decay to 0, the least one keeps its ratio to it.",
        float,
        metavar="RATE",
        check=_where(lambda value: 0 < value < math.inf, "a number greater than 0, such as 3e-4"),
        unheeded="chooses its learning rates itself",
    )
    warmup: int | None = _option(
        "Steps over which the learning rate rises, fewer than a run has.",
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
        "Largest gap in final loss that counts as none.",
        float,
        metavar="NATS",
        check=_where(lambda value: 0 < value < math.inf, "nats greater than 0; no two losses are ever equal"),
        unheeded="gives no verdict on convergence",
    )
    alpha: float | None = _option(
        "Error rate of the verdict's tests. Default: 0.05.",
        float,
        check=_where(lambda value: 0 < value < 0.5, "a probability between 0 and 0.5, such as 0.05"),
        unheeded="gives no verdict on convergence",
    )
    branch_at: int | None = _option(
        "Judge FP8 from this step on only: bf16 trains up to there, and each configuration goes on from its weights.",
        metavar="STEP",
        check=_a_branch,
        unheeded="trains every run from its first step",
    )
    bf16_from: int | None = _option(
        "Judge each recipe's training too that goes on in bf16 from this step on.",
        metavar="STEP",
        check=_one_or_more,
        unheeded="changes no precision while it trains",
    )
    design: str | None = _option(
        "What a recipe's runs are compared with: pairs, bf16's of the same seed; pool, the mean of more bf16 runs.",
        str,
        check=lambda flag, value: plugins.check(flag, value, ["pairs", "pool"]),
        unheeded="gives no verdict on convergence",
    )
    as_pilot: bool | None = _option(
        "Run the first rounds of a plan for their spread alone; their means stay hidden.",
        bool,
        unheeded="has no plan that a pilot could shape",
    )
    fused: bool | None = _option(
        "Judge each recipe's fused step too, with a bf16 and with an FP8 head.",
        bool,
        unheeded="chooses its kernels itself",
    )
    share: int | None = _option(
        "Trials at a time on each GPU, where losses are judged and no times.",
        check=between(1, 16),
        unheeded="measures times, which trials beside others would falsify",
    )
    gpus_per_trial: int | None = _option(
        "GPUs of each training step, 2 to 1024, on a CPU processes; its batch is divided over them.",
        check=_where(lambda value: 2 <= value <= 1024, "2 to 1024; for one GPU leave it out, and --parallel"),
    )
    parallel: str | None = _option(
        "How --gpus-per-trial divide a step: ddp, fsdp2, fsdp2+tp, hsdp, tp or zero1.",
        str,
        metavar="MODE",
        check=lambda flag, value: plugins.check("mode of parallelism", value, parallels.names()),
        unheeded=_NO_STEP,
    )
    shard: int | None = _option(
        "GPUs of a group: of hsdp they share the weights, of fsdp2+tp each layer.", check=between(2, 512)
    )
    sequence_parallel: bool | None = _option(
        "GPUs that share layers, by tp or fsdp2+tp, share the tokens between them too: less memory, as much is sent.",
        bool,
        unheeded="has no step whose ranks share layers",
        instead=f"give --gpus-per-trial N --parallel {' or '.join(parallels.SHARING)}, or ",
    )
    overlap: str | None = _option(
        "What overlaps --sequence-parallel's collectives with the GEMMs beside them: symmetric, torch's symmetric memory.",
        str,
        metavar="BY",
        check=lambda flag, value: plugins.check(flag, value, list(parallels.OVERLAPS)),
        unheeded="has no step at a fixed batch",
    )
    gather: str | None = _option(
        "What fsdp2 and hsdp gather weights in, of FP8 trials: fp8, one byte an element.",
        str,
        metavar="FORMAT",
        check=lambda flag, value: plugins.check(flag, value, ["fp8"]),
        unheeded="has no step in FP8 at a fixed batch",
    )
    checkpointing: bool | None = _option(
        "Training steps keep their blocks' inputs alone and compute the rest again: gradient checkpointing.",
        bool,
        unheeded=_NO_STEP,
    )
    weights: str | None = _option(
        "What matrices are trained in, of te-bench's models: bf16, without float32 masters. Default: float32.",
        str,
        metavar="FORMAT",
        check=lambda flag, value: plugins.check(flag, value, [WHOLE, "bf16"]),
        unheeded=_NO_STEP,
        instead=_KEEPING,
    )
    states: str | None = _option(
        "What te-bench's AdamW keeps matrices' moments in: bf16 or fp8. Default: float32; torch's: as the weights.",
        str,
        metavar="FORMAT",
        check=lambda flag, value: plugins.check(flag, value, [WHOLE, "bf16", "fp8"]),
        unheeded=_NO_STEP,
        instead=_KEEPING,
    )

    def data_for(self, model: str, default: str) -> str:
        return self.data.get(model, self.data.get("", default))


#: {option: how it is said}, in the order of the command line's help.
OPTIONS: Mapping[str, Option] = {
    f.name: dataclasses.replace(option, flag=option.flag or f"--{f.name.replace('_', '-')}")
    for f in dataclasses.fields(Options)
    if (option := f.metadata["option"])
}


def check(options: Options) -> None:
    """Raise ValueError for a value that no suite could obey."""
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
    """What --weights and --states ask of a step."""
    said = {name: getattr(options, name) for name in ("weights", "states")}
    return {name: value for name, value in said.items() if value not in (None, WHOLE)}


def check_ranks(options: Options) -> None:
    """Raise ValueError unless a mode has its number of ranks, and a mode with groups, and no other, theirs."""
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
    """What the command line says for these options, but for those that a report tells from the trials themselves."""
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
    """The options by what the command line was given for them; None and False: not said. device: the default one."""
    values: dict[str, Any] = {"device": device}
    for name, option in OPTIONS.items():
        value = said.get(name)
        if value is not None and value is not False:
            values[name] = option.read(value) if option.read else value
    return Options(**values)


def shown(settings: Mapping[str, Any]) -> str:
    """What a report adds to a recipe's name for an option's settings: ", fused, FP8 head", ", bf16 weights, FP8 states"."""
    said = [str(settings["blocks"])] if settings.get("blocks") else []
    said += ["te-bench's kernels"] if settings.get("parts") else []
    said += ["FP8 head"] if said and settings.get("head") == "fp8" else []
    said += [f"bf16 from step {settings['bf16_from']:,}"] if settings.get("bf16_from") else []
    return "".join(f", {word}" for word in (*said, *fewer_words(settings)))


def fewer_words(settings: Mapping[str, Any]) -> list[str]:
    """What a name says of weights and states in fewer bits than float32's."""
    said = {name: value for name in ("weights", "states") if (value := settings.get(name))}
    if len(said) == 2 and len(set(said.values())) == 1:
        return [f"{said['weights']} weights and states"]
    return [f"{'FP8' if value == 'fp8' else value} {name}" for name, value in said.items()]
