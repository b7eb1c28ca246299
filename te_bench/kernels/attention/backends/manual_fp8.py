"""FP8 attention from its definition, in plain PyTorch: what the fast FP8 kernels are held to. Runs anywhere.

q, k, v and dO are E4M3 with one scale per head, from the head's own amax (current scaling). Forward: S = scale Q K^T of
the FP8 operands; P = 2^(S - m_i) in float32, m_i the rows' maxima, and l_i the sums of P. 2^8 P, at most 256 of E4M3's
448, is rounded to E4M3 for O = P V / l_i, so a weight below 2^-18 of its row's largest becomes 0. Backward: S again,
and dP = dO V^T, of FP8 operands; P and dS = P (dP - delta) are rounded to the inputs' dtype for dV = P^T dO, dQ = scale
dS K and dK = scale dS^T Q with the unquantised dO, K and Q. delta is the rows' sums of O * dO with dP's dO, so that
rows of dS sum to 0.
dO is E4M3, not E5M2 as gradients elsewhere: a current scale per head gives 2^17 from the largest to the smallest
element, and dS is a difference, where a third mantissa bit matters. A head with a NaN or an infinity becomes all NaN
through its scale, because a saturating cast would hide it.
Source: Micikevicius et al., arXiv:2209.05433; Shah et al., "FlashAttention-3", arXiv:2407.08608, for P's 2^8.
"""

from typing import Any

import torch
from torch import Tensor

from te_bench.kernels.attention import Backend, unsupported_in_fp8
from te_bench.kernels.attention.sdpa import repeat_heads
from te_bench.kernels.autograd import cast, once_differentiable
from te_bench.kernels.quantize.backends.reference import scale_from_amax

FORMAT = torch.float8_e4m3fn
WEIGHTS = 2.0**8  # factor of P before rounding: its largest is 1, and E4M3 vanishes below 2^-10


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x (B, H, T, D) in E4M3, and scale_inv (B, H, 1, 1) float32, 1 / (448 / amax) per head; 1 for zeros.

    scale_inv is NaN for a head with a NaN or an infinity.
    """
    x = x.detach().float()
    amax = x.abs().amax((2, 3), keepdim=True) if x.numel() else x.new_zeros(*x.shape[:2], 1, 1)
    scale = scale_from_amax(amax, FORMAT)
    limit = torch.finfo(FORMAT).max
    data = (x * scale).clamp(-limit, limit).to(FORMAT)
    return data, torch.where(amax.isfinite(), scale.reciprocal(), torch.nan)


def _rounded(x: Tensor, like: Tensor) -> Tensor:
    """Return x (B, Hkv or H, T, D) rounded through FP8, in float32, repeated for each of like's heads."""
    data, scale_inv = quantize_heads(x)
    return repeat_heads(data.float() * scale_inv, like.shape[1])


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = _rounded(q, q) @ _rounded(k, q).mT * scale
    if causal:
        past = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~past & ~scores.isnan(), -torch.inf)
    return scores


def _sum_groups(x: Tensor, kv_heads: int) -> Tensor:
    return x.unflatten(1, (kv_heads, -1)).sum(2)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        scores = _scores(q, k, causal, scale)
        m_i = scores.amax(-1, keepdim=True)
        weights = WEIGHTS * (scores - m_i).exp()
        l_i = weights.sum(-1, keepdim=True)
        out = cast(weights.to(FORMAT).float() @ _rounded(v, q) / l_i, q.dtype)
        lse = (m_i + (l_i / WEIGHTS).log()).squeeze(-1)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = causal, scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        causal, scale = ctx.settings
        dout8 = _rounded(dout, q)
        weights = (_scores(q, k, causal, scale) - lse[..., None]).exp()
        delta = (out.float() * dout8).sum(-1, keepdim=True)
        dscores = (weights * (dout8 @ _rounded(v, q).mT - delta)).to(q.dtype).float()
        dv = weights.to(q.dtype).float().mT @ dout.float()
        dq = scale * dscores @ repeat_heads(k, q.shape[1]).float()
        dk = scale * dscores.mT @ q.float()
        groups = k.shape[1]
        return dq.to(q.dtype), _sum_groups(dk, groups).to(q.dtype), _sum_groups(dv, groups).to(q.dtype), None, None


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float) -> tuple[Tensor, Tensor]:
    """Compute out = softmax(scale Q K^T, causal or not) V through FP8, and lse, each row's logsumexp.

    q (B, H, T, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv) -> (B, H, T, Dv) in q's dtype, (B, H, T) float32, not
    differentiable; without keys 0 and -inf.
    """
    if q.numel() == 0 or k.shape[2] == 0:
        nothing = (q.sum() + k.sum() + v.sum()) * 0
        return nothing + q.new_zeros(*q.shape[:3], v.shape[3]), torch.full(
            q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device
        )
    out, lse = _Attention.apply(q, k, v, causal, scale)
    return out, lse


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, dropout: float = 0.0, mask: Tensor | None = None
) -> Tensor:
    """Return attention's out."""
    if dropout or mask is not None:
        raise ValueError("dropout and masks: FP8 attention has none")
    return attention(q, k, v, causal=causal, scale=scale)[0]


BACKEND = Backend(forward=forward, unsupported=unsupported_in_fp8, fp8=True)
