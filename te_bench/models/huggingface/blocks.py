"""The layers of transformers' Llama family by the fused chain (models.fused.chain), from one attention to the next.

    y = norm(layers(embed(tokens)))     additions, norms, casts and activations beside the GEMMs, q, k and v by one GEMM

A pass goes layer by layer, with te.convert's other parts, if something observes the layers (hooks, LoRA, hidden
states), with a cache, with its own positions or mask, and under torch.compile. A training pass makes no cache unless
asked. Checkpointed layers are a chain each. Source: transformers 5.17 and 5.23, models/llama, mistral, qwen2 and qwen3.
"""

import contextlib
import functools
import importlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from te_bench.models import fp8
from te_bench.models.fused import chain
from te_bench.models.huggingface import attention
from te_bench.models.huggingface.mlp import MLP, can_fuse, division
from te_bench.models.modules.activations import FLOATS, compute_dtype, is_recorded
from te_bench.models.modules.gathered import Gathered
from te_bench.models.modules.layernorm import RMSNorm
from te_bench.models.modules.linear import Linear
from te_bench.models.modules.plain import are_plain
from te_bench.models.parts import AttentionPart, LinearPart, MLPPart, NormPart, Part
from te_bench.models.subclassing import Mixed, mix

#: Families whose layers the chain computes; other classes that run the same code count, too.
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
#: Arguments that the chain takes, and arguments of a loss, which layers ignore.
TAKEN = frozenset(("input_ids", "inputs_embeds", "attention_mask", "use_cache", "return_dict"))
OF_THE_LOSS = frozenset(("num_items_in_batch", "ignore_index", "shift_labels"))
CAPTURING = "transformers.utils.output_capturing"
QKV = ("q_proj", "k_proj", "v_proj")
LAYER_NORMS, HEAD_NORMS = ("input_layernorm", "post_attention_layernorm"), ("q_norm", "k_norm")


class Blocks(Mixed):
    """A mixin before the class of a decoder without its head."""

    _te_names: list[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own: Any = cls._te_origin.forward
        names = [name for name in inspect.signature(own).parameters if name != "self"]

        @functools.wraps(own)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = self.te_given(args, kwargs)
            return _run(self, given) if self.te_fuses(given) else own(self, *args, **kwargs)

        cls.forward = forward  # type: ignore[attr-defined]
        cls._te_names = names

    def te_given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a pass by name."""
        return dict(zip(self._te_names, args, strict=False)) | kwargs

    def te_stacks(self) -> list[list[Any]]:
        """Return the groups of Linears whose weights multiply as one matrix, except an MLP's."""
        return [[getattr(layer.self_attn, name) for name in QKV] for layer in _layers(self)]

    def te_linears(self) -> list[Any]:
        """Return the Linears whose weights are only ever read in the recipe's FP8."""
        layers = [layer for layer in _layers(self) if getattr(layer.mlp, "_te_mlp", None) is not None]
        return [linear for layer in layers for linear in _linears(layer) if isinstance(linear, Linear)]

    def te_fuses(self, given: dict[str, Any]) -> bool:
        """Return whether the chain can compute this pass: it gives the same result, and nothing observes layers."""
        return _fuses(self, given)


class _Attention:
    """An attention's kernel behind the interface of a part's module. width: of its window."""

    def __init__(self, module: Any, width: int | None) -> None:
        self.module, self.width = module, width

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, dropout: float) -> Tensor:
        """Compute (B, H, T, D) -> (B, H, T, D) with the module's own scale, window and dropout."""
        own, width = self.module, self.width
        window = None if width is None or width >= q.shape[2] else (width - 1, 0)
        drops = own.attention_dropout if own.training else dropout
        seen = attention.Seen(causal, window)
        made, _ = attention.attention(own, q, k, v, seen, dropout=drops, scaling=own.scaling)
        return made.transpose(1, 2)


