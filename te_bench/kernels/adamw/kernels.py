# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Triton kernels of AdamW: each program updates one tile of a parameter, looked up in a table of addresses.

They are memory-bound: 16 bytes read and 12 written per element, 2 more for the bf16 copy, 1 for each FP8 layout, 2
fewer for a bf16 gradient; 14 in all with bf16 weight, gradient and moments, 10.25 with FP8 moments. A parameter with a
data_t is cut into tiles of ROWS x COLUMNS; any other is read as a matrix of a tile's width, so that its tiles are runs
of ROWS * COLUMNS elements.
"""

import triton
import triton.language as tl

from te_bench.kernels.adamw import BLOCK
from te_bench.kernels.adamw.backends.reference import LEAST_SCALE, OFFSET, ROUNDS, SHIFT, TOP
from te_bench.kernels.tile import INTERPRETED, magnitude, publish, rounded, to_fp8

# A tile's row of 64 float32 is 256 bytes; its 32 rows are a 32-byte sector of the transposed FP8. 8 elements a thread
# with 8 warps take 71 to 80 registers: three programs per SM. At 64 x 64 two fit, and FP8 spilled (sm_90a).
ROWS, COLUMNS, WARPS = 32, 64, 8
# For FP8 moments: left alone, the assemblers of Triton 3.6 and 3.7 choose 64 or 80 for some forms, and spill.
REGISTERS = {"maxnreg": 80}
PIECE = 8  # rows at a time for a parameter without the alignment
SUMS = 2048  # partial sums that the norm's second stage adds at a time
# Scalars or views into tables of scalars: do not compile for each alignment.
UNALIGNED = ["rate", "step", "multiplier", "seed"]
PHILOX_ROUNDS, LEAST = tl.constexpr(ROUNDS), tl.constexpr(LEAST_SCALE)
ROOT_SHIFT, ROOT_OFFSET, ROOT_TOP, ROOT_HALF = (tl.constexpr(x) for x in (SHIFT, OFFSET, TOP, 1 << SHIFT - 17))
assert COLUMNS == BLOCK, "a block of FP8 moments is a row of a tile"

#: Fields of a table's row, 8 bytes each: addresses or 0; the bits of a float64; numbers.
(
    WEIGHT, GRAD, EXP_AVG, EXP_AVG_SQ, BF16, DATA, DATA_T, SCALE, SCALE_INV, AMAX, EXP_AVG_SCALE, EXP_AVG_SQ_SCALE,
    WEIGHT_DECAY, HEIGHT, WIDTH, COUNT, ALIGNED, HALF_GRAD, FIELDS,
) = (tl.constexpr(i) for i in range(19))  # fmt: skip


@triton.jit
def _address(row, FIELD: tl.constexpr, first, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(row + FIELD).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + first


@triton.jit
def _place(row, tile, down, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a tile's first row (plus `down`) and column, the parameter's width, and the number of elements from there.

    ALIGNED: addresses are multiples of 16 bytes, lengths of 16 elements; otherwise Triton loads elements one by one.
    """
    width = tl.load(row + WIDTH).to(tl.int32)
    count = tl.load(row + COUNT)
    if ALIGNED:
        width, count = tl.multiple_of(width, 16), tl.multiple_of(count, 16)
    across = tl.cdiv(width, COLUMNS)
    top, left = tile // across * ROWS + down, tile % across * COLUMNS
    rest = tl.minimum(count - (top.to(tl.int64) * width + left), 2147483632).to(tl.int32)
    return top, left, width, rest


@triton.jit
def _elements(rows, columns, left, width, rest):
    """Return the offsets of a tile's elements from its first, and a mask of those that exist."""
    offsets = rows * width + columns
    return offsets, (columns < width - left) & (offsets < rest)


@triton.jit
def _gradient(
    row, first, left, width, rest, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Load a tile of the gradient, float32 or bf16 as its row says, as float32."""
    if tl.load(row + HALF_GRAD) != 0:
        # In one line, as the bf16 copy is written: a tile would give its layout to every other tile.
        at = tl.arange(0, ROWS * COLUMNS)
        line_offsets, line_mask = _elements(at // COLUMNS, at % COLUMNS, left, width, rest)
        line = tl.load(_address(row, GRAD, first, tl.bfloat16, ALIGNED) + line_offsets, mask=line_mask, other=0.0)
        g = tl.reshape(line, (ROWS, COLUMNS)).to(tl.float32)
    else:
        offsets, mask = _elements(tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :], left, width, rest)
        g = tl.load(_address(row, GRAD, first, tl.float32, ALIGNED) + offsets, mask=mask, other=0.0)
    return g


@triton.jit
def _multiply_add(a, b, c):
    """Return a * b + c, rounded once."""
    if INTERPRETED:
        return (b.to(tl.float64) * a + c.to(tl.float64)).to(tl.float32)  # a may be a number
    else:
        return tl.fma(a, b, c)


@triton.jit
def _draw(
    seed, row_number, step, first, offsets, width, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return 32 random bits per element of a tile, equal to the reference's philox."""
    if ALIGNED:  # widths are multiples of 4: each philox call serves four neighbours
        quarter = tl.arange(0, ROWS)[:, None] * (width // 4) + tl.arange(0, COLUMNS // 4)[None, :]
        index = (first // 4 + quarter).to(tl.uint32)
        zero = index * 0
        a, b, c, d = tl.philox(seed, index, zero + row_number, zero + step, zero, PHILOX_ROUNDS)
        bits = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, COLUMNS))
    else:
        element = first + offsets
        index = (element // 4).to(tl.uint32)
        zero, word = index * 0, element % 4
        a, b, c, d = tl.philox(seed, index, zero + row_number, zero + step, zero, PHILOX_ROUNDS)
        bits = tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))
    return bits


