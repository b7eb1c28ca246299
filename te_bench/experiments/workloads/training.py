"""A loss curve on real data, by steps or by a budget of seconds, with a fixed validation stream beside it.

problem: model, batch (a number, or "max" for the largest that fits), block, vocab, padded_vocab, data, tokenizer, corpus
(the cache key, which holds the content hash), steps or budget_s, eval_every (steps) or eval_every_s, eval_tokens, and any
field of models.train.Optim.
samples: step, loss, time_s; val_step, val_loss, val_time_s. The clock counts training only: not evaluation, not the
check, not the first two steps, in which a compiled model is compiled.
"""

import dataclasses
import time
from typing import Any

import torch
from torch import Tensor

from te_bench.experiments.measurement import Context, Diverged, Measurement
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import _check, _model, max_batch
from te_bench.models import corpus as corpora
from te_bench.models import data
from te_bench.models.train import TrainStep, evaluate, train

LOG_EVERY = 10  # steps between reads of the loss: each read waits for the device
COMPILING = 2  # first steps, whose time is not training time


def run(trial: Trial, context: Context) -> Measurement:
    work: dict[str, object] = {}
    if trial.problem["batch"] == "max":
        tries = max_batch.largest(trial)
        work = {"batch": tries[0], "tries": tries[1]}
        trial = dataclasses.replace(trial, problem={**trial.problem, "batch": tries[0]})
    _model.require_supported(trial)  # touches CUDA, after which the tries could not have forked
    p = trial.problem
    corpus = None if p["data"] == "random" else corpora.load(str(p["corpus"]), cache=context.cache)
    sizes = _model.sizes_of(trial)
    optim = _model.optim_of(trial)
    rows = {**sizes, "batch": sizes["batch"] * optim.accumulate}
    stream = data.Batches(corpus, **rows, seed=trial.seed, device=trial.device)
    step = TrainStep(_model.build(trial), optim, precision=trial.precision, mode=trial.mode)
    check = _model.check_step(trial, *_few(stream.at(0), optim.accumulate, trial), step)
    _model.reset_memory(trial.device)
    torch.manual_seed(trial.seed)  # dropout draws the same masks whatever the check drew

    curve = _Curve(trial, step, corpus)
    work |= {"batch": sizes["batch"], "tokens": rows["batch"] * sizes["block"], "windows": curve.windows}
    reason = None
    for number, loss in train(step, stream.at, curve.progress):
        reason = curve.add(number, loss)
        if reason:
            break
    if reason is None:
        reason = curve.finish()
    samples = {**curve.samples(), **_model.peak_memory(trial.device, step)}
    measurement = Measurement(check=check, work=work, samples=samples)
    if reason:
        raise Diverged(reason, measurement)
    few = _few(stream.at(0), optim.accumulate, trial)  # at the largest batch the profiler would have no memory left
    _model.reset_memory(trial.device)
    seen = _check.kernels_seen(lambda: step(*few), trial.device)
    return _check.require_kernels(trial, seen, measurement)


def _few(batch: tuple[Tensor, Tensor], accumulate: int, trial: Trial) -> tuple[Tensor, Tensor]:
    """A batch for the check: whole where the step was compiled for its shape, else its first rows."""
    if trial.mode != "eager" and not _model.config_of(trial).dropout:
        return batch
    rows = max(accumulate, min(len(batch[0]), 4 * accumulate))
    return batch[0][:rows], batch[1][:rows]


class _Curve:
    """The running record of one training: what was lost when, by the training clock."""

    def __init__(self, trial: Trial, step: TrainStep, corpus: corpora.Corpus | None):
        self.trial, self.step, self.corpus = trial, step, corpus
        p = trial.problem
        self.steps, self.budget_s = p.get("steps"), p.get("budget_s")
        self.eval_every, self.eval_every_s = p.get("eval_every"), p.get("eval_every_s")
        self.tokens = {"max_tokens": p.get("eval_tokens")}
        self.windows = data.windows(corpus, trial.number("block"), **self.tokens)  # type: ignore[arg-type]
        self.elapsed, self.mark = 0.0, time.perf_counter()
        self.pending: list[tuple[int, Tensor]] = []
        self.last_eval_s = 0.0
        self.step_, self.loss, self.time_s = [], [], []  # type: ignore[var-annotated]
        self.val_step, self.val_loss, self.val_time_s = [], [], []  # type: ignore[var-annotated]
        self.number = 0

    def progress(self, number: int) -> float | None:
        """Where step `number` stands between 0 and 1, or None when training is over."""
        if self.steps is not None:
            return number / int(self.steps) if number < int(self.steps) else None
        at = self.elapsed / float(self.budget_s or 0)
        return at if at < 1 else None

    def add(self, number: int, loss: Tensor) -> str | None:
        """Note a step's loss; every LOG_EVERY steps read them, and evaluate when it is time. A reason ends training."""
        self.number = number
        self.pending.append((number, loss))
        if number == COMPILING - 1:
            self._wait()
            self.mark = time.perf_counter()
        if self.budget_s is None and (number + 1) % LOG_EVERY:
            return None  # under a budget every step is read: it must end on time, and slow steps make a read cheap
        reason = self._read()
        due = self.eval_every and (number + 1) % int(self.eval_every) == 0
        due = due or (self.eval_every_s and self.elapsed - self.last_eval_s >= float(self.eval_every_s))
        return self._evaluate() if reason is None and due else reason

    def finish(self) -> str | None:
        reason = self._read()
        if reason is None and (not self.val_step or self.val_step[-1] != self.number + 1):
            reason = self._evaluate()
        return reason

    def samples(self) -> dict[str, list[float]]:
        return {
            "step": self.step_,
            "loss": self.loss,
            "time_s": self.time_s,
            "val_step": self.val_step,
            "val_loss": self.val_loss,
            "val_time_s": self.val_time_s,
        }

    def _wait(self) -> None:
        if self.trial.device == "cuda":
            torch.cuda.synchronize()

    def _read(self) -> str | None:
        """Bring the pending losses to the host, each at the time the training clock now shows."""
        self._wait()
        now = time.perf_counter()
        if self.number >= COMPILING:
            self.elapsed += now - self.mark
        self.mark = now
        for number, loss in self.pending:
            value = loss.item()
            if not abs(value) < float("inf"):
                return f"the loss is {value} at step {number}"
            self.step_.append(number)
            self.loss.append(value)
            self.time_s.append(self.elapsed)
        self.pending.clear()
        return None

    def _evaluate(self) -> str | None:
        """Note the validation loss; one that is not finite is a reason to end training."""
        sizes: dict[str, Any] = _model.sizes_of(self.trial) | self.tokens
        batches = data.validation(self.corpus, **sizes, device=self.trial.device)
        loss = evaluate(self.step.model, batches, self.trial.precision)
        if not abs(loss) < float("inf"):
            return f"the validation loss is {loss} after step {self.number}"
        self.val_loss.append(loss)
        self.val_step.append(self.number + 1)
        self.val_time_s.append(self.elapsed)
        self.last_eval_s = self.elapsed
        self.mark = time.perf_counter()
        return None
