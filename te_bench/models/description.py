"""Check a decoder's description of itself: its parts and its tables against its configuration's shape.

Fused blocks compute by the parts, costs by the shape, and modules by neither. A wrong description would at best show as
a wrong gradient, far from its cause.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from te_bench import plugins
from te_bench.kernels import activation, norm
from te_bench.models import cost
from te_bench.models.configs import Shape
from te_bench.models.parts import AttentionPart, LinearPart, MLPPart, NormPart

if TYPE_CHECKING:
    from te_bench.models.decoder import Decoder

Claim = tuple[str, object, object]  # (what, its actual value, the shape's value)


def check(model: "Decoder") -> None:
    """Raise ValueError for the first claim that is wrong."""
    name, shape = type(model).__name__, model.config.shape
    plugins.check(f"activation of {name}", shape.activation, list(activation.KINDS))
    plugins.check(f"norm of {name}", shape.norm, list(norm.KINDS))
    for what, found, said in _claims(model, shape):
        if found != said:
            raise ValueError(
                f"{name} describes itself wrongly: {what}: {found}, where {said} is right by its config.shape"
            )


def _claims(model: "Decoder", shape: Shape) -> Iterator[Claim]:
    parts, tables, width = model.parts(), model.tables(), shape.hidden
    table, head = tables.tokens.weight, tables.head
    yield "the token embedding's width", table.shape[1], width
    yield "the head's weight", list(head.weight.shape), [len(table), width]
    yield "a bias of the head", head.bias is not None, False  # no head of kernels.linear_cross_entropy has one
    yield "the head tied to the token embedding", head.weight is table, shape.tied
    yield "a table of positions", tables.positions is not None, shape.learned_positions
    yield from _of_norm("the last norm", NormPart.of(tables.norm), width, shape.norm)
    for kind in (AttentionPart, MLPPart) if parts else ():
        yield f"the number of {kind.__name__}s", sum(isinstance(part, kind) for part in parts), shape.layers
    for number, part in enumerate(parts):
        at = f"parts()[{number}]"
        yield from _of_norm(f"{at}.norm", part.norm, width, shape.norm)
        yield from _of_attention(at, part, shape) if isinstance(part, AttentionPart) else _of_mlp(at, part, shape)
    angles = model.angles(1)
    if angles is not None:
        features = angles.shape[-1]
        fits = angles.dim() == 2 and features % 2 == 0 and features <= shape.head_dim
        yield "the shape of angles(1)", list(angles.shape), [1, features if fits else shape.head_dim]
    described = {id(tensor) for tensor in _tensors(model)}
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    # An optimizer may have replaced parameters by its copies.
    yield "what of its tensors is no parameter", len(described - own.keys()), 0
    if model.blocks == "fused":  # other models may compute what parts cannot express
        yield "parameters in no part and no table", [name for key, name in own.items() if key not in described], []
    there = sum(parameter.numel() for parameter in model.parameters())
    yield "the number of all parameters", there, cost.parameters(model.config, len(table))


def _tensors(model: "Decoder") -> Iterator[Tensor]:
    """Yield every tensor that parts and tables name."""
    tables = model.tables()
    described: list[Any] = [table for table in (tables.tokens, tables.positions, tables.head) if table is not None]
    described.append(NormPart.of(tables.norm))
    for part in model.parts():
        described += [each for each in part if isinstance(each, NormPart | LinearPart)]
    for each in described:
        yield each.weight
        if getattr(each, "bias", None) is not None:
            yield each.bias


def _of_norm(at: str, part: NormPart, width: int, kind: str) -> Iterator[Claim]:
    yield f"{at}.weight", list(part.weight.shape), [width]
    yield f"the kind of {at}", part.norm.kind, kind


def _of_attention(at: str, part: AttentionPart, shape: Shape) -> Iterator[Claim]:
    heads, groups, d = shape.heads, shape.groups, shape.head_dim
    yield f"(heads, groups, head_dim) of {at}", (part.heads, part.groups, part.head_dim), (heads, groups, d)
    yield f"{at}.qkv.weight", list(part.qkv.weight.shape), [shape.qkv, shape.hidden]
    yield f"{at}.proj.weight", list(part.proj.weight.shape), [shape.hidden, heads * d]
    yield f"what turns of {at} leave of its groups", groups % part.turns, 0
    for name, each in (("q_norm", part.q_norm), ("k_norm", part.k_norm)):
        yield f"{at} with a {name}", each is not None, shape.head_norms
        if each is not None:
            yield f"{at}.{name}.weight", list(each.weight.shape), [d]
            yield f"a bias of {at}.{name}", each.bias is not None, False  # models.fused has none


def _of_mlp(at: str, part: MLPPart, shape: Shape) -> Iterator[Claim]:
    yield f"the activation of {at}", part.activation, shape.activation
    yield f"{at}.up.weight", list(part.up.weight.shape), [shape.ffn * (1 + shape.gated), shape.hidden]
    yield f"{at}.down.weight", list(part.down.weight.shape), [shape.hidden, shape.ffn]
