"""Norms by the rule error <= 2 x torch's at the same dtype + floor against float64; quantised ones code by code."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import kernel_checks
import pytest
import torch
import torch.nn.functional as F
from kernel_checks import DEVICES, FLOATS, assert_as_good, assert_cast_alike, of_copy
from torch import Tensor

from te_bench.kernels import norm
from te_bench.kernels.norm import Backend, Norm, Problem
from te_bench.kernels.quantize import Quantized

EPS = 1e-5
SHAPES = [(1, 7), (33, 100), (5, 768), (130, 4096)]
EACH = [*itertools.product(norm.KINDS, (False, True))]  # True: of a residual stream, with 1 + weight
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
REFERENCE = norm.load("reference")


def supported(name: str, n: int, device: str, quantized: bool = False) -> Backend:
    return kernel_checks.supported(norm, name, device, n=n, dtype="bf16", kind="layernorm", quantized=quantized)


@dataclasses.dataclass
class Case:
    """x, dy, residual (M, N), weight and bias (N,); gamma is 1 + weight and the residual is added where `rich`."""

    x: Tensor
    dy: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    kind: str

    @property
    def options(self) -> dict[str, Any]:
        return {"norm": Norm(EPS, self.residual is not None, self.kind)}


def draw(
    shape: tuple[int, int], kind: str = "layernorm", rich: bool = True, dtype: str = "bf16", device: str = "cpu"
) -> Case:
    generator = torch.Generator().manual_seed(shape[0] * shape[1])
    x, dy, residual = (torch.randn(shape, generator=generator) for _ in range(3))
    weight, bias = (torch.randn(shape[1], generator=generator) for _ in range(2))
    tensors = [t.to(device, FLOATS[dtype]) for t in (x * 2 + 0.5, dy, weight, bias, residual)]
    return Case(*tensors[:3], tensors[3] if kind == "layernorm" else None, tensors[4] if rich else None, kind)


def textbook(x: Tensor, gamma: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    centred = x - x.mean(1, keepdim=True) if kind == "layernorm" else x
    y = centred / (centred.square().mean(1, keepdim=True) + EPS).sqrt() * gamma
    return y if bias is None else y + bias


def library(x: Tensor, gamma: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    if kind == "layernorm":
        return F.layer_norm(x, gamma.shape, gamma, bias, EPS)
    return F.rms_norm(x, gamma.shape, gamma, EPS)


def by_autograd(function: Callable[..., Tensor], case: Case, dtype: torch.dtype) -> list[Tensor]:
    """y, dx plus the residual, dweight, dbias."""
    leaves = [t.to(dtype).detach().requires_grad_() for t in (case.x, case.weight, case.bias) if t is not None]
    x, weight, bias = leaves if len(leaves) == 3 else (*leaves, None)
    y = function(x, weight + 1 if case.residual is not None else weight, bias, case.kind)
    grads = list(torch.autograd.grad(y, leaves, case.dy.to(dtype)))
    if case.residual is not None:
        grads[0] = grads[0] + case.residual.to(dtype)
    return [y.detach(), *grads]


def run(backend: Backend, case: Case) -> list[Tensor]:
    y, mean, rstd = backend.forward(case.x, case.weight, case.bias, **case.options)
    dx, dweight, dbias = backend.backward(
        case.dy, case.x, case.weight, mean, rstd, residual=case.residual, **case.options
    )
    assert (mean is None) == (dbias is None) == (case.kind == "rmsnorm")
    assert rstd.dtype == torch.float32
    return [t for t in (y, dx, dweight, dbias) if t is not None]


def assert_right(backend: Backend, case: Case) -> None:
    ours, truth = run(backend, case), by_autograd(textbook, case, torch.float64)
    yardstick = by_autograd(library, case, case.x.dtype)
    for name, value, torchs, exact in zip(("y", "dx", "dweight", "dbias"), ours, yardstick, truth, strict=False):
        assert_as_good(name, value, torchs, exact)


def observe(backend: Backend, case: Case, dtype: torch.dtype, **layouts: bool) -> tuple[Quantized, Tensor, Tensor]:
    """Quantized, amax (from 0.5) and counts (from 1) of forward_quantized at a scale that saturates and underflows."""
    amax = torch.tensor(0.5, device=case.x.device)
    counts = torch.ones(3, dtype=torch.int64, device=case.x.device)
    scale = torch.tensor(torch.finfo(dtype).max / 2.9, device=case.x.device)
    layouts = layouts or {"rowwise": True, "columnwise": True}
    packed, mean, rstd = backend.forward_quantized(
        case.x, case.weight, case.bias, scale=scale, dtype=dtype, amax=amax, counts=counts,
        **layouts, **case.options,
    )  # fmt: skip
    assert (mean is None) == (case.kind == "rmsnorm")
    unfused = backend.forward(case.x, case.weight, case.bias, **case.options)[2]
    torch.testing.assert_close(rstd, unfused, rtol=1e-5, atol=0, equal_nan=True)
    return packed, amax, counts


def assert_quantizes_right(backend: Backend, case: Case, dtype: torch.dtype, **layouts: bool) -> None:
    ours, exact = (observe(b, case, dtype, **layouts) for b in (backend, REFERENCE))
    assert_cast_alike(ours, exact, case.x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "dtype", "kind", "rich"),
    [
        *((shape, "bf16", *each) for shape in SHAPES[:3] for each in EACH),
        *((SHAPES[1], dtype, *each) for dtype in ("fp32", "fp16") for each in EACH),
        *((SHAPES[3], "bf16", *each) for each in EACH[1:3]),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", norm.names())
def test_contract(name: str, shape: tuple[int, int], dtype: str, kind: str, rich: bool, device: str) -> None:
    assert_right(supported(name, shape[1], device), draw(shape, kind, rich, dtype, device))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", norm.KINDS)
@pytest.mark.parametrize("shape", [(8192, 4096), (12288, 768), (300, 16384), (3, 8200)], ids=str)
@pytest.mark.parametrize("name", norm.names())
def test_contract_at_size(name: str, shape: tuple[int, int], kind: str) -> None:
    assert_right(supported(name, shape[1], "cuda"), draw(shape, kind, True, "bf16", "cuda"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "kind"),
    [*itertools.product(SHAPES[:2], norm.KINDS), (SHAPES[2], "layernorm"), ((70, 300), "rmsnorm")],
    ids=str,
)
@pytest.mark.parametrize("name", norm.names())
def test_quantized_is_the_reference(name: str, shape: tuple[int, int], kind: str, device: str) -> None:
    backend = supported(name, shape[1], device, quantized=True)
    for source, dtype in zip(FLOATS, (*FP8, FP8[shape[0] % 2]), strict=True):
        assert_quantizes_right(backend, draw(shape, kind, True, source, device), dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", norm.names())
def test_a_constant_row_is_the_bias(name: str, device: str) -> None:
    backend, case = supported(name, 128, device), draw((3, 128), rich=False, dtype="fp32", device=device)
    case.x[:] = torch.tensor([[0.0], [3.0], [-4096.0]])
    y, mean, rstd = backend.forward(case.x, case.weight, case.bias, Norm(EPS))
    assert case.bias is not None
    assert torch.equal(y, case.bias.expand(3, -1))
    assert torch.equal(mean, case.x[:, 0])
    torch.testing.assert_close(rstd, torch.full_like(rstd, EPS**-0.5))
    assert_right(backend, case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "factor"), [("fp32", 1e15), ("bf16", 1e15), ("fp16", 5e3), ("fp32", 1e-15)])
@pytest.mark.parametrize("name", norm.names())
def test_huge_and_tiny_rows(name: str, dtype: str, factor: float, device: str) -> None:
    case = draw((7, 300), rich=False, dtype=dtype, device=device)
    case.x *= factor
    assert_right(supported(name, 300, device), case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", norm.names())
def test_a_mean_of_thousands_of_deviations_costs_the_variance_nothing(name: str, device: str) -> None:
    """E[x^2] - E[x]^2 in float32 would be off by the variance itself. Tiles of unlike means as well."""
    backend, case = supported(name, 600, device), draw((9, 600), rich=False, dtype="fp32", device=device)
    case.x += 4096
    case.x[4:, :130] -= 100
    rstd = (case.x.double().var(1, correction=0) + EPS).rsqrt()
    torch.testing.assert_close(
        backend.forward(case.x, case.weight, case.bias, Norm(EPS))[2].double(), rstd, rtol=1e-4, atol=0
    )
    if name != "liger":
        observe(backend, case, FP8[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_strided_and_empty_inputs(name: str, device: str) -> None:
    backend, case = supported(name, 100, device), draw((33, 100), device=device)
    wanted = run(backend, case)
    wide = torch.cat([case.x, case.x], 1)[:, :100]
    columns = case.dy.t().contiguous().t()
    for value, exact in zip(run(backend, dataclasses.replace(case, x=wide, dy=columns)), wanted, strict=True):
        assert torch.equal(value, exact)
    nothing = dataclasses.replace(case, x=case.x[:0], dy=case.dy[:0], residual=case.residual[:0])  # type: ignore[index]
    y, dx, dweight, dbias = run(backend, nothing)
    assert y.shape == dx.shape == (0, 100)
    assert not dweight.any()
    assert not dbias.any()


@pytest.mark.parametrize("device", DEVICES)
def test_strided_weights_and_biases(device: str) -> None:
    backend, case = supported("triton", 100, device, quantized=True), draw((33, 100), device=device)
    assert case.bias is not None
    strided = dataclasses.replace(case, weight=case.weight.repeat_interleave(2)[::2], bias=case.bias[:1].expand(100))
    same = dataclasses.replace(case, bias=case.bias[:1].repeat(100))
    for value, exact in zip(run(backend, strided), run(backend, same), strict=True):
        assert torch.equal(value, exact)
    assert_quantizes_right(backend, strided, FP8[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_not_a_number_is_seen(name: str, device: str) -> None:
    backend, case = supported(name, 100, device, quantized=True), draw((33, 100), device=device)
    case.x[5, 7] = float("nan")
    packed, amax, counts = observe(backend, case, FP8[0])
    assert amax.isnan()
    assert counts[2] == 1 + 100
    assert packed.data.float().isnan().sum(1).tolist() == [100 if row == 5 else 0 for row in range(33)]


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_bad_input(name: str) -> None:
    backend, case = norm.load(name), draw((4, 8))
    with pytest.raises(ValueError, match="batchnorm"):
        backend.forward(case.x, case.weight, case.bias, Norm(EPS, kind="batchnorm"))
    with pytest.raises(ValueError, match="rmsnorm none"):
        backend.forward(case.x, case.weight, case.bias, Norm(EPS, kind="rmsnorm"))
    with pytest.raises(ValueError, match=r"\(7,\)"):
        backend.forward(case.x, case.weight[:7], None, Norm(EPS))
    with pytest.raises(ValueError, match=r"\(M, N\)"):
        backend.forward(case.x[None], case.weight, None, Norm(EPS))
    with pytest.raises(ValueError, match="layout"):
        observe(backend, case, FP8[0], rowwise=False, columnwise=False)


def test_what_can_not_run_says_why() -> None:
    problem = Problem(n=64, dtype="bf16", kind="layernorm", quantized=True, device="cuda", capability=(8, 0))
    assert "8.9" in (norm.load("triton").unsupported(problem) or "")
    assert norm.load("triton").unsupported(dataclasses.replace(problem, quantized=False)) is None
    assert "16384" in (norm.load("triton").unsupported(dataclasses.replace(problem, n=20000, quantized=False)) or "")
    assert norm.load("liger").unsupported(problem) in ("pip install liger-kernel", "no FP8 output")
    with pytest.raises(ValueError, match="FP8 output"):
        norm.load("liger").forward_quantized()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", norm.KINDS)
def test_operators(kind: str, device: str) -> None:
    supported("triton", 16, device)
    case = draw((6, 16), kind, device=device)
    _, mean, rstd = REFERENCE.forward(case.x, case.weight, case.bias, **case.options)
    forward = (case.x, case.weight, case.bias, EPS, True, case.kind)
    backward = (case.dy, case.x, case.weight, mean, rstd, True, case.residual)
    made = torch.ops.te_bench
    for operator, arguments in ((made.norm_forward, forward), (made.norm_backward, backward)):
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", norm.KINDS)
def test_compiles_without_graph_breaks(kind: str, device: str) -> None:
    backend = supported("triton", 32, device, quantized=True)
    case = draw((17, 32), kind, device=device)
    compiled = dataclasses.replace(
        backend,
        **{
            name: torch.compile(getattr(backend, name), fullgraph=True, backend="aot_eager")
            for name in ("forward", "forward_quantized", "backward")
        },
    )
    for value, exact in zip(run(compiled, case), run(backend, case), strict=True):
        torch.testing.assert_close(value, exact)
    assert_quantizes_right(compiled, case, FP8[0])
    assert_quantizes_right(compiled, case, FP8[0], rowwise=False, columnwise=True)


@pytest.mark.gpu
def test_gradients_are_the_same_in_every_run() -> None:
    backend, case = supported("triton", 768, "cuda"), draw((4096, 768), device="cuda")
    first = run(backend, case)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(backend, case), strict=True))


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("shape", [(8192, 4096), (12288, 768)], ids=str)
def test_bandwidth(shape: tuple[int, int]) -> None:
    """bf16 bytes: 2 read and 2 written an element; the backward reads 3 x 2 and writes 2."""
    backend, case = supported("triton", shape[1], "cuda", quantized=True), draw(shape, device="cuda")
    elements = case.x.numel()
    _, mean, rstd = backend.forward(case.x, case.weight, case.bias, **case.options)
    amax, counts = torch.zeros((), device="cuda"), torch.zeros(3, dtype=torch.int64, device="cuda")
    scale = torch.ones((), device="cuda")

    def forward() -> object:
        return backend.forward(case.x, case.weight, case.bias, Norm(EPS))

    def quantized() -> object:
        return backend.forward_quantized(
            case.x, case.weight, case.bias, Norm(EPS), scale=scale, dtype=FP8[0], rowwise=True, columnwise=True,
            amax=amax, counts=counts,
        )  # fmt: skip

    def backward() -> object:
        return backend.backward(case.dy, case.x, case.weight, mean, rstd, Norm(EPS), case.residual)

    assert of_copy(forward, 4 * elements, case.x, "norm forward") > 0.35
    assert of_copy(quantized, 4 * elements, case.x, "norm forward_quantized") > 0.35
    assert of_copy(backward, 8 * elements, case.x, "norm backward") > 0.35
