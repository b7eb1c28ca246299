"""Sweeps over a cluster of Ray, by real runs on one of three nodes: each fault is one typed row, and nothing runs twice."""

import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import journals
import psutil
import pytest
from driving import MARK, PLANTED, Run, eventually, rows, running, te_bench

from te_bench.experiments import environment, on_ray, ray_host
from te_bench.experiments.measurement import Context

ON_RAY = {"PYTHONPATH": os.pathsep.join([str(PLANTED.parent / "on_ray"), os.environ["PYTHONPATH"]])}
PLAIN = {"PYTHONPATH": os.environ["PYTHONPATH"]}  # which the cluster's fixture puts stand-ins before
CLUSTER = uuid.uuid4().hex
QUICK = ("run", "quick", "--device", "cpu", "--on", "ray")
NAPS = ("run", "naps", "--device", "cpu", "--on", "ray")


def scratch() -> set[Path]:
    return {path for kind in ("te-ray-*", "te-bench-*") for path in Path("/tmp").glob(kind)}


def workers() -> list[psutil.Process]:
    """The cluster's processes that run a trial each; other tests have such processes too."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            ours = process.cmdline()[:1] == ["ray::carry_out"] and process.environ().get(MARK) == CLUSTER
            found += [process] if ours and process.children() else []
    return found


def started(run: Run, program: str) -> list[psutil.Process]:
    """Those of a run's processes that have the program's name in their command lines."""
    found = []
    for process in run.family():
        with suppress(psutil.Error):
            found += [process] if program in " ".join(process.cmdline()) else []
    return found


def outcomes(out: Path) -> list[str]:
    return [row["outcome"] for row in rows(out)]


def asleep() -> list[psutil.Process]:
    """What the cluster's long trials have started; other tests have such processes too."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found += [process] if process.name() == "sleep" and process.environ().get(MARK) == CLUSTER else []
    return found


def test_without_ray_it_says_what_to_install(tmp_path: Path, no_package: Callable[[str], dict[str, str]]) -> None:
    done = te_bench(*QUICK, "--out", tmp_path / "out", env=no_package("ray"))
    assert done.returncode == 2
    assert done.stderr == "te-bench: --on ray: Ray is not installed: pip install 'te-bench[cluster]'\n"


