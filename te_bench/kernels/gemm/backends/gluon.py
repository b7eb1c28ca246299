"""FP8 GEMM by our own warp-specialised kernel for Hopper in Gluon, whose tiles leave under other tiles' products.

Source: te-bench's own kernel, after NVIDIA's description of CUTLASS's ping-pong and cooperative ones. It replaces
triton.py for scales per tensor and per row, on compute capability 9.0 only.
"""

import functools

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from te_bench.kernels import architecture
from te_bench.kernels.activation import KINDS
from te_bench.kernels.gemm import Backend, Problem
from te_bench.kernels.gemm.hopper.kernels import gluon_gemm_kernel
from te_bench.kernels.gemm.hopper.plans import Tiling, plan
from te_bench.kernels.gemm.operands import check, granularities, refusal
from te_bench.kernels.gemm.operators import GROUP_M, misaligned, readable, unpadded
from te_bench.kernels.quantize import BLOCK, Operand

INTERPRETED: bool = triton.knobs.runtime.interpret


def unsupported(p: Problem) -> str | None:
    if reason := refusal(p.a, p.b) or misaligned(p):
        return reason
    kind, other = granularities(p.a, p.b)
    if kind not in ("tensor", "row"):
        return f"scales per {kind} x {other}: this one has tensor x tensor and row x row"
    return architecture.lacks_gluon(p.device, p.capability, INTERPRETED)


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    names = {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5, torch.float32: gl.float32}
    in_gluon = names.get(dtype) or {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, columns], in_gluon)


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [rows, columns], _layout(rows, columns, x.dtype))


def launch(a: Operand, b: Operand, *, out_dtype: torch.dtype, fast_accum: bool, bias: Tensor | None = None) -> Tensor:
    """Compute D for nonzero M, N and K. Raises ValueError for unsupported operands."""
    kind, other = check(a, b, bias)
    if kind not in ("tensor", "row"):
        raise ValueError(f"scales per {kind} x {other}: the Gluon GEMM has none in blocks; take triton or scaled_mm")
    out = a.data.new_empty((a.data.shape[0], b.data.shape[0]), dtype=out_dtype)
    p, scales = plan(out_dtype, promote=not fast_accum), (a.scale_inv, b.scale_inv)
    run(p, readable(a.data), readable(b.data), bias, out, kind=kind, scales=scales, promote=not fast_accum)
    return out


def run(
    p: Tiling,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out: Tensor,
    h: Tensor | None = None,
    *,
    kind: str = "none",
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    promote: bool = False,
    activation: str | None = None,
    gradient: bool = False,
) -> None:
    """Run the kernel on a (M, K) and b (N, K), or (K, N) for a gradient, by the plan.

    activation: also write h, and f(h) as the result; gradient: multiply the product by f'(h), with h given.
    """
    (m, k), n = a.shape, b.shape[1 if gradient else 0]
    part, block = p.width // p.parts, BLOCK // a.dtype.itemsize
    with torch.cuda.device_of(a):
        gluon_gemm_kernel[(p.programs(m, n, architecture.processors(a.device)),)](
            _descriptor(a, p.height, block),
            _descriptor(b, block, p.width) if gradient else _descriptor(b, p.width, block),
            _descriptor(out, p.height, part),
            None if h is None else _descriptor(h, p.height, part),
            *(*scales, None if bias is None else bias.contiguous(), m, n, k),
            A_KIND=kind,
            PROMOTE=promote,
            ACTIVATION=None if activation is None else KINDS[activation][0],
            GRADIENT=gradient,
            PARTS=p.parts,
            SLOTS=p.slots,
            TURNS=p.turns,
            STAGES=p.stages(out.element_size() * (2 if activation and not gradient else 1)),
            GROUP_M=GROUP_M,
            num_warps=4,
        )


BACKEND = Backend(forward=unpadded("gluon", launch), unsupported=unsupported)
