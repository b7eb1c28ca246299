"""Attention backends, forward and backward apart, causal, at a GPT-2's and a longer shape."""

import pytest
import torch

from te_bench.kernels import attention

#: batch, heads, length, head_dim
SHAPES = {
    "cuda": {"gpt2": (12, 12, 1024, 64), "long": (2, 16, 8192, 128)},
    "cpu": {"gpt2": (1, 4, 128, 64), "long": (1, 2, 256, 64)},
}


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("shape", ["gpt2", "long"])
@pytest.mark.parametrize("backend", attention.names())
def bench_attention(cuda_benchmark, randn, device, dtype, capability, backend, shape, way):
    batch, heads, length, head_dim = SHAPES[device][shape]
    sizes = {"batch": batch, "heads": heads, "length": length, "head_dim": head_dim}
    rival = attention.load(backend)
    problem = attention.Problem(**sizes, dtype=dtype, causal=True, dropout=0.0, device=device, capability=capability)
    if reason := rival.unsupported(problem):
        pytest.skip(f"{backend}: {reason}")
    q, k, v, dout = (randn(batch, heads, length, head_dim) for _ in range(4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    def forward():
        return rival.forward(q, k, v, causal=True, scale=head_dim**-0.5)

    out = forward()

    def backward():
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    call = forward if way == "forward" else backward
    cuda_benchmark(call, group=f"attention {way}, {shape}", dtype=dtype, causal=True, **sizes)
