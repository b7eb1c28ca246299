"""FP8 quantisers, both layouts in one call, at every granularity."""

import pytest
import torch

from te_bench.kernels import quantize
from te_bench.kernels.quantize import block_casts

#: M, N
SIZES = {"cuda": (8192, 4096), "cpu": (128, 256)}
BOTH = {"rowwise": True, "columnwise": True}
CASTS = {
    name: lambda rival, x, block=block: rival.quantize(x, torch.float8_e4m3fn, block, **BOTH)
    for name, block in quantize.BLOCKS.items()
} | {
    "scaled": lambda rival, x: rival.quantize(x, torch.float8_e4m3fn, scale=torch.ones((), device=x.device), **BOTH),
}


@pytest.mark.parametrize("granularity", CASTS)
@pytest.mark.parametrize("backend", quantize.names())
def bench_quantize(cuda_benchmark, randn, device, dtype, capability, backend, granularity):
    rival = quantize.load(backend)
    if reason := rival.unsupported(quantize.Problem(device=device, capability=capability)):
        pytest.skip(f"{backend}: {reason}")
    m, n = SIZES[device]
    x = randn(m, n)
    cast = CASTS[granularity]
    cuda_benchmark(lambda: cast(rival, x), group=f"quantize per {granularity}", dtype=dtype, m=m, n=n)


BOTH = {"rowwise": True, "columnwise": True}
BLOCK_FORMATS = {
    "mxfp8": lambda x, _: block_casts.mxfp8(x, torch.float8_e4m3fn, **BOTH),
    "nvfp4, a weight": lambda x, _: block_casts.nvfp4(x, rows=16, **BOTH),
    "nvfp4, an input": lambda x, _: block_casts.nvfp4(x, **BOTH, transform=True),
    "nvfp4, a gradient": lambda x, seed: block_casts.nvfp4(x, **BOTH, transform=True, seed=seed),
}


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def bench_block_formats(cuda_benchmark, randn, device, dtype, name):
    (m, n), seed = SIZES[device], torch.ones((), dtype=torch.int64, device=device)
    x, cast = randn(m, n), BLOCK_FORMATS[name]
    cuda_benchmark(lambda: cast(x, seed), group=f"cast to {name}", dtype=dtype, m=m, n=n)
