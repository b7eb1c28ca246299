"""GPT-2 124M, 12 x 1024 tokens: PyTorch's ladder for nanoGPT, on to torch.compile, CUDA graphs and FP8."""

from te_bench.experiments import suite_trials
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import Experiment, Options
from te_bench.experiments.suite_trials import VP, V

SEEDS = 3

#: (attention, padded vocabulary, precision, mode), the baseline first.
CONFIGURATIONS = [
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
    problem: Settings = {"model": "gpt2", "batch": 12, "block": 1024}
    trials = [
        suite_trials.step(options, problem, *configuration, seed)
        for seed in suite_trials.seeds(options, SEEDS)
        for configuration in CONFIGURATIONS
    ]
    return Experiment(
        suite="nanogpt",
        title="GPT-2 124M training step, 12 x 1024 tokens",
        trials=tuple(trials),
        baseline=trials[0].cell,
    )
