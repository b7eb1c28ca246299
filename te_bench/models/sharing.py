"""The parameters of a plain transformer layer, given to layers of te modules that compute the same function.

The layers are those of Transformer Engine's quickstart, `examples/te_quickstart.py` has them: ln1, qkv_projection,
projection, ln2 and mlp.linear1 and .linear2 in the plain one, where each head's rows of qkv_projection lie together as
[q, k, v]. A parameter is *shared*, the same object in both layers, where its rows are the plain layer's; else it is a new
Parameter with a copy of the values, which trains on its own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

#: Names in a basic te layer and in the plain one are the same.
BASIC = {name: name for name in ("ln1", "qkv_projection", "projection", "ln2", "mlp.linear1", "mlp.linear2")}
KINDS = ("weight", "bias")


def share_parameters_with_basic_te_model(te_model: nn.Module, basic_model: nn.Module) -> None:
    """All parameters of a layer of te.LayerNorm and te.Linear are those of `basic_model`: shared.

    Raises ValueError where a parameter is missing or of another shape.
    """
    for name in BASIC:
        for kind in KINDS:
            _share(te_model, f"{name}.{kind}", _parameter(basic_model, f"{name}.{kind}"))


def share_parameters_with_fused_te_model(te_model: nn.Module, basic_model: nn.Module) -> None:
    """All parameters of a layer of ln_qkv, projection and ln_mlp are those of `basic_model`: shared.

    Raises ValueError where a parameter is missing or of another shape.
    """
    for kind in KINDS:
        for ours, theirs in (
            (f"ln_qkv.layer_norm_{kind}", f"ln1.{kind}"),
            (f"ln_qkv.{kind}", f"qkv_projection.{kind}"),
            (f"projection.{kind}", f"projection.{kind}"),
            (f"ln_mlp.layer_norm_{kind}", f"ln2.{kind}"),
            (f"ln_mlp.fc1_{kind}", f"mlp.linear1.{kind}"),
            (f"ln_mlp.fc2_{kind}", f"mlp.linear2.{kind}"),
        ):
            _share(te_model, ours, _parameter(basic_model, theirs))


def share_parameters_with_transformerlayer_te_model(te_model: nn.Module, basic_model: nn.Module) -> None:
    """All parameters of a te.TransformerLayer are those of `basic_model`: shared, but for query, key and value.

    These are shared, too, with fuse_qkv_params and qkv_weight_interleaved, whose rows lie as the plain layer's do; else
    they are copies. Raises ValueError where a parameter is missing or of another shape.
    """
    for kind in KINDS:
        for ours, theirs in (
            (f"self_attention.layernorm_qkv.layer_norm_{kind}", f"ln1.{kind}"),
            (f"self_attention.proj.{kind}", f"projection.{kind}"),
            (f"layernorm_mlp.layer_norm_{kind}", f"ln2.{kind}"),
            (f"layernorm_mlp.fc1_{kind}", f"mlp.linear1.{kind}"),
            (f"layernorm_mlp.fc2_{kind}", f"mlp.linear2.{kind}"),
        ):
            _share(te_model, ours, _parameter(basic_model, theirs))
    attention: Any = te_model.self_attention
    for kind in KINDS:
        qkv = _parameter(basic_model, f"qkv_projection.{kind}")
        where = "self_attention.layernorm_qkv"
        if attention.interleaved:
            _share(te_model, f"{where}.{kind}", qkv)
            continue
        parts = _by_head(qkv, attention.num_attention_heads)
        if hasattr(attention.layernorm_qkv, f"query_{kind}"):
            for name, rows in zip(("query", "key", "value"), parts, strict=True):
                _share(te_model, f"{where}.{name}_{kind}", _copied([rows], qkv))
        else:
            _share(te_model, f"{where}.{kind}", _copied(parts, qkv))


def _by_head(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """query, key and value, (heads d, ...) each, out of (heads 3 d, ...)."""
    if qkv.shape[0] % (3 * heads):
        raise ValueError(f"qkv_projection has {qkv.shape[0]} rows, which {heads} heads cannot share among q, k and v")
    return tuple(part.flatten(0, 1) for part in qkv.detach().unflatten(0, (heads, 3, -1)).unbind(1))


def _copied(parts: Sequence[Tensor], source: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.cat(list(parts)), source.requires_grad)


def _parameter(model: nn.Module, name: str) -> nn.Parameter:
    try:
        return model.get_parameter(name)
    except AttributeError as error:
        raise ValueError(f"{type(model).__name__} has no parameter {name}: {error}") from None


def _share(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Make `parameter` the one called `name`."""
    own = _parameter(model, name)
    if own.shape != parameter.shape:
        raise ValueError(
            f"{type(model).__name__}'s {name} is {tuple(own.shape)}, the plain layer's {tuple(parameter.shape)}: "
            "make both layers of the same sizes"
        )
    owner, _, attribute = name.rpartition(".")
    model.get_submodule(owner).register_parameter(attribute, parameter)
