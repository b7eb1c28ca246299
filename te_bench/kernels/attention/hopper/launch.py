"""Launch Gluon's attention kernels: tiles, registers, TMA descriptors."""

import sys
from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from te_bench.kernels import architecture
from te_bench.kernels.attention.autograd import Gradients, empty_results
from te_bench.kernels.attention.hopper.backward_fused import gluon_attention_backward_fused_kernel
from te_bench.kernels.attention.hopper.backward_keys import gluon_attention_backward_keys_kernel
from te_bench.kernels.attention.hopper.backward_rows import gluon_attention_backward_rows_kernel
from te_bench.kernels.attention.hopper.backward_sums import attention_dq_of_sums_kernel, gluon_attention_delta_kernel
from te_bench.kernels.attention.hopper.forward import gluon_attention_forward_kernel
from te_bench.kernels.attention.portable.launch import row_strides

LOG2_E = 1.4426950408889634
ROWS = 64  # of a warpgroup
DELTA_ROWS = 16  # of a program; a divisor of ROWS. Fewer were faster (benchmarks/NOTES.md)
ALL = sys.maxsize  # programs that share a pair: all of them


class Tiling(NamedTuple):
    """A program's tile, 64 rows (or keys) per warpgroup, and its buffers.

    at_once: keys (or rows) per block; stages: blocks in shared memory; slots: tiles whose own rows are there.
    registers: of a multiplying thread. overlap: exponentials run during the previous product. in_registers: the dK, dV
    kernel reads its own keys and values from registers. ahead: in the fused kernel, the next block's scores begin
    before this block's dQ leaves. sharing: how many programs work on one sequence and head at a time; ALL, or 0 for as
    few as possible.
    """

    warpgroups: int
    at_once: int
    stages: int
    slots: int
    registers: int
    overlap: bool = False
    in_registers: bool = False
    ahead: bool = False
    sharing: int = 0

    def fetching(self) -> int:
        """Return the registers left for fetching threads."""
        # Before warpgroups redistribute a thread's registers, the fetching warp has a warpgroup's.
        at_start = architecture.HOPPER_REGISTERS // (128 * (self.warpgroups + 1)) // 8 * 8
        left = at_start * (self.warpgroups + 1) - self.warpgroups * self.registers
        assert left >= 24, f"{self}: {left} registers to fetch with"
        return left

    def constants(self) -> dict[str, int]:
        """Return the constants of every kernel."""
        return {
            "CONSUMERS": self.warpgroups, "STAGES": self.stages, "REGISTERS": self.registers, "FETCHING": self.fetching(),
            "num_warps": 4,
        }  # fmt: skip


#: {head width: plan}, the fastest, or within 4 % of it, at 1024 to 16384 keys (benchmarks/NOTES.md). At D128, two
#: warpgroups would use keys faster than memory delivers them, so four programs share a head's keys.
FORWARD: Mapping[int, Tiling] = {
    64: Tiling(4, 64, 4, 2, 112),
    128: Tiling(2, 128, 2, 2, 240, overlap=True, sharing=4),
}
#: From LONG keys on, dQ has other plans. It lies between the lengths where the order changed.
LONG = 4096
OF_ROWS: Mapping[tuple[int, bool], Tiling] = {  # dQ
    (64, False): Tiling(2, 64, 4, 2, 240), (64, True): Tiling(3, 64, 4, 2, 160),
    (128, False): Tiling(2, 64, 3, 1, 240), (128, True): Tiling(2, 64, 3, 1, 240),
}  # fmt: skip
OF_KEYS: Mapping[int, Tiling] = {  # dK and dV, for any number of keys
    64: Tiling(2, 64, 4, 2, 240, in_registers=True),
    128: Tiling(2, 32, 4, 2, 240),
}
#: {(head width, causal): plan} of the fused kernel, with dQ's sums in global memory. With 4 programs sharing a pair,
#: its rows and sums move 4 times less often; without a causal mask all may share. Unmeasured cases have no entry.
FUSED: Mapping[tuple[int, bool], Tiling] = {
    (64, True): Tiling(2, 128, 2, 1, 240, sharing=4),
    (128, True): Tiling(2, 64, 3, 1, 240, ahead=True, sharing=4),
    (128, False): Tiling(2, 64, 3, 1, 240, sharing=ALL),
}
LONGEST = 2**31 // 128 - ROWS  # of a head, whose sums have 32-bit offsets
#: {head width: fewest keys}. D64's 1,024 are faster by two kernels: the sums weigh more. Between is unmeasured.
FUSED_FROM: Mapping[int, int] = {64: LONG, 128: 2048}


