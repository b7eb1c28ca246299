"""A first report in about a minute: on a GPU one round of `quick`, on a CPU steps of the smallest GPT.

A vocabulary of bytes keeps a CPU's steps short: GPT-2's vocabulary would take most of a tiny GPT's step.
"""

import dataclasses

from te_bench.experiments.spec import Experiment, Options
from te_bench.experiments.suites import quick

SHORT = {"batch": 8, "steps": 60, "eval_every": 15, "eval_tokens": 8192, "warmup": 10}


def experiment(options: Options) -> Experiment:
    options = dataclasses.replace(options, seeds=options.seeds or 1)
    if options.device == "cuda":
        return dataclasses.replace(quick.experiment(options), suite="demo")
    rungs = [("manual", True, "fp32"), *(("flash", True, precision) for precision in ("fp32", "bf16", "fp8"))]
    return quick.on_a_cpu("demo", options, quick.TINY | {"vocab": 256}, rungs, quick.curves(options, **SHORT))
