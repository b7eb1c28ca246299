"""Many trials that do nothing for a moment: food for kills and clocks."""

from te_bench.experiments.spec import Experiment, Options, Trial

SECONDS = {"naps": 0.15, "nothing": 0.0, "sleeps": 600.0}


def trials(kind: str, number: int) -> tuple[Trial, ...]:
    problem = {"model": kind, "seconds": SECONDS[kind]}
    return tuple(
        Trial(workload="nap", device="cpu", problem={**problem, "number": i}, attention="manual", protocol="once")
        for i in range(number)
    )


def experiment(options: Options) -> Experiment:
    return Experiment(suite="naps", title="Naps", trials=trials("naps", 8))
