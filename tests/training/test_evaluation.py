"""Perplexity and last word: against models whose predictions are known, and against one forward pass for each token."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from te_bench.models import fp8
from te_bench.models import recipe as recipes
from te_bench.models.zoo.gpt import GPT, GPTConfig
from te_bench.training import evaluation
from te_bench.training.evaluation import LastWord, Perplexity, calibrate, last_word, perplexity, split_last_word
from te_bench.training.tokenizer import Bytes, Subwords, train_bpe

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=256)


def a_model(seed: int = 0, *, recipe: Any = None, padded: int | None = None, **changes: Any) -> GPT:
    """Weights so large that every token of the context shows in the prediction."""
    torch.manual_seed(seed)
    config = dataclasses.replace(SMALL, **changes)
    model = GPT(config, attention="manual", recipe=recipe, padded_vocab_size=padded)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "ln_" not in name:
                p.mul_(6)
    return model


def some_tokens(count: int, vocab: int = 256, seed: int = 0) -> NDArray[np.uint16]:
    return np.random.default_rng(seed).integers(0, vocab, count).astype(np.uint16)


def nats_of(model: GPT, context: NDArray[Any], target: int) -> float:
    """-ln p(target | context) of one forward pass, in float32."""
    with torch.no_grad():
        logits = model.eval().logits(torch.from_numpy(context.astype(np.int64))[None])[0, -1]
    return -F.log_softmax(logits.double(), dim=0)[target].item()


# Models whose predictions are known.


def a_repeater(logit: float, **changes: Any) -> GPT:
    """logits = `logit` for the token that was read last, 0 for the 14 others: rows of a Hadamard matrix as embeddings.

    They are orthogonal, of mean 0 and variance 1, so the last LayerNorm leaves them alone but for its epsilon.
    """
    rows = torch.ones(1, 1)
    for _ in range(4):
        rows = torch.cat([torch.cat([rows, rows], 1), torch.cat([rows, -rows], 1)])
    config = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=15, dropout=0.5)
    model = GPT(config, attention="manual", **changes)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("c_proj.weight") or "wpe" in name:
                p.zero_()
        model.transformer.wte.weight[:15].copy_(rows[1:])
        model.transformer.ln_f.weight.fill_(logit / 16 * math.sqrt(1 + 1e-5))
    return model


class Bigram(GPT):
    """logits = table[token that was read last]; the head is the identity."""

    def __init__(self, table: Tensor, block: int = 32):
        vocab = len(table)
        super().__init__(
            GPTConfig(n_layer=1, n_head=1, n_embd=vocab, block_size=block, vocab_size=vocab), attention="manual"
        )
        self.table = table
        with torch.no_grad():
            self.transformer.wte.weight.copy_(torch.eye(vocab))

    def hidden(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("padded", [None, 16])
def test_a_model_that_repeats_has_the_perplexity_that_follows(precision: str, padded: int | None) -> None:
    recipe = recipes.Float8CurrentScaling() if precision == "fp8" else None
    model = a_repeater(2.0, recipe=recipe, padded_vocab_size=padded)
    tokens = np.array([3, 3, 3, 14, 14, 0, 1, 2, 2, 2, 2, 2])  # 7 repetitions in 11 steps, known at any context
    found = perplexity(model, tokens, block=4, stride=3, batch=2, precision=precision, text_bytes=24)
    ln_sum = math.log(math.exp(2.0) + 14)
    nats = ln_sum - 2.0 * 7 / 11
    assert found.nats_per_token == pytest.approx(nats, rel=1e-6)
    assert found.tokens == 11
    assert found.perplexity == pytest.approx(math.exp(nats), rel=1e-6)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) * 12 / 24, rel=1e-6)


def test_uniform_bytes_are_eight_bits_each() -> None:
    model = Bigram(torch.zeros(256, 256))
    found = perplexity(model, some_tokens(100), block=32, stride=16, batch=1, precision="fp32", text_bytes=100)
    assert found.perplexity == pytest.approx(256)
    assert found.bits_per_byte == pytest.approx(8)
    unknown = perplexity(model, some_tokens(100), block=32, stride=16, batch=1, precision="fp32")
    assert unknown.bits_per_byte is None


def likes(pairs: dict[str, tuple[str, float]]) -> Tensor:
    """A table in which each character is followed by the one given, with this probability, else by any alike."""
    table = torch.full((256, 256), 1 / 256).log()
    for before, (after, p) in pairs.items():
        table[ord(before)] = math.log((1 - p) / 255)
        table[ord(before), ord(after)] = math.log(p)
    return table


def test_the_last_word_counts_only_when_all_of_it_is_predicted() -> None:
    model = Bigram(likes({"x": (" ", 0.5), " ": ("a", 0.9), "a": ("b", 0.8), "b": ("a", 0.7)}))
    passages = ["x ab", "one x aba\n", "x aa", "x ba"]  # wrong: the last character; the first of the word
    found = last_word(model, Bytes(), passages, block=32, batch=3, precision="fp32")
    assert (found.correct, found.passages, found.cut) == (2, 4, 0)
    assert found.accuracy == 0.5
    begin, odd = math.log(0.5) + math.log(0.9), [math.log(0.2 / 255), math.log(0.1 / 255)]
    words = [begin + math.log(0.8), begin + math.log(0.8) + math.log(0.7), begin + odd[0]]
    words.append(math.log(0.5) + odd[1] + math.log(0.7))
    assert found.nats_per_word == pytest.approx(-sum(words) / 4, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.nats_per_word))


class Words:
    """Each word of a list is a token."""

    state = None

    def __init__(self, *words: str):
        self.words, self.vocab = words, len(words)

    def encode(self, text: str) -> Iterator[NDArray[Any]]:
        yield np.array([self.words.index(word) for word in text.split()], np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(self.words[i] for i in ids)


def test_logits_of_one_bf16_value_are_told_apart() -> None:
    """100 and 100.1 are one number in bf16; rounding would make the first of them the likeliest."""
    model = Bigram(torch.tensor([[0.0, 100.0, 100.1]]).expand(3, 3))
    words = Words("a", "b", "c")
    assert last_word(model, words, ["a c"], block=4, batch=1, precision="bf16").correct == 1
    assert last_word(model, words, ["a b"], block=4, batch=1, precision="bf16").correct == 0


def test_a_model_of_nan_predicts_nothing() -> None:
    model = Bigram(torch.full((3, 3), math.nan))
    found = last_word(model, Words("a", "b", "c"), ["b a"], block=4, batch=1, precision="fp32")  # argmax gives 0
    assert found.correct == 0
    assert math.isnan(found.perplexity)
    assert math.isnan(perplexity(model, np.array([0, 1]), block=4, stride=2, batch=1, precision="fp32").perplexity)


def test_hopeless_perplexities_are_infinite() -> None:
    assert LastWord(correct=0, passages=1, nats_per_word=1e4, cut=0).perplexity == math.inf
    assert Perplexity(nats_per_token=1e4, tokens=1).perplexity == math.inf


# The sliding window.


def begin_of(target: int, block: int, stride: int) -> int:
    """Where the context of tokens[target] begins: the first window that reaches it."""
    return 0 if target <= block else -(-(target - block) // stride) * stride


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("count", "block", "stride"),
    [
        (2, 8, 4),
        (8, 8, 4),
        (9, 8, 4),
        (10, 8, 4),
        (40, 8, 3),
        (41, 8, 8),
        (45, 8, 8),
        (30, 8, 1),
        (60, 16, 12),
        (9, 1, 1),
    ],
)
def test_the_sliding_window_is_one_pass_for_each_token(count: int, block: int, stride: int, batch: int) -> None:
    model, tokens = a_model(), some_tokens(count)
    begins = [begin_of(target, block, stride) for target in range(1, count)]
    each = [nats_of(model, tokens[begin:t], int(tokens[t])) for t, begin in enumerate(begins, 1)]
    found = perplexity(model, tokens, block=block, stride=stride, batch=batch, precision="fp32")
    assert found.nats_per_token == pytest.approx(sum(each) / len(each), rel=1e-5)
    assert found.tokens == count - 1


# Last words of a model that sees all of its context.

PASSAGES = ["to be", "or not to be", "that is the question whether", "a b", "'tis nobler in", "the mind to", "x y"]


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_the_last_word_is_one_pass_for_each_token(batch: int) -> None:
    model, block = a_model(block_size=16), 16
    nats, cut = 0.0, 0
    for passage in PASSAGES:
        ids = np.frombuffer(passage.encode(), np.uint8)
        first = passage.rindex(" ")
        begin = max(0, len(ids) - (block + 1))
        cut += begin > 0
        nats += sum(nats_of(model, ids[begin:t], int(ids[t])) for t in range(first, len(ids)))
    assert cut == 1
    found = last_word(model, Bytes(), PASSAGES, block=block, batch=batch, precision="fp32")
    assert found.nats_per_word == pytest.approx(nats / len(PASSAGES), rel=1e-5)
    assert found.cut == cut


@pytest.mark.parametrize(
    ("passage", "parts"),
    [
        ("to be", ("to", " be")),
        (" to be.  \n", (" to", " be.")),
        ("to  be", ("to ", " be")),
        ("to\n\nbe", ("to\n", "\nbe")),
        ("a b c", ("a b", " c")),
        ("la vida être", ("la vida", " être")),
    ],
)
def test_a_passage_is_split_before_the_last_white_space(passage: str, parts: tuple[str, str]) -> None:
    assert split_last_word(passage) == parts


def nats_of_word(model: GPT, ids: NDArray[Any], first: int) -> float:
    return sum(nats_of(model, ids[:t], int(ids[t])) for t in range(first, len(ids)))


def test_the_words_tokens_are_those_of_the_whole_passage() -> None:
    tokenizer = Subwords(train_bpe(["the question is the question "] * 20, 300))
    passage = "the  question is the question"
    ids = np.concatenate(list(tokenizer.encode(passage)))
    first = next(i for i in range(len(ids)) if tokenizer.decode(ids[i:]) == " question")
    model = a_model(vocab_size=tokenizer.vocab)
    found = last_word(model, tokenizer, [passage], block=16, batch=1, precision="fp32")
    assert found.nats_per_word == pytest.approx(nats_of_word(model, ids, first), rel=1e-5)
    assert found.cut == 0


def test_a_token_that_begins_before_the_word_is_predicted_with_it() -> None:
    class Pairs(Words):
        def encode(self, text: str) -> Iterator[NDArray[Any]]:
            yield np.array([sum(text[i : i + 2].encode()) for i in range(0, len(text), 2)])

    model, (ids,) = a_model(), Pairs().encode("abc de")  # ab, "c ", de; the context alone is ab, c
    found = last_word(model, Pairs(), ["abc de"], block=16, batch=1, precision="fp32")
    assert found.nats_per_word == pytest.approx(nats_of_word(model, ids, 1), rel=1e-5)


# What is computed in which precision, and what is left behind.


def test_a_recipe_is_off_in_bf16_and_on_in_fp8() -> None:
    tokens = some_tokens(60)
    settings: dict[str, Any] = {"block": 16, "stride": 8, "batch": 4}
    plain = perplexity(a_model(), tokens, precision="bf16", **settings).nats_per_token
    model = a_model(recipe=recipes.Float8CurrentScaling())
    assert perplexity(model, tokens, precision="bf16", **settings).nats_per_token == plain
    native = perplexity(model, tokens, precision="fp8", **settings).nats_per_token
    assert native != plain
    assert native == pytest.approx(plain, rel=0.05)
    assert plain == pytest.approx(perplexity(a_model(), tokens, precision="fp32", **settings).nats_per_token, rel=0.01)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training: bool) -> None:
    model = a_model(recipe=recipes.DelayedScaling(), dropout=0.5).train(training)
    calibrate(model, some_tokens(40), block=16, batch=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    settings: dict[str, Any] = {"block": 16, "batch": 4, "precision": "fp8"}
    first, second = (perplexity(model, some_tokens(60), stride=8, **settings) for _ in range(2))
    last_word(model, Bytes(), PASSAGES, **settings)
    assert first == second
    assert model.training is training
    after = model.state_dict()
    assert len(before) == len(after)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError, match="token 300"):
        perplexity(model, np.array([1, 300]), stride=8, **settings)
    assert model.training is training


def test_the_head_in_pieces_is_the_head_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = a_model(), some_tokens(60)
    settings: dict[str, Any] = {"block": 16, "batch": 4, "precision": "fp32"}
    whole = perplexity(model, tokens, stride=8, **settings), last_word(model, Bytes(), PASSAGES, **settings)
    monkeypatch.setattr(evaluation, "HEAD_ROWS", 5)
    pieces = perplexity(model, tokens, stride=8, **settings), last_word(model, Bytes(), PASSAGES, **settings)
    assert pieces[0].nats_per_token == pytest.approx(whole[0].nats_per_token, rel=1e-6)
    assert pieces[1].nats_per_word == pytest.approx(whole[1].nats_per_word, rel=1e-6)


def test_calibration_gives_delayed_scaling_the_amaxes_of_a_pass() -> None:
    model = a_model(recipe=recipes.DelayedScaling())
    assert calibrate(model, some_tokens(100), block=16, batch=4) == 64
    for name, figures in fp8.numerics(model).items():
        weight = model.get_parameter(f"{name}.weight").abs().max().item()
        assert figures["weight"]["amax"] == pytest.approx(weight)
        assert figures["weight"]["scale"] == pytest.approx(448 / weight)
        assert figures["input"]["scale"] == pytest.approx(448 / figures["input"]["amax"])
    assert calibrate(model, some_tokens(7), block=16, batch=4) == 7
    with pytest.raises(ValueError, match="no FP8 recipe"):
        calibrate(a_model(), some_tokens(100), block=16, batch=4)


# What cannot be evaluated.


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block": 17}, "block 17: this model takes 1 to 16"),
        ({"block": 0}, "block 0"),
        ({"stride": 9}, "stride 9: give 1 to 8"),
        ({"stride": 0}, "stride 0"),
        ({"batch": 0}, "batch 0"),
        ({"precision": "fp8"}, "a model with a recipe"),
        ({"precision": "bf61"}, "bf61.*bf16"),
        ({"tokens": np.array([1])}, "1 tokens"),
        ({"tokens": np.array([1, 256])}, "token 256: the model knows 0 to 255"),
        ({"tokens": np.array([1, -1])}, "token -1"),
    ],
)
def test_what_perplexity_cannot_do_is_said(changes: dict[str, Any], said: str) -> None:
    settings = {"tokens": some_tokens(20), "block": 8, "stride": 4, "batch": 2, "precision": "fp32", **changes}
    with pytest.raises(ValueError, match=said):
        perplexity(a_model(), **settings)


@pytest.mark.parametrize(
    ("passages", "said"),
    [
        ([], "no passages"),
        (["a b", "one"], "passage 2: 'one' has no context"),
        ([" \n"], "no context"),
        (["a " + 16 * "b"], "passage 1: its last word has 17 tokens, more than a block of 16"),
    ],
)
def test_passages_that_cannot_be_split_are_named(passages: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        last_word(a_model(), Bytes(), passages, block=16, batch=2, precision="fp32")
    with pytest.raises(ValueError, match="token 98"):
        last_word(a_model(vocab_size=98), Bytes(), ["a b"], block=16, batch=2, precision="fp32")


def test_a_passage_of_one_token_has_none_before_its_last_word() -> None:
    class Whole(Words):
        def encode(self, text: str) -> Iterator[NDArray[Any]]:
            yield np.array([len(text)])

    with pytest.raises(ValueError, match="passage 1: 'a b' has no token before its last word, or none of it"):
        last_word(a_model(), Whole(), ["a b"], block=16, batch=2, precision="fp32")


def test_the_longest_word_that_fits_is_predicted() -> None:
    found = last_word(a_model(), Bytes(), ["xa " + 15 * "b"], block=16, batch=1, precision="fp32")
    assert (found.passages, found.cut) == (1, 1)
