"""Weights in the Hugging Face layout: transformers' logits both ways, round trips, shards, every refusal."""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from weight_logits import VOCAB, assert_same, configure, logits, rewrite, tokens

from te_bench.models import decoder
from te_bench.models.configs import DecoderConfig, GPTConfig, LlamaConfig, RopeScaling
from te_bench.models.recipe import float8_current_scaling
from te_bench.models.zoo.llama import Llama
from te_bench.training import weights

GPT2 = GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=24, vocab_size=VOCAB, dropout=0.1)
LLAMA = LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,  # not 32 / 4
    block_size=24,
    vocab_size=VOCAB,
    rope_theta=500.0,
    rms_norm_eps=1e-3,
)
SCALED = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
LLAMA_3 = {"rope_type": "llama3", **dataclasses.asdict(SCALED)}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"config": GPT2, "gelu": "none", "bias": True},
    "gpt2-tanh": {"config": GPT2, "gelu": "tanh", "bias": True},
    "llama": {},
    "llama-scaled": {"rope_scaling": SCALED},
    "llama-tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "qwen2": {"attention_bias": True, "tie_word_embeddings": True},
    "qwen3": {"qk_norm": True, "num_key_value_heads": 1},
    "qwen3-scaled": {"qk_norm": True, "rope_scaling": SCALED},
}
WITHOUT_BIAS = {kind: {"config": GPT2, "gelu": kind, "bias": False} for kind in ("none", "tanh")}


def a_model(
    config: DecoderConfig = LLAMA, *, padded: int | None = None, seed: int = 0, **changes: Any
) -> decoder.Decoder:
    """Weights large enough that every part of the model shows in the logits; biases and gains too."""
    torch.manual_seed(seed)
    config = dataclasses.replace(config, **changes)
    model = decoder.build(config, attention="manual", padded_vocab_size=padded).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.3)
            elif p is not model.tables().tokens.weight:
                p.mul_(8)
    return model


@pytest.mark.parametrize("padded", [None, 64])
@pytest.mark.parametrize("family", FAMILIES | WITHOUT_BIAS)
def test_transformers_reads_what_we_save(tmp_path: Path, family: str, padded: int | None) -> None:
    transformers = pytest.importorskip("transformers")
    model = a_model(padded=padded, **(FAMILIES | WITHOUT_BIAS)[family])
    folder = tmp_path / "new" / "folder"
    weights.save(model, folder)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert theirs.config.model_type == ("gpt2" if family in WITHOUT_BIAS else family.partition("-")[0])
    assert theirs.config.vocab_size == VOCAB
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert_same(logits(model), logits(theirs))


