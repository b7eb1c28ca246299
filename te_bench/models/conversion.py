"""convert: the Linear, LayerNorm and RMSNorm layers of any model, swapped in place for those that know te.autocast.

    print(te.convert(model, recipe.DelayedScaling()))
    loss = model(x).sum()  # in FP8

The model's forward and its other layers stay as they are, and so does its state dict: a Conv1D's weight (transformers'
GPT-2) becomes a transposed Parameter, but is stored untransposed there.
"""

import contextlib
import functools
import inspect
from collections.abc import Collection, Iterator
from typing import Any, NoReturn

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from te_bench.kernels import compiler
from te_bench.models import conversion_parts, fp8, linears, rms_norms
from te_bench.models.conversion_parts import Filter
from te_bench.models.conversion_report import Conversion, ConvertedLayer, KeptLayer, OtherWeight, TeLayer
from te_bench.models.modules import arguments
from te_bench.models.modules.activations import FLOATS
from te_bench.models.modules.fp8_module import Fp8Module
from te_bench.models.modules.layernorm import LayerNorm, RMSNorm
from te_bench.models.modules.linear import Linear
from te_bench.models.recipe import Recipe
from te_bench.models.subclassing import Mixed, mix

MULTIPLE = 16  # bytes: cuBLASLt's FP8 GEMMs need rows of a multiple

