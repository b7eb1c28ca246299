"""GEMMs as torch's operators; and the public functions of a backend that pads nothing, around its launchers."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_bench.kernels.gemm import Epilogue, Problem, Product
from te_bench.kernels.gemm.operands import DTYPES, check, check_epilogue, check_sum, put_together, take_apart
from te_bench.kernels.quantize import TENSOR, Layout, Operand, Quantized

K_ALIGNMENT, N_ALIGNMENT = 16, 8  # elements: TMA wants rows at multiples of 16 bytes, of FP8 and of a 2-byte D
FP8_ALIGNMENT = 16  # of the rows of a D in FP8


INTERPRETED_PROCESSORS = 3  # of the interpreter: fewer than a test has tiles, so that a persistent loop turns
GROUP_M = 8  # tiles of M that share the tiles of b in L2, Triton's usual

Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


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


def as_operator(name: str, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A backend's `forward` as the operator te_bench::NAME: a profiler and torch.compile see it and none of its parts."""

    @torch.library.custom_op(f"te_bench::{name}", mutates_args=())
    def operator(
        a: Tensor,
        b: Tensor,
        a_scale_inv: Tensor,
        b_scale_inv: Tensor,
        a_granularity: str,
        b_granularity: str,
        out_dtype: torch.dtype,
        fast_accum: bool,
        bias: Tensor | None,
    ) -> Tensor:
        both = put_together(a, b, a_scale_inv, b_scale_inv, a_granularity, b_granularity)
        return forward(*both, out_dtype=out_dtype, fast_accum=fast_accum, bias=bias)

    operator.register_fake(
        lambda a, b, _a, _b, _of_a, _of_b, out_dtype, *_: a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)
    )

    def call(
        a: Operand, b: Operand, *, out_dtype: torch.dtype, fast_accum: bool = False, bias: Tensor | None = None
    ) -> Tensor:
        return operator(*take_apart(a, b), out_dtype, fast_accum, bias)

    return call


def misaligned(p: Problem) -> str | None:
    """Why TMA cannot read or write a problem's matrices, or None."""
    if p.k % K_ALIGNMENT or p.n % N_ALIGNMENT:
        return f"N {p.n} must be a multiple of {N_ALIGNMENT}, K {p.k} of {K_ALIGNMENT}: TMA rows start at 16-byte addresses"
    return None if p.epilogue is None else _unaligned(p.m, p.n, p.epilogue)


def _unaligned(m: int, n: int, epilogue: Epilogue) -> str | None:
    """Why TMA cannot write the FP8 that an epilogue asks for, or None."""
    if epilogue.target is None:
        return None
    for name, size, asked in (("N", n, epilogue.rowwise), ("M", m, epilogue.columnwise)):
        if asked and size % FP8_ALIGNMENT:
            return f"{name} {size} must be a multiple of {FP8_ALIGNMENT} for a D in FP8: TMA rows start at 16-byte addresses"
    return None


