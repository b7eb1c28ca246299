"""Per-tensor current scaling in plain PyTorch.

scale = FP8_MAX / amax(x); data = cast(saturate(x * scale)); scale_inv = 1 / scale. An amax of 0, infinity or NaN gives
scale 1, and the quotient saturates at the largest float32: the rules of Transformer Engine's Float8CurrentScaling.
"""

import torch
from torch import Tensor


def scale_from_amax(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """scale = FP8_MAX / amax, () float32 -> () float32; 1 where amax is 0, infinite or NaN."""
    amax = amax.float()
    # A tensor over a tensor: torch computes a number over a tensor as number * (1 / tensor), which rounds twice and
    # loses all precision above amax 8.5e37, where the reciprocal is subnormal.
    limit = torch.full_like(amax, torch.finfo(dtype).max)
    scale = (limit / amax).clamp(max=torch.finfo(torch.float32).max)
    return torch.where((amax > 0) & torch.isfinite(amax), scale, torch.ones_like(scale))


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """data, scale_inv = fp8(x * scale), 1 / scale; x any shape and float dtype -> data of `dtype`, scale_inv () float32.

    Values beyond the format's largest saturate; NaN stays NaN.
    """
    limit = torch.finfo(dtype).max
    scale = scale_from_amax(x.abs().amax(), dtype)
    data = (x.float() * scale).clamp(-limit, limit).to(dtype)
    return data, scale.reciprocal()


def dequantize(data: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """x = data * scale_inv, computed in float32, returned in `dtype`."""
    return (data.float() * scale_inv).to(dtype)
