"""The rounds of te-bench gate --base: who takes turns with whom, what runs beside, and at which pairs it is judged."""

import json
import re
import time
from collections.abc import Callable
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gates import FAST, judge_as, outcomes
from revisions import FILES, Repository

from te_bench.experiments.run_options import seconds
from te_bench.experiments.store import load
from te_bench.gate import paired_trial, revisions


@pytest.mark.parametrize(("name", "together"), [("untimed", False), ("training-budget", False), ("training", True)])
def test_untimed_trials_run_one_after_the_other_but_trainings_of_so_many_steps(
    gate: Callable[..., Any], repository: Repository, tmp_path: Path, name: str, together: bool
) -> None:
    base = repository.commit({"a": FAST, name: 0})
    sleeps = f"    if name == '{name}':\n        time.sleep(0.3)\n    timed ="
    trial = FILES["experiments/trial.py"].replace("    timed =", sleeps)
    head = repository.commit({"a": FAST, name: 0}, experiments__trial=trial)
    assert base != head
    assert gate(head, "--head", head).code == 0
    begun = [
        datetime.fromisoformat(record.started_at)
        for side in ("base", "head")
        for record in load(tmp_path / "out" / side).records.values()
        if record.trial.problem["model"] == name
    ]
    assert len(begun) == 2
    assert (abs(begun[1] - begun[0]).total_seconds() < 0.29) == together


def test_a_training_beside_does_not_hold_up_a_gate_that_ends(gate, repository, monkeypatch):
    def full(*arguments: Any) -> None:
        raise ValueError("the disk is full")

    base = repository.commit({"a": FAST, "training": "hangs"})
    monkeypatch.setattr("te_bench.experiments.store.Store.add", full)
    begin = time.monotonic()
    done = gate(base)
    assert (done.code, "the disk is full" in done.err, time.monotonic() - begin < 30) == (2, True, True)


def test_a_process_that_was_killed_is_replaced_with_the_next_round(gate, repository, tmp_path):
    """By a trial of the second round, whose parent is its supervisor, and that one's parent the process."""
    kills = (
        "    if trial.seed == 1 and '/head/' in __file__:\n"
        "        side = open(f'/proc/{{os.getppid()}}/stat').read().rpartition(')')[2].split()[1]\n"
        "        os.kill(int(side), signal.SIGKILL)\n"
        "        time.sleep(60)\n    timed ="
    )
    base = repository.commit({"a": FAST, "b": FAST})
    trial = FILES["experiments/trial.py"].replace("    timed =", kills)
    repository.commit({"a": FAST, "b": FAST}, experiments__trial=trial)
    assert gate(base).code == 4
    found = outcomes(tmp_path / "out")
    assert {name for name, outcome in found if outcome == "crashed"} == {"a", "b"}
    assert [found[name, "ok"] for name in "ab"] == [4, 4]


