"""A loss curve on real data, by steps or by a budget of seconds, with a fixed validation stream beside it.

The clock counts training only: not evaluation, not the looks at FP8's numerics, not the check, not the first two steps, in
which a compiled model is compiled.
samples: step, loss, time_s, and grad_norm where gradients are clipped; val_step, val_loss, val_time_s; val_loss_native, at
the end, under a budget at each evaluation; probe_step, and of each Linear's tensors amax:MODULE.TENSOR, saturated:... and
underflowed:..., the latter two fractions of the elements.
Of a branch all of these are from its first step on, and trunk_step, trunk_loss and so on are of the trunk before it.
work: batch, tokens and windows; ran (checks.what_ran); tries of batch "max"; trunk, of a branch: the SHA-256 of the weights
that it began with, whether this trial trained them, and took_s, how long it did so or waited; on a GPU launches, the kernels
of one step (eager: of a step on four rows at most of each micro-batch); in a mode that compiles graph_breaks and recompiles.
Of a training that ends in bf16 what ran, launches and kernels are of its first part; ended has what ran in the last.
"""

import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from te_bench.experiments import janitor, trial_model, trunks
from te_bench.experiments.checks import adopted_step, held, training_step, update, what_ran, windows
from te_bench.experiments.instruments import compilation, fp8_numerics, memory, profiling
from te_bench.experiments.measurement import CheckFailed, Context, Diverged, Measurement
from te_bench.experiments.problems import TrainingProblem, end_of, ranks_of, trunk_of
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import max_batch
from te_bench.models.adopted import Adopted
from te_bench.training import checkpoints, data, resume
from te_bench.training import corpus as corpora
from te_bench.training.evaluation import evaluate
from te_bench.training.step import TrainStep, train

LOG_EVERY = 10  # steps between reads of the loss: each read waits for the device
#: Of the steps: from here on slopes and bands are read from the curve, so all its points see the same tokens.
LATE = 0.75
COMPILING = 2  # first steps, whose time is not training time
TRUNK = ("step", "loss", "grad_norm", "val_step", "val_loss")  # samples of a trunk that its branches record


def run(trial: Trial, context: Context) -> Measurement:
    p = TrainingProblem.of(trial)
    if p.branch_at is not None and context.trunks is None:
        with tempfile.TemporaryDirectory() as folder:
            return run(trial, dataclasses.replace(context, trunks=Path(folder)))
    work: dict[str, object] = {}
    if p.batch == "max":
        batch, tries = max_batch.largest(trial)
        work = {"batch": batch, "tries": tries}
        trial = trial.with_(batch=batch)
    trial_model.require_supported(trial)  # touches CUDA, after which the tries could not have forked
    corpus = None if p.data == corpora.RANDOM else corpora.load(str(p.corpus), cache=context.cache)
    trunk = _trunk(trial, context, corpus)
    compilation.begin(trial)
    sizes = trial_model.sizes_of(trial)
    optim = trial_model.optim_of(trial)
    rows = {**sizes, "batch": sizes["batch"] * optim.accumulate}
    at = trial_model.batches_of(trial, corpus)
    first = p.branch_at or 0
    step, check = _begun(trial, *_few(at(0), optim.accumulate, trial))
    if p.bf16_from is not None:
        trunks.require_room(step, Path(tempfile.gettempdir()), f"the state of step {p.bf16_from}")
    torch.manual_seed(step.parallel.seed(trial.seed))  # dropout draws the same masks whatever the check drew
    if trunk is not None:
        few = _few(at(first), optim.accumulate, trial)
        weights = trunks.graft(step, trial, trunk.folder, lambda: step.gradients(*few, records=True))
        work["trunk"] = {"sha256": weights, "trained": trunk.trained, "took_s": trunk.took_s}
    memory.reset(trial.device)  # a graft holds weights and moments twice, training does not

    probe = [step.parallel.rows(x) for x in _micro(at(0), optim.accumulate)]
    curve = _Curve(trial, step, corpus, probe=(probe[0], probe[1]), first=first, end=p.bf16_from)
    work |= {"batch": sizes["batch"], "tokens": rows["batch"] * sizes["block"], "windows": curve.windows}
    work |= ranks_of(trial)
    reason, peaks, looked, ended = _train(curve, step, at, first), dict[str, list[float]](), None, trial
    if reason is None and (last := end_of(trial)) is not None:
        assert p.bf16_from is not None
        ended, peaks = last, _peaks(trial, step)
        scratch = Path(tempfile.mkdtemp(prefix="te-bench-"))
        with janitor.remove_at_end(scratch):  # a trial may be killed, and its state is as large as a trunk
            state = scratch / "state"
            resume.save(step, state, p.bf16_from)
            left = trunks.digest(step)
            looked = _looked(trial, step, at(0), Measurement(check=check, work={**work, **compilation.counts(trial)}))
            del step  # with `curve`'s it is the last: two at once may not fit
            step = _in_bf16(last, curve, at(p.bf16_from), state)
            if (step.precision, trunks.digest(step)) != ("bf16", left):
                raise CheckFailed(f"step {p.bf16_from} does not go on in bf16 from the weights and moments before it")
        reason = _train(curve, step, at, p.bf16_from)
    reason = reason or curve.finish()
    peaks = {name: [max(*values, *peaks.get(name, values))] for name, values in _peaks(trial, step).items()}
    samples = {**curve.samples(), **peaks, **_before(trunk)}
    measurement = Measurement(check=check, work=work, samples=samples)
    if reason:
        raise Diverged(reason, measurement)
    if context.checkpoints is not None:
        _save(step, trial, corpus, context.checkpoints)
    measurement = dataclasses.replace(measurement, work={**work, **compilation.counts(ended)})
    measurement = _looked(ended, step, at(0), measurement)
    if looked is None:
        return measurement
    work = {**looked.work, "ended": {"ran": measurement.work["ran"]}}
    return dataclasses.replace(looked, work=work, samples=samples)


