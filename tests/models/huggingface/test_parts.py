"""te.convert(parts=...): families of transformers by te-bench's kernels compute the same, and go on as models do."""

import copy
import importlib
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, GQA, VOCAB, assert_same, inputs, make, run, tokens
from torch import nn
from torch.overrides import TorchFunctionMode

import te_bench.models as te
from te_bench.models import recipe
from te_bench.models.conversion_parts import PARTS

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("plain_heads")

NO_ROTARY, NO_HEAD = "calls apply_rotary_pos_emb", "no model of transformers with an lm_head"
OTHERWISE, NO_BLOCKS = {"blocks": "compute otherwise than Llama"}, {"blocks": "no model of transformers in it has"}
#: What stays, and words of the reason.
STAYS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("phi3", "gemma"), OTHERWISE),
    "mixtral": {"mlp": "no module has the Linears", **OTHERWISE},
    "gemma2": {"attention": "caps the scores", "head": "not Llama's", **OTHERWISE},
    "gpt2": {"rotary": NO_ROTARY, **NO_BLOCKS},
    "bert": {"mlp": "no module has the Linears", "rotary": NO_ROTARY, "head": NO_HEAD, **NO_BLOCKS},
    "t5": {"attention": "bias of positions", "rotary": NO_ROTARY, "head": "not Llama's", **NO_BLOCKS},
    "vit": {"rotary": NO_ROTARY, "head": NO_HEAD, **NO_BLOCKS},
    "whisper": {"mlp": "another function", "rotary": NO_ROTARY, "head": NO_HEAD, **NO_BLOCKS},
}


ODD = """
from torch import nn


class Odd(nn.Module):
    def forward(self, x):
        text = '''
of a line that begins where the class does'''
# as does this comment
        return 2 * x if text else x
"""


def test_how_a_module_s_source_is_indented_is_no_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "oddly_indented.py").write_text(ODD)
    monkeypatch.syspath_prepend(tmp_path)
    model = make("llama")
    model.model.layers[0].mlp = importlib.import_module("oddly_indented").Odd()
    assert "attention: " in str(te.convert(model, parts="attention"))
    assert model.config._attn_implementation == "te_bench"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_the_same_and_the_report_says_what_stays(family: str) -> None:
    model = make(family)
    loss, gradients = run(model, inputs(family))
    parameters = {name: p for name, p in model.named_parameters() if ".c_" not in name}
    keys = list(model.state_dict())
    report = te.convert(model, parts="all")
    again, found = run(model, inputs(family))
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=0)
    assert_same(found, gradients, 1e-4)
    assert list(model.state_dict()) == keys
    assert all(model.get_parameter(name) is p for name, p in parameters.items())
    stays = {entry.part: entry.reason for entry in report.parts if entry.after is None}
    assert stays.keys() == STAYS.get(family, {}).keys()
    for part, word in STAYS.get(family, {}).items():
        assert word in (stays[part] or "")
        assert f"{part}: kept: {stays[part]}" in str(report)
    if not stays:
        assert str(report).endswith("by te-bench's kernels: 2 mlp, 2 rotary, 1 attention, 1 blocks, 1 head")
    if "mlp" not in stays:
        assert sum(entry.part == "mlp" for entry in report.parts) == (4 if family == "t5" else 2)


@pytest.mark.parametrize(
    ("family", "choice"),
    [
        ("llama", recipe.DelayedScaling(amax_history_len=4)),
        ("gpt2", recipe.RowwiseScaling()),
        ("phi3", recipe.Float8CurrentScaling()),
        ("vit", recipe.DelayedScaling(amax_history_len=4)),
    ],
)
def test_in_fp8_it_is_near_it(family: str, choice: Any) -> None:
    model = make(family)
    loss, gradients = run(model, inputs(family))
    te.convert(model, choice, parts="all")
    run(model, inputs(family))  # delayed scaling begins with scale 1
    near, found = run(model, inputs(family))
    assert 0 < abs(near - loss) < 0.05
    for name, gradient in gradients.items():
        if not name.endswith(("k_proj.bias", "key.bias")):  # 0 but for rounding
            cosine = nn.functional.cosine_similarity(found[name].flatten(), gradient.flatten(), dim=0)
            assert cosine > 0.9, name
            assert 0.7 < found[name].norm() / gradient.norm() < 1.4, name


