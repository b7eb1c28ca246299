"""Use the fastest measured FP8 GEMM for a shape; cuBLASLt if none was measured or none is much faster.

Block scales use Triton where cuBLASLt lacks them: on every GPU with TMA but Hopper. Only 1 x 128 of a by 128 x 128 of b
is measured.

All backends keep one contract, so the choice affects only time and the last bits (order of sums over K; Gluon adds the
bias before rounding). It depends only on shape, scales, accumulation and GPU: a trial's record names the kernels that
ran.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from te_bench.kernels import architecture, measured
from te_bench.kernels.gemm import Problem, table
from te_bench.kernels.gemm.backends import gluon, scaled_mm, triton
from te_bench.kernels.gemm.operands import granularities, refusal
from te_bench.kernels.gemm.operators import as_operator
from te_bench.kernels.quantize import Layout, Operand

USUAL = "scaled_mm"
LAUNCHES: dict[str, Callable[..., Tensor]] = {"gluon": gluon.launch, "triton": triton.launch}


def forward(
    a: Operand, b: Operand, *, out_dtype: torch.dtype, fast_accum: bool = False, bias: Tensor | None = None
) -> Tensor:
    """Compute D = dequantise(a) @ dequantise(b).T + bias by the chosen backend; a (M, K), b (N, K) FP8 -> (M, N).

    As gemm.Backend's forward; raises ValueError for operands that cannot be multiplied.
    """
    if torch.compiler.is_compiling():
        return _operator(a, b, out_dtype=out_dtype, fast_accum=fast_accum, bias=bias)
    x, y = a.data, b.data
    launch = _launcher(a.layout, b.layout, x.shape, y.shape, out_dtype, fast_accum, x.get_device())
    if launch is None:
        return scaled_mm.forward(a, b, out_dtype=out_dtype, fast_accum=fast_accum, bias=bias)
    return launch(a, b, out_dtype=out_dtype, fast_accum=fast_accum, bias=bias)


_operator = as_operator("policy_gemm", forward)


@functools.lru_cache(maxsize=4096)  # bounded, because sequences vary in length
def _launcher(
    a: Layout,
    b: Layout,
    a_shape: tuple[int, ...],
    b_shape: tuple[int, ...],
    out_dtype: torch.dtype,
    fast: bool,
    device: int,
) -> Callable[..., Tensor] | None:
    """Return a launcher other than cuBLASLt's, or None. Raises ValueError for block scales that no backend supports."""
    if device < 0 or refusal(a, b) or not len(a_shape) == len(b_shape) == 2 or a_shape[1] != b_shape[1]:
        return None
    pair = granularities(a, b)
    granularity = next((name for name, measurable in table.SCALES.items() if measurable == pair), None)
    (m, k), (n, _) = a_shape, b_shape
    capability = torch.cuda.get_device_capability(device)
    problem = Problem(m=m, n=n, k=k, a=a, b=b, device="cuda", capability=capability)
    if "block" in pair and (lack := scaled_mm.lacks_block_scales(capability)) is not None:
        if not (m and n and k):
            return None
        if reason := triton.BACKEND.unsupported(problem):
            raise ValueError(f"{lack}; by Triton: {reason}")
        return LAUNCHES["triton"]
    # Only E4M3 into half precision is measured; float32 has other tiles.
    if granularity is None or not (a.format is b.format is torch.float8_e4m3fn and out_dtype.itemsize == 2):
        return None
    processors = architecture.processors(torch.device("cuda", device))
    gpu = torch.cuda.get_device_name(device)
    name = choose(m, n, k, granularity=granularity, fast=fast, gpu=gpu, processors=processors)
    if name == USUAL:
        return None
    backend = {"gluon": gluon, "triton": triton}[name].BACKEND
    return LAUNCHES[name] if backend.unsupported(problem) is None else None


measured.on_forget(_launcher.cache_clear)


def choose(m: int, n: int, k: int, *, granularity: str, fast: bool, gpu: str, processors: int) -> str:
    """Return the backend's name for E4M3 operands (M, K) and (N, K) with a granularity of table.SCALES."""
    fast = fast and granularity != "block"
    shape = {"n": n, "k": k, "dtype": "e4m3", "scales": granularity, "fast_accum": fast, "epilogue": None}
    row = table.nearest(gpu, processors, m, **shape)
    return USUAL if row is None else row.choose(USUAL, LAUNCHES, table.LEAST_GAIN)
