"""PyTorch's ladder for nanoGPT, then torch.compile, CUDA graphs and FP8: GPT-2 124M, 12 x 1024 tokens, or --model.

If a model's vocabulary needs no padding, the rungs with and without padding are one. Attention that keeps its scores is left
out if the scores do not fit.
"""

from te_bench.experiments import suite_trials
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import Experiment, Options

SEEDS = 3
OWN, PADDED = False, True

#: (attention, vocabulary, precision, mode), the baseline first.
CONFIGURATIONS = [
    ("manual", OWN, "bf16", "eager"),
    ("math", OWN, "bf16", "eager"),
    ("mem_efficient", OWN, "bf16", "eager"),
    ("flash", OWN, "bf16", "eager"),
    ("flash", PADDED, "bf16", "eager"),
    ("cudnn", PADDED, "bf16", "eager"),
    ("flash", PADDED, "fp16", "eager"),
    ("manual", OWN, "bf16", "compile"),
    ("flash", PADDED, "bf16", "compile"),
    ("flex", PADDED, "bf16", "compile"),
    ("cudnn", PADDED, "bf16", "compile"),
    ("cudnn", PADDED, "bf16", "compile-reduce-overhead"),
    ("cudnn", PADDED, "bf16", "cudagraph"),
    ("cudnn", PADDED, "fp8", "eager"),
    ("cudnn", PADDED, "fp8", "compile"),
    ("cudnn", PADDED, "fp8", "cudagraph"),
]


def experiment(options: Options) -> Experiment:
    usual: Settings = {"model": "gpt2", "batch": 12, "block": 1024}
    problem = suite_trials.sized(options, usual)
    trials = [
        suite_trials.step(options, problem, attention, precision, mode, seed, padded=padded)
        for seed in suite_trials.seeds(options, SEEDS)
        for attention, padded, precision, mode in CONFIGURATIONS
        if suite_trials.can_hold(options, attention, problem)
    ]
    trials = list({trial.id: trial for trial in trials}.values())
    return Experiment(
        suite="nanogpt",
        title=f"{suite_trials.called(problem)} training step, {problem['batch']} x {problem['block']} tokens",
        trials=tuple(trials),
        baseline=trials[0].cell,
        heeds=frozenset({"model", "batch", "tokens"}),
    )
