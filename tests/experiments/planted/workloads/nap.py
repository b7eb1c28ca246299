"""Sleep, with a grandchild that sleeps longer."""

import subprocess
import time

from te_bench.experiments.measurement import Context, Measurement
from te_bench.experiments.spec import Trial


def run(trial: Trial, context: Context) -> Measurement:
    seconds = float(trial.problem["seconds"] or 0)
    if seconds > 1:
        subprocess.Popen(["sleep", "1000"])
    time.sleep(seconds)
    return Measurement(samples={"latency_s": [seconds]})
