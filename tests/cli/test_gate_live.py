"""te-bench gate --base: what each way of failing answers, and what a kill leaves behind."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from driving import Run, eventually
from gates import FAST, QUICK, SLOW, outcomes
from revisions import FILES, Repository

from te_bench.experiments.store import load
from te_bench.gate import revisions


def test_0_the_same_code_passes(gate: Callable[..., Any], repository: Repository, tmp_path: Path) -> None:
    base = repository.commit({"a": FAST, "untimed": 0})
    done = gate(base)
    assert done.code == 0, done
    assert re.match("PASS: 1 (PASS|IMPROVED) of 1 timed", done.out), done  # by chance, 1 in 20 is faster than itself
    assert outcomes(tmp_path / "out") == {("a", "ok"): 5, ("untimed", "ok"): 1}
    records = load(tmp_path / "out" / "head").records.values()
    assert all(record.check["asked"] == (record.trial.seed == 0) for record in records)  # checked once
    assert json.loads((tmp_path / "out" / "gate.json").read_text())["exit_code"] == 0


def test_1_a_slower_revision_is_found(gate: Callable[..., Any], repository: Repository) -> None:
    base = repository.commit({"a": FAST, "b": FAST})
    repository.commit({"a": FAST, "b": SLOW})
    done = gate(base)
    assert (done.code, "1 REGRESSION" in done.out) == (1, True), done
    assert gate("HEAD", "--head", base).code == 0  # the other way round it is an improvement


def test_1_a_revision_of_which_every_fourth_call_is_slow_is_found(gate, repository, tmp_path, monkeypatch):
    # A process of six calls has one slow call or two: five pairs may leave it undecided, and a gate then goes on.
    monkeypatch.setattr(revisions, "LOOKS", (5, 10, 20))
    base = repository.commit({"a": FAST})
    one = "until = time.thread_time() + seconds"
    slow = one.replace("seconds", "seconds * (1 if next(calls) % 4 else 40)")
    trial = FILES["experiments/trial.py"].replace(one, slow)
    trial = trial.replace("    def call():", "    calls = __import__('itertools').count()\n\n    def call():")
    repository.commit({"a": FAST}, experiments__trial=trial)
    done = gate(base, "--json", tmp_path / "gate.json")
    [found] = json.loads((tmp_path / "gate.json").read_text())["trials"]
    assert (done.code, found["verdict"]) == (1, "REGRESSION"), done
    assert found["ratio"] < 2 < 3.5 < found["mean"]["low"]


def test_3_a_budget_that_ends_too_soon(gate: Callable[..., Any], repository: Repository, tmp_path: Path) -> None:
    base = repository.commit({"a": FAST})
    done = gate(base, "--budget", "0.06s")
    assert (done.code, "1 pair:" in done.out) == (3, True)
    assert "Note: the 5 pairs of each trial that any verdict needs would take about" in done.out
    assert outcomes(tmp_path / "out") == {("a", "ok"): 1}


def test_4_a_trial_that_is_gone_is_missing_and_one_that_came_is_new(gate, repository):
    base = repository.commit({"a": FAST, "gone": FAST})
    repository.commit({"a": FAST, "came": FAST})
    done = gate(base)
    assert done.code == 4, done
    assert "PyTorch eager fp32, gone: in the baseline, not in the candidate" in done.out
    assert "PyTorch eager fp32, came: new in the candidate: ok" in done.out


def test_4_trials_that_die_or_reply_what_no_record_can_hold(gate, repository, tmp_path):
    """Once is enough of each; what is sound beside them is measured."""
    replies = {
        "unknown": '{"outcome": "splendid"}',
        "empty": "{}",
        "nan": '{"outcome": "ok", "check": {"x": float("nan")}}',
        "number": "7",
    }
    wrong = ("segfault", "raises", *replies)
    base = repository.commit({"a": FAST, **dict.fromkeys(wrong, FAST)})
    dead = {name: name for name in ("segfault", "raises")}
    repository.commit({"a": FAST, **dict.fromkeys(replies, FAST), **dead}, experiments__trial=replying(replies))
    done = gate(base)
    said = " ".join(done.out.split())
    assert done.code == 4, done
    assert "crashed, ok in the baseline: seed 0: the process ended: SIGSEGV" in said, done
    assert "without a result" in said, done
    assert outcomes(tmp_path / "out") == {("a", "ok"): 5, **{(name, "crashed"): 1 for name in wrong}}


def replying(replies: dict[str, str]) -> str:
    """The trial's source, of which some trials reply with an expression."""
    lines = ""
    for name, reply in replies.items():
        expression = reply.replace("{", "{{").replace("}", "}}")
        lines += f"    if name == '{name}':\n        return {expression}\n\n"
    return FILES["experiments/trial.py"].replace("    def call():", f"{lines}    def call():")


