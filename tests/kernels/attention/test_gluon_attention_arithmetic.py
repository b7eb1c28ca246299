"""What Gluon's attention computes: its own functions as Python threads, in float64, against the definition.

Layouts and instructions are the GPU's; which rows and keys, the masks, the scales and the order are here.
"""

import itertools
import math
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from barriers import ran
from gluon_machine import PARTS, ROWS, Machine, Place, Room, Shape
from torch import Tensor

from te_bench.kernels.attention.hopper import (
    backward_fused,
    backward_keys,
    backward_rows,
    forward,
    fp8_backward,
    fp8_forward,
    parts,
)
from te_bench.kernels.attention.hopper.backward_sums import attention_dq_of_sums_kernel, gluon_attention_delta_kernel
from te_bench.kernels.attention.hopper.launch import DELTA_ROWS, FUSED, LOG2_E, Plan, pad_last_rows
from te_bench.kernels.attention.portable.forward import row_strides

D = 64
#: fp8_forward's own functions that run as they are, but in Python.
FP8 = (
    "_fetch_values", "_quantize_p", "_sum_own_columns", "_update_softmax", "_store_out", "_skip_blocks", "_add_half",
    "_attend_block",
)  # fmt: skip


class Fragment(Tensor):
    type = types.SimpleNamespace(layout=None)  # type: ignore[assignment]


def fragment(x: Tensor) -> Any:
    return x.as_subclass(Fragment)


class Pointer:
    def __init__(self, of: Tensor, at: Any = 0) -> None:
        self.of, self.at = of, at

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.of, self.at + more)

    def load(self, there: Tensor | None = None, other: float = 0.0) -> Any:
        if there is None:
            return self.of.flatten()[self.at]
        at = torch.where(there, self.at, 0)
        return fragment(torch.where(there, self.of.flatten()[at], other))

    def store(self, x: Tensor, there: Tensor) -> None:
        self.of.view(-1)[self.at[there]] = x[there].as_subclass(Tensor).to(self.of.dtype)

    def add(self, x: Tensor) -> None:
        self.of.view(-1).index_add_(0, self.at.as_subclass(Tensor), x.as_subclass(Tensor).to(self.of.dtype))


class Block(Place):
    """In shared memory: a matrix."""

    turned = False

    def permute(self, _: Any) -> "Block":
        made = Block()
        made.holds = self.holds.mT
        return made

    def index(self, i: int) -> "Block":
        made = Block()
        made.holds = self.holds[i]
        return made

    def slice(self, first: int, count: int, dim: int) -> "Block":
        made = Block()
        made.holds = self.holds.narrow(dim, first, count)
        return made

    def load(self, _: Any) -> Any:
        return self.holds.clone()

    def store(self, x: Any) -> None:
        self.holds.copy_(x)


def blocks(count: int, rows: int, columns: int = D) -> Room:
    """What nobody has filled is NaN, so that a result of it shows."""
    made = [Block() for _ in range(count)]
    for block in made:
        block.holds = fragment(torch.full((rows, columns), math.nan, dtype=torch.float64))
    return Room(made, rows, columns)


def desc(of: Tensor, rows: int, columns: int | None = None) -> Any:
    shape = [1, 1, rows, columns or of.shape[-1]]
    return types.SimpleNamespace(of=of, name="", dtype=None, block_type=types.SimpleNamespace(shape=shape, nbytes=rows))


def fetched(desc: Any, at: list[Any]) -> Any:
    """A block, 0 where there is nothing; the last two sizes are rows and columns, or 2 and rows."""
    of, (_, _, rows, columns) = desc.of, desc.block_type.shape
    if of.dim() == 3:
        found = of[int(at[0])][:, at[2] : at[2] + rows]
        return fragment(torch.nn.functional.pad(found, (0, rows - found.shape[1])))
    found = of[int(at[0]), int(at[1]), at[2] : at[2] + rows, at[3] : at[3] + columns]
    return fragment(torch.nn.functional.pad(found, (0, 0, 0, rows - found.shape[0])))


def larger(x: Tensor, y: Tensor | float) -> Tensor:
    """As the GPU has it: of NaN and a number the number."""
    return torch.fmax(x, torch.as_tensor(y, dtype=x.dtype))


