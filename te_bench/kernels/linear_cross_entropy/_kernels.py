# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The Triton kernels that turn logits into losses and into the logits' gradient, and their launchers.

Bound by memory. One program has a row and reads it twice: 50304 columns of bf16 are 100 KB, and the 264 rows that an H200's
132 processors have in flight (two programs of 1024 threads each) 27 MB, so that the second read finds them in the 50 MB of
L2; four programs of 512 threads would have 53 MB in flight. Each thread keeps the maximum and the sum of what it saw: no
barrier until the row's end. Rows and, the second time, columns are taken from last to first: what was written last is
still in L2. The alternative, a row in 64 registers of 1024 threads (BLOCK 65536), leaves one program a processor, which
loads while nobody computes. Registers for sm_90a, Triton 3.7: 28, nothing spilt; speeds are not measured yet.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels._epilogue import FLOATS, quantize_tile, rounded
from te_bench.kernels._launch import launch, traits

INTERPRETED: bool = triton.knobs.runtime.interpret
BLOCK, WARPS = 8192, 32
TOGETHER = tl.constexpr(8)  # columns that a thread loads at once: 16 bytes of bf16
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(
    -2e38
)  # of a thread that saw nothing: -inf - -inf would be NaN, and times LOG2_E it must not overflow

# |softmax - onehot| <= 1, so that 2^15 takes it to at most 32768, in the last of E5M2's binades (its largest is 57344).
GRADIENT_SCALE = 2.0**15
ROWS, COLUMNS = 128, 64  # tile of the FP8 kernel, that of te_bench.kernels.quantize
TILE = {"SCALE": GRADIENT_SCALE, "ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": 8}


