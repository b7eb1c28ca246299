"""The trials of which suites consist: nanoGPT's benchmark, training runs, and their data."""

import dataclasses
from typing import Any

from te_bench import plugins
from te_bench.experiments import environment
from te_bench.experiments.adoption import adoptee
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import Options, Trial
from te_bench.models.configs import MOST, configs
from te_bench.training import corpus as corpora

MULTIPLE = 64  # of a padded vocabulary
TOKENIZED = 50257  # tokens of bpe:50257; a user's model with a smaller vocabulary gets bytes
STEP_TOKENS = 12 * 1024  # of a step, GPT-2's; the limit for a suite's default batch if sequences are longer
#: Attention that keeps scores for the backward pass is left out if the scores of all layers exceed this size in bf16.
KEEPS_SCORES = ("manual", "manual_fp8", "math")
SCORES_LIMIT = 8 * 2**30
FP8_RECIPE = "float8_current_scaling"
FP8_ATTENTION = "float8_current_scaling_dpa"

#: nanoGPT's bench.py: no clipping, no accumulation, weight decay 1e-2, learning rate 1e-4.
BENCH_PY: Settings = {
    "grad_clip": 0.0,
    "weight_decay": 1e-2,
    "learning_rate": 1e-4,
    "min_learning_rate": 1e-4,
}

HOPPER = (9, 0)
GLUON_WIDTHS = 64, 128  # head sizes that the attention backend `gluon` supports

#: Tiny models have at most so many features or, if a user's, parameters.
TINY_HIDDEN, TINY_PARAMETERS = 64, 2**18


def gpu_here() -> dict[str, Any]:
    """Return the first GPU that CUDA would see; {} without a GPU."""
    return next(iter(environment.visible_gpus()), {})


def attention_kernels(head_dim: int = 64) -> tuple[str, str]:
    """Return (the fastest of torch's, the fastest of all) on the GPU here; without a GPU, on a Hopper."""
    if tuple(gpu_here().get("capability") or HOPPER) != HOPPER:
        return "flash", "flash"
    return "cudnn", "gluon" if head_dim in GLUON_WIDTHS else "flash"


def on_request() -> frozenset[str]:
    """Return recipes that a suite runs only if --recipes names them, as their files say.

    Attention in FP8 is off by default. Recipes emulated by half-precision GEMMs are no faster than these GEMMs. Recipes with
    a part in bf16 or another format answer what that part costs.
    """
    return plugins.saying("te_bench.models.recipe", "ON_REQUEST = True")


def without_fp8_head() -> frozenset[str]:
    """Return recipes that keep a part of the head out of FP8, as their files say: they refuse an FP8 head."""
    return plugins.saying("te_bench.models.recipe", "FP8_HEAD = False")


def recipes() -> list[str]:
    """Return the recipes that a suite runs by default."""
    left_out = on_request()
    return [name for name in plugins.names("te_bench.models.recipe") if name not in left_out]


def seeds(options: Options, default: int) -> range:
    return range(options.seeds or default)


