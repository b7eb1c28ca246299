"""The parts that te.convert replaces besides layers: MLPs, rotary embeddings, attention, the head with its loss.

A module and its parameters stay in place; its class, or its model's attn_implementation, changes.
"""

import ast
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from te_bench.models.conversion_report import ConvertedPart
from te_bench.models.modules.linear import Linear
from te_bench.models.subclassing import mix

Filter = Callable[[str, nn.Module], bool]
#: Replaces a part and returns its description; raises ValueError with the reason if the part stays.
Convertor = Callable[[Any, contextlib.ExitStack], str]

LAYERS = ("linear", "norm")
PARTS = (*LAYERS, "mlp", "experts", "rotary", "attention", "blocks", "head")
ALL = "all"


def check(parts: str | Collection[str] | None) -> tuple[str, ...]:
    """Return the names of the requested parts. Raises ValueError for an unknown one."""
    if parts is None:
        return LAYERS
    names = (parts,) if isinstance(parts, str) else tuple(parts)
    unknown = [name for name in names if name not in (*PARTS, ALL)]
    if unknown or not names:
        raise ValueError(
            f"parts {parts!r}: {repr(unknown[0]) + ' is none' if unknown else 'none'} of {', '.join(PARTS)}; {ALL!r} is all"
        )
    return PARTS if ALL in names else tuple(name for name in PARTS if name in names)


def convert(
    model: nn.Module,
    parts: Collection[str],
    filter: Filter | None,
    undo: contextlib.ExitStack,
    left: Collection[str] = (),
    fp8_head: bool = True,
) -> Iterator[ConvertedPart]:
    """Replace the requested parts, and yield for each its new form or the reason why it stays.
    left: names of Linears that the recipe leaves in the activations' precision; a head among them has no FP8. fp8_head:
    whether the recipe computes all three GEMMs of a head in FP8.
    """
    for part in PARTS[len(LAYERS) :]:
        if part not in parts:
            continue
        if part == "attention":
            done = [_attempt(part, name, m, None, _set_attention, undo) for name, m in _models_of_transformers(model)]
        elif part == "head":
            done = list(_heads(model, filter, undo, left, fp8_head))
        else:
            done = list(_modules(part, model, filter, undo))
        yield from done
        if not done and (part != "experts" or len(parts) < len(PARTS)):  # few models have experts: not for "all"
            yield ConvertedPart(part, "", type(model).__name__, None, ABSENT[part])


#: The reason given for a model without such a part.
ABSENT = {
    "mlp": "no module has the Linears of an MLP by names that convert knows (gate_proj, up_proj, down_proj; fc1, fc2; ...)",
    "experts": "it holds no experts that go by transformers' interface",
    "rotary": "no attention of transformers in it calls apply_rotary_pos_emb",
    "attention": "it holds no model of transformers",
    "blocks": "no model of transformers in it has embed_tokens, layers and rotary_emb",
    "head": "it holds no model of transformers with an lm_head",
}


def _modules(part: str, model: nn.Module, filter: Filter | None, undo: contextlib.ExitStack) -> Iterator[ConvertedPart]:
    """Replace all modules of a part that is found by their attributes."""
    from te_bench.models.huggingface import blocks, experts, mlp, rotary

    takes, convert, home = {
        "mlp": (lambda module: mlp.places(module) is not None, mlp.convert, ""),
        "experts": (experts.multiplies, experts.convert, "transformers."),
        "rotary": (rotary.calls, rotary.convert, "transformers."),
        "blocks": (_has_blocks, blocks.convert, "transformers."),
    }[part]
    for name, module in model.named_modules():
        if isinstance(module, mlp.MLP) and part == "mlp":
            yield ConvertedPart(part, name, type(module).__name__, "te's already", None)
        elif type(module).__module__.startswith(home) and takes(module):
            yield _attempt(part, name, module, None if part == "blocks" else filter, convert, undo)


def _has_blocks(module: Any) -> bool:
    return all(hasattr(module, child) for child in ("embed_tokens", "layers", "rotary_emb", "norm"))


def _heads(
    model: nn.Module, filter: Filter | None, undo: contextlib.ExitStack, left: Collection[str], fp8_head: bool
) -> Iterator[ConvertedPart]:
    from te_bench.models.huggingface import head

    for name, inner in model.named_modules():
        if not type(inner).__module__.startswith("transformers.") or not hasattr(inner, "lm_head"):
            continue
        where = f"{name}.lm_head" if name else "lm_head"
        in_fp8 = fp8_head and where not in left and (filter is None or filter(where, inner.lm_head))
        entry = _attempt("head", where, inner, None, functools.partial(head.convert, in_fp8=in_fp8), undo)
        own = entry.after is not None and inner._te_head_in_fp8 and not isinstance(inner.lm_head, Linear)
        yield replace(entry, parameters=inner.lm_head.weight.numel()) if own else entry


