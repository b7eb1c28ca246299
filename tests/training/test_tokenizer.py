import json
from pathlib import Path
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from te_bench.training import tokenizer as tok

TEXT = "def f(x):\n    return x * x\n\n\nclass Grüße:\r\n\tpass  # naïve 日本語 🙂\n" * 40
texts = st.text(max_size=300)
# Whitespace of every kind beside letters: where a cut can go wrong.
spaced = st.text(st.sampled_from("ab1.' \n\r\t\x1c\x85\u00a0\u2028é日🙂"), max_size=200)


def ids(tokenizer: tok.Tokenizer, text: str) -> list[int]:
    return [int(i) for piece in tokenizer.encode(text) for i in piece]


@pytest.fixture(scope="module")
def bpe() -> tok.Subwords:
    return tok.Subwords(tok.train_bpe([TEXT], 400))


@given(texts)
@settings(deadline=None)
def test_bytes_are_utf8(text: str) -> None:
    assert bytes(ids(tok.Bytes(), text)) == text.encode()
    assert tok.Bytes().decode(ids(tok.Bytes(), text)) == text


@given(texts, st.integers(1, 7))
@settings(deadline=None)
def test_chars_are_the_sorted_alphabet_whatever_the_slices(text: str, size: int) -> None:
    with mock.patch.object(tok, "SLICE", size):
        chars = tok.build("chars", text, 0, None)
        found = ids(chars, text)
    alphabet = sorted(set(text))
    assert chars.vocab == len(alphabet)
    assert found == [alphabet.index(c) for c in text]
    assert tok.restore("chars", chars.state).decode(found) == text


def test_a_character_that_is_not_in_the_alphabet_is_named_and_none_takes_its_place() -> None:
    with (
        mock.patch.object(tok, "SLICE", 2),
        pytest.raises(ValueError, match="the tokenizer knows 2 characters, and not 'cd'"),
    ):
        ids(tok.Chars("ab"), "ababcdab")


@pytest.mark.parametrize("keeps", ["unk_token", "byte_fallback", "letters"])
def test_a_bpe_drops_no_character_without_a_word(keeps: str) -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "?": 1}, "merges": []}
    short = tok.build("file:t.json", "ab", 2, json.dumps({"model": model}))
    assert ids(short, "aa?") == [0, 0, 1]
    with pytest.raises(ValueError, match="the tokenizer has no token for 'b', and drops it"):
        ids(short, "aba")
    if keeps == "letters":
        model["vocab"] = json.loads(tok.train_bpe([], 256))["model"]["vocab"]
    else:
        model[keeps] = "?" if keeps == "unk_token" else True
    assert ids(tok.build("file:t.json", "ab", 2, json.dumps({"model": model})), "a") == [model["vocab"]["a"]]


@given(texts)
@settings(deadline=None)
def test_bpe_gives_every_text_back(bpe: tok.Subwords, text: str) -> None:
    assert bpe.decode(ids(bpe, text)) == text


