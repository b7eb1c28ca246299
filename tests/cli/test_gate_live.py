"""te-bench gate --base: two revisions measured in turns, what each way of failing answers, and what a kill leaves behind."""

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from driving import Run, eventually
from in_process import Command
from revisions import FILES, Repository

from te_bench.experiments import pairs
from te_bench.experiments.store import load
from te_bench.reports import gate_live

FAST, SLOW = 0.002, 0.006
QUICK = {"TURN_S": 0.004, "TIMED_S": 0.03, "MOST_TURNS": 6}


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


@pytest.fixture
def gate(
    command: Command, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """gate("--head", ...) from inside the repository, in rounds of a tenth of a second."""
    monkeypatch.chdir(repository.root)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    for name, value in QUICK.items():
        monkeypatch.setattr(pairs, name, value)
    monkeypatch.setattr(gate_live, "LOOKS", (5,))
    out = tmp_path / "out"

    def run(base: str, *arguments: object, margin: str = "100%") -> Any:
        done = command("gate", "--base", base, "--device", "cpu", "--out", out, "--margin", margin, *arguments)
        assert not list((tmp_path / "tmp").iterdir())
        return done

    return run


def outcomes(out: Path) -> Counter[tuple[str, str]]:
    """{(trial, outcome): records} of the head."""
    return Counter((r.trial.problem["model"], r.outcome) for r in load(out / "head").records.values())


def test_0_the_same_code_passes(gate: Callable[..., Any], repository: Repository, tmp_path: Path) -> None:
    base = repository.commit({"a": FAST, "untimed": 0})
    done = gate(base)
    assert done.code == 0, done
    assert done.out.startswith("PASS: 1 PASS of 1 timed.")
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


def test_3_a_budget_that_ends_too_soon(gate: Callable[..., Any], repository: Repository, tmp_path: Path) -> None:
    base = repository.commit({"a": FAST})
    done = gate(base, "--budget", "0.001")
    assert (done.code, "1 pair:" in done.out) == (3, True)
    assert outcomes(tmp_path / "out") == {("a", "ok"): 1}


def test_4_a_trial_that_is_gone_is_missing_and_one_that_came_is_new(
    gate: Callable[..., Any], repository: Repository
) -> None:
    base = repository.commit({"a": FAST, "gone": FAST})
    repository.commit({"a": FAST, "came": FAST})
    done = gate(base)
    assert done.code == 4, done
    assert "gone/flash/fp32/eager: in the baseline, not in the candidate" in done.out
    assert "came/flash/fp32/eager: new in the candidate: ok" in done.out


@pytest.mark.parametrize(
    ("how", "said"),
    [("segfault", "crashed, ok in the baseline: seed 0: the process ended: SIGSEGV"), ("raises", "without a result")],
)
def test_4_a_trial_that_dies(
    gate: Callable[..., Any], repository: Repository, tmp_path: Path, how: str, said: str
) -> None:
    base = repository.commit({"a": FAST, "b": FAST})
    repository.commit({"a": FAST, "b": how})
    done = gate(base)
    assert (done.code, said in " ".join(done.out.split())) == (4, True), done
    assert outcomes(tmp_path / "out") == {("a", "ok"): 5, ("b", "crashed"): 1}  # once is enough


def test_4_a_trial_that_is_no_longer_timed_is_missing(gate: Callable[..., Any], repository: Repository) -> None:
    base = repository.commit({"a": FAST})
    untimed = FILES["experiments/trial.py"].replace("timing.bench_py(call, trial.device)", "[call()] and True")
    repository.commit({"a": FAST}, experiments__trial=untimed)
    done = gate(base)
    assert (done.code, "timed in the baseline, not in the candidate" in " ".join(done.out.split())) == (4, True), done


@pytest.mark.parametrize(
    "reply", ['{"outcome": "splendid"}', "{}", '{"outcome": "ok", "check": {"x": float("nan")}}', "7"]
)
def test_4_a_reply_that_no_record_can_hold_is_a_crash(
    gate: Callable[..., Any], repository: Repository, tmp_path: Path, reply: str
) -> None:
    base = repository.commit({"a": FAST, "b": FAST})
    repository.commit({"a": FAST, "b": FAST}, experiments__trial=replying("b", reply))
    assert gate(base).code == 4
    assert outcomes(tmp_path / "out") == {("a", "ok"): 5, ("b", "crashed"): 1}


def replying(name: str, reply: str) -> str:
    """The trial's source, of which one trial replies with an expression."""
    expression = reply.replace("{", "{{").replace("}", "}}")
    lines = f"    if name == '{name}':\n        return {expression}\n\n    def call():"
    return FILES["experiments/trial.py"].replace("    def call():", lines)


def test_a_fork_that_dies_between_turns_takes_no_other_trial_with_it(
    gate: Callable[..., Any], repository: Repository, tmp_path: Path
) -> None:
    base = repository.commit({"a": FAST, "b": FAST, "c": FAST})
    dies = FILES["experiments/trial.py"].replace(
        "    timed =",
        "    if name == 'b':\n        signal.setitimer(signal.ITIMER_REAL, 0.02)  # SIGALRM kills\n    timed =",
    )
    repository.commit({"a": FAST, "b": FAST, "c": FAST}, experiments__trial=dies)
    assert gate(base).code == 4
    assert outcomes(tmp_path / "out") == {("a", "ok"): 5, ("b", "crashed"): 1, ("c", "ok"): 5}


def test_what_a_trial_started_ends_with_it(gate: Callable[..., Any], repository: Repository, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    base = repository.commit({"a": FAST, "b": FAST})
    starts = replying(
        "b", f"open({str(note)!r}, 'w').write(str(__import__('subprocess').Popen(['sleep', '600']).pid)) and {{}}"
    )
    repository.commit({"a": FAST, "b": FAST}, experiments__trial=starts)
    assert gate(base).code == 4
    assert eventually(lambda: not psutil.pid_exists(int(note.read_text())), 5)


def test_a_trial_of_another_question_is_not_gone_on_with(
    gate: Callable[..., Any], repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = repository.commit({"a": FAST})
    out = tmp_path / "out"
    gate(base)
    first = {key: record.started_at for key, record in load(out / "head").records.items()}
    (out / "gate.json").unlink()  # as if it had been killed just before its answer
    gate(base)
    assert {key: record.started_at for key, record in load(out / "head").records.items()} == first
    for changed in (("--timeout", 30), ("--budget", 5), ("--alpha", 0.01)):
        (out / "gate.json").unlink()
        gate(base, *changed)
        again = {key: record.started_at for key, record in load(out / "head").records.items()}
        assert set(again.values()).isdisjoint(first.values())
        first = again


def test_untimed_trials_run_one_after_the_other(
    gate: Callable[..., Any], repository: Repository, tmp_path: Path
) -> None:
    base = repository.commit({"a": FAST, "untimed": 0.2})
    slow = FILES["experiments/trial.py"].replace(
        "    timed =", "    if name == 'untimed':\n        time.sleep(0.2)\n    timed ="
    )
    head = repository.commit({"a": FAST, "untimed": 0.2}, experiments__trial=slow)
    gate(head, "--head", head)
    assert base != head
    begun = [
        datetime.fromisoformat(record.started_at)
        for side in ("base", "head")
        for record in load(tmp_path / "out" / side).records.values()
        if record.trial.problem["model"] == "untimed"
    ]
    assert abs(begun[1] - begun[0]).total_seconds() > 0.19


def test_4_a_trial_that_hangs_is_stopped(gate: Callable[..., Any], repository: Repository) -> None:
    base = repository.commit({"a": FAST, "b": FAST})
    repository.commit({"a": FAST, "b": "hangs"})
    done = gate(base, "--timeout", 1)
    assert (done.code, "stopped after 1 s (--timeout)" in " ".join(done.out.split())) == (4, True), done


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            {"experiments__trial": "import no_such_package\n"},
            "head: ModuleNotFoundError: No module named 'no_such_package'",
        ),
        ({"experiments__plan": "def resolve(*a, **k): raise ValueError('no suite')\n"}, "head: ValueError: no suite"),
    ],
)
def test_4_a_revision_that_cannot_be_run(
    gate: Callable[..., Any], repository: Repository, broken: dict[str, str], said: str
) -> None:
    base = repository.commit({"a": FAST})
    repository.commit({"a": FAST}, **broken)
    done = gate(base)
    assert (done.code, said in " ".join(done.out.split())) == (4, True), done


