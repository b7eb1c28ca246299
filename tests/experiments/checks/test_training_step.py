"""The check of a training step: it passes what is right, on every seed, and fails mutations of model and kernels."""

import dataclasses
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planting import no_clip_factor
from torch import Tensor, nn
from whole_recipes import WHOLE

from te_bench.experiments import trial_model
from te_bench.experiments.checks import gradients, large, training_step
from te_bench.experiments.checks.gradients import EMULATION
from te_bench.experiments.checks.quantity import Quantity
from te_bench.experiments.checks.tolerances import FP8_OVERALL
from te_bench.experiments.instruments import profiling
from te_bench.experiments.measurement import CheckFailed, Unsupported
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import train_step
from te_bench.kernels.quantize import Operand, Quantized, block_casts
from te_bench.kernels.quantize.backends.reference import spread
from te_bench.models import decoder
from te_bench.models import recipe as recipes
from te_bench.models.configs import CONFIGS, DecoderConfig
from te_bench.models.dropout import remove_dropout
from te_bench.models.modules.linear import Linear
from te_bench.models.recipe import Float8CurrentScaling, Format, Recipe, Slot
from te_bench.training.optimizer import TableAdamW
from te_bench.training.step import Optim, TrainStep

PRECISIONS = ["fp32", "bf16", "fp8"]
RECIPES = [*WHOLE, "float8_current_scaling_bf16_wgrad"]
IN_FP8 = [name for name in RECIPES if not recipes.load(name).block_formats]
CURRENT = "float8_current_scaling"
V, VP = 250, 256
EVERY = [("fp32", CURRENT), ("bf16", CURRENT), *(("fp8", recipe) for recipe in RECIPES)]
EVERY_PRECISION = pytest.mark.parametrize(("precision", "recipe"), EVERY)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def a_trial(precision: str, seed: int = 0, recipe: str = CURRENT, **problem: Any) -> Trial:
    sizes = {"model": "tiny", "batch": 4, "block": 64, "vocab": V, "padded_vocab": VP, **problem}
    said: dict[str, Any] = {"precision": precision, "recipe": recipe if precision == "fp8" else None, "seed": seed}
    return Trial(workload="train_step", device="cpu", problem=sizes, attention="flash", **said)


def checked(trial: Trial, mutate: Callable[[TrainStep], None] = lambda step: None) -> dict[str, Any]:
    step = TrainStep(trial_model.build(trial), trial_model.optim_of(trial), precision=trial.precision, mode="eager")
    mutate(step)
    return training_step.check_step(trial, *train_step.random_batches(trial)[0], step)


@pytest.mark.usefixtures("references_once")
@pytest.mark.parametrize("seed", range(2))  # of more the limits are drawn, by benchmarks/check_margins.py
@EVERY_PRECISION
def test_true_steps_pass_on_every_seed(precision: str, recipe: str, seed: int) -> None:
    check = checked(a_trial(precision, seed, recipe))
    names = [q["name"] for q in check["quantities"]]
    assert "loss" in names
    assert "grad padding rows" in names
    assert len(names) >= 2 + len(list(trial_model.build(a_trial(precision)).parameters()))
    for q in check["quantities"]:
        assert 0 <= q["error"] <= q["limit"]
        # A zeroed gradient has relative error 1, a sign flip 2, a doubled one 1, one scaled by sqrt(2) 0.41.
        shares = q["name"].startswith("grad, ratio") or q["name"].endswith("worst row")
        assert q["limit"] < 0.3 or shares or recipe != CURRENT, q


def test_a_check_that_draws_random_numbers_is_the_same_whatever_ran_before() -> None:
    """Of NVFP4, whose yardstick rounds gradients stochastically: of some draws a gradient 25 % too large passes."""
    trial = a_trial("fp8", recipe="nvfp4_block_scaling")
    assert checked(trial) == checked(trial)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "problem",
    [
        {"vocab": 50257, "padded_vocab": 50304, "batch": 1, "block": 32},
        {"batch": 1, "block": 16},
        {"padded_vocab": V},
        {"accumulate": 2},
        {"grad_clip": 0.0},
        {"dropout": 0.2},
    ],
    ids=lambda p: "-".join(f"{k}{v}" for k, v in p.items()),
)
def test_true_steps_of_other_shapes_pass(precision: str, problem: dict[str, Any]) -> None:
    checked(a_trial(precision, len(problem) % 2, **problem))


