"""Compute te.TransformerLayer by the segments of fused.segment: same parameters, states and caches in fewer passes.

`can_fuse` says for which passes. Hooks and dropout need the modules one by one, and torch.compile fuses them itself.
"""

from typing import Any

import torch
from torch import Tensor

from te_bench.models import fp8
from te_bench.models.fused import chain
from te_bench.models.modules.activations import FLOATS, compute_dtype, flatten
from te_bench.models.modules.attention import MultiheadAttention
from te_bench.models.modules.layernorm_linear import LayerNormLinear
from te_bench.models.modules.layernorm_mlp import LayerNormMLP
from te_bench.models.modules.linear import Linear
from te_bench.models.modules.plain import are_plain
from te_bench.models.modules.rotary import Rotation
from te_bench.models.parts import AttentionPart, LinearPart, MLPPart, NormPart


def can_fuse(layer: Any, x: Tensor) -> bool:
    """Return whether segments can compute this pass of a TransformerLayer: in FP8, or in half precision on a GPU."""
    if fp8.current.calibrating or torch.compiler.is_compiling() or x.dim() != 3 or x.dtype not in FLOATS:
        return False
    if not fp8.current.enabled and not (x.is_cuda and compute_dtype(x).itemsize == 2):
        return False
    if layer.ranks.size > 1 or x.numel() == 0:
        return False
    if layer.layer_type != "encoder" or layer.parallel or layer.residual_after_norm or layer.layernorm is not None:
        return False
    if layer.hidden_dropout and layer.training:
        return False
    attention = layer.self_attention
    inner: Any = (attention, getattr(attention, "layernorm_qkv", None), attention.proj, layer.layernorm_mlp)
    if tuple(map(type, inner)) != (MultiheadAttention, LayerNormLinear, Linear, LayerNormMLP):
        return False  # a module was replaced or parametrised
    return attention.qkv_format != "thd" and are_plain(inner)


def parts(layer: Any) -> tuple[AttentionPart, MLPPart]:
    """Return the layer's two parts. Raises ValueError as its modules do."""
    attention, mlp = layer.self_attention, layer.layernorm_mlp
    qkv, proj = attention.layernorm_qkv, attention.proj
    heads, groups, d = attention.num_attention_heads, attention.num_gqa_groups, attention.channels
    return (
        AttentionPart(
            attention,
            NormPart(qkv.layer_norm_weight, qkv.layer_norm_bias, qkv.norm),
            LinearPart(qkv, *qkv.split.weight_and_bias(qkv)),
            LinearPart(proj, *proj.split.weight_and_bias(proj)),
            heads,
            groups,
            d,
            turns=groups if attention.interleaved else 1,
        ),
        MLPPart(
            NormPart(mlp.layer_norm_weight, mlp.layer_norm_bias, mlp.norm),
            LinearPart(mlp, mlp.fc1_weight, mlp.fc1_bias, 0),
            LinearPart(mlp, mlp.fc2_weight, mlp.fc2_bias, 1),
            mlp.activation,
        ),
    )


def run(layer: Any, x: Tensor, is_first_microbatch: bool | None, rotary: Any, core: dict[str, Any]) -> Tensor:
    """Compute the layer on x (s, b, hidden) or (b, s, hidden), if it `can_fuse`; core: core_attention's arguments.

    Raises ValueError as the modules do.
    """
    attention, qkv = layer.self_attention, layer.self_attention.layernorm_qkv
    described = parts(layer)
    qkv.check_input(x, qkv.in_features, described[0].qkv.weight)
    dtype = compute_dtype(x)
    rotation: Rotation | None = attention.rotation(x.shape[:2], rotary)

    def attend(part: AttentionPart, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.reshape(*x.shape[:2], -1, part.head_dim) for t in (q, k, v))
        y = attention.attend(q, k, v, None if rotation is not None else rotary, core)
        return flatten(y, dtype)

    made = chain.compute(
        described, None, flatten(x, x.dtype), dtype, attend, lambda part: rotation, is_first_microbatch
    )
    return made.view(x.shape)
