"""Attention forward and backward at eleven shapes, some with windows, documents or dropout; and errors by where to scale."""

from typing import Any

from te_bench.experiments import suite_trials
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import Experiment, Options
from te_bench.experiments.suite_trials import alone
from te_bench.kernels import attention

SEEDS = 3  # of times; the errors have draws of their own
#: (batch, heads, length, head_dim, causal[, key heads]): the shapes of GPT-2, of a 7B model, long contexts, Llama 3 8B.
GPU_SHAPES: list[tuple[Any, ...]] = [
    (12, 12, 1024, 64, True),
    (12, 12, 1024, 64, False),
    (4, 32, 2048, 128, True),
    (4, 32, 2048, 128, False),
    (4, 16, 8192, 64, True),
    (2, 16, 8192, 128, True),
    (1, 16, 16384, 128, True),
    (1, 16, 16384, 128, False),
    (4, 16, 4096, 64, True),
    (4, 32, 2048, 128, True, 8),
    (1, 32, 8192, 128, True, 8),
]
#: Changes to some shapes, one at a time, to measure their cost.
GPU_CHANGES: dict[tuple[Any, ...], list[Settings]] = {
    (12, 12, 1024, 64, True): [{"window_left": 511, "window_right": 0}, {"documents": 4}, {"dropout": 0.1}],
    (4, 32, 2048, 128, True, 8): [
        {"window_left": 1023, "window_right": 0},
        {"window_left": 511, "window_right": 0},
        {"documents": 4},
        {"dropout": 0.1},
    ],
}
CPU_SHAPES: list[tuple[Any, ...]] = [(2, 4, 128, 32, True), (2, 4, 128, 32, False), (1, 4, 512, 64, True)]
CPU_CHANGES: dict[tuple[Any, ...], list[Settings]] = {
    (2, 4, 128, 32, True): [{"window_left": 63, "window_right": 0}, {"documents": 4}, {"dropout": 0.1}],
}


def experiment(options: Options) -> Experiment:
    cuda = options.device == "cuda"
    dtype = "bf16" if cuda else "fp32"
    shapes, changes = (GPU_SHAPES, GPU_CHANGES) if cuda else (CPU_SHAPES, CPU_CHANGES)
    able: list[tuple[Settings, str]] = []
    for sizes in shapes:
        plain = problem(*sizes)
        able += [(plain, name) for name in attention.names() if can_hold(name, plain)]
        able += [({**plain, **change}, name) for change in changes.get(sizes, ()) for name in fused()]
    trials = [
        alone(options.device, "attention", shape, name, dtype, "kernel", seed)
        for seed in suite_trials.seeds(options, SEEDS if cuda else 1)
        for shape, name in able
    ]
    numerics = [
        alone(options.device, "attention_numerics", problem(*shapes[0]), name, precision, "once", seed)
        for seed in suite_trials.seeds(options, 1)
        for precision in (("bf16", "fp16", "fp32") if cuda else ("bf16", "fp32"))
        for name in ("math", "flash")
    ]
    return Experiment(suite="attention", title="Attention, forward and backward", trials=(*trials, *numerics))


def can_hold(name: str, problem: Settings) -> bool:
    """Return False for a backend that would keep too many scores."""
    scores_bytes = 2 * problem["batch"] * problem["heads"] * problem["length"] ** 2
    return name not in suite_trials.KEEPS_SCORES or scores_bytes <= suite_trials.SCORES_LIMIT


def fused() -> list[str]:
    """Return backends for training: without kept scores, and without FP8, whose attention supports none of the changes."""
    return [name for name in attention.names() if not (name in suite_trials.KEEPS_SCORES or attention.in_fp8(name))]


def problem(batch: int, heads: int, length: int, head_dim: int, causal: bool, kv_heads: int | None = None) -> Settings:
    found: Settings = {"batch": batch, "heads": heads, "length": length, "head_dim": head_dim, "causal": causal}
    return found if kv_heads is None else {**found, "kv_heads": kv_heads}
