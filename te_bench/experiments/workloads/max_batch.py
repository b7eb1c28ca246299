"""The largest batch whose training step fits in memory, by bisection, each try in a fresh process.

problem: model, block, vocab, padded_vocab, memory_limit_gib (None: all of the GPU). samples: max_batch (1).
work.tries: [{batch, fits, peak_allocated_bytes, peak_reserved_bytes, total_bytes}] in the order they were made.
"""

import dataclasses
import multiprocessing
import resource
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch

from te_bench.experiments.measurement import Context, Measurement, Unsupported
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import _model, train_step
from te_bench.models.train import TrainStep

STEPS = 3  # AdamW's moments exist after the first; a captured or compiled step has settled after the second
LIMIT = 1 << 16  # no try beyond this batch

Try = dict[str, Any]


def run(trial: Trial, context: Context) -> Measurement:
    batch, tries = largest(trial)
    return Measurement(work={"tries": tries}, samples={"max_batch": [float(batch)]})


def largest(trial: Trial) -> tuple[int, list[Try]]:
    """(batch, tries): batch fits and batch + 1 does not. Nothing here touches the GPU itself: the tries are forks.

    Raises MemoryError when not even a batch of 1 fits, Unsupported on a CPU without memory_limit_gib.
    """
    if trial.device == "cpu" and trial.problem.get("memory_limit_gib") is None:
        raise Unsupported("the largest batch on a CPU needs memory_limit_gib: a host without memory kills at random")
    tries: list[Try] = []

    def fits(batch: int) -> bool:
        tries.append(attempt(trial, batch))
        return bool(tries[-1]["fits"])

    low, high = 0, 1  # low fits, high is the next to try until one does not
    while high <= LIMIT and fits(high):
        low, high = high, _next(tries, high)
    if high > LIMIT:
        return low, tries
    while high - low > 1:
        middle = (low + high) // 2 if len(tries) % 2 else _guess(tries, low, high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low == 0:
        raise MemoryError("not even a batch of 1 fits")
    return low, tries


def _next(tries: list[Try], batch: int) -> int:
    """Twice as much, eight times while the peak shows that memory is far from full."""
    peak, total = tries[-1]["peak_reserved_bytes"], tries[-1]["total_bytes"]
    return batch * (8 if peak and total and peak < total / 16 else 2)


def _guess(tries: list[Try], low: int, high: int) -> int:
    """Where the line through the two largest fitting peaks meets the total, strictly between low and high.

    Peak memory is linear in the batch, so the line saves most of the bisection; every other try bisects all the same.
    """
    points = sorted({(t["batch"], t["peak_reserved_bytes"]) for t in tries if t["fits"] and t["peak_reserved_bytes"]})
    middle = (low + high) // 2
    if len(points) >= 2 and tries[-1]["total_bytes"]:
        (b0, m0), (b1, m1) = points[-2:]
        if m1 > m0:
            middle = int(b1 + (tries[-1]["total_bytes"] - m1) * (b1 - b0) / (m1 - m0))
    return min(max(middle, low + 1), high - 1)


def attempt(trial: Trial, batch: int) -> Try:
    """Train STEPS steps at this batch in a fresh process."""
    fork = multiprocessing.get_context("fork")  # the parent has imported torch and never touched CUDA
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_steps, args=(trial, batch, sender))
    process.start()
    sender.close()
    try:
        reply = receiver.recv_bytes().decode() if receiver.poll(None) else ""
    except EOFError:
        reply = ""
    process.join()
    kind, _, rest = reply.partition(" ")
    if kind == "ok":
        allocated, reserved, total = (int(word) or None for word in rest.split())
        return _try(batch, fits=True, allocated=allocated, reserved=reserved, total=total)
    if kind == "oom" or process.exitcode == -9:  # -9: the kernel's out-of-memory killer
        return _try(batch, fits=False, total=int(rest or 0) or None)
    if kind == "unsupported":
        raise Unsupported(rest)
    raise RuntimeError(rest or f"the try with batch {batch} ended with exit code {process.exitcode}")


def _try(
    batch: int, *, fits: bool, allocated: int | None = None, reserved: int | None = None, total: int | None = None
) -> Try:
    peaks = {"peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved}
    return {"batch": batch, "fits": fits, **peaks, "total_bytes": total}


def _steps(trial: Trial, batch: int, sender: Connection) -> None:
    """In the fresh process: answer "ok ALLOCATED RESERVED TOTAL", "oom TOTAL", "unsupported WHY" or "error WHY"."""
    total = 0
    try:
        _model.require_supported(trial)
        total = _limit_memory(trial)
        trial = dataclasses.replace(trial, problem={**trial.problem, "batch": batch})
        batches = train_step.random_batches(trial)
        step = TrainStep(_model.build(trial), _model.optim_of(trial), precision=trial.precision, mode=trial.mode)
        for number in range(STEPS):
            step(*batches[number])
        allocated = reserved = 0
        if trial.device == "cuda":
            torch.cuda.synchronize()
            allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        reply = f"ok {allocated} {reserved} {total}"
    except Unsupported as error:
        reply = f"unsupported {error}"
    except (torch.OutOfMemoryError, MemoryError):
        reply = f"oom {total}"
    except RuntimeError as error:
        out_of_memory = "allocate memory" in str(error) or "out of memory" in str(error)
        reply = f"oom {total}" if out_of_memory else f"error {type(error).__name__}: {error}"
    sender.send_bytes(reply.encode())
    sender.close()
    sys.stdout.flush()


def _limit_memory(trial: Trial) -> int:
    """Apply memory_limit_gib and return the bytes there are: of the GPU, or of this process's data on a CPU."""
    gib = trial.problem.get("memory_limit_gib")
    if trial.device == "cuda":
        total = torch.cuda.get_device_properties().total_memory
        if gib is not None:
            torch.cuda.set_per_process_memory_fraction(min(float(gib) * 2**30 / total, 1.0))
            return min(int(float(gib) * 2**30), total)
        return total
    limit = int(float(gib or 0) * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return limit
