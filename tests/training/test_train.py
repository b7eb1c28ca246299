"""One training step in every mode, its schedule, its optimizer, accumulation and clipping, and what must change no state."""

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_bench.models import recipe as recipes
from te_bench.models.recipe import float8_current_scaling
from te_bench.models.zoo.gpt import CONFIGS, GPT, GPTConfig
from te_bench.training.data import Batches
from te_bench.training.evaluation import evaluate
from te_bench.training.step import Optim, TrainStep, adamw, train

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=50)
Batch = tuple[Tensor, Tensor]


DEFAULT = Optim()


def a_step(
    optim: Optim = DEFAULT, *, precision: str = "fp32", mode: str = "eager", config: GPTConfig = SMALL, **changes: Any
) -> TrainStep:
    torch.manual_seed(0)
    recipe = float8_current_scaling.RECIPE if precision == "fp8" else None
    model = GPT(dataclasses.replace(config, **changes), attention="manual", padded_vocab_size=64, recipe=recipe)
    return TrainStep(model.double() if precision == "fp64" else model, optim, precision=precision, mode=mode)


def a_batch(step: int = 0, batch: int = 4) -> Batch:
    return Batches(None, block=16, batch=batch, vocab=50, seed=7).at(step)


# The schedule and the optimizer.


def nanogpt_rate(it: int, rate: float, least: float, warmup: int, decay: int) -> float:
    """Karpathy, nanoGPT train.py, get_lr."""
    if it < warmup:
        return rate * (it + 1) / (warmup + 1)
    if it > decay:
        return least
    ratio = (it - warmup) / (decay - warmup)
    return least + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (rate - least)


def test_the_schedule_is_nanogpts() -> None:
    """nanoGPT's cosine starts where the warm-up ends; ours runs over `progress`, whoever gives it."""
    optim = Optim(learning_rate=1e-3, min_learning_rate=1e-4, warmup=100)
    for it in (0, 1, 50, 99, 100, 101, 1000, 4999, 5000, 6000):
        progress = (it - 100) / (5000 - 100)
        assert optim.rate(it, progress) == pytest.approx(nanogpt_rate(it, 1e-3, 1e-4, 100, 5000), rel=1e-12)


def test_the_schedules_edges() -> None:
    optim = Optim(learning_rate=1.0, min_learning_rate=0.1)
    assert optim.rate(0, 0.0) == 1.0
    assert optim.rate(5, 0.5) == pytest.approx(0.55)
    assert optim.rate(5, 1.0) == pytest.approx(0.1)
    assert optim.rate(5, 7.0) == optim.rate(5, 1.0)
    assert optim.rate(5, -1.0) == 1.0
    rates = [Optim(warmup=10).rate(k, 0.0) for k in range(11)]
    assert rates == sorted(rates)
    assert rates[0] > 0
    assert rates[10] == Optim().learning_rate


def test_matrices_decay_and_nothing_else() -> None:
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(SMALL, bias=True))
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = adamw(model, Optim(weight_decay=0.3, beta1=0.8, beta2=0.9, learning_rate=1e-3))
    decayed, others = optimizer.param_groups
    assert decayed["weight_decay"] == 0.3
    assert others["weight_decay"] == 0.0
    assert all(group["betas"] == (0.8, 0.9) and group["lr"] == 1e-3 and group["fused"] for group in (decayed, others))
    matrices = {names[id(p)] for p in decayed["params"]}
    vectors = {names[id(p)] for p in others["params"]}
    assert matrices | vectors == set(names.values())
    assert len(decayed["params"]) + len(others["params"]) == len(names)  # the tied head once
    assert all(("ln_" in name) or name.endswith("bias") for name in vectors)
    assert "transformer.wte.weight" in matrices
    assert "transformer.wpe.weight" in matrices


