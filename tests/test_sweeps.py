"""The sweeps under benchmarks/: who runs when, what hangs is killed, and a Hopper GPU has room for every plan."""

import contextlib
import functools
import inspect
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_bench.experiments import suite_trials
from te_bench.experiments.measurement import Context, Measurement
from te_bench.experiments.spec import Options, Trial
from te_bench.kernels.activation import kernels as activation
from te_bench.kernels.norm import residual_forward
from te_bench.kernels.rotary import kernels as rotary

ROOT = Path(__file__).resolve().parents[1]
SHARED = 227 * 1024  # bytes of a processor's shared memory that a program may have


def test_candidates_take_turns_there_and_back(script: Callable[[str], Any]) -> None:
    seen: list[str] = []
    clock = {"a": iter((9.0, 1.0, 2.0)), "b": iter((4.0, 6.0, 5.0)), "c": iter((7.0, 7.0, 8.0))}

    def seconds(name: str) -> float:
        seen.append(name)
        return next(clock[name])

    assert script("_race").by_turns({name: name for name in "abc"}, 3, seconds) == {"a": 2.0, "b": 5.0, "c": 7.0}
    assert "".join(seen) == "cbaabccba"


def test_who_raises_is_left_out_of_a_forgiving_race(script, monkeypatch, capsys):
    race = script("_race")
    cuda = SimpleNamespace(empty_cache=lambda: None, Stream=object, stream=contextlib.nullcontext)
    monkeypatch.setattr(race, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(race, "captured", lambda call, stream: call())
    monkeypatch.setattr(race, "seconds_of", lambda graph, stream: graph)
    calls = {"a": lambda: 1.0, "b": lambda: 1 / 0, "c": lambda: 3.0}
    assert race.race(lambda: calls, 2, skip=["c"], forgiving=True) == {"a": 1.0}
    assert capsys.readouterr().out == "b: ZeroDivisionError division by zero\n"
    with pytest.raises(ZeroDivisionError):
        race.race(lambda: calls, 2)


def test_a_table_has_the_fastest_first_and_is_kept(script, tmp_path, capsys):
    race = script("_race")
    rates = race.told("a shape", 4e9, {"slow": 4e-5, "fast": 1e-5})
    assert rates == pytest.approx({"slow": 100, "fast": 400})
    assert [line.split()[-1] for line in capsys.readouterr().out.split("\n")[2:4]] == ["fast", "slow"]
    race.keep({"a shape": rates}, tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text()) == {"a shape": rates}


PIECE = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(__file__).with_suffix(".pid").write_text(str(os.getpid()))
time.sleep(60 if sys.argv[1] == "hangs" else 0)
sys.exit(sys.argv[1] == "fails")
"""


@pytest.mark.parametrize(("how", "seconds", "well"), [("ends", 30, True), ("fails", 30, False), ("hangs", 1, False)])
def test_a_piece_that_hangs_is_killed(how, seconds, well, script, tmp_path, monkeypatch):
    piece = tmp_path / "piece.py"
    piece.write_text(PIECE)
    monkeypatch.setattr("sys.argv", [str(piece), "not", "these"])
    began = time.monotonic()
    assert script("_race").apart(seconds, how, "more") is well
    assert time.monotonic() - began < 20
    with pytest.raises(ProcessLookupError):
        os.kill(int(piece.with_suffix(".pid").read_text()), 0)


def test_plans_of_the_backward_pass(script: Callable[[str], Any]) -> None:
    sweep = script("attention_backward_plans")
    assert len(sweep.PLANS) == len(set(sweep.PLANS.values())) == 7
    assert {plan for (width, _), plan in sweep.launch.FUSED.items() if width == 128} <= set(sweep.PLANS.values())
    for p in sweep.PLANS.values():
        held, ring, dscores = 2 * p.warpgroups * p.slots * 64 * 256, 4 * p.stages * 64 * 128, 4 * p.warpgroups * 64 * 64
        assert p.fetching() >= 24
        leaving = p.ahead * p.warpgroups * 64 * 64 * 4
        assert held + ring + p.stages * 64 * 8 + dscores + leaving + 512 <= SHARED
    covered(sweep.PLANS, sweep.CHECKED)


def test_plans_of_the_forward_pass(script: Callable[[str], Any]) -> None:
    sweep = script("attention_forward_plans")
    for width, plans in sweep.PLANS.items():
        shipped = sweep.launch.FORWARD[width]
        ships = next(name for name, plan in plans.items() if plan == shipped)
        alike = [name for name, plan in plans.items() if dealt(plan) == dealt(shipped) and name != ships]
        covered(plans, {ships: alike} | {name: shared for name, shared in sweep.CHECKED.items() if name in plans})


def dealt(plan: Any) -> Any:
    """The plan but for how tiles are dealt, which is no other compilation."""
    return plan._replace(sharing=0)


def covered(plans: dict[str, Any], checked: dict[str, list[str]]) -> None:
    """Each plan is checked, or shares its compilation with the one that it is named beside."""
    assert sorted(plans) == sorted(name for key, shared in checked.items() for name in (key, *shared))
    for key, shared in checked.items():
        assert {dealt(plans[name]) for name in shared} <= {dealt(plans[key])}


def asked(sweep: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str, wrong: str = "") -> list[tuple[Any, ...]]:
    """Pieces that a sweep runs apart, where one check fails: seconds and arguments."""
    pieces = []

    def apart(seconds: float, *of: str) -> bool:
        pieces.append((seconds, *of))
        return of != ("check", wrong)

    monkeypatch.setattr(sweep if hasattr(sweep, "apart") else sys.modules["_attention_plans"], "apart", apart)
    monkeypatch.setattr("sys.argv", ["sweep.py", *arguments])
    with pytest.raises(SystemExit, match="1") if wrong else contextlib.nullcontext():
        sweep.main()
    return pieces


def test_what_failed_is_not_timed(script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, wrong, alike = script("attention_backward_plans"), "2 places, sharing 4", "2 places, all sharing"
    monkeypatch.setitem(sweep.CHECKED, wrong, [alike])
    *checks, last = asked(sweep, monkeypatch, "--json", "x.json", wrong=wrong)
    assert checks == [(60 if i else 150, "check", name) for i, name in enumerate(sweep.CHECKED)]
    assert last == (180, "time", wrong, alike, "--json", "x.json")
    measured: list[Any] = []
    monkeypatch.setattr(sweep, "measure", lambda *given: measured.extend(given))
    assert asked(sweep, monkeypatch, *map(str, last[1:])) == []
    assert measured == [[wrong, alike], Path("x.json")]
    first, *_ = sweep.CHECKED
    assert asked(sweep, monkeypatch, wrong=first)[-1] == (180, "time", first, *sweep.CHECKED[first])


def test_pieces_of_fp8_attention(script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = script("attention_fp8_tiles")
    pieces = asked(sweep, monkeypatch, "--json", "x.json")
    assert [piece[0] for piece in pieces] == [150, 150, 120, 420]
    ran: list[Any] = []
    for name in ("check", "long", "measure"):
        monkeypatch.setattr(sweep, name, lambda *given, name=name: ran.append((name, *given)))
    for _, *arguments in pieces:
        assert asked(sweep, monkeypatch, *map(str, arguments)) == []
    checks = [("check", name) for name in ("quantize", "triton_fp8")]
    assert ran == [*checks, ("long",), ("measure", Path("x.json"))]


def test_tiles_of_fp8_attention(script: Callable[[str], Any]) -> None:
    sweep = script("attention_fp8_tiles")
    assert len(set(sweep.TILES)) == len(sweep.TILES) == 11
    assert {sweep.fp8_forward.FORWARD[width] for width in (64, 128)} <= set(sweep.TILES)
    assert sweep.fp8_launch.FORWARD in sweep.GLUON_PLANS
    assert set(sweep.fp8_launch.BACKWARD.values()) <= set(sweep.GLUON_BACKWARD)


def test_shapes_and_bars_are_the_documents(script: Callable[[str], Any]) -> None:
    document = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    backward, fp8 = script("attention_backward_plans").SHAPES, script("attention_fp8_tiles").SHAPES
    for name, (batch, heads, rows, causal, bar) in backward.items():
        assert name == f"B{batch} H{heads} T{rows} {'causal' if causal else 'full'}"
        assert f"\n| {name} | {bar} |".replace(" 0 ", " ") in document
    for name, (batch, heads, rows, width, causal, bar) in fp8.items():
        assert name == f"B{batch} H{heads} T{rows} D{width} {'causal' if causal else 'full'}"
        assert not bar or re.search(rf"^\| {name}, forward[^|]*\| {bar} \|", document, re.MULTILINE)


def test_the_norms_tiles_hold_what_ships_and_each_is_what_runs(script, monkeypatch):
    sweep = script("norm_tiles")
    ships, named = residual_forward.WIDE_CAST, inspect.signature(sweep._residual.add_forward_quantized)
    assert tuple(ships.values()) in sweep.TILES
    assert len(set(sweep.TILES)) == 24

    def cast(*args: Any, **kwargs: Any) -> None:
        given = named.bind(*args, **kwargs).arguments
        assert dict(zip(ships, (32, 64, 8, 4), strict=True)) == residual_forward.WIDE_CAST
        if given["branch"] is not None:
            raise OverflowError

    monkeypatch.setattr(residual_forward, "WIDE_CAST", ships)  # which is put back
    monkeypatch.setattr(sweep._residual, "add_forward_quantized", cast)
    assert sweep.measured(32, 64, 8, 4, "cpu") == [0, "OverflowError"]


def test_activations_tiles_begin_with_what_ships_and_each_is_the_one_that_runs(script, monkeypatch):
    sweep, ships = script("activation_tiles"), activation.QUANTIZED
    assert sweep.TILES[0] == (ships["ROWS"], ships["COLUMNS"], ships["num_warps"], None)
    assert len(set(sweep.TILES)) == 12
    ran: list[Any] = []

    def calls(m: int, n: int, device: str) -> dict[str, Callable[[], None]]:
        return {"a": lambda: ran.append(activation.QUANTIZED), "b": lambda: ran.append(1 / 0)}

    monkeypatch.setattr(activation, "QUANTIZED", ships)  # which is put back
    monkeypatch.setattr(sweep, "calls", calls)
    assert sweep.measured(64, 128, 4, 80, 1, 1, "cpu") == {"a": 0, "b": "ZeroDivisionError"}
    [tile] = ran
    assert tile == {**ships, "ROWS": 64, "COLUMNS": 128, "num_warps": 4, "maxnreg": 80}


def test_rotarys_tiles_begin_with_what_ships(script: Callable[[str], Any]) -> None:
    tiles = script("bench_rotary").TILES
    assert tiles[0] == (rotary.HEADS, rotary.EACH, rotary.AREA, rotary.WARPS)
    assert len(set(tiles)) == 12


def test_a_barrier_comes_before_what_a_loop_has_stored(script, monkeypatch):
    from torch._inductor.codegen.triton import TritonKernel

    lines: list[str] = []
    monkeypatch.setattr(TritonKernel, "load", lambda self, name, index: lines.append(name))
    usual = TritonKernel.load
    stored = SimpleNamespace(invalidated_stores={"stored"})
    kernel = {"inside_reduction": True, "persistent_reduction": False, "cse": stored}
    with script("compiled_loss").barriers():
        for name, changes in (("stored", {}), ("read", {}), ("stored", {"persistent_reduction": True})):
            TritonKernel.load(
                SimpleNamespace(**kernel | changes, loads=SimpleNamespace(writeline=lines.append)), name, 0
            )  # type: ignore[arg-type]
    assert lines == ["tl.debug_barrier()", "stored", "read", "stored"]
    assert TritonKernel.load is usual


@pytest.mark.slow
def test_a_compiled_loss_beside_eagers(script, monkeypatch, capsys):
    """By Dynamo alone: of a CPU Inductor has no Triton code, into which barriers could go."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(sys, "argv", ["compiled_loss.py", "--model", "tiny", "--layers", "1", "--batch", "2"])
    script("compiled_loss").main()
    eager, compiled, with_barriers = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"eager: (\+0\.000000, ){2}\+0\.000000 of 5\.5\d+", eager)
    for name, line in (("compile", compiled), ("compile, with barriers", with_barriers)):
        assert line.startswith(f"{name}: ")
        assert all(abs(float(loss)) < 1e-3 for loss in line.removeprefix(f"{name}: ").split(", "))


def test_the_step_with_barriers_is_checked_and_timed_as_the_suites(script, monkeypatch):
    from torch._inductor.codegen.triton import TritonKernel

    sweep, usual, ran = script("compiled_loss"), TritonKernel.load, list[Trial]()

    def run(trial: Trial, context: Context) -> Measurement:
        assert context.check
        assert TritonKernel.load is not usual
        ran.append(trial)
        return Measurement(samples={"latency_s": [0.3, 0.1, 0.2]})

    monkeypatch.setattr(sweep.train_step, "run", run)
    assert sweep.timed("gpt2-large", 12, "cuda") == 200
    (trial,) = ran
    problem = {"model": "gpt2-large", "batch": 12, "block": 1024}
    mode = "compile-reduce-overhead"
    asked = suite_trials.step(Options(device="cuda"), problem, "cudnn", "bf16", mode, 0)
    assert trial == asked
