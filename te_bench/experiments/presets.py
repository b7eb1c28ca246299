"""Named settings of a training run, which the convergence suites share, and the user's changes to them."""

from te_bench import plugins
from te_bench.experiments import suite_trials
from te_bench.experiments.adoption import adoptee
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import Options, Trial
from te_bench.models.configs import configs
from te_bench.training import corpus as corpora

#: nanoGPT's config/train_shakespeare_char.py.
CHAR: Settings = {
    "model": "char",
    "batch": 64,
    "block": 256,
    "steps": 5000,
    "eval_every": 250,
    "eval_tokens": None,
    "learning_rate": 1e-3,
    "min_learning_rate": 1e-4,
    "warmup": 100,
    "beta2": 0.99,
}
#: The same design at a size that a CPU trains in half a minute.
TINY: Settings = {
    **CHAR,
    "model": "tiny",
    "batch": 16,
    "block": 64,
    "steps": 400,
    "eval_every": 50,
    "eval_tokens": 32768,
    "learning_rate": 3e-3,
    "min_learning_rate": 3e-4,
    "warmup": 20,
}

#: Learning rates decay to 0; before that, losses measure the rate more than the precision.
_DECAYED: Settings = {"min_learning_rate": 0.0, "evaluate": "both", "probes": 10}

_GPT2: Settings = {
    **_DECAYED,
    "model": "gpt2",
    # 49,152 tokens a step: 100 M tokens are 2,035 steps, enough for a schedule. 48 sequences take 6 % less time than 4 times
    # 12 (speed-b64), with up to 31 GiB (convergence-first); --batch 12 --accumulate 4 trains on the same batches in less.
    "batch": 48,
    "block": 1024,
    "accumulate": 1,
    "steps": 2035,
    "eval_every": 200,
    # Used in 4 of 11 evaluations. With 10 M tokens in each, an FP8 trial evaluated for half its training time (H200).
    "eval_tokens": 4 * 2**20,
    "early_eval_tokens": 2**18,
    # At 6e-4 with 100 steps of warm-up, two bf16 runs whose weights differ by one ulp end farther apart than any margin; the
    # gap depends on the rate (docs/convergence-records.md). Not measured at 3e-4.
    "learning_rate": 3e-4,
    "warmup": 400,
    "order": "once",
}
_CPU: Settings = {  # at this rate, runs that differ by one ulp stay together; at twice the rate they end 0.02 nats apart
    **TINY,
    **_DECAYED,
    "batch": 8,
    "steps": 150,
    "eval_every": 30,
    "early_eval_tokens": 2**13,  # in 3 of 5 evaluations; with 2**15 tokens they took a third of a trial's time
    "learning_rate": 1e-3,
    "warmup": 15,
    "probes": 5,
}
#: Presets whose step is the fused one, also for bf16.
FUSED = frozenset({"gpt2", "llama"})

#: Problems without their data. eval_tokens: None is the whole validation part. early_eval_tokens: of evaluations before the
#: last quarter of the steps, which are shown but enter no verdict.
PRESETS: dict[str, Settings] = {
    "cpu": _CPU,
    "cpu-pool": {**_CPU, "order": "once"},  # a pool, at a size for a CPU
    # nanoGPT's 5,000 steps overfit: the validation loss is lowest at 1,750 and ends 0.17 higher, which voids a verdict.
    "char": {**CHAR, **_DECAYED, "steps": 1200, "eval_every": 60},
    "gpt2": _GPT2,
    "llama": {**_GPT2, "model": "llama-114m"},
    "gpt2-short": {  # 3.7 M tokens: does FP8 lose anything within 300 steps?
        **{key: value for key, value in _GPT2.items() if key != "order"},
        "learning_rate": 6e-4,
        "batch": 12,
        "steps": 300,
        "eval_every": 30,
        "eval_tokens": 2**18,
        "early_eval_tokens": 2**16,
        "warmup": 60,
    },
}

#: Options of a training that `problem_of` obeys.
TRAINING = frozenset({"batch", "accumulate", "steps", "tokens", "learning_rate", "warmup"})

FEWEST_STEPS = 20  # shorter runs tell nothing of a precision; fewer --tokens are meant as a sequence's length


def preset_of(options: Options) -> str:
    """Return the preset that was asked for, else the model's, else the device's.

    Raise ValueError for an unknown preset, and for --tokens with a user's model: in other suites it is a sequence's length.
    """
    if options.tokens is not None and adoptee(options) is not None:
        raise ValueError(
            f"--tokens {options.tokens}: in suites without training this is the length of your model's sequences, and here "
            "the length of a run; set the length of a run by --steps"
        )
    if options.preset is not None:
        plugins.check("preset", options.preset, list(PRESETS))
        return options.preset
    if options.model is not None:  # by the longest sequences of the model
        if (own := adoptee(options)) is not None:
            long = own.facts.block is None or own.facts.block >= _GPT2["block"]
            return "gpt2-short" if options.device == "cuda" and long else "cpu"
        length = configs()[options.model].block_size
        return next(name for name in ("gpt2", "char", "cpu") if name == "cpu" or length >= PRESETS[name]["block"])
    return "gpt2-short" if options.device == "cuda" else "cpu"  # preset gpt2 needs too many seeds


