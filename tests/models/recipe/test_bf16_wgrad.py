"""Weight gradients out of FP8: alone of all that a pass computes they are another, those of the tensors themselves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_cases import randomise, results, transformer
from torch import Tensor, nn

import te_bench.models as te
from te_bench.experiments import trial_model
from te_bench.experiments.measurement import Unsupported
from te_bench.experiments.spec import Trial
from te_bench.models import decoder, recipe
from te_bench.models.configs import configs
from te_bench.models.modules.linear import Linear
from te_bench.models.recipe import Recipe
from te_bench.training.parallel import Indivisible
from te_bench.training.parallel._fp8_gather import Fp8Gather
from te_bench.training.step import Optim, TrainStep

KINDS: list[Any] = [recipe.Float8CurrentScaling, recipe.RowwiseScaling]

MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: te.Linear(48, 32, device="cpu"),
    "LayerNormLinear": lambda: te.LayerNormLinear(48, 32, return_layernorm_output=False, device="cpu"),
    "LayerNormMLP": lambda: te.LayerNormMLP(48, 80, activation="swiglu", device="cpu"),
    "TransformerLayer": transformer,
}


def snr(exact: Tensor, found: Tensor) -> float:
    """Signal to noise, in dB."""
    return float(20 * torch.log10(exact.norm() / (found - exact).norm()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODULES)
def test_all_but_the_weight_gradients_is_bit_for_bit_the_base_recipes(name: str, kind: Any) -> None:
    module, (x, dy) = randomise(MODULES[name]()), torch.randn(2, 40, 2, 48).unbind()
    dy = dy[..., : module(x).shape[-1]]
    base, ours = (results(module, x, dy, asked) for asked in (kind(), kind(bf16_wgrad=True)))
    weights = {name for name, p in module.named_parameters() if p.dim() == 2}
    for what in base:
        assert torch.equal(base[what], ours[what]) == (what not in weights), what
    assert all(18 < snr(ours[what], base[what]) < 40 for what in weights), "the noise of FP8 is what is gone"


@pytest.mark.parametrize("kind", KINDS)
def test_a_linears_weight_gradient_is_that_without_fp8(kind: Any) -> None:
    layer, (x, dy) = randomise(MODULES["Linear"]()), torch.randn(2, 40, 48).unbind()
    dy = dy[:, :32]
    exact = dy.double().t() @ x.double()
    assert snr(exact, results(layer, x, dy, kind(bf16_wgrad=True))["weight"]) > 120
    found = []
    for asked in (None, kind(bf16_wgrad=True), kind()):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(results(layer, x, dy, asked)["weight"])
    plain, ours, base = found
    assert torch.equal(plain, ours)
    assert snr(exact, ours) > 45 > 35 > snr(exact, base)


def a_step(asked: Recipe, blocks: str | None = None, **options: Any) -> TrainStep:
    torch.manual_seed(0)
    model = decoder.build(configs()["tiny"], attention="manual", recipe=asked, blocks=blocks, head="chunked")
    return TrainStep(model, Optim(**options), precision="fp8", mode="eager")


@pytest.mark.parametrize(("blocks", "kind"), zip((None, "fused"), KINDS, strict=True))
def test_a_step_of_a_gpt_differs_in_its_linears_weight_gradients_alone(blocks: str | None, kind: Any) -> None:
    tokens = torch.randint(0, 64, (2, 64), generator=torch.Generator().manual_seed(0))
    (base_loss, base), (loss, ours) = (
        a_step(asked, blocks, grad_clip=0.0).gradients(tokens, tokens) for asked in (kind(), kind(bf16_wgrad=True))
    )
    step = a_step(kind(), blocks)
    linears = {f"{name}.weight" for name, module in step.model.named_modules() if isinstance(module, Linear)}
    assert len(linears) == 8
    assert loss == base_loss
    for name in base:
        assert torch.equal(base[name], ours[name]) == (name not in linears), name
    assert all(15 < snr(ours[name], base[name]) < 45 for name in linears)


def test_a_compiled_module_computes_the_same() -> None:
    asked, (x, dy) = recipe.RowwiseScaling(bf16_wgrad=True), torch.randn(2, 16, 2, 48).unbind()
    for name in ("Linear", "LayerNormMLP"):  # whose parts are those of LayerNormLinear, too
        module = randomise(MODULES[name]())
        eager = results(module, x, dy[..., : module(x).shape[-1]], asked)
        compiled: Any = torch.compile(module, backend="aot_eager", fullgraph=True)
        found = results(compiled, x, dy[..., : eager["y"].shape[-1]], asked)
        for one, other in zip(eager.values(), found.values(), strict=True):
            torch.testing.assert_close(one, other)


def test_what_is_written_over_before_the_backward_pass_is_told() -> None:
    """x is kept uncast: torch knows that it is another."""
    layer, x = te.Linear(48, 32, device="cpu"), torch.randn(16, 48)
    with te.autocast(recipe=recipe.RowwiseScaling(bf16_wgrad=True)):
        y = layer(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_pass_without_a_backward_pass_lets_go_of_what_it_kept() -> None:
    """norm(x) is an output that is kept, too: kept as a view of it, it would hold itself."""
    layer = te.LayerNormLinear(48, 32, return_layernorm_output=True, device="cpu")
    freed: list[bool] = []

    class Flag:
        def __del__(self) -> None:
            freed.append(True)

    with te.autocast(recipe=recipe.Float8CurrentScaling(bf16_wgrad=True)):
        y, normed = layer(torch.randn(16, 48))
    y.grad_fn.next_functions[0][0].flag = Flag()
    del y, normed
    assert freed == [True]


def test_numbers_that_a_cast_loses_are_counted_as_ever() -> None:
    counted = []
    for asked in (recipe.RowwiseScaling(), recipe.RowwiseScaling(bf16_wgrad=True)):
        torch.manual_seed(0)
        layer, x = te.Linear(48, 32, device="cpu"), torch.randn(16, 48) * torch.logspace(-6, 3, 48)
        with te.record_numerics(), te.autocast(recipe=asked):
            y = layer(x)
        y.square().sum().backward()
        counted.append(te.numerics(layer)[""])
    assert counted[0] == counted[1]
    assert counted[0]["input"]["underflowed"] > 0


def test_an_fp8_head_is_refused() -> None:
    for asked, why in (
        (recipe.RowwiseScaling(bf16_wgrad=True), "keeps weight gradients in the activations' precision"),
        (recipe.RowwiseScaling(bf16_last=0.5), "keeps the head in the activations' precision"),
    ):
        with pytest.raises(ValueError, match=f"head fp8: the recipe {why}; choose chunked"):
            decoder.build(configs()["tiny"], recipe=asked, head="fp8")
    assert decoder.build(configs()["tiny"], recipe=recipe.RowwiseScaling(bf16_first=0.5), head="fp8").heads
    problem = {"model": "tiny", "block": 16, "vocab": 64, "padded_vocab": 64, "batch": 2, "head": "fp8"}
    trial = Trial(workload="train_step", device="cpu", problem=problem, attention="flash", precision="fp8")
    for name in ("rowwise_scaling_bf16_wgrad", "float8_current_scaling_bf16_end"):
        with pytest.raises(Unsupported, match="head fp8: the recipe keeps"):
            trial_model.require_supported(Trial(**{**trial.to_json(), "recipe": name}))


def test_weights_are_not_gathered_in_fp8_for_it() -> None:
    gather = Fp8Gather([te.Linear(32, 32, device="cpu")], 1, lambda x: x)
    with (
        te.autocast(recipe=recipe.Float8CurrentScaling(bf16_wgrad=True)),
        pytest.raises(Indivisible, match="gather fp8: the recipe keeps wgrad out of FP8"),
    ):
        gather.begin()
