# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The Triton kernels that turn logits into losses and into the logits' gradient, and their launchers.

They are memory-bound, as long as an element costs few instructions. Hence exp2 flushes subnormals, targets are 32-bit,
and one cast serves both layouts (15 instructions). A program has a row and reads it twice, the second time mostly not
from L2. Each thread keeps its own maximum and sum, so there is no barrier before the row's end. Rows and, the second
time, columns go from last to first, because what was written last is still in L2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels.launch import launch, traits
from te_bench.kernels.tile import FLOATS, exp2, rounded, to_fp8
from te_bench.kernels.tile import INTERPRETED as IN_PYTHON

Constants = dict[str, object]

INTERPRETED: bool = triton.knobs.runtime.interpret
# The fastest of blocks of 1024 to 8192 and 4 to 32 warps, for 12288 x 50304 on an H200 (benchmarks/NOTES.md).
ROW: Constants = {"BLOCK": 8192, "num_warps": 16}
STATISTICS: Constants = {"BLOCK": 4096, "num_warps": 8}
VECTOR = tl.constexpr(8)  # columns that a thread loads at once: 16 bytes of bf16
LOG2_E = tl.constexpr(1.4426950408889634)
# For threads without an element: -inf - -inf would be NaN, and times LOG2_E it must not overflow.
LOWEST = tl.constexpr(-2e38)

# |softmax - onehot| <= 1, so 2^15 gives at most 32768, within E5M2's last binade (its largest is 57344).
GRADIENT_SCALE = 2.0**15
# Tile of the FP8 kernel: 128 bytes of bf16 read, 128 bytes of the transposed layout written. 64 x 128, as fast with
# Triton 3.6, goes through shared memory byte by byte with 3.7.
ROWS, COLUMNS = 128, 64
TILE: Constants = {"SCALE": GRADIENT_SCALE, "ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": 8}
TARGETS = 8192  # per step of count_kernel and mean_kernel, one program each
# For scale_kernel: elements per step, and programs, which have nothing to do if dloss is 1.
PIECE, PROGRAMS = 4096, 1024

# Rows of numbers (3, 4), one value each: 16 bytes apart, they are aligned for cuBLASLt, too.
COUNTED, INVERSE, SCALED = 0, 1, 2  # counted targets, 1 / max(counted, 1), that over GRADIENT_SCALE


@triton.jit
def _columns(start, BLOCK: tl.constexpr):
    """Return (BLOCK / 8, 8) columns: 8 neighbours per thread."""
    return start + tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]


@triton.jit
def _load(z, cols, vocab, padded):
    # The load's mask ends at padded, a multiple of 8: ending at vocab, 50257, it would load 2 bytes at a time.
    v = tl.load(z + cols, mask=cols < padded, other=0.0).to(tl.float32)
    return tl.where(cols < vocab, v, float("-inf"))


@triton.jit
def _update_softmax(v, m_i, l_i):
    """Update every thread's maximum and sum with v (BLOCK / 8, 8)."""
    m_new = tl.maximum(m_i, tl.max(v, 1))
    return m_new, l_i * exp2((m_i - m_new) * LOG2_E) + tl.sum(exp2((v - m_new[:, None]) * LOG2_E), 1)


