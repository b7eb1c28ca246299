"""torch's grouped_mm, by which experts multiply, where torch has none: of float32 without memory, and in float64."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ATEN: Any = torch.ops.aten._grouped_mm


class Imagined(TorchFunctionMode):
    """On tensors without memory grouped_mm takes bfloat16 alone; the shapes are those of any dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch._grouped_mm or args[0].dtype is torch.bfloat16:
            return func(*args, **(kwargs or {}))
        a, b, *others = args
        return func(a.bfloat16(), b.bfloat16(), *others, **(kwargs or {})).to(a.dtype)


class Exact(TorchFunctionMode):
    """grouped_mm in float64, a group at a time: torch's takes float32 at most."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch._grouped_mm or args[0].dtype is not torch.float64:
            return func(*args, **(kwargs or {}))
        return _by_groups(*args, **(kwargs or {}))


def _by_groups(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """(M, K) x (G, K, N) -> (M, N), each group of rows by its own matrix; offs (G,): where a group ends.

    Rows past the last group are 0. Two operands of three dimensions multiply one by one, without offs. Raises ValueError for
    two of two, which no forward pass has.
    """
    if offs is None:
        y = a @ b
    elif a.dim() == 2 and b.dim() == 3:
        ends = offs.tolist()
        rows = a[: ends[-1]].split([end - start for start, end in zip([0, *ends], ends, strict=False)])
        y = torch.cat([part @ weight for part, weight in zip(rows, b, strict=True)])
        y = F.pad(y, (0, 0, 0, len(a) - ends[-1]))
    else:
        raise ValueError(f"grouped_mm in float64 of {tuple(a.shape)} and {tuple(b.shape)}: give rows and matrices")
    return y if bias is None else y + bias


def flop(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """FLOP of one grouped_mm by its operands' shapes: each row multiplies once, whichever group it is in."""
    return 2 * a.numel() * b[-1]


#: For FlopCounterMode, which knows no grouped_mm.
FLOP = {_ATEN: flop}
