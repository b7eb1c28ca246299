"""te-bench evaluate: the right text in the right tokens, bf16 beside fp8, and plain words for what cannot be."""

import functools
import importlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer

from te_bench.experiments import evaluation
from te_bench.experiments.evaluation import HEADINGS, evaluate, read_passages, rows, summary, to_json
from te_bench.models import decoder
from te_bench.models import recipe as recipes
from te_bench.models.zoo.gpt import GPT, GPTConfig
from te_bench.training import checkpoints, tokenizer, weights
from te_bench.training import corpus as corpora
from te_bench.training.corpus import Corpus
from te_bench.training.evaluation import calibrate, last_word, perplexity
from te_bench.training.tokenizer import Bytes

TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. " * 20
PASSAGES = ["to be or not to be", "that is the question", "whether 'tis nobler in the mind"]


def a_model(*, recipe: Any = None, vocab: int = 256) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16, vocab_size=vocab, bias=True)
    model = GPT(config, attention="manual", recipe=recipe)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


def broken() -> GPT:
    model = a_model()
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(math.nan)
    return model


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(TEXT)
    return f"text:{tmp_path / 'text.txt'}"


@pytest.fixture
def corpus(tmp_path: Path, text: str) -> Corpus:
    return corpora.prepare(text, "bytes", cache=tmp_path / "cache")


@pytest.fixture
def passages(tmp_path: Path) -> Path:
    path = tmp_path / "passages.jsonl"
    path.write_text("\n".join(json.dumps({"text": passage, "id": 3}) for passage in PASSAGES) + "\n\n")
    return path


@pytest.fixture
def checkpoint(tmp_path: Path, corpus: Corpus) -> Path:
    """Trained in current scaling on the bytes of the text, as far as its file says."""
    checkpoints.save(a_model(), tmp_path / "mine.pt", recipe="float8_current_scaling", corpus=corpus)
    return tmp_path / "mine.pt"


def test_both_checks_in_bf16_and_in_the_checkpoints_own_recipe(checkpoint, text, corpus, passages):
    found = evaluate(checkpoint, text, passages=passages, attention="manual", batch=4)
    model = a_model(recipe=recipes.Float8CurrentScaling())
    bf16, fp8 = found.arms
    for arm, precision in ((bf16, "bf16"), (fp8, "fp8")):
        settings: dict[str, Any] = {"block": 16, "batch": 4, "precision": precision}
        tokens = corpus.tokens("val")
        assert arm.perplexity == perplexity(model, tokens, stride=8, text_bytes=len(tokens), **settings)
        assert arm.last_word == last_word(model, Bytes(), PASSAGES, **settings)
    assert (bf16.precision, bf16.recipe, bf16.scales) == ("bf16", None, None)
    assert (fp8.precision, fp8.recipe, fp8.scales) == ("fp8", "float8_current_scaling", None)
    assert bf16.perplexity != fp8.perplexity
    assert (found.block, found.stride, found.batch, found.tokenizer) == (16, 8, 4, "bytes")
    assert (found.data_sha256, found.split, found.seen) == (corpus.sha256, "val", False)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["manual", "flash"])
@pytest.mark.parametrize("recipe", recipes.names())
def test_a_gpu_scores_as_a_cpu_does(checkpoint: Path, text: str, passages: Path, recipe: str, attention: str) -> None:
    settings: dict[str, Any] = {"passages": passages, "recipe": recipe, "batch": 4, "split": "all"}
    on_gpu = evaluate(checkpoint, text, attention=attention, device="cuda", **settings)
    on_cpu = evaluate(checkpoint, text, attention="manual", device="cpu", **settings)
    for gpu, cpu in zip(on_gpu.arms, on_cpu.arms, strict=True):
        assert (gpu.precision, gpu.recipe) == (cpu.precision, cpu.recipe)
        assert gpu.perplexity.tokens == cpu.perplexity.tokens > 1000
        assert gpu.perplexity.nats_per_token == pytest.approx(cpu.perplexity.nats_per_token, rel=5e-3)
        assert gpu.last_word.passages == cpu.last_word.passages == len(PASSAGES)


def test_the_parts_of_a_text_are_those_of_training(checkpoint: Path, text: str, corpus: Corpus) -> None:
    for split, tokens in (("train", corpus.train_tokens), ("val", corpus.val_tokens), ("all", len(TEXT))):
        found = evaluate(checkpoint, text, split=split, recipe="none", attention="manual", stride=16)
        assert [arm.perplexity.tokens for arm in found.arms] == [tokens - 1]
        assert found.seen is (split != "val")