#: Attributes with a module's hooks, which move to the new layer. Handles still remove them there.
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)
#: Hooks bound to the module that they were registered with.
STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def larger_than(features: int) -> Filter:
    """Return a te.convert filter: Linears with fewer in or out features stay, as casts cost more than FP8 saves."""

    def accept(name: str, module: nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        return not isinstance(weight, Tensor) or weight.dim() < 2 or min(weight.shape) >= features

    return accept


def convert(
    model: nn.Module,
    recipe: Recipe | None = None,
    *,
    parts: str | Collection[str] | None = None,
    filter: Filter | None = None,
    pad: bool = False,
) -> Conversion:
    """Swap the Linear, LayerNorm and RMSNorm layers of `model` for te's, in place, and report which.

    It converts nn.Linear, nn.LayerNorm, nn.RMSNorm, and of transformers Conv1D and what computes RMSNorm. Parameter
    objects stay the same (ties, optimizers, dtype, device, requires_grad, hooks), except a Conv1D's weight, which is
    transposed: make the optimizer afterwards. filter(name, module) says which layers may be converted. A layer with
    dimensions that are not multiples of 16 stays, unless `pad`: te pads inside the GEMM, exactly, at a cost in time.
    parts: one or several of "linear", "norm", "mlp", "experts", "rotary", "attention", "blocks", "head", or "all"; None
    is linear and norm. The others (docs/huggingface.md) leave modules and parameters in place. filter is also asked for
    MLPs, experts and attentions, and for lm_head: whether its part may be in FP8.
    With `recipe`, Linears that it keeps (bf16_first, bf16_last) stay, and calling the model enters
    te.autocast(recipe=recipe), which torch.compile(fullgraph=True) cannot trace. Without, your own te.autocast decides.
    Converting twice is harmless, and the second report includes the first. If anything is raised, nothing has changed:
    ValueError for a model that is itself such a layer, for a Conv1D in DistributedDataParallel, for a recipe that its
    device cannot run, and, with a recipe, for a model whose class cannot be subclassed or that Lightning would train
    without calling it.
    """
    asked = conversion_parts.check(parts)
    _check(model, recipe)
    ours = tuple(_find_te_layers(model))
    owners = _find_owners(model)
    converted: dict[int, tuple[nn.Module, ConvertedLayer]] = {}
    kept: dict[int, KeptLayer] = {}
    places = list(_find_places(model))
    left = frozenset[str]() if recipe is None else kept_by(recipe, model)
    for name, _, _, layer in places:
        kind = _kind(layer)
        if kind is None or id(layer) in converted or id(layer) in kept:
            continue
        if ("norm" if kind.endswith("Norm") else "linear") not in asked:
            reason: str | None = "no part that was asked for"
        else:
            allowed = filter is None or filter(name, layer)
            reason = _reason_to_keep(layer, kind, name, owners, pad) if allowed else "filtered out"
            reason = "kept by the recipe" if reason is None and name in left else reason
        if reason is None:
            converted[id(layer)] = _make_replacement(layer, kind, name)
        else:
            kept[id(layer)] = KeptLayer(name, type(layer).__name__, reason, _count_in_gemm(layer, kind))
    _check_reduced(model, {number for number, (_, entry) in converted.items() if entry.before == "Conv1D"})
    total = sum(p.numel() for p in model.parameters() if not is_lazy(p))
    seen = [layer for _, _, _, layer in places if id(layer) in converted or id(layer) in kept]
    outside = tuple(_find_other_weights(model, seen))
    with contextlib.ExitStack() as undo:
        for _, parent, attribute, layer in places:
            if id(layer) in converted:
                _swap(parent, attribute, converted[id(layer)][0], undo)
        fp8_head = recipe is None or recipe.lacks_fp8_head() is None
        others = tuple(conversion_parts.convert(model, asked, filter, undo, left, fp8_head))
        for module in model.modules():
            _checkpoint_in_fp8(module, undo)
            _let_resize(module, undo)
            _keep_padded(module, undo)
        if recipe is not None:
            _enter_by_itself(model, recipe, undo)
        undo.pop_all()  # everything succeeded: keep the changes
    # An FP8 head reads its weight itself, so its layer is not reported as kept.
    heads = {part.name for part in others if part.parameters}
    stays = tuple(entry for entry in kept.values() if entry.name not in heads)
    by_itself = getattr(model, "_te_recipe", None) is not None
    return Conversion(tuple(entry for _, entry in converted.values()), stays, total, ours, outside, others, by_itself)


def kept_by(recipe: Recipe, model: nn.Module) -> frozenset[str]:
    """Return the names of the Linears that the recipe leaves in the activations' precision."""
    return recipe.keeps(name for name, layer in model.named_modules() if _kind(layer) in ("Linear", "Conv1D"))


def _swap(parent: nn.Module, attribute: str, new: nn.Module, undo: contextlib.ExitStack) -> None:
    undo.callback(parent._modules.__setitem__, attribute, parent._modules[attribute])
    parent._modules[attribute] = new
    if isinstance(parent, nn.TransformerEncoderLayer):
        # Its inference fast path reads the weights directly, bypassing the layers and FP8; 0 disables it.
        _assign(parent, "activation_relu_or_gelu", 0, undo)


def _keep_padded(module: nn.Module, undo: contextlib.ExitStack) -> None:
    """Let an nn.TransformerEncoder give no nested tensors to layers whose inference fast path `_swap` disabled."""
    layers = module.layers if isinstance(module, nn.TransformerEncoder) else ()
    if any(getattr(layer, "activation_relu_or_gelu", None) == 0 for layer in layers):
        _assign(module, "use_nested_tensor", False, undo)


def _checkpoint_in_fp8(module: Any, undo: contextlib.ExitStack) -> None:
    """Let transformers' gradient checkpointing, enabled now or later, use te.checkpoint instead of torch's."""
    if "_gradient_checkpointing_func" in vars(module):
        function = _put_te_checkpoint(module._gradient_checkpointing_func)
        _assign(module, "_gradient_checkpointing_func", function, undo)
    setter = getattr(type(module), "_set_gradient_checkpointing", None)
    # Code from before transformers 4.35 has (module, value) here, and calls torch's checkpoint by name.
    if callable(setter) and "gradient_checkpointing_func" in inspect.signature(setter).parameters:
        _assign(module, "_set_gradient_checkpointing", _Checkpointing(module), undo)


class _Checkpointing:
    """A model's own _set_gradient_checkpointing, which is given te.checkpoint instead of torch's."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(
        self, enable: bool = True, gradient_checkpointing_func: Any = torch.utils.checkpoint.checkpoint, **options: Any
    ) -> None:
        type(self.model)._set_gradient_checkpointing(
            self.model, enable, _put_te_checkpoint(gradient_checkpointing_func), **options
        )


def _put_te_checkpoint(function: Any) -> Any:
    """Return te.checkpoint with the same options if `function` is torch's checkpoint; else `function` itself."""
    called, options = function, {}
    if isinstance(function, functools.partial) and not function.args:
        called, options = function.func, function.keywords
    return functools.partial(fp8.checkpoint, **options) if called is torch.utils.checkpoint.checkpoint else function


def _let_resize(module: Any, undo: contextlib.ExitStack) -> None:
    """Let a transformers model resize a head that is a te.Linear."""
    if hasattr(type(module), "resize_token_embeddings") and isinstance(module.get_output_embeddings(), Linear):
        from te_bench.models.huggingface.head import Resizing

        _assign(module, "resize_token_embeddings", Resizing(module), undo)


def _assign(module: Any, attribute: str, value: Any, undo: contextlib.ExitStack) -> None:
    """Set an attribute without calling the module's own __setattr__, which may do anything."""
    if attribute in vars(module):
        undo.callback(vars(module).__setitem__, attribute, vars(module)[attribute])
    else:
        undo.callback(vars(module).pop, attribute, None)
    vars(module)[attribute] = value


def _check(model: nn.Module, recipe: Recipe | None) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"convert takes an nn.Module, got {type(model).__name__}")
    if _kind(model) is not None:
        name = type(model).__name__
        raise ValueError(f"convert swaps layers inside a model, and a {name} is one: wrap it, nn.Sequential(layer)")
    if recipe is None:
        return
    fp8.check_recipe(recipe)
    if any(base.__name__ == "LightningModule" for base in type(model).__mro__):
        raise ValueError(
            f"{type(model).__name__} is a LightningModule, whose training_step Lightning calls without calling the "
            "module, so it would enter no recipe: convert the model that training_step calls, te.convert(self.model, recipe)"
        )
    for device in {p.device for p in model.parameters()}:
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        reason = recipe.unsupported(device.type, capability)
        if reason is not None:
            raise ValueError(reason)


