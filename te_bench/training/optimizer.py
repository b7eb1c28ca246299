"""AdamW by a backend of te_bench.kernels.adamw, and the copies of the weights that the next training pass computes with.

The model's parameters stay what they are: float32, in its state dict, for evaluations and checkpoints. While a training
pass runs, a bf16 leaf takes the place of every Linear's weight, the copy that the last update left: autocast finds nothing
to cast, and the gradient of the weight arrives at the leaf as its GEMM rounded it, as it does under autocast, whose
backward then widens it. Where an FP8 recipe knows its scale beforehand the update casts to FP8, too, and Linear reuses
what is kept and quantizes no weight. A Decoder reads such a weight nowhere else: of its leaf only the gradient is
real, its numbers are one NaN. Copies of weights that multiply as one matrix lie side by side, and are cast in the pass.

Of a large model (models.cost.ONCE) the FP8 lasts in one layout, which a backward pass turns, that of weights side by side
is left by the update, too, layers of the fused chain read no other copy, and a tied head that casts by itself has none.

A weight that is bf16 itself has no master: it is its own leaf, and the update leaves its FP8 alone.
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

#: Dtypes of a matrix's first moment; the second one's root is in FP8 of another kind.
STATES = {None: torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Copy:
    """A te.Linear's weight in FP8, by the scale and into the amax that its recipe keeps for it, in both layouts, or by rows.

    whole: with those that stand beside it, whose rows `kept` are; they share one scale.
    """

    module: Linear
    recipe: Recipe
    slot: Slot
    kept: Quantized
    whole: Quantized


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A matrix's bf16 leaf and the modules in which it takes the master's place.

    direct: the leaf's gradient is all of the master's, and the update reads it there; else it is added to the master's.
    half: it is the weight in bf16; else nobody multiplies by it, and it has no numbers. `leaf.copy_of` is the master. A
    bf16 master is the leaf itself, which nobody has to fill.
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
    """{weight of one or more Linear: its copy}; region: the FP8 autocast of `model`; direct: where nobody else uses it.

    turns: whether a backward pass may turn FP8 weights, so that those of a large model last once.
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
        stacked = {layer.weight for stack in stacks for layer in stack}  # cast together, in the pass
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
                # Side by side in memory: nobody has to put them there.
                joined = torch.cat([copy.leaf for copy in copies]).split([len(copy.leaf) for copy in copies])
                for copy, part in zip(copies, joined, strict=True):
                    copy.leaf.data = part
    return found


def _elements_in_fp8(users: dict[nn.Parameter, list[nn.Module]]) -> int:
    """Of weights that the present autocast's recipe leaves to whoever makes them."""
    linear = [(p, first) for p, (first, *others) in users.items() if isinstance(first, Linear) and not others]
    return sum(p.numel() for p, first in linear if first._parameters.get("weight") is p and first.weight_cast())


def _read_in_fp8(model: nn.Module, once: bool) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
    """Of a large model the weights that are read in FP8 alone, and the tied tables that a head casts by itself."""
    if not once:
        return set(), set()
    read = [layer.weight for module in model.modules() for layer in getattr(module, "te_linears", list)()]
    cast = [table for module in model.modules() for table in getattr(module, "te_cast_tables", list)()]
    return set(read), set(cast)


def _stacks_of(model: nn.Module) -> list[list[Any]]:
    """Linears whose weights multiply as one matrix, as modules say that have some (te_stacks)."""
    stacks = [stack for module in model.modules() for stack in getattr(module, "te_stacks", list)() if len(stack) > 1]
    return [stack for stack in stacks if all(isinstance(layer, nn.Linear | Linear) for layer in stack)]


def _make_placeholder(like: Tensor) -> Tensor:
    """A tensor of like's shape for a gradient to arrive at: who multiplied by it would find NaN."""
    return torch.full((), math.nan, dtype=torch.bfloat16, device=like.device).expand(like.shape)


