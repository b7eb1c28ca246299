"""te-bench tune: measured, checked, and written where the code that chooses looks."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from in_process import Command

from te_bench.experiments.spec import Record, Trial, digest
from te_bench.experiments.store import Plan, Store, load
from te_bench.kernels import measured
from te_bench.kernels.gemm.table import GemmShape
from te_bench.kernels.linear_cross_entropy.table import HeadShape
from te_bench.kernels.measured import Timing

SPEED = Path(__file__).resolve().parents[2] / "results" / "h200" / "speed"


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def own_file(text: str) -> Path:
    """The user's own table, which holds this."""
    path = measured.user_table()
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def own_table() -> tuple[Timing, ...]:
    return measured.read(measured.user_table())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["mlp"], "unknown kind 'mlp'. Known: attention, gemm, epilogue, head."),
        (["attention", "--shape", "12,12,1024,64"], "--shape 12,12,1024,64: give B,H,T,D,MASK such as"),
        (["attention", "--shape", "12,12,1024,64,casual"], "give B,H,T,D,MASK"),
        (["attention", "--shape", "0,12,1024,64,causal"], "every size must be at least 1"),
        (["attention", "--shape", "1,12/5,1024,64,causal"], "5 key heads must divide the 12 query heads"),
        (["attention", "--shape", "1,12/0,1024,64,causal"], "0 key heads must divide"),
        (["attention", "--shape", "1,2,4,8,window=:"], "a window without limits is the full mask"),
        (["attention", "--rivals", "flush"], "unknown rival 'flush'. Did you mean flash"),
        (["attention", "--rivals", "auto"], "unknown rival 'auto'"),
        (["attention", "--rivals", " , "], "--rivals names none"),
        (["attention", "--rounds", "0"], "--rounds 0: give 1 or more"),
        (["attention", "--dtype", "fp8"], "unknown dtype 'fp8'"),
        (["attention", "--device", "tpu"], "unknown device 'tpu'"),
        (["attention", "--timeout", "0"], "--timeout 0"),
        (["attention", "--timeout", "inf"], "--timeout inf"),
        (["attention", "--from", "nowhere"], "nowhere"),
        (["gemm", "--shape", "64,64"], "--shape 64,64: give M,N,K such as"),
        (["gemm", "--shape", "64,64,64,row"], "give M,N,K such as"),
        (["gemm", "--shape", "64,64,64,fp8,block,promoted"], "give M,N,K such as"),
        (["gemm", "--shape", "64,0,64"], "every size must be at least 1"),
        (["gemm", "--dtype", "bf16"], "--dtype bf16: for gemm the shape states the dtype"),
        (["gemm", "--rivals", "flash"], "unknown rival 'flash'"),
        (["gemm", "--shape", "8,8,8", "--rivals", "triton"], "unknown rival 'triton'. Known: torch, gluon"),
        (["epilogue", "--shape", "64,64,64"], "give M,N,K,activated or M,N,K,gradient"),
        (["head", "--shape", "64,64"], "give N,D,VOCAB or N,D,VOCAB/PADDED"),
        (["head", "--shape", "64,64,50/40"], "40 rows are fewer than 50 classes"),
        (["head", "--dtype", "fp8"], "unknown dtype 'fp8'"),
        (["head", "--from", SPEED], "holds no timings of head: measure some with te-bench tune head"),
        (["attention", "--from", SPEED.parent / "memory"], "holds no timings of attention"),
        (["attention", "--from", SPEED, "--rivals", "flash"], "--rivals with --from, which measures nothing"),
        *(
            (["attention", "--from", SPEED, *option], f"{option[0]} with --from")
            for option in (("--rounds", "2"), ("--fresh",), ("--timeout", "9"), ("--shape", "1,1,16,16,full"))
        ),
    ],
)
def test_what_is_wrong_is_named(command: Command, arguments: list[object], reason: str) -> None:
    device = [] if "--device" in arguments or "--from" in arguments else ["--device", "cpu"]
    done = command("tune", *arguments, *device)
    assert (done.code, reason in done.err) == (2, True), done.err
    assert not list(Path().glob("runs/*/journal.jsonl"))
    assert not measured.user_table().exists()


def test_a_table_of_what_was_recorded(command: Command) -> None:
    done = command("tune", "attention", "--from", SPEED)
    assert done.code == 0, done.err
    assert "B12 H12 T1024 D64 causal bf16: gluon 0.218 ms (cudnn 1.26x, triton 1.35x)" in done.out
    [cell] = own_table()
    assert cell.fastest() == ["gluon", "cudnn", "triton"]
    assert cell.source.endswith("derived from GPT steps that differ in their attention alone")
    assert command("tune", "attention", "--from", SPEED, "--table", "mine.json").code == 0
    assert measured.read(Path("mine.json")) == (cell,)


Results = list[tuple[Trial, dict[str, list[float]] | str]]