def _peaks(trial: Trial, step: TrainStep) -> dict[str, list[float]]:
    peaks = memory.peak(trial.device, step)
    held.require(peaks, held.of_step(step, ()))
    return peaks


def _train(curve: "_Curve", step: TrainStep, at: Callable[[int], tuple[Tensor, Tensor]], first: int) -> str | None:
    """Train to the curve's end; a reason where that was not reached."""
    step.fed = curve.fed
    reasons = (curve.add(number, loss) for number, loss in train(step, at, curve.progress, first))
    reason = next((reason for reason in reasons if reason), None) or curve.read()
    step.fed = None
    curve.require_plan()
    return reason


def _in_bf16(last: Trial, curve: "_Curve", batch: tuple[Tensor, Tensor], state: Path) -> TrainStep:
    """The step that goes on from `state` in bf16. It is not checked: the study's bf16 control is, which has the same."""
    curve.step = None  # type: ignore[assignment]
    memory.reset(last.device)
    compilation.begin(last)
    step = trial_model.step_of(last)
    few = _few(batch, trial_model.optim_of(last).accumulate, last)
    if isinstance(step.model, Adopted):
        adopted_step.first_pass(last, step, *few)  # which tells what is to run, as the check of another trial does
    trunks.graft(step, last, state, lambda: step.gradients(*few, records=True))
    memory.reset(last.device)
    curve.go_on(last, step)
    return step


def _looked(trial: Trial, step: TrainStep, batch: tuple[Tensor, Tensor], measurement: Measurement) -> Measurement:
    """With what ran in one more step, whose weights nobody uses after.

    At the largest batch the profiler would have no memory left.
    """
    accumulate = trial_model.optim_of(trial).accumulate
    few = _few(batch, accumulate, trial)
    memory.reset(trial.device)
    with update.made(step, profiling.LOOKS[trial.device]):
        seen = profiling.kernels_seen(lambda: step(*few), trial.device)
    tokens = few[0].numel() // accumulate // step.parallel.replicas
    return what_ran.require(trial, seen, measurement, what_ran.expected_of_step(trial, tokens, step.model))


def _trunk(trial: Trial, context: Context, corpus: corpora.Corpus | None) -> trunks.Trunk | None:
    """What a branch goes on from; None of a trial that begins with the first step. Raises Diverged where bf16 breaks."""
    control = trunk_of(trial)
    if control is None:
        return None
    assert context.trunks is not None
    found = trunks.find(control, context.trunks, lambda folder: _grow(control, corpus, folder))
    memory.reset(trial.device)
    return found


def _grow(control: Trial, corpus: corpora.Corpus | None, folder: Path) -> dict[str, list[Any]]:
    """Train the control's first steps as it would itself, and write where they led to; what they sampled.

    The step is not checked: the control's own is, which goes on from here.
    """
    branch_at = TrainingProblem.of(control).branch_at
    assert branch_at is not None
    at, step = trial_model.batches_of(control, corpus), trial_model.step_of(control)
    trunks.require_room(step, folder.parent, "the trunk")
    torch.manual_seed(step.parallel.seed(control.seed))
    curve = _Curve(control, step, corpus, probe=at(0), end=branch_at)
    if reason := _train(curve, step, at, 0):
        raise Diverged(f"the trunk, in bf16: {reason}", Measurement(samples=_named(curve.samples())))
    resume.save(step, folder, branch_at)
    return curve.samples()


