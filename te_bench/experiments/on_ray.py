"""Run trials on the hosts of a Ray cluster: te-bench run SUITE --on ray. Imports Ray on demand, and no torch.

Ray places a trial and reserves its GPUs. On its host `runner.Supervisor` runs the trial as on any machine, in its own
process under its time limit. A Ray worker runs many trials one after the other and never touches CUDA; only the trials'
fresh processes do. So no trial leaves memory behind, and each worker starts the fork server only once.

Data moves one way: a trial goes to a host, a record comes back, and only the head writes the journal.
"""

import contextlib
import functools
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from te_bench.experiments import environment, janitor, ray_host, runner
from te_bench.experiments.measurement import Context
from te_bench.experiments.spec import Record, Trial
from te_bench.experiments.store import own

LOOK_S = 2.0  # between checks of the cluster's hosts
ALONE_S = 60.0  # a sweep without hosts waits so long for one
ANSWER_S = 10.0  # for a cluster to accept a connection
PROBE_S = 120.0  # for a host to describe itself: it starts a process and imports te_bench
OBJECT_STORE = 2**27  # bytes of shared memory; records are small
OWN = "TE_BENCH_CLUSTER"  # environment variable of all processes of te-bench's own cluster: the cluster's folder
#: Environment variables of Ray's processes: no usage statistics; the raylet kills what a killed worker has started.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "1",
}


@contextlib.contextmanager
def connected(address: str | None = None, say: Callable[[str], None] = lambda line: None) -> Iterator[int]:
    """Connect to a cluster and yield its number of GPUs: the given address, else one running here, else a new one here.

    A cluster started here ends with this process, however the process ends, and leaves no file. Raise ValueError without Ray
    or without the given cluster. say: reports that the cluster last started here by `ray start` is gone.
    """
    os.environ.update(SETTINGS)
    try:
        import ray
    except ModuleNotFoundError:
        raise ValueError("--on ray: Ray is not installed: pip install 'te-bench[cluster]'") from None
    asked_for = address or os.environ.get("RAY_ADDRESS")
    if asked_for == "auto":  # Ray's word for a cluster that runs here
        asked_for = None
    if asked_for:
        _require_answer(asked_for)
    running = asked_for or _started_here(say)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    with contextlib.ExitStack() as opened:
        if running:
            ray.init(address=running, **quiet)
        else:
            folder = Path(tempfile.mkdtemp(prefix="te-ray-", dir="/tmp"))  # /tmp keeps the names of its sockets short
            # The kernel ends Ray's servers with this process. They end their children, but not those that are still
            # starting: a worker tries for 27 s to reach its raylet, a runtime environment's agent for 10 (Ray 2.60).
            opened.enter_context(janitor.remove_at_end(folder, f"{OWN}={folder}"))
            os.environ[OWN] = str(folder)
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray writes a token to the home folder
            store = {"object_store_memory": OBJECT_STORE}
            ray.init(address="local", include_dashboard=False, _temp_dir=str(folder), **store, **quiet)
        opened.callback(ray.shutdown)
        yield int(ray.cluster_resources().get("GPU", 0))


def _started_here(say: Callable[[str], None]) -> str | None:
    """Return the address of the cluster last started on this host by `ray start`, if it answers.

    Only `ray stop` removes the file with the address; a killed cluster, after a restart of the host for instance, leaves it.
    """
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # the order in which Ray looks
    file = Path(folder) / "ray" / "ray_current_cluster"
    address = file.read_text().strip() if file.exists() else ""
    try:
        if address:
            _require_answer(address)
    except ValueError:
        say(f"warning: the Ray cluster {address}, which {file} names, is gone; te-bench starts its own")
        return None
    return address or None


def _require_answer(address: str) -> None:
    """Raise ValueError if nobody listens; Ray itself would try for minutes and then end the process."""
    if address.startswith("ray://"):
        raise ValueError(
            f"--on ray: {address} is for Ray's client; give the head by --ray-address HOST:PORT, as ray start prints it"
        )
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--on ray: no cluster of Ray answers at {address}. Start one (ray start --head), or give another by "
            f"--ray-address HOST:PORT; without --ray-address and RAY_ADDRESS te-bench starts its own."
        ) from error


