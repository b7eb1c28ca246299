"""A training step that needs more memory than any GPU has, a sound one after it, and the largest batch in 8 GiB."""

from te_bench.experiments.spec import Experiment, Options, Trial

SMALL = {"model": "tiny", "batch": 4, "block": 64, "vocab": 50257, "padded_vocab": 50304}
TOO_LARGE = {**SMALL, "batch": 2**15}  # 2.1e11 bytes of logits in bf16
LARGEST = {key: value for key, value in SMALL.items() if key != "batch"} | {"memory_limit_gib": 8.0}


def experiment(options: Options) -> Experiment:
    steps = [Trial(workload="train_step", device="cuda", problem=p, attention="flash") for p in (TOO_LARGE, SMALL)]
    largest = Trial(workload="max_batch", device="cuda", problem=LARGEST, attention="flash", protocol="bisection")
    return Experiment(suite="gpu", title="Memory of a GPU", trials=(*steps, largest))
