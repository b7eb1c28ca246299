"""The head and the loss of transformers' causal language models, without all the logits, in training.

    loss = model(input_ids=tokens, labels=tokens).loss     # .logits is None

Logits are computed in evaluation (model.eval()), without labels, with logits_to_keep, and with skip_logits=False;
skip_logits=True always skips them. Shift, ignore_index, shift_labels, num_items_in_batch are transformers'.
Source: transformers 5.17 and 5.23, loss/loss_utils.py.
"""

import contextlib
import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_bench.kernels import architecture
from te_bench.kernels.linear_cross_entropy import IGNORED, load
from te_bench.kernels.linear_cross_entropy.tied import tied
from te_bench.models import fp8
from te_bench.models.huggingface.blocks import Blocks
from te_bench.models.modules.activations import FLOATS, is_recorded
from te_bench.models.modules.linear import Linear
from te_bench.models.modules.plain import are_plain, has_hooks
from te_bench.models.subclassing import Mixed, mix

#: Classes of transformers (5.17, 5.23) whose forward equals `Head`'s but is written differently from Llama's.
LIKE_LLAMA = frozenset(("GPT2LMHeadModel",))
LLAMA, MIXTRAL = "LlamaForCausalLM", "MixtralForCausalLM"

# Loaded here because torch.compile cannot trace an import.
_heads = {name: load(name) for name in ("chunked", "fp8", "reference")}
ILLEGAL = -2  # no class has this target: the loss becomes NaN, as for any illegal one


