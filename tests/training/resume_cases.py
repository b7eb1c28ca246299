"""Checkpoints from 2 ranks to 4 and from 4 to one process, for test_resume: python resume_cases.py prints them as JSON."""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_cases import a_step, at, batch
from torch import Tensor

from te_bench.experiments.measurement import Context
from te_bench.experiments.problems import world_of
from te_bench.experiments.spec import Trial
from te_bench.training import parallel, resume
from te_bench.training.parallel import SINGLE
from te_bench.training.step import TrainStep

#: Mode and optimizer.
KINDS = {mode: (mode, "reference" if mode == "ddp" else None) for mode in ("ddp", "fsdp2", "tp", "zero1")}
INTO = {**KINDS, **{mode: (mode, None) for mode in parallel.GROUPED}, "table": ("zero1", "reference")}  # of four ranks
#: Written by one, read by another.
PAIRS = (
    *(("ddp", "ddp"), ("fsdp2", "zero1"), ("zero1", "hsdp"), ("zero1", "fsdp2"), ("ddp", "table")),
    *(("tp", "fsdp2+tp"), ("zero1", "fsdp2+tp"), ("tp", "fsdp2"), ("fsdp2", "tp")),
)
READ = ("hsdp", "fsdp2", "fsdp2+tp", "table")  # written again, and read by one process
PADDED = 63  # rows of the vocabulary, which no two ranks share evenly
STEPS = 2
RATE = 3e-3


def fresh(kind: str, seed: int = 0) -> TrainStep:
    mode, optimizer = INTO[kind]
    gathering: dict[str, Any] = {"gather": "fp8"}  # whose shards are no plain tensors
    options = {
        "fsdp2": gathering,
        "hsdp": {"shard": 2, **gathering},
        "fsdp2+tp": {"shard": 2, "sequence_parallel": True},
    }.get(mode, {})
    return a_step(parallel.load(mode, **options), "fp8", seed=seed, optimizer=optimizer, padded=PADDED)


def digests(step: TrainStep) -> dict[str, str]:
    """{name: sha256} of whole weights, moments and the FP8 state; of amaxes that are still each rank's own the largest."""
    whole = step.parallel.whole
    parameters = dict(step.model.named_parameters(remove_duplicate=False))
    state = {name: whole(tensor.detach(), parameters.get(name)) for name, tensor in step.model.state_dict().items()}
    state = {name: step.parallel.largest(t) if name.endswith("history_bwd") else t for name, t in state.items()}
    named: dict[Any, str] = {parameter: name for name, parameter in step.model.named_parameters()}
    for of, values in step.own_optimizer.state.items():
        state |= {f"{named.get(of, of)}.{kind}": whole(v, of if v.dim() else None) for kind, v in values.items()}
    mine = {name: digest(tensor) for name, tensor in state.items()}
    everywhere: list[Any] = [mine] * step.parallel.world
    if len(everywhere) > 1:
        dist.all_gather_object(everywhere, mine)
    found: dict[str, str] = {}
    for each in everywhere:
        assert all(found.get(name, value) == value for name, value in each.items())
        found |= each
    return found


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def go_on(step: TrainStep) -> list[float]:
    return [step(*batch(number)).item() for number in range(STEPS, 2 * STEPS)]


def written(folder: Path) -> dict[str, Any]:
    """Of each kind of step: its state when it was saved, and how it went on, as it was and from the checkpoint."""
    found = {}
    for kind in KINDS:
        step = fresh(kind)
        for number in range(STEPS):
            step(*batch(number))
        step.set_rate(RATE)
        resume.save(step, folder / kind, STEPS)
        said = {"state": digests(step), "random": digest(torch.get_rng_state()), "went on": go_on(step)}
        other = fresh(kind, seed=5)
        said["number"] = resume.load(other, folder / kind)
        said["same random"] = digest(torch.get_rng_state()) == said.pop("random")
        found[kind] = {**said, "loaded": digests(other), "resumed": go_on(other)}
    return found


def read(two: Path, four: Path) -> dict[str, Any]:
    """The state of a step that has loaded a checkpoint of the first kind and is of the second; the last is written again."""
    found = {}
    for kind, into in PAIRS:
        step = fresh(into, seed=5)
        number = resume.load(step, two / kind)
        random = [torch.empty_like(torch.get_rng_state()) for _ in range(step.parallel.world)]
        dist.all_gather(random, torch.get_rng_state())
        said = {"number": number, "rate": float(step.optimizer.param_groups[0]["lr"])}
        found[f"{kind} {into}"] = {**said, "state": digests(step), "random": len({digest(each) for each in random})}
        if kind in ("ddp", "zero1") and into in READ:
            resume.save(step, four / into, number)
    return found


def read_by_one(four: Path, into: str) -> dict[str, str]:
    step = a_step(SINGLE, "fp8", seed=5, optimizer=INTO[into][1], padded=PADDED)
    resume.load(step, four / into)
    return digests(step)


def reply(world: int, found: Any) -> Any:
    """found() in so many ranks."""

    def cases(trial: Trial, context: Context) -> dict[str, Any]:
        assert world_of(trial) == dist.get_world_size()
        return {"outcome": "ok", "reason": None, "samples": {}, "found": found()}

    said = at(world, cases)
    assert said["outcome"] == "ok", said["reason"]
    return said["found"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        two, four = Path(name) / "2", Path(name) / "4"
        found = {"written": reply(2, lambda: written(two)), "in four": reply(4, lambda: read(two, four))}
        print(json.dumps({**found, "in one": {into: read_by_one(four, into) for into in READ}}))
