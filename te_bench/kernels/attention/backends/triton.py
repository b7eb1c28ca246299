"""Our own fused attention in Triton: FlashAttention-2's algorithm with Hopper's tiles, whatever the mask.

The kernel supports grouped queries, windows and any mask; keys outside a window are not read. Dropout is Philox, seeded
by one draw of torch's generator, so that the backward pass repeats it. The memory order of out is (B, T, H, Dv).
"""

from typing import Any

import torch
import triton
from torch import Tensor

from te_bench.kernels.attention import Backend, Problem, gradients
from te_bench.kernels.attention.autograd import (
    Gradients,
    check,
    differentiable,
    with_positive_scale,
)
from te_bench.kernels.attention.portable import backward as backward_kernels
from te_bench.kernels.attention.portable import forward as forward_kernel
from te_bench.kernels.attention.portable.backward import Attended
from te_bench.kernels.attention.portable.forward import Extent, Packed
from te_bench.kernels.attention.portable.scores import within_reach

WIDEST = 256
FARTHEST = 2**30  # limit of a window's ends, which the kernels add to int32 indices


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, starts_q: Tensor | None,
    starts_k: Tensor | None, left: int, right: int, scale: float, dropout: float, rows: int, keys: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out and lse; starts: of packed sequences of at most `rows` and `keys`."""
    extent, packed = _find_extent(q, k, left, right, mask), _pack(starts_q, starts_k, rows, keys)
    q, k, v = within_reach(q), within_reach(k), within_reach(v)
    return forward_kernel.forward(q, k, v, extent, scale, dropout, seed, packed=packed)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, starts_q: Tensor | None,
    starts_k: Tensor | None, out: Tensor, lse: Tensor, left: int, right: int, scale: float, dropout: float, rows: int,
    keys: int, apart: bool = True,
) -> Gradients:  # fmt: skip
    """Return dq, dk, dv; apart: each in its own memory, as torch.compile expects."""
    packed = _pack(starts_q, starts_k, rows, keys)
    # In rows without visible keys, 0 x an infinite gradient would be NaN.
    if mask is not None or 0 <= left < q.shape[2] - k.shape[2] or (packed is not None and starts_q is not starts_k):
        dout = dout.masked_fill((lse == float("-inf"))[..., None], 0.0)
    dout, q, k, v = (within_reach(x) for x in (dout, q, k, v))
    extent = _find_extent(q, k, left, right, mask)
    there = None if apart or packed is not None else gradients.room(q, k, v)
    attended = Attended(q, k, v, out, lse, seed)
    return backward_kernels.backward(attended, dout, extent, scale, dropout, packed, there)


def _find_extent(q: Tensor, k: Tensor, left: int, right: int, mask: Tensor | None) -> Extent:
    left, right = min(left, FARTHEST), min(right, FARTHEST)
    if mask is None:
        return Extent(left, right, None)
    return Extent(left, right, mask.view(torch.uint8).expand(*q.shape[:3], k.shape[2]))


def _pack(starts_q: Tensor | None, starts_k: Tensor | None, rows: int, keys: int) -> Packed | None:
    return None if starts_q is None or starts_k is None else Packed(starts_q, starts_k, rows, keys)


def _empty_gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> Gradients:
    dq, dk, dv = (torch.empty_like(within_reach(x)) for x in (q, k, v))
    return dq, dk, dv


attend_by_kernels = differentiable(
    "attention", _forward, _backward, fake_backward=_empty_gradients, saved=7, side_by_side=True
)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> None:
    check(q, k, v, mask, dropout)
    if max(q.shape[3], v.shape[3]) > WIDEST:
        raise ValueError(f"head_dim {q.shape[3]}, of v {v.shape[3]}: at most {WIDEST}; take another attention backend")


def unsupported(p: Problem) -> str | None:
    if p.device != "cuda" and not triton.knobs.runtime.interpret:
        return "needs an NVIDIA GPU (or TRITON_INTERPRET=1)"
    if p.capability is not None and p.capability < (8, 0):
        return f"compute capability {p.capability[0]}.{p.capability[1]} < 8.0"
    if p.dtype == "fp64" or (p.dtype == "fp32" and not triton.knobs.runtime.interpret):
        return f"dtype {p.dtype}: bf16 and fp16 only"
    for head_dim in (p.head_dim, p.v_head_dim or p.head_dim):
        if head_dim > WIDEST:
            return f"head_dim {head_dim} > {WIDEST}"
    return None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float,
    dropout: float = 0.0,
    mask: Tensor | None = None,
    window: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute out = softmax(scale Q K^T, masked) V and lse, each row's logsumexp; without visible keys 0 and -inf.

    q (B, H, T, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv) in float32, bf16 or fp16 -> (B, H, T, Dv) in their dtype, (B, H,
    T) float32, not differentiable. mask bool, True hides, broadcastable to (B, H, T, S). window (left, right): row i
    sees keys i - left to i + right, -1 for no end; causal is right = 0. dropout draws two numbers from torch's
    generator of q's device. Gradients are bitwise the same in every run. Raises ValueError for unsupported inputs.
    """
    _check(q, k, v, mask, dropout)
    q, seed, settings = _prepare(q, causal, scale, dropout, window)
    return attend_by_kernels((q, k, v, mask, seed, None, None), (*settings, 0, 0))


