"""A user's model as a training step takes one: (inputs, targets) -> loss, with its precision and its attention.

    made = make(source, attention="own", device="cpu")    the module as its factory or config gives it
    model = Adopted(made, recipe=recipe.DelayedScaling())
    with model.autocast():
        loss = model(inputs, targets)

A factory's module is called with the tokens, and with the targets if its forward takes them. It returns the loss,
logits (B, T, V), or an object with a `loss`.
"""

import contextlib
import functools
import importlib
import inspect
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils.flop_counter import FlopCounterMode

from te_bench.models import conversion, families, fp8, grouped_gemm
from te_bench.models.calling import judged, loss_of, parameter_of_targets, shown
from te_bench.models.conversion_parts import Filter
from te_bench.models.decoder import move
from te_bench.models.dropout import rates, remove_dropout
from te_bench.models.recipe import Recipe
from te_bench.models.rivals import Adoption
from te_bench.models.sources import PINNED, TOO_LARGE, Refused, Source, on_one_line

OWN = "own"  # attention as the model and PyTorch choose it: experiments.spec.OWN_ATTENTION
#: {attention: transformers' name of it}: written out in plain operators, or kernels of SDPA.
IMPLEMENTATIONS = {"manual": "eager", **dict.fromkeys(PINNED, "sdpa")}

T = TypeVar("T")

LAYERS = ("layers", "num_layers", "n_layer", "n_layers")  # names of a factory's parameter for its depth
PROBE_BATCH = 2  # sequences of a pass whose numbers do not count: a batch norm refuses a single image of one pixel


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A module, how to draw its inputs and how to call it. vocab is 1 if its inputs are no tokens."""

    source: Source
    attention: str
    module: nn.Module
    forward: Callable[[nn.Module, Tensor, Tensor], Any]
    drawn: families.Draw | None  # None: random tokens
    vocab: int
    block: int | None
    sequence: int | None
    text: bool
    ignores: bool = False  # whether a target of families.IGNORED is legal and counts for nothing

    @property
    def has_manual(self) -> bool:
        return self.source.config is not None

    def draw(self, batch: int, tokens: int, *, seed: int, device: str) -> tuple[Tensor, Tensor]:
        """Draw (inputs, targets) on the device. Raises ValueError if the user's --inputs returns other things."""
        generator = torch.Generator(device).manual_seed(seed)
        if self.drawn is None:
            both = torch.randint(self.vocab, (batch, tokens + 1), generator=generator, device=device)
            return both[:, :-1].contiguous(), both[:, 1:].contiguous()
        found = called(self.source.inputs or self.source.model, self.drawn, batch, tokens, generator, device)
        if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(x, Tensor) for x in found):
            raise Refused(f"{self.source.inputs}: it returned {shown(found)}; return two tensors, inputs and targets")
        if any(len(x.shape) < 1 or len(x) != batch for x in found):
            shapes = " and ".join(str(tuple(x.shape)) for x in found)
            raise Refused(
                f"{self.source.inputs}: its tensors are {shapes}; the first dimension of both is batch, {batch}"
            )
        return found


