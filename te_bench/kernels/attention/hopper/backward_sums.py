"""Before and after Gluon's fused backward kernels: delta and levels of the rows, zeros for dQ's sums; dQ of the sums.

In plain Triton: nothing but memory decides their time. dQ of the sums is FP8 attention's, too, and no backend's mark.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from te_bench.kernels.tile import rounded

BLOCK = tl.constexpr(64)  # rows of the sums' order
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _here(program, H, T, padded, D: tl.constexpr, ROWS: tl.constexpr):
    """Batch and head; where the program's rows of all begin in their sums, and of their pair; the rows, which are there."""
    pair = (program // (padded // ROWS)).to(tl.int64)
    first = program % (padded // ROWS) * ROWS
    rows = first + tl.arange(0, ROWS)
    line = (pair * padded + first) * D + tl.arange(0, ROWS * D)
    return pair // H, pair % H, pair, line, rows, (rows < T)[:, None] & (tl.arange(0, D) < D)[None, :]


@triton.jit
def gluon_attention_delta_kernel(
    out, dout, lse, level, delta, sums, out_b, out_h, out_t, dout_b, dout_h, dout_t, H, T, padded, D: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """level, delta (pairs, padded) as _gluon_backward_rows has them; 0 in sums (pairs, padded, D)."""
    b, h, pair, line, rows, there = _here(tl.program_id(0), H, T, padded, D, ROWS)
    of_out = rows.to(tl.int64)[:, None] * out_t + tl.arange(0, D)[None, :]
    of_dout = rows.to(tl.int64)[:, None] * dout_t + tl.arange(0, D)[None, :]
    made = tl.load(out + b * out_b + h * out_h + of_out, there, 0.0).to(tl.float32)
    come = tl.load(dout + b * dout_b + h * dout_h + of_dout, there, 0.0).to(tl.float32)
    tl.store(delta + pair * padded + rows, tl.sum(made * come, 1))
    tl.store(level + pair * padded + rows, tl.load(lse + pair * T + rows, rows < T, float("inf")) * LOG2_E)
    tl.store(sums + line, tl.zeros((ROWS * D,), tl.float32))


@triton.jit
def attention_dq_of_sums_kernel(sums, dq, dq_b, dq_h, dq_t, scale, H, T, padded, D: tl.constexpr):
    """dq = scale sums, which are of 64 rows in _gluon_backward_fused's order, in dq's dtype."""
    # The last ones are in the L2 still.
    b, h, _, line, rows, there = _here(tl.num_programs(0) - 1 - tl.program_id(0), H, T, padded, D, BLOCK)
    apart = tl.permute(tl.reshape(tl.load(sums + line), (D // 8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5))
    at = rows.to(tl.int64)[:, None] * dq_t + tl.arange(0, D)[None, :]
    made = rounded(tl.reshape(apart, (BLOCK, D)) * scale, dq.dtype.element_ty)
    tl.store(dq + b * dq_b + h * dq_h + at, made, there)
