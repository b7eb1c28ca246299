"""Where each precision diverges: the learning rate times 1, 2, 4 and so on up to 64, in bf16 and every FP8 recipe."""

import dataclasses

from te_bench.experiments import presets, suite_trials
from te_bench.experiments.spec import Experiment, Options

#: A tiny GPT diverges between 4 and 16 in every precision (CPU, six seeds, 2026-11-26).
FACTORS = tuple(2**n for n in range(7))
SEEDS = 6  # the fewest whose smallest and largest value enclose the median in 95 % of cases
#: Faults of scale, planted at the usual rate into FAULTY: if no run diverged with them, the suite could detect nothing.
FAULTS, FAULTY = ("nan_at_depth", "poisoned_token", "short_history"), "delayed_scaling"
#: The preset of long models: 300 steps, for which the default text suffices.
SHORT = "gpt2-short"
HEEDS = frozenset({"model", "recipes", "preset"}) | presets.TRAINING


def experiment(options: Options) -> Experiment:
    if options.preset is None and presets.preset_of(options) in presets.FUSED:
        options = dataclasses.replace(options, preset=SHORT)
    problem = presets.problem_of(options)
    rate = problem["learning_rate"]
    arms = (None, *presets.recipes_of(options))
    trials = []
    for seed in suite_trials.seeds(options, SEEDS):
        for factor in FACTORS:
            at = {**problem, "learning_rate": rate * factor, "lr_factor": factor}
            trials += [presets.arm(options, at, recipe, seed) for recipe in arms]
        broken = {**problem, "lr_factor": 1, "arm": "broken"}
        trials += [presets.arm(options, {**broken, "fault": fault}, FAULTY, seed) for fault in FAULTS if FAULTY in arms]
    return Experiment(
        suite="stress",
        title=f"Learning-rate stress: {problem['model']}, {problem['steps']} steps at {rate:g} and its multiples",
        trials=tuple(trials),
        baseline=trials[0].cell,
        heeds=HEEDS,
    )
