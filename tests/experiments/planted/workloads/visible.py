"""Sleep, and tell which GPUs this process sees."""

import os
import time

from te_bench.experiments.measurement import Context, Measurement
from te_bench.experiments.spec import Trial


def run(trial: Trial, context: Context) -> Measurement:
    time.sleep(float(trial.problem["seconds"] or 0))
    return Measurement(kernels=[os.environ["CUDA_VISIBLE_DEVICES"]])
