"""Shared code of te-bench's own fused attentions: checks, operators for torch.compile, and the autograd Function.

A rival brings two launchers. forward(q, k, v, *rest) returns out, lse and further tensors to save; backward(dout,
*saved, out, lse, *kept, *settings) returns dq, dk, dv.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_bench.kernels.attention import gradients
from te_bench.kernels.autograd import once_differentiable
from te_bench.kernels.operators import define

LEAST = 1e-30  # smallest scale: hidden scores are -inf, and 0 x -inf is NaN; both give equal weights
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

Results = tuple[Tensor, ...]
Gradients = tuple[Tensor, Tensor, Tensor]


def check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> None:
    """Raise ValueError for inputs that do not form an attention."""
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


def with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return q and a positive scale with the same scores: the kernels take the maximum before they scale."""
    return (-q, max(float(-scale), LEAST)) if scale < 0 else (q, max(float(scale), LEAST))


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate out (B, H, T, Dv), in memory order (B, T, H, Dv), and lse (B, H, T) float32."""
    batch, heads, rows, _ = q.shape
    out = q.new_empty(batch, rows, heads, v.shape[3]).transpose(1, 2)
    return out, q.new_empty(batch, heads, rows, dtype=torch.float32)


def without_masks(attention: Callable[..., tuple[Tensor, Tensor]], refusal: str) -> Callable[..., Tensor]:
    """Make a backend's forward that returns only out; it raises ValueError(refusal) if masks or dropout are given.

    Gradients are deterministic if torch.use_deterministic_algorithms requests it.
    """

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, dropout: float = 0.0, mask: Tensor | None = None
    ) -> Tensor:
        if dropout or mask is not None:
            raise ValueError(refusal)
        deterministic = torch.are_deterministic_algorithms_enabled()
        return attention(q, k, v, causal=causal, scale=scale, deterministic=deterministic)[0]

    return forward


def differentiable(
    name: str,
    forward: Callable[..., Results],
    backward: Callable[..., Results],
    *,
    fake_backward: Callable[..., Results],
    saved: int,
    side_by_side: bool,
    fake_forward: Callable[..., Results] = lambda q, k, v, *_: empty_results(q, v),
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return apply(tensors, settings, for_backward=()) -> out and lse; only out is differentiable, and once.

    The launchers' annotations are the schemas of the operators te_bench::{name}_forward and te_bench::{name}_backward,
    whose shapes and strides the fakes tell. Both launchers' arguments end with settings, backward's also with
    for_backward. saved: how many of the first tensors backward takes. side_by_side: backward also takes apart=False.
    """

    @functools.wraps(forward)
    def run_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Results:
        if q.numel() == 0 or k.shape[2] == 0:  # an empty sum is 0, its logarithm -inf
            out, lse, *kept = fake_forward(q, k, v, *rest)
            return out.zero_(), lse.fill_(float("-inf")), *kept
        return forward(q, k, v, *rest)

    @functools.wraps(backward)
    def run_backward(dout: Tensor, q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Results:
        if q.numel() == 0 or k.shape[2] == 0:
            return tuple(dx.zero_() for dx in fake_backward(dout, q, k, *rest))
        return backward(dout, q, k, *rest, **options)

    forward_op = define(f"{name}_forward", run_forward, fake_forward)
    backward_op = define(f"{name}_backward", run_backward, fake_backward)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, settings: tuple[Any, ...], for_backward: tuple[Any, ...], *tensors: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            # Eager calls go straight to the launchers, because a custom operator costs the host about 20 us a call.
            run = forward_op if torch.compiler.is_compiling() else run_forward
            arguments: Any = (*tensors, *settings)
            out, lse, *kept = run(*arguments)
            ctx.save_for_backward(*tensors[:saved], out, lse, *kept)
            ctx.settings, ctx.others = (*settings, *for_backward), len(tensors) - 3
            ctx.options = {"apart": gradients.apart()} if side_by_side else {}
            ctx.mark_non_differentiable(lse)
            ctx.set_materialize_grads(False)
            return out, lse

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
            others = (None,) * ctx.others
            if dout is None:
                return None, None, None, None, None, *others
            if torch.compiler.is_compiling():
                made = backward_op(dout, *ctx.saved_tensors, *ctx.settings)
            else:
                made = run_backward(dout, *ctx.saved_tensors, *ctx.settings, **ctx.options)
            return None, None, *made, *others

    def apply(
        tensors: tuple[Tensor | None, ...], settings: tuple[Any, ...], for_backward: tuple[Any, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        out, lse = Attention.apply(settings, for_backward, *tensors)
        return out, lse

    return apply
