"""What a recipe is: its formats, how it quantises a tensor of each role, and how it multiplies for each GEMM.

Roles are "input", "weight" and "grad_output"; GEMMs are "fprop", "dgrad" and "wgrad". A module asks its recipe for both
and never for its name.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.gemm import policy
from te_bench.kernels.gemm.backends import reference as gemm_reference
from te_bench.kernels.quantize import TENSOR, Backend, Layout, Operand, Quantized
from te_bench.kernels.quantize.backends import reference as quantize_reference
from te_bench.kernels.quantize.backends import triton as quantize_triton

DTYPES = {448.0: torch.float8_e4m3fn, 57344.0: torch.float8_e5m2}  # by their largest number


class Maxima(NamedTuple):
    """The largest numbers of a forward and of a backward pass."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """FP8 formats of the forward and the backward pass. E5M2 has two mantissa bits, too few for activations and weights."""

    E4M3 = Maxima(448.0, 448.0)
    E5M2 = Maxima(57344.0, 57344.0)
    HYBRID = Maxima(448.0, 57344.0)

    def __init__(self, max_fwd: float, max_bwd: float) -> None:
        self.forward, self.backward = DTYPES[max_fwd], DTYPES[max_bwd]


class Slot(NamedTuple):
    """What a module keeps for one of its tensors: delayed scaling's state, and the counters of te.record_numerics."""

    scale: Tensor | None = None  # () float32
    amax: Tensor | None = None  # () float32, this step's, gathered while casting
    counts: Tensor | None = None  # (3,) int64, see kernels.quantize
    again: bool = False  # torch.compile will compute the cast again, in the backward pass of an activation checkpoint

    def checkpointed(self, copy: Callable[[Tensor], Tensor], again: bool) -> "Slot":
        """The same inside an activation checkpoint, whose recomputation casts by the copy."""
        return self if self.scale is None else self._replace(scale=copy(self.scale), again=again)

    def forget(self) -> None:
        """Drop what this step has gathered."""
        if self.amax is not None:
            self.amax.zero_()

    def unrecorded(self) -> "Slot":
        """The same, leaving no trace in the recipe's state."""
        return self._replace(amax=None)


class Cast(NamedTuple):
    """A cast that the kernel which makes a tensor can do in passing, for its scale is known beforehand."""

    scale: Tensor
    dtype: torch.dtype
    amax: Tensor | None
    counts: Tensor | None


class State:
    """What a recipe keeps of one module from step to step; a module speaks of it by these names alone.

    saved: the names of `tensors()`, which a state dict holds as fp8_NAME.
    """

    saved: ClassVar[tuple[str, ...]] = ()

    recipe: "Recipe"
    slots: Mapping[tuple[str, int], Slot]  # of (role, number of the GEMM); another object once tensors have moved
    silent = False  # whether compiled code or a CUDA graph uses it, which doesn't say when
    owner: int | None = None  # of Linears side by side the first one's number

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        saved_names.update(dict.fromkeys(cls.saved))

    @property
    def real(self) -> bool:
        """Whether it holds numbers: a pass on the meta device or under FakeTensorMode makes none."""
        return True

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        raise NotImplementedError

    def slot(self, role: str, gemm: int) -> Slot:
        """What the cast of a tensor takes and leaves."""
        return self.slots[role, gemm]

    def figures(self, role: str, gemm: int) -> dict[str, float]:
        """What te.numerics tells of a tensor."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """What a state dict holds, by the names in `saved`; not copies."""
        raise NotImplementedError

    def buffers(self) -> list[Tensor]:
        """The tensors that training writes to."""
        raise NotImplementedError

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Copy what there is of `tensors()`. Raises ValueError, with nothing copied, where it does not fit."""
        raise NotImplementedError

    def carry(self, old: Any) -> None:
        """Go on from a state of the same class under another recipe."""

    def join(self, other: Any) -> None:
        """Go on from this and from another one of the same class, for tensors that are cast as one from now on."""

    def to(self, device: torch.device) -> None:
        """Move all tensors to a device; their dtypes stay."""
        raise NotImplementedError


#: What states of any recipe save, in the order of their definition.
saved_names: dict[str, None] = {}