def _run(model: Any, given: dict[str, Any]) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    x = given.get("inputs_embeds")
    x = model.embed_tokens(given["input_ids"]) if x is None else x
    positions = torch.arange(x.shape[1], device=x.device)[None]
    tables = torch.cat(model.rotary_emb(x, position_ids=positions), -1)[0].float()
    layers = _layers(model)
    if not fp8.current.enabled:
        for linear in (linear for layer in layers for linear in _linears(layer)):
            linear.without_fp8()
    run = functools.partial(chain.run, angles=tables, tables=True)
    parts, last, y = [_parts(model, layer) for layer in layers], NormPart.of(model.norm), x
    if model.training and any(getattr(layer, "gradient_checkpointing", False) for layer in layers):
        for layer, own in zip(layers, parts, strict=True):
            one = functools.partial(run, own, None)
            y = layer._gradient_checkpointing_func(one, y) if layer.gradient_checkpointing else one(y)
        parts = []
    y = run([part for own in parts for part in own], last, y)
    return BaseModelOutputWithPast(last_hidden_state=y.to(compute_dtype(x)))


def _layers(model: Any) -> list[Any]:
    return list(model.layers[: model.config.num_hidden_layers])


def _mlp_linears(mlp: Any) -> tuple[list[Any], Any]:
    form = mlp._te_mlp
    return [getattr(mlp, name) for name in form.first], getattr(mlp, form.last)


def _linears(layer: Any) -> list[Any]:
    first, last = _mlp_linears(layer.mlp)
    return [*(getattr(layer.self_attn, name, None) for name in (*QKV, "o_proj")), *first, last]


def _norms(layer: Any) -> list[Any]:
    heads = [getattr(layer.self_attn, name) for name in HEAD_NORMS if hasattr(layer.self_attn, name)]
    return [*(getattr(layer, name, None) for name in LAYER_NORMS), *heads]


def _width(model: Any, layer: Any) -> int | None:
    """Return the width of a layer's window: Qwen's layers have one each, Mistral uses the model's, Llama none."""
    of_model = model.config.sliding_window if _family_of(model, layer) == "mistral" else None
    width: int | None = getattr(layer.self_attn, "sliding_window", of_model)
    return width


def _parts(model: Any, layer: Any) -> list[Part]:
    own, (first, last) = layer.self_attn, _mlp_linears(layer.mlp)
    q, k, v, o = _linears(layer)[:4]
    before, after, *of_heads = map(NormPart.of, _norms(layer))
    q_norm, k_norm = of_heads or (None, None)
    heads, groups = q.out_features // own.head_dim, k.out_features // own.head_dim
    sizes = {"heads": heads, "groups": groups, "head_dim": own.head_dim}
    attend = _Attention(own, _width(model, layer))
    return [
        AttentionPart(attend, before, LinearPart.of(q, k, v), LinearPart.of(o), **sizes, q_norm=q_norm, k_norm=k_norm),
        MLPPart(after, LinearPart.of(*first), LinearPart.of(last), layer.mlp._te_mlp.kind),
    ]


def _fuses(model: Any, given: dict[str, Any]) -> bool:
    ids, x, config = given.get("input_ids"), given.get("inputs_embeds"), model.config
    causal = given.get("is_causal")
    if (ids is None) == (x is None) or is_recorded() or fp8.current.calibrating:
        return False
    if not (getattr(config, "is_causal", True) if causal is None else causal):  # transformers then masks nothing
        return False
    others = given.keys() - TAKEN - OF_THE_LOSS
    if any(given[name] is not None and given[name] is not False for name in others):
        return False
    cached, wrapped = given.get("use_cache"), given.get("return_dict")
    if (config.use_cache and not model.training) if cached is None else cached:
        return False
    if not (config.return_dict if wrapped is None else wrapped):
        return False
    if config.output_hidden_states or config.output_attentions or config._attn_implementation != attention.NAME:
        return False
    tokens: Any = ids if x is None else x
    if tokens.numel() == 0 or tokens.dim() != (2 if x is None else 3) or not _are_plain(model):
        return False
    mask = given.get("attention_mask")
    if mask is None:
        return True
    return isinstance(mask, Tensor) and mask.dim() == 2 and attention.padding_of(mask, tokens.shape[1]) is None


