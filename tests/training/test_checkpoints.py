"""Checkpoint files: what is saved comes back, nanoGPT's files are read, and everything else is refused with its reason."""

import dataclasses
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from torch import Tensor

from te_bench.models import decoder, zoo
from te_bench.models import recipe as recipes
from te_bench.models.configs import CONFIGS, RopeScaling
from te_bench.models.zoo.gpt import GPT, GPTConfig
from te_bench.training import checkpoints, tokenizer, weights
from te_bench.training import corpus as corpora
from te_bench.training.corpus import Corpus
from te_bench.training.data import Batches
from te_bench.training.evaluation import perplexity
from te_bench.training.step import Optim, TrainStep

TINY = GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=24, vocab_size=51, dropout=0.1)
DELAYED = recipes.DelayedScaling()

#: The parameters that nanoGPT's model.py gives a GPT of one layer without biases.
NANOGPT = [
    "transformer.wte.weight",
    "transformer.wpe.weight",
    "transformer.h.0.ln_1.weight",
    "transformer.h.0.attn.c_attn.weight",
    "transformer.h.0.attn.c_proj.weight",
    "transformer.h.0.ln_2.weight",
    "transformer.h.0.mlp.c_fc.weight",
    "transformer.h.0.mlp.c_proj.weight",
    "transformer.ln_f.weight",
    "lm_head.weight",
]


def a_model(seed: int = 0, *, padded: int | None = None, recipe: Any = None, **changes: Any) -> GPT:
    torch.manual_seed(seed)
    model = GPT(dataclasses.replace(TINY, **changes), attention="manual", padded_vocab_size=padded, recipe=recipe)
    with torch.no_grad():
        for p in model.parameters():
            p.add_((p != 0) * torch.randn_like(p) * 0.1)  # the padding stays 0
    return model.eval()


