"""Fused attention for autograd and torch.compile: what is checked, the operators, the Function around them."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from te_bench.kernels.attention import _backward_kernels, _kernels
from te_bench.kernels.attention._kernels import Extent

WIDEST = 256
LEAST = 1e-30  # of a scale: hidden scores are -inf, and 0 x -inf is NaN; all weights are equal with either
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _rows(x: Tensor) -> Tensor:
    """x, or a copy where the elements of its rows do not follow one another."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _extent(q: Tensor, k: Tensor, left: int, right: int, mask: Tensor | None) -> Extent:
    if mask is None:
        return Extent(left, right, None)
    return Extent(left, right, mask.view(torch.uint8).expand(*q.shape[:3], k.shape[2]))


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None,
    left: int, right: int, scale: float, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse, by the kernel; of an empty sum 0 and -inf."""
    if q.numel() == 0 or k.shape[2] == 0:
        out, lse = _fake(q, k, v, mask, seed, left, right, scale, dropout)
        return out.zero_(), lse.fill_(float("-inf"))
    return _kernels.forward(_rows(q), _rows(k), _rows(v), _extent(q, k, left, right, mask), scale, dropout, seed)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, seed: Tensor | None,
    left: int, right: int, scale: float, dropout: float, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, by the kernels."""
    if q.numel() == 0 or k.shape[2] == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dout, q, k, v = (_rows(x) for x in (dout, q, k, v))
    extent = _extent(q, k, left, right, mask)
    return _backward_kernels.backward(extent, scale, dropout, deterministic, dout, q, k, v, out, lse, seed)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None,
    left: int, right: int, scale: float, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, heads, rows, _ = q.shape
    out = q.new_empty(batch, rows, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(batch, heads, rows, dtype=torch.float32)


def _fake_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, seed: Tensor | None,
    left: int, right: int, scale: float, dropout: float, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_forward_op = torch.library.custom_op("te_bench::attention_forward", forward, mutates_args=())
_backward_op = torch.library.custom_op("te_bench::attention_backward", backward, mutates_args=())
_forward_op.register_fake(_fake)
_backward_op.register_fake(_fake_backward)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None,
        settings: tuple[int, int, float, float], deterministic: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        # Eager calls go straight to the launchers: a custom operator costs the host about 20 us a call.
        run = _forward_op if torch.compiler.is_compiling() else forward
        out, lse = run(q, k, v, mask, seed, *settings)
        ctx.save_for_backward(q, k, v, out, lse, mask, seed)
        ctx.settings = *settings, deterministic
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 7
        run = _backward_op if torch.compiler.is_compiling() else backward
        return *run(dout, *ctx.saved_tensors, *ctx.settings), None, None, None, None


def check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> None:
    """Raise ValueError for what is no attention."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or x.dtype not in FLOATS or x.dtype is not q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} is {tuple(x.shape)} of {x.dtype} on {x.device}: four dimensions, float32, bfloat16 or float16, "
                f"and all on {q.device} of {q.dtype} as q is"
            )
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or v.shape[:3] != k.shape[:3] or not k.shape[1]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: must be (B, H, T, D), (B, Hkv, S, D), "
            "(B, Hkv, S, Dv)"
        )
    if max(q.shape[3], v.shape[3]) > WIDEST:
        raise ValueError(f"head_dim {q.shape[3]}, of v {v.shape[3]}: at most {WIDEST}; take another attention backend")
    if q.is_cuda and q.dtype is torch.float32:
        raise ValueError("float32 on a GPU: bfloat16 or float16; take mem_efficient or math for float32")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads, {k.shape[1]} key heads: the latter must divide the former")
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout={dropout}: from 0 to 1")
    if mask is not None and mask.dtype is not torch.bool:
        raise ValueError(f"mask of {mask.dtype}: must be bool, True for what is hidden")
    full = (*q.shape[:3], k.shape[2])
    if mask is not None and (
        mask.device != q.device
        or mask.dim() > len(full)
        or any(n not in (1, wanted) for n, wanted in zip(reversed(mask.shape), reversed(full), strict=False))
    ):
        raise ValueError(f"mask {tuple(mask.shape)} on {mask.device}: must broadcast to {full}, on {q.device} as q is")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float,
    dropout: float = 0.0,
    mask: Tensor | None = None,
    window: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """out = softmax(scale Q K^T, masked) V and lse, the logarithm of each row's sum of exp, () of no key: 0 and -inf.

    q (B, H, T, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv) in float32, bf16 or fp16 -> (B, H, T, Dv) in their dtype, (B, H, T)
    float32, not differentiable. mask bool, True hides, broadcastable to (B, H, T, S). window (left, right): row i sees keys
    i - left to i + right, -1 for no end; causal is right = 0. dropout draws two numbers from torch's generator of q's
    device. deterministic: gradients that are bitwise the same in every run. Raises ValueError for what does not fit.
    """
    check(q, k, v, mask, dropout)
    left, right = window
    if left < -1 or right < -1:
        raise ValueError(f"window={window}: (left, right), at least 0, or -1 for no end")
    if scale < 0:  # the kernels take the maximum before they scale
        q, scale = -q, -scale
    scale = max(scale, LEAST)
    seed = torch.randint(-(2**63), 2**63 - 1, (2,), device=q.device) if dropout else None
    settings = left, 0 if causal else right, float(scale), float(dropout)
    out, lse = _Attention.apply(q, k, v, mask, seed, settings, deterministic)
    return out, lse
