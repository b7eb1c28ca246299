"""A weight that ranks' shards were gathered into in FP8, in place of a module's parameter.

FP8 code uses `quantized`; for any other operator it is the weight dequantised to its dtype, again each time.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from te_bench.kernels.quantize import Operand, Quantized
from te_bench.kernels.quantize.backends import reference
from te_bench.kernels.quantize.turn import turn

#: Operators that return the same weight.
SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.as_strided.default)
NOT_TURNED = Operand(None, None, None)  # type: ignore[arg-type]


class Gathered(Tensor):
    """(N, K) of `dtype` with an Operand's values and one scale; views share it, so that it can be gathered again."""

    held: list[Operand]

    @staticmethod
    def __new__(cls, operand: Operand, dtype: torch.dtype) -> "Gathered":
        return cls._of([operand], operand.data.shape, dtype, operand.data.device)

    @classmethod
    def _of(cls, held: list[Operand], shape: Any, dtype: torch.dtype, device: torch.device) -> "Gathered":
        made: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.held = held
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def refill(self, operand: Operand) -> None:
        """Take another gather's values, for all views."""
        self.held[0] = operand

    def quantized(self, columnwise: bool = False) -> Quantized:
        """Return it as GEMMs read it. Without columnwise, the transpose is left to `turned` when needed."""
        data, scale_inv, layout = rows = self.held[0]
        columns = turned(rows) if columnwise else NOT_TURNED
        return Quantized(data, scale_inv, columns.data, columns.scale_inv, layout)

    def widened(self) -> Tensor:
        return reference.dequantize(self.held[0], self.dtype)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Gathered({tuple(self.shape)}, {self.dtype}, from {self.held[0].data.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, cls):
            same = operator in SAME and (
                len(args) == 1 or (args[1], args[2]) == (list(first.shape), list(first.stride()))
            )
            if same:
                return cls._of(first.held, first.shape, first.dtype, first.device)
            if operator._schema.is_mutable:
                raise ValueError(
                    f"{operator}: a weight that was gathered in FP8 cannot be written to; write to its shards"
                )
        args, kwargs = tree_map_only(cls, cls.widened, (args, kwargs or {}))
        return operator(*args, **kwargs)


def turned(operand: Operand) -> Operand:
    """Return the transpose of an operand with one scale, for a GEMM that contracts its rows."""
    return operand._replace(data=turn(operand.data))