def _before(trunk: trunks.Trunk | None) -> dict[str, list[Any]]:
    return {} if trunk is None else _named(trunk.samples)


def _named(samples: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    return {f"trunk_{name}": samples[name] for name in TRUNK if name in samples}


def _save(step: TrainStep, trial: Trial, corpus: corpora.Corpus | None, folder: Path) -> None:
    """Write the trained model to TRIAL-ID.pt, for `te-bench evaluate`; of a user's model its state dict.

    A planted fault is no recipe to run it in, and what ended in bf16 has none. Of several ranks all make the weights whole,
    and the first writes them.
    """
    model: Any = step.model
    path, parallel = folder / f"{trial.id}.pt", step.parallel
    if isinstance(model, Adopted):
        parameters = dict(model.module.named_parameters(remove_duplicate=False))
        state = {name: parallel.whole(value, parameters.get(name)) for name, value in model.module.state_dict().items()}
        if parallel.rank == 0:
            torch.save(state, path)
        return
    p = TrainingProblem.of(trial)
    recipe = None if p.fault or p.bf16_from is not None else trial.recipe
    checkpoints.save(model, path, recipe=recipe, corpus=corpus, about=trial.to_json(), parallel=parallel)


def _begun(trial: Trial, tokens: Tensor, targets: Tensor) -> tuple[TrainStep, dict[str, Any]]:
    """The step and its check. A planted fault would rightly fail it, and is what that trial is to measure."""
    if TrainingProblem.of(trial).fault:
        return trial_model.step_of(trial), {"skipped": "planted fault"}
    return training_step.begin(trial, tokens, targets)


def _micro(batch: tuple[Tensor, Tensor], accumulate: int) -> tuple[Tensor, Tensor]:
    """The first micro-batch."""
    rows = len(batch[0]) // accumulate
    return batch[0][:rows], batch[1][:rows]


def _few(batch: tuple[Tensor, Tensor], accumulate: int, trial: Trial) -> tuple[Tensor, Tensor]:
    """A batch's first rows, eager; else all, for a captured step takes no other shape and a compiled one compiles anew."""
    if trial.mode != "eager":
        return batch
    parts = TrainingProblem.of(trial).replicas
    rows = max(accumulate, min(len(batch[0]), -(-4 // parts) * parts * accumulate))
    return batch[0][:rows], batch[1][:rows]


class _Curve:
    """The running record of one training: what was lost when, by the training clock."""

    def __init__(
        self,
        trial: Trial,
        step: TrainStep,
        corpus: corpora.Corpus | None,
        probe: tuple[Tensor, Tensor],
        *,
        first: int = 0,
        end: int | None = None,
    ):
        """first: its first step; end: the one before which it stops, where that is not the schedule's."""
        self.trial, self.step, self.corpus, self.probe = trial, step, corpus, probe
        self.problem = p = TrainingProblem.of(trial)
        self.steps, self.end = p.steps, p.steps if end is None else end
        self.clocked, self.owed = first + COMPILING, 0
        self.plan = windows.plan_of(trial, corpus)
        #: Of each step since the last look: the digest of its windows, and its learning rate.
        self.given: list[tuple[Tensor | None, Tensor | float]] = []
        self.foretold = (-1, 0.0)  # a step, and the loss that it is to find
        self.windows = data.windows(corpus, p.block, max_tokens=p.eval_tokens)
        early = (p.early_eval_tokens or 0) // p.block
        self.early_every = max(1, self.windows // early) if early else 1
        self.elapsed, self.mark = 0.0, time.perf_counter()
        self.pending: list[tuple[int, Tensor, Tensor]] = []  # step, loss, norm of the gradients
        self.last_eval_s = 0.0
        self.step_, self.loss, self.time_s = [], [], []  # type: ignore[var-annotated]
        self.val_step, self.val_loss, self.val_time_s = [], [], []  # type: ignore[var-annotated]
        self.more: dict[str, list[float | None]] = {}  # what only some trials sample
        self.evaluations = 0
        probes = (p.probes or 0) if trial.recipe else 0
        evaluations = (p.steps or 0) // max(p.eval_every or 1, 1)
        self.probe_every = max(1, round(evaluations / probes)) if probes else 0
        self.number, self.first, self.looked = first - 1, first, first

    def progress(self, number: int) -> float | None:
        """Where step `number` stands between 0 and 1, or None when training is over."""
        if self.steps is not None:
            return number / self.steps if number < (self.end or 0) else None
        at = self.elapsed / (self.problem.budget_s or 0)
        return at if at < 1 else None

    def go_on(self, trial: Trial, step: TrainStep) -> None:
        """From here on it is of this step, to the schedule's end; the clock stands still until that is compiled."""
        self.trial, self.step, self.end = trial, step, self.steps
        self.clocked, self.owed, self.probe_every = self.number + 1 + COMPILING, COMPILING, 0

    def fed(self, inputs: Tensor, targets: Tensor) -> None:
        """Note what a step was given, and its learning rate, and wait for neither."""
        rate = self.step.optimizer.param_groups[0]["lr"]
        taken = None if self.plan is None else windows.digest(inputs, targets)
        self.given.append((taken, rate.clone() if isinstance(rate, Tensor) else rate))

    def require_plan(self) -> None:
        """Raise CheckFailed unless each step since the last look had the plan's windows at the schedule's rate, once."""
        given, self.given = self.given, []
        if self.number + 1 - self.looked != len(given):
            raise CheckFailed(f"{len(given)} batches were trained on from step {self.looked} to step {self.number}")
        taken = [each for each, _ in given if each is not None]
        found = torch.stack(taken).tolist() if taken else []
        for number, (_, rate) in enumerate(given, self.looked):
            self._require_rate(number, float(rate))
            if self.plan is not None:
                self.plan.require(number, found[number - self.looked])
        self.looked = self.number + 1

    def add(self, number: int, loss: Tensor) -> str | None:
        """Note a step's loss; every LOG_EVERY steps read them, and evaluate when it is time. A reason ends training.

        Raises CheckFailed for a step that is not the next, or whose dropout an evaluation left off.
        """
        if number != self.first + len(self.step_) + len(self.pending):
            raise CheckFailed(
                f"step {number} came after {len(self.step_) + len(self.pending)} steps from {self.first} on"
            )
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
        reason = self.read()
        if reason is None and (not self.val_step or self.val_step[-1] != self.number + 1):
            reason = self._evaluate()
        return reason

    def samples(self) -> dict[str, list[Any]]:
        return {
            **self.more,
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

    def read(self) -> str | None:
        """Bring the pending losses to the host, each at the time the training clock now shows."""
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
            self.step_.append(number)
            self.loss.append(value)
            self.time_s.append(self.elapsed)
            if self.step.grad_norm is not None:
                self._more("grad_norm", norm)
        return None

    def _more(self, name: str, value: float | None) -> None:
        """JSON has no NaN and no infinity: what is not a finite number is null."""
        known = value is not None and abs(value) < float("inf")
        self.more.setdefault(name, []).append(value if known else None)

    def _evaluate(self) -> str | None:
        """Note the validation loss; one that is not finite is a reason to end training.

        Of evaluations in both precisions the trial's own is at the end alone: it takes FP8 as long as bf16's.
        Raises CheckFailed where steps had other windows or rates than planned, where an evaluation had other windows, and
        where both precisions computed the same.
        """
        self.require_plan()
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
        self.val_loss.append(loss)
        self.val_step.append(self.number + 1)
        self.val_time_s.append(self.elapsed)
        if both and at_end:
            self._more("val_loss_native", native)
        self.evaluations += 1
        if self.probe_every and self.evaluations % self.probe_every == 0:
            self._more("probe_step", self.number + 1)
            for name, figure in fp8_numerics.probe(self.step, *self.probe).items():
                self._more(name, figure)
        if self.plan is not None and (ahead := self.number + 1) < (self.end or 0):
            inputs, targets = (x.to(self.trial.device) for x in self.plan.of_step(ahead))
            self.foretold = ahead, training_step.foretold(self.trial, self.step, inputs, targets, by=evaluate)
        self.last_eval_s = self.elapsed
        self.mark = time.perf_counter()
        return None

    def _require_rate(self, number: int, found: float) -> None:
        """Raise CheckFailed unless the rate was the schedule's, written out; of a budget only the clock knows it."""
        if self.steps is None:
            return
        o = trial_model.optim_of(self.trial)
        right = o.learning_rate * (number + 1) / (o.warmup + 1)
        if number >= o.warmup:
            share = math.cos(math.pi / 2 * number / self.steps) ** 2
            right = share * o.learning_rate + (1 - share) * o.min_learning_rate
        if not math.isclose(found, right, rel_tol=1e-5, abs_tol=1e-12):
            raise CheckFailed(f"step {number} trained at the learning rate {found:.6g}: {right:.6g} expected")

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
