"""Activations, a plain and a gated one, forward and backward apart."""

import pytest

from te_bench.kernels import activation

#: M, F
SIZES = {"cuda": (8192, 8192), "cpu": (256, 1024)}


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("backend", activation.names())
def bench_activation(cuda_benchmark, randn, device, dtype, capability, backend, kind, way):
    m, f = SIZES[device]
    rival = activation.load(backend)
    if reason := rival.unsupported(activation.Problem(quantized=False, device=device, capability=capability)):
        pytest.skip(f"{backend}: {reason}")
    x, dy = randn(m, 2 * f if activation.KINDS[kind][1] else f), randn(m, f)
    call = (lambda: rival.forward(x, kind)) if way == "forward" else (lambda: rival.backward(dy, x, kind))
    cuda_benchmark(call, group=f"{kind} {way}", dtype=dtype, m=m, f=f)
