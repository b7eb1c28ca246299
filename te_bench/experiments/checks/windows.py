"""Check which windows a model reads and at which rates it trains, worked out without training.data and training.step."""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from te_bench.experiments import trial_model
from te_bench.experiments.measurement import CheckFailed
from te_bench.experiments.problems import StepProblem, TrainingProblem
from te_bench.experiments.spec import Trial
from te_bench.models import adopted
from te_bench.training.corpus import Corpus
from te_bench.training.data import ORDER, RANDOM_WINDOWS, TRAINING, VALIDATION
from te_bench.training.step import TrainStep


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


class Fed:
    """The windows and learning rates of a training's steps, to be compared with the plan and the schedule."""

    def __init__(self, trial: Trial, plan: Plan | None, first: int):
        self.plan, self.optim = plan, trial_model.optim_of(trial)
        self.steps = TrainingProblem.of(trial).steps
        self._next = first  # the first step that is not compared yet
        self._given: list[tuple[Tensor | None, Tensor | float]] = []  # digest and rate of each step from there on

    def note(self, step: TrainStep, inputs: Tensor, targets: Tensor) -> None:
        """Note a step's batch and rate, and wait for neither."""
        rate = step.optimizer.param_groups[0]["lr"]
        taken = None if self.plan is None else digest(inputs, targets)
        self._given.append((taken, rate.clone() if isinstance(rate, Tensor) else rate))

    def require(self, last: int) -> None:
        """Raise CheckFailed unless every step up to `last` had the plan's windows at the schedule's rate, once."""
        given, self._given = self._given, []
        if last + 1 - self._next != len(given):
            raise CheckFailed(f"{len(given)} batches were trained on from step {self._next} to step {last}")
        taken = [each for each, _ in given if each is not None]
        found = torch.stack(taken).tolist() if taken else []
        for number, (_, rate) in enumerate(given, self._next):
            self._require_rate(number, float(rate))
            if self.plan is not None:
                self.plan.require(number, found[number - self._next])
        self._next = last + 1

    def _require_rate(self, number: int, found: float) -> None:
        """Raise CheckFailed unless the rate is the schedule's, written out; under a budget only the clock knows it."""
        if self.steps is None:
            return
        o = self.optim
        right = o.learning_rate * (number + 1) / (o.warmup + 1)
        if number >= o.warmup:
            share = math.cos(math.pi / 2 * number / self.steps) ** 2
            right = share * o.learning_rate + (1 - share) * o.min_learning_rate
        if not math.isclose(found, right, rel_tol=1e-5, abs_tol=1e-12):
            raise CheckFailed(f"step {number} trained at the learning rate {found:.6g}: {right:.6g} expected")


def _pair(windows: NDArray[Any]) -> tuple[Tensor, Tensor]:
    both = torch.from_numpy(windows.astype(np.int64))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def plan_of(trial: Trial, corpus: Corpus | None = None) -> Plan | None:
    """Return the trial's plan, or None for a user's model that draws its own inputs."""
    source = StepProblem.of(trial).source
    drawn = corpus is None and source is not None and adopted.described(source).drawn is not None
    return None if drawn else Plan(trial, corpus)
