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

from te_bench.kernels._epilogue import FLOATS, FP8
from te_bench.kernels.activation import KINDS
from te_bench.kernels.gemm import (
    PAIRS,
    Backend,
    Epilogue,
    Problem,
    Product,
    check_epilogue,
    check_sum,
    granularities,
)
from te_bench.kernels.gemm._kernels import gemm_accumulate_kernel, scaled_kernel
from te_bench.kernels.gemm._tiles import Tile, split, tile
from te_bench.kernels.gemm.reference import DTYPES
from te_bench.kernels.quantize import BLOCK, Quantized

INTERPRETED: bool = triton.knobs.runtime.interpret
K_ALIGNMENT, N_ALIGNMENT = 16, 8  # elements: TMA wants rows at multiples of 16 bytes, of FP8 and of a 2-byte D
FP8_ALIGNMENT = 16  # of the rows of a D in FP8

GROUP_M = 8  # tiles of M that share the tiles of b in L2, Triton's usual


def unsupported(p: Problem) -> str | None:
    if (p.a_granularity, p.b_granularity) not in PAIRS:
        return f"scales per {p.a_granularity} x {p.b_granularity}: te-bench has no such kernel"
    if p.k % K_ALIGNMENT or p.n % N_ALIGNMENT:
        return f"N {p.n} must be a multiple of {N_ALIGNMENT}, K {p.k} of {K_ALIGNMENT}: TMA rows start at 16-byte addresses"
    if p.epilogue is not None and (reason := _unaligned(p.m, p.n, p.epilogue)):
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


def _unaligned(m: int, n: int, epilogue: Epilogue) -> str | None:
    """Why TMA cannot write the FP8 that an epilogue asks for, or None."""
    if epilogue.target is None:
        return None
    for name, size, wanted in (("N", n, epilogue.rowwise), ("M", m, epilogue.columnwise)):
        if wanted and size % FP8_ALIGNMENT:
            return f"{name} {size} must be a multiple of {FP8_ALIGNMENT} for a D in FP8: TMA rows start at 16-byte addresses"
    return None


def _check_alignment(n: int, k: int) -> None:
    if k % K_ALIGNMENT or n % N_ALIGNMENT:
        raise ValueError(
            f"N {n} and K {k}: Triton's GEMM takes N a multiple of {N_ALIGNMENT} and K of {K_ALIGNMENT}; "
            "pad with zeros, or take scaled_mm, which does"
        )


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
    epilogue: Epilogue = Epilogue(),  # noqa: B008 - frozen
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
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
    return Product(out, pre, Quantized(data, there, data_t, back))


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
    granularities(a, b, a_scale_inv, b_scale_inv, bias)
    (m, k), n = a.shape, b.shape[0]
    _check_alignment(n, k)
    if not (m and n and k):
        nothing = a.new_zeros((m, n), dtype=out_dtype)
        return nothing if bias is None else nothing.add_(bias)
    out = _launch(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, fast_accum).out
    assert isinstance(out, Tensor)
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


