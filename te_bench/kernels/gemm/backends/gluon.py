"""FP8 GEMM by our own warp-specialised kernels for Hopper in Gluon, whose epilogues run under other tiles' products.

Source: te-bench's own kernels, after NVIDIA's description of CUTLASS's ping-pong and cooperative ones. A twin of triton.py
for scales per tensor and per row, on compute capability 9.0 alone.
"""

import functools

import torch
import triton
from torch import Tensor

from te_bench.kernels import architecture, gluon
from te_bench.kernels.activation import KINDS
from te_bench.kernels.gemm import NO_EPILOGUE, Backend, Epilogue, Problem, Product
from te_bench.kernels.gemm.hopper.plans import Plan, plan, plan_sum, programs
from te_bench.kernels.gemm.operands import check, granularities, refusal
from te_bench.kernels.gemm.operators import GROUP_M, Operators, allocate, misaligned
from te_bench.kernels.quantize import BLOCK, Operand

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from te_bench.kernels.gemm.hopper.kernels import gluon_gemm_accumulate_kernel, gluon_gemm_kernel
except ImportError:
    MISSING: str | None = gluon.ABSENT
else:
    MISSING = None
INTERPRETED: bool = triton.knobs.runtime.interpret


def unsupported(p: Problem) -> str | None:
    if reason := refusal(p.a, p.b) or misaligned(p):
        return reason
    kind, other = granularities(p.a, p.b)
    if kind not in ("tensor", "row"):
        return f"scales per {kind} x {other}: this one has tensor x tensor and row x row"
    return gluon.unsupported(p.device, p.capability, MISSING, INTERPRETED)


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> "gl.NVMMASharedLayout":
    return gl.NVMMASharedLayout.get_default_for([rows, columns], _in_gluon(dtype))


def _in_gluon(dtype: torch.dtype) -> "gl.dtype":
    names = {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5, torch.float32: gl.float32}
    return names.get(dtype) or {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[dtype]


def _descriptor(x: Tensor, rows: int, columns: int) -> "TensorDescriptor":
    return TensorDescriptor.from_tensor(x, [rows, columns], _layout(rows, columns, x.dtype))


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
    chosen: Plan | None = None,
) -> Product:
    """D and what its epilogue leaves, none of M, N and K being 0."""
    kind = _kind(a, b, bias)
    p = chosen or plan(out_dtype, promote=not fast_accum, epilogue=epilogue, residual=residual)
    made = allocate(a.data, b.data.shape[0], out_dtype, epilogue)
    left = made.out, made.pre, residual, made.data, made.data_t
    numbers = a.scale_inv, b.scale_inv, bias, scale, made.scale_inv, amax
    run(p, a.data, b.data, left, numbers, epilogue, out_dtype, kind=kind, promote=not fast_accum)
    return made.product()


def run(
    p: Plan,
    a: Tensor,
    b: Tensor,
    left: tuple[Tensor | None, ...],
    numbers: tuple[Tensor | None, ...],
    epilogue: Epilogue,
    out_dtype: torch.dtype,
    *,
    kind: str,
    promote: bool,
    across: bool = False,
    gradient: bool = False,
) -> None:
    """The kernel on a (M, K) and b (N, K), or, across, (K, N), by the plan.

    left: out, what precedes its activation, residual, and FP8 in two layouts; numbers: both operands' scale_inv, bias, and
    the FP8's scale, scale_inv and amax; gradient: out is the product times the activation's slope at the residual.
    """
    out, pre, residual, data, data_t = left
    a_scale_inv, b_scale_inv, bias, *of_fp8 = numbers
    (m, k), n = a.shape, b.shape[1 if across else 0]
    part, block = p.width // p.parts, BLOCK // a.dtype.itemsize
    staged = out is not None or data_t is not None
    with torch.cuda.device_of(a):
        gluon_gemm_kernel[(programs(p, m, n, architecture.processors(a.device)),)](
            _descriptor(a, p.height, block),
            _descriptor(b, block, p.width) if across else _descriptor(b, p.width, block),
            *(None if x is None else _descriptor(x, p.height, part) for x in (out, pre, residual, data)),
            *(None if data_t is None else _descriptor(data_t, part, p.height), a_scale_inv, b_scale_inv),
            *(None if bias is None else bias.contiguous(), *of_fp8, m, n, k),
            A_KIND=kind,
            ACROSS=across,
            PROMOTE=promote,
            ACTIVATION=None if epilogue.activation is None else KINDS[epilogue.activation][0],
            GRADIENT=gradient,
            DTYPE=_in_gluon(out_dtype),
            OUT_LAYOUT=_layout(p.height, part, out_dtype),
            STORES=sum(x is not None for x in (out, pre, data, data_t)),
            IN_PLACE=staged and residual is not None and residual.dtype is out_dtype,
            STAGES=p.stages(out_dtype, epilogue, residual),
            **_constants(p),
        )


def _kind(a: Operand, b: Operand, bias: Tensor | None = None) -> str:
    """What both operands' scales are for. Raises ValueError for operands that cannot be multiplied, or not here."""
    kind, other = check(a, b, bias)
    if kind not in ("tensor", "row"):
        raise ValueError(f"scales per {kind} x {other}: the Gluon GEMM has none in blocks; take triton or scaled_mm")
    return kind


def _constants(p: Plan) -> dict[str, int | bool]:
    return {"PARTS": p.parts, "SLOTS": p.slots, "TURNS": p.turns, "GROUP_M": GROUP_M, "num_warps": 4}


def launch_accumulate(
    a: Operand, b: Operand, out: Tensor, fast_accum: bool, whole: bool, chosen: Plan | None = None
) -> None:
    """out += the product, none of M, N and K being 0; whole: no tile is shared by several programs."""
    kind = _kind(a, b)
    (m, k), n, processors = a.data.shape, b.data.shape[0], architecture.processors(a.data.device)
    p, whole = (chosen, whole) if chosen else plan_sum(m, n, promote=not fast_accum, whole=whole, processors=processors)
    height, width = p.tile()
    steps = triton.cdiv(m, height) * triton.cdiv(n, width) * triton.cdiv(k, BLOCK)
    with torch.cuda.device_of(a.data):
        gluon_gemm_accumulate_kernel[(programs(p, m, n, processors) if whole else min(processors, steps),)](
            *(_descriptor(a.data, p.height, BLOCK), _descriptor(b.data, p.width, BLOCK)),
            *(_descriptor(out, p.height, p.width // p.parts), a.scale_inv, b.scale_inv, m, n, k),
            A_KIND=kind,
            PROMOTE=not fast_accum,
            STAGES=p.stages(torch.float32, NO_EPILOGUE, None),
            STREAM=not whole,
            **_constants(p),
        )


_made = Operators("gluon", launch, launch_accumulate)

BACKEND = Backend(forward=_made.forward, unsupported=unsupported, fused=_made.fused, accumulate=_made.accumulate)
