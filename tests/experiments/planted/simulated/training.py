"""A training that takes no time and ends on a known loss: a seed's own, an arm's gap and a noise that is drawn for the run.

TE_BENCH_TEST_GAPS: {"delayed_scaling": 0.02, "aa": 0.0, "rowwise_scaling": null ...}, 0 where none is given; null diverges.
"""

import json
import os
import random

from te_bench.experiments.measurement import Context, Diverged, Measurement
from te_bench.experiments.spec import Trial

SD = 0.00002  # of one run
STEP_S = 0.01
READ = 10  # steps


def run(trial: Trial, context: Context) -> Measurement:
    kind, steps = str(trial.problem["arm"]), int(str(trial.problem["steps"]))
    gaps = {"broken": 0.1, **json.loads(os.environ["TE_BENCH_TEST_GAPS"])}
    gap = gaps.get(str(trial.recipe) if kind == "recipe" else kind, 0.0)
    final = 3.28 + random.Random(trial.seed).gauss(0, 0.002) + (gap or 0.0) + random.Random(trial.id).gauss(0, SD)
    read = range(READ, steps + 1, READ)
    measurement = Measurement(
        samples={
            "step": [float(step) for step in range(steps)],
            "loss": [final + 1 / (1 + step) for step in range(steps)],
            "time_s": [STEP_S * READ * (1 + step // READ) for step in range(steps)],
            "val_step": [float(step) for step in read],
            "val_loss": [final + (steps - step) / steps for step in read],
            "val_time_s": [STEP_S * step for step in read],
        },
        work={"tokens": 512, "batch": 8},
    )
    if gap is None:
        raise Diverged(f"the loss is nan at step {steps // 2}", measurement)
    return measurement
