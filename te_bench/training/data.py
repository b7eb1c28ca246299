"""Batches of a corpus: random windows for training, a fixed sequence of windows for validation.

The batch of a step is a function of (seed, step) and of nothing else. It has a generator of its own, so what the model
draws, how often it is evaluated and where training was resumed cannot change what it is trained on.
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
    """The training stream: at(step) is (x, y), int64, each (batch, block) on `device`; y is x one token later.

    Windows begin anywhere in the training part with equal probability, as nanoGPT's get_batch draws them; `once`, they
    follow each other there, and each is taken once, in an order that the seed shuffles: at(step) raises ValueError after the
    last. `corpus` None is random data: tokens uniform over [0, vocab). Raises ValueError for sizes below 1, a negative seed,
    a corpus shorter than a block, or one with tokens that the model's `vocab` lacks.
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
        """The batch of step 0, 1, ..., in any order and any number of times."""
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

    The windows do not overlap, and there are `windows(...)` of them, of which one in `every` is taken, evenly spread;
    the last batch may have fewer rows, so a mean loss weights each batch by its x.numel(). Raises ValueError as Batches
    does, before the first batch.
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
    """How many windows of block tokens validation sees: all that fit, or as many as max_tokens allows.

    The tokens after the last whole window, fewer than a block, are left out. Raises ValueError if max_tokens < block.
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
    """A generator of its own for each tuple of whole numbers; SeedSequence mixes them into unrelated states."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))


def _cut_windows(tokens: NDArray[Any], starts: NDArray[np.int64], block: int) -> NDArray[np.int64]:
    """(len(starts), block + 1) tokens from each start on."""
    return np.stack([tokens[start : start + block + 1] for start in starts]).astype(np.int64)


def _draw(generator: np.random.Generator, rows: int, block: int, vocab: int) -> NDArray[np.int64]:
    return generator.integers(0, vocab, (rows, block + 1))


def _send_pair(window: NDArray[np.int64], device: torch.device) -> tuple[Tensor, Tensor]:
    """(x, y) of (rows, block + 1) tokens, both contiguous, sent in one copy; pinned, so it overlaps with the GPU."""
    both = torch.from_numpy(np.stack([window[:, :-1], window[:, 1:]]))
    if device.type == "cuda":
        both = both.pin_memory().to(device, non_blocking=True)
    return both[0], both[1]
