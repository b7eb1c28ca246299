"""A training step at its fastest: fused head, optimizer and blocks in one CUDA graph, beside torch.compile.

GPT-2 124M, 12 x 1024 tokens, or --model, --batch and --tokens. Manual attention, the common first step, runs for GPT-2's
default problem only.
"""

from te_bench.experiments import suite_trials
from te_bench.experiments.adoption import adoptee
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import NO_ATTENTION, Experiment, Options, Trial
from te_bench.models import rivals
from te_bench.models.configs import configs

SEEDS = 3
GPT2: Settings = {"model": "gpt2", "batch": 12, "block": 1024}
RECIPES = ("delayed_scaling", "float8_current_scaling")

#: Heads of the fast step in bf16 and in fp8; the FP8 head is optional.
HEADS = {"bf16": ("chunked",), "fp8": ("chunked", "fp8")}

#: Blocks: one module after the other, and fused. On a GPU fused blocks run with te-bench's attention and the best others.
BLOCKS: tuple[Settings, ...] = ({}, {"blocks": "fused"})
OWN = ("triton", "gluon")
BESIDE = (*OWN, "flash4")


def experiment(options: Options) -> Experiment:
    cuda = options.device == "cuda"
    usual: Settings = GPT2 if cuda else {"model": "tiny", "batch": 4, "block": 64}
    problem = suite_trials.sized(options, usual)
    if adoptee(options) is None and configs()[problem["model"]].dropout:
        raise ValueError(f"--model {options.model}: it trains with dropout, which no fused kernel has; choose another")
    seeds = suite_trials.seeds(options, SEEDS if cuda else 1)
    begun = cuda and problem == usual
    repetitions = [[*_trials(options, problem, seed, begun), _ceilings(options.device, seed)] for seed in seeds]
    return Experiment(
        suite="speed",
        title=f"Fastest step: {suite_trials.called(problem)}, {problem['batch']} x {problem['block']} tokens",
        trials=tuple(trial for trials in repetitions for trial in trials),
        baseline=repetitions[0][0].cell,
        heeds=frozenset({"model", "batch", "recipes", "tokens"}),
    )


def _ceilings(device: str, seed: int) -> Trial:
    """Return the copy and GEMM that measure ceilings: on a GPU far beyond the L2, on a CPU only to run the workload."""
    roof: Settings = {"copy_bytes": 2**31, "edge": 8192} if device == "cuda" else {"copy_bytes": 2**24, "edge": 256}
    return Trial(workload="ceilings", device=device, problem=roof, attention=NO_ATTENTION, protocol="kernel", seed=seed)


def beginning(options: Options, problem: Settings, seed: int) -> Trial:
    """Return the common first step: attention written out, unpadded vocabulary, eager bf16."""
    return suite_trials.step(options, problem, "manual", "bf16", "eager", seed, padded=False)


def compiled(options: Options, problem: Settings, seed: int, attention: str = "cudnn") -> Trial:
    """Return torch.compile's fastest bf16 step."""
    return suite_trials.step(options, problem, attention, "bf16", "compile-reduce-overhead", seed)


def fused(
    options: Options, problem: Settings, seed: int, attention: str, precision: str, recipe: str = RECIPES[0]
) -> Trial:
    """Return te-bench's own step on a GPU: blocks, head and optimizer fused in one CUDA graph; in fp8 with an FP8 head."""
    ours: Settings = {**problem, "optimizer": "triton", "head": HEADS[precision][-1], "blocks": "fused"}
    return suite_trials.step(options, ours, attention, precision, "cudagraph", seed, recipe=recipe)


def rivals_of(options: Options, problem: Settings, seed: int, attention: str = "cudnn") -> list[Trial]:
    """Return other projects' steps, as their users train; for a GPT only torchao's, as published, and only on a GPU."""
    gpt = adoptee(options) is None and configs()[problem["model"]].family == "gpt"
    if gpt and options.device == "cpu":
        return []
    found = {"linears": ["torchao_tensorwise"]} if gpt else {"rival": rivals.names()}
    return [
        suite_trials.step(
            options,
            {**problem, key: name},
            attention,
            rival.precision,
            mode,
            seed,
            recipe=rival.recipe or RECIPES[0],
        )
        for key, names in found.items()
        for name, rival in ((name, rivals.load(name)) for name in names)
        for mode in rival.modes
    ]


def _trials(options: Options, problem: Settings, seed: int, begun: bool) -> list[Trial]:
    """Return the trials of a seed, torch.compile in bf16 first; on a CPU all are eager, in plain PyTorch.

    begun: include the common first step.
    """
    cuda = options.device == "cuda"
    attention, modes = ("cudnn", ("compile-reduce-overhead", "cudagraph")) if cuda else ("flash", ("eager",))
    precisions = [("bf16", ""), *(("fp8", recipe) for recipe in options.recipes or RECIPES)]
    trials = [
        suite_trials.step(options, problem, attention, precision, mode, seed, recipe=recipe)
        for mode in modes
        for precision, recipe in precisions
    ]
    trials += rivals_of(options, problem, seed, attention)
    if begun:
        trials.append(beginning(options, problem, seed))
    fast: Settings = {**problem, "optimizer": "triton" if cuda else "reference"}
    trials += [
        suite_trials.step(options, {**fast, "head": head, **blocks}, kernel, precision, modes[-1], seed, recipe=recipe)
        for precision, recipe in precisions
        for head in HEADS[precision]
        if head != "fp8" or recipe not in suite_trials.without_fp8_head()
        for blocks in BLOCKS
        for kernel in (attention, *(BESIDE if cuda and blocks else ()))
    ]
    # The reference optimizer computes in float64, so a CPU gets a small vocabulary.
    small: Settings = {} if cuda or adoptee(options) else {"vocab": 250, "padded_vocab": 256}
    return [trial.with_(**small) for trial in trials]
