"""Delayed scaling: a tensor is cast with a scale taken from the amaxes of the steps before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from te_bench.kernels.operators import define
from te_bench.kernels.quantize import Quantized
from te_bench.kernels.quantize import history as _history
from te_bench.kernels.quantize.backends import reference as quantize_reference
from te_bench.kernels.quantize.backends import triton as quantize_triton
from te_bench.kernels.tile import empty_pair
from te_bench.models.recipe._recipe import (
    AmaxAlgorithm,
    Cast,
    Format,
    Recipe,
    ScaleAlgorithm,
    Slot,
    State,
    largest_of_ranks,
)

ALGORITHMS = ("max", "most_recent")


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """scale = (FP8_MAX / amax) / 2^margin; amax is the largest, or the most recent, of the last amax_history_len steps.

    The first step casts with scale 1. An amax of 0, infinity or NaN keeps the scale; infinity and NaN are counted and
    kept out of the history, so that one does not freeze the scale for the whole window, as in Transformer Engine.
    amax_compute_algo: "max", "most_recent" or a function of the history (L, n) -> (n,);
    scaling_factor_compute_algo(amax, scale, fp8_max, recipe) -> new scale, all (n,) float32. reduce_amax takes the
    maximum over autocast's process group. fp8_dpa: attention in FP8, too, in E4M3 with current scales per head;
    Transformer Engine's are delayed. Raises ValueError for impossible settings.
    Source: Transformer Engine, DelayedScaling; Micikevicius et al., arXiv:2209.05433.
    """

    margin: float = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    scaling_factor_compute_algo: ScaleAlgorithm = None
    reduce_amax: bool = True
    fp8_dpa: bool = field(default=False, kw_only=True)
    fp8_mha: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_format()
        length = self.amax_history_len
        whole = isinstance(length, int) and not isinstance(length, bool) and length >= 1
        self._reject(not whole, "amax_history_len", "a whole number from 1")
        known = callable(self.amax_compute_algo) or self.amax_compute_algo in ALGORITHMS
        self._reject(not known, "amax_compute_algo", f"one of {', '.join(ALGORITHMS)}, or a function")
        custom = self.scaling_factor_compute_algo
        self._reject(not (custom is None or callable(custom)), "scaling_factor_compute_algo", "None or a function")
        number = isinstance(self.margin, int | float) and not isinstance(self.margin, bool)
        self._reject(not (number and -126 <= self.margin <= 126), "margin", "a number, -126 to 126")
        self._reject(self.fp8_mha, "fp8_mha", "te_bench hands attention its inputs in the activations' precision")

    @classmethod
    def delayed(cls) -> bool:
        return True

    def by_given_scale(self) -> Recipe:
        return self

    def quantize(
        self, x: Tensor, role: str, slot: Slot, *, rowwise: bool, columnwise: bool, column_sum: Tensor | None = None
    ) -> Quantized:
        assert slot.scale is not None
        amax = slot.amax
        if slot.again and amax is not None:  # in the graph's own tensor: the history moves on before a recomputation
            amax = x.new_zeros((), dtype=torch.float32)
        quantize = _emulated if self._emulated(x) and torch.compiler.is_compiling() else self._quantizer(x)
        made = quantize(
            x,
            self.dtype(role),
            scale=slot.scale,
            rowwise=rowwise,
            columnwise=columnwise,
            amax=amax,
            counts=slot.counts,
            column_sum=column_sum,
        )
        if slot.amax is not None and amax is not slot.amax:
            assert amax is not None
            slot.amax.copy_(torch.maximum(slot.amax, amax))
        return made

    def quantize_pair(
        self, x: Tensor, x_slot: Slot, w: Tensor, w_slot: Slot, *, x_columnwise: bool, w_columnwise: bool
    ) -> tuple[Quantized, Quantized]:
        made = None
        dtype = self.dtype("input")
        if x_slot.counts is None and not x_slot.again and dtype is self.dtype("weight") and not self._emulated(x):
            assert x_slot.scale is not None
            assert w_slot.scale is not None
            made = quantize_triton.quantize_pair(
                x, x_slot.scale, x_slot.amax, w, w_slot.scale, w_slot.amax, dtype, x_columnwise, w_columnwise
            )
        if made is not None:
            return made
        return super().quantize_pair(x, x_slot, w, w_slot, x_columnwise=x_columnwise, w_columnwise=w_columnwise)

    def epilogue(self, role: str, slot: Slot) -> Cast | None:
        assert slot.scale is not None
        if self.emulate or slot.again or (torch.compiler.is_compiling() and not slot.scale.is_cuda):
            return None  # see _emulated
        return Cast(slot.scale, self.dtype(role), slot.amax, slot.counts)

    def observe(self, x: Tensor, role: str, slot: Slot) -> None:
        if slot.amax is not None and x.numel():
            slot.amax.copy_(torch.maximum(slot.amax, x.detach().abs().amax().float()))

    def make_state(self, gemms: int, device: torch.device) -> "DelayedState":
        return DelayedState(self, gemms, device)

    def update(self, states: Sequence["DelayedState"], group: Any = None) -> None:
        """Turn the states' amaxes into scales, in place, and advance their histories by a step.

        States without an amax stay as they are. With `group`, its ranks share their largest amax first (reduce_amax).
        """
        tables = [table for state in states for table in (state.forward, state.backward) if table.real]
        if not tables:
            return
        with torch.no_grad():
            if self.reduce_amax and group is not None and dist.get_world_size(group) > 1:
                _reduce([table.written[0][0] for table in tables], group)
            # Stacked Linears share a table, which must advance only once. Ranks may differ in which tables have joined,
            # but have reduced equally many before this.
            tables = list({id(table): table for table in tables}.values())
            if callable(self.amax_compute_algo) or self.scaling_factor_compute_algo is not None:
                for table in tables:
                    self._custom_update(table)
                return
            _history.update(
                [table.written[0] for table in tables],
                [table.written[1] for table in tables],
                [table.limit for table in tables],
                margin=self.margin,
                algorithm=self.amax_compute_algo,
                nonfinite=[table.written[2] for table in tables],
            )

    def _custom_update(self, table: "ScaleTable") -> None:
        """Update with the user's own functions; their results for slots without an amax are ignored."""
        history, scale, nonfinite = table.written
        staged = history[0].clone()
        bad = ~torch.isfinite(staged)
        nonfinite += bad
        history[0].masked_fill_(bad, 0.0)
        algorithm = self.amax_compute_algo
        if callable(algorithm):
            amax = algorithm(history)
        else:
            amax = history[0].clone() if algorithm == "most_recent" else history.amax(0)
        if self.scaling_factor_compute_algo is not None:
            new = self.scaling_factor_compute_algo(amax, scale, table.limit, self)
        else:
            new = (table.limit / amax / 2.0**self.margin).clamp(max=torch.finfo(torch.float32).max)
        usable = (staged != 0) & ~bad & (amax > 0) & torch.isfinite(amax) & torch.isfinite(new)
        scale.copy_(torch.where(usable, new, scale))
        moved = history.roll(-1, 0)
        moved[0] = 0.0
        history.copy_(torch.where(staged != 0, moved, history))


