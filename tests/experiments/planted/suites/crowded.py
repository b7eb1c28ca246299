"""Three trials that would take ten minutes each, and then a nap, one more of those, and a nap."""

from te_bench.experiments.spec import Experiment, Options
from te_bench.experiments.suites import naps


def experiment(options: Options) -> Experiment:
    *first, last = naps.trials("sleeps", 4)
    before, after = naps.trials("naps", 2)
    return Experiment(suite="crowded", title="Crowded", trials=(*first, before, last, after))
