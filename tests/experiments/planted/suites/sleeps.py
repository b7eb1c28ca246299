"""A nap, and then a trial that would take ten minutes."""

from te_bench.experiments.spec import Experiment, Options
from te_bench.experiments.suites import naps


def experiment(options: Options) -> Experiment:
    trials = (*naps.trials("naps", 1), *naps.trials("sleeps", 2))
    return Experiment(suite="sleeps", title="Sleeps", trials=trials)
