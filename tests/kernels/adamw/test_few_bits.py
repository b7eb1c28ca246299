"""Weights and moments in fewer bits than float32's: stochastic rounding is right on average, and the same anywhere."""

import functools
import math
from typing import Any

import kernel_checks
import pytest
import torch
from adamw_checks import E4M3, FORMS, assert_same, copy, few_bits, gradient, parameter, plain, rate_of, update

from te_bench.kernels import adamw
from te_bench.kernels.adamw import BLOCK, Backend, Parameter
from te_bench.kernels.adamw.backends import reference

BF16, F32 = torch.bfloat16, torch.float32
BETAS = (0.9, 0.95)
backend = functools.partial(kernel_checks.supported, adamw, fp8=True)


def run(
    found: Backend, made: list[Parameter], t: int, seed: int = 5, rate: float | None = None, betas: Any = BETAS
) -> None:
    device = made[0].weight.device
    numbers = [torch.tensor(value, device=device) for value in (rate_of(t) if rate is None else rate, float(t))]
    key = torch.tensor(seed, device=device)
    found.step(found.table(made), rate=numbers[0], step=numbers[1], betas=betas, eps=1e-8, seed=key)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize(
    ("device", "offset"), [("cpu", 3), *(pytest.param("cuda", offset, marks=pytest.mark.gpu) for offset in (0, 3))]
)
def test_triton_is_the_reference_bit_for_bit(offset: int, device: str) -> None:
    """Parameters of all forms in one table, with FP8 copies and without; a negative seed, and a block of NaN."""
    ours = [few_bits((33, 70), FORMS["bf16"], "rt", device, offset), parameter((7,), plain(device), 0)]
    ours += [few_bits((34, BLOCK), form, layouts, device, offset) for form in FORMS.values() for layouts in ("", "rt")]
    ours += [few_bits((34, BLOCK), FORMS["moments in bf16"], "b", device, offset)]
    for p in ours:
        if p.exp_avg_sq_scale is not None:
            p.exp_avg_sq_scale[-1] = math.nan
    theirs = [copy(p) for p in ours]
    for t in (1, 1000):
        run(backend("triton", device), ours, t, seed=-(2**40) - 7)
        run(reference.BACKEND, theirs, t, seed=-(2**40) - 7)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other)


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_can_be_captured(form: str) -> None:
    table = reference.table([few_bits((34, BLOCK), FORMS[form], "rt")])
    rate, step, seed = torch.tensor(0.1), torch.tensor(1.0), torch.tensor(5)
    with kernel_checks.WithoutHostTensors():
        reference.step(table, rate=rate, step=step, betas=BETAS, eps=1e-8, seed=seed)


def test_the_words_are_philoxs() -> None:
    """Triton's own, of 7 rounds; each element, parameter and step has others."""
    seed, step = torch.tensor(5), torch.tensor(3.0)
    found = reference.random_bits(seed, 4096, 0, step)
    assert found.min() >= 0
    assert found.max() < 2**32
    assert found.unique().numel() == 4096
    for other in ((seed + 1, 0, step), (seed, 1, step), (seed, 0, step + 1), (seed + 2**33, 0, step)):
        again = reference.random_bits(other[0], 4096, *other[1:])
        assert (again == found).sum() <= 1
    for shift in range(32):
        assert abs(((found >> shift) & 1).double().mean() - 0.5) < 4 * 0.5 / 64


