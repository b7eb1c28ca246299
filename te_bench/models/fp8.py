"""autocast: the modules below it compute in FP8, as its recipe says. It wraps the forward pass only.

    with te.autocast(recipe=recipe.DelayedScaling()):
        loss = model(x)
    loss.backward()

When the outermost autocast ends, delayed scaling's amaxes become scales: those of this forward pass and those of the
backward pass before it, of the modules that it used. Transformer Engine updates the backward ones at the end of the
backward pass, with the same scales in every GEMM as long as each backward pass is followed by the next forward one.
"""

import contextlib
import functools
import weakref
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from te_bench.kernels import compiler
from te_bench.models import kernel_choice
from te_bench.models.recipe import DelayedScaling, Recipe


@dataclass(frozen=True, slots=True)
class Region:
    """What the innermost autocast asks for."""

    enabled: bool = False
    calibrating: bool = False
    recipe: Recipe | None = None
    group: Any = None
    numerics: bool = False  # count saturation, underflow and non-finite elements
    scales: "Scales | None" = None  # of an activation checkpoint
    #: Whether modules must look further than their recipe and state; they ask at every call.
    unusual: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "unusual", self.numerics or self.calibrating or self.scales is not None)


class Scales:
    """The forward scales an activation checkpoint was computed with, in order, for its recomputations.

    `outer`: those of the checkpoint around it, whose recomputation computes this one for the first time again.
    """

    traced = False

    def __init__(self, outer: "Scales | None" = None) -> None:
        self.outer = outer
        self.kept: list[Tensor] = []
        self.recomputing = False
        self.next = 0

    @property
    def replaying(self) -> bool:
        """Whether what runs has run before."""
        return self.recomputing or (self.outer is not None and self.outer.replaying)

    def recall(self, scale: Tensor) -> Tensor:
        """The first time: keep a copy and use it. In a recomputation: the copy that was kept then."""
        if not self.recomputing:
            self.kept.append(scale.clone() if self.outer is None else self.outer.recall(scale))
            return self.kept[-1]
        self.next += 1
        return self.kept[self.next - 1]


# An operator of ours, for what torch.compile keeps of a checkpoint is said by operator; see _contexts.
@torch.library.custom_op("te_bench::scale_of_checkpoint", mutates_args=())
def _kept(scale: Tensor) -> Tensor:
    return scale.clone()


@_kept.register_fake
def _(scale: Tensor) -> Tensor:
    return torch.empty_like(scale)


class TracedScales(Scales):
    """The same where torch.compile traces: the graph keeps the copies, and computes the rest again by itself."""

    traced = True

    def recall(self, scale: Tensor) -> Tensor:
        return _kept(scale)


_TRACED = TracedScales()


current = Region()
_depth = 0
_left = 0  # how often reset() was called
#: The recipes that take a step when the outermost autocast ends, those that were used in it, each with its process group.
_due: dict[Recipe, Any] = {}
#: By the number of their module: the states that were used since the outermost autocast was entered.
_used: dict[int, Any] = {}
#: And those that run without Python: they count as used by every autocast of their recipe.
_silent: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
#: Those that live for ever: of ranks, which must share as many amaxes whenever each collects its garbage, and CUDA graphs.
_held: dict[int, Any] = {}
#: Equal recipes are one object, so that what was compiled for one is not compiled again for the other; the latest of them.
_interned: dict[Recipe, Recipe] = {}
INTERNED = 64


def use(number: int, state: Any) -> None:
    """Have the present autocast step a module's state when it ends, and those of a CUDA graph's replays as well."""
    _used[number] = state
    if _captures():
        use_silently(number, state)


def use_silently(number: int, state: Any) -> None:
    """Have every autocast of a state's recipe step it: compiled code and CUDA graphs never say when they use it."""
    state.silent = True
    _silent[number] = state


def _captures() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def records() -> bool:
    """Whether what is cast leaves an amax: an evaluation leaves none in the training's scales, a recomputation no second."""
    replays = current.scales is not None and current.scales.replaying
    return (torch.is_grad_enabled() or current.calibrating) and not replays


