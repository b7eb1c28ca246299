"""The base of recipes: formats, how to quantise a tensor of each role, and how to multiply in each GEMM.

Roles are "input", "weight" and "grad_output"; GEMMs are "fprop", "dgrad" and "wgrad". A module asks its recipe for
both, and never for its name.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.gemm import block_scaled, policy
from te_bench.kernels.gemm.backends import reference as gemm_reference
from te_bench.kernels.quantize import TENSOR, Block, Layout, Operand, Quantized
from te_bench.kernels.quantize.backends import reference as quantize_reference
from te_bench.kernels.quantize.backends import triton as quantize_triton

DTYPES = {448.0: torch.float8_e4m3fn, 57344.0: torch.float8_e5m2}  # {largest number: format}


class Maxima(NamedTuple):
    """The largest numbers of a forward and of a backward pass."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """FP8 formats of forward and backward. E5M2 has two mantissa bits, too few for activations and weights."""

    E4M3 = Maxima(448.0, 448.0)
    E5M2 = Maxima(57344.0, 57344.0)
    HYBRID = Maxima(448.0, 57344.0)

    def __init__(self, max_fwd: float, max_bwd: float) -> None:
        self.forward, self.backward = DTYPES[max_fwd], DTYPES[max_bwd]


class Slot(NamedTuple):
    """A module's state for one tensor: delayed scaling's scale and amax, and the counters of te.record_numerics."""

    scale: Tensor | None = None  # () float32
    amax: Tensor | None = None  # () float32, the current step's, gathered while casting
    counts: Tensor | None = None  # (3,) int64, see kernels.quantize
    again: bool = False  # torch.compile will recompute the cast in a checkpoint's backward pass

    def checkpointed(self, copy: Callable[[Tensor], Tensor], again: bool) -> "Slot":
        """Return the slot inside an activation checkpoint, whose recomputation casts with the copy."""
        return self if self.scale is None else self._replace(scale=copy(self.scale), again=again)

    def forget(self) -> None:
        """Drop the current step's amax."""
        if self.amax is not None:
            self.amax.zero_()

    def unrecorded(self) -> "Slot":
        """Return the slot without an amax to record."""
        return self._replace(amax=None)


class Cast(NamedTuple):
    """A cast that the kernel which produces a tensor can fuse, because the scale is known beforehand."""

    scale: Tensor
    dtype: torch.dtype
    amax: Tensor | None
    counts: Tensor | None


