"""The running record of a training: losses by its clock, evaluations, and looks at FP8's numerics.

The clock counts training only: not evaluations, looks or the check, nor the first two steps, which compile.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from te_bench.experiments import trial_model
from te_bench.experiments.checks import training_step, windows
from te_bench.experiments.instruments import fp8_numerics
from te_bench.experiments.measurement import CheckFailed
from te_bench.experiments.problems import TrainingProblem
from te_bench.experiments.spec import Trial
from te_bench.training import data
from te_bench.training.corpus import Corpus
from te_bench.training.evaluation import evaluate
from te_bench.training.step import TrainStep

LOG_EVERY = 10  # steps between reads of the loss: each read waits for the device
#: Share of the steps after which slopes and bands are read from the curve, so all its points are of the same tokens.
LATE = 0.75
COMPILING = 2  # first steps, whose time is not training time
ALWAYS = ("step", "loss", "time_s", "val_step", "val_loss", "val_time_s")


class Curve:
    """One training's samples (`workloads.training` names them), each read and held to the plan as it comes."""

    def __init__(
        self,
        trial: Trial,
        step: TrainStep,
        corpus: Corpus | None,
        probe: tuple[Tensor, Tensor],
        *,
        first: int = 0,
        end: int | None = None,
    ):
        """Begin before step `first`. end: the step to stop before; None is the schedule's end.

        probe: the micro-batch by which FP8's numerics are looked at.
        """
        self.trial, self.step, self.corpus, self.probe = trial, step, corpus, probe
        self.problem = p = TrainingProblem.of(trial)
        self.steps, self.end = p.steps, p.steps if end is None else end
        self.samples: dict[str, list[Any]] = {name: [] for name in ALWAYS}
        self.number, self.first = first - 1, first  # of the last step, and of the first
        self.pending: list[tuple[int, Tensor, Tensor]] = []  # step, loss, norm of the gradients
        self.clocked, self.owed = (
            first + COMPILING,
            0,
        )  # the first step on the clock; steps whose time is to be estimated
        self.elapsed, self.mark, self.last_eval_s = 0.0, time.perf_counter(), 0.0
        self.plan = windows.plan_of(trial, corpus)
        self.fed = windows.Fed(trial, self.plan, first)
        self.foretold: tuple[int, training_step.Foretold | None] = (
            -1,
            None,
        )  # a step, and the loss that it has to find
        self.windows = data.windows(corpus, p.block, max_tokens=p.eval_tokens)
        early = (p.early_eval_tokens or 0) // p.block
        self.early_every = max(1, self.windows // early) if early else 1
        probes = (p.probes or 0) if trial.recipe else 0
        evaluations = (p.steps or 0) // max(p.eval_every or 1, 1)
        self.probe_every = max(1, round(evaluations / probes)) if probes else 0

    def progress(self, number: int) -> float | None:
        """Return where step `number` stands between 0 and 1, or None if training is over."""
        if self.steps is not None:
            return number / self.steps if number < (self.end or 0) else None
        at = self.elapsed / (self.problem.budget_s or 0)
        return at if at < 1 else None

    def go_on(self, trial: Trial, step: TrainStep) -> None:
        """Go on with this step to the schedule's end; the clock stands still until it is compiled."""
        self.trial, self.step, self.end = trial, step, self.steps
        self.clocked, self.owed, self.probe_every = self.number + 1 + COMPILING, COMPILING, 0

    def add(self, number: int, loss: Tensor) -> str | None:
        """Note a step's loss, and read or evaluate when it is time. Return a reason to end training, or None.

        Raises CheckFailed for a step that is not the next, or that trained without dropout after an evaluation.
        """
        if number != self.number + 1:
            raise CheckFailed(f"step {number} came after {self.number + 1 - self.first} steps from {self.first} on")
        if not self.step.model.training:
            raise CheckFailed(f"step {number} trained as in an evaluation, without dropout")
        self.number = number
        norm = self.step.grad_norm
        self.pending.append((number, loss, loss if norm is None else norm))
        if number == self.clocked - 1:
            self._wait()
            self.mark = time.perf_counter()
        every, every_s = self.problem.eval_every, self.problem.eval_every_s
        due = bool(every and (number + 1) % every == 0)
        if self.problem.budget_s is None and (number + 1) % LOG_EVERY and not due:
            return None  # under a budget every step is read: it must end on time, and slow steps make a read cheap
        reason = self.read()
        due = due or bool(every_s and self.elapsed - self.last_eval_s >= every_s)
        return self._evaluate() if reason is None and due else reason

    def finish(self) -> str | None:
        """Read what is pending and evaluate the end. Return a reason why the training diverged, or None."""
        reason = self.read()
        if reason is None and self.samples["val_step"][-1:] != [self.number + 1]:
            reason = self._evaluate()
        return reason

    def read(self) -> str | None:
        """Bring the pending losses to the host, each at the clock's present time. Return a reason to end training."""
        self._wait()
        now = time.perf_counter()
        if self.number >= self.clocked:  # steps that compiled beside others would have taken as long as those after
            self.elapsed += (now - self.mark) * (1 + self.owed / (self.number + 1 - self.clocked))
            self.owed = 0
        self.mark = now
        pending, self.pending = self.pending, []
        read = [torch.stack((loss.float(), norm.float())) for _, loss, norm in pending]
        values = torch.stack(read).tolist() if read else []
        for (number, _, _), (value, norm) in zip(pending, values, strict=True):
            if not abs(value) < float("inf"):
                return f"the loss is {value} at step {number}"
            if number == self.foretold[0]:
                training_step.require_foretold(number, value, self.foretold[1])
            self._sample(step=number, loss=value, time_s=self.elapsed)
            if self.step.grad_norm is not None:
                self._sample(grad_norm=norm)
        return None

    def _wait(self) -> None:
        if self.trial.device == "cuda":
            torch.cuda.synchronize()

    def _sample(self, **values: float | None) -> None:
        """Add one value to each of these samples; what is no finite number is null, for JSON has no NaN."""
        for name, value in values.items():
            known = value is not None and abs(value) < float("inf")
            self.samples.setdefault(name, []).append(value if known else None)

    def _evaluate(self) -> str | None:
        """Sample the validation loss. Return a reason to end training if it is not finite.

        Of evaluations in both precisions the trial's own is at the end alone: in FP8 it takes as long as in bf16. Raises
        CheckFailed where steps had other windows or rates than planned, where an evaluation had other windows, and where
        both precisions computed the same.
        """
        self.fed.require(self.number)
        precision = self.trial.precision
        both = self.problem.evaluate == "both"
        at_end = self.steps is None or self.number + 1 == self.steps
        alike = not both or precision == "bf16"
        loss = native = self._loss(precision if alike else "bf16", quantized=alike)
        if not alike and at_end:
            native = self._loss(precision)
            if native == loss:
                raise CheckFailed(f"the validation losses in bf16 and in {precision} are the same: {loss}")
        if not abs(loss) + abs(native) < float("inf"):
            return f"the validation loss is {loss if abs(native) < float('inf') else native} after step {self.number}"
        self._sample(val_loss=loss, val_step=self.number + 1, val_time_s=self.elapsed)
        if both and at_end:
            self._sample(val_loss_native=native)
        if self.probe_every and len(self.samples["val_step"]) % self.probe_every == 0:
            self._sample(probe_step=self.number + 1, **fp8_numerics.probe(self.step, *self.probe))
        if self.plan is not None and (ahead := self.number + 1) < (self.end or 0):
            plan = self.plan
            told = training_step.foretold(self.trial, self.step, lambda: plan.of_step(ahead), by=evaluate)
            self.foretold = ahead, told
        self.last_eval_s = self.elapsed
        self.mark = time.perf_counter()
        return None

    def _loss(self, precision: str, *, quantized: bool = True) -> float:
        """Return the held-out windows' loss. Raises CheckFailed if dropout is on, or windows are missing or others."""
        early = self.steps is not None and self.number + 1 < LATE * self.steps
        every, rows, taken = self.early_every if early else 1, 0, list[Tensor]()
        how: dict[str, Any] = {**trial_model.sizes_of(self.trial), "every": every, "device": self.trial.device}

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            nonlocal rows
            for inputs, targets in data.validation(self.corpus, max_tokens=self.problem.eval_tokens, **how):
                if self.step.model.training:
                    raise CheckFailed(f"the evaluation after step {self.number} has dropout")
                rows += len(inputs)
                if self.plan is not None:
                    taken.append(windows.digest(inputs, targets))
                yield inputs, targets

        loss = evaluate(self.step.model, batches(), precision, quantized=quantized)
        if rows != -(-self.windows // every):
            raise CheckFailed(f"the evaluation after step {self.number} is of {rows} of {self.windows} windows")
        if self.plan and torch.stack(taken).tolist() != self.plan.held_out(self.problem.eval_tokens, every):
            raise CheckFailed(f"the evaluation after step {self.number} is of other windows than those held out")
        return loss
