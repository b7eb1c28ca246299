"""A training step in every FP8 recipe and in bf16, eager, compiled and as one CUDA graph: GPT-2 124M, or --model."""

from te_bench.experiments import suite_trials
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import Experiment, Options

SEEDS = 3
MODES = ("eager", "compile", "cudagraph")


def experiment(options: Options) -> Experiment:
    cuda = options.device == "cuda"
    usual: Settings = {"model": "gpt2", "batch": 12, "block": 1024}
    if not cuda:
        usual = {"model": "tiny", "batch": 2, "block": 64}
    problem = suite_trials.sized(options, usual)
    attention, modes = ("cudnn", MODES) if cuda else ("flash", ("eager",))
    recipes = options.recipes or suite_trials.recipes()
    configurations = [("bf16", "", mode) for mode in modes]
    configurations += [("fp8", recipe, mode) for recipe in recipes for mode in modes]
    trials = [
        suite_trials.step(options, problem, attention, precision, mode, seed, recipe=recipe)
        for seed in suite_trials.seeds(options, SEEDS if cuda else 1)
        for precision, recipe, mode in configurations
    ]
    return Experiment(
        suite="fp8",
        title=f"FP8 recipes: {suite_trials.called(problem)} training step, {problem['batch']} x {problem['block']} tokens",
        trials=tuple(trials),
        baseline=trials[0].cell,
        heeds=frozenset({"model", "batch", "recipes", "tokens"}),
    )