FAST = {"head": "chunked", "optimizer": "reference"}


#: With an FP8 head where there is one (fp32's yardstick is bf16's), and of each precision one with more.
FAST_STEPS = [
    *((*each, FAST) for each in EVERY),
    *(
        (*each, {**FAST, "head": "fp8"})
        for each in EVERY[1:]
        if each[0] == "bf16" or not recipes.load(each[1]).lacks_fp8_head()
    ),
    *((*each, {**FAST, **more}) for each in EVERY[:4] for more in ({"accumulate": 2}, {"dropout": 0.2})),
]


@pytest.mark.usefixtures("plain_heads", "references_once")
@pytest.mark.parametrize(("precision", "recipe", "problem"), FAST_STEPS)
def test_true_fast_steps_pass(precision: str, recipe: str, problem: dict[str, Any]) -> None:
    trial = a_trial(precision, RECIPES.index(recipe) % 2, recipe, **problem)
    step = trial_model.step_of(trial)
    assert step.table is not None
    training_step.check_step(trial, *train_step.random_batches(trial)[0], step)


@pytest.mark.usefixtures("plain_heads")
@pytest.mark.parametrize(
    ("precision", "optimizer", "states"),
    [("bf16", None, "bf16"), ("bf16", "reference", "fp8"), ("fp8", "reference", "bf16")],
)
def test_bf16_weights_are_held_to_float64_of_the_same_rounded_weights(precision, optimizer, states, monkeypatch):
    """Both references begin with the trial's bf16 weights, bit for bit, and not with what those were rounded from."""
    blocks = {"blocks": "fused", "head": "chunked", "optimizer": optimizer} if optimizer else {}
    trial = a_trial(precision, recipe="delayed_scaling", weights="bf16", states=states, **blocks)
    trial_model.require_supported(trial)
    step, batch = trial_model.step_of(trial), train_step.random_batches(trial)[0]
    assert {p.dtype for p in step.model.parameters() if p.dim() > 1} == {torch.bfloat16}
    right, built = trial_model.build, []

    def noted(asked: Trial) -> Any:
        model = right(asked)
        built.append({name: p.detach().double() for name, p in model.named_parameters()})
        return model

    monkeypatch.setattr(trial_model, "build", noted)
    training_step.check_step(trial, *batch, step)
    assert len(built) == 2
    for found in built:
        for name, p in step.model.named_parameters():
            assert torch.equal(found[name], p.detach().double()[: len(found[name])]), name


def test_steps_in_fewer_bits_that_no_machine_has_are_unsupported() -> None:
    for problem, reason in (
        ({"weights": "bf16"}, "torch's AdamW keeps states in the weights' dtype; give both bf16"),
        ({"states": "fp8"}, "torch's AdamW keeps states in the weights' dtype"),
        (
            {"weights": "bf16", "states": "bf16", "accumulate": 2},
            "gradients of 2 micro-batches would be summed in bf16",
        ),
        (
            {"weights": "bf16", "states": "bf16", "parallel": "ddp", "world": 2},
            "of steps on one GPU alone, for ranks would round apart",
        ),
    ):
        with pytest.raises(Unsupported, match=reason):
            trial_model.require_supported(a_trial("bf16", **problem))
    with pytest.raises(Unsupported, match="fp32: only for steps in bf16 and fp8"):
        trial_model.require_supported(a_trial("fp32", weights="bf16", states="bf16"))


