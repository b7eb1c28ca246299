"""convert: other people's models compute the same function, in FP8 when asked, and the report says what it did."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import te_bench.models as te
from te_bench.models import fp8, recipe
from te_bench.models.conversion import RMS_NORMS, Conversion, convert

VOCAB = 64
FAMILIES = ["gpt2", "llama", "t5"]
RECIPES = [recipe.DelayedScaling(amax_history_len=4), *(recipe.load(name) for name in recipe.names()[1:])]


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


def error(x: Tensor, exact: Tensor) -> float:
    return ((x - exact).norm() / exact.norm()).item()


def cosine(x: Tensor, y: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(x.flatten(), y.flatten(), dim=0).item()


# ---- the models of transformers


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


@pytest.mark.parametrize("choice", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_in_fp8_it_is_near_it(family: str, choice: recipe.Recipe) -> None:
    model = a_model(family)
    logits, grads = run(model), gradients(model)
    convert(model, choice)
    gradients(model)  # delayed scaling begins with scale 1
    far = error(run(model), logits)
    assert 5e-3 < far < 0.2
    for name, grad in gradients(model).items():
        assert cosine(grad, grads[name]) > 0.9, name
        assert 0.7 < (grad.norm() / grads[name].norm()).item() < 1.4, name


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


# ---- any model


class Tiny(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 64)
        self.down = nn.Linear(64, width, bias=False)

    def forward(self, x: Tensor, fail: BaseException | None = None, again: int = 0) -> Tensor:
        assert fp8.is_fp8_enabled() is isinstance(self.up, te.Linear)
        if fail is not None:
            raise fail
        if again:
            x = self(x, again=again - 1)
            assert fp8.is_fp8_enabled()
        out: Tensor = self.down(self.up(self.norm(x)).relu())
        return out


def an_input() -> Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(2))


def test_parameters_are_kept_so_optimizers_go_on() -> None:
    model = Tiny().bfloat16().eval()
    model.up.weight.requires_grad_(False)
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = torch.get_rng_state()
    convert(model, RECIPES[1])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p is before[name] for name, p in model.named_parameters())
    assert list(before) == [name for name, _ in model.named_parameters()]
    assert not any(module.training for module in model.modules())
    old = model.down.weight.detach().clone()
    model(an_input().bfloat16()).float().square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.down.weight, old)
    assert model.up.weight.grad is None


def test_the_report_is_a_table() -> None:
    model = nn.Sequential(*(Tiny() for _ in range(3)), nn.Linear(32, 10))
    report = convert(model)
    text = str(report)
    assert [line.split()[:4] for line in text.splitlines()[1:4]] == [
        ["*.norm", "3", "x", "LayerNorm"],
        ["*.up", "3", "x", "Linear"],
        ["*.down", "3", "x", "Linear"],
    ]
    assert "10 not divisible by 16 (pad=True converts it)" in text
    weights = 3 * 2 * 32 * 64
    total = weights + 3 * (64 + 64) + 32 * 10 + 10
    assert (report.gemm_parameters, report.parameters) == (weights, total)
    assert text.splitlines()[-1] == (
        f"9 of 10 layers converted; FP8 GEMMs read {weights:,} of {total:,} parameters ({weights / total:.1%})"
    )


def test_a_filter_chooses() -> None:
    asked = []

    def wanted(name: str, module: nn.Module) -> bool:
        asked.append((name, type(module)))
        return name.endswith("up")

    model = nn.Sequential(Tiny())
    report = convert(model, filter=wanted)
    assert asked == [("0.norm", nn.LayerNorm), ("0.up", nn.Linear), ("0.down", nn.Linear)]
    assert [entry.name for entry in report.converted] == ["0.up"]
    assert {(kept.name, kept.reason) for kept in report.kept} == {
        ("0.norm", "filtered out"),
        ("0.down", "filtered out"),
    }


def test_padding_is_exact_enough_to_ask_for() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 7))
    x = torch.randn(5, 33)
    expected = model(x)
    assert [kept.reason.split(" (")[0] for kept in convert(model).kept] == ["7 and 33 not divisible by 16"]
    convert(model, RECIPES[1], pad=True)
    assert isinstance(model[0], te.Linear)
    assert 1e-3 < error(model(x), expected) < 0.1


def test_a_layer_in_several_places_is_one_layer() -> None:
    layer = nn.Linear(32, 32)
    model = nn.Sequential(layer, nn.ReLU(), nn.Sequential(layer))
    report = convert(model)
    assert [entry.name for entry in report.converted] == ["0"]
    assert isinstance(model[0], te.Linear)
    assert model[0] is model[2][0]


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def with_forward_replaced() -> nn.Module:
    layer = nn.Linear(32, 32)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


def compiled() -> nn.Module:
    layer = nn.Linear(32, 32)
    layer.compile(backend="eager")
    return layer


def with_state_hook() -> nn.Module:
    layer = nn.Linear(32, 32)
    layer.register_state_dict_post_hook(lambda *args: None)
    return layer


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(32, 32))


STAYING: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "subclass": (lambda: Scaled(32, 32), "Scaled, a subclass of Linear"),
    "lazy": (lambda: nn.LazyLinear(32), "LazyLinear, a subclass of Linear"),
    "parametrised": (lambda: parametrizations.weight_norm(nn.Linear(32, 32)), "parametrised"),
    "weight_norm": (old_weight_norm, "weight_g, weight_v"),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(32, 32), "weight", 0.5), "weight_mask, weight_orig"),
    "replaced": (with_forward_replaced, "its forward was replaced"),
    "compiled": (compiled, "its forward was replaced, or compiled"),
    "state hook": (with_state_hook, "hooks on its state dict"),
    "float64": (lambda: nn.Linear(32, 32).double(), "torch.float64"),
    "odd": (lambda: nn.Linear(32, 24), "24 not divisible by 16"),
    "no weight": (lambda: nn.LayerNorm(32, elementwise_affine=False), "elementwise_affine=False"),
    "two dimensions": (lambda: nn.LayerNorm((4, 32)), "normalises over 2 dimensions"),
    "eps": (lambda: nn.RMSNorm(32), "eps=None"),
}


@pytest.mark.parametrize("case", STAYING)
def test_what_stays_says_why(case: str) -> None:
    make, why = STAYING[case]
    layer = make()
    model = nn.Sequential(layer, nn.Linear(32, 32))
    report = convert(model)
    assert model[0] is layer
    assert isinstance(model[1], te.Linear)
    assert why in report.kept[0].reason
    assert [kept.name for kept in report.kept] == ["0"]


def test_the_projection_inside_pytorchs_attention_stays() -> None:
    model = nn.Sequential(nn.MultiheadAttention(32, 2))
    report = convert(model)
    assert [kept.name for kept in report.kept] == ["0.out_proj"]
    assert "NonDynamicallyQuantizableLinear" in report.kept[0].reason


def test_a_weight_in_two_linears_stays_in_both() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    assert [kept.reason for kept in convert(model).kept] == [
        "its weight is also 1.weight",
        "its weight is also 0.weight",
    ]


def test_norms_without_bias_and_rms_norms() -> None:
    model = nn.Sequential(nn.LayerNorm(32, eps=1e-2, bias=False), nn.RMSNorm(32, eps=1e-2))
    nn.init.normal_(model[0].weight)
    nn.init.normal_(model[1].weight)
    x = an_input() * 0.1
    expected, keys = model(x), list(model.state_dict())
    convert(model)
    assert [type(layer) for layer in model] == [te.LayerNorm, te.RMSNorm]
    torch.testing.assert_close(model(x), expected)
    assert list(model.state_dict()) == keys


def test_hooks_go_with_the_layer_and_their_handles_still_remove_them() -> None:
    model = Tiny()
    seen: list[str] = []
    handles = [
        model.up.register_forward_pre_hook(lambda module, args: seen.append("before")),
        model.up.register_forward_hook(lambda module, args, out: seen.append(type(module).__module__)),
        model.up.register_full_backward_hook(lambda module, dx, dy: seen.append("backward")),
    ]
    model.up.note = "mine"
    convert(model, RECIPES[1])
    model(an_input().requires_grad_()).sum().backward()
    assert seen == ["before", "te_bench.models.modules.linear", "backward"]
    assert model.up.note == "mine"
    for handle in handles:
        handle.remove()
    model(an_input()).sum().backward()
    assert len(seen) == 3


def test_twice_is_once() -> None:
    model = Tiny()
    convert(model, RECIPES[0])
    layers, expected = list(model.modules()), model(an_input())
    report = convert(model, RECIPES[1])
    assert report.converted == report.kept == ()
    assert all(a is b for a, b in zip(model.modules(), layers, strict=True))
    assert not torch.equal(model(an_input()), expected)  # the recipe is the second one's
    assert type(model).__mro__.count(Tiny) == 1


# ---- under a recipe of its own


@pytest.mark.parametrize("failure", [RuntimeError("no"), KeyboardInterrupt()], ids=repr)
def test_autocast_is_left_whatever_happens(failure: BaseException) -> None:
    model = Tiny()
    convert(model, RECIPES[0])
    for _ in range(2):
        with pytest.raises(type(failure)):
            model(an_input(), fail=failure)
        assert not fp8.is_fp8_enabled()
        model(an_input(), again=2).sum().backward()
        assert not fp8.is_fp8_enabled()
    assert fp8._depth == 0
    assert te.numerics(model)["up"]["input"]["scale"] != 1.0


def test_without_a_recipe_the_users_autocast_decides() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    expected = model(an_input())
    convert(model)
    assert torch.equal(model(an_input()), expected)
    with te.autocast(recipe=RECIPES[1]):
        near = model(an_input())
    assert 1e-3 < error(near, expected) < 0.1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_run_in_fp8_too(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model = Tiny()
    convert(model, RECIPES[0])
    for _ in range(2):
        model(an_input()).sum().backward()
    other = duplicate(model)
    assert torch.equal(other(an_input()), model(an_input()))
    assert isinstance(other, Tiny)
    other(an_input()).sum().backward()
    assert other.get_parameter("up.weight") is not model.up.weight


@pytest.mark.parametrize("eager", [True, False])
def test_pytorchs_encoder_layer_does_not_pass_fp8_by(eager: bool) -> None:
    """In inference its fast path reads the weights of its linear layers itself."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    x = an_input()[None]
    with torch.no_grad():
        expected = model(x)
        convert(model)
        torch.testing.assert_close(model(x), expected)
        with te.autocast(enabled=eager, recipe=RECIPES[1]):
            far = error(model(x), expected)
    assert (far > 1e-3) is eager
    assert far < 0.1


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