def logits(model: GPT) -> Tensor:
    tokens = torch.randint(0, TINY.vocab_size, (3, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.logits(tokens)


def nanogpts(model: GPT, /, **changes: Any) -> dict[str, Any]:
    """What nanoGPT's train.py saves."""
    c = model.config
    names = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
    return {
        "model": model.state_dict(),
        "optimizer": torch.optim.AdamW(model.parameters()).state_dict(),
        "model_args": {name: getattr(c, name) for name in names},
        "iter_num": 2000,
        "best_val_loss": torch.tensor(1.47),
        "config": {"dataset": "shakespeare_char", "learning_rate": 1e-3, "compile": True},
        **changes,
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.save(nanogpts(a_model()), tmp_path / "ckpt.pt")
    return tmp_path / "ckpt.pt"


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 200)
    return corpora.prepare(f"text:{tmp_path / 'text.txt'}", "chars", cache=tmp_path / "cache")


# What is saved comes back.


@pytest.mark.parametrize("padded", [None, 64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gelu", ["none", "tanh"])
def test_a_round_trip_is_bitwise(tmp_path: Path, gelu: str, bias: bool, padded: int | None) -> None:
    model = a_model(gelu=gelu, bias=bias, padded=padded)
    checkpoints.save(model, tmp_path / "new" / "folder" / "mine.pt")
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["mine.pt"]
    before = torch.get_rng_state()
    found = checkpoints.load(tmp_path / "new" / "folder" / "mine.pt")
    again = found.build(attention="manual").eval()
    assert torch.equal(torch.get_rng_state(), before)
    assert found.config == again.config == model.config
    assert again.lm_head.weight is again.transformer.wte.weight
    assert torch.equal(logits(again), logits(model))
    assert (found.recipe, found.tokenizer, found.data_sha256, found.text_tokenizer()) == (None, None, None, None)


def test_nanogpt_could_read_it(tmp_path: Path) -> None:
    checkpoints.save(a_model(n_layer=1, padded=4096, recipe=DELAYED), tmp_path / "mine.pt")
    content = torch.load(tmp_path / "mine.pt", weights_only=True)
    assert sorted(content["model"]) == sorted(NANOGPT)
    head, embedding = (content["model"][name] for name in ("lm_head.weight", "transformer.wte.weight"))
    assert head.shape == (51, 32)
    assert head.data_ptr() == embedding.data_ptr()  # the tied head is written once
    assert set(content["model_args"]) == {"n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout"}
    parameters = sum(p.numel() for p in GPT(dataclasses.replace(TINY, n_layer=1)).parameters())
    assert (tmp_path / "mine.pt").stat().st_size < 4 * parameters + 2**14  # no padding


def test_the_tokenizer_and_the_text_travel_along(tmp_path: Path, corpus: Corpus) -> None:
    model = a_model(vocab_size=corpus.vocab)
    checkpoints.save(model, tmp_path / "mine.pt", recipe="rowwise_scaling", corpus=corpus, about={"seed": 3})
    found = checkpoints.load(tmp_path / "mine.pt")
    assert (found.recipe, found.tokenizer, found.data_sha256) == ("rowwise_scaling", "chars", corpus.sha256)
    own, theirs = found.text_tokenizer(), corpus.text_tokenizer()
    assert own is not None
    assert [ids.tolist() for ids in own.encode("to be")] == [ids.tolist() for ids in theirs.encode("to be")]
    assert torch.load(tmp_path / "mine.pt", weights_only=True)["te_bench"]["about"] == {"seed": 3}


def test_delayed_scalings_scales_come_back(tmp_path: Path) -> None:
    """The model that was trained and the one that was loaded compute the same, and another than from fresh scales."""
    model = a_model(recipe=DELAYED, dropout=0.0)
    step = TrainStep(model, Optim(), precision="fp8", mode="eager")
    for number in range(3):
        step(*Batches(None, block=24, batch=4, vocab=51, seed=0).at(number))
    checkpoints.save(model, tmp_path / "mine.pt", recipe="delayed_scaling")
    found = checkpoints.load(tmp_path / "mine.pt")
    tokens = np.random.default_rng(0).integers(0, 51, 100)
    settings: dict[str, Any] = {"block": 24, "stride": 12, "batch": 2, "precision": "fp8"}
    expected = perplexity(model, tokens, **settings)
    assert perplexity(found.build(attention="manual", recipe=DELAYED), tokens, **settings) == expected
    fresh = dataclasses.replace(found, scales={}).build(attention="manual", recipe=DELAYED)
    assert perplexity(fresh, tokens, **settings) != expected
    bf16 = perplexity(model, tokens, **{**settings, "precision": "bf16"})
    assert perplexity(found.build(attention="manual"), tokens, **{**settings, "precision": "bf16"}) == bf16


def test_a_save_that_fails_leaves_what_was_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_bytes()

    def full(content: Any, file: BinaryIO) -> None:
        file.write(b"half")
        raise RuntimeError("No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RuntimeError, match="No space"):
        checkpoints.save(a_model(seed=1), file)
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


# Any decoder.

SCALED = RopeScaling(factor=8.0, original_max_position_embeddings=16)


@pytest.mark.parametrize("padded", [None, 320])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "rope_scaling": SCALED, "qk_norm": True}])
def test_a_llama_comes_back(tmp_path: Path, changes: dict[str, Any], padded: int | None) -> None:
    config = dataclasses.replace(CONFIGS["llama-tiny"], **changes)
    torch.manual_seed(0)
    model = decoder.build(config, attention="manual", padded_vocab_size=padded, recipe=DELAYED).eval()
    checkpoints.save(model, tmp_path / "mine.pt", recipe="delayed_scaling")
    found = checkpoints.load(tmp_path / "mine.pt")
    assert found.config == config
    again = found.build(attention="manual").eval()
    tokens = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), model.autocast(enabled=False):
        assert torch.equal(again.logits(tokens), model.logits(tokens))
    assert (again.tables().head.weight is again.tables().tokens.weight) == config.shape.tied
    assert "model_args" not in torch.load(tmp_path / "mine.pt", weights_only=True)


def test_a_decoder_of_ones_own_comes_back(tmp_path: Path) -> None:
    """It is one file of models/zoo, with no line in training.layouts; a Hugging Face folder is refused."""
    folder = str(Path(__file__).parents[1] / "models" / "zoo" / "third")
    zoo.__path__.append(folder)
    try:
        model = decoder.load("sandwich", attention="manual", padded_vocab_size=320).eval()
        checkpoints.save(model, tmp_path / "mine.pt")
        again = checkpoints.load(tmp_path / "mine.pt").build(attention="manual").eval()
        tokens = torch.arange(24)[None]
        with torch.no_grad():
            assert torch.equal(again.logits(tokens), model.logits(tokens))
        with pytest.raises(ValueError, match=r"no file of te_bench/training/layouts is sandwich's"):
            weights.save(model, tmp_path / "folder")
    finally:
        zoo.__path__.remove(folder)
        sys.modules.pop(f"{zoo.__name__}.sandwich", None)


LLAMA = dataclasses.asdict(CONFIGS["llama-tiny"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"family": "mamba"}, "unknown family of models 'mamba'.* Known: gpt, llama"),
        ({"family": None}, "unknown family of models 'None'"),
        ({"config": None}, "a LlamaConfig is NoneType, not a dictionary"),
        ({"config": {**LLAMA, "experts": 8}}, "a LlamaConfig has no experts: another model"),
        ({"config": {k: v for k, v in LLAMA.items() if k != "head_dim"}}, "no head_dim: a LlamaConfig needs them"),
        ({"config": {**LLAMA, "hidden_size": 0}}, "hidden_size is 0: give an integer"),
        ({"config": {**LLAMA, "qk_norm": 1}}, "qk_norm is 1: give bool"),
        ({"config": {**LLAMA, "rope_scaling": {"factor": "8"}}}, "factor is '8': give float"),
        ({"config": {**LLAMA, "rope_scaling": 8.0}}, "rope_scaling is 8.0: give RopeScaling or None"),
        ({"config": {**LLAMA, "num_hidden_layers": 3}}, r"model\.layers\.2\.\S+ is missing"),
        ({"config": {**LLAMA, "tie_word_embeddings": False}, "head": 1.0}, None),
        ({"head": 1.0}, "lm_head.weight differs, but head and token embedding are tied"),
    ],
)
def test_other_configurations_are_named(tmp_path: Path, changes: dict[str, Any], said: str | None) -> None:
    checkpoints.save(decoder.load("llama-tiny", attention="manual"), tmp_path / "mine.pt")
    content = torch.load(tmp_path / "mine.pt", weights_only=True)
    content["model"]["lm_head.weight"] = content["model"]["lm_head.weight"] + changes.get("head", 0.0)
    content["te_bench"] |= changes
    torch.save(content, tmp_path / "mine.pt")
    if said is None:  # an untied head is one of its own
        found = checkpoints.load(tmp_path / "mine.pt").parameters
        assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"] + 1)
    else:
        with pytest.raises(ValueError, match=said):
            checkpoints.load(tmp_path / "mine.pt")


