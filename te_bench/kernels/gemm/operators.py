"""FP8 GEMMs as torch's operators; and the `forward` of a backend that pads nothing, around its launcher."""

from collections.abc import Callable

import torch
from torch import Tensor

from te_bench.kernels.gemm import Problem
from te_bench.kernels.gemm.operands import check, put_together, take_apart
from te_bench.kernels.quantize import Operand

K_ALIGNMENT, N_ALIGNMENT = 16, 8  # elements: TMA wants rows at multiples of 16 bytes, of FP8 and of a 2-byte D
INTERPRETED_PROCESSORS = 3  # of the interpreter: fewer than a test has tiles, so that a persistent loop turns
GROUP_M = 8  # tiles of M that share the tiles of b in L2, Triton's usual


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
    return None


def unpadded(name: str, launch: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The `forward` of the backend NAME, operator te_bench::NAME_gemm, around launch(a, b, *, out_dtype, fast_accum, bias).

    What is launched is aligned, and none of its M, N and K is 0.
    """

    def forward(
        a: Operand, b: Operand, *, out_dtype: torch.dtype, fast_accum: bool = False, bias: Tensor | None = None
    ) -> Tensor:
        """D = dequantise(a) @ dequantise(b).T + bias, in float32 until rounded; a (M, K), b (N, K) FP8 -> (M, N) out_dtype.

        fast_accum keeps Hopper's 14-bit accumulator for the whole of K; without it, and always with block scales, every 128
        of K are added up in float32. Raises ValueError for operands that cannot be multiplied.
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
