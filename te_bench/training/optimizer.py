"""AdamW by a backend of te_bench.kernels.adamw, which also writes the weight copies that the next training pass uses.

The model's parameters stay float32 master weights in its state dict. During a training pass the bf16 copy that the last
update wrote replaces every Linear's weight. So autocast has nothing to cast, and the weight gradient arrives at that
leaf in bf16, as its GEMM rounded it. Where an FP8 recipe knows its scale beforehand, the update also writes the FP8
weight, and Linear reuses it. A Decoder reads such a weight nowhere else: its leaf only receives the gradient, and its
values are one NaN. Weights that multiply as one matrix lie side by side and are cast to FP8 in the pass.

Above cost.ONCE weight elements we save memory: (1) each FP8 weight is stored in one layout, and dgrad transposes it on
the fly; (2) the optimizer also writes the stacked q/k/v and gate/up FP8 weights; (3) layers of the fused chain keep no
bf16 copy; (4) a tied head that casts its own table has no copy.

A weight that is bf16 itself has no float32 master: it is its own leaf, and the update writes only its FP8 copy.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from te_bench.kernels import adamw
from te_bench.kernels.adamw import Parameter, Table
from te_bench.kernels.adamw.backends import reference
from te_bench.kernels.quantize import TENSOR, Layout, Quantized
from te_bench.models import cost, fp8
from te_bench.models.decoder import Decoder
from te_bench.models.modules.fp8_module import InFp8
from te_bench.models.modules.linear import Linear
from te_bench.models.recipe import Recipe, Slot
from te_bench.training import fewer_bits
from te_bench.training.parallel import SINGLE, Parallel

EPS = 1e-8  # torch.optim.AdamW's default

#: Dtypes of a matrix's first moment. With "fp8" the root of the second moment has another FP8 format (reference.ROOTS).
STATES = {None: torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Copy:
    """The FP8 copy of a te.Linear's weight, with its recipe's scale and amax; in both layouts, or rowwise only.

    whole: the stacked FP8 weight with one shared scale, of which `kept` is some rows; else `kept` itself.
    """

    module: Linear
    recipe: Recipe
    slot: Slot
    kept: Quantized
    whole: Quantized


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A weight's bf16 leaf, and the modules in which it replaces the master weight during a pass.

    direct: the leaf receives the master's whole gradient, and the update reads it there; otherwise `gather` adds it to
    the master's. half: the leaf holds the weight in bf16; otherwise only the FP8 copy is multiplied, and the leaf is a
    NaN placeholder. `leaf.copy_of` is the master. A bf16 master is its own leaf.
    """

    leaf: nn.Parameter
    modules: tuple[nn.Module, ...]
    direct: bool
    half: bool
    fp8: Fp8Copy | None


def make_copies(
    model: nn.Module,
    *,
    direct: bool,
    region: Callable[[], contextlib.AbstractContextManager[None]],
    turns: bool = False,
) -> dict[nn.Parameter, Copy]:
    """Return {weight of one or more Linear: its copy}. region: the FP8 autocast of `model`.

    direct: a leaf may stand for its master's gradient. turns: dgrad may transpose FP8 weights: one layout if large.
    """
    users: dict[nn.Parameter, list[nn.Module]] = {}
    found: dict[nn.Parameter, Copy] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                users.setdefault(parameter, []).append(module)
    stacks = _stacks_of(model)
    with torch.no_grad(), region():
        once = turns and _elements_in_fp8(users) >= cost.ONCE
        fp8 = _make_fp8_stacks(stacks, users) if once else {}
        stacked = {layer.weight for stack in stacks for layer in stack}  # cast together in the pass
        alone_in_fp8, without = _read_in_fp8(model, once)
        for master, modules in users.items():
            linear = [m for m in modules if isinstance(m, nn.Linear | Linear) and m._parameters.get("weight") is master]
            if not linear or master in without:
                continue
            alone, first = len(modules) == 1, linear[0]
            if alone and master not in stacked and isinstance(first, Linear):
                fp8[master] = _make_fp8_copy(first, master, columnwise=not once)
            own = fp8.get(master)
            if master.dtype is torch.bfloat16:
                found |= {} if own is None else {master: Copy(master, tuple(linear), True, False, own)}
                continue
            half = own is None or not (isinstance(model, Decoder) or master in alone_in_fp8)
            leaf: Any = nn.Parameter(master.to(torch.bfloat16) if half else _make_placeholder(master))
            leaf.copy_of = master
            if own is not None and not (half and own.kept is own.whole):
                leaf.in_fp8 = InFp8(own.recipe, own.kept, own.whole)
            found[master] = Copy(leaf, tuple(linear), direct and alone, half, own)
        for stack in stacks:
            copies = [found[layer.weight] for layer in stack if layer.weight in found]
            if len(copies) == len(stack) and all(copy.half for copy in copies):
                # Put the leaves side by side in memory, so that stacking them costs no copy.
                joined = torch.cat([copy.leaf for copy in copies]).split([len(copy.leaf) for copy in copies])
                for copy, part in zip(copies, joined, strict=True):
                    copy.leaf.data = part
    return found