def test_a_step_is_adamw_written_out() -> None:
    optim = Optim(learning_rate=1e-2, weight_decay=0.1, grad_clip=0.0)
    step = a_step(optim, precision="fp64")
    before = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    _, gradients = step.gradients(*a_batch())
    step(*a_batch())
    for name, p in step.model.named_parameters():
        g, decay = gradients[name], 0.1 if before[name].dim() >= 2 else 0.0
        expected = before[name] * (1 - 1e-2 * decay) - 1e-2 * g / (g.abs() + 1e-8)  # both moments corrected to g, g^2
        torch.testing.assert_close(p.detach(), expected, rtol=1e-9, atol=1e-12)


# Accumulation and clipping.


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_accumulation_is_one_large_batch(clip: float) -> None:
    optim = Optim(learning_rate=1e-2, grad_clip=clip)
    whole, parts = (a_step(dataclasses.replace(optim, accumulate=n), precision="fp64") for n in (1, 4))
    for k in range(3):
        batch = a_batch(k, batch=8)
        assert parts(*batch).item() == pytest.approx(whole(*batch).item(), rel=1e-9)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="6 rows do not divide into 4 micro-batches"):
        a_step(Optim(accumulate=4))(*a_batch(batch=6))


@pytest.mark.parametrize("optimizer", [None, "reference"])
def test_a_step_that_could_train_nothing_is_refused(optimizer: str | None) -> None:
    how: dict[str, Any] = {"precision": "fp32", "mode": "eager", "optimizer": optimizer}
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="accumulate 0: give 1 or more micro-batches"):
        TrainStep(model, Optim(accumulate=0), **how)
    for untrained in (model.requires_grad_(False), nn.Identity()):
        with pytest.raises(ValueError, match="the model has no weight to train; set requires_grad"):
            TrainStep(untrained, Optim(), **how)


def test_clipping_bounds_the_norm_and_keeps_the_direction() -> None:
    free, clipped, loose = (
        a_step(Optim(grad_clip=clip), precision="fp64").gradients(*a_batch())[1] for clip in (0.0, 0.01, 1e6)
    )
    norm = math.sqrt(sum(g.square().sum().item() for g in free.values()))
    assert norm > 0.01
    assert math.sqrt(sum(g.square().sum().item() for g in clipped.values())) == pytest.approx(0.01, rel=1e-3)
    for name, g in free.items():
        torch.testing.assert_close(clipped[name], g * 0.01 / norm, rtol=1e-4, atol=1e-12)
        torch.testing.assert_close(loose[name], g)


@pytest.mark.parametrize("precision", ["fp64", "fp8"])
def test_the_norm_is_that_of_the_gradients_before_clipping(precision: str) -> None:
    free, clipped = (a_step(Optim(grad_clip=clip, accumulate=2), precision=precision) for clip in (0.0, 0.01))
    _, found = free.gradients(*a_batch())
    norm = math.sqrt(sum(g.double().square().sum().item() for g in found.values()))
    clipped(*a_batch())
    assert clipped.grad_norm is not None
    assert clipped.grad_norm.item() == pytest.approx(norm, rel=1e-5)
    assert free.grad_norm is None


# gradients() looks and does not touch.


def state(step: TrainStep) -> list[Tensor]:
    moments = [v for s in step.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [t.detach().clone() for t in (*step.model.parameters(), *moments)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_gradients_changes_no_state(precision: str) -> None:
    looked, blind = (a_step(Optim(learning_rate=1e-2), precision=precision) for _ in range(2))
    for k in range(3):
        before, random = state(looked), torch.get_rng_state()
        loss, found = looked.gradients(*a_batch(9))
        again = looked.gradients(*a_batch(9))
        assert loss == again[0]
        assert all(torch.equal(found[name], again[1][name]) for name in found)
        assert all(torch.equal(a, b) for a, b in zip(before, state(looked), strict=True))
        assert torch.equal(torch.get_rng_state(), random)
        assert all(p.grad is None for p in looked.model.parameters())
        assert torch.equal(looked(*a_batch(k)), blind(*a_batch(k)))
    assert all(torch.equal(a, b) for a, b in zip(state(looked), state(blind), strict=True))


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-6), ("fp32", 5e-2)])
def test_gradients_are_the_slope_of_the_loss(precision: str, tolerance: float) -> None:
    step = a_step(Optim(grad_clip=0.0), precision=precision)
    _, found = step.gradients(*a_batch())
    size = {"fp64": 1e-5, "fp32": 1e-1}[precision]
    square = sum(g.square().sum().item() for g in found.values())
    losses = []
    for sign in (1, -1):
        moved = copy.deepcopy(step.model)
        with torch.no_grad():
            for name, p in moved.named_parameters():
                p.add_(found[name], alpha=sign * size)
        losses.append(moved(*a_batch()).item())
    assert (losses[0] - losses[1]) / (2 * size) == pytest.approx(square, rel=tolerance)


