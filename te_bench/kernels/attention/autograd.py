"""Fused attention for autograd and torch.compile: what is checked, the operators, the Function around them."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from te_bench.kernels.attention import gradients
from te_bench.kernels.attention.portable import backward as _backward_kernels
from te_bench.kernels.attention.portable import forward as _kernels
from te_bench.kernels.attention.portable.forward import Extent, Packed
from te_bench.kernels.attention.portable.scores import within_reach

WIDEST = 256
FARTHEST = 2**30  # of a window's ends, which the kernels add to int32 indices
LEAST = 1e-30  # of a scale: hidden scores are -inf, and 0 x -inf is NaN; all weights are equal with either
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _extent(q: Tensor, k: Tensor, left: int, right: int, mask: Tensor | None) -> Extent:
    left, right = min(left, FARTHEST), min(right, FARTHEST)
    if mask is None:
        return Extent(left, right, None)
    return Extent(left, right, mask.view(torch.uint8).expand(*q.shape[:3], k.shape[2]))


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None,
    left: int, right: int, scale: float, dropout: float,
    starts_q: Tensor | None = None, starts_k: Tensor | None = None, rows: int = 0, keys: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse, by the kernel; of an empty sum 0 and -inf. starts: of packed sequences, of at most `rows` and `keys`."""
    if q.numel() == 0 or k.shape[2] == 0:
        out, lse = _fake(q, k, v, mask, seed, left, right, scale, dropout)
        return out.zero_(), lse.fill_(float("-inf"))
    extent, packed = _extent(q, k, left, right, mask), _packed(starts_q, starts_k, rows, keys)
    q, k, v = within_reach(q), within_reach(k), within_reach(v)
    return _kernels.forward(q, k, v, extent, scale, dropout, seed, packed=packed)


def _packed(starts_q: Tensor | None, starts_k: Tensor | None, rows: int, keys: int) -> Packed | None:
    return None if starts_q is None or starts_k is None else Packed(starts_q, starts_k, rows, keys)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, seed: Tensor | None,
    left: int, right: int, scale: float, dropout: float, deterministic: bool,
    starts_q: Tensor | None = None, starts_k: Tensor | None = None, rows: int = 0, keys: int = 0, apart: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, by the kernels; apart: each in memory of its own, as torch.compile has been told."""
    if q.numel() == 0 or k.shape[2] == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    packed = _packed(starts_q, starts_k, rows, keys)
    # Rows that see no key: 0 x an infinite gradient is NaN.
    if mask is not None or 0 <= left < q.shape[2] - k.shape[2] or (packed is not None and starts_q is not starts_k):
        dout = dout.masked_fill((lse == float("-inf"))[..., None], 0.0)
    dout, q, k, v = (within_reach(x) for x in (dout, q, k, v))
    extent = _extent(q, k, left, right, mask)
    tensors = dout, q, k, v, out, lse, seed
    there = None if apart or packed is not None else gradients.room(q, k, v)
    return _backward_kernels.backward(extent, scale, dropout, deterministic, *tensors, packed=packed, gradients=there)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None,
    left: int, right: int, scale: float, dropout: float,
    starts_q: Tensor | None = None, starts_k: Tensor | None = None, rows: int = 0, keys: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, heads, length, _ = q.shape
    out = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(batch, heads, length, dtype=torch.float32)


def _fake_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, seed: Tensor | None,
    left: int, right: int, scale: float, dropout: float, deterministic: bool,
    starts_q: Tensor | None = None, starts_k: Tensor | None = None, rows: int = 0, keys: int = 0, apart: bool = True,
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
        starts_q: Tensor | None = None, starts_k: Tensor | None = None, longest: tuple[int, int] = (0, 0),
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        # Eager calls go straight to the launchers: a custom operator costs the host about 20 us a call.
        run = _forward_op if torch.compiler.is_compiling() else forward
        out, lse = run(q, k, v, mask, seed, *settings, starts_q, starts_k, *longest)
        ctx.save_for_backward(q, k, v, out, lse, mask, seed, starts_q, starts_k)
        ctx.settings, ctx.longest = (*settings, deterministic), longest
        ctx.apart = gradients.apart()
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 10
        run = _backward_op if torch.compiler.is_compiling() else functools.partial(backward, apart=ctx.apart)
        q, k, v, out, lse, mask, seed, *starts = ctx.saved_tensors
        made = run(dout, q, k, v, out, lse, mask, seed, *ctx.settings, *starts, *ctx.longest)
        return *made, None, None, None, None, None, None, None


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
    q, seed, settings = _prepared(q, causal, scale, dropout, window)
    out, lse = _Attention.apply(q, k, v, mask, seed, settings, deterministic)
    return out, lse


def _prepared(
    q: Tensor, causal: bool, scale: float, dropout: float, window: tuple[int, int]
) -> tuple[Tensor, Tensor | None, tuple[int, int, float, float]]:
    """q, the seed and the settings that the Function takes."""
    left, right = window
    if left < -1 or right < -1:
        raise ValueError(f"window={window}: (left, right), at least 0, or -1 for no end")
    if scale < 0:  # the kernels take the maximum before they scale
        q, scale = -q, -scale
    scale = max(scale, LEAST)
    seed = torch.randint(-(2**63), 2**63 - 1, (2,), device=q.device) if dropout else None
    return q, seed, (left, 0 if causal else right, float(scale), float(dropout))


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
    window: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """`attention` of sequences of many lengths, one after the other: out (rows, H, Dv) and lse (H, rows).

    q (rows, H, D), k (keys, Hkv, D), v (keys, Hkv, Dv). Sequence b is rows starts_q[b] to starts_q[b + 1], starts (sequences
    + 1,) int32 or int64, and likewise keys; longest: rows and keys of the longest, which no sequence may exceed (their
    values go unread here). Rows of no sequence are 0. Raises ValueError as `attention` does.
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
    check(q, k, v, None, dropout)
    q, seed, settings = _prepared(q, causal, scale, dropout, window)
    first = starts_q.contiguous()
    second = first if starts_k is starts_q else starts_k.contiguous()
    out, lse = _Attention.apply(q, k, v, None, seed, settings, deterministic, first, second, longest)
    return out[0].transpose(0, 1), lse[0]
