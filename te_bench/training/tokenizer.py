"""Tokenisers: bytes, characters, a byte-level BPE trained on the text, or a tokenizer.json. No torch.

A tokeniser is asked for by its spec: "bytes", "chars", "bpe:SIZE" or "file:PATH". `encode` yields the ids of a text in
pieces of a few million characters, so a large text needs little memory beside itself.
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

#: The legal specs, each with one line for `te-bench list`.
TOKENIZERS = {
    "bytes": "the 256 bytes of UTF-8",
    "chars": "the characters that occur in the text, sorted (nanoGPT's shakespeare_char)",
    "bpe:SIZE": "a byte-level BPE of at most SIZE tokens, trained on the training part of the text",
    "file:PATH": "a tokenizer.json of the package tokenizers",
}

# 256 bytes are every byte-level BPE's alphabet; the largest vocabularies in use have some 260,000 tokens.
BPE_SIZES = range(256, 1_000_001)

SLICE = 1 << 22  # characters that bytes and chars turn into ids at once: 16 MiB of UTF-32
CHUNK = 1 << 16  # characters in one string handed to `tokenizers`
CHUNKS = 32  # strings in one call: enough for its threads; 2 M characters of Encoding objects at a time

# Byte-level BPE begins a token before a single space or after a single newline, so cutting there changes no token.
_CUTS = (re.compile(r"\S(?= \S)"), re.compile(r"\S\n(?=\S)"))

Ids = NDArray[Any]  # (n,) of any unsigned integer type


class Tokenizer(Protocol):
    """`vocab` is one more than the largest id; `state` is what `restore` needs beside the spec, as JSON."""

    vocab: int

    @property
    def state(self) -> str | None: ...

    def encode(self, text: str) -> Iterator[Ids]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


def unknown(kind: str, value: str, legal: Mapping[str, str]) -> ValueError:
    """Return the error for an unknown spec; it lists the forms, the nearest ones first."""
    forms = {form.partition(":")[0]: form for form in legal}
    near = difflib.get_close_matches(value.partition(":")[0], forms, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(forms[name] for name in near)}?" if near else ""
    return ValueError(f"unknown {kind} {value!r}.{hint} Known: {', '.join(legal)}.")


def check(spec: str) -> tuple[str, str]:
    """Return (kind, argument) of a tokeniser's spec. Raises ValueError unless it has one of TOKENIZERS' forms."""
    kind, colon, argument = spec.partition(":")
    if kind not in ("bytes", "chars", "bpe", "file"):
        raise unknown("tokenizer", spec, TOKENIZERS)
    if kind in ("bytes", "chars"):
        if colon:
            raise ValueError(f"tokenizer {spec!r}: {kind} takes no argument; write {kind}")
    elif kind == "bpe":
        digits = argument.isascii() and argument.isdecimal() and len(argument) < 10
        if not digits or int(argument) not in BPE_SIZES:
            sizes = f"{BPE_SIZES[0]} to {BPE_SIZES[-1]}"
            raise ValueError(f"tokenizer {spec!r}: SIZE is a whole number from {sizes}; write for example bpe:50257")
    elif not argument:
        raise ValueError(f"tokenizer {spec!r} names no file; write file:PATH, with the path of a tokenizer.json")
    return kind, argument


class Bytes:
    """UTF-8 bytes as ids."""

    vocab = 256
    state: str | None = None

    def encode(self, text: str) -> Iterator[Ids]:
        for start in range(0, len(text), SLICE):
            yield np.frombuffer(text[start : start + SLICE].encode(), np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(ids).decode(errors="replace")  # a sample may begin or end inside a character


class Chars:
    """A tokeniser whose ids are indices into `characters`, which is sorted and without repetitions.

    `encode` raises ValueError for a text with other characters.
    """

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.vocab = len(characters)

    @property
    def state(self) -> str:
        return self.characters

    def encode(self, text: str) -> Iterator[Ids]:
        codes = np.frombuffer(self.characters.encode("utf-32-le"), "<u4")
        table = np.full(
            0x110000, self.vocab, np.uint32
        )  # Unicode's code points, 4.4 MB; no character has the id `vocab`
        table[codes] = np.arange(self.vocab)
        for start in range(0, len(text), SLICE):
            part = text[start : start + SLICE]
            ids = table[np.frombuffer(part.encode("utf-32-le"), "<u4")]
            if (ids == self.vocab).any():
                some = "".join(sorted(set(part) - set(self.characters))[:10])
                raise ValueError(
                    f"the tokenizer knows {self.vocab} characters, and not {some!r} of this text: give another text"
                )
            yield ids

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.characters[i] for i in ids)


class Subwords:
    """A tokeniser from a tokenizer.json. No special tokens are added; nothing is truncated, padded or dropped.

    Long texts are cut about every CHUNK characters, before a single space or else after a single newline. A byte-level
    BPE gives the same tokens; a tokeniser that treats a string's start specially sees one at each cut. Raises
    ValueError if `content` is not a tokenizer.json, and `encode` for a character that it would drop.
    """

    def __init__(self, content: str, source: str = "tokenizer.json") -> None:
        import tokenizers

        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises bare Exception for every fault of the content
            raise ValueError(f"{source} is not a tokenizer.json of the package tokenizers: {error}") from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        if getattr(self.tokenizer.model, "dropout", None):
            self.tokenizer.model.dropout = None
        self.content = content
        vocab = self.tokenizer.get_vocab()
        self.vocab = 1 + max(vocab.values(), default=-1)  # ids may have gaps
        if self.vocab == 0:
            raise ValueError(f"{source} has an empty vocabulary; give a tokenizer.json that has been trained")
        model = self.tokenizer.model
        whole = set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) <= vocab.keys()
        bpe = isinstance(model, tokenizers.models.BPE)  # which leaves out what it does not know
        self._encoded: set[str] = set()  # characters that are known to have a token
        self._may_drop = bpe and model.unk_token is None and not (model.byte_fallback or whole)

    @property
    def state(self) -> str:
        return self.content

    def encode(self, text: str) -> Iterator[Ids]:
        batch: list[str] = []
        for chunk in chunks(text):
            batch.append(chunk)
            if len(batch) == CHUNKS:
                yield self._ids(batch)
                batch = []
        if batch:
            yield self._ids(batch)

    def _ids(self, batch: list[str]) -> Ids:
        for character in sorted(set().union(*batch) - self._encoded) if self._may_drop else ():
            if not (character.isspace() or self.tokenizer.encode(character, add_special_tokens=False).ids):
                raise ValueError(
                    f"the tokenizer has no token for {character!r}, and drops it: give one with an unk_token, with "
                    "byte_fallback or of bytes"
                )
            self._encoded.add(character)
        try:
            encodings = self.tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        except Exception as error:  # bare again, for example for a character that the vocabulary lacks
            raise ValueError(f"the tokenizer cannot encode this text: {error}; take another") from error
        return np.concatenate([np.array(encoding.ids, np.uint32) for encoding in encodings])

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))


def build(spec: str, text: str, train_characters: int, source: str | None) -> Tokenizer:
    """Build the tokeniser of a text, training on its first `train_characters`. source: a tokenizer.json's content."""
    kind, argument = check(spec)
    if kind == "bytes":
        return Bytes()
    if kind == "chars":
        return Chars("".join(sorted(set(text))))
    if kind == "bpe":
        return Subwords(train_bpe(chunks(text, train_characters), int(argument)))
    assert source is not None
    return Subwords(source, argument)