class Operators:
    """A backend's functions, and the operators te_bench::NAME_gemm, NAME_gemm_fused and NAME_gemm_accumulate of them.

    launch(a, b, *, out_dtype, fast_accum, bias, epilogue, residual, scale, amax) -> Product, the last five optional, and
    add(a, b, out, fast_accum, whole) run a kernel; M, N and K are aligned, and none of them is 0.
    """

    def __init__(self, name: str, launch: Callable[..., Product], add: Callable[..., None]):
        self.name, self.launch = name, launch
        self.forward = as_operator(f"{name}_gemm", self._forward)
        self._fused_operator = _fused_operator(name, launch)
        self._accumulate_operator = _accumulate_operator(name, add)

    def _forward(
        self, a: Operand, b: Operand, *, out_dtype: torch.dtype, fast_accum: bool = False, bias: Tensor | None = None
    ) -> Tensor:
        """D = dequantise(a) @ dequantise(b).T + bias, in float32 until rounded; a (M, K), b (N, K) FP8 -> (M, N) out_dtype.

        fast_accum keeps Hopper's 14-bit accumulator for the whole of K; without it, and always with block scales, every 128
        of K are added up in float32. Raises ValueError for operands that cannot be multiplied.
        """
        check(a, b, bias)
        m, n, k = self._sizes(a, b)
        if not (m and n and k):
            nothing = a.data.new_zeros((m, n), dtype=out_dtype)
            return nothing if bias is None else nothing.add_(bias)
        out = self.launch(a, b, out_dtype=out_dtype, fast_accum=fast_accum, bias=bias).out
        assert isinstance(out, Tensor)
        return out

    def fused(
        self,
        a: Operand,
        b: Operand,
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
        m, n, k = self._sizes(a, b)
        check_epilogue((m, n), out_dtype, epilogue, residual, scale, amax)
        if reason := _unaligned(m, n, epilogue):
            raise ValueError(f"{reason}; pad with zeros, or cast out by te_bench.kernels.quantize")
        if not (m and n and k):
            raise ValueError(f"an empty product {m} x {n} x {k} has no epilogue: take forward")
        tensors = {"bias": bias, "residual": residual, "scale": scale, "amax": amax}
        if not torch.compiler.is_compiling():
            return self.launch(a, b, out_dtype=out_dtype, fast_accum=fast_accum, epilogue=epilogue, **tensors)
        e = epilogue
        fields = e.activation, e.keep, e.residual, e.out, e.target, e.rowwise, e.columnwise
        made = self._fused_operator(*take_apart(a, b), *tensors.values(), out_dtype, fast_accum, *fields)
        fp8 = e.target is not None
        asked = e.out, e.keep, fp8 and e.rowwise, fp8 and e.columnwise, fp8
        return Outputs(*[x if there else None for x, there in zip(made, asked, strict=True)]).product()

    def accumulate(self, a: Operand, b: Operand, *, out: Tensor, fast_accum: bool = False) -> None:
        """out += dequantise(a) @ dequantise(b).T in float32, by TMA's reduction; a (M, K), b (N, K) FP8, out (M, N) float32.

        Where tiles of out are too few for the GPU, several programs share one along K, and add in no fixed order: never so
        under torch.use_deterministic_algorithms. Raises ValueError as `forward`, and for another out.
        """
        check(a, b)
        m, n, k = self._sizes(a, b)
        check_sum((m, n), out)
        if m and n and k:
            self._accumulate_operator(*take_apart(a, b), out, fast_accum, torch.are_deterministic_algorithms_enabled())

    def _sizes(self, a: Operand, b: Operand) -> tuple[int, int, int]:
        """M, N and K. Raises ValueError for what TMA cannot read or write."""
        (m, k), n = a.data.shape, b.data.shape[0]
        if k % K_ALIGNMENT or n % N_ALIGNMENT:
            raise ValueError(
                f"N {n} and K {k}: the {self.name} GEMM takes N a multiple of {N_ALIGNMENT} and K of {K_ALIGNMENT}; "
                "pad with zeros, or take scaled_mm, which does"
            )
        return m, n, k


def _fused_operator(name: str, launch: Callable[..., Product]) -> Callable[..., Five]:
    """-> out, pre, data, data_t, scale_inv; empty for what was not asked for, for an operator can't return None."""

    @torch.library.custom_op(f"te_bench::{name}_gemm_fused", mutates_args=("amax",))
    def operator(
        a: Tensor,
        b: Tensor,
        a_scale_inv: Tensor,
        b_scale_inv: Tensor,
        a_granularity: str,
        b_granularity: str,
        bias: Tensor | None,
        residual: Tensor | None,
        scale: Tensor | None,
        amax: Tensor | None,
        out_dtype: torch.dtype,
        fast_accum: bool,
        activation: str | None,
        keep: bool,
        has_residual: bool,
        out: bool,
        target: str | None,
        rowwise: bool,
        columnwise: bool,
    ) -> Five:
        both = put_together(a, b, a_scale_inv, b_scale_inv, a_granularity, b_granularity)
        epilogue = _epilogue(activation, keep, has_residual, out, target, rowwise, columnwise)
        tensors = {"bias": bias, "residual": residual, "scale": scale, "amax": amax}
        made = launch(*both, out_dtype=out_dtype, fast_accum=fast_accum, epilogue=epilogue, **tensors)
        return _five(a, made, out_dtype)

    @operator.register_fake
    def _(a: Tensor, b: Tensor, *rest: Any) -> Five:
        *_, out_dtype, _ = rest[:-FIELDS]
        return _five(a, allocate(a, b.shape[0], out_dtype, _epilogue(*rest[-FIELDS:])).product(), out_dtype)

    return operator


FIELDS = len(dataclasses.fields(Epilogue))


def _epilogue(*fields: Any) -> Epilogue:
    """Of its fields in their order."""
    return Epilogue(**{f.name: value for f, value in zip(dataclasses.fields(Epilogue), fields, strict=True)})


def _five(like: Tensor, made: Product, out_dtype: torch.dtype) -> Five:
    q, fp8 = made.quantized, DTYPES["e4m3"]
    parts = (
        (None, None, None) if q is None else (q.data, q.data_t, q.scale_inv if q.data is not None else q.scale_inv_t)
    )
    dtypes = out_dtype, out_dtype, *(2 * [fp8 if q is None else q.layout.format]), torch.float32
    found = zip((made.out, made.pre, *parts), dtypes, strict=True)
    out, pre, data, data_t, scale_inv = [like.new_empty(0, dtype=d) if x is None else x for x, d in found]
    return out, pre, data, data_t, scale_inv


def _accumulate_operator(name: str, add: Callable[..., None]) -> Callable[..., None]:
    @torch.library.custom_op(f"te_bench::{name}_gemm_accumulate", mutates_args=("out",))
    def operator(
        a: Tensor,
        b: Tensor,
        a_scale_inv: Tensor,
        b_scale_inv: Tensor,
        a_granularity: str,
        b_granularity: str,
        out: Tensor,
        fast_accum: bool,
        whole: bool,
    ) -> None:
        add(*put_together(a, b, a_scale_inv, b_scale_inv, a_granularity, b_granularity), out, fast_accum, whole)

    operator.register_fake(lambda *_: None)
    return operator
