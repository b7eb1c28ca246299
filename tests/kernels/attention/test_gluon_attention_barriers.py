"""Who waits for whom in Gluon's attention: its own functions as Python threads, on barriers as sm_90's are.

What a product reads may not change until the product is over, nor what a store reads until it is read; each tile must be of
its own rows and keys, each once and in order. A barrier shows one bit of how many phases are over.
"""

import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
from barriers import ran
from gluon_machine import PARTS, ROWS, Machine, Number, Place, Room, Shape, Sum

from te_bench.kernels.attention.hopper import (
    backward_fused,
    backward_keys,
    backward_rows,
    fp8_backward,
    fp8_forward,
    parts,
)
from te_bench.kernels.attention.hopper import (
    forward as _gluon_forward,
)
from te_bench.kernels.attention.hopper.launch import Plan


def desc(name: str, rows: int) -> Any:
    return types.SimpleNamespace(
        name=name, dtype=None, block_type=types.SimpleNamespace(shape=[1, 1, rows, 64], nbytes=rows)
    )


def room(count: int, rows: int) -> Room:
    return Room([Place() for _ in range(count)], rows)


def stand_in(machine: Machine, monkeypatch: pytest.MonkeyPatch, program: int, programs: int) -> None:
    """The kernels' functions become Python's."""
    language = types.SimpleNamespace(
        cdiv=lambda x, y: -(-x // y), program_id=lambda _: program, num_programs=lambda _: programs, static_range=range,
        NVMMADistributedLayout=lambda *args: types.SimpleNamespace(instr_shape=args[2]), zeros=lambda *_: Sum(),
        SliceLayout=lambda *_: None, DotOperandLayout=lambda *_: None, SwizzledSharedLayout=lambda *_: None, float32=None,
        arange=lambda *_: Number(), where=lambda _, x, __: x,
    )  # fmt: skip
    of_barriers = types.SimpleNamespace(wait=machine.wait, arrive=machine.arrive, expect=machine.expect)
    stores = types.SimpleNamespace(
        async_copy_global_to_shared=machine.load, store_wait=machine.store_wait,
        async_copy_shared_to_global=lambda desc, at, place: machine.leave(place),
    )  # fmt: skip
    python = {name: getattr(parts, name).fn for name in (*PARTS, "pick_tile")}
    same = dict.fromkeys(
        ("as_matrix", "round_to", "as_operand", "hold_back", "exp2", "mask_scores", "keep_positive"), lambda x, *_: x
    )
    common = {
        "gl": language, "mbarrier": of_barriers, "tma": stores, "ROWS": ROWS, "LN_2": 1, "spread_rows": lambda *_: 1,
        "BLOCK": 128, "OFFSET": 8.0,
    }  # fmt: skip
    products = {
        "warpgroup_mma": machine.multiply,
        "warpgroup_mma_wait": machine.finish,
        "warpgroup_mma_init": lambda x: x,
        "fence_async_shared": lambda: None,
    }
    forward = _gluon_forward, fp8_forward
    backward = backward_rows, backward_keys, backward_fused, fp8_backward
    for module in (parts, *forward, *backward):
        for name, value in (common | python | same | products).items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    for module, names in (
        (_gluon_forward, ("_skip_blocks", "_multiply_qk", "_attend_block")), (backward_rows, ("_add_dq",)),
        (fp8_forward, ("_fetch_values", "_skip_blocks", "_add_half", "_attend_block", "_store_out")),
        (backward_keys, ("_add_dk_dv", "find_row_blocks")), (backward_fused, ("_add_gradients", "find_row_blocks")),
        (fp8_backward, ("_add_gradients", "find_row_blocks")),
    ):  # fmt: skip
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name).fn)


SHAPES = {
    "whole": Shape(1, 3, 3, 512, 512, True),
    "full": Shape(2, 1, 1, 256, 384, False),
    "tails, shared heads": Shape(2, 2, 1, 330, 330, True),
    "few keys": Shape(1, 2, 2, 400, 70, True),
    "few rows": Shape(1, 3, 3, 40, 500, True),
    "one of each": Shape(1, 1, 1, 1, 1, True),
}
FORWARD = {
    "4": Plan(4, 64, 4, 2, 112), "4, two stages": Plan(4, 64, 2, 3, 112),
    "2, overlap": Plan(2, 128, 2, 2, 232, overlap=True),
}  # fmt: skip
SLOW = ["fetch", "0", "1"]