@dataclass(frozen=True, slots=True)
class Host:
    """A node of the cluster, with its environment if it takes trials."""

    node: str  # Ray's id of the node
    name: str
    resources: Mapping[str, float]
    machine: dict[str, Any] | None = None  # environment.capture's answer

    @property
    def state(self) -> dict[str, Any]:
        """The host's part of a record's `device_state`."""
        assert self.machine is not None
        return {"host": self.name, **environment.of_times(self.machine)}


@dataclass(frozen=True, slots=True)
class Place:
    node: str
    host: str


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a sweep requires of a host."""

    device: str
    by_table: tuple[str, ...]  # as for environment.capture
    gpus: float = 1  # of each trial on a GPU; a fraction if several trials share one
    at_once: Callable[[int], int] = lambda cores: 1  # trials side by side on a CPU with so many cores
    losses: bool = False  # as for environment.capture

    def places(self, resources: Mapping[str, float]) -> int:
        """Return how many trials a host takes at a time."""
        cores = int(resources.get("CPU", 0))
        if self.device == "cuda":
            return int(resources.get("GPU", 0) / self.gpus + 1e-6)
        return min(self.at_once(cores), cores) if cores else 0

    def of_each(self, resources: Mapping[str, float]) -> dict[str, float]:
        """Return the resources of a host that each trial reserves."""
        if self.device == "cuda":
            return {"num_gpus": self.gpus, "num_cpus": 0}
        return {"num_cpus": resources["CPU"] // self.places(resources)}


class Cluster:
    """The hosts on which a sweep runs: those with equal environments; `machine` is their environment."""

    def __init__(self, wanted: Wanted, say: Callable[[str], None]):
        """say: reports excluded hosts and their differences. Raise ValueError if no host takes a trial."""
        self.wanted, self._say = wanted, say
        hosts = [self._answer(ref, host) for ref, host in [self._ask(node) for node in self._that_could()]]
        fit = [host for host in hosts if host.machine is not None]
        if not fit:
            gpus = "a GPU" if wanted.gpus <= 1 else f"{wanted.gpus:g} GPUs, as the widest trial needs,"
            what = gpus if wanted.device == "cuda" else "a CPU"
            or_else = "leave wider trials out by --only" if wanted.gpus > 1 else "change --device"
            raise ValueError(f"--on ray: no host of the cluster has {what} and this te_bench; add one, or {or_else}")
        places: dict[str, int] = {}
        for host in fit:
            places[_id(host)] = places.get(_id(host), 0) + wanted.places(host.resources)
        most = max(places, key=lambda found: places[found])
        self.machine: dict[str, Any] = next(host.machine for host in fit if host.machine and _id(host) == most)
        self.hosts = [host for host in fit if self._alike(host)]
        self._asked = {host.node for host in hosts}
        self._asking: dict[Any, Host] = {}

    @property
    def places(self) -> list[Place]:
        """A place for each trial that runs at a time, with the hosts in turn."""
        each = [[Place(host.node, host.name)] * self.wanted.places(host.resources) for host in self.hosts]
        rounds = max(map(len, each), default=0)
        return [places[i] for i in range(rounds) for places in each if i < len(places)]

    def look(self) -> list[Host]:
        """Remove hosts that have gone; add equal hosts that have joined and answered. Return the added ones."""
        import ray

        alive = self._that_could()
        self.hosts = [host for host in self.hosts if host.node in {node["NodeID"] for node in alive}]
        for node in alive:
            if node["NodeID"] not in self._asked:
                self._asked.add(node["NodeID"])
                ref, host = self._ask(node)
                self._asking[ref] = host
        answered = ray.wait(list(self._asking), num_returns=len(self._asking), timeout=0)[0] if self._asking else ()
        joined = [self._answer(ref, self._asking.pop(ref)) for ref in answered]
        joined = [host for host in joined if host.machine is not None and self._alike(host)]
        self.hosts += joined
        return joined

    def head(self) -> ray_host.Head:
        """Return what hosts must know of this process."""
        return ray_host.Head(
            environment.code_hash(), self.machine["id"], str(Path.cwd()), os.environ.get(ray_host.THREADS)
        )

    def of(self, node: str) -> Host | None:
        return next((host for host in self.hosts if host.node == node), None)

    def _that_could(self) -> list[dict[str, Any]]:
        """Return the live nodes of ray.nodes that have a trial's resources."""
        import ray

        return [node for node in ray.nodes() if node["Alive"] and self.wanted.places(node["Resources"])]

    def _ask(self, node: dict[str, Any]) -> tuple[Any, Host]:
        import ray

        task = ray.remote(num_cpus=0, max_retries=0)(ray_host.capture)
        ref = task.options(scheduling_strategy=on(node["NodeID"])).remote(
            self.wanted.device, self.wanted.by_table, os.environ.get(ray_host.THREADS), self.wanted.losses
        )
        name = node.get("NodeManagerHostname") or node["NodeManagerAddress"]
        return ref, Host(node["NodeID"], name, node["Resources"])

    def _answer(self, ref: Any, host: Host) -> Host:
        """Return the host with its environment; without it, after a warning, if the host takes no trial."""
        import ray

        try:
            machine = ray.get(ref, timeout=PROBE_S)
        except ray.exceptions.RayError as error:
            machine = f"te_bench does not answer there: {_line(error)}"
        ours = environment.code_hash()
        if not isinstance(machine, str) and (code := machine["identity"]["code"]) != ours:
            machine = f"its te_bench is {code}, this one {ours}: install the same there"
        if isinstance(machine, str):
            self._say(f"warning: the host {host.name} is left out: {machine}")
            return host
        return replace(host, machine=machine)

    def _alike(self, host: Host) -> bool:
        """Return whether the host's environment equals the others'; report differences, which forbid any comparison."""
        if _id(host) == self.machine["id"]:
            return True
        assert host.machine is not None
        ours, theirs = self.machine["identity"], host.machine["identity"]
        differs = [f"{name} {theirs.get(name)}" for name in ours | theirs if theirs.get(name) != ours.get(name)]
        here = [f"{name} {ours.get(name)}" for name in ours | theirs if theirs.get(name) != ours.get(name)]
        self._say(
            f"warning: the host {host.name} is left out, because results of different machines are not compared: it has "
            f"{', '.join(differs)}, the others {', '.join(here)}. A separate sweep may run there."
        )
        return False