def check_recipe(recipe: Any) -> None:
    """Raise ValueError for what is no recipe."""
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{recipe!r} is no recipe: choose one of te_bench.models.recipe, e.g. DelayedScaling()")


class autocast(contextlib.ContextDecorator):
    """FP8 in the te_bench modules of a forward pass.

    enabled=False computes in the activations' own precision; calibrating gathers amaxes while doing so. recipe: the
    default is DelayedScaling(). amax_reduction_group: the process group over which delayed scaling shares its amaxes.
    Its ranks use the same modules in a region, for they share the amaxes of those alone.
    Nests: the innermost counts. Raises ValueError for what is no recipe, or a recipe that this machine cannot run.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
    ):
        recipe = DelayedScaling() if recipe is None else recipe
        check_recipe(recipe)
        if enabled and torch.cuda.is_available():
            reason = recipe.unsupported("cuda", torch.cuda.get_device_capability())
            if reason:
                raise ValueError(reason)
        recipe = _interned.pop(recipe, recipe)
        _interned[recipe] = recipe
        if len(_interned) > INTERNED:  # recipes with functions of their own, made anew in every step
            del _interned[next(iter(_interned))]
        self._asked = (bool(enabled), bool(calibrating), recipe, amax_reduction_group)
        self._outer: list[tuple[Region, int]] = []

    def __enter__(self) -> None:
        global current, _depth
        enabled, calibrating, recipe, group = self._asked
        self._outer.append((current, _left))
        current = replace(current, enabled=enabled, calibrating=calibrating, recipe=recipe, group=group)
        _depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global current, _depth, _due
        outer, left = self._outer.pop()
        if left != _left:
            return  # reset() has ended it
        ended, current = current, outer
        _depth -= 1
        again = ended.scales is not None and ended.scales.replaying
        active = (ended.enabled and torch.is_grad_enabled()) or ended.calibrating
        if active and kind is None and not again:
            assert ended.recipe is not None
            _due[ended.recipe] = ended.group
        if _depth == 0:
            due, _due = _due, {}
            if due and kind is None:
                _update(due)
            _used.clear()


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
) -> autocast:
    """`autocast` by its older name and arguments."""
    return autocast(enabled=enabled, calibrating=calibrating, recipe=fp8_recipe, amax_reduction_group=fp8_group)


def ranks(shared: bool) -> Any:
    """The process group over which delayed scaling shares its amaxes: every rank, or None for this one alone."""
    return torch.distributed.group.WORLD if shared else None


def reset() -> None:
    """As if no autocast had been entered: those still open end without a step of their recipes."""
    global current, _depth, _due, _left
    current, _depth, _due, _left = Region(), 0, {}, _left + 1
    _used.clear()


def refuse_data_parallel() -> NoReturn:
    """Raise the ValueError of a model in FP8 that nn.DataParallel would copy."""
    raise ValueError(
        "nn.DataParallel runs copies of a model in threads of one process, which te.autocast can't follow: start one "
        "process a GPU, torchrun --nproc-per-node N, or show the process one GPU, CUDA_VISIBLE_DEVICES=0"
    )


def is_fp8_enabled() -> bool:
    return current.enabled


def recipe_of_attention() -> Recipe | None:
    """The recipe by which attention computes in FP8 here; None where it computes in the activations' precision."""
    recipe = current.recipe
    return recipe if current.enabled and recipe is not None and recipe.fp8_dpa else None


def _update(due: dict[Recipe, Any]) -> None:
    """One step of these recipes over their groups, of the states that were used, in the order in which modules were made."""
    for recipe, group in due.items():
        silent = {number: state for number, state in _silent.items() if state.recipe is recipe}
        if silent and (group is not None or _captures()):
            _held.update(silent)
        found = silent | {number: state for number, state in _used.items() if state.recipe is recipe}
        recipe.update([found[number] for number in sorted(found)], group)


def _leave_updates_out_of_graphs() -> None:
    global _update
    _update = torch.compiler.disable(_update)


compiler.when_imported(_leave_updates_out_of_graphs)


@contextlib.contextmanager
def record_numerics() -> Any:
    """Below it, quantisers count saturated, underflowed and non-finite elements, for te.numerics to tell."""
    global current
    outer, current = current, replace(current, numerics=True)
    try:
        yield
    finally:
        current = replace(current, numerics=outer.numerics)