def test_another_text_was_not_seen_and_a_checkpoint_may_not_say(checkpoint: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "other.txt").write_text("something else " * 10)
    settings: dict[str, Any] = {"recipe": "none", "attention": "manual", "split": "all"}
    assert evaluate(checkpoint, f"text:{tmp_path / 'other.txt'}", **settings).seen is False
    checkpoints.save(a_model(), checkpoint)
    assert evaluate(checkpoint, text, tokenizer="bytes", **settings).seen is None


def test_a_limit_of_tokens_knows_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("être ou ne pas être, " * 50)
    checkpoints.save(a_model(vocab=300), tmp_path / "mine.pt")
    (tmp_path / "tokenizer.json").write_text(made := tokenizer.train_bpe(["être ou ne pas être, " * 50], 300))
    spec, data = f"file:{tmp_path / 'tokenizer.json'}", f"text:{tmp_path / 'text.txt'}"
    found = evaluate(tmp_path / "mine.pt", data, tokenizer=spec, split="all", max_tokens=20, attention="manual")
    scored, words = found.arms[0].perplexity, tokenizer.Subwords(made)
    assert scored.tokens == 20
    size = len(words.decode(next(words.encode("être ou ne pas être, " * 50))[:21].tolist()).encode())
    assert scored.bits_per_byte == pytest.approx(scored.nats_per_token / math.log(2) * 21 / size)


@pytest.mark.parametrize(("limit", "size"), [(1, 1), (2, 3), (3, 4)])
def test_half_a_character_is_no_bytes(limit: int, size: int) -> None:
    """The first limit + 1 bytes of "aéb": the one that is half of é decodes to nothing."""
    tokens, known = evaluation._encode(Bytes(), "aébc", limit)
    assert (len(tokens), known) == (limit + 1, size)


def test_a_tokenizer_that_loses_text_gives_no_bits_per_byte(tmp_path: Path) -> None:
    class Lower(Bytes):
        def encode(self, text: str) -> Any:
            return super().encode(text.lower())

    assert evaluation._encode(Lower(), "To be", 2)[1] is None
    assert evaluation._encode(Lower(), "to be", 2)[1] == 3
    assert evaluation._encode(Lower(), "To be", None)[1] == 5


# FP8 with a memory.


def test_scales_come_from_the_checkpoint_or_from_calibration(tmp_path: Path, text: str, corpus: Corpus) -> None:
    model = a_model(recipe=recipes.DelayedScaling())
    calibrate(model, corpus.tokens("train")[:1000], block=16, batch=8)
    checkpoints.save(model, tmp_path / "with.pt", recipe="delayed_scaling", corpus=corpus)
    checkpoints.save(a_model(), tmp_path / "without.pt", corpus=corpus)
    settings: dict[str, Any] = {"block": 16, "stride": 8, "batch": 2, "precision": "fp8"}
    tokens = corpus.tokens("val")
    own = evaluate(tmp_path / "with.pt", text, attention="manual", batch=2).arms[1]
    assert own.scales == "scales of the checkpoint"
    assert own.perplexity == perplexity(model, tokens, text_bytes=len(tokens), **settings)
    made = evaluate(tmp_path / "without.pt", text, attention="manual", batch=2, recipe="delayed_scaling").arms[1]
    assert made.scales == "scales calibrated on 32 tokens"
    fresh = a_model(recipe=recipes.DelayedScaling())
    at_one = perplexity(fresh, tokens, text_bytes=len(tokens), **settings)
    calibrate(fresh, tokens, block=16, batch=2)
    assert made.perplexity == perplexity(fresh, tokens, text_bytes=len(tokens), **settings)
    assert made.perplexity != at_one


def test_passages_alone_calibrate_too(tmp_path: Path, corpus: Corpus, passages: Path) -> None:
    checkpoints.save(a_model(), tmp_path / "mine.pt", corpus=corpus)
    arm = evaluate(tmp_path / "mine.pt", passages=passages, attention="manual", recipe="delayed_scaling").arms[1]
    assert arm.perplexity is None
    assert arm.last_word is not None
    assert arm.scales == f"scales calibrated on {sum(map(len, PASSAGES)) // 16 * 16} tokens"


# What is shown.


def test_rows_are_a_table_with_the_gap(checkpoint: Path, text: str, passages: Path) -> None:
    found = evaluate(checkpoint, text, passages=passages, attention="manual")
    heading, bf16, fp8 = rows(found)
    assert heading == HEADINGS
    assert (bf16[0], fp8[0]) == ("bf16", "fp8 float8_current_scaling")
    first, second = (arm.perplexity for arm in found.arms)
    assert bf16[1:4] == (f"{first.nats_per_token:.4f}", "—", f"{first.perplexity:.2f}")
    assert float(fp8[2]) == pytest.approx(second.nats_per_token - first.nats_per_token, abs=6e-5)
    assert fp8[2][0] in "+-"
    assert bf16[4] == f"{first.bits_per_byte:.4f}"
    assert bf16[5].endswith("/3)")
    alone = rows(evaluate(checkpoint, passages=passages, attention="manual"))
    assert [row[1:5] for row in alone[1:]] == [("—",) * 4] * 2


