"""A model's validation loss, and downstream checks of a decoder: perplexity of a text by a sliding window, and LAMBADA's
prediction of the last word.

In the checks the body computes in the precision asked for; the head and the softmax are float32, because bf16 logits of
GPT-2's size (about 100) lie 0.5 apart, and ties would decide which token is the likeliest.
Source: Hugging Face, "Perplexity of fixed-length models"; Paperno et al. 2016 (LAMBADA); Radford et al. 2019, 3.3.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from te_bench import plugins
from te_bench.models import fp8
from te_bench.models.decoder import Decoder
from te_bench.training.step import AUTOCAST, autocast, fp8_autocast
from te_bench.training.tokenizer import Tokenizer

HEAD_ROWS = 1024  # positions whose logits exist at once: 206 MB of float32 at GPT-2's vocabulary
IGNORED = -1  # a target that is not scored


@dataclass(frozen=True, kw_only=True, slots=True)
class Perplexity:
    """tokens: how many were scored. bits_per_byte is None where the length of the text is not known."""

    nats_per_token: float
    tokens: int
    bits_per_byte: float | None = None

    @property
    def perplexity(self) -> float:
        """exp(nats per token)."""
        return _exp(self.nats_per_token)


@dataclass(frozen=True, kw_only=True, slots=True)
class LastWord:
    """correct: passages whose last word was predicted. cut: passages whose beginning did not fit a block."""

    correct: int
    passages: int
    nats_per_word: float
    cut: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.passages

    @property
    def perplexity(self) -> float:
        """exp(nats per word): of the word, however many tokens it has."""
        return _exp(self.nats_per_word)


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], precision: str, *, quantized: bool = True
) -> float:
    """Mean loss in nats over every token of `batches`, dropout off; a smaller last batch counts by its size.

    quantized=False evaluates a model that has an FP8 recipe without it, in `precision` alone.
    """
    device = next(model.parameters()).device
    total, tokens = torch.zeros((), dtype=torch.float64, device=device), 0
    with _in_eval_mode(model):
        for x, y in batches:
            with autocast(device, precision), fp8_autocast(model, quantized):
                total += model(x, y).double() * y.numel()
            tokens += y.numel()
    return total.item() / tokens


@contextlib.contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    """While inside, every module is; afterwards each is in its own mode, as one that is frozen stays in eval mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # those inside of it come after it
            if module.training is not training:
                module.train(training)


def perplexity(
    model: Decoder,
    tokens: NDArray[Any],
    *,
    block: int,
    stride: int,
    batch: int,
    precision: str,
    text_bytes: int | None = None,
) -> Perplexity:
    """-mean ln p(token | at most `block` tokens before it), each token but the first scored once; tokens (N,) integers.

    Windows of `block` tokens begin every `stride` tokens. The first one scores all of its targets, the others the last
    `stride`, which therefore see block - stride + 1 tokens or more; stride = block gives windows that do not overlap, 1
    is exact and slowest. text_bytes: the length of the text that `tokens` stand for; bits per byte are those of a token
    times tokens per byte. Per-tensor FP8 scales are shared by a batch of windows, so there `batch` is part of the result.
    Raises ValueError for sizes that do not fit and for tokens that are not the model's.
    """
    _check_sizes(model, block, batch)
    if not 1 <= stride <= block:
        raise ValueError(f"stride {stride}: give 1 to {block}, the block")
    if len(tokens) < 2:
        raise ValueError(f"{len(tokens)} tokens: perplexity needs 2 or more, for the first one has nothing before it")
    _check_tokens(model, tokens)
    total, count = 0.0, 0
    with _evaluating(model, precision):
        for x, y in _cut_windows(tokens, block, stride, batch):
            nats, _ = _score(model, x, y, precision)
            total += nats.sum().item()
            count += len(nats)
    assert count == len(tokens) - 1
    mean = total / count
    bits = None if text_bytes is None else mean / math.log(2) * len(tokens) / text_bytes
    return Perplexity(nats_per_token=mean, tokens=count, bits_per_byte=bits)


