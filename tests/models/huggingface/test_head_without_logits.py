"""The head of a causal language model without logits: transformers' own loss, and who asks for logits gets them."""

import inspect
from typing import Any

import pytest
import torch
from families import assert_same, draw, inputs, make, run, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

import te_bench.models as te
from te_bench.models import recipe
from te_bench.models.huggingface.head import causal_loss

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("plain_heads")

IGNORING = tokens().flip(1).masked_fill(tokens() < 20, -100)


def convert(family: str = "llama", **options: Any) -> Any:
    model = make(family, **options)
    te.convert(model, parts="head")
    return model


@pytest.mark.parametrize(
    "given",
    [
        {"labels": IGNORING},
        {"labels": IGNORING, "num_items_in_batch": 17},
        {"labels": IGNORING, "num_items_in_batch": torch.tensor(17)},
        {"labels": tokens(), "ignore_index": 5},
        {"labels": tokens(), "shift_labels": IGNORING},
        {"labels": torch.full_like(IGNORING, -100), "num_items_in_batch": 3},
    ],
    ids=["ignored", "items", "items in a tensor", "ignore_index", "shifted", "nothing counts"],
)
def test_the_loss_is_transformers_own(given: dict[str, Any]) -> None:
    sizes = {"num_hidden_layers": 1}
    plain, model = make("llama", **sizes), convert("llama", **sizes)
    loss, gradients = run(plain, {"input_ids": tokens(), **given})
    again, found = run(model, {"input_ids": tokens(), **given})
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=0)
    assert_same(found, gradients, 1e-4)
    assert model(input_ids=tokens(), **given).logits is None


@pytest.mark.parametrize("asked", [{}, {"output_router_logits": True}], ids=["", "balanced"])
def test_a_mixture_of_experts_has_its_router_s_loss_too(asked: dict[str, Any]) -> None:
    plain, model = make("mixtral"), convert("mixtral")
    given = {**inputs("mixtral"), **asked}
    outputs, others = plain(**given), model(**given)
    assert others.logits is None
    assert (others.aux_loss is None) == (outputs.aux_loss is None) == (not asked)
    if asked:
        torch.testing.assert_close(others.aux_loss, outputs.aux_loss)
        assert [x.shape for x in others.router_logits] == [x.shape for x in outputs.router_logits]
    (loss, gradients), (again, found) = run(plain, given), run(model, given)
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=0)
    assert_same(found, gradients, 1e-4)


def test_who_asks_for_logits_gets_them() -> None:
    model = convert()
    given = inputs("llama")
    assert model(**given).logits is None
    assert model(tokens(), labels=tokens()).logits is None
    for more in ({"labels": None}, {"skip_logits": False}, {"logits_to_keep": 16}):
        assert model(**{**given, **more}).logits.shape == (3, 16, 64)
    model.eval()
    assert model(**given).logits is not None
    assert model(**given, skip_logits=True).logits is None
    torch.testing.assert_close(model(**given, skip_logits=True).loss, model(**given).loss)
    with pytest.raises(ValueError, match="skip_logits=True, but logits_to_keep asks for them"):
        model(**given, skip_logits=True, logits_to_keep=2)


def test_outputs_are_tuples_where_those_are_asked_for() -> None:
    model = convert()
    loss = model(**inputs("llama"), use_cache=False).loss
    (alone,) = model(**inputs("llama"), use_cache=False, return_dict=False)
    assert torch.equal(alone, loss)
    model.config.return_dict = False
    assert torch.equal(model(**inputs("llama"))[0], loss)
    model.config.return_dict = True
    assert len(model(**inputs("llama"), output_hidden_states=True).hidden_states) == 3


def test_a_trainer_sees_the_models_own_signature() -> None:
    assert list(inspect.signature(convert().forward).parameters) == list(
        inspect.signature(make("llama").forward).parameters
    )


def test_a_hook_on_the_head_sees_the_logits() -> None:
    model, seen = convert(), []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    assert model(**inputs("llama")).logits is not None
    assert seen == [(3, 16, 64)]
    with pytest.raises(ValueError, match="lm_head has a hook"):
        model(**inputs("llama"), skip_logits=True)


