"""Every AdamW against float64, against torch.optim.AdamW, and against each other bit for bit; the copies that it leaves."""

import functools
import math
from typing import Any

import kernel_checks
import pytest
import torch
from adamw_checks import (
    E4M3,
    E5M2,
    SHAPES,
    STATE,
    assert_same,
    bits,
    copy,
    gradient,
    parameter,
    parameters,
    plain,
    rate_of,
    update,
)
from kernel_checks import DEVICES, assert_as_good
from torch import Tensor

from te_bench.kernels import adamw
from te_bench.kernels.adamw import Backend, Parameter, Problem, kernels
from te_bench.kernels.adamw.backends import reference, triton
from te_bench.kernels.quantize.backends import reference as quantizer

BETAS = (0.9, 0.95)


backend = functools.partial(kernel_checks.supported, adamw, fp8=True)


def run(
    found: Backend,
    made: list[Parameter],
    t: int,
    betas: tuple[float, float] = BETAS,
    multiplier: Tensor | None = None,
    eps: float = 1e-8,
) -> None:
    device = made[0].weight.device
    numbers = (torch.tensor(value, device=device) for value in (rate_of(t), float(t)))
    rate, step = numbers
    found.step(found.table(made), rate=rate, step=step, betas=betas, eps=eps, multiplier=multiplier)


def test_the_backends_are_the_files() -> None:
    assert adamw.names() == ["reference", "triton"]
    for name in adamw.names():
        assert isinstance(adamw.load(name), Backend)
    old = {"device": "cuda", "capability": (8, 0)}
    assert "8.9" in str(triton.unsupported(Problem(**old, fp8=True)))
    assert triton.unsupported(Problem(**old, fp8=False)) is None


# Float64 and torch


def trained(found: Backend | None, shapes: tuple[tuple[int, ...], ...], device: str) -> list[list[Tensor]]:
    """w, m, v of each shape after 20 steps from zero moments: a backend's; without one float64's."""
    made = [parameter(shape, plain(device), i) for i, shape in enumerate(shapes)]
    for p in made:
        p.exp_avg.zero_()
        p.exp_avg_sq.zero_()
    states = [[getattr(p, name).double() for name in STATE] for p in made]
    for t in range(1, 21):
        for i, p in enumerate(made):
            p.grad.copy_(gradient(shapes[i], t))
            if found is None:
                states[i] = update(states[i], p.grad.double(), rate_of(t), t, BETAS, 1e-8, p.weight_decay)
        if found is not None:
            run(found, made, t)
    return states if found is None else [[getattr(p, name) for name in STATE] for p in made]


def torchs(shapes: tuple[tuple[int, ...], ...], device: str, **options: Any) -> list[list[Tensor]]:
    """The same by torch.optim.AdamW."""
    made = [parameter(shape, plain(device), i) for i, shape in enumerate(shapes)]
    weights = [p.weight.requires_grad_() for p in made]
    groups = [{"params": [w], "weight_decay": p.weight_decay} for w, p in zip(weights, made, strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(rate_of(0), device=device), betas=BETAS, eps=1e-8, **options)
    for t in range(1, 21):
        for group in optimizer.param_groups:
            group["lr"].fill_(rate_of(t))
        for w, shape in zip(weights, shapes, strict=True):
            w.grad = gradient(shape, t).to(device)
        optimizer.step()
    return [[w.detach(), optimizer.state[w]["exp_avg"], optimizer.state[w]["exp_avg_sq"]] for w in weights]


ODD = ((), (0,), (7,), (9, 70))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", adamw.names())
def test_twenty_steps_against_float64(name: str, device: str) -> None:
    ours, exact = trained(backend(name, device), ODD, device), trained(None, ODD, device)
    library = torchs(ODD, device, fused=True, capturable=device == "cuda")
    for shape, *states in zip(ODD, ours, library, exact, strict=True):
        for what, mine, theirs, true in zip(STATE, *states, strict=True):
            assert_as_good(f"{what} {shape}", mine, theirs, true)


@pytest.mark.parametrize("name", adamw.names())
def test_eps_is_added_to_the_root(name: str) -> None:
    """At g = eps the first update is half the rate: without eps, or with it under the root, it is not."""
    p = parameter((16,), plain("cpu"), 0)
    for tensor, value in ((p.weight, 0.0), (p.exp_avg, 0.0), (p.exp_avg_sq, 0.0), (p.grad, 1e-8)):
        tensor.fill_(value)
    run(backend(name, "cpu"), [p], 1)
    torch.testing.assert_close(p.weight, torch.full((16,), -rate_of(1) / 2), rtol=1e-6, atol=0)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="torch's loop with multiply-adds is x86's"
)
def test_the_reference_is_torchs_fused_one_bit_for_bit() -> None:
    """Whole vectors, 16 elements: the rest of torch's loop is compiled without multiply-adds."""
    shapes = ((16,), (48, 80), (4096,))
    for ours, theirs in zip(trained(reference.BACKEND, shapes, "cpu"), torchs(shapes, "cpu", fused=True), strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(bits(mine), bits(other))


# Bit for bit


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("betas", "target"), [(BETAS, E4M3), ((0.0, 0.999), E5M2), ((0.3, 0.0), E4M3)])
def test_triton_is_the_reference_bit_for_bit(betas: tuple[float, float], target: torch.dtype, device: str) -> None:
    ours = parameters(plain(device), target)
    theirs = [copy(p) for p in ours]
    multiplier = torch.tensor(0.37, device=device)
    for t, by, eps in (
        (1, multiplier, 1e-8),
        (2, None, 0.0),
        (1000, multiplier, 1e-8),
    ):  # eps 0: 0 / 0 beyond the edges
        run(backend("triton", device), ours, t, betas, by, eps)
        run(reference.BACKEND, theirs, t, betas, by, eps)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [0, 3])