def last_word(
    model: Decoder, tokenizer: Tokenizer, passages: Sequence[str], *, block: int, batch: int, precision: str
) -> LastWord:
    """The share of passages whose last word greedy decoding gets right, every token of it, and the word's mean -ln p.

    A passage is split by `split_last_word`; the word's tokens are those of the whole passage from where it and the tokens
    of its context part. Passages longer than a block lose their beginning. There is no filter of stop words. Rows of a
    batch are filled up on the right, which no scored token sees; per-tensor FP8 scales do.
    Raises ValueError, with the number of the passage, for one without a context or with a word longer than the block.
    """
    _check_sizes(model, block, batch)
    if not passages:
        raise ValueError("no passages: give one or more")
    rows = [_encode(tokenizer, passage, block, number) for number, passage in enumerate(passages, 1)]
    for tokens, _, _ in rows:
        _check_tokens(model, tokens)
    rows.sort(key=lambda row: len(row[0]))  # neighbours of one length need little filling up
    nats_of_words, correct = 0.0, 0
    with _evaluating(model, precision):
        for start in range(0, len(rows), batch):
            some = rows[start : start + batch]
            nats, likeliest = _score(model, *_pad([(tokens, first) for tokens, first, _ in some]), precision)
            nats_of_words += nats.sum().item()
            lengths = [len(tokens) - first for tokens, first, _ in some]
            correct += sum(bool(word.all()) for word in likeliest.split(lengths))
    cut = sum(was_cut for _, _, was_cut in rows)
    return LastWord(correct=correct, passages=len(rows), nats_per_word=nats_of_words / len(rows), cut=cut)


def split_last_word(passage: str) -> tuple[str, str]:
    """(context, last word): the last run of characters that are not white space, with the one white space before it.

    White space after the word is dropped, punctuation is part of it. Raises ValueError for a passage of one word or none.
    """
    text = passage.rstrip()
    words = text.split()
    if len(words) < 2:
        raise ValueError(f"{passage[:40]!r} has no context: a passage needs two words or more")
    cut = len(text) - len(words[-1]) - 1
    return text[:cut], text[cut:]


