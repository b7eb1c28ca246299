"""Launching FP8 attention's forward kernel for Hopper: tiles, registers, TMA's descriptors."""

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from te_bench.kernels.attention._fp8_quantize import Heads
from te_bench.kernels.attention._gluon_fp8_forward import SWIZZLE, fp8_attention_forward_gluon_kernel
from te_bench.kernels.attention._gluon_launch import LOG2_E, ROWS, Plan, processors

#: Compiled for sm_90a without spills, for heads of 128; the fastest of a sweep at T2048 to 16384 (docs/attention.md).
FORWARD = Plan(3, 128, 3, 2, 160)


def _descriptor(x: Tensor, rows: int, line: int) -> TensorDescriptor:
    """Of blocks (1, 1, rows, columns) of x (B, H, M, columns), its last stride 1; `line` bytes of a row lie together."""
    columns, bits = x.shape[3], 8 * x.element_size()
    steps = [step if size > 1 else columns for size, step in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*steps, 1], [1, 1, rows, columns], gl.NVMMASharedLayout(line, bits, 4))


def forward(
    q: Heads, k: Heads, v: Heads, lengths: tuple[int, int], features: int, dtype: torch.dtype, causal: bool, scale: float,
    given: Plan | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`_fp8_kernels.forward` for heads of 128 features."""
    assert q.data is not None
    assert k.data is not None
    assert v.data_t is not None
    p, (rows, keys), (batch, heads, _, width) = given or FORWARD, lengths, q.data.shape
    assert width == features == v.data_t.shape[3] == 128, "of 128 features, none of them padding"
    assert p.at_once == v.data_t.shape[4], "blocks of values as the quantiser leaves them"
    out = torch.empty(batch, rows, heads, features, dtype=dtype, device=q.data.device).transpose(1, 2)
    lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=q.data.device)
    pairs, blocks = batch * heads, triton.cdiv(rows, ROWS * p.warpgroups)
    tiles = pairs * blocks
    programs = min(tiles, processors(out.device) * p.programs)
    group = heads // k.data.shape[1]
    with torch.cuda.device_of(out):
        fp8_attention_forward_gluon_kernel[(programs,)](
            _descriptor(q.data, ROWS, 128), _descriptor(k.data, p.at_once, 128),
            _descriptor(v.data_t.flatten(2, 3), width, 128), _descriptor(out, ROWS, SWIZZLE.value), lse,
            q.scale_inv, k.scale_inv, v.scale_inv, float(scale * LOG2_E), rows, keys, heads, group, pairs, blocks, pairs,
            *divmod(tiles, programs), CONSUMERS=p.warpgroups, SLOTS=p.slots, STAGES=p.stages, REGISTERS=p.registers,
            FETCHING=p.fetching(), CAUSAL=causal, EDGE=causal or keys % p.at_once != 0, num_warps=4,
        )  # fmt: skip
    return out, lse
