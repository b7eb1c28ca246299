"""The base of the FP8 modules: recipe state, its way into and out of state dicts, weight caches and counters."""

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from te_bench.kernels import compiler
from te_bench.kernels.quantize import Quantized
from te_bench.models import fp8
from te_bench.models.modules.activations import FLOATS, is_recorded
from te_bench.models.modules.gathered import Gathered
from te_bench.models.modules.gemms import Gemms
from te_bench.models.modules.parameters import materialise, stack
from te_bench.models.modules.tensor_parallel import Division, Parallelised, Ranks
from te_bench.models.recipe import Cast, DelayedScaling, Recipe, Slot, State, saved_names

Kept = tuple[Recipe | None, Quantized | None]  # a weight in FP8, and the recipe that cast it
NOT_KEPT: Kept = (None, None)


class InFp8(NamedTuple):
    """The FP8 weight that an optimizer's leaf stands for: alone, and stacked with those that multiply with it."""

    recipe: Recipe
    own: Quantized
    whole: Quantized


PREFIX = "fp8_"  # of recipe state in a state dict
ROLES = ("input", "weight", "grad_output")
COUNTS = ("saturated", "underflowed", "nonfinite")  # in the order of kernels.quantize


class Fp8Module(Parallelised, nn.Module):
    """A module with its own GEMMs. Its FP8 state is plain float32 tensors under `fp8_*` in the state dict."""

    def __init__(self, ranks: Ranks, divisions: Sequence[Division | None]) -> None:
        """divisions: how each GEMM's weight is divided among `ranks`."""
        super().__init__()
        self.ranks, self.divisions, self._n_gemms = ranks, divisions, len(divisions)
        self._state: State | None = None
        self._loaded: dict[str, Tensor] = {}  # loaded from a state dict, used when the recipe is known
        self._counts: dict[tuple[str, int], Tensor] = {}
        self._cached: list[Kept] = [NOT_KEPT] * self._n_gemms
        self._reuse = False  # calls without is_first_microbatch use the kept weight
        self._caches = False  # such calls keep what they cast, until `forget_weights`
        self._versions: list[Any] = [None] * self._n_gemms  # versions of the parameters at that cast
        #: {key: gemms()' answer for this state}, None if it must not be kept. Empty: the last call had no FP8.
        self._usual: dict[tuple[int, bool], tuple[Any, Gemms] | None] = {}
        self._enlist()

    def _enlist(self) -> None:
        self._number = next(_numbers)
        _alive[self._number] = self

    @torch.no_grad()
    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise again; parameters on the meta device move to a real one. defer_init: change nothing."""
        if not defer_init:
            materialise(self)
            self._initialise()

    def _initialise(self) -> None:
        raise NotImplementedError

    def gemms(self, gemm: int = 0) -> Gemms:
        """Return the GEMMs of weight number `gemm` under the current autocast."""
        region = fp8.current
        recipe = region.recipe
        assert recipe is not None
        if is_recorded() and not torch.compiler.is_compiling():
            raise ValueError(
                "torch.jit.trace records no FP8: trace the model outside of te.autocast, or use torch.compile"
            )
        divided = self.divisions[gemm]
        if divided is not None and divided.ranks.sequence and isinstance(recipe, DelayedScaling):
            divided.ranks.require_shared(region.group if recipe.reduce_amax else None)
        if not region.unusual and not torch.compiler.is_compiling():
            key, state = (gemm, torch.is_grad_enabled()), self._state
            known = self._usual.get(key)
            if known is not None and known[1].recipe is recipe and (state is None or state.slots is known[0]):
                if state is not None and key[1]:
                    fp8.use(self._number, state)
                return known[1]
            self._prepare()
            usual = self._with_slots(recipe, gemm)
            state = self._state
            self._usual[key] = (state and state.slots, usual) if state is None or state.real else None
            return usual
        compiling = torch.compiler.is_compiling()
        self._prepare(traced=compiling)
        if compiling:
            # A guard: compiled code that meets a module with a state of its own is traced again.
            assert self._state is None or self._state.silent or not fp8.records()
        elif region.enabled:  # calibration alone computes without FP8
            self._usual.setdefault((gemm, torch.is_grad_enabled()), None)
        if self._state is None and not region.numerics:
            return Gemms(recipe, _NOTHING, _NOTHING, _NOTHING, divided)
        return self._with_slots(recipe, gemm)

    def _with_slots(self, recipe: Recipe, gemm: int) -> Gemms:
        if self._state is not None and not torch.compiler.is_compiling() and fp8.records():
            fp8.use(self._number, self._state)
        x, weight, grad_output = (self._slot(role, gemm) for role in ROLES)
        return Gemms(recipe, x, weight, grad_output, self.divisions[gemm])

    def join(self, first: Self) -> None:
        """Share the state of `first`, beside whose weight this one multiplies, so that both are always cast alike.

        Amaxes of either count for both. Call it before first.gemms(), which may copy scales for a checkpoint.
        """
        self.gemms()  # ensures that either every rank has made a state before, or none has
        # Evaluations do not join, as ranks must share equally many amaxes; gathered weights keep their own scales.
        if not fp8.records() or isinstance(getattr(self, "weight", None), Gathered):
            return
        if self._state is None or self._state is first._state:
            return
        first._prepare()
        if type(self._state) is type(first._state):
            first._state.join(self._state)
            first._state.owner = first._number
        self._state = first._state

    def without_fp8(self) -> None:
        """Note a call without FP8. Raises ValueError if it recomputes in a backward pass what was computed in FP8."""
        if torch.compiler.is_compiling() or not self._usual:
            return
        scales = fp8.current.scales
        if scales is not None and scales.replaying:  # te.checkpoint's first pass was without FP8, too
            return
        if torch._C._current_graph_task_id() != -1:
            raise ValueError(
                f"{type(self).__name__}: computed in FP8, and again in the backward pass without it: torch.utils.checkpoint "
                "knows nothing of te.autocast. Use te.checkpoint in its place, or enter te.autocast inside of what is "
                "checkpointed; in a model of transformers te.convert sees to it"
            )
        self._usual.clear()

    @compiler.constant  # torch.compile traces with a state in place; else every run of its code would make one
    def _prepare(self, traced: bool = False) -> None:
        """Make the recipe's state under the current autocast, and counters if it counts.

        traced: also for all modules like this one, counted as used by compiled code. Otherwise each layer without a
        state would recompile the same code, until torch's recompile_limit of eight: layers compiled one by one, or a
        model's copies.
        """
        first = self._state is None
        self._make()
        uses = fp8.records() and self._state is not None and not self._state.silent
        if not traced or self._state is None or not (first or uses):
            return
        if fp8.current.group is not None:
            gc.collect()  # dead modules in reference cycles live on only some ranks
        form = self._form()
        for other in [other for other in _alive.values() if other._form() == form]:
            if other._state is None:
                with contextlib.suppress(ValueError):  # its own call reports wrong loaded values
                    other._make()
            if uses and other._state is not None:
                fp8.use_silently(other._number, other._state)

    def _form(self) -> tuple[Any, ...]:
        """Return the properties that modules running the same compiled code share."""
        return type(self), [(name, p.shape, p.device) for name, p in self.named_parameters(recurse=False)]

    def _make(self) -> None:
        recipe, old = fp8.current.recipe, self._state
        if old is not None and not old.real:
            old = None  # a state without values (meta, fake) has nothing to continue
        device = next(self.parameters()).device
        if fp8.current.numerics and not self._counts:
            keys = itertools.product(ROLES, range(self._n_gemms))
            with torch.inference_mode(False):
                self._counts = {key: torch.zeros(3, dtype=torch.int64, device=device) for key in keys}
        if recipe is None:
            return
        if old is not None and old.recipe == recipe:
            old.recipe = recipe
            return
        with torch.inference_mode(False):  # inference tensors could never be trained with
            state = recipe.make_state(self._n_gemms, device)
        if state is None:
            return
        if type(old) is type(state):
            state.carry(old)
        if self._loaded and state.real:
            state.load(self._loaded)
            self._loaded = {}
        self._state = state
        _expose()

    def _slot(self, role: str, gemm: int) -> Slot:
        region = fp8.current
        replaying = role != "grad_output" and region.scales is not None and region.scales.replaying
        counts = self._counts[role, gemm] if region.numerics and not replaying else None
        if self._state is None or self._state.recipe is not region.recipe:
            return Slot(counts=counts)
        slot = self._state.slot(role, gemm)
        if counts is not None:
            slot = slot._replace(counts=counts)
        if role == "grad_output":
            return slot
        if region.scales is not None:
            slot = slot.checkpointed(region.scales.recall, region.scales.traced)
        return slot if fp8.records() else slot.unrecorded()

    def quantized_weight(
        self,
        gemms: Gemms,
        weight: Tensor,
        gemm: int,
        is_first_microbatch: bool | None,
        *,
        columnwise: bool,
        made_of: Sequence[Tensor] | None = None,
    ) -> Quantized:
        """Return the weight in FP8: cast (None), cast and kept (True), or as kept (False).

        made_of: this weight and others, stacked. A weight gathered in FP8 is used as its ranks cast it, and an
        optimizer's leaf as its FP8 copy (`in_fp8`), regardless of is_first_microbatch.
        """
        alone = made_of is None or len(made_of) == 1
        if alone and isinstance(weight, Gathered):
            return weight.quantized(columnwise)
        left: InFp8 | None = None if torch.compiler.is_compiling() else getattr(weight, "in_fp8", None)
        if left is not None and left.recipe == gemms.recipe:
            return left.own if alone else left.whole
        is_first_microbatch = self.which_microbatch(gemms, gemm, is_first_microbatch, made_of)
        if is_first_microbatch is False:
            recipe, kept = self._cached[gemm]
            if kept is None or recipe != gemms.recipe:
                raise ValueError(
                    "is_first_microbatch=False, but no FP8 weight is kept: call the first micro-batch with "
                    "is_first_microbatch=True, under the same autocast"
                )
            return kept
        # Detached: the amax is written outside of an autograd.Function, and the state must hold no graph.
        both = columnwise or is_first_microbatch is True
        whole = weight.detach() if alone else stack(made_of or ())
        made = gemms.quantize(whole, "weight", rowwise=True, columnwise=both)
        if is_first_microbatch:
            self._cached[gemm] = gemms.recipe, made
        return made

    def which_microbatch(
        self, gemms: Gemms, gemm: int, asked: bool | None, made_of: Sequence[Tensor] | None = None
    ) -> bool | None:
        """Return is_first_microbatch; for a call that leaves it None, whether a weight is kept for it."""
        if asked is not None or not (self._reuse or self._caches):
            return asked
        if self._reuse:
            return False
        # A graph would reuse the kept weight forever; an evaluation's cast records no amax, so it is not kept.
        if is_recorded() or not torch.is_grad_enabled():
            return None
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return None
        own = [p for p in self._parameters.values() if p is not None]
        versions = [(id(p), p._version) for p in made_of or own]
        known = self._cached[gemm][0] == gemms.recipe and self._versions[gemm] == versions
        self._versions[gemm] = versions
        return not known

    def cache_weights(self) -> None:
        """Let calls without is_first_microbatch cast a weight once, until it changes or `forget_weights`."""
        self._caches = True

    def forget_weights(self) -> None:
        self._cached = [NOT_KEPT] * self._n_gemms

    def weight_cast(self) -> tuple[Recipe, Cast] | None:
        """Return how the weight's maker may cast it under the current autocast; None if only the recipe can."""
        self._prepare()
        region = fp8.current
        if not region.enabled or region.recipe is None or self._state is None:
            return None
        cast = region.recipe.epilogue("weight", self._state.slot("weight", 0))
        return None if cast is None else (region.recipe, cast)

    def reuse(self, recipe: Recipe | None, weight: Quantized | None) -> None:
        """Let calls without is_first_microbatch use `weight`, cast by `recipe`; None ends that."""
        self._cached[0], self._reuse = (recipe, weight), weight is not None

    def calibrate(self, gemm: int, x: Tensor, weight: Tensor) -> None:
        """Let the recipe record the amaxes of what it would cast, while the module computes in high precision."""
        gemms = self.gemms(gemm)
        gemms.recipe.observe(x, "input", gemms.input)
        gemms.recipe.observe(weight, "weight", gemms.weight)

    def fp8_numerics(self) -> dict[str, dict[str, float]]:
        """Return {tensor: figures} for te.numerics; a tensor is "input", "weight", "grad_output", "fc1.input", ..."""
        by_role: dict[str, dict[str, float]] = {}
        for gemm, role in itertools.product(range(self._n_gemms), ROLES):
            figures: dict[str, float] = {} if self._state is None else self._state.figures(role, gemm)
            if (role, gemm) in self._counts:
                figures |= dict(zip(COUNTS, self._counts[role, gemm].tolist(), strict=True))
            if figures:
                by_role[role if self._n_gemms == 1 else f"fc{gemm + 1}.{role}"] = figures
        return by_role

    def check_input(self, x: Tensor, features: int, weight: Tensor) -> None:
        """Raise ValueError, naming the value, for an input that this module does not support."""
        if x.dim() and x.shape[-1] == features and x.device == weight.device and x.dtype in FLOATS:
            return
        name = type(self).__name__
        if x.dim() < 1 or x.shape[-1] != features:
            raise ValueError(f"{name}: the input's last dimension must be {features}, got shape {tuple(x.shape)}")
        if x.device != weight.device:
            raise ValueError(f"{name}: the input is on {x.device}, the parameters on {weight.device}: move one of them")
        if not x.is_floating_point() or x.dtype.itemsize == 1:
            raise ValueError(f"{name}: the input must be floating point, got {x.dtype}: of two bytes or more")
        if fp8.current.enabled and x.dtype not in FLOATS and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"{name}: FP8 takes float32, bfloat16 or float16, got {x.dtype}")

    # ---- state dict: plain tensors, loadable with weights_only=True

    def recipe_state(self) -> dict[str, Tensor]:
        """Return {name: tensor} of the recipe's state, or of a loaded one; not copies."""
        state = self._state
        tensors = state.tensors() if state is not None and state.real else self._loaded
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def written(self) -> list[Tensor]:
        """Return the tensors of the recipe's state that training writes to."""
        return [] if self._state is None else self._state.buffers()

    @torch.no_grad()
    def begin_recipe_state(self, loaded: Mapping[str, Tensor] | None = None) -> None:
        """Reset the recipe's state to a new module's, or to `loaded`, a recipe_state(); in place, for a captured graph."""
        self._loaded = dict(loaded or {})
        self.forget_weights()
        if self._state is None or not self._state.real:
            return
        fresh = self._state.recipe.make_state(self._n_gemms, self._state.device)
        assert fresh is not None
        fresh.load(self._loaded)
        self._loaded = {}
        if self._state.owner in (None, self._number):
            for tensor, value in zip(self._state.buffers(), fresh.buffers(), strict=True):
                tensor.copy_(value)
        else:  # it is that of Linears side by side, and the first of them has begun
            self._state.join(fresh)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield buffers, and with recurse=False also the recipe state.

        torch.distributed.checkpoint lists a module's state dict with recurse=False. DistributedDataParallel, which
        would broadcast rank 0's buffers, uses recurse=True.
        """
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        if not recurse:
            for name, tensor in self.recipe_state().items():
                yield f"{prefix}{'.' if prefix else ''}{PREFIX}{name}", tensor

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in self.recipe_state().items():
            destination[f"{prefix}{PREFIX}{name}"] = tensor.clone()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Transformer Engine's pickled recipe state is not unpickled; scales begin anew.
        state_dict.pop(f"{prefix}_extra_state", None)
        given = {name: state_dict.pop(f"{prefix}{PREFIX}{name}", None) for name in saved_names}
        wrong = [name for name, value in given.items() if value is not None and not isinstance(value, Tensor)]
        if wrong:
            raise ValueError(
                f"{prefix}{PREFIX}{wrong[0]} is {given[wrong[0]]!r}, not a tensor: the state dict is damaged"
            )
        saved = {name: tensor.detach().clone() for name, tensor in given.items() if tensor is not None}
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.forget_weights()
        if not saved:
            return
        _expose()
        if self._state is None or not self._state.real:
            self._state, self._loaded = None, saved
        elif self._state.owner in (None, self._number):
            self._state.load(saved)
        else:  # the state is shared by stacked Linears, and the first has loaded its own
            own = self._state.recipe.make_state(self._n_gemms, self._state.device)
            assert own is not None
            own.load(saved)
            self._state.join(own)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.forget_weights()
        if self._state is not None and not self._state.real:
            self._state = None
        if self._state is not None:
            self._state.to(fn(torch.empty(0, device=self._state.device)).device)
        self._counts = {
            key: count.to(fn(torch.empty(0, device=count.device)).device) for key, count in self._counts.items()
        }
        return self

    def _replicate_for_data_parallel(self) -> Any:
        if fp8.current.enabled:
            fp8.refuse_data_parallel()
        return super()._replicate_for_data_parallel()

    def __getstate__(self) -> dict[str, Any]:
        """Copy the module for copy.deepcopy and pickle, with the scales as if loaded."""
        copied = {name: tensor.clone() for name, tensor in self.recipe_state().items()}
        fresh = {
            "_cached": [NOT_KEPT] * self._n_gemms,
            "_caches": False,
            "_usual": {},
        }  # no optimizer knows the copy yet
        return {**self.__dict__, "_state": None, "_loaded": copied, **fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._enlist()


#: {number in order of creation, the same on all ranks: module}.
_alive: "weakref.WeakValueDictionary[int, Fp8Module]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _attribute(name: str) -> property:
    """Make a property for a tensor of the recipe state by its state dict key, for torch.distributed.checkpoint."""

    def tensor(self: Fp8Module) -> Tensor:
        tensors = self.recipe_state()
        if name not in tensors:
            raise AttributeError(name)
        return tensors[name]

    return property(tensor)


def _expose() -> None:
    """Give Fp8Module an attribute for each tensor that recipes save."""
    for name in saved_names:
        if not hasattr(Fp8Module, f"{PREFIX}{name}"):
            setattr(Fp8Module, f"{PREFIX}{name}", _attribute(name))


_expose()

_NOTHING = Slot()
