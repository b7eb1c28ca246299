"""Norms in half precision: sums over rows and 1 + gamma are float32, on every path, as float64 shows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import te_bench.models as te
from te_bench.kernels.norm import Problem
from te_bench.models import recipe
from te_bench.models.modules import layernorm

ROWS, C = 4096, 48
SMALL = 0.003  # as a gamma around 0: next to 1, bf16 knows nothing nearer than 0.0039 above and 0.002 below
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = {"LayerNorm": te.LayerNorm, "RMSNorm": te.RMSNorm}
Results = dict[str, Tensor]


def exact(norm: nn.Module, x: Tensor, dy: Tensor, kind: str, centred: bool) -> Results:
    """What PyTorch's norms make of the same numbers in float64."""
    leaves = {"dx": x, **dict(norm.named_parameters())}
    leaves = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    gamma = leaves["weight"] + 1 if centred else leaves["weight"]
    if kind == "LayerNorm":
        y = F.layer_norm(leaves["dx"], (C,), gamma, leaves["bias"], norm.eps)
    else:
        y = F.rms_norm(leaves["dx"], (C,), gamma, norm.eps)
    return {
        "y": y.detach(),
        **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy.double()), strict=True)),
    }


def computed(norm: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> Results:
    x = x.detach().requires_grad_()
    y = forward(x)
    y.backward(dy.to(y.dtype))
    assert x.grad is not None
    return {
        "y": y.detach(),
        "dx": x.grad,
        **{name: p.grad for name, p in norm.named_parameters() if p.grad is not None},
    }


def draw(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x, and gradients of one sign, whose sum grows with the rows."""
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(ROWS, C, generator=generator), torch.rand(ROWS, C, generator=generator)
    return x.to(device, dtype), dy.to(device, dtype)


def assert_near(ours: Results, truth: Results) -> None:
    """Within the roundings of bf16 and fp16 that are made: of what is returned, and of what it is made of."""
    assert ours.keys() == truth.keys()
    for name, value in ours.items():
        assert (value.double() - truth[name]).norm().item() <= 2.0**-8 * truth[name].norm().item(), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_over_rows_of_half_precision(kind: str, dtype: torch.dtype, device: str) -> None:
    norm = KINDS[kind](C, params_dtype=dtype, device=device)
    x, dy = draw(device, dtype)
    assert_near(computed(norm, norm, x, dy), exact(norm, x, dy, kind, centred=False))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_over_rows_under_torch_autocast(kind: str, device: str) -> None:
    norm = KINDS[kind](C, device=device)
    x, dy = draw(device, torch.bfloat16)

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            y = norm(x)
        assert y.dtype is torch.bfloat16
        return y  # type: ignore[no-any-return]

    assert_near(computed(norm, forward, x.float(), dy), exact(norm, x, dy, kind, centred=False))


@pytest.mark.parametrize("make", [te.LayerNormLinear, te.LayerNormMLP])
def test_sums_over_rows_inside_of_fused_modules(make: Callable[..., nn.Module]) -> None:
    """Against the same module in float32: half precision leaves roundings of what the sums are of, not of the sums."""
    torch.manual_seed(0)
    wide = make(C, 32, device="cpu")
    narrow = make(C, 32, device="cpu", params_dtype=torch.bfloat16)
    with torch.no_grad():
        for p, q in zip(wide.parameters(), narrow.parameters(), strict=True):
            q.copy_(p)
            p.copy_(q)
    x, dy = draw("cpu", torch.bfloat16)
    truth = computed(wide, wide, x.float(), dy[:, :32] if make is te.LayerNormLinear else dy)
    ours = computed(narrow, narrow, x, dy[:, :32] if make is te.LayerNormLinear else dy)
    for name in ("layer_norm_weight", "layer_norm_bias"):
        assert (ours[name] - truth[name]).norm().item() <= 2.0**-6 * truth[name].norm().item(), name


def share(ours: Tensor, truth: Tensor) -> float:
    """How much of `truth` is in `ours`: 1 but for what roundings, which go both ways, leave in the mean."""
    return ((ours.double() * truth).sum() / truth.square().sum()).item()


PATHS: dict[str, Any] = {
    "eager": lambda norm: norm,
    "compiled": lambda norm: torch.compile(norm, backend="aot_eager", dynamic=False),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_one_plus_gamma_is_not_rounded(kind: str, dtype: torch.dtype, path: str, device: str) -> None:
    torch._dynamo.reset()
    norm = KINDS[kind](C, params_dtype=dtype, device=device, zero_centered_gamma=True)
    with torch.no_grad():
        norm.weight.fill_(SMALL)
    x, dy = draw(device, dtype)
    dy = dy - 0.5
    ours, truth = computed(norm, PATHS[path](norm), x, dy), exact(norm, x, dy, kind, centred=True)
    assert_near(ours, truth)
    for name in ("y", "dx"):
        assert abs(share(ours[name], truth[name]) - 1) <= SMALL / 20, name


@pytest.mark.parametrize("asked", [None, recipe.Float8CurrentScaling()], ids=["none", "fp8"])
@pytest.mark.parametrize("make", [te.LayerNormLinear, te.LayerNormMLP])
def test_one_plus_gamma_inside_of_fused_modules(make: Callable[..., nn.Module], asked: recipe.Recipe | None) -> None:
    module = make(
        C, 32, params_dtype=torch.bfloat16, device="cpu", zero_centered_gamma=True, return_layernorm_output=True
    )
    with torch.no_grad():
        module.layer_norm_weight.fill_(SMALL)
    x, _ = draw("cpu", torch.bfloat16)
    with te.autocast(enabled=asked is not None, recipe=asked):
        normed = module(x)[-1]
    truth = F.layer_norm(x.double(), (C,), torch.full((C,), 1.0 + module.layer_norm_weight[0].item()).double())
    assert abs(share(normed, truth) - 1) <= SMALL / 20


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("n", [16384, 16385])
def test_rows_of_any_width_have_kernels_that_take_them(n: int, kind: str) -> None:
    problem = Problem(n=n, dtype="bf16", kind=kind, quantized=True, device="cuda", capability=(9, 0))
    with FakeTensorMode():
        chosen = layernorm.backend(torch.empty(2, n, dtype=torch.bfloat16, device="cuda"))
    assert chosen.unsupported(problem) is None


@pytest.mark.gpu
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_rows_wider_than_the_kernels_take(make: Callable[..., nn.Module]) -> None:
    x = torch.randn(3, 20000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    norm = make(20000, params_dtype=torch.bfloat16, device="cuda")
    norm(x).square().mean().backward()
    for t in (x, *norm.parameters()):
        assert t.grad is not None
        assert t.grad.isfinite().all()