@given(spaced, st.integers(1, 20), st.integers(1, 3))
@settings(deadline=None)
def test_cuts_lose_nothing(text: str, size: int, batch: int) -> None:
    with mock.patch.multiple(tok, CHUNK=size, CHUNKS=batch):
        assert "".join(tok.chunks(text)) == text
        assert "".join(tok.chunks(text, len(text) // 2)) == text[: len(text) // 2]
        assert all(size <= len(chunk) <= 2 * size for chunk in list(tok.chunks(text))[:-1])


@given(
    st.lists(st.text(st.sampled_from("a1.' \n\r\t\x1c\x85\u00a0\u2028日"), max_size=12), min_size=4, max_size=20),
    st.sampled_from(["x x", "x\nx"]),
)
@settings(deadline=None, max_examples=300)
def test_cut_text_has_the_tokens_of_the_whole(bpe: tok.Subwords, parts: list[str], seam: str) -> None:
    # At least one clean place to cut in every 33 characters, so that one is always found within a chunk's reach.
    text = "".join(part + seam for part in parts)
    whole = bpe.tokenizer.encode(text, add_special_tokens=False).ids
    with mock.patch.multiple(tok, CHUNK=34, CHUNKS=2):
        assert ids(bpe, text) == whole


def test_cuts_prefer_a_space_then_a_newline_then_anywhere() -> None:
    with mock.patch.object(tok, "CHUNK", 5):
        assert list(tok.chunks("aaaaa\nb b bb")) == ["aaaaa\nb", " b bb"]
        assert list(tok.chunks("aaaaa\nbbbb")) == ["aaaaa\n", "bbbb"]
        assert list(tok.chunks("a" * 17)) == ["aaaaa", "aaaaa", "aaaaaaa"]


def test_bpe_is_reproducible_and_learns() -> None:
    first, again = (tok.train_bpe(tok.chunks(TEXT), 300) for _ in range(2))
    assert first == again
    assert tok.Subwords(first).vocab == 300
    assert len(ids(tok.Subwords(first), TEXT)) < len(TEXT.encode()) / 2


def test_bpe_vocabulary_is_what_training_gave() -> None:
    small = tok.build("bpe:50000", "ab ab", 5, None)
    assert small.vocab == 258  # 256 bytes, "ab" and " ab"


def test_bpe_is_trained_on_the_training_part_only() -> None:
    held_out = "zyzyzyzy" * 50
    assert (
        tok.build("bpe:300", TEXT + held_out, len(TEXT), None).state
        == tok.build("bpe:300", TEXT, len(TEXT), None).state
    )


def test_a_file_is_not_truncated_padded_randomised_or_decorated(bpe: tok.Subwords) -> None:
    content = json.loads(bpe.content)
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 10_000},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    content["model"]["dropout"] = 0.9
    content["model"]["vocab"]["<s>"] = 900  # a gap: 306 tokens, ids up to 900
    content["added_tokens"] = [
        {"id": 900, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
    ]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [900], "tokens": ["<s>"]}},
    }
    odd = tok.Subwords(json.dumps(content))
    assert ids(odd, TEXT) == ids(bpe, TEXT)
    assert odd.vocab == 901


def test_encode_yields_bounded_pieces(bpe: tok.Subwords) -> None:
    with mock.patch.multiple(tok, CHUNK=100, CHUNKS=2, SLICE=500):
        for tokenizer in (bpe, tok.Bytes(), tok.Chars("".join(sorted(set(TEXT))))):
            pieces = list(tokenizer.encode(TEXT))
            assert len(pieces) > 3
            assert all(isinstance(p, np.ndarray) and p.dtype.kind == "u" for p in pieces)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("byte", ["'byte'", "Did you mean bytes", "bpe:SIZE", "file:PATH"]),
        ("bpee:300", ["Did you mean bpe:SIZE"]),
        ("bytes:8", ["takes no argument"]),
        ("bpe", ["SIZE", "256 to 1000000", "bpe:50257"]),
        ("bpe:255", ["256 to 1000000"]),
        ("bpe:1e3", ["'bpe:1e3'"]),
        ("bpe:²²²²", ["256 to 1000000"]),
        ("file:", ["file:PATH"]),
        ("", ["Known: bytes, chars"]),
    ],
)
def test_bad_specs_are_explained(spec: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        tok.check(spec)
    assert all(word in str(caught.value) for word in words), caught.value


def test_bad_tokenizer_files_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with pytest.raises(ValueError, match=r"No such file.*file:PATH"):
        tok.read(str(path))
    path.write_text("nonsense")
    with pytest.raises(ValueError, match="not JSON"):
        tok.read(str(path))
    path.write_bytes(b'{"\xff')
    with pytest.raises(ValueError, match="byte offset 2"):
        tok.read(str(path))
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"t\.json is not a tokenizer\.json"):
        tok.build(f"file:{path}", "text", 3, tok.read(str(path)))
    path.write_text('{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}}')
    with pytest.raises(ValueError, match="cannot encode"):
        ids(tok.build(f"file:{path}", "text", 3, tok.read(str(path))), "b")
