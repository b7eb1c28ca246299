"""Many trials that do nothing for a moment: food for kills and clocks."""

from te_bench.experiments.spec import Experiment, Options, Trial

SECONDS = {"naps": 0.15, "nothing": 0.0, "sleeps": 600.0}


def trials(kind: str, number: int) -> tuple[Trial, ...]:
    problem = {"model": kind, "seconds": SECONDS[kind]}
    of = {"workload": "nap", "device": "cpu", "attention": "manual", "protocol": "once"}
    return tuple(Trial(problem={**problem, "number": i}, **of) for i in range(number))


def experiment(options: Options) -> Experiment:
    return Experiment(suite="naps", title="Naps", trials=trials("naps", 8))
