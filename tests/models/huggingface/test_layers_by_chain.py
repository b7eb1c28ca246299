"""te.convert(parts="all"): layers of transformers' Llama family as one fused chain compute what the parts compute."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from families import assert_same, inputs, make, run, tokens
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import te_bench.models as te
from te_bench.kernels.activation.backends import triton as activation_triton
from te_bench.kernels.linear_cross_entropy import kernels, tied
from te_bench.kernels.norm.backends import triton as norm_triton
from te_bench.kernels.quantize import history
from te_bench.kernels.rotary.backends import triton as rotary_triton
from te_bench.models import recipe
from te_bench.models.adopt import adopt
from te_bench.models.conversion_parts import PARTS
from te_bench.models.fused import segment
from te_bench.models.modules import layernorm_mlp, rotary
from te_bench.training.step import Optim, TrainStep

pytestmark = pytest.mark.usefixtures("plain_heads")

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LAYER_BY_LAYER = tuple(part for part in PARTS if part != "blocks")
DELAYED, CURRENT = recipe.DelayedScaling(amax_history_len=4), recipe.Float8CurrentScaling()


def goes_by_chain(model: Any, **given: Any) -> bool:
    fuses: bool = model.model.te_fuses(model.model.te_given((), {"input_ids": tokens(), **given}))
    return fuses


def passes(model: nn.Module, choice: recipe.Recipe | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The second training pass under autocast: delayed scaling begins with scale 1."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(1 if choice is None else 2):
            found = run(model, inputs("llama"))
    return found


@pytest.mark.parametrize("choice", [None, DELAYED, CURRENT], ids=["bf16", "delayed", "current"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_as_near_to_float32_as_layer_by_layer(family: str, choice: recipe.Recipe | None) -> None:
    exact = make(family)
    loss, truth = run(exact, inputs("llama"))
    losses, errors = [], []
    for parts in (LAYER_BY_LAYER, "all"):
        model = copy.deepcopy(exact)
        te.convert(model, choice, parts=parts)
        near, found = passes(model, choice)
        losses.append(abs(near - loss).item())
        errors.append(
            {name: ((g.float() - truth[name]).norm() / truth[name].norm()).item() for name, g in found.items()}
        )
    assert goes_by_chain(model)
    assert losses[1] < 2 * losses[0] + (0.01 if choice is None else 0.05)
    assert errors[1].keys() == truth.keys()
    for name, error in errors[1].items():
        if not name.endswith("k_proj.bias"):  # 0 but for rounding
            assert error < 2 * errors[0][name] + 0.01, name
            assert error < (0.1 if choice is None else 0.5), name


def test_the_kernels_of_a_gpu_interpreted_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for interpreted in (False, True):
        if interpreted:
            monkeypatch.setattr(segment, "backend", lambda x: norm_triton.BACKEND)
            for module in (segment, layernorm_mlp):
                monkeypatch.setattr(module, "activation_backend", lambda x: activation_triton.BACKEND)
            monkeypatch.setattr(rotary, "backend", lambda x: rotary_triton.BACKEND)
            for head in (kernels, tied):
                monkeypatch.setattr(head, "INTERPRETED", True)
        model = make("qwen2", num_hidden_layers=1)
        te.convert(model, DELAYED, parts="all")
        assert goes_by_chain(model)
        found.append(passes(model, DELAYED))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=0)
    assert_same(found[1][1], found[0][1], 1e-2)  # a number here and there may come to the other side of a midpoint


@pytest.mark.parametrize(
    "given",
    [
        {"attention_mask": torch.ones(3, 16).index_fill(1, torch.tensor([15]), 0)},
        {"position_ids": torch.arange(16)[None] + 3},
        {"output_hidden_states": True},
        {"use_cache": True},
        {"return_dict": False},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_it_has_not_goes_layer_by_layer(given: dict[str, Any]) -> None:
    by_layer = make("llama")
    model = copy.deepcopy(by_layer)
    te.convert(by_layer, parts=LAYER_BY_LAYER)
    te.convert(model, parts="all")
    assert goes_by_chain(model)
    assert goes_by_chain(model, attention_mask=torch.ones(3, 16))
    assert not goes_by_chain(model, **given)
    expected, found = (x.model(tokens(), **given) for x in (by_layer, model))
    assert type(found) is type(expected)
    assert len(found) == len(expected)
    assert torch.equal(found[0], expected[0])
    assert goes_by_chain(model)


@pytest.mark.parametrize(
    "inner", ["", ".self_attn", ".self_attn.k_proj", ".mlp", ".mlp.act_fn", ".mlp.up_proj", ".input_layernorm"]
)
def test_whoever_listens_to_a_module_hears_it(inner: str) -> None:
    model = make("llama")
    te.convert(model, parts="all")
    loss, gradients = run(model, inputs("llama"))
    heard: list[Any] = []
    handle = model.get_submodule(f"model.layers.1{inner}").register_forward_hook(lambda *_: heard.append(1))
    again, found = run(model, inputs("llama"))
    assert heard == [1]
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=0)
    assert_same(found, gradients, 1e-4)
    handle.remove()
    assert goes_by_chain(model)


class Doubled(nn.Module):
    """What it wraps, twice; other attributes are those of what it wraps, as of torch's wrappers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        made = self.inner(*args, **kwargs)
        return (2 * made[0], *made[1:]) if isinstance(made, tuple) else 2 * made


