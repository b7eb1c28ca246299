"""A host's side of a trial on a Ray cluster: what `on_ray` sends there. It runs in a worker of Ray, and imports no torch."""

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

THREADS = "OMP_NUM_THREADS"  # which Ray sets to a task's CPUs
LONGEST = 70  # characters of a folder in which a socket's name, of 107 in all, still has room
LOG_TAIL = 2**18  # characters of a failed trial's log that come to the head
RERUN = "rerun to repeat it"


@dataclass(frozen=True, slots=True)
class Head:
    """What a host must know of the process that drives the sweep."""

    code: str  # environment.code_hash
    environment: str
    folder: str  # the current one, from which a user's model is imported
    threads: str | None  # OMP_NUM_THREADS


def answer() -> None:
    """Nothing: that it ends says that there is a host."""


def capture(device: str, by_table: Collection[str], threads: str | None, losses: bool = False) -> dict[str, Any] | str:
    """environment.capture of this host, or why it can run nothing."""
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
    """Run the trial in a process of its own: its record in JSON, but for the host, and its log where it did not end ok."""
    import ray

    as_on_the_head(head.threads)
    if (differs := other_code(head)) is not None:
        reason = f"{differs}: install the same there; {RERUN}"
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        return _unrun(Trial.from_json(trial), head, reason, now).to_json(), None
    with contextlib.suppress(OSError):  # a host without that folder has no model of the user's either, and says so
        os.chdir(head.folder)
    # Ray's own script, which multiprocessing would have each trial import.
    vars(sys.modules["__main__"]).pop("__file__", None)
    session: str = ray._private.worker.global_worker.node.get_session_dir_path()  # which goes with the cluster
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
    """How this host's te_bench differs from the head's; None where it does not."""
    code = environment.code_hash()
    return (
        None if code == head.code else f"the te_bench of {os.uname().nodename} is {code}, that of the head {head.code}"
    )


def as_on_the_head(threads: str | None) -> None:
    """Have this host's trials compute with as many threads as the head's would: Ray gives them one a CPU that it counts."""
    os.environ.pop(THREADS, None)
    if threads is not None:
        os.environ[THREADS] = threads


def held_gpus() -> str:
    """The UUIDs of the GPUs that Ray holds for this trial, as CUDA_VISIBLE_DEVICES takes them."""
    import ray

    held = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return ",".join(uuids(held, environment.nvidia_gpus()))


def uuids(held: Sequence[str], gpus: Sequence[Mapping[str, Any]]) -> list[str]:
    """The UUID of each GPU that Ray names by its index or UUID. Raises ValueError for one that the driver does not know."""
    found = []
    for name in held:
        named = [gpu["uuid"] for gpu in gpus if name in (str(gpu["index"]), gpu["uuid"])]
        if not named:
            raise ValueError(
                f"Ray holds the GPU {name}, which the driver does not report: start Ray without MIG devices"
            )
        found += named
    return found
