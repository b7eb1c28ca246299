"""The compute dtype of modules, and activations as matrices."""

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def is_recorded() -> bool:
    """Return whether torch.compile or torch.jit.trace records the current code, which needs plain operators."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return a module's compute dtype: torch.autocast's if it is on, else the input's."""
    if not torch._C._is_any_autocast_enabled():
        return x.dtype  # saves 0.3 us against a look-up by x's device
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def flatten(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x (..., K) as a contiguous (M, K) of `dtype`; x itself if it is one already."""
    x = x if x.dtype is dtype else x.to(dtype)
    return x if x.dim() == 2 and x.is_contiguous() else x.reshape(-1, x.shape[-1]).contiguous()
