"""Our own fused attention for Hopper in Gluon: a warp fetches by TMA, two to four warpgroups multiply and weigh.

The kernels support grouped queries, but no masks, windows or dropout: `triton` does. The backward pass is bitwise
deterministic, except where hopper.launch takes its single kernel; there only on request.
Source: te-bench's own kernels, after Shah et al., "FlashAttention-3", arXiv:2407.08608.
"""

import torch
import triton
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.attention import Backend, Problem, gradients
from te_bench.kernels.attention.autograd import (
    Gradients,
    check,
    differentiable,
    with_positive_scale,
    without_masks,
)
from te_bench.kernels.attention.hopper import launch

INTERPRETED: bool = triton.knobs.runtime.interpret
WIDTHS = 64, 128


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
    return architecture.lacks_gluon(p.device, p.capability, INTERPRETED)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return launch.forward(q, k, v, causal, scale)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float,
    deterministic: bool, apart: bool = True,
) -> Gradients:  # fmt: skip
    """Return dq, dk, dv; apart: each in its own memory, as torch.compile expects."""
    there = None if apart else gradients.room(q, k, v)
    return launch.backward(dout, q, k, v, out, lse, causal, scale, deterministic, gradients=there)


def _empty_gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> Gradients:
    return launch.empty_gradients(q, k, v)


attend_by_kernels = differentiable(
    "gluon_attention", _forward, _backward, fake_backward=_empty_gradients, saved=3, side_by_side=True
)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError for inputs that these kernels do not support."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or x.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"{name} is {tuple(x.shape)} of {x.dtype}: four dimensions, bfloat16 or float16")
        if x.shape[3] not in WIDTHS or not x.is_cuda:
            raise ValueError(f"{name} has head_dim {x.shape[3]} on {x.device}: 64 or 128, on the GPU; take triton")
    check(q, k, v, None, 0.0)
    if v.shape[3] != k.shape[3]:
        raise ValueError(f"head_dim {k.shape[3]}, of v {v.shape[3]}: 64 or 128 for both")


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float, deterministic: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute out = softmax(scale Q K^T, causal or not) V and lse, each row's logsumexp; without keys 0 and -inf.

    q (B, H, T, D), k and v (B, Hkv, S, D), D of 64 or 128, in bf16 or fp16 -> (B, H, T, D) in their dtype, (B, H, T)
    float32, not differentiable. Tensors with strides that TMA does not support are copied. deterministic: bitwise the
    same gradients in every run. Raises ValueError for unsupported inputs.
    """
    _check(q, k, v)
    q, scale = with_positive_scale(q, scale)
    return attend_by_kernels((q, k, v), (causal, scale), (deterministic,))


BACKEND = Backend(
    forward=without_masks(attention, "dropout and masks: Gluon's attention has none; take triton"),
    unsupported=unsupported,
    kernels={"cuda": r"^gluon_attention_(forward|backward_(rows|keys|fused)|delta)_kernel"},
)