# Checkpoints of others.


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod."])
def test_nanogpts_file_is_read(tmp_path: Path, prefix: str) -> None:
    model = a_model(bias=True)
    state = {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}
    state |= {f"{prefix}transformer.h.{i}.attn.bias": torch.ones(1, 1, 24, 24).tril() for i in range(2)}
    torch.save(nanogpts(model, model=state), tmp_path / "ckpt.pt")
    found = checkpoints.load(tmp_path / "ckpt.pt")
    assert found.config == model.config
    assert torch.equal(logits(found.build(attention="manual").eval()), logits(model))


def test_half_precision_becomes_float32(tmp_path: Path) -> None:
    state = {name: tensor.bfloat16() for name, tensor in a_model().state_dict().items()}
    torch.save(nanogpts(a_model(), model=state), tmp_path / "ckpt.pt")
    model = checkpoints.load(tmp_path / "ckpt.pt").build()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.transformer.wpe.weight, state["transformer.wpe.weight"].float())


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_a_hugging_face_folder_is_read(tmp_path: Path, has_tokenizer: bool) -> None:
    model = a_model(bias=True)
    weights.save(model, tmp_path)
    content = tokenizer.train_bpe(["to be or not to be"], 260)
    if has_tokenizer:
        (tmp_path / "tokenizer.json").write_text(content)
    found = checkpoints.load(tmp_path)
    assert torch.equal(logits(found.build(attention="manual").eval()), logits(model))
    own = found.text_tokenizer()
    assert (own.state if own else None) == (content if has_tokenizer else None)


# What is refused.


class Code:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    torch.save(nanogpts(a_model(), config=Code(tmp_path / "ran")), tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match=r"ckpt\.pt holds Python objects .* can run code"):
        checkpoints.load(tmp_path / "ckpt.pt")
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "ckpt.pt", weights_only=False)
    assert (tmp_path / "ran").exists()  # it would have


def sized(**changes: Any) -> dict[str, Any]:
    content = nanogpts(a_model())
    return content | {"model_args": {**content["model_args"], **changes}}


