"""Batches of a corpus: random windows for training, a fixed sequence of windows for validation.

The batch of a step is a function of (seed, step) and of nothing else. It has its own generator. So the model's random
draws, the number of evaluations and a resume cannot change it.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from te_bench.training.corpus import Corpus, check_length, windows_once

# The first word of each stream's seed keeps the streams apart: ASCII "data", "eval" and "once".
TRAINING, VALIDATION, ORDER = 0x64617461, 0x6576616C, 0x6F6E6365

RANDOM_WINDOWS = 64  # validation windows of random data, whose loss is ln(vocab) whatever the model learns


class Batches:
    """The training stream: at(step) returns (x, y), int64, each (batch, block) on `device`; y is x one token later.

    Windows begin anywhere in the training part with equal probability, as in nanoGPT's get_batch. With `once`, windows
    do not overlap and each is used once, in an order shuffled by the seed; at(step) raises ValueError after the last.
    If `corpus` is None, tokens are uniform over [0, vocab). Raises ValueError for sizes below 1, a negative seed, a
    corpus shorter than a block, and a corpus with tokens beyond the model's `vocab`.
    """

    def __init__(
        self,
        corpus: Corpus | None,
        *,
        block: int,
        batch: int,
        vocab: int,
        seed: int,
        device: str | torch.device = "cpu",
        once: bool = False,
    ) -> None:
        _check(corpus, block, batch, vocab)
        if seed < 0:
            raise ValueError(f"seed {seed} is negative; give 0 or more")
        self.block, self.batch, self.vocab, self.seed = block, batch, vocab, seed
        self.device = torch.device(device)
        self._tokens = None if corpus is None else corpus.tokens("train")
        self._order = None
        if once and corpus is not None:
            self._order = _make_generator(ORDER, seed).permutation(windows_once(corpus, block))

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch of `step` = 0, 1, ...; steps may be asked for in any order and repeatedly."""
        generator = _make_generator(TRAINING, self.seed, step)
        if self._tokens is None:
            return _send_pair(_draw(generator, self.batch, self.block, self.vocab), self.device)
        if self._order is not None:
            starts = self.block * self._order[step * self.batch : (step + 1) * self.batch]
            if starts.size < self.batch:
                raise ValueError(
                    f"step {step} of {self.batch} windows: the text has {self._order.size} that are each taken once; train "
                    "for fewer steps, or on a longer text"
                )
        else:
            starts = generator.integers(0, len(self._tokens) - self.block, self.batch)
        return _send_pair(_cut_windows(self._tokens, starts, self.block), self.device)


def validation(
    corpus: Corpus | None,
    *,
    block: int,
    batch: int,
    vocab: int,
    max_tokens: int | None = None,
    every: int = 1,
    device: str | torch.device = "cpu",
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (x, y), int64 (at most batch, block), over the first windows of the validation part: the same every time.

    The windows do not overlap. There are `windows(...)` of them, and every `every`-th is used. The last batch may have
    fewer rows, so weight each batch's mean loss by its x.numel(). Raises ValueError as Batches does, before the first
    batch.
    """
    _check(corpus, block, batch, vocab)
    count = windows(corpus, block, max_tokens)
    if corpus is None:
        fixed = _draw(_make_generator(VALIDATION, 0, 0), count, block, vocab)[::every]
        rows = (fixed[start : start + batch] for start in range(0, len(fixed), batch))
    else:
        tokens = corpus.tokens("val")
        starts = np.arange(0, count, every) * block
        rows = (_cut_windows(tokens, starts[start : start + batch], block) for start in range(0, starts.size, batch))
    return (_send_pair(window, torch.device(device)) for window in rows)


def windows(corpus: Corpus | None, block: int, max_tokens: int | None = None) -> int:
    """Count the validation windows of `block` tokens: all that fit, or as many as max_tokens allows.

    The tokens after the last whole window are left out. Raises ValueError if max_tokens < block.
    """
    if max_tokens is not None and max_tokens < block:
        raise ValueError(f"max_tokens {max_tokens} is less than a block of {block}; give at least {block}")
    there = RANDOM_WINDOWS if corpus is None else (corpus.val_tokens - 1) // block
    return there if max_tokens is None else min(there, max_tokens // block)


def _check(corpus: Corpus | None, block: int, batch: int, vocab: int) -> None:
    for name, size in {"block": block, "batch": batch, "vocab": vocab}.items():
        if size < 1:
            raise ValueError(f"{name} {size} is too small; give 1 or more")
    if corpus is not None:
        check_length(corpus, block)
        if corpus.vocab > vocab:
            raise ValueError(
                f"tokenizer {corpus.tokenizer!r} has {corpus.vocab} tokens and the model's vocabulary {vocab}; "
                f"give the model at least {corpus.vocab} or take a smaller tokenizer"
            )


def _make_generator(*words: int) -> np.random.Generator:
    """Return a generator seeded by these whole numbers; SeedSequence mixes each tuple into an unrelated state."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))


def _cut_windows(tokens: NDArray[Any], starts: NDArray[np.int64], block: int) -> NDArray[np.int64]:
    return np.stack([tokens[start : start + block + 1] for start in starts]).astype(np.int64)


def _draw(generator: np.random.Generator, rows: int, block: int, vocab: int) -> NDArray[np.int64]:
    return generator.integers(0, vocab, (rows, block + 1))


def _send_pair(window: NDArray[np.int64], device: torch.device) -> tuple[Tensor, Tensor]:
    """Split (rows, block + 1) tokens into contiguous (x, y), sent in one copy from pinned memory so it overlaps."""
    both = torch.from_numpy(np.stack([window[:, :-1], window[:, 1:]]))
    if device.type == "cuda":
        both = both.pin_memory().to(device, non_blocking=True)
    return both[0], both[1]
