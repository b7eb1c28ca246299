"""FP8 GEMM by our own persistent TMA kernels in Triton for Hopper, with epilogues and accumulation into float32.

Source: te-bench's own: tiles of 128 x 256 x 128 with 8 warps, four stages and an epilogue in two halves.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from te_bench.kernels import architecture
from te_bench.kernels.activation import KINDS
from te_bench.kernels.gemm import NO_EPILOGUE, Backend, Epilogue, Problem, Product
from te_bench.kernels.gemm.operands import DTYPES, check, refusal
from te_bench.kernels.gemm.operators import GROUP_M, INTERPRETED_PROCESSORS, Operators, allocate, misaligned
from te_bench.kernels.gemm.portable.kernels import gemm_accumulate_kernel, scaled_kernel
from te_bench.kernels.gemm.portable.tiles import Tile, split, tile
from te_bench.kernels.quantize import BLOCK, Operand
from te_bench.kernels.tile import FLOATS, FP8

INTERPRETED: bool = triton.knobs.runtime.interpret


def unsupported(p: Problem) -> str | None:
    if reason := refusal(p.a, p.b) or misaligned(p):
        return reason
    if INTERPRETED:
        return None
    if p.device != "cuda":
        return "needs an NVIDIA GPU (or TRITON_INTERPRET=1, set before Triton is imported)"
    if p.capability is not None and p.capability < architecture.TMA_SINCE:
        return f"compute capability {p.capability[0]}.{p.capability[1]} < 9.0: no TMA"
    return None


def _along_n(scale_inv: Tensor, block_n: int) -> Tensor:
    """(N, K blocks) -> (K blocks, N up to a multiple of block_n), contiguous along N."""
    missing = -scale_inv.shape[0] % block_n
    return (F.pad(scale_inv, (0, 0, 0, missing)) if missing else scale_inv).t().contiguous()


def _operands(a: Operand, b: Operand, kinds: tuple[str, str], t: Tile) -> tuple[Any, ...]:
    """Both operands as descriptors, and their scales as the kernels read them."""
    b_scale_inv = _along_n(b.scale_inv, t.n) if kinds[1] == "block" else b.scale_inv
    a_desc = TensorDescriptor.from_tensor(a.data, [t.m, BLOCK])
    b_desc = TensorDescriptor.from_tensor(b.data, [t.n, BLOCK])
    return a_desc, b_desc, a.scale_inv.contiguous(), b_scale_inv.contiguous()


def _constants(t: Tile, kinds: tuple[str, str], fast_accum: bool, tiles: int, device: torch.device) -> dict[str, Any]:
    return {
        "A_KIND": kinds[0], "B_KIND": kinds[1], "PROMOTE": not fast_accum,
        "BLOCK_M": t.m, "BLOCK_N": t.n, "BLOCK_K": BLOCK, "GROUP_M": GROUP_M,
        "PROGRAMS": min(architecture.processors(device, INTERPRETED_PROCESSORS) * t.programs, tiles), "PARTS": t.parts,
        "num_warps": t.warps, "num_stages": t.stages,
    }  # fmt: skip


def launch(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype,
    fast_accum: bool,
    bias: Tensor | None = None,
    epilogue: Epilogue = NO_EPILOGUE,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> Product:
    """D and what its epilogue leaves, none of M, N and K being 0."""
    kinds = check(a, b, bias)
    (m, k), n, device = a.data.shape, b.data.shape[0], a.data.device
    target = None if epilogue.target is None else DTYPES[epilogue.target]
    t = tile(
        m, n, out_dtype, promote=not fast_accum, kind=kinds[0], epilogue=epilogue,
        processors=architecture.processors(device, INTERPRETED_PROCESSORS),
    )  # fmt: skip
    made = allocate(a.data, n, out_dtype, epilogue)
    part = [t.m, t.n // t.parts]
    outputs = made.out, made.pre, residual, made.data
    left = [None if x is None else TensorDescriptor.from_tensor(x, part) for x in outputs]
    data_t_desc = None if made.data_t is None else TensorDescriptor.from_tensor(made.data_t, part[::-1])
    a_desc, b_desc, a_scale_inv, b_scale_inv = _operands(a, b, kinds, t)
    constants = _constants(t, kinds, fast_accum, triton.cdiv(m, t.m) * triton.cdiv(n, t.n), device)
    with torch.cuda.device_of(a.data):
        scaled_kernel[(constants["PROGRAMS"],)](
            *(a_desc, b_desc, *left, data_t_desc, a_scale_inv, b_scale_inv),
            *(None if bias is None else bias.contiguous(), scale, made.scale_inv, amax, m, n, k),
            ACTIVATION=None if epilogue.activation is None else KINDS[epilogue.activation][0],
            DTYPE=FLOATS[out_dtype],
            TARGET=None if target is None else FP8[target],
            **constants,
        )
    return made.product()


def launch_accumulate(a: Operand, b: Operand, out: Tensor, fast_accum: bool, whole: bool) -> None:
    """out += the product, none of M, N and K being 0; whole: K is not split."""
    kinds, device = check(a, b), a.data.device
    (m, k), n, processors = a.data.shape, b.data.shape[0], architecture.processors(device, INTERPRETED_PROCESSORS)
    promote = kinds[0] in ("block", "tile") or not fast_accum
    if whole:
        t, shares = tile(m, n, out.dtype, promote=promote, processors=processors), 1
    else:
        t, shares = split(m, n, k, promote=promote, processors=processors)
    d_desc = TensorDescriptor.from_tensor(out, [t.m, t.n // t.parts])
    a_desc, b_desc, a_scale_inv, b_scale_inv = _operands(a, b, kinds, t)
    constants = _constants(t, kinds, fast_accum, triton.cdiv(m, t.m) * triton.cdiv(n, t.n) * shares, device)
    with torch.cuda.device_of(a.data):
        gemm_accumulate_kernel[(constants["PROGRAMS"],)](
            a_desc, b_desc, d_desc, a_scale_inv, b_scale_inv, m, n, k, SPLIT=shares, **constants
        )


_made = Operators("triton", launch, launch_accumulate)

BACKEND = Backend(forward=_made.forward, unsupported=unsupported, fused=_made.fused, accumulate=_made.accumulate)
