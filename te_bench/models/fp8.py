"""autocast: modules compute in FP8 inside it, as its recipe says. It wraps the forward pass only.

    with te.autocast(recipe=recipe.DelayedScaling()):
        loss = model(x)
    loss.backward()

When the outermost autocast ends, delayed scaling turns amaxes into scales, for the modules used in it: the amaxes of
this forward pass and of the backward pass before it. Transformer Engine updates the backward ones when the backward
pass ends; if every backward pass is followed by the next forward pass, all GEMMs get the same scales.
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
from te_bench.kernels.operators import define
from te_bench.models import kernel_choice
from te_bench.models.recipe import DelayedScaling, Recipe


@dataclass(frozen=True, slots=True)
class Region:
    """The settings of the innermost autocast."""

    enabled: bool = False
    calibrating: bool = False
    recipe: Recipe | None = None
    group: Any = None
    numerics: bool = False  # count saturation, underflow and non-finite elements
    scales: "Scales | None" = None  # of an activation checkpoint
    #: Whether modules need more than their recipe and state; they check it at every call.
    unusual: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "unusual", self.numerics or self.calibrating or self.scales is not None)


class Scales:
    """The forward scales that an activation checkpoint used, in order, for its recomputations.

    `outer`: the scales of the enclosing checkpoint, whose recomputation runs this one's first pass again.
    """

    traced = False

    def __init__(self, outer: "Scales | None" = None) -> None:
        self.outer = outer
        self.kept: list[Tensor] = []
        self.recomputing = False
        self.next = 0

    @property
    def replaying(self) -> bool:
        """Whether the current pass is a recomputation."""
        return self.recomputing or (self.outer is not None and self.outer.replaying)

    def recall(self, scale: Tensor) -> Tensor:
        """Return a kept copy of the scale in the first pass, and that same copy in a recomputation."""
        if not self.recomputing:
            self.kept.append(scale.clone() if self.outer is None else self.outer.recall(scale))
            return self.kept[-1]
        self.next += 1
        return self.kept[self.next - 1]


# A custom operator, because torch.compile selects by operator what a checkpoint saves; see _contexts.
def _clone(scale: Tensor) -> Tensor:
    return scale.clone()


_kept = define("scale_of_checkpoint", _clone, torch.empty_like)


class TracedScales(Scales):
    """Scales under torch.compile's tracing: the graph saves the copies, and recomputes the rest itself."""

    traced = True

    def recall(self, scale: Tensor) -> Tensor:
        kept: Tensor = _kept(scale)
        return kept


_TRACED = TracedScales()


current = Region()
_depth = 0
_left = 0  # number of reset() calls
#: {recipe used since the outermost autocast began: process group}; they update when it ends.
_due: dict[Recipe, Any] = {}
#: {module number: state used since the outermost autocast began}.
_used: dict[int, Any] = {}
#: {module number: state used by compiled code or CUDA graphs}. Every autocast of its recipe counts it as used.
_silent: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
#: States kept alive for ever: with ranks, which must share equally many amaxes, and for CUDA graphs.
_held: dict[int, Any] = {}
#: Equal recipes are made one object, so that code compiled for one serves the other; only the latest are kept.
_interned: dict[Recipe, Recipe] = {}
INTERNED = 64


def use(number: int, state: Any) -> None:
    """Update this state when the current autocast ends; under graph capture, for the graph's replays, too."""
    _used[number] = state
    if _captures():
        use_silently(number, state)


def use_silently(number: int, state: Any) -> None:
    """Update a state at the end of every autocast of its recipe: compiled code and graphs do not report its use."""
    state.silent = True
    _silent[number] = state


def _captures() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def records() -> bool:
    """Return whether casts record an amax: evaluations and recomputations do not."""
    replays = current.scales is not None and current.scales.replaying
    return (torch.is_grad_enabled() or current.calibrating) and not replays


def check_recipe(recipe: Any) -> None:
    """Raise ValueError unless `recipe` is a Recipe."""
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{recipe!r} is no recipe: choose one of te_bench.models.recipe, e.g. DelayedScaling()")


