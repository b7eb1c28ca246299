"""What Gluon's attention computes, by its launchers: its own functions as Python threads, in float64, by the definition.

Layouts and instructions are the GPU's; which rows and keys, the masks, the scales and the order are here.
"""

import contextlib
import functools
import math
import re
import types
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from fp8_definition import definition, slots, trip
from gluon_machine import ROWS, Machine, Place, Shape, in_python
from torch import Tensor
from triton.runtime.jit import JITFunction

from te_bench.kernels import architecture
from te_bench.kernels.attention import autograd
from te_bench.kernels.attention.fp8_quantize import Heads
from te_bench.kernels.attention.hopper import backward_fused, fp8_launch, launch, parts
from te_bench.kernels.attention.hopper.launch import LOG2_E, Tiling

D = 128
SCALE = 0.3


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
    """In shared memory: a matrix; what nobody has filled is NaN, so that a result of it shows."""

    def __init__(self, holds: Any) -> None:
        super().__init__()
        self.holds = holds

    def permute(self, _: Any) -> "Block":
        return Block(self.holds.mT)

    def index(self, i: int) -> "Block":
        return Block(self.holds[i])

    def _reinterpret(self, _: Any, shape: list[int], __: Any) -> "Block":
        return self if list(self.holds.shape) == shape else Block(self.holds.view(shape))

    def slice(self, first: int, count: int, dim: int) -> "Block":
        return Block(self.holds.narrow(dim, first, count))

    def load(self, _: Any) -> Any:
        return self.holds.clone()

    def store(self, x: Any) -> None:
        self.holds.copy_(x)


def block(shape: list[int]) -> Block:
    return Block(fragment(torch.full(shape, math.nan, dtype=torch.float64)))


def fetched(desc: Any, at: list[Any]) -> Any:
    """A block, 0 where there is nothing; the last two sizes are rows and columns, or 2 and rows."""
    of, (*_, rows, columns) = desc.of, desc.block_type.shape
    if of.dim() == 3:
        found = of[int(at[0])][:, at[2] : at[2] + columns]
        return fragment(torch.nn.functional.pad(found, (0, columns - found.shape[1])))
    found = of[int(at[0]), int(at[1]), at[2] : at[2] + rows, at[3] : at[3] + columns]
    return fragment(torch.nn.functional.pad(found, (0, 0, 0, rows - found.shape[0])))


class Calculator(Machine):
    """Products and copies of numbers, at once."""

    def load(self, desc: Any, at: list[Any], barrier: Any, place: Any) -> None:
        def landed() -> None:
            place.holds = fetched(desc, at)
            barrier.bytes -= desc.block_type.nbytes
            barrier.settle()

        self.do(landed)

    def leave(self, desc: Any, at: list[Any], place: Any) -> None:
        there = desc.of[int(at[0]), int(at[1]), at[2] : at[2] + ROWS]
        there.copy_(place.holds[: there.shape[0]])

    def add(self, desc: Any, at: list[Any], place: Any) -> None:
        self.do(lambda: desc.of[int(at[0])].add_(place.holds))

    def multiply(self, a: Any, b: Any, acc: Any, *, use_acc: bool = True, is_async: bool) -> Any:
        made = (a.holds if isinstance(a, Block) else a) @ b.holds
        return acc + made if use_acc else made

    def finish(self, pending: int, deps: tuple[Any, ...]) -> Any:
        return deps[0] if len(deps) == 1 else deps

    def store_wait(self, pending: int) -> None:
        pass


def larger(x: Tensor, y: Tensor | float) -> Tensor:
    """As the GPU has it: of NaN and a number the number."""
    return torch.fmax(x, torch.as_tensor(y, dtype=x.dtype))


def packed(asm: str, x: Tensor) -> Any:
    """x as the instructions put each four of a thread into a register, but not rounded; cvt's second source is lower."""
    pairs = {name: (int(low), int(high)) for name, high, low in re.findall(r"cvt\S+ (\w+), \$(\d), \$(\d);", asm)}
    (halves,) = re.findall(r"mov\.b32 \$0, \{(\w+), (\w+)\};", asm)
    return x.unflatten(-1, (-1, 4))[..., [i - 1 for half in halves for i in pairs[half]]].flatten(-2)


