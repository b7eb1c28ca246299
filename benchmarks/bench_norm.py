"""LayerNorm and RMSNorm, forward and backward apart."""

import pytest

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
