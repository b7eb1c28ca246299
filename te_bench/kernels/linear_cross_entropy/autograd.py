"""What the chunked backends share: how the rows are cut up, and the autograd Function around their operators."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from te_bench.kernels.autograd import once_differentiable
from te_bench.kernels.linear_cross_entropy import IGNORED, check, kernels

_autograd: Any = torch._C._autograd
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

ROWS_MULTIPLE = 128  # rows of a GEMM's tile
# Of classes: cuBLAS has slow kernels alone for rows that 16 bytes do not divide, such as GPT-2's 50257.
CLASSES_MULTIPLE = 64
# A bf16 dW is rounded once for each of so many chunks at most: of four it errs 1.7 times as much as of one (on an H200,
# 1000 x 256 x 5056), and the rule is twice as much as PyTorch.
MOST_CHUNKS = 4


def chunk_rows(n: int, padded: int, itemsize: int, budget: int) -> int:
    """Rows a chunk: as few chunks as `budget` bytes of (rows, padded) allow, aligned, of one size but for the last."""
    most = max(ROWS_MULTIPLE, budget // (padded_classes(padded) * itemsize) // ROWS_MULTIPLE * ROWS_MULTIPLE)
    each = -(-n // -(-n // most)) if n else most
    return -(-each // ROWS_MULTIPLE) * ROWS_MULTIPLE


def gradient_dtype(leaf: torch.dtype, products: torch.dtype) -> torch.dtype:
    """In which an operator returns the gradient of a leaf: bfloat16 of one in it, which GEMMs write, else float32."""
    return leaf if leaf is products is torch.bfloat16 else torch.float32


def sum_dtype(leaf: torch.dtype, products: torch.dtype, chunks: int) -> torch.dtype:
    """In which chunks are added up: that of the gradient, unless it is rounded and there are more than MOST_CHUNKS."""
    return gradient_dtype(leaf, products) if chunks <= MOST_CHUNKS else torch.float32


def padded_classes(classes: int) -> int:
    """As many as `aligned` makes of them."""
    return -(-classes // CLASSES_MULTIPLE) * CLASSES_MULTIPLE


def aligned(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """weight (V, D) as it is where GEMMs can take it on a GPU, else a copy in dtype with rows of padding, which are 0."""
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
    inverse = 1 / counted.clamp(min=1)  # where every target is ignored the gradients are 0, and not 0 / 0
    return torch.stack([counted, inverse, inverse / kernels.GRADIENT_SCALE])[:, None].expand(-1, 4).contiguous()


def mean(losses: Tensor, numbers: Tensor) -> Tensor:
    """`kernels.mean`, in plain PyTorch where no kernel runs."""
    if losses.is_cuda or kernels.INTERPRETED:
        return kernels.mean(losses, numbers)
    return losses.sum() / numbers[kernels.COUNTED, 0]


def slices(n: int, size: int) -> Iterator[slice]:
    """0..n in pieces of `size`, the last of what is left."""
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


class _LinearCrossEntropy(torch.autograd.Function):
    """The operator computes the mean loss's gradients along with it; the backward pass scales them by the loss's own."""

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
    """gradient * dloss in dtype: gradient itself, overwritten, where a kernel can do it and no other backward pass follows.

    dW, 155 MB of GPT-2's in float32, 1.1 GB of Llama-3-8B's in bf16, is then not read where dloss is 1, as it is but for a
    scaled or divided loss. The GPU decides, for nobody waits for it.
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
    """The shapes and dtypes of what the operators return."""
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
    """The loss by operator(x, weight, targets, vocab, dtype, rows, strip, leaf, need_dx, need_dw) -> loss, dx, dw.

    dtype is autocast's or x's, leaf weight's; dx and dw, of `gradient_dtype`, are the mean loss's gradients, empty where not
    needed. copy: what operator takes for weight, whose gradient it stays. Raises ValueError for what does not fit.
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
