"""Run a trial that spans several processes, one rank for each GPU or part of a CPU's cores; return one reply.

The trial's own process supervises the ranks. It forks them into its process group before anything touches CUDA, and they end
with it. They meet at a socket that the supervisor has bound, so that no other process can take the port, and run the whole
trial in step. Rank 0's reply is the trial's. The first failing rank ends all others, and the reply names the failing rank.
If several fail at once, it is one that did not merely lose a neighbour; if ranks timed out in a collective, it is the rank
that did not join.
"""

import datetime
import multiprocessing
import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from te_bench.experiments import exclusive, host, runner, throttling
from te_bench.experiments.measurement import Context
from te_bench.experiments.problems import backend_of, world_of
from te_bench.experiments.processes import Ended, ProcessCall, end_with_parent, wait_for_any
from te_bench.experiments.spec import Trial
from te_bench.training import parallel

Reply = dict[str, Any]
Run = Callable[[Trial, Context], Reply]

#: Seconds that a rank waits for the others in a collective; longer while ranks compile and tune kernels.
PATIENCE_S, COMPILING_PATIENCE_S = 45.0, 300.0
#: Seconds in which other ranks may fail too, after the first failure, so that the cause can be found among them.
GRACE_S = 3.0
#: The same after an unsupported rank: mostly all ranks are unsupported, and one may still be starting on a busy host.
UNSUPPORTED_GRACE_S = 12.0
ADDRESS = "127.0.0.1"
#: torch's messages in a rank that timed out waiting for another: by gloo, the store, and NCCL (in the log, then abort).
WATCHDOG = "Watchdog caught collective operation timeout"
WAITED = ("Timed out waiting", "wait timeout", WATCHDOG)
#: torch's messages in a rank whose neighbour has gone.
LOST = (
    *("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe"),
    *("DistNetworkError", "DistStoreError", "ncclRemoteError", "NCCL communicator was aborted"),
)


def run(trial: Trial, context: Context, one: Run) -> Reply:
    """Run one(trial, context) in every rank, with a process group; return rank 0's reply, or the failed rank's."""
    world = world_of(trial)
    if trial.device == "cuda" and (here := _gpus()) < world:
        return {
            "outcome": "unsupported",
            "reason": f"not run: {world} ranks need a GPU each, and this trial has {here}",
        }
    started, kills = time.perf_counter(), host.oom_kills()
    with socket.create_server((ADDRESS, 0)) as meeting:
        fork: Any = multiprocessing.get_context("fork")
        calls = [ProcessCall(fork, _rank, one, trial, context, rank, meeting, os.getpid()) for rank in range(world)]
        try:
            for call in calls:
                call.start()
            meeting.close()  # else it still accepts connections after the listening rank has ended
            replies = _answers(calls, kills)
        finally:
            for call in calls:
                call.kill()
    return {**_verdict(replies, world, _patience(trial)), "work_s": time.perf_counter() - started}


def _gpus() -> int:
    """Return the number of GPUs that this process may use, by NVML, because CUDA would not survive the fork."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return torch.cuda.device_count() if visible is None else len([gpu for gpu in visible.split(",") if gpu])


def _patience(trial: Trial) -> float:
    return PATIENCE_S if trial.mode == "eager" else COMPILING_PATIENCE_S


def _rank(one: Run, trial: Trial, context: Context, rank: int, meeting: socket.socket, parent: int) -> Reply:
    """In a rank's process: join the other ranks and run the trial."""
    end_with_parent(parent)
    world = world_of(trial)
    timeout = datetime.timedelta(seconds=_patience(trial))
    port = meeting.getsockname()[1]
    listens: dict[str, Any] = {"is_master": True, "master_listen_fd": meeting.detach()} if rank == 0 else {}
    meeting.close()
    how = {"timeout": timeout, "wait_for_workers": False, **listens}
    store = dist.TCPStore(ADDRESS, port, world, **how)  # type: ignore[attr-defined]
    if trial.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, host.cores() // world))
    device = torch.device("cuda", rank) if trial.device == "cuda" else None
    dist.init_process_group(
        backend_of(trial), store=store, rank=rank, world_size=world, timeout=timeout, device_id=device
    )
    with exclusive.of_ranks(rank, parallel.meet):
        reply = one(trial, context)
    if reply["outcome"] == "ok":
        dist.barrier()  # rank 0 holds the store, and must outlive the others' reads
    return reply


def _answers(calls: list[ProcessCall], oom_kills: int) -> dict[int, Reply]:
    """Return {rank: its reply or how it ended}, in order of arrival, until a grace period after the first failure."""
    replies: dict[int, Reply] = {}
    until = float("inf")
    while len(replies) < len(calls) and time.monotonic() < until:
        running = [call for rank, call in enumerate(calls) if rank not in replies]
        for call in wait_for_any(running, until - time.monotonic()):
            rank = calls.index(call)
            reply = replies[rank] = _answer(call, rank, oom_kills)
            if reply["outcome"] != "ok":
                grace_s = UNSUPPORTED_GRACE_S if reply["outcome"] == "unsupported" else GRACE_S
                until = min(until, time.monotonic() + grace_s)
    return replies


def _answer(call: ProcessCall, rank: int, oom_kills: int) -> Reply:
    try:
        reply: Reply = call.result()
    except Ended as end:
        reply = runner.post_mortem(end, oom_kills, None)
        if f"[Rank {rank}] {WATCHDOG}" in _log():
            reply["reason"] += f": {WATCHDOG}"
    except Exception as error:  # while joining the other ranks, or in the answer
        return {"outcome": "crashed", "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
    return reply


def _log() -> str:
    """Return what the ranks have printed, if the trial's log is a file."""
    return Path("/dev/stderr").read_text(errors="replace") if stat.S_ISREG(os.fstat(2).st_mode) else ""


def _verdict(replies: dict[int, Reply], world: int, patience: float) -> Reply:
    """Return rank 0's reply if all are ok, else the reply of the rank at fault, with its name."""
    failed = {rank: reply for rank, reply in replies.items() if reply["outcome"] != "ok"}
    if not failed:
        return _together([replies[rank] for rank in range(world)])
    outcomes = {reply["outcome"] for reply in replies.values()}
    if len(replies) == world and len(outcomes) == 1 and "crashed" not in outcomes:
        return replies[0]  # all ranks failed alike, like one process
    waited = [rank for rank, reply in failed.items() if _says(reply, WAITED)]
    lost = [rank for rank, reply in failed.items() if rank not in waited and _says(reply, LOST)]
    own = [rank for rank in failed if rank not in (*waited, *lost)]
    if waited and not own:
        silent = [rank for rank in range(world) if rank not in replies]
        late = silent[0] if silent else (lost or waited)[-1]
        vain = f"came late or never to a collective that the others waited {patience:g} s for"
        return {"outcome": "crashed", "reason": f"rank {late}: {vain}"}
    rank = (own or lost)[0]
    return {**failed[rank], "reason": f"rank {rank}: {failed[rank]['reason']}"}


def _together(replies: list[Reply]) -> Reply:
    """Return rank 0's reply, with the largest peak memory of all ranks and what throttled any of their GPUs."""
    samples = {
        name: [max(reply["samples"][name][0] for reply in replies)] if name.startswith("peak_") else values
        for name, values in replies[0]["samples"].items()
    }
    state = throttling.of_ranks([reply.get("device_state") or {} for reply in replies])
    return {**replies[0], "samples": samples, "device_state": state}


def _says(reply: Reply, words: tuple[str, ...]) -> bool:
    return reply["outcome"] == "crashed" and any(each in str(reply["reason"]) for each in words)
