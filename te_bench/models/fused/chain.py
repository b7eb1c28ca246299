"""A decoder's blocks, given as parts, by the segments of models.fused.segment.

    stream -> norm -> qkv -> attention -> proj -> x + -> norm -> up -> activation -> down -> x + -> the next block's norm ...

The parts name the modules' own parameters, recipes and weights that an optimizer left in FP8; what is computed is what the
modules compute one by one, rounded where they round.

From pass to pass a block keeps one float32 stream and what the attention added to it, in bf16: their sum is added up again.
Where the scale is known beforehand the activation is made again by the kernel that makes its gradient, and not kept either,
and so is a gated one in half precision. In blocks of many weights (cost.ONCE) each weight's FP8 lasts in one layout, which
dgrad turns, and what qkv and proj read is cast again for wgrad. models.cost says how many bytes that leaves.
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
from te_bench.models.fused.segment import Entry, HeadColumns, Plan, Segment
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
    """The norm `last`, if there is one, of what a decoder's blocks make of x (B, T, C), of x's dtype.

    angles (T, d2): by which queries and keys turn; tables: they are tables of kernels.rotary. Raises ValueError for an x
    of float64, for the kernels compute in float32, and for an nn.Linear under te.autocast.
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
    """What the parts make of the stream (M, C), and of that the norm `last`, if there is one.

    dtype: of what the GEMMs make. attend(part, q, k, v), each (M, turns, columns), -> (M, heads head_dim). rotate(part): by
    what its q and k turn before. is_first_microbatch as in te.Linear.
    """
    training = torch.is_grad_enabled()
    scales, once = _scales(parts, training), training and _last_once(parts)
    read = _scales_of_inputs(parts, once)

    def product(part: LinearPart) -> tuple[Projection, list[Tensor | None]]:
        made, *weights = _product(part, dtype, training and not once, is_first_microbatch)
        return made, list(weights)  # torch.compile of torch 2.11 makes it a tuple

    y, proj, proj_scale, mlps, weights = None, None, None, [], []  # since the last attention
    for part in parts:
        if isinstance(part, MLPPart):
            (up, up_weights), (down, down_weights) = product(part.up), product(part.down)
            # Without a gate it is GEMMs' epilogues (kernels.gemm.half) that make activation and slope: it would cost a pass.
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
        plan = Plan(proj, tuple(mlps), part.norm.norm, entry, dtype, training, proj_scale)
        stream, *heads = Segment.apply(
            stream, y, plan, *weights, part.norm.weight, part.norm.bias, *qkv_weights, *gains
        )
        y = attend(part, *heads).to(dtype)
        proj, weights = product(part.proj)
        proj_scale, mlps = scale, []
    end = [] if last is None else [last.weight, last.bias]
    plan = Plan(proj, tuple(mlps), None if last is None else last.norm, None, dtype, training, proj_scale)
    made: Tensor = Segment.apply(stream, y, plan, *weights, *end)
    return made


def _columns(part: AttentionPart) -> HeadColumns:
    q, k = (heads * part.head_dim // part.turns for heads in (part.heads, part.groups))
    return HeadColumns(q, k, k)


def _product(
    part: LinearPart, dtype: torch.dtype, columnwise: bool, is_first_microbatch: bool | None
) -> tuple[Projection, Tensor, Tensor | None]:
    """The GEMMs of a part, its weight and its bias; columnwise: as Projection.of's."""
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
    """Whether FP8 weights of the parts last in one layout: of many elements, where the scale is known beforehand."""
    region = fp8.current
    if not region.enabled or region.unusual or torch.compiler.is_compiling():
        return False
    products = [p for part in parts for p in (part[1:3] if isinstance(part, MLPPart) else part[2:4])]
    weights = [weight for part in products for weight in part.weights]
    if sum(weight.numel() for weight in weights) < cost.ONCE or any(isinstance(w, Gathered) for w in weights):
        return False
    return all(gemms and gemms.recipe.epilogue("weight", gemms.weight) for gemms in map(_gemms, products))


def _scales_of_inputs(parts: Sequence[Part], once: bool) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """What each attention's qkv and proj have their inputs cast by, copied; None where their FP8 is to be kept."""
    products = [product for part in parts if isinstance(part, AttentionPart) for product in (part.qkv, part.proj)]
    known = [_gemms(product) for product in products] if once else []
    casts = [gemms.recipe.epilogue("input", gemms.input) for gemms in known if gemms.divided is None]
    if not casts or None in casts or len(casts) < len(known):
        return itertools.repeat((None, None))
    scales = torch.stack([cast.scale for cast in casts]).unbind()
    return zip(scales[::2], scales[1::2], strict=True)


def _scales(parts: Sequence[Part], training: bool) -> Iterator[Tensor | None]:
    """What each MLP's activation is cast by, copied, for scales move on between the passes; None where it is to be kept."""
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
