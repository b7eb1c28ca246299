"""What modules compute in: the dtypes of activations, and their two dimensions."""

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def is_recorded() -> bool:
    """Whether what runs is recorded, by torch.compile or torch.jit.trace, which want plain operators."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def compute_dtype(x: Tensor) -> torch.dtype:
    """What a module computes in: torch.autocast's dtype where that is on, else the input's."""
    if not torch._C._is_any_autocast_enabled():
        return x.dtype  # 0.3 us sooner than by the name of x's device
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def flatten(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (..., K) as a contiguous (M, K) of `dtype`; x itself where it is one."""
    x = x if x.dtype is dtype else x.to(dtype)
    return x if x.dim() == 2 and x.is_contiguous() else x.reshape(-1, x.shape[-1]).contiguous()