class State:
    """A recipe's state of one module from step to step; modules use only these names.

    saved: the names of `tensors()`, stored in a state dict as fp8_NAME.
    """

    saved: ClassVar[tuple[str, ...]] = ()

    recipe: "Recipe"
    slots: Mapping[tuple[str, int], Slot]  # by (role, number of the GEMM); replaced when tensors move
    silent = False  # compiled code or a CUDA graph uses it, without reporting when
    owner: int | None = None  # the number of the first of stacked Linears

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        saved_names.update(dict.fromkeys(cls.saved))

    @property
    def real(self) -> bool:
        """Whether it holds values: a pass on the meta device or under FakeTensorMode makes none."""
        return True

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        raise NotImplementedError

    def slot(self, role: str, gemm: int) -> Slot:
        """Return the slot with a tensor's cast inputs and outputs."""
        return self.slots[role, gemm]

    def figures(self, role: str, gemm: int) -> dict[str, float]:
        """Return te.numerics' figures of a tensor."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a state dict, under the names in `saved`; not copies."""
        raise NotImplementedError

    def buffers(self) -> list[Tensor]:
        """Return the tensors that training writes to."""
        raise NotImplementedError

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Copy the available ones of `tensors()`. Raises ValueError, with nothing copied, if one does not fit."""
        raise NotImplementedError

    def carry(self, old: Any) -> None:
        """Continue from a state of the same class under another recipe."""

    def join(self, other: Any) -> None:
        """Merge another state of the same class into this one; both tensors are cast as one from then on."""

    def to(self, device: torch.device) -> None:
        """Move all tensors to a device; their dtypes stay."""
        raise NotImplementedError


#: The saved names of all states, in the order of their definition.
saved_names: dict[str, None] = {}


@dataclass(frozen=True)
class Recipe:
    """The base of all recipes. `emulate` computes in PyTorch, on any device, what FP8 hardware would.

    bf16_last: the share of a model's blocks, counted from the end and rounded up, whose Linears stay in the
    activations' precision, together with Linears in no block (a head). bf16_first: the same for the first blocks,
    without a head. te.convert(model, recipe) and te_bench's own models apply both; te.autocast knows no blocks. Raises
    ValueError for shares outside 0 to 1.
    """

    emulate: bool = field(default=False, kw_only=True)
    bf16_last: float = field(default=0.0, kw_only=True)
    bf16_first: float = field(default=0.0, kw_only=True)

    granularity: ClassVar[str] = "tensor"  # what shares a scale: "tensor", "row", "block"; "mxfp8", "nvfp4"
    block_formats: ClassVar[bool] = False  # it casts to MXFP8 or NVFP4, in bf16: kernels/quantize/block_formats.py
    # Not annotated: a dataclass would treat known ClassVars as coming before subclasses' fields.
    fp8_format = Format.HYBRID
    power_of_two = False  # scales are powers of two
    bf16_wgrad = False  # wgrad multiplies x and dy themselves, in their own precision
    fp8_dpa = False  # attention computes in FP8, too: see kernels/attention/backends/manual_fp8.py

    def __post_init__(self) -> None:
        for setting in ("bf16_first", "bf16_last"):
            self._reject(not 0 <= getattr(self, setting) <= 1, setting, "a share of the blocks, 0 to 1")

    def __init_subclass__(cls, **options: Any) -> None:
        """Disable inherited fused casts in a subclass that overrides quantize, because they would bypass it."""
        super().__init_subclass__(**options)

        def depth(name: str) -> int:
            return next(i for i, base in enumerate(cls.__mro__) if name in base.__dict__)

        for short_cut in ("quantize_pair", "epilogue"):
            if depth("quantize") < depth(short_cut):
                setattr(cls, short_cut, getattr(Recipe, short_cut))

    @classmethod
    def delayed(cls) -> bool:
        """Return whether it is delayed scaling; this and the following methods are Transformer Engine's."""
        return False

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Return whether it is per-tensor current scaling."""
        return False

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Return whether it is delayed or per-tensor current scaling."""
        return cls.delayed() or cls.float8_current_scaling()

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Return whether it scales blocks of 128 and of 128 x 128."""
        return False

    @classmethod
    def mxfp8(cls) -> bool:
        """Return whether it is MXFP8."""
        return False

    @classmethod
    def nvfp4(cls) -> bool:
        """Return whether it is NVFP4."""
        return False

    @classmethod
    def custom(cls) -> bool:
        """Return False: a user's own recipe is a subclass of Recipe."""
        return False

    def keeps(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names of a model's Linears that stay in the activations' precision."""
        Recipe.__post_init__(self)  # a user's own recipe may have another
        return _in_end_blocks(names, self.bf16_first, self.bf16_last)

    @property
    def keeps_blocks(self) -> bool:
        """Whether `keeps` may return any."""
        return self.bf16_first > 0 or self.bf16_last > 0

    def lacks_fp8_head(self) -> str | None:
        """Return why the recipe rules out a head with all three GEMMs in FP8, or None."""
        if self.bf16_wgrad:
            return "the recipe keeps weight gradients in the activations' precision"
        return "the recipe keeps the head in the activations' precision" if self.bf16_last else None

    def by_given_scale(self) -> "Recipe | None":
        """Return a recipe that casts with a given scale as this one does with the tensor's own; None if impossible."""
        return None

    def dtype(self, role: str) -> torch.dtype:
        """Return the FP8 format of a role."""
        return self.fp8_format.backward if role == "grad_output" else self.fp8_format.forward

    def block(self, role: str) -> Block:
        """Return what shares a scale in a tensor of that role."""
        return TENSOR

    def quantize(
        self, x: Tensor, role: str, slot: Slot, *, rowwise: bool, columnwise: bool, column_sum: Tensor | None = None
    ) -> Quantized:
        """Quantise x (M, N) in the requested layouts; the sum over x's rows is added to column_sum, (N,) float32.

        Each `block` is scaled by its own amax, unless a recipe overrides this.
        """
        block = self.block(role)
        itself = columnwise and self.bf16_wgrad and role != "weight"  # its columns are its own, uncast
        if column_sum is not None and block != TENSOR:
            add_rows(x, column_sum)
            column_sum = None
        q = self._quantizer(x)(
            x,
            self.dtype(role),
            block,
            rowwise=rowwise or itself,
            columnwise=columnwise and not itself,
            power_of_two=self.power_of_two,
            counts=slot.counts,
            column_sum=column_sum,
        )
        return self._with_itself(q, x) if itself else q

    def quantize_pair(
        self, x: Tensor, x_slot: Slot, w: Tensor, w_slot: Slot, *, x_columnwise: bool, w_columnwise: bool
    ) -> tuple[Quantized, Quantized]:
        """Quantise a Linear's input (M, K) and weight (N, K), both rowwise; in one launch if the recipe can."""
        return (
            self.quantize(x, "input", x_slot, rowwise=True, columnwise=x_columnwise),
            self.quantize(w, "weight", w_slot, rowwise=True, columnwise=w_columnwise),
        )

    def observe(self, x: Tensor, role: str, slot: Slot) -> None:
        """Record the amax that casting x would, for a calibrating module, which computes in high precision."""

    def make_state(self, gemms: int, device: torch.device) -> State | None:
        """Make the state of a module with so many GEMMs; None for a stateless recipe."""
        return None

    def update(self, states: Sequence[Any], group: Any = None) -> None:
        """Update the states that were used; called when the outermost autocast ends."""

    def epilogue(self, role: str, slot: Slot) -> Cast | None:
        """Return a cast for the producing kernel to fuse, or None if the scale depends on the finished tensor."""
        return None

    def gemm(self, a: Operand, b: Operand, gemm: str, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """Compute D = a @ b.T + bias, (M, K) and (N, K) -> (M, N); only fprop uses fast accumulation.

        It runs cuBLASLt, or what was measured to be faster at this shape on this GPU (kernels/measured.json); with
        bf16_wgrad, wgrad is computed without FP8. Raises ValueError for layouts that no GEMM here supports: a recipe
        that makes such layouts overrides this.
        """
        if self.bf16_wgrad and gemm == "wgrad":
            if a.layout.scales is not None or b.layout.scales is not None:
                raise ValueError(
                    f"{type(self).__name__}: bf16_wgrad=True, but its quantize casts what wgrad reads; leave bf16_wgrad out"
                )
            return torch.mm(a.data, b.data.t()).to(out_dtype)
        multiply = gemm_reference.forward if self._emulated(a.data) else policy.forward
        return multiply(a, b, out_dtype=out_dtype, fast_accum=gemm == "fprop", bias=bias)

    def unsupported(self, device: str, capability: tuple[int, int] | None) -> str | None:
        """Return why this device cannot run the recipe, or None."""
        lack = (architecture.lacks_bf16 if self.block_formats else architecture.lacks_fp8)(capability)
        if device != "cuda" or self.emulate or lack is None:
            return None
        return f"{lack}; {type(self).__name__}(emulate=True) computes the same numbers without it, slowly"

    def by_half_gemms(self, device: str, capability: tuple[int, int] | None) -> bool:
        """Return whether its GEMMs are half precision there, because they emulate MXFP8's or NVFP4's."""
        return self.block_formats and (self.emulate or block_scaled.unsupported(device, capability) is not None)

    @staticmethod
    def _with_itself(q: Quantized, x: Tensor) -> Quantized:
        """Return q with x's own columns, detached: a view with a graph would create a reference cycle with x."""
        return q._replace(data_t=x.detach().t(), scale_inv_t=None, layout_t=Layout(x.dtype, TENSOR, None))

    def _emulated(self, x: Tensor) -> bool:
        return self.emulate or not x.is_cuda

    def _quantizer(self, x: Tensor) -> Callable[..., Quantized]:
        return quantize_reference.quantize if self._emulated(x) else quantize_triton.quantize

    def _reject(self, wrong: bool, setting: str, legal: str) -> None:
        if wrong:
            raise ValueError(f"{type(self).__name__}: {setting}={getattr(self, setting)!r} is not possible: {legal}")

    def _check_format(self, legal: tuple[Format, ...] = (Format.HYBRID, Format.E4M3)) -> None:
        why = "E5M2 has too few mantissa bits for the forward pass; " if self.fp8_format is Format.E5M2 else ""
        self._reject(self.fp8_format not in legal, "fp8_format", why + " or ".join(f"Format.{f.name}" for f in legal))


def add_rows(x: Tensor, column_sum: Tensor) -> None:
    """Add the sum over x's rows to column_sum, float32."""
    column_sum += x.sum(0, dtype=torch.float32)  # x.float() would be a copy of twice its bytes


def _in_end_blocks(names: Iterable[str], first: float, last: float) -> frozenset[str]:
    """Return the names in the first and last ceil(share x blocks) blocks; `last` includes names in no block (a head).

    A block is a number in a dotted name, such as 3 in transformer.h.3.mlp; of several module lists the longest counts.
    A share of 0 selects none. Raises ValueError if a share is above 0 and no name has a number.
    """
    if not first and not last:
        return frozenset()
    lists: dict[str, dict[int, set[str]]] = {}
    outside = set[str]()
    for name in names:
        parts = name.split(".")
        place = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if place is not None:
            lists.setdefault(".".join(parts[:place]), {}).setdefault(int(parts[place]), set()).add(name)
        else:
            outside.add(name)
    if not lists:
        said = f"bf16_last={last}" if last else f"bf16_first={first}"
        raise ValueError(f"{said}: the model's layers are in no numbered blocks; leave it at 0")
    blocks = max(lists.values(), key=len)

    def whole(share: float) -> int:  # 0.07 x 100 blocks is 7, but slightly more in floats
        return max(1, math.ceil(share * len(blocks) - 1e-9)) if share else 0

    numbers = sorted(blocks)
    ends = {*numbers[: whole(first)], *numbers[len(numbers) - whole(last) :]}
    return frozenset(outside if last else ()).union(*(blocks[number] for number in ends))


def largest_of_ranks(x: Tensor, group: Any = None) -> Tensor:
    """Return each element's maximum over the group (None: all ranks); NaN becomes infinity, as backends may lose it."""
    x = x.nan_to_num(nan=torch.inf, posinf=torch.inf)
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x


AmaxAlgorithm = str | Callable[[Tensor], Tensor]
ScaleAlgorithm = Callable[[Tensor, Tensor, Tensor, Any], Tensor] | None