# ---- what cannot be


class Impossible(recipe.Float8CurrentScaling):
    def unsupported(self, device: str, capability: tuple[int, int] | None) -> str | None:
        return f"not on {device}"


@pytest.mark.parametrize(
    ("model", "choice", "why"),
    [
        (nn.Linear(32, 32), None, "wrap it"),
        (nn.RMSNorm(32), None, "wrap it"),
        (Scaled(32, 32), None, "a Scaled is one"),
        ("gpt2", None, "nn.Module, got str"),
        (Tiny(), "delayed", "'delayed' is no recipe"),
        (Tiny(), Impossible(), "not on cpu"),
    ],
    ids=["linear", "norm", "subclass", "a name", "no recipe", "device"],
)
def test_what_cannot_be_is_said_before_anything_changes(model: Any, choice: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        convert(model, choice)
    if isinstance(model, Tiny):
        assert type(model) is Tiny
        assert type(model.up) is nn.Linear


@pytest.mark.gpu
def test_a_gpu_without_fp8_is_named_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tiny().cuda()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with pytest.raises(ValueError, match=r"this GPU has 8\.0"):
        convert(model, recipe.DelayedScaling())
    assert type(model.up) is nn.Linear
    assert isinstance(convert(model, recipe.DelayedScaling(emulate=True)), Conversion)


@pytest.mark.gpu
@pytest.mark.parametrize("choice", RECIPES, ids=lambda r: type(r).__name__)
def test_on_a_gpu_it_trains(choice: recipe.Recipe) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).cuda().bfloat16()
    x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    expected = model(x)
    report = convert(model, choice)
    assert len(report.converted) == 3
    model(x).float().square().sum().backward()
    assert 1e-3 < error(model(x).float(), expected.float()) < 0.1
    assert all(p.grad is not None and p.grad.isfinite().all().item() for p in model.parameters())
