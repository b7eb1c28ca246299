"""Compute a decoder's blocks, given as parts, by the segments of models.fused.segment.

    stream -> norm -> qkv -> attention -> proj -> x + -> norm -> up -> activation -> down -> x + -> the next block's norm ...

The parts name the modules' own parameters, recipes and the FP8 weights that an optimizer wrote. The result is what the
modules compute one by one, rounded at the same places.
For the backward pass a block saves one float32 stream and attention's bf16 branch; their sum is recomputed. With a
known scale, or gated in half precision, the activation is recomputed by the kernel of its gradient, not saved. Above
cost.ONCE weight elements each FP8 weight has one layout, which dgrad transposes, and wgrad casts the inputs of qkv and
proj again. models.cost counts the bytes.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from te_bench.kernels.activation import KINDS
from te_bench.kernels.attention.gradients import read_at_once
from te_bench.models import cost, fp8
from te_bench.models.fused import segment
from te_bench.models.fused.projection import Projection, Stacked
from te_bench.models.fused.segment import Entry, HeadColumns, Segment, SegmentPlan
from te_bench.models.modules.activations import FLOATS, compute_dtype
from te_bench.models.modules.fp8_module import Fp8Module
from te_bench.models.modules.gathered import Gathered
from te_bench.models.modules.rotary import Rotation
from te_bench.models.parts import AttentionPart, LinearPart, MLPPart, NormPart, Part

Attend = Callable[[AttentionPart, Tensor, Tensor, Tensor], Tensor]
Rotate = Callable[[AttentionPart], Rotation | None]


def run(
    parts: Sequence[Part], last: NormPart | None, x: Tensor, angles: Tensor | None = None, tables: bool = False
) -> Tensor:
    """Compute a decoder's blocks on x (B, T, C), and the norm `last` if given; the result has x's dtype.

    angles (T, d2) rotate queries and keys; tables: they are tables of kernels.rotary. Raises ValueError for float64 x
    (the kernels compute in float32), and for an nn.Linear under te.autocast.
    """
    B, T, C = x.shape
    if x.dtype not in FLOATS:
        raise ValueError(f"blocks fused: float32, bfloat16 or float16, got {x.dtype}; build the model without blocks")

    def attend(part: AttentionPart, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.view(B, T, -1, part.head_dim).transpose(1, 2) for t in (q, k, v))
        scale = 1 / math.sqrt(part.head_dim)
        with nullcontext() if torch.compiler.is_compiling() else read_at_once():
            y: Tensor = part.module.attention(q, k, v, causal=True, scale=scale, dropout=0.0)
        return y.transpose(1, 2).reshape(B * T, -1)

    def rotate(part: AttentionPart) -> Rotation | None:
        if angles is None:
            return None
        return Rotation(angles, angles, part.turns, _columns(part), part.head_dim, (B, T), True, False, tables)

    return compute(parts, last, x.reshape(B * T, C), compute_dtype(x), attend, rotate).view(B, T, C)


def compute(
    parts: Sequence[Part],
    last: NormPart | None,
    stream: Tensor,
    dtype: torch.dtype,
    attend: Attend,
    rotate: Rotate,
    is_first_microbatch: bool | None = None,
) -> Tensor:
    """Compute the parts on the stream (M, C), and the norm `last` if given.

    dtype: of the GEMMs' outputs. attend(part, q, k, v), each (M, turns, columns), returns (M, heads head_dim).
    rotate(part) returns the rotation of its q and k. is_first_microbatch as in te.Linear.
    """
    training = torch.is_grad_enabled()
    scales, once = _scales(parts, training), training and _last_once(parts)
    read = _scales_of_inputs(parts, once)

    def product(part: LinearPart) -> tuple[Projection, list[Tensor | None]]:
        made, *weights = _product(part, dtype, training and not once, is_first_microbatch)
        return made, list(weights)  # torch.compile of torch 2.11 returns a tuple here

    y, proj, proj_scale, mlps, weights = None, None, None, [], []  # the state since the last attention
    for part in parts:
        if isinstance(part, MLPPart):
            (up, up_weights), (down, down_weights) = product(part.up), product(part.down)
            # Recomputing an ungated activation would cost a pass: GEMM epilogues (kernels.gemm.half) compute it.
            again = down.gemms is None and KINDS[part.activation][1]
            mlps.append(segment.MLP(part.norm.norm, up, down, part.activation, next(scales), again))
            weights += [part.norm.weight, part.norm.bias, *up_weights, *down_weights]
            continue
        qkv, qkv_weights = product(part.qkv)
        q_norm, k_norm = part.q_norm, part.k_norm
        qkv_scale, scale = next(read)
        norms = q_norm and q_norm.norm, k_norm and k_norm.norm
        entry = Entry(qkv, _columns(part), part.head_dim, *norms, rotate(part), qkv_scale)
        gains = [norm.weight for norm in (q_norm, k_norm) if norm is not None]
        plan = SegmentPlan(proj, tuple(mlps), part.norm.norm, entry, dtype, training, proj_scale)
        stream, *heads = Segment.apply(
            stream, y, plan, *weights, part.norm.weight, part.norm.bias, *qkv_weights, *gains
        )
        y = attend(part, *heads).to(dtype)
        proj, weights = product(part.proj)
        proj_scale, mlps = scale, []
    end = [] if last is None else [last.weight, last.bias]
    plan = SegmentPlan(proj, tuple(mlps), None if last is None else last.norm, None, dtype, training, proj_scale)
    made: Tensor = Segment.apply(stream, y, plan, *weights, *end)
    return made


def _columns(part: AttentionPart) -> HeadColumns:
    q, k = (heads * part.head_dim // part.turns for heads in (part.heads, part.groups))
    return HeadColumns(q, k, k)


def _product(
    part: LinearPart, dtype: torch.dtype, columnwise: bool, is_first_microbatch: bool | None
) -> tuple[Projection, Tensor, Tensor | None]:
    """Return the GEMMs of a part, its weight and its bias. columnwise: as in Projection.of."""
    module, weight, bias, beside = part.module, part.weight, part.bias, part.beside
    if beside and bias is not None:
        bias = torch.cat([bias, *(other.bias for other in beside)])
    weights = part.weights
    recipe = fp8.current.recipe
    kept = recipe is not None and recipe.keeps_blocks and type(module) is nn.Linear
    if kept or not fp8.current.enabled:
        weight = Stacked.apply(dtype, *weights) if beside else weight.to(dtype)
        return Projection(None, None), weight, None if bias is None else bias.to(dtype)
    if not isinstance(module, Fp8Module):
        raise ValueError(
            f"blocks fused under te.autocast need te.Linear, and this model has {type(module).__name__}: "
            "build it with a recipe"
        )
    projection = Projection.of(module, weights, part.gemm, is_first_microbatch, columnwise, beside)
    return projection, Stacked.apply(None, *weights) if beside else weight, bias


def _last_once(parts: Sequence[Part]) -> bool:
    """Return whether the parts' FP8 weights are stored in one layout: many elements, scales known beforehand."""
    region = fp8.current
    if not region.enabled or region.unusual or torch.compiler.is_compiling():
        return False
    products = [p for part in parts for p in (part[1:3] if isinstance(part, MLPPart) else part[2:4])]
    weights = [weight for part in products for weight in part.weights]
    if sum(weight.numel() for weight in weights) < cost.ONCE or any(isinstance(w, Gathered) for w in weights):
        return False
    return all(gemms and gemms.recipe.epilogue("weight", gemms.weight) for gemms in map(_gemms, products))