@dataclass(frozen=True)
class Recipe:
    """The base of all recipes. `emulate` computes in PyTorch what FP8 hardware would, on any device.

    bf16_last: the share of a model's blocks, the last ones, whose Linears stay in the activations' precision, rounded up to
    whole blocks, and with them Linears in no block, a head. bf16_first: the same of the first blocks, without a head.
    te.convert(model, recipe) and te_bench's own models heed both, for te.autocast knows no blocks. Raises ValueError for
    what is not from 0 to 1.
    """

    emulate: bool = field(default=False, kw_only=True)
    bf16_last: float = field(default=0.0, kw_only=True)
    bf16_first: float = field(default=0.0, kw_only=True)

    granularity: ClassVar[str] = "tensor"  # what shares a scale: "tensor", "row" or "block"; "mxfp8" or "nvfp4"
    by_half_gemms: ClassVar[bool] = (
        False  # whether its GEMMs are half precision's on every device: it emulates a format
    )
    # Not annotated: a dataclass would put what it knows as a ClassVar before the fields of its subclasses.
    fp8_format = Format.HYBRID
    power_of_two = False  # whether scales are powers of two
    bf16_wgrad = False  # whether wgrad multiplies x and dy themselves, in their own precision
    fp8_dpa = False  # whether attention computes in FP8, too: kernels/attention/backends/manual_fp8.py says how

    def __init_subclass__(cls, **options: Any) -> None:
        """Whoever overrides quantize is asked by quantize alone: an inherited short cut would go past it."""
        super().__init_subclass__(**options)

        def depth(name: str) -> int:
            return next(i for i, base in enumerate(cls.__mro__) if name in base.__dict__)

        for short_cut in ("quantize_pair", "epilogue"):
            if depth("quantize") < depth(short_cut):
                setattr(cls, short_cut, getattr(Recipe, short_cut))

    @classmethod
    def delayed(cls) -> bool:
        """Whether it is delayed scaling; this and what follows are Transformer Engine's questions."""
        return False

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether it is per-tensor current scaling."""
        return False

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether it is one of these two."""
        return cls.delayed() or cls.float8_current_scaling()

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether it scales blocks of 128 and of 128 x 128."""
        return False

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether it is MXFP8."""
        return False

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether it is NVFP4."""
        return False

    @classmethod
    def custom(cls) -> bool:
        """False: a recipe of the user's own is a subclass of Recipe."""
        return False

    def keeps(self, names: Iterable[str]) -> frozenset[str]:
        """Of a model's Linears, by name, those that stay in the activations' precision."""
        for setting in ("bf16_first", "bf16_last"):
            self._reject(not 0 <= getattr(self, setting) <= 1, setting, "a share of the blocks, 0 to 1")
        return _in_end_blocks(names, self.bf16_first, self.bf16_last)

    @property
    def keeps_blocks(self) -> bool:
        """Whether `keeps` may name any."""
        return self.bf16_first > 0 or self.bf16_last > 0

    def lacks_fp8_head(self) -> str | None:
        """Why a head whose three GEMMs are in FP8 is not what the recipe asks for, or None."""
        if self.bf16_wgrad:
            return "the recipe keeps weight gradients in the activations' precision"
        return "the recipe keeps the head in the activations' precision" if self.bf16_last else None

    def by_given_scale(self) -> "Recipe | None":
        """What casts by a scale that is given as this recipe does by the tensor's own; None where none does."""
        return None

    def dtype(self, role: str) -> torch.dtype:
        """The FP8 format of a role."""
        return self.fp8_format.backward if role == "grad_output" else self.fp8_format.forward

    def quantize(
        self, x: Tensor, role: str, slot: Slot, *, rowwise: bool, columnwise: bool, column_sum: Tensor | None = None
    ) -> Quantized:
        """x (M, N) in the layouts asked for; the sum over x's rows is added to column_sum, (N,) float32."""
        raise NotImplementedError

    def quantize_pair(
        self, x: Tensor, x_slot: Slot, w: Tensor, w_slot: Slot, *, x_columnwise: bool, w_columnwise: bool
    ) -> tuple[Quantized, Quantized]:
        """`quantize` of a Linear's input (M, K) and weight (N, K), rowwise both: in one launch where a recipe can."""
        return (
            self.quantize(x, "input", x_slot, rowwise=True, columnwise=x_columnwise),
            self.quantize(w, "weight", w_slot, rowwise=True, columnwise=w_columnwise),
        )

    def observe(self, x: Tensor, role: str, slot: Slot) -> None:
        """Note what the cast of x would, where a module calibrates: it computes in high precision."""

    def make_state(self, gemms: int, device: torch.device) -> State | None:
        """What a module with so many GEMMs keeps between steps; None for a recipe that keeps nothing."""
        return None

    def update(self, states: Sequence[Any], group: Any = None) -> None:
        """Take a step: called with the states that were used when the outermost autocast ends."""

    def epilogue(self, role: str, slot: Slot) -> Cast | None:
        """The cast that a producing kernel may do, or None where the scale depends on the finished tensor."""
        return None

    def gemm(self, a: Operand, b: Operand, gemm: str, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """D = a @ b.T + bias, (M, K) and (N, K) -> (M, N); only fprop accumulates fast.

        By cuBLASLt, or by what was measured to be faster at this shape on this GPU (kernels/measured.json); with bf16_wgrad
        wgrad as a Linear without FP8 has it. Raises ValueError for layouts that no GEMM here multiplies: a recipe that makes
        them multiplies them itself.
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
        """Why this device cannot run the recipe, or None."""
        lack = (architecture.lacks_bf16 if self.by_half_gemms else architecture.lacks_fp8)(capability)
        if device != "cuda" or self.emulate or lack is None:
            return None
        return f"{lack}; {type(self).__name__}(emulate=True) computes the same numbers without it, slowly"

    def _itself(self, role: str, columnwise: bool) -> bool:
        """Whether the columns that are asked for are those of the tensor itself."""
        return columnwise and self.bf16_wgrad and role != "weight"

    @staticmethod
    def _with_itself(q: Quantized, x: Tensor) -> Quantized:
        """q with x's own columns. Detached, as a view of what autograd has made x would hold x's graph, and x be in it."""
        return q._replace(data_t=x.detach().t(), scale_inv_t=None, layout_t=Layout(x.dtype, TENSOR, None))

    def _emulated(self, x: Tensor) -> bool:
        return self.emulate or not x.is_cuda

    def _quantizer(self, x: Tensor) -> Backend:
        return quantize_reference.BACKEND if self._emulated(x) else quantize_triton.BACKEND

    def _reject(self, wrong: bool, setting: str, legal: str) -> None:
        if wrong:
            raise ValueError(f"{type(self).__name__}: {setting}={getattr(self, setting)!r} is not possible: {legal}")

    def _check_format(self, legal: tuple[Format, ...] = (Format.HYBRID, Format.E4M3)) -> None:
        why = "E5M2 has too few mantissa bits for the forward pass; " if self.fp8_format is Format.E5M2 else ""
        self._reject(self.fp8_format not in legal, "fp8_format", why + " or ".join(f"Format.{f.name}" for f in legal))


def _in_end_blocks(names: Iterable[str], first: float, last: float) -> frozenset[str]:
    """Of dotted names those in the first and last ceil(share x blocks) blocks; with the last those in no block, a head's.

    A block is a number in a name, such as 3 in transformer.h.3.mlp; of several lists of modules the longest counts. A share
    of 0 has none. Raises ValueError where a share is above 0 and no name has a number.
    """
    if not first and not last:
        return frozenset()
    found: dict[str, dict[int, set[str]]] = {}
    outside = set[str]()
    for name in names:
        parts = name.split(".")
        place = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if place is not None:
            found.setdefault(".".join(parts[:place]), {}).setdefault(int(parts[place]), set()).add(name)
        else:
            outside.add(name)
    if not found:
        said = f"bf16_last={last}" if last else f"bf16_first={first}"
        raise ValueError(f"{said}: the model's layers are in no numbered blocks; leave it at 0")
    blocks = max(found.values(), key=len)

    def whole(share: float) -> int:  # 0.07 x 100 blocks is 7, and a float above it
        return max(1, math.ceil(share * len(blocks) - 1e-9)) if share else 0

    numbers = sorted(blocks)
    ends = {*numbers[: whole(first)], *numbers[len(numbers) - whole(last) :]}
    return frozenset(outside if last else ()).union(*(blocks[number] for number in ends))


AmaxAlgorithm = str | Callable[[Tensor], Tensor]
ScaleAlgorithm = Callable[[Tensor, Tensor, Tensor, Any], Tensor] | None