def test_a_fork_that_dies_between_turns_takes_no_other_trial_with_it(gate, repository, tmp_path):
    base = repository.commit({"a": FAST, "b": FAST, "c": FAST})
    dies = FILES["experiments/trial.py"].replace(
        "    timed =",
        "    if name == 'b':\n        signal.setitimer(signal.ITIMER_REAL, 0.02)  # SIGALRM kills\n    timed =",
    )
    repository.commit({"a": FAST, "b": FAST, "c": FAST}, experiments__trial=dies)
    assert gate(base).code == 4
    assert outcomes(tmp_path / "out") == {("a", "ok"): 5, ("b", "crashed"): 1, ("c", "ok"): 5}


def test_what_trials_started_ends_with_them(gate: Callable[..., Any], repository: Repository, tmp_path: Path) -> None:
    """In a session of its own, too."""
    notes = {name: tmp_path / name for name in ("b", "c")}
    trials = dict.fromkeys("abc", FAST)
    base = repository.commit(trials)
    starts = {}
    for name, note in notes.items():
        sleeper = f"__import__('subprocess').Popen(['sleep', '600'], start_new_session={name == 'c'})"
        starts[name] = f"open({str(note)!r}, 'w').write(str({sleeper}.pid)) and {{}}"
    repository.commit(trials, experiments__trial=replying(starts))
    assert gate(base).code == 4
    for note in notes.values():
        pid = int(note.read_text())
        assert eventually(lambda: not psutil.pid_exists(pid), 5)  # noqa: B023


def test_the_temporary_folder_may_be_a_link(gate, repository, temporary, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(temporary)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "link"))
    done = gate(repository.commit({"a": FAST}), "--budget", "0.06s")
    assert (done.code, "1 pair:" in done.out) == (3, True), done


def test_a_trial_of_another_question_is_not_gone_on_with(gate, repository, tmp_path, monkeypatch):
    base = repository.commit({"a": FAST})
    out = tmp_path / "out"
    gate(base)
    first = {key: record.started_at for key, record in load(out / "head").records.items()}
    (out / "gate.json").unlink()  # as if it had been killed just before its answer
    gate(base)
    assert {key: record.started_at for key, record in load(out / "head").records.items()} == first
    for changed in (("--timeout", 30), ("--budget", "5min"), ("--alpha", 0.01)):
        (out / "gate.json").unlink()
        gate(base, *changed)
        again = {key: record.started_at for key, record in load(out / "head").records.items()}
        assert set(again.values()).isdisjoint(first.values())
        first = again


def test_the_repository_is_the_one_around_whatever_git_was_told(gate, repository, tmp_path, monkeypatch):
    base = repository.commit({"a": FAST})
    other = Repository(tmp_path / "other")
    monkeypatch.setenv("GIT_DIR", str(other.root / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other.root))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other.root / ".git" / "index"))
    assert gate(base).code == 0


UNTIMED = FILES["experiments/trial.py"].replace("timing.bench_py(call, trial.device)", "[call()] and True")


@pytest.mark.parametrize(
    ("trial", "broken", "said"),
    [
        (FAST, {"experiments__trial": UNTIMED}, "timed in the baseline, not in the candidate"),
        ("hangs", {}, "stopped after 1 s (--timeout)"),
        (
            FAST,
            {"experiments__trial": "import no_such_package\n"},
            "head: ModuleNotFoundError: No module named 'no_such_p",
        ),
        (
            FAST,
            {"experiments__plan": "def resolve(*a, **k): raise ValueError('no suite')\n"},
            "head: ValueError: no suite",
        ),
    ],
)
def test_4_a_revision_that_cannot_be_run_hangs_or_is_no_longer_timed(gate, repository, trial, broken, said):
    base = repository.commit({"a": FAST, "b": FAST})
    repository.commit({"a": FAST, "b": trial}, **broken)
    done = gate(base, "--timeout", 1)
    assert (done.code, said in " ".join(done.out.split())) == (4, True), done