def stale_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the copies were at first, whatever the weights become."""
    right = TableAdamW._refresh

    def refresh(self: TableAdamW) -> None:
        for p in self.masters:
            p.data.mul_(1.1)
        right(self)
        for p in self.masters:
            p.data.div_(1.1)

    monkeypatch.setattr(TableAdamW, "_refresh", refresh)


def gradient_of_the_head_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decoder.tied

    def tied(*given: Tensor) -> tuple[Tensor, Tensor]:
        rows, again = right(*given)
        return rows, again.detach()

    monkeypatch.setattr(decoder, "tied", tied)


def padding_in_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decoder.load_head

    def load(name: str) -> Any:
        head = right(name)
        wrong = lambda *args, vocab, **more: head.forward(*args, vocab=vocab + 1, **more)  # noqa: E731
        return dataclasses.replace(head, forward=wrong)

    monkeypatch.setattr(decoder, "load_head", load)


@pytest.mark.usefixtures("plain_heads")
@pytest.mark.parametrize(
    "mutation", [stale_copies, gradient_of_the_head_lost, padding_in_the_head, no_clip_factor], ids=lambda f: f.__name__
)
@pytest.mark.parametrize(("precision", "recipe"), [("bf16", CURRENT), ("fp8", "delayed_scaling")])
def test_a_wrong_fast_step_fails(precision, recipe, mutation, monkeypatch):
    trial = a_trial(precision, 0, recipe, **FAST, grad_clip=0.1)
    mutation(monkeypatch)
    with pytest.raises(CheckFailed):
        training_step.check_step(trial, *train_step.random_batches(trial)[0], trial_model.step_of(trial))


# Mutations of the trial's own model.


def attention_with(**changes: Any) -> Callable[[TrainStep], None]:
    def mutate(step: TrainStep) -> None:
        for block in step.model.transformer.h:  # type: ignore[union-attr]
            right = block.attn.attention  # type: ignore[union-attr]
            block.attn.attention = lambda q, k, v, right=right, **said: right(q, k, v, **{**said, **changes})  # type: ignore[union-attr]

    return mutate


def model_with(name: str, **changes: Any) -> Callable[[TrainStep], None]:
    """These attributes of the submodule of this name."""
    return lambda step: vars(step.model.get_submodule(f"transformer.{name}")).update(changes)


def gelu_is(other: nn.Module) -> Callable[[TrainStep], None]:
    return lambda step: step.model.set_submodule("transformer.h.1.mlp.gelu", other)


def positions_off_by_one(step: TrainStep) -> None:
    wpe = step.model.get_submodule("transformer.wpe")
    wpe.register_forward_pre_hook(lambda module, args: ((args[0] + 1) % 64,))


def gradients_of(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[TrainStep], None]:
    """Those of other tokens and targets."""

    def mutate(step: TrainStep) -> None:
        right = step.gradients
        step.gradients = lambda *batch, **how: right(*change(*batch), **how)

    return mutate


MODEL = {
    "not-causal": attention_with(causal=False),
    "scale-1/D": attention_with(scale=1 / 16),
    "scale-1": attention_with(scale=1.0),
    "one-gelu-is-relu": gelu_is(nn.ReLU()),
    "positions-off-by-one": positions_off_by_one,
    "last-norm-left-out": model_with("ln_f", forward=lambda x: x),
    "dropout-left-on": model_with("h.0.mlp.dropout", p=0.05),
    "targets-shifted": gradients_of(lambda tokens, targets: (tokens, targets.roll(1, 1))),
    "half-of-the-batch": gradients_of(lambda tokens, targets: (tokens[::2], targets[::2])),
}


@pytest.mark.usefixtures("references_once")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mutation", MODEL)
def test_a_wrong_model_fails(precision: str, mutation: str) -> None:
    """On one of two seeds: each precision has mutations of both, and each mutation is of both."""
    with pytest.raises(CheckFailed):
        checked(a_trial(precision, (PRECISIONS.index(precision) + list(MODEL).index(mutation)) % 2), MODEL[mutation])


def test_a_step_that_lost_its_dropout_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trial_model.model_of

    def without(trial: Trial) -> Any:
        model = made(trial)
        remove_dropout(model)
        return model

    trial = dataclasses.replace(a_trial("bf16", dropout=0.2), attention="math")
    batch = train_step.random_batches(trial)[0]
    training_step.begin(trial, *batch)
    monkeypatch.setattr(trial_model, "model_of", without)
    with pytest.raises(CheckFailed, match="masks of dropout"):
        training_step.begin(trial, *batch)


@pytest.mark.usefixtures("references_once")
@pytest.mark.parametrize("mutation", [gelu_is(nn.GELU(approximate="tanh")), attention_with(scale=0.2525)])
def test_fp32_sees_what_lower_precisions_round_away(mutation: Callable[[TrainStep], None]) -> None:
    with pytest.raises(CheckFailed):
        checked(a_trial("fp32"), mutation)


@pytest.mark.parametrize(("precision", "vocab", "padded"), [("fp32", V, VP), ("bf16", 50257, 50304), ("fp8", V, VP)])
def test_padding_inside_the_softmax_fails(precision, vocab, padded, monkeypatch):
    """The loss alone shows it where the gradient of the padding is cut off, so that it is zero as it should be."""

    def unmasked(logits: Tensor, targets: Tensor, *, vocab: int) -> Tensor:
        return F.cross_entropy(logits, targets, ignore_index=-1)

    def cut_off(logits: Tensor, targets: Tensor, *, vocab: int) -> Tensor:
        return unmasked(torch.cat([logits[:, :vocab], logits[:, vocab:].detach()], dim=1), targets, vocab=vocab)

    monkeypatch.setattr(decoder, "cross_entropy", unmasked)
    with pytest.raises(CheckFailed, match="padding"):
        checked(a_trial(precision, vocab=vocab, padded_vocab=padded, batch=2))
    monkeypatch.setattr(decoder, "cross_entropy", cut_off)
    with pytest.raises(CheckFailed):
        checked(a_trial(precision, padded_vocab=512))


# Mutations of single gradients.


def recipe_switched_off(step: TrainStep) -> None:
    step.model.recipe = None  # type: ignore[assignment]


@pytest.mark.usefixtures("references_once")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_that_ran_in_bf16_is_no_fp8_step(recipe: str) -> None:
    with pytest.raises(CheckFailed, match="ratio of FP8 emulation to it"):
        checked(a_trial("fp8", RECIPES.index(recipe) % 2, recipe), recipe_switched_off)


def test_checking_leaves_tf32_as_the_trial_needs_it() -> None:
    for precision in ("bf16", "fp32", "fp8"):
        checked(a_trial(precision))
        assert torch.backends.cuda.matmul.allow_tf32 is (precision != "fp32")


@pytest.mark.parametrize("turn", [1, 2])
def test_what_a_trial_allows_ends_with_its_test(turn: int) -> None:
    """Else every later test of float32 on a GPU is one of TF32, and fails by the order of files."""
    assert not torch.backends.cuda.matmul.allow_tf32
    trial_model.allow_tf32("bf16")


@pytest.mark.usefixtures("references_once")
@pytest.mark.parametrize(("precision", "factor"), [("fp32", 0.0), ("bf16", float("nan")), ("fp8", 2.0)])
@pytest.mark.parametrize("name", ["h.0.attn.c_proj.weight", "ln_f.weight", "wte.weight"])
def test_a_wrong_gradient_fails(precision: str, factor: float, name: str) -> None:
    """The limits of true steps say of other factors and precisions that they would."""
    name = f"transformer.{name}"

    def mutate(step: TrainStep) -> None:
        right = step.gradients

        def gradients(tokens: Tensor, targets: Tensor, **how: bool) -> tuple[float, dict[str, Tensor]]:
            loss, found = right(tokens, targets, **how)
            return loss, {**found, name: found[name] * factor}

        step.gradients = gradients  # type: ignore[method-assign]

    with pytest.raises(CheckFailed, match="grad") as failed:
        checked(a_trial(precision), mutate)
    quantities = {q["name"]: q for q in failed.value.measurement.check["quantities"]}
    error = quantities[f"grad {name}"]["error"]
    assert error is None or error > quantities[f"grad {name}"]["limit"]


# Mutations of FP8, in the code that the trial uses everywhere: the yardstick must not share them.

#: right recipe, x, what it made of it, role -> data, scale_inv
Rule = Callable[[Recipe, Tensor, Operand, str], tuple[Tensor, Tensor]]
Mutation = Callable[[type[Recipe]], type[Recipe]]


def quantised_by(rule: Rule) -> Mutation:
    """Each orientation by `rule`, which is told what the right recipe made of it."""

    def mutation(right: type[Recipe]) -> type[Recipe]:
        class Wrong(right):  # type: ignore[misc,valid-type]
            def quantize(self, x: Tensor, role: str, slot: Slot, **asked: Any) -> Quantized:
                q = super().quantize(x, role, slot, **asked)
                row = (None, None) if q.data is None else rule(self, x, q.by_rows(), role)
                column = (None, None) if q.data_t is None else rule(self, x.t().contiguous(), q.by_columns(), role)
                [dtype, *_] = [data.dtype for data, _ in (row, column) if data is not None]
                return Quantized(*row, *column, q.layout._replace(format=dtype))

        return Wrong

    return mutation


def scaled(x: Tensor, right: Operand, dtype: torch.dtype, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Quantised with `factor` times the right scale, saturating, undone by the matching scale_inv."""
    limit = torch.finfo(dtype).max
    scale_inv = right.scale_inv / factor
    return (x.float() / spread(right._replace(scale_inv=scale_inv))).clamp(-limit, limit).to(dtype), scale_inv


