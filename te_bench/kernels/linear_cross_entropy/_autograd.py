"""What the chunked backends share: how the rows are cut up, and the autograd Function around their operators."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from te_bench.kernels.linear_cross_entropy import check

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# 3072 rows of GPT-2's 50304 columns in bf16, so that 12288 are four chunks. Fewer rows: dW, 155 MB in float32, is read and
# written more often, and dx has fewer tiles (3072 x 768: 144 of 128 x 128 for 132 processors). Reasoned, not measured.
LOGITS_BYTES = 300 * 2**20
ROWS_MULTIPLE = 128  # rows of a GEMM's tile


def chunk_rows(n: int, padded: int, itemsize: int) -> int:
    """Rows a chunk: as few chunks as LOGITS_BYTES of logits allow, of one size but for the last."""
    most = max(ROWS_MULTIPLE, LOGITS_BYTES // (padded * itemsize) // ROWS_MULTIPLE * ROWS_MULTIPLE)
    each = -(-n // -(-n // most)) if n else most
    return -(-each // ROWS_MULTIPLE) * ROWS_MULTIPLE


def slices(n: int, size: int) -> Iterator[slice]:
    """0..n in pieces of `size`, the last of what is left."""
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


class _LinearCrossEntropy(torch.autograd.Function):
    """The operator computes the gradients of the sum of the losses along with them; the backward pass scales them.

    Scaling at the end and not in the logits' gradient keeps that within [-1, 1]: divided by 12288 rows, float16 would lose
    it to underflow, and FP8 would need a scale that depends on the number of targets.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        operator: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]],
        settings: tuple[Any, ...],
        need_dx: bool,
        need_dw: bool,
    ) -> Tensor:
        loss, counted, dx, dw = operator(x, weight, targets, *settings, need_dx, need_dw)
        ctx.save_for_backward(counted, dx, dw)
        ctx.needs, ctx.dtypes = (need_dx, need_dw), (x.dtype, weight.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        counted, dx, dw = ctx.saved_tensors
        factor = dloss / counted.clamp(min=1)  # where every target is ignored the gradients are 0, and not 0 / 0
        scaled = (
            (sums * factor).to(dtype) if needed else None
            for sums, needed, dtype in zip((dx, dw), ctx.needs, ctx.dtypes, strict=True)
        )
        return *scaled, None, None, None, None, None


def fake(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab: int,
    dtype: torch.dtype,
    rows: int | None,
    strip: int | None,
    need_dx: bool,
    need_dw: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The shapes and dtypes of what the operators return."""
    loss, counted = x.new_empty((), dtype=torch.float32), targets.new_empty(())
    dx = x.new_empty(x.shape if need_dx else 0, dtype=torch.float32)
    return loss, counted, dx, x.new_empty(weight.shape if need_dw else 0, dtype=torch.float32)


def apply(
    operator: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]],
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab: int,
    rows: int | None,
    strip: int | None,
) -> Tensor:
    """The loss by operator(x, weight, targets, vocab, dtype, rows, strip, need_dx, need_dw) -> loss, counted, dx, dw.

    dtype is autocast's or x's; dx and dw, float32, are gradients of the sum of the losses, empty where not needed.
    Raises ValueError for what does not fit.
    """
    check(x, weight, targets, vocab)
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
    return _LinearCrossEntropy.apply(x, weight, targets, operator, (vocab, dtype, rows, strip), *needs)
