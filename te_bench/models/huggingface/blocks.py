"""The layers of transformers' Llama by the fused chain (models.fused.chain), from one attention to the next.

    y = norm(layers(embed(tokens)))     additions, norms, casts and activations beside the GEMMs, q, k and v by one GEMM

A pass goes layer by layer, by the other parts of te.convert, where somebody looks between them (hooks, LoRA, gradient
checkpointing, hidden states), with a cache, positions or a mask of its own, and where torch.compile records it. In training
a pass that does not ask for a cache makes none. Source: transformers 5.17 and 5.23, models/llama/modeling_llama.py.
"""

import contextlib
import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from te_bench.models import fp8
from te_bench.models.fused import chain
from te_bench.models.huggingface import attention
from te_bench.models.huggingface.mlp import MLP, can_fuse, division
from te_bench.models.modules.fp8_module import FLOATS, compute_dtype, is_recorded
from te_bench.models.modules.gathered import Gathered
from te_bench.models.modules.layernorm import RMSNorm
from te_bench.models.modules.linear import Linear
from te_bench.models.modules.plain import are_plain, has_hooks
from te_bench.models.parts import AttentionPart, LinearPart, MLPPart, NormPart, Part
from te_bench.models.subclassing import Mixed, mix

#: Arguments of a pass that the chain takes; of a loss, which layers pass by; and of what is as transformers has it by default.
TAKEN = frozenset(("input_ids", "inputs_embeds", "attention_mask", "use_cache"))
OF_THE_LOSS = frozenset(("num_items_in_batch", "ignore_index", "shift_labels"))
DEFAULTS = {"return_dict": True}
QKV = ("q_proj", "k_proj", "v_proj")


class Blocks(Mixed):
    """Put before the class of a decoder without its head."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own: Any = cls._te_origin.forward
        names = [name for name in inspect.signature(own).parameters if name != "self"]

        @functools.wraps(own)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            return _run(self, given) if _can_fuse(self, given) else own(self, *args, **kwargs)

        cls.forward = forward  # type: ignore[attr-defined]


class _Attention:
    """An attention's kernel, as a part's module has it."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, dropout: float) -> Tensor:
        """(B, H, T, D) -> (B, H, T, D), by the module's own scale and dropout."""
        drops = self.module.attention_dropout if self.module.training else dropout
        seen = attention.Seen(causal=causal)
        made, _ = attention.attention(self.module, q, k, v, seen, dropout=drops, scaling=self.module.scaling)
        return made.transpose(1, 2)


def _run(model: Any, given: dict[str, Any]) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    x = given.get("inputs_embeds")
    x = model.embed_tokens(given["input_ids"]) if x is None else x
    positions = torch.arange(x.shape[1], device=x.device)[None]
    tables = torch.cat(model.rotary_emb(x, position_ids=positions), -1)[0].float()
    if not fp8.current.enabled:
        for layer in _linears(model):
            layer.without_fp8()
    y = chain.run(_parts(model), NormPart.of(model.norm), x, tables, tables=True)
    return BaseModelOutputWithPast(last_hidden_state=y.to(compute_dtype(x)))


def _layers(model: Any) -> Any:
    return model.layers[: model.config.num_hidden_layers]


def _first_and_last(mlp: Any) -> tuple[list[Any], Any]:
    """The Linears of an MLP that is te's."""
    form = mlp._te_mlp
    return [getattr(mlp, name) for name in form.first], getattr(mlp, form.last)


def _linears(model: Any) -> list[Any]:
    found = []
    for layer in _layers(model):
        first, last = _first_and_last(layer.mlp)
        found += [*(getattr(layer.self_attn, name) for name in (*QKV, "o_proj")), *first, last]
    return found


def _parts(model: Any) -> list[Part]:
    parts: list[Part] = []
    for layer in _layers(model):
        own, (first, last) = layer.self_attn, _first_and_last(layer.mlp)
        q, k, v = (getattr(own, name) for name in QKV)
        part = AttentionPart(
            module=_Attention(own),
            norm=NormPart.of(layer.input_layernorm),
            qkv=LinearPart.of(q, k, v),
            proj=LinearPart.of(own.o_proj),
            heads=q.out_features // own.head_dim,
            groups=k.out_features // own.head_dim,
            head_dim=own.head_dim,
        )
        norm = NormPart.of(layer.post_attention_layernorm)
        parts += [part, MLPPart(norm, LinearPart.of(*first), LinearPart.of(last), layer.mlp._te_mlp.kind)]
    return parts


