"""Resolve a suite's name into its trials in running order. Pure but for the token cache; imports no torch."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from itertools import groupby

from te_bench import plugins
from te_bench.experiments import adoption, estimate, host, run_options, suites, workloads
from te_bench.experiments.problems import (
    PROBLEMS,
    GemmProblem,
    LayerProblem,
    PieceProblem,
    Settings,
    StepProblem,
    TrainingProblem,
    TrialProblem,
    source_of,
)
from te_bench.experiments.spec import (
    DEVICES,
    MODES,
    NO_ATTENTION,
    OWN_ATTENTION,
    PRECISIONS,
    PROTOCOLS,
    Experiment,
    Options,
    Trial,
    matches,
)
from te_bench.experiments.suites import pieces
from te_bench.kernels.gemm import table
from te_bench.models.configs import configs
from te_bench.models.sources import TOO_LARGE
from te_bench.training import parallel

#: Settings of a problem that name a plug-in, and the plug-ins' package.
PLUGINS = {
    "head": "te_bench.kernels.linear_cross_entropy.backends",
    "optimizer": "te_bench.kernels.adamw.backends",
    "fault": "te_bench.models.faults",
    **dict.fromkeys(("rival", "linears"), "te_bench.models.rivals"),
}
WITHOUT_ATTENTION = (
    "ceilings",
    "layer",
    "gemm",
    "linear",
    "linear_cross_entropy",
    "piece",
)  # workloads that may have no attention
RECIPES = "te_bench.models.recipe"
SPANNING = ("train_step", "training")  # workloads that span the GPUs of --parallel
_OF_YOUR_MODEL = {
    "weights": "create your model in the dtype that you want",
    "states": "AdamW keeps your model's moments in the dtype of its weights",
}
PROVEN = ("train_step", "scaling")  # workloads whose record lists the collectives that ran
STEPS = (*SPANNING, "scaling", "max_batch")  # workloads that can recompute activations


#: Float32 FLOP/s of two cores of an AMD EPYC (matrices of 2048, 2026-11-26; bf16: 2.2e11).
CPU_FLOP_S = 4e10
SLOW_S = 20.0


def resolve(suite: str, options: Options, *, only: str | None = None) -> Experiment:
    """Return a suite's experiment with its trials in running order. Raise ValueError for any unknown name."""
    plugins.check("device", options.device, list(DEVICES))
    run_options.check(options)
    experiment: Experiment = plugins.load(suites.__name__, suite, "experiment")(options)
    run_options.check_ranks(options)  # after the suite, which may refuse ranks altogether
    experiment = _as_asked(adoption.adapt(experiment, options), options)
    for trial in experiment.trials:
        check(trial)
    trained = sorted({str(trial.problem["model"]) for trial in experiment.trials if trial.workload == "training"})
    for model in filter(None, options.data):
        plugins.check("model of --data", model, trained)
    names = [trial.name for trial in experiment.trials]
    chosen = [t for t in experiment.trials if matches(t.name, only)]
    if not chosen:
        shown = "\n  ".join(names[:12])
        where = "\nThese are a CPU's; --device cuda plans a GPU's." if options.device == "cpu" else ""
        raise ValueError(f"--only {only!r} matches no trial of {suite}. Its trials are named like\n  {shown}{where}")
    if options.gather is not None and all("gather" not in trial.problem for trial in chosen):
        raise ValueError(
            f"--gather {options.gather} applies to steps in FP8, and --only {only!r} chooses none; leave one of them out"
        )
    whole = None
    if experiment.judgement and len(chosen) < len(names):
        every = interleave(list(experiment.trials))
        whole = dataclasses.replace(experiment, trials=every, asked=run_options.words(options))
    asked = run_options.words(options, only)
    return dataclasses.replace(experiment, trials=interleave(chosen), asked=asked, whole=whole)


