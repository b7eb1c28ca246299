"""Sweeps over a cluster of Ray, by real runs on one of three nodes: each fault is one typed row, and nothing runs twice."""

import os
import shutil
import signal
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from driving import MARK, PLANTED, eventually, rows, running, te_bench

from te_bench.experiments import on_ray, ray_host

ON_RAY = {"PYTHONPATH": os.pathsep.join([str(PLANTED.parent / "on_ray"), os.environ["PYTHONPATH"]])}
CLUSTER = uuid.uuid4().hex
QUICK = ("run", "quick", "--device", "cpu", "--on", "ray")
NAPS = ("run", "naps", "--device", "cpu", "--on", "ray")


def scratch() -> set[Path]:
    return {path for kind in ("te-ray-*", "te-bench-*") for path in Path("/tmp").glob(kind)}


def workers() -> list[psutil.Process]:
    """The cluster's processes that run a trial each."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found += [process] if process.cmdline()[:1] == ["ray::carry_out"] and process.children() else []
    return found


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--on", "slurm"), "--on slurm: trials run here, or on a Ray cluster"),
        (("--ray-address", "a:1"), "--ray-address a:1: it goes with --on ray"),
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
def test_a_host_takes_as_many_trials_as_it_has_gpus_or_cores_for(
    wanted: on_ray.Wanted, places: int, of_each: dict[str, float]
) -> None:
    host = {"GPU": 8.0, "CPU": 96.0}
    assert (wanted.places(host), wanted.of_each(host)) == (places, of_each)
    assert wanted.places({"memory": 1.0}) == 0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes of one CPU each, one of them with two GPUs that are pretended."""
    pytest.importorskip("ray", reason="needs ray: pip install '.[cluster]'")
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="te-", dir="/tmp")  # its sockets' names must be short
    notice = {"health_check_period_ms": 500, "health_check_failure_threshold": 3, "health_check_initial_delay_ms": 0}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ON_RAY, **on_ray.SETTINGS, "RAY_TMPDIR": folder, MARK: CLUSTER}.items():
            patch.setenv(name, value)
        head = {"num_cpus": 1, "include_dashboard": False, "_system_config": notice}
        nodes = Cluster(initialize_head=True, head_node_args=head)
        for gpus in (0, 2):
            nodes.add_node(num_cpus=1, num_gpus=gpus)
        try:
            yield nodes
        finally:
            nodes.shutdown()
            shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_sweep_ends_and_its_rerun_repeats_nothing(cluster: Any, tmp_path: Path) -> None:
    command = (*NAPS, "--ray-address", cluster.address, "--out", tmp_path / "out")
    done = te_bench(*command, env=ON_RAY)
    assert (done.returncode, Counter(row["outcome"] for row in rows(tmp_path / "out"))) == (0, {"ok": 8}), done
    assert {row["device_state"]["host"] for row in rows(tmp_path / "out")} == {os.uname().nodename}
    again = te_bench(*command, env=ON_RAY)
    assert (again.returncode, len(rows(tmp_path / "out"))) == (0, 8), again
    assert "8 of 8 trials are already in" in again.stdout


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_each_gpu_has_one_trial_at_a_time(cluster: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ("run", "visible", "--device", "cuda", "--on", "ray", "--ray-address", cluster.address, "--out", out)
    done = te_bench(*command, env=ON_RAY)
    assert (done.returncode, "on ray: 2 trials at a time, on 1 host" in done.stdout) == (0, True), done
    seen = {"GPU-0": [], "GPU-1": []}
    for row in rows(out):
        began = datetime.fromisoformat(row["started_at"]).timestamp()
        seen[row["kernels"][0]].append((began, began + row["wall_s"]))
    for spans in seen.values():
        assert len(spans) >= 2
        assert all(end <= began + 0.002 for (_, end), (began, _) in pairwise(sorted(spans))), spans


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_hosts_that_differ_are_left_out_with_what_differs(cluster: Any, tmp_path: Path) -> None:
    others = [
        cluster.add_node(num_cpus=0, num_gpus=1, env_vars={name: "2"})
        for name in ("PRETENDED_DRIVER", "PRETENDED_CODE")
    ]
    command = ("run", "visible", "--device", "cuda", "--on", "ray", "--ray-address", cluster.address)
    done = te_bench(*command, "--out", tmp_path / "out", env=ON_RAY)
    for other in others:
        cluster.remove_node(other)
    assert (done.returncode, "on ray: 2 trials at a time, on 1 host" in done.stdout) == (0, True), done
    name = os.uname().nodename
    left_out = [line for line in done.stderr.splitlines() if line.startswith("warning: the host")]
    assert len(left_out) == 2
    assert any(f"{name} is left out: its te_bench is 2, this one " in line for line in left_out)
    assert any("not compared: it has driver 2, the others driver 1. " in line for line in left_out)
    assert len({row["environment"] for row in rows(tmp_path / "out")}) == 1


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
def test_lost_nodes_workers_and_drivers_are_rows_to_repeat(cluster: Any, tmp_path: Path) -> None:
    """Three trials hold all places. A node is lost, another joins, and then a worker and te-bench are killed."""
    out, host = tmp_path / "out", os.uname().nodename
    command = ("run", "crowded", "--device", "cpu", "--on", "ray", "--ray-address", cluster.address, "--out", out)

    def outcomes() -> list[str]:
        return [row["outcome"] for row in rows(out)]

    with running(*command, main=None, env=ON_RAY) as run:
        assert eventually(lambda: len(asleep()) == 3, 40)
        raylets = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
        on_a_node = next(worker for worker in workers() if worker.ppid() in raylets)
        cluster.remove_node(raylets[on_a_node.ppid()], allow_graceful=False)
        assert eventually(lambda: outcomes() == ["interrupted"], 40)
        time.sleep(2 * on_ray.LOOK_S)  # while no waiting trial is sent to where one was lost
        assert outcomes() == ["interrupted"]

        cluster.add_node(num_cpus=1)
        assert eventually(lambda: outcomes() == ["interrupted", "ok"] and len(asleep()) == 3, 40)
        workers()[0].kill()
        assert eventually(lambda: outcomes() == ["interrupted", "ok", "interrupted", "ok"], 40)
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
        assert eventually(lambda: not asleep() and run.gone(0), 30)

    by_node, by_worker = (row["reason"] for row in rows(out)[::2])
    killed = f"the process that starts trials on {host} was killed; rerun to repeat it"
    assert by_node == killed or by_node.startswith(f"the host {host} was lost"), by_node
    assert by_worker == killed

    done = te_bench(*command, "--timeout", "1", env=ON_RAY)
    assert outcomes()[4:] == ["timeout"] * 4, done
    assert "2 of 6 trials are already in" in done.stdout
    assert not asleep()


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_cluster_of_its_own_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray: pip install '.[cluster]'")
    before = scratch()
    with running(*NAPS, "--out", tmp_path / "out", main=None, env=ON_RAY) as run:
        assert eventually(lambda: len(rows(tmp_path / "out")) >= 2, 60)
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
        assert run.gone()
    assert eventually(lambda: scratch() <= before, 10)