class autocast(contextlib.ContextDecorator):
    """FP8 in the te_bench modules of a forward pass.

    enabled=False computes in the activations' precision; calibrating also gathers amaxes. recipe: the default is
    DelayedScaling(). amax_reduction_group: the process group over which delayed scaling shares amaxes; its ranks must
    use the same modules in a region, because only used modules share theirs. Nests: the innermost counts. Raises
    ValueError unless `recipe` is a Recipe that this machine can run.
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
        if len(_interned) > INTERNED:  # e.g. recipes with their own functions, made anew in each step
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
    """`autocast` under its older name and arguments."""
    return autocast(enabled=enabled, calibrating=calibrating, recipe=fp8_recipe, amax_reduction_group=fp8_group)


def ranks(shared: bool) -> Any:
    """Return the process group over which delayed scaling shares amaxes: all ranks, or None for this rank alone."""
    return torch.distributed.group.WORLD if shared else None


def reset() -> None:
    """Forget all autocasts; those still open end without updating their recipes."""
    global current, _depth, _due, _left
    current, _depth, _due, _left = Region(), 0, {}, _left + 1
    _used.clear()


def refuse_data_parallel() -> NoReturn:
    """Raise the ValueError of an FP8 model that nn.DataParallel tries to copy."""
    raise ValueError(
        "nn.DataParallel runs copies of a model in threads of one process, which te.autocast can't follow: start one "
        "process a GPU, torchrun --nproc-per-node N, or show the process one GPU, CUDA_VISIBLE_DEVICES=0"
    )


def is_fp8_enabled() -> bool:
    return current.enabled


def recipe_of_attention() -> Recipe | None:
    """Return the recipe by which attention computes in FP8 here; None if it uses the activations' precision."""
    recipe = current.recipe
    return recipe if current.enabled and recipe is not None and recipe.fp8_dpa else None


@compiler.untraced
def _update(due: dict[Recipe, Any]) -> None:
    """Update these recipes over their groups, for the used states in the order in which their modules were made."""
    for recipe, group in due.items():
        silent = {number: state for number, state in _silent.items() if state.recipe is recipe}
        if silent and (group is not None or _captures()):
            _held.update(silent)
        both = silent | {number: state for number, state in _used.items() if state.recipe is recipe}
        recipe.update([both[number] for number in sorted(both)], group)


@contextlib.contextmanager
def record_numerics() -> Any:
    """Count saturated, underflowed and non-finite elements in the quantisers, for te.numerics."""
    global current
    outer, current = current, replace(current, numerics=True)
    try:
        yield
    finally:
        current = replace(current, numerics=outer.numerics)


def numerics(module: torch.nn.Module) -> dict[str, dict[str, dict[str, float]]]:
    """Return {module: {tensor: figures}} of every FP8 module below `module`; it waits for the device.

    Figures: under delayed scaling scale, amax (the history's largest) and nonfinite_amax (steps whose amax was infinite
    or NaN); under te.record_numerics() counts of saturated, underflowed and nonfinite elements.
    """
    by_layer = {}
    for name, child in module.named_modules():
        if hasattr(child, "fp8_numerics"):
            figures = child.fp8_numerics()
            if figures:
                by_layer[name] = figures
    return by_layer


class _Tracked:
    """Restore a tracker's generators (Megatron-LM has one) for a recomputation, and put them back after it."""

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
    """The context of a checkpointed function, for its first pass and its recomputations."""

    def __init__(self, region: Region, recomputing: bool, tracked: "_Tracked"):
        self.region, self.recomputing, self.tracked = region, recomputing, tracked
        self.kernel = kernel_choice.current  # recompute with the same attention kernel, wherever backward is called
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
    """Return the contexts of a checkpointed function's first pass and recomputation; under tracing, a save policy."""
    if get_proxy_mode() is not None:
        return torch.utils.checkpoint.create_selective_checkpoint_contexts(
            [torch.ops.te_bench.scale_of_checkpoint.default]
        )
    outer = current.scales
    region = replace(current, scales=Scales(None if outer is _TRACED else outer))  # it was traced until the graph broke
    tracked = _Tracked(tracker)
    return _Within(region, False, tracked), _Within(region, True, tracked)


def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Return function(*args, **kwargs) without keeping its activations: the backward pass recomputes them in the same
    FP8.

    The recomputation runs under this call's autocast and casts with the first pass's scales; amaxes and counts are
    gathered once. torch.compile takes it into its graph, with the autocast outside. It takes torch.utils.checkpoint's
    keyword arguments except context_fn and debug, and Transformer Engine's at their defaults; get_rng_state_tracker()
    is Megatron-LM's. It is never reentrant: use_reentrant=True gives the same outputs and gradients.
    """
    global current
    for name in ("use_reentrant", "tp_group"):  # a tp_group is only for distribute_saved_activations
        kwargs.pop(name, None)
    tracker = kwargs.pop("get_rng_state_tracker", None)
    contexts = _contexts if tracker is None else functools.partial(_contexts, tracker)
    # te.checkpoint has neither Transformer Engine's nor PyTorch's: the contexts are its own.
    for name in ("distribute_saved_activations", "context_fn", "debug"):
        if kwargs.pop(name, None):
            raise ValueError(f"te.checkpoint: te_bench has no {name}; leave it out")

    outer = current
    # Set this around the graph's node, because inside it nothing may be set.
    if torch.compiler.is_compiling() and outer.scales is not _TRACED:
        current = replace(outer, scales=_TRACED)
    try:
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    finally:
        if current is not outer:  # inside a traced graph nothing may be set
            current = outer
