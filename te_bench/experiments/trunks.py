"""The trunk that a study's branches share: the first steps of its bf16 control, trained once and kept.

    DIR/TRIAL/              a checkpoint of training.resume, and curve.json, the samples up to the branch
    DIR/TRIAL/broke.json    instead of both, if bf16 diverged: the reason, and the samples up to there
    DIR/TRIAL.lock

TRIAL is the control's id, which includes the seed. The first trial that needs a missing trunk trains it; others wait for the
lock. A folder TRIAL is always complete: it is written under another name, which the next holder of the lock removes.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from te_bench.experiments import trial_model
from te_bench.experiments.checks.gradients import settle
from te_bench.experiments.measurement import Diverged, Measurement
from te_bench.experiments.spec import Trial
from te_bench.training import resume
from te_bench.training.corpus import locked
from te_bench.training.durable import replacing
from te_bench.training.step import TrainStep

CURVE, BROKE = "curve.json", "broke.json"
#: Least bytes of a moment, by AdamW's format for it; None: those of its weight.
MOMENT = {"bf16": 2, "fp8": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trunk:
    """An existing trunk. `samples`: of its training; `trained`: by this trial; took_s: seconds of training or waiting."""

    folder: Path
    samples: Mapping[str, list[Any]]
    trained: bool
    took_s: float


def find(control: Trial, folder: Path, grow: Callable[[Path], Mapping[str, list[Any]]]) -> Trunk:
    """Return the control's trunk; if it is not in `folder`, `grow` trains it, writes a checkpoint and returns samples.

    Raise Diverged if bf16 diverged in it, also for another trial, and OSError if it cannot be written.
    """
    began, trained = time.perf_counter(), False
    own = folder / control.id
    with locked(own):
        if not own.exists():
            half = own.with_suffix(".half")
            shutil.rmtree(half, ignore_errors=True)  # left by a killed trial
            try:
                try:
                    _write(half / CURVE, grow(half))
                except Diverged as broke:
                    _write(half / BROKE, {"reason": str(broke), "samples": broke.measurement.samples})
            except OSError as error:  # free space, because a full disk could not store the record and log of this error
                shutil.rmtree(half, ignore_errors=True)
                free = shutil.disk_usage(folder).free / 1e6
                raise OSError(f"{error}; {free:,.0f} MB are free there") from error
            half.rename(own)
            trained = True
    if (own / BROKE).exists():
        told = json.loads((own / BROKE).read_text())
        raise Diverged(told["reason"], Measurement(samples=told["samples"]))
    samples = json.loads((own / CURVE).read_text())
    return Trunk(folder=own, samples=samples, trained=trained, took_s=time.perf_counter() - began)


def _write(path: Path, found: Mapping[str, Any]) -> None:
    """Write a file; it is on the disk before the trunk gets its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write_text(json.dumps(found))


def require_room(step: TrainStep, folder: Path, what: str) -> None:
    """Raise OSError, before hours of training, if the disk has no room for `what`, the step's weights and moments."""
    trained = [p for p in step.model.parameters() if p.requires_grad]
    least = sum(p.nbytes + 2 * p.numel() * MOMENT.get(step.states or "", p.element_size()) for p in trained)
    if least > shutil.disk_usage(folder).free:
        raise OSError(f"{what} takes {least / 1e6:,.0f} MB or more in {folder}")


def graft(step: TrainStep, trial: Trial, folder: Path, once: Callable[[], object]) -> str:
    """Load the checkpoint in `folder` into the step; return the SHA-256 of its weights before any of them is moved.

    once: a pass over the batch of the branch's first step, which changes no weight. FP8 begins as in a checked trial's first
    step, with the recipe's scales settled on the weights.
    """
    once()  # load a captured step into the memory that its graph reads
    resume.load(step, folder, begin_fp8=True)
    weights = _hash(step.model.named_parameters())
    with torch.random.fork_rng(["cuda"] if trial.device == "cuda" else []):  # dropout continues the trunk's masks
        trial_model.perturb(step.model, trial)
        settle(trial.recipe, once)
    return weights


def digest(step: TrainStep) -> str:
    """Return the SHA-256 of the step's weights, moments and number of updates."""
    names = {parameter: name for name, parameter in step.model.named_parameters()}
    state = ((names.get(of, of), values) for of, values in step.optimizer.state.items())
    kept = ((f"{name} {kind}", value) for name, values in state for kind, value in values.items())
    return _hash([*step.model.named_parameters(), *kept])


def _hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    found = hashlib.sha256()
    for _, tensor in sorted(tensors, key=lambda named: named[0]):
        found.update(tensor.detach().flatten().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()
