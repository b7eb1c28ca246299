"""A loss curve on real data, by steps or by a budget of seconds, with a fixed validation stream beside it.

`experiments.curve` reads it and has its clock, which counts training only.
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
import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from te_bench.experiments import janitor, trial_model, trunks
from te_bench.experiments.checks import adopted_step, held, training_step, what_ran
from te_bench.experiments.curve import Curve
from te_bench.experiments.instruments import compilation, memory
from te_bench.experiments.measurement import CheckFailed, Context, Diverged, Measurement, Unsaved
from te_bench.experiments.problems import TrainingProblem, end_of, ranks_of, trunk_of
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import max_batch
from te_bench.models.adopted import Adopted
from te_bench.training import checkpoints, resume
from te_bench.training import corpus as corpora
from te_bench.training.step import TrainStep, train

TRUNK = ("step", "loss", "grad_norm", "val_step", "val_loss")  # samples of a trunk that its branches record


def run(trial: Trial, context: Context) -> Measurement:
    p = TrainingProblem.of(trial)
    if p.branch_at is not None and context.trunks is None:
        with tempfile.TemporaryDirectory() as folder:
            return run(trial, dataclasses.replace(context, trunks=Path(folder)))
    work: dict[str, object] = {}
    if p.batch == "max":
        max_batch.require_free(trial)
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

    inputs, targets = (step.parallel.rows(x[: sizes["batch"]]) for x in at(0))  # the first micro-batch
    curve = Curve(trial, step, corpus, probe=(inputs, targets), first=first, end=p.bf16_from)
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
    samples = {**curve.samples, **peaks, **_of_trunk({} if trunk is None else trunk.samples)}
    measurement = Measurement(check=check, work=work, samples=samples)
    if reason:
        raise Diverged(reason, measurement)
    if context.checkpoints is not None:
        try:
            _save(step, trial, corpus, context.checkpoints)
        except OSError as error:
            raise Unsaved(f"the trained model is not saved: {error}", measurement) from error
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


def _train(curve: Curve, step: TrainStep, at: Callable[[int], tuple[Tensor, Tensor]], first: int) -> str | None:
    """Train to the curve's end. Return a reason if training ended before."""
    step.fed = functools.partial(curve.fed.note, step)
    reasons = (curve.add(number, loss) for number, loss in train(step, at, curve.progress, first))
    reason = next((reason for reason in reasons if reason), None) or curve.read()
    step.fed = None
    curve.fed.require(curve.number)
    return reason


def _in_bf16(last: Trial, curve: Curve, batch: tuple[Tensor, Tensor], state: Path) -> TrainStep:
    """Return a step that goes on from `state` in bf16. The study's bf16 control, which is checked, has the same."""
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
    """Return the measurement with what ran in one more step, whose weights nobody uses after.

    The step is of few rows: at the largest batch the profiler would have no memory left.
    """
    few = _few(batch, step.optim.accumulate, trial)
    memory.reset(trial.device)
    return what_ran.require_step(trial, step, lambda: step(*few), few[0].numel(), measurement)


def _trunk(trial: Trial, context: Context, corpus: corpora.Corpus | None) -> trunks.Trunk | None:
    """Return what a branch goes on from, or None for a trial that begins with the first step. Raises Diverged."""
    control = trunk_of(trial)
    if control is None:
        return None
    assert context.trunks is not None
    found = trunks.find(control, context.trunks, lambda folder: _grow(control, corpus, folder))
    memory.reset(trial.device)
    return found


def _grow(control: Trial, corpus: corpora.Corpus | None, folder: Path) -> dict[str, list[Any]]:
    """Train the control's first steps as it would itself, and write their end to `folder`. Return their samples.

    The step is not checked: the control's own is, which goes on from here.
    """
    branch_at = TrainingProblem.of(control).branch_at
    assert branch_at is not None
    at, step = trial_model.batches_of(control, corpus), trial_model.step_of(control)
    trunks.require_room(step, folder.parent, "the trunk")
    torch.manual_seed(step.parallel.seed(control.seed))
    curve = Curve(control, step, corpus, probe=at(0), end=branch_at)
    if reason := _train(curve, step, at, 0):
        raise Diverged(f"the trunk, in bf16: {reason}", Measurement(samples=_of_trunk(curve.samples)))
    resume.save(step, folder, branch_at)
    return curve.samples


def _of_trunk(samples: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Return a trunk's samples by the names that they have in a record."""
    return {f"trunk_{name}": samples[name] for name in TRUNK if name in samples}


def _save(step: TrainStep, trial: Trial, corpus: corpora.Corpus | None, folder: Path) -> None:
    """Write the trained model to TRIAL-ID.pt, for `te-bench evaluate`; of a user's model its state dict.

    A model with a planted fault, or one that ended in bf16, is written without a recipe. All ranks make the weights whole,
    and the first writes them.
    """
    model: Any = step.model
    path, parallel = folder / f"{trial.id}.pt", step.parallel
    if isinstance(model, Adopted):
        parameters = dict(model.module.named_parameters(remove_duplicate=False))
        state = {name: parallel.whole(value, parameters.get(name)) for name, value in model.module.state_dict().items()}
        if parallel.rank == 0:
            checkpoints.write(state, path)
        return
    p = TrainingProblem.of(trial)
    recipe = None if p.fault or p.bf16_from is not None else trial.recipe
    checkpoints.save(model, path, recipe=recipe, corpus=corpus, about=trial.to_json(), parallel=parallel)


def _begun(trial: Trial, tokens: Tensor, targets: Tensor) -> tuple[TrainStep, dict[str, Any]]:
    """Return the step and its check. A planted fault would fail it, and is what the trial measures."""
    if TrainingProblem.of(trial).fault:
        return trial_model.step_of(trial), {"skipped": "planted fault"}
    return training_step.begin(trial, tokens, targets)


def _few(batch: tuple[Tensor, Tensor], accumulate: int, trial: Trial) -> tuple[Tensor, Tensor]:
    """Return a batch's first rows in mode eager, else all: other shapes cannot be captured, or compile anew."""
    if trial.mode != "eager":
        return batch
    parts = TrainingProblem.of(trial).replicas
    rows = max(accumulate, min(len(batch[0]), -(-4 // parts) * parts * accumulate))
    return batch[0][:rows], batch[1][:rows]