def _attempt(
    part: str, name: str, module: nn.Module, filter: Filter | None, convert: Convertor, undo: contextlib.ExitStack
) -> ConvertedPart:
    kind = type(module).__name__
    if filter is not None and not filter(name, module):
        return ConvertedPart(part, name, kind, None, "filtered out")
    with contextlib.ExitStack() as own:
        try:
            after = convert(module, own)
        except ValueError as error:
            return ConvertedPart(part, name, kind, None, str(error))
        undo.push(own.pop_all())
    return ConvertedPart(part, name, kind, after, None)


def _models_of_transformers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the transformers models that lie in no other one."""
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel

    inside: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and id(module) not in inside:
            inside.update(map(id, module.modules()))
            yield name, module


def _set_attention(model: Any, undo: contextlib.ExitStack) -> str:
    """Set attn_implementation="te_bench" on a model and those in it. Raises ValueError with the reason if not."""
    from transformers import PreTrainedModel

    from te_bench.models.huggingface.attention import NAME, Attending

    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    reason = _lack(model, models)
    if reason is not None:
        raise ValueError(reason)
    for inner in models:
        undo.callback(setattr, inner.config, "_attn_implementation", inner.config._attn_implementation)
        inner.set_attn_implementation(NAME)  # on each, as encoders and decoders may have copies of the configuration
    if any(inner.config._attn_implementation != NAME for inner in models):
        raise ValueError("transformers does not let it take another attention")
    mix(model, Attending, undo)
    return f"attn_implementation={NAME!r}"


def _lack(model: Any, models: list[Any]) -> str | None:
    """Return why a model cannot use te-bench's attention, or None."""
    from transformers import PreTrainedModel

    # transformers lets a class without attention set an implementation, too.
    if not model._can_set_attn_implementation() or not _mention(models, "ALL_ATTENTION_FUNCTIONS"):
        return "it has no attention that goes by transformers' interface"
    if any(getattr(inner.config, "attn_logit_softcapping", None) is not None for inner in models):
        return "it caps the scores softly, which no kernel does"
    if any(hasattr(module, "sinks") for module in model.modules()):
        return "it has attention sinks, which no kernel does"
    if _mention(models, "position_bias"):
        return "it adds a bias of positions to the scores, which no kernel does"
    if not all(inner._supports_sdpa for inner in models):
        return "transformers writes its attention out, and takes no kernel for it (no attn_implementation='sdpa')"
    # Models read the mask of tokens, which is a tensor; modules in them are given te-bench's.
    inner: set[Any] = {type(module) for module in model.modules() if not isinstance(module, PreTrainedModel)}
    own = sorted(cls.__name__ for cls in inner if _computes_mask(cls))
    return f"its {own[0]} computes with the mask of attention, of which te-bench's makes no tensor" if own else None


@functools.cache
def _computes_mask(cls: Any) -> bool:
    """Return whether a class's forward hands transformers' interface a mask of its own making, or adds one to scores."""
    source = _source(inspect.unwrap(cls.forward))
    try:  # not dedented: comments and strings may begin at the line's start
        nodes = list(ast.walk(ast.parse(f"if 1:\n{source}" if source[:1].isspace() else source)))
    except SyntaxError:  # a lambda's line
        return False
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "attention_interface"]
    handed = {ast.unparse(mask) for call in calls for mask in call.args[4:5]}  # after module, query, key and value
    handed |= {ast.unparse(named.value) for call in calls for named in call.keywords if named.arg == "attention_mask"}
    made = [node.value for node in nodes if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in handed]
    sums = [node for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)]
    given = {node.arg for node in nodes if isinstance(node, ast.arg) and "mask" in node.arg}
    return any(map(_computes, made)) or any({ast.unparse(x.left), ast.unparse(x.right)} & given for x in sums)


def _computes(value: ast.expr) -> bool:
    """Return whether an expression is more than a choice or a slice of what is there."""
    calls = [node for node in ast.walk(value) if isinstance(node, ast.Call)]
    chosen = all(isinstance(call.func, ast.Attribute) and call.func.attr == "get" for call in calls)
    return not chosen or any(isinstance(node, ast.BinOp) for node in ast.walk(value))


def _mention(models: list[Any], word: str) -> bool:
    """Return whether the source file of a model's class, or of a base class, contains the word."""
    classes = [base for model in models for base in type(model).__mro__ if hasattr(base, "config_class")]
    files = {base.__module__ for base in classes} - {"transformers.modeling_utils"}
    return any(word in _source(sys.modules[name]) for name in files)


def _source(module: Any) -> str:
    """Return a module's source text; "" for code typed into an interpreter."""
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return ""