def _as_asked(experiment: Experiment, options: Options) -> Experiment:
    """Apply the options to the trials. Raise ValueError for an option that neither the suite nor a trial obeys."""
    heeds = experiment.heeds | (run_options.WITH_MODEL if "model" in experiment.heeds else frozenset())
    trials = list(experiment.trials)
    for name, option in run_options.OPTIONS.items():
        if option.unheeded is None or getattr(options, name) in (None, {}):
            continue
        heeded = name in heeds
        if name in ASKED:
            found = [ASKED[name](trial, options) for trial in trials]
            heeded = any(settings is not None for settings in found)
            trials = [trial.with_(**more) if more else trial for trial, more in zip(trials, found, strict=True)]
        if not heeded:
            why = f"the suite {experiment.suite} {option.unheeded}"
            raise ValueError(f"{option.flag}: {why}; {option.instead}leave it out")
    if trials == list(experiment.trials):
        return experiment
    cells = {old.cell: new.cell for old, new in zip(experiment.trials, trials, strict=True)}
    baseline = None if experiment.baseline is None else cells[experiment.baseline]
    return dataclasses.replace(
        experiment, trials=tuple(trials), baseline=baseline, judgement=experiment.judged_in(cells)
    )


def _in_fewer_bits(name: str, trial: Trial, options: Options) -> Settings | None:
    """Return the settings for --weights or --states; torch's AdamW keeps states in the weights' dtype.

    Suite scaling compares with steps over ranks, which keep float32. Raise ValueError for a user's model.
    """
    value = getattr(options, name)
    if value == run_options.WHOLE:
        return {}
    if trial.workload not in STEPS:
        return None
    if source_of(trial) is not None:
        raise ValueError(f"--{name} applies to te-bench's own models only; {_OF_YOUR_MODEL[name]}")
    if name in trial.problem:  # the trial sets it itself
        return {} if trial.problem[name] == value else None
    whole = trial.precision not in ("bf16", "fp8") or trial.workload == "scaling"
    if whole or {"arm", "lr_factor"} & trial.problem.keys():
        return None
    if trial.problem.get("optimizer") is not None:
        return {name: value}
    return {"weights": value, "states": value} if name == "weights" else None


def _over_ranks(options: Options) -> Settings:
    groups = {} if options.shard is None else {"shard": options.shard}
    return {"parallel": options.parallel, "world": options.gpus_per_trial, **groups}


def _shares_layers(trial: Trial) -> bool:
    """Return whether the trial's ranks may share the tokens too; those of rivals always do."""
    return trial.problem.get("parallel") in parallel.SHARING and "rival" not in trial.problem


#: {option: function that returns its settings of a trial, None if the trial ignores it}. Experiment.heeds has the others.
ASKED: dict[str, Callable[[Trial, Options], Settings | None]] = {
    "data": lambda t, _: {} if t.workload == "training" else None,
    "budget_s": lambda t, _: {} if t.problem.get("budget_s") is not None else None,
    "parallel": lambda t, asked: _over_ranks(asked) if t.workload in SPANNING else None,
    "sequence_parallel": lambda t, _: {"sequence_parallel": True} if _shares_layers(t) else None,
    "overlap": lambda t, asked: (
        {"overlap": asked.overlap} if "sequence_parallel" in t.problem and t.workload in PROVEN else None
    ),
    "gather": lambda t, asked: (
        {"gather": asked.gather} if t.workload == "train_step" and t.precision == "fp8" else None
    ),
    "checkpointing": lambda t, _: {"checkpointing": "blocks"} if t.workload in STEPS else None,
    "weights": functools.partial(_in_fewer_bits, "weights"),
    "states": functools.partial(_in_fewer_bits, "states"),
}