def make(source: Source, *, attention: str, device: str, seed: int = 0, layers: int | None = None) -> Made:
    """Build the source's module on the device; the seed decides its weights. layers: the most layers it may have.

    Raises ValueError, naming the source, if the user's code fails or returns no module.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    with torch.device(device):
        module = _built(source, attention, layers)
    where = {t.device.type for t in (*module.parameters(), *module.buffers())}
    if where - {device, "cpu"}:
        raise Refused(f"{source.model}: it puts weights on {max(where)} by itself; leave that to te-bench")
    if where - {device}:
        module = module.to(device)
    if not any(p.requires_grad for p in module.parameters()):
        raise Refused(f"{source.model}: it has no weights that are trained")
    tables = [(name, m) for name, m in module.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    if sparse := [name for name, table in tables if table.sparse]:
        raise Refused(
            f"{source.model}: {sparse[0]} gives sparse gradients, which AdamW does not take: leave sparse=True out"
        )
    judge = None if source.loss is None else judged(source.loss, _function(source.loss))
    unknown = f"{source.model}: te-bench does not know how to feed {type(module).__name__}: give --inputs and --loss"
    family, forward = families.calling(source.model, module, judge, unknown)
    own_inputs = None if source.inputs is None else _function(source.inputs)
    drawn = own_inputs or (None if family is None else family.draw)
    vocab = 1 if drawn is not None else _vocabulary(module)
    if vocab is None:
        raise Refused(f"{source.model}: it has no nn.Embedding that would say its vocabulary: give --inputs")
    return Made(
        source=source,
        attention=attention,
        module=module,
        forward=forward,
        drawn=drawn,
        vocab=vocab,
        block=_longest(module),
        sequence=None if own_inputs is not None or family is None else family.sequence,
        text=drawn is None and (family is None or family.name in ("causal", "masked", "seq2seq")),
        ignores=judge is None and (parameter_of_targets(module) is None if family is None else family.labels),
    )


def _built(source: Source, attention: str, layers: int | None) -> nn.Module:
    if source.config is not None:
        built: nn.Module = called(source.model, _of_config, source, attention, layers, doing="transformers")
        return built
    factory = _function(source.model)
    arguments = json.loads(source.arguments or "{}")
    parameters = inspect.signature(factory).parameters if callable(factory) else {}
    unknown = [name for name in arguments if name not in parameters]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        known = ", ".join(parameters) or "none"
        raise Refused(f"{source.model}: it takes no argument {unknown[0]!r}; its arguments: {known}")
    missing = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and name not in arguments and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if missing:
        raise Refused(f"{source.model}: it needs the argument {missing[0]!r}: --model-args {missing[0]}=VALUE")
    if layers is not None and (depth := layers_argument(source)) is not None:
        arguments[depth] = min(layers, arguments.get(depth, parameters[depth].default))
    module = called(source.model, factory, **arguments)
    if not isinstance(module, nn.Module):
        raise Refused(f"{source.model}: it returned {shown(module)}; return a torch.nn.Module")
    return module


def _of_config(source: Source, attention: str, layers: int | None) -> nn.Module:
    try:
        return families.build(str(source.config), attention=IMPLEMENTATIONS.get(attention), layers=layers)
    except Refused as error:
        raise Refused(f"{source.model}: {error}") from None


def depth_of(source: Source) -> int | None:
    """Return how many layers the whole model has, or None if its depth cannot be changed."""
    if source.config is not None:
        settings = json.loads(source.config)
        return max((settings[key] for key in families.LAYERS if isinstance(settings.get(key), int)), default=None)
    depth = layers_argument(source)
    if depth is None:
        return None
    value = json.loads(source.arguments or "{}").get(
        depth, inspect.signature(_function(source.model)).parameters[depth].default
    )
    return value if isinstance(value, int) else None


def layers_argument(source: Source) -> str | None:
    """Return the name of the factory's parameter for the model's depth, or None."""
    parameters = inspect.signature(_function(source.model)).parameters
    return next((name for name in LAYERS if name in parameters), None)


def _function(path: str) -> Any:
    """Return the object of an import path; the current folder is searched, too."""
    module, _, name = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found = called(path, importlib.import_module, module, doing=f"importing {module}")
    try:
        return getattr(found, name)
    except AttributeError:
        raise Refused(f"{path}: {module} has no {name}") from None


def called(path: str, function: Any, *arguments: Any, doing: str = "it", **named: Any) -> Any:
    """Call the user's function. Errors in it become ValueError, except missing packages and lack of memory."""
    try:
        return function(*arguments, **named)
    except Refused:
        raise
    except (ModuleNotFoundError, torch.OutOfMemoryError, MemoryError, KeyboardInterrupt, *UNIMAGINABLE):
        raise
    except (Exception, SystemExit) as error:
        _raise_if_unimaginable(error)
        if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # torch: no class of its own
            raise MemoryError(f"{path}: {doing} ran out of memory: {TOO_LARGE}") from None
        raise Refused(f"{path}: {doing} raised {_told(error)}") from error