def _scales_of_inputs(parts: Sequence[Part], once: bool) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Yield copies of the scales of each attention's qkv and proj inputs; None to save their FP8 instead."""
    products = [product for part in parts if isinstance(part, AttentionPart) for product in (part.qkv, part.proj)]
    known = [_gemms(product) for product in products] if once else []
    casts = [gemms.recipe.epilogue("input", gemms.input) for gemms in known if gemms.divided is None]
    if not casts or None in casts or len(casts) < len(known):
        return itertools.repeat((None, None))
    scales = torch.stack([cast.scale for cast in casts]).unbind()
    return zip(scales[::2], scales[1::2], strict=True)


def _scales(parts: Sequence[Part], training: bool) -> Iterator[Tensor | None]:
    """Yield a copy of each MLP's activation scale, since scales change between passes; None to save the FP8 instead."""
    mlps = [part for part in parts if isinstance(part, MLPPart)]
    absent: list[Tensor | None] = [None] * len(mlps)
    region = fp8.current
    if not (training and region.enabled) or region.unusual or torch.compiler.is_compiling():
        return iter(absent)
    known = [_gemms(part.down) for part in mlps]
    if not all(known):
        return iter(absent)
    casts = [gemms.recipe.epilogue("input", gemms.input) for gemms in known]
    gradients = [gemms.recipe.epilogue("grad_output", gemms.grad_output) for gemms in known]
    missing = not casts or None in (*casts, *gradients)
    return iter(absent if missing else torch.stack([cast.scale for cast in casts]).unbind())


def _gemms(part: LinearPart) -> Any:
    return part.module.gemms(part.gemm) if isinstance(part.module, Fp8Module) else None
