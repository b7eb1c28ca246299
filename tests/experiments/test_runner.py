"""The runner, by real runs: every fault is one typed row, the sweep goes on, nothing outlives te-bench or is lost."""

import functools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import journals
import psutil
import pytest
from driving import IDLE, PLANTED, Run, eventually, rows, running, te_bench

from te_bench.experiments import environment, runner
from te_bench.experiments.spec import OUTCOMES, Record, Trial
from te_bench.experiments.store import Store, load

MODELLED = PLANTED.with_name("te_bench_modelled.py")
NAPS = ("run", "naps", "--device", "cpu", "--timeout", "60", "--out")

#: fault -> (outcome, what its reason matches)
FAULTS = {
    "sound": ("ok", None),
    "segfault": ("crashed", r"^SIGSEGV; see logs/[0-9a-f]{16}\.log$"),
    "abort": ("crashed", r"^SIGABRT; see logs/[0-9a-f]{16}\.log$"),
    "host-memory": ("oom", r"^host: .*can't allocate memory.* 8589934592 bytes"),
    "python-memory": ("oom", r"^host: out of memory$"),
    "missing-package": ("unsupported", r"pip install a_package_that_is_not_there$"),
    "missing-submodule": ("unsupported", r"numpy\.a_part_that_is_not_there, which the installed numpy lacks$"),
    "wrong-kernel": ("failed_check", r"^asked for manual, but flash ran"),
    "killed-once": ("interrupted", r"SIGKILL"),
    "exit": ("crashed", r"^exit code 3 without a reply$"),
    "nan-sample": ("crashed", r"^a result that JSON cannot hold"),
    "raises": ("crashed", r"^KeyError: .*; see logs/[0-9a-f]{16}\.log$"),
    "no-log": ("crashed", r"^KeyError: 'its log is gone'$"),
    "lock": ("ok", None),
    "sound-after": ("ok", None),
    "tiny": ("diverged", r"^the loss is not finite$"),  # a real training step, at a learning rate of 1e30
}


@pytest.mark.slow
def test_every_fault_is_one_row_of_its_own_kind_and_the_sweep_goes_on(tmp_path: Path) -> None:
    """And the same command once more repeats what was interrupted, nothing else."""
    command = ("run", "faults", "--out", tmp_path / "out", "--device", "cpu", "--cache", tmp_path)
    done = te_bench(*command, main=PLANTED)
    written = rows(tmp_path / "out")
    by_fault = {row["trial"]["problem"]["model"]: row for row in written}

    assert {fault: row["outcome"] for fault, row in by_fault.items()} == {fault: FAULTS[fault][0] for fault in FAULTS}
    assert len(written) == len(FAULTS)
    assert written[-1] is by_fault["sound-after"]
    states = [row["device_state"] for row in written]  # of those that left no reply too
    here = environment.of_times(environment.capture("cpu"))
    assert [{name: state[name] for name in here} for state in states] == [here] * len(FAULTS)
    for fault, (outcome, reason) in FAULTS.items():
        said = by_fault[fault]["reason"]
        assert said is None if reason is None else re.search(reason, said), said
        assert bool(by_fault[fault]["samples"].get("latency_s")) == (outcome == "ok")

    assert done.returncode == 4  # incomplete
    said = [line for line in done.stderr.splitlines() if "the machine is busy" not in line]
    assert all(line.startswith("[") for line in said), done.stderr  # progress: no leaked locks
    assert "crashed: fault/segfault/manual/bf16/eager/s0: SIGSEGV" in done.stdout
    assert (tmp_path / "out" / "report" / "index.html").is_file()
    logs = tmp_path / "out" / "logs"
    for fault, where in (("segfault", "in string_at"), ("abort", "in abort"), ("raises", "KeyError")):
        assert where in (logs / f"{by_fault[fault]['trial']['id']}.log").read_text()
    assert not (logs / f"{by_fault['sound']['trial']['id']}.log").exists()

    again = te_bench(*command, main=PLANTED)
    repeated = rows(tmp_path / "out")[len(written) :]
    assert [(row["trial"]["problem"]["model"], row["outcome"]) for row in repeated] == [("killed-once", "ok")]
    assert f"{len(FAULTS) - 1} of {len(FAULTS)} trials are already in {tmp_path}/out" in again.stdout
    outcomes = Counter(record.outcome for record in load(tmp_path / "out").records.values())
    assert outcomes["ok"] == 4
    assert not outcomes["interrupted"]


