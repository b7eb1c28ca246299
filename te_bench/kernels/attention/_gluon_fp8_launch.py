"""Launching Gluon's FP8 attention: tiles, registers, TMA's descriptors."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from te_bench.kernels.attention._fp8_quantize import Heads
from te_bench.kernels.attention._gluon_fp8_forward import gluon_fp8_attention_forward_kernel
from te_bench.kernels.attention._gluon_launch import LOG2_E, ROWS, Plan, processors


class Fp8Plan(NamedTuple):
    """A tile's plan, and whether each block's product is a float32 sum of its own (`_gluon_fp8_forward`'s FRESH)."""

    tile: Plan
    fresh: bool


#: By the width of the heads, compiled for sm_90a without spills. Fresh, whatever it costs: without, 16384 keys whose values
#: have a mean of 1 lose 18 % of their sum (14.7 dB for 54.3; H200, 2026-11-22), at 837 TFLOP/s for 690. So at 128 64 keys at
#: once: with 128 a sum of each block's own spills 2 KB a thread. turns as in `_gluon_forward`.
FORWARD: Mapping[int, Fp8Plan] = {
    64: Fp8Plan(Plan(3, 64, 4, 2, 160, turns=True), True),
    128: Fp8Plan(Plan(2, 64, 4, 2, 240, turns=True), True),
}


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Of blocks (1, 1, rows, columns) of x (B, H, M, N), its last stride 1."""
    line = columns * x.element_size()
    layout = gl.NVMMASharedLayout(min(128, line), 8 * x.element_size(), 4)
    unit = 16 // x.element_size()
    steps = [step if size > 1 else unit for size, step in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*steps, 1], [1, 1, rows, columns], layout)


def _dealt(p: Plan, batch: int, heads: int, group: int, rows: int, keys: int, device: torch.device) -> tuple[int, ...]:
    """How many programs; T, S, H, group, pairs, blocks, near, whole, rest, as the kernel takes them."""
    pairs, blocks = batch * heads, triton.cdiv(rows, ROWS * p.warpgroups)
    tiles = pairs * blocks
    programs = min(tiles, processors(device) * p.programs)
    return programs, rows, keys, heads, group, pairs, blocks, pairs, *divmod(tiles, programs)


def forward(
    q: Heads, k: Heads, v: Heads, lengths: tuple[int, int], features: int, dtype: torch.dtype, causal: bool, scale: float,
    given: Fp8Plan | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`_fp8_kernels.forward` for heads of 64 and 128 features."""
    assert q.data is not None
    assert k.data is not None
    assert v.data_t is not None
    (rows, keys), (batch, heads, _, width) = lengths, q.data.shape
    assert width == features == v.data_t.shape[2], "of 64 or 128 features, none of them padding"
    p, fresh = given or FORWARD[width]
    out = torch.empty(batch, rows, heads, features, dtype=dtype, device=q.data.device).transpose(1, 2)
    lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=q.data.device)
    programs, *sizes = _dealt(p, batch, heads, heads // k.data.shape[1], rows, keys, out.device)
    descriptors = (
        _descriptor(q.data, ROWS, width), _descriptor(k.data, p.at_once, width), _descriptor(v.data_t, width, p.at_once),
    )  # fmt: skip
    leaving = TensorDescriptor(
        out, list(out.shape), [out.stride(0) if batch > 1 else 8, *out.stride()[1:]], [1, 1, ROWS, width],
        gl.NVMMASharedLayout(128, 16, 4),
    )  # fmt: skip
    with torch.cuda.device_of(out):
        gluon_fp8_attention_forward_kernel[(programs,)](
            *descriptors, leaving, lse, q.scale_inv, k.scale_inv, v.scale_inv, float(scale * LOG2_E), *sizes,
            CONSUMERS=p.warpgroups, SLOTS=p.slots, STAGES=p.stages, REGISTERS=p.registers, FETCHING=p.fetching(),
            CAUSAL=causal, EDGE=causal or keys % p.at_once != 0, FRESH=fresh, TURNS=p.turns, num_warps=4,
        )  # fmt: skip
    return out, lse
