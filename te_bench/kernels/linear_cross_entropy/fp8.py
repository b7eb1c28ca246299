"""Linear cross-entropy with all three GEMMs in FP8: x and W in E4M3 by their own amax, the logits' gradient in E5M2.

As `chunked`, but the gradient of the logits leaves its kernel as E5M2 in both layouts, for the GEMM that contracts the
vocabulary and for the one that contracts the rows. Its scale needs no amax: |softmax - onehot| <= 1. The bf16 logits of a
strip are gone when the next strip's are made. On a CPU kernels and GEMMs are emulated.

Source: Micikevicius et al. 2022 (FP8 formats for deep learning) for E4M3 forward and E5M2 backward.
"""

import torch
from torch import Tensor

from te_bench.kernels import quantize
from te_bench.kernels.gemm import reference as gemm_reference
from te_bench.kernels.gemm import scaled_mm
from te_bench.kernels.linear_cross_entropy import IGNORED, Backend, Problem, _kernels, reference
from te_bench.kernels.linear_cross_entropy._autograd import apply, chunk_rows, fake, slices
from te_bench.kernels.quantize import Quantized

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# 256 rows of 50304 bf16 logits, 26 MB, are read twice while they are still in L2 (50 MB on an H200), and the 394 tiles of
# 128 x 256 of their GEMM are three waves, less two tiles, of 132 processors. Reasoned, not measured.
STRIP = 256


def unsupported(p: Problem) -> str | None:
    if p.capability is not None and p.capability < (8, 9):
        return f"FP8 needs compute capability 8.9, this GPU has {p.capability[0]}.{p.capability[1]}"
    return None


def forward(
    x: Tensor, weight: Tensor, targets: Tensor, *, vocab: int, rows: int | None = None, strip: int | None = None
) -> Tensor:
    """mean_i CE(q(x)_i q(W)^T, t_i) in nats; x (N, D), weight (Vp, D), targets (N,) int64 -> () float32.

    q is E4M3 with one scale per tensor; logits are bf16. dx = g q(W) and dW = g^T q(x), g = E5M2(softmax - onehot), in
    float32, then rounded once to the dtypes of x and weight. targets, rows and errors are those of `chunked`, and so is
    strip, but for its default of 256 rows.
    """
    return apply(torch.ops.te_bench.linear_cross_entropy_fp8, x, weight, targets, vocab, rows, strip)


@torch.library.custom_op("te_bench::linear_cross_entropy_fp8", mutates_args=())
def _operator(
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
    """The mean loss, how many targets count, and the gradients of the losses' sum in float32, empty where not needed."""
    with torch.autocast(x.device.type, enabled=False):
        (n, d), padded, targets = x.shape, weight.shape[0], targets.contiguous()
        rows = min(rows or chunk_rows(n, padded, 2), max(n, 1))
        qx, qw = _quantized(x, weight, need_dx)
        losses = x.new_empty(n, dtype=torch.float32)
        dx = x.new_empty((n, d) if need_dx else 0, dtype=torch.float32)
        dw = x.new_empty(0, dtype=torch.float32)
        g_scale_inv = torch.full((), 1 / _kernels.GRADIENT_SCALE, device=x.device)
        for chunk in slices(n, rows):
            height, x_data = chunk.stop - chunk.start, qx.data[chunk]
            g = x.new_empty((height, padded), dtype=E5M2) if need_dx else None
            g_t = x.new_empty((padded, height), dtype=E5M2) if need_dw else None
            for part in slices(height, strip or STRIP):
                logits = _gemm(x_data[part], qw.data, qx.scale_inv, qw.scale_inv, torch.bfloat16)
                _rows(logits, targets[chunk][part], losses[chunk][part], vocab, g, g_t, part.start)
                del logits  # or the next strip's would be made beside them
            if g is not None:
                dx[chunk] = _gemm(g, qw.data_t, g_scale_inv, qw.scale_inv_t, torch.float32)
            if g_t is not None:
                x_t = x_data.view(torch.uint8).t().contiguous().view(E4M3)
                share = _gemm(g_t, x_t, g_scale_inv, qx.scale_inv, torch.float32)
                dw = dw.add_(share) if chunk.start else share  # torch's FP8 GEMM cannot add to what is there
        if need_dw and n == 0:
            dw = x.new_zeros((padded, d), dtype=torch.float32)
        counted = (targets != IGNORED).sum()
        return losses.sum() / counted, counted, dx, dw


_operator.register_fake(fake)


def _quantized(x: Tensor, weight: Tensor, need_dx: bool) -> tuple[Quantized, Quantized]:
    """x rowwise, weight rowwise and, for dx, columnwise, in E4M3 by their own amax."""
    cast = quantize.load("triton" if x.is_cuda else "reference").tensor
    # By way of bf16: that halves what the two passes read, and float32 is not transposed in the quantiser's kernel.
    x, weight = (t.to(torch.bfloat16) if t.dtype is torch.float32 else t for t in (x, weight))
    return cast(x, E4M3, rowwise=True, columnwise=False), cast(weight, E4M3, rowwise=True, columnwise=need_dx)


def _gemm(a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a (M, K) b (N, K)^T; the logits, of K = D, by fast accumulation, the gradients, of long sums, without."""
    multiply = scaled_mm.forward if a.is_cuda else gemm_reference.forward
    return multiply(a, b, a_scale_inv, b_scale_inv, out_dtype=out_dtype, fast_accum=out_dtype is torch.bfloat16)


def _rows(
    logits: Tensor, targets: Tensor, losses: Tensor, vocab: int, g: Tensor | None, g_t: Tensor | None, first: int
) -> None:
    """losses := -log p_t; g's rows and g_t's columns from `first` on := E5M2(p - onehot(t)) by GRADIENT_SCALE."""
    if logits.is_cuda or _kernels.INTERPRETED:
        _kernels.fp8_rows(logits, targets, losses, vocab, g, g_t, first)
        return
    plain_losses, gradient = reference.rows(logits, targets, vocab)
    losses.copy_(plain_losses)
    packed = (gradient.bfloat16().float() * _kernels.GRADIENT_SCALE).to(E5M2)
    part = slice(first, first + len(logits))
    if g is not None:
        g[part] = packed
    if g_t is not None:
        g_t[:, part] = packed.t()


BACKEND = Backend(forward=forward, unsupported=unsupported)