@triton.jit
def _stochastic_bf16(x, bits):
    """Round float32 x stochastically to a bf16 neighbour, by 16 random bits; NaN stays."""
    moved = x.to(tl.uint32, bitcast=True) + bits
    return (tl.where(x == x, moved, 0x7FC00000) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _stochastic_e4m3(x, bits):
    """Round float32 x stochastically to an E4M3 neighbour, still as float32; `to_fp8` saturates it."""
    code = x.to(tl.int32, bitcast=True)
    exponent = tl.maximum((code >> 23) & 0xFF, 121)  # of 2^-6, below which the spacing is constant
    places = tl.abs(x) * ((257 - exponent) << 23).to(tl.float32, bitcast=True)
    below = tl.floor(places)
    up = (places - below > (bits.to(tl.float32) + 0.5) * 0.0000152587890625).to(tl.float32)
    y = (below + up) * ((exponent - 3) << 23).to(tl.float32, bitcast=True)
    return (y.to(tl.int32, bitcast=True) | (code & -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def _roots(codes):
    """Convert unsigned E5M3 codes to float32."""
    return tl.where(codes > 0, ((codes.to(tl.int32) + ROOT_OFFSET) << ROOT_SHIFT).to(tl.float32, bitcast=True), 0.0)


@triton.jit
def _stochastic_root(x, bits):
    """Round float32 x to the code of an unsigned E5M3 neighbour other than 0, by 16 random bits; NaN gives 0."""
    moved = x.to(tl.int32, bitcast=True) + (bits.to(tl.int32) << ROOT_SHIFT - 16) + ROOT_HALF
    return tl.where(x >= 0, tl.minimum(tl.maximum((moved >> ROOT_SHIFT) - ROOT_OFFSET, 1), 255), 0)


@triton.jit
def _store_scales(scales, x, there, TOP: tl.constexpr):
    """Store and return each existing row's scale: its largest magnitude divided by TOP."""
    largest = tl.max(magnitude(x), 1).to(tl.float32, bitcast=True)
    scale = tl.maximum(
        tl.div_rn(largest, tl.full(largest.shape, TOP, tl.float32)), LEAST, propagate_nan=tl.PropagateNan.ALL
    )
    tl.store(scales, scale, mask=there)
    return scale[:, None]


@triton.jit
def _store_moments(exp_avg, exp_avg_sq, m_scales, v_scales, m, v, bits, mask, there):
    """Store both moments in FP8, one scale per row: the root of v, and m divided by the stored root."""
    root = tl.sqrt_rn(v)
    scale = _store_scales(v_scales, root, there, ROOT_TOP)
    code = tl.where(root > 0, _stochastic_root(root * tl.div_rn(1.0, scale), bits >> 16), 0)
    tl.store(exp_avg_sq, code.to(tl.uint8), mask=mask)
    kept = _roots(code) * scale
    ratio = tl.where(kept > 0, tl.div_rn(m, kept), 0.0)
    scale = _store_scales(m_scales, ratio, there, 448.0)
    y = _stochastic_e4m3(ratio * tl.div_rn(1.0, scale), (bits >> 8) & 0xFFFF)
    tl.store(exp_avg, to_fp8(y, tl.float8e4nv), mask=mask)


@triton.jit
def _update_tile(
    row, tile, down, lr, step_size, bias_correction2_sqrt, grad_scale, lerp_weight, one_minus_beta2, beta2, eps,
    seed, row_number, count, w_dtype: tl.constexpr, m_dtype: tl.constexpr,
    FROM_GRAD: tl.constexpr, HALF: tl.constexpr, TARGET: tl.constexpr, ALIGNED: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    top, left, width, rest = _place(row, tile, down, ALIGNED, TILE, COLUMNS)
    first = top.to(tl.int64) * width + left
    offsets, mask = _elements(tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :], left, width, rest)
    weight = _address(row, WEIGHT, first, w_dtype, ALIGNED) + offsets
    exp_avg = _address(row, EXP_AVG, first, m_dtype, ALIGNED) + offsets
    IN_FP8: tl.constexpr = m_dtype == tl.float8e4nv
    exp_avg_sq = _address(row, EXP_AVG_SQ, first, tl.uint8 if IN_FP8 else m_dtype, ALIGNED) + offsets
    g = _gradient(row, first, left, width, rest, ALIGNED, ROWS, COLUMNS)
    m = tl.load(exp_avg, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq, mask=mask, other=0)
    w = tl.load(weight, mask=mask, other=0.0).to(tl.float32)
    if IN_FP8:
        blocks = tl.arange(0, ROWS) * (width // COLUMNS)
        there = blocks * COLUMNS < rest
        m_scales = _address(row, EXP_AVG_SCALE, first // COLUMNS, tl.float32, False) + blocks
        v_scales = _address(row, EXP_AVG_SQ_SCALE, first // COLUMNS, tl.float32, False) + blocks
        root = _roots(v) * tl.load(v_scales, mask=there, other=0.0)[:, None]
        m = m * tl.load(m_scales, mask=there, other=0.0)[:, None] * root
        v = root * root
    else:
        v = v.to(tl.float32)
    g *= grad_scale
    m = _multiply_add(lerp_weight, g - m, g if FROM_GRAD else m)
    v = _multiply_add(one_minus_beta2 * g, g, v * beta2)
    decay = (1.0 - lr * tl.load(row + WEIGHT_DECAY).to(tl.float64, bitcast=True)).to(tl.float32)
    w = w * decay + tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), bias_correction2_sqrt) + eps)
    if w_dtype == tl.float32 and m_dtype == tl.float32:
        random = 0
    else:
        random = _draw(seed, row_number, count, first, offsets, width, ALIGNED, ROWS, COLUMNS)
    y = _stochastic_bf16(w, random & 0xFFFF) if w_dtype == tl.bfloat16 else w
    tl.store(weight, y, mask=mask)
    if IN_FP8:
        _store_moments(exp_avg, exp_avg_sq, m_scales, v_scales, m, v, random, mask, there)
    elif m_dtype == tl.bfloat16:
        tl.store(exp_avg, rounded(m, tl.bfloat16), mask=mask)
        tl.store(exp_avg_sq, _stochastic_bf16(v, random >> 16), mask=mask)
    else:
        tl.store(exp_avg, m, mask=mask)
        tl.store(exp_avg_sq, v, mask=mask)
    if HALF or TARGET is not None:
        # Cast FP8 from the bf16 value, as the quantisers do for a bf16 weight, never from the float32 tile: on Hopper
        # Triton 3.6 stores garbage if one kernel casts a float32 tile to FP8 and transposes it.
        if w_dtype == tl.float32:
            y = rounded(w, tl.bfloat16)
        # In one line: Triton gives tiles of one shape the narrowest dtype's layout, 8 float32 a thread instead of 4.
        at = tl.arange(0, ROWS * COLUMNS)
        offsets, mask = _elements(at // COLUMNS, at % COLUMNS, left, width, rest)
        line = tl.reshape(y, (ROWS * COLUMNS,))
        if HALF and tl.load(row + BF16) != 0:
            tl.store(_address(row, BF16, first, tl.bfloat16, ALIGNED) + offsets, line, mask=mask)
        if TARGET is not None and tl.load(row + SCALE) != 0:
            scale = tl.load(_address(row, SCALE, 0, tl.float32, False))
            if tl.load(row + DATA) != 0:
                q = to_fp8(line.to(tl.float32) * scale, TARGET)
                tl.store(_address(row, DATA, first, TARGET, ALIGNED) + offsets, q, mask=mask)
            if tl.load(row + DATA_T) != 0:
                _transposed_tile(row, y, scale, top, left, width, TARGET, ALIGNED, ROWS, COLUMNS)
            if tile == 0 and tl.load(row + SCALE_INV) != 0:
                tl.store(_address(row, SCALE_INV, 0, tl.float32, False), tl.div_rn(1.0, scale))
            if tl.load(row + AMAX) != 0:
                bits = tl.where(mask, magnitude(line.to(tl.float32)), 0)
                publish(bits, None, _address(row, AMAX, 0, tl.float32, False), None)


@triton.jit
def _transposed_tile(
    row, y, scale, top, left, width,
    TARGET: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the transposed FP8 of the bf16 tile y to data_t."""
    height = tl.load(row + HEIGHT).to(tl.int32)
    if ALIGNED:
        height = tl.multiple_of(height, 16)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    mask = (rows < height - top)[:, None] & (columns < width - left)[None, :]
    data_t = _address(row, DATA_T, left.to(tl.int64) * height + top, TARGET, ALIGNED)
    # Transpose before the cast: ldmatrix moves 16-bit elements, bytes would go one by one (sm_90a: 8 shared stores and 4
    # ldmatrix a thread instead of 36 stores).
    q = to_fp8(tl.trans(y).to(tl.float32) * scale, TARGET)
    tl.store(data_t + columns.to(tl.int64)[:, None] * height + rows[None, :], q, mask=tl.trans(mask))


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def numbers_kernel(rate, step, numbers, LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr):
    """Compute numbers (2,), shared by all elements: minus the step size, and the root of 1 - beta2^step.

    It is a separate program, because in step_kernel this float64 was a quarter of the instructions. LOG_BETA1 and
    LOG_BETA2 (base 2) are constants, because a kernel's number arguments are float32.
    """
    count = tl.load(step).to(tl.float64)
    lr = tl.load(rate).to(tl.float64)
    tl.store(numbers, (lr / (tl.exp2(count * LOG_BETA1) - 1.0)).to(tl.float32))
    tl.store(numbers + 1, tl.sqrt(1.0 - tl.exp2(count * LOG_BETA2)).to(tl.float32))


@triton.jit(do_not_specialize=["start"], do_not_specialize_on_alignment=UNALIGNED)
def step_kernel(
    table, tiles, start, rate, step, numbers, multiplier, seed, lerp_weight, one_minus_beta2, beta2, eps,
    w_dtype: tl.constexpr, m_dtype: tl.constexpr, FROM_GRAD: tl.constexpr,
    HALF: tl.constexpr, TARGET: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Apply AdamW to one tile per program, from tile `start` on; all their parameters have these dtypes.

    numbers: numbers_kernel's result.
    """
    program = start + tl.program_id(0)
    row_number = tl.load(tiles + 2 * program)
    row = table + row_number.to(tl.int64) * FIELDS
    tile = tl.load(tiles + 2 * program + 1)
    lr = tl.load(rate).to(tl.float64)
    step_size, bias_correction2_sqrt = tl.load(numbers), tl.load(numbers + 1)
    grad_scale = 1.0
    if multiplier is not None:
        grad_scale = tl.load(multiplier)
    key, number = 0, 0
    if seed is not None:
        key, number = tl.load(seed).to(tl.uint64, bitcast=True), tl.load(step).to(tl.int32)
    if tl.load(row + ALIGNED) != 0:
        _update_tile(
            row, tile, 0, lr, step_size, bias_correction2_sqrt, grad_scale, lerp_weight, one_minus_beta2, beta2, eps,
            key, row_number, number, w_dtype, m_dtype, FROM_GRAD, HALF, TARGET, True, ROWS, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        # Piece by piece: the element addresses of a whole tile would need more registers than the other branch has.
        for down in tl.range(0, ROWS, PIECE):
            _update_tile(
                row, tile, down, lr, step_size, bias_correction2_sqrt, grad_scale, lerp_weight, one_minus_beta2, beta2, eps,
                key, row_number, number, w_dtype, m_dtype, FROM_GRAD, HALF, TARGET, False, ROWS, PIECE, COLUMNS,
            )  # fmt: skip


@triton.jit
def _squares(row, tile, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    top, left, width, rest = _place(row, tile, 0, ALIGNED, ROWS, COLUMNS)
    g = _gradient(row, top.to(tl.int64) * width + left, left, width, rest, ALIGNED, ROWS, COLUMNS)
    return tl.sum(g * g)


@triton.jit
def squares_kernel(table, tiles, partial, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the sum of squares of one tile's gradients to partial[program]."""
    program = tl.program_id(0)
    row = table + tl.load(tiles + 2 * program).to(tl.int64) * FIELDS
    tile = tl.load(tiles + 2 * program + 1)
    if tl.load(row + ALIGNED) != 0:
        tl.store(partial + program, _squares(row, tile, True, ROWS, COLUMNS))
    else:
        tl.store(partial + program, _squares(row, tile, False, ROWS, COLUMNS))


@triton.jit
def norm_kernel(partial, norm, multiplier, count, max_norm, SUMS: tl.constexpr):
    """Compute norm and multiplier from the partial sums, in one program and float64, in the same order in every run."""
    total = tl.zeros((SUMS,), tl.float64)
    for start in tl.range(0, count, SUMS):
        at = start + tl.arange(0, SUMS)
        total += tl.load(partial + at, mask=at < count, other=0.0).to(tl.float64)
    found = tl.sqrt(tl.sum(total)).to(tl.float32)
    tl.store(norm, found)
    quotient = tl.div_rn(max_norm, found + 1e-6)
    tl.store(multiplier, tl.minimum(quotient, 1.0, propagate_nan=tl.PropagateNan.ALL))
