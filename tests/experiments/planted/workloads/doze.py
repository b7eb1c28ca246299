import time
from te_bench.experiments.measurement import Measurement
def run(trial, context):
    time.sleep(trial.problem["s"])
    return Measurement()
