"""Who makes what in Gluon's GEMM, and who waits for whom: its functions as three Python threads, on barriers as sm_90's are.

A barrier shows one bit of how many phases are over: who is two behind, or ahead by one, takes another block for its own.
On an H200 every plan in turns with two tiles a program ended in an "unspecified launch failure" of it (2026-11-21).
"""

import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
from barriers import Barrier, Threads, ran

from te_bench.kernels.gemm.hopper import kernels, plans
from te_bench.kernels.gemm.hopper.plans import Tiling


class Place:
    """Of a block in shared memory: what was last copied there."""

    holds: Any = None

    def permute(self, _: Any) -> "Place":
        return self

    def slice(self, *_: Any) -> "Place":
        return self


class Room(list[Any]):
    dtype = types.SimpleNamespace(primitive_bitwidth=8)

    def index(self, i: Any, *_: Any) -> Any:
        return self[i]


class Sum:
    """Of products: those that are over by what they read, and those under way."""

    def __init__(self, over: list[Any], under_way: list[tuple[Place, Place]]) -> None:
        self.over, self.under_way = over, under_way

    def __add__(self, other: "Sum") -> "Sum":
        assert not other.under_way, "taken before it was there"
        return Sum(self.over + other.over, [])


class Machine(Threads):
    """Stand-ins for what the kernels take from Gluon."""

    def allocate(self, dtype: Any, shape: list[int], _: Any) -> Room:
        return Room((Barrier if dtype == "barrier" else Place)() for _ in range(shape[0]))

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count

    def copy(self, desc: Any, at: list[int], barrier: Barrier, place: Place) -> None:
        def landed() -> None:
            place.holds = at
            barrier.bytes -= desc.block_type.nbytes
            barrier.settle()

        self.do(landed)

    def multiply(self, a: Place, b: Place, acc: Sum, *, use_acc: bool, is_async: bool) -> Sum:
        assert is_async
        return Sum(acc.over if use_acc else [], [*(acc.under_way if use_acc else []), (a, b)])

    def finish(self, pending: int, deps: tuple[Sum]) -> Sum:
        (acc,) = deps
        self.do(lambda: None)
        done = len(acc.under_way) - pending
        read = [(a.holds, b.holds) for a, b in acc.under_way[: max(done, 0)]]
        return Sum(acc.over + read, acc.under_way[max(done, 0) :])

    def join(self, upper: Sum, lower: Sum) -> Sum:
        assert upper.over == lower.over
        return upper


