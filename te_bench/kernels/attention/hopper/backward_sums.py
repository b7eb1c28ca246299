"""Kernels before and after Gluon's fused backward kernels: delta, lse_2 and zeroed dQ sums; dQ from the sums.

They are memory-bound, hence plain Triton. FP8 attention uses the one for dQ, too, so it identifies no backend.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from te_bench.kernels.tile import rounded

BLOCK = tl.constexpr(64)  # rows of a block of the sums
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _locate(program, H, T, padded, D: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return batch, head, pair, the program's offsets in the sums, its rows, and a mask of those that exist."""
    pair = (program // (padded // BLOCK_M)).to(tl.int64)
    start_m = program % (padded // BLOCK_M) * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    line = (pair * padded + start_m) * D + tl.arange(0, BLOCK_M * D)
    return pair // H, pair % H, pair, line, offs_m, (offs_m < T)[:, None] & (tl.arange(0, D) < D)[None, :]


@triton.jit
def gluon_attention_delta_kernel(
    out, do, lse, lse_2, delta, dq_sum, out_b, out_h, out_t, do_b, do_h, do_t, H, T, padded, D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Compute lse_2 and delta (pairs, padded) as in backward_rows; zero dq_sum (pairs, padded, D)."""
    b, h, pair, line, offs_m, inside = _locate(tl.program_id(0), H, T, padded, D, BLOCK_M)
    offs_out = offs_m.to(tl.int64)[:, None] * out_t + tl.arange(0, D)[None, :]
    offs_do = offs_m.to(tl.int64)[:, None] * do_t + tl.arange(0, D)[None, :]
    out_tile = tl.load(out + b * out_b + h * out_h + offs_out, inside, 0.0).to(tl.float32)
    do_tile = tl.load(do + b * do_b + h * do_h + offs_do, inside, 0.0).to(tl.float32)
    tl.store(delta + pair * padded + offs_m, tl.sum(out_tile * do_tile, 1))
    tl.store(lse_2 + pair * padded + offs_m, tl.load(lse + pair * T + offs_m, offs_m < T, float("inf")) * LOG2_E)
    tl.store(dq_sum + line, tl.zeros((BLOCK_M * D,), tl.float32))


@triton.jit
def attention_dq_of_sums_kernel(dq_sum, dq, dq_b, dq_h, dq_t, scale, H, T, padded, D: tl.constexpr):
    """Write dq = scale dq_sum in dq's dtype; dq_sum's 64 rows are ordered by backward_fused._flatten_dq."""
    # Begin with the last ones, which are still in the L2.
    b, h, _, line, offs_m, inside = _locate(tl.num_programs(0) - 1 - tl.program_id(0), H, T, padded, D, BLOCK)
    in_pairs = tl.permute(tl.reshape(tl.load(dq_sum + line), (D // 8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5))
    at = offs_m.to(tl.int64)[:, None] * dq_t + tl.arange(0, D)[None, :]
    dq_tile = rounded(tl.reshape(in_pairs, (BLOCK, D)) * scale, dq.dtype.element_ty)
    tl.store(dq + b * dq_b + h * dq_h + at, dq_tile, inside)
