"""Our own FP8 attention in Triton: S, P V and dP by FP8 tensor cores, as `manual_fp8` defines it.

q, k, v and dO are cast to E4M3 by their heads' own amaxes before each pass. On Hopper, heads of 128 use Gluon kernels.
Their dQ is not summed in a fixed order, so deterministic gradients use Triton's kernels, as all other heads do. Grouped
queries are supported; masks, windows and dropout are not. The memory order of out is (B, T, H, Dv).
"""

import functools

import torch
import triton
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.attention import Backend, Problem, fp8_quantize, unsupported_in_fp8
from te_bench.kernels.attention.autograd import (
    Gradients,
    check,
    differentiable,
    empty_results,
    with_positive_scale,
    without_masks,
)
from te_bench.kernels.attention.fp8_quantize import E4M3, Heads
from te_bench.kernels.attention.hopper import fp8_launch
from te_bench.kernels.attention.portable import fp8_backward, fp8_forward
from te_bench.kernels.attention.portable.scores import within_reach

WIDEST = 128  # warpgroups cannot multiply wider tiles
#: In narrower heads so much padding is known to be 0 that ptxas 12.8 packs its bytes with stale register contents.
NARROWEST = 16


def unsupported(p: Problem) -> str | None:
    reason = unsupported_in_fp8(p)
    if reason is not None:
        return reason
    if p.device != "cuda" and not triton.knobs.runtime.interpret:
        return "needs an NVIDIA GPU (or TRITON_INTERPRET=1); take manual_fp8"
    if lack := architecture.lacks_fp8(p.capability):
        return lack
    if p.dtype == "fp64" or (p.dtype == "fp32" and not triton.knobs.runtime.interpret):
        return f"dtype {p.dtype}: bf16 and fp16 only"
    for head_dim in (p.head_dim, p.v_head_dim or p.head_dim):
        if not NARROWEST <= head_dim <= WIDEST:
            return f"head_dim {head_dim}: {NARROWEST} to {WIDEST}"
    return None


Made = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@functools.cache
def _has_gluon(device: torch.device) -> bool:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return architecture.lacks_gluon(device.type, capability, triton.knobs.runtime.interpret) is None


def _in_gluon(q: Tensor, features: int) -> bool:
    """Return whether Gluon kernels exist for q (B, H, T, D) and values of so many features."""
    return q.shape[3] == features == 128 and _has_gluon(q.device)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, keep: bool) -> Made:
    """Return out and lse; with keep also q, k, v in FP8 by rows, and their three scale_inv, for the backward pass."""
    q, k, v = within_reach(q), within_reach(k), within_reach(v)
    heads = fp8_quantize.quantize(q, k, v, keep=keep)
    out, lse = empty_results(q, v)
    in_gluon = _in_gluon(q, v.shape[3]) and fp8_launch.forward_pays(q)
    kernels = fp8_launch if in_gluon else fp8_forward
    kernels.forward(out, lse, heads, k.shape[2], causal, scale)
    q8, k8, v8 = (x.by_rows if keep else q.new_empty(0, dtype=E4M3) for x in heads)
    q_inv, k_inv, v_inv = (x.scale_inv for x in heads)
    return out, lse, q8, k8, v8, q_inv, k_inv, v_inv


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, out: Tensor, lse: Tensor, q8: Tensor, k8: Tensor, v8: Tensor,
    q_inv: Tensor, k_inv: Tensor, v_inv: Tensor, causal: bool, scale: float, keep: bool, deterministic: bool,
) -> Gradients:  # fmt: skip
    """Return dq, dk, dv for a forward pass with keep."""
    gradients = _empty_gradients(dout, q, k, out)
    dout, q, k = within_reach(dout), within_reach(q), within_reach(k)
    fp8 = Heads(q8, None, q_inv), Heads(k8, None, k_inv), Heads(v8, None, v_inv)
    in_gluon = not deterministic and _in_gluon(q, out.shape[3]) and fp8_launch.backward_pays(q, k)
    kernels = fp8_launch if in_gluon else fp8_backward
    kernels.backward(gradients, dout, q, k, out, lse, fp8, causal, scale)
    return gradients


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, keep: bool) -> Made:
    def kept(x: Tensor) -> Tensor:
        sizes = (*x.shape[:2], fp8_quantize.padded(x.shape[2]), fp8_quantize.width(x.shape[3])) if keep else (0,)
        return x.new_empty(sizes, dtype=E4M3)

    q_inv, k_inv, v_inv = (x.new_empty(x.shape[:2], dtype=torch.float32) for x in (q, k, v))
    return *empty_results(q, v), kept(q), kept(k), kept(v), q_inv, k_inv, v_inv


def _empty_gradients(dout: Tensor, q: Tensor, k: Tensor, out: Tensor, *_: object) -> Gradients:
    q, k = within_reach(q), within_reach(k)
    dv = torch.empty_like(k) if out.shape[3] == k.shape[3] else k.new_empty(*k.shape[:3], out.shape[3])
    return torch.empty_like(q), torch.empty_like(k), dv


attend_by_kernels = differentiable(
    "fp8_attention", _forward, _backward,
    fake_forward=_fake_forward, fake_backward=_empty_gradients, saved=2, side_by_side=False,
)  # fmt: skip


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float, deterministic: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute out = softmax(scale Q K^T, causal or not) V through FP8, and lse, each row's logsumexp.

    q (B, H, T, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv) in bf16 or fp16 -> (B, H, T, Dv) in their dtype, (B, H, T)
    float32, not differentiable; without keys 0 and -inf. deterministic: bitwise the same gradients in every run. Raises
    ValueError for unsupported inputs.
    """
    check(q, k, v, None, 0.0)
    if not all(NARROWEST <= x.shape[3] <= WIDEST for x in (q, v)):
        raise ValueError(f"head_dim {q.shape[3]}, of v {v.shape[3]}: {NARROWEST} to {WIDEST} in FP8; take triton")
    q, scale = with_positive_scale(q, scale)
    keep = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return attend_by_kernels((q, k, v), (causal, scale, keep), (deterministic,))


BACKEND = Backend(
    forward=without_masks(attention, "dropout and masks: FP8 attention has none"),
    unsupported=unsupported,
    kernels={"cuda": r"^fp8_attention_"},
    fp8=True,
)
