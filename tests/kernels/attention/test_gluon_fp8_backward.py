"""Gluon's FP8 backward pass without a GPU: who waits for whom, and what it computes in float64. As in test_gluon_fp8."""

import functools
import itertools
import math
import types
from collections.abc import Callable
from typing import Any

import barriers
import pytest
import test_gluon_attention_arithmetic as arithmetic
import test_gluon_attention_barriers as waiting
import torch
from barriers import Barrier
from fp8_definition import definition, trip
from gluon_machine import ROWS, Machine, Number, Place, Room, Shape, Sum
from test_gluon_fp8 import SHARED, D, run
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.attention.fp8_quantize import Heads
from te_bench.kernels.attention.hopper import fp8_backward as kernel
from te_bench.kernels.attention.hopper import fp8_launch as launch
from te_bench.kernels.attention.hopper import launch as _gluon_launch
from te_bench.kernels.attention.hopper.fp8_launch import BACKWARD
from te_bench.kernels.attention.hopper.launch import LOG2_E, Plan
from te_bench.kernels.attention.hopper.launch import REGISTERS as OF_A_PROCESSOR

PLANS = {"causal": BACKWARD[True], "full": BACKWARD[False], "one place": Plan(2, 64, 1, 1, 240, sharing=1)}
KERNEL = kernel.fp8_attention_backward_gluon_kernel


def constants(p: Plan, s: Shape) -> dict[str, int]:
    """The kernel's, as the launcher gives them."""
    return {
        "CONSUMERS": p.warpgroups, "FP8_STAGES": p.slots, "STAGES": p.stages, "REGISTERS": p.registers,
        "FETCHING": p.fetching(), "CAUSAL": s.causal, "EDGE": s.causal or s.keys % (2 * ROWS) != 0,
    }  # fmt: skip


def shared_memory(monkeypatch: pytest.MonkeyPatch, room: Callable[[list[int]], Any]) -> dict[Place, Room]:
    """The halves of dV's places, where before that keys and values are in FP8; the kernel may allocate by itself."""
    halves: dict[Place, Room] = {}

    def allocate(_: Any, shape: list[int], __: Any) -> Room:
        return Room([room(shape[-2:]) for _ in range(shape[0])], *shape[-2:])

    def both(place: Place, _: Any) -> Room:
        return halves.setdefault(place, Room([room([ROWS, D]), room([ROWS, D])]))

    kernel.gl.allocate_shared_memory, kernel.gl.NVMMASharedLayout = allocate, lambda *_: None
    monkeypatch.setattr(kernel, "_split_dv_stage", both)
    return halves


# Who waits for whom


BARRIERS = "held", "left", "full8", "empty8", "full", "empty", "given", "over"  # in the order in which they are made
BYTES = {"k8": 1, "v8": 1, "q8": 1, "dout8": 1, "k": 2, "q": 2, "dout": 2, "dk": 2, "dv": 2}  # of a number
COME = ("k8", "v8", "k", "q8", "dout8", "q", "dout", "info")


class Fenced(Machine):
    """What a thread has stored, the tensor core and TMA see from its fence on. without: the barriers nobody waits at."""

    def __init__(self, slow: str, without: str) -> None:
        super().__init__(slow)
        self.without, self.made, self.unseen = without, list[list[Barrier]](), dict[Place, Any]()

    def barriers(self, count: int, arrivals: int) -> Room:
        made = super().barriers(count, arrivals)
        self.made.append(made.of)
        return made

    def wait(self, barrier: Barrier, parity: int, *, pred: bool = True) -> None:
        if not self.without or barrier not in self.made[BARRIERS.index(self.without)]:
            super().wait(barrier, parity, pred=pred)

    def stored(self, place: Place) -> None:
        assert place.readers == 0, "written while a product reads it"
        assert not place.leaving, "written while a store reads it"
        self.unseen[place] = self.own
        self.own.__dict__.setdefault("unseen", []).append(place)

    def fence(self) -> None:
        self.do(lambda: [self.unseen.pop(place, None) for place in self.own.__dict__.pop("unseen", [])])

    def multiply(self, a: Any, b: Place, acc: Sum, *, use_acc: bool = True, is_async: bool) -> Sum:
        assert not {a, b} & self.unseen.keys(), "the tensor core may see what was there before"
        return super().multiply(a, b, acc, use_acc=use_acc, is_async=is_async)


