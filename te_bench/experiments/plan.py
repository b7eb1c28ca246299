"""From a suite's name to the trials it will run, in order. Pure but for the token cache; imports no torch."""

import dataclasses
import fnmatch
import math
from itertools import groupby

from te_bench import plugins
from te_bench.experiments import suites, workloads
from te_bench.experiments.spec import (
    DEVICES,
    MODES,
    NO_ATTENTION,
    PRECISIONS,
    PROTOCOLS,
    Experiment,
    Options,
    Trial,
)
from te_bench.models.configs import CONFIGS
from te_bench.models.torchao_linears import NAMES as LINEARS

#: Settings of a problem that name a plug-in, and where those are.
PLUGINS = {"head": "te_bench.kernels.linear_cross_entropy.backends", "optimizer": "te_bench.kernels.adamw.backends"}
WITHOUT_ATTENTION = ("ceilings", "layer", "gemm", "linear_cross_entropy")  # workloads that can do without
MOST_SEEDS = 1000  # far beyond any study, and planned in seconds
RECIPES, FAULTS = "te_bench.models.recipe", "te_bench.models.faults"


def resolve(suite: str, options: Options, *, only: str | None = None) -> Experiment:
    """The experiment of a suite with its trials in running order. Raises ValueError for any name that is not known."""
    plugins.check("device", options.device, list(DEVICES))
    _check_values(options)
    experiment: Experiment = plugins.load(suites.__name__, suite, "experiment")(options)
    for trial in experiment.trials:
        check(trial)
    _check_options(experiment, options)
    names = [trial.name for trial in experiment.trials]
    chosen = [t for t in experiment.trials if only is None or fnmatch.fnmatch(t.name, only)]
    if not chosen:
        shown = "\n  ".join(names[:12])
        raise ValueError(f"--only {only!r} matches no trial of {suite}. Its trials are named like\n  {shown}")
    return dataclasses.replace(experiment, trials=interleave(chosen))


def _check_values(options: Options) -> None:
    """Raise ValueError for an option that no suite could obey."""
    for name in ("seeds", "batch", "steps", "tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value}: give 1 or more")
    if options.seeds is not None and options.seeds > MOST_SEEDS:
        raise ValueError(f"--seeds {options.seeds}: give at most {MOST_SEEDS}")
    if options.steps is not None and options.tokens is not None:
        raise ValueError(f"--steps {options.steps} and --tokens {options.tokens} both say how long to train: give one")
    if options.margin is not None and not 0 < options.margin < math.inf:  # nor is NaN
        raise ValueError(f"--margin {options.margin:g}: give nats greater than 0; no two losses are ever equal")
    if options.alpha is not None and not 0 < options.alpha < 0.5:
        raise ValueError(f"--alpha {options.alpha:g}: give a probability between 0 and 0.5, such as 0.05")
    if options.model is not None:
        plugins.check("model", options.model, list(CONFIGS))
    if options.recipes is not None:
        known = plugins.names(RECIPES)
        if not options.recipes:
            raise ValueError(f"--recipes names none; known: {', '.join(known)}")
        for name in options.recipes:
            plugins.check("recipe", name, known)
            if options.recipes.count(name) > 1:
                raise ValueError(f"--recipes: {name} is named twice; name each once")


#: Why a suite does not obey an option that is not among those it heeds.
_UNHEEDED = {
    "model": "chooses its models itself",
    "batch": "chooses its batches itself",
    "recipes": "chooses its recipes itself",
    "steps": "chooses itself how long it trains",
    "tokens": "chooses itself how long it trains",
    "margin": "gives no verdict on convergence",
    "alpha": "gives no verdict on convergence",
    "preset": "has no presets",
    "stop_early": "gives no verdict that could come early",
    "fused": "chooses its kernels itself",
    "share": "measures times, which trials beside others would falsify",
}


def _check_options(experiment: Experiment, options: Options) -> None:
    """Raise ValueError for an option that no trial of the suite would heed."""
    problems = [trial.problem for trial in experiment.trials]
    trained = sorted({str(trial.problem["model"]) for trial in experiment.trials if trial.workload == "training"})
    if options.data and not trained:
        raise ValueError(f"--data: the suite {experiment.suite} trains on no data set; leave it out")
    for model in options.data:
        if model:
            plugins.check("model of --data", model, trained)
    if options.budget_s is not None and not any("budget_s" in problem for problem in problems):
        raise ValueError(f"--budget: the suite {experiment.suite} has no time-budget trial; leave it out")
    for name, why in _UNHEEDED.items():
        if getattr(options, name) is not None and name not in experiment.heeds:
            raise ValueError(f"--{name.replace('_', '-')}: the suite {experiment.suite} {why}; leave it out")


def check(trial: Trial) -> None:
    """Raise ValueError, with the near matches, unless every name in the trial is known, and unless fp8 has its recipe."""
    plugins.check("workload", trial.workload, plugins.names(workloads.__name__))
    if trial.attention != NO_ATTENTION or trial.workload not in WITHOUT_ATTENTION:
        plugins.check("attention backend", trial.attention, plugins.names("te_bench.kernels.attention.backends"))
    plugins.check("precision", trial.precision, list(PRECISIONS))
    plugins.check("mode", trial.mode, list(MODES))
    plugins.check("protocol", trial.protocol, list(PROTOCOLS))
    for setting, package in PLUGINS.items():
        if setting in trial.problem:
            plugins.check(setting, str(trial.problem[setting]), plugins.names(package))
    if "blocks" in trial.problem:
        plugins.check("blocks", str(trial.problem["blocks"]), ["fused"])
    if "linears" in trial.problem:
        linears = str(trial.problem["linears"])
        plugins.check("linears", linears, list(LINEARS))
        if trial.recipe != (recipe := LINEARS[linears][1]):
            raise ValueError(f"{trial.name}: the arithmetic of {linears} is the recipe {recipe}, not {trial.recipe}")
    recipes = plugins.names(RECIPES)
    if trial.recipe is not None:
        plugins.check("recipe", trial.recipe, recipes)
    if trial.precision == "fp8" and trial.recipe is None:
        raise ValueError(f"{trial.name}: fp8 needs a recipe. Known: {', '.join(recipes)}.")
    if trial.precision != "fp8" and trial.recipe is not None:
        raise ValueError(f"{trial.name}: the recipe {trial.recipe} is for fp8; leave it out or choose precision fp8")
    if "fault" in trial.problem:
        plugins.check("fault", str(trial.problem["fault"]), plugins.names(FAULTS))
        if trial.recipe is None:
            raise ValueError(f"{trial.name}: a fault is planted into a recipe; choose precision fp8 and one")


def interleave(trials: list[Trial]) -> tuple[Trial, ...]:
    """Rivals vary fastest, repetitions slowest, every other round backwards (A B, B A), so that drift hits all alike."""
    by_seed = groupby(sorted(trials, key=lambda t: t.seed), key=lambda t: t.seed)
    rounds = [list(group) for _, group in by_seed]
    return tuple(trial for number, group in enumerate(rounds) for trial in (group if number % 2 == 0 else group[::-1]))
