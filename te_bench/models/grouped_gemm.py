"""Replacements of torch's grouped_mm, the GEMM of experts: float32 on fake tensors, autocast, and float64."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ALIGNED = 8  # grouped_mm needs rows of a multiple of this many bf16 features

_ATEN: Any = torch.ops.aten._grouped_mm


class Imagined(TorchFunctionMode):
    """Run grouped_mm on fake tensors of any dtype; torch takes only bfloat16 with rows of a multiple of 16 bytes.

    Features are padded to a multiple of 8, and their FLOP counted so.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch._grouped_mm or args[0].dtype is torch.bfloat16:
            return func(*args, **(kwargs or {}))
        a, b, *others = args
        inner, outer = (-size % ALIGNED for size in b.shape[-2:])
        full = F.pad(a.bfloat16(), (0, inner)), F.pad(b.bfloat16(), (0, outer, 0, inner))
        return func(*full, *others, **(kwargs or {}))[..., : b.shape[-1]].to(a.dtype)


class InAutocast(TorchFunctionMode):
    """Cast grouped_mm's operands as autocast casts a Linear's; torch's autocast does not reach it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch._grouped_mm or not torch.is_autocast_enabled(args[0].device.type):
            return func(*args, **(kwargs or {}))
        a, b, *others = args
        dtype = torch.get_autocast_dtype(a.device.type)
        return func(a.to(dtype), b.to(dtype), *others, **(kwargs or {}))


class Exact(TorchFunctionMode):
    """Compute grouped_mm in float64, one group at a time; torch's takes at most float32."""

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
    """Compute torch's grouped_mm; offs (G,) are the ends of the groups of rows, of columns, or of the summed dimension.

    (M, K) x (G, K, N) -> (M, N), (G, M, K) x (K, N) -> (M, N), (M, K) x (K, N) -> (G, M, N): the dimension without G is
    split into groups; beyond the last group the result is 0. Without offs it is a batched GEMM.
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
    """Count the FLOP of a grouped_mm from its operands' shapes: each row or column is multiplied in one group only."""
    groups = a[0] if len(a) == 3 and len(b) == 2 else 1  # a column is in one of these groups
    return 2 * a.numel() * b[-1] // groups


#: FlopCounterMode's custom_mapping for grouped_mm.
FLOP = {_ATEN: flop}
