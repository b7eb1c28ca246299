"""The faults that only a GPU has, and a sound trial after each."""

from te_bench.experiments.spec import Experiment, Options, Trial

FAULTS = ("gpu-memory", "gpu-sound", "gpu-assert", "gpu-sound-after")


def experiment(options: Options) -> Experiment:
    trials = tuple(
        Trial(workload="fault", device="cuda", problem={"model": fault}, attention="manual", protocol="once")
        for fault in FAULTS
    )
    return Experiment(suite="gpu_faults", title="GPU faults", trials=trials)
