"""Linear cross-entropy over chunks of rows, loss and gradients in one pass; the logits are never all in memory.

One GEMM makes a chunk's logits, one Triton kernel turns them into their gradient in place, and two GEMMs use that. The
forward pass computes loss and gradients, because the loss is a scalar: the backward pass multiplies by its gradient.
Nothing waits for the GPU, so a CUDA graph can capture it. On a CPU the kernel's formula runs in plain PyTorch.

Source: Hsu et al. 2024 (Liger Kernel, arXiv 2410.10989) for gradients in the forward pass; not for the chunks, for its rule
gives 256 rows at GPT-2's shapes.
"""

import torch
from torch import Tensor

from te_bench.kernels.gemm import half
from te_bench.kernels.linear_cross_entropy import Backend, Problem, kernels
from te_bench.kernels.linear_cross_entropy.autograd import (
    MOST_CHUNKS,
    ROWS_MULTIPLE,
    apply,
    chunk_rows,
    count,
    fake,
    gradient_dtype,
    mean,
    slices,
    sum_dtype,
)
from te_bench.kernels.linear_cross_entropy.backends import reference
from te_bench.kernels.operators import define

# Size of a chunk's logits: 6144 rows of GPT-2's 50304 columns in bf16, so that 12288 are two chunks; 2048 of Llama-3's
# 128256, so that 8192 are four. With more chunks dW is read and written more often, and dx has fewer tiles.
LOGITS_BYTES = 600 * 2**20
# A bf16 dW from more than MOST_CHUNKS chunks is summed in float32 and rounded, 6 bytes an element. Up to this many rows
# per column of x, MOST_CHUNKS chunks need less memory: dW's 2 bytes and 2 Vp N / 4 bytes of logits.
ROWS_A_COLUMN = 8


def unsupported(p: Problem) -> str | None:
    if p.capability is not None and p.capability < (8, 0) and p.dtype == "bf16":
        return f"bf16 needs compute capability 8.0, this GPU has {p.capability[0]}.{p.capability[1]}"
    return None


def forward(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab: int,
    rows: int | None = None,
    strip: int | None = None,
    copy: Tensor | None = None,
) -> Tensor:
    """Compute mean_i CE(x_i W^T, t_i) in nats; x (N, D), weight (Vp, D), targets (N,) int64 -> () float32.

    It computes in autocast's dtype or x's: logits and their gradient are rounded to it, a chunk's sums are float32. dx
    is rounded once, to x's dtype; dW once or, for a bf16 weight and at most four chunks, once per chunk. The backward
    pass rounds both again if the loss's own gradient is no power of two. A target of -1 is ignored; any other target
    outside the vocabulary makes the loss NaN, because an error would have to wait for the GPU.
    rows: of a chunk, whose logits are in memory at once (default: about 600 MiB of them, or a fourth of all rows if a
    bf16 dW then needs less memory); strip: rows whose logits are made and used before the next (default: the whole
    chunk). Both affect only the order of sums, and how often dW is rounded. copy: the weight, already rounded, for the
    GEMMs; the gradient is weight's. Raises ValueError for inputs that do not fit; no second derivatives.
    """
    return apply(torch.ops.te_bench.linear_cross_entropy, x, weight, targets, vocab, rows, strip, copy)


def rows_of(n: int, d: int, padded: int, itemsize: int, *, rounded: bool) -> int:
    """Return the rows of a chunk of n; rounded: dW is bf16."""
    rows = chunk_rows(n, padded, itemsize, LOGITS_BYTES)
    if rounded and n <= ROWS_A_COLUMN * d:
        rows = max(rows, -(-n // (MOST_CHUNKS * ROWS_MULTIPLE)) * ROWS_MULTIPLE)
    return min(rows, max(n, 1))


def gemms(n: int, d: int, padded: int, itemsize: int, rounded: bool) -> tuple[int, int]:
    """Count the GEMMs: per chunk its logits and their two gradients."""
    return 0, 3 * len(list(slices(n, rows_of(n, d, padded, itemsize, rounded=rounded))))


def _compute(
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
    """Return the mean loss and its gradients, empty if not needed; leaf: dtype of the weight that gets dW."""
    with torch.autocast(x.device.type, enabled=False):
        (n, d), padded = x.shape, weight.shape[0]
        made = gradient_dtype(leaf, dtype)
        rows = min(rows or rows_of(n, d, padded, dtype.itemsize, rounded=made is not torch.float32), max(n, 1))
        losses = x.new_empty(n, dtype=torch.float32)
        dx = x.new_empty((n, d) if need_dx else 0, dtype=gradient_dtype(x.dtype, dtype))
        dw = x.new_empty((padded, d) if need_dw else 0, dtype=sum_dtype(leaf, dtype, -(-n // rows)))
        x, weight, targets = x.to(dtype), weight.to(dtype), targets.contiguous()
        buffer = x.new_empty(rows, padded)
        numbers = count(targets)
        inverse = numbers[kernels.INVERSE, 0]
        # Divided by 12288 rows, float16 gradients of the logits would underflow: divide the results instead.
        late = dtype is torch.float16
        factor = (torch.ones_like(inverse) if late else inverse) if need_dx or need_dw else None
        for chunk in slices(n, rows):
            x_chunk, logits = x[chunk], buffer[: chunk.stop - chunk.start]
            for part in slices(len(logits), strip or rows):
                half.multiply(x_chunk[part], weight, out=logits[part])
                _rows(logits[part], targets[chunk][part], losses[chunk][part], vocab, factor)
            if need_dx:
                _product(logits, weight, dx[chunk], accumulate=False)
            if need_dw:
                _product(logits.t(), x_chunk, dw, accumulate=chunk.start > 0)
        if n == 0:
            dw.zero_()
        if late:
            dx.mul_(inverse)
            dw.mul_(inverse)
        return mean(losses, numbers), dx, dw.to(made)


define("linear_cross_entropy", _compute, fake)


def _rows(logits: Tensor, targets: Tensor, losses: Tensor, vocab: int, factor: Tensor | None) -> None:
    """Write -log p_t to losses; with a factor, (p - onehot(t)) * factor to logits, in place."""
    if logits.is_cuda or kernels.INTERPRETED:
        kernels.rows(logits, targets, losses, vocab, factor)
        return
    plain_losses, gradient = reference.rows(logits, targets, vocab)
    losses.copy_(plain_losses)
    if factor is not None:
        logits.copy_(gradient * factor)


def _product(a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool) -> None:
    """Write a @ b to out, or add it if `accumulate`; a (M, K), b (K, N) of one dtype, out (M, N) of it or float32."""
    if a.dtype is out.dtype or not a.is_cuda:  # out_dtype works only on CUDA (torch 2.13)
        a, b = a.to(out.dtype), b.to(out.dtype)
        if accumulate:
            torch.addmm(out, a, b, out=out)
        else:
            torch.mm(a, b, out=out)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


BACKEND = Backend(
    forward=forward,
    unsupported=unsupported,
    copied=True,
    kernels={"cuda": r"^rows_kernel$", "cpu": r"^te_bench::linear_cross_entropy$"},
    gemms=gemms,
)