def test_4_a_revision_without_te_bench(gate: Callable[..., Any], repository: Repository) -> None:
    base = repository.commit({"a": FAST})
    repository.git("rm", "--quiet", "-r", "te_bench")
    repository.git("commit", "--quiet", "-m", "gone")
    done = gate(base)
    assert (done.code, "has no te_bench package at its root" in " ".join(done.out.split())) == (4, True), done


def test_2_what_cannot_be_asked(gate, command, repository, tmp_path, monkeypatch):
    repository.commit({"a": FAST})
    assert "no revision 'nowhere'" in gate("nowhere").err
    assert "no revision '--output=x'" in gate("HEAD", "--head", "--output=x").err
    assert "--budget soon" in gate("HEAD", "--budget", "soon").err
    assert "--timeout 0" in gate("HEAD", "--timeout", 0).err
    assert "give one of them" in gate("HEAD", "--baseline", tmp_path).err
    assert (
        "--self-test writes its answers to --out, not to --markdown"
        in command("gate", "--self-test", "--markdown", tmp_path / "x.md").err
    )
    for option, value in (("--gates", 3), ("--at-once", 2), ("--slower", "2%"), ("--on", "ray")):
        assert "need --self-test: add it" in gate("HEAD", option, value).err
    assert "--at-once 2: with --on ray" in command("gate", "--self-test", "--on", "ray", "--at-once", 2).err
    none = "def resolve(*a, **k): raise ValueError('no such suite')\n"
    refused = gate(repository.commit({"a": FAST}, experiments__plan=none))
    assert (refused.code, refused.err.splitlines()[-1]) == (2, "te-bench: no such suite")
    monkeypatch.chdir(tmp_path)
    refused = gate("HEAD")
    assert (refused.code, "is in no git repository" in refused.err) == (2, True)


def test_the_repository_is_left_as_it_was(gate: Callable[..., Any], repository: Repository) -> None:
    base = repository.commit({"a": FAST})
    (repository.root / "te_bench" / "plugins.py").write_text("raise SystemExit  # not committed, so not judged\n")
    before = repository.git("status", "--porcelain", "--branch"), repository.git("worktree", "list")
    done = gate(base)
    assert (done.code, "Uncommitted changes are not judged" in done.err) == (0, True), done
    assert (repository.git("status", "--porcelain", "--branch"), repository.git("worktree", "list")) == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_kill_leaves_nothing_and_the_next_call_goes_on(repository, tmp_path, number):
    go_on = tmp_path / "go_on"  # else its third round lasts
    waits = f"    while trial.seed == 2 and not os.path.exists({str(go_on)!r}):\n        time.sleep(0.01)\n    timed ="
    trial = FILES["experiments/trial.py"].replace("    timed =", waits)
    base = repository.commit({"a": FAST, "b": FAST}, experiments__trial=trial)
    temporary, out = tmp_path / "tmp", tmp_path / "out"
    temporary.mkdir()
    arguments = ("gate", "--base", base, "--device", "cpu", "--out", out, "--margin", "100%")
    where = {"cwd": repository.root, "env": {"TMPDIR": str(temporary)}}
    main = tmp_path / "main.py"  # not -m: the repository's own te_bench would be the one that is run
    main.write_text(
        "from te_bench.cli import main\nfrom te_bench.gate import paired_trial, revisions\n"
        f"vars(paired_trial).update({QUICK})\nrevisions.LOOKS = (5,)\nmain()\n"
    )

    def measured() -> int:
        journal = out / "head" / "journal.jsonl"
        return journal.read_bytes().count(b'"kind":"record"') if journal.exists() else 0

    run = Run(*arguments, main=main, **where)
    assert eventually(lambda: measured() >= 3, 30)
    os.kill(run.process.pid, number)
    codes = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGINT: 130}
    assert run.finish().returncode == codes[number]
    assert run.gone()
    assert eventually(lambda: not list(temporary.iterdir()), 10)
    assert not list(out.rglob(".*.json.*"))  # of a file that is written whole or not at all
    kept = {key: r for key, r in load(out / "head").records.items() if key in load(out / "base").records}  # whole pairs
    go_on.touch()
    done = Run(*arguments, main=main, **where).finish()
    assert done.returncode == 0, done
    now = load(out / "head").records
    assert all(now[key].started_at == record.started_at for key, record in kept.items())
    assert len(now) > len(kept)
