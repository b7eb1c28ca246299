"""A first report in about a minute: on a GPU one round of `quick`, on a CPU steps of the smallest GPT.

A vocabulary of bytes keeps a CPU's steps short: GPT-2's vocabulary would take most of a tiny GPT's step.
"""

import dataclasses

from te_bench.experiments import suite_trials
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import Experiment, Options
from te_bench.experiments.suites import quick

TINY: Settings = {"model": "tiny", "batch": 2, "block": quick.BLOCK, "vocab": 256}
SHORT = {"batch": 8, "steps": 60, "eval_every": 15, "eval_tokens": 8192, "warmup": 10}


def experiment(options: Options) -> Experiment:
    options = dataclasses.replace(options, seeds=options.seeds or 1)
    if options.device == "cuda":
        return dataclasses.replace(quick.experiment(options), suite="demo")
    ladder = [
        suite_trials.step(options, TINY, attention, precision, "eager", seed)
        for seed in suite_trials.seeds(options, 1)
        for attention, precision in (("manual", "fp32"), ("flash", "fp32"), ("flash", "bf16"), ("flash", "fp8"))
    ]
    return Experiment(
        suite="demo",
        title=f"Quick look: tiny GPT, {TINY['batch']} x {TINY['block']} tokens",
        trials=(*ladder, *quick.curves(options, **SHORT)),
        baseline=ladder[0].cell,
    )
