"""Trials without any work of their own."""

from te_bench.experiments.spec import Experiment, Options
from te_bench.experiments.suites import naps


def experiment(options: Options) -> Experiment:
    return Experiment(suite="nothing", title="Nothing", trials=naps.trials("nothing", 11))