def _prepare(
    q: Tensor, causal: bool, scale: float, dropout: float, window: tuple[int, int] | None
) -> tuple[Tensor, Tensor | None, tuple[int, int, float, float]]:
    """Return q, the seed, and left, right, scale and dropout for the launchers."""
    left, right = (-1, -1) if window is None else window
    if left < -1 or right < -1:
        raise ValueError(f"window={window}: (left, right), at least 0, or -1 for no end")
    q, scale = with_positive_scale(q, scale)
    seed = torch.randint(-(2**63), 2**63 - 1, (2,), device=q.device) if dropout else None
    return q, seed, (left, 0 if causal else right, scale, float(dropout))


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest: tuple[int, int],
    *,
    causal: bool = False,
    scale: float,
    dropout: float = 0.0,
    window: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `attention` of packed sequences: out (rows, H, Dv) and lse (H, rows).

    q (rows, H, D), k (keys, Hkv, D), v (keys, Hkv, Dv). Sequence b is rows starts_q[b] to starts_q[b + 1], starts
    (sequences + 1,) int32 or int64, and likewise keys. longest: rows and keys of the longest sequence, which is not
    checked here. Rows of no sequence are 0. Raises ValueError as `attention` does.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{name} is {tuple(x.shape)}: packed sequences are (rows, heads, features)")
    for name, starts in (("starts_q", starts_q), ("starts_k", starts_k)):
        if starts.dtype not in (torch.int32, torch.int64) or starts.dim() != 1 or starts.device != q.device:
            raise ValueError(
                f"{name} is {tuple(starts.shape)} of {starts.dtype} on {starts.device}: (sequences + 1,), int32"
            )
    if len(starts_q) != len(starts_k) or len(starts_q) < 2:
        raise ValueError(
            f"starts_q has {len(starts_q)} entries, starts_k {len(starts_k)}: one more than sequences, both"
        )
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    _check(q, k, v, None, dropout)
    q, seed, settings = _prepare(q, causal, scale, dropout, window)
    first = starts_q.contiguous()
    second = first if starts_k is starts_q else starts_k.contiguous()
    out, lse = attend_by_kernels((q, k, v, None, seed, first, second), (*settings, *longest))
    return out[0].transpose(0, 1), lse[0]


def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Return attention's out; its gradients are bitwise the same in every run."""
    return attention(q, k, v, **options)[0]


def packed(q: Tensor, k: Tensor, v: Tensor, *sequences: Any, **options: Any) -> Tensor:
    """Return packed_attention's out."""
    return packed_attention(q, k, v, *sequences, **options)[0]


BACKEND = Backend(
    forward=forward,
    unsupported=unsupported,
    kernels={"cuda": r"^attention_(forward|backward_(rows|keys))_kernel"},
    windows=True,
    packed=packed,
)