def recorded(directory: Path, code: str, results: Results) -> None:
    """A journal of trials, each with its samples or an outcome without any."""
    identity = {"gpu": "NVIDIA H300", "torch": "3.0", "code": code}
    machine = {"id": digest(identity), "identity": identity, "details": {}}
    with Store(directory) as store:
        store.add_environment(machine)
        at: dict[str, Any] = {"environment": machine["id"], "started_at": f"2026-11-2{code}T00:00:00+00:00"}
        trials = tuple(t.to_json() for t, _ in results)
        store.add_plan(Plan(suite="attention", title="", baseline=None, judgement={}, trials=trials, **at))
        for trial, found in results:
            outcome, samples = (found, {}) if isinstance(found, str) else ("ok", found)
            store.add(Record(trial=trial, outcome=outcome, wall_s=1.0, samples=samples, **at))


def attention(times: dict[tuple[str, int], tuple[float, float]], **failed: str) -> Results:
    """At one shape: {(rival, seed): forward and backward seconds}; failed: {rival: outcome}."""
    problem = {"batch": 2, "heads": 3, "length": 64, "head_dim": 16, "causal": True}
    asked = Trial(workload="attention", device="cuda", problem=problem, attention="", protocol="kernel")
    found: Results = [(dataclasses.replace(asked, attention=name), outcome) for name, outcome in failed.items()]
    for (name, seed), (forward, backward) in times.items():
        samples = {"forward_s": [forward] * 3, "backward_s": [backward] * 3}
        found.append((dataclasses.replace(asked, attention=name, seed=seed), samples))
    return found


def test_windows_documents_and_dropout_are_rows_of_their_own(command: Command, tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{}, {"window_left": 31, "window_right": 0}, {"documents": 3}, {"dropout": 0.1}]
    results: Results = []
    for change in changes:
        for trial, found in attention({("triton", 0): (1e-3, 2e-3)}):
            results.append((dataclasses.replace(trial, problem={**trial.problem, **change}), found))
    recorded(tmp_path / "run", "1", results)
    done = command("tune", "attention", "--from", tmp_path / "run")
    assert done.code == 0, done.err
    for shape in ("B2 H3 T64 D16 causal", "B2 H3 T64 D16 window 31:0", "B6 H3 T32 D16 causal packed"):
        assert f"{shape} bf16: triton 3.000 ms" in done.out
    assert "B2 H3 T64 D16 causal dropout 0.1 bf16: triton" in done.out
    rows = [(row.problem.packed, row.problem.window, row.problem.dropout, row.problem.batch) for row in own_table()]
    assert set(rows) == {
        (False, None, 0.0, 2),
        (False, (31, 0), 0.0, 2),
        (True, None, 0.0, 6),
        (False, None, 0.1, 2),
    }


def test_of_gemms_with_an_epilogue_and_without_each_takes_its_own(command: Command, tmp_path: Path) -> None:
    problem = {"m": 64, "n": 48, "k": 32, "dtype": "bf16", "backend": "gluon"}
    plain = Trial(workload="gemm", device="cuda", problem=problem, attention="none", protocol="kernel")
    recorded(tmp_path / "run", "1", [(plain, {"kernel_s": [1e-3] * 3})])
    done = command("tune", "epilogue", "--from", tmp_path / "run")
    assert done.code == 2
    assert "holds no timings of epilogue: measure some with te-bench tune epilogue" in done.err
    within = dataclasses.replace(plain, problem={**problem, "epilogue": "activated"})
    recorded(tmp_path / "run", "2", [(plain, {"kernel_s": [1e-3] * 3}), (within, {"kernel_s": [2e-3] * 3})])
    for kind, epilogue in (("epilogue", "activated"), ("gemm", None)):
        assert command("tune", kind, "--from", tmp_path / "run", "--table", f"{kind}.json").code == 0
        assert [row.problem.epilogue for row in measured.read(Path(f"{kind}.json"))] == [epilogue]


def test_the_newest_environment_with_the_most_rivals_counts(command: Command, tmp_path: Path) -> None:
    """Medians over processes, forward and backward together; what failed, auto itself and FP8 count for nothing."""
    times = {("flash", 0): (1e-3, 2e-3), ("flash", 1): (1.2e-3, 2.2e-3), ("triton", 0): (1e-3, 1e-3)}
    never = {("auto", 0): (1e-9, 1e-9), ("triton_fp8", 0): (1e-9, 1e-9)}
    recorded(tmp_path / "run", "1", attention(times | never, cudnn="failed_check"))
    recorded(tmp_path / "run", "2", attention({("flash", 0): (9e-3, 1e-3)}))
    assert command("tune", "attention", "--from", tmp_path / "run").code == 0
    [cell] = own_table()
    assert cell.seconds == {"triton": pytest.approx(2e-3), "flash": pytest.approx(3.2e-3)}
    assert cell.machine == "NVIDIA H300"
    assert (cell.problem.kv_heads, cell.problem.causal, cell.problem.dtype) == (3, True, "bf16")
    recorded(tmp_path / "run", "3", attention({("flash", 0): (9e-3, 1e-3), ("triton", 0): (9e-3, 3e-3)}))
    assert command("tune", "attention", "--from", tmp_path / "run", SPEED).code != 0  # one DIR a --from
    assert command("tune", "attention", "--from", tmp_path / "run", "--from", SPEED).code == 0
    newer = own_table()
    assert len(newer) == 2
    assert newer[0].seconds == {"flash": 0.01, "triton": 0.012}