def stand_in(machine: Machine, monkeypatch: pytest.MonkeyPatch, program: int, programs: int) -> Any:
    """The module of the kernels, its functions Python's."""
    k = kernels
    for name in (
        "_tile_origin", "_await_turn", "_allocate_barriers", "_allocate_parts", "_allocate_ring", "_block_of_b", "_product",
        "_promoted_product",
    ):  # fmt: skip
        monkeypatch.setattr(k, name, getattr(getattr(k, name), "fn", getattr(k, name)))
    same = lambda x, *_, **__: x  # noqa: E731
    language = types.SimpleNamespace(
        cdiv=lambda x, y: -(-x // y), program_id=lambda _: program, num_programs=lambda _: programs, static_range=range,
        NVMMADistributedLayout=lambda *_: None, zeros=lambda *_: Sum([], []), int16=None, float32=None, int64="barrier",
        allocate_shared_memory=machine.allocate, join=machine.join, permute=same, reshape=same, convert_layout=same,
    )  # fmt: skip
    monkeypatch.setattr(k, "gl", language)
    monkeypatch.setattr(
        k, "tma", types.SimpleNamespace(async_copy_global_to_shared=machine.copy, store_wait=lambda _: None)
    )
    of_barriers = {name: getattr(machine, name) for name in ("init", "wait", "arrive", "expect")}
    monkeypatch.setattr(k, "mbarrier", types.SimpleNamespace(**of_barriers, MBarrierLayout=lambda: None))
    monkeypatch.setattr(k, "warpgroup_mma", machine.multiply)
    monkeypatch.setattr(k, "warpgroup_mma_wait", machine.finish)
    monkeypatch.setattr(k, "WARPGROUPS", 2)
    return k


def run(
    shape: tuple[int, int, int], p: Tiling, stages: int, programs: int, promote: bool, slow: str,
    monkeypatch: pytest.MonkeyPatch, gradient: bool = False, program: int = 0,
) -> list[tuple[int, int, list[Any]]]:  # fmt: skip
    """Row, column and products of what a program of `programs` leaves."""
    machine = Machine(slow)
    k = stand_in(machine, monkeypatch, program, programs)
    left: list[tuple[int, int, list[Any]]] = []

    def leave(x: Sum, row: int, column: int) -> None:
        assert not x.under_way
        machine.do(lambda: left.append((row, column, x.over)))

    monkeypatch.setattr(k, "store_by_parts", lambda *args: leave(args[0], *args[9:11]))
    a, b, h = (
        types.SimpleNamespace(
            block_type=types.SimpleNamespace(shape=box, nbytes=box[0] * box[1]), dtype=None, layout=None
        )
        for box in ([p.height, 128], [128, p.width] if gradient else [p.width, 128], [p.height, p.width // p.parts])
    )
    ring = k._allocate_ring(a, b, 1 if p.turns else 2, stages)
    turn, loaded, places = k._allocate_barriers(), k._allocate_barriers(), k._allocate_parts(h, p.parts)

    def multiply(who: int) -> None:
        k._multiply.fn(
            ring, turn, None, h if gradient else None, None, places, loaded, None, shape, who, "tensor", promote, None,
            gradient, p.height, p.width, 128, p.parts, p.slots, p.turns, stages, 8,
        )  # fmt: skip

    calls: dict[str, Callable[[], None]] = {
        "fetch": lambda: k._fetch.fn(a, b, ring, shape, gradient, p.turns, stages, 8),
        "first": lambda: multiply(0),
        "second": lambda: multiply(1),
    }

    ran(machine, calls)
    return left


PLANS = {
    "turns": (plans.TURNS, False),
    "turns, wide": (Tiling(64, 256, True, 4), False),
    "halves": (Tiling(64, 256, False, 4, 2), False),
    "promoted": (plans.PROMOTED, True),
    "promoted, in turns": (plans.PROMOTED._replace(turns=True), True),
}


@pytest.mark.parametrize("slow", ["fetch", "first", "second"])
@pytest.mark.parametrize(("k", "stages"), [(128, 4), (640, 4), (768, 6), (1152, 2), (1152, 3)])
@pytest.mark.parametrize("name", PLANS)
def test_each_tile_is_of_its_own_blocks_whoever_is_slow(name, k, stages, slow, monkeypatch):
    p, promote = PLANS[name]
    shape = 5 * p.tile()[0] - 16, 2 * p.tile()[1], k
    left = run(shape, p, stages, 2, promote, slow, monkeypatch)
    assert len(left) > (2 if p.turns else 4), "too few for a barrier's second phase"
    check_tiles(left, k)


@pytest.mark.parametrize("name", ["turns", "halves", "promoted"])
@pytest.mark.parametrize("shape", [(128, 128, 128), (1200, 136, 16), (768, 776, 512)], ids=str)
@pytest.mark.parametrize("programs", [1, 5, 6])
def test_every_block_of_every_tile_is_multiplied_once(programs, shape, name, monkeypatch):
    p, promote = PLANS[name]
    (height, width), boxes = p.tile(), 1 if p.turns else 2
    rows = range(0, -(-shape[0] // height) * height, p.height)
    wanted = set(itertools.product(rows, range(0, shape[1], width)))
    programs, seen = min(programs, len(wanted) // boxes), list[tuple[int, int]]()
    for program in range(programs):
        left = run(shape, p, 4, programs, promote, "fetch", monkeypatch, program=program)
        check_tiles(left, shape[2])
        seen += [(row, column) for row, column, _ in left]
    assert sorted(seen) == sorted(wanted)


def check_tiles(left: list[tuple[int, int, list[Any]]], k: int) -> None:
    for row, column, products in left:
        assert products == [([row, depth], [column, depth]) for depth in range(0, k, 128)]


@pytest.mark.parametrize("slow", ["fetch", "first", "second"])
def test_blocks_of_a_matrix_that_lies_across(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left = run((640, 384, 768), plans.TURNS, 5, 2, False, slow, monkeypatch, gradient=True)
    assert len(left) > 2
    for row, column, products in left:
        assert products == [([row, depth], [depth, column]) for depth in range(0, 768, 128)]
