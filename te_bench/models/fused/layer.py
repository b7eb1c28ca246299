"""te.TransformerLayer under FP8 by the segments of fused.segment: the same parameters, states and caches in fewer passes.

Where something needs the modules one by one, as hooks, dropout and torch.compile do, which fuses by itself, they are
called one by one: `can_fuse` says which.
"""

from typing import Any

import torch
from torch import Tensor

from te_bench.models import fp8
from te_bench.models.fused.projection import Projection
from te_bench.models.fused.segment import Between, Enter, HeadColumns, Segment
from te_bench.models.modules.attention import MultiheadAttention
from te_bench.models.modules.fp8_module import FLOATS, compute_dtype, flatten
from te_bench.models.modules.layernorm_linear import LayerNormLinear
from te_bench.models.modules.layernorm_mlp import LayerNormMLP
from te_bench.models.modules.linear import Linear
from te_bench.models.modules.plain import are_plain


def can_fuse(layer: Any, x: Tensor) -> bool:
    """Whether this pass of a TransformerLayer is one that segments compute."""
    if not fp8.current.enabled or torch.compiler.is_compiling() or x.dim() != 3 or x.dtype not in FLOATS:
        return False
    if layer.layer_type != "encoder" or layer.parallel or layer.residual_after_norm or layer.layernorm is not None:
        return False
    if layer.hidden_dropout and layer.training:
        return False
    attention = layer.self_attention
    inner: Any = (attention, getattr(attention, "layernorm_qkv", None), attention.proj, layer.layernorm_mlp)
    if tuple(map(type, inner)) != (MultiheadAttention, LayerNormLinear, Linear, LayerNormMLP):
        return False  # another one in its place, or a parametrised one
    return attention.qkv_format != "thd" and are_plain(inner)


def run(layer: Any, x: Tensor, is_first_microbatch: bool | None, rotary: Any, core: dict[str, Any]) -> Tensor:
    """The layer's output of x (s, b, hidden) or (b, s, hidden), where it `can_fuse`; core: what core_attention takes.

    Raises ValueError as the modules do.
    """
    attention, mlp = layer.self_attention, layer.layernorm_mlp
    first, last, dtype, training = attention.layernorm_qkv, attention.proj, compute_dtype(x), torch.is_grad_enabled()
    weight, bias = first.parts.weight_and_bias(first)
    first.check_input(x, first.in_features, weight)
    stream = flatten(x, x.dtype)
    heads, groups, d = attention.num_attention_heads, attention.num_gqa_groups, attention.channels
    turns = groups if attention.interleaved else 1
    columns = HeadColumns(heads * d // turns, groups * d // turns, groups * d // turns)
    after = Projection.of(first, weight, 0, is_first_microbatch, training)
    rotation = attention.rotation(x.shape[:2], rotary)
    norms, kind = (None, first.norm), mlp.activation
    segment = Segment(None, None, None, after, norms, columns, kind, dtype, training, rotation=rotation)
    stream, *qkv = Enter.apply(stream, first.layer_norm_weight, first.layer_norm_bias, weight, bias, segment)
    q, k, v = (part.reshape(*x.shape[:2], -1, d) for part in qkv)
    y = attention.attend(q, k, v, None if rotation is not None else rotary, core)

    proj_w, proj_b = last.parts.weight_and_bias(last)
    proj = Projection.of(last, proj_w, 0, is_first_microbatch, training)
    fc = Projection.of(mlp, mlp.fc1_weight, 0, is_first_microbatch, training)
    out = Projection.of(mlp, mlp.fc2_weight, 1, is_first_microbatch, training)
    segment = Segment(proj, fc, out, None, (mlp.norm, None), None, mlp.activation, dtype, training)
    made: Tensor = Between.apply(
        *(stream, flatten(y, dtype), segment, proj_w, proj_b, mlp.layer_norm_weight, mlp.layer_norm_bias),
        *(mlp.fc1_weight, mlp.fc1_bias, mlp.fc2_weight, mlp.fc2_bias, None, None, None, None),
    )
    return made.view(x.shape)
