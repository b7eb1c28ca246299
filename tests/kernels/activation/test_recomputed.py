"""The activation that comes with its gradient: bit for bit what the forward pass's own cast left."""

from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from te_bench.kernels import activation
from te_bench.kernels.activation import KINDS, Backend, kernels, recomputed
from te_bench.kernels.activation.backends import triton as in_triton
from te_bench.kernels.quantize import Quantized

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def draw(
    shape: tuple[int, int], kind: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """dy of the shape (M, F), and x."""
    generator, (m, f) = torch.Generator().manual_seed(shape[0]), shape
    dy, x = (torch.randn(m, n, generator=generator) * 2 for n in (f, 2 * f if KINDS[kind][1] else f))
    return dy.to(device, dtype), x.to(device, dtype)


def looks(x: Tensor) -> dict[str, Any]:
    return {
        "amax": torch.tensor(0.5, device=x.device),
        "counts": torch.ones(3, dtype=torch.int64, device=x.device),
        "column_sum": torch.full((x.shape[1],), 2.0, device=x.device),
    }


def code(t: Tensor) -> Tensor:
    return t.view(torch.uint8)


def assert_as_apart(
    backend: Backend, run: Any, dy: Tensor, x: Tensor, kind: str, dtype: torch.dtype, slack: float = 0.0
) -> None:
    """Both results, and what is gathered, are those of the two functions that `run` stands for."""
    scale, by = (torch.tensor(s, device=x.device) for s in (torch.finfo(dtype).max / 2.9, 448 / 3.7))
    ours, theirs = looks(x), looks(x)
    packed, value_t = run(dy, x, kind, scale=scale, dtype=dtype, value_scale=by, value_dtype=E4M3, **ours)
    both = {"rowwise": True, "columnwise": True}
    apart: Quantized = backend.backward_quantized(dy, x, kind, scale=scale, dtype=dtype, **both, **theirs)
    value = backend.forward_quantized(x, kind, scale=by, dtype=E4M3, **both)
    for mine, wanted in zip((*packed[:4:2], value_t), (*apart[:4:2], value.data_t), strict=True):
        assert torch.equal(code(mine), code(wanted))
    assert packed.scale_inv.item() == packed.scale_inv_t.item() == apart.scale_inv.item()
    for name, wanted in theirs.items():
        torch.testing.assert_close(ours[name], wanted, rtol=slack, atol=0)


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_rows_beyond_a_launch_s_are_another_s(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dy, x = draw((130, 20), kind)
    columns = dy.t().contiguous().t()
    made = []
    for tallest in (kernels.TALLEST, 48):
        monkeypatch.setattr(kernels, "TALLEST", tallest)
        value = torch.empty_like(dy)
        made.append([kernels.forward(x, kind), kernels.backward(columns, x, kind, value), value])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*made, strict=True))


def by_kernel(dy: Tensor, x: Tensor, kind: str, **options: Any) -> tuple[Quantized, Tensor]:
    cast = [options.pop(name) for name in ("scale", "dtype", "value_scale", "value_dtype")]
    return recomputed.kernel(dy, x, kind, *cast, **options)


def wrapped(backend: Backend) -> Any:
    return lambda dy, x, kind, **options: recomputed.recomputed(backend, dy, x, kind, **options)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_is_the_two_kernels(kind: str) -> None:
    for shape, dtype in (((6, 100), E4M3), ((130, 72), E5M2)):
        dy, x = draw(shape, kind)
        assert_as_apart(in_triton.BACKEND, by_kernel, dy, x, kind, dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_in_half_precision_one_kernel_is_both(kind: str) -> None:
    for shape in ((5, 100), (18, 300)):
        dy, x = draw(shape, kind)
        y = torch.empty_like(dy)
        dx = kernels.backward(dy, x, kind, y)
        assert torch.equal(dx, kernels.backward(dy, x, kind))
        assert torch.equal(y, kernels.forward(x, kind))


@pytest.mark.parametrize("shape", [(33, 100), (6, 16)], ids=str)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_without_the_kernel(kind: str, shape: tuple[int, int], half: torch.dtype) -> None:
    backend = activation.load("reference")
    assert_as_apart(backend, wrapped(backend), *draw(shape, kind, half), kind, E5M2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gelu", "gelu_erf", "swiglu", "geglu", "reglu"])
@pytest.mark.parametrize("shape", [(12288, 3072), (4098, 776), (33, 100)], ids=str)
def test_at_size(shape: tuple[int, int], kind: str) -> None:
    assert_as_apart(in_triton.BACKEND, wrapped(in_triton.BACKEND), *draw(shape, kind, device="cuda"), kind, E5M2)


@pytest.mark.gpu
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["swiglu", "geglu", "reglu", "gelu_erf"])
@pytest.mark.parametrize("shape", [(8192, 8192), (33, 100)], ids=str)
def test_in_half_precision_at_size(shape: tuple[int, int], kind: str, half: torch.dtype) -> None:
    backend, (dy, x) = in_triton.BACKEND, draw(shape, kind, half, "cuda")
    dx, y = recomputed.gradient_and_value(backend, dy, x, kind)
    assert torch.equal(dx, backend.backward(dy, x, kind))
    assert torch.equal(y, backend.forward(x, kind))


def test_what_it_is_not_for() -> None:
    one, (dy, x) = torch.ones(()), draw((4, 8), "gelu")
    cast: dict[str, Any] = {"scale": one, "dtype": E5M2, "value_scale": one, "value_dtype": E4M3}
    run = wrapped(activation.load("reference"))
    for kind, width in (("swiglu", 4), ("gelu", 8)):
        with pytest.raises(ValueError, match=r"has the output"):
            recomputed.gradient_and_value(activation.load("reference"), dy[:, :6], x, kind)
        with pytest.raises(ValueError, match=rf"{kind} of x \(4, 8\) has the output \(4, {width}\)"):
            run(dy[:, :6], x, kind, **cast)