def test_4_a_revision_without_te_bench(gate: Callable[..., Any], repository: Repository) -> None:
    base = repository.commit({"a": FAST})
    repository.git("rm", "--quiet", "-r", "te_bench")
    repository.git("commit", "--quiet", "-m", "gone")
    done = gate(base)
    assert (done.code, "has no te_bench package at its root" in " ".join(done.out.split())) == (4, True), done


def test_2_what_cannot_be_asked(
    gate: Callable[..., Any], command: Command, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.commit({"a": FAST})
    assert "no revision 'nowhere'" in gate("nowhere").err
    assert "no revision '--output=x'" in gate("HEAD", "--head", "--output=x").err
    assert "--budget soon" in gate("HEAD", "--budget", "soon").err
    assert "--timeout 0" in gate("HEAD", "--timeout", 0).err
    assert "give one of them" in gate("HEAD", "--baseline", tmp_path).err
    assert "--self-test has no --markdown" in command("gate", "--self-test", "--markdown", tmp_path / "x.md").err
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


def test_the_two_take_turns_and_another_begins_each_round(
    gate: Callable[..., Any], repository: Repository, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    base = repository.commit({"a": FAST}, notes=notes)
    gate(base)
    calls: dict[str, list[tuple[str, int]]] = {}  # {round: (whose, how many) calls follow each other}
    for who, seed in (line.split() for line in notes.read_text().splitlines()):
        found = calls.setdefault(seed, [])
        found.append((who, found.pop()[1] + 1 if found and found[-1][0] == who else 1))
    for seed, found in calls.items():
        first, second = ("base", "head") if int(seed) % 2 == 0 else ("head", "base")
        *_, (_, turn) = found
        # A B (how long is a call?), then A B, B A, A B, B A, A B, B A
        assert [who for who, _ in found[-9:]] == [first, second] * 4 + [first]
        assert [number for _, number in found[-6:]] == [2 * turn] * 5 + [turn]


def test_a_finished_gate_starts_anew_and_keeps_what_it_had(
    gate: Callable[..., Any], repository: Repository, tmp_path: Path
) -> None:
    base = repository.commit({"a": FAST})
    gate(base)
    gate(base)
    assert outcomes(tmp_path / "out") == {("a", "ok"): 5}
    assert len(list((tmp_path / "out" / "head").glob("journal.*.jsonl"))) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_kill_leaves_nothing_and_the_next_call_goes_on(
    repository: Repository, tmp_path: Path, number: signal.Signals
) -> None:
    base = repository.commit({"a": FAST, "b": FAST})
    temporary, out = tmp_path / "tmp", tmp_path / "out"
    temporary.mkdir()
    arguments = ("gate", "--base", base, "--device", "cpu", "--out", out, "--margin", "100%")
    where = {"cwd": repository.root, "env": {"TMPDIR": str(temporary)}}
    main = tmp_path / "main.py"  # not -m: the repository's own te_bench would be the one that is run
    main.write_text(
        "from te_bench.cli import main\nfrom te_bench.experiments import pairs\nfrom te_bench.reports import gate_live\n"
        f"vars(pairs).update({QUICK})\ngate_live.LOOKS = (5,)\nmain()\n"
    )

    def measured() -> int:
        journal = out / "head" / "journal.jsonl"
        return journal.read_bytes().count(b'"kind":"record"') if journal.exists() else 0

    run = Run(*arguments, main=main, **where)
    assert eventually(lambda: measured() >= 3, 30)
    os.kill(run.process.pid, number)
    run.finish()
    assert run.gone()
    assert eventually(lambda: not list(temporary.iterdir()), 10)
    assert not list(out.rglob("*.part"))
    kept = {key: r for key, r in load(out / "head").records.items() if key in load(out / "base").records}  # whole pairs
    done = Run(*arguments, main=main, **where).finish()
    assert done.returncode == 0, done
    now = load(out / "head").records
    assert all(now[key].started_at == record.started_at for key, record in kept.items())
    assert len(now) > len(kept)


def test_looks_are_those_that_the_time_allows() -> None:
    looks = gate_live.LOOKS
    assert gate_live.looks_within(2, 10, None) == looks
    assert gate_live.looks_within(2, 10, 1000) == looks
    assert gate_live.looks_within(2, 10, 80) == (6, 10)  # none just before the last, where alpha would be thrown away
    assert gate_live.looks_within(2, 10, 41) == (6,)
    assert gate_live.looks_within(2, 10, 0) == (5,)  # fewer pairs claim nothing: such a gate ends undecided
    assert gate_live.looks_within(2, 10, None, most=7) == (7,)
