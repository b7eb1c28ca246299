"""GPT-2 124M training step in every FP8 recipe beside BF16, in eager mode, compiled and as one CUDA graph."""

from te_bench.experiments import suite_trials
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import Experiment, Options
from te_bench.experiments.suite_trials import VP

SEEDS = 3
MODES = ("eager", "compile", "cudagraph")


def experiment(options: Options) -> Experiment:
    cuda = options.device == "cuda"
    problem: Settings = {"model": "gpt2", "batch": 12, "block": 1024}
    if not cuda:
        problem = {"model": "tiny", "batch": 2, "block": 64}
    attention, modes = ("cudnn", MODES) if cuda else ("flash", ("eager",))
    recipes = suite_trials.recipes()
    configurations = [("bf16", "", mode) for mode in modes]
    configurations += [("fp8", recipe, mode) for recipe in recipes for mode in modes]
    trials = [
        suite_trials.step(options, problem, attention, VP, precision, mode, seed, recipe=recipe)
        for seed in suite_trials.seeds(options, SEEDS if cuda else 1)
        for precision, recipe, mode in configurations
    ]
    return Experiment(
        suite="fp8",
        title="FP8 recipes: " + ("GPT-2 124M training step, 12 x 1024 tokens" if cuda else "tiny GPT, 2 x 64 tokens"),
        trials=tuple(trials),
        baseline=trials[0].cell,
    )
