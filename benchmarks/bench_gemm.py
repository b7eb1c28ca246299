"""FP8 GEMMs of E4M3 operands, at every pair of granularities."""

import pytest
import torch

from te_bench.kernels import gemm, quantize

#: M, N, K
SIZES = {"cuda": (8192, 4096, 4096), "cpu": (128, 256, 256)}


def operand(x, granularity):
    """x in E4M3, K-major."""
    reference = quantize.load("reference")
    block = quantize.BLOCKS[granularity]
    return reference.quantize(x, torch.float8_e4m3fn, block, rowwise=True, columnwise=False).by_rows()


@pytest.mark.parametrize("pair", gemm.PAIRS, ids="-".join)
@pytest.mark.parametrize("backend", gemm.names())
def bench_gemm(cuda_benchmark, randn, device, capability, backend, pair):
    m, n, k = SIZES[device]
    rival = gemm.load(backend)
    a, b = operand(randn(m, k), pair[0]), operand(randn(n, k), pair[1])
    problem = gemm.Problem(m=m, n=n, k=k, a=a.layout, b=b.layout, device=device, capability=capability)
    if reason := rival.unsupported(problem):
        pytest.skip(f"{backend}: {reason}")

    def call():
        return rival.forward(a, b, out_dtype=torch.bfloat16)

    cuda_benchmark(call, group=f"gemm per {pair[0]} x {pair[1]}", dtype="e4m3", m=m, n=n, k=k, flop=2 * m * n * k)
