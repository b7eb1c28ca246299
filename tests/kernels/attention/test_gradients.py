"""Where our attention leaves its gradients: side by side where q, k and v lie so, which is where no copy joins them."""

import pytest
import torch
import triton
from torch import Tensor

from te_bench.kernels import attention
from te_bench.kernels.attention.gradients import read_at_once, room

INTERPRETED = triton.knobs.runtime.interpret
BACKENDS = [
    pytest.param("triton", "cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")),
    *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in ("triton", "gluon")),
]


def projected(
    batch: int, rows: int, heads: int, width: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Tensor:
    """(3, B, H, T, D), views of one (B, T, 3, H, D), as a projection's output is read."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(batch, rows, 3, heads, width, generator=generator).to(device, dtype)
    return whole.permute(2, 0, 3, 1, 4)


def side_by_side(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """By what is written: k's numbers are those after q's, in one row after another."""
    if q._base is None or q._base is not k._base or q._base is not v._base:
        return False
    whole = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2).flatten()
    return torch.equal(whole, torch.as_strided(q, (whole.numel(),), (1,), q.storage_offset()))


@pytest.mark.parametrize("shape", [(2, 5, 3, 8), (1, 4, 2, 16), (3, 1, 1, 8)], ids=str)
def test_gradients_of_what_lies_side_by_side_do(shape: tuple[int, int, int, int]) -> None:
    q, k, v = projected(*shape)
    made = room(q, k, v)
    for gradient, x in zip(made, (q, k, v), strict=True):
        assert (gradient.shape, gradient.stride(), gradient.dtype) == (x.shape, x.stride(), x.dtype)
        gradient.copy_(x)
    assert side_by_side(*made)


def test_others_are_as_empty_like_has_them() -> None:
    q, k, v = projected(2, 5, 3, 8)
    fewer = torch.randn(2, 5, 1, 8).transpose(1, 2)
    per_head = torch.randn(2, 5, 3, 3, 8).permute(3, 0, 2, 1, 4)  # (B, T, H, 3, D)
    inner = torch.randn(2, 9, 3, 3, 8)[:, 2:7].permute(2, 0, 3, 1, 4)  # rows of longer sequences
    for given in ((q, v, k), (q, k, v.clone()), (q, k, v.half()), (q, fewer, fewer), per_head, inner, (q, q, q)):
        made = room(*given)
        assert len({gradient.untyped_storage().data_ptr() for gradient in made}) == 3
        for gradient, x in zip(made, given, strict=True):
            assert (gradient.stride(), gradient.dtype) == (torch.empty_like(x).stride(), x.dtype)


@pytest.mark.parametrize(("name", "device"), BACKENDS)
@pytest.mark.parametrize("width", [64, 128])
def test_they_are_the_ones_that_are_left_apart(name: str, device: str, width: int) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = projected(2, 40 if device == "cpu" else 200, 2, width, device, dtype)
    dout = torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(1)).to(device, dtype)
    found = []
    for together in (True, False):
        given = [part.detach().requires_grad_() if together else part.clone().requires_grad_() for part in x]
        with read_at_once():
            out = attention.load(name).forward(*given, causal=True, scale=0.125, dropout=0.0)
        gradients = torch.autograd.grad(out, given, dout)
        assert side_by_side(*gradients) is together
        found.append(gradients)
    for ours, apart in zip(*found, strict=True):
        assert torch.equal(ours, apart)
    plain = [part.detach().requires_grad_() for part in x]
    out = attention.load(name).forward(*plain, causal=True, scale=0.125, dropout=0.0)
    gradients = torch.autograd.grad(out, plain, dout)
    assert all(gradient.transpose(1, 2).is_contiguous() for gradient in gradients), "nobody reads them at once"


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.gpu) for name in ("triton", "gluon")])
def test_compiled_they_are_apart_as_torch_compile_was_told(name: str) -> None:
    x = projected(2, 200, 2, 64, "cuda", torch.bfloat16)
    dout = torch.randn(x.shape[1:], device="cuda").bfloat16()

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.load(name).forward(q, k, v, causal=True, scale=0.125, dropout=0.0)

    given = [part.detach().requires_grad_() for part in x]
    wanted = torch.autograd.grad(step(*given), given, dout)
    for ours, plain in zip(torch.autograd.grad(torch.compile(step)(*given), given, dout), wanted, strict=True):
        assert torch.equal(ours, plain)
