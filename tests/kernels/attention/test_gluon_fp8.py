"""Gluon's FP8 attention without a GPU: who waits for whom, what it computes in float64, where it is chosen.

test_gluon_attention_barriers says what may not happen, test_gluon_attention_arithmetic what is the GPU's.
"""

import functools
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import test_gluon_attention_arithmetic as arithmetic
import test_gluon_attention_barriers as waiting
import torch
from barriers import ran
from fp8_definition import slots
from gluon_machine import ROWS, Machine, Number, Place, Room, Shape, Sum
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.attention.backends import triton_fp8
from te_bench.kernels.attention.fp8_quantize import Heads
from te_bench.kernels.attention.hopper import fp8_forward as kernel
from te_bench.kernels.attention.hopper import fp8_launch as launch
from te_bench.kernels.attention.hopper import launch as _gluon_launch
from te_bench.kernels.attention.hopper.fp8_launch import FORWARD
from te_bench.kernels.attention.hopper.launch import REGISTERS as OF_A_PROCESSOR
from te_bench.kernels.attention.hopper.launch import Plan
from te_bench.kernels.attention.portable import fp8_backward, fp8_forward

D = 128
SHARED = 227 * 1024
PLANS = {"shipped": FORWARD, "64 keys": Plan(3, 64, 4, 2, 160), "few places": Plan(3, 128, 2, 1, 160)}


def run(
    entry: Any, monkeypatch: pytest.MonkeyPatch, machine: Machine, room: Callable[[list[int]], Place], descriptors: Any,
    *given: Any, **constants: int,
) -> None:  # fmt: skip
    """One of a kernel's programs, that which the machine stands in for; constants: the kernel's."""
    module = sys.modules[entry.fn.__module__]

    def specialize(parts: list[Any], warps: list[int], registers: list[int]) -> None:
        assert warps == [4] * (len(parts) - 2) + [1], "the last one fetches"
        assert registers == [constants["REGISTERS"]] * (len(parts) - 2) + [constants["FETCHING"]]
        names = [*map(str, range(len(parts) - 1)), "fetch"]
        ran(
            machine,
            {name: functools.partial(call.fn, *given) for name, (call, given) in zip(names, parts, strict=True)},
        )

    def rooms(desc: Any, count: int) -> Room:
        shape = desc.block_type.shape
        return Room([room(shape[2:]) for _ in range(count)], *shape[2:])

    module.gl.warp_specialize, module.gl.static_assert = specialize, lambda _: None
    monkeypatch.setattr(module, "allocate", rooms)
    monkeypatch.setattr(module, "make_barriers", machine.barriers)
    entry.fn(*descriptors, *given, **constants)


def constants(p: Plan, *, causal: bool, edge: bool) -> dict[str, int]:
    return {
        "CONSUMERS": p.warpgroups, "SLOTS": p.slots, "STAGES": p.stages, "REGISTERS": p.registers, "FETCHING": p.fetching(),
        "CAUSAL": causal, "EDGE": edge,
    }  # fmt: skip


# Who waits for whom


class Index(int):
    def to(self, _: Any) -> "Index":
        return self