@dataclass
class ScaleTable:
    """One direction of a module: history (L, n), scale (n,), limit (n,), float32; nonfinite (n,) int64."""

    history: Tensor
    scale: Tensor
    limit: Tensor
    nonfinite: Tensor

    def __post_init__(self) -> None:
        # The same memory without version counters: torch.compile saves the backward tables for the backward pass, which
        # must see the update at the autocast's end.
        self.written = self.history.data, self.scale.data, self.nonfinite.data
        #: Whether it holds values: a pass on the meta device or under FakeTensorMode makes none.
        self.real = not (self.scale.is_meta or isinstance(self.scale, FakeTensor))

    def fresh(self) -> Tensor:
        """Return which scales no amax has set yet, (n,) bool; with a one-step history only the scale shows it."""
        return (self.scale == 1) & (self.history == 0).all(0)


class DelayedState(State):
    """Scales and amax histories of one module, in Transformer Engine's layout.

    forward: n = 3 x gemms, for input, weight and output of each GEMM; backward: n = 2 x gemms, for grad_output and
    grad_input. Row 0 of a history gathers the current step. Outputs, input gradients are unused: not quantised.
    """

    saved = ("scale_fwd", "amax_history_fwd", "limit_fwd", "scale_bwd", "amax_history_bwd", "limit_bwd")

    ROLES: ClassVar[dict[str, tuple[str, int, int]]] = {  # role -> direction, slots per GEMM, index among them
        "input": ("forward", 3, 0),
        "weight": ("forward", 3, 1),
        "grad_output": ("backward", 2, 0),
    }

    def __init__(self, recipe: DelayedScaling, gemms: int, device: torch.device):
        self.recipe, self.gemms = recipe, gemms
        self.forward = _fresh(recipe, 3 * gemms, "input", device)
        self.backward = _fresh(recipe, 2 * gemms, "grad_output", device)
        self._index()

    @property
    def real(self) -> bool:
        return self.forward.real

    @property
    def device(self) -> torch.device:
        return self.forward.scale.device

    def _index(self) -> None:
        self.slots = {(role, gemm): self._view(role, gemm) for role in self.ROLES for gemm in range(self.gemms)}

    def _at(self, role: str, gemm: int) -> tuple["ScaleTable", int]:
        """Return the table of a tensor, and its column there."""
        direction, stride, place = self.ROLES[role]
        return self.forward if direction == "forward" else self.backward, stride * gemm + place

    def _view(self, role: str, gemm: int) -> Slot:
        table, i = self._at(role, gemm)
        return Slot(table.scale[i], table.history[0, i])

    def slot(self, role: str, gemm: int) -> Slot:
        """Return a slot whose scale and amax are () views of the tables."""
        if torch.compiler.is_compiling():  # there, written graph inputs that share memory cost clones
            return self._view(role, gemm)
        return self.slots[role, gemm]

    def figures(self, role: str, gemm: int) -> dict[str, float]:
        """Return scale, amax and nonfinite_amax of a tensor, for te.numerics."""
        table, i = self._at(role, gemm)
        amax = table.history[:, i].amax()
        return {"scale": table.scale[i].item(), "amax": amax.item(), "nonfinite_amax": table.nonfinite[i].item()}

    def tensors(self) -> dict[str, Tensor]:
        tensors = [t for table in (self.forward, self.backward) for t in (table.scale, table.history, table.limit)]
        return dict(zip(self.saved, tensors, strict=True))

    def buffers(self) -> list[Tensor]:
        return [t for table in (self.forward, self.backward) for t in table.written]

    def scales(self) -> list[Tensor]:
        """Return the scales of both directions, (n,) float32, in the memory that `update` writes."""
        return [table.written[1] for table in (self.forward, self.backward)]

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Copy another state's `tensors()`. Raises ValueError, before copying, for other shapes or formats than this
        recipe's.
        """
        remedy = "or load it without its fp8_* keys into a model that has not run, which begins with fresh scales"
        known = {name: own for name, own in self.tensors().items() if name in saved}
        for name, own in known.items():
            if saved[name].shape != own.shape:
                raise ValueError(
                    f"the checkpoint's {name} is {tuple(saved[name].shape)}, this module's {tuple(own.shape)}: load it "
                    f"under DelayedScaling(amax_history_len={self._length(saved)}), {remedy}"
                )
            if name.startswith("limit") and not torch.equal(saved[name].to(own.device), own):
                raise ValueError(
                    f"the checkpoint's {name} is {saved[name].tolist()}, this recipe's {own.tolist()}: its scales are of "
                    f"another fp8_format; load it under that one, {remedy}"
                )
        for name, own in known.items():
            own.copy_(saved[name])

    @torch.no_grad()
    def carry(self, old: "DelayedState") -> None:
        """Continue from a state of another DelayedScaling: its latest steps, and its scales in our recipe's formats."""
        for mine, theirs in ((self.forward, old.forward), (self.backward, old.backward)):
            kept = min(len(mine.history), len(theirs.history)) - 1
            mine.history[0] = theirs.history[0]
            if kept:
                mine.history[-kept:] = theirs.history[-kept:]
            mine.scale.copy_(theirs.scale * (mine.limit / theirs.limit))
            mine.nonfinite.copy_(theirs.nonfinite)

    @torch.no_grad()
    def join(self, other: "DelayedState") -> None:
        """Merge: each step's larger amax and the smaller scale; if one has no amax yet, the other's."""
        if not (self.real and other.real and self.recipe == other.recipe):
            return
        for mine, theirs in ((self.forward, other.forward), (self.backward, other.backward)):
            (history, scale, nonfinite), (other_history, other_scale, other_nonfinite) = mine.written, theirs.written
            fresh, other_fresh = mine.fresh(), theirs.fresh()
            smaller = torch.minimum(scale, other_scale)
            scale.copy_(torch.where(fresh, other_scale, torch.where(other_fresh, scale, smaller)))
            history.copy_(torch.maximum(history, other_history))
            nonfinite.copy_(torch.maximum(nonfinite, other_nonfinite))

    @staticmethod
    def _length(saved: Mapping[str, Tensor]) -> int:
        return next((len(value) for name, value in saved.items() if name.startswith("amax_history")), 0)

    def to(self, device: torch.device) -> None:
        """Move to a device, never to another dtype: scales stay float32 whatever the parameters become."""
        for table in (self.forward, self.backward):
            for name in ("history", "scale", "limit", "nonfinite"):
                setattr(table, name, getattr(table, name).to(device))
            table.__post_init__()
        self._index()