@pytest.mark.parametrize(
    ("name", "wrap", "by_chain"),
    [
        ("layers.1", Doubled, False),
        ("layers.1.self_attn", Doubled, False),
        ("layers.1.mlp", Doubled, False),
        ("norm", Doubled, False),
        ("embed_tokens", Doubled, True),
        ("embed_tokens", nn.Sequential, False),  # which has no weight to tell a dtype by
    ],
)
def test_what_was_wrapped_since_is_not_passed_by(name: str, wrap: Any, by_chain: bool) -> None:
    found = []
    for converted in (False, True):
        model = make("llama")
        if converted:
            te.convert(model, parts="all")
        model.model.set_submodule(name, wrap(model.model.get_submodule(name)))
        found.append(run(model, inputs("llama")))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=0)
    assert_same(found[1][1], found[0][1], 1e-4)
    assert goes_by_chain(model) == by_chain


@pytest.mark.parametrize(
    ("settings", "given", "by_chain"),
    [({"sliding_window": 4}, {}, True), ({"is_causal": False}, {}, False), ({}, {"is_causal": False}, False)],
    ids=["a window that Llama has not", "config.is_causal", "is_causal"],
)
def test_rows_see_what_transformers_says(settings: dict[str, Any], given: dict[str, Any], by_chain: bool) -> None:
    model = make("llama", **settings)
    loss, gradients = run(model, {**inputs("llama"), **given})
    te.convert(model, parts="all")
    assert goes_by_chain(model, **given) == by_chain
    again, found = run(model, {**inputs("llama"), **given})
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=0)
    assert_same(found, gradients, 1e-4)


def test_frozen_weights_have_no_gradients_and_the_others_theirs() -> None:
    model = make("llama")
    _, gradients = run(model, inputs("llama"))
    te.convert(model, parts="all")
    model.model.layers[0].requires_grad_(False)
    assert not goes_by_chain(model)
    _, found = run(model, inputs("llama"))
    assert_same(found, {name: g for name, g in gradients.items() if ".layers.0." not in name}, 1e-4)


def test_the_report_says_why_layers_stay() -> None:
    model = make("llama")
    report = te.convert(model, DELAYED, parts="all", filter=lambda name, _: name != "model.layers.1.self_attn.v_proj")
    assert "blocks: kept: some of its Linears stay as they are" in str(report)
    run(model, inputs("llama"))


def test_trained_by_the_chain_it_is_evaluated_layer_by_layer_with_the_same_scales() -> None:
    model = make("llama")
    te.convert(model, DELAYED, parts="all")
    for _ in range(3):
        run(model, inputs("llama"))
    model.eval()
    with torch.no_grad():
        by_chain = model(tokens(), use_cache=False).logits
        by_layer = model(tokens()).logits
    assert not goes_by_chain(model)
    # Only the order of sums differs: what is cast, is cast by the same scales.
    assert (by_layer - by_chain).norm() < 0.01 * by_chain.norm()


@pytest.mark.parametrize(
    ("parts", "length", "checkpointed"),
    [("all", 1, False), ("all", 8, True), (LAYER_BY_LAYER, 8, False)],
    ids=["one amax kept", "checkpointed", "the MLP alone"],
)
def test_trained_layer_by_layer_it_goes_on_side_by_side_with_the_scales_of_all(parts, length, checkpointed):
    """k's and up's weights are 16 times q's and gate's: by these' scales alone they would saturate."""
    model = make("llama")
    te.convert(model, recipe.DelayedScaling(amax_history_len=length), parts=parts)
    if checkpointed:
        model.gradient_checkpointing_enable()
    large = [x for name, x in model.named_modules() if name.endswith(("k_proj", "up_proj"))]
    with torch.no_grad():
        for layer in large:
            layer.weight.mul_(16)
    handles = [layer.register_forward_hook(lambda *_: None) for layer in large]
    for _ in range(2):
        run(model, inputs("llama"))
    before = te.numerics(model)
    for handle in handles:
        handle.remove()
    with te.record_numerics():
        run(model, inputs("llama"))
    for name, tensors in te.numerics(model).items():
        assert tensors["weight"].get("saturated", 0) <= 1, name  # the largest may round up
        for role, figures in tensors.items() if length > 1 else ():
            assert figures["amax"] >= before[name][role]["amax"], (name, role)


