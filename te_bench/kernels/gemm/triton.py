"""FP8 GEMM by our own persistent TMA kernels in Triton for Hopper: one for tensor and row scales, one for block scales.

Source: te-bench's own measurements on an H200 (2026-11-21): tiles of 128 x 256 x 128 with 8 warps, four stages and an
epilogue in two halves reach cuBLASLt's speed within a few per cent at K >= 4096.
"""

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from te_bench.kernels.gemm import PAIRS, Backend, Problem, granularities
from te_bench.kernels.gemm._kernels import block_kernel, scaled_kernel
from te_bench.kernels.quantize import BLOCK

INTERPRETED: bool = triton.knobs.runtime.interpret
K_ALIGNMENT, N_ALIGNMENT = 16, 8  # elements: TMA wants rows at multiples of 16 bytes, of FP8 and of a 2-byte D

GROUP_M = 8  # tiles of M that share the tiles of b in L2, Triton's usual


class Tile(NamedTuple):
    m: int
    n: int
    warps: int
    stages: int
    halves: int  # of the epilogue: D leaves through this part of the shared memory it would take at once
    speed: float  # of a full wave, relative


# A 128 x 256 tile reads a third less of L2 for the same product, but leaves a ragged last wave; its four stages of 48 KB
# and half of a 2-byte D fill 224 of 227 KB. Speeds of full waves: a guess from the bytes per product, not a measurement.
LARGE, SMALL = Tile(128, 256, 8, 4, 2, 1.0), Tile(128, 128, 8, 4, 1, 0.88)
LARGE_FLOAT32 = LARGE._replace(stages=3)  # D takes twice the shared memory, 64 KB
# Promotion to float32 needs a second accumulator: 128 x 256 spills (172 bytes a thread), 128 x 128 does not.
PRECISE = SMALL


def tile(m: int, n: int, out_dtype: torch.dtype, *, promote: bool, processors: int) -> Tile:
    """The tile that finishes (M, N) first, counting waves of one tile a processor.

    12288 x 768 on 132 processors: 288 large tiles take 3 waves of 2.2, 576 small ones 5 of 4.4, which is less.
    """
    if promote:
        return PRECISE
    large = LARGE_FLOAT32 if out_dtype is torch.float32 else LARGE

    def time(t: Tile) -> float:
        waves = triton.cdiv(triton.cdiv(m, t.m) * triton.cdiv(n, t.n), processors)
        return float(waves * t.m * t.n / t.speed)

    return min(large, SMALL, key=time)


def unsupported(p: Problem) -> str | None:
    if (p.a_granularity, p.b_granularity) not in PAIRS:
        return f"scales per {p.a_granularity} x {p.b_granularity}: te-bench has no such kernel"
    if p.k % K_ALIGNMENT or p.n % N_ALIGNMENT:
        return f"N {p.n} must be a multiple of {N_ALIGNMENT}, K {p.k} of {K_ALIGNMENT}: TMA rows start at 16-byte addresses"
    if INTERPRETED:
        return None
    if p.device != "cuda":
        return "needs an NVIDIA GPU (or TRITON_INTERPRET=1, set before Triton is imported)"
    if p.capability is not None and p.capability < (9, 0):
        return f"compute capability {p.capability[0]}.{p.capability[1]} < 9.0: no TMA"
    return None


def _along_n(scale_inv: Tensor, block_n: int) -> Tensor:
    """(N, K blocks) -> (K blocks, N up to a multiple of block_n), contiguous along N."""
    missing = -scale_inv.shape[0] % block_n
    return (F.pad(scale_inv, (0, 0, 0, missing)) if missing else scale_inv).t().contiguous()


@functools.cache
def _processors(device: torch.device) -> int:
    # Three in the interpreter: fewer than a test has tiles, so that the persistent loop turns.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@torch.library.custom_op("te_bench::triton_gemm", mutates_args=())
def _gemm(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    a_kind, b_kind = granularities(a, b, a_scale_inv, b_scale_inv, bias)
    (m, k), n = a.shape, b.shape[0]
    if k % K_ALIGNMENT or n % N_ALIGNMENT:
        raise ValueError(
            f"N {n} and K {k}: Triton's GEMM takes N a multiple of {N_ALIGNMENT} and K of {K_ALIGNMENT}; "
            "pad with zeros, or take scaled_mm, which does"
        )
    out = a.new_empty((m, n), dtype=out_dtype)
    if not (m and n and k):
        out.zero_()
        return out if bias is None else out.add_(bias)
    blocks = a_kind in ("block", "tile")
    t = tile(m, n, out_dtype, promote=blocks or not fast_accum, processors=_processors(a.device))
    programs = min(_processors(a.device), triton.cdiv(m, t.m) * triton.cdiv(n, t.n))
    if b_kind == "block":
        b_scale_inv = _along_n(b_scale_inv, t.n)
    operands = (
        TensorDescriptor.from_tensor(a, [t.m, BLOCK]),
        TensorDescriptor.from_tensor(b, [t.n, BLOCK]),
        TensorDescriptor.from_tensor(out, [t.m, t.n // t.halves]),
        a_scale_inv.contiguous(),
        b_scale_inv.contiguous(),
        None if bias is None else bias.contiguous(),
        m,
        n,
        k,
    )
    sizes = {"BLOCK_M": t.m, "BLOCK_N": t.n, "BLOCK_K": BLOCK, "GROUP_M": GROUP_M, "PROGRAMS": programs}
    launch = {"BIAS": bias is not None, "num_warps": t.warps, "num_stages": t.stages}
    with torch.cuda.device_of(a):
        if blocks:
            block_kernel[(programs,)](*operands, **sizes, A_TILE=a_kind == "tile", B_TILE=b_kind == "tile", **launch)
        else:
            scaled_kernel[(programs,)](
                *operands,
                **sizes,
                HALVES=t.halves,
                ROW=a_kind == "row",
                IMPRECISE=None if fast_accum else BLOCK,
                **launch,
            )
    return out


@_gemm.register_fake
def _(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def forward(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    *,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """D = dequantise(a) @ dequantise(b).T + bias, in float32 until D is rounded; a (M, K), b (N, K) FP8 -> (M, N) out_dtype.

    fast_accum keeps Hopper's 14-bit accumulator for the whole of K; without it, and always with block scales, every 128
    of K are added up in float32. Raises ValueError for operands that cannot be multiplied.
    """
    return torch.ops.te_bench.triton_gemm(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, fast_accum)


BACKEND = Backend(forward=forward, unsupported=unsupported)
