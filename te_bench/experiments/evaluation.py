"""te-bench evaluate: downstream checks of one checkpoint, in bf16 and in its FP8 recipe.

Results go to no journal, because nothing is timed. The text is split like in training, so `val` of a model's own data set
is text that the model has not seen.
"""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from te_bench import plugins
from te_bench.experiments import trial_model
from te_bench.experiments.spec import DEVICES
from te_bench.kernels import attention as backends
from te_bench.models import recipe as recipes
from te_bench.models.decoder import Decoder
from te_bench.training import checkpoints
from te_bench.training import corpus as corpora
from te_bench.training import tokenizer as tokenizers
from te_bench.training.checkpoints import Checkpoint
from te_bench.training.evaluation import LastWord, Perplexity, calibrate, last_word, perplexity

NONE = "none"  # the recipe that means bf16 alone
SPLITS = ("val", "train", "all")
REBUILT = ("chars", "bpe")  # tokenisers built from the text to encode
MISSING = "—"
HEADINGS = ("configuration", "nats/token", "gap to bf16", "perplexity", "bits/byte", "last word", "word perplexity")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """The results of one way to compute the model. scales: the source of delayed scaling's; None for other recipes."""

    precision: str  # "bf16" or "fp8"
    recipe: str | None = None
    scales: str | None = None
    perplexity: Perplexity | None = None
    last_word: LastWord | None = None

    @property
    def finite(self) -> bool:
        """Whether all results are finite; with NaN in the weights none is."""
        tokens = 0.0 if self.perplexity is None else self.perplexity.nats_per_token
        words = 0.0 if self.last_word is None else self.last_word.nats_per_word
        return math.isfinite(tokens) and math.isfinite(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The results, bf16 first, and everything that they depend on; sha256 of the texts in UTF-8."""

    checkpoint: str
    device: str
    attention: str
    block: int
    stride: int
    batch: int
    tokenizer: str
    data: str | None
    data_sha256: str | None
    split: str
    seen: bool | None  # whether this text was trained on; None: the checkpoint does not tell
    passages: str | None
    passages_sha256: str | None
    arms: tuple[Evaluated, ...]  # the name in the JSON


def evaluate(
    checkpoint: Path,
    data: str | None = None,
    *,
    passages: Path | None = None,
    recipe: str | None = None,
    device: str = "cpu",
    tokenizer: str | None = None,
    split: str = "val",
    attention: str = "flash",
    block: int | None = None,
    stride: int | None = None,
    batch: int = 8,
    max_tokens: int | None = None,
) -> Evaluation:
    """Measure perplexity on a part of `data` and last-word accuracy on `passages`, in bf16 and, with a recipe, in fp8.

    recipe: None is the checkpoint's own, "none" is bf16 alone. tokenizer: None is the checkpoint's own. block: tokens of a
    window, None is the model's longest. stride: None is half a block. max_tokens: tokens to score. passages: a file of JSON
    lines {"text": ...}. Raise ValueError for anything that the user can correct.
    """
    _check(device, split, data, tokenizer, passages, max_tokens)
    found = checkpoints.load(checkpoint)
    chosen = found.recipe if recipe is None else None if recipe == NONE else recipe
    model = _model(found, chosen, device, attention)
    texts = None if passages is None else read_passages(passages)
    text = None if data is None else corpora.read_text(data)
    spec, words = _tokenizer(found, tokenizer, text)
    tokens, size = (None, None) if text is None else _encode(words, _part(text, split), max_tokens)
    given = _Given(tokenizer=words, tokens=tokens, text_bytes=size, passages=texts)
    block = found.config.block_size if block is None else block
    sizes = {"block": block, "stride": max(1, block // 2) if stride is None else stride, "batch": batch}
    ways = [_evaluated(model, "bf16", given, **sizes)]
    if chosen is not None:
        scales = _settle(model, found, given, block, batch)
        ways.append(dataclasses.replace(_evaluated(model, "fp8", given, **sizes), recipe=chosen, scales=scales))
    sha256 = None if text is None else hashlib.sha256(text.encode()).hexdigest()
    return Evaluation(
        checkpoint=str(checkpoint),
        device=device,
        attention=attention,
        **sizes,
        tokenizer=spec,
        data=data,
        data_sha256=sha256,
        split=split,
        seen=_seen(found, sha256, split),
        passages=None if passages is None else str(passages),
        passages_sha256=None if passages is None else hashlib.sha256(passages.expanduser().read_bytes()).hexdigest(),
        arms=tuple(ways),
    )


def rows(found: Evaluation) -> list[tuple[str, ...]]:
    """Return HEADINGS and a row of text for each configuration; a dash for missing values."""
    reference = found.arms[0].perplexity
    table: list[tuple[str, ...]] = [HEADINGS]
    for way in found.arms:
        ppl, word = way.perplexity, way.last_word
        gap = None if ppl is None or reference is None or way is found.arms[0] else ppl.nats_per_token
        table.append(
            (
                " ".join(filter(None, [way.precision, way.recipe, way.scales and f"({way.scales})"])),
                MISSING if ppl is None else f"{ppl.nats_per_token:.4f}",
                MISSING if gap is None or reference is None else f"{gap - reference.nats_per_token:+.4f}",
                MISSING if ppl is None else f"{ppl.perplexity:.2f}",
                MISSING if ppl is None or ppl.bits_per_byte is None else f"{ppl.bits_per_byte:.4f}",
                MISSING if word is None else f"{100 * word.accuracy:.1f} % ({word.correct}/{word.passages})",
                MISSING if word is None else f"{word.perplexity:.2f}",
            )
        )
    return table


def summary(found: Evaluation) -> str:
    """Return `rows` in aligned columns, with a warning if the model was trained on the text."""
    table = rows(found)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            f"{word:{'<' if i == 0 else '>'}{width}}" for i, (word, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
    if found.seen:
        lines.append(
            f"The checkpoint was trained on this text: --split {found.split} does not measure how well it predicts new text."
        )
    return "\n".join(lines)


def to_json(found: Evaluation) -> dict[str, Any]:
    """Return every field and derived value; null for missing or non-finite values."""
    value = dataclasses.asdict(found)
    for way, shown in zip(found.arms, value["arms"], strict=True):
        if way.perplexity is not None:
            shown["perplexity"]["perplexity"] = way.perplexity.perplexity
        if way.last_word is not None:
            shown["last_word"] |= {"accuracy": way.last_word.accuracy, "perplexity": way.last_word.perplexity}
        for part in ("perplexity", "last_word"):
            shown[part] = shown[part] and {
                k: v if v is None or math.isfinite(v) else None for k, v in shown[part].items()
            }
    return value


def read_passages(path: Path) -> list[str]:
    """Return the texts of a JSON-lines file of {"text": ...}, without blank lines. Raise ValueError, naming the line."""
    content = tokenizers.read_utf8(str(path), 'a file with one {"text": ...} on a line')
    passages = []
    for number, line in enumerate(content.split("\n"), 1):  # splitlines would cut inside JSON strings
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise ValueError(f'{path}, line {number} is not an object with a "text": {line[:60]}')
        passages.append(text)
    if not passages:
        raise ValueError(f'{path} holds no passages: write one {{"text": ...}} on a line')
    return passages


@dataclass(frozen=True, kw_only=True, slots=True)
class _Given:
    """The input of an evaluation: tokens and their text's size in bytes (if known), and passages; None: absent."""

    tokenizer: tokenizers.Tokenizer
    tokens: NDArray[Any] | None
    text_bytes: int | None
    passages: list[str] | None


def _check(
    device: str, split: str, data: str | None, tokenizer: str | None, passages: Path | None, max_tokens: int | None
) -> None:
    """Raise ValueError for wrong arguments before anything large is read."""
    plugins.check("device", device, list(DEVICES))
    plugins.check("split", split, list(SPLITS))
    if data is None and passages is None:
        raise ValueError("nothing to evaluate on: --data for perplexity, --last-word for accuracy, or both")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"{max_tokens} tokens to score: give 1 or more")
    if data is not None:
        corpora.check(data, tokenizer or "bytes")
        if data == corpora.RANDOM:
            raise ValueError("data set 'random' has no text to evaluate on; give text:PATH or hf:NAME")