def a_transformer(family: str, **changes: Any) -> Any:
    """A small random model of transformers, its gains and biases random too."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 24}
    if family != "gpt2":
        sizes |= {"intermediate_size": 48, "num_key_value_heads": 2}
    config = transformers.AutoConfig.for_model(
        family, **{**sizes, "vocab_size": 51, "initializer_range": 0.2, **changes}
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.3)
    return model


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {"activation_function": "gelu"}),
        ("gpt2", {"activation_function": "gelu_new"}),
        ("llama", {}),
        ("llama", {"rope_theta": 300.0, "rms_norm_eps": 1e-2, "head_dim": 16, "tie_word_embeddings": True}),
        ("llama", {"rope_scaling": LLAMA_3, "num_key_value_heads": None}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {}),  # a window of 4096 tokens hides none of 24
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 24}),
        ("qwen3", {}),
        ("qwen3", {"rope_scaling": LLAMA_3, "head_dim": 6}),
    ],
)
@pytest.mark.parametrize("form", ["as transformers writes it", "in the older form"])
def test_we_read_what_transformers_saves(tmp_path: Path, family: str, changes: dict[str, Any], form: str) -> None:
    """The older form has rope_theta and rope_scaling in place of rope_parameters."""
    theirs = a_transformer(family, **changes)
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if form == "in the older form" and "rope_parameters" in config:
        rope = config.pop("rope_parameters")
        theta = rope.pop("rope_theta")
        configure(tmp_path, rope_parameters=..., rope_theta=theta, rope_scaling=rope if len(rope) > 1 else None)
    for padded in (None, 64):
        ours = weights.load(tmp_path, attention="math", padded_vocab_size=padded).eval()
        assert_same(logits(ours), logits(theirs))
        head = ours.tables().head.weight
        assert (head is ours.tables().tokens.weight) == theirs.config.tie_word_embeddings
        assert (head[51:] == 0).all()
    if family == "gpt2":
        assert ours.config.gelu == {"gelu": "none", "gelu_new": "tanh"}[changes["activation_function"]]
    labels = tokens()
    with torch.no_grad():
        loss = theirs.eval()(labels, labels=labels).loss
        assert ours(labels[:, :-1], labels[:, 1:]).item() == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("shard_bytes", [10**9, 40_000, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_bitwise(tmp_path: Path, family: str, shard_bytes: int) -> None:
    model = a_model(padded=64, **FAMILIES[family])
    weights.save(model, tmp_path, shard_bytes=shard_bytes)
    assert (tmp_path / "model.safetensors").exists() == (shard_bytes == 10**9)
    again = weights.load(tmp_path, attention="manual", padded_vocab_size=128).eval()
    assert again.config == model.config
    there = dict(again.named_parameters())
    for name, p in model.named_parameters():
        rows = 51 if model.has_padding(p) else len(p)
        assert torch.equal(there.pop(name)[:rows], p[:rows])
    assert not there
    assert torch.equal(logits(again), logits(model))


def test_a_gpt2_without_biases_is_saved_with_zeros(tmp_path: Path) -> None:
    model = a_model(GPT2, padded=64)
    weights.save(model, tmp_path)
    again = weights.load(tmp_path, attention="manual", padded_vocab_size=128).eval()
    assert again.config == dataclasses.replace(model.config, bias=True)
    there = {name: p for name, p in again.named_parameters() if name not in dict(model.named_parameters())}
    assert len(there) == 13
    assert all((p == 0).all() for p in there.values())
    assert torch.equal(logits(again), logits(model))


def test_loading_draws_no_random_numbers_and_trains(tmp_path: Path) -> None:
    weights.save(a_model(GPT2), tmp_path)
    before = torch.get_rng_state()
    model = weights.load(tmp_path, padded_vocab_size=64, recipe=float8_current_scaling.RECIPE)
    assert torch.equal(torch.get_rng_state(), before)
    with model.eval().autocast():
        loss = model(tokens(), tokens())
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert (model.tables().tokens.weight.grad[51:] == 0).all()


# Shards.


def test_shards_are_of_the_given_size_and_all_in_the_index(tmp_path: Path) -> None:
    model = a_model()
    weights.save(model, tmp_path, shard_bytes=40_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    sizes = []
    for file in files:
        tensors = load_file(tmp_path / file)
        assert {key for key, name in index["weight_map"].items() if name == file} == set(tensors)
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
    assert 1 < len(files) < 6
    assert max(sizes) <= 40_000
    assert sum(sizes) == index["metadata"]["total_size"] == 4 * sum(p.numel() for p in model.parameters())


def test_transformers_reads_shards_and_we_read_its_own(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = a_model(tie_word_embeddings=True, rope_scaling=SCALED)
    weights.save(model, tmp_path / "ours", shard_bytes=40_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert_same(logits(model), logits(theirs))
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 1
    again = weights.load(tmp_path / "theirs", attention="manual").eval()
    assert torch.equal(logits(again), logits(model))


def test_an_index_that_names_what_is_not_there_or_is_none_is_told(tmp_path: Path) -> None:
    weights.save(a_model(), tmp_path, shard_bytes=40_000)
    index = tmp_path / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    for content, said in (
        ({"weight_map": {**where, K: "../elsewhere.safetensors"}}, "not safetensors beside it"),
        ({"weight_map": {**where, K: "there-is-none.safetensors"}}, "has no there-is-none.* names: fetch the"),
        ([], "not an index"),
    ):
        index.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=said):
            weights.load(tmp_path)


def test_tied_tables_may_hold_nan(tmp_path: Path) -> None:
    """Those of a training that diverged are no other model's."""
    model = a_model(tie_word_embeddings=True)
    with torch.no_grad():
        model.tables().tokens.weight[3, 4] = torch.nan
    weights.save(model, tmp_path)
    rewrite(tmp_path, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].clone()})
    assert weights.load(tmp_path, attention="manual").tables().head.weight.isnan().sum() == 1