def _told(error: BaseException) -> str:
    text = on_one_line(str(error))[:300]
    # The last is torch's, built with CUDA, of a weight without memory that leaves the CPU.
    gpu = any(word in text.lower() for word in ("cuda", "nvidia", "couldn't swap"))
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{said}. Leave it to te-bench to put a model on a GPU" if gpu else said


def _vocabulary(module: Any) -> int | None:
    """Return its config's vocab_size, the module's own, or the rows of its first embedding."""
    text = getattr(module.config, "get_text_config", None) if families.is_of_transformers(module) else None
    for holder in (text() if text else None, getattr(module, "config", None), module):
        size = getattr(holder, "vocab_size", None)
        if isinstance(size, int):
            return size
    return next((m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)), None)


def _longest(module: Any) -> int | None:
    for holder in (getattr(module, "config", None), module):
        for name in families.LENGTHS:
            length = getattr(holder, name, None)
            if type(length) is int and length > 0:
                return length
    return None


#: Raised by fake tensors where a result depends on values.
UNIMAGINABLE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


@contextlib.contextmanager
def imagined(source: Source) -> Iterator[None]:
    """Give CPU tensors shapes without memory in this context; reading their values raises one of UNIMAGINABLE.

    The source's modules are imported before, so that tensors made at import are real.
    """
    for path in (None if source.config is not None else source.model, source.inputs, source.loss):
        if path is not None:
            _function(path)
    # It redraws what is outside of its bounds, which depends on values; transformers' trunc_normal_ calls it, too.
    undrawn = mock.patch.object(nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor)
    with FakeTensorMode(allow_non_fake_inputs=True), grouped_gemm.Imagined(), undrawn:
        yield


