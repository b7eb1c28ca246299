"""Our own fused attention for Hopper in Gluon: a warp fetches by TMA, two to four warpgroups multiply and weigh.

Keys and values shared by heads are the kernels' own; masks, windows and dropout are not: `triton` has them. The backward
pass adds in a fixed order, so its gradients are bitwise the same in every run, but where _gluon_launch has its one kernel
for the faster: there for who asks. Source: te-bench's own kernels, after Shah et al., "FlashAttention-3", arXiv:2407.08608.
"""

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from te_bench.kernels import gluon
from te_bench.kernels.attention import Backend, Problem, gradients

try:
    from te_bench.kernels.attention.hopper import launch
except ImportError:
    MISSING: str | None = gluon.ABSENT
else:
    MISSING = None
INTERPRETED: bool = triton.knobs.runtime.interpret
WIDTHS = 64, 128
LEAST = 1e-30  # of a scale: hidden scores are -inf, and 0 x -inf is NaN; all weights are equal with either


def unsupported(p: Problem) -> str | None:
    if p.dtype not in ("bf16", "fp16"):
        return f"dtype {p.dtype}: bf16 and fp16 only"
    if p.head_dim not in WIDTHS or p.v_head_dim not in (None, p.head_dim):
        return f"head_dim {p.head_dim}, of v {p.v_head_dim or p.head_dim}: 64 or 128 for both"
    if p.mask:
        return "mask: only the causal one; take triton"
    if p.window is not None:
        return "window: only the causal mask; take triton"
    if p.dropout:
        return f"dropout {p.dropout}: it has none; take triton"
    return gluon.unsupported(p.device, p.capability, MISSING, INTERPRETED)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse, by the kernel; of an empty sum 0 and -inf."""
    if q.numel() == 0 or k.shape[2] == 0:
        out, lse = _fake(q, k, v, causal, scale)
        return out.zero_(), lse.fill_(float("-inf"))
    return launch.forward(q, k, v, causal, scale)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float,
    deterministic: bool, apart: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, by the kernels; apart: each in memory of its own, as torch.compile has been told."""
    if q.numel() == 0 or k.shape[2] == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    there = None if apart else gradients.room(q, k, v)
    return launch.backward(dout, q, k, v, out, lse, causal, scale, deterministic, gradients=there)


def _fake(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, rows, width = q.shape
    out = q.new_empty(batch, rows, heads, width).transpose(1, 2)
    return out, q.new_empty(batch, heads, rows, dtype=torch.float32)


def _fake_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float,
    deterministic: bool, apart: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_forward_op = torch.library.custom_op("te_bench::gluon_attention_forward", _forward, mutates_args=())
_backward_op = torch.library.custom_op("te_bench::gluon_attention_backward", _backward, mutates_args=())
_forward_op.register_fake(_fake)
_backward_op.register_fake(_fake_backward)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, deterministic: bool
    ) -> tuple[Tensor, Tensor]:
        run = _forward_op if torch.compiler.is_compiling() else _forward  # an operator costs the host 20 us a call
        out, lse = run(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings, ctx.apart = (causal, scale, deterministic), gradients.apart()
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 6
        run = _backward_op if torch.compiler.is_compiling() else functools.partial(_backward, apart=ctx.apart)
        return *run(dout, *ctx.saved_tensors, *ctx.settings), None, None, None


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError for what these kernels cannot take."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or x.dtype not in (torch.bfloat16, torch.float16) or x.dtype is not q.dtype:
            raise ValueError(
                f"{name} is {tuple(x.shape)} of {x.dtype}: four dimensions, bfloat16 or float16, and all of q's {q.dtype}"
            )
        if x.shape[3] not in WIDTHS or not x.is_cuda or x.device != q.device:
            raise ValueError(
                f"{name} has head_dim {x.shape[3]} on {x.device}: 64 or 128, on the GPU that q is on; take triton"
            )
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or v.shape != k.shape or not k.shape[1]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: (B, H, T, D) and twice (B, Hkv, S, D)"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads, {k.shape[1]} key heads: the latter must divide the former")


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float, deterministic: bool = False
) -> tuple[Tensor, Tensor]:
    """out = softmax(scale Q K^T, causal or not) V and lse, the logarithm of each row's sum of exp; of no key 0 and -inf.

    q (B, H, T, D), k and v (B, Hkv, S, D), D of 64 or 128, in bf16 or fp16 -> (B, H, T, D) in their dtype, (B, H, T)
    float32, not differentiable. Strides that TMA cannot take are copied. deterministic: gradients that are bitwise the same
    in every run. Raises ValueError for what does not fit.
    """
    _check(q, k, v)
    if scale < 0:  # the kernels take the maximum before they scale
        q, scale = -q, -scale
    out, lse = _Attention.apply(q, k, v, causal, max(float(scale), LEAST), deterministic)
    return out, lse


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, dropout: float = 0.0, mask: Tensor | None = None
) -> Tensor:
    """attention's out; gradients are deterministic where torch.use_deterministic_algorithms asks for it."""
    if dropout or mask is not None:
        raise ValueError("dropout and masks: Gluon's attention has none; take triton")
    deterministic = torch.are_deterministic_algorithms_enabled()
    return attention(q, k, v, causal=causal, scale=scale, deterministic=deterministic)[0]


BACKEND = Backend(
    forward=forward,
    unsupported=unsupported,
    kernels={"cuda": r"^gluon_attention_(forward|backward_(rows|keys|fused)|delta)_kernel"},
)