def _evaluated(model: Decoder, precision: str, given: _Given, *, block: int, stride: int, batch: int) -> Evaluated:
    sizes: dict[str, Any] = {"block": block, "batch": batch, "precision": precision}
    text = words = None
    if given.tokens is not None:
        text = perplexity(model, given.tokens, stride=stride, text_bytes=given.text_bytes, **sizes)
    if given.passages is not None:
        words = last_word(model, given.tokenizer, given.passages, **sizes)
    return Evaluated(precision=precision, perplexity=text, last_word=words)


def _model(found: Checkpoint, recipe: str | None, device: str, attention: str) -> Decoder:
    """Return the checkpoint's model on the device. Raise ValueError, with the reason, if this machine cannot run it."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no NVIDIA GPU; use --device cpu")
    chosen = None if recipe is None else recipes.load(recipe)
    problem = trial_model.attention_problem(dataclasses.replace(found.config, dropout=0.0), "bf16", device)
    reasons = {
        attention: backends.load(attention).unsupported(problem),
        recipe: chosen and chosen.unsupported(device, problem.capability),
    }
    for name, reason in reasons.items():
        if reason:
            raise ValueError(f"{name}: {reason}")
    return found.build(attention=attention, recipe=chosen).to(device)


def _settle(model: Decoder, found: Checkpoint, given: _Given, block: int, batch: int) -> str | None:
    """Return the source of a stateful recipe's scales; calibrate them if the checkpoint has none.

    With its initial scale 1 the recipe would compute differently than in training.
    """
    assert model.recipe is not None
    if model.recipe.make_state(1, torch.device("cpu")) is None:
        return None
    if found.scales:
        return "scales of the checkpoint"
    tokens = given.tokens
    if tokens is None:
        tokens = np.concatenate([ids for one in given.passages or () for ids in given.tokenizer.encode(one)])
    return f"scales calibrated on {calibrate(model, tokens, block=block, batch=batch)} tokens"


def _tokenizer(found: Checkpoint, spec: str | None, text: str | None) -> tuple[str, tokenizers.Tokenizer]:
    """Return (spec, tokeniser) for the evaluation. Raise ValueError if none fits the model's training."""
    if spec is None:
        own = found.text_tokenizer()
        if own is None or found.tokenizer is None:
            raise ValueError(
                f"{found.path} does not hold its tokenizer; give --tokenizer: {', '.join(tokenizers.TOKENIZERS)}"
            )
        chosen = found.tokenizer, own
    else:
        kind, argument = tokenizers.check(spec)
        if kind in REBUILT and text is None:
            raise ValueError(f"tokenizer {spec!r} is made from a text: give the data set that the model was trained on")
        source = tokenizers.read(argument) if kind == "file" else None
        whole = text or ""
        chosen = spec, tokenizers.build(spec, whole, len(_part(whole, "train")), source)
        if kind in REBUILT and chosen[1].vocab != found.config.vocab_size:
            raise ValueError(
                f"tokenizer {spec!r} of this text has {chosen[1].vocab} tokens, the model {found.config.vocab_size}: it "
                "fits only the data set that the model was trained on; give that data set, or file:PATH"
            )
    if chosen[1].vocab > found.config.vocab_size:
        raise ValueError(
            f"tokenizer {chosen[0]!r} has {chosen[1].vocab} tokens and the model's vocabulary {found.config.vocab_size}; "
            "give the tokenizer that the model was trained with"
        )
    return chosen