def numerics(module: torch.nn.Module) -> dict[str, dict[str, dict[str, float]]]:
    """{module: {tensor: figures}} of every FP8 module below `module`; reading it waits for the device.

    scale, amax (the largest of the history) and nonfinite_amax (steps whose amax was infinite or NaN) under delayed
    scaling; saturated, underflowed and nonfinite elements for the passes under te.record_numerics().
    """
    found = {}
    for name, child in module.named_modules():
        if hasattr(child, "fp8_numerics"):
            figures = child.fp8_numerics()
            if figures:
                found[name] = figures
    return found


class _Tracked:
    """The generators of a tracker, as Megatron-LM has one: as they were the first time, afterwards as before."""

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker
        self.first: Any = None
        self.outer: list[Any] = []

    def enter(self, recomputing: bool) -> None:
        if self.tracker is None:
            return
        if recomputing:
            self.outer.append(self.tracker().get_states())
            self.tracker().set_states(self.first)
        else:
            self.first = self.tracker().get_states()

    def leave(self, recomputing: bool) -> None:
        if self.tracker is not None and recomputing:
            self.tracker().set_states(self.outer.pop())


class _Within:
    """What a checkpointed function runs in, the first time and, as often as needed, again."""

    def __init__(self, region: Region, recomputing: bool, tracked: "_Tracked"):
        self.region, self.recomputing, self.tracked = region, recomputing, tracked
        self.kernel = kernel_choice.current  # the same attention again, wherever the backward pass is called
        self.outer: list[tuple[Region, str | None]] = []

    def __enter__(self) -> None:
        global current
        self.outer.append((current, kernel_choice.current))
        current, kernel_choice.current = self.region, self.kernel
        assert current.scales is not None
        current.scales.recomputing, current.scales.next = self.recomputing, 0
        self.tracked.enter(self.recomputing)

    def __exit__(self, *error: object) -> None:
        global current
        current, kernel_choice.current = self.outer.pop()
        self.tracked.leave(self.recomputing)


def _contexts(tracker: Any = None) -> tuple[Any, Any]:
    """What a checkpointed function runs in, the first time and again; while torch.compile traces it, what is kept."""
    if get_proxy_mode() is not None:
        return torch.utils.checkpoint.create_selective_checkpoint_contexts(
            [torch.ops.te_bench.scale_of_checkpoint.default]
        )
    outer = current.scales
    region = replace(current, scales=Scales(None if outer is _TRACED else outer))  # traced until the graph broke
    tracked = _Tracked(tracker)
    return _Within(region, False, tracked), _Within(region, True, tracked)


def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs) without keeping its activations: the backward pass computes them again, in the same FP8.

    The recomputation runs under the autocast of this call and casts with the very scales of the first time; amaxes are
    gathered, and elements counted, once. torch.compile takes it into its graph, with the autocast outside. Takes
    torch.utils.checkpoint's own keyword arguments but context_fn and debug, and Transformer Engine's where they ask for
    nothing; get_rng_state_tracker() is what Megatron-LM draws by. It is never reentrant: use_reentrant=True, their default,
    has the same outputs and gradients.
    """
    global current
    for name in ("use_reentrant", "tp_group"):  # a tp_group is for distribute_saved_activations
        kwargs.pop(name, None)
    tracker = kwargs.pop("get_rng_state_tracker", None)
    contexts = _contexts if tracker is None else functools.partial(_contexts, tracker)
    # Transformer Engine's; PyTorch's, for the contexts are te.checkpoint's own, and debug comes without any.
    for name in ("distribute_saved_activations", "context_fn", "debug"):
        if kwargs.pop(name, None):
            raise ValueError(f"te.checkpoint: te_bench has no {name}; leave it out")

    outer = current
    # Here, around the graph's node, for inside it nothing may be set.
    if torch.compiler.is_compiling() and outer.scales is not _TRACED:
        current = replace(outer, scales=_TRACED)
    try:
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    finally:
        if current is not outer:  # a graph inside of which this is called may set nothing
            current = outer