class Head(Mixed):
    """A mixin before a causal language model's class."""

    _te_head_in_fp8: bool | None = None
    _te_routed: bool  # a mixture of experts, whose loss may include one for an uneven router

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own: Any = cls._te_origin.forward
        cls._te_routed = _is_like(cls._te_origin, MIXTRAL)
        cls._te_unevenness = inspect.unwrap(own).__globals__.get("load_balancing_loss_func")  # type: ignore[attr-defined]
        names = [name for name in inspect.signature(own).parameters if name != "self"]

        @functools.wraps(own)  # trainers read the signature
        def forward(self: Any, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            asked = self.training if skip_logits is None else skip_logits
            if not asked or given.get("labels") is None or not _can_skip(self, given, skip_logits):
                return own(self, *args, **kwargs)
            return _without_logits(self, given)

        cls.forward = forward  # type: ignore[attr-defined]

    def te_cast_tables(self: Any) -> list[Tensor]:
        """Return the tables that a training pass casts to FP8 itself: a bf16 copy would last through all layers."""
        head, table = self.lm_head, self.get_input_embeddings().weight
        tied = isinstance(head, nn.Linear | Linear) and head.weight is table
        return [table] if self._te_head_in_fp8 and tied else []


def _can_skip(model: Any, given: dict[str, Any], asked: bool | None) -> bool:
    """Return whether the logits can be skipped unobserved. Raises ValueError if not, and `asked` demands it."""
    kept = given.get("logits_to_keep", 0)
    reason = None
    if model._te_head_in_fp8 is None:
        reason = "the model was not converted"
    elif isinstance(kept, Tensor) or kept:
        reason = "logits_to_keep asks for them"
    elif not are_plain([model.lm_head], frozen=True):
        reason = "lm_head has a hook, or was replaced"
    elif not has_usual_loss(model):
        reason = "the model's loss_function was replaced"
    if reason is not None and asked:
        raise ValueError(f"skip_logits=True, but {reason}: leave one of them out")
    return reason is None and not fp8.current.calibrating


def _without_logits(model: Any, given: dict[str, Any]) -> Any:
    return_dict = given.pop("return_dict", None)
    labels, _ = given.pop("labels"), given.pop("logits_to_keep", 0)
    weight, copy = model.lm_head.weight, None
    if (table := _shared_table(model, given)) is not None:
        copy = None if weight is table else weight
        padding = model.base_model.embed_tokens.padding_idx
        given["inputs_embeds"], weight = tied(table, None, given.pop("input_ids"), padding)
    if model._te_routed and given.get("output_router_logits") is None:
        given["output_router_logits"] = model.config.output_router_logits
    outputs = model.base_model(**given, return_dict=True)
    options = {name: given[name] for name in ("num_items_in_batch", "ignore_index", "shift_labels") if name in given}
    recipe = fp8.current.recipe
    in_fp8 = model._te_head_in_fp8 and fp8.current.enabled and not (recipe is not None and recipe.bf16_wgrad)
    loss = causal_loss(outputs.last_hidden_state, weight, labels, in_fp8=in_fp8, copy=copy, **options)
    made = _outputs(model, loss, outputs, given)
    return made if (model.config.return_dict if return_dict is None else return_dict) else made.to_tuple()


def _outputs(model: Any, loss: Tensor, outputs: Any, given: dict[str, Any]) -> Any:
    """Return the model's output; with a mixture of experts the router's loss is added if requested."""
    from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

    kept = {name: outputs[name] for name in ("past_key_values", "hidden_states", "attentions") if name in outputs}
    if not model._te_routed:
        return CausalLMOutputWithPast(loss=loss, **kept)
    uneven = None
    if given["output_router_logits"]:
        experts = model.num_experts, model.num_experts_per_tok
        uneven = type(model)._te_unevenness(outputs.router_logits, *experts, given.get("attention_mask"))
        loss = loss + model.router_aux_loss_coef * uneven.to(loss.device)
    return MoeCausalLMOutputWithPast(loss=loss, aux_loss=uneven, router_logits=outputs.router_logits, **kept)


def _shared_table(model: Any, given: dict[str, Any]) -> Tensor | None:
    """Return the embedding's weight if the head shares it and both can get one joint gradient; else None.

    The head's weight may be the optimizer's copy of it.
    """
    base: Any = model.base_model
    ids, weight = given.get("input_ids"), model.lm_head.weight
    if not issubclass(type(base), Blocks) or has_hooks(base) or is_recorded() or not torch.is_grad_enabled():
        return None
    if given.get("inputs_embeds") is not None or not isinstance(ids, Tensor) or ids.dim() != 2:
        return None
    embedding = base.embed_tokens
    plain = type(embedding) is nn.Embedding and are_plain([embedding])
    if not plain or embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
        return None
    table = embedding.weight
    if type(table) is not nn.Parameter or table.dtype not in FLOATS or table.device != ids.device:
        return None
    return table if weight is table or getattr(weight, "copy_of", None) is table else None


def causal_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    in_fp8: bool = False,
    copy: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
) -> Tensor:
    """Return mean CE(hidden_i W^T, the label after i), () float32 nats; hidden (B, T, C), weight (V, C), labels (B, T).

    Labels of ignore_index count for nothing. num_items_in_batch: divides the sum, not the number of labels. copy: the
    weight as an optimizer rounded it, used in the GEMMs; the gradient is weight's.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.flatten().to(hidden.device)
    ignored = targets == ignore_index
    targets = targets.masked_fill(targets == IGNORED, ILLEGAL).masked_fill(ignored, IGNORED)
    x = hidden.flatten(0, -2)
    name = "reference" if x.dtype not in FLOATS else "fp8" if in_fp8 else "chunked"
    copied = {"copy": copy} if _heads[name].copied else {}
    mean: Tensor = _heads[name].forward(x, weight, targets, vocab=len(weight), **copied)
    if num_items_in_batch is None:
        return mean
    counted = (~ignored).sum()
    total = torch.where(counted > 0, mean * counted, 0.0)  # the mean of no labels is NaN, but their sum is 0
    return total / (num_items_in_batch.to(total.device) if torch.is_tensor(num_items_in_batch) else num_items_in_batch)


def has_usual_loss(model: Any) -> bool:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return model.loss_function is ForCausalLMLoss


def _is_like(origin: Any, family: str) -> bool:
    """Return whether a class's forward has the same bytecode as a family's model: hidden states, a Linear, a loss."""
    import transformers

    codes = [inspect.unwrap(cls.forward).__code__ for cls in (origin, getattr(transformers, family))]
    return len({(code.co_code, code.co_names) for code in codes}) == 1


def convert(model: Any, undo: contextlib.ExitStack, in_fp8: bool) -> str:
    """Let a causal language model compute its training loss without logits; returns a description.

    in_fp8: it may compute in FP8 under a recipe. Raises ValueError with the reason if the head stays.
    """
    origin: Any = model._te_origin if isinstance(model, Mixed) else type(model)
    if origin.__name__ not in LIKE_LLAMA and not any(_is_like(origin, family) for family in (LLAMA, MIXTRAL)):
        raise ValueError(
            "its forward is not Llama's or Mixtral's: it may do more with the logits, or compute another loss"
        )
    head = model.lm_head
    if not isinstance(head, nn.Linear | Linear) or head.bias is not None:
        raise ValueError("lm_head is no Linear without a bias")
    if len(head.weight) != model.config.vocab_size:
        raise ValueError(f"lm_head has {len(head.weight)} rows, but config.vocab_size is {model.config.vocab_size}")
    if not has_usual_loss(model):
        raise ValueError("the model's loss_function was replaced")
    if head.weight.is_cuda and architecture.lacks_fp8(torch.cuda.get_device_capability(head.weight.device)):
        in_fp8 = False
    mix(model, Head, undo)
    undo.callback(vars(model).pop, "_te_head_in_fp8", None)
    model._te_head_in_fp8 = in_fp8
    return "the loss without logits" + (", in FP8 where a recipe is on" if in_fp8 else "")


class Resizing:
    """A model's own resize_token_embeddings, run with an nn.Linear in the place of a head that is a te.Linear.

    The head stays the same module, with hooks and scales, but gets new parameters.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model, head = self.model, self.model.get_output_embeddings()
        resize = type(model).resize_token_embeddings
        if not isinstance(head, Linear):
            return resize(model, *args, **kwargs)
        options: dict[str, Any] = {"bias": head.bias is not None, "device": "meta", "dtype": head.weight.dtype}
        plain: Any = nn.Linear(head.in_features, head.out_features, **options)  # around the same parameters
        plain.weight, plain.bias = head.weight, head.bias
        model.set_output_embeddings(plain)
        try:
            return resize(model, *args, **kwargs)
        finally:
            made = model.get_output_embeddings()
            head.resize(made.weight, made.bias)
            model.set_output_embeddings(head)
