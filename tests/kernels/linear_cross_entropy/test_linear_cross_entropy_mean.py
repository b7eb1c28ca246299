"""What surrounds the row kernels: the count of targets, the mean, and the backward pass's factor."""

import pytest
import torch
from lce_checks import PLACES, draw, exact, prepare, relative, run
from torch import Tensor

from te_bench.kernels import linear_cross_entropy
from te_bench.kernels.linear_cross_entropy import autograd, kernels

CHUNKED = linear_cross_entropy.load("chunked").forward
CHUNKED_NAMES = ("chunked", "fp8")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CHUNKED_NAMES)
def test_a_kept_graph_keeps_its_gradients(name: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass that another may follow overwrites nothing; the last one may, and gives away its buffers."""
    case = draw(10, 16, 20, 32, device=prepare(place, monkeypatch))
    in_place = []
    scale = kernels.scale

    def spy(x: Tensor, factor: Tensor, out: Tensor) -> None:
        in_place.append(out is x)
        scale(x, factor, out)

    monkeypatch.setattr(kernels, "scale", spy)
    leaves = case.x.requires_grad_(), case.weight.requires_grad_()
    loss = linear_cross_entropy.load(name).forward(*leaves, case.targets, vocab=20)
    factors = [torch.tensor(factor, device=loss.device) for factor in (0.0, 4.0, 1.0, 2.0)]
    *kept, last = (
        torch.autograd.grad(loss, leaves, factor, retain_graph=number < 3) for number, factor in enumerate(factors)
    )
    for factor, gradients in zip((0, 4), kept[:2], strict=True):
        for gradient, one, two in zip(gradients, kept[2], last, strict=True):
            assert one.any()
            assert torch.equal(gradient, factor * one)
            assert torch.equal(two, 2 * one)
    assert in_place == ([] if place == "plain" else [False] * 6 + [True] * 2)


@pytest.mark.parametrize("place", PLACES[1:])
def test_counts_and_means_of_many_pieces(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = prepare(place, monkeypatch)
    monkeypatch.setattr(kernels, "TARGETS", 16)
    for n in (0, 1, 16, 37):
        targets = torch.arange(n, device=device) % 5 - 1
        losses = torch.arange(n, device=device).float()
        counted = int((targets != -1).sum())
        numbers = kernels.count(targets)
        inverse = 1 / max(counted, 1)
        assert numbers[:, 0].tolist() == pytest.approx([counted, inverse, inverse / 2**15], rel=2**-23)
        torch.testing.assert_close(numbers[:, 0], autograd.count(targets.cpu())[:, 0].to(device), rtol=2**-23, atol=0.0)
        mean = kernels.mean(losses, numbers)
        assert mean.isnan() if counted == 0 else mean.item() == pytest.approx(losses.sum().item() / counted)


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaling_in_pieces(dtype: torch.dtype, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise the product, rounded once; in place and by 1 nothing is written, which is why a NaN's bits stay."""
    device = prepare(place, monkeypatch)
    monkeypatch.setattr(kernels, "PIECE", 16)
    monkeypatch.setattr(kernels, "PROGRAMS", 2)
    x = torch.randn(5, 23, generator=torch.Generator().manual_seed(0)).to(device)
    for factor in (0.0, 1.0, 1 / 3, torch.inf):
        by = torch.tensor(factor, device=device)
        out = torch.empty_like(x, dtype=dtype)
        kernels.scale(x, by, out)
        torch.testing.assert_close(out, (x * by).to(dtype), rtol=0, atol=0, equal_nan=True)
        mine = x.clone()
        kernels.scale(mine, by, mine)
        torch.testing.assert_close(mine, x * by, rtol=0, atol=0, equal_nan=True)
    odd = torch.tensor([0x7FA00001], dtype=torch.int32, device=device)
    signalling = odd.view(torch.float32)
    kernels.scale(signalling, torch.ones((), device=device), signalling)
    assert odd.item() == 0x7FA00001


@pytest.mark.parametrize("place", ["plain", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_many_rows_do_not_underflow_in_float16(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the logits, about 1 / 64 / 4000 for a mean, would be some sixty steps of a subnormal number."""
    case = draw(4000, 16, 64, 64, torch.float16, prepare(place, monkeypatch), size=0.5)
    with torch.autocast(case.x.device.type, dtype=torch.float16):
        ours = run(CHUNKED, case.to(torch.float32))
    for mine, right in zip(ours[1:], exact(case)[1:], strict=True):
        assert relative(mine, right) < 2**-12