def fused(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    *,
    out_dtype: torch.dtype,
    epilogue: Epilogue,
    fast_accum: bool = False,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> Product:
    """out = round(f(round(product + bias)) + residual) and fp8(out * scale), in one kernel; see gemm.Epilogue.

    amax becomes max(amax, max |out|). Raises ValueError as `forward`, and for an epilogue's tensors that do not fit.
    """
    check_epilogue(a, b, out_dtype, epilogue, residual, scale, amax)
    (m, k), n = a.shape, b.shape[0]
    _check_alignment(n, k)
    if reason := _unaligned(m, n, epilogue):
        raise ValueError(f"{reason}; pad with zeros, or cast out by te_bench.kernels.quantize")
    if not (m and n and k):
        raise ValueError(f"an empty product {m} x {n} x {k} has no epilogue: take forward")
    if not torch.compiler.is_compiling():
        return _launch(
            a, b, a_scale_inv, b_scale_inv, bias, out_dtype, fast_accum, epilogue, residual, scale, amax
        )  # fmt: skip
    e = epilogue
    out, pre, data, data_t, scale_inv = _fused_op(
        a, b, a_scale_inv, b_scale_inv, bias, out_dtype, fast_accum,
        e.activation, e.keep, residual, e.out, e.target, e.rowwise, e.columnwise, scale, amax,
    )  # fmt: skip
    quantized = None
    if e.target is not None:
        there, back = (scale_inv if wanted else None for wanted in (e.rowwise, e.columnwise))
        quantized = Quantized(data if e.rowwise else None, there, data_t if e.columnwise else None, back)
    return Product(out if e.out else None, pre if e.keep else None, quantized)


@torch.library.custom_op("te_bench::triton_gemm_fused", mutates_args=("amax",))
def _fused_op(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    activation: str | None,
    keep: bool,
    residual: Tensor | None,
    out: bool,
    target: str | None,
    rowwise: bool,
    columnwise: bool,
    scale: Tensor | None,
    amax: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, pre, data, data_t, scale_inv; empty for what was not asked for, for an operator can't return None."""
    epilogue = Epilogue(
        activation=activation, keep=keep, residual=residual is not None, out=out, target=target,
        rowwise=rowwise, columnwise=columnwise,
    )  # fmt: skip
    made = _launch(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, fast_accum, epilogue, residual, scale, amax)
    q = made.quantized or Quantized(None, None, None, None)
    fp8 = DTYPES[target or "e4m3"]
    found = (made.out, made.pre, q.data, q.data_t, q.scale_inv if q.scale_inv is not None else q.scale_inv_t)
    dtypes = (out_dtype, out_dtype, fp8, fp8, torch.float32)
    of_each = [a.new_empty(0, dtype=d) if x is None else x for x, d in zip(found, dtypes, strict=True)]
    return of_each[0], of_each[1], of_each[2], of_each[3], of_each[4]


@_fused_op.register_fake
def _(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    activation: str | None,
    keep: bool,
    residual: Tensor | None,
    out: bool,
    target: str | None,
    rowwise: bool,
    columnwise: bool,
    scale: Tensor | None,
    amax: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (m, _), n, fp8 = a.shape, b.shape[0], DTYPES[target or "e4m3"]
    return (
        a.new_empty((m, n) if out else (0,), dtype=out_dtype),
        a.new_empty((m, n) if keep else (0,), dtype=out_dtype),
        a.new_empty((m, n) if target and rowwise else (0,), dtype=fp8),
        a.new_empty((n, m) if target and columnwise else (0,), dtype=fp8),
        a.new_empty(() if target else (0,), dtype=torch.float32),
    )


def accumulate(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, *, out: Tensor, fast_accum: bool = False
) -> None:
    """out += dequantise(a) @ dequantise(b).T in float32, by TMA's reduction; a (M, K), b (N, K) FP8, out (M, N) float32.

    Where the tiles of out are too few for the GPU, K is split (see `split`), and shares are added in no fixed order: under
    torch.use_deterministic_algorithms it never is. Raises ValueError as `forward`, and for another out.
    """
    check_sum(a, b, out)
    granularities(a, b, a_scale_inv, b_scale_inv)
    _check_alignment(b.shape[0], a.shape[1])
    if a.shape[0] and b.shape[0] and a.shape[1]:
        whole = torch.are_deterministic_algorithms_enabled()
        _accumulate_op(a, b, a_scale_inv, b_scale_inv, out, fast_accum, whole)


@torch.library.custom_op("te_bench::triton_gemm_accumulate", mutates_args=("out",))
def _accumulate_op(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, out: Tensor, fast_accum: bool, whole: bool
) -> None:
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


@_accumulate_op.register_fake
def _(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, out: Tensor, fast_accum: bool, whole: bool
) -> None:
    return None


BACKEND = Backend(forward=forward, unsupported=unsupported, fused=fused, accumulate=accumulate)
