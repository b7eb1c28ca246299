"""The faults that only a GPU has, and a sound trial after each."""

from te_bench.experiments.spec import Experiment, Options, Trial

FAULTS = ("gpu-memory", "gpu-sound", "gpu-assert", "gpu-sound-after")


def experiment(options: Options) -> Experiment:
    of = {"workload": "fault", "device": "cuda", "attention": "manual", "protocol": "once"}
    trials = tuple(Trial(problem={"model": fault}, **of) for fault in FAULTS)
    return Experiment(suite="gpu_faults", title="GPU faults", trials=trials)