def test_a_table_that_cannot_be_read_is_not_overwritten(command: Command, tmp_path: Path) -> None:
    """The user's own is set aside, and made anew; another file was not meant."""
    path, notes = own_file("my notes"), tmp_path / "notes.txt"
    notes.write_text("my notes")
    done = command("tune", "attention", "--from", SPEED)
    assert done.code == 0
    assert f"set aside as {path.with_suffix('.bad')}" in done.out
    assert path.with_suffix(".bad").read_text() == "my notes"
    assert len(own_table()) == 1
    done = command("tune", "attention", "--from", SPEED, "--table", notes)
    assert done.code == 2
    assert "is no table of measured times" in done.err
    assert notes.read_text() == "my notes"


def test_a_bad_row_is_set_aside_and_the_good_ones_stay(command: Command) -> None:
    first = [measured.read(measured.SHIPPED, name)[0] for name in ("gemm", "attention")]
    table = measured.text([dataclasses.replace(row, machine="mine") for row in first])
    table = table.replace('"dtype": "e4m3"', '"dtype": "e9m9"', 1)
    path = own_file(table)
    done = command("tune", "attention", "--from", SPEED)
    assert done.code == 0, done.err
    assert f"set aside as {path.with_suffix('.bad')}: {path}: row 1 is no measured time" in done.out
    assert path.with_suffix(".bad").read_text() == table
    assert [row.machine for row in own_table()] == ["NVIDIA H200", "mine"]


def test_backends_that_a_shape_no_longer_has_are_named(command: Command) -> None:
    shipped = measured.read(measured.SHIPPED, "attention")
    row = next(row for row in shipped if row.problem.length == 1024 and row.problem.causal)
    own_file(measured.text([dataclasses.replace(row, seconds={**row.seconds, "flash": 1e-3, "math": 1.0})]))
    done = command("tune", "attention", "--from", SPEED)
    assert done.code == 0
    assert "no longer in the table: flash, math" in done.out


@pytest.mark.slow
def test_a_cpu_is_measured_and_a_second_time_goes_on(command: Command, tmp_path: Path) -> None:
    asked = ["--device", "cpu", "--shape", "1,2/1,48,16,window=9:0"]
    done = command("tune", "attention", *asked, "--rivals", "math,manual,cudnn", "--rounds", "2")
    assert done.code == 0, done.err
    assert "unsupported: attention/" in done.out
    [cell] = own_table()
    assert set(cell.seconds) == {"math", "manual"}
    assert cell.machine == measured.machine_name("cpu")
    assert cell.problem.window == (9, 0)
    assert "window 9:0" in done.out
    journal = tmp_path / "runs" / "tune-attention"
    records = list(load(journal).records.values())
    assert len(records) == 6
    other = command("tune", "attention", *asked, "--shape", "1,1,16,8,causal", "--rivals", "manual", "--rounds", "1")
    assert other.code == 0, other.err
    after = list(load(journal).records.values())
    assert after[:6] == records
    assert len(after) == 7
    assert len(own_table()) == 2


@pytest.mark.slow
def test_a_cpus_gemms_epilogues_and_heads_are_measured_into_one_table(command: Command) -> None:
    done = command("tune", "gemm", "--device", "cpu", "--rounds", "1", "--rivals", "torch,gluon,reference,scaled_mm",
        "--shape", "64,48,32", "--shape", "64,48,32,fp8,row", "--shape", "64,48,160,fp8,block")  # fmt: skip
    assert done.code == 0, done.err
    assert "scaled_mm: needs an NVIDIA GPU" in done.out
    assert "M64 N48 K160 fp8 block: reference" in done.out
    for what, shape in (("epilogue", "64,48,32,gradient"), ("head", "32,16,50/64")):
        rivals = ["--rivals", "reference"] if what == "head" else []
        done = command("tune", what, "--device", "cpu", "--rounds", "1", "--shape", shape, *rivals)
        assert done.code == 0, done.err
    assert {row.problem: set(row.seconds) for row in own_table()} == {
        HeadShape(n=32, d=16, vocab=50, padded=64, dtype="fp32"): {"reference"},
        GemmShape(m=64, n=48, k=32, dtype="bf16", epilogue="gradient"): {"separate"},
        GemmShape(m=64, n=48, k=32, dtype="bf16"): {"torch"},
        GemmShape(m=64, n=48, k=32, dtype="e4m3", scales="row", fast_accum=True): {"reference"},
        GemmShape(m=64, n=48, k=160, dtype="e4m3", scales="block"): {"reference"},
    }
    assert {row.machine for row in own_table()} == {measured.machine_name("cpu")}