def _elements_in_fp8(users: dict[nn.Parameter, list[nn.Module]]) -> int:
    """Count the elements of weights whose FP8 cast the current autocast's recipe leaves to the optimizer."""
    linear = [(p, first) for p, (first, *others) in users.items() if isinstance(first, Linear) and not others]
    return sum(p.numel() for p, first in linear if first._parameters.get("weight") is p and first.weight_cast())


def _read_in_fp8(model: nn.Module, once: bool) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
    """Return, for a large model, the weights read only in FP8 and the tied tables that a head casts itself."""
    if not once:
        return set(), set()
    read = [layer.weight for module in model.modules() for layer in getattr(module, "te_linears", list)()]
    cast = [table for module in model.modules() for table in getattr(module, "te_cast_tables", list)()]
    return set(read), set(cast)


def _stacks_of(model: nn.Module) -> list[list[Any]]:
    """Return the groups of Linears whose weights multiply as one matrix, as the modules' te_stacks name them."""
    stacks = [stack for module in model.modules() for stack in getattr(module, "te_stacks", list)() if len(stack) > 1]
    return [stack for stack in stacks if all(isinstance(layer, nn.Linear | Linear) for layer in stack)]


def _make_placeholder(like: Tensor) -> Tensor:
    """Return a NaN tensor of like's shape, one element in memory: a gradient can arrive there, and misuse shows."""
    return torch.full((), math.nan, dtype=torch.bfloat16, device=like.device).expand(like.shape)


def _make_fp8_copy(module: Linear, master: Tensor, *, columnwise: bool, rows: int | None = None) -> Fp8Copy | None:
    """Allocate a weight's FP8 copy; None if the current autocast's recipe does not leave the cast to the optimizer.

    rows: number of rows of the whole stack, if the weight is stacked.
    """
    made = module.weight_cast()
    if made is None:
        return None
    recipe, cast = made
    inverse = torch.ones((), dtype=torch.float32, device=master.device)
    data = torch.empty(rows or len(master), master.shape[1], dtype=cast.dtype, device=master.device)
    data_t = data.new_empty(data.t().shape) if columnwise else None
    layout = Layout(cast.dtype, TENSOR, torch.float32)
    whole = Quantized(data, inverse, data_t, inverse if columnwise else None, layout)
    return Fp8Copy(module, recipe, Slot(cast.scale, cast.amax), whole, whole)


def _make_fp8_stacks(
    stacks: list[list[Any]], users: dict[nn.Parameter, list[nn.Module]]
) -> dict[nn.Parameter, Fp8Copy | None]:
    """Return {weight: its rows of the stack's FP8} for stacks of float32 weights with one user; they share a scale."""
    found: dict[nn.Parameter, Fp8Copy | None] = {}
    for stack in stacks:
        weights: list[Any] = [layer.weight for layer in stack]
        if not all(isinstance(layer, Linear) for layer in stack) or any(len(users.get(w, ())) != 1 for w in weights):
            continue
        rows = [len(weight) for weight in weights]
        own = _make_fp8_copy(stack[0], weights[0], columnwise=False, rows=sum(rows))
        if own is None or any(weight.dtype is not torch.float32 for weight in weights):
            continue
        with torch.enable_grad():  # layers join only with gradients enabled, as in the coming pass
            for layer in stack[1:]:
                layer.join(stack[0])
        for layer, weight, part in zip(stack, weights, own.whole.data.split(rows), strict=True):
            found[weight] = replace(own, module=layer, kept=own.whole._replace(data=part))
    return found