def scaled_by(factor: float, *roles: str) -> Mutation:
    """The scales of these roles times `factor`."""
    return quantised_by(lambda recipe, x, q, role: scaled(x, q, recipe.dtype(role), factor if role in roles else 1.0))


def of_one(recipe: Recipe, x: Tensor, right: Operand, role: str) -> tuple[Tensor, Tensor]:
    return x.float().clamp(-448, 448).to(recipe.dtype(role)), torch.ones_like(right.scale_inv)


def doubled_scale_inv(recipe: Recipe, x: Tensor, right: Operand, role: str) -> tuple[Tensor, Tensor]:
    data, inverse = scaled(x, right, recipe.dtype(role))
    return data, inverse * (2 if role == "weight" else 1)


def truncated(recipe: Recipe, x: Tensor, right: Operand, role: str) -> tuple[Tensor, Tensor]:
    """Rounded towards zero in place of to the nearest."""
    dtype = recipe.dtype(role)
    data, inverse = scaled(x, right, dtype)
    up = data.float().abs() > (x.float() / spread(right)).abs()
    return torch.where(up, (data.view(torch.uint8) - 1).view(dtype).float(), data.float()).to(dtype), inverse


def e5m2_for(*roles: str) -> Mutation:
    """These roles in E5M2, with the scale that fits its range."""

    def rule(recipe: Recipe, x: Tensor, right: Operand, role: str) -> tuple[Tensor, Tensor]:
        dtype = recipe.dtype(role)
        wrong = torch.float8_e5m2 if role in roles else dtype
        return scaled(x, right, wrong, torch.finfo(wrong).max / torch.finfo(dtype).max)

    return quantised_by(rule)