def test_retry_repeats_once_what_did_not_end_ok_and_its_last_record_counts(tmp_path: Path) -> None:
    where = ("--out", tmp_path / "out", "--device", "cpu", "--cache", tmp_path, "--only", "fault/[sermk]*")
    te_bench("run", "faults", *where, main=PLANTED, env=IDLE)
    first = rows(tmp_path / "out")
    failed = [row["trial"]["id"] for row in first if row["outcome"] != "ok"]
    done = te_bench("run", "faults", *where, "--retry", "--within", "0.001s", main=PLANTED, env=IDLE)
    assert (len(rows(tmp_path / "out")), done.returncode) == (len(first), 4)
    assert f"\n{len(failed)} trials would not have ended --within 0.001s" in done.stdout
    with (tmp_path / "out" / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"crc32":"0')  # as a kill leaves it
    assert {row["outcome"] for row in first} == {"ok", "crashed", "unsupported", "interrupted"}
    done = te_bench("run", "faults", *where, "--retry", main=PLANTED, env=IDLE)
    repeated = rows(tmp_path / "out")[len(first) :]
    assert f"{tmp_path}/out: the journal's last line was incomplete and is removed" in done.stdout
    assert [row["trial"]["id"] for row in repeated] == failed
    assert f"{len(first) - len(failed)} of {len(first)} trials are already in" in done.stdout
    now = {record.trial.problem["model"]: record.outcome for record in load(tmp_path / "out").records.values()}
    assert now["killed-once"] == "ok"
    assert len(now) == len(first)


class Idle:
    """An executor whose free places stay free, and to which no other comes."""

    busy = False

    def __init__(self, *free: Any):
        self.free = list(free)

    def submit(self, trial: Trial, place: Any) -> None:
        raise AssertionError(trial)

    def ended(self) -> Iterator[Record]:
        raise ValueError("no place came")

    def kill(self) -> None:
        pass


def naps(number: int) -> list[Trial]:
    return [Trial(workload="nap", device="cpu", problem={}, attention="manual", seed=seed) for seed in range(number)]


def test_no_place_is_waited_for_once_no_trial_is_in_time(tmp_path: Path) -> None:
    late: dict[str, Any] = {"progress": lambda *_: None, "needless": lambda _: None, "in_time": lambda _: False}
    with Store(tmp_path) as store:
        assert runner.run(naps(2), store, "e0", Idle(), **late) == naps(2)
        with pytest.raises(ValueError, match="no place came"):
            runner.run(naps(2), store, "e0", Idle(), **late | {"in_time": lambda _: True})


class Noting:
    """An executor of so many places that ends the trial first that began last, and notes what ran beside what."""

    def __init__(self, places: int):
        self.free, self.running, self.begun = list(range(places)), list[Trial](), list[set[tuple[int, str]]]()

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def submit(self, trial: Trial, place: Any) -> None:
        self.running.append(trial)
        self.begun.append({(one.seed, str(one.problem["arm"])) for one in self.running})

    def ended(self) -> Iterator[Record]:
        self.free.append(0)
        yield journals.record(self.running.pop(), "e0")

    def kill(self) -> None:
        pass


def test_a_branch_waits_while_another_trains_its_trunk_and_lets_others_go_first(tmp_path: Path) -> None:
    wanted = [
        Trial(workload="training", device="cpu", problem={"arm": arm, "branch_at": 5}, attention="flash", seed=seed)
        for seed in range(3)
        for arm in ("control", "aa", "recipe")
    ]
    how: dict[str, Any] = {"progress": lambda *_: None, "needless": lambda _: None, "in_time": lambda _: True}
    with Store(tmp_path) as store:
        executor = Noting(2)
        assert runner.run(wanted, store, "e0", executor, **how) == []
        assert executor.begun[:2] == [{(0, "control")}, {(0, "control"), (1, "control")}]
        assert executor.begun[2] == {(0, "control"), (1, "aa")}  # seed 1's trunk is there, and seed 0's is not
        assert executor.begun[-1] >= {(0, "aa")} or executor.begun[-1] >= {(0, "recipe")}
        assert len(store.journal.records) == 9
    for code, beside in (("e0", {(0, "aa"), (0, "recipe")}), ("other code", {(0, "control"), (1, "control")})):
        with Store(tmp_path / code) as store:
            store.add(journals.record(wanted[0], code))  # of an earlier sitting
            executor = Noting(2)
            runner.run(wanted, store, "e0", executor, **how)
            assert executor.begun[1] == beside


def test_a_branch_that_would_have_to_train_its_trunk_is_in_time_where_the_control_is(tmp_path: Path) -> None:
    """Else it would begin as one that finds its trunk, and end long after the time is over."""
    control, branch = (
        Trial(workload="training", device="cpu", problem={"arm": arm, "branch_at": 5}, attention="flash")
        for arm in ("control", "aa")
    )
    how: dict[str, Any] = {"progress": lambda *_: None, "needless": lambda _: None}
    how["in_time"] = lambda trial: trial.problem["arm"] != "control"  # which takes as long as with its trunk
    with Store(tmp_path) as store:
        assert runner.run([control, branch], store, "e0", Noting(1), **how) == [control, branch]
        store.add(journals.record(control, "e0"))
        assert runner.run([branch], store, "e0", Noting(1), **how) == []


def test_a_needless_trial_is_stopped_and_not_left_for_another_time(tmp_path: Path) -> None:
    first, second = naps(2)
    with Store(tmp_path) as store:
        left = runner.run(
            [first, second],
            store,
            "e0",
            Idle(None),
            progress=lambda *_: None,
            needless=lambda trial: "decided" if trial == first else None,
            in_time=lambda _: False,
        )
        ended = [(record.trial, record.outcome, record.reason) for record in store.journal.records.values()]
        assert (left, ended) == ([second], [(first, "stopped", "decided")])


def test_a_divergence_is_not_repeated_with_retry_either(tmp_path: Path) -> None:
    trials = [Trial(workload="nap", device="cpu", problem={"model": name}, attention="manual") for name in OUTCOMES]
    with Store(tmp_path) as store:
        for trial, outcome in zip(trials, OUTCOMES, strict=True):
            store.add(Record(trial=trial, environment="e0", outcome=outcome, started_at="2026-11-23", wall_s=1.0))

        def repeated(*, retry: bool) -> set[str]:
            return {str(t.problem["model"]) for t in runner.to_do(trials, store.journal, "e0", retry=retry)}

        assert repeated(retry=False) == {"interrupted"}
        assert repeated(retry=True) == set(OUTCOMES) - {"ok", "diverged"}
        assert runner.to_do(trials, store.journal, "another environment", retry=False) == trials


def test_hung_trials_end_in_time_with_all_that_they_started(tmp_path: Path) -> None:
    with running("run", "hangs", "--out", tmp_path, "--device", "cpu", "--cache", tmp_path, "--timeout", "2") as run:
        done = run.finish()
        assert run.gone(), run.family()
    _, *hung, after = rows(tmp_path)
    assert [(row["outcome"], row["reason"]) for row in hung] == [("timeout", "stopped after 2 s (--timeout)")] * 2
    assert [row["trial"]["problem"]["model"] for row in hung] == ["hang", "hang-holding-gil"]
    assert all(2 <= row["wall_s"] < 5 for row in hung)
    assert after["outcome"] == "ok", after["reason"]  # it found none of their children alive
    assert done.returncode == 4


@pytest.mark.gpu
def test_gpu_faults_are_rows_and_the_next_trial_has_a_sound_gpu(tmp_path: Path) -> None:
    where = ("--device", "cuda", "--gpus", "0", "--cache", tmp_path)
    te_bench("run", "gpu_faults", "--out", tmp_path, *where, main=PLANTED)
    said = {row["trial"]["problem"]["model"]: (row["outcome"], row["reason"]) for row in rows(tmp_path)}
    assert said["gpu-sound"] == said["gpu-sound-after"] == ("ok", None)
    assert said["gpu-memory"][0] == "oom"
    assert said["gpu-memory"][1].startswith("GPU: CUDA out of memory")
    assert said["gpu-assert"][0] == "crashed"
    assert "CUDA error" in said["gpu-assert"][1]


def test_without_torch_every_trial_says_which_package_is_missing(tmp_path: Path, no_torch: dict[str, str]) -> None:
    done = te_bench("run", "nothing", "--out", tmp_path / "out", "--device", "cpu", main=PLANTED, env=no_torch)
    assert {row["reason"] for row in rows(tmp_path / "out")} == {"needs the package torch: pip install torch"}
    assert {row["outcome"] for row in rows(tmp_path / "out")} == {"unsupported"}
    assert done.returncode == 4  # nothing was measured
    assert len(rows(tmp_path / "out")) == 11


def test_a_trial_costs_half_a_second_at_most_beside_its_own_work(tmp_path: Path) -> None:
    done = te_bench("run", "nothing", "--out", tmp_path, "--device", "cpu", main=PLANTED)
    assert done.returncode == 0, done.stderr
    cost = [row["wall_s"] - row["work_s"] for row in rows(tmp_path)[1:]]  # the first waits for the import of torch
    assert len(cost) == 10
    assert statistics.median(cost) <= 0.5, cost


def test_on_a_cpu_a_child_finds_the_models_imported_and_nothing_of_it_to_collect(tmp_path: Path) -> None:
    where = ("--out", tmp_path / "out", "--device", "cpu", "--cache", tmp_path, "--only", "fault/sound/*")
    te_bench("run", "faults", *where, main=MODELLED)
    (row,) = rows(tmp_path / "out")
    assert row["work"]["models"]
    assert row["work"]["frozen"] > 100_000


BROKEN = """
import sys

class Broken:
    @staticmethod
    def find_spec(name, *_):
        if name == "te_bench.models.zoo.gpt":
            raise RuntimeError("broken")

sys.meta_path.insert(0, Broken)
"""


def test_models_that_do_not_import_are_the_trials_fault_alone(tmp_path: Path) -> None:
    """The fork server would die of them, and the run with it."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    env = {"PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"]))}
    where = ("--out", tmp_path / "out", "--device", "cpu", "--cache", tmp_path, "--only", "fault/sound/*")
    te_bench("run", "faults", *where, main=MODELLED, env=env)
    (row,) = rows(tmp_path / "out")
    assert (row["outcome"], row["work"]["models"]) == ("ok", False)


def test_the_plan_a_run_writes_down_is_the_plan_it_shows(tmp_path: Path) -> None:
    assert te_bench(*NAPS, tmp_path, main=PLANTED, env=IDLE).returncode == 0
    ids = [trial["id"] for trial in planned("naps")]
    assert len(set(ids)) == 8
    assert results(tmp_path) == Counter((trial_id, "ok") for trial_id in ids)
    assert [row["trial"]["id"] for row in rows(tmp_path)] == ids
    assert [Trial.from_json(trial).id for trial in load(tmp_path).plans[-1].trials] == ids


@functools.cache
def planned(suite: str) -> list[dict[str, Any]]:
    done = te_bench("plan", suite, "--device", "cpu", "--json", main=PLANTED)
    return list(json.loads(done.stdout)["trials"])


# Kills.


def results(directory: Path) -> Counter[tuple[str, str]]:
    """(trial id, outcome) of every row that counts, as often as it was written."""
    return Counter((row["trial"]["id"], row["outcome"]) for row in rows(directory) if row["outcome"] != "interrupted")


def uninterrupted() -> Counter[tuple[str, str]]:
    """The results of a run that nothing disturbed: test_the_plan_... shows that these are they."""
    return Counter((trial["id"], "ok") for trial in planned("naps"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_kill_9_at_random_moments_loses_nothing_repeats_nothing_and_leaves_nobody(tmp_path: Path, seed: int) -> None:
    """Three kills: while it starts, while a trial runs, and anywhere; then the same command to the end.

    The first seed's kills may hit the import of torch.
    """
    draw, env = random.Random(seed), IDLE if seed else {}
    for after in (0, draw.randint(1, 3), draw.randint(4, 6)):
        with running(*NAPS, tmp_path, env=env) as run:
            eventually(lambda: len(rows(tmp_path)) >= after or run.process.poll() is not None, 30)  # noqa: B023
            moment = draw.uniform(0.2, 2.5) if after == 0 else draw.uniform(0.0, 0.4)
            eventually(lambda: False, moment)
            os.kill(run.process.pid, signal.SIGKILL)
            assert run.process.wait() == -signal.SIGKILL
            assert run.gone(), run.family()
    assert te_bench(*NAPS, tmp_path, main=PLANTED, env=env).returncode == 0
    assert results(tmp_path) == uninterrupted()


#: A sitecustomize.py that notes when the fork server imports what trials run, and holds it up.
WATCHED = """
import pathlib
import sys
import time

class Watched:
    @staticmethod
    def find_spec(name, *_):
        if name == "te_bench.experiments.trial":
            pathlib.Path({mark!r}).touch()
            time.sleep({seconds})

sys.meta_path.insert(0, Watched)
"""


def test_kill_9_while_the_fork_server_imports_torch_ends_it_at_once(tmp_path: Path) -> None:
    mark = tmp_path / "importing"
    (tmp_path / "sitecustomize.py").write_text(WATCHED.format(mark=str(mark), seconds=60))
    env = {"PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"]))}
    with running(*NAPS, tmp_path / "out", env=env) as run:
        assert eventually(mark.exists, 30)
        os.kill(run.process.pid, signal.SIGKILL)
        assert run.gone(), run.family()


PATIENT = """
import pathlib
import sys
import time

sys.path.append({planted!r})
import te_bench_planted
from te_bench.experiments import plan

resolve = plan.resolve

def resolve_later(*arguments, **options):
    until = time.monotonic() + 20
    while not pathlib.Path({mark!r}).exists():
        assert time.monotonic() < until, "no fork server imports"
        time.sleep(0.01)
    return resolve(*arguments, **options)

plan.resolve = resolve_later

if __name__ == "__main__":
    te_bench_planted.cli.main()
"""


def test_the_fork_server_imports_while_the_plan_is_made_and_not_for_a_run_that_is_there(tmp_path: Path) -> None:
    mark, program = tmp_path / "imported", tmp_path / "patient.py"
    (tmp_path / "sitecustomize.py").write_text(WATCHED.format(mark=str(mark), seconds=0))
    program.write_text(PATIENT.format(mark=str(mark), planted=str(PLANTED.parent)))
    env = {"PYTHONPATH": os.pathsep.join((str(tmp_path), IDLE["PYTHONPATH"]))}
    done = te_bench(*NAPS, tmp_path / "out", main=program, env=env)
    assert done.returncode == 0, done
    mark.unlink()
    assert te_bench(*NAPS, tmp_path / "out", main=PLANTED, env=env).returncode == 0
    assert not mark.exists()


def test_a_ctrl_c_before_the_fork_server_imports_anything_is_te_benchs(tmp_path: Path) -> None:
    """Else Python, which starts there, would print where it was."""
    started = "import os, signal, sys\nif 'forkserver' in sys.orig_argv[-1]:\n    os.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "sitecustomize.py").write_text(started)
    env = {"PYTHONPATH": os.pathsep.join((str(tmp_path), IDLE["PYTHONPATH"]))}
    done = te_bench(*NAPS, tmp_path / "out", "--only", "*/s0", main=PLANTED, env=env)
    assert (done.returncode, "KeyboardInterrupt" in done.stderr) == (0, False), done


def test_a_program_that_had_a_fork_server_before_runs_trials(tmp_path: Path) -> None:
    """It goes on serving, and has imported nothing for te-bench."""
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing, sys\n"
        f"sys.path.append({str(PLANTED.parent)!r})\n"
        "import te_bench_planted\n"
        "if __name__ == '__main__':\n"
        "    first = multiprocessing.get_context('forkserver').Process(target=int)\n"
        "    first.start()\n"
        "    first.join()\n"
        "    te_bench_planted.cli.main()\n"
    )
    done = te_bench(*NAPS, tmp_path / "out", "--only", "*/s0", main=program, env=IDLE)
    assert done.returncode == 0, done
    assert {row["outcome"] for row in rows(tmp_path / "out")} == {"ok"}


def test_a_fork_server_that_begins_after_te_bench_was_killed_ends(tmp_path: Path) -> None:
    """Its parent is another by then, whose death would come too late."""
    command = [sys.executable, "-c", f"import {runner.PRELOAD}; print('lives')"]
    for parent, lives in ((os.getpid(), True), (2**22, False)):  # above every pid
        env = {**os.environ, runner.RUNNER: str(parent), runner.PRELOADED: ""}  # a run in this process leaves its own
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert (done.stdout, done.returncode) == (("lives\n", 0) if lives else ("", 1)), done.stderr


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where everything that runs from here on puts its temporary files; short, for a socket's path has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def test_kill_9_of_the_parent_ends_a_hung_trial_and_its_children(tmp_path: Path, temporary: Path) -> None:
    with asleep(tmp_path, env={}) as run:  # with torch in all its processes
        assert run.named("sleep")
        assert list(temporary.iterdir())
        os.kill(run.process.pid, signal.SIGKILL)
        assert run.gone(), run.family()
    assert [record.outcome for record in load(tmp_path).records.values()] == ["ok"]
    assert not list(temporary.iterdir())


def test_kill_9_of_the_watcher_and_then_of_the_parent_ends_the_trial(tmp_path: Path) -> None:
    """What the trial itself started is the watcher's to end: the sleep lives on."""
    with asleep(tmp_path) as run:
        (trial,) = {process.ppid() for process in run.named("sleep")}
        (watcher,) = (child for child in psutil.Process(trial).children() if child.name() != "sleep")
        watcher.kill()
        os.kill(run.process.pid, signal.SIGKILL)
        assert eventually(lambda: run.family() == run.named("sleep"), 30), run.family()


@pytest.mark.parametrize("victim", ["fork server", "trial", "both"])
def test_kill_9_of_the_fork_server_or_a_trial_interrupts_one_trial_which_a_rerun_repeats(tmp_path, temporary, victim):
    with asleep(tmp_path) as run:
        (trial,) = {process.ppid() for process in run.named("sleep")}
        server = fork_server(run)
        for pid in {"fork server": [server], "trial": [trial], "both": [server, trial]}[victim]:
            os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: len(rows(tmp_path)) == 2, 30)  # and the next one sleeps
        run.process.send_signal(signal.SIGINT)
        run.finish(30)
        assert run.gone(), run.family()
    assert [row["outcome"] for row in rows(tmp_path)] == ["ok", "interrupted"]
    assert re.search(r"killed.*; rerun to repeat it$", rows(tmp_path)[1]["reason"])
    assert not list(temporary.iterdir())
    with Store(tmp_path) as store:
        trials = list(map(Trial.from_json, store.journal.plans[-1].trials))
        (environment,) = store.journal.environments
        assert len(runner.to_do(trials, store.journal, environment, retry=False)) == 2


