# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""GEMMs of `quantize.block_formats`' operands by Blackwell's tensor cores, which scale each block of K themselves.

Compiled for compute capabilities 10.0 and 12.0, and never run. Each product packs its operands first. Older GPUs have
no such tensor cores, and Triton's interpreter no tl.dot_scaled: there `block_formats` multiplies in half precision.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from te_bench.kernels import architecture
from te_bench.kernels.quantize import packing
from te_bench.kernels.quantize.block_formats import NVFP4_LARGEST
from te_bench.kernels.tile import FLOATS, rounded

NAME = "block_scaled"  # in doctor's answers
#: A tile of D. Two fit on a processor of compute capability 10.0: registers, shared memory, columns of tensor memory.
SIDE, STAGES = 128, 3
PER_AMAXES = tl.constexpr(torch.tensor(1 / NVFP4_LARGEST**2).item())  # float32, like every constant of alpha
NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def unsupported(device: str, capability: architecture.Capability) -> str | None:
    """Return why a device cannot run it, or None. Everyone who asks whether MXFP8 and NVFP4 are emulated asks this."""
    if device != "cuda" or capability is None:
        return "needs an NVIDIA GPU"
    return architecture.lacks_block_scales(capability)


@functools.cache
def supported(device: torch.device) -> bool:
    """Return whether this device runs it."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return unsupported(device.type, capability) is None


@triton.jit
def alpha_of(a_scale_inv, b_scale_inv):
    """Return block_formats.alpha."""
    both = (tl.load(a_scale_inv) * 2688.0).to(tl.float32) * (tl.load(b_scale_inv) * 2688.0).to(tl.float32)
    return both * PER_AMAXES


@triton.jit
def _scales(desc, row, k, SIDE: tl.constexpr, TILES: tl.constexpr):
    """Return the scales of `SIDE` rows and `TILES` tiles of packing.BLOCKS, (rows, blocks), as a view."""
    tiles = tl.reshape(desc.load([0, row // 128, k * TILES, 0, 0]), (SIDE // 128, TILES, 32, 4, 4))
    return tl.reshape(tl.permute(tiles, (0, 3, 2, 1, 4)), (SIDE, TILES * 4))


@triton.jit(do_not_specialize_on_alignment=["a_scale_inv", "b_scale_inv", "bias"])
def block_scaled_gemm_kernel(
    a_desc, b_desc, a_scales, b_scales, a_scale_inv, b_scale_inv, bias, out, M, N, steps,
    A: tl.constexpr, B: tl.constexpr, DTYPE: tl.constexpr,
    SIDE: tl.constexpr, BYTES: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write one tile of D = alpha a b^T + bias, alpha 1 without scale_inv, in float32 until rounded."""
    row, column = tl.program_id(0) * SIDE, tl.program_id(1) * SIDE
    acc = tl.zeros((SIDE, SIDE), tl.float32)
    for k in tl.range(steps, num_stages=STAGES):
        a, b = a_desc.load([row, k * BYTES]), b_desc.load([column, k * BYTES])
        a_scale, b_scale = _scales(a_scales, row, k, SIDE, TILES), _scales(b_scales, column, k, SIDE, TILES)
        acc = tl.dot_scaled(a, a_scale, A, b.T, b_scale, B, acc)
    rows, columns = row + tl.arange(0, SIDE), column + tl.arange(0, SIDE)
    if a_scale_inv is not None:
        acc *= alpha_of(a_scale_inv, b_scale_inv)
    if bias is not None:
        acc += tl.load(bias + columns, columns < N, 0.0).to(tl.float32)[None, :]
    to = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(to, rounded(acc, DTYPE), (rows < M)[:, None] & (columns < N)[None, :])


def multiply(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor | None,
    b_scale_inv: Tensor | None,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    a_dtype: torch.dtype = torch.float8_e4m3fn,
) -> Tensor:
    """Compute D = alpha a b^T + bias of nonempty a (M, K) and b (N, K) in bf16 -> (M, N) out_dtype.

    Without scale_inv both are MXFP8's, a of a_dtype and b of E4M3; else NVFP4's, and alpha is block_formats.alpha.
    """
    m, n = len(a), len(b)
    formats = ("e2m1", "e2m1") if a_scale_inv is not None else (NAMES[a_dtype], "e4m3")
    _, per_byte, width, _ = packing.FORMATS[formats[0]]
    tiles = packing.BYTES * per_byte // (width * packing.BLOCKS)
    (a, a_scales), (b, b_scales) = (packing.packed(x, name) for x, name in zip((a, b), formats, strict=True))
    out = a.new_empty(m, n, dtype=out_dtype)
    of_data, of_scales = [SIDE, packing.BYTES], [1, SIDE // packing.ROWS, tiles, *a_scales.shape[3:]]
    with torch.cuda.device_of(a):
        block_scaled_gemm_kernel[triton.cdiv(m, SIDE), triton.cdiv(n, SIDE)](
            *(TensorDescriptor.from_tensor(x, of_data) for x in (a, b)),
            *(TensorDescriptor.from_tensor(x, of_scales) for x in (a_scales, b_scales)),
            *(a_scale_inv, b_scale_inv, None if bias is None else bias.contiguous(), out),
            *(m, n, a.shape[1] // packing.BYTES, *formats),
            DTYPE=FLOATS[out_dtype],
            SIDE=SIDE,
            BYTES=packing.BYTES,
            TILES=tiles,
            STAGES=STAGES,
            num_warps=4 if architecture.of_device(a.device).tensor_memory else 8,  # elsewhere D fills 128 registers
            num_stages=STAGES,
            enable_fp_fusion=False,
        )
    return out