@pytest.mark.parametrize("slow", [*SLOW, "q"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("plan", FORWARD)
def test_forward(plan: str, shape: str, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, s, found = FORWARD[plan], SHAPES[shape], list[Any]()
    for program in range(2):
        with monkeypatch.context() as patch:
            found += forward(p, s, slow, patch, program)
    expected = []
    for b, h, row in itertools.product(range(s.batch), range(s.heads), range(0, s.rows, ROWS)):
        kv = h // s.group
        of_keys = [((("q", b, h, row, 0),), ("k", b, kv, key, 0)) for key in s.keys_of(row, p.at_once)]
        expected.append((b, h, row, tuple(((pair,), ("v", *pair[1][1:])) for pair in of_keys)))
    assert sorted(found) == sorted(expected)


def forward(p: Plan, s: Shape, slow: str, monkeypatch: pytest.MonkeyPatch, program: int) -> list[Any]:
    """What one of two programs leaves: sequence, head, row, and the products of weights and values."""
    machine, found = Machine(slow), list[Any]()
    stand_in(machine, monkeypatch, program, 2)

    def leave(acc: Sum, sums: Any, top: Any, desc: Any, place: Place, lse: Any, b: int, h: int, pair: int, row: int, T: int):  # type: ignore[no-untyped-def] # fmt: skip
        place.store(acc)
        machine.leave(place)
        if row < T:
            machine.do(lambda: found.append((b, h, row, acc.done())))

    monkeypatch.setattr(_gluon_forward, "_store_out", leave)
    monkeypatch.setattr(_gluon_forward, "_start_softmax", lambda x, *_: (Sum(x.done()), None, None))
    monkeypatch.setattr(_gluon_forward, "_update_softmax", lambda x, *_: (Sum(x.done()), None, None, 1))
    monkeypatch.setattr(Sum, "__mul__", lambda self, _: (self.done(), self)[1])
    n, held = p.at_once, p.warpgroups * p.slots
    shared = room(held, ROWS), room(p.stages, n), room(p.stages, n)
    counts = ((held, 1), (held, 1), (p.stages, 1), (p.stages, p.warpgroups), (p.stages, 1), (p.stages, p.warpgroups))
    gates = tuple(itertools.starmap(machine.barriers, (*counts, (p.warpgroups, 1))))
    sizes = s.sizes(p, of_keys=False, near=2)
    fetched = (desc("q", ROWS), desc("k", n), desc("v", n), shared, gates, sizes)
    common = p.warpgroups, p.slots, p.stages, s.causal
    made = (None, shared, gates, sizes, None, 1.0)
    calls = {"fetch": lambda: _gluon_forward._fetch.fn(fetched, *common)}
    for who in range(p.warpgroups):
        calls[str(who)] = lambda who=who: _gluon_forward._attend.fn(made, who, *common, True, p.overlap)  # type: ignore[misc]
    ran(machine, calls)
    return found


def collecting(machine: Machine, found: list[Any], limit: int) -> Callable[[Place, Sum], None]:
    """A store into a place that tells what was there, and the products: but for rows or keys beyond the limit."""

    def store(place: Place, x: Sum) -> None:
        assert place.readers == 0, "written while a product reads it"
        if place.holds[3] < limit:
            machine.do(lambda: found.append((place.holds, x.done())))
        place.holds = "a result"

    return store


ROWS_HELD = {"3": Plan(3, 64, 4, 2, 160), "2, one slot": Plan(2, 128, 2, 1, 232)}
KEYS_HELD = {"few rows": Plan(2, 32, 3, 2, 232), "in registers": Plan(2, 64, 2, 2, 240, in_registers=True)}


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("plan", ROWS_HELD)
def test_dq(plan: str, shape: str, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, s, found = ROWS_HELD[plan], SHAPES[shape], list[Any]()
    for program in range(2):
        with monkeypatch.context() as patch:
            found += rows(p, s, slow, patch, program)
    expected = []
    for b, h, row in itertools.product(range(s.batch), range(s.heads), range(0, s.rows, ROWS)):
        products = []
        for key in s.keys_of(row, p.at_once):
            q, dout, k, v = (name_at(x, b, h, h // s.group, row, key) for x in ("q", "dout", "k", "v"))
            products.append(((((q,), k), ((dout,), v)), k))
        expected.append((q, tuple(products)))
    assert sorted(found) == sorted(expected)


def name_at(name: str, b: int, h: int, kv: int, row: int, key: int) -> tuple[Any, ...]:
    return (name, b, kv, key, 0) if name in "kv" else (name, b, h, row, 0)


def queries(s: Shape, p: Plan, b: int, h: int, row: int) -> tuple[Any, ...]:
    """Of a block that goes beyond the last row, the copy."""
    return ("last", b, h, row % ROWS, 0) if row + p.at_once > s.rows else ("q", b, h, row, 0)


def rows(p: Plan, s: Shape, slow: str, monkeypatch: pytest.MonkeyPatch, program: int) -> list[Any]:
    """What one of two programs leaves of dQ: its place in q, and the products of dS, of what it is made, and keys."""
    machine, found = Machine(slow), list[Any]()
    stand_in(machine, monkeypatch, program, 2)

    def levels(out: Place, dout: Place, lse: Any, info: Any, pair: int, row: int, T: int, *_: Any) -> tuple[Any, Any]:
        at = dout.holds[1:]
        assert out.holds == ("out", *at)
        assert at == (pair // s.heads, pair % s.heads, row, 0)
        return Number(), Number()

    monkeypatch.setattr(backward_rows, "_load_lse_and_delta", levels)
    monkeypatch.setattr(Place, "store", collecting(machine, found, s.rows))
    n, held = p.at_once, p.warpgroups * p.slots
    shared = *(room(held, ROWS) for _ in range(3)), *(room(p.stages, n) for _ in range(2))
    gates = tuple(itertools.starmap(machine.barriers, ((held, 1), (held, 1), (p.stages, 1), (p.stages, p.warpgroups))))
    sizes = s.sizes(p, of_keys=False, near=2)
    fetched = (*(desc(x, ROWS) for x in ("q", "dout", "out")), desc("k", n), desc("v", n), shared, gates, sizes)
    made = (desc("dq", ROWS), shared, gates, sizes, None, None, 0, 1.0)
    common = p.warpgroups, p.slots, p.stages, s.causal
    calls = {"fetch": lambda: backward_rows._fetch_keys.fn(fetched, *common)}
    for who in range(p.warpgroups):
        calls[str(who)] = lambda who=who: backward_rows._make_dq.fn(made, who, *common, True)  # type: ignore[misc]
    ran(machine, calls)
    return found


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("plan", KEYS_HELD)
def test_dk_and_dv(plan: str, shape: str, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, s, found = KEYS_HELD[plan], SHAPES[shape], list[Any]()
    for program in range(2):
        with monkeypatch.context() as patch:
            found += keys(p, s, slow, patch, program)
    expected = []
    for b, kv, key in itertools.product(range(s.batch), range(s.kv_heads), range(0, s.keys, ROWS)):
        begin = min(key, s.rows - 1) // ROWS * ROWS if s.causal else 0
        dk, dv = [], []
        for h, row in itertools.product(
            range(kv * s.group, (kv + 1) * s.group), range(begin, -(-s.rows // ROWS) * ROWS, p.at_once)
        ):
            q, (dout, k, v) = queries(s, p, b, h, row), (name_at(x, b, h, kv, row, key) for x in ("dout", "k", "v"))
            dv.append(((((k,), q),), dout))
            dk.append(((((k,), q), ((v,), dout)), q))
        expected += [(k, tuple(dk)), (v, tuple(dv))]
    assert sorted(found) == sorted(expected)


def keys(p: Plan, s: Shape, slow: str, monkeypatch: pytest.MonkeyPatch, program: int) -> list[Any]:
    """What one of two programs leaves of dK and dV: its place in k or v, and the products."""
    machine, found = Machine(slow), list[Any]()
    stand_in(machine, monkeypatch, program, 2)
    monkeypatch.setattr(Place, "store", collecting(machine, found, s.keys))
    n, held = p.at_once, p.warpgroups * p.slots
    shared = room(held, ROWS), room(held, ROWS), *(room(p.stages, n) for _ in range(3))
    gates = tuple(itertools.starmap(machine.barriers, ((held, 1), (held, 1), (p.stages, 1), (p.stages, p.warpgroups))))
    sizes = s.sizes(p, of_keys=True, near=2)
    come = (desc(x, n) for x in ("q", "last", "dout", "info"))
    fetched = (desc("k", ROWS), desc("v", ROWS), *come, shared, gates, sizes)
    made = (desc("dk", ROWS), desc("dv", ROWS), shared, gates, sizes, 1.0)
    common = p.warpgroups, p.slots, p.stages, s.causal
    calls = {"fetch": lambda: backward_keys.fetch_rows.fn(fetched, *common)}
    for who in range(p.warpgroups):
        calls[str(who)] = lambda who=who: backward_keys._make_dk_dv.fn(made, who, *common, p.in_registers)  # type: ignore[misc]
    ran(machine, calls)
    return found


FUSED = {"3 stages": Plan(2, 64, 3, 1, 240), "2 stages": Plan(2, 64, 2, 1, 240)}


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("plan", FUSED)
def test_all_gradients_at_once(plan: str, shape: str, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s, found = SHAPES[shape], list[Any]()
    for program in range(2):
        with monkeypatch.context() as patch:
            found += fused(FUSED[plan], s, slow, patch, program)
    assert sorted(found) == sorted(of_all(s, FUSED[plan]))


def of_all(s: Shape, p: Plan) -> list[Any]:
    """dK and dV: places in k or v, and products; dQ's shares: head, half of its columns, row, and products."""
    expected: list[Any] = []
    for b, kv, first in itertools.product(range(s.batch), range(s.kv_heads), range(0, s.keys, 2 * ROWS)):
        begin = min(first, s.rows - 1) // ROWS * ROWS if s.causal else 0
        made: dict[int, tuple[list[Any], list[Any]]] = {first: ([], []), first + ROWS: ([], [])}
        for h, row in itertools.product(range(kv * s.group, (kv + 1) * s.group), range(begin, s.rows, ROWS)):
            share = []
            for key, (dk, dv) in made.items():
                q, (dout, k, v) = queries(s, p, b, h, row), (name_at(x, b, h, kv, row, key) for x in ("dout", "k", "v"))
                scores, dscores = (((k,), q),), (((k,), q), ((v,), dout))
                dv.append((scores, dout))
                dk.append((dscores, q))
                share.append(((dscores,), k))
            expected += [(b * s.heads + h, who, row, tuple(share)) for who in range(2)]
        for key, (dk, dv) in made.items():
            if key < s.keys:
                expected += [(("k", b, kv, key, 0), tuple(dk)), (("v", b, kv, key, 0), tuple(dv))]
    return [(str(x), *x) for x in expected]


def fused(p: Plan, s: Shape, slow: str, monkeypatch: pytest.MonkeyPatch, program: int, without: str = "") -> list[Any]:
    """What one of two programs leaves, and that without waiting at one of its barriers."""
    machine, found = Machine(slow), list[Any]()
    stand_in(machine, monkeypatch, program, 2)
    dscores_shared = room(4, ROWS)
    leave = collecting(machine, found, s.keys)

    def store(place: Place, x: Sum) -> None:
        if place in dscores_shared.of:
            assert place.readers == 0, "written while a product reads it"
            machine.do(lambda: setattr(place, "holds", x.done()))
        else:
            leave(place, x)

    def add(columns: tuple[int, int], row: int, dq: Sum, _: int) -> None:
        machine.do(lambda: found.append((*columns, row, dq.done())))

    monkeypatch.setattr(Place, "store", store)
    monkeypatch.setattr(backward_fused, "add_dq", add)
    monkeypatch.setattr(backward_fused, "find_dq_columns", lambda _, head, who, *__: (head, who))
    monkeypatch.setattr(backward_fused, "mask_scores_in_eights", lambda x, *_: x)
    n, held = p.at_once, p.warpgroups
    shared = room(held, ROWS), room(held, ROWS), *(room(p.stages, n) for _ in range(3))
    gates = tuple(itertools.starmap(machine.barriers, ((held, 1), (held, 1), (p.stages, 1), (p.stages, p.warpgroups))))
    given, over = machine.barriers(2, p.warpgroups), machine.barriers(1, p.warpgroups).index(0)
    skipped = {"": (), "given": given.of, "over": (over,)}[without]
    waits = types.SimpleNamespace(
        arrive=machine.arrive, wait=lambda barrier, parity: barrier in skipped or machine.wait(barrier, parity)
    )
    monkeypatch.setattr(backward_fused, "mbarrier", waits)
    sizes = s.sizes(p, of_keys=True, near=2)
    come = (desc(x, n) for x in ("q", "last", "dout", "info"))
    fetched = (desc("k", ROWS), desc("v", ROWS), *come, shared, gates, sizes)
    made = (desc("dk", ROWS), desc("dv", ROWS), shared, dscores_shared, gates, given, over, sizes, None, 0, 1.0)
    constants = p.warpgroups, p.stages, s.causal, True
    calls = {"fetch": lambda: backward_keys.fetch_rows.fn(fetched, p.warpgroups, 1, p.stages, s.causal)}
    for who in range(p.warpgroups):
        calls[str(who)] = lambda who=who: backward_fused._make_gradients.fn(made, who, *constants)  # type: ignore[misc]
    ran(machine, calls)
    return [(str(x), *x) for x in found]


@pytest.mark.parametrize("slow", ["0", "1"])
@pytest.mark.parametrize("without", ["given", "over"])
def test_each_wait_of_one_warpgroup_for_the_other_is_needed(
    without: str, slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read too early or written too early shows, by whichever of the two is slower."""
    s, plan, found = SHAPES["whole"], FUSED["3 stages"], list[Any]()
    try:
        for program in range(2):
            with monkeypatch.context() as patch:
                found += fused(plan, s, slow, patch, program, without)
    except AssertionError:
        return
    assert sorted(found) != sorted(of_all(s, plan))