def test_nothing_beyond_a_tensor_is_written(offset: int, device: str) -> None:
    """Every tensor lies between guards, on an address that is a multiple of 16 bytes and on one that is not."""
    rooms: list[tuple[Tensor, Tensor]] = []

    def room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        numel = math.prod(shape)
        buffer = torch.full((numel + 64,), 7, device=device).to(dtype)
        inside = buffer[16 + offset : 16 + offset + numel].view(shape)
        rooms.append((buffer, inside))
        return inside

    ours = parameters(room, shapes=SHAPES[3:])
    theirs = [copy(p) for p in ours]
    found = backend("triton", device)
    table = found.table(ours)
    assert table.rows[:, kernels.ALIGNED.value].any().item() == (offset == 0)
    run(found, ours, 3)
    run(reference.BACKEND, theirs, 3)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine, other)
    for buffer, inside in rooms:
        around = buffer.float()
        around[16 + offset : 16 + offset + inside.numel()] = 7
        assert (around == 7).all()


# The copies


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", adamw.names())
def test_the_copies_are_of_the_new_weight(name: str, device: str) -> None:
    """bf16 to the nearest; FP8 what the quantiser makes of that bf16, not of the float32; saturating at a large scale."""
    made = [parameter((48, 80), plain(device), 0, "brt"), parameter((33, 70), plain(device), 1, "rt", E4M3)]
    made[1].scale.fill_(2000.0)
    made[0].amax.fill_(1e3)  # larger than any weight: kept
    run(backend(name, device), made, 1)
    assert torch.equal(made[0].bf16, made[0].weight.bfloat16())
    for p in made:
        half = p.weight.bfloat16()
        exact = quantizer.quantize(half, E4M3, scale=p.scale, rowwise=True, columnwise=True)
        assert torch.equal(bits(p.data), bits(exact.data))
        assert torch.equal(bits(p.data_t), bits(exact.data_t))
        assert torch.equal(p.scale_inv, exact.scale_inv)
    assert made[0].amax == 1e3
    assert made[1].amax == made[1].weight.bfloat16().abs().max()
    assert made[1].data.float().abs().max() == 448
    direct = quantizer.quantize(made[0].weight, E4M3, scale=made[0].scale, rowwise=True, columnwise=False)
    assert not torch.equal(bits(made[0].data), bits(direct.data))  # so the equalities above can tell


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", adamw.names())
def test_a_gradient_that_is_not_a_number_is_seen_in_the_amax(name: str, device: str) -> None:
    p = parameter((33, 70), plain(device), 0, "brt")
    p.grad[32, 69] = math.nan
    run(backend(name, device), [p], 1)
    assert p.amax.isnan()
    assert p.data.float().isnan().sum() == 1
    assert p.data_t[69, 32].float().isnan()
    assert p.bf16.isnan().sum() == 1


# The norm


