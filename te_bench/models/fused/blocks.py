"""GPT-2's blocks from one attention to the next, by the segments of models.fused.segment.

    attention -> c_proj -> x + -> ln_2 -> c_fc -> GELU -> c_proj -> x + -> the next block's ln_1 -> c_attn -> attention

The modules are those of models.zoo.gpt, with their parameters, recipes and weights that an optimizer left in FP8; what is
computed is what they compute one by one, rounded where they round.

From pass to pass a block keeps one float32 stream and what the attention added to it, in bf16: their sum is added up again.
Where the scale is known beforehand GELU's output is made again by the kernel that makes its gradient, and not kept either:
models.cost says how many bytes that leaves.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from te_bench.kernels.attention.gradients import read_at_once
from te_bench.models import fp8
from te_bench.models.fused.projection import Projection
from te_bench.models.fused.segment import Between, Enter, HeadColumns, Segment
from te_bench.models.modules.fp8_module import FLOATS, Fp8Module, compute_dtype
from te_bench.models.modules.layernorm import Norm
from te_bench.models.modules.plain import are_plain, why_not_plain

GELU = {"none": "gelu_erf", "tanh": "gelu"}  # torch's `approximate` -> a kind of kernels.activation

Attend = Callable[..., Tensor]


def _linear(module: Any, dtype: torch.dtype, training: bool) -> tuple[Projection, Tensor, Tensor | None]:
    """The GEMMs of an nn.Linear or a te Linear, its weight and its bias."""
    weight, bias = module.weight, module.bias
    if not fp8.current.enabled:
        return Projection(None, None), weight.to(dtype), None if bias is None else bias.to(dtype)
    if not isinstance(module, Fp8Module):
        raise ValueError(
            f"blocks fused under te.autocast need te.Linear, and this model has {type(module).__name__}: "
            "build it with a recipe"
        )
    return Projection.of(module, weight, 0, None, training), weight, bias


def _norm(norm: nn.LayerNorm) -> Norm:
    return Norm(norm.eps, False, "layernorm")


def _scales(blocks: list[Any], training: bool) -> list[Tensor | None]:
    """What each block's GELU is cast by, copied, for scales move on between the passes; None where it is to be kept."""
    region = fp8.current
    absent: list[Tensor | None] = [None] * len(blocks)
    if not (training and region.enabled) or region.unusual or torch.compiler.is_compiling():
        return absent
    # In the order in which they multiply: who asks first makes a state, and ranks, of which one may have evaluated before,
    # share their amaxes in the order of the states.
    order = [(b.attn.c_attn, b.attn.c_proj, b.mlp.c_fc, b.mlp.c_proj) for b in blocks]
    gemms = [[linear.gemms() for linear in linears][-1] for linears in order]
    casts = [known.recipe.epilogue("input", known.input) for known in gemms]
    gradients = [known.recipe.epilogue("grad_output", known.grad_output) for known in gemms]
    return absent if None in (*casts, *gradients) else [*torch.stack([cast.scale for cast in casts]).unbind()]


class NotFused(UserWarning):
    """Blocks that were to be fused are computed one module after the other; the message says why."""


def can_fuse(blocks: nn.ModuleList, last: nn.LayerNorm) -> bool:
    """Whether this pass needs no module by itself, as calibration and hooks do.

    torch.compile cannot trace the question: what it compiles is fused.
    """
    if fp8.current.calibrating:
        return False
    return torch.compiler.is_compiling() or are_plain((*blocks.modules(), last))


def why_not(blocks: nn.ModuleList, last: nn.LayerNorm) -> str:
    """What a pass that cannot be fused needs the modules for."""
    if fp8.current.calibrating:
        return "calibration looks at the modules' inputs"
    named = ((f"h.{name}" if name else "h", module) for name, module in blocks.named_modules())
    return why_not_plain((*named, ("ln_f", last)))


def run(blocks: Iterable[Any], last: nn.LayerNorm, x: Tensor, *, attend: Attend, heads: int, gelu: str) -> Tensor:
    """`last` of what the blocks make of x (B, T, C); attend is kernels.attention's forward, gelu torch's `approximate`.

    The result is of x's dtype. Raises ValueError for an x of float64, for the kernels compute in float32, and for an
    nn.Linear under te.autocast.
    """
    B, T, C = x.shape
    if x.dtype not in FLOATS:
        raise ValueError(f"blocks fused: float32, bfloat16 or float16, got {x.dtype}; build the model without blocks")
    dtype, training = compute_dtype(x), torch.is_grad_enabled()
    layers = list(blocks)
    stream = x.reshape(B * T, C)
    first = layers[0]
    after, w, b = _linear(first.attn.c_attn, dtype, training)
    columns = HeadColumns(C, C, C)
    segment = Segment(None, None, None, after, (None, _norm(first.ln_1)), columns, GELU[gelu], dtype, training)
    stream, *qkv = Enter.apply(stream, first.ln_1.weight, first.ln_1.bias, w, b, segment)
    for block, following, scale in zip(layers, [*layers[1:], None], _scales(layers, training), strict=True):
        q, k, v = (t.view(B, T, heads, -1).transpose(1, 2) for t in qkv)
        with nullcontext() if torch.compiler.is_compiling() else read_at_once():
            y = attend(q, k, v, causal=True, scale=1 / math.sqrt(C // heads), dropout=0.0)
        y = y.transpose(1, 2).reshape(B * T, C)
        linears = [_linear(m, dtype, training) for m in (block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj)]
        norm = last if following is None else following.ln_1
        end: Any = (None, None, None) if following is None else _linear(following.attn.c_attn, dtype, training)
        (proj, proj_w, proj_b), (fc, fc_w, fc_b), (out, out_w, out_b) = linears
        norms = _norm(block.ln_2), _norm(norm)
        segment = Segment(proj, fc, out, end[0], norms, columns, GELU[gelu], dtype, training, scale)
        weights = (proj_w, proj_b, block.ln_2.weight, block.ln_2.bias, fc_w, fc_b, out_w, out_b)
        made = Between.apply(stream, y.to(dtype), segment, *weights, norm.weight, norm.bias, *end[1:])
        if following is not None:
            stream, *qkv = made
    return made.view(B, T, C)