@pytest.mark.parametrize("slow", [*waiting.SLOW, "2", "q"])
@pytest.mark.parametrize("shape", waiting.SHAPES)
@pytest.mark.parametrize("plan", PLANS)
def test_each_tile_is_of_its_own_rows_and_keys(
    plan: str, shape: str, slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, s, found = PLANS[plan], waiting.SHAPES[shape], list[Any]()
    for program in range(2):
        with monkeypatch.context() as patch:
            found += left_by(p, s, slow, patch, program)
    expected = []
    for b, h, row in itertools.product(range(s.batch), range(s.heads), range(0, s.rows, ROWS)):
        kv, products = h // s.group, list[Any]()
        for key in s.keys_of(row, p.at_once):
            weights = ((("q", b, h, row, 0),), ("k", b, kv, key, 0))
            products.append(((weights,), ("v", b, kv, key // 128 * D, key % 128)))
        expected.append((b, h, row, tuple(products), tuple(products)))
    assert sorted(found) == sorted(expected)


def left_by(p: Plan, s: Shape, slow: str, monkeypatch: pytest.MonkeyPatch, program: int) -> list[Any]:
    """What one of two programs leaves: sequence, head, row, and the products of weights with each half of the values."""
    machine, found, places, stored = Machine(slow), list[Any](), list[Place](), dict[Place, list[Any]]()
    waiting.stand_in(machine, monkeypatch, program, 2)
    tile = kernel.pick_tile

    def room(_: list[int]) -> Place:
        places.append(Place())
        return places[-1]

    def store(place: Place, x: Sum) -> None:
        assert not place.leaving, "written while a store reads it"
        stored.setdefault(place, []).append(x.done())
        machine.own.seen = False

    def leave(_: Any, at: list[int], place: Place) -> None:
        assert machine.own.seen, "TMA may read what was there before"
        machine.leave(place)
        halves, (b, h, row, column) = stored.pop(place), at
        assert column == 0
        if row < s.rows:
            machine.do(lambda: found.append((b, h, row, *halves)))

    for name in ("load", "max", "sum", "log2", "convert_layout", "full"):
        setattr(kernel.gl, name, lambda *_, **__: Number())
    kernel.gl.store, kernel.gl.int64 = (lambda *_: None), None
    kernel.tma.async_copy_shared_to_global = leave
    stubs: dict[str, Any] = {
        "as_matrix": lambda x: x, "_as_lines": lambda x: x, "_quantize_p": lambda x, _: x,
        "_sum_own_columns": lambda _: Number(),
        "_update_softmax": lambda x, *_: (Sum(x.done()), Number(), Number(), Number()),
        "pick_tile": lambda *given: tuple(map(Index, tile(*given))),
        "fence_async_shared": lambda: setattr(machine.own, "seen", True),
    }  # fmt: skip
    for name, stub in stubs.items():
        monkeypatch.setattr(kernel, name, stub)
    monkeypatch.setattr(Place, "store", store)
    descriptors = [waiting.desc(*x) for x in (("q", ROWS), ("k", p.at_once), ("v", D), ("out", ROWS))]
    sizes, common = s.sizes(p, of_keys=False, near=2), constants(p, causal=s.causal, edge=True)
    entry = kernel.fp8_attention_forward_gluon_kernel
    run(entry, monkeypatch, machine, room, descriptors, *[Number()] * 4, 1.0, *sizes, **common)
    assert not any(place.leaving for place in places), "gone before a store has read it"
    return found


# What it computes


PLACES = {"shipped": FORWARD, "few places": PLANS["few places"], "many places": Plan(3, 128, 5, 3, 160)}
SHAPES = arithmetic.SHAPES | {"more tiles than programs": Shape(2, 4, 2, 450, 450, True)}


def drawn(s: Shape) -> tuple[list[Tensor], list[Tensor]]:
    """q, k, v as FP8 has them, and what one is of each head."""
    tensors = arithmetic.drawn(s, D)[:3]
    sizes = [(by, x.shape[:2]) for by, x in zip((0.2, 0.9, 3), tensors, strict=True)]
    return tensors, [by * torch.linspace(1.5, 0.5, b * h, dtype=torch.float64).view(b, h) for by, (b, h) in sizes]


def quantized(x: Tensor, inverse: Tensor) -> Heads:
    """As the quantiser leaves it, but in float64: padded with zeros, and transposed."""
    data = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % 128))
    return Heads(data, data[:, :, slots(data.shape[2])].unflatten(2, (-1, 128)).mT.contiguous(), inverse)


def attended(
    p: Plan, s: Shape, tensors: list[Tensor], inverses: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """out and lse, launched on two processors: float64, and float32; what nobody writes is NaN."""

    def descriptor(x: Tensor, shape: list[int], strides: list[int], block: list[int], _: Any) -> Any:
        return arithmetic.desc(x.as_strided(shape, strides), *block[2:])

    def block(shape: list[int]) -> Place:
        made: Place = arithmetic.blocks(1, *shape).of[0]
        return made

    def launched(programs: int, *given: Any, num_warps: int, **of_plan: int) -> None:
        assert num_warps == 4
        assert of_plan == constants(p, causal=s.causal, edge=arithmetic.edge(s, p))
        pairs = s.batch * s.heads
        assert given[9:-2] == s.sizes(p, of_keys=False, near=pairs)[:-2], (
            "as many tiles as there are, the heaviest first"
        )
        pointers = [arithmetic.Pointer(x) for x in given[4:8]]
        for program in range(programs):
            with monkeypatch.context() as patch:
                machine = arithmetic.stand_in(patch, program, programs)
                run(entry, patch, machine, block, given[:4], *pointers, *given[8:], **of_plan)

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return functools.partial(launched, *grid)

    entry = kernel.fp8_attention_forward_gluon_kernel
    heads = [quantized(*x) for x in zip(tensors, inverses, strict=True)]
    unwritten = functools.partial(torch.full, fill_value=math.nan)
    with monkeypatch.context() as patch:
        patch.setattr(architecture, "processors", lambda _: 2)
        patch.setattr(_gluon_launch, "TensorDescriptor", descriptor)
        patch.setattr(launch, "fp8_attention_forward_gluon_kernel", Kernel())
        patch.setattr(torch, "empty", lambda *sizes, **options: unwritten(sizes, **options))
        return launch.forward(*heads, (s.rows, s.keys), D, torch.float64, s.causal, 0.3, p)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("plan", PLACES)
def test_out_and_lse_are_those_of_the_definition(plan: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s = SHAPES[shape]
    tensors, inverses = drawn(s)
    out, lse = attended(PLACES[plan], s, tensors, inverses, monkeypatch)
    q, k, v = (x * inverse[..., None, None] for x, inverse in zip(tensors, inverses, strict=True))
    exact, of_rows, *_ = arithmetic.by_definition(s, q, k, v, torch.zeros_like(q))
    torch.testing.assert_close(out, exact, atol=1e-9, rtol=0)
    torch.testing.assert_close(lse, of_rows.float(), atol=2e-6, rtol=0)


@pytest.mark.parametrize("which", range(3))
def test_a_scale_that_is_nan_makes_its_heads_nan_and_no_others(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the values: not lse."""
    s = SHAPES["tails, shared heads"]
    tensors, inverses = drawn(s)
    before = attended(FORWARD, s, tensors, inverses, monkeypatch)
    inverses[which][1, 1] = math.nan
    heads = [1] if which == 0 else [2, 3]
    for i, (x, y) in enumerate(zip(before, attended(FORWARD, s, tensors, inverses, monkeypatch), strict=True)):
        expected = x.clone()
        if i == 0 or which < 2:
            expected[1, heads] = math.nan
        torch.testing.assert_close(y, expected, atol=0, rtol=0, equal_nan=True)


def test_scales_whose_product_is_0_leave_equal_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """And hidden scores hidden: 0 times -inf is NaN."""
    s = SHAPES["tails, shared heads"]
    tensors, inverses = drawn(s)
    out, lse = attended(FORWARD, s, tensors, [0 * inverses[0], *inverses[1:]], monkeypatch)
    q, k, v = tensors[0] * 0, tensors[1], tensors[2] * inverses[2][..., None, None]
    exact, of_rows, *_ = arithmetic.by_definition(s, q, k, v, torch.zeros_like(q))
    torch.testing.assert_close(out, exact, atol=1e-9, rtol=0)
    torch.testing.assert_close(lse, of_rows.float(), atol=2e-6, rtol=0)


# Where it is chosen


@pytest.mark.parametrize(
    ("changes", "gluon"),
    [
        ({}, True),
        ({"width": 64}, False),
        ({"features": 64}, False),
        ({"width": 64, "features": 64}, False),
        ({"device": "cpu"}, False),
        ({"capability": (8, 9)}, False),
        ({"capability": (10, 0)}, False),
        ({"missing": "no Gluon"}, False),
        ({"interpret": True}, False),
    ],
    ids=str,
)
def test_where_it_is(changes: dict[str, Any], gluon: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "width": 128, "features": 128, "device": "cuda", "capability": (9, 0), "missing": None, "interpret": False,
    } | changes  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: given["capability"])
    monkeypatch.setattr(triton_fp8, "MISSING", given["missing"])
    monkeypatch.setattr(triton_fp8.triton.knobs.runtime, "interpret", given["interpret"])
    monkeypatch.setattr(triton_fp8, "_has_gluon", triton_fp8._has_gluon.__wrapped__)  # it remembers each device

    class There(Tensor):
        device = torch.device(given["device"])  # type: ignore[assignment]

    assert triton_fp8._in_gluon(torch.empty(1, 2, 5, given["width"]).as_subclass(There), given["features"]) is gluon


def test_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "processors", lambda _: 132)
    for sizes, pays in (((1, 22, 1024), True), ((1, 21, 1024), False), ((64, 64, 511), False), ((8, 32, 512), True)):
        assert launch.forward_pays(torch.empty(*sizes, 0)) is pays, sizes
    for rows, keys, pays in ((1, 256, True), (4096, 255, False), (2**24 - 64, 256, True), (2**24 - 63, 256, False)):
        given = torch.empty(1, 1, rows, 0), torch.empty(1, 1, keys, 0)
        assert launch.backward_pays(*given) is pays, (rows, keys)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("pays", [False, True])
def test_who_is_chosen(pays: bool, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gluon's forward pass has the same bits in every run, its backward pass has not."""
    ran = list[str]()
    monkeypatch.setattr(triton_fp8, "_in_gluon", lambda *_: True)
    for name in ("forward", "backward"):
        monkeypatch.setattr(launch, f"{name}_pays", lambda *_: pays)
        monkeypatch.setattr(launch, name, lambda *_, name=name: (ran.append(f"Gluon's {name}"), (None, None))[1])
    monkeypatch.setattr(fp8_forward, "forward", lambda *_: (ran.append("Triton's forward"), (None, None))[1])
    monkeypatch.setattr(fp8_backward, "backward", lambda *_: ran.append("Triton's backward"))
    q = torch.empty(1, 1, 5, 128)
    monkeypatch.setattr(triton_fp8.fp8_quantize, "quantize", lambda *_, keep: [Heads(q, q, q)] * 3)
    triton_fp8._forward(q, q, q, True, 1.0, True)
    triton_fp8._backward(*[q] * 11, True, 1.0, True, deterministic)
    whose = ["Gluon" if pays else "Triton", "Gluon" if pays and not deterministic else "Triton"]
    assert ran == [f"{whose[0]}'s forward", f"{whose[1]}'s backward"]


def test_a_plan_has_room() -> None:
    p = FORWARD
    assert p.at_start() * 128 * (p.warpgroups + 1) <= OF_A_PROCESSOR
    assert p.registers * p.warpgroups + p.fetching() <= p.at_start() * (p.warpgroups + 1)
    rows, come = p.warpgroups * (p.slots + 2) * 64 * D, 2 * p.stages * p.at_once * D  # of q and out; of k and v
    assert rows + come + 1024 <= SHARED
