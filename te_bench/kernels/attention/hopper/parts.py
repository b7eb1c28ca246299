"""What Gluon's attention kernels for Hopper share: whose tile it is, shared memory, and arithmetic on fragments.

A program has a warp that fetches and CONSUMERS warpgroups of ROWS rows each (of keys, where dK and dV are made). Scores
are in units of log2(e), so that a weight is one multiplication and addition, one exp2.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

ROWS = gl.constexpr(64)  # of a warpgroup: those of one instruction of the tensor core
LN_2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-3e38)  # about the least of float32's finite numbers

# One compilation for all lengths; `group` is 1 or not.
SIZES = ["T", "S", "H", "pairs", "blocks", "near", "whole", "rest", "padded"]
UNALIGNED = ["group"]


# Whose tile


@gluon.jit
def count_tiles(whole, rest):
    """How many tiles are this program's: of `whole` rounds, and of the first `rest` of one more."""
    buffer = gl.program_id(0)
    if (whole & 1) > 0:
        buffer = gl.num_programs(0) - 1 - buffer
    if buffer < rest:
        whole += 1
    return whole


@gluon.jit
def pick_tile(tile_index, blocks, pairs, near):
    """(which block of rows, in order; which pair of a sequence and a head) of the program's tile number tile_index.

    Tiles are dealt there and back, so that who had the heaviest of one round has the lightest of the next. In order: block
    0 of `near` pairs, then block 1 of them, and so on.
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
    """The stage after this one, and the parity of how often it was filled before."""
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
    """How many blocks of keys WARPGROUPS x 64 rows from start_m on see; one, if there are no such rows."""
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
    """Shared memory for COUNT blocks of desc's tensor, (1, 1, rows, D) each."""
    shape: gl.constexpr = desc.block_type.shape
    return gl.allocate_shared_memory(desc.dtype, [COUNT, 1, 1, shape[2], shape[3]], desc.layout)


@builtin
def add_to_global(desc, at, source, _semantic=None):
    """What is in shared memory added to global memory, by TMA, in no order: of Gluon's language, but for this name."""
    at = _semantic._convert_to_ir_values(at, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, at, source.handle)


@gluon.jit
def meet():
    """Two warpgroups wait for each other, at one of the processor's 16 barriers, of which Triton takes the first few."""
    each = gl.zeros((128,), gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise("bar.sync 8, 256; mov.b32 $0, $1;", "=r,r", [each], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def as_matrix(block):
    """A block (1, 1, rows, D) as a matrix."""
    shape: gl.constexpr = block.shape
    BITS: gl.constexpr = block.dtype.primitive_bitwidth
    return block._reinterpret(block.dtype, [shape[2], shape[3]], gl.NVMMASharedLayout(128, BITS, 2))


@gluon.jit
def fetch(desc, b, h, row, full, empty, phase, stage, column=0):
    """Fill a stage, once all have left it."""
    mbarrier.wait(empty, phase ^ 1)
    mbarrier.expect(full, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [b, h, row, column], full, stage)


@gluon.jit
def take_turn(tile_index, consumer, phase):
    """Wait for the warpgroup before; the first of all waits for nobody."""
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
    """2^x of float32, 0 below its normal numbers."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def keep_positive(scale):
    """As `fp8_quantize.keep_positive` has it."""
    return gl.where(scale < 1e-37, 1e-37, scale)


@gluon.jit
def round_to(x, DTYPE: gl.constexpr):
    """x, float32, to the nearest of DTYPE, in pairs: one by one the conversion is a slow one."""
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
    """x, of round_to, in float32. Its pairs stay together, as an operand needs them: Triton's own way takes them apart."""
    if gl.bfloat16 == x.dtype:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def as_operand(x, LAYOUT: gl.constexpr):
    """A product's result as the left operand of the next one; nothing leaves its thread."""
    return gl.convert_layout(x, gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def spread_rows(x, y):
    """x, a number for each row, laid out as the rows of y; nothing leaves its thread."""
    return gl.convert_layout(x, gl.SliceLayout(1, y.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def sum_in_parts(x):
    """The sums of every 8th column of x: they stay in their threads."""
    WIDTH: gl.constexpr = x.shape[1]
    if WIDTH == 8:
        return x
    else:
        left, right = gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, WIDTH // 2)), (0, 2, 1)))
        return sum_in_parts(left + right)


@gluon.jit
def hold_back(sums):
    """sums, float32 and not negative; what comes after does not come before they are there.

    The assembler moves the wait for a product up, over all that is not memory's, though the exponentials should run under
    the product (ptxas 12.8 to 13.5). So it is told of a store, which never happens.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .f32 x, y; .reg .b32 a; mov.b32 a, 0; add.f32 x, $4, $5; add.f32 y, $6, $7; add.f32 x, x, y; "
        "setp.lt.f32 p, x, 0f00000000; @p st.shared.f32 [a], x; "
        "mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7; }",
        "=f,=f,=f,=f,f,f,f,f", [sums], dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def mask_scores(qk, start_m, start_n, S, CAUSAL: gl.constexpr):
    """qk of rows from start_m on and keys from start_n on, -inf where a row does not see a key."""
    offs_n = start_n + gl.arange(0, qk.shape[1], gl.SliceLayout(0, qk.type.layout))
    visible = (offs_n < S)[None, :]
    if CAUSAL:
        offs_m = start_m + gl.arange(0, qk.shape[0], gl.SliceLayout(1, qk.type.layout))
        visible = visible & (offs_n[None, :] <= offs_m[:, None])
    return gl.where(visible, qk, float("-inf"))