def desc(name: str) -> Any:
    shape, size = [1, 1, ROWS, D], BYTES.get(name, 0) * ROWS * D or 8 * ROWS
    return types.SimpleNamespace(
        name=name, dtype=None, layout=None, block_type=types.SimpleNamespace(shape=shape, nbytes=size)
    )


def left_by(
    p: Plan, s: Shape, slow: str, monkeypatch: pytest.MonkeyPatch, program: int, without: str = ""
) -> list[Any]:
    """What one of two programs leaves: of dK and dV place and products; dQ's shares: head, columns' half, row, products."""
    machine, found, places = Fenced(slow, without), list[Any](), list[Place]()
    waiting.stand_in(machine, monkeypatch, program, 2)

    def room(_: list[int]) -> Place:
        places.append(Place())
        return places[-1]

    halves = shared_memory(monkeypatch, room)

    def store(place: Place, x: Sum) -> None:
        for part in (place, *(halves[place].of if place in halves else ())):
            machine.stored(part)
            machine.do(lambda part=part: setattr(part, "holds", x.done()))  # type: ignore[misc]

    def load(place: Place, _: Any) -> Sum:
        machine.do(lambda: None)  # time in which another block may come
        return Sum((place.holds,))

    def leave(desc: Any, at: list[int], place: Place) -> None:
        assert place not in machine.unseen, "TMA may read what was there before"
        assert (place in halves) == (desc.name == "dv"), "each has its place"
        for part in (place, *(halves[place].of if place in halves else ())):
            machine.leave(part)
        if at[2] < s.keys:
            machine.do(lambda: found.append((desc.name, *at, place.holds)))

    def add(columns: tuple[int, int], row: int, dq: Sum, width: int) -> None:
        machine.do(lambda: found.append(("dq", *columns, row, width, dq.done())))

    kernel.gl.load = lambda _: Number()
    kernel.tma.async_copy_shared_to_global = leave
    for name, stub in {
        "add_dq": add, "find_dq_columns": lambda _, head, who, *__: (head, who), "mask_scores_in_eights": lambda x, *_: x,
        "fence_async_shared": machine.fence,
    }.items():  # fmt: skip
        monkeypatch.setattr(kernel, name, stub)
    monkeypatch.setattr(Place, "store", store)
    monkeypatch.setattr(Place, "load", load)
    monkeypatch.setattr(Sum, "__sub__", lambda x, y: Sum(x.done() + y.done()))  # level and delta
    descriptors = [desc(name) for name in (*COME, "dk", "dv")]
    sizes = s.sizes(p, of_keys=True, near=2)
    run(KERNEL, monkeypatch, machine, room, descriptors, *[Number()] * 4, None, 0, 1.0, *sizes, **constants(p, s))
    assert not any(place.leaving for place in places), "gone before a store has read it"
    return [(str(x), *x) for x in found]


def expected(s: Shape) -> list[Any]:
    """What both programs leave."""
    found: list[Any] = []
    for b, kv, first in itertools.product(range(s.batch), range(s.kv_heads), range(0, s.keys, 2 * ROWS)):
        begin = min(first, s.rows - 1) // ROWS * ROWS if s.causal else 0
        made: dict[int, tuple[list[Any], list[Any]]] = {first: ([], []), first + ROWS: ([], [])}
        for h, row in itertools.product(range(kv * s.group, (kv + 1) * s.group), range(begin, s.rows, ROWS)):
            share = []
            for key, (dk, dv) in made.items():
                k8, v8, k = ((name, b, kv, key, 0) for name in COME[:3])
                q8, dout8, q, dout = ((name, b, h, row, 0) for name in COME[3:-1])
                weights = (((k8,), q8), ("info", b * s.heads + h, 0, row))
                dscores = (*weights, ((v8,), dout8), weights[1])
                dv.append((weights, dout))
                dk.append((dscores, q))
                share.append(((dscores,), k))
            found += [("dq", b * s.heads + h, who, row, D, tuple(share)) for who in range(2)]
        for key, of_keys in made.items():
            if key < s.keys:
                found += [(x, b, kv, key, 0, tuple(y)) for x, y in zip(("dk", "dv"), of_keys, strict=True)]
    return [(str(x), *x) for x in found]


def left_by_both(p: Plan, s: Shape, slow: str, monkeypatch: pytest.MonkeyPatch, without: str = "") -> list[Any]:
    found = list[Any]()
    for program in range(2):
        with monkeypatch.context() as patch:
            found += left_by(p, s, slow, patch, program, without)
    return found


