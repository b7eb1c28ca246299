"""Tensor and sequence parallelism, as Transformer Engine divides a Linear among the ranks of a group.

For y = x W^T + b a "column" Linear holds a rank's rows of W and b, and computes its columns of y. A "row" Linear holds
its columns of W, takes its columns of x, and adds b after summing y over the ranks. Activations between a row Linear
and the next column Linear are whole in every rank. With sequence parallelism a rank has its part of their first
dimension: column Linears gather it, row Linears reduce-scatter their sums.

Parameters marked `sequence_parallel` (a norm's, a row Linear's bias) have gradients of the rank's own rows: the trainer
sums them over the group, as Megatron-LM does.
Source: Shoeybi et al., arXiv:1909.08053; Korthikanti et al., arXiv:2205.05198.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_bench.kernels.quantize import Operand
from te_bench.models.modules import arguments
from te_bench.models.recipe import largest_of_ranks

MODES = ("column", "row")
# The names from torch 2.13 on, or the earlier ones.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
OVERLAPS = (*arguments.SWITCHES, "symmetric_ar_type")  # they hide or shorten collectives


class Ranks:
    """The ranks among which a module's weights are divided; a single rank divides nothing."""

    def __init__(
        self,
        where: str,
        tp_group: Any = None,
        tp_size: int = 1,
        sequence_parallel: bool | None = False,
        others: Mapping[str, Any] | None = None,
    ):
        """where: the module's name in messages; others: its arguments that `arguments` accepts.

        Raises ValueError for an invalid group, another size, and arguments that several ranks do not support.
        """
        arguments.check(where, tp_size=tp_size)
        self.where, self.group, self.size = where, tp_group, int(tp_size)
        if tp_group is not None:
            self.size = self._size_of(tp_group)
            if tp_size not in (1, self.size):
                raise ValueError(f"{where}: tp_size={tp_size}, but tp_group has {self.size} ranks: give one of them")
        self.sequence = bool(sequence_parallel) and self.size > 1
        self.overlaps = False  # a Linear's collectives and GEMMs are one operator (symmetric); needs self.sequence
        for name in OVERLAPS:
            if self.size > 1 and (others or {}).get(name):
                raise ValueError(f"{where}: te_bench has no {name} at tp_size={self.size}; leave it out")

    def meet(self, group: Any) -> None:
        """Divide among this group. Raises ValueError if its size differs from the module's."""
        size = 1 if group is None else self._size_of(group)
        if size != self.size and group is not None:
            raise ValueError(
                f"{self.where}: the group has {size} ranks, but its weights are for tp_size={self.size}: make it anew with "
                f"tp_size={size}"
            )
        self.group = group

    def _size_of(self, group: Any) -> int:
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"{self.where}: tp_group={group!r} is no process group of torch.distributed, of this rank's"
            )
        return group.size()

    def part(self, name: str, whole: int) -> int:
        """Return a rank's share of `whole` features or heads. Raises ValueError if they do not divide."""
        if whole % self.size:
            raise ValueError(f"{self.where}: {name}={whole} does not divide into tp_size={self.size} ranks")
        return whole // self.size

    def _ready(self) -> Any:
        if self.group is None:
            raise ValueError(
                f"{self.where}: its weights are divided into {self.size}, but it knows no group: call "
                "set_tensor_parallel_group(group) first"
            )
        return self.group

    @property
    def symmetric(self) -> str | None:
        """The group's name for operators of symmetric memory, or None if GEMMs and collectives are separate."""
        return self._ready().group_name if self.overlaps else None

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate all ranks' x along the first dimension."""
        whole = x.new_empty(x.shape[0] * self.size, *x.shape[1:])
        _gather(whole, x.contiguous(), group=self._ready())
        return _received(whole)

    def scatter(self, x: Tensor) -> Tensor:
        """Return this rank's part, along the first dimension, of the sum over the ranks."""
        own = x.new_empty(self.part("the first dimension", x.shape[0]), *x.shape[1:])
        _scatter(own, x.contiguous(), group=self._ready())
        return _received(own)

    def total(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        x = x.contiguous().clone()
        dist.all_reduce(x, group=self._ready())
        return _received(x)

    def add_up(self, parameter: Tensor) -> Tensor:
        """Return a parameter that every rank has, such that its gradient is summed over the ranks."""
        return _There.apply(parameter, _same, self.total)

    def amax(self, x: Tensor) -> Tensor:
        """Return max |x| over the ranks, () float32; infinity if a rank has NaN."""
        amax = x.detach().abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
        return largest_of_ranks(amax, self._ready())

    def gather_operand(self, own: Operand) -> Operand:
        """Gather all ranks' rows of an FP8 operand with one scale, as bytes, which every backend sends."""
        return own._replace(data=self.gather(own.data.view(torch.uint8)).view(own.data.dtype))

    def require_shared(self, group: Any) -> None:
        """Raise ValueError if delayed scaling does not share amaxes over the ranks, which send with one scale."""
        mine = dist.get_process_group_ranks(self._ready())
        theirs = [] if group is None else dist.get_process_group_ranks(group)
        if not set(mine) <= set(theirs):
            raise ValueError(
                f"{self.where}: sequence_parallel sends FP8 by a scale that all ranks share: give te.autocast an "
                "amax_reduction_group with all of tp_group's ranks, and the recipe reduce_amax=True"
            )

    def __deepcopy__(self, memo: Any) -> Self:
        made = type(self).__new__(type(self))
        vars(made).update(vars(self))  # copies share the group
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "group": None}  # a group belongs to a process: the loader sets it


