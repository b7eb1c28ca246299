"""Shared code of Gluon's attention kernels for Hopper: tile schedule, shared memory, and arithmetic on fragments.

A program has a warp that fetches and CONSUMERS warpgroups of ROWS rows each (of keys, for dK and dV). Scores are in
units of log2(e), so that a weight is one multiply-add and one exp2.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

ROWS = gl.constexpr(64)  # of a warpgroup: those of one tensor core instruction
LN_2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-3e38)  # about float32's lowest finite number

# One compilation for all lengths; `group` is specialised for 1.
SIZES = ["T", "S", "H", "pairs", "blocks", "near", "whole", "rest", "padded"]
UNALIGNED = ["group"]


# Tile schedule


@gluon.jit
def count_tiles(whole, rest):
    """Return the number of this program's tiles: `whole` rounds, and perhaps one of the last round's `rest`."""
    buffer = gl.program_id(0)
    if (whole & 1) > 0:
        buffer = gl.num_programs(0) - 1 - buffer
    if buffer < rest:
        whole += 1
    return whole


@gluon.jit
def pick_tile(tile_index, blocks, pairs, near):
    """Return (block of rows, pair of sequence and head) of the program's tile number tile_index.

    Tiles are dealt in alternating direction, so that a round's heaviest tile is followed by the next round's lightest.
    Order: block 0 of `near` pairs, then their block 1, and so on.
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    position = program
    if (tile_index & 1) > 0:
        position = programs - 1 - program
    position += tile_index * programs
    first_pair = position // (blocks * near) * near
    count = min(pairs - first_pair, near)
    inside = position - first_pair * blocks
    return inside // count, first_pair + inside % count


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Return the next stage, and the parity of its number of fills."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def previous_stage(stage, phase, STAGES: gl.constexpr):
    if stage == 0:
        stage = STAGES
        phase ^= 1
    return stage - 1, phase


@gluon.jit
def count_key_blocks(start_m, WARPGROUPS: gl.constexpr, T, S, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Return the number of key blocks that WARPGROUPS x 64 rows from start_m on see; 1 if no such rows exist."""
    offs_n = S
    if CAUSAL:
        offs_n = min(S, min(start_m + ROWS * WARPGROUPS, T))
    if start_m >= T:
        offs_n = 1
    return gl.cdiv(offs_n, BLOCK_N)


# Barriers and shared memory


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    args = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(args.index(i), count=ARRIVALS)
    return args


@gluon.jit
def allocate(desc, COUNT: gl.constexpr):
    """Allocate shared memory for COUNT blocks of desc's tensor, (1, 1, rows, D) each."""
    shape: gl.constexpr = desc.block_type.shape
    return gl.allocate_shared_memory(desc.dtype, [COUNT, 1, 1, shape[2], shape[3]], desc.layout)


@builtin
def add_to_global(desc, at, source, _semantic=None):
    """Add shared memory to global memory by TMA, in no order; Gluon's language supports it but does not expose it."""
    at = _semantic._convert_to_ir_values(at, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, at, source.handle)


@gluon.jit
def meet():
    """Synchronise two warpgroups at barrier 8 of the SM's 16, of which Triton uses the first few."""
    each = gl.zeros((128,), gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise("bar.sync 8, 256; mov.b32 $0, $1;", "=r,r", [each], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def as_matrix(block):
    """Return a block (1, 1, rows, D) as a matrix."""
    shape: gl.constexpr = block.shape
    BITS: gl.constexpr = block.dtype.primitive_bitwidth
    return block._reinterpret(block.dtype, [shape[2], shape[3]], gl.NVMMASharedLayout(128, BITS, 2))


@gluon.jit
def fetch(desc, b, h, row, full, empty, phase, stage, column=0):
    """Fill a stage once every warpgroup has left it."""
    mbarrier.wait(empty, phase ^ 1)
    mbarrier.expect(full, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [b, h, row, column], full, stage)


@gluon.jit
def take_turn(tile_index, consumer, phase):
    """Wait for the previous warpgroup's turn to end; the very first wait returns at once."""
    if consumer == 0:
        mbarrier.wait(tile_index.index(consumer), phase ^ 1)
    else:
        mbarrier.wait(tile_index.index(consumer), phase)


@gluon.jit
def pass_turn(tile_index, consumer, CONSUMERS: gl.constexpr):
    mbarrier.arrive(tile_index.index((consumer + 1) % CONSUMERS), count=1)


# Arithmetic


@gluon.jit
def exp2(x):
    """Return 2^x of float32, flushing subnormals to 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def keep_positive(scale):
    """Compute `fp8_quantize.keep_positive`."""
    return gl.where(scale < 1e-37, 1e-37, scale)


@gluon.jit
def round_to(x, DTYPE: gl.constexpr):
    """Round float32 x to DTYPE, to nearest, in pairs: single conversions are slow."""
    if gl.bfloat16 == DTYPE:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def widen(x):
    """Convert round_to's result to float32, keeping pairs together as operands need; Triton would separate them."""
    if gl.bfloat16 == x.dtype:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def as_operand(x, LAYOUT: gl.constexpr):
    """Return a product's result as the next product's left operand, without moving data between threads."""
    return gl.convert_layout(x, gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def spread_rows(x, y):
    """Return x, a number per row, in the layout of y's rows, without moving data between threads."""
    return gl.convert_layout(x, gl.SliceLayout(1, y.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def sum_in_parts(x):
    """Return the sums of every 8th column of x, without moving data between threads."""
    WIDTH: gl.constexpr = x.shape[1]
    if WIDTH == 8:
        return x
    else:
        left, right = gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, WIDTH // 2)), (0, 2, 1)))
        return sum_in_parts(left + right)


@gluon.jit
def hold_back(sums):
    """Return sums (float32, not negative) such that later code cannot be moved before they exist.

    ptxas 12.8 to 13.5 moves the wait for a product up across everything but memory accesses, although exponentials
    should run during the product. So this contains a store that never executes.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .f32 x, y; .reg .b32 a; mov.b32 a, 0; add.f32 x, $4, $5; add.f32 y, $6, $7; add.f32 x, x, y; "
        "setp.lt.f32 p, x, 0f00000000; @p st.shared.f32 [a], x; "
        "mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7; }",
        "=f,=f,=f,=f,f,f,f,f", [sums], dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def mask_scores(qk, start_m, start_n, S, CAUSAL: gl.constexpr):
    """Mask qk of rows from start_m on and keys from start_n on: -inf where a row does not see a key."""
    offs_n = start_n + gl.arange(0, qk.shape[1], gl.SliceLayout(0, qk.type.layout))
    visible = (offs_n < S)[None, :]
    if CAUSAL:
        offs_m = start_m + gl.arange(0, qk.shape[0], gl.SliceLayout(1, qk.type.layout))
        visible = visible & (offs_n[None, :] <= offs_m[:, None])
    return gl.where(visible, qk, float("-inf"))
