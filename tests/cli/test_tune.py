"""te-bench tune attention: measured, checked, and written where `auto` looks."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from in_process import Command

from te_bench.cli import tune
from te_bench.experiments.spec import Record, Trial, digest
from te_bench.experiments.store import Plan, Store
from te_bench.kernels.attention import table
from te_bench.kernels.attention.table import Cell

SPEED = Path(__file__).resolve().parents[2] / "results" / "h200" / "speed"


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def own_table() -> tuple[Cell, ...]:
    path = table.user_table()
    assert path is not None
    return table.read(path)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("12,12,1024,64,causal", {"batch": 12, "heads": 12, "length": 1024, "head_dim": 64, "causal": True}),
        (
            "2,32/8,64,128,full",
            {"batch": 2, "heads": 32, "kv_heads": 8, "length": 64, "head_dim": 128, "causal": False},
        ),
        (
            "1,2,64,16,window=255:0",
            {"batch": 1, "heads": 2, "length": 64, "head_dim": 16, "causal": False}
            | {"window_left": 255, "window_right": 0},
        ),
        (
            "1,2,64,16,window=:7",
            {"batch": 1, "heads": 2, "length": 64, "head_dim": 16, "causal": False}
            | {"window_left": -1, "window_right": 7},
        ),
    ],
)
def test_a_shape(text: str, settings: dict[str, Any]) -> None:
    assert tune.problem(text) == settings


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["mlp"], "unknown kind 'mlp'. Known: attention."),
        (["attention", "--shape", "12,12,1024,64"], "--shape 12,12,1024,64: give B,H,T,D,MASK such as"),
        (["attention", "--shape", "12,12,1024,64,casual"], "give B,H,T,D,MASK"),
        (["attention", "--shape", "0,12,1024,64,causal"], "every size must be at least 1"),
        (["attention", "--shape", "1,12/5,1024,64,causal"], "5 key heads must divide the 12 query heads"),
        (["attention", "--shape", "1,12/0,1024,64,causal"], "0 key heads must divide"),
        (["attention", "--shape", "1,2,4,8,window=:"], "a window without an end is full"),
        (["attention", "--rivals", "flush"], "unknown rival 'flush'. Did you mean flash"),
        (["attention", "--rivals", "auto"], "unknown rival 'auto'"),
        (["attention", "--rivals", " , "], "--rivals names none"),
        (["attention", "--rounds", "0"], "--rounds 0: give 1 or more"),
        (["attention", "--dtype", "fp8"], "unknown dtype 'fp8'"),
        (["attention", "--device", "tpu"], "unknown device 'tpu'"),
        (["attention", "--timeout", "0"], "--timeout 0"),
        (["attention", "--from", "nowhere"], "nowhere"),
        (["attention", "--from", SPEED, "--rivals", "flash"], "--rivals with --from, which measures nothing"),
    ],
)
def test_what_is_wrong_is_named(command: Command, arguments: list[object], reason: str) -> None:
    done = command(
        "tune", *arguments, *([] if "--device" in arguments or "--from" in arguments else ["--device", "cpu"])
    )
    assert done.code == 2
    assert reason in done.err
    assert not Path("runs/tune-attention/journal.jsonl").exists()


def test_the_rivals_take_turns_and_auto_is_none_of_them_nor_what_it_never_takes() -> None:
    from te_bench.kernels import attention

    names = [name for name in attention.names() if name != "auto" and not attention.load(name).fp8]
    experiment = tune._experiment("cuda", ["1,2,64,16,causal", "1,2,64,16,full"], None, None, 2)
    ran = [(t.problem["causal"], t.attention) for t in experiment.trials]
    once = [(causal, name) for causal in (True, False) for name in names]
    assert ran == [*once, *reversed(once)]
    assert {t.precision for t in experiment.trials} == {"bf16"}
    assert len(tune._experiment("cuda", [], None, "flash,cudnn", 1).trials) == 2 * 8  # the suite's shapes


def test_a_table_of_what_was_recorded(command: Command) -> None:
    done = command("tune", "attention", "--from", SPEED)
    assert done.code == 0, done.err
    assert "B12 H12 T1024 D64 causal bf16: gluon 0.218 ms (cudnn 1.26x, triton 1.35x)" in done.out
    [cell] = own_table()
    assert cell.fastest() == ["gluon", "cudnn", "triton"]
    assert cell.source.endswith("derived from GPT steps that differ in their attention alone")
    assert command("tune", "attention", "--from", SPEED, "--table", "mine.json").code == 0
    assert table.read(Path("mine.json")) == (cell,)


def recorded(directory: Path, latencies: dict[tuple[str, int], tuple[float, float]], code: str, **failed: str) -> None:
    """A journal of attention at one shape: {(rival, seed): forward and backward seconds}; failed: {rival: outcome}."""
    problem = {"batch": 2, "heads": 3, "length": 64, "head_dim": 16, "causal": True}
    identity = {"gpu": "NVIDIA H300", "torch": "3.0", "code": code}
    machine = {"id": digest(identity), "identity": identity, "details": {}}
    cells = [*latencies, *((name, 0) for name in failed)]
    trials = {
        (name, seed): Trial(
            workload="attention", device="cuda", problem=problem, attention=name, protocol="kernel", seed=seed
        )
        for name, seed in cells
    }
    with Store(directory) as store:
        store.add_environment(machine)
        store.add_plan(
            Plan(
                suite="attention", title="", environment=machine["id"], baseline=None, judgement={},
                trials=tuple(t.to_json() for t in trials.values()), started_at=f"2026-11-2{code}T00:00:00+00:00",
            )
        )  # fmt: skip
        for key, trial in trials.items():
            forward, backward = latencies.get(key, (0.0, 0.0))
            store.add(
                Record(
                    trial=trial, environment=machine["id"], outcome=failed.get(key[0], "ok"), wall_s=1.0,
                    started_at=f"2026-11-2{code}T00:00:01+00:00",
                    samples={} if key[0] in failed else {"forward_s": [forward] * 3, "backward_s": [backward] * 3},
                )
            )  # fmt: skip


def test_the_newest_environment_with_the_most_rivals_counts(command: Command, tmp_path: Path) -> None:
    """Medians over processes, forward and backward together; what failed, auto itself and FP8 count for nothing."""
    times = {("flash", 0): (1e-3, 2e-3), ("flash", 1): (1.2e-3, 2.2e-3), ("triton", 0): (1e-3, 1e-3)}
    never = {("auto", 0): (1e-9, 1e-9), ("triton_fp8", 0): (1e-9, 1e-9)}
    recorded(tmp_path / "run", times | never, "1", cudnn="failed_check")
    recorded(tmp_path / "run", {("flash", 0): (9e-3, 1e-3)}, "2")
    assert command("tune", "attention", "--from", tmp_path / "run").code == 0
    [cell] = own_table()
    assert cell.seconds == {"triton": pytest.approx(2e-3), "flash": pytest.approx(3.2e-3)}
    assert cell.machine == "NVIDIA H300"
    assert (cell.problem.kv_heads, cell.problem.causal, cell.problem.dtype) == (3, True, "bf16")
    recorded(tmp_path / "run", {("flash", 0): (9e-3, 1e-3), ("triton", 0): (9e-3, 3e-3)}, "3")
    assert command("tune", "attention", "--from", tmp_path / "run", SPEED).code != 0  # one DIR a --from
    assert command("tune", "attention", "--from", tmp_path / "run", "--from", SPEED).code == 0
    newer = own_table()
    assert len(newer) == 2
    assert newer[0].seconds == {"flash": 0.01, "triton": 0.012}


def test_nothing_of_attention_is_no_table(command: Command, tmp_path: Path) -> None:
    done = command("tune", "attention", "--from", SPEED.parent / "memory")
    assert done.code == 2
    assert "holds no timings of attention" in done.err
    assert not (tmp_path / "cache").exists()


def test_a_table_that_cannot_be_read_is_not_overwritten(command: Command, tmp_path: Path) -> None:
    """The user's own is set aside, and made anew; another file was not meant."""
    path, notes = table.user_table(), tmp_path / "notes.txt"
    assert path is not None
    path.parent.mkdir(parents=True)
    for file in (path, notes):
        file.write_text("my notes")
    done = command("tune", "attention", "--from", SPEED)
    assert done.code == 0
    assert f"set aside as {path.with_suffix('.bad')}" in done.out
    assert path.with_suffix(".bad").read_text() == "my notes"
    assert len(own_table()) == 1
    done = command("tune", "attention", "--from", SPEED, "--table", notes)
    assert done.code == 2
    assert "is no table of measured attention" in done.err
    assert notes.read_text() == "my notes"