def _check_reduced(model: nn.Module, transposed: Collection[int]) -> None:
    """Raise ValueError if DistributedDataParallel holds a layer, by its id, that would get a new Parameter."""
    for wrapper in model.modules():
        if isinstance(wrapper, DistributedDataParallel) and any(id(layer) in transposed for layer in wrapper.modules()):
            raise ValueError(
                "DistributedDataParallel would not reduce the gradients of Conv1D weights, which convert makes anew: "
                "convert the model, then wrap it"
            )


def _find_places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """Yield (name, parent, attribute, layer) for every place of a module; a shared one has several."""
    for name, layer in model.named_modules(remove_duplicate=False):
        if name:
            prefix, _, attribute = name.rpartition(".")
            yield name, model.get_submodule(prefix), attribute, layer


def _find_owners(model: nn.Module) -> dict[int, list[str]]:
    """Return {id of a parameter: the names it has}."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(f"{name}.{attribute}" if name else attribute)
    return owners


def _find_te_layers(model: nn.Module) -> Iterator[TeLayer]:
    counted: set[int] = set()
    for name, layer in model.named_modules():
        if isinstance(layer, Fp8Module):
            weights = [p for p in layer.parameters(recurse=False) if p.dim() == 2 and id(p) not in counted]
            counted.update(map(id, weights))
            yield TeLayer(name, type(layer).__name__, sum(p.numel() for p in weights))
        elif isinstance(layer, LayerNorm | RMSNorm):
            yield TeLayer(name, type(layer).__name__, 0)


def _find_other_weights(model: nn.Module, seen: list[nn.Module]) -> Iterator[OtherWeight]:
    """Yield weights of two or more dimensions that belong neither to `seen` nor to te's layers."""
    layers = [*seen, *(module for module in model.modules() if isinstance(module, Fp8Module))]
    known = {id(p) for layer in layers for p in layer.parameters()}
    for name, module in model.named_modules():
        for attribute, p in module._parameters.items():
            if p is None or id(p) in known or is_lazy(p) or p.dim() < 2 or not p.is_floating_point():
                continue
            known.add(id(p))
            reason, multiplied = _describe_use(model, module, p)
            where = f"{name}.{attribute}" if name else attribute
            yield OtherWeight(where, type(module).__name__, reason, p.numel(), multiplied)