def _fits(x: Tensor) -> bool:
    """Return whether x's strides suit TMA: nonzero, of 16 bytes, with contiguous rows."""
    *outer, last = zip(x.shape, x.stride(), strict=True)
    return last[1] == 1 and not any(size > 1 and (not step or step % 8) for size, step in outer)


def make_readable(x: Tensor) -> Tensor:
    """Return x, or a copy if TMA cannot read it, for its strides or its address."""
    return x if _fits(x) and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """Allocate dq, dk, dv in the inputs' memory order if TMA can write it, whatever their addresses."""

    def like(x: Tensor) -> Tensor:
        return torch.empty_like(x, memory_format=torch.preserve_format if _fits(x) else torch.contiguous_format)

    return like(q), like(k), like(v)


def describe(x: Tensor, rows: int, line: int = 128) -> TensorDescriptor:
    """Describe blocks (1, 1, rows, D) of x (B, H, T, D), last stride 1, to TMA; `line`: bytes of a row together."""
    columns = x.shape[3]
    steps = [step if size > 1 else columns for size, step in zip(x.shape[:3], x.stride()[:3], strict=True)]
    layout = gl.NVMMASharedLayout(line, 8 * x.element_size(), 4)
    return TensorDescriptor(x, list(x.shape), [*steps, 1], [1, 1, rows, columns], layout)


def pad_last_rows(q: Tensor, rows: int = ROWS) -> Tensor:
    """Return q's last incomplete block, padded to (B, H, rows, D) with its last row; q itself if `rows` divides T."""
    there = q.shape[2] % rows
    return torch.cat([q[:, :, -there:], q[:, :, -1:].expand(-1, -1, rows - there, -1)], 2) if there else q


def deal_tiles(p: Tiling, q: Tensor, k: Tensor, *, of_keys: bool) -> tuple[int, tuple[int, ...]]:
    """Return the number of programs, and (T, S, H, group, pairs, blocks, near, whole, rest) for the kernels."""
    batch, heads, rows, _ = q.shape
    keys, group = k.shape[2], heads // k.shape[1]
    pairs = batch * (k.shape[1] if of_keys else heads)
    # Do not set `near` to the number of programs: those that get their tiles first would do 8-14 % more than average.
    near = min(pairs, max(1, architecture.processors(q.device) // p.sharing)) if p.sharing else pairs
    blocks = triton.cdiv(keys if of_keys else rows, ROWS * p.warpgroups)
    tiles = blocks * pairs
    programs = min(tiles, architecture.processors(q.device))
    return programs, (rows, keys, heads, group, pairs, blocks, near, *divmod(tiles, programs))


def forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, given: Tiling | None = None
) -> tuple[Tensor, Tensor]:
    """Return out (B, H, T, D), q's dtype, memory order (B, T, H, D), and lse (B, H, T) float32; inputs not empty."""
    p = given or FORWARD[q.shape[3]]
    q, k, v = (make_readable(x) for x in (q, k, v))
    out, lse = empty_results(q, v)
    programs, sizes = deal_tiles(p, q, k, of_keys=False)
    descriptors = [describe(x, n) for x, n in ((q, ROWS), (k, p.at_once), (v, p.at_once), (out, ROWS))]
    with torch.cuda.device_of(q):
        gluon_attention_forward_kernel[(programs,)](
            *descriptors, lse, float(scale * LOG2_E), *sizes,
            CAUSAL=causal, EDGE=causal or k.shape[2] % p.at_once != 0, OVERLAP=p.overlap, SLOTS=p.slots, **p.constants(),
        )  # fmt: skip
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float,
    deterministic: bool = False, fused: Tiling | None = None, gradients: Gradients | None = None,
) -> Gradients:  # fmt: skip
    """Return dq, dk, dv in the inputs' dtype; deterministic: bitwise the same in every run, by the two kernels.

    Otherwise the fused kernel where it is faster. fused: force it, with this plan. gradients: memory, writable by TMA.
    """
    if fused is None and not deterministic and k.shape[2] >= FUSED_FROM[k.shape[3]] and q.shape[2] <= LONGEST:
        fused = FUSED.get((k.shape[3], causal))
    gradients = gradients or empty_gradients(q, k, v)
    dout, q, k, v, out = (make_readable(x) for x in (dout, q, k, v, out))
    with torch.cuda.device_of(q):
        if fused is None:
            _backward_by_two(gradients, dout, q, k, v, out, lse, causal, scale)
        else:
            _backward_fused(gradients, dout, q, k, v, out, lse, causal, scale, fused)
    return gradients