def fork_server(run: Run) -> int:
    (server,) = (p for p in psutil.Process(run.process.pid).children() if "forkserver" in " ".join(p.cmdline()))
    return int(server.pid)


@contextmanager
def asleep(directory: Path, *options: str, env: Mapping[str, str] = IDLE) -> Iterator[Run]:
    """A run that has done one trial and is in the middle of another, which sleeps and has a child that sleeps."""
    with running("run", "sleeps", *options, "--out", directory, "--device", "cpu", env=env) as run:
        assert eventually(lambda: bool(run.named("sleep")), 60)
        yield run


# Being stopped.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_or_sigterm_ends_the_children_and_says_how_to_go_on(tmp_path: Path, number: signal.Signals) -> None:
    with asleep(tmp_path / "a run", "--fresh") as run:
        os.killpg(run.process.pid, number)  # as a terminal does: to the whole foreground group
        done = run.finish(30)
        assert run.gone(), run.family()
    assert done.returncode == 128 + number
    again = f"te-bench run sleeps --out '{tmp_path}/a run' --device cpu"  # not --fresh again
    assert done.stdout.splitlines()[-1] == f"Stopped with 2 trials to go. To go on: {again}"
    assert "Traceback" not in done.stderr
    assert [record.outcome for record in load(tmp_path / "a run").records.values()] == ["ok"]


