"""Liger-Kernel's Triton norms, an optional rival: `pip install liger-kernel`. They have no FP8 output.

Written against liger-kernel 0.8.5: ops/layer_norm.py and ops/rms_norm.py, whose functions run without autograd.
"""

import importlib.util
from typing import NoReturn

import torch
from torch import Tensor

from te_bench.kernels.norm import Backend, Norm, Problem, check


def unsupported(p: Problem) -> str | None:
    if importlib.util.find_spec("liger_kernel") is None:
        return "pip install liger-kernel"
    if p.device != "cuda":
        return "needs an NVIDIA GPU"
    if p.quantized:
        return "no FP8 output"
    if p.n > 65536:
        return f"hidden size {p.n} > 65536"
    return None


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute y = (x - mean) * rstd * gamma + bias, mean, rstd; x (M, N) -> (M, N) in x's dtype, (M,), (M,) float32.

    rmsnorm computes in float32 throughout (Liger's casting mode "gemma"). Liger's layernorm has neither option: without
    a bias zeros are added, and 1 is added to a zero-centred gamma first, in float32.
    """
    from liger_kernel.ops.layer_norm import layer_norm_forward
    from liger_kernel.ops.rms_norm import rms_norm_forward

    eps, zero_centered_gamma, kind = norm
    check(x, weight, bias, kind)
    if kind == "rmsnorm":
        y, _, rstd, *_ = rms_norm_forward(x, weight, eps, float(zero_centered_gamma), "gemma", None)
        return y, None, rstd
    gamma = weight.float() + 1 if zero_centered_gamma else weight
    y, _, mean, rstd, *_ = layer_norm_forward(x, gamma, torch.zeros_like(weight) if bias is None else bias, eps)
    return y, mean, rstd


def forward_quantized(*_arguments: object, **_options: object) -> NoReturn:
    raise ValueError("liger's norms have no FP8 output: use the norm `triton` or `reference`")


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, norm: Norm, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return dx (plus the residual, in a second pass), dweight, dbias; shapes and dtypes as in the contract."""
    from liger_kernel.ops.layer_norm import layer_norm_backward
    from liger_kernel.ops.rms_norm import rms_norm_backward
    from liger_kernel.ops.utils import calculate_settings

    _, zero_centered_gamma, kind = norm
    check(x, weight, None, kind)
    dbias = None
    if kind == "rmsnorm":
        columns, warps = calculate_settings(x.shape[1])
        gemma = 1  # Liger's number of the casting mode, for rms_norm_backward
        dx, dweight = rms_norm_backward(
            dy, x, weight, rstd, float(zero_centered_gamma), gemma, columns, warps, False, None
        )
    else:
        gamma = weight.float() + 1 if zero_centered_gamma else weight
        dx, dweight, dbias = layer_norm_backward(dy, x, gamma, weight, mean, rstd)
        dweight = dweight.to(weight.dtype)
    return dx if residual is None else dx.add_(residual), dweight, dbias


BACKEND = Backend(forward=forward, forward_quantized=forward_quantized, backward=backward, unsupported=unsupported)
