"""GPT-2 124M, 12 x 1024 tokens: PyTorch's ladder for nanoGPT, on to torch.compile, CUDA graphs and FP8."""

from te_bench.experiments.spec import Experiment, Options, Scalar
from te_bench.experiments.suites import _rungs
from te_bench.experiments.suites._rungs import VP, V

SEEDS = 3

#: (attention, padded vocabulary, precision, mode), the baseline first.
RUNGS = [
    ("manual", V, "bf16", "eager"),
    ("math", V, "bf16", "eager"),
    ("mem_efficient", V, "bf16", "eager"),
    ("flash", V, "bf16", "eager"),
    ("flash", VP, "bf16", "eager"),
    ("cudnn", VP, "bf16", "eager"),
    ("flash", VP, "fp16", "eager"),
    ("manual", V, "bf16", "compile"),
    ("flash", VP, "bf16", "compile"),
    ("flex", VP, "bf16", "compile"),
    ("cudnn", VP, "bf16", "compile"),
    ("cudnn", VP, "bf16", "compile-reduce-overhead"),
    ("cudnn", VP, "bf16", "cudagraph"),
    ("cudnn", VP, "fp8", "eager"),
    ("cudnn", VP, "fp8", "compile"),
    ("cudnn", VP, "fp8", "cudagraph"),
]


def experiment(options: Options) -> Experiment:
    problem: dict[str, Scalar] = {"model": "gpt2", "batch": 12, "block": 1024}
    trials = [_rungs.step(options, problem, *rung, seed) for seed in _rungs.seeds(options, SEEDS) for rung in RUNGS]
    return Experiment(
        suite="nanogpt",
        title="GPT-2 124M training step, 12 x 1024 tokens",
        trials=tuple(trials),
        baseline=trials[0].cell,
    )