def _are_plain(model: Any) -> bool:
    """Return whether every module of the layers is as `convert` left it, with whole weights."""
    layers, like = _layers(model), getattr(model.embed_tokens, "weight", None)
    if not layers or not isinstance(like, Tensor) or like.dtype not in FLOATS or not isinstance(model.norm, RMSNorm):
        return False
    if any(_family_of(model, layer) is None or why_not(layer) is not None for layer in layers):
        return False
    linears = [linear for layer in layers for linear in _linears(layer)]
    if not are_plain([*linears, model.norm, *(norm for layer in layers for norm in _norms(layer))]):
        return False
    if any(division(linear) is not None or isinstance(linear.weight, Gathered) for linear in linears):
        return False
    if any(linear.weight.device != like.device for linear in linears):
        return False
    inner = [module for layer in layers for module in (layer, layer.self_attn, layer.mlp)]
    if any(_is_heard(module) or "forward" in vars(module) for module in inner):
        return False
    return all(can_fuse(layer.mlp, like, *_mlp_linears(layer.mlp)) for layer in layers)


def _is_heard(module: nn.Module) -> bool:
    """Return whether a module has hooks other than transformers' for hidden states, which stay after the first use."""
    own = vars(module)
    hooks = [
        hook
        for which in ("forward", "forward_pre", "backward", "backward_pre")
        for hook in own[f"_{which}_hooks"].values()
    ]
    return any(getattr(hook, "__module__", "") != CAPTURING for hook in hooks)


def why_not(layer: Any) -> str | None:
    """Return why the chain cannot compute a decoder layer, or None."""
    form = layer.mlp._te_mlp if isinstance(layer.mlp, MLP) else None
    if form is None or form.dropout is not None:
        return "its MLPs stay as they are"
    if not all(isinstance(norm, RMSNorm) for norm in _norms(layer)):
        return "its norms stay as they are"
    linears = _linears(layer)
    if not all(isinstance(linear, Linear) for linear in linears):
        return "some of its Linears stay as they are"
    biases = [[linear.bias is not None for linear in group] for group in (linears[:3], linears[4:-1])]
    if any(any(group) != all(group) for group in biases):
        return "of the Linears that multiply together some have a bias and some have none"
    return None


def _codes(*classes: Any) -> list[tuple[Any, ...]]:
    """Return the bytecode of these classes' forwards."""
    codes = (getattr(inspect.unwrap(cls.forward), "__code__", None) for cls in classes)
    return [(getattr(code, "co_code", None), getattr(code, "co_names", None)) for code in codes]


@functools.cache
def _family(*classes: Any) -> str | None:
    """Return the family whose model, layer and attention classes run the same code as these, or None."""
    own = _codes(*classes)
    for name, title in FAMILIES.items():
        file = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        if own == _codes(*(getattr(file, f"{title}{part}") for part in ("Model", "DecoderLayer", "Attention"))):
            return name
    return None


def _family_of(model: Any, layer: Any) -> str | None:
    """Return a layer's family; None if the layer or its attention is wrapped."""
    if not all(isinstance(getattr(layer, name, None), nn.Module) for name in ("self_attn", "mlp")):
        return None
    classes: list[Any] = [type(module) for module in (model, layer, layer.self_attn)]
    return _family(*classes)


def convert(model: Any, undo: contextlib.ExitStack) -> str:
    """Let a decoder's layers compute as one chain; returns a description. Raises ValueError with the reason if not."""
    layers = list(model.layers)
    if any(_family_of(model, layer) is None for layer in layers):
        raise ValueError(f"its layers compute otherwise than {', '.join(FAMILIES.values())}'s")
    if model.config._attn_implementation != attention.NAME or any(
        not isinstance(layer.self_attn, Mixed) for layer in layers
    ):
        raise ValueError("its attentions or rotary embeddings stay as they are")
    reason = next(filter(None, map(why_not, layers)), None)
    if reason is None and not isinstance(model.norm, RMSNorm):
        reason = "its last norm stays as it is"
    if reason is not None:
        raise ValueError(reason)
    mix(model, Blocks, undo)
    return "all layers as one fused chain"
