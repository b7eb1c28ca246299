"""A model's validation loss, and downstream checks of a decoder: perplexity of a text by a sliding window, and LAMBADA's
prediction of the last word.

In the checks, blocks compute in the given precision, head and softmax in float32: bf16 logits of GPT-2's size (about
100) are 0.5 apart, so ties would pick the likeliest token.
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

HEAD_ROWS = 1024  # positions whose logits exist at once: 206 MB in float32 at GPT-2's vocabulary
IGNORED = -1  # the target of a position that is not scored


@dataclass(frozen=True, kw_only=True, slots=True)
class Perplexity:
    """Perplexity of `tokens` scored tokens. bits_per_byte is None if the length of the text is unknown."""

    nats_per_token: float
    tokens: int
    bits_per_byte: float | None = None

    @property
    def perplexity(self) -> float:
        """exp(nats per token)."""
        return _exp(self.nats_per_token)


@dataclass(frozen=True, kw_only=True, slots=True)
class LastWord:
    """LAMBADA's result. correct: passages whose last word was predicted. cut: passages whose beginning did not fit."""

    correct: int
    passages: int
    nats_per_word: float
    cut: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.passages

    @property
    def perplexity(self) -> float:
        """exp(nats per word), however many tokens a word has."""
        return _exp(self.nats_per_word)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterator[tuple[Tensor, Tensor]],
    precision: str,
    *,
    quantized: bool = True,
    as_trained: bool = False,
) -> float:
    """Return the mean loss in nats over every token of `batches`, without dropout; each batch counts by its tokens.

    quantized=False switches the FP8 recipe off, so that the model computes in `precision` alone. as_trained=True leaves
    the model in its mode: with the head that it trains with, and with dropout.
    """
    device = next(model.parameters()).device
    total, tokens = torch.zeros((), dtype=torch.float64, device=device), 0
    with contextlib.nullcontext() if as_trained else _in_eval_mode(model):
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
    """Return the mean -ln p(token | at most `block` tokens before it) of tokens (N,), each but the first scored once.

    Windows of `block` tokens begin every `stride` tokens. The first window scores all its targets, every other its last
    `stride`, which see at least block - stride + 1 tokens. stride = block gives windows without overlap; stride = 1 is
    exact and slowest. text_bytes is the length of the text, for bits per byte. Per-tensor FP8 scales are shared by the
    windows of a batch, so with FP8 the result depends on `batch`. Raises ValueError for sizes that do not fit and for
    tokens outside the model's vocabulary.
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
    """Measure how often greedy decoding gets every token of a passage's last word right, and that word's mean -ln p.

    `split_last_word` splits a passage. The word's tokens begin where the passage's tokens first differ from the
    context's. Passages longer than a block lose their beginning. There is no filter of stop words. Rows are padded on
    the right: no scored token sees the padding, but per-tensor FP8 scales do. Raises ValueError, with the number of the
    passage, for one without a context or with a word longer than the block.
    """
    _check_sizes(model, block, batch)
    if not passages:
        raise ValueError("no passages: give one or more")
    rows = [_encode(tokenizer, passage, block, number) for number, passage in enumerate(passages, 1)]
    for tokens, _, _ in rows:
        _check_tokens(model, tokens)
    rows.sort(key=lambda row: len(row[0]))  # neighbours of similar length need little padding
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
    """Return (context, last word); the word is the last run of non-white-space, with the one white space before it.

    White space after the word is dropped; punctuation stays. Raises ValueError for a passage of fewer than two words.
    """
    text = passage.rstrip()
    words = text.split()
    if len(words) < 2:
        raise ValueError(f"{passage[:40]!r} has no context: a passage needs two words or more")
    cut = len(text) - len(words[-1]) - 1
    return text[:cut], text[cut:]


def calibrate(model: Decoder, tokens: NDArray[Any], *, block: int, batch: int) -> int:
    """Set the scales of a stateful recipe from the amaxes of a bf16 forward pass over the first windows of `tokens`.

    Returns the number of tokens read. A model whose state came with its checkpoint needs no calibration. Raises
    ValueError for a model without a recipe, and as perplexity does.
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
    """Switch dropout and gradients off; restore the mode at the end. Raises ValueError for an unsupported precision."""
    plugins.check("precision", precision, list(AUTOCAST))
    if precision == "fp8" and model.recipe is None:
        raise ValueError("fp8 needs a model with a recipe: build it with one, or take bf16")
    with _in_eval_mode(model), torch.no_grad():
        yield


def _score(model: Decoder, x: NDArray[np.int64], y: NDArray[np.int64], precision: str) -> tuple[Tensor, Tensor]:
    """Return -ln p(y), float64, and whether y is the likeliest token, bool, for each y that is not IGNORED.

    x and y are (B, T); results go row by row. If a row's logits are not all finite, no token is its likeliest.
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
    """Yield (x, y), each (at most batch, block): whole windows, then the rest. Only the first scores all targets."""
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
    """Return (at most block + 1 tokens, the last word's index there >= 1, whether the beginning was cut off)."""
    try:
        context, word = split_last_word(passage)
    except ValueError as error:
        raise ValueError(f"passage {number}: {error}") from None
    whole, before = (
        np.concatenate([np.empty(0, np.int64), *tokenizer.encode(text)]).astype(np.int64)
        for text in (context + word, context)
    )
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


def _pad(rows: Sequence[tuple[NDArray[np.int64], int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pad (tokens, first scored) pairs to (x, y) with each row's last token, whose activations have usual sizes."""
    width = max(len(tokens) for tokens, _ in rows) - 1
    x, y = np.empty((len(rows), width), np.int64), np.full((len(rows), width), IGNORED)
    for i, (tokens, first) in enumerate(rows):
        last = len(tokens) - 1
        x[i, :last], x[i, last:] = tokens[:-1], tokens[-1]
        y[i, first - 1 : last] = tokens[first:]
    return x, y
