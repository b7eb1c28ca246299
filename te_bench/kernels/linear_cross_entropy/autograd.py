"""Shared code of the chunked backends: chunk sizes, and the autograd Function around their operators."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from te_bench.kernels.autograd import once_differentiable
from te_bench.kernels.linear_cross_entropy import IGNORED, check, kernels

_autograd: Any = torch._C._autograd
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

ROWS_MULTIPLE = 128  # rows of a GEMM's tile
# Multiple of classes: cuBLAS is slow for rows that are no multiple of 16 bytes, such as GPT-2's 50257.
CLASSES_MULTIPLE = 64
# A bf16 dW is rounded once per chunk, for at most this many: with four its error is 1.7 times that with one (H200, 1000
# x 256 x 5056); the error rule allows twice PyTorch's.
MOST_CHUNKS = 4


def chunk_rows(n: int, padded: int, itemsize: int, budget: int) -> int:
    """Return the rows of a chunk: the fewest chunks that `budget` bytes of (rows, padded) allow, aligned."""
    most = max(ROWS_MULTIPLE, budget // (padded_classes(padded) * itemsize) // ROWS_MULTIPLE * ROWS_MULTIPLE)
    each = -(-n // -(-n // most)) if n else most
    return -(-each // ROWS_MULTIPLE) * ROWS_MULTIPLE


def gradient_dtype(leaf: torch.dtype, products: torch.dtype) -> torch.dtype:
    """Return the dtype of an operator's gradient for a leaf: bfloat16 for bfloat16, which GEMMs write, else float32."""
    return leaf if leaf is products is torch.bfloat16 else torch.float32


def sum_dtype(leaf: torch.dtype, products: torch.dtype, chunks: int) -> torch.dtype:
    """Return the dtype in which chunks are summed: the gradient's, but float32 for more than MOST_CHUNKS."""
    return gradient_dtype(leaf, products) if chunks <= MOST_CHUNKS else torch.float32


def padded_classes(classes: int) -> int:
    """Return the number of classes padded as by `aligned`."""
    return -(-classes // CLASSES_MULTIPLE) * CLASSES_MULTIPLE


def aligned(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return weight (V, D) if GEMMs on a GPU support it, else a copy in dtype padded with zero rows."""
    classes, d = weight.shape
    if padded_classes(classes) == classes or not (weight.is_cuda or kernels.INTERPRETED):
        return weight
    wide = weight.new_empty(padded_classes(classes), d, dtype=dtype)
    wide[:classes] = weight
    wide[classes:] = 0
    return wide


def count(targets: Tensor) -> Tensor:
    """`kernels.count`, in plain PyTorch where no kernel runs."""
    if targets.is_cuda or kernels.INTERPRETED:
        return kernels.count(targets)
    counted = (targets != IGNORED).sum().float()
    inverse = 1 / counted.clamp(min=1)  # if every target is ignored the gradients are 0, not 0 / 0
    return torch.stack([counted, inverse, inverse / kernels.GRADIENT_SCALE])[:, None].expand(-1, 4).contiguous()


def mean(losses: Tensor, numbers: Tensor) -> Tensor:
    """`kernels.mean`, in plain PyTorch where no kernel runs."""
    if losses.is_cuda or kernels.INTERPRETED:
        return kernels.mean(losses, numbers)
    return losses.sum() / numbers[kernels.COUNTED, 0]


def slices(n: int, size: int) -> Iterator[slice]:
    """Split 0..n into pieces of `size`; the last is what remains."""
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


class _LinearCrossEntropy(torch.autograd.Function):
    """The operator computes the mean loss with its gradients; the backward pass scales them by the loss's own."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        operator: Callable[..., tuple[Tensor, Tensor, Tensor]],
        settings: tuple[Any, ...],
        need_dx: bool,
        need_dw: bool,
        copy: Tensor | None,
    ) -> Tensor:
        used = aligned(weight if copy is None else copy, settings[1])
        loss, dx, dw = operator(x, used, targets, *settings, weight.dtype, need_dx, need_dw)
        ctx.save_for_backward(dx, dw[: len(weight)])
        ctx.needs, ctx.dtypes = (need_dx, need_dw), (x.dtype, weight.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (
            _scaled(gradient, dloss, dtype) if needed else None
            for gradient, needed, dtype in zip(ctx.saved_tensors, ctx.needs, ctx.dtypes, strict=True)
        )
        return *scaled, None, None, None, None, None, None


def _scaled(gradient: Tensor, dloss: Tensor, dtype: torch.dtype) -> Tensor:
    """Return gradient * dloss in dtype; in place if a kernel can and no other backward pass follows.

    Then dW (155 MB for GPT-2 in float32, 1.1 GB for Llama-3-8B in bf16) is not read if dloss is 1, as for an unscaled
    loss. The GPU checks that, so nobody waits for it.
    """
    if torch.compiler.is_compiling() or not (gradient.is_cuda or kernels.INTERPRETED):
        return (gradient * dloss).to(dtype)
    again = dtype is not gradient.dtype or _autograd._get_current_graph_task_keep_graph()
    out = torch.empty_like(gradient, dtype=dtype) if again else gradient
    kernels.scale(gradient, dloss, out)
    return out


def fake(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab: int,
    dtype: torch.dtype,
    rows: int | None,
    strip: int | None,
    leaf: torch.dtype,
    need_dx: bool,
    need_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the operators' results as fake tensors."""
    loss = x.new_empty((), dtype=torch.float32)
    dx = x.new_empty(x.shape if need_dx else 0, dtype=gradient_dtype(x.dtype, dtype))
    return loss, dx, x.new_empty(weight.shape if need_dw else 0, dtype=gradient_dtype(leaf, dtype))


def apply(
    operator: Callable[..., tuple[Tensor, Tensor, Tensor]],
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab: int,
    rows: int | None,
    strip: int | None,
    copy: Tensor | None,
) -> Tensor:
    """Compute the loss by operator(x, weight, targets, vocab, dtype, rows, strip, leaf, need_dx, need_dw), with dx, dw.

    dtype is autocast's or x's, leaf weight's; dx and dw, of `gradient_dtype`, are the mean loss's gradients, empty if
    not needed. copy: used in weight's place, which gets the gradient. Raises ValueError if inputs do not fit.
    """
    check(x, weight, targets, vocab)
    if copy is not None and copy.shape != weight.shape:
        raise ValueError(f"copy {tuple(copy.shape)} of a weight {tuple(weight.shape)}: it must be of the same shape")
    kind = x.device.type
    autocast = torch.is_autocast_enabled(kind)
    if x.dtype not in FLOATS or weight.dtype not in FLOATS or (x.dtype != weight.dtype and not autocast):
        raise ValueError(
            f"x of {x.dtype} and weight of {weight.dtype}: one of float32, bfloat16, float16, or any under torch.autocast"
        )
    for name, value in (("rows", rows), ("strip", strip)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: at least 1, or None for the default")
    dtype = torch.get_autocast_dtype(kind) if autocast else x.dtype
    training = torch.is_grad_enabled()
    needs = training and x.requires_grad, training and weight.requires_grad
    copy = None if copy is None else copy.detach()
    return _LinearCrossEntropy.apply(x, weight, targets, operator, (vocab, dtype, rows, strip), *needs, copy)
