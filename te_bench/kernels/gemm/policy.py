"""The fastest FP8 GEMM of a shape, as measured; cuBLASLt where nothing was, or where nothing is much faster.

Every backend keeps the same contract, so that the choice is one of time; the last bits differ, by the order in which K is
added up and by a bias that Gluon adds before it rounds. It depends on the shape, the scales, the sums asked for and the GPU,
and on nothing else: a trial's record names the kernels that ran.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from te_bench.kernels import architecture, measured
from te_bench.kernels.gemm import Epilogue, Problem, Product, empty_product, granularities, table
from te_bench.kernels.gemm.backends import gluon, scaled_mm, triton

USUAL = "scaled_mm"
PLAIN = Epilogue()
LAUNCHES: dict[str, Callable[..., Product]] = {"gluon": gluon.launch, "triton": triton.launch}


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
    """D = dequantise(a) @ dequantise(b).T + bias by the backend chosen; a (M, K), b (N, K) FP8 -> (M, N) out_dtype.

    As gemm.Backend's forward; raises ValueError for operands that cannot be multiplied.
    """
    if torch.compiler.is_compiling():
        return _operator(a, b, a_scale_inv, b_scale_inv, out_dtype, fast_accum, bias)
    if a.dim() != 2 or b.dim() != 2:
        granularities(a, b, a_scale_inv, b_scale_inv, bias)  # which raises
    launch = _launcher(
        *(*a.shape, *b.shape, a.dtype, b.dtype, a_scale_inv.dim(), b_scale_inv.dim()),
        *(out_dtype, fast_accum, a.get_device()),
    )
    if launch is None:
        return scaled_mm.forward(a, b, a_scale_inv, b_scale_inv, out_dtype=out_dtype, fast_accum=fast_accum, bias=bias)
    made: Tensor = launch(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, fast_accum, PLAIN, None, None, None).out
    return made


@torch.library.custom_op("te_bench::policy_gemm", mutates_args=())
def _operator(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
    bias: Tensor | None,
) -> Tensor:
    return forward(a, b, a_scale_inv, b_scale_inv, out_dtype=out_dtype, fast_accum=fast_accum, bias=bias)


_operator.register_fake(empty_product)


@functools.lru_cache(maxsize=4096)  # sequences of many lengths would fill it for ever
def _launcher(
    m: int,
    k: int,
    n: int,
    b_k: int,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    a_scales: int,
    b_scales: int,
    out_dtype: torch.dtype,
    fast: bool,
    device: int,
) -> Callable[..., Product] | None:
    """The launcher of another backend than cuBLASLt; by scales' dimensions, 0 per tensor and 1 per row."""
    formats = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
    legal = b_k == k and a_scales == b_scales < 2 and {a_dtype, b_dtype} <= formats.keys()
    # What was measured: E4M3 into half precision. float32 leaves by other tiles.
    if not legal or device < 0 or out_dtype.itemsize != 2 or torch.float8_e5m2 in (a_dtype, b_dtype):
        return None
    granularity = ("tensor", "row")[a_scales]
    processors = architecture.processors(torch.device("cuda", device))
    gpu = torch.cuda.get_device_name(device)
    name = choose(m, n, k, granularity=granularity, fast=fast, gpu=gpu, processors=processors)
    if name == USUAL:
        return None
    problem = Problem(
        m=m, n=n, k=k, a_dtype=formats[a_dtype], b_dtype=formats[b_dtype], device="cuda",
        capability=torch.cuda.get_device_capability(device), a_granularity=granularity, b_granularity=granularity,
    )  # fmt: skip
    backend = {"gluon": gluon, "triton": triton}[name].BACKEND
    return LAUNCHES[name] if backend.unsupported(problem) is None else None


measured.on_forget(_launcher.cache_clear)


def choose(m: int, n: int, k: int, *, granularity: str, fast: bool, gpu: str, processors: int) -> str:
    """The backend's name, of E4M3 operands (M, K) and (N, K) with scales per "tensor" or "row"."""
    shape = {"n": n, "k": k, "dtype": "e4m3", "scales": granularity, "fast_accum": fast, "epilogue": None}
    row = table.nearest(gpu, processors, m, **shape)
    return USUAL if row is None else row.choose(USUAL, LAUNCHES, table.LEAST_GAIN)
