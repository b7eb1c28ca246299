"""torch's grouped_mm, by which experts multiply, where torch has none: of float32 without memory, and in float64."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ALIGNED = 8  # features, that grouped_mm takes rows of bfloat16

_ATEN: Any = torch.ops.aten._grouped_mm


class Imagined(TorchFunctionMode):
    """On tensors without memory grouped_mm takes bfloat16 alone, in rows of 16 bytes; the shapes are those of any dtype.

    Features that are no multiple of 8 are filled up to one, and their FLOP counted so.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch._grouped_mm or args[0].dtype is torch.bfloat16:
            return func(*args, **(kwargs or {}))
        a, b, *others = args
        inner, outer = (-size % ALIGNED for size in b.shape[-2:])
        full = F.pad(a.bfloat16(), (0, inner)), F.pad(b.bfloat16(), (0, outer, 0, inner))
        return func(*full, *others, **(kwargs or {}))[..., : b.shape[-1]].to(a.dtype)


class InAutocast(TorchFunctionMode):
    """grouped_mm of operands as autocast casts a Linear's, which it does not reach."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch._grouped_mm or not torch.is_autocast_enabled(args[0].device.type):
            return func(*args, **(kwargs or {}))
        a, b, *others = args
        dtype = torch.get_autocast_dtype(a.device.type)
        return func(a.to(dtype), b.to(dtype), *others, **(kwargs or {}))


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
    """torch's grouped_mm, whose groups offs (G,) ends: of rows, of columns, or of what is summed over.

    (M, K) x (G, K, N) -> (M, N), (G, M, K) x (K, N) -> (M, N), (M, K) x (K, N) -> (G, M, N): a dimension that a G lacks has
    the groups one after the other; past the last one is 0. Without offs two operands of three dimensions multiply as ever.
    """
    if offs is None:
        y = a @ b
    else:
        ends = offs.tolist()
        parts = [slice(*span) for span in zip([0, *ends], ends, strict=False)]
        if b.dim() == 3:
            y = torch.cat([a[part] @ weight for part, weight in zip(parts, b, strict=True)])
            y = F.pad(y, (0, 0, 0, len(a) - ends[-1]))
        elif a.dim() == 3:
            y = torch.cat([weight @ b[:, part] for part, weight in zip(parts, a, strict=True)], 1)
            y = F.pad(y, (0, b.shape[1] - ends[-1]))
        else:
            y = torch.stack([a[:, part] @ b[part] for part in parts])
    return y if bias is None else y + bias


def flop(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """FLOP of one grouped_mm by its operands' shapes: a row, or a column, multiplies once, whichever group it is in."""
    groups = a[0] if len(a) == 3 and len(b) == 2 else 1  # of which a column is in one
    return 2 * a.numel() * b[-1] // groups


#: For FlopCounterMode, which knows no grouped_mm.
FLOP = {_ATEN: flop}
