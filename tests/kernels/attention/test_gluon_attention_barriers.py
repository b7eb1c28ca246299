"""Who waits for whom in Gluon's attention: its own functions as Python threads, on barriers as sm_90's are.

What a product reads may not change until the product is over, nor what a store reads until it is read; each tile must be of
its own rows and keys, each once and in order. A barrier shows one bit of how many phases are over.
"""

import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from gluon_machine import ROWS, Machine, Number, Place, Shape, Sum, in_python

from te_bench.kernels.attention.hopper import fp8_launch, launch, parts
from te_bench.kernels.attention.hopper.launch import Tiling

SHAPES = {
    "whole": Shape(1, 3, 3, 512, 512, True),
    "full": Shape(2, 1, 1, 256, 384, False),
    "tails, shared heads": Shape(2, 2, 1, 330, 330, True),
    "few keys": Shape(1, 2, 2, 400, 70, True),
    "few rows": Shape(1, 3, 3, 40, 500, True),
    "one of each": Shape(1, 1, 1, 1, 1, True),
}
SLOW = ("fetch", "0", "1")
TELLING = ("full", "tails, shared heads")  # by whichever warps are slow, the others by the last
D = 128
PADDED = 1024  # rows that dQ's sums have of a head


class Index(int):
    def to(self, _: Any) -> "Index":
        return self


def desc(name: str, s: Shape, rows: int) -> Any:
    """Of blocks of so many rows, of which those beyond `limit` are not written; nbytes: as they arrive."""
    size = 8 * rows if name == "info" else rows * D * (1 if name.endswith("8") else 2)
    limit = s.keys if name in ("dk", "dv") else s.rows
    block = types.SimpleNamespace(shape=[1, 1, rows, D], nbytes=size)
    return types.SimpleNamespace(name=name, dtype=None, layout=None, block_type=block, limit=limit)


def stubs(machine: Machine) -> dict[str, Any]:
    """In place of arithmetic: of products only what they have read."""
    tile = parts.pick_tile.fn

    def weigh(x: Sum, *_: Any) -> tuple[Any, ...]:
        return Sum(x.done()), Number(), Number(), Number()

    unchanged = ("exp2", "mask_scores", "mask_scores_in_eights", "keep_positive", "_quantize_p")
    return {
        **dict.fromkeys(unchanged, lambda x, *_: x), "_sum_own_columns": lambda _: Number(), "spread_rows": lambda *_: 1,
        "_start_softmax": lambda *given: weigh(*given)[:3], "_update_softmax": weigh,
        "pick_tile": lambda *given: tuple(map(Index, tile(*given))),
        "_flatten_dq": lambda dq: dq, "find_dq_columns": lambda _, head, who, *__: (head, who),
        "add_dq": lambda at, row, dq, _: machine.do(lambda: machine.found.append(("dq", *at, row, dq.done()))),
    }  # fmt: skip


WORDS = {
    **dict.fromkeys(("load", "max", "log2", "full", "arange"), lambda *_, **__: Number()), "zeros": lambda *_: Sum(),
    "sum": lambda x, _: x, "convert_layout": lambda x, *_, **__: x, "where": lambda _, x, __: x, "store": lambda *_: None,
}  # fmt: skip


class Kernel(NamedTuple):
    """One of the kernels: what comes and leaves by TMA, numbers before the sizes, and what both programs must leave."""

    entry: Any
    plans: dict[str, Tiling]
    tensors: str  # those that end in ":" come by as many rows as a plan has at once
    given: tuple[Any, ...]
    constants: Callable[[Tiling], dict[str, Any]]
    expected: Callable[[Shape, Tiling], Iterator[Any]]
    of_keys: bool = False