def words(machine: Machine) -> dict[str, Any]:
    """Of Gluon's language."""
    return {
        "float32": torch.float64, "int64": torch.int64, "where": torch.where, "sum": torch.sum, "log2": torch.log2,
        "reshape": torch.reshape, "permute": torch.permute, "maximum": larger, "split": lambda x: x.unbind(-1),
        "zeros": lambda shape, *_: fragment(torch.zeros(shape, dtype=torch.float64)),
        "full": lambda shape, value, *_: fragment(torch.full(shape, value, dtype=torch.float64)),
        "arange": lambda a, b, _=None: fragment(torch.arange(a, b)), "convert_layout": lambda x, *_, **__: x,
        "max": lambda x, axis: larger(x, -math.inf).amax(axis),
        "inline_asm_elementwise": lambda asm, _, x, **__: types.SimpleNamespace(to=lambda *_, **__: packed(asm, *x)),
        "store": lambda at, x, there: at.store(x, there), "load": lambda at, *given: at.load(*given),
        "atomic_add": lambda at, x, sem: machine.do(lambda: at.add(x)),
    }  # fmt: skip


class Processors:
    """In place of two processors, and of torch for the launchers: what they hold in float32 is float64."""

    float32 = torch.float64
    cuda = types.SimpleNamespace(device_of=lambda _: contextlib.nullcontext())

    def __init__(self) -> None:
        self.masked = list[int]()  # rows of blocks that were asked which keys they see
        self.edges = set[bool]()  # as the launchers say it

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def descriptor(self, x: Tensor, shape: list[int], strides: list[int], block: list[int], _: Any) -> Any:
        assert shape == list(x.shape)
        assert all(step and step % 8 == 0 for size, step in zip(shape[:-1], strides, strict=False)), "TMA can read it"
        of = types.SimpleNamespace(shape=block, nbytes=math.prod(block))
        return types.SimpleNamespace(of=x.as_strided(shape, strides), dtype=None, layout=None, block_type=of)

    def launcher(self, entry: Any) -> Any:
        """kernel[(programs,)](...), one program after the other."""

        def run(programs: int, *given: Any, num_warps: int, **constants: Any) -> None:
            assert num_warps == 4
            self.edges |= {constants["EDGE"]} if "EDGE" in constants else set()
            tile, hidden = parts.pick_tile.fn, backward_fused.mask_scores_in_eights.fn
            stubs = {
                "pick_tile": lambda *args: (tile(*args)[0], torch.tensor(tile(*args)[1])), "exp2": torch.exp2,
                "spread_rows": lambda x, _: x[:, None], "sum_in_parts": lambda x: x.reshape(ROWS, -1, 8).sum(1),
                "mask_scores_in_eights": lambda *x: (self.masked.append(x[2]), hidden(*x))[1],
            }  # fmt: skip
            given = tuple(Pointer(x) if isinstance(x, Tensor) else x for x in given)
            for program in range(programs):
                with pytest.MonkeyPatch.context() as patch:
                    machine = Calculator()
                    in_python(patch, machine, block, program, programs, words(machine), stubs)
                    entry.fn(*given, **constants)

        kernel = MagicMock()
        kernel.__getitem__.side_effect = lambda grid: functools.partial(run, *grid)
        return kernel


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Processors]:
    """Two; memory that nobody writes is NaN."""
    made = Processors()
    for module in (launch, fp8_launch, autograd):
        monkeypatch.setattr(module, "torch", made)
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction) and value.is_gluon():
                monkeypatch.setattr(module, name, made.launcher(value))
    monkeypatch.setattr(architecture, "processors", lambda _: 2)
    monkeypatch.setattr(launch, "TensorDescriptor", made.descriptor)
    monkeypatch.setattr(launch, "LONG", 0)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield made
    torch.use_deterministic_algorithms(before)


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
BEYOND = {"keys that no row sees": Shape(2, 4, 2, 201, 500, True)}
#: Where blocks end among rows or keys.
PARTS = "full, tails", "tails, shared heads", "few rows"
INFINITE = [*((shape, False) for shape in SHAPES), *((shape, True) for shape in (*PARTS, "few keys"))]
OTHER_PLAN = "tails, shared heads", "many, whole tiles"


