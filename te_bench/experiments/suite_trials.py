"""The trials that suites are made of: nanoGPT's benchmark, training runs, and their data."""

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
TOKENIZED = 50257  # tokens of bpe:50257; a user's model of fewer gets bytes
STEP_TOKENS = (
    12 * 1024
)  # of a step, GPT-2's: a suite that is not told its batch takes no more where sequences are longer
#: Attention that keeps the scores for the backward pass is left out where those of all layers take more bytes in bf16.
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
GLUON_WIDTHS = 64, 128  # heads that the attention backend `gluon` takes

#: A model of at most so many features or, a user's, parameters is tiny.
TINY_HIDDEN, TINY_PARAMETERS = 64, 2**18


def gpu_here() -> dict[str, Any]:
    """The first GPU that CUDA would see; {} without one."""
    return next(iter(environment.visible_gpus()), {})


def attention_kernels(head_dim: int = 64) -> tuple[str, str]:
    """(the fastest of torch's, the fastest of all) on the GPU here. A plan made without a GPU is a Hopper's."""
    if tuple(gpu_here().get("capability") or HOPPER) != HOPPER:
        return "flash", "flash"
    return "cudnn", "gluon" if head_dim in GLUON_WIDTHS else "flash"


def on_request() -> frozenset[str]:
    """Recipes that a suite runs where --recipes names them, as their files say.

    Attention in FP8 is off unless asked for, what is emulated by half precision's GEMMs is no faster than they are, and a
    part in bf16 or another format is for who asks what that part costs.
    """
    return plugins.saying("te_bench.models.recipe", "ON_REQUEST = True")


def without_fp8_head() -> frozenset[str]:
    """Recipes that keep a part of the head out of FP8, as their files say: an FP8 head is refused beside them."""
    return plugins.saying("te_bench.models.recipe", "FP8_HEAD = False")


def recipes() -> list[str]:
    """The recipes of a suite that was not told which."""
    left_out = on_request()
    return [name for name in plugins.names("te_bench.models.recipe") if name not in left_out]


def seeds(options: Options, default: int) -> range:
    return range(options.seeds or default)


def sized(options: Options, usual: Settings) -> Settings:
    """The usual problem with the model, the batch and the tokens of a sequence that the user asks for.

    A model of te-bench's that is named gets its longest sequences, a user's the usual ones, and without --batch a step has
    STEP_TOKENS at most. Raises ValueError for sequences that the model does not take.
    """
    found = dict(usual)
    if options.model is not None and (own := adoptee(options)) is not None:
        longest = own.facts.sequence or own.facts.block or MOST
        found |= {"model": own.source.model, "block": own.facts.sequence or min(usual["block"], longest)}
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


def named(options: Options, usual: str) -> str:
    """The problem's model: the one that the user asks for, or the usual one."""
    own = adoptee(options)
    return own.source.model if own is not None else options.model or usual


def called(problem: Settings) -> str:
    """What a title calls the problem's model."""
    name = str(problem["model"])
    return {"gpt2": "GPT-2 124M", "tiny": "tiny GPT"}.get(name, name)


def vocabulary(options: Options, model: str, *, padded: bool) -> int:
    """Classes of random tokens for that model, or the same padded to a MULTIPLE."""
    if (own := adoptee(options)) is not None:
        vocab = own.facts.vocab
    else:
        config = configs()[model]
        vocab = config.MEASURED_VOCAB or config.vocab_size
    return -(-vocab // MULTIPLE) * MULTIPLE if padded else vocab


def threads_of(options: Options, model: str) -> Settings:
    """One thread for a tiny model on a CPU, else as many as torch takes.

    A second thread makes its steps hardly faster. Where other programs run, the two wait for each other, and a trial takes
    eight times as long (two vCPUs, AMD EPYC).
    """
    own = adoptee(options)
    tiny = configs()[model].shape.hidden <= TINY_HIDDEN if own is None else own.facts.parameters <= TINY_PARAMETERS
    return {"threads": 1} if tiny and options.device == "cpu" else {}


def can_hold(options: Options, attention: str, problem: Settings) -> bool:
    """False for a backend that would keep too many scores in a training step; one without a batch is of one sequence."""
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
    """A train_step trial, at the padded vocabulary or at the model's own; `recipe` is heeded in fp8 alone.

    A problem with a `vocab`, of a multiple of MULTIPLE, keeps it.
    """
    vocab, width = (
        problem.get("vocab") or vocabulary(options, problem["model"], padded=wide) for wide in (False, padded)
    )
    problem = {**problem, **BENCH_PY, "vocab": vocab, "padded_vocab": width, "data": "random"}
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
    problem = {**threads_of(options, problem["model"]), **problem}
    trial = alone(options.device, workload, problem, attention, precision, protocol, seed)
    return dataclasses.replace(trial, mode=mode, recipe=recipe if precision == "fp8" else None)


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


def corpus_problem(options: Options, model: str, data: str, tokenizer: str, block: int) -> Settings:
    """The data part of a training problem, by content: the corpus is read, tokenised into the cache and hashed.

    Random tokens are of the model's vocabulary. A text file goes by its name, not its folder: the hash says which text it
    was. Raises ValueError for bad data.
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