def _describe_use(model: nn.Module, module: nn.Module, p: Tensor) -> tuple[str, int | None]:
    """Return why a weight stays, and how many of its elements multiply a token (None: unknown)."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "a table, which is looked up", 0
    if isinstance(module, nn.MultiheadAttention):
        return "torch multiplies by it outside of any layer", p.numel()
    config = getattr(model, "config", None)  # transformers' config
    chosen, experts = getattr(config, "num_experts_per_tok", None), p.shape[0]
    counts = {getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")}
    if p.dim() == 3 and isinstance(chosen, int) and experts in counts:
        return f"{experts} experts in one parameter, of which a token takes {chosen}", p.numel() * chosen // experts
    return f"{type(module).__name__} has it to itself, not in a layer that convert knows", None


def _kind(layer: nn.Module) -> str | None:
    """Return the kind of a layer or its base class: "Linear", "Conv1D", "LayerNorm", "RMSNorm"; None for any other."""
    name, home = type(layer).__name__, type(layer).__module__
    if home.startswith("transformers.") and name == "Conv1D":
        return "Conv1D"
    kinds = {nn.Linear: "Linear", nn.LayerNorm: "LayerNorm", nn.RMSNorm: "RMSNorm"}
    known = next((kind for base, kind in kinds.items() if isinstance(layer, base)), None)
    if known is None and home.startswith("transformers."):
        return "RMSNorm" if name.endswith("RMSNorm") or rms_norms.offset(layer) is not None else None
    return known


def _reason_to_keep(layer: nn.Module, kind: str, name: str, owners: dict[int, list[str]], pad: bool) -> str | None:
    cls = type(layer)
    if parametrize.is_parametrized(layer):
        return "its weight is parametrised (torch.nn.utils.parametrize)"
    torchs = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
    if (
        isinstance(layer, torchs)
        and cls not in torchs
        and not (isinstance(layer, nn.Linear) and linears.is_plain(layer))
    ):
        return f"{cls.__name__}, a subclass of {kind}, may do more than that"
    if "forward" in vars(layer) or vars(layer).get("_compiled_call_impl"):
        return "its forward was replaced, or compiled: convert first"
    others = {*layer._parameters, *layer._buffers, *layer._modules} - {"weight", "bias"}
    if others:
        return (
            f"it has {', '.join(sorted(others))}: its weight is made by hooks (pruning, weight_norm), or it does more"
        )
    if any(vars(layer)[hooks] for hooks in STATE_HOOKS):
        return "it has hooks on its state dict"
    weight = layer._parameters.get("weight")
    if weight is None:
        return "it has no weight (elementwise_affine=False)"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    if weight.dtype not in FLOATS:
        return f"its weight is {weight.dtype}: FP8 takes float32, bfloat16 or float16"
    elsewhere = [other for other in owners[id(weight)] if other != f"{name}.weight"]
    if elsewhere:
        return f"its weight is also {', '.join(elsewhere)}"
    return _norm_reason(layer, weight) if kind.endswith("Norm") else _gemm_reason(weight, pad)


def _norm_reason(layer: nn.Module, weight: Tensor) -> str | None:
    if weight.dim() != 1:
        return f"it normalises over {weight.dim()} dimensions"
    if not weight.numel():
        return "it normalises over nothing"
    if not isinstance(layer, nn.LayerNorm | nn.RMSNorm) and rms_norms.offset(layer) is None:
        return "it does not compute weight x / sqrt(mean(x^2) + eps)"
    if rms_norms.eps(layer) is None:
        return "eps=None takes the input's dtype's: set its eps to a number"
    legal, words = arguments.LEGAL["eps"]
    eps = rms_norms.eps(layer)
    return None if legal(eps) else f"its eps is {eps}: te's must be {words}"


def _gemm_reason(weight: Tensor, pad: bool) -> str | None:
    if not weight.numel():
        return f"its weight is {tuple(weight.shape)}: nothing to multiply"
    odd = [str(size) for size in weight.shape if size % MULTIPLE]
    if odd and not pad:
        return f"{' and '.join(odd)} not divisible by {MULTIPLE} (pad=True converts it)"
    return None


def _count_in_gemm(layer: nn.Module, kind: str) -> int:
    weight = getattr(layer, "weight", None)
    return 0 if kind.endswith("Norm") or weight is None or is_lazy(weight) else weight.numel()


def _make_replacement(layer: Any, kind: str, name: str) -> tuple[nn.Module, ConvertedLayer]:
    """Make the te layer that replaces another, around the same Parameters."""
    weight, bias, note = layer.weight, getattr(layer, "bias", None), ""
    options: dict[str, Any] = {"params_dtype": weight.dtype, "device": "meta"}  # replaced below: no memory, no seed
    new: nn.Module
    if kind.endswith("Norm"):
        centred = rms_norms.offset(layer) == 1
        cls = LayerNorm if kind == "LayerNorm" else RMSNorm
        new = cls(weight.numel(), rms_norms.eps(layer), zero_centered_gamma=centred, **options)
    else:
        if kind == "Conv1D":
            weight = nn.Parameter(weight.detach().t().contiguous(), weight.requires_grad)
            note = "weight transposed, but not in the state dict: a new Parameter"
        new = Linear(weight.shape[1], weight.shape[0], bias=bias is not None, **options)
    new.weight, new.bias = weight, bias
    for attribute, value in vars(layer).items():
        if attribute in HOOKS or attribute not in vars(new):  # attributes that users set move along
            vars(new)[attribute] = value
    if kind == "Conv1D":
        new.register_state_dict_post_hook(_give_as_conv1d)
        new.register_load_state_dict_pre_hook(_take_from_conv1d)
    new.train(layer.training)
    entry = ConvertedLayer(name, type(layer).__name__, type(new).__name__, _count_in_gemm(layer, kind), note)
    return new, entry


def _give_as_conv1d(_: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Replace the weight in the state dict by a transposed view, so that writing to it writes to the model."""
    state[f"{prefix}weight"] = state[f"{prefix}weight"].t()


