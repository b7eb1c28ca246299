"""Activations by the rule error <= 2 x torch's at the same dtype + floor against float64; quantised ones code by code."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import kernel_checks
import pytest
import torch
import torch.nn.functional as F
from kernel_checks import DEVICES, FLOATS, assert_as_good, assert_cast_alike, of_copy
from torch import Tensor

from te_bench.kernels import activation
from te_bench.kernels.activation import KINDS, Backend, Problem
from te_bench.kernels.quantize import Quantized

SHAPES = [(33, 100), (1, 7), (5, 768), (130, 272)]  # of y; what f is does not depend on them
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
REFERENCE = activation.load("reference")

#: f, written out, and by torch's own operators.
TEXTBOOK: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: x / 2 * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()),
    "gelu_erf": lambda x: x / 2 * torch.special.erfc(-x / math.sqrt(2)),
    "sigmoid": lambda x: (1 + (x / 2).tanh()) / 2,
    "qgelu": lambda x: x / 2 * (1 + (1.702 / 2 * x).tanh()),
    "silu": lambda x: x / 2 * (1 + (x / 2).tanh()),
    "relu": lambda x: x.clamp(min=0),
    "srelu": lambda x: x.clamp(min=0) ** 2,
}
LIBRARY: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "sigmoid": torch.sigmoid,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
}


supported = functools.partial(kernel_checks.supported, activation, quantized=False)


def draw(
    shape: tuple[int, int], kind: str, dtype: str = "bf16", device: str = "cpu", factor: float = 2.0
) -> tuple[Tensor, Tensor]:
    """x, twice as wide for a gated kind, and dy."""
    generator = torch.Generator().manual_seed(shape[0] * shape[1])
    x = torch.randn(shape[0], shape[1] * (2 if KINDS[kind][1] else 1), generator=generator) * factor
    dy = torch.randn(shape, generator=generator)
    return x.to(device, FLOATS[dtype]), dy.to(device, FLOATS[dtype])


def by_autograd(
    functions: dict[str, Callable[[Tensor], Tensor]], x: Tensor, dy: Tensor, kind: str, dtype: torch.dtype
) -> list[Tensor]:
    """y, dx."""
    name, gated = KINDS[kind]
    leaf = x.to(dtype).detach().requires_grad_()
    first, second = leaf.chunk(2, 1) if gated else (leaf, None)
    y = functions[name](first)
    y = y if second is None else y * second
    return [y.detach(), *torch.autograd.grad(y, leaf, dy.to(dtype))]


def assert_right(backend: Backend, x: Tensor, dy: Tensor, kind: str) -> None:
    ours = [backend.forward(x, kind), backend.backward(dy, x, kind)]
    # On the CPU: CUDA's float64 tanh has NaN for a slope at 1e15 (torch 2.11).
    truth = [t.to(x.device) for t in by_autograd(TEXTBOOK, x.cpu(), dy.cpu(), kind, torch.float64)]
    yardstick = by_autograd(LIBRARY, x, dy, kind, x.dtype)
    for name, value, library, exact in zip(("y", "dx"), ours, yardstick, truth, strict=True):
        assert_as_good(name, value, library, exact)


def observe(
    backend: Backend, x: Tensor, dy: Tensor, kind: str, dtype: torch.dtype, forward: bool, **layouts: bool
) -> tuple[Quantized, Tensor, Tensor, Tensor]:
    """Quantized, amax (from 0.5), counts (from 1) and column_sum (from 2), at a scale that saturates and underflows."""
    amax = torch.tensor(0.5, device=x.device)
    counts = torch.ones(3, dtype=torch.int64, device=x.device)
    column_sum = torch.full((x.shape[1],), 2.0, device=x.device)
    scale = torch.tensor(torch.finfo(dtype).max / 2.9, device=x.device)
    options: dict[str, Any] = {"scale": scale, "dtype": dtype, "amax": amax, "counts": counts}
    options |= layouts or {"rowwise": True, "columnwise": True}
    if forward:
        return backend.forward_quantized(x, kind, **options), amax, counts, column_sum
    return backend.backward_quantized(dy, x, kind, column_sum=column_sum, **options), amax, counts, column_sum


def assert_quantizes_right(
    backend: Backend, x: Tensor, dy: Tensor, kind: str, dtype: torch.dtype, **layouts: bool
) -> None:
    for forward in (True, False):
        (*ours, total), (*exact, total_exact) = (
            observe(b, x, dy, kind, dtype, forward, **layouts) for b in (backend, REFERENCE)
        )
        assert_cast_alike(ours, exact, x)
        # Sums of M numbers up to amax: float32 rounds each partial sum, and one of x's dtype may be rounded otherwise.
        slack = (x.shape[0] * 2**-24 + torch.finfo(x.dtype).eps) * exact[1].item()
        torch.testing.assert_close(total, total_exact, rtol=1e-6, atol=slack)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "dtype", "kind"),
    [*itertools.product([SHAPES[0]], FLOATS, KINDS), *itertools.product(SHAPES[1:], ["bf16"], ["gelu", "swiglu"])],
    ids=str,
)
@pytest.mark.parametrize("name", activation.names())
def test_contract(name: str, shape: tuple[int, int], dtype: str, kind: str, device: str) -> None:
    assert_right(supported(name, device), *draw(shape, kind, dtype, device), kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gelu", "gelu_erf", "swiglu", "srelu"])
@pytest.mark.parametrize("shape", [(8192, 16384), (12288, 3072), (70001, 48), (2**20 + 4, 48)], ids=str)
def test_contract_at_size(shape: tuple[int, int], kind: str) -> None:
    backend, (x, dy) = supported("triton", "cuda", quantized=True), draw(shape, kind, device="cuda")
    for value, exact in (
        (backend.forward(x, kind), REFERENCE.forward(x, kind)),
        (backend.backward(dy, x, kind), REFERENCE.backward(dy, x, kind)),
    ):
        torch.testing.assert_close(value, exact, rtol=2**-7, atol=2e-5)
        assert (value != exact).sum() <= exact.numel() / 200
    assert_quantizes_right(backend, x, dy, kind, FP8[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "kind"),
    [*itertools.product([(70, 136)], KINDS), *itertools.product([*SHAPES[:2], (3, 300)], ["gelu", "swiglu"])],
    ids=str,
)
@pytest.mark.parametrize("name", activation.names())
def test_quantized_is_the_reference(name: str, shape: tuple[int, int], kind: str, device: str) -> None:
    """Of three pairs of dtypes gelu and swiglu by each, the others by one in turn."""
    backend, turn = supported(name, device, quantized=True), list(KINDS).index(kind) % 3
    pairs = list(zip(FLOATS, (*FP8, FP8[shape[0] % 2]), strict=True))
    for source, dtype in pairs if kind in ("gelu", "swiglu") else pairs[turn : turn + 1]:
        assert_quantizes_right(backend, *draw(shape, kind, source, device), kind, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("name", activation.names())
def test_a_layout_not_asked_for_is_none(name: str, kind: str, device: str) -> None:
    backend, (x, dy) = supported(name, device, quantized=True), draw((33, 100), kind, device=device)
    for layouts in ({"rowwise": True, "columnwise": False}, {"rowwise": False, "columnwise": True}):
        packed = observe(backend, x, dy, kind, FP8[0], True, **layouts)[0]
        assert [t is None for t in packed[:4]] == [not layouts["rowwise"]] * 2 + [not layouts["columnwise"]] * 2
        assert_quantizes_right(backend, x, dy, kind, FP8[0], **layouts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "factor"), [("fp32", 1e15), ("fp16", 2e3), ("fp32", 1e-15), ("bf16", 30.0)])
@pytest.mark.parametrize("kind", [*(kind for kind, (_, gated) in KINDS.items() if not gated), "glu"])
@pytest.mark.parametrize("name", activation.names())
def test_huge_and_tiny_values(name: str, kind: str, dtype: str, factor: float, device: str) -> None:
    x, dy = draw((7, 300), kind, dtype, device, factor)
    if KINDS[kind][0] == "srelu" and factor > 1:
        x = x.clamp(max=100)
    assert_right(supported(name, device), x, dy, kind)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gelu", "qgelu", "silu"])
@pytest.mark.parametrize("name", activation.names())
def test_the_slope_of_the_largest_float_is_no_nan(name: str, kind: str, device: str) -> None:
    x = torch.tensor([[-3e38, -1e20, -100.0, 100.0, 1e20, 3e38]], device=device)
    slope = supported(name, device).backward(torch.ones_like(x), x, kind)
    assert slope.tolist() == [[0, 0, 0, 1, 1, 1]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("name", activation.names())
def test_strided_and_empty_inputs(name: str, kind: str, device: str) -> None:
    backend, (x, dy) = supported(name, device), draw((33, 100), kind, device=device)
    wide, columns = torch.cat([x, x], 1)[:, : x.shape[1]], dy.t().contiguous().t()
    assert torch.equal(backend.forward(wide, kind), backend.forward(x, kind))
    assert torch.equal(backend.backward(columns, wide, kind), backend.backward(dy, x, kind))
    assert backend.forward(x[:0], kind).shape == (0, 100)
    packed, amax, counts, total = observe(backend, x[:0], dy[:0], kind, FP8[0], False)
    assert packed.data.shape == x[:0].shape
    assert packed.scale_inv.item() == pytest.approx(2.9 / 448)
    assert (amax.item(), counts.tolist(), set(total.tolist())) == (0.5, [1, 1, 1], {2.0})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", activation.names())
def test_a_column_and_its_gate(name: str, device: str) -> None:
    """Triton compiles integers that are 1 in, as constants: on a GPU alone."""
    backend, (x, dy) = supported(name, device, quantized=True), draw((34, 1), "swiglu", device=device)
    assert_right(backend, x, dy, "swiglu")
    assert_quantizes_right(backend, x, dy, "swiglu", FP8[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", activation.names())
def test_not_a_number_is_seen(name: str, device: str) -> None:
    backend, (x, dy) = supported(name, device, quantized=True), draw((33, 100), "gelu", device=device)
    x[5, 7] = float("nan")
    packed, amax, counts, _ = observe(backend, x, dy, "gelu", FP8[0], True)
    assert amax.isnan()
    assert counts[2] == 1 + 1
    assert packed.data.float().isnan().nonzero().tolist() == [[5, 7]]


def changed(function: str, change: Callable[[Any], Any], **overridden: Any) -> Backend:
    """The reference, its result changed, or its arguments."""
    original = getattr(REFERENCE, function)

    def mutant(*args: Any, **options: Any) -> Any:
        return change(original(*args, **{**options, **overridden}))

    return dataclasses.replace(REFERENCE, **{function: mutant})


def exchanged(backend: Backend, function: str) -> Backend:
    """Gates with the first half instead of the second."""
    original = getattr(backend, function)

    def mutant(*args: Any, **options: Any) -> Any:
        *before, x, kind = args
        return original(*before, x.roll(x.shape[1] // 2, 1), kind, **options)

    return dataclasses.replace(backend, **{function: mutant})


def of_kind(function: str, kind: str) -> Backend:
    original = getattr(REFERENCE, function)
    return dataclasses.replace(REFERENCE, **{function: lambda *args: original(*args[:-1], kind)})


MUTATIONS = {
    **{f"{f}: zero": changed(f, torch.zeros_like) for f in ("forward", "backward")},
    **{f"{f}: sign": changed(f, torch.neg) for f in ("forward", "backward")},
    **{f"{f}: doubled": changed(f, lambda t: t * 2) for f in ("forward", "backward")},
    **{f"{f}: halves exchanged": exchanged(REFERENCE, f) for f in ("forward", "backward")},
    **{f"{f}: another function": of_kind(f, "swiglu") for f in ("forward", "backward")},
    "backward: 2 % too large": changed("backward", lambda t: t * 1.02),
    "forward: transposed": changed("forward", lambda t: t.t().contiguous()),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_fail_the_contract(name: str, dtype: str) -> None:
    x, dy = draw((64, 64), "geglu", dtype)
    assert_right(REFERENCE, x, dy, "geglu")
    with pytest.raises(AssertionError):
        assert_right(MUTATIONS[name], x, dy, "geglu")


def same(packed: Quantized) -> Quantized:
    return packed


QUANTIZED_MUTATIONS: dict[str, dict[str, Any]] = {
    "zero data": {"change": lambda q: q._replace(data=torch.zeros_like(q.data))},
    "minus data_t": {"change": lambda q: q._replace(data_t=(-q.data_t.float()).to(q.data_t.dtype))},
    "doubled scale": {"change": same, "scale": torch.tensor(2 * 448 / 2.9)},
    "scale_inv for scale": {"change": lambda q: q._replace(scale_inv=q.scale_inv.reciprocal())},
    "data_t not transposed": {"change": lambda q: q._replace(data_t=q.data)},
    "wrong format": {"change": same, "dtype": torch.float8_e5m2},
    "no amax": {"change": same, "amax": None},
    "no counts": {"change": same, "counts": None},
}


@pytest.mark.parametrize("function", ["forward_quantized", "backward_quantized"])
@pytest.mark.parametrize("name", [*QUANTIZED_MUTATIONS, "no column_sum"])
def test_mutations_fail_the_quantized_contract(name: str, function: str) -> None:
    x, dy = draw((64, 64), "gelu")
    assert_quantizes_right(REFERENCE, x, dy, "gelu", FP8[0])
    if name == "no column_sum":
        mutant = changed("backward_quantized", same, column_sum=None)
    else:
        mutant = changed(function, **QUANTIZED_MUTATIONS[name])
    with pytest.raises(AssertionError):
        assert_quantizes_right(mutant, x, dy, "gelu", FP8[0])


@pytest.mark.parametrize("name", activation.names())
def test_bad_input(name: str) -> None:
    backend, (x, dy) = activation.load(name), draw((4, 9), "gelu")
    with pytest.raises(ValueError, match="Did you mean gelu"):
        backend.forward(x, "gellu")
    with pytest.raises(ValueError, match=r"swiglu takes \(M, 2F\)"):
        backend.forward(x, "swiglu")
    with pytest.raises(ValueError, match=r"\(4, 9\)"):
        backend.backward(dy[:, :8], x, "gelu")
    with pytest.raises(ValueError, match=r"\(M, F\)"):
        backend.forward(x[None], "gelu")
    with pytest.raises(ValueError, match="layout"):
        observe(backend, x, dy, "gelu", FP8[0], True, rowwise=False, columnwise=False)


def test_what_can_not_run_says_why() -> None:
    problem = Problem(quantized=True, device="cuda", capability=(8, 0))
    assert "8.9" in (activation.load("triton").unsupported(problem) or "")
    assert activation.load("triton").unsupported(dataclasses.replace(problem, quantized=False)) is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["forward", "forward_quantized", "backward", "backward_quantized"])
def test_operators(name: str, device: str) -> None:
    activation.load("triton")
    x, dy = draw((6, 16), "swiglu", device=device)
    looks = torch.zeros((), device=device), torch.zeros(3, dtype=torch.int64, device=device)
    cast = (torch.tensor(9.0, device=device), FP8[0], True, False, *looks)
    arguments = {
        "forward": (x, "swiglu"),
        "forward_quantized": (x, "swiglu", *cast),
        "backward": (dy, x, "swiglu"),
        "backward_quantized": (dy, x, "swiglu", *cast, torch.zeros(32, device=device)),
    }
    operator = getattr(torch.ops.te_bench, f"activation_{name}").default
    torch.library.opcheck(operator, arguments[name], test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_compiles_without_graph_breaks(kind: str, device: str) -> None:
    backend, (x, dy) = supported("triton", device, quantized=True), draw((17, 32), kind, device=device)
    compiled = Backend(
        **{
            field.name: torch.compile(getattr(backend, field.name), fullgraph=True, backend="aot_eager")
            for field in dataclasses.fields(backend)
            if field.name != "unsupported"
        },
        unsupported=backend.unsupported,
    )
    assert_right(compiled, x, dy, kind)
    assert_quantizes_right(compiled, x, dy, kind, FP8[0])
    assert_quantizes_right(compiled, x, dy, kind, FP8[0], rowwise=True, columnwise=False)


@pytest.mark.gpu
@pytest.mark.alone  # other workers' kernels would take their share of the memory's bandwidth
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("shape", [(8192, 16384), (12288, 3072)], ids=str)
def test_bandwidth(shape: tuple[int, int], kind: str) -> None:
    """bf16 bytes an element of y: 2, gated 4, read and 2 written; backward 2 more read and 2, gated 4, written."""
    backend, (x, dy) = supported("triton", "cuda", quantized=True), draw(shape, kind, device="cuda")
    reads = 2 * x.numel()
    writes = 2 * dy.numel()
    options: dict[str, Any] = {
        "scale": torch.ones((), device="cuda"),
        "dtype": FP8[0],
        "rowwise": True,
        "columnwise": True,
        "amax": torch.zeros((), device="cuda"),
        "counts": torch.zeros(3, dtype=torch.int64, device="cuda"),
    }
    total = torch.zeros(x.shape[1], device="cuda")
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "forward": (lambda: backend.forward(x, kind), reads + writes),
        "forward_quantized": (lambda: backend.forward_quantized(x, kind, **options), reads + writes),
        "backward": (lambda: backend.backward(dy, x, kind), 2 * reads + writes),
        "backward_quantized": (
            lambda: backend.backward_quantized(dy, x, kind, column_sum=total, **options),
            2 * reads + writes,
        ),
    }
    for name, (call, nbytes) in calls.items():
        assert of_copy(call, nbytes, x, f"{kind} {name}") > 0.35, name