def test_backends_that_a_shape_no_longer_has_are_named(command: Command) -> None:
    path = table.user_table()
    assert path is not None
    path.parent.mkdir(parents=True)
    cell = next(cell for cell in table.read(table.SHIPPED) if cell.problem.length == 1024 and cell.problem.causal)
    path.write_text(table.text([dataclasses.replace(cell, seconds={**cell.seconds, "flash": 1e-3, "math": 1.0})]))
    done = command("tune", "attention", "--from", SPEED)
    assert done.code == 0
    assert "no longer in the table: flash, math" in done.out


@pytest.mark.parametrize("option", [("--rounds", "3"), ("--fresh",), ("--shape", "1,1,16,16,full")])
def test_an_option_of_a_measurement_is_refused_where_nothing_is_measured(command: Command, option: tuple[str]) -> None:
    done = command("tune", "attention", "--from", SPEED, *option)
    assert done.code == 2
    assert f"{option[0]} with --from" in done.err


@pytest.mark.slow
def test_a_cpu_is_measured_and_a_second_time_goes_on(command: Command, tmp_path: Path) -> None:
    asked = ["--device", "cpu", "--shape", "1,2/1,48,16,window=9:0", "--rivals", "math,manual,cudnn", "--rounds", "2"]
    done = command("tune", "attention", *asked)
    assert done.code == 0, done.err
    assert "unsupported: attention/" in done.out
    [cell] = own_table()
    assert set(cell.seconds) == {"math", "manual"}
    assert cell.machine == table.machine("cpu")
    assert cell.problem.window == (9, 0)
    assert "window 9:0" in done.out
    journal = tmp_path / "runs" / "tune-attention" / "journal.jsonl"
    records = [line for line in journal.read_text().splitlines() if json.loads(line)["kind"] == "record"]
    assert len(records) == 6
    other = command("tune", "attention", *asked, "--shape", "1,1,16,8,causal", "--rivals", "manual", "--rounds", "1")
    assert other.code == 0, other.err
    after = [line for line in journal.read_text().splitlines() if json.loads(line)["kind"] == "record"]
    assert after[:6] == records
    assert len(after) == 7
    assert len(own_table()) == 2
