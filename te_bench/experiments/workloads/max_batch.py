"""The largest batch whose training step fits in memory, by bisection, each try in a fresh process.

samples: max_batch (1).
work.ran: of the check's step at batch 1 (checks.what_ran).
work.tries: [{batch, fits, peak_allocated_bytes, peak_reserved_bytes, total_bytes}] in the order they were made.
work.capped: true if the search ended at its LIMIT, and larger batches may fit.
"""

import dataclasses
import multiprocessing
import resource
import signal
from collections.abc import Callable
from typing import Any

import torch

from te_bench.experiments import environment, processes, trial_model
from te_bench.experiments.checks import training_step, what_ran
from te_bench.experiments.host import oom_kills
from te_bench.experiments.measurement import CheckFailed, Context, Interrupted, Measurement, Unsupported, ran_out
from te_bench.experiments.problems import MaxBatchProblem, TrainingProblem, TrialProblem, source_of
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import train_step
from te_bench.models import adopted

EAGER_STEPS = 2  # on a CPU, where a step of the largest batch takes a second
STEPS = 3  # AdamW's moments exist after the first; a captured or compiled step has settled after the second
OTHERS = 0.1  # of a GPU's memory: more than a desktop, or contexts without tensors, hold
LIMIT = 1 << 16  # no try beyond this batch

Try = dict[str, Any]


def run(trial: Trial, context: Context) -> Measurement:
    _require_limit(trial)
    require_free(trial)  # while this process holds nothing
    _look_once(trial)
    verified = verify(trial)
    batch, tries = largest(trial)
    work = {**verified.work, "tries": tries, **({"capped": True} if batch == LIMIT else {})}
    return dataclasses.replace(verified, work=work, samples={"max_batch": [float(batch)]})


def largest(trial: Trial) -> tuple[int, list[Try]]:
    """(batch, tries): batch fits and batch + 1 does not, unless batch is LIMIT.

    Nothing here touches the GPU itself: the tries are forks. Raises MemoryError when not even a batch of 1 fits,
    Unsupported on a CPU without memory_limit_gib, Interrupted while other processes hold memory of the GPU.
    """
    _require_limit(trial)
    _look_once(trial)
    tries: list[Try] = []

    def fits(batch: int) -> bool:
        tries.append(attempt(trial, batch))
        return bool(tries[-1]["fits"])

    low, high = 0, 1  # low fits, high is the next to try until one does not
    while fits(high):
        if high == LIMIT:
            return LIMIT, tries
        low, high = high, min(_next(tries, high), LIMIT)
    while high - low > 1:
        middle = (low + high) // 2 if len(tries) % 2 else _guess(tries, low, high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low == 0:
        raise MemoryError("not even a batch of 1 fits")
    return low, tries


def _look_once(trial: Trial) -> None:
    """Import and describe a user's model here and not in each fork, where transformers alone took half of a try of 2.3 s.

    On a CPU alone: a module that is imported may touch CUDA, which no fork survives. By one thread: nor do OpenMP's.
    """
    source = source_of(trial)
    if source is None or trial.device != "cpu":
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        adopted.described(source)
    finally:
        torch.set_num_threads(threads)


def _require_limit(trial: Trial) -> None:
    if trial.device == "cpu" and _limit_gib(trial) is None:
        raise Unsupported("the largest batch on a CPU needs memory_limit_gib: a host without memory kills at random")


def require_free(trial: Trial) -> None:
    """Raise Interrupted if other processes hold memory that the tries may use: all of the GPU's, or memory_limit_gib."""
    gpus = environment.visible_gpus() if trial.device == "cuda" else []
    held = environment.memory_in_use(gpus[0]["uuid"]) if gpus else None
    if held is None:
        return
    total, gib = gpus[0]["memory_bytes"], _limit_gib(trial)
    if held > total - min((1 - OTHERS) * total, total if gib is None else gib * 2**30):
        raise Interrupted(f"other processes hold {held / 2**30:.1f} GiB of the GPU; rerun when they have ended")


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
    total = points and next(t["total_bytes"] for t in tries if t["total_bytes"])
    if len(points) >= 2 and total:
        (b0, m0), (b1, m1) = points[-2:]
        if m1 > m0:
            middle = int(b1 + (total - m1) * (b1 - b0) / (m1 - m0))
    return min(max(middle, low + 1), high - 1)


