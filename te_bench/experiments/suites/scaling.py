"""Tokens a second and GPU on 1, 2, 4 and 8 GPUs, by ddp, fsdp2 and tp in bf16 and FP8: of GPT-2 124M, or --model's.

There are --batch sequences for each GPU, however many there are, so that efficiency is the time of a step on one GPU over
that on several. Under tp every GPU has its part of each sequence's work. On a CPU two processes take the place of GPUs. What
needs more GPUs than there are is not run.
"""

import dataclasses

from te_bench.experiments import suite_trials
from te_bench.experiments.adoption import adoptee
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import Experiment, Options, Trial

SEEDS = 3
WORLDS = {"cuda": (1, 2, 4, 8), "cpu": (1, 2)}
RECIPES = ("delayed_scaling", "float8_current_scaling")
#: How a step is divided, and the execution modes that it goes with on a GPU; None: one GPU, which has all of them.
MODES: dict[str | None, tuple[str, ...]] = {
    None: ("compile", "cudagraph"),
    "ddp": ("compile", "cudagraph"),
    "fsdp2": ("compile",),
    "tp": ("compile",),
}
LEFT_OUT = (
    "torchtitan's and Transformer Engine's steps: over several GPUs a rival's is not measured yet",
    "hsdp and fsdp2+tp: they are for several hosts, and these trials are of one; speed measures them by --shard N",
)


def experiment(options: Options) -> Experiment:
    if options.parallel is not None:
        raise ValueError(
            "--parallel: the suite scaling has every mode on each number of GPUs; leave it out, or choose trials by "
            "--only '*-ddp-x2/*'"
        )
    cuda = options.device == "cuda"
    usual: Settings = {"model": "gpt2", "batch": 12, "block": 1024}
    if not cuda:
        usual = {"model": "tiny", "batch": 2, "block": 64}
    problem = suite_trials.sized(options, usual)
    trials = [
        trial
        for seed in suite_trials.seeds(options, SEEDS if cuda else 1)
        for world in WORLDS[options.device]
        for parallel in (("ddp", "fsdp2", "tp") if world > 1 else (None,))
        for trial in _trials(options, problem, parallel, world, seed)
    ]
    each = f"{problem['batch']} x {problem['block']} tokens a {'GPU' if cuda else 'process'}"
    return Experiment(
        suite="scaling",
        title=f"Scaling: {suite_trials.called(problem)}, {each}",
        trials=tuple(trials),
        baseline=trials[0].cell,
        heeds=frozenset({"model", "batch", "tokens", "recipes"}),
        left_out=LEFT_OUT,
    )


def _trials(options: Options, problem: Settings, parallel: str | None, world: int, seed: int) -> list[Trial]:
    """Of one way to divide the step, over so many ranks."""
    cuda = options.device == "cuda"
    over: Settings = {} if parallel is None else {"parallel": parallel, "world": world}
    divided = {**problem, "batch": problem["batch"] * world, **over}
    configurations = [("bf16", ""), *(("fp8", recipe) for recipe in options.recipes or RECIPES)]
    steps = [
        suite_trials.step(options, divided, "cudnn" if cuda else "flash", precision, mode, seed, recipe=recipe)
        for mode in (MODES[parallel] if cuda else ("eager",))
        for precision, recipe in configurations
    ]
    # Of a large vocabulary a CPU's processes would send each other little else.
    small: Settings = {} if cuda or adoptee(options) else {"vocab": 250, "padded_vocab": 256}
    return [dataclasses.replace(step, workload="scaling", problem={**step.problem, **small}) for step in steps]