def drawn(s: Shape, width: int = D) -> list[Tensor]:
    """q, k, v, dout; whose rows lie as a projection leaves them."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((s.heads, s.rows), (s.kv_heads, s.keys), (s.kv_heads, s.keys), (s.heads, s.rows))
    made = [torch.randn(s.batch, n, h, width, generator=generator, dtype=torch.float64) for h, n in sizes]
    return [x.transpose(1, 2) for x in made]


def with_infinite_keys(s: Shape, q: Tensor, k: Tensor) -> None:
    """Of every 7th key all scores are -inf, and those that no row sees are anything."""
    q[..., 5], q[..., 9] = q[..., 5].abs() + 0.1, -q[..., 9].abs() - 0.1
    k[:, :, 3::14, 5], k[:, :, 10::14, 9] = -math.inf, math.inf
    if s.causal:
        k[:, :, s.rows :] = math.inf


def by_definition(s: Shape, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """out, lse, dq, dk, dv."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    scores = SCALE * q @ k.repeat_interleave(s.group, 1).mT
    if s.causal:
        scores = scores.masked_fill(torch.arange(s.keys) > torch.arange(s.rows)[:, None], -math.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(s.group, 1)
    return [out.detach(), scores.detach().logsumexp(-1), *torch.autograd.grad(out, (q, k, v), dout)]


def assert_close(found: Any, exact: Any, atol: float = 1e-9) -> None:
    for x, y in zip(found, exact, strict=True):
        torch.testing.assert_close(x, y, atol=atol, rtol=0)


@pytest.mark.parametrize(("shape", "infinite"), INFINITE)
@pytest.mark.parametrize("width", [64, 128])
def test_forward(width: int, shape: str, infinite: bool, processors: Processors) -> None:
    """Infinite keys: row 192 sees, of the block that it begins with, key 192 alone, whose score is -inf."""
    s = SHAPES[shape]
    q, k, v, dout = drawn(s, width)
    if infinite:
        with_infinite_keys(s, q, k)
    assert_close(launch.forward(q, k, v, s.causal, SCALE), by_definition(s, q, k, v, dout)[:2])
    assert processors.edges == {s.causal or s.keys % launch.FORWARD[width].at_once != 0}


@pytest.mark.parametrize("width", [64, 128])
def test_a_row_whose_scores_are_all_minus_infinity_is_nan(width: int, processors: Processors) -> None:
    """And its lse, by which the backward passes make their weights."""
    s = SHAPES["tails, shared heads"]
    q, k, v, _ = drawn(s, width)
    q[..., 5] = q[..., 5].abs() + 0.1
    k[:, :, :100, 5] = -math.inf
    for x in launch.forward(q, k, v, s.causal, SCALE):
        assert x[:, :, :100].isnan().all()
        assert x[:, :, 100:].isfinite().all()


@pytest.mark.parametrize(("shape", "infinite"), INFINITE)
@pytest.mark.parametrize("width", [64, 128])
def test_backward_by_two_kernels(width: int, shape: str, infinite: bool, processors: Processors) -> None:
    s = SHAPES[shape]
    q, k, v, dout = drawn(s, width)
    if infinite:
        with_infinite_keys(s, q, k)
    out, lse, *exact = by_definition(s, q, k, v, dout)
    made = launch.backward(dout, q, k, v, out, lse, s.causal, SCALE, deterministic=True)
    assert_close(made[infinite:], exact[infinite:])  # dQ is 0 x infinity
    assert processors.edges == {s.causal or s.keys % 64 != 0}


def partly_hidden(s: Shape, rows: int = ROWS) -> list[int]:
    """The blocks of rows, of each of two warpgroups and each head, of which a tile of 128 keys may be partly hidden."""
    found, end = list[int](), -(-s.rows // rows) * rows
    for first in range(0, s.keys, 2 * ROWS):
        begin = min(first, s.rows - 1) // rows * rows if s.causal else 0
        edge = end if first + 2 * ROWS > s.keys else min(first + 2 * ROWS, end) if s.causal else begin
        found += list(range(begin, edge, rows)) * 2 * s.batch * s.heads
    return found


ONE_KERNEL = [
    *((x, "infinite keys" if infinite else "near") for x, infinite in INFINITE),
    *((x, "far below 0") for x in PARTS),
]


@pytest.mark.parametrize(
    ("width", "shape", "scores"),
    [(w, x, how) for w in (64, 128) for x, how in ONE_KERNEL if (w, SHAPES[x].causal) in launch.FUSED],
)
def test_backward_by_one_kernel(width, shape, scores, processors, monkeypatch):
    """far: 2 to the power of 0 - level is infinity, and so a key beyond the last one must not get there."""
    s, far, infinite = SHAPES[shape], scores == "far below 0", scores == "infinite keys"
    monkeypatch.setattr(launch, "FUSED_FROM", {width: 0})
    q, k, v, dout = drawn(s, width)
    if far:
        q, k = q.abs() + 8, -k.abs() - 8
    if infinite:
        with_infinite_keys(s, q, k)
    out, lse, *exact = by_definition(s, q, k, v, dout)
    made = launch.backward(dout, q, k, v, out, lse, s.causal, SCALE)
    assert processors.edges == {s.causal or s.keys % 128 != 0}
    assert sorted(processors.masked) == sorted(partly_hidden(s, launch.FUSED[width, s.causal].at_once))
    assert_close(made[infinite:], exact[infinite:], 1e-4 if far else 1e-5)  # levels and delta are of float32


# In FP8


def inverses_of(tensors: list[Tensor]) -> list[Tensor]:
    """What one is in FP8, of each head."""
    sizes = zip((0.2, 0.9, 3, 1.7), (x.shape[:2] for x in tensors), strict=True)
    return [by * torch.linspace(1.5, 0.5, b * h, dtype=torch.float64).view(b, h) for by, (b, h) in sizes]


def quantized(x: Tensor, inverse: Tensor) -> Heads:
    """As the quantiser leaves it, but in float64: padded with zeros, and transposed."""
    data = torch.nn.functional.pad(x / inverse.nan_to_num(1)[..., None, None], (0, 0, 0, -x.shape[2] % 128))
    return Heads(data, data[:, :, slots(data.shape[2])].unflatten(2, (-1, 128)).mT.contiguous(), inverse)


def attended(s: Shape, tensors: list[Tensor], inverses: list[Tensor], p: Tiling | None = None) -> list[Tensor]:
    """out and lse; what nobody writes is NaN."""
    out = torch.full((s.batch, s.heads, s.rows, D), math.nan, dtype=torch.float64)
    lse = torch.full(out.shape[:3], math.nan, dtype=torch.float64)
    q8, k8, v8 = (quantized(*x) for x in zip(tensors[:3], inverses[:3], strict=True))
    fp8_launch.forward(out, lse, (q8, k8, v8), s.keys, s.causal, SCALE, p)
    return [out, lse]


@pytest.mark.parametrize(
    ("shape", "plan"),
    [*((x, fp8_launch.FORWARD) for x in SHAPES | BEYOND), *((x, Tiling(3, 128, 2, 1, 160)) for x in OTHER_PLAN)],
)
def test_fp8_forward(shape: str, plan: Tiling, processors: Processors) -> None:
    s = (SHAPES | BEYOND)[shape]
    tensors = drawn(s)
    assert_close(attended(s, tensors, inverses_of(tensors), plan), by_definition(s, *tensors)[:2])
    assert processors.edges == {s.causal or s.keys % plan.at_once != 0}


@pytest.mark.parametrize("which", range(3))
def test_a_scale_that_is_nan_makes_its_heads_nan_and_no_others(which: int, processors: Processors) -> None:
    """Of the values: not lse."""
    s = SHAPES["tails, shared heads"]
    tensors = drawn(s)
    inverses = inverses_of(tensors)
    before = attended(s, tensors, inverses)
    inverses[which][1, 1] = math.nan
    heads = [1] if which == 0 else [2, 3]
    for i, (x, y) in enumerate(zip(before, attended(s, tensors, inverses), strict=True)):
        if i == 0 or which < 2:
            x[1, heads] = math.nan
        torch.testing.assert_close(y, x, atol=0, rtol=0, equal_nan=True)


def test_scales_whose_product_is_0_leave_equal_weights(processors: Processors) -> None:
    """And hidden scores hidden: 0 times -inf is NaN."""
    s = SHAPES["tails, shared heads"]
    q, *rest = drawn(s)
    inverses = inverses_of([q, *rest])
    right = by_definition(s, 0 * q, *rest)[:2]
    inverses[0] *= 0
    out = torch.full_like(q, math.nan)
    lse = torch.full(q.shape[:3], math.nan, dtype=torch.float64)
    q8, k8, v8 = Heads(quantized(q, inverses[0] + 1).data, None, inverses[0]), *map(quantized, rest[:2], inverses[1:3])
    fp8_launch.forward(out, lse, (q8, k8, v8), s.keys, s.causal, SCALE)
    assert_close((out, lse), right)


def differentiated(
    s: Shape, tensors: list[Tensor], inverses: list[Tensor], monkeypatch: pytest.MonkeyPatch, p: Tiling | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in FP8."""

    def arriving(dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Heads, Tensor]:
        come = quantized(trip(dout), inverses[3])
        info = torch.zeros(2, *come.by_rows.shape[:3], dtype=torch.float64)
        info[0], info[0, ..., : s.rows] = math.inf, lse * LOG2_E
        info[1, ..., : s.rows] = (out * trip(dout)).sum(-1)
        return come, info

    q, k, v, dout = tensors
    out, lse = by_definition(s, *map(trip, tensors))[:2]
    fp8 = quantized(trip(q), inverses[0]), quantized(trip(k), inverses[1]), quantized(trip(v), inverses[2])
    gradients = torch.full_like(q, math.nan), torch.full_like(k, math.nan), torch.full_like(k, math.nan)
    monkeypatch.setattr(fp8_launch, "quantize_dout", arriving)
    fp8_launch.backward(gradients, dout, q, k, out, lse, fp8, s.causal, SCALE, p)
    return gradients


@pytest.mark.parametrize(
    ("shape", "far", "plan"),
    [
        *((x, False, None) for x in SHAPES | BEYOND),
        *((x, True, None) for x in PARTS),
        *((x, False, Tiling(2, 64, 1, 1, 240)) for x in OTHER_PLAN),
    ],
)
def test_fp8_backward(shape, far, plan, processors, monkeypatch):
    """far: as in test_backward_by_one_kernel."""
    s = (SHAPES | BEYOND)[shape]
    q, k, v, dout = drawn(s)
    tensors = [q.abs() + 8, -k.abs() - 8, v, dout] if far else [q, k, v, dout]
    made = differentiated(s, tensors, inverses_of(tensors), monkeypatch, plan)
    assert sorted(processors.masked) == sorted(partly_hidden(s)), "a loop that masks, then one that needs not ask"
    assert_close(made, definition(tensors, s.causal, SCALE)[1:], 1e-9 * 10**far)
    if s.causal:
        assert not any(x[:, :, s.rows :].any() for x in made[1:]), "no row sees them"


@pytest.mark.parametrize("which", range(4))
def test_fp8_gradients_of_a_scale_that_is_nan(which, processors, monkeypatch):
    """Its heads' are NaN, and no others; of the values or of dO: not dV."""
    s = SHAPES["tails, shared heads"]
    tensors = drawn(s)
    inverses = inverses_of(tensors)
    dq, dk, dv = differentiated(s, tensors, inverses, monkeypatch)
    inverses[which][1, 1] = math.nan
    of_rows = which in (0, 3)
    dq[1, [1] if of_rows else [2, 3]] = math.nan
    dk[1, 0 if of_rows else 1] = math.nan
    if which < 2:
        dv[1, 0 if of_rows else 1] = math.nan
    for found, right in zip(differentiated(s, tensors, inverses, monkeypatch), (dq, dk, dv), strict=True):
        torch.testing.assert_close(found, right, atol=1e-9, rtol=0, equal_nan=True)


def test_dout_may_be_expanded(processors: Processors, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a sum is, which TMA cannot read."""
    s = Shape(2, 2, 1, 70, 70, True)
    tensors = drawn(s)
    inverses = inverses_of(tensors)
    tensors[3] = torch.ones(1, dtype=torch.float64).expand_as(tensors[3])
    assert_close(differentiated(s, tensors, inverses, monkeypatch), definition(tensors, True, SCALE)[1:])
