"""Linear cross-entropy with all three GEMMs in FP8: x and W in E4M3 by their own amax, the logits' gradient in E5M2.

It works as `chunked`, but writes the logits' gradient as E5M2 in both layouts, for the GEMMs that contract the
vocabulary and the rows. Its scale needs no amax: |softmax - onehot| <= 1. The bf16 logits exist for part of a strip at
a time, the gradient for dx for a strip. The gradient for dW is kept for a chunk of many strips, because torch's FP8
GEMM cannot accumulate into dW. With a single chunk, dW is allocated after both layouts of W are freed. On a CPU kernels
and GEMMs are emulated.

Source: Micikevicius et al. 2022 (FP8 formats for deep learning) for E4M3 forward and E5M2 backward.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from te_bench.kernels import architecture, quantize
from te_bench.kernels.gemm import policy
from te_bench.kernels.gemm.backends import reference as gemm_reference
from te_bench.kernels.gemm.backends import scaled_mm
from te_bench.kernels.linear_cross_entropy import Backend, Problem, kernels
from te_bench.kernels.linear_cross_entropy.autograd import (
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
from te_bench.kernels.quantize import TENSOR, Layout, Operand, Quantized

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENT = Layout(E5M2, TENSOR, torch.float32)

# Bytes of all bf16 logits of a strip: 3072 rows of GPT-2's 50304 columns. With fewer, dx has too few tiles
# (benchmarks/NOTES.md); the logits, with 393 columns of tiles, need only 1536 rows at a time.
STRIP_BYTES, LOGITS_BYTES = 300 * 2**20, 150 * 2**20
# Bytes of E5M2 for dW per chunk: 12288 rows of 50304. Each further chunk adds 155 MB. A chunk may use as much as W in
# both layouts, and a single one as much as dW, which replaces them: 8192 rows of 128256 x 4096 (Llama-3-8B) in bf16, of
# 128256 x 2048 in float32. Two chunks of the latter would read and write dW again, and take 2.38 instead of 1.96 GiB.
CHUNK_BYTES = 600 * 2**20
# Bytes of float32 that a further chunk adds to dW at a time; most of them are still in the L2.
SHARE_BYTES = 64 * 2**20


def unsupported(p: Problem) -> str | None:
    return architecture.lacks_fp8(p.capability)


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
    """Compute mean_i CE(q(x)_i q(W)^T, t_i) in nats; x (N, D), weight (Vp, D), targets (N,) int64 -> () float32.

    q is E4M3 with one scale per tensor; logits are bf16. dx = g q(W) and dW = g^T q(x), g = E5M2(softmax - onehot), in
    float32, then rounded as `chunked`'s to the dtypes of x and weight. targets, errors and copy are as in `chunked`.
    rows: how many rows of g^T are in memory at once (default: about 600 MiB, or as much as q(W) takes in both layouts;
    all, if that is at most dW's size); strip: how many rows of g are (default: about 150 MiB); logits exist for at most
    as many rows, and at most about 150 MiB.
    """
    return apply(torch.ops.te_bench.linear_cross_entropy_fp8, x, weight, targets, vocab, rows, strip, copy)


def _cut(
    n: int, d: int, padded: int, rows: int | None = None, strip: int | None = None, *, itemsize: int
) -> tuple[int, int, int]:
    """Return the rows of a chunk, of a strip, and of the logits made at once; itemsize: of dW."""
    columns = d * (itemsize if n <= itemsize * d else 2)
    rows = min(rows or chunk_rows(n, padded, 1, max(CHUNK_BYTES, columns * padded)), max(n, 1))
    strip = min(strip or chunk_rows(rows, padded, 2, STRIP_BYTES), rows)
    return rows, strip, chunk_rows(strip, padded, 2, LOGITS_BYTES)


def _shares(d: int, padded: int) -> Iterator[slice]:
    """Yield the slices of dW's classes that are added at a time, whole tiles each."""
    return slices(padded, max(ROWS_MULTIPLE, SHARE_BYTES // (4 * d) // ROWS_MULTIPLE * ROWS_MULTIPLE))


def gemms(n: int, d: int, padded: int, itemsize: int, rounded: bool) -> tuple[int, int]:
    """Count the GEMMs: logits, a strip's dx and a chunk's dW, which after the first chunk goes by slices of classes."""
    rows, strip, most = _cut(n, d, padded, itemsize=2 if rounded else 4)
    chunks = [chunk.stop - chunk.start for chunk in slices(n, rows)]
    strips = [part.stop - part.start for height in chunks for part in slices(height, strip)]
    shares = 1 + (len(chunks) - 1) * len(list(_shares(d, padded)))
    return sum(len(list(slices(height, most))) for height in strips) + len(strips) + shares, 0


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
        (n, d), padded, targets = x.shape, weight.shape[0], targets.contiguous()
        rows, strip, most = _cut(n, d, padded, rows, strip, itemsize=gradient_dtype(leaf, dtype).itemsize)
        qx, *qw = _quantized(x, weight, need_dx, need_dw)
        x_rows = qx.by_rows()
        numbers = count(targets)
        # The gradient's scale and the mean are one factor of the GEMMs.
        g_scale_inv = numbers[kernels.SCALED, 0]
        losses = x.new_empty(n, dtype=torch.float32)
        dx = x.new_empty((n, d) if need_dx else 0, dtype=gradient_dtype(x.dtype, dtype))
        dw = x.new_empty(0, dtype=sum_dtype(leaf, dtype, -(-n // rows)))
        g = x.new_empty((strip, padded), dtype=E5M2) if need_dx else None
        for chunk in slices(n, rows):
            height = chunk.stop - chunk.start
            g_t = x.new_empty((padded, height), dtype=E5M2) if need_dw else None
            for start in range(chunk.start, chunk.stop, strip):
                part = slice(start, min(start + strip, chunk.stop))
                g_part = None if g is None else g[: part.stop - start]
                for some in slices(part.stop - start, most):
                    here = slice(start + some.start, start + some.stop)
                    logits = _gemm(x_rows._replace(data=qx.data[here]), qw[0].by_rows(), torch.bfloat16)
                    g_some = None if g_part is None else g_part[some]
                    _rows(logits, targets[here], losses[here], vocab, g_some, g_t, here.start - chunk.start)
                    del logits  # free them before the next are made
                if g_part is not None:
                    _gemm_into(dx[part], Operand(g_part, g_scale_inv, GRADIENT), qw[0].by_columns())
            if chunk.stop == n:
                qw.clear()  # dW takes their place
                del g, g_part, g_some
            if g_t is not None:
                x_t = qx.by_columns()._replace(data=_columns(qx.data_t, chunk))
                if chunk.start == 0:
                    dw = dw.new_empty(padded, d)
                    _gemm_into(dw, Operand(g_t, g_scale_inv, GRADIENT), x_t)
                else:
                    for some in _shares(d, padded):
                        dw[some] += _gemm(Operand(g_t[some], g_scale_inv, GRADIENT), x_t, torch.float32)
            del g_t  # free it before the next chunk's is made
        if need_dw and n == 0:
            dw = dw.new_zeros(padded, d)
        return mean(losses, numbers), dx, dw.to(gradient_dtype(leaf, dtype))


define("linear_cross_entropy_fp8", _compute, fake)


def _quantized(x: Tensor, weight: Tensor, need_dx: bool, need_dw: bool) -> tuple[Quantized, Quantized]:
    """Cast x and weight to E4M3 by their own amax: rowwise, and columnwise x for dW and weight for dx."""
    cast = quantize.load("triton" if x.is_cuda else "reference").quantize
    # Through bf16: it halves what both passes read, and the quantiser's kernel does not transpose float32.
    x, weight = (t.to(torch.bfloat16) if t.dtype is torch.float32 else t for t in (x, weight))
    return cast(x, E4M3, rowwise=True, columnwise=need_dw), cast(weight, E4M3, rowwise=True, columnwise=need_dx)


def _gemm(a: Operand, b: Operand, out_dtype: torch.dtype) -> Tensor:
    """Compute a (M, K) b (N, K)^T; logits (K = D) with fast accumulation, gradients (long sums) without."""
    multiply = policy.forward if a.data.is_cuda else gemm_reference.forward
    return multiply(a, b, out_dtype=out_dtype, fast_accum=out_dtype is torch.bfloat16)


def _gemm_into(out: Tensor, a: Operand, b: Operand) -> None:
    """Write a (M, K) b (N, K)^T to out (M, N), without a copy if cuBLASLt supports the shapes."""
    x, y = a.data, b.data
    aligned = not (x.shape[1] % scaled_mm.ALIGNMENT or y.shape[0] % scaled_mm.ALIGNMENT)
    if x.is_cuda and aligned:
        torch._scaled_mm(x, y.t(), a.scale_inv, b.scale_inv, out_dtype=out.dtype, use_fast_accum=False, out=out)
    else:
        out.copy_(_gemm(a, b, torch.float32))


def _columns(x_t: Tensor, chunk: slice) -> Tensor:
    """Return x_t (D, N) at a chunk's columns, contiguous."""
    # Copy bytes, because not every device copies FP8.
    return x_t if chunk == slice(0, x_t.shape[1]) else x_t.view(torch.uint8)[:, chunk].contiguous().view(E4M3)


def _rows(
    logits: Tensor, targets: Tensor, losses: Tensor, vocab: int, g: Tensor | None, g_t: Tensor | None, first: int
) -> None:
    """Write -log p_t to losses, and scaled E5M2(p - onehot(t)) to g (N, Vp) and g_t's columns from `first` on."""
    if logits.is_cuda or kernels.INTERPRETED:
        kernels.fp8_rows(logits, targets, losses, vocab, g, g_t, first)
        return
    plain_losses, gradient = reference.rows(logits, targets, vocab)
    losses.copy_(plain_losses)
    packed = (gradient * kernels.GRADIENT_SCALE).to(E5M2)
    if g is not None:
        g.copy_(packed)
    if g_t is not None:
        g_t[:, first : first + len(logits)] = packed.t()


BACKEND = Backend(
    forward=forward,
    unsupported=unsupported,
    copied=True,
    kernels={"cuda": r"^fp8_kernel$", "cpu": r"^te_bench::linear_cross_entropy_fp8$"},
    gemms=gemms,
)
