"""Liger-Kernel's fused cross-entropy, an optional rival: `pip install liger-kernel`.

Its one kernel overwrites the logits with their gradient in the forward pass. It waits for the GPU twice, once to count the
targets that are not ignored and once to compare the loss's gradient with 1, so a CUDA graph can't capture it; the loss is
of the logits' dtype. Written against liger-kernel 0.8.5, transformers/functional.py.
"""

import importlib.util

import torch
from torch import Tensor

from te_bench.kernels.cross_entropy import Backend, Problem


def unsupported(p: Problem) -> str | None:
    if importlib.util.find_spec("liger_kernel") is None:
        return "pip install liger-kernel"
    if p.device != "cuda":
        return "needs an NVIDIA GPU"
    return None


def forward(logits: Tensor, targets: Tensor, *, vocab: int) -> Tensor:
    """Return the mean loss in nats; logits (N, Vp) of any float dtype, targets (N,) int64 -> (). -1 is ignored.

    Liger supports no padding: its columns are set to -inf first, hidden from autograd as in the reference, so that the
    kernel leaves gradients of exactly 0. The logits must not be a leaf, because they are overwritten.
    """
    from liger_kernel.transformers.functional import liger_cross_entropy

    if vocab < logits.shape[-1]:
        with torch.no_grad():
            logits[:, vocab:] = float("-inf")
    with torch.cuda.device(logits.get_device()):  # Triton launches on the current device; Dynamo lacks device_of
        return liger_cross_entropy(logits, targets, ignore_index=-1)


BACKEND = Backend(forward=forward, unsupported=unsupported)
