"""LayerNorm and RMSNorm, forward and backward apart; and with a residual's addition and an FP8 cast in the same pass."""

import pytest
import torch

from te_bench.kernels import norm

#: M, N
SIZES = {"cuda": (8192, 4096), "cpu": (512, 768)}
EPS = 1e-5


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("kind", norm.KINDS)
@pytest.mark.parametrize("backend", norm.names())
def bench_norm(cuda_benchmark, randn, device, dtype, capability, backend, kind, way):
    m, n = SIZES[device]
    rival = norm.load(backend)
    problem = norm.Problem(n=n, dtype=dtype, kind=kind, quantized=False, device=device, capability=capability)
    if reason := rival.unsupported(problem):
        pytest.skip(f"{backend}: {reason}")
    x, dy, weight = randn(m, n), randn(m, n), randn(n)
    bias = randn(n) if kind == "layernorm" else None

    def forward():
        return rival.forward(x, weight, bias, eps=EPS, kind=kind)

    _, mean, rstd = forward()

    def backward():
        return rival.backward(dy, x, weight, mean, rstd, kind=kind)

    call = forward if way == "forward" else backward
    cuda_benchmark(call, group=f"{kind} {way}", dtype=dtype, m=m, n=n)


@pytest.mark.parametrize("added", [False, True], ids=["norm", "sum and norm"])
@pytest.mark.parametrize("backend", [name for name in norm.names() if norm.load(name).residual is not None])
def bench_norm_in_fp8(cuda_benchmark, randn, device, dtype, capability, backend, added):
    m, n = SIZES[device]
    rival = norm.load(backend)
    problem = norm.Problem(n=n, dtype=dtype, kind="layernorm", quantized=True, device=device, capability=capability)
    if reason := rival.unsupported(problem):
        pytest.skip(f"{backend}: {reason}")
    x, branch, weight, bias = randn(m, n), randn(m, n) if added else None, randn(n), randn(n)
    cast = {"scale": torch.ones((), device=device), "dtype": torch.float8_e4m3fn, "rowwise": True, "columnwise": True}

    def forward():
        return rival.residual.add_forward_quantized(x, branch, weight, bias, eps=EPS, via=x.dtype, **cast)

    cuda_benchmark(forward, group="sum and norm in FP8" if added else "norm in FP8", dtype=dtype, m=m, n=n)
