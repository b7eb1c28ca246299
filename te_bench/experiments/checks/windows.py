"""Check which windows a model reads. Seed and corpus decide them; this module works them out without training.data."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from te_bench.experiments import trial_model
from te_bench.experiments.measurement import CheckFailed
from te_bench.experiments.problems import StepProblem
from te_bench.experiments.spec import Trial
from te_bench.models import adopted
from te_bench.training.corpus import Corpus
from te_bench.training.data import ORDER, RANDOM_WINDOWS, TRAINING, VALIDATION


def digest(inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of every token times its place, () int64 on the tokens' device, without waiting for it."""
    both = torch.stack((inputs, targets)).flatten()
    return (both * torch.arange(1, both.numel() + 1, device=both.device)).sum()


class Plan:
    """The windows of a trial as (inputs, targets) on the host. Without a corpus they are random tokens."""

    def __init__(self, trial: Trial, corpus: Corpus | None):
        sizes = trial_model.sizes_of(trial)
        self.seed, self.block, self.vocab, self.batch = trial.seed, sizes["block"], sizes["vocab"], sizes["batch"]
        self.rows = self.batch * trial_model.optim_of(trial).accumulate
        self.parts: dict[str, NDArray[Any]] = {}
        self.order: NDArray[np.int64] | None = None
        self._held_out: dict[tuple[int, int], list[int]] = {}
        if corpus is not None:
            dtype, folder = np.dtype(corpus.dtype).newbyteorder("<"), corpus.train.parent
            self.parts = {part: np.memmap(folder / f"{part}.bin", dtype, "r") for part in ("train", "val")}
            if trial.problem.get("order") == "once":
                there = (len(self.parts["train"]) - 1) // self.block
                self.order = np.random.default_rng([ORDER, self.seed]).permutation(there)

    def of_step(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the windows of step `number`, of all its micro-batches."""
        drawn = np.random.default_rng([TRAINING, self.seed, number])
        if not self.parts:
            return _pair(drawn.integers(0, self.vocab, (self.rows, self.block + 1)))
        if self.order is not None:
            return self._cut("train", self.block * self.order[number * self.rows :][: self.rows])
        return self._cut("train", drawn.integers(0, len(self.parts["train"]) - self.block, self.rows))

    def held_out(self, most: int | None, every: int) -> list[int]:
        """Return the digest of each batch of an evaluation: one in `every` held-out windows, of the first `most` tokens."""
        there = (len(self.parts["val"]) - 1) // self.block if self.parts else RANDOM_WINDOWS
        count = there if most is None else min(there, most // self.block)
        if (count, every) not in self._held_out:
            if self.parts:
                chosen = self.block * np.arange(0, count, every)
            else:
                drawn = np.random.default_rng([VALIDATION, 0, 0])
                chosen = drawn.integers(0, self.vocab, (count, self.block + 1))[::every]
            batches = (chosen[start : start + self.batch] for start in range(0, len(chosen), self.batch))
            pairs = (self._cut("val", each) if self.parts else _pair(each) for each in batches)
            self._held_out[count, every] = [int(digest(*pair)) for pair in pairs]
        return self._held_out[count, every]

    def require(self, number: int, found: int) -> None:
        """Raise CheckFailed unless `found` is the digest of step `number`'s windows."""
        if found != int(digest(*self.of_step(number))):
            raise CheckFailed(f"step {number} had other windows than seed {self.seed} decides")

    def _cut(self, part: str, starts: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        return _pair(self.parts[part][starts[:, None] + np.arange(self.block + 1)])


def _pair(windows: NDArray[Any]) -> tuple[Tensor, Tensor]:
    both = torch.from_numpy(windows.astype(np.int64))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def plan_of(trial: Trial, corpus: Corpus | None = None) -> Plan | None:
    """Return the trial's plan, or None for a user's model that draws its own inputs."""
    source = StepProblem.of(trial).source
    drawn = corpus is None and source is not None and adopted.described(source).drawn is not None
    return None if drawn else Plan(trial, corpus)