def test_a_loss_of_the_users_own_is_called() -> None:
    model = convert()
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.sum() * 0 + vocab_size
    assert model(**inputs("llama")).loss == 64
    other = make("llama")
    other.loss_function = model.loss_function
    report = te.convert(other, parts="head")
    assert report.parts[0].reason == "the model's loss_function was replaced"


@pytest.mark.parametrize("label", [-1, 64, -2])
def test_a_label_of_no_class_makes_the_loss_nan(label: int) -> None:
    labels = tokens().clone()
    labels[0, 3] = label
    assert convert()(input_ids=tokens(), labels=labels).loss.isnan()


def test_in_fp8_under_a_recipe_unless_filtered_out() -> None:
    losses = []
    for kept in (False, True):
        model = make("llama", tie_word_embeddings=True)
        te.convert(model, recipe.Float8CurrentScaling(), parts="head", filter=lambda name, _, k=kept: not k)  # type: ignore[misc]
        losses.append(model(**inputs("llama")).loss)
    plain = make("llama", tie_word_embeddings=True)(**inputs("llama")).loss
    torch.testing.assert_close(losses[1], plain)
    assert 0 < abs(losses[0] - plain) < 0.05


def test_a_head_that_the_recipe_keeps_is_not_in_fp8() -> None:
    """bf16_last leaves the head in bf16, whoever computes it."""
    model = make("llama")
    report = te.convert(model, recipe.Float8CurrentScaling(bf16_last=1.0), parts=("linear", "head"))
    assert report.parts[0].after == "the loss without logits"
    torch.testing.assert_close(model(**inputs("llama")).loss, make("llama")(**inputs("llama")).loss)


def test_a_head_whose_weight_gradient_is_to_be_in_bf16_is_not_in_fp8() -> None:
    """The FP8 head casts for all three GEMMs, whether te.convert was told the recipe or an autocast has it."""
    asked, exact = recipe.Float8CurrentScaling(bf16_wgrad=True), make("llama")(**inputs("llama")).loss
    told, untold = make("llama"), convert()
    report = te.convert(told, asked, parts="head")
    assert report.parts[0].after == "the loss without logits"
    with te.autocast(recipe=asked):
        losses = [told(**inputs("llama")).loss, untold(**inputs("llama")).loss]
    for loss in losses:
        torch.testing.assert_close(loss, exact)
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        assert not torch.equal(untold(**inputs("llama")).loss, exact)


def test_what_has_a_bias_stays() -> None:
    model = make("llama")
    model.lm_head = nn.Linear(32, 64)
    report = te.convert(model, parts="head")
    assert "no Linear without a bias" in (report.parts[0].reason or "")
    assert model(**inputs("llama")).logits is not None


def test_a_second_derivative_is_refused() -> None:
    model = convert(num_hidden_layers=1)
    (gradient,) = torch.autograd.grad(model(**inputs("llama")).loss, model.lm_head.weight, create_graph=True)
    with pytest.raises(ValueError, match="create_graph=True asks for second derivatives"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_gradient_checkpointing_the_loss_is_the_same(reentrant: bool) -> None:
    hidden, weight = (draw(*sizes, seed=2).requires_grad_() for sizes in ((2, 16, 32), (64, 32)))
    labels = tokens(2)
    expected = torch.autograd.grad(causal_loss(hidden, weight, labels), (hidden, weight))
    checkpoint(causal_loss, hidden, weight, labels, use_reentrant=reentrant).backward()
    for leaf, gradient in zip((hidden, weight), expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


def test_float64_is_computed_in_float64() -> None:
    hidden, weight = draw(2, 5, 8).double().requires_grad_(), draw(16, 8, seed=2).double()
    labels = torch.randint(16, (2, 5), generator=torch.Generator().manual_seed(3))
    loss = causal_loss(hidden, weight, labels)
    logits = hidden @ weight.t()
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
