"""Weights in the Hugging Face GPT-2 layout: the same logits as transformers' GPT2LMHeadModel, both ways."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from weight_logits import VOCAB, assert_same, configure, logits, rewrite, tokens

from te_bench.models.recipe import float8_current_scaling
from te_bench.models.zoo.gpt import GPT, GPTConfig
from te_bench.training import weights

TINY = GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=24, vocab_size=VOCAB, dropout=0.1)


def a_model(seed: int = 0, *, padded: int | None = None, attention: str = "manual", **changes: Any) -> GPT:
    """Weights large enough that every part of the model shows in the logits; biases and gains too."""
    torch.manual_seed(seed)
    model = GPT(dataclasses.replace(TINY, **changes), attention=attention, padded_vocab_size=padded).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "ln_" in name or name.endswith("bias"):
                p.add_(torch.randn_like(p) * 0.3)
            elif "wte" not in name:
                p.mul_(8)
    return model


@pytest.mark.parametrize("padded", [None, 64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gelu", ["none", "tanh"])
def test_transformers_reads_what_we_save(tmp_path: Path, gelu: str, bias: bool, padded: int | None) -> None:
    transformers = pytest.importorskip("transformers")
    model = a_model(gelu=gelu, bias=bias, padded=padded)
    weights.save(model, tmp_path / "new" / "folder")
    theirs, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "new" / "folder", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert theirs.config.vocab_size == TINY.vocab_size
    assert_same(logits(model), logits(theirs))


@pytest.mark.parametrize("padded", [None, 64])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_we_read_what_transformers_saves(tmp_path: Path, activation: str, padded: int | None) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 24, "vocab_size": 51, "initializer_range": 0.2}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, activation_function=activation))
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if name.endswith("bias"):
                p.add_(torch.randn_like(p) * 0.3)
    theirs.save_pretrained(tmp_path)
    ours = weights.load(tmp_path, attention="math", padded_vocab_size=padded).eval()
    assert ours.config.gelu == {"gelu": "none", "gelu_new": "tanh"}[activation]
    assert_same(logits(ours), logits(theirs))
    labels = tokens()
    with torch.no_grad():
        loss = theirs.eval()(labels, labels=labels).loss
        assert ours(labels[:, :-1], labels[:, 1:]).item() == pytest.approx(loss.item(), rel=1e-5)
    if padded:
        assert (ours.transformer.wte.weight[51:] == 0).all()


@pytest.mark.parametrize("bias", [False, True])
def test_round_trip_is_bitwise(tmp_path: Path, bias: bool) -> None:
    model = a_model(bias=bias, padded=64)
    weights.save(model, tmp_path)
    again = weights.load(tmp_path, attention="manual", padded_vocab_size=128)
    assert again.config == dataclasses.replace(model.config, bias=True)  # zeros, if it had none
    there = dict(again.named_parameters())
    for name, p in model.named_parameters():
        assert torch.equal(there.pop(name)[: 51 if "wte" in name else None], p[: 51 if "wte" in name else None])
    assert bias or (len(there) == 13 and all((p == 0).all() for p in there.values()))
    assert again.lm_head.weight is again.transformer.wte.weight
    assert torch.equal(logits(again.eval()), logits(model))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_loading_draws_no_random_numbers_and_trains(tmp_path: Path) -> None:
    weights.save(a_model(), tmp_path)
    before = torch.get_rng_state()
    model = weights.load(tmp_path, padded_vocab_size=64, recipe=float8_current_scaling.RECIPE)
    assert torch.equal(torch.get_rng_state(), before)
    with model.eval().autocast():
        loss = model(tokens(), tokens())
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert (model.transformer.wte.weight.grad[51:] == 0).all()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    weights.save(a_model(bias=True), tmp_path)
    return tmp_path


def test_keys_as_openai_published_them(folder: Path) -> None:
    """No prefix, the causal masks stored beside the weights, and a head that repeats the embedding."""
    expected = logits(weights.load(folder, attention="manual").eval())

    def published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 24, 24).tril() for i in range(2)}
        masks |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
        return {**found, **masks, "lm_head.weight": found["wte.weight"].clone()}

    rewrite(folder, published)
    assert torch.equal(logits(weights.load(folder, attention="manual").eval()), expected)


def test_several_files_under_an_index(folder: Path) -> None:
    expected = logits(weights.load(folder, attention="manual").eval())
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name].clone() for name in names if where[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    assert torch.equal(logits(weights.load(folder, attention="manual").eval()), expected)
    index.write_text(json.dumps({"weight_map": {**where, names[0]: "../elsewhere.safetensors"}}))
    with pytest.raises(ValueError, match="not safetensors beside it"):
        weights.load(folder)
    index.write_text(json.dumps({"weight_map": {**where, names[0]: "there-is-none.safetensors"}}))
    with pytest.raises(ValueError, match="there-is-none"):
        weights.load(folder)
    index.write_text("[]")
    with pytest.raises(ValueError, match="not an index"):
        weights.load(folder)


def test_a_pickle_is_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ValueError, match=r"no model\.safetensors; pytorch_model\.bin is a pickle"):
        weights.load(folder)


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


C_FC = "transformer.h.1.mlp.c_fc.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without(C_FC), rf"{C_FC} is missing"),
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
)
def test_tensors_that_do_not_fit_are_named(folder, change, said):
    rewrite(folder, change)
    with pytest.raises(ValueError, match=said):
        weights.load(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
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
)
def test_another_kind_of_model_is_named(folder: Path, changes: dict[str, Any], said: str) -> None:
    configure(folder, **changes)
    with pytest.raises(ValueError, match=said):
        weights.load(folder)


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
def test_broken_files_are_named(folder: Path, file: str, content: bytes | None, said: str) -> None:
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        weights.load(folder)


def test_a_folder_in_place_of_a_file_is_named(folder: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
        (folder / name).mkdir()
        with pytest.raises(ValueError, match=rf"cannot read .*{name}"):
            weights.load(folder)