# Learning.


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_it_learns_a_batch_by_heart(precision: str) -> None:
    step = a_step(Optim(learning_rate=1e-2, weight_decay=0.0), precision=precision)
    losses = [step(*a_batch()).item() for _ in range(60)]
    assert losses[0] == pytest.approx(math.log(50), abs=0.2)
    assert losses[-1] < 0.15 * losses[0]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_lower_precision_follows_fp32_and_is_another_curve(precision: str) -> None:
    curves = []
    for name in ("fp32", precision):
        step = a_step(Optim(learning_rate=3e-3), precision=name)
        curves.append([step(*a_batch(k)).item() for k in range(20)])
    assert curves[1] == pytest.approx(curves[0], rel={"bf16": 0.01, "fp8": 0.02}[precision])
    assert curves[1] != curves[0]


@pytest.mark.slow
def test_compiling_changes_no_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the graphs that are compiled, whatever Inductor makes of them."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    optim = Optim(learning_rate=3e-3, accumulate=2)
    curves = []
    for mode in ("eager", "compile"):
        step = a_step(optim, mode=mode, n_layer=1)
        step.gradients(*a_batch(0))
        curves.append([step(*a_batch(k)).item() for k in range(5)])
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


def test_a_rate_of_zero_moves_nothing_and_set_rate_takes_effect() -> None:
    step = a_step(Optim(learning_rate=1e-2))
    before = state(step)
    step.set_rate(0.0)
    step(*a_batch())
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=False))
    step.set_rate(1e-2)
    step(*a_batch())
    assert not all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=False))


def test_modes_that_need_a_gpu_say_so() -> None:
    with pytest.raises(ValueError, match="cudagraph needs a GPU and no gradient scaler; got cpu, fp32"):
        a_step(mode="cudagraph")


# The loop and evaluation.


def test_train_sets_the_rate_then_takes_the_step_in_order() -> None:
    step = a_step(Optim(learning_rate=1.0, min_learning_rate=0.1, warmup=2))
    happened: list[tuple[str, float]] = []

    class Spy:
        optim = step.optim

        def set_rate(self, rate: float) -> None:
            happened.append(("rate", rate))

        def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
            happened.append(("step", tokens.item()))
            return tokens

    def batches(k: int) -> Batch:
        happened.append(("batch", k))
        return torch.tensor(k), torch.tensor(k)

    numbers = [number for number, _ in train(Spy(), batches, lambda k: k / 4 if k < 4 else None)]  # type: ignore[arg-type]
    assert numbers == [0, 1, 2, 3]
    assert [kind for kind, _ in happened] == ["rate", "batch", "step"] * 4
    assert [value for kind, value in happened if kind == "step"] == [0, 1, 2, 3]
    rates = [value for kind, value in happened if kind == "rate"]
    assert rates == pytest.approx([1 / 3, 2 / 3, 0.55, step.optim.rate(3, 0.75)])


def test_train_is_lazy_and_can_take_no_step() -> None:
    step = a_step()
    before = state(step)
    assert list(train(step, a_batch, lambda k: None)) == []
    loop = train(step, a_batch, lambda k: 0.0)
    next(loop)
    after_one = state(step)
    assert not all(torch.equal(a, b) for a, b in zip(before, after_one, strict=False))
    loop.close()
    assert all(torch.equal(a, b) for a, b in zip(after_one, state(step), strict=True))


