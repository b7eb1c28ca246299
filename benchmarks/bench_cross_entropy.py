"""Cross-entropy over a padded vocabulary, forward and backward together, a copy of the logits included.

The copy is everybody's: a rival may overwrite its logits, so each call needs fresh ones.
"""

import pytest
import torch

from te_bench.kernels import cross_entropy

#: N, vocabulary, padded vocabulary
SIZES = {"cuda": (8192, 50257, 50304), "cpu": (128, 1000, 1024)}


@pytest.mark.parametrize("backend", cross_entropy.names())
def bench_cross_entropy(cuda_benchmark, randn, device, dtype, capability, backend):
    n, vocab, padded = SIZES[device]
    rival = cross_entropy.load(backend)
    problem = cross_entropy.Problem(vocab=vocab, padded=padded, dtype=dtype, device=device, capability=capability)
    if reason := rival.unsupported(problem):
        pytest.skip(f"{backend}: {reason}")
    logits = randn(n, padded).requires_grad_()
    targets = torch.arange(n, device=device) % vocab

    def call():
        loss = rival.forward(logits.clone(), targets, vocab=vocab)
        return torch.autograd.grad(loss, logits)

    cuda_benchmark(call, group="cross_entropy", dtype=dtype, n=n, vocab=vocab, padded=padded)