def require_room_on_a_cpu(options: Options) -> None:
    """Raise ValueError if a user's model cannot train in this machine's memory: weights, gradients and two moments."""
    own = adoption.adoptee(options) if options.device == "cpu" else None
    if own is None:
        return
    weight, there = 4 if own.facts.float32 else 2, host.memory_bytes()
    held = 4 * weight * own.facts.parameters
    if held > there:
        sizes = f"{held / 2**30:,.0f} GiB, and this machine has {there / 2**30:,.0f}"
        what = f"weights, gradients and AdamW's moments of {own.facts.parameters:,} parameters take {sizes}"
        raise ValueError(f"{own.source.model}: {what}: {TOO_LARGE}")


def slow_on_a_cpu(trials: Sequence[Trial], options: Options) -> str | None:
    """Say how long the largest step of trials on a CPU takes, if above SLOW_S; estimated by 6 FLOP per weight and token."""
    own, largest = adoption.adoptee(options), (0.0, "", "tens of them")
    for trial in trials:
        flop = estimate.step_flop(trial, own) if trial.device == "cpu" else None
        if flop is None:
            continue
        p = StepProblem.of(trial)
        batch = p.batch if isinstance(p.batch, int) else 1
        parts = f"{p.accumulate} x " if p.accumulate and p.accumulate > 1 else ""
        steps = f"{trial.problem['steps']:,} steps" if trial.problem.get("steps") else "tens of them"
        largest = max(largest, (flop, f"{p.model}, {parts}{batch} x {p.block} tokens,", steps))
    flop, what, steps = largest
    if flop < SLOW_S * CPU_FLOP_S:
        return None
    minutes = f"{flop / CPU_FLOP_S / 60:,.1f}"
    return (
        f"a step of {what} is {flop / 1e12:,.1f} TFLOP. This run is on a CPU: two cores take about {minutes} min for each, "
        f"and a trial has {steps}. To try it on a CPU, choose a small model or preset (--model tiny)"
    )


def check(trial: Trial) -> None:
    """Raise ValueError, with similar names, for an unknown name in the trial, and for fp8 without a recipe."""
    plugins.check("workload", trial.workload, plugins.names(workloads.__name__))
    can_do_without = trial.attention == NO_ATTENTION and trial.workload in WITHOUT_ATTENTION
    if not can_do_without and not (trial.attention == OWN_ATTENTION and source_of(trial) is not None):
        plugins.check("attention backend", trial.attention, plugins.names("te_bench.kernels.attention.backends"))
    plugins.check("precision", trial.precision, list(PRECISIONS))
    plugins.check("mode", trial.mode, list(MODES))
    plugins.check("protocol", trial.protocol, list(PROTOCOLS))
    recipes = plugins.names(RECIPES)
    if trial.recipe is not None:
        plugins.check("recipe", trial.recipe, recipes)
    if trial.precision == "fp8" and trial.recipe is None:
        raise ValueError(f"{trial.name}: fp8 needs a recipe. Known: {', '.join(recipes)}.")
    if trial.precision != "fp8" and trial.recipe is not None:
        raise ValueError(f"{trial.name}: the recipe {trial.recipe} is for fp8; leave it out or choose precision fp8")
    if trial.workload in PROBLEMS:
        _check_problem(trial, TrialProblem.of(trial))


def _check_problem(trial: Trial, p: TrialProblem) -> None:
    """Raise ValueError for an unknown name in the trial's settings."""
    for setting, package in PLUGINS.items():
        if (name := getattr(p, setting, None)) is not None:
            plugins.check(setting, name, plugins.names(package))
    if isinstance(p, GemmProblem):
        shape = {name: value for name, value in trial.problem.items() if name != "backend"}
        plugins.check("backend", p.backend, table.rivals(table.read_problem(shape)))
    if isinstance(p, PieceProblem):
        plugins.check("kind", p.kind, list(pieces.PIECES))
        plugins.check(f"call of {p.kind}", p.call, list(pieces.PIECES[p.kind]))
        plugins.check("backend", p.backend, list(pieces.rivals(p.kind, p.call)))
    if isinstance(p, StepProblem):
        _check_step(trial, p)
    if isinstance(p, LayerProblem) and p.model is not None:
        plugins.check("model", p.model, list(configs()))


