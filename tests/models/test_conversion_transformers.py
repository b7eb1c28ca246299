"""convert, on models of transformers: the same function, in FP8 near it, and their checkpoints."""

import copy
import functools
import io
from typing import Any

import pytest
import torch
from conversion_cases import RECIPES, error
from torch import Tensor, nn

import te_bench.models as te
from te_bench.models import fp8, recipe
from te_bench.models.conversion import RMS_NORMS, convert

VOCAB = 64
FAMILIES = ["gpt2", "llama", "t5"]


def a_model(family: str, seed: int = 0, layers: int = 2) -> nn.Module:
    """A small one, with weights large enough that every layer shows in the logits."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    if family == "gpt2":
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(n_layer=layers, n_head=2, n_embd=32, vocab_size=VOCAB, n_positions=32, **off)
        model = transformers.GPT2LMHeadModel(config)
    elif family == "llama":
        sizes = {"num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1}
        config = transformers.LlamaConfig(hidden_size=32, intermediate_size=64, vocab_size=VOCAB, **sizes)
        model = transformers.LlamaForCausalLM(config)
    else:
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": layers, "num_heads": 2, "dropout_rate": 0.0}
        config = transformers.T5Config(vocab_size=VOCAB, decoder_start_token_id=0, tie_word_embeddings=True, **sizes)
        model = transformers.T5ForConditionalGeneration(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.2)
            else:
                p.copy_(torch.randn_like(p) * p.shape[-1] ** -0.5)
            if name.endswith(".q.weight"):
                p.mul_(0.25)  # T5 leaves attention unscaled: saturated, it makes any error large
    return model


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (4, 16), generator=torch.Generator().manual_seed(1))


def run(model: nn.Module) -> Tensor:
    out: Tensor = model(input_ids=tokens(), labels=tokens(), use_cache=False).logits
    return out


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(input_ids=tokens(), labels=tokens().flip(1), use_cache=False).loss.backward()
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        layer = model.get_submodule(name.rpartition(".")[0])
        was_conv1d = "c_" in name and isinstance(layer, te.Linear) and p.dim() == 2
        found[name] = p.grad.t() if was_conv1d else p.grad
    return found


def cosine(x: Tensor, y: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(x.flatten(), y.flatten(), dim=0).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_without_autocast_it_is_the_same_function(family: str) -> None:
    model = a_model(family)
    logits, grads = run(model), gradients(model)
    report = convert(model)
    torch.testing.assert_close(run(model), logits, rtol=1e-5, atol=1e-5)
    assert logits.std() > 0.1
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, grads[name], rtol=1e-4, atol=1e-5 * grads[name].abs().max().item())
    after = {entry.after for entry in report.converted}
    assert after == {"gpt2": {"Linear", "LayerNorm"}}.get(family, {"Linear", "RMSNorm"})


#: A Linear's output under NVFP4 is 14.5 % off, under E4M3 3.7 %.
NVFP4 = 4.0


@pytest.mark.parametrize("choice", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_in_fp8_it_is_near_it(family: str, choice: recipe.Recipe) -> None:
    model = a_model(family)
    logits, grads = run(model), gradients(model)
    convert(model, choice)
    gradients(model)  # delayed scaling begins with scale 1
    noise = NVFP4 if choice.nvfp4() else 1.0
    far = error(run(model), logits)
    assert (0.15 if choice.nvfp4() else 5e-3) < far < 0.2 * noise
    for name, grad in gradients(model).items():
        near = cosine(grad, grads[name])
        assert near > 0, name
        assert (1 - near**2) ** 0.5 / near < 0.484 * noise, name  # the angle's tangent; without noise a cosine of 0.9
        assert 0.7 < (grad.norm() / grads[name].norm()).item() < (1.4 if noise == 1 else 2.0), name


@pytest.mark.parametrize(("family", "tied"), [("gpt2", "transformer.wte"), ("t5", "shared"), ("llama", None)])
def test_tied_weights_stay_tied_and_high_precision(family: str, tied: str | None) -> None:
    model: Any = a_model(family)
    report = convert(model)
    reasons = {kept.name: kept.reason for kept in report.kept}
    if tied is None:
        assert not reasons
        assert isinstance(model.lm_head, te.Linear)
    else:
        assert f"its weight is also {tied}.weight" in reasons["lm_head"]
        assert list(reasons) == ["lm_head"]
        assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("family", FAMILIES)
def test_state_dicts_have_the_same_keys_and_load(family: str) -> None:
    original = a_model(family)
    model = copy.deepcopy(original)
    convert(model, RECIPES[0])
    assert list(model.state_dict()) == list(original.state_dict())
    if family == "llama":  # nothing is transposed there: the checkpoint is the original's
        other = a_model(family, seed=1)
        other.load_state_dict(model.state_dict())
        assert torch.equal(run(other), run(original))
    gradients(model)
    gradients(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = a_model(family, seed=1)
    convert(again, RECIPES[0])
    again.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(run(again), run(model))


def test_experts_in_raw_parameters_are_counted() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.MixtralConfig(vocab_size=VOCAB, num_key_value_heads=1, num_local_experts=8, **sizes)
    model = transformers.MixtralForCausalLM(config)
    report = convert(model)
    experts = 2 * 8 * 3 * 32 * 64
    attention = 2 * (2 * 32 * 32 + 2 * 16 * 32)
    raw = [entry for entry in report.outside if "experts in one parameter, of which a token takes 2" in entry.reason]
    assert sum(entry.parameters for entry in raw) == experts
    assert sum(entry.multiplied or 0 for entry in raw) == experts // 4
    assert report.gemm_parameters == attention + VOCAB * 32
    assert report.flop_share == (attention + VOCAB * 32) / (attention + VOCAB * 32 + experts // 4)
    assert report.parameters == sum(p.numel() for p in model.parameters())
    tables = {entry.name for entry in report.outside if entry.multiplied == 0}
    assert tables == {"model.embed_tokens.weight"}


def test_a_conv1d_has_its_weight_transposed_and_the_report_says_so() -> None:
    model: Any = a_model("gpt2")
    before = model.transformer.h[0].attn.c_attn.weight
    before.requires_grad_(False)
    report = convert(model)
    layer = model.transformer.h[0].attn.c_attn
    assert torch.equal(layer.weight, before.t())
    assert layer.weight.is_contiguous()
    assert not layer.weight.requires_grad
    notes = {entry.name: entry.note for entry in report.converted}
    assert notes["transformer.h.0.attn.c_attn"] == "weight transposed: a new Parameter"
    assert notes["transformer.ln_f"] == ""


def test_generation_goes_on_as_before() -> None:
    model: Any = a_model("gpt2")
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(tokens()[:, :4], **options)
    convert(model)
    assert torch.equal(model.generate(tokens()[:, :4], **options), expected)
    convert(model, RECIPES[0])
    assert model.generate(tokens()[:, :4], **options).shape == expected.shape
    assert model.__class__.__name__ == "GPT2LMHeadModel"


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_gradient_checkpointing_changes_no_bit(family: str, before: bool, own: bool) -> None:
    """Whether it is enabled before convert or after, whoever enters the autocast, and in a copy."""
    choice = RECIPES[0]
    straight: Any = a_model(family)
    again: Any = copy.deepcopy(straight)
    if before:
        again.gradient_checkpointing_enable()
    for model in (straight, again):
        convert(model, choice if own else None)
        model.train()
    again = copy.deepcopy(again)
    if not before:
        again.gradient_checkpointing_enable({"use_reentrant": True})
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    next(module for module in again.modules() if isinstance(module, te.Linear)).register_forward_hook(count)
    for _ in range(2):
        found = []
        for model in (straight, again):
            with te.autocast(enabled=not own, recipe=choice):
                loss = model(input_ids=tokens(), labels=tokens().flip(1), use_cache=False).loss
            model.zero_grad()
            loss.backward()
            found.append({name: p.grad for name, p in model.named_parameters()})
        assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())
    assert calls == 4
    again.gradient_checkpointing_disable()
    gradients(again)
    assert calls == 5


def test_a_checkpoint_function_of_the_users_own_stays() -> None:
    model: Any = a_model("llama")
    own = functools.partial(te.checkpoint, preserve_rng_state=False)
    model._set_gradient_checkpointing(True, own)
    convert(model)
    assert model.model.layers[0]._gradient_checkpointing_func is own


def test_code_from_before_transformers_4_35_enables_checkpointing_its_own_way() -> None:
    from transformers import LlamaConfig, PreTrainedModel

    class Old(PreTrainedModel):
        config_class = LlamaConfig
        supports_gradient_checkpointing = True

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layer = nn.Linear(32, 32)

        def _set_gradient_checkpointing(self, module: nn.Module, value: bool = False) -> None:  # type: ignore[override]
            if module is self:
                self.gradient_checkpointing = value

    model: Any = Old(LlamaConfig(hidden_size=32))
    convert(model)
    for enable, call in ((True, model.gradient_checkpointing_enable), (False, model.gradient_checkpointing_disable)):
        call()
        assert model.gradient_checkpointing is enable


@pytest.mark.parametrize("name", sorted(RMS_NORMS))
def test_known_norms_of_transformers_are_rms_norms(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    import importlib

    family = name.removesuffix("RMSNorm").removesuffix("LayerNorm").lower()
    cls = getattr(importlib.import_module(f"{transformers.__name__}.models.{family}.modeling_{family}"), name)
    norm = cls(32, eps=1e-3)
    nn.init.normal_(norm.weight)
    model = nn.Sequential(norm)
    x = torch.randn(5, 32) * 0.1
    expected = model(x)
    report = convert(model)
    assert isinstance(model[0], te.RMSNorm)
    assert report.converted[0].parameters == 0
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("own", [True, False])
def test_compiled_it_computes_the_same_in_one_graph(own: bool) -> None:
    model = a_model("llama", layers=1)
    convert(model, RECIPES[2] if own else None)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch.compiler.reset()
    with te.autocast(enabled=not own, recipe=RECIPES[2]):
        expected = run(model)
        torch.testing.assert_close(run(torch.compile(model, backend=backend)), expected, rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1
    assert not fp8.is_fp8_enabled()
