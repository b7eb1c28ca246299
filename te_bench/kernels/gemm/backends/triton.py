"""FP8 GEMM by our own persistent TMA kernels in Triton for Hopper, with epilogues and accumulation into float32.

Source: te-bench's own measurements on an H200 (2026-11-21): tiles of 128 x 256 x 128 with 8 warps, four stages and an
epilogue in two halves reach cuBLASLt's speed within a few per cent at K >= 4096. Epilogues and split K: not timed yet.
"""

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from te_bench.kernels.activation import KINDS
from te_bench.kernels.gemm import (
    PAIRS,
    Backend,
    Epilogue,
    Problem,
    Product,
    granularities,
)
from te_bench.kernels.gemm.backends.reference import DTYPES
from te_bench.kernels.gemm.operators import misaligned, operators
from te_bench.kernels.gemm.portable.kernels import gemm_accumulate_kernel, scaled_kernel
from te_bench.kernels.gemm.portable.tiles import Tile, split, tile
from te_bench.kernels.quantize import BLOCK, TENSOR, Layout, Quantized
from te_bench.kernels.tile import FLOATS, FP8

INTERPRETED: bool = triton.knobs.runtime.interpret

GROUP_M = 8  # tiles of M that share the tiles of b in L2, Triton's usual


def unsupported(p: Problem) -> str | None:
    if (p.a_granularity, p.b_granularity) not in PAIRS:
        return f"scales per {p.a_granularity} x {p.b_granularity}: te-bench has no such kernel"
    if reason := misaligned(p):
        return reason
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


def _operands(a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, b_kind: str, t: Tile) -> tuple[Any, ...]:
    """Both operands as descriptors, and their scales as the kernels read them."""
    if b_kind == "block":
        b_scale_inv = _along_n(b_scale_inv, t.n)
    a_desc = TensorDescriptor.from_tensor(a, [t.m, BLOCK])
    b_desc = TensorDescriptor.from_tensor(b, [t.n, BLOCK])
    return a_desc, b_desc, a_scale_inv.contiguous(), b_scale_inv.contiguous()


def _constants(t: Tile, kinds: tuple[str, str], fast_accum: bool, tiles: int, device: torch.device) -> dict[str, Any]:
    return {
        "A_KIND": kinds[0], "B_KIND": kinds[1], "PROMOTE": not fast_accum,
        "BLOCK_M": t.m, "BLOCK_N": t.n, "BLOCK_K": BLOCK, "GROUP_M": GROUP_M,
        "PROGRAMS": min(_processors(device) * t.programs, tiles), "PARTS": t.parts,
        "num_warps": t.warps, "num_stages": t.stages,
    }  # fmt: skip


def _launch(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    epilogue: Epilogue,
    residual: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
) -> Product:
    """D and what its epilogue leaves, none of M, N and K being 0."""
    kinds = granularities(a, b, a_scale_inv, b_scale_inv, bias)
    (m, k), n, device = a.shape, b.shape[0], a.device
    target = None if epilogue.target is None else DTYPES[epilogue.target]
    t = tile(
        m, n, out_dtype, promote=not fast_accum, kind=kinds[0], epilogue=epilogue,
        processors=_processors(device),
    )  # fmt: skip
    out = a.new_empty((m, n), dtype=out_dtype) if epilogue.out else None
    pre = a.new_empty((m, n), dtype=out_dtype) if epilogue.keep else None
    data = a.new_empty((m, n), dtype=target) if target is not None and epilogue.rowwise else None
    data_t = a.new_empty((n, m), dtype=target) if target is not None and epilogue.columnwise else None
    scale_inv = None if target is None else torch.empty((), dtype=torch.float32, device=device)
    part = [t.m, t.n // t.parts]
    left = [None if x is None else TensorDescriptor.from_tensor(x, part) for x in (out, pre, residual, data)]
    data_t_desc = None if data_t is None else TensorDescriptor.from_tensor(data_t, part[::-1])
    a_desc, b_desc, a_scale_inv, b_scale_inv = _operands(a, b, a_scale_inv, b_scale_inv, kinds[1], t)
    constants = _constants(t, kinds, fast_accum, triton.cdiv(m, t.m) * triton.cdiv(n, t.n), device)
    with torch.cuda.device_of(a):
        scaled_kernel[(constants["PROGRAMS"],)](
            *(a_desc, b_desc, *left, data_t_desc, a_scale_inv, b_scale_inv),
            *(None if bias is None else bias.contiguous(), scale, scale_inv, amax, m, n, k),
            ACTIVATION=None if epilogue.activation is None else KINDS[epilogue.activation][0],
            DTYPE=FLOATS[out_dtype],
            TARGET=None if target is None else FP8[target],
            **constants,
        )
    if target is None:
        return Product(out, pre, None)
    there, back = (None if x is None else scale_inv for x in (data, data_t))
    return Product(out, pre, Quantized(data, there, data_t, back, Layout(target, TENSOR, torch.float32)))


def _add(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, out: Tensor, fast_accum: bool, whole: bool
) -> None:
    """out += the product, none of M, N and K being 0; whole: K is not split."""
    kinds = granularities(a, b, a_scale_inv, b_scale_inv)
    (m, k), n, processors = a.shape, b.shape[0], _processors(a.device)
    promote = kinds[0] in ("block", "tile") or not fast_accum
    if whole:
        t, shares = tile(m, n, out.dtype, promote=promote, processors=processors), 1
    else:
        t, shares = split(m, n, k, promote=promote, processors=processors)
    d_desc = TensorDescriptor.from_tensor(out, [t.m, t.n // t.parts])
    a_desc, b_desc, a_scale_inv, b_scale_inv = _operands(a, b, a_scale_inv, b_scale_inv, kinds[1], t)
    constants = _constants(t, kinds, fast_accum, triton.cdiv(m, t.m) * triton.cdiv(n, t.n) * shares, a.device)
    with torch.cuda.device_of(a):
        gemm_accumulate_kernel[(constants["PROGRAMS"],)](
            a_desc, b_desc, d_desc, a_scale_inv, b_scale_inv, m, n, k, SPLIT=shares, **constants
        )


forward, fused, accumulate = operators("triton", _launch, _add)

BACKEND = Backend(forward=forward, unsupported=unsupported, fused=fused, accumulate=accumulate)
