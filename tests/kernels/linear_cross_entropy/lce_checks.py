"""What a linear cross-entropy must pass, as functions, so that broken ones can be shown to fail it."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import assert_as_good
from torch import Tensor

from te_bench.kernels import linear_cross_entropy
from te_bench.kernels.linear_cross_entropy import kernels

Forward = Callable[..., Tensor]
REFERENCE = linear_cross_entropy.load("reference").forward

#: Where the row kernels run: as their formula in plain PyTorch, in Triton's interpreter, on a GPU.
PLACES = ["plain", "interpreted", pytest.param("cuda", marks=pytest.mark.gpu)]


class Case(NamedTuple):
    x: Tensor
    weight: Tensor
    targets: Tensor
    vocab: int

    def to(self, dtype: torch.dtype) -> "Case":
        return self._replace(x=self.x.to(dtype), weight=self.weight.to(dtype))


class Result(NamedTuple):
    loss: Tensor
    dx: Tensor
    dw: Tensor


def prepare(place: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of a place; blocks of 64 columns in the interpreter, so that small rows take several."""
    if place == "interpreted" and not kernels.INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")
    monkeypatch.setattr(kernels, "INTERPRETED", place == "interpreted")
    if place == "interpreted":
        for constants in (kernels.ROW, kernels.STATISTICS):
            monkeypatch.setitem(constants, "BLOCK", 64)
    return "cuda" if place == "cuda" else "cpu"


def draw(
    n: int, d: int, vocab: int, padded: int, dtype: torch.dtype = torch.float32, device: str = "cpu", size: float = 2.0
) -> Case:
    """Normal x and W with logits of standard deviation `size`; every fifth target is ignored where there are several."""
    generator = torch.Generator().manual_seed(n * padded + d)
    x = torch.randn(n, d, generator=generator)
    weight = torch.randn(padded, d, generator=generator) * (size / d**0.5)
    targets = torch.randint(0, vocab, (n,), generator=generator)
    targets[4::5] = -1
    targets[0] = vocab - 1  # beside the padding
    return Case(x.to(device, dtype), weight.to(device, dtype), targets.to(device), vocab)


def integers(n: int, d: int, vocab: int, padded: int, device: str = "cpu") -> Case:
    """x and W of -1, 0 and 1 in bf16: the logits are exact in every order of sums."""
    generator = torch.Generator().manual_seed(n)
    x, weight = (torch.randint(-1, 2, (rows, d), generator=generator).bfloat16() for rows in (n, padded))
    targets = torch.randint(-1, vocab, (n,), generator=generator)
    return Case(x.to(device), weight.to(device), targets.to(device), vocab)


def run(forward: Forward, case: Case, **options: int) -> Result:
    """Loss and gradients of leaves, of a loss that is three times the forward's."""
    x, weight = case.x.detach().clone().requires_grad_(), case.weight.detach().clone().requires_grad_()
    loss = forward(x, weight, case.targets, vocab=case.vocab, **options)
    return Result(loss.detach(), *torch.autograd.grad(3 * loss, (x, weight)))


def autocast_run(forward: Forward, case: Case, **options: int) -> Result:
    """`run` of float32 leaves of the case's values, under bf16 autocast: gradients that are not rounded."""
    with torch.autocast(case.x.device.type, dtype=torch.bfloat16):
        return run(forward, case.to(torch.float32), **options)


def exact(case: Case) -> Result:
    """In float64 from the unpadded formula."""
    x, weight = case.x.double().requires_grad_(), case.weight.double().requires_grad_()
    loss = F.cross_entropy(x @ weight[: case.vocab].t(), case.targets, ignore_index=-1)
    return Result(loss.detach(), *torch.autograd.grad(3 * loss, (x, weight)))


def loss_floor(case: Case, loss: Tensor) -> float:
    """What rounding the logits to x's dtype costs: a number so small may be hit exactly, by the reference's luck.

    Four standard deviations of the mean over the rows of sum_j p_j e_j - e_t, e independent roundings; and 16 of float32.
    """
    logits = case.x.double() @ case.weight[: case.vocab].double().t()
    unit = torch.finfo(case.x.dtype).eps / 2
    deviation = unit * logits.square().mean().sqrt().item() / int((case.targets != -1).sum()) ** 0.5
    return 4 * deviation + 16 * torch.finfo(torch.float32).eps * loss.abs().item()


def assert_right(forward: Forward, case: Case, **options: int) -> None:
    """Loss and gradients by the error rule against the reference at the same dtype; the padding's gradient is 0."""
    ours, library, truth = run(forward, case, **options), run(REFERENCE, case), exact(case)
    assert ours.loss.dtype is torch.float32
    assert (ours.loss - truth.loss).abs() <= 2 * (library.loss - truth.loss).abs() + loss_floor(case, truth.loss)
    for name, mine, theirs, right in zip(Result._fields[1:], ours[1:], library[1:], truth[1:], strict=True):
        assert_as_good(name, mine, theirs, right)
    assert not ours.dw[case.vocab :].any()
    assert not ours.dx[case.targets == -1].any()


def relative(value: Tensor, truth: Tensor) -> float:
    return ((value.double() - truth).norm() / truth.norm()).item()