@triton.jit
def _columns(start, BLOCK: tl.constexpr):
    """(BLOCK / 8, 8) columns: 8 neighbours in each thread."""
    return start + tl.arange(0, BLOCK // TOGETHER)[:, None] * TOGETHER + tl.arange(0, TOGETHER)[None, :]


@triton.jit
def _load(z, cols, vocab, padded):
    """z at cols in float32, -inf in the padding."""
    # The mask of the load ends at padded, a multiple of 8: one that ends at vocab, 50257, would load 2 bytes at a time.
    v = tl.load(z + cols, mask=cols < padded, other=0.0).to(tl.float32)
    return tl.where(cols < vocab, v, float("-inf"))


@triton.jit
def _statistics(z, vocab, padded, BLOCK: tl.constexpr):
    """max z and sum exp(z - max z) over the first `vocab` of a row."""
    largest = tl.full((BLOCK // TOGETHER,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK // TOGETHER,), tl.float32)
    for start in tl.range(0, padded, BLOCK):
        v = _load(z, _columns(start, BLOCK), vocab, padded)
        above = tl.maximum(largest, tl.max(v, 1))
        total = total * tl.exp2((largest - above) * LOG2_E) + tl.sum(tl.exp2((v - above[:, None]) * LOG2_E), 1)
        largest = above
    row_largest = tl.max(largest)
    return row_largest, tl.sum(total * tl.exp2((largest - row_largest) * LOG2_E))


@triton.jit
def _loss(z_target, target, largest, total, vocab):
    """-log softmax at the target, 0 where that is ignored, and 1 / total; both NaN where it is not in the vocabulary."""
    # (largest - z_target) first: added to largest alone, log(total) would lose its digits.
    loss = tl.where(target == -1, 0.0, tl.log(total) + (largest - z_target))
    illegal = (target < -1) | (target >= vocab)
    return tl.where(illegal, float("nan"), loss), tl.where(illegal, float("nan"), tl.div_rn(1.0, total))


@triton.jit
def _target_logit(z, target, vocab):
    return tl.load(z + target, mask=(target >= 0) & (target < vocab), other=0.0).to(tl.float32)


@triton.jit
def rows_kernel(
    logits, targets, losses, vocab, padded, GRADIENT: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr
):
    """losses[row] = -log p_t; with GRADIENT logits[row] := p - onehot(t), 0 in the padding and where t is ignored."""
    row = tl.num_programs(0) - 1 - tl.program_id(0)
    z = logits + row.to(tl.int64) * padded
    target = tl.load(targets + row)
    z_target = _target_logit(z, target, vocab)
    largest, total = _statistics(z, vocab, padded, BLOCK)
    loss, inverse = _loss(z_target, target, largest, total, vocab)
    tl.store(losses + row, loss)
    if GRADIENT:
        blocks = tl.cdiv(padded, BLOCK)
        for block in tl.range(0, blocks):
            cols = _columns((blocks - 1 - block) * BLOCK, BLOCK)
            v = _load(z, cols, vocab, padded)
            g = tl.exp2((v - largest) * LOG2_E) * inverse - (cols == target).to(tl.float32)
            g = tl.where((cols < vocab) & (target != -1), g, 0.0)
            tl.store(z + cols, rounded(g, DTYPE), mask=cols < padded)


@triton.jit
def statistics_kernel(logits, targets, losses, statistics, vocab, padded, BLOCK: tl.constexpr):
    """losses[row] = -log p_t; statistics[row] = max z, 1 / sum exp(z - max z)."""
    row = tl.num_programs(0) - 1 - tl.program_id(0)
    z = logits + row.to(tl.int64) * padded
    target = tl.load(targets + row)
    z_target = _target_logit(z, target, vocab)
    largest, total = _statistics(z, vocab, padded, BLOCK)
    loss, inverse = _loss(z_target, target, largest, total, vocab)
    tl.store(losses + row, loss)
    tl.store(statistics + 2 * row, largest)
    tl.store(statistics + 2 * row + 1, inverse)


@triton.jit
def fp8_kernel(
    logits,
    targets,
    statistics,
    data,
    data_t,
    rows,
    first,
    height,
    vocab,
    padded,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of e5m2((p - onehot(t)) * SCALE) into data (height, Vp) from its row `first` on, and into data_t (Vp, height).

    Rounded to bf16 on the way, as the gradient of bf16 logits is: what is transposed must be 16 bits wide.
    """
    across = tl.cdiv(padded, COLUMNS)
    index = tl.program_id(0)
    here = index // across * ROWS + tl.arange(0, ROWS)
    cols = index % across * COLUMNS + tl.arange(0, COLUMNS)
    there = here < rows
    mask = there[:, None] & (cols < padded)[None, :]
    target = tl.load(targets + here, mask=there, other=-1)
    largest = tl.load(statistics + 2 * here, mask=there, other=0.0)
    inverse = tl.load(statistics + 2 * here + 1, mask=there, other=0.0)
    v = tl.load(logits + here.to(tl.int64)[:, None] * padded + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    onehot = (cols[None, :] == target[:, None]).to(tl.float32)
    g = tl.exp2((v - largest[:, None]) * LOG2_E) * inverse[:, None] - onehot
    g = tl.where((cols < vocab)[None, :] & (target != -1)[:, None], g, 0.0)
    g = rounded(g, tl.bfloat16)
    quantize_tile(g, mask, SCALE, data, data_t, first + here, cols, height, padded, tl.float8e5)


def rows(logits: Tensor, targets: Tensor, losses: Tensor, vocab: int, gradient: bool) -> None:
    """losses (N,) float32 := -log p_t; with `gradient` logits (N, Vp), contiguous, := p - onehot(t)."""
    n, padded = logits.shape
    args = (logits, targets, losses, vocab, padded)
    constants = {"GRADIENT": gradient, "DTYPE": FLOATS[logits.dtype], "BLOCK": BLOCK, "num_warps": WARPS}
    key = (*traits(logits, targets, losses), vocab, padded, gradient)
    with torch.cuda.device_of(logits):
        launch(rows_kernel, n, key, logits.get_device(), args, constants)


def fp8_rows(
    logits: Tensor, targets: Tensor, losses: Tensor, vocab: int, data: Tensor | None, data_t: Tensor | None, first: int
) -> None:
    """losses (N,) := -log p_t; rows first.. of data (height, Vp) and columns of data_t (Vp, height) := E5M2's p - onehot(t).

    logits (N, Vp), contiguous, stay as they are; data and data_t, E5M2, stand for GRADIENT_SCALE times the gradient.
    """
    (n, padded), device = logits.shape, logits.get_device()
    statistics = torch.empty(n, 2, dtype=torch.float32, device=logits.device)
    args = (logits, targets, losses, statistics, vocab, padded)
    key = (*traits(logits, targets, losses, statistics), vocab, padded)
    with torch.cuda.device_of(logits):
        launch(statistics_kernel, n, key, device, args, {"BLOCK": BLOCK, "num_warps": WARPS})
        if data is not None:
            height = data.shape[0]
        elif data_t is not None:
            height = data_t.shape[1]
        else:
            return
        sizes = (n, first, height, vocab, padded)
        key = (*traits(logits, targets, statistics, data, data_t), *sizes)
        tiles = triton.cdiv(n, ROWS) * triton.cdiv(padded, COLUMNS)
        launch(fp8_kernel, tiles, key, device, (logits, targets, statistics, data, data_t, *sizes), TILE)
