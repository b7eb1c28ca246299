"""The kernel of the Gluon GEMM for Hopper: one warp of each program fetches, two warpgroups multiply and store.

TURNS: a tile belongs to one warpgroup, and its epilogue runs during the other's products. Otherwise each warpgroup has
half of a tile's rows, which needs less shared-memory bandwidth: 128 bytes a cycle for 128 x 256, twice 160 for 128 x
128. In turns a warpgroup skips the other's blocks, and a barrier's single phase bit could make it take an older block
for its own: so it waits until the other has seen all of those.
Source of the scheme: CUTLASS's "ping-pong" and "cooperative" kernels for Hopper, as NVIDIA describes them.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from te_bench.kernels.gemm.hopper.epilogue import store_by_parts

WARPGROUPS = gl.constexpr(2)
REGISTERS = gl.constexpr(240)  # per multiplying thread; a fetching one has 24, an SM 65536

# Fetch


@gluon.jit
def _tile_origin(index, tiles_m, tiles_n, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, GROUP_M: gl.constexpr):
    """Return a tile's first row and column: GROUP_M tiles down, then one to the right."""
    group = index // (GROUP_M * tiles_n)
    first = group * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    within = index % (GROUP_M * tiles_n)
    return (first + within % height) * HEIGHT, (within // height) * WIDTH


@gluon.jit
def _fetch(
    a_desc, b_desc, ring, sizes,
    ACROSS: gl.constexpr, TURNS: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Fetch blocks of K of a and b, tile after tile, into the ring of STAGES."""
    a_shared, b_shared, full, empty = ring
    BOXES: gl.constexpr = 1 if TURNS else WARPGROUPS
    BOX: gl.constexpr = a_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    WIDTH: gl.constexpr = b_desc.block_type.shape[1 if ACROSS else 0]
    M, N, K = sizes
    tiles_m, tiles_n, blocks = gl.cdiv(M, BOX * BOXES), gl.cdiv(N, WIDTH), gl.cdiv(K, BLOCK_K)
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = _tile_origin(tile, tiles_m, tiles_n, BOX * BOXES, WIDTH, GROUP_M)
        for k in range(blocks):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, a_desc.block_type.nbytes * BOXES + b_desc.block_type.nbytes)
            for box in gl.static_range(BOXES):
                place = a_shared.index(stage * BOXES + box)
                tma.async_copy_global_to_shared(a_desc, [row + box * BOX, k * BLOCK_K], ready, place)
            at = [k * BLOCK_K, column] if ACROSS else [column, k * BLOCK_K]
            tma.async_copy_global_to_shared(b_desc, at, ready, b_shared.index(stage))
            step += 1


# Multiply


@gluon.jit
def _block_of_b(b_shared, stage, ACROSS: gl.constexpr):
    """Return block `stage` of b as (K, N); it is stored so if ACROSS, else as (N, K)."""
    if ACROSS:
        return b_shared.index(stage)
    else:
        return b_shared.index(stage).permute((1, 0))


@gluon.jit
def _await_turn(turn, who, parity):
    """Wait until the other warpgroup has all blocks of the previous tile; parity: of this one's finished tiles."""
    mbarrier.wait(turn.index(who), parity ^ 1 ^ who)  # the very first wait returns at once


@gluon.jit
def _product(
    ring, turn, who, step, length, box,
    ACROSS: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
    HEIGHT: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Compute a warpgroup's tile of a @ b.T, float32, over `length` blocks of K, from `step` of the ring on."""
    a_shared, b_shared, full, empty = ring
    acc = gl.zeros((HEIGHT, WIDTH), gl.float32, LAYOUT)
    for k in range(length):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        a, b = a_shared.index(stage * BOXES + box), _block_of_b(b_shared, stage, ACROSS)
        acc = warpgroup_mma(a, b, acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        # One block's products are running; the previous block has been read.
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
        step += 1
    if BOXES == 1:
        mbarrier.arrive(turn.index(1 - who), count=1)  # the other's first product can follow at once
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _promoted_product(
    ring, turn, who, step, length, box,
    ACROSS: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
    HEIGHT: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Compute `_product`, accumulating 128 of K in the tensor core and the rest in float32.

    It takes half the rows at a time, because a second full accumulator would not fit. While one warpgroup adds, the
    other's products run if they share a tile; in turns the tensor core waits.
    """
    a_shared, b_shared, full, empty = ring
    HALF: gl.constexpr = HEIGHT // 2
    upper = gl.zeros((HALF, WIDTH), gl.float32, LAYOUT)
    lower = gl.zeros((HALF, WIDTH), gl.float32, LAYOUT)
    part = gl.zeros((HALF, WIDTH), gl.float32, LAYOUT)
    for _ in range(length):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        a, b = a_shared.index(stage * BOXES + box), _block_of_b(b_shared, stage, ACROSS)
        part = warpgroup_mma(a.slice(0, HALF, 0), b, part, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        upper += part
        part = warpgroup_mma(a.slice(HALF, HALF, 0), b, part, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(empty.index(stage), count=1)
        lower += part
        step += 1
    if BOXES == 1:
        mbarrier.arrive(turn.index(1 - who), count=1)
    whole = gl.reshape(gl.permute(gl.join(upper, lower), (2, 0, 1)), (HEIGHT, WIDTH))
    return gl.convert_layout(whole, LAYOUT, assert_trivial=True)


@gluon.jit
def _multiply(
    ring, turn, d_desc, h_desc, d_shared, h_shared, loaded, vectors, sizes, who,
    A_KIND: gl.constexpr, PROMOTE: gl.constexpr, ACTIVATION: gl.constexpr, GRADIENT: gl.constexpr,
    HEIGHT: gl.constexpr, WIDTH: gl.constexpr, BLOCK_K: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr,
    TURNS: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Compute and store a warpgroup's tiles, or its halves of the program's tiles."""
    BOXES: gl.constexpr = 1 if TURNS else WARPGROUPS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, WIDTH, 256 // ring[0].dtype.primitive_bitwidth]
    )
    PENDING: gl.constexpr = (1 if h_desc is None else 2) * SLOTS - 1
    M, N, K = sizes
    tiles_m, tiles_n, blocks = gl.cdiv(M, HEIGHT * BOXES), gl.cdiv(N, WIDTH), gl.cdiv(K, BLOCK_K)
    # Count in blocks over all tiles: counting tiles, the exact GELU spills a register (Triton 3.6).
    position, stride = gl.program_id(0) * blocks, gl.num_programs(0) * blocks
    step, skipped, box, parity = 0, 0, who, 0
    if TURNS:
        step, skipped, box = who * blocks, blocks, 0
        position += who * stride
        stride *= WARPGROUPS
    while position < tiles_m * tiles_n * blocks:
        row, column = _tile_origin(position // blocks, tiles_m, tiles_n, HEIGHT * BOXES, WIDTH, GROUP_M)
        row += box * HEIGHT
        if GRADIENT:  # request h early, so that it arrives before the product
            tma.store_wait(0)
            mbarrier.expect(loaded.index(who), h_desc.block_type.nbytes * PARTS)
            for part in gl.static_range(PARTS):
                at, place = column + part * (WIDTH // PARTS), h_shared.index(who * PARTS + part)
                tma.async_copy_global_to_shared(h_desc, [row, at], loaded.index(who), place)
        product: gl.constexpr = _promoted_product if PROMOTE else _product
        if TURNS:
            _await_turn(turn, who, parity)
        x = product(ring, turn, who, step, blocks, box, GRADIENT, BOXES, STAGES, LAYOUT, HEIGHT, WIDTH)
        store_by_parts(
            x, d_desc, h_desc, d_shared, h_shared, who, None if loaded is None else loaded.index(who), parity, vectors,
            row, column, M, N, A_KIND, ACTIVATION, GRADIENT, PENDING, SLOTS, PARTS, 0,
        )  # fmt: skip
        parity ^= 1
        step += blocks + skipped
        position += stride
    tma.store_wait(0)


# The kernel


@gluon.jit
def _allocate_ring(a_desc, b_desc, BOXES: gl.constexpr, STAGES: gl.constexpr):
    """Allocate STAGES blocks of K of a and b, each with two barriers: full, and read by all BOXES."""
    a_shape: gl.constexpr = a_desc.block_type.shape
    b_shape: gl.constexpr = b_desc.block_type.shape
    a_shared = gl.allocate_shared_memory(a_desc.dtype, [STAGES * BOXES, a_shape[0], a_shape[1]], a_desc.layout)
    b_shared = gl.allocate_shared_memory(b_desc.dtype, [STAGES, b_shape[0], b_shape[1]], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=BOXES)
    return a_shared, b_shared, full, empty


@gluon.jit
def _allocate_barriers():
    """Make a barrier with one arrival for each warpgroup."""
    barriers = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], mbarrier.MBarrierLayout())
    for who in gl.static_range(WARPGROUPS):
        mbarrier.init(barriers.index(who), count=1)
    return barriers


@gluon.jit
def _allocate_parts(desc, SLOTS: gl.constexpr):
    """Allocate shared memory for SLOTS parts of desc's tensor per warpgroup."""
    shape: gl.constexpr = desc.block_type.shape
    return gl.allocate_shared_memory(desc.dtype, [WARPGROUPS * SLOTS, shape[0], shape[1]], desc.layout)


def _name(specialized: Any) -> str:
    """Return the kernel's name, by which a profiler tells FP8 from half precision."""
    return f"gluon_gemm_{'half' if specialized.constants['A_KIND'] == 'none' else 'fp8'}_kernel"


@gluon.jit(repr=_name)
def gluon_gemm_kernel(
    a_desc, b_desc, d_desc, h_desc, a_scale_inv, b_scale_inv, bias, M, N, K,
    A_KIND: gl.constexpr, PROMOTE: gl.constexpr, ACTIVATION: gl.constexpr, GRADIENT: gl.constexpr,
    PARTS: gl.constexpr, SLOTS: gl.constexpr, TURNS: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Compute D = dequantise(a) @ dequantise(b).T + bias; arguments that are None cost nothing.

    For half-precision a and b A_KIND is "none". ACTIVATION: the rounded product is stored as h, and D = f(h). GRADIENT:
    D is the rounded product times f'(h), and b lies ACROSS, as (K, N). PARTS: D's parts, stored in sequence; SLOTS of
    them are in shared memory, for a GRADIENT all of h's, which D overwrites.
    """
    HEIGHT: gl.constexpr = a_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    WIDTH: gl.constexpr = b_desc.block_type.shape[1 if GRADIENT else 0]
    BOXES: gl.constexpr = 1 if TURNS else WARPGROUPS
    ring = _allocate_ring(a_desc, b_desc, BOXES, STAGES)
    turn = _allocate_barriers()
    d_shared, h_shared, loaded = _allocate_parts(d_desc, SLOTS), None, None
    if GRADIENT:
        h_shared, loaded = d_shared, _allocate_barriers()
    elif h_desc is not None:
        h_shared = _allocate_parts(h_desc, SLOTS)
    fence_async_shared()
    vectors, sizes = (a_scale_inv, b_scale_inv, bias), (M, N, K)
    gl.warp_specialize(
        [
            (_multiply, (
                ring, turn, d_desc, h_desc, d_shared, h_shared, loaded, vectors, sizes, 0,
                A_KIND, PROMOTE, ACTIVATION, GRADIENT, HEIGHT, WIDTH, BLOCK_K, PARTS, SLOTS, TURNS, STAGES, GROUP_M,
            )),
            (_multiply, (
                ring, turn, d_desc, h_desc, d_shared, h_shared, loaded, vectors, sizes, 1,
                A_KIND, PROMOTE, ACTIVATION, GRADIENT, HEIGHT, WIDTH, BLOCK_K, PARTS, SLOTS, TURNS, STAGES, GROUP_M,
            )),
            (_fetch, (a_desc, b_desc, ring, sizes, GRADIENT, TURNS, STAGES, GROUP_M)),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip
