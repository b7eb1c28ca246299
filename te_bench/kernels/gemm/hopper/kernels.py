"""The kernels of the Gluon GEMM for Hopper: a warp of every program fetches, two warpgroups multiply and leave.

TURNS: a tile is one warpgroup's, and its epilogue runs under the other's products. Else both have a tile's upper and lower
half, which is easier on shared memory: 128 x 256 a program moves 128 bytes a cycle there, 128 x 128 twice 160. In turns a
warpgroup passes over the other's blocks, and a barrier's one bit of phase would show it an older block as its own: so it
waits until the other has seen all of those.
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

from te_bench.kernels.gemm.hopper.epilogue import add_by_parts, store_by_parts
from te_bench.kernels.gemm.hopper.schedule import next_position, steps_in_tile, steps_of_program, tile_origin

WARPGROUPS = gl.constexpr(2)
REGISTERS = gl.constexpr(240)  # of a multiplying thread; a fetching one has 24, and a processor 65536

# A tensor of one number, or a view into a table of them: not worth a compilation for each alignment.
UNALIGNED = ["scale", "amax", "scale_inv"]


# Fetch


@gluon.jit
def _fetch(
    a_desc, b_desc, ring, sizes,
    ACROSS: gl.constexpr, TURNS: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, STREAM: gl.constexpr,
):  # fmt: skip
    """Blocks of K of a and b, tile after tile, into the ring of STAGES."""
    a_shared, b_shared, full, empty = ring
    BOXES: gl.constexpr = 1 if TURNS else WARPGROUPS
    BOX: gl.constexpr = a_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    WIDTH: gl.constexpr = b_desc.block_type.shape[1 if ACROSS else 0]
    tiles_m, tiles_n, blocks, position, end = steps_of_program(sizes, BOX * BOXES, WIDTH, BLOCK_K, STREAM)
    step = 0
    while position < end:
        row, column = tile_origin(position // blocks, tiles_m, tiles_n, BOX * BOXES, WIDTH, GROUP_M)
        first, length = position % blocks, steps_in_tile(position, end, blocks)
        for k in range(first, first + length):
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
        position = next_position(position, length, blocks, STREAM)


# Multiply


@gluon.jit
def _block_of_b(b_shared, stage, ACROSS: gl.constexpr):
    """Block `stage` of b as (K, N): so it lies ACROSS, else as (N, K)."""
    if ACROSS:
        return b_shared.index(stage)
    else:
        return b_shared.index(stage).permute((1, 0))


@gluon.jit
def _await_turn(turn, who, parity):
    """Wait until the other warpgroup has all blocks of the tile before; parity: of how many tiles this one has made."""
    mbarrier.wait(turn.index(who), parity ^ 1 ^ who)  # the first of all waits for nobody


@gluon.jit
def _product(
    ring, turn, who, step, length, box,
    ACROSS: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
    HEIGHT: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """A warpgroup's tile of a @ b.T, float32, over `length` blocks of K from `step` of the ring on."""
    a_shared, b_shared, full, empty = ring
    acc = gl.zeros((HEIGHT, WIDTH), gl.float32, LAYOUT)
    for k in range(length):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        a, b = a_shared.index(stage * BOXES + box), _block_of_b(b_shared, stage, ACROSS)
        acc = warpgroup_mma(a, b, acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        # One block's products are under way; the block before it has been read.
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
        step += 1
    if BOXES == 1:
        mbarrier.arrive(turn.index(1 - who), count=1)  # the other's first product follows the last one's here at once
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _promoted_product(
    ring, turn, who, step, length, box,
    ACROSS: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
    HEIGHT: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """_product, in whose sums the tensor core adds up 128 of K and float32 the rest.

    Half of the tile's rows at a time: a second accumulator of all of them would not fit. While one warpgroup adds, the
    other one's products run, if they share a tile; in turns the tensor core waits.
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
    ring, turn, descs, staging, loaded, vectors, scale, amax, sizes, who,
    A_KIND: gl.constexpr, ACROSS: gl.constexpr, PROMOTE: gl.constexpr, ACTIVATION: gl.constexpr, GRADIENT: gl.constexpr,
    DTYPE: gl.constexpr, STORES: gl.constexpr, IN_PLACE: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr,
    BLOCK_K: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr, TURNS: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    """A warpgroup's tiles, or its halves of the program's tiles, and what is made of them."""
    BOXES: gl.constexpr = 1 if TURNS else WARPGROUPS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, WIDTH, 256 // ring[0].dtype.primitive_bitwidth]
    )
    residual_desc, residual_shared = descs[2], staging[1]
    tiles_m, tiles_n, blocks, position, end = steps_of_program(sizes, HEIGHT * BOXES, WIDTH, BLOCK_K, False)
    stride = gl.num_programs(0) * blocks
    step, skipped, box = 0, 0, who
    if TURNS:
        step, skipped, box = who * blocks, blocks, 0
        position += who * stride
        stride *= WARPGROUPS
    amax_bits, parity = gl.zeros((HEIGHT, 8), gl.int16, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32])), 0
    while position < end:
        row, column = tile_origin(position // blocks, tiles_m, tiles_n, HEIGHT * BOXES, WIDTH, GROUP_M)
        row += box * HEIGHT
        if residual_desc is not None:  # asked for early, so that it is there when the product is
            tma.store_wait(0)
            mbarrier.expect(loaded.index(who), residual_desc.block_type.nbytes * PARTS)
            for part in gl.static_range(PARTS):
                at, place = column + part * (WIDTH // PARTS), residual_shared.index(who * PARTS + part)
                tma.async_copy_global_to_shared(residual_desc, [row, at], loaded.index(who), place)
        product: gl.constexpr = _promoted_product if PROMOTE else _product
        if TURNS:
            _await_turn(turn, who, parity)
        x = product(ring, turn, who, step, blocks, box, ACROSS, BOXES, STAGES, LAYOUT, HEIGHT, WIDTH)
        amax_bits = store_by_parts(
            x, descs, staging, who, None if loaded is None else loaded.index(who), parity, vectors, scale, amax_bits,
            row, column, sizes[0], sizes[1], A_KIND, ACTIVATION, GRADIENT, DTYPE, amax is not None, STORES * SLOTS - 1,
            IN_PLACE, SLOTS, PARTS, PARTS, 0,
        )  # fmt: skip
        parity ^= 1
        step += blocks + skipped
        position += stride
    tma.store_wait(0)
    if amax is not None:
        largest = gl.max(amax_bits.to(DTYPE, bitcast=True).to(gl.float32).to(gl.int32, bitcast=True))
        gl.atomic_max(amax.to(gl.pointer_type(gl.int32), bitcast=True), largest, sem="relaxed")


@gluon.jit
def _multiply_and_add(
    ring, turn, shared, d_desc, vectors, sizes, who,
    A_KIND: gl.constexpr, PROMOTE: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, BLOCK_K: gl.constexpr,
    PARTS: gl.constexpr, SLOTS: gl.constexpr, TURNS: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    STREAM: gl.constexpr,
):  # fmt: skip
    """A warpgroup's stretches of K of tiles, or its halves of the program's, added to D."""
    BOXES: gl.constexpr = 1 if TURNS else WARPGROUPS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, WIDTH, 256 // ring[0].dtype.primitive_bitwidth]
    )
    tiles_m, tiles_n, blocks, position, end = steps_of_program(sizes, HEIGHT * BOXES, WIDTH, BLOCK_K, STREAM)
    step, parity, box = 0, 0, who
    if TURNS:
        box = 0
        if who > 0:
            step = steps_in_tile(position, end, blocks)
            position = next_position(position, step, blocks, STREAM)
    while position < end:
        row, column = tile_origin(position // blocks, tiles_m, tiles_n, HEIGHT * BOXES, WIDTH, GROUP_M)
        row += box * HEIGHT
        length = steps_in_tile(position, end, blocks)
        product: gl.constexpr = _promoted_product if PROMOTE else _product
        if TURNS:
            _await_turn(turn, who, parity)
        x = product(ring, turn, who, step, length, box, False, BOXES, STAGES, LAYOUT, HEIGHT, WIDTH)
        add_by_parts(x, d_desc, shared, who, vectors, row, column, sizes[0], sizes[1], A_KIND, SLOTS, PARTS, 0)
        parity ^= 1
        step += length
        position = next_position(position, length, blocks, STREAM)
        if TURNS:
            skipped = steps_in_tile(position, end, blocks)
            step += skipped
            position = next_position(position, skipped, blocks, STREAM)
    tma.store_wait(0)


# The kernels


@gluon.jit
def _allocate_ring(a_desc, b_desc, BOXES: gl.constexpr, STAGES: gl.constexpr):
    """Room for STAGES blocks of K of a and b, and for each two barriers: it is full, all BOXES have been read."""
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
    """A barrier for each warpgroup, at which one arrives."""
    barriers = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], mbarrier.MBarrierLayout())
    for who in gl.static_range(WARPGROUPS):
        mbarrier.init(barriers.index(who), count=1)
    return barriers


@gluon.jit
def _allocate_parts(desc, SLOTS: gl.constexpr):
    """Shared memory for SLOTS of each warpgroup's parts of desc's tensor."""
    shape: gl.constexpr = desc.block_type.shape
    return gl.allocate_shared_memory(desc.dtype, [WARPGROUPS * SLOTS, shape[0], shape[1]], desc.layout)


def _name(specialized: Any) -> str:
    """The kernel's name, by which a profiler tells FP8 products from those in half precision."""
    return f"gluon_gemm_{'half' if specialized.constants['A_KIND'] == 'none' else 'fp8'}_kernel"


@gluon.jit(do_not_specialize_on_alignment=UNALIGNED, repr=_name)
def gluon_gemm_kernel(
    a_desc, b_desc, d_desc, pre_desc, residual_desc, data_desc, data_t_desc,
    a_scale_inv, b_scale_inv, bias, scale, scale_inv, amax, M, N, K,
    A_KIND: gl.constexpr, ACROSS: gl.constexpr, PROMOTE: gl.constexpr, ACTIVATION: gl.constexpr, GRADIENT: gl.constexpr,
    DTYPE: gl.constexpr, OUT_LAYOUT: gl.constexpr, STORES: gl.constexpr, IN_PLACE: gl.constexpr, PARTS: gl.constexpr,
    SLOTS: gl.constexpr, TURNS: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """D = dequantise(a) @ dequantise(b).T and what gemm.Epilogue makes of it; what is None costs nothing.

    a and b in half precision are of A_KIND "none"; b may then be (K, N), ACROSS. GRADIENT: D is the product, rounded, times
    the slope of ACTIVATION at the residual.
    STORES: of d, pre, data and data_t those that are there. PARTS: in which they leave; SLOTS of each are in shared memory,
    but all of the residual, whose place out takes if IN_PLACE. OUT_LAYOUT: that of a part of out.
    """
    HEIGHT: gl.constexpr = a_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    WIDTH: gl.constexpr = b_desc.block_type.shape[1 if ACROSS else 0]
    BOXES: gl.constexpr = 1 if TURNS else WARPGROUPS
    if scale_inv is not None and gl.program_id(0) == 0:
        gl.store(scale_inv, gl.div_rn(1.0, gl.load(scale)))
    ring = _allocate_ring(a_desc, b_desc, BOXES, STAGES)
    turn = _allocate_barriers()
    residual_shared, out_shared, loaded = None, None, None
    if residual_desc is not None:
        residual_shared = _allocate_parts(residual_desc, PARTS)
        loaded = _allocate_barriers()
    if IN_PLACE:
        out_shared = residual_shared
    elif d_desc is not None or data_t_desc is not None:
        out_shared = gl.allocate_shared_memory(DTYPE, [WARPGROUPS * SLOTS, HEIGHT, WIDTH // PARTS], OUT_LAYOUT)
    pre_shared, data_shared, data_t_shared = None, None, None
    if pre_desc is not None:
        pre_shared = _allocate_parts(pre_desc, SLOTS)
    if data_desc is not None:
        data_shared = _allocate_parts(data_desc, SLOTS)
    if data_t_desc is not None:
        data_t_shared = _allocate_parts(data_t_desc, SLOTS)
    fence_async_shared()
    descs = (d_desc, pre_desc, residual_desc, data_desc, data_t_desc)
    staging = (out_shared, residual_shared, pre_shared, data_shared, data_t_shared)
    vectors, sizes = (a_scale_inv, b_scale_inv, bias), (M, N, K)
    gl.warp_specialize(
        [
            (_multiply, (
                ring, turn, descs, staging, loaded, vectors, scale, amax, sizes, 0,
                A_KIND, ACROSS, PROMOTE, ACTIVATION, GRADIENT, DTYPE, STORES, IN_PLACE, HEIGHT, WIDTH, BLOCK_K,
                PARTS, SLOTS, TURNS, STAGES, GROUP_M,
            )),
            (_multiply, (
                ring, turn, descs, staging, loaded, vectors, scale, amax, sizes, 1,
                A_KIND, ACROSS, PROMOTE, ACTIVATION, GRADIENT, DTYPE, STORES, IN_PLACE, HEIGHT, WIDTH, BLOCK_K,
                PARTS, SLOTS, TURNS, STAGES, GROUP_M,
            )),
            (_fetch, (a_desc, b_desc, ring, sizes, ACROSS, TURNS, STAGES, GROUP_M, False)),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def gluon_gemm_accumulate_kernel(
    a_desc, b_desc, d_desc, a_scale_inv, b_scale_inv, M, N, K,
    A_KIND: gl.constexpr, PROMOTE: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr,
    TURNS: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, STREAM: gl.constexpr,
):  # fmt: skip
    """D, float32, += dequantise(a) @ dequantise(b).T.

    STREAM: every program has as many blocks of K as any other, whatever the tiles, and adds what it has of each.
    """
    HEIGHT: gl.constexpr = a_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    WIDTH: gl.constexpr = b_desc.block_type.shape[0]
    BOXES: gl.constexpr = 1 if TURNS else WARPGROUPS
    ring = _allocate_ring(a_desc, b_desc, BOXES, STAGES)
    turn = _allocate_barriers()
    shared = _allocate_parts(d_desc, SLOTS)
    fence_async_shared()
    vectors, sizes = (a_scale_inv, b_scale_inv, None), (M, N, K)
    gl.warp_specialize(
        [
            (_multiply_and_add, (
                ring, turn, shared, d_desc, vectors, sizes, 0,
                A_KIND, PROMOTE, HEIGHT, WIDTH, BLOCK_K, PARTS, SLOTS, TURNS, STAGES, GROUP_M, STREAM,
            )),
            (_multiply_and_add, (
                ring, turn, shared, d_desc, vectors, sizes, 1,
                A_KIND, PROMOTE, HEIGHT, WIDTH, BLOCK_K, PARTS, SLOTS, TURNS, STAGES, GROUP_M, STREAM,
            )),
            (_fetch, (a_desc, b_desc, ring, sizes, False, TURNS, STAGES, GROUP_M, STREAM)),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip
