"""Three trials that would take ten minutes each, and a nap that waits for a place."""

from te_bench.experiments.spec import Experiment, Options
from te_bench.experiments.suites import naps


def experiment(options: Options) -> Experiment:
    trials = (*naps.trials("sleeps", 3), *naps.trials("naps", 1))
    return Experiment(suite="crowded", title="Crowded", trials=trials)
