"""Check that a peak of memory is no less than what the process held at the same time."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from te_bench.experiments.checks.tolerances import RESIDENT
from te_bench.experiments.measurement import CheckFailed
from te_bench.training.parallel import SINGLE
from te_bench.training.step import TrainStep

_STAT, _RSS = Path("/proc/self/stat"), 21  # proc(5): field 24, the 22nd after the name in brackets


def require(peaks: Mapping[str, list[float]], held: int) -> None:
    """Raise CheckFailed for an allocator's peak below `held` bytes, or a CPU's below what is resident now.

    No system but Linux says how much is resident; elsewhere a CPU's peak is not checked.
    """
    for name, values in peaks.items():
        least = RESIDENT * _resident() if name == "peak_rss_bytes" else held
        if min(values) < least:
            raise CheckFailed(f"{name}: {min(values) / 2**20:.6g} MiB, but {least / 2**20:.6g} MiB are held")


def of_step(step: TrainStep, batch: Iterable[Tensor]) -> int:
    """Return the bytes on the step's device that exist together as it updates: weights, moments, gradients, a batch.

    Of several ranks, or of an optimizer that keeps gradients in its own way, gradients are not counted.
    """
    states = step.own_optimizer.state
    moments = [value for state in states.values() for value in state.values() if isinstance(value, Tensor)]
    held = of_tensors(t for t in (*_of_model(step.model), *moments, *batch) if t.device.type == step.device.type)
    if step.table is not None or step.parallel is not SINGLE:
        return held
    updates = {p: float(state["step"]) for p, state in states.items()}
    return held + sum(p.nbytes for p in updates if updates[p] == max(updates.values()))


def of_module(module: nn.Module, inputs: Iterable[Tensor]) -> int:
    """Return the bytes of a module after its passes: weights, the gradients that are there, inputs."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return of_tensors([*_of_model(module), *gradients, *inputs])


def of_tensors(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of their storages, each once; of a sharded tensor this rank's, of other subclasses none."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    storages = [t.untyped_storage() for t in local if type(t) in (Tensor, nn.Parameter)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def _of_model(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _resident() -> int:
    if not _STAT.exists():
        return 0
    return int(_STAT.read_text().rpartition(")")[2].split()[_RSS]) * os.sysconf("SC_PAGE_SIZE")
