"""The check of a training step: it passes what is right, on every seed, and fails mutations of model and kernels."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_bench.experiments.measurement import CheckFailed
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import _model, train_step
from te_bench.kernels.quantize import Quantized, reference
from te_bench.models import gpt
from te_bench.models import recipe as recipes
from te_bench.models.modules.linear import Linear
from te_bench.models.recipe import Format, Slot, float8_current_scaling
from te_bench.models.train import TrainStep

PRECISIONS = ["fp32", "bf16", "fp8"]
V, VP = 250, 256
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def a_trial(precision: str, seed: int = 0, **problem: Any) -> Trial:
    return Trial(
        workload="train_step",
        device="cpu",
        problem={"model": "tiny", "batch": 4, "block": 64, "vocab": V, "padded_vocab": VP, **problem},
        attention="flash",
        precision=precision,
        recipe="float8_current_scaling" if precision == "fp8" else None,
        seed=seed,
    )


def checked(trial: Trial, mutate: Callable[[TrainStep], None] = lambda step: None) -> dict[str, Any]:
    step = TrainStep(_model.build(trial), _model.optim_of(trial), precision=trial.precision, mode="eager")
    mutate(step)
    return _model.check_step(trial, *train_step.random_batches(trial)[0], step)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_true_steps_pass_on_every_seed(precision: str, seed: int) -> None:
    check = checked(a_trial(precision, seed))
    names = [q["name"] for q in check["quantities"]]
    assert "loss" in names
    assert "grad padding rows" in names
    assert len(names) >= 2 + len(list(_model.build(a_trial(precision)).parameters()))
    assert all(0 <= q["error"] <= q["limit"] for q in check["quantities"])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "problem",
    [
        {"vocab": 50257, "padded_vocab": 50304, "batch": 2},
        {"batch": 1, "block": 16},
        {"padded_vocab": V},
        {"accumulate": 2},
        {"grad_clip": 0.0},
        {"dropout": 0.2},
    ],
    ids=lambda p: "-".join(f"{k}{v}" for k, v in p.items()),
)
def test_true_steps_of_other_shapes_pass(precision: str, problem: dict[str, Any]) -> None:
    for seed in range(2):
        checked(a_trial(precision, seed, **problem))


# Mutations of the trial's own model.


def attention_with(**changes: Any) -> Callable[[TrainStep], None]:
    def mutate(step: TrainStep) -> None:
        for block in step.model.transformer.h:  # type: ignore[union-attr]
            right = block.attn.attention  # type: ignore[union-attr]
            block.attn.attention = lambda q, k, v, right=right, **said: right(q, k, v, **{**said, **changes})  # type: ignore[union-attr]

    return mutate


def one_gelu_is_tanh(step: TrainStep) -> None:
    step.model.transformer.h[1].mlp.gelu = nn.GELU(approximate="tanh")  # type: ignore[index,union-attr]


def one_gelu_is_relu(step: TrainStep) -> None:
    step.model.transformer.h[1].mlp.gelu = nn.ReLU()  # type: ignore[index,union-attr]


def positions_off_by_one(step: TrainStep) -> None:
    wpe = step.model.transformer.wpe  # type: ignore[union-attr]
    wpe.register_forward_pre_hook(lambda module, args: ((args[0] + 1) % 64,))  # type: ignore[union-attr]


def last_norm_left_out(step: TrainStep) -> None:
    step.model.transformer.ln_f.forward = lambda x: x  # type: ignore[union-attr]


def dropout_left_on(step: TrainStep) -> None:
    step.model.transformer.h[0].mlp.dropout.p = 0.05  # type: ignore[index,union-attr]


def targets_shifted(step: TrainStep) -> None:
    right = step.gradients
    step.gradients = lambda tokens, targets: right(tokens, targets.roll(1, 1))  # type: ignore[method-assign]


def half_of_the_batch(step: TrainStep) -> None:
    right = step.gradients
    step.gradients = lambda tokens, targets: right(tokens[::2], targets[::2])  # type: ignore[method-assign]


def no_clipping(step: TrainStep) -> None:
    step.optim = dataclasses.replace(step.optim, grad_clip=0.0)


MODEL = {
    "not-causal": attention_with(causal=False),
    "scale-1/D": attention_with(scale=1 / 16),
    "scale-1": attention_with(scale=1.0),
    "scale-1%-off": attention_with(scale=0.2525),
    "one-gelu-is-relu": one_gelu_is_relu,
    "positions-off-by-one": positions_off_by_one,
    "last-norm-left-out": last_norm_left_out,
    "dropout-left-on": dropout_left_on,
    "targets-shifted": targets_shifted,
    "half-of-the-batch": half_of_the_batch,
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mutation", [m for m in MODEL if m != "scale-1%-off"])
def test_a_wrong_model_fails(precision: str, mutation: str) -> None:
    for seed in range(2):
        with pytest.raises(CheckFailed):
            checked(a_trial(precision, seed), MODEL[mutation])


@pytest.mark.parametrize("mutation", [one_gelu_is_tanh, MODEL["scale-1%-off"]])
def test_fp32_sees_what_lower_precisions_round_away(mutation: Callable[[TrainStep], None]) -> None:
    with pytest.raises(CheckFailed):
        checked(a_trial("fp32"), mutation)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_padding_inside_the_softmax_fails(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unmasked(logits: Tensor, targets: Tensor, *, vocab: int) -> Tensor:
        return F.cross_entropy(logits, targets, ignore_index=-1)

    monkeypatch.setattr(gpt, "cross_entropy", unmasked)
    for vocab, padded in ((V, VP), (50257, 50304)):
        with pytest.raises(CheckFailed, match="padding"):
            checked(a_trial(precision, vocab=vocab, padded_vocab=padded, batch=2))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_loss_alone_shows_padding_inside_the_softmax(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the padding is cut off here, so that it is zero as it should be."""

    def unmasked(logits: Tensor, targets: Tensor, *, vocab: int) -> Tensor:
        logits = torch.cat([logits[:, :vocab], logits[:, vocab:].detach()], dim=1)
        return F.cross_entropy(logits, targets, ignore_index=-1)

    monkeypatch.setattr(gpt, "cross_entropy", unmasked)
    with pytest.raises(CheckFailed):
        checked(a_trial(precision, padded_vocab=512))


