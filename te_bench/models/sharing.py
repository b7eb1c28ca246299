"""The parameters of a plain transformer layer, given to layers of te modules that compute the same function.

The layers are those of Transformer Engine's quickstart (`examples/te_quickstart.py`). The plain one has ln1,
qkv_projection, projection, ln2, mlp.linear1 and mlp.linear2; each head's rows of qkv_projection lie together as [q, k,
v]. A parameter with the plain layer's rows is *shared*: the same object in both layers. Any other is a new Parameter
with a copy of the values, which trains on its own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from te_bench.models.quickstart import te_fused, te_layer


def share_parameters_with_basic_te_model(te_model: nn.Module, basic_model: nn.Module) -> None:
    """Share all parameters of `basic_model` with a layer of te.LayerNorm and te.Linear.

    Raises ValueError if a parameter is missing or of another shape.
    """
    for name in te_layer.NAMES:
        _share(te_model, name, _parameter(basic_model, name))


def share_parameters_with_fused_te_model(te_model: nn.Module, basic_model: nn.Module) -> None:
    """Share all parameters of `basic_model` with a layer of ln_qkv, projection and ln_mlp.

    Raises ValueError if a parameter is missing or of another shape.
    """
    for name, ours in te_fused.NAMES.items():
        _share(te_model, ours, _parameter(basic_model, name))


def share_parameters_with_transformerlayer_te_model(te_model: nn.Module, basic_model: nn.Module) -> None:
    """Share all parameters of `basic_model` with a te.TransformerLayer, except query, key and value.

    With fuse_qkv_params and qkv_weight_interleaved, whose rows lie as the plain layer's, these are shared, too;
    otherwise copied. Raises ValueError if a parameter is missing or of another shape.
    """
    attention: Any = te_model.self_attention
    for name, ours in te_layer.NAMES.items():
        parameter = _parameter(basic_model, name)
        if not name.startswith("qkv_projection") or attention.interleaved:
            _share(te_model, ours, parameter)
            continue
        parts, (where, _, kind) = _split_heads(parameter, attention.num_attention_heads), ours.rpartition(".")
        if hasattr(attention.layernorm_qkv, f"query_{kind}"):
            for part, rows in zip(("query", "key", "value"), parts, strict=True):
                _share(te_model, f"{where}.{part}_{kind}", _copy_rows([rows], parameter))
        else:
            _share(te_model, ours, _copy_rows(parts, parameter))


def _split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Split (heads 3 d, ...) into query, key and value, (heads d, ...) each."""
    if qkv.shape[0] % (3 * heads):
        raise ValueError(f"qkv_projection has {qkv.shape[0]} rows, which {heads} heads cannot share among q, k and v")
    return tuple(part.flatten(0, 1) for part in qkv.detach().unflatten(0, (heads, 3, -1)).unbind(1))


def _copy_rows(parts: Sequence[Tensor], source: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.cat(list(parts)), source.requires_grad)


def _parameter(model: nn.Module, name: str) -> nn.Parameter:
    try:
        return model.get_parameter(name)
    except AttributeError as error:
        raise ValueError(f"{type(model).__name__} has no parameter {name}: {error}") from None


def _share(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    own = _parameter(model, name)
    if own.shape != parameter.shape:
        raise ValueError(
            f"{type(model).__name__}'s {name} is {tuple(own.shape)}, the plain layer's {tuple(parameter.shape)}: "
            "make both layers of the same sizes"
        )
    owner, _, attribute = name.rpartition(".")
    model.get_submodule(owner).register_parameter(attribute, parameter)