class Entry:
    """An input that several column Linears share: its gradients are summed here, then all-reduced once.

    The first Linear to take a tensor enters it; the others reuse it if it is unchanged and gradients are recorded
    alike. Nothing is kept once all have taken it.
    """

    def __init__(self, ranks: Ranks, readers: int):
        self.ranks, self.readers = ranks, readers
        self._left = 0
        self._known: tuple[Tensor, Tensor, tuple[bool, int]] | None = None

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        known, state = self._known, self._state(x)
        if known is None or known[0] is not x or known[1].dtype is not dtype or known[2] != state:
            self._left = self.readers
            known = x, _There.apply(x.to(dtype), _same, self.ranks.total), state
        self._left -= 1
        self._known = known if self._left else None
        return known[1]

    @staticmethod
    def _state(x: Tensor) -> tuple[bool, int]:
        """Return whether gradients are recorded, and x's version; a traced graph tracks writes to x itself."""
        unknown = torch.compiler.is_compiling() or x.is_inference()
        return torch.is_grad_enabled(), 0 if unknown else x._version

    def __deepcopy__(self, memo: Any) -> Self:
        return type(self)(copy.deepcopy(self.ranks, memo), self.readers)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_left": 0, "_known": None}


class Division(NamedTuple):
    """The division of one Linear's weight: "column" or "row".

    entry: for a column Linear that shares its input with others, without sequence parallelism.
    """

    ranks: Ranks
    mode: str
    entry: Entry | None = None

    def take(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a rank's input in `dtype`, for `enter` or a GEMM; code that computes for a Linear must call this."""
        return x.to(dtype) if self.entry is None else self.entry(x, dtype)

    def alone(self) -> Self:
        """Return the division for code that computes all Linears of one entry at once."""
        return self._replace(entry=None)

    def gathers(self, role: str) -> bool:
        """Return whether the GEMM operand of this role is gathered from the ranks' rows."""
        return self.ranks.sequence and role == ("input" if self.mode == "column" else "grad_output")

    def enter(self, x: Tensor) -> Tensor:
        """Turn a rank's input into its GEMM's input, in high precision."""
        if self.mode == "row" or self.entry is not None:
            return x
        return _There.apply(x, self.ranks.gather if self.ranks.sequence else _same, self._sum)

    def leave(self, y: Tensor) -> Tensor:
        """Turn a rank's product into its output, in high precision."""
        if self.mode == "column":
            return y
        return _There.apply(y, self._sum, self.ranks.gather if self.ranks.sequence else _same)

    def summed(self, product: Tensor, gemm: str) -> Tensor:
        """Return what a rank keeps of its product in a GEMM, "fprop" or "dgrad", where no graph is recorded."""
        whole = gemm == ("dgrad" if self.mode == "row" else "fprop")
        return product if whole or self.entry is not None else self._sum(product)

    def _sum(self, x: Tensor) -> Tensor:
        return self.ranks.scatter(x) if self.ranks.sequence else self.ranks.total(x)


def outer(x: Tensor, division: Division | None) -> tuple[int, ...]:
    """Return an output's dimensions but the last, for input x: sequence parallelism changes the first."""
    if division is None or not division.ranks.sequence:
        return x.shape[:-1]
    ranks, first = division.ranks, x.shape[0]
    first = first * ranks.size if division.mode == "column" else ranks.part("the first dimension", first)
    return first, *x.shape[1:-1]


def _same(x: Tensor) -> Tensor:
    return x


def _received(x: Tensor) -> Tensor:
    """Return x, written by a collective, as a view: torch.compile 2.11 drops a Function's gradient of x itself."""
    return x.view_as(x)


class _There(torch.autograd.Function):
    """Compute there(x), with the gradient back(dy)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        y = there(x)
        return x.view_as(x) if y is x else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(dy), None, None


def divide(ranks: Ranks, mode: str | None) -> Division | None:
    """Return the Division, or None if one rank has all. Raises ValueError unless mode is column, row or None."""
    if mode is not None and mode not in MODES:
        raise ValueError(f"{ranks.where}: parallel_mode={mode!r} is not possible: None, {' or '.join(MODES)}")
    return None if mode is None or ranks.size == 1 else Division(ranks, mode)


def require_set(ranks: Ranks, set_parallel_mode: bool) -> None:
    """Raise ValueError if a module of several ranks is not told to divide its weights."""
    if ranks.size > 1 and not set_parallel_mode:
        raise ValueError(f"{ranks.where}: tp_size={ranks.size} needs set_parallel_mode=True, which divides the weights")


def mark(
    division: Division | None, weights: Iterable[nn.Parameter | None], biases: Iterable[nn.Parameter | None]
) -> None:
    """Set the marks that Megatron-LM reads on a Linear's parameters: which are divided, whose gradient is partial."""
    if division is None:
        return
    column = division.mode == "column"
    for p in (*weights, *(biases if column else ())):
        if p is not None:
            p.tensor_model_parallel, p.partition_dim, p.partition_stride = True, 0 if column else 1, 1  # type: ignore[attr-defined]
    mark_partial(division.ranks, () if column else biases)


def mark_partial(ranks: Ranks, parameters: Iterable[nn.Parameter | None]) -> None:
    """Mark parameters that every rank has with whether their gradient is that of its own part of the sequence."""
    for p in parameters:
        if p is not None and ranks.size > 1:
            p.sequence_parallel = ranks.sequence  # type: ignore[attr-defined]


class Parallelised:
    """Accept the process groups of Transformer Engine's users, and pass tp_group on to submodules."""

    ranks: Ranks

    @property
    def tp_size(self) -> int:
        return self.ranks.size

    @property
    def tp_group(self) -> Any:
        return self.ranks.group

    @property
    def sequence_parallel(self) -> bool:
        return self.ranks.sequence

    def set_tensor_parallel_group(self: Any, tp_group: Any) -> None:
        """Set this rank's group, which divides the weights; None forgets it. Raises ValueError for another size."""
        self.ranks.meet(tp_group)
        for child in self.children():
            if isinstance(child, Parallelised):
                child.set_tensor_parallel_group(tp_group)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Accept None or a group of one rank; raises ValueError for any other."""
        arguments.reject(type(self).__name__, {"cp_group": cp_group, "cp_comm_type": cp_comm_type})