def clipped(gradients: list[Tensor], max_norm: float) -> tuple[Tensor, list[Tensor]]:
    """torch's: the norm, and the gradients after it."""
    weights = [torch.zeros_like(g).requires_grad_() for g in gradients]
    for w, g in zip(weights, gradients, strict=True):
        w.grad = g.clone()
    found = torch.nn.utils.clip_grad_norm_(weights, max_norm)
    return found, [w.grad for w in weights if w.grad is not None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_norm", [1.0, 0.3, 1e9, math.inf])
@pytest.mark.parametrize("name", adamw.names())
def test_the_norm_and_the_multiplier_are_torchs(name, max_norm, device, monkeypatch):
    monkeypatch.setattr(triton, "SUMS", 4)  # so that the second stage takes several rounds
    found, made = backend(name, device), parameters(plain(device))
    before = [p.grad.clone() for p in made]
    wanted, gradients = clipped([g.float() for g in before], max_norm)  # torch rounds a bf16 tensor's norm to bf16
    table = found.table(made)
    norm, multiplier = found.norm(table, max_norm)
    for number in (norm, multiplier):
        assert (number.shape, number.dtype, number.device) == (torch.Size(()), torch.float32, made[0].weight.device)
    torch.testing.assert_close(norm, wanted, rtol=1e-6, atol=0)
    assert (multiplier == 1) == (max_norm >= 1e9)
    for p, old, new in zip(made, before, gradients, strict=True):
        assert torch.equal(p.grad, old)
        torch.testing.assert_close(p.grad.float() * multiplier, new, rtol=1e-6, atol=0)
    again = found.norm(table, max_norm)
    assert torch.equal(norm, again[0])
    assert torch.equal(multiplier, again[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("name", adamw.names())
def test_the_norm_of_no_ordinary_gradients(name: str, value: float, device: str) -> None:
    found, p = backend(name, device), parameter((7,), plain(device), 0)
    p.grad.zero_()[3] = value
    norm, multiplier = found.norm(found.table([p]), 1.0)
    wanted, _ = clipped([p.grad], 1.0)
    assert torch.equal(bits(norm.nan_to_num(nan=-1.0)), bits(wanted.nan_to_num(nan=-1.0)))
    expected = {0.0: 1.0, math.inf: 0.0}.get(value, math.nan)
    assert multiplier.item() == expected or (math.isnan(expected) and multiplier.isnan())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", adamw.names())
def test_the_norm_is_kept_from_zero(name: str, device: str) -> None:
    found, p = backend(name, device), parameter((16,), plain(device), 0)
    p.grad.fill_(0.25e-6)
    norm, multiplier = found.norm(found.table([p]), 1e-6)
    assert norm.item() == pytest.approx(1e-6)
    assert multiplier.item() == pytest.approx(0.5)


# What a table holds


@pytest.mark.parametrize("name", adamw.names())
def test_nothing_to_do_is_no_error(name: str) -> None:
    found = backend(name, "cpu")
    for made in ([], [parameter((0, 5), plain("cpu"), 0, "brt")]):
        table = found.table(made)
        one = torch.ones(())
        found.step(table, rate=one, step=one, betas=BETAS, eps=1e-8)
        norm, multiplier = found.norm(table, 1.0)
        assert (norm.item(), multiplier.item()) == (0, 1)
    assert made[0].amax == 0
    assert made[0].scale_inv == 0


@pytest.mark.parametrize("name", adamw.names())
def test_a_backward_through_the_old_weight_is_refused(name: str) -> None:
    p = parameter((16,), plain("cpu"), 0, "b")
    losses = [tensor.requires_grad_().square().sum() for tensor in (p.weight, p.bf16)]
    run(backend(name, "cpu"), [p], 1)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class _Saves(torch.autograd.Function):
    """Return x; the backward pass reads `copy`, as an FP8 Linear's reads its weight in FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, copy: Tensor) -> Tensor:
        ctx.save_for_backward(copy)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (_,) = ctx.saved_tensors
        return dy, None


@pytest.mark.parametrize("name", adamw.names())
def test_a_backward_through_an_old_fp8_copy_is_refused(name: str) -> None:
    p = parameter((16, 32), plain("cpu"), 0, "rt")
    x = torch.ones((), requires_grad=True)
    losses = [_Saves.apply(x, copy) for copy in (p.data, p.data_t, p.scale_inv)]
    run(backend(name, "cpu"), [p], 1)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


IN_FP8 = {"exp_avg": torch.ones(4, 6).to(E4M3), "exp_avg_sq": torch.ones(4, 6).to(torch.uint8)}


def changed(**values: Any) -> Parameter:
    p = parameter((4, 6), plain("cpu"), 0, "brt")
    return Parameter(**{name: getattr(p, name) for name in (*p.__slots__,)} | values)


NOWHERE = {"data": None, "data_t": None}
WRONG = (
    ({"weight": torch.ones(4, 6).half()}, "weight .4, 6. of torch.float16"),
    ({"weight": torch.ones(4, 6).bfloat16()}, "grad .* must be .4, 6. of torch.bfloat16"),
    (
        {"weight": torch.ones(4, 6).bfloat16(), "grad": torch.ones(4, 6).bfloat16()},
        "bf16 of a weight in bfloat16: it is that weight; leave bf16 out",
    ),
    ({"exp_avg": torch.ones(4, 6).bfloat16()}, "exp_avg_sq .* must be .4, 6. of torch.bfloat16"),
    (IN_FP8, "exp_avg_scale and exp_avg_sq_scale are of those in FP8"),
    ({"exp_avg_scale": torch.ones(0)}, "exp_avg_scale and exp_avg_sq_scale are of those in FP8"),
    (
        IN_FP8 | {f"{name}_scale": torch.ones(0) for name in STATE[1:]},
        "rows must be multiples of 64; keep them in bf16",
    ),
    ({"grad": torch.ones(4, 6).double()}, "grad .4, 6. of torch.float64"),
    ({"grad": torch.ones(6, 4)}, "grad .6, 4."),
    ({"exp_avg": torch.ones(24)}, r"exp_avg .24,."),
    ({"exp_avg_sq": torch.ones(6, 4).t()}, "exp_avg_sq .* strides .1, 4.: .*contiguous"),
    ({"bf16": torch.ones(4, 6)}, "bf16 .* must be .4, 6. of torch.bfloat16"),
    ({"data": torch.ones(4, 6)}, "data .* of torch.float32"),
    ({"data_t": torch.ones(4, 6).to(E4M3)}, "data_t .4, 6. .* must be .6, 4."),
    ({"data_t": torch.ones(6, 4).to(E5M2)}, "a table casts to one"),
    ({"scale": None}, "without a scale"),
    ({"scale": torch.ones(1)}, r"scale .1,."),
    ({"amax": torch.zeros((), dtype=torch.float64)}, "amax .* of torch.float64"),
    (NOWHERE, "without data or data_t"),
    ({"weight_decay": -0.1}, "weight_decay -0.1"),
    ({"weight_decay": math.nan}, "weight_decay nan"),
    ({"grad": torch.ones(4, 6, device="meta")}, "cpu, meta"),
)


@pytest.mark.parametrize("name", adamw.names())
@pytest.mark.parametrize(("values", "named"), WRONG, ids=[named for _, named in WRONG])
def test_what_does_not_fit_is_named(values: dict[str, Any], named: str, name: str) -> None:
    with pytest.raises(ValueError, match=named):
        adamw.load(name).table([changed(), changed(**values)])


@pytest.mark.parametrize("name", adamw.names())
def test_tied_weights_given_twice_and_vectors_in_fp8_are_refused(name: str) -> None:
    p = changed()
    with pytest.raises(ValueError, match="weight of parameter 1 is weight of parameter 0"):
        adamw.load(name).table([p, changed(weight=p.weight)])
    with pytest.raises(ValueError, match="2-D"):
        adamw.load(name).table([parameter((7,), plain("cpu"), 0, "r")])


def test_a_matrix_too_wide_for_32_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "WIDEST", 6)
    with pytest.raises(ValueError, match="below 6"):
        triton.table([changed()])
    triton.table([changed(data_t=None)])


@pytest.mark.parametrize("name", adamw.names())
def test_a_step_with_wrong_numbers_is_refused(name: str) -> None:
    found, one = adamw.load(name), torch.ones(())
    table = found.table([changed()])
    good: dict[str, Any] = {"rate": one, "step": one, "betas": BETAS, "eps": 1e-8}
    for values, named in (
        ({"rate": torch.ones(1)}, r"rate .1,."),
        ({"rate": one.double()}, "rate .* of torch.float64"),
        ({"step": torch.ones((), dtype=torch.int64)}, "step .* of torch.int64"),
        ({"multiplier": torch.ones((), device="meta")}, "multiplier .* on meta"),
        ({"betas": (0.9, 1.0)}, r"betas \(0.9, 1.0\)"),
        ({"betas": (-0.1, 0.9)}, "betas"),
        ({"eps": -1e-8}, "eps -1e-08"),
        ({"eps": math.nan}, "eps nan"),
    ):
        with pytest.raises(ValueError, match=named):
            found.step(table, **good | values)
    for max_norm in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm"):
            found.norm(table, max_norm)