def multiplied_by(operands: Callable[[Tensor, Tensor, Tensor, Tensor, str], tuple[Tensor, ...]]) -> Mutation:
    """GEMMs of other operands: (a, a_scale_inv, b, b_scale_inv, gemm) -> the four that are multiplied."""

    def mutation(right: type[Recipe]) -> type[Recipe]:
        class Wrong(right):  # type: ignore[misc,valid-type]
            def gemm(self, a: Operand, b: Operand, gemm: str, *others: Any) -> Tensor:
                found = operands(*a[:2], *b[:2], gemm)
                wrong = (Operand(*found[:2], a.layout), Operand(*found[2:], b.layout))
                return super().gemm(*wrong, gemm, *others)  # type: ignore[no-any-return]

        return Wrong

    return mutation


def misread(x: Tensor) -> Tensor:
    """The data of (M, K) read as if it were (K, M)."""
    return x.t().reshape(x.shape).contiguous()  # of a square matrix, reshape gives a view


def operand(number: int, gemm: str, change: Callable[[Tensor], Tensor]) -> Mutation:
    """One of a, a_scale_inv, b, b_scale_inv of a GEMM, changed."""
    return multiplied_by(
        lambda *given: [change(x) if (at, gemm) == (number, given[-1]) else x for at, x in enumerate(given[:-1])]
    )


def unscaled(gemm: str) -> Mutation:
    return operand(1, gemm, torch.ones_like)


EVERY_ROLE = ("input", "weight", "grad_output")
FP8: dict[str, Mutation] = {
    "scale-doubled-everywhere": scaled_by(2.0, *EVERY_ROLE),
    "scale-doubled-of-inputs": scaled_by(2.0, "input"),
    "scale-doubled-of-weights": scaled_by(2.0, "weight"),
    "scale-quadrupled-of-gradients": scaled_by(4.0, "grad_output"),
    "scale-of-one": quantised_by(of_one),
    "scale-inv-doubled": quantised_by(doubled_scale_inv),
    "truncated": quantised_by(truncated),
    "e5m2-forward": e5m2_for("input", "weight"),
    "e5m2-of-inputs": e5m2_for("input"),
    "e5m2-of-weights": e5m2_for("weight"),
    "wgrad-x-transposed": operand(2, "wgrad", misread),
    "wgrad-dy-transposed": operand(0, "wgrad", misread),
    "dgrad-unscaled": unscaled("dgrad"),
    "fprop-unscaled": unscaled("fprop"),
}