# Mutations of single gradients.


def test_a_step_that_ran_in_bf16_is_no_fp8_step() -> None:
    with pytest.raises(CheckFailed, match="ratio of FP8 emulation to it"):
        checked(a_trial("fp8"), without_recipe)


def without_recipe(step: TrainStep) -> None:
    step.model.recipe = None


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("recipe", recipes.names())
def test_true_steps_of_every_recipe_pass(recipe: str, seed: int) -> None:
    checked(dataclasses.replace(a_trial("fp8", seed), recipe=recipe))


@pytest.mark.parametrize("recipe", recipes.names())
def test_a_step_that_ran_in_bf16_is_none_of_any_recipe(recipe: str) -> None:
    with pytest.raises(CheckFailed, match="ratio of FP8 emulation to it"):
        checked(dataclasses.replace(a_trial("fp8"), recipe=recipe), without_recipe)


@pytest.mark.parametrize("recipe", recipes.names())
def test_a_step_of_another_format_fails_under_every_recipe(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """E5M2 where the recipe says E4M3, by the quantisers alone: the emulation asks the recipe, and is told E4M3."""
    kind = type(recipes.load(recipe))
    right = kind.quantize

    def quantize(self: Any, x: Tensor, role: str, *arguments: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "dtype", lambda self, role: E5M2)
            return right(self, x, role, *arguments, **options)

    monkeypatch.setattr(kind, "quantize", quantize)
    monkeypatch.setattr(kind, "epilogue", lambda self, role, slot: None)
    with pytest.raises(CheckFailed):
        checked(dataclasses.replace(a_trial("fp8"), recipe=recipe))


def test_checking_leaves_tf32_as_the_trial_needs_it() -> None:
    for precision in ("bf16", "fp32", "fp8"):
        checked(a_trial(precision))
        assert torch.backends.cuda.matmul.allow_tf32 is (precision != "fp32")


def test_limits_are_below_what_any_single_wrong_gradient_would_show() -> None:
    """A zeroed gradient has relative error 1, a sign flip 2, a doubled one 1, one scaled by sqrt(2) 0.41."""
    for precision in PRECISIONS:
        for seed in range(3):
            for q in checked(a_trial(precision, seed))["quantities"]:
                assert q["limit"] < 0.3 or q["name"].startswith("grad, ratio"), (precision, q)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("factor", [0.0, -1.0, 2.0, float("nan")])
@pytest.mark.parametrize(
    "name", ["transformer.h.0.attn.c_proj.weight", "transformer.ln_f.weight", "transformer.wte.weight"]
)
def test_a_wrong_gradient_fails(precision: str, factor: float, name: str) -> None:
    def mutate(step: TrainStep) -> None:
        right = step.gradients

        def gradients(tokens: Tensor, targets: Tensor) -> tuple[float, dict[str, Tensor]]:
            loss, found = right(tokens, targets)
            return loss, {**found, name: found[name] * factor}

        step.gradients = gradients  # type: ignore[method-assign]

    with pytest.raises(CheckFailed, match="grad") as failed:
        checked(a_trial(precision), mutate)
    quantities = {q["name"]: q for q in failed.value.measurement.check["quantities"]}
    error = quantities[f"grad {name}"]["error"]
    assert error is None or error > quantities[f"grad {name}"]["limit"]


# Mutations of FP8, in the code that the trial uses everywhere: the yardstick must not share them.

RIGHT = float8_current_scaling.Float8CurrentScaling


def quantised_by(rule: Callable[[Tensor, str], tuple[Tensor, Tensor]]) -> type[Any]:
    class Wrong(RIGHT):
        def quantize(
            self, x: Tensor, role: str, slot: Slot, *, rowwise: bool, columnwise: bool, column_sum: Tensor | None = None
        ) -> Quantized:
            if column_sum is not None:
                column_sum += x.float().sum(0)
            data, inverse = rule(x.detach(), role)
            return Quantized(data, inverse, data.t().contiguous(), inverse)

    return Wrong


def scaled(x: Tensor, dtype: torch.dtype, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Quantised with `factor` times the right scale, saturating, undone by the matching scale_inv."""
    limit = torch.finfo(dtype).max
    scale = reference.scale_from_amax(x.abs().amax(), dtype) * factor
    return (x.float() * scale).clamp(-limit, limit).to(dtype), scale.reciprocal()


def formats(role: str) -> torch.dtype:
    return E5M2 if role == "grad_output" else E4M3


def doubled_scale_inv(x: Tensor, role: str) -> tuple[Tensor, Tensor]:
    data, inverse = scaled(x, formats(role))
    return data, inverse * (2 if role == "weight" else 1)


def truncated(x: Tensor, role: str) -> tuple[Tensor, Tensor]:
    """Rounded towards zero in place of to the nearest."""
    dtype = formats(role)
    data, inverse = scaled(x, dtype)
    up = data.float().abs() > (x.float() / inverse).abs()
    return torch.where(up, (data.view(torch.uint8) - 1).view(dtype).float(), data.float()).to(dtype), inverse


def wrong_gemm(name: str, change: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]) -> type[Any]:
    """A recipe whose GEMM `name` multiplies what `change` makes of a, a_scale_inv, b, b_scale_inv."""

    class Wrong(RIGHT):
        def gemm(
            self,
            a: Tensor,
            a_scale_inv: Tensor,
            b: Tensor,
            b_scale_inv: Tensor,
            gemm: str,
            out_dtype: torch.dtype,
            bias: Tensor | None = None,
        ) -> Tensor:
            operands = (a, a_scale_inv, b, b_scale_inv)
            operands = change(*operands) if gemm == name else operands  # type: ignore[assignment]
            return super().gemm(*operands, gemm, out_dtype, bias)

    return Wrong


def misread(x: Tensor) -> Tensor:
    """The data of (M, K) read as if it were (K, M)."""
    return x.t().reshape(x.shape).contiguous()


FP8 = {
    "scale-doubled-everywhere": quantised_by(lambda x, role: scaled(x, formats(role), 2.0)),
    "scale-doubled-of-inputs": quantised_by(lambda x, role: scaled(x, formats(role), 2.0 if role == "input" else 1.0)),
    "scale-doubled-of-weights": quantised_by(
        lambda x, role: scaled(x, formats(role), 2.0 if role == "weight" else 1.0)
    ),
    "scale-quadrupled-of-gradients": quantised_by(
        lambda x, role: scaled(x, formats(role), 4.0 if role == "grad_output" else 1.0)
    ),
    "scale-of-one": quantised_by(
        lambda x, role: (x.float().clamp(-448, 448).to(formats(role)), torch.ones((), device=x.device))
    ),
    "scale-inv-doubled": quantised_by(doubled_scale_inv),
    "truncated": quantised_by(truncated),
    "e5m2-forward": quantised_by(lambda x, role: scaled(x, E5M2)),
    "e5m2-of-inputs": quantised_by(lambda x, role: scaled(x, E4M3 if role == "weight" else E5M2)),
    "e5m2-of-weights": quantised_by(lambda x, role: scaled(x, E4M3 if role == "input" else E5M2)),
    "wgrad-x-transposed": wrong_gemm("wgrad", lambda a, s, b, t: (a, s, misread(b), t)),
    "wgrad-dy-transposed": wrong_gemm("wgrad", lambda a, s, b, t: (misread(a), s, b, t)),
    "dgrad-unscaled": wrong_gemm("dgrad", lambda a, s, b, t: (a, torch.ones_like(s), b, t)),
    "fprop-unscaled": wrong_gemm("fprop", lambda a, s, b, t: (a, torch.ones_like(s), b, t)),
}


@pytest.mark.parametrize("mutation", FP8)
def test_wrong_fp8_fails(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8_current_scaling, "RECIPE", FP8[mutation]())
    for seed in range(3):
        with pytest.raises(CheckFailed):
            checked(a_trial("fp8", seed))


def test_e4m3_gradients_are_not_worse_than_hybrid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8_current_scaling, "RECIPE", RIGHT(fp8_format=Format.E4M3))
    checked(a_trial("fp8"))


def test_a_linear_that_multiplies_by_the_wrong_operand_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda self, x: right(self, x.flip(-1)))
    with pytest.raises(CheckFailed):
        checked(a_trial("fp8"))
