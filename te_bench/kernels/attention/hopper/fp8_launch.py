"""Launching FP8 attention's kernels for Hopper: tiles, registers, TMA's descriptors."""

from collections.abc import Mapping

import torch
import triton
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.attention.autograd import Gradients
from te_bench.kernels.attention.fp8_quantize import Operands
from te_bench.kernels.attention.hopper.fp8_backward import fp8_attention_backward_gluon_kernel
from te_bench.kernels.attention.hopper.fp8_forward import SWIZZLE, fp8_attention_forward_gluon_kernel
from te_bench.kernels.attention.hopper.launch import (
    ALL,
    LOG2_E,
    LONGEST,
    ROWS,
    Tiling,
    deal_tiles,
    describe,
    describe_info,
    make_readable,
    store_dq,
)
from te_bench.kernels.attention.portable.fp8_backward import quantize_dout

#: Fastest, or within 4 % of it, in sweeps of heads of 128 at T2048 to 16384 (benchmarks/NOTES.md).
FORWARD = Tiling(3, 128, 3, 2, 160)
#: {causal: plan}. stages: for unquantised rows; slots: for FP8 rows.
BACKWARD: Mapping[bool, Tiling] = {
    True: Tiling(2, 64, 3, 2, 240, sharing=4),
    False: Tiling(2, 64, 2, 3, 240, sharing=ALL),
}


def forward_pays(q: Tensor) -> bool:
    """Return whether it beats Triton's for q (B, H, T, D): its large tiles should number at least one per SM."""
    batch, heads, rows, _ = q.shape
    tiles = batch * heads * triton.cdiv(rows, ROWS * FORWARD.warpgroups)
    return rows >= 512 and tiles >= architecture.processors(q.device)


def backward_pays(q: Tensor, k: Tensor) -> bool:
    """Return whether it beats Triton's backward pass (fewer keys: not measured); sums have 32-bit offsets."""
    return k.shape[2] >= 256 and q.shape[2] <= LONGEST


def forward(
    out: Tensor, lse: Tensor, fp8: Operands, keys: int, causal: bool, scale: float, given: Tiling | None = None
) -> None:
    """Compute `portable.fp8_forward.forward` for heads of 128 features."""
    p, (q, k, v), (_, _, rows, width) = given or FORWARD, fp8, out.shape
    assert width == q.by_rows.shape[3] == v.transposed.shape[3] == 128, "of 128 features, none of them padding"
    assert p.at_once == v.transposed.shape[4], "blocks of values as the quantiser leaves them"
    programs, sizes = deal_tiles(p, q.by_rows[:, :, :rows], k.by_rows[:, :, :keys], of_keys=False)
    with torch.cuda.device_of(out):
        fp8_attention_forward_gluon_kernel[(programs,)](
            describe(q.by_rows, ROWS), describe(k.by_rows, p.at_once), describe(v.transposed.flatten(2, 3), width),
            describe(out, ROWS, SWIZZLE.value), lse, q.scale_inv, k.scale_inv, v.scale_inv, float(scale * LOG2_E), *sizes,
            SLOTS=p.slots, CAUSAL=causal, EDGE=causal or keys % p.at_once != 0, **p.constants(),
        )  # fmt: skip


def backward(
    gradients: Gradients, dout: Tensor, q: Tensor, k: Tensor, out: Tensor, lse: Tensor,
    fp8: Operands, causal: bool, scale: float, given: Tiling | None = None,
) -> None:  # fmt: skip
    """Compute `portable.fp8_backward.backward` for heads of 128 features, but with dQ summed in no fixed order."""
    p, (dq, dk, dv), (_, _, _, width) = given or BACKWARD[causal], gradients, q.shape
    assert width == out.shape[3] == 128
    do8, info = quantize_dout(dout, out, lse)
    dout, q, k = make_readable(dout), make_readable(q), make_readable(k)
    padded = info.shape[3]
    sums = q.new_zeros(info[0].numel() // padded, padded, width, dtype=torch.float32)
    programs, sizes = deal_tiles(p, q, k, of_keys=True)
    operands = *fp8, do8
    of_q8, of_k8, of_v8, of_do8 = (describe(x.by_rows, ROWS) for x in operands)
    of_k, of_q, of_dout, of_dk, of_dv = (describe(x, ROWS) for x in (k, q, dout, dk, dv))
    with torch.cuda.device_of(q):
        fp8_attention_backward_gluon_kernel[(programs,)](
            of_k8, of_v8, of_k, of_q8, of_do8, of_q, of_dout, describe_info(info.flatten(1, 2).transpose(0, 1), ROWS),
            of_dk, of_dv, *(x.scale_inv for x in operands), sums, padded, float(scale * LOG2_E), *sizes,
            FP8_STAGES=p.slots, CAUSAL=causal, EDGE=causal or k.shape[2] % (p.warpgroups * ROWS) != 0, **p.constants(),
        )  # fmt: skip
        store_dq(sums, dq, scale)
