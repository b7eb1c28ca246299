"""te-bench gate: each exit code by command, the percentages it takes, and the files it writes."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from driving import te_bench
from in_process import Command
from journals import environment, step_record, trial, write

from te_bench.cli.gate import fraction
from te_bench.reports import files


def run(
    out: Path, *, slower: float = 1.0, attention: str = "flash", seeds: int = 8, gib: float = 1.0, **identity: Any
) -> Path:
    """A run of one cell on a CPU whose processes vary by 0.4 %, in another way for every slow-down."""
    where = environment(out.name, gpu=None, code=out.name, **identity)
    records = [
        step_record(
            trial(attention=attention, device="cpu", seed=seed),
            30 * slower * (1 + 0.004 * math.sin(8 * seed + len(out.name))),
            gib,
            out.name,
        )
        for seed in range(seeds)
    ]
    return write(out, records, body=where)


Gate = Callable[..., Any]


@pytest.fixture
def gate(command: Command, tmp_path: Path) -> Gate:
    def compare(*arguments: object, **candidate: Any) -> Any:
        before = run(tmp_path / "before")
        return command("gate", "--baseline", before, "--candidate", run(tmp_path / "after", **candidate), *arguments)

    return compare


@pytest.mark.parametrize(
    ("arguments", "candidate", "code", "said"),
    [
        ((), {}, 0, "PASS: 1 PASS of 1 timed. Margin 2 %, alpha 0.05."),
        ((), {}, 0, " Finds "),
        ((), {"slower": 1.05}, 1, "REGRESSION: "),
        ((), {"gib": 2.0}, 1, "peak resident +1,024.0 MiB"),
        ((), {"attention": "math"}, 4, "in the baseline, not in the candidate"),
        ((), {"slower": 1.5, "torch": "2.12.0"}, 5, "torch: 2.11.0 -> 2.12.0"),
        (["--margin", "2%"], {"slower": 1.05}, 1, "PyTorch eager bf16 is 1.05"),
        (["--verbose"], {"slower": 1.05}, 1, "train_step/gpt2-b12-t1024-V50304/flash/bf16/eager is 1.05"),
        (["--allow-environment-change"], {"slower": 1.5, "torch": "2.12.0"}, 1, "as allowed: torch"),
    ],
)
def test_each_answer_has_its_exit_code(gate: Gate, arguments: Any, candidate: Any, code: int, said: str) -> None:
    done = gate(*arguments, **candidate)
    assert (done.code, done.err, said in " ".join(done.out.split())) == (code, "", True), done


def test_3_too_few_pairs(gate: Gate) -> None:
    done = gate(seeds=2)
    assert (done.code, "2 pairs: a verdict needs at least 5" in done.out) == (3, True)
    said = " ".join(done.out.split())
    assert "1 of 1 timed trials have fewer than 5 pairs of seeds" in said
    assert "run te-bench run nanogpt --seeds 8 --out DIR on each side" in said
    assert "with that side's code and that run's other options" in said
    assert "pairs of seeds" not in gate().out


def test_1_a_threshold_beside_the_test(gate: Gate, tmp_path: Path) -> None:
    limits = ("--compare-fail", "median:2.5%", "--compare-fail", "min:1")
    done = gate("--margin", "6%", *limits, "--junit", tmp_path / "junit", slower=1.03)
    said = " ".join(done.out.split())
    assert (done.code, done.out.split(":")[0]) == (1, "REGRESSION")
    assert "1 PASS of 1 timed; got worse: 1." in said
    assert "the limit is median:2.5% (a threshold, no statistics)" in said
    assert "min:1" not in said
    assert ElementTree.parse(tmp_path / "junit").find(".//failure").get("type") == "threshold"
    assert gate("--margin", "6%", "--compare-fail", "median:3.5%", slower=1.03).code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--margin", "0.02"), "--margin 0.02: give more than 0 % and at most 100 %, with the % sign"),
        (("--mde", "1"), "--mde 1: give more than 0 %"),
        (("--alpha", "0.7"), "alpha 0.7"),
        (("--compare-fail", "middle:3%"), "--compare-fail middle:3%: write STAT:N% or STAT:N"),
        (("--only", "*/flex/*"), "matches no trial"),
    ],
)
def test_2_usage_which_comes_before_another_environment(gate: Gate, arguments: tuple[str, ...], message: str) -> None:
    for other in ({}, {"torch": "2.12.0"}):
        done = gate(*arguments, **other)
        assert (done.code, message in done.err, done.out) == (2, True, "")


def test_2_runs_that_are_none(command: Command, tmp_path: Path) -> None:
    assert "give the revision to compare with" in command("gate").err
    run(tmp_path / "a")
    done = command("gate", "--baseline", tmp_path / "a", "--candidate", tmp_path / "none")
    assert (done.code, "holds no journal" in done.err) == (2, True)


def test_every_form_is_written_whatever_the_answer(gate: Gate, tmp_path: Path) -> None:
    files = {form: tmp_path / "out" / form for form in ("markdown", "junit", "json")}
    done = gate(*(x for form, path in files.items() for x in (f"--{form}", path)), slower=1.05)
    assert done.code == 1
    assert "| REGRESSION |" in files["markdown"].read_text()
    assert ElementTree.parse(files["junit"]).getroot().get("failures") == "1"
    assert json.loads(files["json"].read_text())["exit_code"] == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["json", "junit", "markdown"]


def test_a_form_that_cannot_be_written_is_usage(gate: Gate, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = gate("--json", tmp_path / "file" / "gate.json")
    assert (done.code, "Choose another --json" in done.err) == (2, True)


def test_what_cannot_be_written_is_known_before_anything_is_measured(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "file" / "x", f"{tmp_path / 'file'} is no directory")):
        done = command("gate", "--base", "no such revision", "--markdown", path)
        assert (done.code, f"cannot write {path}: {why}. Choose another --markdown." in done.err) == (2, True)


def test_a_file_that_fails_costs_neither_the_answer_nor_the_others(gate, tmp_path, monkeypatch):
    forms = ("--markdown", tmp_path / "bad", "--json", tmp_path / "good")
    write_all = files.write_atomically

    def full(path: Path, content: bytes) -> None:
        if path.name == "bad":
            raise OSError(28, "No space left on device")
        write_all(path, content)

    monkeypatch.setattr(files, "write_atomically", full)
    for slower, code in ((1.05, 1), (1.0, 2)):
        done = gate(*forms, slower=slower)
        said = f"cannot write {tmp_path / 'bad'}: No space left on device. Choose another --markdown.\n"
        assert (done.code, done.err) == (code, said)
        assert json.loads((tmp_path / "good").read_text())["exit_code"] == code % 2


@pytest.mark.parametrize(
    ("arguments", "named"), [(("--budget", "1m"), "--budget"), (("--head", "x", "-x"), "--head, --exitfirst")]
)
def test_two_runs_are_measured_by_nothing(gate: Gate, arguments: tuple[str, ...], named: str) -> None:
    done = gate(*arguments)
    assert (done.code, done.out) == (2, "")
    said = f"{named}: only for measuring two revisions, and --baseline reads two runs; leave out"
    assert said in " ".join(done.err.split())


def test_a_suite_with_trials_over_ranks_is_refused_in_a_sentence(command: Command, tmp_path: Path) -> None:
    """Each rank would ask the gate for turns of its own."""
    done = command("gate", "--self-test", "--suite", "scaling", "--device", "cpu", "--out", tmp_path)
    assert done.code == 2
    assert "-ddp-x2/flash/bf16/eager/s0 runs on several ranks, and a gate times one process only; exclude" in done.err


@pytest.mark.parametrize(("given", "missing"), [("baseline", "candidate"), ("candidate", "baseline")])
def test_one_run_is_compared_with_nothing(command: Command, tmp_path: Path, given: str, missing: str) -> None:
    done = command("gate", f"--{given}", run(tmp_path / "a"))
    assert (done.code, f"--{missing} DIR is missing" in done.err) == (2, True)


def test_it_needs_no_torch(no_torch: dict[str, str], tmp_path: Path) -> None:
    arguments = ("--baseline", run(tmp_path / "a"), "--candidate", run(tmp_path / "bb"))
    done = te_bench("gate", *arguments, env=no_torch)
    assert done.returncode == 0, done.stderr


def test_percentages() -> None:
    for given, value in (("2%", 0.02), ("2.5 %", 0.025), (" .5%", 0.005), ("100%", 1.0), ("0.02%", 0.0002)):
        assert fraction("--margin", given) == pytest.approx(value)
    for given in ("2", "0.02", "", "%", "0%", "-2%", "+2%", "101%", "2,5%", "nan%", "2%%", "1e1%", "٢%"):
        with pytest.raises(ValueError, match=r"with the % sign: 2% or 2\.5%"):
            fraction("--margin", given)