def test_rounding_is_unbiased_and_goes_to_a_neighbour() -> None:
    """Over all random bits the mean is x, to 2^-16 of a spacing, subnormals of E4M3 and both signs included."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, generator=generator) * torch.exp(2 * torch.randn(64, generator=generator))
    every = torch.arange(2**16).expand(64, -1)
    halves = reference.stochastic_bf16(x[:, None].expand(-1, 2**16).contiguous(), every).double()
    low, high = halves.amin(1), halves.amax(1)
    assert ((low <= x) & (x <= high)).all()
    assert (high - low <= x.abs().double() * 2.0**-7).all()
    assert ((halves.mean(1) - x.double()).abs() <= (high - low) * 2.0**-16).all()
    small = torch.cat([x.clamp(-400, 400), x * 2.0**-8])[:, None].expand(-1, 2**16).contiguous()
    eighths = reference.stochastic_e4m3(small, torch.arange(2**16).expand(128, -1))
    assert torch.equal(eighths, eighths.to(E4M3).float())
    below, above = eighths.amin(1).double(), eighths.amax(1).double()
    spacing = torch.exp2(small[:, 0].abs().double().log2().floor().clamp(min=-6) - 3)
    assert ((eighths.double().mean(1) - small[:, 0].double()).abs() <= spacing * 2.0**-17).all()
    assert (above - below <= spacing).all()
    assert (above > below).sum() > 120
    odd = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    most = torch.full((5,), 2**16 - 1)
    assert torch.equal(reference.stochastic_bf16(odd, most).float().nan_to_num(7.0), odd.nan_to_num(7.0))
    assert torch.equal(reference.stochastic_e4m3(odd, most).nan_to_num(7.0), odd.clamp(-448, 448).nan_to_num(7.0))


def a_block(form: tuple[torch.dtype, torch.dtype], rows: int = 64) -> Parameter:
    """A weight of 1 whose moments are 0."""
    p = few_bits((rows, BLOCK), form)
    p.weight.fill_(1.0)
    p.exp_avg.zero_()
    p.exp_avg_sq.zero_()
    return p


def test_steps_below_half_a_spacing_arrive_on_average() -> None:
    """40 of 2^-12 from 1, whose neighbours are 2^-8 below and 2^-7 above: to the nearest none would."""
    p = a_block(FORMS["bf16"])
    p.grad.fill_(1.0)
    for t in range(1, 41):
        run(reference.BACKEND, [p], t, rate=2.0**-12)
    moved = (1 - p.weight.double()) / 2.0**-12
    assert abs(moved.mean().item() - 40 * 1.1) < 4 * moved.std().item() / 64 + 0.5  # decay: 0.1 of the weight
    assert set(p.weight.unique().tolist()) <= {1 - i * 2.0**-8 for i in range(-2, 16)}


@pytest.mark.parametrize("beta2", [0.999, 0.9999])
@pytest.mark.parametrize("form", FORMS)
def test_v_falls_after_a_large_gradient(form: str, beta2: float) -> None:
    """By beta2 an update: to the nearest bf16 or E4M3, 0.4 % and 6 % away, it would stay where it was.

    The largest of a block stays, for where all fall alike their scale does it.
    """
    p = a_block(FORMS[form])
    p.grad.fill_(8.0)
    p.grad[:, 0] = 10.0
    run(reference.BACKEND, [p], 1, betas=(0.9, beta2))
    first = reference._moments(p)[1][:, 1:].mean().item()
    p.grad.zero_()
    p.grad[:, 0] = 10.0 * math.sqrt(1 - beta2)
    for t in range(2, 102):
        run(reference.BACKEND, [p], t, betas=(0.9, beta2))
    fell = reference._moments(p)[1][:, 1:].mean().item() / first
    assert fell == pytest.approx(beta2**100, rel=0.2 * (1 - beta2**100))


def test_no_root_becomes_0_by_which_m_would_be_divided() -> None:
    """Of elements a million times smaller than the largest of their block; those without a gradient stay 0."""
    p = a_block(FORMS["bf16, moments in FP8"])
    p.grad.fill_(2.0**-20)
    p.grad[:, 0], p.grad[:, 1] = 1.0, 0.0
    for t in range(1, 11):
        run(reference.BACKEND, [p], t)
    root = p.exp_avg_sq.float()
    assert (root[:, 2:] > 0).all()
    assert not root[:, 1].any()
    assert (p.weight.float() - 1).abs().max() < 10 * 2.0**-7


@pytest.mark.parametrize("ratio", [1e5, 1e8])
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_an_outlier_neither_slows_its_neighbours_nor_shakes_them(beta2: float, ratio: float) -> None:
    """Of gradients of 1 and noise: on average as far as in float32, and as near to it as without the outlier, 4 to 10 %.

    With both moments in E4M3 neighbours were three times further away at 1e5, and four times slower at 1e6.
    """
    ours = a_block(FORMS["moments in FP8"])
    plainly = parameter((64, BLOCK), plain("cpu"), 0)
    for p in (ours, plainly):
        p.weight.zero_()
    plainly.exp_avg.zero_()
    plainly.exp_avg_sq.zero_()
    for t in range(1, 61):
        g = 1 + 3 * torch.randn(64, BLOCK, generator=torch.Generator().manual_seed(t))
        g[:, 0] *= ratio
        for p in (ours, plainly):
            p.grad.copy_(g)
            run(reference.BACKEND, [p], t, rate=2.0**-9, betas=(0.9, beta2))
    found, wanted = (p.weight[:, 1:].double() for p in (ours, plainly))
    assert found.mean() / wanted.mean() == pytest.approx(1, abs=0.02)
    assert (found - wanted).norm() < 0.12 * wanted.norm()


@pytest.mark.parametrize("form", FORMS)
def test_twenty_steps_stay_near_float64(form: str) -> None:
    """The mean of 64 x 64 weights within a fiftieth of their way, each within the spacings that it was rounded by."""
    p = few_bits((64, BLOCK), FORMS[form])
    p.exp_avg.zero_()
    p.exp_avg_sq.zero_()
    exact = [p.weight.double(), torch.zeros(64, BLOCK).double(), torch.zeros(64, BLOCK).double()]
    started = p.weight.double()
    for t in range(1, 21):
        p.grad.copy_(gradient((64, BLOCK), t))
        exact = update(exact, p.grad.double(), rate_of(t), t, BETAS, 1e-8, p.weight_decay)
        run(reference.BACKEND, [p], t)
    went = exact[0] - started
    gap = p.weight.double() - exact[0]
    assert gap.mean().abs() < 0.02 * went.abs().mean()
    noise = 0.0 if FORMS[form][0] is F32 else exact[0].square().mean().sqrt().item() * 2.0**-7 * math.sqrt(20)
    assert gap.std() < noise + (0.15 if FORMS[form][1] is E4M3 else 0.02) * went.std()
    cosine = torch.nn.functional.cosine_similarity(p.weight.double().flatten() - started.flatten(), went.flatten(), 0)
    assert cosine > (0.6 if noise else 0.98)


def test_what_is_rounded_stochastically_needs_a_seed() -> None:
    p = a_block(FORMS["bf16"])
    one = torch.ones(())
    for name in adamw.names():
        found = adamw.load(name)
        with pytest.raises(ValueError, match=r"no seed: .* give a \(\) int64"):
            found.step(found.table([p]), rate=one, step=one, betas=BETAS, eps=1e-8)
        with pytest.raises(ValueError, match=r"seed .* must be \(\) of torch.int64"):
            found.step(found.table([p]), rate=one, step=one, betas=BETAS, eps=1e-8, seed=one)