def packed(asm: str, x: Tensor) -> Any:
    """x as the instructions put each four of a thread into a register, but not rounded; cvt's second source is lower."""
    pairs = {name: (int(low), int(high)) for name, high, low in re.findall(r"cvt\S+ (\w+), \$(\d), \$(\d);", asm)}
    (halves,) = re.findall(r"mov\.b32 \$0, \{(\w+), (\w+)\};", asm)
    return x.unflatten(-1, (-1, 4))[..., [i - 1 for half in halves for i in pairs[half]]].flatten(-2)


def stand_in(monkeypatch: pytest.MonkeyPatch, program: int, programs: int) -> Machine:
    """The kernels' functions become Python's, on matrices."""
    machine = Machine("nobody")

    def load(desc: Any, at: list[Any], barrier: Any, place: Block) -> None:
        def landed() -> None:
            place.holds = fetched(desc, at)
            barrier.bytes -= desc.block_type.nbytes
            barrier.settle()

        machine.do(landed)

    def leave(desc: Any, at: list[Any], place: Block) -> None:
        there = desc.of[int(at[0]), int(at[1]), at[2] : at[2] + ROWS]
        there.copy_(place.holds[: there.shape[0]])

    def product(a: Any, b: Block, acc: Any, *, use_acc: bool = True, is_async: bool) -> Any:
        made = (a.holds if isinstance(a, Block) else a) @ b.holds
        return acc + made if use_acc else made

    language = types.SimpleNamespace(
        cdiv=lambda x, y: -(-x // y), program_id=lambda _: program, num_programs=lambda _: programs, static_range=range,
        NVMMADistributedLayout=lambda *args: types.SimpleNamespace(instr_shape=args[2]), float32=None, int64=torch.int64,
        zeros=lambda shape, *_: fragment(torch.zeros(shape, dtype=torch.float64)),
        SliceLayout=lambda *_: None, DotOperandLayout=lambda *_: None, SwizzledSharedLayout=lambda *_: None,
        BlockedLayout=lambda *_: None,
        arange=lambda a, b, _=None: fragment(torch.arange(a, b)), where=torch.where, sum=torch.sum, log2=torch.log2,
        full=lambda shape, value, *_: fragment(torch.full(shape, value, dtype=torch.float64)),
        max=lambda x, axis: larger(x, -math.inf).amax(axis), convert_layout=lambda x, *_, **__: x, maximum=larger,
        split=lambda x: x.unbind(-1), uint8=None, float8e4nv=None,
        inline_asm_elementwise=lambda asm, _, x, **__: types.SimpleNamespace(to=lambda *_, **__: packed(asm, *x)),
        reshape=torch.reshape, permute=torch.permute, atomic_add=lambda at, x, sem: machine.do(lambda: at.add(x)),
        store=lambda at, x, there: at.store(x, there), load=lambda at, *given: at.load(*given),
    )  # fmt: skip
    language.float32 = torch.float64
    barriers = types.SimpleNamespace(wait=machine.wait, arrive=machine.arrive, expect=machine.expect)
    copies = types.SimpleNamespace(
        async_copy_global_to_shared=load, async_copy_shared_to_global=leave, store_wait=lambda _: None
    )
    python = {name: getattr(parts, name).fn for name in (*PARTS, "mask_scores", "keep_positive")}
    tile = parts.pick_tile.fn
    same = {name: lambda x, *_: x for name in ("as_matrix", "_as_lines", "round_to", "as_operand", "hold_back")}
    values = {
        "gl": language, "mbarrier": barriers, "tma": copies, "ROWS": ROWS, "LN_2": math.log(2), "LOG2_E": LOG2_E,
        "LOWEST": parts.LOWEST.value, "BLOCK": 128, "OFFSET": fp8_forward.OFFSET.value,
        "pick_tile": lambda *args: (tile(*args)[0], torch.tensor(tile(*args)[1])), "exp2": torch.exp2,
        "spread_rows": lambda x, _: x[:, None], "sum_in_parts": lambda x: x.reshape(ROWS, -1, 8).sum(1),
        "warpgroup_mma": product, "warpgroup_mma_wait": lambda _, deps: deps[0] if len(deps) == 1 else deps,
        "fence_async_shared": lambda: None, "warpgroup_mma_init": lambda x: x,
    }  # fmt: skip
    own = {
        forward: ("_start_softmax", "_update_softmax", "_store_out", "_skip_blocks", "_multiply_qk", "_attend_block"),
        fp8_forward: FP8,
        backward_rows: ("_add_dq", "_sum_rows", "_load_lse_and_delta"),
        backward_keys: ("_add_dk_dv", "find_row_blocks"),
        backward_fused: (
            "_add_gradients",
            "find_row_blocks",
            "mask_scores_in_eights",
            "_flatten_dq",
            "find_dq_columns",
            "add_dq",
        ),
        fp8_backward: ("_add_gradients", "find_row_blocks", "mask_scores_in_eights", "find_dq_columns", "add_dq"),
    }
    for module in (parts, *own):
        for name, value in (values | python | same).items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
        for name in own.get(module, ()):
            monkeypatch.setattr(module, name, getattr(module, name).fn)
    return machine


SHAPES = {
    "whole": Shape(1, 2, 2, 256, 256, True),
    "full, tails": Shape(2, 1, 1, 200, 330, False),
    "tails, shared heads": Shape(2, 4, 2, 201, 201, True),
    "few keys": Shape(1, 2, 1, 300, 70, True),
    "few rows": Shape(1, 2, 2, 40, 300, True),
    "one of each": Shape(1, 1, 1, 1, 1, True),
    "many, whole tiles": Shape(1, 3, 1, 700, 640, True),
    "full, whole tiles": Shape(1, 2, 1, 150, 256, False),
}
FORWARD = {"4x64": Plan(4, 64, 4, 2, 112), "2x128": Plan(2, 128, 2, 2, 240, overlap=True)}
BACKWARD = {
    "64": (Plan(3, 64, 4, 2, 160), Plan(2, 64, 4, 2, 240, in_registers=True)),
    "128": (Plan(2, 128, 2, 1, 232), Plan(2, 32, 4, 2, 240))
}  # fmt: skip


def drawn(s: Shape, width: int = D) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((s.heads, s.rows), (s.kv_heads, s.keys), (s.kv_heads, s.keys), (s.heads, s.rows))
    return [torch.randn(s.batch, h, n, width, generator=generator, dtype=torch.float64) for h, n in sizes]


def with_infinite_keys(s: Shape, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Of every 7th key all scores are -inf, and those that no row sees are anything."""
    q, k = q.clone(), k.clone()
    q[..., 5], q[..., 9] = q[..., 5].abs() + 0.1, -q[..., 9].abs() - 0.1
    k[:, :, 3::14, 5], k[:, :, 10::14, 9] = -math.inf, math.inf
    if s.causal:
        k[:, :, s.rows :] = math.inf
    return q, k


def by_definition(s: Shape, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """out, lse, dq, dk, dv, of scale 0.3."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    scores = 0.3 * q @ k.repeat_interleave(s.group, 1).mT
    if s.causal:
        scores = scores.masked_fill(torch.arange(s.keys) > torch.arange(s.rows)[:, None], -math.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(s.group, 1)
    return [out.detach(), scores.detach().logsumexp(-1), *torch.autograd.grad(out, (q, k, v), dout)]


def both_programs(call: Callable[[pytest.MonkeyPatch, int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    for program in range(2):
        with monkeypatch.context() as patch:
            call(patch, program)


def edge(s: Shape, p: Plan) -> bool:
    """As the launcher says it."""
    return s.causal or s.keys % p.at_once != 0


def attended(
    p: Plan, s: Shape, q: Tensor, k: Tensor, v: Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """out and lse, by the kernel's programs in turn."""
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:3], math.nan, dtype=torch.float64)

    def program(patch: pytest.MonkeyPatch, which: int) -> None:
        machine = stand_in(patch, which, 2)
        n, held = p.at_once, p.warpgroups * p.slots
        shared = blocks(held, ROWS), blocks(p.stages, n), blocks(p.stages, n)
        counts = (
            (held, 1),
            (held, 1),
            (p.stages, 1),
            (p.stages, p.warpgroups),
            (p.stages, 1),
            (p.stages, p.warpgroups),
        )
        gates = tuple(itertools.starmap(machine.barriers, (*counts, (p.warpgroups, 1))))
        sizes, common = s.sizes(p, of_keys=False, near=2), (p.warpgroups, p.slots, p.stages, s.causal)
        given = (desc(q, ROWS), desc(k, n), desc(v, n), shared, gates, sizes)
        made = (desc(out, ROWS), shared, gates, sizes, Pointer(lse), 0.3 * LOG2_E)
        calls = {"fetch": lambda: forward._fetch.fn(given, *common)}
        constants = (*common, edge(s, p), p.overlap)
        for who in range(p.warpgroups):
            calls[str(who)] = lambda who=who: forward._attend.fn(made, who, *constants)  # type: ignore[misc]
        ran(machine, calls)

    both_programs(program, monkeypatch)
    return out, lse


@pytest.mark.parametrize("infinite", [False, True], ids=["", "infinite keys"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("plan", FORWARD)
def test_forward(plan: str, shape: str, infinite: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinite keys: row 192 sees, of the block that it begins with, key 192 alone, whose score is -inf."""
    s = SHAPES[shape]
    q, k, v, dout = drawn(s)
    if infinite:
        q, k = with_infinite_keys(s, q, k)
    out, lse = attended(FORWARD[plan], s, q, k, v, monkeypatch)
    expected = by_definition(s, q, k, v, dout)
    torch.testing.assert_close(out, expected[0], atol=1e-9, rtol=0)
    torch.testing.assert_close(lse, expected[1], atol=1e-9, rtol=0)


@pytest.mark.parametrize("plan", FORWARD)
def test_a_row_whose_scores_are_all_minus_infinity_is_nan(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its lse, by which the backward passes make their weights."""
    s = SHAPES["tails, shared heads"]
    q, k, v, _ = drawn(s)
    q[..., 5] = q[..., 5].abs() + 0.1
    k[:, :, :100, 5] = -math.inf
    out, lse = attended(FORWARD[plan], s, q, k, v, monkeypatch)
    for x in (out, lse):
        assert x[:, :, :100].isnan().all()
        assert x[:, :, 100:].isfinite().all()


def gates_of(machine: Machine, p: Plan) -> tuple[Room, ...]:
    """Of the backward kernels."""
    held = p.warpgroups * p.slots
    return tuple(itertools.starmap(machine.barriers, ((held, 1), (held, 1), (p.stages, 1), (p.stages, p.warpgroups))))


@pytest.mark.parametrize("infinite", [False, True], ids=["", "infinite keys"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("plans", BACKWARD)
def test_backward(plans: str, shape: str, infinite: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (of_rows, of_keys), s = BACKWARD[plans], SHAPES[shape]
    q, k, v, dout = drawn(s)
    if infinite:
        q, k = with_infinite_keys(s, q, k)
    out, lse, *expected = by_definition(s, q, k, v, dout)
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
    padded = -(-s.rows // ROWS) * ROWS
    info = torch.full((s.batch * s.heads, 2, padded), math.nan, dtype=torch.float64)

    def rows(patch: pytest.MonkeyPatch, which: int) -> None:
        machine, p = stand_in(patch, which, 2), of_rows
        held, n = p.warpgroups * p.slots, p.at_once
        shared = *(blocks(held, ROWS) for _ in range(3)), *(blocks(p.stages, n) for _ in range(2))
        gates, sizes = gates_of(machine, p), s.sizes(p, of_keys=False, near=2)
        given = (*(desc(x, ROWS) for x in (q, dout, out)), desc(k, n), desc(v, n), shared, gates, sizes)
        made = (desc(dq, ROWS), shared, gates, sizes, Pointer(lse), Pointer(info), padded, 0.3 * LOG2_E)
        common = p.warpgroups, p.slots, p.stages, s.causal
        calls = {"fetch": lambda: backward_rows._fetch_keys.fn(given, *common)}
        for who in range(p.warpgroups):
            calls[str(who)] = lambda who=who: backward_rows._make_dq.fn(made, who, *common, edge(s, p))  # type: ignore[misc]
        ran(machine, calls)

    def keys(patch: pytest.MonkeyPatch, which: int) -> None:
        machine, p = stand_in(patch, which, 2), of_keys
        held, n = p.warpgroups * p.slots, p.at_once
        shared = *(blocks(held, ROWS) for _ in range(2)), *(blocks(p.stages, n) for _ in range(3))
        gates, sizes = gates_of(machine, p), s.sizes(p, of_keys=True, near=2)
        come = (desc(x, n) for x in (q, pad_last_rows(q), dout, info))
        given = (desc(k, ROWS), desc(v, ROWS), *come, shared, gates, sizes)
        made = (desc(dk, ROWS), desc(dv, ROWS), shared, gates, sizes, 0.3 * LOG2_E)
        common = p.warpgroups, p.slots, p.stages, s.causal
        calls = {"fetch": lambda: backward_keys.fetch_rows.fn(given, *common)}
        for who in range(p.warpgroups):
            calls[str(who)] = lambda who=who: backward_keys._make_dk_dv.fn(made, who, *common, p.in_registers)  # type: ignore[misc]
        ran(machine, calls)

    both_programs(rows, monkeypatch)
    assert not info.isnan().any()
    both_programs(keys, monkeypatch)
    for made, exact in list(zip((dq, dk, dv), expected, strict=True))[infinite:]:  # dQ is 0 x infinity
        torch.testing.assert_close(made, exact, atol=1e-9, rtol=0)


def partly_hidden(s: Shape) -> list[int]:
    """The blocks of rows, of each of two warpgroups and each head, of which a tile of 128 keys may be partly hidden."""
    found, end = list[int](), -(-s.rows // ROWS) * ROWS
    for first in range(0, s.keys, 2 * ROWS):
        begin = min(first, s.rows - 1) // ROWS * ROWS if s.causal else 0
        edge = end if first + 2 * ROWS > s.keys else min(first + 2 * ROWS, end) if s.causal else begin
        found += list(range(begin, edge, ROWS)) * 2 * s.batch * s.heads
    return found


@pytest.mark.parametrize("scores", ["near", "far below 0", "infinite keys"])
@pytest.mark.parametrize("shape", SHAPES)
def test_backward_by_one_kernel(shape: str, scores: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """far: 2 to the power of 0 - level is infinity, and so a key beyond the last one must not get there."""
    s, far, infinite = SHAPES[shape], scores == "far below 0", scores == "infinite keys"
    q, k, v, dout = drawn(s)
    if far:
        q, k = q.abs() + 8, -k.abs() - 8
    if infinite:
        q, k = with_infinite_keys(s, q, k)
    out, lse, *expected = by_definition(s, q, k, v, dout)
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
    padded = -(-s.rows // ROWS) * ROWS
    info = torch.full((2, s.batch * s.heads, padded), math.nan, dtype=torch.float64)
    sums = torch.full((s.batch * s.heads, padded, D), math.nan, dtype=torch.float64)
    grid, common = (s.batch * s.heads * padded // ROWS,), (s.heads, s.rows, padded)
    gluon_attention_delta_kernel[(grid[0] * ROWS // DELTA_ROWS,)](
        out, dout, lse, *info.unbind(), sums, *row_strides(out, dout), *common, D=D, BLOCK_M=DELTA_ROWS
    )
    assert not sums.any()

    masked: list[int] = []

    def program(patch: pytest.MonkeyPatch, which: int) -> None:
        machine = stand_in(patch, which, 2)
        hidden = backward_fused.mask_scores_in_eights
        patch.setattr(
            backward_fused, "mask_scores_in_eights", lambda *given: (masked.append(given[2]), hidden(*given))[1]
        )
        held, n, p = 2, ROWS, FUSED[128, s.causal]
        shared = *(blocks(held, ROWS) for _ in range(2)), *(blocks(p.stages, n) for _ in range(3))
        gates, sizes = gates_of(machine, p), s.sizes(p, of_keys=True, near=2)
        given, over = machine.barriers(2, p.warpgroups), machine.barriers(1, p.warpgroups).index(0)
        come = (desc(x, n) for x in (q, pad_last_rows(q), dout, info.transpose(0, 1)))
        fetched = (desc(k, ROWS), desc(v, ROWS), *come, shared, gates, sizes)
        made = (
            desc(dk, ROWS), desc(dv, ROWS), shared, blocks(2 * p.warpgroups, ROWS), gates, given, over, sizes, Pointer(sums),
            padded, 0.3 * LOG2_E,
        )  # fmt: skip
        calls = {"fetch": lambda: backward_keys.fetch_rows.fn(fetched, p.warpgroups, 1, p.stages, s.causal)}
        edges = s.causal or s.keys % (2 * ROWS) != 0
        for who in range(p.warpgroups):
            calls[str(who)] = lambda who=who: backward_fused._make_gradients.fn(made, who, 2, p.stages, s.causal, edges)  # type: ignore[misc]
        ran(machine, calls)

    both_programs(program, monkeypatch)
    assert sorted(masked) == sorted(partly_hidden(s))
    attention_dq_of_sums_kernel[grid](sums, dq, *row_strides(dq), 0.3, *common, D=D)
    of_float32 = 1e-4 if far else 1e-5  # levels, delta and the scale are
    for found, exact in list(zip((dq, dk, dv), expected, strict=True))[infinite:]:
        torch.testing.assert_close(found, exact, atol=of_float32, rtol=0)