def test_the_summary_lines_up_and_warns_of_text_that_was_seen(checkpoint: Path, text: str) -> None:
    found = evaluate(checkpoint, text, attention="manual")
    lines = summary(found).split("\n")
    assert len(lines) == 3
    assert len({len(line) for line in lines}) == 1
    assert [line.split()[0] for line in lines] == ["configuration", "bf16", "fp8"]
    seen = summary(evaluate(checkpoint, text, attention="manual", split="train", recipe="none"))
    assert "was trained on this text: --split train" in seen.split("\n")[2]


def test_json_has_everything_and_null_for_what_is_not_finite(checkpoint: Path, text: str, passages: Path) -> None:
    shown = to_json(evaluate(checkpoint, text, passages=passages, attention="manual"))
    again = json.loads(json.dumps(shown, allow_nan=False))
    arm = again["arms"][0]
    assert arm["perplexity"]["perplexity"] == pytest.approx(math.exp(arm["perplexity"]["nats_per_token"]))
    assert arm["last_word"]["accuracy"] == arm["last_word"]["correct"] / 3
    checkpoints.save(broken(), checkpoint)
    found = evaluate(checkpoint, text, attention="manual", tokenizer="bytes")
    arm = to_json(found)["arms"][0]
    nothing = dict.fromkeys(("nats_per_token", "perplexity", "bits_per_byte"))
    assert arm["perplexity"] == {**nothing, "tokens": len(TEXT) // 10 - 1}
    assert arm["last_word"] is None
    assert rows(found)[1][1] == "nan"


# Tokenisers.


def test_characters_are_rebuilt_from_the_text_that_was_trained_on(tmp_path: Path, text: str) -> None:
    known = sorted(set(TEXT))
    checkpoints.save(a_model(vocab=len(known)), tmp_path / "mine.pt")
    found = evaluate(tmp_path / "mine.pt", text, tokenizer="chars", attention="manual")
    assert found.arms[0].perplexity is not None
    (tmp_path / "other.txt").write_text("another text")
    with pytest.raises(ValueError, match="it fits only the data set that the model was trained on"):
        evaluate(tmp_path / "mine.pt", f"text:{tmp_path / 'other.txt'}", tokenizer="chars", attention="manual")


def test_characters_that_the_model_does_not_know_are_named(tmp_path: Path, text: str) -> None:
    corpus = corpora.prepare(text, "chars", cache=tmp_path / "cache")
    checkpoints.save(a_model(vocab=corpus.vocab), tmp_path / "mine.pt", corpus=corpus)
    (tmp_path / "other.txt").write_text("to be, ÿ or not to be")
    (tmp_path / "p.jsonl").write_text('{"text": "to b\\u00e9"}')
    with pytest.raises(ValueError, match="not 'ÿ' of this text"):
        evaluate(tmp_path / "mine.pt", f"text:{tmp_path / 'other.txt'}", attention="manual", split="all")
    with pytest.raises(ValueError, match="not 'é' of this text"):
        evaluate(tmp_path / "mine.pt", passages=tmp_path / "p.jsonl", attention="manual")


def test_passages_calibrate_a_model_that_knows_no_newline(tmp_path: Path, passages: Path) -> None:
    (tmp_path / "text.txt").write_text(" ".join(PASSAGES) * 40)
    corpus = corpora.prepare(f"text:{tmp_path / 'text.txt'}", "chars", cache=tmp_path / "cache")
    checkpoints.save(a_model(vocab=corpus.vocab), tmp_path / "mine.pt", corpus=corpus)
    arm = evaluate(tmp_path / "mine.pt", passages=passages, attention="manual", recipe="delayed_scaling").arms[1]
    assert arm.scales == f"scales calibrated on {sum(map(len, PASSAGES)) // 16 * 16} tokens"


def test_a_hugging_face_folder_brings_its_tokenizer(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "gpt2"
    weights.save(a_model(vocab=300), folder)
    with pytest.raises(ValueError, match="does not hold its tokenizer; give --tokenizer: bytes"):
        evaluate(folder, text, attention="manual")
    (folder / "tokenizer.json").write_text(tokenizer.train_bpe([TEXT], 290))
    found = evaluate(folder, text, attention="manual")
    assert found.tokenizer == f"file:{folder / 'tokenizer.json'}"
    assert len(found.arms) == 1  # it names no recipe


def test_a_llama_in_a_folder_and_in_a_checkpoint_is_evaluated(tmp_path: Path, text: str, passages: Path) -> None:
    torch.manual_seed(0)
    model = decoder.load("llama-tiny", attention="manual")
    weights.save(model, tmp_path / "folder", shard_bytes=50_000)
    checkpoints.save(model, tmp_path / "mine.pt", recipe="float8_current_scaling")
    settings: dict[str, Any] = {"tokenizer": "bytes", "attention": "manual", "batch": 4, "block": 16}
    by_folder = evaluate(tmp_path / "folder", text, passages=passages, **settings)
    by_file = evaluate(tmp_path / "mine.pt", text, passages=passages, **settings)
    assert by_file.arms[0] == by_folder.arms[0]
    assert [arm.recipe for arm in by_file.arms] == [None, "float8_current_scaling"]
    assert by_folder.arms[0].perplexity == perplexity(
        model, np.frombuffer(TEXT.encode(), np.uint8)[int(len(TEXT) * 0.9) :], block=16, stride=8, batch=4,
        precision="bf16", text_bytes=len(TEXT) - int(len(TEXT) * 0.9),
    )  # fmt: skip
    assert by_file.arms[1].perplexity != by_file.arms[0].perplexity


def test_the_command_takes_a_shorter_window_and_ends_with_4_where_no_loss_is(checkpoint, text, monkeypatch, capsys):
    """A Llama's longest sequence may be 131,072 tokens."""
    command = importlib.import_module("te_bench.cli.evaluate")
    monkeypatch.setattr(evaluation, "evaluate", functools.partial(evaluate, attention="manual"))
    command.evaluate(checkpoint, text, recipe="none", device="cpu", block=4, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["block"], found["stride"]) == (4, 2)
    checkpoints.save(broken(), checkpoint)
    with pytest.raises(typer.Exit) as ended:
        command.evaluate(checkpoint, text, recipe="none", device="cpu", tokenizer="bytes")
    assert ended.value.exit_code == 4
    assert "no result in bf16: the loss is not finite" in capsys.readouterr().err


# What cannot be evaluated.


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": None}, "nothing to evaluate on"),
        ({"data": "random"}, "has no text to evaluate on"),
        ({"data": "txt:a"}, "unknown data set"),
        ({"data": "text:/there/is/none"}, "cannot read /there/is/none"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"device": "cuda"}, "no NVIDIA GPU"),
        ({"split": "test"}, "unknown split 'test'.*val, train, all"),
        ({"recipe": "delayed"}, "delayed_scaling"),
        ({"attention": "cudnn"}, "cudnn: "),
        ({"attention": "flush"}, "flash"),
        ({"max_tokens": 0}, "0 tokens to score"),
        ({"block": 0}, "block 0"),
        ({"stride": 0}, "stride 0"),
        ({"batch": 0}, "batch 0"),
        ({"tokenizer": "words"}, "unknown tokenizer"),
        ({"tokenizer": "bpe:280"}, "fits only the data set that the model was trained on"),
        ({"tokenizer": "file:/there/is/none"}, "cannot read /there/is/none"),
        ({"checkpoint": Path("/there/is/none")}, "cannot read /there/is/none"),
        ({"passages": Path("/there/is/none")}, "cannot read /there/is/none"),
    ],
)
def test_bad_input_is_named(checkpoint, text, changes, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=said):
        evaluate(**{"checkpoint": checkpoint, "data": text, "attention": "manual", **changes})


def test_tokenizers_that_the_model_cannot_take_are_named(tmp_path: Path, text: str, passages: Path) -> None:
    checkpoints.save(a_model(vocab=255), tmp_path / "mine.pt")
    with pytest.raises(ValueError, match="256 tokens and the model's vocabulary 255"):
        evaluate(tmp_path / "mine.pt", text, tokenizer="bytes", attention="manual")
    with pytest.raises(ValueError, match="'chars' is made from a text"):
        evaluate(tmp_path / "mine.pt", passages=passages, tokenizer="chars", attention="manual")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds no passages"),
        ('{"text": "a b"}\n{"text": ', "line 2 is not JSON"),
        ('{"text": "a b"}\n\n["a b"]', r'line 3 is not an object with a "text"'),
        ('{"text": 3}', "line 1 is not an object"),
    ],
)
def test_bad_passages_are_named(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(ValueError, match=said):
        read_passages(tmp_path / "p.jsonl")


def test_passages_may_hold_any_character(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"text": "a\u2028b c"}\r\n{"text": "d\\ne"}\n', newline="")
    assert read_passages(tmp_path / "p.jsonl") == ["a\u2028b c", "d\ne"]
