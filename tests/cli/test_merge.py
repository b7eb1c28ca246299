"""te-bench merge: parts of one sweep become one run, byte by byte; what is of another sweep or machine is not taken."""

import dataclasses
import json
import lzma
from collections.abc import Sequence
from pathlib import Path

import journals
import pytest
from in_process import Command

from te_bench.experiments import runner
from te_bench.experiments.spec import Record, Trial
from te_bench.experiments.store import JOURNAL, PACKED, Store, load
from te_bench.reports.analysis.rows import load_results

SEEDS = range(4)


def trial(seed: int) -> Trial:
    return journals.trial(seed=seed)


def record(seed: int, ms: float = 10.0, **changes: object) -> Record:
    return dataclasses.replace(journals.step_record(trial(seed), ms + seed), **changes)  # type: ignore[arg-type]


def part(directory: Path, records: Sequence[Record], **options: object) -> Path:
    """A run of which everything was planned, and a part done."""
    return journals.write(directory, records, planned=list(map(trial, SEEDS)), **options)  # type: ignore[arg-type]


def lines(run: Path) -> list[bytes]:
    return (run / JOURNAL).read_bytes().splitlines(keepends=True)


def records(run: Path) -> list[bytes]:
    return [line for line in lines(run) if json.loads(line)["kind"] == "record"]


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, Path]:
    return part(tmp_path / "a", [record(0), record(1)]), part(tmp_path / "b", [record(2)])


def test_parts_of_a_sweep_become_a_run_that_is_reported_gone_on_with_and_gated(command, parts, tmp_path):
    out = tmp_path / "out"
    done = command("merge", *parts, "--out", out)
    assert (done.code, done.out, done.err) == (0, f"3 of 4 planned trials have ended: {out}\n", "")
    assert lines(out) == list(dict.fromkeys([*lines(parts[0]), *lines(parts[1])]))

    with Store(out) as store:
        assert runner.to_do(list(map(trial, SEEDS)), store.journal, "env-h200", retry=False) == [trial(3)]
        store.add(record(3))
    assert command("report", out).err == ""
    assert command("gate", "--baseline", out, "--candidate", out).code in (0, 3)
    page = (out / "report" / "report.md").read_text()
    assert "4/4" in page


def test_packed_and_torn_journals_are_merged_too(command: Command, parts: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = parts
    expected = records(first) + records(second)
    (first / PACKED).write_bytes(lzma.compress((first / JOURNAL).read_bytes()))
    (first / JOURNAL).unlink()
    with (second / JOURNAL).open("ab") as journal:
        journal.write(b'{"crc32":"0')
    done = command("merge", first, second, "--out", tmp_path / "out")
    assert done.err == f"Note: {second}: the journal ends in the middle of a line, which is left out.\n"
    assert records(tmp_path / "out") == expected


def test_other_machines_are_named_and_refused_unless_allowed(command: Command, tmp_path: Path) -> None:
    first = part(tmp_path / "a", [record(0)])
    elsewhere = journals.environment("env-other", gpu="NVIDIA H100", torch="2.12.0")
    second = part(tmp_path / "b", [record(1, environment="env-other")], body=elsewhere)
    differ = "gpu: NVIDIA H200 -> NVIDIA H100; torch: 2.11.0 -> 2.12.0"
    done = command("merge", first, second, "--out", tmp_path / "out")
    assert (done.code, done.out) == (5, "")
    assert f"nothing is merged, because the runs have different environments: {differ}." in done.err
    assert not (tmp_path / "out").exists()
    done = command("merge", first, second, "--out", tmp_path / "out", "--allow-environment-change")
    assert done.err == f"Note: the environments differ, as allowed: {differ}.\n"
    assert {key[1] for key in load(tmp_path / "out").records} == {"env-h200", "env-other"}


@pytest.mark.parametrize("done", [0, 1], ids=["which has begun nothing", "which goes on"])
def test_of_two_machines_each_plan_stays_whole_in_either_order(command: Command, tmp_path: Path, done: int) -> None:
    """Neither continues the other, as a rerun continues what an older environment left."""
    first = part(tmp_path / "a", [record(0), record(1)])
    elsewhere = journals.environment("env-other", gpu="NVIDIA H100")
    second = part(tmp_path / "b", [record(0, environment="env-other")][:done], body=elsewhere)

    def found(*runs: Path) -> dict[str, list[str]]:
        groups = load_results(runs).groups
        return {
            group.environment: sorted(row.outcome for one in group.configurations for row in one.rows)
            for group in groups
        }

    for number, runs in enumerate([(first, second), (second, first)]):
        out = tmp_path / f"out{number}"
        command("merge", *runs, "--out", out, "--allow-environment-change")
        assert found(out) == found(first, second)
        assert sum(map(len, found(out).values())) == 2 * len(SEEDS)


def test_a_trial_that_several_runs_hold_is_taken_from_one(command: Command, tmp_path: Path) -> None:
    """An ended one before an interrupted, a divergence before all, a copy without a word."""
    copied = record(3)
    first = part(tmp_path / "a", [record(0), record(1, outcome="interrupted"), record(2), copied])
    diverged = record(2, outcome="diverged", reason="the loss is not finite")
    second = part(tmp_path / "b", [record(0, ms=99.0), record(1), diverged, record(2), copied])
    done = command("merge", first, second, "--out", tmp_path / "out")
    note = "2 trials ended in several runs: a divergence counts first, then the run that is named first"
    assert done.err == f"Note: {note}.\n"
    mine, its = records(first), records(second)
    assert records(tmp_path / "out") == [mine[0], mine[3], *its[1:4]]


def test_all_that_one_run_says_of_a_trial_stays(command: Command, tmp_path: Path) -> None:
    """A second try does not hide the first."""
    tries = [record(0, outcome="crashed", reason="KeyError"), record(0)]
    first, second = part(tmp_path / "a", tries), part(tmp_path / "b", [record(1)])
    command("merge", first, second, "--out", tmp_path / "out")
    assert records(tmp_path / "out") == records(first) + records(second)


def test_plans_that_differ_are_told_of(command: Command, tmp_path: Path) -> None:
    first = journals.write(tmp_path / "a", [record(0), record(1)], judgement={"margin": 0.003})
    second = journals.write(tmp_path / "b", [record(1), record(2)], judgement={"margin": 0.01})
    told = command("merge", first, second, "--out", tmp_path / "out").err.splitlines()
    judged = f"judgement of nanogpt: {{'margin': 0.003}} in {first}, {{'margin': 0.01}} in {second}"
    assert told == [
        f"Note: {judged}.",
        f"Note: {second} plans 1 trial that {first} does not: {trial(2).name}.",
        f"Note: {first} plans 1 trial that {second} does not: {trial(0).name}.",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a",), "joins two runs or more"),
        (("a", "a/"), "joins two runs or more"),
        (("a", "nowhere"), "nowhere holds no journal.jsonl"),
        (("a", "other"), "a ran the suite nanogpt and other ran the suite layer: merge takes runs of one sweep"),
        (("a", "b", "--out", "b"), "b holds a journal already: choose another --out"),
        (("a", "empty"), "empty holds a journal without a plan"),
    ],
)
def test_what_cannot_be_merged_is_exit_2(command, parts, tmp_path, arguments, message):
    part(tmp_path / "other", [record(0)], suite="layer")
    Store(tmp_path / "empty").close()
    done = command("merge", "--out", "out", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert not (tmp_path / "out").exists()