def restore(kind: str, state: str | None) -> Tokenizer:
    """Rebuild a tokeniser from its kind ("bytes", "chars", "bpe", "file") and its state."""
    if kind == "bytes":
        return Bytes()
    assert state is not None
    return Chars(state) if kind == "chars" else Subwords(state)


def train_bpe(texts: Iterable[str], size: int) -> str:
    """Train a byte-level BPE of at most `size` tokens and return its tokenizer.json; short texts give fewer tokens.

    It uses GPT-2's pre-tokenisation and no special tokens. The same texts give the same bytes on any number of threads:
    the library counts words in integers and breaks ties between merges by id.
    """
    import tokenizers as library

    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    trainer = library.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def chunks(text: str, stop: int | None = None) -> Iterator[str]:
    """Yield the text up to `stop`, in order, in pieces of CHUNK to 2 * CHUNK characters; the last may be shorter."""
    start, stop = 0, len(text) if stop is None else stop
    while start < stop:
        end = start + CHUNK
        if end < stop:
            limit = min(end + CHUNK, stop)
            cuts = (cut.search(text, end - 1, limit) for cut in _CUTS)
            # Without a clean cut, keep the last stretch whole, and cut any other after CHUNK characters.
            end = next((found.end() for found in cuts if found), stop if limit == stop else end)
        yield text[start : min(end, stop)]
        start = end


def read(path: str) -> str:
    """Return the content of a tokenizer.json. Raises ValueError if it cannot be read or is not JSON."""
    content = read_utf8(path, "a tokenizer.json as file:PATH")
    try:
        json.loads(content)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; give a tokenizer.json as file:PATH") from error
    return content


def read_utf8(path: str, expected: str) -> str:
    """Return the text of a file, byte for byte. Raises ValueError, asking for `expected`, if it cannot be read."""
    try:
        return Path(path).expanduser().read_bytes().decode()
    except UnicodeDecodeError as error:
        what = f"{path} is not UTF-8: {error.reason} at byte offset {error.start}"
        raise ValueError(f"{what}; convert it, for example with iconv") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ without a home folder
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', error)}; give {expected}") from error
