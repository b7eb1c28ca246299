"""Tokens per second and GPU on 1, 2, 4 and 8 GPUs, by ddp, fsdp2 and tp in bf16 and FP8: GPT-2 124M, or --model.

Other projects' steps run beside te-bench's, each divided as its project does it (te_bench.training.ways).

Each GPU has --batch sequences, however many GPUs there are, so efficiency is the time of a step on one GPU over the time on
several. Under tp every GPU does a part of each sequence's work. On a CPU two processes take the place of GPUs. Trials that
need more GPUs than there are do not run.
"""

import dataclasses

from te_bench.experiments import suite_trials
from te_bench.experiments.adoption import adoptee
from te_bench.experiments.problems import Settings
from te_bench.experiments.run_options import OPTIONS
from te_bench.experiments.spec import Experiment, Options, Trial
from te_bench.experiments.suites import speed
from te_bench.models import rivals
from te_bench.models.configs import configs

SEEDS = 3
WORLDS = {"cuda": (1, 2, 4, 8), "cpu": (1, 2)}
RECIPES = ("delayed_scaling", "float8_current_scaling")
#: Modes of parallelism, and the execution modes that each supports on a GPU; None: one GPU, which supports all.
MODES: dict[str | None, tuple[str, ...]] = {
    None: ("compile", "cudagraph"),
    "ddp": ("compile", "cudagraph"),
    "fsdp2": ("compile", "cudagraph"),
    "tp": ("compile",),
}
#: On one GPU a rival's step uses this mode over a group of one rank, like torchtitan's; a rival with ddp runs undivided.
ALONE = "fsdp2"
RIVALS_OF_OWN = (
    "torchtitan's ddp, its loss by chunks and its activation checkpointing, and Transformer Engine's overlapped tp "
    "(Userbuffers): te-bench does not run these steps"
)
RIVALS_OF_A_USER = "torchtitan's, torchao's and Transformer Engine's steps: over several GPUs for te-bench's own models"
LEFT_OUT = ("hsdp and fsdp2+tp: for several hosts, and these trials run on one; speed measures them with --shard N",)


def experiment(options: Options) -> Experiment:
    modes = [mode for mode in MODES if mode]
    for name in ("parallel", "gpus_per_trial", "shard"):
        if getattr(options, name) is not None:
            mode = options.parallel if options.parallel in modes else "fsdp2"
            raise ValueError(
                f"{OPTIONS[name].flag}: the suite scaling has {', '.join(modes)} on each number of GPUs; "
                f"leave it out and choose trials by --only '*-{mode}-x2/*', or predict a step by te-bench plan scaling "
                "--world N"
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
        for make in (_ours, _fused, _theirs)
        for trial in make(options, problem, world, seed)
    ]
    each = f"{problem['batch']} x {problem['block']} tokens a {'GPU' if cuda else 'process'}"
    return Experiment(
        suite="scaling",
        title=f"Scaling: {suite_trials.called(problem)}, {each}",
        trials=tuple(trials),
        baseline=trials[0].cell,
        heeds=frozenset({"model", "batch", "tokens", "recipes"}),
        left_out=(RIVALS_OF_OWN if adoptee(options) is None else RIVALS_OF_A_USER, *LEFT_OUT),
    )


def _ours(options: Options, problem: Settings, world: int, seed: int) -> list[Trial]:
    configurations = [("bf16", ""), *(("fp8", recipe) for recipe in options.recipes or RECIPES)]
    return [
        _step(options, problem, parallel, world, precision, recipe, mode, seed)
        for parallel in (("ddp", "fsdp2", "tp") if world > 1 else (None,))
        for mode in (MODES[parallel] if options.device == "cuda" else ("eager",))
        for precision, recipe in configurations
    ]


def _fused(options: Options, problem: Settings, world: int, seed: int) -> list[Trial]:
    """Return, for te-bench's own models, the fastest step on one GPU, divided by ddp; none on a CPU."""
    if options.device != "cuda" or adoptee(options) is not None:
        return []
    divided = {**problem, **_over("ddp" if world > 1 else None, problem, world)}
    recipe = (options.recipes or RECIPES)[0]
    trials = [speed.fused(options, divided, seed, "gluon", precision, recipe) for precision in ("bf16", "fp8")]
    return [dataclasses.replace(trial, workload="scaling") for trial in trials]


def _theirs(options: Options, problem: Settings, world: int, seed: int) -> list[Trial]:
    """Return other projects' steps of te-bench's own models: for a GPT no step with its own blocks; on a CPU only bf16."""
    if adoptee(options) is not None:
        return []
    cuda, gpt = options.device == "cuda", configs()[problem["model"]].family == "gpt"
    found = []
    for name in rivals.names():
        rival = rivals.load(name)
        unasked = options.recipes and rival.recipe not in (None, *options.recipes)
        if unasked or rival.way is None or (gpt and rival.own_blocks) or not (cuda or rival.recipe is None):
            continue
        ways: list[tuple[str | None, tuple[str, ...]]] = [*rival.ranks.items()]
        if world == 1:
            over_one = ALONE in rival.ranks and "ddp" not in rival.ranks
            ways = [(ALONE, rival.ranks[ALONE])] if over_one else [(None, ("eager",))]
        theirs = {**problem, "rival": name}
        found += [
            _step(options, theirs, parallel, world, rival.precision, rival.recipe or "", mode, seed)
            for parallel, modes in ways
            for mode in (modes if cuda else ("eager",))
        ]
    return found


def _step(
    options: Options,
    problem: Settings,
    parallel: str | None,
    world: int,
    precision: str,
    recipe: str,
    mode: str,
    seed: int,
) -> Trial:
    cuda = options.device == "cuda"
    divided = {**problem, **_over(parallel, problem, world)}
    step = suite_trials.step(options, divided, "cudnn" if cuda else "flash", precision, mode, seed, recipe=recipe)
    # On a CPU, a large vocabulary would make up nearly all of the communication.
    small: Settings = {} if cuda or adoptee(options) else {"vocab": 250, "padded_vocab": 256}
    return dataclasses.replace(step.with_(**small), workload="scaling")


def _over(parallel: str | None, problem: Settings, world: int) -> Settings:
    over: Settings = {} if parallel is None else {"parallel": parallel, "world": world}
    return {"batch": problem["batch"] * world, **over}