def test_side_by_side_they_load_the_scales_of_all() -> None:
    """q's and gate's weights, the first, are 16 times the others': by the scales of the last they would saturate."""
    model, other = make("llama"), make("llama")
    for one in (model, other):
        te.convert(one, recipe.DelayedScaling(amax_history_len=8), parts="all")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "q_proj" in name or "gate_proj" in name:
                p.mul_(16)
    handles = [layer.register_forward_hook(lambda *_: None) for layer in model.modules()]
    for _ in range(2):
        run(model, inputs("llama"))
    for handle in handles:
        handle.remove()
    run(other, inputs("llama"))  # by the chain
    other.load_state_dict(model.state_dict())
    with te.record_numerics():
        run(other, inputs("llama"))
    for name, tensors in te.numerics(other).items():
        assert tensors["weight"].get("saturated", 0) <= 1, name  # the largest may round up


@pytest.mark.parametrize("given", [{}, {"output_hidden_states": True}], ids=["by the chain", "layer by layer"])
def test_what_linears_share_is_moved_on_once_a_step(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, moved = make("llama"), []
    te.convert(model, DELAYED, parts="all")
    run(model, inputs("llama"))
    step = history.update
    monkeypatch.setattr(
        history, "update", lambda found, *args, **kwargs: moved.append(found) or step(found, *args, **kwargs)
    )
    run(model, {**inputs("llama"), **given})
    (histories,) = moved
    assert (
        len(histories) == len({x.data_ptr() for x in histories}) == 2 * 2 * 4
    )  # both ways, two layers, qkv o gate down


class Counted(TorchDispatchMode):
    """How often operators run while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("given", "options"), [({"output_hidden_states": True}, {}), ({}, {"pad_token_id": int(tokens()[0, 0])})]
)
def test_embedding_and_tied_head_have_one_gradient_made_for_both(given, options):
    model = make("llama", tie_word_embeddings=True, **options)
    loss, gradients = run(model, inputs("llama"))
    te.convert(model, parts="all")
    found = []
    for hooked in (False, True):  # whoever listens to the embedding hears it, and autograd sums
        handle = model.model.embed_tokens.register_forward_hook(lambda *_: None) if hooked else None
        with Counted() as counted:
            found.append(run(model, {**inputs("llama"), **given}))
        assert counted.calls["aten::embedding_dense_backward"] == hooked
        if handle is not None:
            handle.remove()
    for again, each in found:
        torch.testing.assert_close(again, loss, rtol=1e-5, atol=0)
        assert_same(each, gradients, 1e-4)


@pytest.mark.parametrize(
    ("choice", "accumulate", "tie"),
    [(None, 1, True), (DELAYED, 1, False), (DELAYED, 2, True), (CURRENT, 1, True)],
    ids=["bf16", "delayed", "in two", "current"],
)
def test_by_the_optimizers_copies_it_trains_the_same(choice: recipe.Recipe | None, accumulate: int, tie: bool) -> None:
    losses, gradients = [], []
    for optimizer in (None, "reference"):
        model = adopt(make("llama", tie_word_embeddings=tie), recipe=choice, parts="all")
        optim = Optim(learning_rate=1e-3, accumulate=accumulate)
        step = TrainStep(model, optim, precision="bf16" if choice is None else "fp8", mode="eager", optimizer=optimizer)
        losses.append(torch.stack([step(tokens(4), tokens(4).flip(1)) for _ in range(3)]))
        assert goes_by_chain(model.module)
        with Counted() as counted:
            gradients.append(step.gradients(tokens(4), tokens(4).flip(1))[1])
        assert counted.calls["aten::embedding_dense_backward"] == (0 if tie else accumulate)
    torch.testing.assert_close(*losses, rtol=0, atol=0.01 if choice is None else 0.05)
    assert losses[0][-1] < losses[0][0] - 0.01
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        found = gradients[1][name]
        assert nn.functional.cosine_similarity(gradient.flatten(), found.flatten(), dim=0) > (
            0.98 if choice is None else 0.9
        ), name
        assert 0.7 < found.norm() / gradient.norm() < 1.4, name
