"""FP8 GEMMs as torch operators, and the `forward` of a backend without padding around its launcher."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_bench.kernels.gemm import Problem
from te_bench.kernels.gemm.operands import check, put_together, take_apart
from te_bench.kernels.operators import define
from te_bench.kernels.quantize import Operand

K_ALIGNMENT, N_ALIGNMENT = 16, 8  # elements: TMA needs rows of a multiple of 16 bytes, for FP8 and for a 2-byte D
INTERPRETED_PROCESSORS = 3  # fewer than a test has tiles, so that persistent loops repeat
GROUP_M = 8  # tiles of M that share b's tiles in L2, Triton's usual


def as_operator(name: str, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a backend's `forward` as operator te_bench::NAME: profilers and torch.compile do not see inside."""

    def run(
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

    def fake(a: Tensor, b: Tensor, _a: Tensor, _b: Tensor, _of_a: str, _of_b: str, dtype: torch.dtype, *_: Any) -> Any:
        return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)

    operator = define(name, run, fake)

    def call(
        a: Operand, b: Operand, *, out_dtype: torch.dtype, fast_accum: bool = False, bias: Tensor | None = None
    ) -> Tensor:
        product: Tensor = operator(*take_apart(a, b), out_dtype, fast_accum, bias)
        return product

    return call


def misaligned(p: Problem) -> str | None:
    """Return why TMA cannot read or write a problem's matrices, or None."""
    if p.k % K_ALIGNMENT or p.n % N_ALIGNMENT:
        return f"N {p.n} must be a multiple of {N_ALIGNMENT}, K {p.k} of {K_ALIGNMENT}: TMA rows start at 16-byte addresses"
    return None


def readable(data: Tensor) -> Tensor:
    """Return an operand's data, or a copy if TMA cannot read it: it must begin at a 16-byte address."""
    return data.clone() if data.data_ptr() % 16 else data


def unpadded(name: str, launch: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return NAME's `forward`, operator te_bench::NAME_gemm, around launch(a, b, *, out_dtype, fast_accum, bias).

    launch gets aligned operands only, with nonzero M, N and K.
    """

    def forward(
        a: Operand, b: Operand, *, out_dtype: torch.dtype, fast_accum: bool = False, bias: Tensor | None = None
    ) -> Tensor:
        """Compute D = dequantise(a) @ dequantise(b).T + bias, float32 until rounded; a (M, K), b (N, K) FP8 -> (M, N).

        fast_accum keeps Hopper's 14-bit accumulator for all of K; without it, and always with block scales, every 128
        of K are added in float32. Raises ValueError for operands that cannot be multiplied.
        """
        check(a, b, bias)
        (m, k), n = a.data.shape, b.data.shape[0]
        if k % K_ALIGNMENT or n % N_ALIGNMENT:
            raise ValueError(
                f"N {n} and K {k}: the {name} GEMM takes N a multiple of {N_ALIGNMENT} and K of {K_ALIGNMENT}; "
                "pad with zeros, or take scaled_mm, which does"
            )
        if not (m and n and k):
            nothing = a.data.new_zeros((m, n), dtype=out_dtype)
            return nothing if bias is None else nothing.add_(bias)
        return launch(a, b, out_dtype=out_dtype, fast_accum=fast_accum, bias=bias)

    return as_operator(f"{name}_gemm", forward)