def put_in_place(monkeypatch: pytest.MonkeyPatch, recipe: str, mutation: Mutation) -> None:
    wrong = mutation(type(recipes.load(recipe)))()  # which imports its module
    monkeypatch.setattr(sys.modules[f"{recipes.__name__}.{recipe}"], "RECIPE", wrong)


@pytest.mark.usefixtures("references_once")  # which see nothing of a mutation but its settings
@pytest.mark.parametrize(
    ("mutation", "recipe", "seed"),
    [(m, r, (i + j) // 3 % 2) for i, m in enumerate(FP8) for j, r in enumerate(IN_FP8) if (i + j) % 3 == 0],
)
def test_wrong_fp8_fails(mutation: str, recipe: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A covering set: every mutation with every third recipe, and every recipe with every third mutation, on two seeds."""
    put_in_place(monkeypatch, recipe, FP8[mutation])
    with pytest.raises(CheckFailed):
        checked(a_trial("fp8", seed, recipe))


@pytest.mark.parametrize("recipe", IN_FP8)
def test_the_mutations_of_fp8_are_right_but_for_what_they_change(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they might fail for being broken. All kinds of them at once."""
    put_in_place(monkeypatch, recipe, lambda right: unscaled("none")(e5m2_for()(scaled_by(1.0, *EVERY_ROLE)(right))))
    checked(a_trial("fp8", recipe=recipe))


def asked_otherwise(role: str, **wrong: Any) -> Mutation:
    """The casts of a role by other settings of `block_casts`."""

    def mutation(right: type[Recipe]) -> type[Recipe]:
        class Wrong(right):  # type: ignore[misc,valid-type]
            def quantize(self, x: Tensor, given: str, slot: Slot, **asked: Any) -> Quantized:
                with pytest.MonkeyPatch.context() as patched:
                    more = wrong if given == role else {}
                    for name in ("mxfp8", "nvfp4"):
                        cast = getattr(block_casts, name)
                        patched.setattr(block_casts, name, lambda *x, cast=cast, **own: cast(*x, **own | more))
                    return super().quantize(x, given, slot, **asked)  # type: ignore[no-any-return]

        return Wrong

    return mutation


BLOCK_FORMATS: dict[str, tuple[str, Mutation]] = {
    "transformed on one side": ("nvfp4", asked_otherwise("input", transform=False)),
    "nvfp4 doubled": ("nvfp4", operand(2, "fprop", lambda b: 2 * b)),
    "mxfp8 doubled": ("mxfp8", operand(2, "dgrad", lambda b: 2 * b)),
    "of the next block": ("mxfp8", operand(2, "fprop", lambda b: b.roll(32, 1))),
    "of two mantissa bits": ("mxfp8", operand(2, "wgrad", lambda b: b.to(torch.float8_e5m2).to(b.dtype))),
}


@pytest.mark.usefixtures("references_once")
@pytest.mark.parametrize("mutation", BLOCK_FORMATS)
def test_wrong_block_formats_fail(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong = BLOCK_FORMATS[mutation]
    put_in_place(monkeypatch, f"{name}_block_scaling", wrong)
    with pytest.raises(CheckFailed):
        checked(a_trial("fp8", 0, f"{name}_block_scaling"))


@pytest.mark.parametrize("problem", [{}, {"blocks": "fused", "optimizer": "reference"}], ids=["eager", "fused"])
def test_a_true_step_with_blocks_in_bf16_passes(problem: dict[str, Any]) -> None:
    checked(a_trial("fp8", recipe="nvfp4_block_scaling_bf16_end", **problem))


def test_the_mutations_of_block_formats_are_right_but_for_what_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    for recipe in ("mxfp8_block_scaling", "nvfp4_block_scaling"):
        put_in_place(
            monkeypatch, recipe, lambda right: operand(2, "wgrad", lambda b: b)(asked_otherwise("input")(right))
        )
        checked(a_trial("fp8", recipe=recipe))


def test_e4m3_gradients_are_not_worse_than_hybrid() -> None:
    def e4m3(step: TrainStep) -> None:
        step.model.recipe = Float8CurrentScaling(fp8_format=Format.E4M3)  # type: ignore[assignment]

    checked(a_trial("fp8"), e4m3)


def test_a_linear_that_multiplies_by_the_wrong_operand_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda self, x: right(self, x.flip(-1)))
    with pytest.raises(CheckFailed):
        checked(a_trial("fp8"))


@pytest.mark.parametrize(
    ("counts", "expected"), [([89, 88], 88), ([88, 88], 88), ([None, None], None), ([None, 5], None)]
)
def test_launches_are_the_fewer_of_two_looks(counts, expected, monkeypatch):
    looks = iter(counts)
    monkeypatch.setattr(profiling, "seen_once", lambda call, device: profiling.Seen(["gemm"], next(looks)))
    assert profiling.kernels_seen(lambda: None, "cuda") == profiling.Seen(["gemm"], expected)


def test_on_a_cpu_where_nothing_is_launched_one_look_is_enough() -> None:
    calls: list[Tensor] = []
    x = torch.ones(1, 1, 8, 8)
    seen = profiling.kernels_seen(lambda: calls.append(F.scaled_dot_product_attention(x, x, x)), "cpu")
    assert len(calls) == 1
    assert seen.launches is None
    assert any("attention" in name for name in seen.names)


@pytest.mark.parametrize(
    ("name", "tokens", "memory_gib", "rows"),
    [
        ("gpt2", 1024, 0, 1),  # a CPU
        ("gpt2", 1024, 24, 1),
        ("gpt2", 1024, 80, 2),
        ("gpt2", 1024, 141, 4),
        ("gpt2-xl", 1024, 141, 1),
        ("llama3-8b", 8192, 141, 1),
        ("gpt2", 64, 0, 12),
        ("gpt2-xl", 128, 16, 12),  # no more than on a CPU, for all else that a token keeps is more than its scores
    ],
)
def test_references_compute_as_many_sequences_together_as_the_gpu_holds(
    name: str, tokens: int, memory_gib: int, rows: int
) -> None:
    assert training_step.rows_together(CONFIGS[name].shape, tokens, 12, memory_gib * 2**30) == rows


@pytest.mark.parametrize("tokens", [128, 1024])
@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl", "llama3-1b", "llama3-8b", "qwen3-0.6b"])
def test_references_keep_no_more_than_their_part_of_a_gpu(name: str, tokens: int) -> None:
    """One layer, as the check of a large model has: logits and what a token keeps are then more than scores."""
    config = dataclasses.replace(CONFIGS[name], **{CONFIGS[name].LAYERS: 1}, block_size=tokens)
    kept = bytes_kept(config, tokens)
    alone = training_step.rows_together(config.shape, tokens, 1024, 0)
    for memory in (2**34, 2**37):
        together = training_step.rows_together(config.shape, tokens, 1024, memory)
        assert together == alone or together * kept <= memory / 6


def bytes_kept(config: DecoderConfig, tokens: int) -> int:
    """For the backward pass of one sequence in float64, and two more copies of the logits, which the loss makes."""
    with torch.device("meta"):
        model = decoder.build(config, attention="manual").double()
        batch = torch.zeros(1, tokens, dtype=torch.int64)
    own, kept = {p.untyped_storage()._cdata for p in model.parameters()}, dict[int, torch.UntypedStorage]()

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(batch, batch)
    return sum(storage.nbytes() for storage in kept.values()) + 2 * 8 * tokens * config.vocab_size


def test_references_that_have_no_memory_go_by_fewer_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    right, tried = gradients.Gradients.written_out, []

    def written_out(model: Any, optim: Optim, precision: str, tokens: Tensor, targets: Tensor) -> Any:
        tried.append(len(tokens) // optim.accumulate)
        if tried[-1] > 1:
            raise torch.OutOfMemoryError
        return right(model, optim, precision, tokens, targets)

    monkeypatch.setattr(gradients.Gradients, "written_out", written_out)
    trial = a_trial("bf16")
    found = training_step.reference(trial, trial_model.optim_of(trial), *train_step.random_batches(trial)[0])
    assert tried == [4, 2, 1]
    assert found.loss == pytest.approx(5.5, abs=0.2)  # ln(250)


@pytest.mark.parametrize(
    ("first", "others", "wrong"),
    [
        ([("grad w", 0.1), (EMULATION, 1.15)], [[(EMULATION, 1.0)]] * 2, []),  # by chance
        ([("grad w", 0.1), (EMULATION, 1.15)], [[(EMULATION, 1.16)]] * 2, [f"{EMULATION}, of 3 batches"]),  # a format
        ([(EMULATION, 1.3)], [[(EMULATION, 0.9)]] * 2, [EMULATION]),  # too far for chance
        ([("grad w", 3.0), (EMULATION, 1.15)], [[(EMULATION, 0.9)]] * 2, ["grad w", EMULATION]),  # not alone
        ([(EMULATION, 1.15)], [[(EMULATION, 1.0)], [(EMULATION, 1.0), ("grad w", 3.0)]], ["grad w"]),  # now and then
        ([(EMULATION, 1.15)], [[(EMULATION, 1.4)], [(EMULATION, 0.8)]], [EMULATION]),  # too far in another batch
    ],
)
def test_fp8_coarser_than_its_emulation_is_so_in_every_batch(
    first: list[tuple[str, float]], others: list[list[tuple[str, float]]], wrong: list[str]
) -> None:
    def quantities(errors: list[tuple[str, float]]) -> list[Quantity]:
        return [Quantity(name, error, FP8_OVERALL if name == EMULATION else 2.0) for name, error in errors]

    step = trial_model.step_of(a_trial("fp8"))
    found = gradients.over_batches(quantities(first), step, lambda number: quantities(others[number - 1]))
    assert [q.name for q in found if q.wrong] == wrong


@pytest.mark.usefixtures("plain_heads")
@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        ("delayed_scaling", {}),
        ("delayed_scaling", {**FAST, "blocks": "fused"}),
        ("nvfp4_block_scaling", {}),  # which draws random numbers
    ],
)
def test_a_step_of_which_more_batches_were_asked_trains_on_as_if_none_had_been(
    recipe: str, problem: dict[str, Any]
) -> None:
    trial = a_trial("fp8", recipe=recipe, **problem)
    batches = train_step.random_batches(trial)

    def trained(*, more: bool) -> list[float]:
        step = trial_model.step_of(trial)
        gradients.settle(trial.recipe, lambda: step.gradients(*batches[0], records=True))

        def of_batch(number: int) -> list[Quantity]:
            step.gradients(*batches[number], records=True)
            return [Quantity(EMULATION, 1.0, FP8_OVERALL)]

        if more:
            gradients.over_batches([Quantity(EMULATION, 1.15, FP8_OVERALL)], step, of_batch)
        return [step(*batches[number]).item() for number in range(3)]

    assert trained(more=True) == trained(more=False)


def test_references_of_one_batch_are_gone_before_those_of_the_next() -> None:
    """Of a large model two batches' would not fit; those by parts, and those that emulate FP8, refer to themselves."""

    class Reference:
        def __init__(self) -> None:
            self.itself = self

    made: list[weakref.ref[Reference]] = []

    def of_batch(number: int) -> list[Quantity]:
        assert [one for one in made if one() is not None] == []
        made.append(weakref.ref(Reference()))
        return [Quantity(EMULATION, 1.0, FP8_OVERALL)]

    gc.disable()
    try:
        gradients.over_batches([Quantity(EMULATION, 1.15, FP8_OVERALL)], trial_model.step_of(a_trial("fp8")), of_batch)
    finally:
        gc.enable()
    assert len(made) == 2


def test_a_reference_by_parts_is_gone_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    trial, right, made = a_trial("bf16", padded_vocab=V), trial_model.build, list[weakref.ref[Any]]()

    def build(asked: Trial) -> Any:
        model = right(asked)
        made.append(weakref.ref(model))
        return model

    monkeypatch.setattr(trial_model, "build", build)
    monkeypatch.setattr(large, "LARGE", 2**10)
    gc.disable()
    try:
        training_step.reference(trial, trial_model.optim_of(trial), *train_step.random_batches(trial)[0])
        assert [one() for one in made] == [None]
    finally:
        gc.enable()
