"""Every way in which a trial can end but by hanging, each by its own fault, and a sound one after them."""

from te_bench.experiments.spec import Experiment, Options, Trial

FAULTS = (
    "sound",
    "segfault",
    "abort",
    "host-memory",
    "python-memory",
    "missing-package",
    "missing-submodule",
    "wrong-kernel",
    "killed-once",
    "exit",
    "nan-sample",
    "raises",
    "no-log",
    "lock",
    "sound-after",
)

#: A real training step at a learning rate that no loss survives.
NAN_LOSS = {"model": "tiny", "batch": 1, "block": 8, "vocab": 64, "padded_vocab": 64}
NAN_LOSS |= {"learning_rate": 1e30, "min_learning_rate": 1e30, "grad_clip": 0.0}


def trial(fault: str) -> Trial:
    return Trial(workload="fault", device="cpu", problem={"model": fault}, attention="manual", protocol="once")


def experiment(options: Options) -> Experiment:
    diverges = Trial(workload="train_step", device="cpu", problem=NAN_LOSS, attention="manual", precision="fp32")
    trials = tuple(trial(fault) for fault in FAULTS)
    return Experiment(suite="faults", title="Faults", trials=(trials[0], diverges, *trials[1:]))