def test_a_model_that_no_memory_holds_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights.save(a_model(), tmp_path)
    configure(tmp_path, hidden_size=2**20, intermediate_size=2**20)

    def to_empty(self: Llama, device: Any) -> None:
        if str(device) == "cpu":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8796093022208 bytes.")

    monkeypatch.setattr(Llama, "to_empty", to_empty)  # some machines promise any memory
    with pytest.raises(ValueError, match="the model takes 26,390 GB in float32, and this machine has not as much"):
        weights.load(tmp_path)


@pytest.mark.parametrize("before", [10**9, 40_000, 1])
@pytest.mark.parametrize("after", [10**9, 40_000])
def test_a_later_save_replaces_the_whole(tmp_path: Path, before: int, after: int) -> None:
    """Files of the model before would be read in place of the new ones, or beside them."""
    (tmp_path / "tokenizer.json").write_text("{}")
    weights.save(a_model(num_hidden_layers=3), tmp_path, shard_bytes=before)
    model = a_model(seed=1)
    weights.save(model, tmp_path, shard_bytes=after)
    assert torch.equal(logits(weights.load(tmp_path, attention="manual").eval()), logits(model))
    alone = tmp_path / "alone"
    weights.save(model, alone, shard_bytes=after)
    names = {path.name for path in alone.iterdir()}
    assert {path.name for path in tmp_path.iterdir()} - {"alone", "tokenizer.json"} == names
    assert (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize("shard_bytes", [10**9, 40_000])
def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch, shard_bytes):
    weights.save(a_model(), tmp_path, shard_bytes=shard_bytes)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    right = weights.save_file

    def full(tensors: Any, path: Path, **more: Any) -> None:
        if "00001-of" in path.name:
            return right(tensors, path, **more)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        weights.save(a_model(seed=1), tmp_path, shard_bytes=shard_bytes)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("before", [10**9, 40_000])
@pytest.mark.parametrize("after", [10**9, 40_000])
def test_a_save_that_is_killed_leaves_no_mixture(tmp_path, monkeypatch, before, after):
    """Killed after any number of files: the old model, the new one, or a folder that is refused."""
    old, new = a_model(), a_model(seed=1)
    right, left = Path.replace, 0

    def replace(self: Path, target: Path) -> Path:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return right(self, target)

    refused = 0
    for files in range(8):
        folder = tmp_path / str(files)
        weights.save(old, folder, shard_bytes=before)
        left = files
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(Path, "replace", replace)
            weights.save(new, folder, shard_bytes=after)
        try:
            found = logits(weights.load(folder, attention="manual").eval())
        except ValueError:
            refused += 1
        else:
            assert any(torch.equal(found, logits(model)) for model in (old, new))
    assert refused < 8
    assert left >= 0  # the last save ended


def test_no_shard_has_no_bytes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shard_bytes is 0: give 1 or more"):
        weights.save(a_model(), tmp_path, shard_bytes=0)


# What does not fit.


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    weights.save(a_model(GPT2, bias=True), tmp_path)
    return tmp_path


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    weights.save(a_model(rope_scaling=SCALED), tmp_path)
    return tmp_path


def test_keys_as_openai_published_them(gpt2: Path) -> None:
    """No prefix, the causal masks stored beside the weights, and a head that repeats the embedding."""
    expected = logits(weights.load(gpt2, attention="manual").eval())

    def published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 24, 24).tril() for i in range(2)}
        masks |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
        return {**found, **masks, "lm_head.weight": found["wte.weight"].clone()}

    rewrite(gpt2, published)
    assert torch.equal(logits(weights.load(gpt2, attention="manual").eval()), expected)


