"""The public functions of a GEMM backend that pads nothing, around its launchers: checks, empty products, operators."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_bench.kernels.gemm import (
    Epilogue,
    Problem,
    Product,
    check_epilogue,
    check_sum,
    empty_product,
    granularities,
)
from te_bench.kernels.gemm.backends.reference import DTYPES
from te_bench.kernels.quantize import TENSOR, Layout, Quantized

K_ALIGNMENT, N_ALIGNMENT = 16, 8  # elements: TMA wants rows at multiples of 16 bytes, of FP8 and of a 2-byte D
FP8_ALIGNMENT = 16  # of the rows of a D in FP8


INTERPRETED_PROCESSORS = 3  # of the interpreter: fewer than a test has tiles, so that a persistent loop turns
GROUP_M = 8  # tiles of M that share the tiles of b in L2, Triton's usual


class Outputs(NamedTuple):
    """What a kernel with an epilogue writes; None for what was not asked for."""

    out: Tensor | None  # (M, N)
    pre: Tensor | None  # (M, N)
    data: Tensor | None  # (M, N), FP8
    data_t: Tensor | None  # (N, M), FP8
    scale_inv: Tensor | None  # ()

    def product(self) -> Product:
        if self.scale_inv is None:
            return Product(self.out, self.pre, None)
        there, back = (None if x is None else self.scale_inv for x in (self.data, self.data_t))
        [dtype, *_] = [x.dtype for x in (self.data, self.data_t) if x is not None]
        layout = Layout(dtype, TENSOR, torch.float32)
        return Product(self.out, self.pre, Quantized(self.data, there, self.data_t, back, layout))


def allocate(a: Tensor, n: int, out_dtype: torch.dtype, epilogue: Epilogue) -> Outputs:
    """Uninitialised, of a product of a (M, K) and b (N, K)."""
    m, target = a.shape[0], None if epilogue.target is None else DTYPES[epilogue.target]
    return Outputs(
        out=a.new_empty((m, n), dtype=out_dtype) if epilogue.out else None,
        pre=a.new_empty((m, n), dtype=out_dtype) if epilogue.keep else None,
        data=a.new_empty((m, n), dtype=target) if target is not None and epilogue.rowwise else None,
        data_t=a.new_empty((n, m), dtype=target) if target is not None and epilogue.columnwise else None,
        scale_inv=None if target is None else torch.empty((), dtype=torch.float32, device=a.device),
    )


class Operators(NamedTuple):
    """As gemm.Backend has them."""

    forward: Callable[..., Tensor]
    fused: Callable[..., Product]
    accumulate: Callable[..., None]


def misaligned(p: Problem) -> str | None:
    """Why TMA cannot read or write a problem's matrices, or None."""
    if p.k % K_ALIGNMENT or p.n % N_ALIGNMENT:
        return f"N {p.n} must be a multiple of {N_ALIGNMENT}, K {p.k} of {K_ALIGNMENT}: TMA rows start at 16-byte addresses"
    return None if p.epilogue is None else _unaligned(p.m, p.n, p.epilogue)


def _unaligned(m: int, n: int, epilogue: Epilogue) -> str | None:
    """Why TMA cannot write the FP8 that an epilogue asks for, or None."""
    if epilogue.target is None:
        return None
    for name, size, wanted in (("N", n, epilogue.rowwise), ("M", m, epilogue.columnwise)):
        if wanted and size % FP8_ALIGNMENT:
            return f"{name} {size} must be a multiple of {FP8_ALIGNMENT} for a D in FP8: TMA rows start at 16-byte addresses"
    return None


def _check_alignment(name: str, n: int, k: int) -> None:
    if k % K_ALIGNMENT or n % N_ALIGNMENT:
        raise ValueError(
            f"N {n} and K {k}: the {name} GEMM takes N a multiple of {N_ALIGNMENT} and K of {K_ALIGNMENT}; "
            "pad with zeros, or take scaled_mm, which does"
        )


def operators(name: str, launch: Callable[..., Product], add: Callable[..., None]) -> Operators:
    """The functions of backend `name`, and as torch operators te_bench::NAME_gemm, NAME_gemm_fused, NAME_gemm_accumulate.

    launch(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, fast_accum, epilogue, residual, scale, amax) -> Product and
    add(a, b, a_scale_inv, b_scale_inv, out, fast_accum, whole) run a kernel; M, N and K are aligned, and none of them is 0.
    """
    return Operators(_forward(name, launch), _fused(name, launch), _accumulate(name, add))


