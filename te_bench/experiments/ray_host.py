"""The host's side of a trial on a Ray cluster, called by `on_ray`. Runs in a Ray worker, and imports no torch."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from te_bench.experiments import environment, runner
from te_bench.experiments.measurement import Context
from te_bench.experiments.spec import Record, Trial

THREADS = "OMP_NUM_THREADS"  # Ray sets it to a task's CPUs
LONGEST = 70  # characters of a folder's path that leave room for a socket's name, 107 in all
LOG_TAIL = 2**18  # characters of a failed trial's log that are sent to the head
RERUN = "rerun to repeat it"


@dataclass(frozen=True, slots=True)
class Head:
    """What a host must know of the process that drives the sweep."""

    code: str  # environment.code_hash
    environment: str
    folder: str  # the current folder, from which a user's model is imported
    threads: str | None  # OMP_NUM_THREADS


def answer() -> None:
    """Do nothing; the task's end shows that the host is there."""


def capture(device: str, by_table: Collection[str], threads: str | None, losses: bool = False) -> dict[str, Any] | str:
    """Return environment.capture of this host, or why the host cannot run trials."""
    as_on_the_head(threads)
    gpus = (environment.visible_gpus() or environment.nvidia_gpus()) if device == "cuda" else []
    if device == "cuda" and not gpus:
        return "its driver reports no NVIDIA GPU"
    if device == "cuda" and (why := environment.no_cuda()):
        return why
    try:
        return environment.capture(device, gpus, by_table=by_table, losses=losses)
    except ValueError as error:
        return str(error)


def carry_out(
    trial: Mapping[str, Any], head: Head, timeout_s: float, context: Context
) -> tuple[dict[str, Any], str | None]:
    """Run the trial in its own process; return its record in JSON, without the host, and its log unless it ended ok."""
    import ray

    as_on_the_head(head.threads)
    if (differs := other_code(head)) is not None:
        reason = f"{differs}: install the same there; {RERUN}"
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        return _unrun(Trial.from_json(trial), head, reason, now).to_json(), None
    with contextlib.suppress(OSError):  # without the folder a user's model is missing too, and the trial reports that
        os.chdir(head.folder)
    # Remove Ray's own script, which multiprocessing would otherwise import in each trial.
    vars(sys.modules["__main__"]).pop("__file__", None)
    session: str = ray._private.worker.global_worker.node.get_session_dir_path()  # removed with the cluster
    if len(session) <= LONGEST:
        tempfile.tempdir = session
    with tempfile.TemporaryDirectory(prefix="te-bench-") as folder:
        wanted = Trial.from_json(trial)
        how: dict[str, Any] = {"timeout_s": timeout_s, "context": context, "on_cpu": wanted.device == "cpu"}
        supervisor = runner.Supervisor(Path(folder), head.environment, [], state={}, **how)
        try:
            supervisor.submit(wanted, held_gpus() if wanted.device == "cuda" else None)
            while not (records := list(supervisor.ended())):
                pass
        finally:
            supervisor.kill()
        log = Path(folder) / runner.LOGS / f"{wanted.id}.log"
        return records[0].to_json(), log.read_text(errors="replace")[-LOG_TAIL:] if log.exists() else None


def _unrun(trial: Trial, head: Head, reason: str, now: str) -> Record:
    return Record(
        trial=trial, environment=head.environment, outcome="interrupted", reason=reason, started_at=now, wall_s=0.0
    )


def other_code(head: Head) -> str | None:
    """Return how this host's te_bench differs from the head's, or None."""
    code = environment.code_hash()
    return (
        None if code == head.code else f"the te_bench of {os.uname().nodename} is {code}, that of the head {head.code}"
    )


def as_on_the_head(threads: str | None) -> None:
    """Give this host's trials the head's number of threads; Ray would give them one per counted CPU."""
    os.environ.pop(THREADS, None)
    if threads is not None:
        os.environ[THREADS] = threads


def held_gpus() -> str:
    """Return the UUIDs of the GPUs that Ray reserves for this trial, in the form of CUDA_VISIBLE_DEVICES."""
    import ray

    held = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return ",".join(uuids(held, environment.nvidia_gpus()))


def uuids(held: Sequence[str], gpus: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the UUID of each GPU that Ray names by index or UUID. Raise ValueError for one unknown to the driver."""
    found = []
    for name in held:
        named = [gpu["uuid"] for gpu in gpus if name in (str(gpu["index"]), gpu["uuid"])]
        if not named:
            raise ValueError(
                f"Ray holds the GPU {name}, which the driver does not report: start Ray without MIG devices"
            )
        found += named
    return found
