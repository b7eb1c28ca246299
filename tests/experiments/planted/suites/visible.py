"""Trials that want a GPU each."""

from te_bench.experiments.spec import Experiment, Options, Trial


def experiment(options: Options) -> Experiment:
    trials = [
        Trial(
            workload="visible",
            device="cuda",
            problem={"model": "naps", "seconds": 0.5, "number": i},
            attention="manual",
            protocol="once",
        )
        for i in range(6)
    ]
    return Experiment(suite="visible", title="Visible", trials=tuple(trials))
