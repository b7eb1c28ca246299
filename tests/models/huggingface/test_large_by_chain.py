"""Large models of transformers by the fused chain: FP8 weights in one layout, and no copy of them in bf16, the same bits."""

from typing import Any

import pytest
import torch
from families import make, tokens
from large_models import RECIPE, Limit, assert_equal, layouts, trained
from table_adamw_cases import OPTIM
from torch import Tensor

import te_bench.models as te
from te_bench.models.adopt import adopt
from te_bench.training.evaluation import evaluate
from te_bench.training.step import TrainStep

pytestmark = pytest.mark.usefixtures("plain_heads")


def adopted(
    family: str = "llama",
    optimizer: str | None = "reference",
    checkpointed: bool = False,
    parts: Any = "all",
    **options: Any,
) -> TrainStep:
    model = make(family, tie_word_embeddings=True, **options)
    if checkpointed:
        model.gradient_checkpointing_enable()
    model = adopt(model, recipe=RECIPE, parts=parts)
    return TrainStep(model, OPTIM, precision="fp8", mode="eager", optimizer=optimizer)


CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "torch's optimizer": {"optimizer": None},
    "biases": {"family": "qwen2"},
    "norms of heads": {"family": "qwen3"},
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_bit_for_bit_as_with_both_layouts(name: str, limit: Limit) -> None:
    wanted = trained(adopted(**CASES[name]))
    limit(0)
    step = adopted(**CASES[name])
    if step.table is not None:
        assert layouts(step) == {False}
        # The tied table, which the head casts by itself, has no copy; nor has any other a second one, in bf16.
        assert all(copy.fp8 is not None and not copy.half for copy in step.table.copies.values())
    assert_equal(trained(step), wanted)


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_gated_mlps_without_the_chain_train_bit_for_bit_as_with_both_layouts(family: str, limit: Limit) -> None:
    """Their first Linears multiply as one matrix there, too."""
    parts = ("linear", "norm", "mlp")
    wanted = trained(adopted(family, parts=parts))
    limit(0)
    step = adopted(family, parts=parts)
    assert layouts(step) == {False}
    assert_equal(trained(step), wanted)


@pytest.mark.parametrize("parts", ["all", ("linear", "norm", "mlp"), None], ids=["chain", "MLPs", "Linears"])
@pytest.mark.parametrize("large", [False, True])
def test_checkpointed_layers_compute_again_with_the_same_weights(large: bool, parts: Any, limit: Limit) -> None:
    """In the layouts of the first time, too, which that pass's graph knows."""
    limit(0 if large else 2**60)
    steps = [adopted(checkpointed=again, parts=parts) for again in (False, True)]
    found = [[step.gradients(tokens(4), tokens(4).flip(1))] for step in steps]
    for (loss, plain), (again, gradients) in zip(*found, strict=True):
        assert again == loss
        for name, gradient in plain.items():
            assert (gradients[name] - gradient).norm() < 2e-3 * gradient.norm(), name


@pytest.mark.parametrize("cached", [False, True])
def test_a_loop_of_ones_own(cached: bool, limit: Limit) -> None:
    """Its weights are cast in the pass, or kept for some passes by cache_weights."""

    def passes() -> list[Tensor]:
        model = make("llama")
        te.convert(model, RECIPE, parts="all")
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        if cached:
            te.cache_weights(model, optimizer)
        found = []
        for number in range(6):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=tokens(), labels=tokens()).loss
            loss.backward()
            found.append(loss.detach())
            if number % 2:
                found += [p.grad.clone() for p in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
        return found

    wanted = passes()
    limit(0)
    assert_equal(passes(), wanted)


@pytest.mark.parametrize("watched", ["", ".self_attn.k_proj", ".mlp", ".self_attn.o_proj"])
def test_where_somebody_listens_it_goes_layer_by_layer_with_the_same_weights(watched: str, limit: Limit) -> None:
    found = []
    for elements in (2**60, 0):
        limit(elements)
        step = adopted()
        step(tokens(4), tokens(4).flip(1))
        model: Any = step.model
        model.module.model.layers[1].get_submodule(watched.lstrip(".")).register_forward_hook(lambda *_: None)
        losses = [step(tokens(4), tokens(4).flip(1)) for _ in range(3)]
        found.append(
            torch.stack([*losses, evaluate(step.model, iter([(tokens(4), tokens(4))]), "fp8") * losses[0] ** 0])
        )
    # Weights side by side keep one scale there, where each would take its own.
    torch.testing.assert_close(found[0], found[1], rtol=0.02, atol=0)


def test_trained_layer_by_layer_it_goes_on_with_the_scales_of_all(limit: Limit) -> None:
    """k's and up's weights are 16 times q's and gate's, by whose scales alone the first step's would saturate."""
    limit(0)
    model = adopt(make("llama"), recipe=RECIPE, parts="all")
    large = [layer for name, layer in model.named_modules() if name.endswith(("k_proj", "up_proj"))]
    with torch.no_grad():
        for layer in large:
            layer.get_parameter("weight").mul_(16)
    handles = [layer.register_forward_hook(lambda *_: None) for layer in large]
    for _ in range(2):
        with model.autocast(), torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens(4), tokens(4).flip(1))
        loss.backward()
    for handle in handles:
        handle.remove()
    step = TrainStep(model, OPTIM, precision="fp8", mode="eager", optimizer="reference")
    step.gradients(tokens(4), tokens(4).flip(1))
    assert step.table is not None
    for weight, copy in step.table.copies.items():
        if copy.fp8 is not None:
            kept = copy.fp8.kept.data.float() * copy.fp8.kept.scale_inv
            assert (kept - weight).norm() < 0.05 * weight.norm()