def test_in_bf16_it_is_as_near_to_float32_as_the_model_itself() -> None:
    exact = make("llama")
    _, truth = run(exact, inputs("llama"))
    errors = []
    for parts in (None, "all"):
        model = copy.deepcopy(exact).bfloat16()
        if parts:
            te.convert(model, parts=parts)
        _, found = run(model, inputs("llama"))
        errors.append({name: (g.float() - truth[name]).norm() / truth[name].norm() for name, g in found.items()})
    for name, error in errors[1].items():
        assert error < 2 * errors[0][name] + 1e-3, name
        assert error < 0.1, name


@pytest.mark.parametrize("part", PARTS)
def test_each_part_alone(part: str) -> None:
    model = make("llama")
    loss, gradients = run(model, inputs("llama"))
    report = te.convert(model, parts=part)
    again, found = run(model, inputs("llama"))
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=0)
    assert_same(found, gradients, 1e-4)
    assert {entry.part for entry in report.parts} == {part} - {"linear", "norm"}
    linears = sum(isinstance(module, te.Linear) for module in model.modules())
    assert linears == (15 if part == "linear" else 0)
    assert (model(**inputs("llama")).logits is None) is (part == "head")


def test_without_parts_it_is_layers_as_before() -> None:
    model = make("llama")
    report = te.convert(model)
    assert not report.parts
    assert model.config._attn_implementation == "sdpa"
    assert type(model.model.layers[0].mlp).__mro__[1] is nn.Module
    assert len(report.converted) == 20