def a_pass(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return model(inputs, targets). Raises one of UNIMAGINABLE for a pass that casts a module without memory."""
    try:
        loss: Tensor = model(inputs, targets)
    except RuntimeError as error:
        _raise_if_unimaginable(error)
        raise
    return loss


def _raise_if_unimaginable(error: BaseException) -> None:
    """Raise one of UNIMAGINABLE for torch's error of a module without memory that is cast, as by `.to(torch.bfloat16)`."""
    if "Couldn't swap" in str(error) and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        raise UnsupportedFakeTensorException(str(error)) from error


def without_memory(source: Source, work: Callable[[], T], otherwise: Callable[[], T] | None = None) -> T:
    """Return work() on tensors without memory, or on real ones if its result depends on their values.

    otherwise: called instead of work() on real tensors.
    """
    try:
        with imagined(source):
            return work()
    except UNIMAGINABLE:
        return (otherwise or work)()


@functools.cache
def described(source: Source) -> Made:
    """Make the source's model to inspect it, not to compute: weights have memory only where unavoidable."""
    return without_memory(source, lambda: make(source, attention=OWN, device="cpu"))


class Adopted(nn.Module):
    """A user's module as forward(inputs, targets) -> (), its loss.

    With a recipe its Linear and norm layers are converted (models.conversion) and compute in FP8 under `autocast()`;
    with `parts` and `filter` (te.convert's), the named parts are converted, with or without a recipe. rival: another
    project's way to train it, instead of recipe and parts. dropout=False removes dropout. kernel: of
    scaled_dot_product_attention, by default that of `made`.
    """

    shares_amaxes = False  # set by training.parallel, as a Decoder's

    def __init__(
        self,
        made: Made,
        *,
        recipe: Recipe | None = None,
        dropout: bool = True,
        kernel: str | None = None,
        parts: str | None = None,
        filter: Filter | None = None,
        rival: Adoption | None = None,
    ):
        super().__init__()
        self.made, self.recipe, self.parts = made, recipe, parts
        self.kernel = made.attention if kernel is None else kernel
        self.module = made.module
        if not dropout:
            remove_dropout(self.module)
        self.has_dropout = any(True for _ in rates(self.module))
        converts = recipe is not None or parts is not None
        left = frozenset[str]() if recipe is None else conversion.kept_by(recipe, self.module)

        def allowed(name: str, module: nn.Module) -> bool:
            return name not in left and (filter is None or filter(name, module))

        self.conversion = conversion.convert(self.module, parts=parts, filter=allowed) if converts else None
        self.changed = None if rival is None else rival.build(self.module)
        self.weights = sum(p.numel() for p in self.parameters())  # counted before ranks share them
        self.gemms = 0  # FP8 GEMMs of the last pass under `counted`
        self.rows: set[int] = set()  # numbers of rows that FP8 layers were given in it
        self.fused = False  # whether the fused chain computed it

    @property
    def in_fp8(self) -> bool:
        """Whether precision fp8 applies: the model has a recipe, or a rival computes in FP8."""
        return self.recipe is not None or self.changed is not None

    @property
    def as_it_is(self) -> bool:
        """Whether a captured step skips the compiler, as a Decoder's may: te-bench's kernels compute its parts."""
        return self.parts is not None

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return loss_of(self.made.source.model, self.made.forward(self.module, inputs, targets), targets)

    def autocast(self, enabled: bool = True) -> contextlib.AbstractContextManager[None]:
        """Enter the forward pass's context: its attention kernel and the recipe's FP8; enabled=False switches FP8 off.

        The attention kernel stays selected until another model selects one: a backward pass may recompute.
        """
        pin(self.kernel)
        if self.changed is not None:
            return self.changed.around()
        if self.recipe is None:
            return contextlib.nullcontext()
        return fp8.autocast(enabled, recipe=self.recipe, amax_reduction_group=fp8.ranks(self.shares_amaxes))

    def flop_per_token(self, length: int) -> int:
        """Count FLOP per token, forward and backward, by PyTorch's counter, attention as non-causal.

        Returns 6 N if shapes alone do not decide what is computed.
        """
        pin("math")  # the counter knows it on every device
        try:
            with imagined(self.made.source):
                model = Adopted(make(self.made.source, attention=OWN, device="cpu"), kernel="math")
                inputs, targets = model.made.draw(PROBE_BATCH, length, seed=0, device="cpu")
                with FlopCounterMode(display=False, custom_mapping=grouped_gemm.FLOP) as counter:
                    a_pass(model, inputs, targets).backward()
        except UNIMAGINABLE:
            return 6 * self.weights
        finally:
            pin(self.kernel)
        return int(counter.get_total_flops()) // (PROBE_BATCH * length)

    @property
    def converted(self) -> dict[str, str]:
        """{name of a layer that multiplies in FP8: its class before conversion}."""
        if self.changed is not None:
            return {f"module.{name}": "Linear" for name in self.changed.linears}
        layers = () if self.conversion is None else self.conversion.converted
        return {f"module.{layer.name}": layer.before for layer in layers if layer.parameters}

    @property
    def norms(self) -> list[str]:
        """Names of the norms that te_bench computes."""
        layers = () if self.conversion is None else self.conversion.converted
        return [f"module.{layer.name}" for layer in layers if not layer.parameters]

    @property
    def converted_experts(self) -> bool:
        """Whether experts multiply in autocast's precision; transformers' own do not."""
        done = () if self.conversion is None else self.conversion.parts
        return any(part.part == "experts" and part.after is not None for part in done)

    @property
    def fp8_heads(self) -> list[str]:
        """Names of heads whose loss is computed in FP8 although they are not converted layers."""
        found = () if self.conversion is None or self.recipe is None else self.conversion.parts
        return [f"module.{part.name}" for part in found if part.parameters]

    def _blocks_in_fp8(self, layers: str) -> int:
        """Count the blocks in the list `layers` that multiply in FP8: a recipe may leave some out."""
        return len({name.removeprefix(layers).partition(".")[0] for name in self.converted if name.startswith(layers)})

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count the FP8 GEMMs of a pass, forward and backward, in `gemms`: three a Linear, two for the first one.

        A Linear on which the loss does not depend has one. So has a call that checkpointing repeats: the GEMMs of its
        gradients are not counted. A recipe with bf16 wgrad has one fewer each. A converted MLP has two products (gate
        and up together), a fused layer four; a head without logits counts as none.
        """
        self.gemms, self.rows, self.fused = 0, set(), False
        each = 2 if self.recipe is not None and self.recipe.bf16_wgrad else 3
        done = [] if self.conversion is None else [part for part in self.conversion.parts if part.after is not None]
        mlps, heads, chains = (
            [f"module.{part.name}".rstrip(".") for part in done if part.part == kind]
            for kind in ("mlp", "head", "blocks")
        )
        mlps = [name for name in mlps if not name.startswith(tuple(f"{chain}." for chain in chains))]
        inside = tuple(f"{name}." for name in (*mlps, *chains))
        mlps = [name for name in mlps if any(one.startswith(f"{name}.") for one in self.converted)]
        linears = [name for name in self.converted if name not in heads and not name.startswith(inside)]
        # Products, whether x has a gradient, and the output's place in the graph.
        calls: list[tuple[int, bool, Any]] = []
        losses: list[Tensor] = []

        def count(products: int, _: nn.Module, arguments: tuple[Any, ...], made: Any) -> None:
            self.rows |= {x.numel() // x.shape[-1] for x in arguments[:1]}
            calls.append((products, bool(arguments and arguments[0].requires_grad), getattr(made, "grad_fn", None)))

        def count_chain(blocks: int, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            given = module.te_given(arguments, named)
            tokens, x = given.get("input_ids"), given.get("inputs_embeds")
            self.rows |= {tokens.numel()} if x is None else {x.numel() // x.shape[-1]}
            self.gemms += each * 4 * blocks  # qkv, proj, up, down; layer by layer there are more
            self.fused |= module.te_fuses(given)

        handles = [
            self.get_submodule(name).register_forward_hook(functools.partial(count, products))
            for products, names in ((1, linears), (2, mlps))
            for name in names
        ]
        handles += [
            self.get_submodule(name).register_forward_pre_hook(
                functools.partial(count_chain, self._blocks_in_fp8(f"{name}.layers.")), with_kwargs=True
            )
            for name in chains
        ]
        handles.append(self.register_forward_hook(lambda _, __, loss: losses.append(loss)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        reached = {node for loss in losses for node in graph_of(loss)}
        self.gemms += sum(each * n - (not needs_x) if made in reached else n for n, needs_x, made in calls)


def graph_of(loss: Tensor) -> list[Any]:
    """Return the nodes of autograd's graph that the loss depends on."""
    found: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(found)
    for node in found:  # it grows in the loop
        more = {inner for inner, _ in node.next_functions if inner is not None} - seen
        seen |= more
        found += more
    return found


def convert_head(module: nn.Module) -> str | None:
    """Let te.convert replace the module's head and loss. Return the head's name; None unless it replaces exactly one."""
    try:
        done = conversion.convert(module, parts="head")
    except ValueError:  # the module is itself a layer
        return None
    names = [part.name for part in done.parts if part.after is not None]
    return names[0] if len(names) == 1 else None


@torch.no_grad()
def perturb(module: nn.Module, seed: int, ulps: int) -> None:
    """Move every weight to a neighbouring representable value `ulps` times, up or down as drawn by `seed`."""
    for number, parameter in enumerate(module.parameters()):
        move(parameter, seed << 16 | number, ulps)


_switches: dict[str, bool] | None = None  # {kernel: whether it was allowed before the first pin}; None: not pinned


def pin(attention: str) -> None:
    """Restrict scaled_dot_product_attention to that kernel; a name of none of its kernels undoes that."""
    global _switches
    if attention not in PINNED:
        allowed, _switches = _switches or {}, None
    else:
        if _switches is None:
            _switches = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in PINNED}
        allowed = {name: name == attention for name in PINNED}
    for name, allow in allowed.items():
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(allow)
