"""One or two minutes: the effect of FP8 on GPT-2's step on this GPU; on a CPU a few configurations on a tiny GPT.

A tiny GPT would say nothing about a GPU, because its time is the host's. The suite `speed` has larger sweeps.
"""

from collections.abc import Sequence

from te_bench.experiments import suite_trials
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import Experiment, Options, Trial
from te_bench.experiments.suites import attention, speed

SEEDS = {"cuda": 2, "cpu": 1}  # a third round of GPT-2's took 36 s on an H200, where two take 111 (2026-11-23)
BLOCK = 64
TINY: Settings = {"model": "tiny", "batch": 2, "block": BLOCK}
FP8_FROM = (8, 9)  # compute capability: Ada
SMALL_BATCH, SMALL_GPU = 4, 32 * 2**30  # manual attention with 12 x 1024 tokens takes 22.6 GiB, besides its check


def experiment(options: Options) -> Experiment:
    return _on_a_gpu(options) if options.device == "cuda" else _on_a_cpu(options)


def _on_a_gpu(options: Options) -> Experiment:
    """Return three steps of the suite `speed`: the common first step, torch.compile's, and te-bench's, in FP8 if supported.

    Without a GPU, the plan is for a Hopper GPU.
    """
    gpu = suite_trials.gpu_here()
    capability = gpu.get("capability") or suite_trials.HOPPER
    cudnn, own = suite_trials.attention_kernels()
    precision = "fp8" if tuple(capability) >= FP8_FROM else "bf16"
    batch = SMALL_BATCH if gpu.get("memory_bytes", SMALL_GPU) < SMALL_GPU else speed.GPT2["batch"]
    problem: Settings = {**speed.GPT2, "batch": batch}
    rounds = [
        (
            speed.beginning(options, problem, seed),
            speed.compiled(options, problem, seed, cudnn),
            speed.fused(options, problem, seed, own, precision),
        )
        for seed in suite_trials.seeds(options, SEEDS["cuda"])
    ]
    return Experiment(
        suite="quick",
        title=f"Quick look: GPT-2 124M, {batch} x {problem['block']} tokens",
        trials=tuple(trial for trials in rounds for trial in trials),
        baseline=rounds[0][1].cell,
    )


def _on_a_cpu(options: Options) -> Experiment:
    """Compare the kernels in fp32, because a CPU computes bf16 slowly."""
    rungs = [(name, False, "fp32") for name in ("manual", "math", "flash")]
    rungs += [("flash", True, precision) for precision in ("fp32", "bf16", "fp8")]
    return on_a_cpu("quick", options, TINY, rungs, (*curves(options), *_numerics(options)))


def on_a_cpu(
    suite: str, options: Options, problem: Settings, rungs: list[tuple[str, bool, str]], rest: Sequence[Trial]
) -> Experiment:
    """Return a tiny GPT's steps, each (attention, whether the vocabulary is padded, precision), and then the `rest`."""
    ladder = [
        suite_trials.step(options, problem, attention, precision, "eager", seed, padded=padded)
        for seed in suite_trials.seeds(options, SEEDS["cpu"])
        for attention, padded, precision in rungs
    ]
    return Experiment(
        suite=suite,
        title=f"Quick look: tiny GPT, {problem['batch']} x {problem['block']} tokens",
        trials=(*ladder, *rest),
        baseline=ladder[0].cell,
    )


def curves(options: Options, **changed: int) -> list[Trial]:
    """Return one short training in bf16 and in fp8, for a pair of loss curves. changed: changed settings."""
    data = suite_trials.corpus_problem(options, "tiny", options.data_for("tiny"), "bytes", BLOCK)
    problem: Settings = {
        **data,
        "model": "tiny",
        "batch": 16,
        "block": BLOCK,
        "steps": 100,
        "eval_every": 25,
        "eval_tokens": 16384,
        "learning_rate": 3e-3,
        "min_learning_rate": 3e-4,
        "warmup": 20,
        **changed,
    }
    return [
        suite_trials.training(options, problem, "flash", precision, "eager", seed)
        for seed in suite_trials.seeds(options, 1)
        for precision in ("bf16", "fp8")
    ]


def _numerics(options: Options) -> list[Trial]:
    problem = attention.problem(1, 4, 256, 64, True)
    return [
        suite_trials.alone(options.device, "attention_numerics", problem, "flash", "bf16", "once", seed)
        for seed in suite_trials.seeds(options, 1)
    ]