@triton.jit
def _row_statistics(z, vocab, padded, BLOCK: tl.constexpr):
    """Return max z and sum exp(z - max z) over a row's first `vocab` columns."""
    m_i = tl.full((BLOCK // VECTOR,), LOWEST, tl.float32)
    l_i = tl.zeros((BLOCK // VECTOR,), tl.float32)
    full = vocab // BLOCK * BLOCK
    for start in tl.range(0, full, BLOCK):
        v = tl.load(z + _columns(start, BLOCK)).to(tl.float32)
        m_i, l_i = _update_softmax(v, m_i, l_i)
    for start in tl.range(full, vocab, BLOCK):
        m_i, l_i = _update_softmax(_load(z, _columns(start, BLOCK), vocab, padded), m_i, l_i)
    row_max = tl.max(m_i)
    return row_max, tl.sum(l_i * exp2((m_i - row_max) * LOG2_E))


@triton.jit
def _loss(z_target, target, m_i, l_i, vocab):
    """Return -log softmax at the target (0 if ignored) and 1 / l_i; both NaN for a target outside the vocabulary."""
    # Compute m_i - z_target first: added to m_i alone, log(l_i) would lose digits.
    loss = tl.where(target == -1, 0.0, tl.log(l_i) + (m_i - z_target))
    illegal = (target < -1) | (target >= vocab)
    return tl.where(illegal, float("nan"), loss), tl.where(illegal, float("nan"), tl.div_rn(1.0, l_i))


@triton.jit
def _target_logit(z, target, vocab):
    return tl.load(z + target, mask=(target >= 0) & (target < vocab), other=0.0).to(tl.float32)


@triton.jit
def _softmax_row(logits, targets, losses, vocab, padded, BLOCK: tl.constexpr):
    """Return the row, its logits, target, max z and 1 / sum exp(z - max z), and store its loss; last rows first."""
    row = tl.num_programs(0) - 1 - tl.program_id(0)
    z = logits + row.to(tl.int64) * padded
    target = tl.load(targets + row)
    z_target = _target_logit(z, target, vocab)
    m_i, l_i = _row_statistics(z, vocab, padded, BLOCK)
    loss, inv_l = _loss(z_target, target, m_i, l_i, vocab)
    tl.store(losses + row, loss)
    return row, z, target, m_i, inv_l


@triton.jit
def rows_kernel(
    logits, targets, losses, factor, vocab, padded, GRADIENT: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr
):
    """Store -log p_t; with GRADIENT write (p - onehot(t)) * factor to the row, 0 in the padding and for ignored t."""
    _, z, target, m_i, inv_l = _softmax_row(logits, targets, losses, vocab, padded, BLOCK)
    if GRADIENT:
        scale = tl.load(factor)
        inv_l *= scale
        counts, column = target != -1, target.to(tl.int32)  # a target outside the vocabulary is NaN by `inv_l`
        full = vocab // BLOCK
        blocks = tl.cdiv(padded, BLOCK)
        for block in tl.range(0, blocks - full):
            cols = _columns((blocks - 1 - block) * BLOCK, BLOCK)
            g = exp2((_load(z, cols, vocab, padded) - m_i) * LOG2_E) * inv_l
            g = tl.where(cols == column, g - scale, g)
            tl.store(z + cols, rounded(tl.where((cols < vocab) & counts, g, 0.0), DTYPE), mask=cols < padded)
        for block in tl.range(0, full):
            cols = _columns((full - 1 - block) * BLOCK, BLOCK)
            g = exp2((tl.load(z + cols).to(tl.float32) - m_i) * LOG2_E) * inv_l
            g = tl.where(cols == column, g - scale, g)
            tl.store(z + cols, rounded(tl.where(counts, g, 0.0), DTYPE))


@triton.jit
def statistics_kernel(logits, targets, losses, statistics, vocab, padded, BLOCK: tl.constexpr):
    """Store losses[row] = -log p_t and statistics[row] = max z, 1 / sum exp(z - max z)."""
    row, _, _, m_i, inv_l = _softmax_row(logits, targets, losses, vocab, padded, BLOCK)
    tl.store(statistics + 2 * row, m_i)
    tl.store(statistics + 2 * row + 1, inv_l)


@triton.jit
def _gradient(logits, targets, statistics, here, cols, rows, padded, SCALE: tl.constexpr):
    """Return (p - onehot(t)) * SCALE, float32, at (here, cols), 0 for ignored t; the caller handles padding."""
    row_mask = here < rows
    target = tl.load(targets + here, mask=row_mask, other=-1)
    m_i = tl.load(statistics + 2 * here, mask=row_mask, other=0.0)
    inv_l = tl.load(statistics + 2 * here + 1, mask=row_mask, other=0.0) * SCALE
    mask = row_mask[:, None] & (cols < padded)[None, :]
    v = tl.load(logits + here.to(tl.int64)[:, None] * padded + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    g = exp2((v - m_i[:, None]) * LOG2_E) * inv_l[:, None]
    # 32 bits are one comparison, 64 two; a target outside the vocabulary is NaN by `inv_l`.
    g = tl.where(cols[None, :] == target.to(tl.int32)[:, None], g - SCALE, g)
    return tl.where((target != -1)[:, None], g, 0.0), mask


@triton.jit
def _pairs(upper, lower):
    """Return E5M2 codes of two rows as 16 bits, the upper row's in the low byte, as they are adjacent in a column."""
    if IN_PYTHON:
        low = to_fp8(upper, tl.float8e5).to(tl.uint8, bitcast=True).to(tl.uint16)
        high = to_fp8(lower, tl.float8e5).to(tl.uint8, bitcast=True).to(tl.uint16)
        return low | (high << 8)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 first, second;
            cvt.rn.satfinite.e5m2x2.f32 first, $3, $1;
            cvt.rn.satfinite.e5m2x2.f32 second, $4, $2;
            mov.b32 $0, {first, second};
            }""",
            "=r,r,r,r,r",
            [upper, lower],
            dtype=tl.uint16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def fp8_kernel(
    logits, targets, statistics, data, data_t, rows, first, height, vocab, padded,
    PAIRED: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write a tile of e5m2((p - onehot(t)) * SCALE) to data (rows, Vp), and data_t (Vp, height) from column `first` on.

    Both are bytes. PAIRED: data_t is 16 bits wide, (Vp, height / 2), first and rows are even. Pairs of rows are cast
    once and moved through shared memory as 16 bits: Triton would move bytes one by one.
    """
    across = tl.cdiv(padded, COLUMNS)
    index = tl.program_id(0)
    start = index % across * COLUMNS
    pairs = index // across * (ROWS // 2) + tl.arange(0, ROWS // 2)
    upper, lower = 2 * pairs, 2 * pairs + 1
    cols = start + tl.arange(0, COLUMNS)
    g_upper, upper_mask = _gradient(logits, targets, statistics, upper, cols, rows, padded, SCALE)
    g_lower, lower_mask = _gradient(logits, targets, statistics, lower, cols, rows, padded, SCALE)
    if start + COLUMNS > vocab:
        g_upper = tl.where((cols < vocab)[None, :], g_upper, 0.0)
        g_lower = tl.where((cols < vocab)[None, :], g_lower, 0.0)
    packed = _pairs(g_upper, g_lower)
    if data is not None:
        there = data + upper.to(tl.int64)[:, None] * padded + cols[None, :]
        tl.store(there, (packed & 0xFF).to(tl.uint8), mask=upper_mask)
        tl.store(there + padded, (packed >> 8).to(tl.uint8), mask=lower_mask)
    if data_t is not None:
        packed_t, wide = tl.trans(packed), cols.to(tl.int64)[:, None]
        if PAIRED:
            # Compare pairs: from `lower < rows` Triton would not see that neighbours agree, and store two bytes each.
            mask = (cols < padded)[:, None] & (pairs < rows // 2)[None, :]
            tl.store(data_t + wide * (height // 2) + (first // 2 + pairs)[None, :], packed_t, mask=mask)
        else:
            there_t = data_t + wide * height + (first + upper)[None, :]
            tl.store(there_t, (packed_t & 0xFF).to(tl.uint8), mask=tl.trans(upper_mask))
            tl.store(there_t + 1, (packed_t >> 8).to(tl.uint8), mask=tl.trans(lower_mask))


@triton.jit
def count_kernel(targets, numbers, n, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """Write numbers: the targets that are not ignored, 1 over max(that, 1), and that over SCALE."""
    total = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += (tl.load(targets + at, mask=at < n, other=-1) != -1).to(tl.int32)
    counted = tl.sum(total).to(tl.float32)
    inverse = tl.div_rn(1.0, tl.maximum(counted, 1.0))
    tl.store(numbers, counted)
    tl.store(numbers + 4, inverse)
    tl.store(numbers + 8, inverse / SCALE)


@triton.jit
def mean_kernel(losses, numbers, loss, n, BLOCK: tl.constexpr):
    """Write the sum of losses (n,) over the number of counted targets to loss; NaN (0 / 0) without any."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(losses + at, mask=at < n, other=0.0)
    tl.store(loss, tl.div_rn(tl.sum(total), tl.load(numbers)))


@triton.jit
def scale_kernel(
    x, factor, out, n, IN_PLACE: tl.constexpr, FAR: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write x * factor to out, both (n,); IN_PLACE, nothing is read or written if the factor is 1.

    FAR: a step beyond n, 32 bits would overflow.
    """
    by = tl.load(factor)
    end = tl.where(by == 1.0, 0, n) if IN_PLACE else n
    first = tl.program_id(0) * BLOCK
    if FAR:
        first = first.to(tl.int64)
    for start in tl.range(first, end, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(out + at, rounded(tl.load(x + at, mask=at < n, other=0.0) * by, DTYPE), mask=at < n)


def rows(logits: Tensor, targets: Tensor, losses: Tensor, vocab: int, factor: Tensor | None) -> None:
    """Write -log p_t to losses (N,); with a factor, () float32, overwrite logits by (p - onehot(t)) * factor."""
    n, padded = logits.shape
    args = (logits, targets, losses, factor, vocab, padded)
    gradient = factor is not None
    constants = {"GRADIENT": gradient, "DTYPE": FLOATS[logits.dtype], **ROW}
    key = (*traits(logits, targets, losses, factor), vocab, padded)
    launch(rows_kernel, n, key, logits.get_device(), args, constants)


def fp8_rows(
    logits: Tensor, targets: Tensor, losses: Tensor, vocab: int, data: Tensor | None, data_t: Tensor | None, first: int
) -> None:
    """Write -log p_t to losses (N,), and p - onehot(t) in E5M2 to data (N, Vp) and data_t (Vp, height) from `first` on.

    logits (N, Vp), contiguous, are unchanged; data and data_t hold GRADIENT_SCALE times the gradient.
    """
    (n, padded), device = logits.shape, logits.get_device()
    statistics = torch.empty(n, 2, dtype=torch.float32, device=logits.device)
    args = (logits, targets, losses, statistics, vocab, padded)
    key = (*traits(logits, targets, losses, statistics), vocab, padded)
    launch(statistics_kernel, n, key, device, args, STATISTICS)
    if data is None and data_t is None:
        return
    height = 0 if data_t is None else data_t.shape[1]
    paired = not (height % 2 or first % 2 or n % 2) and (data_t is None or data_t.data_ptr() % 2 == 0)
    if data is not None:
        data = data.view(torch.uint8)
    if data_t is not None:
        data_t = data_t.view(torch.uint16 if paired else torch.uint8)
    sizes = (n, first, height, vocab, padded)
    key = (*traits(logits, targets, statistics, data, data_t), *sizes)
    tiles = triton.cdiv(n, ROWS) * triton.cdiv(padded, COLUMNS)
    arguments = (logits, targets, statistics, data, data_t, *sizes)
    launch(fp8_kernel, tiles, key, device, arguments, {"PAIRED": paired, **TILE})


def count(targets: Tensor) -> Tensor:
    """Return numbers (3, 4) float32 of targets (N,): COUNTED, INVERSE and SCALED in the first column of three rows."""
    numbers = torch.empty(3, 4, dtype=torch.float32, device=targets.device)
    args, constants = (targets, numbers, len(targets)), {"SCALE": GRADIENT_SCALE, "BLOCK": TARGETS, "num_warps": 32}
    launch(count_kernel, 1, (*traits(targets), len(targets)), targets.get_device(), args, constants)
    return numbers


def mean(losses: Tensor, numbers: Tensor) -> Tensor:
    """Return () float32: the mean of losses (N,) float32 over the counted targets."""
    loss = torch.empty((), dtype=torch.float32, device=losses.device)
    args, constants = (losses, numbers, loss, len(losses)), {"BLOCK": TARGETS, "num_warps": 32}
    launch(mean_kernel, 1, (*traits(losses), len(losses)), losses.get_device(), args, constants)
    return loss


def scale(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """Write x * factor, rounded once, to out; x contiguous, factor () float32, out of x's shape or x itself."""
    n = x.numel()
    if n:
        key, far = (*traits(x, factor, out), n, out is x), n + PROGRAMS * PIECE >= 2**31
        tile = {"BLOCK": PIECE, "num_warps": 8}
        constants = {"IN_PLACE": out is x, "FAR": far, "DTYPE": FLOATS[out.dtype], **tile}
        launch(scale_kernel, min(triton.cdiv(n, PIECE), PROGRAMS), key, x.get_device(), (x, factor, out, n), constants)
