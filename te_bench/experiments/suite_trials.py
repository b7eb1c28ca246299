"""The trials that suites are made of: nanoGPT's benchmark, training runs, and their data."""

from te_bench import plugins
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import Options, Trial
from te_bench.training import corpus as corpora

V, VP = 50257, 50304  # GPT-2's vocabulary, and the same padded to a multiple of 64
FP8_RECIPE = "float8_current_scaling"
#: Recipes that a suite runs where --recipes names them: attention in FP8 is off unless asked for.
ON_REQUEST = frozenset({"float8_current_scaling_dpa"})

#: nanoGPT's bench.py: no clipping, no accumulation, weight decay 1e-2, learning rate 1e-4.
BENCH_PY: Settings = {
    "grad_clip": 0.0,
    "weight_decay": 1e-2,
    "learning_rate": 1e-4,
    "min_learning_rate": 1e-4,
}


def recipes() -> list[str]:
    """The recipes of a suite that was not told which."""
    return [name for name in plugins.names("te_bench.models.recipe") if name not in ON_REQUEST]


def seeds(options: Options, default: int) -> range:
    return range(options.seeds or default)


def step(
    options: Options, problem: Settings, attention: str, padded: int, precision: str, mode: str, seed: int, **more: str
) -> Trial:
    """A train_step trial at this padded vocabulary; `recipe` is heeded in fp8 alone."""
    problem = {**problem, **BENCH_PY, "vocab": V, "padded_vocab": padded, "data": "random"}
    return _trial("train_step", "bench_py", options, problem, attention, precision, mode, seed, **more)


def training(
    options: Options, problem: Settings, attention: str, precision: str, mode: str, seed: int, **more: str
) -> Trial:
    """A training to a curve; `recipe` is heeded in fp8 alone."""
    return _trial("training", "curve", options, problem, attention, precision, mode, seed, **more)


def _trial(
    workload: str,
    protocol: str,
    options: Options,
    problem: Settings,
    attention: str,
    precision: str,
    mode: str,
    seed: int,
    recipe: str = FP8_RECIPE,
) -> Trial:
    return Trial(
        workload=workload,
        device=options.device,
        problem=problem,
        attention=attention,
        precision=precision,
        recipe=recipe if precision == "fp8" else None,
        mode=mode,
        protocol=protocol,
        seed=seed,
    )


def alone(
    device: str, workload: str, problem: Settings, attention: str, precision: str, protocol: str, seed: int
) -> Trial:
    """A trial of an operator alone; attention: the backend, or NO_ATTENTION."""
    return Trial(
        workload=workload,
        device=device,
        problem=problem,
        attention=attention,
        precision=precision,
        protocol=protocol,
        seed=seed,
    )


def corpus_problem(options: Options, data: str, tokenizer: str, block: int) -> Settings:
    """The data part of a training problem, by content: the corpus is read, tokenised into the cache and hashed.

    A text file goes by its name, not its folder: the hash says which text it was. Raises ValueError for bad data.
    """
    if data == corpora.RANDOM:
        return {"data": data, "tokenizer": None, "corpus": None, "data_sha256": None, "vocab": V, "padded_vocab": VP}
    corpus = corpora.prepare(data, tokenizer, cache=options.cache)
    corpora.check_length(corpus, block)
    kind, _, rest = data.partition(":")
    shown = f"text:{rest.rsplit('/', 1)[-1]}" if kind == "text" else data
    padded = corpus.vocab if corpus.vocab < 1024 else -(-corpus.vocab // 64) * 64
    return {
        "data": shown,
        "tokenizer": tokenizer,
        "corpus": corpus.key,
        "data_sha256": corpus.sha256,
        "vocab": corpus.vocab,
        "padded_vocab": padded,
    }