def _check_step(trial: Trial, p: StepProblem) -> None:
    """Raise ValueError for an unknown model, or a part that does not fit the trial's recipe or rival."""
    if p.source is None:
        plugins.check("model", p.model, list(configs()))
    if p.against is not None:
        name, recipe = p.rival or p.linears, p.against.recipe
        if trial.recipe != recipe:
            raise ValueError(f"{trial.name}: the arithmetic of {name} is the recipe {recipe}, not {trial.recipe}")
        if p.blocks is not None or (p.head is not None and p.against.head is not None):
            raise ValueError(f"{trial.name}: {name} has its own blocks or head; leave out te-bench's")
    if p.parallel is not None:
        plugins.check("mode of parallelism", p.parallel, parallel.names())
    least = 2 if p.against is None else 1  # some rivals divide their step over ranks even on one GPU
    if (p.parallel is None) != (p.world is None) or (p.world is not None and p.world < least):
        raise ValueError(f"{trial.name}: a step over ranks needs a mode, parallel, and {least} ranks or more, world")
    gathers = p.parallel in parallel.GATHERING and trial.precision == "fp8" and trial.workload == "train_step"
    if p.gather is not None and not gathers:
        modes = " or ".join(parallel.GATHERING)
        raise ValueError(f"{trial.name}: gather fp8 applies to a train_step in FP8 over ranks by {modes}")
    if (p.shard is None) != (p.parallel not in parallel.GROUPED):
        raise ValueError(
            f"{trial.name}: shard, the ranks of a group, goes with {' and '.join(parallel.GROUPED)}, and only with these"
        )
    if p.sequence_parallel is not None:
        if p.world is None or p.parallel not in parallel.SHARING:
            raise ValueError(f"{trial.name}: sequence_parallel applies to {' and '.join(parallel.SHARING)}")
        if p.source is None and p.block % (p.world // p.replicas):
            raise ValueError(
                f"sequences of {p.block} tokens do not divide into {p.world // p.replicas} ranks: give other --tokens, or "
                "leave --sequence-parallel out"
            )
    if p.overlap is not None and (p.sequence_parallel is None or trial.workload not in PROVEN):
        raise ValueError(f"{trial.name}: overlap applies to a {' or '.join(PROVEN)} with sequence_parallel")
    if p.world is not None and isinstance(p.batch, int) and p.batch % p.replicas:
        less = p.batch // p.replicas * p.replicas or p.replicas
        parts = (
            f"{p.replicas} ranks" if p.replicas == p.world else f"{p.replicas} groups of {p.world // p.replicas} ranks"
        )
        raise ValueError(
            f"a batch of {p.batch} does not divide into {parts}: give --batch {less}, or another --gpus-per-trial"
        )
    if (
        p.world is not None
        and isinstance(p, TrainingProblem)
        and (p.steps is None or p.eval_every_s or p.batch == "max")
    ):
        raise ValueError(
            f"{trial.name}: every rank has its own clock and memory, so over ranks a training needs a number of steps and "
            "a batch: leave --gpus-per-trial out, or choose convergence or stress"
        )
    if p.fault is not None and trial.recipe is None:
        raise ValueError(f"{trial.name}: a fault is planted into a recipe; choose precision fp8 and one")


def interleave(trials: list[Trial]) -> tuple[Trial, ...]:
    """Order trials: rivals vary fastest, repetitions slowest, every other round backwards (A B, B A) against drift.

    The control of branches, which trains the trunk, always comes first.
    """
    by_seed = groupby(sorted(trials, key=lambda t: t.seed), key=lambda t: t.seed)
    rounds = [list(group) for _, group in by_seed]
    backwards = [number % 2 == 1 and group[0].problem.get("branch_at") is None for number, group in enumerate(rounds)]
    return tuple(t for group, back in zip(rounds, backwards, strict=True) for t in (group[::-1] if back else group))