def test_1_a_regression_stands_if_a_later_round_cannot_be_run_and_the_next_call_goes_on(
    gate, repository, tmp_path, monkeypatch
):
    monkeypatch.setattr(revisions, "LOOKS", (5, 7))
    judge_as(monkeypatch, {"a": 1.02, "b": 1.5})
    rounds, out = tmp_path / "rounds", tmp_path / "out"
    dies = (
        f"import os, signal\nwith open({str(rounds)!r}, 'a') as file:\n    file.write('.')\n    file.flush()\n"
        "    if file.tell() == 7:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    base = repository.commit({"a": FAST, "b": FAST})
    repository.commit({"a": FAST, "b": FAST}, experiments__trial=dies + FILES["experiments/trial.py"])
    done = gate(base, margin="2%")
    said = " ".join(done.out.split())
    assert (done.code, "1 REGRESSION" in said) == (1, True), done
    assert "head: its process ended by SIGKILL while it was asked" in said
    assert "the same command goes on" in said
    assert not (out / "gate.json").exists()
    first, looks = load(out / "head").records, json.loads((out / "question.json").read_text())["looks"]
    assert (looks, len(first)) == ([5, 7], 9)
    assert gate(base, margin="2%").code == 1
    trials = json.loads((out / "gate.json").read_text())["trials"]
    assert [(trial["verdict"], trial["pairs"]) for trial in trials] == [("INCONCLUSIVE", 7), ("REGRESSION", 5)]
    now = load(out / "head").records
    assert all(now[key].started_at == record.started_at for key, record in first.items())


def test_the_two_take_turns_and_another_begins_each_round(gate, repository, tmp_path):
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


@pytest.mark.parametrize("trials", ["ab", "abc"])
def test_another_begins_each_round_of_each_trial(gate, repository, monkeypatch, trials):
    began: dict[str, list[str]] = {}
    run = paired_trial.run

    def noted(sides: Any, asked: Any, **options: Any) -> Any:
        began.setdefault(asked["head"]["problem"]["model"], []).append(sides[0].name)
        return run(sides, asked, **options)

    monkeypatch.setattr(paired_trial, "run", noted)
    gate(repository.commit(dict.fromkeys(trials, FAST)))
    assert [one[0] for one in began.values()] == (["base", "head"] * 2)[: len(trials)]
    assert all(a != b for one in began.values() for a, b in pairwise(one))


def test_looks_are_those_that_the_time_allows() -> None:
    looks = revisions.LOOKS
    assert revisions.looks_within(looks[-1]) == revisions.looks_within(1000) == looks
    assert revisions.looks_within(11) == (6, 11)  # none just before the last, where alpha would be thrown away
    # fewer pairs than 5 claim nothing: such a gate ends undecided
    assert [revisions.looks_within(pairs) for pairs in (2, 6, 7)] == [(5,), (6,), (7,)]


def test_every_pair_counts_when_time_ends_and_it_is_said_how_much_time_would_decide(
    gate: Callable[..., Any], repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = revisions.paired_sweep.run_round
    numbers: list[int] = []

    def run(number: int, *arguments: Any, **options: Any) -> Any:
        numbers.append(number)
        return rounds(number, *arguments, **options)

    now = time.monotonic
    clock = SimpleNamespace(monotonic=lambda: now() + (100 if len(numbers) == 7 else 0.0))
    monkeypatch.setattr(revisions.paired_sweep, "run_round", run)
    monkeypatch.setattr(revisions, "time", clock)
    monkeypatch.setattr(revisions, "LOOKS", (5, 30))
    judge_as(monkeypatch, {"a": 1.02}, noise=0.02)
    done = gate(repository.commit({"a": FAST}), "--budget", "95s", margin="2%")
    [trial] = json.loads((tmp_path / "out" / "gate.json").read_text())["trials"]
    assert (trial["pairs"], numbers) == (7, [*range(7)])
    assert 7 < trial["needed"] <= 30
    said = " ".join(done.out.split()).partition("Note: a decision in 80 % of cases would take about ")[2]
    budget = seconds(said.partition("--budget ")[2].removesuffix("."))
    assert budget == pytest.approx(100 * (1 + trial["needed"] - 7), rel=0.1)  # by the slowest round


def test_where_no_budget_decides_it_is_said(gate, repository, monkeypatch):
    judge_as(monkeypatch, {"a": 1.02}, noise=0.2)
    done = gate(repository.commit({"a": FAST}), margin="2%")
    said = "Note: no --budget decides PyTorch eager fp32, because a gate makes at most 5 pairs"
    assert (done.code, said in " ".join(done.out.split())) == (3, True)


def test_a_trial_that_may_be_slower_goes_before_the_others(gate, repository, tmp_path, monkeypatch):
    rounds = revisions.paired_sweep.run_round
    cells: list[list[str]] = []

    def run(number: int, processes: Any, chosen: Any, **options: Any) -> None:
        names = [processes.planned.trials["head"][cell]["problem"]["model"] for cell in chosen["head"]]
        cells.append(sorted(names))
        rounds(number, processes, chosen, **options)

    monkeypatch.setattr(revisions.paired_sweep, "run_round", run)
    monkeypatch.setattr(revisions, "LOOKS", (5, 8))
    judge_as(monkeypatch, {"a": 1.0, "b": 1.3}, noise=0.2)
    done = gate(repository.commit({"a": FAST, "b": FAST}), margin="2%")
    assert cells == [["a", "b"]] * 3 + [["b"]] * 5 + [["a"]] * 5
    left, name = r"of at most 8, at most about \d+ s left: 1 trial", ": PyTorch eager fp32, "
    slower = f"round 8, pair 8 {left} that may be slower{name}b\n"
    assert re.search(f"{slower}round 9, pair 4 {left}{name}a\n", done.err), done.err
    said = "Note: there were 13 rounds, but fewer pairs of some trials: a trial that may be slower is measured first"
    assert said in " ".join(done.out.split())
    trials = json.loads((tmp_path / "out" / "gate.json").read_text())["trials"]
    assert [trial["pairs"] for trial in trials] == [8, 8]


@pytest.mark.parametrize(("arguments", "pairs"), [((), [7, 5]), (("-x",), [3, 5])])
def test_exitfirst_ends_with_the_first_regression(gate, repository, tmp_path, monkeypatch, arguments, pairs):
    monkeypatch.setattr(revisions, "LOOKS", (5, 7))
    judge_as(monkeypatch, {"a": 1.02, "b": 1.5})
    assert gate(repository.commit({"a": FAST, "b": FAST}), *arguments, margin="2%").code == 1
    trials = json.loads((tmp_path / "out" / "gate.json").read_text())["trials"]
    assert [trial["verdict"] for trial in trials] == ["INCONCLUSIVE", "REGRESSION"]
    assert [trial["pairs"] for trial in trials] == pairs
