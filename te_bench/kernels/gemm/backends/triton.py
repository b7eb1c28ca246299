"""FP8 GEMM by our own persistent TMA kernel in Triton for Hopper.

Source: te-bench's own: tiles of 128 x 256 x 128 with 8 warps and four stages, stored in two halves.
"""

import torch
import triton
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from te_bench.kernels import architecture
from te_bench.kernels.gemm import Backend, Problem
from te_bench.kernels.gemm.operands import check, refusal
from te_bench.kernels.gemm.operators import GROUP_M, INTERPRETED_PROCESSORS, misaligned, readable, unpadded
from te_bench.kernels.gemm.portable.kernels import scaled_kernel
from te_bench.kernels.gemm.portable.tiles import tile
from te_bench.kernels.quantize import BLOCK, Operand
from te_bench.kernels.tile import FLOATS

INTERPRETED: bool = triton.knobs.runtime.interpret


def unsupported(p: Problem) -> str | None:
    if reason := refusal(p.a, p.b) or misaligned(p):
        return reason
    if INTERPRETED:
        return None
    if p.device != "cuda":
        return "needs an NVIDIA GPU (or TRITON_INTERPRET=1, set before Triton is imported)"
    return architecture.lacks_fp8(p.capability) or architecture.lacks_tma(p.capability)


def _along_n(scale_inv: Tensor, block_n: int) -> Tensor:
    """Transpose (N, K blocks) to (K blocks, N padded to a multiple of block_n), contiguous along N."""
    missing = -scale_inv.shape[0] % block_n
    return (F.pad(scale_inv, (0, 0, 0, missing)) if missing else scale_inv).t().contiguous()


def launch(a: Operand, b: Operand, *, out_dtype: torch.dtype, fast_accum: bool, bias: Tensor | None = None) -> Tensor:
    """Compute D for nonzero M, N and K."""
    kinds = check(a, b, bias)
    (m, k), n, device = a.data.shape, b.data.shape[0], a.data.device
    processors = architecture.processors(device, INTERPRETED_PROCESSORS)
    here = architecture.of_device(device)
    t = tile(m, n, out_dtype, promote=not fast_accum, kind=kinds[0], processors=processors, here=here)
    out = a.data.new_empty((m, n), dtype=out_dtype)
    b_scale_inv = _along_n(b.scale_inv, t.n) if kinds[1] == "block" else b.scale_inv
    programs = min(processors, triton.cdiv(m, t.m) * triton.cdiv(n, t.n))
    with torch.cuda.device_of(a.data):
        scaled_kernel[(programs,)](
            TensorDescriptor.from_tensor(readable(a.data), [t.m, BLOCK]),
            TensorDescriptor.from_tensor(readable(b.data), [t.n, BLOCK]),
            TensorDescriptor.from_tensor(out, [t.m, t.n // t.parts]),
            *(a.scale_inv.contiguous(), b_scale_inv.contiguous(), None if bias is None else bias.contiguous(), m, n, k),
            *kinds,
            PROMOTE=not fast_accum,
            DTYPE=FLOATS[out_dtype],
            BLOCK_M=t.m,
            BLOCK_N=t.n,
            BLOCK_K=BLOCK,
            GROUP_M=GROUP_M,
            PROGRAMS=programs,
            PARTS=t.parts,
            num_warps=t.warps,
            num_stages=t.stages,
        )
    return out


BACKEND = Backend(forward=unpadded("triton", launch), unsupported=unsupported)