def _backward_by_two(
    gradients: Gradients, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float,
) -> None:  # fmt: skip
    """Compute the gradients by two kernels, from inputs that TMA can read."""
    (batch, heads, rows, width), (dq, dk, dv) = q.shape, gradients
    of_rows, of_keys = OF_ROWS[width, k.shape[2] >= LONG], OF_KEYS[width]
    padded = triton.cdiv(rows, ROWS) * ROWS
    info = q.new_empty(batch * heads, 2, padded, dtype=torch.float32)
    (programs, sizes), n = deal_tiles(of_rows, q, k, of_keys=False), of_rows.at_once
    held, arriving = [describe(x, ROWS) for x in (q, dout, out)], [describe(x, n) for x in (k, v)]
    gluon_attention_backward_rows_kernel[(programs,)](
        *held, *arriving, describe(dq, ROWS), lse, info, padded, float(scale * LOG2_E), *sizes,
        CAUSAL=causal, EDGE=causal or k.shape[2] % n != 0, SLOTS=of_rows.slots, **of_rows.constants(),
    )  # fmt: skip
    (programs, sizes), n = deal_tiles(of_keys, q, k, of_keys=True), of_keys.at_once
    held, arriving = [describe(x, ROWS) for x in (k, v)], [describe(x, n) for x in (q, pad_last_rows(q), dout)]
    gluon_attention_backward_keys_kernel[(programs,)](
        *held, *arriving, describe_info(info, n), describe(dk, ROWS), describe(dv, ROWS), float(scale * LOG2_E), *sizes,
        CAUSAL=causal, IN_REGISTERS=of_keys.in_registers, SLOTS=of_keys.slots, **of_keys.constants(),
    )  # fmt: skip


def _backward_fused(
    gradients: Gradients, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float, p: Tiling,
) -> None:  # fmt: skip
    """Compute the gradients by the fused kernel, from inputs that TMA can read."""
    (dq, dk, dv), n = gradients, p.at_once
    batch, heads, rows, width = q.shape
    padded = triton.cdiv(rows, n) * n
    info = q.new_empty(2, batch * heads, padded, dtype=torch.float32)
    sums = q.new_empty(batch * heads, padded, width, dtype=torch.float32)
    gluon_attention_delta_kernel[(batch * heads * padded // DELTA_ROWS,)](
        out, dout, lse, *info.unbind(), sums, *row_strides(out, dout), heads, rows, padded,
        D=width, BLOCK_M=DELTA_ROWS, num_warps=4,
    )  # fmt: skip
    programs, sizes = deal_tiles(p, q, k, of_keys=True)
    held, arriving = [describe(x, ROWS) for x in (k, v)], [describe(x, n) for x in (q, pad_last_rows(q, n), dout)]
    gluon_attention_backward_fused_kernel[(programs,)](
        *held, *arriving, describe_info(info.transpose(0, 1), n), describe(dk, ROWS), describe(dv, ROWS),
        describe_sums(sums) if p.ahead else sums, padded, float(scale * LOG2_E), *sizes,
        CAUSAL=causal, EDGE=causal or k.shape[2] % (p.warpgroups * ROWS) != 0, AHEAD=p.ahead, **p.constants(),
    )  # fmt: skip
    store_dq(sums, dq, scale)


def describe_sums(sums: Tensor) -> TensorDescriptor:
    """Describe 64 x 64 blocks of dQ's sums, each in one line, to TMA."""
    blocks = sums.view(-1, ROWS * ROWS // 256, 256)
    return TensorDescriptor(
        blocks, list(blocks.shape), list(blocks.stride()), [1, *blocks.shape[1:]], gl.NVMMASharedLayout(0, 32, 3)
    )


def store_dq(sums: Tensor, dq: Tensor, scale: float) -> None:
    """Write dq (B, H, T, D) from the sums (B H, T padded, D) of a fused kernel."""
    (pairs, padded, width), (_, heads, rows, _) = sums.shape, dq.shape
    attention_dq_of_sums_kernel[(pairs * padded // ROWS,)](
        sums, dq, *row_strides(dq), float(scale), heads, rows, padded, D=width, num_warps=4
    )


def describe_info(info: Tensor, rows: int) -> TensorDescriptor:
    """Describe blocks (1, 2, rows) of info (pairs, 2, rows padded), lse_2 and delta, to TMA."""
    layout = gl.NVMMASharedLayout(0, 32, 3)
    return TensorDescriptor(info, list(info.shape), list(info.stride()), [1, 2, rows], layout)