def recipes_of(options: Options) -> tuple[str, ...]:
    return options.recipes or tuple(suite_trials.recipes())


def problem_of(options: Options) -> Settings:
    """Return the problem that all arms share: the preset's, with the user's model, data and training options."""
    preset = preset_of(options)
    problem = dict(PRESETS[preset])
    problem["model"] = suite_trials.named(options, problem["model"])
    problem["block"] = suite_trials.block_of(options, problem["block"])
    if options.batch is not None:
        problem["batch"] = options.batch
    if options.accumulate is not None and options.accumulate != problem.get("accumulate", 1):
        problem["accumulate"] = options.accumulate
    if options.learning_rate is not None:
        problem["min_learning_rate"] *= options.learning_rate / problem["learning_rate"]
        problem["learning_rate"] = options.learning_rate
    model, block = problem["model"], problem["block"]
    data = options.data_for(model)
    plain = {"cpu": "bytes", "cpu-pool": "bytes", "char": "bytes" if data == "stdlib" else "chars"}
    steps = _steps(options, problem)
    every = max(1, steps * problem["eval_every"] // problem["steps"])
    corpus = suite_trials.corpus_problem(options, model, data, plain.get(preset, "bpe:50257"), block)
    if problem.get("order") == "once" and corpus["corpus"] is not None:
        rows = steps * problem["batch"] * problem.get("accumulate", 1)
        corpora.check_once(corpora.load(corpus["corpus"], cache=options.cache), block, rows)
    return {
        **corpus,
        **problem,
        "steps": steps,
        "eval_every": every,
        "warmup": _warmup(options, problem, steps),
        **suite_trials.threads_of(options, model),
        **_sharing(options),
        **({**fused_parts(options), "head": "chunked"} if preset in FUSED else {}),
    }


def fused_parts(options: Options) -> Settings:
    """Return the fused step's settings without its head."""
    return {"blocks": "fused", "optimizer": "triton" if options.device == "cuda" else "reference"}


def _sharing(options: Options) -> Settings:
    """Return the number of trials that share a GPU, if above one: their step times are not those of one trial."""
    if options.share is not None and options.device == "cpu":
        raise ValueError(
            "--share: only for trials on a GPU; on a CPU they run side by side where it costs no time. Leave it out"
        )
    return {"share": options.share} if options.share and options.share > 1 else {}


def _steps(options: Options, problem: Settings) -> int:
    """Return the number of steps: as asked, or as the tokens need. Raise ValueError for fewer than FEWEST_STEPS."""
    if options.tokens is None:
        if options.steps is not None and options.steps < FEWEST_STEPS:
            raise ValueError(
                f"--steps {options.steps}: so short a run tells nothing of a precision; give {FEWEST_STEPS} or more"
            )
        return options.steps or problem["steps"]
    a_step = problem["batch"] * problem["block"] * problem.get("accumulate", 1)
    steps = -(-options.tokens // a_step)
    if steps < FEWEST_STEPS:
        raise ValueError(
            f"--tokens {options.tokens}: it is how long a run trains here, not how long a sequence is, and that is "
            f"{steps} step{'s' * (steps > 1)} of {a_step:,} tokens; give {FEWEST_STEPS * a_step} or more, or --steps"
        )
    return steps


def _warmup(options: Options, problem: Settings, steps: int) -> int:
    """Return the warm-up steps: as asked, else the preset's or a fifth of the run. Raise ValueError if they fill the run."""
    if options.warmup is None:
        return min(problem["warmup"], steps // 5)
    if options.warmup >= steps:
        raise ValueError(f"--warmup {options.warmup}: a run has {steps} steps; give fewer")
    return options.warmup


def arm(options: Options, problem: Settings, recipe: str | None, seed: int) -> Trial:
    """Return the trial of bf16, or of FP8 by a recipe, in the arms' common mode: one CUDA graph; on a CPU eager."""
    mode = "cudagraph" if options.device == "cuda" else "eager"
    precision = "bf16" if recipe is None else "fp8"
    dropout = adoptee(options) is None and configs()[problem["model"]].dropout
    attention = "math" if dropout and options.device == "cpu" else "flash"  # the CPU's flash kernel has no dropout
    if preset_of(options) in FUSED and options.device == "cuda" and adoptee(options) is None:
        # the attention of the step that te-bench recommends
        _, attention = suite_trials.attention_kernels(configs()[problem["model"]].shape.head_dim)
    return suite_trials.training(
        options, problem, attention, precision, mode, seed, recipe=recipe or suite_trials.FP8_RECIPE
    )