def _forward(name: str, launch: Callable[..., Product]) -> Callable[..., Tensor]:
    @torch.library.custom_op(f"te_bench::{name}_gemm", mutates_args=())
    def operator(
        a: Tensor,
        b: Tensor,
        a_scale_inv: Tensor,
        b_scale_inv: Tensor,
        out_dtype: torch.dtype,
        fast_accum: bool,
        bias: Tensor | None,
    ) -> Tensor:
        granularities(a, b, a_scale_inv, b_scale_inv, bias)
        (m, k), n = a.shape, b.shape[0]
        _check_alignment(name, n, k)
        if not (m and n and k):
            nothing = a.new_zeros((m, n), dtype=out_dtype)
            return nothing if bias is None else nothing.add_(bias)
        out = launch(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, fast_accum, Epilogue(), None, None, None).out
        assert isinstance(out, Tensor)
        return out

    operator.register_fake(empty_product)

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
        """D = dequantise(a) @ dequantise(b).T + bias, in float32 until rounded; a (M, K), b (N, K) FP8 -> (M, N) out_dtype.

        fast_accum keeps Hopper's 14-bit accumulator for the whole of K; without it, and always with block scales, every 128
        of K are added up in float32. Raises ValueError for operands that cannot be multiplied.
        """
        return operator(a, b, a_scale_inv, b_scale_inv, out_dtype, fast_accum, bias)

    return forward


def _fused(name: str, launch: Callable[..., Product]) -> Callable[..., Product]:
    operator = _fused_operator(name, launch)

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
        _check_alignment(name, n, k)
        if reason := _unaligned(m, n, epilogue):
            raise ValueError(f"{reason}; pad with zeros, or cast out by te_bench.kernels.quantize")
        if not (m and n and k):
            raise ValueError(f"an empty product {m} x {n} x {k} has no epilogue: take forward")
        if not torch.compiler.is_compiling():
            return launch(
                a, b, a_scale_inv, b_scale_inv, bias, out_dtype, fast_accum, epilogue, residual, scale, amax
            )  # fmt: skip
        e = epilogue
        out, pre, data, data_t, scale_inv = operator(
            a, b, a_scale_inv, b_scale_inv, bias, out_dtype, fast_accum,
            e.activation, e.keep, residual, e.out, e.target, e.rowwise, e.columnwise, scale, amax,
        )  # fmt: skip
        quantized = None
        if e.target is not None:
            there, back = (scale_inv if wanted else None for wanted in (e.rowwise, e.columnwise))
            layout = Layout(DTYPES[e.target], TENSOR, torch.float32)
            quantized = Quantized(data if e.rowwise else None, there, data_t if e.columnwise else None, back, layout)
        return Product(out if e.out else None, pre if e.keep else None, quantized)

    return fused


def _fused_operator(name: str, launch: Callable[..., Product]) -> Callable[..., Any]:
    """-> out, pre, data, data_t, scale_inv; empty for what was not asked for, for an operator can't return None."""

    @torch.library.custom_op(f"te_bench::{name}_gemm_fused", mutates_args=("amax",))
    def operator(
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
        epilogue = Epilogue(
            activation=activation, keep=keep, residual=residual is not None, out=out, target=target,
            rowwise=rowwise, columnwise=columnwise,
        )  # fmt: skip
        made = launch(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, fast_accum, epilogue, residual, scale, amax)
        fp8 = DTYPES[target or "e4m3"]
        q = made.quantized or Quantized(None, None, None, None, Layout(fp8, TENSOR, torch.float32))
        found = (made.out, made.pre, q.data, q.data_t, q.scale_inv if q.scale_inv is not None else q.scale_inv_t)
        dtypes = (out_dtype, out_dtype, fp8, fp8, torch.float32)
        of_each = [a.new_empty(0, dtype=d) if x is None else x for x, d in zip(found, dtypes, strict=True)]
        return of_each[0], of_each[1], of_each[2], of_each[3], of_each[4]

    @operator.register_fake
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

    return operator


def _accumulate(name: str, add: Callable[..., None]) -> Callable[..., None]:
    @torch.library.custom_op(f"te_bench::{name}_gemm_accumulate", mutates_args=("out",))
    def operator(
        a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, out: Tensor, fast_accum: bool, whole: bool
    ) -> None:
        add(a, b, a_scale_inv, b_scale_inv, out, fast_accum, whole)

    operator.register_fake(lambda *_: None)

    def accumulate(
        a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, *, out: Tensor, fast_accum: bool = False
    ) -> None:
        """out += dequantise(a) @ dequantise(b).T in float32, by TMA's reduction; a (M, K), b (N, K) FP8, out (M, N) float32.

        Where tiles of out are too few for the GPU, several programs share one along K, and add in no fixed order: never so
        under torch.use_deterministic_algorithms. Raises ValueError as `forward`, and for another out.
        """
        check_sum(a, b, out)
        granularities(a, b, a_scale_inv, b_scale_inv)
        _check_alignment(name, b.shape[0], a.shape[1])
        if a.shape[0] and b.shape[0] and a.shape[1]:
            operator(a, b, a_scale_inv, b_scale_inv, out, fast_accum, torch.are_deterministic_algorithms_enabled())

    return accumulate