def left_by(kernel: Kernel, p: Tiling, s: Shape, slow: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What two programs leave, by TMA: whose, where, and the products; of dQ's sums head, columns' half, row, products."""
    found = list[Any]()
    names = [(name.rstrip(":"), p.at_once if name.endswith(":") else ROWS) for name in kernel.tensors.split()]
    descriptors = [desc(name, s, D if name == "v8" and not kernel.of_keys else rows) for name, rows in names]
    constants = {k: v for k, v in (p.constants() | kernel.constants(p)).items() if k != "num_warps"}
    sizes = s.sizes(p, of_keys=kernel.of_keys, near=2)
    for program in range(2):
        with monkeypatch.context() as patch:
            machine, places = Machine(slow), list[Place]()

            def room(_: list[int], places: list[Place] = places) -> Place:
                places.append(Place())
                return places[-1]

            def load(place: Place, _: Any, machine: Machine = machine) -> Sum:
                machine.do(lambda: None)  # time in which another block may come
                return Sum((place.holds,))

            patch.setattr(Place, "store", lambda place, x, machine=machine: machine.store(place, x), raising=False)
            patch.setattr(Place, "load", load, raising=False)
            in_python(patch, machine, room, program, 2, WORDS, stubs(machine))
            kernel.entry.fn(*descriptors, *kernel.given, *sizes, CAUSAL=s.causal, **constants)
            assert not any(place.leaving for place in places), "gone before a store has read it"
            found += machine.found
    return found


def at(name: str, b: int, h: int, row: int, column: int = 0) -> tuple[Any, ...]:
    return name, b, h, row, column


def of_out(s: Shape, p: Tiling, fp8: str = "") -> Iterator[Any]:
    for b, h, row in itertools.product(range(s.batch), range(s.heads), range(0, s.rows, ROWS)):
        products = []
        for key in s.keys_of(row, p.at_once):
            q, k = at(f"q{fp8}", b, h, row), at(f"k{fp8}", b, h // s.group, key)
            place = (key // D * D, key % D) if fp8 else (key,)
            products.append(((((q,), k),), at(f"v{fp8}", b, h // s.group, *place)))
        yield (*at("out", b, h, row), *[tuple(products)] * (2 if fp8 else 1))  # in FP8 a half of the features each


def of_dq(s: Shape, p: Tiling) -> Iterator[Any]:
    for b, h, row in itertools.product(range(s.batch), range(s.heads), range(0, s.rows, ROWS)):
        q, dout, out, products = at("q", b, h, row), at("dout", b, h, row), at("out", b, h, row), []
        for key in s.keys_of(row, p.at_once):
            k, v = (at(name, b, h // s.group, key) for name in "kv")
            products.append(((((q,), k), ((dout,), v), out, dout), k))
        yield (*at("dq", b, h, row), tuple(products))


def of_dk_and_dv(s: Shape, p: Tiling, fp8: str = "", *, dq: bool = True, warpgroups: int = 2) -> Iterator[Any]:
    """And of dQ, for which the warpgroups share their keys, each half of it."""
    for b, kv, first in itertools.product(range(s.batch), range(s.kv_heads), range(0, s.keys, warpgroups * ROWS)):
        whole = max(ROWS, p.at_once)
        begin = min(first, s.rows - 1) // whole * whole if s.causal else 0
        made: dict[int, tuple[list[Any], list[Any]]] = {first + i * ROWS: ([], []) for i in range(warpgroups)}
        heads = range(kv * s.group, (kv + 1) * s.group)
        for h, row in itertools.product(heads, range(begin, -(-s.rows // ROWS) * ROWS, p.at_once)):
            share = []
            beyond = row + p.at_once > s.rows and not fp8  # where the last row fills the block
            q = at("last", b, h, row % ROWS) if beyond else at("q", b, h, row)
            q8, dout8, dout = (
                (at(f"q{fp8}", b, h, row) if fp8 else q),
                at(f"dout{fp8}", b, h, row),
                at("dout", b, h, row),
            )
            for key, (dk, dv) in made.items():
                k8, v8, k = (at(name, b, kv, key) for name in (f"k{fp8}", f"v{fp8}", "k"))
                weights = (((k8,), q8), ("info", b * s.heads + h, 0, row))
                dscores = (*weights, ((v8,), dout8), weights[1])
                dv.append((weights, dout))
                dk.append((dscores, q))
                share.append(((dscores,), k))
            for who in range(2 * dq):
                head = b * s.heads + h
                block = (head * PADDED + row) // p.at_once * 2 + who  # of 64 x 64
                yield "dq", *((block, 0, 0) if p.ahead else (head, who, row)), tuple(share)
        for key, products in made.items():
            if key < s.keys:
                yield from ((*at(x, b, kv, key), tuple(y)) for x, y in zip(("dk", "dv"), products, strict=True))


KERNELS = {
    "forward": Kernel(
        launch.gluon_attention_forward_kernel,
        {"4": launch.FORWARD[64], "4, two stages": Tiling(4, 64, 2, 3, 112), "2, overlap": launch.FORWARD[128]},
        "q k: v: out", (Number(), 1.0), lambda p: {"SLOTS": p.slots, "EDGE": True, "OVERLAP": p.overlap}, of_out,
    ),
    "forward in FP8": Kernel(
        fp8_launch.fp8_attention_forward_gluon_kernel,
        {"3": fp8_launch.FORWARD, "64 keys": Tiling(3, 64, 4, 2, 160), "few places": Tiling(3, 128, 2, 1, 160)},
        "q8 k8: v8 out", (*[Number()] * 4, 1.0), lambda p: {"SLOTS": p.slots, "EDGE": True},
        lambda s, p: of_out(s, p, "8"),
    ),
    "dq": Kernel(
        launch.gluon_attention_backward_rows_kernel,
        {"3": launch.OF_ROWS[64, True], "2, one slot": Tiling(2, 128, 2, 1, 232)},
        "q dout out k: v: dq", (Number(), Number(), 0, 1.0), lambda p: {"SLOTS": p.slots, "EDGE": True}, of_dq,
    ),
    "dk and dv": Kernel(
        launch.gluon_attention_backward_keys_kernel,
        {"few rows": Tiling(2, 32, 3, 2, 232), "in registers": Tiling(2, 64, 2, 2, 240, in_registers=True)},
        "k v q: last: dout: info: dk dv", (1.0,), lambda p: {"SLOTS": p.slots, "IN_REGISTERS": p.in_registers},
        lambda s, p: of_dk_and_dv(s, p, dq=False, warpgroups=1), of_keys=True,
    ),
    "all gradients": Kernel(
        launch.gluon_attention_backward_fused_kernel,
        {
            "ahead": launch.FUSED[128, True], "ahead, 2 stages": launch.FUSED[128, True]._replace(stages=2),
            "by columns": launch.FUSED[128, False], "by rows": launch.FUSED[64, True],
        },
        "k v q: last: dout: info: dk dv", (desc("dq", SHAPES["one of each"], ROWS), PADDED, 1.0),
        lambda p: {"EDGE": True, "AHEAD": p.ahead}, of_dk_and_dv, of_keys=True,
    ),
    "all gradients in FP8": Kernel(
        fp8_launch.fp8_attention_backward_gluon_kernel,
        {"causal": fp8_launch.BACKWARD[True], "full": fp8_launch.BACKWARD[False], "one place": Tiling(2, 64, 1, 1, 240)},
        "k8 v8 k q8 dout8 q dout info dk dv", (*[Number()] * 4, None, 0, 1.0),
        lambda p: {"FP8_STAGES": p.slots, "EDGE": True}, lambda s, p: of_dk_and_dv(s, p, "8"), of_keys=True,
    ),
}  # fmt: skip
#: What is late besides the warps: tensors.
LATE = {
    "forward": itertools.product(SHAPES, ["q"]),
    "forward in FP8": itertools.product(SHAPES, ["2", "q8"]),
    "all gradients in FP8": itertools.product(
        ("whole", "tails, shared heads"), ("k8", "v8", "k", "q8", "dout8", "q", "dout", "info")
    ),
}
CASES = [
    (name, plan, shape, slow)
    for name, kernel in KERNELS.items()
    for (shape, slow), plan in itertools.product(
        [*itertools.product(TELLING, SLOW), *((shape, "1") for shape in SHAPES), *LATE.get(name, ())], kernel.plans
    )
]


@pytest.mark.parametrize(("name", "plan", "shape", "slow"), CASES)
def test_each_tile_is_of_its_own_rows_and_keys(name, plan, shape, slow, monkeypatch):
    kernel, s = KERNELS[name], SHAPES[shape]
    p = kernel.plans[plan]
    found, expected = left_by(kernel, p, s, slow, monkeypatch), kernel.expected(s, p)
    assert sorted(found, key=str) == sorted(expected, key=str)