def calibrate(model: Decoder, tokens: NDArray[Any], *, block: int, batch: int) -> int:
    """Set the scales of a recipe that keeps state from the amaxes of a bf16 pass over the first windows of `tokens`.

    Returns the number of tokens that it read. A model whose state came with its checkpoint needs no calibration.
    Raises ValueError for a model without a recipe, and as perplexity does.
    """
    if model.recipe is None:
        raise ValueError("this model has no FP8 recipe to calibrate: build it with one")
    _check_sizes(model, block, batch)
    _check_tokens(model, tokens)
    count = min(len(tokens) // block, batch)
    window = tokens[: count * block].reshape(count, block) if count else tokens.reshape(1, -1)
    with _evaluating(model, "bf16"), fp8.autocast(enabled=False, calibrating=True, recipe=model.recipe):
        device = next(model.parameters()).device
        with autocast(device, "bf16"):
            model.hidden(torch.from_numpy(window.astype(np.int64)).to(device))
    return window.size


def _exp(nats: float) -> float:
    return math.exp(nats) if not nats > 700 else math.inf  # math.exp raises beyond 709.78


def _check_sizes(model: Decoder, block: int, batch: int) -> None:
    if not 1 <= block <= model.config.block_size:
        raise ValueError(f"block {block}: this model takes 1 to {model.config.block_size}")
    if batch < 1:
        raise ValueError(f"batch {batch}: give 1 or more")


def _check_tokens(model: Decoder, tokens: NDArray[Any]) -> None:
    vocab = model.config.vocab_size
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab:
        raise ValueError(
            f"token {high if high >= vocab else low}: the model knows 0 to {vocab - 1}; take its tokenizer"
        )


@contextlib.contextmanager
def _evaluating(model: Decoder, precision: str) -> Iterator[None]:
    """Dropout and gradients off; the model is left as it was found. Raises ValueError for a precision it has not."""
    plugins.check("precision", precision, list(AUTOCAST))
    if precision == "fp8" and model.recipe is None:
        raise ValueError("fp8 needs a model with a recipe: build it with one, or take bf16")
    with _in_eval_mode(model), torch.no_grad():
        yield


def _score(model: Decoder, x: NDArray[np.int64], y: NDArray[np.int64], precision: str) -> tuple[Tensor, Tensor]:
    """-ln p(target), float64, and whether it is the likeliest token, bool, of every y that is not IGNORED, row by row.

    x and y (B, T). A likeliest token among logits that are not finite is none.
    """
    device = next(model.parameters()).device
    inputs, labels = (torch.from_numpy(part).to(device) for part in (x, y))
    with autocast(device, precision), model.autocast(precision == "fp8"):
        hidden = model.hidden(inputs)
    scored = labels != IGNORED
    head = model.tables().head.weight[: model.config.vocab_size]
    head = head.to(torch.promote_types(head.dtype, torch.float32))
    nats, likeliest = [], []
    for rows, targets in zip(hidden[scored].split(HEAD_ROWS), labels[scored].split(HEAD_ROWS), strict=True):
        logits = F.linear(rows.to(head.dtype), head)
        loss = F.cross_entropy(logits, targets, reduction="none")
        nats.append(loss.double())
        likeliest.append((logits.argmax(dim=1) == targets) & loss.isfinite())
    return torch.cat(nats), torch.cat(likeliest)


def _cut_windows(
    tokens: NDArray[Any], block: int, stride: int, batch: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """(x, y), each (at most batch, block): whole windows first, the first of them alone in scoring all; then the rest."""
    targets = len(tokens) - 1
    whole = max(0, (targets - block) // stride + 1)
    for start in range(0, whole, batch):
        begins = np.arange(start, min(start + batch, whole)) * stride
        both = np.stack([tokens[begin : begin + block + 1] for begin in begins]).astype(np.int64)
        x, y = np.ascontiguousarray(both[:, :-1]), both[:, 1:].copy()
        y[1 if start == 0 else 0 :, : block - stride] = IGNORED
        yield x, y
    scored = block + (whole - 1) * stride if whole else 0
    if scored < targets:
        rest = np.asarray(tokens[whole * stride :]).astype(np.int64)[None]
        y = rest[:, 1:].copy()
        y[:, : y.shape[1] - (targets - scored)] = IGNORED
        yield np.ascontiguousarray(rest[:, :-1]), y


def _encode(tokenizer: Tokenizer, passage: str, block: int, number: int) -> tuple[NDArray[np.int64], int, bool]:
    """(tokens, at most block + 1; where the last word begins, at least 1; whether the beginning was cut off)."""
    try:
        context, word = split_last_word(passage)
    except ValueError as error:
        raise ValueError(f"passage {number}: {error}") from None
    whole, before = (_encode_text(tokenizer, text) for text in (context + word, context))
    length = min(len(whole), len(before))
    same = whole[:length] == before[:length]
    first = length if same.all() else int(same.argmin())
    if not 1 <= first < len(whole):
        raise ValueError(f"passage {number}: {passage[:40]!r} has no token before its last word, or none of it")
    extra = max(0, len(whole) - (block + 1))
    if first - extra < 1:
        raise ValueError(
            f"passage {number}: its last word has {len(whole) - first} tokens, more than a block of {block}"
        )
    return whole[extra:], first - extra, extra > 0


def _encode_text(tokenizer: Tokenizer, text: str) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *tokenizer.encode(text)]).astype(np.int64)


def _pad(rows: Sequence[tuple[NDArray[np.int64], int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(x, y) of (tokens, first scored) pairs; filled up with the row's last token, whose activations are usual ones."""
    width = max(len(tokens) for tokens, _ in rows) - 1
    x, y = np.empty((len(rows), width), np.int64), np.full((len(rows), width), IGNORED)
    for i, (tokens, first) in enumerate(rows):
        last = len(tokens) - 1
        x[i, :last], x[i, last:] = tokens[:-1], tokens[-1]
        y[i, first - 1 : last] = tokens[first:]
    return x, y