def _draws(masters: Iterable[nn.Parameter], states: str | None, accumulate: int, parallel: Parallel) -> bool:
    """Return whether the update rounds stochastically. Raises ValueError for unsupported combinations."""
    weights = "bf16" if any(p.dtype is torch.bfloat16 for p in masters) else None
    reason = fewer_bits.unsupported(weights, states, ranks=parallel is not SINGLE, accumulate=accumulate)
    if reason:
        raise ValueError(f"weights {weights or 'float32'}, states {states or 'float32'}: {reason}")
    return weights is not None or states is not None


def _make_moments(parameter: Tensor, states: str | None) -> dict[str, Tensor]:
    """Return zeroed exp_avg and exp_avg_sq of a parameter, with their scales in FP8, keyed as in adamw.Parameter."""
    matrix = parameter.dim() >= 2
    dtype = STATES[states] if matrix else torch.float32
    dtypes = {"exp_avg": dtype, "exp_avg_sq": reference.ROOTS if states == "fp8" and matrix else dtype}
    found = {name: torch.zeros_like(parameter, dtype=own, requires_grad=False) for name, own in dtypes.items()}
    if states == "fp8" and matrix:
        blocks = parameter.numel() // adamw.BLOCK
        found |= {f"{name}_scale": torch.zeros(blocks, device=parameter.device) for name in list(found)}
    return found


