"""te.TransformerLayer under FP8 by the stretches of `_stretch`: the same parameters, states and weight caches, fewer passes.

Where something needs the modules one by one, hooks or dropout say, or torch.compile, which fuses by itself, they are
called one by one: `able` says which.
"""

from typing import Any

import torch
from torch import Tensor

from te_bench.models import fp8
from te_bench.models.fused.stretch import Between, Enter, Heads, Plan, Product, unwatched
from te_bench.models.modules._module import FLOATS, compute_dtype, flatten
from te_bench.models.modules.attention import MultiheadAttention
from te_bench.models.modules.layernorm_linear import LayerNormLinear
from te_bench.models.modules.layernorm_mlp import LayerNormMLP
from te_bench.models.modules.linear import Linear


def able(layer: Any, x: Tensor) -> bool:
    """Whether this pass of a TransformerLayer is one that stretches compute, with all that hangs on its modules."""
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
    return attention.qkv_format != "thd" and unwatched(inner)


def run(layer: Any, x: Tensor, is_first_microbatch: bool | None, rotary: Any, core: dict[str, Any]) -> Tensor:
    """The layer's output of x (s, b, hidden) or (b, s, hidden), where it is `able`; core: what core_attention takes.

    Raises ValueError as the modules do.
    """
    attention, mlp = layer.self_attention, layer.layernorm_mlp
    first, last, dtype, training = attention.layernorm_qkv, attention.proj, compute_dtype(x), torch.is_grad_enabled()
    weight, bias = first.parts.weight(first), first.parts.bias(first)
    first.check_input(x, first.in_features, weight)
    stream = flatten(x, x.dtype)
    heads, groups, d = attention.num_attention_heads, attention.num_gqa_groups, attention.channels
    turns = groups if attention.interleaved else 1
    columns = Heads(heads * d // turns, groups * d // turns, groups * d // turns)
    after = Product.of(first, weight, 0, is_first_microbatch, training)
    rotation = attention.rotation(x.shape[:2], rotary)
    plan = Plan(
        None, None, None, after, (None, first.norm), columns, mlp.activation, dtype, training, rotation=rotation
    )  # fmt: skip
    stream, *qkv = Enter.apply(stream, first.layer_norm_weight, first.layer_norm_bias, weight, bias, plan)
    q, k, v = (part.reshape(*x.shape[:2], -1, d) for part in qkv)
    y = attention.attend(q, k, v, None if rotation is not None else rotary, core)

    proj_w, proj_b = last.parts.both(last)
    proj = Product.of(last, proj_w, 0, is_first_microbatch, training)
    fc = Product.of(mlp, mlp.fc1_weight, 0, is_first_microbatch, training)
    out = Product.of(mlp, mlp.fc2_weight, 1, is_first_microbatch, training)
    plan = Plan(proj, fc, out, None, (mlp.norm, None), None, mlp.activation, dtype, training)
    made: Tensor = Between.apply(
        *(stream, flatten(y, dtype), plan, proj_w, proj_b, mlp.layer_norm_weight, mlp.layer_norm_bias),
        *(mlp.fc1_weight, mlp.fc1_bias, mlp.fc2_weight, mlp.fc2_bias, None, None, None, None),
    )
    return made.view(x.shape)
