"""Trials that never end, and one after them that looks for what they left running; the first waits for torch's import."""

from te_bench.experiments.spec import Experiment, Options
from te_bench.experiments.suites import faults


def experiment(options: Options) -> Experiment:
    trials = tuple(faults.trial(fault) for fault in ("sound", "hang", "hang-holding-gil", "nobody-else"))
    return Experiment(suite="hangs", title="Hangs", trials=trials)
