"""From a suite's name to the trials it will run, in order. Pure but for the token cache; imports no torch."""

import fnmatch
from itertools import groupby

from te_bench import plugins
from te_bench.experiments import suites, workloads
from te_bench.experiments.spec import DEVICES, MODES, PRECISIONS, PROTOCOLS, Experiment, Options, Trial


def resolve(suite: str, options: Options, *, only: str | None = None) -> Experiment:
    """The experiment of a suite with its trials in running order. Raises ValueError for any name that is not known."""
    plugins.check("device", options.device, list(DEVICES))
    if options.seeds is not None and options.seeds < 1:
        raise ValueError(f"--seeds {options.seeds}: give 1 or more")
    experiment: Experiment = plugins.load(suites.__name__, suite, "experiment")(options)
    for trial in experiment.trials:
        check(trial)
    _check_options(experiment, options)
    names = [trial.name for trial in experiment.trials]
    chosen = [t for t in experiment.trials if only is None or fnmatch.fnmatch(t.name, only)]
    if not chosen:
        shown = "\n  ".join(names[:12])
        raise ValueError(f"--only {only!r} matches no trial of {suite}. Its trials are named like\n  {shown}")
    return Experiment(
        suite=experiment.suite, title=experiment.title, trials=interleave(chosen), baseline=experiment.baseline
    )


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


def check(trial: Trial) -> None:
    """Raise ValueError, with the near matches, unless every name in the trial is known, and unless fp8 has its recipe."""
    plugins.check("workload", trial.workload, plugins.names(workloads.__name__))
    plugins.check("attention backend", trial.attention, plugins.names("te_bench.kernels.attention"))
    plugins.check("precision", trial.precision, list(PRECISIONS))
    plugins.check("mode", trial.mode, list(MODES))
    plugins.check("protocol", trial.protocol, list(PROTOCOLS))
    recipes = plugins.names("te_bench.models.recipe")
    if trial.recipe is not None:
        plugins.check("recipe", trial.recipe, recipes)
    if trial.precision == "fp8" and trial.recipe is None:
        raise ValueError(f"{trial.name}: fp8 needs a recipe. Known: {', '.join(recipes)}.")
    if trial.precision != "fp8" and trial.recipe is not None:
        raise ValueError(f"{trial.name}: the recipe {trial.recipe} is for fp8; leave it out or choose precision fp8")


def interleave(trials: list[Trial]) -> tuple[Trial, ...]:
    """Rivals vary fastest, repetitions slowest, every other round backwards (A B, B A), so that drift hits all alike."""
    by_seed = groupby(sorted(trials, key=lambda t: t.seed), key=lambda t: t.seed)
    rounds = [list(group) for _, group in by_seed]
    return tuple(trial for number, group in enumerate(rounds) for trial in (group if number % 2 == 0 else group[::-1]))