def _fresh(recipe: DelayedScaling, n: int, role: str, device: torch.device) -> ScaleTable:
    return ScaleTable(
        history=torch.zeros(recipe.amax_history_len, n, dtype=torch.float32, device=device),
        scale=torch.ones(n, dtype=torch.float32, device=device),
        limit=torch.full((n,), torch.finfo(recipe.dtype(role)).max, dtype=torch.float32, device=device),
        nonfinite=torch.zeros(n, dtype=torch.int64, device=device),
    )


def _cast(
    x: Tensor,
    dtype: torch.dtype,
    scale: Tensor,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None,
    counts: Tensor | None,
    column_sum: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    looks: dict[str, Any] = {"amax": amax, "counts": counts, "column_sum": column_sum}
    made = quantize_reference.quantize(x, dtype, scale=scale, rowwise=rowwise, columnwise=columnwise, **looks)
    return made.data, made.data_t, made.scale_inv if rowwise else made.scale_inv_t


def _fake_cast(x: Tensor, dtype: torch.dtype, scale: Tensor, rowwise: bool, columnwise: bool, *_: Any) -> Any:
    m, n = x.shape
    return *empty_pair(m, n, x, dtype, rowwise, columnwise), torch.empty_like(scale)


# Opaque to torch.compile, which assumes that scales never change: it would compute what needs no gradient, such as 1 /
# scale of a gradient, in the forward pass, and recompute what is cheap in the backward pass. But the autocast's end, in
# between, changes the scales.
_operator = define("emulated_delayed_cast", _cast, _fake_cast, writes=("amax", "counts", "column_sum"))


def _emulated(x: Tensor, dtype: torch.dtype, *, rowwise: bool, columnwise: bool, **given: Tensor | None) -> Quantized:
    """The reference quantiser by a given scale, for torch.compile."""
    made = _operator(x, dtype, rowwise=rowwise, columnwise=columnwise, **given)
    return quantize_reference.one_scale(dtype, rowwise, columnwise, *made)


def _reduce(rows: list[Tensor], group: Any) -> None:
    """All-reduce every amax to the ranks' largest, in one call; NaN counts as infinity."""
    flat = largest_of_ranks(torch.cat(rows), group)
    for row, value in zip(rows, flat.split([row.numel() for row in rows]), strict=True):
        row.copy_(value)


RECIPE = DelayedScaling()