def test_ctrl_c_again_and_again_does_not_disturb_the_clean_up(tmp_path: Path) -> None:
    with asleep(tmp_path) as run:
        for _ in range(20):
            run.process.send_signal(signal.SIGINT)
            eventually(lambda: False, 0.005)
        assert run.finish(30).returncode in (130, -signal.SIGINT)  # the latter when Python itself was on its way out
        assert run.gone(), run.family()


@pytest.mark.parametrize("moment", [0.1, 0.5, 1.5])
def test_ctrl_c_while_it_starts_leaves_nobody_and_a_store_that_opens(tmp_path: Path, moment: float) -> None:
    with running(*NAPS, tmp_path) as run:
        eventually(lambda: False, moment)
        os.killpg(run.process.pid, signal.SIGINT)
        done = run.finish(30)
        # Python itself was starting, or made a class: before 3.12 it turns what interrupts that into a RuntimeError.
        starting = any(words in done.stderr for words in ("<frozen site>", "Error calling __set_name__"))
        assert done.returncode in (130, -signal.SIGINT) or starting
        assert run.gone(), run.family()
    with Store(tmp_path) as store:
        assert {record.outcome for record in store.journal.records.values()} <= {"ok"}


def test_logs_that_are_a_link_are_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "logs").symlink_to(tmp_path / "target")
    done = te_bench(*NAPS, tmp_path / "out", main=PLANTED, env=IDLE)
    assert (done.returncode, list((tmp_path / "target").iterdir())) == (2, [])
    assert f"{tmp_path}/out/logs is a link" in done.stderr


@pytest.mark.parametrize(
    ("threads", "cores", "expected"),
    [((1, 1), 2, 2), ((1, 1), 1, 1), ((1, 2), 4, 2), ((1, 1), 64, 8), ((8, 8), 4, 1), ((1, None), 4, 1), ((), 4, 1)],
)
def test_trials_that_say_their_threads_run_side_by_side_on_a_cpu(threads, cores, expected):
    problems: list[dict[str, Any]] = [{} if number is None else {"threads": number} for number in threads]
    trials = [Trial(workload="training", device="cpu", problem=problem, attention="flash") for problem in problems]
    assert runner.at_once(trials, cores) == expected


def test_a_fork_server_that_is_dying_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "FORK_SERVER_DIES_S", 0.0)
    broken: list[type[Exception]] = [EOFError, ConnectionRefusedError, BrokenPipeError]

    class Process:
        started = False

        def start(self) -> None:
            if broken:
                raise broken.pop()
            self.started = True

    process = Process()
    runner.start_child(process)  # type: ignore[arg-type]
    assert process.started

    broken += [EOFError] * 9
    with pytest.raises(EOFError):
        runner.start_child(Process())  # type: ignore[arg-type]
