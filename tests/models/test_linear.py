"""Linear in FP8: forward and backward against the same arithmetic written out with NumPy's float64 and rounding by hand."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from te_bench.models import recipe as recipes
from te_bench.models.modules.linear import Linear
from te_bench.models.recipe.float8_current_scaling import Float8CurrentScaling

MANTISSA = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}  # bits, smallest normal exponent, largest


def rounded(x: Tensor, name: str) -> Tensor:
    """x after a trip through FP8 with amax at the format's largest, in float64."""
    bits, least, limit = MANTISSA[name]
    values = x.detach().double().numpy()
    amax = np.abs(values).max()
    scaled = values * (limit / amax if amax else 1.0)
    exponent = np.floor(np.log2(np.maximum(np.abs(scaled), 2.0**-40)))
    step = 2.0 ** (np.maximum(exponent, least) - bits)
    back = np.minimum(np.abs(np.rint(scaled / step) * step), limit) * np.sign(scaled)  # rint: ties to even
    return torch.from_numpy(back / (limit / amax if amax else 1.0))


def a_layer(n_in: int = 48, n_out: int = 32, bias: bool = True, device: str = "cpu") -> Linear:
    torch.manual_seed(0)
    return Linear(n_in, n_out, bias, recipe=recipes.load("float8_current_scaling")).to(device)


def close(x: Tensor, exact: Tensor, tolerance: float) -> bool:
    return bool((x.double() - exact).norm() <= tolerance * exact.norm())


@pytest.mark.parametrize("shape", [(16, 48), (2, 8, 48), (3, 2, 5, 48)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_forward_and_backward_are_the_three_gemms_of_the_rounded(shape: tuple[int, ...], bias: bool) -> None:
    layer = a_layer(bias=bias)
    x = torch.randn(shape, requires_grad=True)
    y = layer(x)
    dy = torch.randn_like(y) * 1e-3
    y.backward(dy)
    x8, w8 = rounded(x.reshape(-1, 48), "e4m3"), rounded(layer.weight, "e4m3")
    g8 = rounded(dy.reshape(-1, 32), "e5m2")
    offset = layer.bias.detach().double() if bias else 0.0
    assert close(y, (x8 @ w8.t() + offset).view(y.shape), 1e-6)
    assert x.grad is not None
    assert close(x.grad, (g8 @ w8).view(shape), 1e-6)
    assert layer.weight.grad is not None
    assert close(layer.weight.grad, g8.t() @ x8, 1e-6)
    if bias:
        assert layer.bias.grad is not None
        assert close(layer.bias.grad, dy.double().reshape(-1, 32).sum(0), 1e-6)
    assert [t.dtype for t in (y, x.grad, layer.weight.grad)] == [torch.float32] * 3


def test_under_autocast_it_computes_and_answers_in_bf16() -> None:
    layer = a_layer()
    x = torch.randn(16, 48, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    exact = rounded(x.bfloat16(), "e4m3") @ rounded(layer.weight, "e4m3").t() + layer.bias.detach().double()
    assert close(y, exact, 2**-8)


def test_it_is_not_an_ordinary_linear_but_near_one() -> None:
    layer = a_layer()
    ordinary = nn.Linear(48, 32)
    ordinary.load_state_dict(layer.state_dict())
    x = torch.randn(64, 48)
    error = ((layer(x) - ordinary(x)).norm() / ordinary(x).norm()).item()
    assert 0.01 < error < 0.06


def test_state_dict_and_initialisation_are_nn_linears() -> None:
    layer = a_layer()
    torch.manual_seed(0)
    ordinary = nn.Linear(48, 32)
    assert list(layer.state_dict()) == list(ordinary.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), ordinary.parameters(), strict=True))
    assert isinstance(layer, nn.Linear)


def test_zeros_stay_zeros_and_nan_shows() -> None:
    layer = a_layer(bias=False)
    x = torch.zeros(16, 48, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert (y == 0).all()
    assert layer.weight.grad is not None
    assert (layer.weight.grad == 0).all()
    assert layer(torch.full((16, 48), float("nan"))).isnan().all()


def test_gradients_too_small_for_half_precision_survive() -> None:
    layer = a_layer(bias=False)
    x = torch.randn(16, 48)
    layer(x).backward(torch.randn(16, 32) * 1e-12)
    assert layer.weight.grad is not None
    assert (layer.weight.grad != 0).float().mean() > 0.99


def test_a_recipe_decides_format_and_gemm() -> None:
    """Linear asks the recipe, by role and by GEMM, and never for its name."""
    asked: list[str] = []

    class Spy(Float8CurrentScaling):
        def quantize(self, x: Tensor, role: str) -> tuple[Tensor, Tensor]:
            asked.append(role)
            return super().quantize(x, role)

        def gemm(self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], gemm: str, out_dtype: torch.dtype) -> Tensor:
            asked.append(gemm)
            assert a[0].is_contiguous()
            assert b[0].is_contiguous()
            return super().gemm(a, b, gemm, out_dtype)

    layer = Linear(48, 32, recipe=Spy())
    layer(torch.randn(16, 48, requires_grad=True)).sum().backward()
    assert asked == ["input", "weight", "fprop", "grad_output", "dgrad", "wgrad"]


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_same_arithmetic() -> None:
    layer = a_layer(256, 128, device="cuda")
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16().cuda().requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = layer(x)
    dy = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)).bfloat16().cuda()
    y.backward(dy)
    x8, w8, g8 = rounded(x.cpu(), "e4m3"), rounded(layer.weight.cpu(), "e4m3"), rounded(dy.cpu(), "e5m2")
    assert close(y.cpu(), x8 @ w8.t() + layer.bias.detach().cpu().double(), 2**-7)
    assert x.grad is not None
    assert close(x.grad.cpu(), g8 @ w8, 2**-8)
    assert layer.weight.grad is not None
    assert close(layer.weight.grad.cpu(), g8.t() @ x8, 2**-8)