def attempt(trial: Trial, batch: int) -> Try:
    """{batch, fits, peak_allocated_bytes, peak_reserved_bytes, total_bytes} of a few steps in a fresh process."""
    return {"batch": batch, **_forked(_steps, trial.with_(batch=batch))}


def verify(trial: Trial) -> Measurement:
    """Check and kernels of one step at batch 1, in a fresh process, before anything of its memory is measured."""
    reply = _forked(_verify, trial.with_(batch=1))
    if "fits" in reply:
        raise MemoryError("not even a batch of 1 fits")
    measurement: Measurement = reply["measurement"]
    if reply["wrong"]:
        raise CheckFailed(reply["wrong"], measurement)
    return measurement


def _forked(work: Callable[[Trial], Try], trial: Trial) -> Try:
    """What `work` answers in a fork, {"fits": False, ...} where memory ran out; raises what else went wrong there."""
    fork = multiprocessing.get_context("fork")  # this process has imported torch and never touched CUDA
    kills = oom_kills()
    try:
        reply: Try = processes.ProcessCall(fork, _or_out_of_memory, work, trial).run()
    except processes.Ended as end:
        if end.exit_code != -signal.SIGKILL:
            raise RuntimeError(f"a try ended with {end}") from None
        if oom_kills() == kills:
            raise Interrupted("a try was killed from outside (SIGKILL); rerun to repeat the trial") from None
        return _outcome(fits=False)
    return reply


def _or_out_of_memory(work: Callable[[Trial], Try], trial: Trial) -> Try:
    """In the fork: what `work` answers, or that memory ran out. Raises RuntimeError for any other that it raises."""
    try:
        trial_model.require_supported(trial)
        return work(trial)
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        return _outcome(fits=False, total=_total_bytes(trial))


def _outcome(*, fits: bool, allocated: int | None = None, reserved: int | None = None, total: int | None = None) -> Try:
    return {"fits": fits, "peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved, "total_bytes": total}


def _steps(trial: Trial) -> Try:
    total = _limit_memory(trial)
    batches = train_step.random_batches(trial)
    step = trial_model.step_of(trial)
    for number in range(EAGER_STEPS if trial.device == "cpu" and trial.mode == "eager" else STEPS):
        step(*batches[number])
    if trial.device != "cuda":
        return _outcome(fits=True, total=total)
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return _outcome(fits=True, allocated=allocated, reserved=reserved, total=total)


def _verify(trial: Trial) -> Try:
    batch = train_step.random_batches(trial)[0]
    try:
        step, check = training_step.begin(trial, *batch)
        measurement, wrong = Measurement(check=check), None
        measurement = what_ran.require_step(trial, step, lambda: step(*batch), batch[0].numel(), measurement)
    except CheckFailed as error:
        measurement, wrong = error.measurement, str(error)
    return {"measurement": measurement, "wrong": wrong}


def _limit_memory(trial: Trial) -> int:
    """Apply memory_limit_gib and return the bytes there are: of the GPU, or of this process's data on a CPU."""
    limit = _total_bytes(trial)
    if trial.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties().total_memory)
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return limit


def _limit_gib(trial: Trial) -> float | None:
    p = TrialProblem.of(trial)
    assert isinstance(p, MaxBatchProblem | TrainingProblem), "only these ask for the largest batch"
    return p.memory_limit_gib


def _total_bytes(trial: Trial) -> int:
    gib = _limit_gib(trial)
    if trial.device == "cuda":
        total = torch.cuda.get_device_properties().total_memory
        return total if gib is None else min(int(gib * 2**30), total)
    return int((gib or 0) * 2**30)