def test_a_cluster_that_does_not_answer_is_said_at_once(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray: pip install '.[cluster]'")
    for address in ("127.0.0.1:1", "head"):
        done = te_bench(*QUICK, "--ray-address", address, "--out", tmp_path / "out", timeout=20)
        said = f"te-bench: --on ray: no cluster of Ray answers at {address}"
        assert (done.returncode, done.stderr.split(". ")[0]) == (2, said)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MagicMock:
    """A Ray that connects to any address, on a host where no cluster was started."""
    stand_in = MagicMock()
    stand_in.cluster_resources.return_value = {"GPU": 2}
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    for name in (*on_ray.SETTINGS, on_ray.OWN, "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return stand_in


def test_ray_s_auto_is_the_same_as_no_address(ray: MagicMock) -> None:
    with on_ray.connected("auto") as gpus:
        assert (gpus, ray.init.call_args.kwargs["address"]) == (2, "local")


def test_an_address_of_ipv6_is_one(ray: MagicMock) -> None:
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    with server, on_ray.connected(f"[::1]:{server.getsockname()[1]}"):
        assert ray.init.call_args.kwargs["address"].startswith("[::1]:")


def test_an_address_of_ray_s_client_is_told_from_the_head_s(ray: MagicMock) -> None:
    said = pytest.raises(ValueError, match="ray://head:10001 is for Ray's client; give the head by --ray-address")
    with said, on_ray.connected("ray://head:10001"):
        pass


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--on", "slurm"), "--on slurm: trials run here, or on a Ray cluster"),
        (("--ray-address", "a:1"), "--ray-address a:1: it goes with --on ray"),
        (
            ("--on", "ray", "--gpus-per-trial", "2", "--share", "2"),
            "--share 2: with --on ray it does not go with --gpus-per-trial",
        ),
        (("--on", "ray", "--gpus", "0"), "--gpus 0: with --on ray the cluster says which GPUs there are"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = te_bench("run", "quick", *options, "--out", tmp_path / "out")
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_a_gpu_that_ray_holds_is_named_by_its_uuid() -> None:
    gpus = [{"index": 0, "uuid": "GPU-a"}, {"index": 1, "uuid": "GPU-b"}]
    assert ray_host.uuids(["1", "GPU-a"], gpus) == ["GPU-b", "GPU-a"]
    with pytest.raises(ValueError, match="the GPU 7, which the driver does not report"):
        ray_host.uuids(["7"], gpus)


@pytest.mark.parametrize(
    ("wanted", "places", "of_each"),
    [
        (on_ray.Wanted(device="cuda", by_table=()), 8, {"num_gpus": 1, "num_cpus": 0}),
        (on_ray.Wanted(device="cuda", by_table=(), gpus=1 / 3), 24, {"num_gpus": 1 / 3, "num_cpus": 0}),
        (on_ray.Wanted(device="cuda", by_table=(), gpus=3), 2, {"num_gpus": 3, "num_cpus": 0}),
        (on_ray.Wanted(device="cpu", by_table=()), 1, {"num_cpus": 96}),
        (on_ray.Wanted(device="cpu", by_table=(), at_once=lambda cores: cores // 12), 8, {"num_cpus": 12}),
    ],
)
def test_a_host_takes_as_many_trials_as_it_has_gpus_or_cores_for(wanted, places, of_each):
    host = {"GPU": 8.0, "CPU": 96.0}
    assert (wanted.places(host), wanted.of_each(host)) == (places, of_each)
    assert wanted.places({"memory": 1.0}) == 0


def test_a_log_that_cannot_be_written_loses_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = journals.trial()
    ended = journals.record(trial, outcome="crashed", reason="KeyError")
    task, fails = MagicMock(), MagicMock(exceptions=MagicMock(RayError=RuntimeError))
    fails.get.return_value = (ended.to_json(), "what it printed")
    fails.wait.side_effect = lambda refs, **_: (refs, [])
    monkeypatch.setitem(sys.modules, "ray", fails)
    monkeypatch.setattr(on_ray, "_task", lambda resources: task)
    monkeypatch.setattr(on_ray, "on", lambda node: None)
    there = MagicMock(state={"host": "a"})
    cluster = MagicMock(places=[on_ray.Place("1", "a")], of=lambda node: there)
    cluster.wanted.of_each.return_value = {}
    executor = on_ray.RayExecutor(cluster, tmp_path, timeout_s=1.0, context=Context())
    (tmp_path / "logs").rmdir()
    executor.submit(trial, executor.free.pop())
    [record] = executor.ended()
    assert (record.outcome, record.reason, record.device_state["host"]) == ("crashed", "KeyError", "a")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes of one CPU each, one of them with two GPUs that are pretended, whose lock files would stay in /tmp."""
    pytest.importorskip("ray", reason="needs ray: pip install '.[cluster]'")
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="te-", dir="/tmp")  # its sockets' names must be short
    at_sigterm = signal.getsignal(signal.SIGTERM)  # each node of Ray's sets a handler, and leaves it
    notice = {"period_ms": 500, "timeout_ms": 2000, "failure_threshold": 3, "initial_delay_ms": 0}
    notice = {f"health_check_{name}": value for name, value in notice.items()}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ON_RAY, **on_ray.SETTINGS, "RAY_TMPDIR": folder, MARK: CLUSTER}.items():
            patch.setenv(name, value)
        head = {"num_cpus": 1, "include_dashboard": False, "_system_config": notice}
        nodes = Cluster(initialize_head=True, head_node_args=head)
        for gpus in (0, 2):
            nodes.add_node(num_cpus=1, num_gpus=gpus, env_vars={"TMPDIR": folder})
        try:
            yield nodes
        finally:
            nodes.shutdown()
            signal.signal(signal.SIGTERM, at_sigterm)
            shutil.rmtree(folder)


@pytest.fixture(scope="module")
def on_gpus(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict[str, Any]]]:
    """A sweep over GPUs, and its records, while the cluster has two more nodes, which differ."""
    out = tmp_path_factory.mktemp("visible") / "out"
    differ = ("PRETENDED_DRIVER", "PRETENDED_CODE")
    others = [cluster.add_node(num_cpus=0, num_gpus=1, env_vars={name: "2"}) for name in differ]
    command = ("run", "visible", "--device", "cuda", "--on", "ray", "--ray-address", cluster.address, "--out", out)
    done = te_bench(*command, env=ON_RAY)
    for other in others:
        cluster.remove_node(other)
    assert (done.returncode, "on ray: 2 trials at a time, on 1 host" in done.stdout) == (0, True), done
    return done, rows(out)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_each_gpu_has_one_trial_at_a_time(on_gpus: tuple[Any, list[dict[str, Any]]]) -> None:
    seen = {"GPU-0": [], "GPU-1": []}
    for row in on_gpus[1]:
        began = datetime.fromisoformat(row["started_at"]).timestamp()
        seen[row["kernels"][0]].append((began, began + row["wall_s"]))
    locks = Path(os.environ["RAY_TMPDIR"]).glob("te-bench-GPU-*.lock")
    assert sorted(path.name[9:-5] for path in locks) == ["GPU-0.gate", "GPU-0.work", "GPU-1.gate", "GPU-1.work"]
    assert all(seen.values())  # how many each had depends on which worker was up first
    for spans in seen.values():
        assert all(end <= began + 0.002 for (_, end), (began, _) in pairwise(sorted(spans))), spans


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_hosts_that_differ_are_left_out_with_what_differs(on_gpus: tuple[Any, list[dict[str, Any]]]) -> None:
    done, found = on_gpus
    name = os.uname().nodename
    left_out = [line for line in done.stderr.splitlines() if line.startswith("warning: the host")]
    assert len(left_out) == 2
    assert any(f"{name} is left out: its te_bench is 2, this one " in line for line in left_out)
    assert any("not compared: it has driver 2, the others driver 1. " in line for line in left_out)
    assert len({row["environment"] for row in found}) == 1


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_ctrl_c_ends_all_trials_and_says_how_to_go_on(cluster: Any, tmp_path: Path) -> None:
    command = ("run", "sleeps", "--device", "cpu", "--on", "ray", "--ray-address", cluster.address)
    with running(*command, "--out", tmp_path / "out", main=None, env=ON_RAY) as run:
        assert eventually(lambda: len(asleep()) == 2, 40)
        run.process.send_signal(signal.SIGINT)
        done = run.finish(30)
    assert (done.returncode, " to go. To go on: te-bench run sleeps" in done.stdout) == (130, True), done
    assert eventually(lambda: not asleep(), 20)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_node_that_is_cut_off_is_a_row_to_repeat(cluster: Any, tmp_path: Path) -> None:
    """Its trial runs on, but nobody hears of it: neither when the sweep ends nor when the node is back.

    The sweep ends when the other node's trial is killed.
    """
    out, host = tmp_path / "out", os.uname().nodename
    command = ("run", "sleeps", "--device", "cpu", "--on", "ray", "--ray-address", cluster.address, "--out", out)

    with running(*command, main=None, env=ON_RAY) as run:
        assert eventually(lambda: len(asleep()) == 2 and outcomes(out) == ["ok"], 40)
        raylets = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
        worker = next(worker for worker in workers() if worker.ppid() in raylets)
        silent = [worker, psutil.Process(worker.ppid())]
        try:
            for process in silent:
                process.suspend()
            assert eventually(lambda: outcomes(out) == ["ok", "interrupted"], 40)
            [other] = [process.parent() for process in asleep() if worker not in process.parents()]
            other.kill()
            done = run.finish(60)
            assert any(worker in process.parents() for process in asleep())
        finally:
            for process in silent:
                process.resume()
    assert outcomes(out) == ["ok", "interrupted", "interrupted"], done
    assert rows(out)[1]["reason"].startswith(f"the host {host} was lost"), rows(out)[1]["reason"]
    cluster.remove_node(raylets[silent[1].pid], allow_graceful=False)
    assert eventually(lambda: not asleep(), 30)
    cluster.add_node(num_cpus=1)

    again = te_bench(*command, "--timeout", "1", env=ON_RAY)
    assert "1 of 3 trials are already in" in again.stdout
    assert outcomes(out) == ["ok", "interrupted", "interrupted", "timeout", "timeout"], again
    assert len({row["trial"]["problem"]["model"] + str(row["trial"]["problem"]["number"]) for row in rows(out)}) == 3


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_full_disk_on_the_head_ends_the_sweep_and_loses_nothing(cluster: Any, tmp_path: Path) -> None:
    """RLIMIT_FSIZE ends a write in the middle of a line, as a full disk does; the next run has room."""
    out = tmp_path / "out"
    command = (*NAPS, "--ray-address", cluster.address, "--out", out)
    with running(*command, main=None, env=ON_RAY) as run:
        assert eventually(lambda: len(rows(out)) >= 2, 60)
        full = (out / "journal.jsonl").stat().st_size + 100
        resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (full, resource.RLIM_INFINITY))
        done = run.finish(60)
    kept = rows(out)
    said = f"te-bench: cannot write {out / 'journal.jsonl'}: File too large. Earlier measurements are safe.\n"
    assert (done.returncode, done.stderr.endswith(said), 2 <= len(kept) < 8) == (2, True, True), done
    assert eventually(lambda: not workers(), 20)

    again = te_bench(*command, env=ON_RAY)
    assert (again.returncode, f"{len(kept)} of 8 trials are already in" in again.stdout) == (0, True), again
    assert rows(out)[: len(kept)] == kept
    assert sorted(row["trial"]["problem"]["number"] for row in rows(out)) == list(range(8))
    here = {"host": os.uname().nodename, **environment.of_times(environment.capture("cpu"))}
    states = [row["device_state"] for row in rows(out)]
    assert {row["outcome"] for row in rows(out)} == {"ok"}
    assert [{name: state[name] for name in here} for state in states] == [here] * 8


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_lost_nodes_workers_and_drivers_are_rows_to_repeat(cluster: Any, tmp_path: Path) -> None:
    """Three trials hold all places. A node is lost, another joins, and then a worker and te-bench are killed."""
    out, host = tmp_path / "out", os.uname().nodename
    command = ("run", "crowded", "--device", "cpu", "--on", "ray", "--ray-address", cluster.address, "--out", out)

    with running(*command, main=None, env=ON_RAY) as run:
        assert eventually(lambda: len(asleep()) == 3, 40)
        raylets = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
        on_a_node = next(worker for worker in workers() if worker.ppid() in raylets)
        cluster.remove_node(raylets[on_a_node.ppid()], allow_graceful=False)
        assert eventually(lambda: outcomes(out) == ["interrupted"], 40)
        time.sleep(2 * on_ray.LOOK_S)  # while no waiting trial is sent to where one was lost
        assert outcomes(out) == ["interrupted"]

        cluster.add_node(num_cpus=1)
        assert eventually(lambda: outcomes(out) == ["interrupted", "ok"] and len(asleep()) == 3, 40)
        workers()[0].kill()
        assert eventually(lambda: outcomes(out) == ["interrupted", "ok", "interrupted", "ok"], 40)
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
        assert eventually(lambda: not asleep() and run.gone(0), 30)

    by_node, by_worker = (row["reason"] for row in rows(out)[::2])
    killed = f"the process that starts trials on {host} was killed; rerun to repeat it"
    assert by_node == killed or by_node.startswith(f"the host {host} was lost"), by_node
    assert by_worker == killed
    assert {row["device_state"]["cpu"] for row in rows(out)} == {environment.capture("cpu")["identity"]["cpu"]}

    done = te_bench(*command, "--timeout", "1", env=ON_RAY)
    assert outcomes(out)[4:] == ["timeout"] * 4, done
    assert "2 of 6 trials are already in" in done.stdout
    assert not asleep()


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_cluster_of_its_own_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    """Nor what was starting when te-bench was killed: a worker of Ray's tries for 27 s to reach a raylet that is no more.

    The cluster is started although `ray start` left the address of one that was killed: only `ray stop` takes that away.
    """
    pytest.importorskip("ray", reason="needs ray: pip install '.[cluster]'")
    before = scratch()
    left = tmp_path / "ray" / "ray_current_cluster"
    left.parent.mkdir()
    left.write_text("127.0.0.1:1")
    with running(*NAPS, "--out", tmp_path / "out", main=None, env={**ON_RAY, "RAY_TMPDIR": str(tmp_path)}) as run:
        assert eventually(lambda: len(rows(tmp_path / "out")) >= 2 or run.process.poll() is not None, 60)
        for worker in started(run, "ray::carry_out"):
            worker.kill()
        assert eventually(lambda: started(run, "default_worker.py"), 40)
        run.process.send_signal(signal.SIGKILL)
        done = run.finish()
        said = f"warning: the Ray cluster 127.0.0.1:1, which {left} names, is gone; te-bench starts its own\n"
        assert (len(rows(tmp_path / "out")) >= 2, done.stderr.startswith(said)) == (True, True), done
        assert run.gone()
    assert eventually(lambda: scratch() <= before, 10)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_step_over_ranks_ends_there_too(tmp_path: Path) -> None:
    """Ray's workers ignore signals of children, and a trial's ranks are its process's children."""
    pytest.importorskip("ray", reason="needs ray: pip install '.[cluster]'")
    asked = ("--gpus-per-trial", 2, "--parallel", "ddp", "--seeds", 1, "--only", "*/bf16/*", "--out", tmp_path / "out")
    done = te_bench("run", "fp8", "--device", "cpu", "--on", "ray", *asked, env={**PLAIN, "RAY_TMPDIR": str(tmp_path)})
    assert (done.returncode, outcomes(tmp_path / "out")) == (0, ["ok"]), done
