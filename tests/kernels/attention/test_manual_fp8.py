"""FP8 attention's definition in PyTorch: its noise is what theory says of E4M3, and mistakes are not within it."""

import math

import pytest
import torch
from fp8_definition import NAMES, definition, sqnr
from test_contract import a_problem, draw, gradients
from torch import Tensor

from te_bench.kernels import attention
from te_bench.kernels.attention.backends import manual_fp8
from te_bench.kernels.quantize.backends import reference as quantize_reference

SHAPE = (2, 4, 256, 64)


def results(tensors: list[Tensor], causal: bool = False) -> list[Tensor]:
    return gradients(lambda q, k, v: manual_fp8.forward(q, k, v, causal=causal, scale=0.125), tensors)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("causal", "kv_heads"), [(False, 4), (True, 2)])
def test_its_noise_is_that_of_e4m3(causal: bool, kv_heads: int, dtype: str) -> None:
    """Standard normal operands. E4M3 leaves 32.2 dB of a number; a score has the noise of two, a weight that of a score.

    Of what FP8 leaves, out has P's rounding alone: 32.2 dB, and more where causal rows have few weights, many of them powers
    of two. Gradients have none but bf16's of dS and P, and out's in delta.
    """
    tensors = draw(a_problem(SHAPE, dtype, "cpu", causal=causal, kv_heads=kv_heads))
    ours = results(tensors, causal)
    of_rounded = [sqnr(*pair) for pair in zip(definition(tensors, causal, 0.125), ours, strict=True)]
    unrounded = [sqnr(*pair) for pair in zip(definition(tensors, causal, 0.125, rounded=False), ours, strict=True)]
    assert 31.2 <= of_rounded[0] <= (38 if causal else 33.2)
    assert min(of_rounded[1:]) >= 40
    scores = -10 * math.log10(2 * 10**-3.22)  # 29.2 dB of a score, whose variance is 1: of a weight, and of dV
    out = -10 * math.log10(4 * 10**-3.22)  # two roundings of the score, P's and V's: 26.2 dB
    if not causal:
        assert abs(unrounded[0] - out) <= 1, unrounded
        assert abs(unrounded[3] - scores) <= 1, unrounded
    assert all(figure >= 24.5 for figure in unrounded), dict(zip(NAMES, unrounded, strict=True))


def test_a_head_is_cast_as_the_quantisers_cast_a_matrix() -> None:
    x = torch.randn(2, 3, 40, 24) * torch.logspace(-30, 30, 6).view(2, 3, 1, 1)
    x[1, 1] = 0
    data, scale_inv = manual_fp8.quantize_heads(x)
    for b in range(2):
        for h in range(3):
            right = quantize_reference.quantize(x[b, h], torch.float8_e4m3fn, rowwise=True, columnwise=False)
            assert torch.equal(data[b, h].view(torch.uint8), right.data.view(torch.uint8))
            assert torch.equal(scale_inv[b, h, 0, 0], right.scale_inv)


def test_lse_is_float32_whatever_the_default_dtype() -> None:
    q, k, v, _ = draw(a_problem((1, 2, 20, 16), "fp32", "cpu", causal=True))
    torch.set_default_dtype(torch.float64)
    try:
        assert manual_fp8.attention(q, k, v, causal=True, scale=0.25)[1].dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", range(4))
def test_what_is_not_finite_makes_its_head_nan_and_no_other(which: int, bad: float) -> None:
    tensors = draw(a_problem((2, 2, 20, 16), "fp32", "cpu", causal=True))
    before = results(tensors, True)
    tensors[which][1, 0, 3, 5] = bad
    after = results(tensors, True)
    reached = {0: (0, 1, 2, 3), 1: (0, 1, 2, 3), 2: (0, 1, 2), 3: (1, 2)}[which]
    for i, (x, y) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(x[0], y[0])
        assert torch.equal(x[1, 1], y[1, 1])
        if i in reached:
            assert y[1, 0].isnan().all(), NAMES[i]
    if which == 3:  # dV has the gradient as it came, of the keys that its row sees
        assert not after[3][1, 0, :4].isfinite().all()


def test_the_cast_keeps_small_weights() -> None:
    """A key with nearly all the weight and 4095 others: without 2^8, what is below 2^-10 would vanish."""
    k = torch.zeros(1, 1, 4096, 16)
    k[..., 0, 0] = 8.0
    q = torch.zeros(1, 1, 1, 16)
    q[..., 0] = 1.0
    v = torch.ones(1, 1, 4096, 16)
    v[..., 0, :] = 0
    out, lse = manual_fp8.attention(q, k, v, scale=1.0)
    torch.testing.assert_close(lse, torch.full((1, 1, 1), math.log(math.exp(8) + 4095)))
    share = 4095 / (math.exp(8) + 4095)
    torch.testing.assert_close(out, torch.full_like(out, share), rtol=2**-4, atol=0)


def test_shares_are_of_its_own_sums() -> None:
    """lse is of P before its rounding, as of `manual`."""
    q, k, v, _ = draw(a_problem((1, 2, 33, 32), "fp32", "cpu"))
    _, lse = manual_fp8.attention(q, k, v, causal=True, scale=0.3)
    rounded = [x.float() * inverse for x, inverse in map(manual_fp8.quantize_heads, (q, k))]
    scores = (0.3 * rounded[0] @ rounded[1].mT).masked_fill(torch.ones(33, 33).triu(1).bool(), -math.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


REFUSED: dict[str, dict[str, object]] = {
    "mask": {"mask": True, "causal": False},
    "window": {"window": (3, 0)},
    "dropout": {"dropout": 0.1},
}


@pytest.mark.parametrize("name", ["manual_fp8", "triton_fp8"])
@pytest.mark.parametrize("what", REFUSED)
def test_what_fp8_attention_has_not_it_says(what: str, name: str) -> None:
    problem = a_problem(device="cpu", **REFUSED[what])
    assert what in str(attention.load(name).unsupported(problem))
    x = torch.zeros(1, 1, 4, 16)
    with pytest.raises(ValueError, match="FP8 attention has none"):
        attention.load(name).forward(x, x, x, causal=False, scale=1.0, dropout=0.1)


def test_nobody_gets_it_who_did_not_ask() -> None:
    from te_bench.kernels.attention.backends import auto

    rounding = {name for name in attention.names() if attention.load(name).fp8}
    assert rounding == {"manual_fp8", "triton_fp8"}
    assert not auto.RIVALS & rounding
    for name in attention.names():
        assert attention.in_fp8(name) == (name in rounding)
        assert attention.yardstick(name) == ("manual_fp8" if name in rounding else "manual")
