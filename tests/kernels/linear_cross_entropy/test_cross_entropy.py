"""Cross-entropy over a padded vocabulary equals the unpadded one, and the padding's gradient is exactly zero."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_bench.kernels.linear_cross_entropy.backends.reference import cross_entropy

CASES = [(5, 7, 7), (5, 7, 8), (33, 50, 64), (4, 1, 64), (1, 2, 3)]  # N, V, Vp


def draw(
    n: int, vocab: int, padded: int, dtype: torch.dtype = torch.float64, size: float = 3.0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n * padded + vocab)
    logits = torch.randn(n, padded, generator=generator, dtype=torch.float64) * size
    return logits.to(dtype), torch.randint(0, vocab, (n,), generator=generator)


def gradient(logits: Tensor, targets: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """loss and d loss / d logits by way of an operator before it, as in a model: the logits are no leaf."""
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy(leaf * 1.0, targets, vocab=vocab)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize(("n", "vocab", "padded"), CASES)
def test_equals_the_unpadded_loss_and_gradient(n: int, vocab: int, padded: int) -> None:
    logits, targets = draw(n, vocab, padded)
    loss, grad = gradient(logits, targets, vocab)
    unpadded = logits[:, :vocab].clone().requires_grad_()
    expected = F.cross_entropy(unpadded, targets)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(grad[:, :vocab], unpadded.grad, rtol=1e-12, atol=1e-15)
    assert (grad[:, vocab:] == 0).all()


@pytest.mark.parametrize(("n", "vocab", "padded"), CASES)
def test_is_the_formula(n: int, vocab: int, padded: int) -> None:
    logits, targets = draw(n, vocab, padded)
    rows = zip(logits.tolist(), targets.tolist(), strict=True)
    losses = [math.log(sum(math.exp(z) for z in row[:vocab])) - row[target] for row, target in rows]
    assert gradient(logits, targets, vocab)[0].item() == pytest.approx(sum(losses) / n, rel=1e-12, abs=1e-14)


def test_the_gradient_is_the_slope() -> None:
    logits, targets = draw(3, 5, 8)
    _, grad = gradient(logits, targets, 5)
    for index in torch.cartesian_prod(torch.arange(3), torch.arange(8)).tolist():
        step = torch.zeros_like(logits)
        step[tuple(index)] = 1e-5
        up, down = (gradient(logits + sign * step, targets, 5)[0] for sign in (1, -1))
        assert grad[tuple(index)].item() == pytest.approx(((up - down) / 2e-5).item(), abs=1e-9)


def test_what_the_padding_holds_does_not_matter() -> None:
    logits, targets = draw(6, 10, 16)
    expected = gradient(logits, targets, 10)
    for value in (1e30, -1e30, math.inf, math.nan):
        other = logits.clone()
        other[:, 10:] = value
        loss = cross_entropy(other.clone(), targets, vocab=10)
        assert torch.equal(loss, expected[0])


def test_ignored_targets_count_for_nothing() -> None:
    logits, targets = draw(8, 10, 16)
    some = targets.clone()
    some[::2] = -1
    loss, grad = gradient(logits, some, 10)
    expected, expected_grad = gradient(logits[1::2], targets[1::2], 10)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad[1::2], expected_grad)
    assert (grad[::2] == 0).all()


def test_logits_that_would_overflow() -> None:
    for size in (1e4, 1e30):
        logits, targets = draw(9, 30, 32, torch.float32, size)
        loss, grad = gradient(logits, targets, 30)
        assert loss.isfinite()
        assert grad.isfinite().all()
        winner = logits[:, :30].argmax(1)
        assert gradient(logits, winner, 30)[0].item() == pytest.approx(0, abs=1e-3)
        assert loss.item() == pytest.approx(F.cross_entropy(logits[:, :30].double(), targets).item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("device", "rows", "vocab", "padded", "units"),
    [("cpu", 64, 500, 512, 2), pytest.param("cuda", 1024, 50257, 50304, 4, marks=pytest.mark.gpu)],
)
def test_lower_precision_stays_near(
    device: str, rows: int, vocab: int, padded: int, units: int, dtype: torch.dtype
) -> None:
    logits, targets = (x.to(device) for x in draw(rows, vocab, padded, dtype))
    loss, grad = gradient(logits, targets, vocab)
    exact, exact_grad = gradient(logits.double(), targets, vocab)
    unit = torch.finfo(dtype).eps
    assert loss.item() == pytest.approx(exact.item(), rel=units * unit)
    assert (grad.double() - exact_grad).norm() / exact_grad.norm() < units * unit
    assert (grad[:, vocab:] == 0).all()


def test_a_view_gives_the_right_answer_too() -> None:
    """It only costs more: see the docstring."""
    logits, targets = draw(12, 10, 16)
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy((leaf * 1.0).view(3, 4, 16).view(-1, 16), targets, vocab=10)
    expected, grad = gradient(logits, targets, 10)
    assert torch.equal(loss.detach(), expected)
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], grad)


def test_without_padding_the_logits_are_left_alone() -> None:
    logits, targets = draw(4, 8, 8)
    before = logits.clone()
    cross_entropy(logits, targets, vocab=8)
    assert torch.equal(logits, before)