LATE = [*itertools.product(waiting.SHAPES, waiting.SLOW), *itertools.product(("whole", "tails, shared heads"), COME)]


@pytest.mark.parametrize(("shape", "slow"), LATE)
@pytest.mark.parametrize("plan", PLANS)
def test_each_tile_is_of_its_own_keys_and_rows(
    plan: str, shape: str, slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = waiting.SHAPES[shape]
    assert sorted(left_by_both(PLANS[plan], s, slow, monkeypatch)) == sorted(expected(s))


WITHOUT = {
    "held": "k8", "left": "0", "full8": "q8", "empty8": "q", "full": "dout", "empty": "0", "given": "0", "over": "0"
}  # fmt: skip


@pytest.mark.parametrize("without", WITHOUT)
def test_each_wait_is_needed(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one thing is slow: which shows what is read too early or written too early."""
    monkeypatch.setattr(barriers, "PATIENCE", 1.0)  # some hang
    s = waiting.SHAPES["whole"]
    try:
        found = left_by_both(PLANS["one place"], s, WITHOUT[without], monkeypatch, without)
    except AssertionError:
        return
    assert sorted(found) != sorted(expected(s))


# What it computes


SHAPES = arithmetic.SHAPES | {
    "keys that no row sees": Shape(2, 4, 2, 201, 500, True),
    "more tiles than programs": Shape(2, 2, 1, 330, 450, True),
}


def drawn(s: Shape, far: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """q, k, v, dout as they lie in memory, by rows; and what one is in FP8, of each head."""
    q, k, v, dout = arithmetic.drawn(s, D)
    if far:
        q, k = q.abs() + 8, -k.abs() - 8
    tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout)]
    sizes = [(by, x.shape[:2]) for by, x in zip((0.2, 0.9, 3, 1.7), tensors, strict=True)]
    return tensors, [by * torch.linspace(1.5, 0.5, b * h, dtype=torch.float64).view(b, h) for by, (b, h) in sizes]


def quantized(x: Tensor, inverse: Tensor) -> Heads:
    """As the quantiser leaves it, but in float64: padded with zeros."""
    data = trip(x) / inverse.nan_to_num(1)[..., None, None]
    return Heads(torch.nn.functional.pad(data, (0, 0, 0, -x.shape[2] % 128)), None, inverse)


def differentiated(
    p: Plan, s: Shape, tensors: list[Tensor], inverses: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """dq, dk, dv, launched on two processors: float64, but for dQ's sums; what nobody writes is NaN."""
    q, k, v, dout = tensors
    masked, hidden = list[int](), arithmetic.backward_fused.mask_scores_in_eights.fn

    def arriving(dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Heads, Tensor]:
        come = quantized(dout, inverses[3])
        info = torch.zeros(2, *come.data.shape[:3], dtype=torch.float64)  # type: ignore[union-attr]
        info[0], info[0, ..., : s.rows] = math.inf, lse * LOG2_E
        info[1, ..., : s.rows] = (out * trip(dout)).sum(-1)
        return come, info

    def descriptor(x: Tensor, shape: list[int], strides: list[int], block: list[int], _: Any) -> Any:
        assert shape == list(x.shape)
        assert all(step and step % 8 == 0 for size, step in zip(shape[:-1], strides, strict=False)), "TMA can read it"
        made = arithmetic.desc(x.as_strided(shape, strides), block[-1] if len(block) == 3 else block[2])
        made.layout = None
        return made

    def block(shape: list[int]) -> Place:
        made: Place = arithmetic.blocks(1, *shape).of[0]
        return made

    def launched(programs: int, *given: Any, num_warps: int, **of_plan: int) -> None:
        assert num_warps == 4
        assert of_plan == constants(p, s)
        near = max(1, 2 // p.sharing)  # pairs that two processors share
        assert given[17:-2] == s.sizes(p, of_keys=True, near=near)[:-2]
        for program in range(programs):
            with monkeypatch.context() as patch:
                machine = arithmetic.stand_in(patch, program, programs)
                shared_memory(patch, block)
                patch.setattr(kernel, "mask_scores_in_eights", lambda *x: (masked.append(x[2]), hidden(*x))[1])
                pointers = map(arithmetic.Pointer, given[10:15])
                run(KERNEL, patch, machine, block, given[:10], *pointers, *given[15:], **of_plan)

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return functools.partial(launched, *grid)

    out, lse = arithmetic.by_definition(s, *map(trip, tensors))[:2]
    heads = [quantized(*x) for x in zip((q, k, v), inverses[:3], strict=True)]
    with monkeypatch.context() as patch:
        patch.setattr(architecture, "processors", lambda _: 2)
        patch.setattr(_gluon_launch, "TensorDescriptor", descriptor)
        patch.setattr(launch, "quantize_dout", arriving)
        patch.setattr(launch, "fp8_attention_backward_gluon_kernel", Kernel())
        patch.setattr(torch, "empty_like", lambda x: torch.full_like(x, math.nan))
        gradients = launch.backward(dout, q, k, out, lse, tuple(heads), D, s.causal, 0.3, p)  # type: ignore[arg-type]
    assert sorted(masked) == sorted(arithmetic.partly_hidden(s)), "a loop that masks, then one that needs not ask"
    return list(gradients)


def check(
    p: Plan, s: Shape, tensors: list[Tensor], inverses: list[Tensor], monkeypatch: pytest.MonkeyPatch,
) -> list[Tensor]:  # fmt: skip
    """The gradients; dQ's sums are in float32, all else is not."""
    gradients, exact = differentiated(p, s, tensors, inverses, monkeypatch), definition(tensors, s.causal, 0.3)[1:]
    torch.testing.assert_close(gradients[0], exact[0], atol=1e-6 * exact[0].abs().max().clamp(1).item(), rtol=0)
    for found, right in zip(gradients[1:], exact[1:], strict=True):
        torch.testing.assert_close(found, right, atol=1e-9, rtol=0)
    return gradients


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("plan", PLANS)
def test_gradients_are_those_of_the_definition(plan: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s = SHAPES[shape]
    _, dk, dv = check(PLANS[plan], s, *drawn(s), monkeypatch)
    if s.causal:
        assert not dk[:, :, s.rows :].any(), "no row sees them"
        assert not dv[:, :, s.rows :].any(), "no row sees them"


@pytest.mark.parametrize("shape", ["full, tails", "tails, shared heads", "few rows"])
def test_where_scores_are_far_below_0(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 to the power of 0 - level is infinity, and so a key beyond the last one must not get there."""
    check(BACKWARD[True], SHAPES[shape], *drawn(SHAPES[shape], far=True), monkeypatch)


@pytest.mark.parametrize("which", range(4))
def test_a_scale_that_is_nan_makes_its_heads_nan_and_no_others(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the values or of dO: not dV."""
    s, p = SHAPES["tails, shared heads"], BACKWARD[True]
    tensors, inverses = drawn(s)
    before = differentiated(p, s, tensors, inverses, monkeypatch)
    inverses[which][1, 1] = math.nan
    of_rows = which in (0, 3)
    dq, dk, dv = (x.clone() for x in before)
    dq[1, [1] if of_rows else [2, 3]] = math.nan
    dk[1, 0 if of_rows else 1] = math.nan
    if which < 2:
        dv[1, 0 if of_rows else 1] = math.nan
    for found, right in zip(differentiated(p, s, tensors, inverses, monkeypatch), (dq, dk, dv), strict=True):
        torch.testing.assert_close(found, right, atol=1e-6, rtol=0, equal_nan=True)


def test_dout_may_be_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a sum is, which TMA cannot read."""
    s = Shape(2, 2, 1, 70, 70, True)
    tensors, inverses = drawn(s)
    tensors[3] = torch.ones(1, dtype=torch.float64).expand_as(tensors[3])
    check(BACKWARD[True], s, tensors, inverses, monkeypatch)


@pytest.mark.parametrize("causal", [False, True])
def test_a_plan_has_room(causal: bool) -> None:
    p = BACKWARD[causal]
    assert p.registers * p.warpgroups + p.fetching() <= p.at_start() * (p.warpgroups + 1)
    assert p.at_start() * 128 * (p.warpgroups + 1) <= OF_A_PROCESSOR
    held = 2 * p.warpgroups * 2 * ROWS * D  # keys; keys and values in FP8
    come = (
        p.slots * (2 * ROWS * D + 2 * 4 * ROWS) + p.stages * 2 * 2 * ROWS * D
    )  # of FP8 with level and delta; the others
    dscores = 2 * p.warpgroups * 2 * ROWS * ROWS
    assert held + come + dscores + 1024 <= SHARED