def test_a_pickle_is_never_opened(gpt2: Path) -> None:
    (gpt2 / "model.safetensors").unlink()
    (gpt2 / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ValueError, match=r"no model\.safetensors; pytorch_model\.bin is a pickle"):
        weights.load(gpt2)


def test_half_precision_and_old_files_with_frequencies(llama: Path) -> None:
    found = logits(weights.load(llama, attention="manual").eval())
    halves = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}
    rewrite(llama, lambda tensors: {name: t.bfloat16() for name, t in tensors.items()} | halves)
    model = weights.load(llama, attention="manual").eval()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close(logits(model), found, rtol=0.2, atol=0.2)
    assert not torch.equal(logits(model), found)


C_FC = "transformer.h.1.mlp.c_fc.weight"
K = "model.layers.1.self_attn.k_proj.weight"
#: Of a folder: changes to its tensors, and what is said of them.
TENSORS: dict[str, list[tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]]] = {
    "gpt2": [
        (lambda t: {key: v for key, v in t.items() if key != C_FC}, rf"{C_FC} is missing"),
        (lambda t: {**t, "transformer.h.2.ln_1.weight": torch.ones(32)}, r"h\.2\.ln_1\.weight is unknown"),
        (lambda t: {**t, "score.weight": torch.ones(32)}, r"score\.weight is unknown"),
        (lambda t: {**t, C_FC: t[C_FC].t()}, r"\[128, 32\], not floating point \[32, 128\]"),
        (lambda t: {**t, C_FC: t[C_FC].flatten()}, r"\[4096\], not"),
        (lambda t: {**t, C_FC: t[C_FC].to(torch.int8)}, r"int8"),
        (
            lambda t: {**t, "transformer.wte.weight": torch.ones(64, 32)},
            r"wte\.weight is .*\[64, 32\], not .*\[51, 32\]",
        ),
        (lambda t: {**t, "wpe.weight": torch.ones(24, 32)}, "there twice"),
        (lambda t: {"nothing": torch.ones(1)}, "and 24 more"),
        (lambda t: {**t, "lm_head.weight": t["transformer.wte.weight"] + 1}, "head and token embedding are tied"),
    ],
    "llama": [
        (lambda t: {k: v for k, v in t.items() if k != K}, rf"{K} is missing"),
        (lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"}, r"lm_head\.weight is missing"),
        (lambda t: {**t, K: t[K][1:]}, rf"{K} is .*\[31, 32\], not floating point \[32, 32\]"),
        (lambda t: {**t, K.replace("weight", "bias"): torch.ones(32)}, r"k_proj\.bias is unknown"),
        (lambda t: {**t, "lm_head.weight": torch.ones(64, 32)}, r"\[64, 32\], not .*\[51, 32\]"),
        (lambda t: {**t, K[6:]: t[K].clone()}, "there twice"),
    ],
}


@pytest.mark.parametrize(("of", "change", "said"), [(of, *case) for of, cases in TENSORS.items() for case in cases])
def test_tensors_that_do_not_fit_are_named(of, change, said, request):
    folder = request.getfixturevalue(of)
    rewrite(folder, change)
    with pytest.raises(ValueError, match=said):
        weights.load(folder)


SETTINGS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "gpt2": [
        ({"model_type": "bert"}, "model_type is 'bert'; known: gpt2, llama, mistral, qwen2, qwen3"),
        ({"model_type": ["gpt2"]}, r"model_type is \['gpt2'\]"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
        ({"activation_function": "relu"}, "'relu'; known: gelu"),
        ({"activation_function": ["gelu"]}, "known: gelu"),
        ({"n_inner": 64}, "n_inner is 64"),
        ({"n_embd": 0}, "n_embd is 0"),
        ({"n_layer": True}, "n_layer is True"),
        ({"n_head": "4"}, "n_head is '4'"),
        ({"n_head": 5}, "no multiple"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"attn_pdrop": 0.2}, "give them one number"),
        ({"resid_pdrop": "x", "attn_pdrop": "x", "embd_pdrop": "x"}, "resid_pdrop"),
    ],
    "llama": [
        ({"attention_bias": True}, "a bias of o_proj, too"),
        ({"model_type": "qwen3", "attention_bias": True}, "a bias of o_proj, too"),
        ({"mlp_bias": True}, "mlp_bias is True; only False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ({"model_type": "mistral", "sliding_window": 23}, "sliding_window is 23 of 24 positions"),
        ({"model_type": "mistral", "max_position_embeddings": 32768}, "sliding_window is 4096 of 32768"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}, "sliding_window is 8 of 24"),
        ({"model_type": "qwen3", "use_sliding_window": True, "layer_types": 5}, "layer_types is 5; give a list"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn', .*known: default, llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type is 'linear'"),
        ({"rope_scaling": {"full_attention": LLAMA_3}}, r"rope_type is None, of \['full_attention'\]"),
        ({"rope_scaling": "llama3"}, "the rotary settings are 'llama3'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 without low_freq_factor, high_freq"),
        ({"rope_scaling": {**LLAMA_3, "factor": "8"}}, "factor is '8'"),
        ({"rope_scaling": {**LLAMA_3, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_theta": 0}, "rope_theta is 0: give a positive number"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ({"hidden_size": 0}, "hidden_size is 0; give positive integers"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads is '2'"),
        ({"model_type": "qwen3", "num_key_value_heads": ...}, "no multiple of num_key_value_heads 32"),
        ({"vocab_size": ...}, "vocab_size is None"),
        ({"model_type": "gemma"}, "model_type is 'gemma'; known: gpt2, llama, mistral, qwen2, qwen3"),
    ],
}


@pytest.mark.parametrize(("of", "changes", "said"), [(of, *case) for of, cases in SETTINGS.items() for case in cases])
def test_another_kind_of_model_is_named(of, changes, said, request):
    folder = request.getfixturevalue(of)
    configure(folder, **changes)
    with pytest.raises(ValueError, match=rf"config\.json: .*{said}"):
        weights.load(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_bias": True, "qk_norm": True}, "attention_bias with qk_norm: no model of transformers has both"),
        ({"hidden_size": 30, "head_dim": 8}, "hidden_size 30 is no multiple of num_attention_heads 4"),
    ],
)
def test_what_no_config_says_is_not_written(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        weights.save(a_model(**changes), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_what_is_absent_means_what_it_means_to_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    weights.save(a_model(num_key_value_heads=4, head_dim=8), tmp_path)
    names = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "tie_word_embeddings")
    configure(tmp_path, **dict.fromkeys(names, ...))
    ours = weights.load(tmp_path, attention="manual").eval()
    assert (ours.config.rms_norm_eps, ours.config.rope_theta) == (1e-6, 1e4)
    assert_same(logits(ours), logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)))


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", None, r"no config\.json"),
        ("config.json", b"{", "not JSON"),
        ("config.json", b"\xff\xfe", "not JSON"),
        ("config.json", b"[1]", "not a JSON object"),
        ("config.json", b"[" * 100_000, "not JSON"),
        ("model.safetensors", None, r"no model\.safetensors$"),
        ("model.safetensors", b"", "cannot read"),
        ("model.safetensors", b"\x00" * 100, "cannot read"),
    ],
)
def test_broken_files_are_named(gpt2: Path, file: str, content: bytes | None, said: str) -> None:
    (gpt2 / file).unlink()
    if content is not None:
        (gpt2 / file).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        weights.load(gpt2)


def test_a_folder_in_place_of_a_file_is_named(gpt2: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (gpt2 / name).unlink()
        (gpt2 / name).mkdir()
        with pytest.raises(ValueError, match=rf"cannot read .*{name}"):
            weights.load(gpt2)