def filled(**changes: Any) -> dict[str, Any]:
    model = a_model()
    return nanogpts(model, model={**model.state_dict(), **changes})


def made(**own: Any) -> dict[str, Any]:
    of_it = {"format": 2, "family": "gpt", "config": dataclasses.asdict(a_model().config)}
    return nanogpts(a_model(), te_bench=of_it | own)


C_FC = "transformer.h.1.mlp.c_fc.weight"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no file of torch.save"),
        (b"hello world" * 10, "no file of torch.save"),
        (b"\x80\x04cos\nsystem\n(S'false'\ntR.", "no file of torch.save"),
        (None, r"cannot read .*ckpt\.pt: No such file or directory. Give nanoGPT's ckpt"),
        (torch.ones(3), "holds Tensor, not a dictionary"),
        ({}, "no model and no model_args: it holds nothing"),
        ({"state_dict": {}, "epoch": 3}, "it holds state_dict, epoch. Give nanoGPT's"),
        ({"model": {}}, "has no model_args: it holds model"),
        ({"model": torch.ones(3), "model_args": {}}, "has no model:"),
        (made(format=99), "another version of te-bench"),
        (made(recipe=3), "recipe is 3"),
        (made(config=dataclasses.asdict(TINY) | {"gelu": "relu"}), "gelu is 'relu': give none or tanh"),
        (made(tokenizer="chars"), "'chars' has no state"),
        (made(tokenizer="words"), "unknown tokenizer 'words'"),
        (nanogpts(a_model(), fp8=[1]), "fp8 part"),
        (sized(n_layer=0), "n_layer is 0"),
        (sized(n_layer=10**7), "n_layer is 10000000: give an integer from 1 to"),
        (sized(n_embd=10**12), "n_embd is 1000000000000: give an integer from 1 to"),
        (sized(n_head="4"), "n_head is '4'"),
        (sized(vocab_size=None), "vocab_size is None"),
        (sized(block_size=True), "block_size is True"),
        (sized(n_head=5), "no multiple of n_head 5"),
        (sized(bias=1), "bias is 1"),
        (sized(dropout=1.5), "dropout is 1.5"),
        (sized(dropout="0"), "dropout is '0'"),
        (sized(rotary=True), "a GPTConfig has no rotary"),
        (sized(n_layer=1), r"transformer\.h\.1\.\S+ is unknown.*; and 1 more"),
        (sized(n_layer=3), r"transformer\.h\.2\.\S+ is missing.*; and 1 more"),
        (sized(block_size=25), r"wpe\.weight is torch\.float32 \[24, 32\], not floating point \[25, 32\]"),
        (sized(vocab_size=50), r"wte\.weight is torch\.float32 \[51, 32\], not floating point \[50, 32\]"),
        (sized(bias=True), "bias is missing"),
        (
            filled(**{C_FC: torch.ones(32, 128)}),
            rf"{C_FC} is torch\.float32 \[32, 128\], not floating point \[128, 32\]",
        ),
        (filled(**{C_FC: 3}), rf"{C_FC} is int, not"),
        (filled(**{f"_orig_mod.{C_FC}": torch.ones(128, 32)}), "there twice"),
        (filled(**{"lm_head.weight": torch.ones(51, 32)}), "lm_head.weight differs, but head and token embedding are"),
    ],
)
def test_what_is_no_checkpoint_is_named(tmp_path: Path, content: Any, said: str) -> None:
    file = tmp_path / "ckpt.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    with pytest.raises(ValueError, match=said):
        checkpoints.load(file)


def test_a_torn_file_and_others_of_a_folder_are_named(file: Path, tmp_path: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])
    for path, said in (
        (file, "or damaged"),
        (tmp_path, r"no config\.json"),
        (tmp_path / "model.safetensors", "its folder"),
    ):
        with pytest.raises(ValueError, match=said):
            checkpoints.load(path)


def test_scales_of_another_model_are_named(file: Path) -> None:
    content = torch.load(file)
    content["fp8"] = {"transformer.h.9.fp8_state": torch.ones(2)}
    torch.save(content, file)
    found = checkpoints.load(file)
    found.build(attention="manual")
    with pytest.raises(ValueError, match="its fp8 part is of another model; evaluate it without a recipe"):
        found.build(attention="manual", recipe=recipes.load("delayed_scaling"))
