"""Loss curves: the best validation loss in a time budget, at each backend's largest batch; bf16 beside fp8 by step.

Models: GPT-2 and nanoGPT's character model, on a CPU a tiny GPT. --model, --batch and --tokens apply to both halves.
"""

from te_bench.experiments import suite_trials
from te_bench.experiments.presets import CHAR, TINY
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import Experiment, Options, Trial

SEEDS = 3  # of the curves by step; their spread is the band of the bf16 arm
BUDGET_S = 60.0


def experiment(options: Options) -> Experiment:
    trials = [*_budget(options), *_steps(options)]
    models = dict.fromkeys(suite_trials.called(dict(trial.problem)) for trial in trials)
    return Experiment(
        suite="curves",
        title=f"Loss curves: {', '.join(models)}",
        trials=tuple(trials),
        baseline=trials[0].cell,
        heeds=frozenset({"model", "batch", "tokens"}),
    )


def _budget(options: Options) -> list[Trial]:
    """Return trainings of equal time: GPT-2 on a GPU, the tiny model at a fixed batch on a CPU."""
    cuda = options.device == "cuda"
    sizes = suite_trials.sized(options, {"model": "gpt2", "block": 1024} if cuda else {"model": "tiny", "block": 64})
    model, block = sizes["model"], sizes["block"]
    tokenizer = "bpe:50257" if cuda else "bytes"
    data = suite_trials.corpus_problem(options, model, options.data_for(model), tokenizer, block)
    budget = options.budget_s or BUDGET_S
    problem: Settings = {
        **data,
        **sizes,
        "batch": options.batch or ("max" if cuda else 16),
        "budget_s": budget,
        "eval_every_s": budget / 8,
        "eval_tokens": 2**20 if cuda else 32768,
        "warmup": 20,
        "memory_limit_gib": None,
    }
    rivals = ["manual", "flash", "cudnn"] if cuda else ["manual", "flash"]
    return [
        suite_trials.training(options, problem, name, "bf16" if cuda else "fp32", "eager", seed)
        for seed in suite_trials.seeds(options, 1)
        for name in rivals
        if suite_trials.can_hold(options, name, {**sizes, "batch": options.batch or 1})
    ]


def _steps(options: Options) -> list[Trial]:
    """Return loss by step in bf16 and fp8, from the same weights on the same batches, for each seed."""
    usual = CHAR if options.device == "cuda" else TINY
    block = options.tokens or suite_trials.block_of(options, usual["block"])
    base = usual | {"model": suite_trials.named(options, usual["model"]), "block": block}
    base["batch"] = options.batch or usual["batch"]
    model = base["model"]
    name = options.data_for(model)
    data = suite_trials.corpus_problem(options, model, name, "bytes" if name == "stdlib" else "chars", block)
    mode = "compile" if options.device == "cuda" else "eager"
    return [
        suite_trials.training(options, {**data, **base}, "flash", precision, mode, seed)
        for seed in suite_trials.seeds(options, SEEDS)
        for precision in ("bf16", "fp8")
    ]