def _part(text: str, split: str) -> str:
    """Return the characters of a split; like training.corpus, `val` is the last tenth."""
    at = int(len(text) * 0.9)
    return {"train": text[:at], "val": text[at:], "all": text}[split]


def _encode(tokenizer: tokenizers.Tokenizer, text: str, max_tokens: int | None) -> tuple[NDArray[Any], int | None]:
    """Return (tokens, the bytes in UTF-8 that they encode, None if unknown); stops after max_tokens and one."""
    limit = None if max_tokens is None else max_tokens + 1
    pieces: list[NDArray[Any]] = [np.empty(0, np.uint8)]
    for ids in tokenizer.encode(text):
        pieces.append(ids)
        if limit is not None and sum(map(len, pieces)) >= limit:
            break
    tokens = np.concatenate(pieces)
    if limit is None or len(tokens) < limit:
        return tokens, len(text.encode())
    # The last token may end within a character, decoded as U+FFFD. An exact tokeniser restores the text before that.
    decoded = tokenizer.decode(tokens[:limit].tolist()).rstrip("\ufffd")
    return tokens[:limit], len(decoded.encode()) if text.startswith(decoded) else None


def _seen(found: Checkpoint, sha256: str | None, split: str) -> bool | None:
    if sha256 is None or found.data_sha256 is None:
        return None
    return split != "val" and sha256 == found.data_sha256