def _can_fuse(model: Any, given: dict[str, Any]) -> bool:
    """Whether the chain computes what the layers would, and nobody looks between them."""
    ids, x, config = given.get("input_ids"), given.get("inputs_embeds"), model.config
    if (ids is None) == (x is None) or is_recorded() or fp8.current.calibrating:
        return False
    others = given.keys() - TAKEN - OF_THE_LOSS
    if any(given[name] is not None and given[name] is not False and given[name] != DEFAULTS.get(name) for name in others):
        return False
    cached = given.get("use_cache")
    if (config.use_cache and not model.training) if cached is None else cached:
        return False
    if config.output_hidden_states or config.output_attentions or config._attn_implementation != attention.NAME:
        return False
    tokens: Tensor = ids if x is None else x
    if tokens.numel() == 0 or tokens.dim() < 2 or not _are_plain(model):
        return False
    mask = given.get("attention_mask")
    if mask is None:
        return True
    return isinstance(mask, Tensor) and mask.dim() == 2 and attention.padding_of(mask, tokens.shape[1]) is None


def _are_plain(model: Any) -> bool:
    """Whether every module of the layers is as `convert` found it, and their weights are whole."""
    layers = list(_layers(model))
    if not layers or any(why_not(layer) is not None for layer in layers):
        return False
    like = model.embed_tokens.weight
    if like.dtype not in FLOATS:
        return False
    linears = _linears(model)
    if not are_plain([*linears, model.norm, *(norm for layer in layers for norm in _norms(layer))]):
        return False
    if any(division(linear) is not None or isinstance(linear.weight, Gathered) for linear in linears):
        return False
    if any(linear.weight.device != like.device for linear in linears):
        return False
    inner = [module for layer in layers for module in (layer, layer.self_attn, layer.mlp)]
    if any(has_hooks(module) or "forward" in vars(module) for module in inner):
        return False
    if model.training and any(getattr(layer, "gradient_checkpointing", False) for layer in layers):
        return False
    return all(can_fuse(layer.mlp, like, *_first_and_last(layer.mlp)) for layer in layers)


def _norms(layer: Any) -> tuple[nn.Module, nn.Module]:
    return layer.input_layernorm, layer.post_attention_layernorm


def why_not(layer: Any) -> str | None:
    """Why a decoder layer is none of the chain's, or None."""
    own, mlp = layer.self_attn, layer.mlp
    if not isinstance(mlp, MLP) or mlp._te_mlp.dropout is not None:
        return "its MLPs stay as they are"
    if any(not isinstance(norm, RMSNorm) for norm in _norms(layer)):
        return "its norms stay as they are"
    linears = [getattr(own, name, None) for name in (*QKV, "o_proj")]
    first, last = _first_and_last(mlp)
    if any(not isinstance(linear, Linear) for linear in (*linears, *first, last)):
        return "some of its Linears stay as they are"
    biases = [[linear.bias is not None for linear in group] for group in (linears[:3], first)]
    if any(any(group) != all(group) for group in biases):
        return "of the Linears that multiply together some have a bias and some have none"
    return None


def _code(function: Any) -> tuple[Any, ...]:
    code = inspect.unwrap(function).__code__
    return code.co_code, code.co_names


def _origin(module: Any) -> Any:
    return module._te_origin if isinstance(module, Mixed) else type(module)


def convert(model: Any, undo: contextlib.ExitStack) -> str:
    """Let a decoder's layers compute as one chain; returns what that is. Raises ValueError, which says why they stay."""
    from transformers.models.llama import modeling_llama as llama

    layers = list(model.layers)
    pairs = [(model, llama.LlamaModel), *((layer, llama.LlamaDecoderLayer) for layer in layers)]
    pairs += [(getattr(layer, "self_attn", None), llama.LlamaAttention) for layer in layers]
    for module, like in pairs:
        forward = getattr(_origin(module), "forward", None)
        if forward is None or _code(forward) != _code(like.forward):
            raise ValueError(f"its {type(module).__name__} computes otherwise than Llama's")
    if model.config._attn_implementation != attention.NAME or any(not hasattr(x.self_attn, "_te_origin") for x in layers):
        raise ValueError("its attentions or rotary embeddings stay as they are")
    reason = next(filter(None, map(why_not, layers)), None)
    if reason is None and not isinstance(model.norm, RMSNorm):
        reason = "its last norm stays as it is"
    if reason is not None:
        raise ValueError(reason)
    mix(model, Blocks, undo)
    return "all layers as one fused chain"