class RayExecutor:
    """The executor of a cluster. Each place is on a host; a host has as many places as trials at a time."""

    def __init__(self, cluster: Cluster, directory: Path, *, timeout_s: float, context: Context):
        """directory: logs/ is created in it."""
        self.free: list[Place] = cluster.places
        self._cluster, self._logs = cluster, directory / runner.LOGS
        own(self._logs).mkdir(exist_ok=True)
        self._timeout_s, self._context = timeout_s, context
        self._head = cluster.head()
        self._running: dict[Any, _Submitted] = {}
        self._gone: set[Any] = set()  # running trials whose host was missing at the last check
        self._doubted: dict[Any, Place] = {}  # places that lost a trial, by the task that checks their host
        self._looked = self._had_hosts = time.monotonic()

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def submit(self, trial: Trial, place: Place) -> None:
        host = self._cluster.of(place.node)
        assert host is not None
        task = _task(tuple(self._cluster.wanted.of_each(host.resources).items()))
        started, started_at = time.perf_counter(), datetime.now(UTC).isoformat(timespec="milliseconds")
        ref = task.options(scheduling_strategy=on(place.node)).remote(
            trial.to_json(), self._head, self._timeout_s, self._context
        )
        self._running[ref] = _Submitted(trial, place, host.state, started, started_at)

    def ended(self) -> Iterator[Record]:
        """Yield the records of ended trials. Raise ValueError if there has been no host for a minute."""
        import ray

        done: Sequence[Any] = []
        if self._running:
            done, _ = ray.wait(list(self._running), num_returns=1, timeout=LOOK_S)
        else:
            time.sleep(LOOK_S)
        for ref in done:
            job = self._running.pop(ref)
            yield self._record(ref, job)
        if time.monotonic() - self._looked >= LOOK_S:
            self._look()
            yield from self._cut_off()

    def kill(self) -> None:
        """Do nothing: the cluster ends a driver's tasks and their processes once the driver disconnects.

        Cancelling them as well ran into a fault in a thread of Ray, which sometimes ended te-bench with exit code 1.
        """

    def _doubt(self, place: Place) -> None:
        """Give the place no trial until its host has answered: Ray notices a lost host late."""
        import ray

        asked = ray.remote(num_cpus=0, max_retries=0)(ray_host.answer).options(scheduling_strategy=on(place.node))
        self._doubted[asked.remote()] = place

    def _look(self) -> None:
        import ray

        joined = {host.node for host in self._cluster.look()}
        for ref in ray.wait(list(self._doubted), num_returns=len(self._doubted), timeout=0)[0] if self._doubted else ():
            place = self._doubted.pop(ref)
            try:
                ray.get(ref)
                self.free.append(place)
            except ray.exceptions.RayError:
                if self._cluster.of(place.node):
                    self._doubt(place)
        self.free = [place for place in self.free if self._cluster.of(place.node)]
        self.free += [place for place in self._cluster.places if place.node in joined]
        self._looked = time.monotonic()
        if self._cluster.hosts or self._running:
            self._had_hosts = self._looked
        elif self._looked - self._had_hosts > ALONE_S:
            raise ValueError(
                "--on ray: the cluster has lost its hosts. Earlier measurements are safe; run the command again."
            )

    def _cut_off(self) -> Iterator[Record]:
        """Yield records of trials whose host was missing in two checks: Ray may wait minutes for an unclosed connection."""
        gone = {ref for ref, job in self._running.items() if self._cluster.of(job.place.node) is None}
        for ref in gone & self._gone:
            job = self._running.pop(ref)  # ignore a later answer
            yield self._unended(job, "interrupted", f"the host {job.place.host} was lost (cut off); {ray_host.RERUN}")
        self._gone = gone & self._running.keys()

    def _unended(self, job: "_Submitted", outcome: str, reason: str) -> Record:
        """Return the record of a trial whose host did not report its end."""
        wall_s = time.perf_counter() - job.started
        said: dict[str, Any] = {"outcome": outcome, "reason": reason, "started_at": job.started_at, "wall_s": wall_s}
        return Record(trial=job.trial, environment=self._head.environment, device_state=job.state, **said)

    def _record(self, ref: Any, job: "_Submitted") -> Record:
        """Return a trial's record: the host's answer, or the reason why there is none."""
        import ray

        try:
            found, log = ray.get(ref)
        except ray.exceptions.RayError as error:
            self._doubt(job.place)
            return self._unended(job, *_lost(error, job.place.host))
        if self._cluster.of(job.place.node):
            self.free.append(job.place)
        path = self._logs / f"{job.trial.id}.log"
        with contextlib.suppress(OSError):  # a log is no reason to lose the record
            if log is None:
                path.unlink(missing_ok=True)
            else:
                own(path).write_text(log)
        record = Record.from_json(found)
        assert record.trial == job.trial
        return replace(record, device_state={**record.device_state, **job.state})


