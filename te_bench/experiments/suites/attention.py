"""Attention alone, forward and backward, every backend at eleven shapes; and where it should be scaled."""

from typing import Any

from te_bench.experiments import suite_trials
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import Experiment, Options
from te_bench.experiments.suite_trials import alone
from te_bench.kernels import attention

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
CPU_SHAPES: list[tuple[Any, ...]] = [(2, 4, 128, 32, True), (2, 4, 128, 32, False), (1, 4, 512, 64, True)]


def experiment(options: Options) -> Experiment:
    cuda = options.device == "cuda"
    dtype = "bf16" if cuda else "fp32"
    shapes = [problem(*shape) for shape in (GPU_SHAPES if cuda else CPU_SHAPES)]
    trials = [
        alone(options.device, "attention", shape, name, dtype, "kernel", seed)
        for seed in suite_trials.seeds(options, 1)
        for shape in shapes
        for name in attention.names()
        if can_hold(name, shape)
    ]
    numerics = [
        alone(options.device, "attention_numerics", shapes[0], name, precision, "once", seed)
        for seed in suite_trials.seeds(options, 1)
        for precision in (("bf16", "fp16", "fp32") if cuda else ("bf16", "fp32"))
        for name in ("math", "flash")
    ]
    return Experiment(suite="attention", title="Attention, forward and backward", trials=(*trials, *numerics))


def can_hold(name: str, problem: Settings) -> bool:
    """False for a backend that would hold too many scores."""
    scores_bytes = 2 * problem["batch"] * problem["heads"] * problem["length"] ** 2
    return name not in suite_trials.KEEPS_SCORES or scores_bytes <= suite_trials.SCORES_LIMIT


def problem(batch: int, heads: int, length: int, head_dim: int, causal: bool, kv_heads: int | None = None) -> Settings:
    found: Settings = {"batch": batch, "heads": heads, "length": length, "head_dim": head_dim, "causal": causal}
    return found if kv_heads is None else {**found, "kv_heads": kv_heads}
