"""Liger-Kernel's fused linear cross-entropy: chunks of rows, gradients in the forward pass, dW summed up in float32.

Optional: `pip install liger-kernel`. A chunk's logits take about as much memory as the hidden states do. Its loss waits
for the GPU to count targets.
Source: liger-kernel 0.8.5, ops/fused_linear_cross_entropy.py.
"""

import importlib.util

import torch
from torch import Tensor

from te_bench.kernels.linear_cross_entropy import IGNORED, Backend, Problem, check


def unsupported(p: Problem) -> str | None:
    if p.device != "cuda":
        return "needs an NVIDIA GPU: Liger does not run on a CPU"
    return None if importlib.util.find_spec("liger_kernel") is not None else "pip install liger-kernel"


def forward(x: Tensor, weight: Tensor, targets: Tensor, *, vocab: int) -> Tensor:
    """Compute Backend.forward; Liger supports no padding, so padded rows are cut off first."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    check(x, weight, targets, vocab)
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    classes = weight if vocab == len(weight) else weight[:vocab]
    found: Tensor = liger_fused_linear_cross_entropy(
        x.to(dtype), classes.to(dtype), targets, ignore_index=IGNORED, accum_dtype=torch.float32
    )
    return found


def gemms(n: int, d: int, padded: int, itemsize: int, rounded: bool) -> tuple[int, int]:
    """Count the GEMMs: per chunk its logits and their two gradients."""
    rows = -(-n // -(-padded // d))
    rows = min(n, 1 << (rows - 1).bit_length())
    return 0, 3 * -(-n // rows)


BACKEND = Backend(
    forward=forward, unsupported=unsupported, kernels={"cuda": r"^liger_cross_entropy_kernel"}, gemms=gemms
)