def sized(options: Options, usual: Settings) -> Settings:
    """Return the usual problem with the user's model, batch and tokens of a sequence.

    Default sequences: the longest of te-bench's named model, the usual ones of a user's model. Default batch: at most
    STEP_TOKENS a step. Raise ValueError for sequences that the model does not support.
    """
    found = dict(usual)
    if options.model is not None and (own := adoptee(options)) is not None:
        longest = own.facts.sequence or own.facts.block or MOST
        found |= {"model": own.source.model, "block": block_of(options, usual["block"])}
        if own.facts.sequence and options.tokens not in (None, longest):
            raise ValueError(f"--tokens {options.tokens}: the model's sequences all have {longest}; leave it out")
        if options.tokens is not None and options.tokens > longest:
            raise ValueError(
                f"--tokens {options.tokens}: the model's longest sequence has {longest}; give at most that"
            )
    elif options.model is not None:
        found |= {"model": options.model, "block": configs()[options.model].block_size}
    if options.tokens is not None:
        if options.tokens > MOST:
            raise ValueError(f"--tokens {options.tokens}: give at most {MOST}")
        found["block"] = options.tokens
    if "batch" in usual:
        found["batch"] = options.batch or min(usual["batch"], max(1, STEP_TOKENS // found["block"]))
    return found


def block_of(options: Options, usual: int) -> int:
    """Return the usual length of a sequence, or the length that the user's model supports."""
    own = adoptee(options)
    return usual if own is None else own.facts.sequence or min(usual, own.facts.block or usual)


def named(options: Options, usual: str) -> str:
    """Return the problem's model: the user's choice, or the usual one."""
    own = adoptee(options)
    return own.source.model if own is not None else options.model or usual


def called(problem: Settings) -> str:
    """Return the model's name for titles."""
    name = str(problem["model"])
    return {"gpt2": "GPT-2 124M", "tiny": "tiny GPT"}.get(name, name)


def vocabulary(options: Options, model: str, *, padded: bool) -> int:
    """Return the number of classes of random tokens for that model; padded: rounded up to a MULTIPLE."""
    if (own := adoptee(options)) is not None:
        vocab = own.facts.vocab
    else:
        config = configs()[model]
        vocab = config.MEASURED_VOCAB or config.vocab_size
    return -(-vocab // MULTIPLE) * MULTIPLE if padded else vocab


def threads_of(options: Options, model: str) -> Settings:
    """Return one thread for a tiny model on a CPU, else torch's default.

    A second thread hardly speeds up a tiny model's steps. On a busy machine the threads wait for each other, and a trial
    takes eight times as long (two vCPUs, AMD EPYC).
    """
    own = adoptee(options)
    tiny = configs()[model].shape.hidden <= TINY_HIDDEN if own is None else own.facts.parameters <= TINY_PARAMETERS
    return {"threads": 1} if tiny and options.device == "cpu" else {}


def can_hold(options: Options, attention: str, problem: Settings) -> bool:
    """Return False for a backend that would keep too many scores in a training step; default: one sequence."""
    if (own := adoptee(options)) is not None:
        scores = own.facts.scores * max(1, problem["block"] // own.facts.tried) ** 2
    else:
        shape = configs()[problem["model"]].shape
        scores = shape.layers * shape.heads * problem["block"] ** 2
    scores *= problem.get("batch", 1)
    return attention not in KEEPS_SCORES or 2 * scores <= SCORES_LIMIT


def step(
    options: Options,
    problem: Settings,
    attention: str,
    precision: str,
    mode: str,
    seed: int,
    *,
    padded: bool = True,
    **more: str,
) -> Trial:
    """Return a train_step trial, at the padded vocabulary or at the model's own; `recipe` applies to fp8 only.

    A problem's own `vocab`, a multiple of MULTIPLE, is kept.
    """
    vocab, width = (
        problem.get("vocab") or vocabulary(options, problem["model"], padded=wide) for wide in (False, padded)
    )
    problem = {**problem, **BENCH_PY, "vocab": vocab, "padded_vocab": width, "data": "random"}
    return _trial("train_step", "bench_py", options, problem, attention, precision, mode, seed, **more)


def training(
    options: Options, problem: Settings, attention: str, precision: str, mode: str, seed: int, **more: str
) -> Trial:
    """Return a training with loss curves; `recipe` applies to fp8 only."""
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
    problem = {**threads_of(options, problem["model"]), **problem}
    trial = alone(options.device, workload, problem, attention, precision, protocol, seed)
    return dataclasses.replace(trial, mode=mode, recipe=recipe if precision == "fp8" else None)


def alone(
    device: str, workload: str, problem: Settings, attention: str, precision: str, protocol: str, seed: int
) -> Trial:
    """Return a trial of a single operator; attention: the backend, or NO_ATTENTION."""
    return Trial(
        workload=workload,
        device=device,
        problem=problem,
        attention=attention,
        precision=precision,
        protocol=protocol,
        seed=seed,
    )


def corpus_problem(options: Options, model: str, data: str, tokenizer: str, block: int) -> Settings:
    """Return the data part of a training problem, by content: the corpus is read, tokenised into the cache and hashed.

    Random tokens have the model's vocabulary. A text file appears by its name without its folder; the hash identifies the
    text. Raise ValueError for bad data.
    """
    if data == corpora.RANDOM:
        vocab, padded = (vocabulary(options, model, padded=wide) for wide in (False, True))
        nothing = dict.fromkeys(("tokenizer", "corpus", "data_sha256"))
        return {"data": data, **nothing, "vocab": vocab, "padded_vocab": padded}
    if (own := adoptee(options)) is not None and own.facts.vocab < TOKENIZED:
        tokenizer = "bytes"
    corpus = corpora.prepare(data, tokenizer, cache=options.cache)
    corpora.check_length(corpus, block)
    if own is not None and own.facts.text and own.facts.vocab < corpus.vocab:
        raise ValueError(
            f"--model {options.model}: its vocabulary has {own.facts.vocab} tokens, and the text in {tokenizer!r} has "
            f"{corpus.vocab}; give a model with at least {corpus.vocab}"
        )
    kind, _, rest = corpus.data.partition(":")
    shown = f"text:{rest.rsplit('/', 1)[-1]}" if kind == "text" else corpus.data
    padded = corpus.vocab if corpus.vocab < 1024 else -(-corpus.vocab // MULTIPLE) * MULTIPLE
    return {
        "data": shown,
        "tokenizer": tokenizer,
        "corpus": corpus.key,
        "data_sha256": corpus.sha256,
        "vocab": corpus.vocab,
        "padded_vocab": padded,
    }