@dataclass(frozen=True, slots=True)
class _Submitted:
    trial: Trial
    place: Place
    state: Mapping[str, Any]  # the host's part of a record's `device_state`
    started: float  # perf_counter
    started_at: str


def _lost(error: Exception, host: str) -> tuple[str, str]:
    """Return (outcome, reason) of a trial whose host did not report its end."""
    from ray import exceptions as said

    if isinstance(error, said.OutOfMemoryError):
        return "oom", f"host: Ray's memory monitor ended the trial on {host}"
    if isinstance(error, said.RayTaskError):
        return "crashed", f"on {host}: {_line(error)}"
    if isinstance(error, said.WorkerCrashedError):
        return "interrupted", f"the process that starts trials on {host} was killed; {ray_host.RERUN}"
    return "interrupted", f"the host {host} was lost ({type(error).__name__}); {ray_host.RERUN}"


def _line(error: Exception) -> str:
    """Return the last line of Ray's message, which holds a whole traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]


def _id(host: Host) -> str:
    assert host.machine is not None
    return str(host.machine["id"])


def on(node: str) -> Any:
    """Return Ray's scheduling strategy for that node alone."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)


@functools.cache
def _task(resources: tuple[tuple[str, float], ...]) -> Any:
    """Return ray_host.carry_out as a task with these resources. No retries: a retry would be a second measurement."""
    import ray

    return ray.remote(max_retries=0, max_calls=0, **dict(resources))(ray_host.carry_out)