class Products(TorchFunctionMode):
    """The dtypes of grouped_mm's operands."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._grouped_mm:
            self.dtypes |= {args[0].dtype, args[1].dtype}
        return func(*args, **(kwargs or {}))


def test_experts_multiply_in_autocast_s_precision() -> None:
    """transformers leaves them in float32, which torch.autocast does not tell grouped_mm of."""
    model = make("mixtral")
    seen, losses, gradients = [], [], []
    for parts in (None, "experts"):
        if parts:
            te.convert(model, parts=parts)
        with Products() as products, torch.autocast("cpu", torch.bfloat16):
            loss, found = run(model, inputs("mixtral"))
        seen.append(products.dtypes)
        losses.append(loss)
        gradients.append(found)
    assert seen == [{torch.float32}, {torch.bfloat16}]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    for name, gradient in gradients[0].items():
        assert (gradients[1][name] - gradient).norm() < 0.1 * gradient.norm(), name


def test_experts_whose_weights_are_given_for_a_call_multiply_in_autocast_s_precision() -> None:
    """They are no parameters then."""
    model = make("mixtral")
    te.convert(model, parts="experts")
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    with Products() as products, torch.autocast("cpu", torch.bfloat16):
        torch.func.functional_call(model, weights, (), inputs("mixtral"))
    assert products.dtypes == {torch.bfloat16}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"intermediate_size": 60}, "multiples of 8, and it has 60"),
        ({"_experts_implementation": "eager"}, "'eager', not"),
    ],
)
def test_experts_that_stay_say_why(settings: dict[str, Any], reason: str) -> None:
    [first, _] = te.convert(make("mixtral", **settings), parts="experts").parts
    assert first.after is None
    assert reason in (first.reason or "")


def test_the_report_says_of_experts_what_they_are_and_of_no_recipe_that_nothing_is_fp8() -> None:
    lines = str(te.convert(make("mixtral"), parts="all")).splitlines()
    [row] = [line for line in lines if ".mlp.experts" in line]
    assert row.endswith("experts: in autocast's precision, by grouped_mm")
    assert ", 3 weights outside of layers; no recipe, so FP8 only under your te.autocast" in lines[-2]
    raw = [line for line in str(te.convert(make("mixtral"))).splitlines() if ".mlp.experts." in line]
    assert all("kept: 4 experts in one parameter" in line for line in raw)
    assert len(raw) == 2


def test_a_model_without_experts_is_told_where_they_were_asked_for() -> None:
    [part] = te.convert(make("llama"), parts=("linear", "experts")).parts
    assert part.reason == "it holds no experts that go by transformers' interface"
    assert not any(part.part == "experts" for part in te.convert(make("llama"), parts="all").parts)


def test_a_model_without_attention_is_given_none() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64, state_size=4)
    [part] = te.convert(transformers.MambaForCausalLM(config), parts="attention").parts
    assert part.after is None
    assert "it has no attention that goes by transformers' interface" in (part.reason or "")


BIGBIRD = {
    **{f"{side}_{size}": n for side in ("encoder", "decoder") for size, n in (("layers", 1), ("attention_heads", 2))},
    **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 32, "vocab_size": VOCAB, "max_position_embeddings": 32},
    **{"decoder_start_token_id": 0, "dropout": 0.0},
}


@pytest.mark.parametrize(
    ("model", "config", "settings", "reason"),
    [
        ("DogeForCausalLM", "DogeConfig", GQA, "its DogeAttention computes with the mask of attention"),
        (
            "BigBirdPegasusForConditionalGeneration",
            "BigBirdPegasusConfig",
            BIGBIRD,
            "transformers writes its attention out",
        ),
    ],
)
def test_an_attention_whose_masks_are_its_own_stays(model: str, config: str, settings: Any, reason: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**settings))
    given = {"input_ids": tokens(), "labels": tokens()}
    loss, gradients = run(made, given)
    stays = {part.part: part.reason or "" for part in te.convert(made, parts="all").parts}
    assert reason in stays["attention"]
    again, found = run(made, given)
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=0)
    assert_same(found, gradients, 1e-4)


@pytest.mark.parametrize("parts", ["mpl", ("linear", "mpl"), ()])
def test_an_unknown_part_is_named(parts: Any) -> None:
    model = make("llama")
    with pytest.raises(
        ValueError, match="of linear, norm, mlp, experts, rotary, attention, blocks, head; 'all' is all"
    ):
        te.convert(model, parts=parts)
    assert not any(isinstance(module, te.Linear) for module in model.modules())


def test_filters_by_name_and_size() -> None:
    model = make("llama")
    report = te.convert(model, parts="all", filter=lambda name, module: "layers.0" not in name)
    kept = [entry.name for entry in report.parts if entry.reason == "filtered out"]
    assert kept == ["model.layers.0.mlp", "model.layers.0.self_attn"]
    assert not isinstance(model.model.layers[0].mlp.up_proj, te.Linear)
    run(model, inputs("llama"))
    model = make("llama")
    te.convert(model, filter=te.larger_than(32))
    layer = model.model.layers[0]
    assert isinstance(layer.self_attn.q_proj, te.Linear)
    assert not isinstance(layer.self_attn.k_proj, te.Linear)
    assert isinstance(layer.input_layernorm, te.RMSNorm)


def test_a_tied_head_in_fp8_counts_as_read() -> None:
    model = make("llama", tie_word_embeddings=True)
    report = te.convert(model, recipe.Float8CurrentScaling(), parts="all")
    assert report.flop_share == 1
    assert not report.kept
    model = make("llama", tie_word_embeddings=True)
    report = te.convert(model, recipe.Float8CurrentScaling(), parts="all", filter=lambda name, _: name != "lm_head")
    assert [entry.name for entry in report.kept] == ["lm_head"]
    assert report.flop_share < 1
    assert model(**inputs("llama")).logits is None


def test_copies_and_pickles_compute_the_same() -> None:
    model = make("llama")
    te.convert(model, recipe.DelayedScaling(amax_history_len=4), parts="all")
    run(model, inputs("llama"))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other).__name__ == "LlamaForCausalLM"
        expected, found = run(copy.deepcopy(model), inputs("llama")), run(other, inputs("llama"))
        assert torch.equal(found[0], expected[0])
        assert all(torch.equal(found[1][name], g) for name, g in expected[1].items())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = make("llama", seed=1)
    te.convert(again, recipe.DelayedScaling(amax_history_len=4), parts="all")
    again.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(run(again, inputs("llama"))[0], run(model, inputs("llama"))[0])


def test_a_pickle_tells_transformers_of_the_attention() -> None:
    model = make("llama")
    te.convert(model, parts="attention")
    assert b"te_bench.models.huggingface.attention" in pickle.dumps(model)


def test_a_model_of_torch_alone_has_none_of_the_parts_and_works() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))
    report = te.convert(model, parts="all")
    assert {entry.part for entry in report.parts if entry.after is None} == {*PARTS} - {"linear", "norm", "experts"}
    assert "it holds no model of transformers" in str(report)
    assert model(torch.ones(2, 32)).shape == (2, 32)


def test_converting_twice_is_harmless() -> None:
    model = make("llama")
    te.convert(model, parts="all")
    loss, gradients = run(model, inputs("llama"))
    report = te.convert(model, parts="all")
    assert [entry.after for entry in report.parts if entry.part == "mlp"] == ["te's already"] * 2
    again, found = run(model, inputs("llama"))
    assert torch.equal(again, loss)
    assert_same(found, gradients, 0)


def test_what_is_raised_on_the_way_leaves_the_model_as_it_was() -> None:
    model = make("llama")
    before = {name: type(module) for name, module in model.named_modules()}
    loss, _ = run(model, inputs("llama"))

    def fail(name: str, module: nn.Module) -> bool:
        if name == "model.layers.1.self_attn":
            raise KeyError(name)
        return True

    with pytest.raises(KeyError):
        te.convert(model, parts="all", filter=fail)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert model.config._attn_implementation == "sdpa"
    assert not any("_te_mlp" in vars(module) for module in model.modules())
    assert torch.equal(run(model, inputs("llama"))[0], loss)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_saved_and_loaded_it_is_transformers_own(family: str, tmp_path: Path) -> None:
    model = make(family)
    cls: Any = type(model)
    te.convert(model, parts="all")
    model.save_pretrained(tmp_path)
    plain = cls.from_pretrained(tmp_path)
    assert plain.config._attn_implementation == "sdpa"
    ours = cls.from_pretrained(tmp_path, attn_implementation="te_bench")
    assert ours.config._attn_implementation == "te_bench"
    model.eval()
    expected = model(input_ids=tokens()).logits
    for other in (plain, ours):
        torch.testing.assert_close(other(input_ids=tokens()).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_is_made_from_the_class_of_a_converted_model_is_transformers_own(family: str, tmp_path: Path) -> None:
    model = make(family)
    plain, config = copy.deepcopy(model), copy.deepcopy(model.config)
    te.convert(model, recipe.DelayedScaling(), parts="all")
    cls: Any = type(model)
    model.save_pretrained(tmp_path)
    made = cls(config)
    made.load_state_dict(plain.state_dict())
    expected, gradients = run(plain, inputs(family))
    for other in (made, cls.from_pretrained(tmp_path).train()):
        loss, found = run(other, inputs(family))
        torch.testing.assert_close(loss, expected)
        assert_same(found, gradients, 1e-5)
        with pytest.raises(ValueError, match="skip_logits=True, but the model was not converted"):
            other(**inputs(family), skip_logits=True)
        assert "recipe, so FP8 only under your te.autocast" in str(te.convert(other))
    base = type(model.base_model)(config)
    assert base(tokens()).last_hidden_state.shape == (*tokens().shape, 32)
    assert not any(getattr(base, "te_linears", list)())
    mlp = type(model.model.layers[0].mlp)(config) if family == "llama" else type(model.transformer.h[0].mlp)(64, config)
    assert mlp(torch.randn(3, 32)).shape == (3, 32)
    assert mlp.te_stacks() == []


@pytest.mark.parametrize(
    ("family", "tied", "choice"),
    [
        ("llama", False, None),
        ("llama", False, recipe.DelayedScaling(amax_history_len=4)),
        ("llama", True, recipe.DelayedScaling(amax_history_len=4)),
        ("gpt2", True, None),
    ],
    ids=["its own", "its own in FP8", "tied in FP8", "tied"],
)
def test_a_resized_vocabulary_keeps_the_head_converted(family: str, tied: bool, choice: Any) -> None:
    plain = make(family, tie_word_embeddings=tied)
    model = copy.deepcopy(plain)
    te.convert(model, choice, parts="all")
    run(model, inputs(family))
    head, model = model.lm_head, copy.deepcopy(model)
    for size in (80, 80, 48):
        torch.manual_seed(0)
        embedding = model.resize_token_embeddings(size)
        assert embedding is model.get_input_embeddings()
        assert (model.config.vocab_size, len(embedding.weight), len(model.lm_head.weight)) == (size, size, size)
        torch.manual_seed(0)
        plain.resize_token_embeddings(size)
    assert type(model.lm_head) is type(head)
    assert (model.lm_head.weight is embedding.weight) is tied
    assert model.lm_head.weight.requires_grad
    again = copy.deepcopy(plain)
    te.convert(again, choice, parts="all")
    given = {name: t.clamp(max=47) for name, t in inputs(family).items()}
    for one in (model, again):
        assert one(**given).logits is None
        run(one, given)
    (loss, gradients), (wanted, expected) = run(model, given), run(again, given)
    torch.testing.assert_close(loss, wanted, rtol=1e-5 if choice is None else 0.02, atol=0)
    assert gradients.keys() == expected.keys()
    assert {name: g.shape for name, g in gradients.items()} == {name: g.shape for name, g in expected.items()}


def test_a_head_of_layers_alone_is_resized_with_its_bias_and_stays_frozen() -> None:
    model = make("phi3")
    model.lm_head = torch.nn.Linear(32, 64)
    model.lm_head.requires_grad_(False)
    te.convert(model)
    before = copy.deepcopy(model.lm_head)
    model.resize_token_embeddings(96, mean_resizing=False)
    assert model.lm_head.extra_repr() == "in_features=32, out_features=96, bias=True"
    assert torch.equal(model.lm_head.weight[:64], before.weight)
    assert torch.equal(model.lm_head.bias[:64], before.bias)
    assert not any(p.requires_grad for p in (model.lm_head.weight, model.lm_head.bias))
    assert model(**inputs("phi3")).logits.shape == (3, 16, 96)


def test_generation_goes_on_as_before() -> None:
    model = make("llama").eval()
    padded = torch.ones(3, 6, dtype=torch.int64)
    padded[0, :2] = 0
    asked: list[dict[str, Any]] = [{}, {"attention_mask": padded}, {"cache_implementation": "static"}]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = [model.generate(tokens()[:, :6], **options, **more) for more in asked]
    te.convert(model, parts="all")
    for more, before in zip(asked, expected, strict=True):
        assert torch.equal(model.generate(tokens()[:, :6], **options, **more), before)
    te.convert(model, recipe.DelayedScaling())
    assert model.generate(tokens()[:, :6], **options).shape == expected[0].shape


def test_compiled_it_computes_the_same() -> None:
    model = make("llama", num_hidden_layers=1)
    te.convert(model, parts="all")
    loss, gradients = run(model, inputs("llama"))
    torch.compiler.reset()
    again, found = run(torch.compile(model, backend="aot_eager"), inputs("llama"))
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=0)
    assert_same({name.removeprefix("_orig_mod."): g for name, g in found.items()}, gradients, 1e-4)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["gate_proj", "down_proj"]])
def test_lora_before_convert_trains_its_own_weights_alone(targets: list[str]) -> None:
    peft = pytest.importorskip("peft")
    plain = peft.get_peft_model(make("llama"), peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    model = copy.deepcopy(plain)
    loss, gradients = run(plain, inputs("llama"))
    report = te.convert(model, parts="all")
    again, found = run(model, inputs("llama"))
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=0)
    assert all("lora" in name for name in found)
    assert_same(found, gradients, 1e-4)
    mlps = [entry for entry in report.parts if entry.part == "mlp"]
    assert all((entry.after is None) is ("gate_proj" in targets) for entry in mlps)
    te.convert(model, recipe.Float8CurrentScaling(), parts="all")
    near, found = run(model, inputs("llama"))
    assert abs(near - loss) < 0.05
    assert found.keys() == gradients.keys()