def test_evaluate_weights_batches_by_their_size() -> None:
    step = a_step(dropout=0.2)
    tokens, targets = a_batch(batch=7)

    def uneven() -> Iterator[Batch]:
        yield tokens[:4], targets[:4]
        yield tokens[4:6], targets[4:6]
        yield tokens[6:], targets[6:]

    found = evaluate(step.model, uneven(), "fp32")
    step.model.eval()
    assert found == pytest.approx(step.model(tokens, targets).item(), rel=1e-6)


@pytest.mark.parametrize("trains", [True, False])
def test_evaluate_leaves_every_module_in_its_own_mode(trains: bool) -> None:
    model: Any = a_step(dropout=0.2).model.train(trains)
    model.transformer.h[0].eval()
    model.transformer.h[0].mlp.train()
    modes = [module.training for module in model.modules()]
    evaluate(model, iter([a_batch()]), "fp32")
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(ZeroDivisionError):
        evaluate(model, (a_batch(1 // 0) for _ in range(1)), "fp32")
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("name", recipes.names())
def test_unquantized_a_model_with_a_recipe_is_evaluated_as_one_without(name: str) -> None:
    """Bit for bit: arms are compared by it. And no scale moves."""
    torch.manual_seed(0)
    fp8, plain = GPT(SMALL, recipe=recipes.load(name)), GPT(SMALL)
    plain.load_state_dict(fp8.state_dict())
    step = TrainStep(fp8, Optim(learning_rate=1e-2), precision="fp8", mode="eager")
    for k in range(3):
        step(*a_batch(k))
    plain.load_state_dict({key: value for key, value in fp8.state_dict().items() if "fp8_" not in key})
    before = {key: value.clone() for key, value in fp8.state_dict().items()}
    by_bf16 = evaluate(fp8, iter([a_batch(9)]), "bf16", quantized=False)
    assert by_bf16 == evaluate(plain, iter([a_batch(9)]), "bf16")
    assert by_bf16 != evaluate(fp8, iter([a_batch(9)]), "fp8")
    assert all(torch.equal(before[key], value) for key, value in fp8.state_dict().items())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_evaluating_changes_nothing_that_is_trained(precision: str) -> None:
    """Dropout draws from torch's generator, so an evaluation that drew from it would change the curve."""
    often, never = (a_step(Optim(learning_rate=1e-2), precision=precision, dropout=0.2) for _ in range(2))
    curves = []
    for step, evaluated in ((often, True), (never, False)):
        torch.manual_seed(3)
        curve = []
        for number, loss in train(step, a_batch, lambda k: 0.0 if k < 5 else None):
            curve.append(loss.item())
            if evaluated:
                values = [evaluate(step.model, iter([a_batch(99)]), precision) for _ in range(1 + number)]
                assert len(set(values)) == 1
                assert step.model.training
                assert all(p.grad is None for p in step.model.parameters())
        curves.append(curve)
    assert curves[0] == curves[1]
    assert all(torch.equal(a, b) for a, b in zip(state(often), state(never), strict=True))


# On a GPU. The tiny model, and as few compilations as there are modes.


MODES = ["eager", "compile", "compile-blocks", "compile-reduce-overhead", "cudagraph"]
OPTIM = Optim(learning_rate=1e-3, grad_clip=0.3, accumulate=2, weight_decay=0.1)
RATES = [1e-3, 3e-3, 0.0, 2e-3, 1e-3]


def on_gpu(
    precision: str = "bf16",
    mode: str = "eager",
    optim: Optim = OPTIM,
    attention: str = "flash",
    fp8: str = "float8_current_scaling",
) -> TrainStep:
    torch.manual_seed(0)
    recipe = recipes.load(fp8) if precision == "fp8" else None
    config = dataclasses.replace(CONFIGS["tiny"], vocab_size=250)
    model = GPT(config, attention=attention, padded_vocab_size=256, recipe=recipe).cuda()
    return TrainStep(model, optim, precision=precision, mode=mode)


def gpu_batch(k: int) -> Batch:
    return Batches(None, block=64, batch=8, vocab=250, seed=1, device="cuda").at(k)


def five_steps(step: TrainStep) -> list[float]:
    """The losses of five steps at five rates; the batch repeats, so that each rate shows in the losses after it."""
    losses = []
    for rate in RATES:
        step.set_rate(rate)
        losses.append(step(*gpu_batch(0)))
    return torch.stack(losses).tolist()


@pytest.fixture(scope="module")
def eager_losses() -> list[float]:
    return five_steps(on_gpu())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES[1:])
def test_every_mode_trains_alike(mode: str, eager_losses: list[float]) -> None:
    """Accumulation, clipping and a rate that changes at every step, which a captured graph must read from memory."""
    step = on_gpu(mode=mode)
    before = [p.detach().clone() for p in step.model.parameters()]
    loss, found = step.gradients(*gpu_batch(0))
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
    norm = math.sqrt(sum(g.double().square().sum().item() for g in found.values()))
    assert norm == pytest.approx(0.3, rel=0.01)
    assert (found["transformer.wte.weight"][250:] == 0).all()
    losses = five_steps(step)
    assert loss == pytest.approx(losses[0], rel=1e-4)
    assert losses == pytest.approx(eager_losses, rel=2e-3)
    drops = [a - b for a, b in itertools.pairwise(losses)]
    assert min(drops[0], drops[1], drops[3]) > 0.005
    assert drops[2] == pytest.approx(0, abs=1e-4)  # after the rate of 0 the loss is the same again
    assert (step.model.transformer.wte.weight[250:] == 0).all()  # type: ignore[union-attr]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_tells_the_norm_of_each_step(mode: str) -> None:
    step, eager = on_gpu(mode=mode), on_gpu()
    for k in range(3):
        step(*gpu_batch(k))
        eager(*gpu_batch(k))
        assert step.grad_norm is not None
        assert eager.grad_norm is not None
        assert step.grad_norm.item() == pytest.approx(eager.grad_norm.item(), rel=2e-2)


@pytest.mark.gpu
def test_a_captured_graph_leaves_state_alone_when_it_only_looks() -> None:
    step, blind = (on_gpu(mode="cudagraph") for _ in range(2))
    for k in range(2):
        before = state(step)
        first, second = step.gradients(*gpu_batch(9)), step.gradients(*gpu_batch(9))
        assert first[0] == pytest.approx(second[0], rel=1e-6)
        for tensor, value in zip(state(step)[: len(before)], before, strict=True):
            assert torch.equal(tensor, value)
        assert step(*gpu_batch(k)).item() == pytest.approx(blind(*gpu_batch(k)).item(), rel=1e-4)
    assert step.captured_peak_bytes
    for a, b in zip(step.model.parameters(), blind.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_fp16_trains_with_its_scaler() -> None:
    step, plain = on_gpu("fp16"), on_gpu("fp32", attention="math")
    scale = step.scaler.get_scale()
    assert scale > 1
    step.gradients(*gpu_batch(0))
    assert step.scaler.get_scale() == scale
    _, found = step.gradients(*gpu_batch(0))
    norm = math.sqrt(sum(g.double().square().sum().item() for g in found.values()))
    assert norm == pytest.approx(0.3, rel=0.01)  # clipped after it was unscaled
    assert five_steps(step) == pytest.approx(five_steps(plain), rel=2e-3)
    assert step.scaler.get_scale() <= scale


@pytest.mark.gpu
def test_fp16_skips_a_step_that_overflows() -> None:
    step = on_gpu("fp16")
    step(*gpu_batch(0))
    step.scaler.update(2.0**40)
    before = [p.detach().clone() for p in step.model.parameters()]
    step(*gpu_batch(1))
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
    assert step.scaler.get_scale() < 2.0**40


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", recipes.names())
def test_fp8_on_a_gpu_follows_bf16(name: str, mode: str, eager_losses: list[float]) -> None:
    losses = five_steps(on_gpu("fp8", mode, fp8=name))
    assert losses == pytest.approx(eager_losses, rel=2e-2)
    assert losses != eager_losses
