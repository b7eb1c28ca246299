"""Launching FP8 attention's kernels for Hopper: tiles, registers, TMA's descriptors."""

from collections.abc import Mapping

import torch
import triton
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.attention.fp8_quantize import Heads
from te_bench.kernels.attention.hopper.backward_sums import attention_dq_of_sums_kernel
from te_bench.kernels.attention.hopper.fp8_backward import fp8_attention_backward_gluon_kernel
from te_bench.kernels.attention.hopper.fp8_forward import SWIZZLE, fp8_attention_forward_gluon_kernel
from te_bench.kernels.attention.hopper.launch import (
    LOG2_E,
    LONGEST,
    ROWS,
    Plan,
    deal_tiles,
    describe,
    describe_info,
    make_readable,
)
from te_bench.kernels.attention.portable.forward import row_strides
from te_bench.kernels.attention.portable.fp8_backward import quantize_dout

#: In sweeps at T2048 to 16384, of heads of 128, the fastest or within 4 % of it (docs/attention.md).
FORWARD = Plan(3, 128, 3, 2, 160)
#: By whether causal. stages: of rows as they came; slots: of those in FP8.
BACKWARD: Mapping[bool, Plan] = {True: Plan(2, 64, 3, 2, 240, sharing=4), False: Plan(2, 64, 2, 3, 240, sharing=132)}


def forward_pays(q: Tensor) -> bool:
    """Whether it is faster than Triton's for q (B, H, T, D): its tiles are large, and should be one for each processor."""
    batch, heads, rows, _ = q.shape
    return rows >= 512 and batch * heads * triton.cdiv(rows, ROWS * FORWARD.warpgroups) >= architecture.processors(
        q.device
    )


def backward_pays(q: Tensor, k: Tensor) -> bool:
    """The same of the backward pass of k (B, Hkv, S, D), of fewer keys not measured; a head's sums count by 32 bits."""
    return k.shape[2] >= 256 and q.shape[2] <= LONGEST


def forward(
    q: Heads, k: Heads, v: Heads, lengths: tuple[int, int], features: int, dtype: torch.dtype, causal: bool, scale: float,
    given: Plan | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`portable.fp8_forward.forward` for heads of 128 features."""
    assert q.data is not None
    assert k.data is not None
    assert v.data_t is not None
    p, (rows, keys), (batch, heads, _, width) = given or FORWARD, lengths, q.data.shape
    assert width == features == v.data_t.shape[3] == 128, "of 128 features, none of them padding"
    assert p.at_once == v.data_t.shape[4], "blocks of values as the quantiser leaves them"
    out = torch.empty(batch, rows, heads, features, dtype=dtype, device=q.data.device).transpose(1, 2)
    lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=q.data.device)
    programs, sizes = deal_tiles(p, q.data[:, :, :rows], k.data[:, :, :keys], of_keys=False)
    with torch.cuda.device_of(out):
        fp8_attention_forward_gluon_kernel[(programs,)](
            describe(q.data, ROWS), describe(k.data, p.at_once), describe(v.data_t.flatten(2, 3), width),
            describe(out, ROWS, SWIZZLE.value), lse, q.scale_inv, k.scale_inv, v.scale_inv, float(scale * LOG2_E), *sizes,
            SLOTS=p.slots, CAUSAL=causal, EDGE=causal or keys % p.at_once != 0, **p.constants(),
        )  # fmt: skip
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, out: Tensor, lse: Tensor, heads: tuple[Heads, Heads, Heads], features: int,
    causal: bool, scale: float, given: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`portable.fp8_backward.backward` for heads of 128 features, but that dQ's sums are in no order."""
    p, (q8, k8, v8) = given or BACKWARD[causal], heads
    assert q8.data is not None
    assert k8.data is not None
    assert v8.data is not None
    batch, count, rows, width = q.shape
    assert width == features == 128
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)
    do8, info = quantize_dout(dout, out, lse)
    assert do8.data is not None
    dout, q, k = make_readable(dout), make_readable(q), make_readable(k)
    padded = info.shape[3]
    sums = q.new_zeros(batch * count, padded, width, dtype=torch.float32)
    programs, sizes = deal_tiles(p, q, k, of_keys=True)
    in_fp8 = [describe(x, ROWS) for x in (k8.data, v8.data, q8.data, do8.data)]
    of_k, of_q, of_dout, of_dk, of_dv = (describe(x, ROWS) for x in (k, q, dout, dk, dv))
    with torch.cuda.device_of(q):
        fp8_attention_backward_gluon_kernel[(programs,)](
            *in_fp8[:2], of_k, *in_fp8[2:], of_q, of_dout, describe_info(info.flatten(1, 2).transpose(0, 1), ROWS),
            of_dk, of_dv,
            q8.scale_inv, k8.scale_inv, v8.scale_inv, do8.scale_inv, sums, padded, float(scale * LOG2_E), *sizes,
            FP8_STAGES=p.slots, CAUSAL=causal, EDGE=causal or k.shape[2] % (p.warpgroups * ROWS) != 0, **p.constants(),
        )  # fmt: skip
        attention_dq_of_sums_kernel[(batch * count * padded // ROWS,)](
            sums, dq, *row_strides(dq), float(scale), count, rows, padded, D=width, num_warps=4
        )
    return dq, dk, dv
