"""convert, on models of transformers: the same function, in FP8 near it, and their checkpoints."""

import copy
import functools
import io
from collections.abc import Iterator
from typing import Any

import families
import pytest
import torch
import torch.distributed as dist
from conversion_cases import RECIPES, error
from families import inputs, make, run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import te_bench.models as te
from te_bench.experiments.checks.gradients import SETTLE
from te_bench.models import fp8, recipe
from te_bench.models.conversion import convert

FAMILIES = ["gpt2", "llama", "t5"]
GIVEN = inputs("llama")


def logits(model: nn.Module) -> Tensor:
    out: Tensor = model(**GIVEN, use_cache=False).logits
    return out


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return run(model, GIVEN)[1]


def cosine(x: Tensor, y: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(x.flatten(), y.flatten(), dim=0).item()


ONE_OF_A_KIND = {type(choice): choice for choice in RECIPES}.values()
#: A Linear's output under NVFP4 is 14.5 % off, under E4M3 3.7 %.
NVFP4 = 4.0


@pytest.mark.parametrize(
    ("family", "choice"),
    [*(("llama", choice) for choice in ONE_OF_A_KIND), ("gpt2", RECIPES[0]), ("t5", RECIPES[0])],
)
def test_in_fp8_it_is_near_it(family: str, choice: recipe.Recipe) -> None:
    model = make(family, **({"feed_forward_proj": "relu"} if family == "t5" else {}))
    exact, grads = logits(model), gradients(model)
    convert(model, choice)
    for _ in range(SETTLE):  # delayed scaling begins with scale 1
        gradients(model)
    noise = NVFP4 if choice.nvfp4() else 1.0
    far = error(logits(model), exact)
    assert (0.15 if choice.nvfp4() else 5e-3) < far < 0.2 * noise
    for name, grad in gradients(model).items():
        near = cosine(grad, grads[name])
        assert near > 0, name
        assert (1 - near**2) ** 0.5 / near < 0.484 * noise, name  # the angle's tangent; without noise a cosine of 0.9
        assert 0.7 < (grad.norm() / grads[name].norm()).item() < (1.4 if noise == 1 else 2.0), name


@pytest.mark.parametrize(("family", "tied"), [("gpt2", "transformer.wte"), ("t5", "shared"), ("llama", None)])
def test_tied_weights_stay_tied_and_high_precision(family: str, tied: str | None) -> None:
    model: Any = make(family)
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
    original = make(family)
    model = copy.deepcopy(original)
    convert(model, RECIPES[0])
    assert list(model.state_dict()) == list(original.state_dict())
    other = make(family, seed=1)
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other), logits(original))
    gradients(model)
    gradients(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = make(family, seed=1)
    convert(again, RECIPES[0])
    again.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(logits(again), logits(model))


def test_experts_in_raw_parameters_are_counted() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.MixtralConfig(vocab_size=families.VOCAB, num_key_value_heads=1, num_local_experts=8, **sizes)
    model = transformers.MixtralForCausalLM(config)
    report = convert(model)
    experts = 2 * 8 * 3 * 32 * 64
    attention = 2 * (2 * 32 * 32 + 2 * 16 * 32)
    raw = [entry for entry in report.outside if "experts in one parameter, of which a token takes 2" in entry.reason]
    assert sum(entry.parameters for entry in raw) == experts
    assert sum(entry.multiplied or 0 for entry in raw) == experts // 4
    assert report.gemm_parameters == attention + families.VOCAB * 32
    assert report.flop_share == (attention + families.VOCAB * 32) / (attention + families.VOCAB * 32 + experts // 4)
    assert report.parameters == sum(p.numel() for p in model.parameters())
    tables = {entry.name for entry in report.outside if entry.multiplied == 0}
    assert tables == {"model.embed_tokens.weight"}


def test_a_conv1d_has_its_weight_transposed_and_the_report_says_so() -> None:
    model: Any = make("gpt2")
    before = model.transformer.h[0].attn.c_attn.weight
    before.requires_grad_(False)
    report = convert(model)
    layer = model.transformer.h[0].attn.c_attn
    assert torch.equal(layer.weight, before.t())
    assert layer.weight.is_contiguous()
    assert not layer.weight.requires_grad
    notes = {entry.name: entry.note for entry in report.converted}
    assert notes["transformer.h.0.attn.c_attn"] == "weight transposed, but not in the state dict: a new Parameter"
    assert notes["transformer.ln_f"] == ""


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("family", FAMILIES)
def test_what_would_not_be_reduced_over_ranks_is_converted_before_it_is_wrapped(family: str) -> None:
    plain: Any = make(family)
    model = nn.Sequential(DistributedDataParallel(plain))
    if family != "gpt2":  # its Parameters stay the same
        assert convert(model).converted
        return
    with pytest.raises(ValueError, match=r"Conv1D weights, .*: convert the model, then wrap it"):
        convert(model)
    assert not any(isinstance(module, te.Linear | te.LayerNorm) for module in model.modules())
    convert(plain)
    assert convert(model).found


@pytest.mark.usefixtures("plain_heads")
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("family", "parts"), [("gpt2", None), ("llama", None), ("llama", "all")])
def test_gradient_checkpointing_changes_no_bit(family: str, before: bool, own: bool, parts: str | None) -> None:
    """Whether it is enabled before convert or after, whoever enters the autocast, and in a copy."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    choice = RECIPES[0]
    straight: Any = make(family)
    again: Any = copy.deepcopy(straight)
    if before:
        again.gradient_checkpointing_enable()
    for model in (straight, again):
        te.convert(model, choice if own else None, **({"parts": parts} if parts else {}))
        model.train()
    again = copy.deepcopy(again)
    if not before:
        again.gradient_checkpointing_enable({"use_reentrant": True})
    layer = next(module for module in again.modules() if isinstance(module, GradientCheckpointingLayer))
    checkpoint, calls = layer._gradient_checkpointing_func, 0  # hooks would have the fused chain go layer by layer

    def counting(function: Any, *arguments: Any) -> Any:
        def compute(*given: Any) -> Any:
            nonlocal calls
            calls += 1
            return function(*given)

        return checkpoint(compute, *arguments)

    layer._gradient_checkpointing_func = counting
    for _ in range(2):
        found = []
        for model in (straight, again):
            with te.autocast(enabled=not own, recipe=choice):
                loss = model(**GIVEN, use_cache=False).loss
            model.zero_grad()
            loss.backward()
            found.append({name: p.grad for name, p in model.named_parameters()})
        assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())
    assert calls == 4
    again.gradient_checkpointing_disable()
    gradients(again)
    assert calls == 4


def test_a_checkpoint_function_of_the_users_own_stays() -> None:
    model: Any = make("llama")
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


@pytest.mark.slow
def test_compiled_it_computes_the_same_in_one_graph() -> None:
    """Where the user's autocast is around it: test_compile.py."""
    model = make("llama", num_hidden_layers=1)
    convert(model, RECIPES[2])
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch.compiler.reset()
    expected = logits(model)
    torch.testing.assert_close(logits(torch.compile(model, backend=backend)), expected, rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1
    assert not fp8.is_fp8_enabled()