def _make_fp8_copy(module: Linear, master: Tensor, *, columnwise: bool, rows: int | None = None) -> Fp8Copy | None:
    """None where the present autocast's recipe cannot leave the cast to whoever makes the weight.

    rows: of the whole, where others stand beside the weight.
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
    """{weight: its rows of a stack's FP8}, by the first's scale; of stacks that are trained, float32, and used once."""
    found: dict[nn.Parameter, Fp8Copy | None] = {}
    for stack in stacks:
        weights: list[Any] = [layer.weight for layer in stack]
        if not all(isinstance(layer, Linear) for layer in stack) or any(len(users.get(w, ())) != 1 for w in weights):
            continue
        rows = [len(weight) for weight in weights]
        own = _make_fp8_copy(stack[0], weights[0], columnwise=False, rows=sum(rows))
        if own is None or any(weight.dtype is not torch.float32 for weight in weights):
            continue
        with torch.enable_grad():  # they join in training, as in the pass to come, whose weights are cast before it
            for layer in stack[1:]:
                layer.join(stack[0])
        for layer, weight, part in zip(stack, weights, own.whole.data.split(rows), strict=True):
            found[weight] = replace(own, module=layer, kept=own.whole._replace(data=part))
    return found


def _draws(masters: Iterable[nn.Parameter], states: str | None, accumulate: int, parallel: Parallel) -> bool:
    """Whether anything is rounded stochastically. Raises ValueError for what cannot be."""
    weights = "bf16" if any(p.dtype is torch.bfloat16 for p in masters) else None
    reason = fewer_bits.unsupported(weights, states, ranks=parallel is not SINGLE, accumulate=accumulate)
    if reason:
        raise ValueError(f"weights {weights or 'float32'}, states {states or 'float32'}: {reason}")
    return weights is not None or states is not None


def _make_moments(parameter: Tensor, states: str | None) -> dict[str, Tensor]:
    """exp_avg and exp_avg_sq of a parameter, and their scales where they are in FP8, by the names of adamw.Parameter."""
    matrix = parameter.dim() >= 2
    dtype = STATES[states] if matrix else torch.float32
    dtypes = {"exp_avg": dtype, "exp_avg_sq": reference.ROOTS if states == "fp8" and matrix else dtype}
    found = {name: torch.zeros_like(parameter, dtype=own, requires_grad=False) for name, own in dtypes.items()}
    if states == "fp8" and matrix:
        blocks = parameter.numel() // adamw.BLOCK
        found |= {f"{name}_scale": torch.zeros(blocks, device=parameter.device) for name in list(found)}
    return found


class TableAdamW:
    """AdamW on every parameter of `model` that is trained, in one go; matrices decay, the others do not.

    `state`, `param_groups`, `zero_grad` and `step` are as torch.optim.AdamW's, the rate and the number of updates tensors
    on the device. Raises ValueError for an unknown backend, one that this machine cannot run, and parameters that are
    neither float32 nor, in one process without micro-batches, bfloat16.
    states: "bf16" or "fp8" keeps the moments of matrices so, None in float32, as those of vectors always are. What is
    rounded stochastically is so by torch's seed as it is now, which `state` has with the number of updates.
    fixed: gradients stay at the addresses that they have from the beginning; else `bind` notes those of the last pass.
    bf16: the Linears compute with copies; region: the model's FP8 autocast; turns: as make_copies'. parallel: of the step;
    where a rank does not own all parameters, `state` has the moments of its own.
    A parameter that no backward pass of a step reached stays as it is, as under torch.optim.AdamW; its bias correction
    counts the table's updates, where torch counts its own. A captured graph updates in each replay those that its own pass
    reached.
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
        self._zeroed: list[int] = []  # the buffers' versions
        self._absent: set[nn.Parameter] = set()
        self._table: Table | None = None
        if fixed:
            holders = self.gradient_holders()
            self._buffers = [(p, torch.zeros(p.shape, dtype=p.dtype, device=device)) for p in holders]
            self.zero_grad()
            self.bind()

    def gradient_holders(self) -> list[nn.Parameter]:
        """Where each master's whole gradient is, after a pass."""
        found = ((p, self.copies.get(p)) for p in self.masters)
        return [copy.leaf if copy is not None and copy.direct else p for p, copy in found]

    def whole_holders(self) -> list[nn.Parameter]:
        """Those of them that a backward pass alone brings the whole gradient: `gather` adds nothing to it."""
        found = ((p, self.copies.get(p)) for p in self.masters)
        return [p if copy is None else copy.leaf for p, copy in found if copy is None or copy.direct]

    @torch.no_grad()
    def carry(self, old: "TableAdamW") -> None:
        """Go on from the table of a model that this one's is a copy of: its moments, and the copies that it left."""
        self._rate.copy_(old._rate)
        for name, value in self.state["step"].items():
            value.copy_(old.state["step"][name])
        for mine, theirs in zip(self.masters, old.masters, strict=True):
            for name, moment in self.state[mine].items():
                moment.copy_(old.state[theirs][name])
        for copy, other in zip(self.copies.values(), old.copies.values(), strict=True):
            if copy.half:
                copy.leaf.copy_(other.leaf)
            if copy.fp8 is not None and other.fp8 is not None:
                for ours, left in zip(copy.fp8.kept[:3], other.fp8.kept[:3], strict=True):
                    if ours is not None:
                        ours.copy_(left)
        self._fresh, self._versions = old._fresh and old._versions == old._seen(), self._seen()

    # ---- before, during and after a training pass

    def prepare(self) -> None:
        """Before every pass: copies that no update left, or that a pass has used already, are made of the weights anew.

        Used already: scales have moved on, and recipes count the amax of a weight once a pass.
        """
        if self.copies and not (self._fresh and self._versions == self._seen()):
            self._refresh()
        self._fresh = False

    def _seen(self) -> list[int]:
        """The masters' versions: loading or restoring weights changes them, a replayed graph does not."""
        return [p._version for p in self.masters]

    def _refresh(self) -> None:
        self._recast(self.copies)

    @torch.no_grad()
    def _recast(self, masters: Iterable[nn.Parameter]) -> None:
        """Make the copies of these masters' present weights."""
        copies = [(master, self.copies[master]) for master in masters if master in self.copies]
        for _, copy in copies:
            if copy.fp8 is not None:
                copy.fp8.slot.forget()  # the weight that an update made before this one took its place
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
        """While inside, the model's Linears compute with the copies. Raises ValueError where those are of FP8 it has not."""
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
        """After each backward pass: what arrived at leaves that do not stand for their master alone, summed in float32."""
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
        """Gradients to zero where the table knows them to be; set_to_none drops them, for those of a graph to come."""
        if set_to_none:
            for holder in (*self.masters, *(copy.leaf for copy in self.copies.values())):
                holder.grad = None
            return
        for holder, buffer in self._buffers:
            holder.grad = buffer
        torch._foreach_zero_([buffer for _, buffer in self._buffers])
        self._zeroed = [buffer._version for _, buffer in self._buffers]

    def pass_by(self) -> None:
        """After a step's last backward pass: holders that none has written to have no gradient, and no update."""
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
        """Note where weights, gradients, moments and copies are; not while a graph is captured."""
        self._table = self._backend.table(self._parameters())

    def release_gradients(self) -> None:
        """Before the capture of a step: of the gradients so far the table keeps only what they look like, until `move`."""
        assert self._table is not None
        self.zero_grad(set_to_none=True)
        forms = (replace(p, grad=torch.empty_like(p.grad, device="meta")) for p in self._table.parameters)
        self._table = replace(self._table, parameters=tuple(forms))

    def move(self) -> None:
        """After the capture of a step: what was captured finds the gradients that the capture made."""
        assert self._table is not None
        assert self._backend.move is not None
        moved = self._parameters()
        if [id(p.weight) for p in moved] != [id(p.weight) for p in self._table.parameters]:
            raise ValueError(
                "mode cudagraph: the captured pass reached other parameters than the one before it, and a graph updates "
                "the same in each replay: a model that chooses anew what it uses (LayerDrop, experts) needs mode eager"
            )
        self._table = self._backend.move(self._table, moved)
        self._fresh = False  # nothing has run yet

    def replayed(self) -> None:
        """After a captured step ran: its update left copies."""
        self._fresh = True

    def _parameters(self) -> list[Parameter]:
        made: list[Parameter] = []
        inverses: set[int] = set()  # that are given: weights side by side share one
        for master, holder in zip(self.masters, self.gradient_holders(), strict=True):
            if master in self._others or holder.grad is None:  # as torch's AdamW, which passes by what no pass reaches
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
        """The norm of all gradients; `step` will multiply them by what brings it down to max_norm."""
        assert self._table is not None
        norm, self._multiplier = self._backend.norm(self._table, max_norm)
        if self._owning is not None:
            norm = self._owning.of_parts(norm.to(self._rate.device))  # of no parameters it is on a CPU
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
        """Raises ValueError: the moments are saved with the step that they are of."""
        raise ValueError("te-bench's AdamW has no state_dict: save and load the whole step by te_bench.training.resume")

    @torch.no_grad()
    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """{master: its gradient after clipping, float32}, of the last pass."""
        assert self._table is not None
        found = {}
        arrived = {p: holder.grad for p, holder in zip(self.masters, self.gradient_holders(), strict=True)}
        for parameter in self._table.parameters:  # a captured graph's are its own
            arrived[parameter.weight] = parameter.grad
        for master, whole in arrived.items():
            if whole is None:
                continue
            gradient = whole.float()
            found[master] = gradient.clone() if self._multiplier is None else gradient * self._multiplier
        return found