def _take_from_conv1d(_: nn.Module, state: dict[str, Any], prefix: str, *metadata: Any) -> None:
    if (weight := state.get(f"{prefix}weight")) is not None:
        state[f"{prefix}weight"] = weight.t().contiguous()  # a copy, as assign=True makes it the Parameter


class _Autocasting(Mixed):
    """A mixin before a model's class that calls the model under te.autocast.

    Hooks would not do: after a KeyboardInterrupt nn.Module calls none, and FP8 would stay on.
    """

    _te_recipe: Recipe | None = None  # None: a module that was made from the class

    # The autocast stays out of graphs, the model's own call does not.
    @functools.partial(compiler.untraced, recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recipe = self._te_recipe
        with contextlib.nullcontext() if recipe is None else fp8.autocast(recipe=recipe):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def _replicate_for_data_parallel(self) -> NoReturn:
        fp8.refuse_data_parallel()


def _enter_by_itself(model: Any, recipe: Recipe, undo: contextlib.ExitStack) -> None:
    try:
        mix(model, _Autocasting, undo)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # raised by a metaclass, __init_subclass__ or __slots__
        raise ValueError(
            f"{type(model).__name__} can't enter the recipe by itself, for no subclass can take its place ({error}): "
            "convert without a recipe, and call the model under te.autocast(recipe=...)"
        ) from error
    _assign(model, "_te_recipe", recipe, undo)