class TableAdamW:
    """AdamW on all trained parameters of `model` at once; matrices decay, other tensors do not.

    `state`, `param_groups`, `zero_grad` and `step` follow torch.optim.AdamW, but the learning rate and the number of
    updates are device tensors. Raises ValueError for an unknown backend, a backend that this machine cannot run, and
    parameters that are neither float32 nor bfloat16 (bfloat16: one process without micro-batches only). states: "bf16"
    or "fp8" is the format of matrices' moments; None is float32, as vectors' always are. Stochastic rounding draws by
    torch's current seed, which `state` keeps with the number of updates. fixed: gradient addresses never change;
    otherwise `bind` reads those of the last pass. bf16: Linears compute with copies. region: the model's FP8 autocast.
    turns: as in make_copies. parallel: how the step is divided; if a rank owns only some parameters, `state` has only
    their moments. A parameter without a gradient in a step is not updated, as in torch.optim.AdamW, but its bias
    correction counts the table's updates. A captured graph updates the parameters that its captured pass reached.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        *,
        weight_decay: float,
        betas: tuple[float, float],
        rate: float,
        bf16: bool,
        accumulate: int,
        fixed: bool,
        region: Callable[[], contextlib.AbstractContextManager[None]],
        parallel: Parallel = SINGLE,
        states: str | None = None,
        turns: bool = False,
    ) -> None:
        self.masters = [p for p in model.parameters() if p.requires_grad]
        device = self.masters[0].device
        draws = _draws(self.masters, states, accumulate, parallel)
        owners = parallel.owners(self.masters)
        self._owning = parallel if owners else None
        self._others = {p for p, rank in zip(self.masters, owners or (), strict=bool(owners)) if rank != parallel.rank}
        self.copies = make_copies(model, direct=accumulate == 1, region=region, turns=turns) if bf16 else {}
        self.name, self._backend = name, adamw.load(name)
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        cast = states == "fp8" or any(copy.fp8 for copy in self.copies.values())
        reason = self._backend.unsupported(adamw.Problem(device=device.type, capability=capability, fp8=cast))
        if reason:
            raise ValueError(f"optimizer {name}: {reason}")
        if not fixed and self._backend.move is None:
            raise ValueError(f"optimizer {name}: no captured graph can follow it; choose mode eager, or triton")
        self._decay, self._betas = weight_decay, betas
        self._rate, self._count = (torch.full((), x, dtype=torch.float32, device=device) for x in (rate, 0.0))
        self.param_groups: list[dict[str, Any]] = [{"params": self.masters, "lr": self._rate}]
        self.state: dict[Any, dict[str, Tensor]] = {
            p: _make_moments(p, states) for p in self.masters if p not in self._others
        }
        self._seed = torch.full((), torch.initial_seed() % 2**63, device=device) if draws else None
        self.state["step"] = {"step": self._count} | ({} if self._seed is None else {"seed": self._seed})
        self._multiplier: Tensor | None = None
        self._fresh, self._versions = False, self._seen()
        self._buffers: list[tuple[nn.Parameter, Tensor]] = []
        self._zeroed: list[int] = []  # the buffers' versions when zeroed
        self._absent: set[nn.Parameter] = set()
        self._table: Table | None = None
        if fixed:
            holders = self.gradient_holders()
            self._buffers = [(p, torch.zeros(p.shape, dtype=p.dtype, device=device)) for p in holders]
            self.zero_grad()
            self.bind()

    def gradient_holders(self) -> list[nn.Parameter]:
        """Return, for each master, the parameter whose .grad holds its whole gradient after a pass."""
        found = ((p, self.copies.get(p)) for p in self.masters)
        return [copy.leaf if copy is not None and copy.direct else p for p, copy in found]

    def whole_holders(self) -> list[nn.Parameter]:
        """Return the holders whose gradient is whole after the backward pass: `gather` adds nothing to it."""
        found = ((p, self.copies.get(p)) for p in self.masters)
        return [p if copy is None else copy.leaf for p, copy in found if copy is None or copy.direct]

    # ---- before, during and after a training pass

    def prepare(self) -> None:
        """Recast the copies before a pass unless the last update left them fresh.

        A copy serves one pass only: scales move on after it, and recipes count a weight's amax once a pass.
        """
        if self.copies and not (self._fresh and self._versions == self._seen()):
            self._refresh()
        self._fresh = False

    def _seen(self) -> list[int]:
        """Return the masters' version counters: loading weights changes them, a replayed graph does not."""
        return [p._version for p in self.masters]

    def _refresh(self) -> None:
        self._recast(self.copies)

    @torch.no_grad()
    def _recast(self, masters: Iterable[nn.Parameter]) -> None:
        """Make copies of these masters' current weights."""
        copies = [(master, self.copies[master]) for master in masters if master in self.copies]
        for _, copy in copies:
            if copy.fp8 is not None:
                copy.fp8.slot.forget()  # drop the amax of the older weight
        for master, copy in copies:
            if copy.half:
                copy.leaf.copy_(master)
            if copy.fp8 is not None:
                slot, kept, half = copy.fp8.slot, copy.fp8.kept, master.to(torch.bfloat16)
                columnwise = kept.data_t is not None
                made = copy.fp8.recipe.quantize(half, "weight", slot, rowwise=True, columnwise=columnwise)
                for ours, theirs in zip(kept[:3], made[:3], strict=True):
                    if ours is not None:
                        ours.copy_(theirs)
        self._versions = self._seen()

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Let the model's Linears compute with the copies. Raises ValueError for FP8-only ones outside FP8 autocast."""
        fp8_only = any(not copy.half for copy in self.copies.values())
        if fp8_only and (fp8.current.calibrating or not fp8.current.enabled):
            raise ValueError(
                "this step's weights are copied in FP8 alone, but the model's autocast is without: train in the autocast "
                "that the step was made in, or make another step"
            )
        try:
            for copy in self.copies.values():
                for module in copy.modules:
                    module._parameters["weight"] = copy.leaf
                if copy.fp8 is not None:
                    copy.fp8.module.reuse(copy.fp8.recipe, copy.fp8.kept)
            yield
        finally:
            for master, copy in self.copies.items():
                for module in copy.modules:
                    module._parameters["weight"] = master
                if copy.fp8 is not None:
                    copy.fp8.module.reuse(None, None)

    @torch.no_grad()
    def gather(self) -> None:
        """Add the gradient of each non-direct leaf to its master's, in float32. Call after each backward pass."""
        for master, copy in self.copies.items():
            arrived = copy.leaf.grad
            if copy.direct or arrived is None:
                continue
            copy.leaf.grad = None
            if master.grad is None:
                master.grad = arrived.float()
            else:
                master.grad.add_(arrived)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero the gradients in the table's buffers. set_to_none drops them, for a graph to allocate its own."""
        if set_to_none:
            for holder in (*self.masters, *(copy.leaf for copy in self.copies.values())):
                holder.grad = None
            return
        for holder, buffer in self._buffers:
            holder.grad = buffer
        torch._foreach_zero_([buffer for _, buffer in self._buffers])
        self._zeroed = [buffer._version for _, buffer in self._buffers]

    def pass_by(self) -> None:
        """Drop gradients that the step's backward passes did not write to, so that their parameters are not updated."""
        absent = set()
        for master, (holder, buffer), zeroed in zip(self.masters, self._buffers, self._zeroed, strict=True):
            if buffer._version == zeroed:
                holder.grad = None
                absent.add(master)
        if absent != self._absent:
            self._absent = absent
            self.bind()

    # ---- the table

    def bind(self) -> None:
        """Note the addresses of weights, gradients, moments and copies; not allowed during graph capture."""
        self._table = self._backend.table(self._parameters())

    def release_gradients(self) -> None:
        """Free the gradients before a capture. The table keeps their shapes and dtypes until `move`."""
        assert self._table is not None
        self.zero_grad(set_to_none=True)
        forms = (replace(p, grad=torch.empty_like(p.grad, device="meta")) for p in self._table.parameters)
        self._table = replace(self._table, parameters=tuple(forms))

    def move(self) -> None:
        """Point the table at the gradients that the capture made. Raises ValueError if other parameters have them."""
        assert self._table is not None
        assert self._backend.move is not None
        moved = self._parameters()
        if [id(p.weight) for p in moved] != [id(p.weight) for p in self._table.parameters]:
            raise ValueError(
                "mode cudagraph: the captured pass reached other parameters than the one before it, and a graph updates "
                "the same in each replay: a model that chooses anew what it uses (LayerDrop, experts) needs mode eager"
            )
        self._table = self._backend.move(self._table, moved)
        self._fresh = False  # the graph has not run yet

    def replayed(self) -> None:
        """Note that a captured step ran, so its update left fresh copies."""
        self._fresh = True

    def _parameters(self) -> list[Parameter]:
        made: list[Parameter] = []
        inverses: set[int] = set()  # scale_inv tensors given so far: stacked weights share one
        for master, holder in zip(self.masters, self.gradient_holders(), strict=True):
            if master in self._others or holder.grad is None:  # torch's AdamW skips such parameters, too
                continue
            copy, fp8 = self.copies.get(master), {}
            if copy is not None and copy.fp8 is not None:
                slot, kept = copy.fp8.slot, copy.fp8.kept
                fp8 = {"data": kept.data, "data_t": kept.data_t, "scale": slot.scale, "amax": slot.amax}
                if id(kept.scale_inv) not in inverses:
                    fp8["scale_inv"] = kept.scale_inv
                    inverses.add(id(kept.scale_inv))
            parameter = Parameter(
                weight=master,
                grad=holder.grad,
                **self.state[master],
                weight_decay=self._decay if master.dim() >= 2 else 0.0,
                bf16=copy.leaf if copy is not None and copy.half else None,
                **fp8,
            )
            made.append(parameter)
        return made

    def clip(self, max_norm: float) -> Tensor:
        """Return the norm of all gradients; `step` will scale them by what brings it down to max_norm."""
        assert self._table is not None
        norm, self._multiplier = self._backend.norm(self._table, max_norm)
        if self._owning is not None:
            norm = self._owning.of_parts(norm.to(self._rate.device))  # without parameters it is on the CPU
            self._multiplier = reference.multiplier_of(norm, max_norm)
        return norm

    @torch.no_grad()
    def step(self) -> None:
        assert self._table is not None
        self._count.add_(1)
        self._backend.step(
            self._table,
            rate=self._rate,
            step=self._count,
            betas=self._betas,
            eps=EPS,
            multiplier=self._multiplier,
            seed=self._seed,
        )
        if self._owning is not None:
            self._owning.updated()
            torch.autograd.graph.increment_version(list(self._others))
        left = self._others | self._absent
        self._recast(p for p in self.masters if p in left)
        self._fresh, self._versions = True, self._seen()

    def state_dict(self) -> NoReturn:
        """Raise ValueError: the moments are saved with their whole step."""
        raise ValueError("te-bench's AdamW has no state_dict: save and load the whole step by te_bench.training.resume")

    @torch.no_grad()
    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return {master: its clipped gradient, float32} of the last pass."""
        assert self._table is not None
        found = {}
        arrived = {p: holder.grad for p, holder in zip(self.masters, self.gradient_holders(), strict=True)}
        for parameter in self._table.parameters:  # a captured graph has its own gradients
            arrived[parameter.weight] = parameter.grad
        for master, whole in arrived.items():
            if whole is None:
                continue
            gradient = whole.float()
            found[master] = gradient.clone() if self._multiplier is None else gradient * self._multiplier
        return found
