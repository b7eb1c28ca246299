"""Liger's cross-entropy is the reference's, where it is installed and there is a GPU; elsewhere it says what is missing."""

import importlib.util
import sys
import types

import pytest
import torch

from te_bench.kernels import cross_entropy
from te_bench.kernels.cross_entropy import Problem

PROBLEM = Problem(vocab=50257, padded=50304, dtype="bf16", device="cuda", capability=(9, 0))
MISSING = importlib.util.find_spec("liger_kernel") is None


def test_the_reference_runs_anywhere() -> None:
    assert cross_entropy.load("reference").unsupported(PROBLEM) is None


@pytest.mark.skipif(not MISSING, reason="liger-kernel is installed")
def test_says_what_to_install() -> None:
    assert cross_entropy.load("liger").unsupported(PROBLEM) == "pip install liger-kernel"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_around_ligers_function_compiles_without_breaks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    functional = types.ModuleType("liger_kernel.transformers.functional")
    functional.liger_cross_entropy = torch.nn.functional.cross_entropy  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, functional.__name__, functional)
    forward = torch.compile(cross_entropy.load("liger").forward, fullgraph=True, backend="eager")
    logits, targets = torch.randn(4, 8, device=device), torch.tensor([0, 1, 2, 4], device=device)
    expected = torch.nn.functional.cross_entropy(logits[:, :5], targets)
    torch.testing.assert_close(forward(logits.clone(), targets, vocab=5), expected)


@pytest.mark.gpu
@pytest.mark.skipif(MISSING, reason="pip install liger-kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "vocab", "padded"), [(33, 50, 64), (1024, 50257, 50304), (5, 7, 7)])
def test_is_the_reference(n: int, vocab: int, padded: int, dtype: torch.dtype) -> None:
    assert cross_entropy.load("liger").unsupported(PROBLEM) is None
    generator = torch.Generator().manual_seed(n)
    logits = (torch.randn(n, padded, generator=generator) * 3).to("cuda", dtype)
    targets = torch.randint(0, vocab, (n,), generator=generator).cuda()
    targets[::4] = -1
    results = []
    for name, of in (("liger", dtype), ("reference", torch.float64)):
        leaf = logits.to(of).requires_grad_()
        loss = cross_entropy.load(name).forward(leaf * 1.0, targets, vocab=vocab)
        results.append((loss.detach().double(), torch.autograd.grad(loss, leaf)[0].double()))
    (loss, grad), (exact, exact_grad) = results
    unit = torch.finfo(dtype).eps
    # Liger keeps each row's share of the mean, and their sum, in the logits' dtype.
    assert loss.item() == pytest.approx(exact.item(), rel=4 * unit)
    assert ((grad - exact_grad).norm() / exact_grad.norm()).item() < 4 * unit
    assert (grad[:, vocab:] == 0).all()
