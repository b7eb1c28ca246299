"""Turn the name of a data set and a tokeniser into memory-mapped token files, cached by content. No torch.

    corpus = prepare("stdlib", "bpe:50257")
    corpus.tokens("train")  # (train_tokens,) uint16, memory-mapped

The last tenth of the characters is held out for validation, as nanoGPT does for shakespeare_char. A cached corpus is a
folder named by the hash of its text and its tokeniser; it appears by one rename, complete, or not at all.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from te_bench.training import tokenizer as tokenizers
from te_bench.training.durable import sync

#: The legal forms of a data set's name, each with one line for `te-bench list datasets`.
DATASETS = {
    "stdlib": "the running Python's own library sources: always there, nothing to download (the default)",
    "text:PATH": "a UTF-8 file, read as it is",
    "hf:NAME[:CONFIG][:COLUMN]": "the train split of a Hugging Face data set or a folder of jsonl, parquet or csv",
    "hf-stream:NAME[:CONFIG][:COLUMN]": "the same without a download, up to the first 100 million characters",
    "cached:KEY": "tokens that the cache holds under that key; their text is not needed",
    "random": "uniformly random tokens over the model's vocabulary; no text, no files",
}
DEFAULT = "stdlib"
RANDOM, CACHED = "random", "cached:"

FORMAT = 1  # part of every cache key: raise it when the same text would give other files
STREAM_CHARACTERS = 100_000_000  # characters hf-stream reads: about 25 million GPT-2 tokens of English
SPLITS = ("train", "val")

_FOREIGN = {"site-packages", "dist-packages", "__pycache__"}

Progress = Callable[[str, float], None]  # called as (what is being done, fraction done)


@dataclass(frozen=True)
class Corpus:
    """A tokenised text: two files of little-endian `dtype` tokens below `vocab`; sha256 is the text's, in UTF-8."""

    data: str
    tokenizer: str
    sha256: str
    vocab: int
    train: Path
    val: Path
    train_tokens: int
    val_tokens: int
    dtype: str  # uint16 or uint32

    @property
    def key(self) -> str:
        """The name of this content on any machine, hashed from text and tokeniser; `load` finds the corpus by it."""
        return self.train.parent.name

    def tokens(self, split: str) -> NDArray[Any]:
        """The tokens of "train" or "val", memory-mapped and read-only."""
        path, count = {"train": (self.train, self.train_tokens), "val": (self.val, self.val_tokens)}[split]
        dtype = np.dtype(self.dtype).newbyteorder("<")
        return np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)

    def text_tokenizer(self) -> tokenizers.Tokenizer:
        """The tokeniser that wrote the files, to turn samples back into text."""
        state = self.train.with_name("tokenizer")
        kind = self.tokenizer.partition(":")[0]
        return tokenizers.restore(kind, state.read_bytes().decode() if state.exists() else None)


def check(data: str, tokenizer: str) -> None:
    """Raise ValueError, with the near matches, unless both are legal names. Reads no text, so plans stay cheap."""
    name, colon, argument = data.partition(":")
    if name not in {form.partition(":")[0] for form in DATASETS}:
        error = tokenizers.unknown("data set", data, DATASETS)
        with contextlib.suppress(OSError):  # a name too long for a file is not one
            if Path(data).is_file():
                error = ValueError(f"{error} For a file, write text:{data}.")
        raise error
    if name in (DEFAULT, RANDOM) and colon:
        raise ValueError(f"data set {data!r}: {name} takes no argument; write {name}")
    if name == "cached" and not argument.isalnum():
        raise ValueError(f"data set {data!r} names no folder of the token cache; write cached:KEY")
    if name == "text" and not argument:
        raise ValueError(f"data set {data!r} names no file; write text:PATH")
    if name in ("hf", "hf-stream"):
        _split_name(data)
    tokenizers.check(tokenizer)


def prepare(data: str, tokenizer: str, *, cache: Path | None = None, progress: Progress | None = None) -> Corpus:
    """Return the corpus of a text and a tokeniser, cached or tokenised into the cache; several processes may call it.

    Raises ValueError for an illegal name, an unreadable or empty text, a cache that cannot be written, and a cached
    corpus that is missing or from another tokeniser.
    """
    check(data, tokenizer)
    if data.startswith(CACHED):
        corpus = load(data.removeprefix(CACHED), cache=cache)
        if corpus.tokenizer != tokenizer:
            raise ValueError(
                f"data set {data!r} was tokenised by {corpus.tokenizer}, and this takes tokens of {tokenizer}: give the text"
            )
        return corpus
    if data == RANDOM:
        raise ValueError("data set 'random' has no text to prepare: its tokens are drawn while training")
    report = progress or (lambda what, fraction: None)
    kind, argument = tokenizers.check(tokenizer)
    source = tokenizers.read(argument) if kind == "file" else None
    report("reading", 0.0)
    text = read_text(data)
    sha256 = _sha256(text)
    report("reading", 1.0)
    identity = [FORMAT, sha256, kind if source else tokenizer, _sha256(source) if source else None]
    folder = (cache or default_cache()) / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    meta = _read_meta(folder)
    if meta is None:
        try:
            with locked(folder):
                meta = _read_meta(folder)  # another process may have written it while we waited
                if meta is None:
                    _write(folder, text, tokenizer, source, report, {"data": data, "sha256": sha256})
                    meta = _read_meta(folder)
        except OSError as error:
            what = f"cannot write the token cache {folder.parent}: {error.strerror or error}"
            raise ValueError(f"{what}. Make room or give a folder that can be written with --cache DIR") from error
    assert meta is not None
    return _make_corpus(folder, {**meta, "data": data, "tokenizer": tokenizer})


def load(key: str, *, cache: Path | None = None) -> Corpus:
    """Return the cached corpus of this key without reading its text. Raises ValueError if missing or incomplete."""
    folder = (cache or default_cache()) / key
    meta = _read_meta(folder) if key.isalnum() else None
    if meta is None:
        raise ValueError(f"no corpus {key!r} in the token cache {folder.parent}; prepare it first, or give --cache DIR")
    return _make_corpus(folder, meta)


def check_length(corpus: Corpus, block: int) -> None:
    """Raise ValueError unless the training and validation parts hold a window of `block` tokens and its targets."""
    for split, count in zip(SPLITS, (corpus.train_tokens, corpus.val_tokens), strict=True):
        if count < block + 1:
            raise ValueError(
                f"data set {corpus.data!r} is shorter than a block: its {split} part has {count} tokens with tokenizer "
                f"{corpus.tokenizer!r} and block {block} needs {block + 1}; take a longer text or a smaller block"
            )


def check_once(corpus: Corpus, block: int, rows: int) -> None:
    """Raise ValueError if the training part holds fewer than `rows` non-overlapping windows of `block` tokens."""
    there = windows_once(corpus, block)
    if rows > there:
        raise ValueError(
            f"each token is to be seen once: {rows * block / 1e6:.3g} M tokens a run, and the training part of data set "
            f"{corpus.data!r} has {there * block / 1e6:.3g} M; give a longer text with --data, or fewer --tokens"
        )


def windows_once(corpus: Corpus, block: int) -> int:
    """Count the non-overlapping windows of `block` tokens, with their targets, in the training part."""
    return max(0, corpus.train_tokens - 1) // block


def default_cache() -> Path:
    """$XDG_CACHE_HOME/te-bench, or ~/.cache/te-bench where that is unset or not an absolute path."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "te-bench"
    except RuntimeError as error:
        raise ValueError("no home folder to keep the token cache in; give one with --cache DIR") from error


# Read the text.


def read_text(data: str) -> str:
    """The text of a data set. Raises ValueError if it cannot be had or is empty."""
    name, _, argument = data.partition(":")
    if name == "stdlib":
        text = "".join(_end_in_newlines(_read_library(Path(sysconfig.get_path("stdlib")))))
    elif name == "cached":
        raise ValueError(f"data set {data!r} has tokens and no text; give the text itself")
    elif name == "text":
        text = tokenizers.read_utf8(argument, "a UTF-8 file as text:PATH")
    else:
        text = _read_hf(data, streaming=name == "hf-stream")
    if not text:
        raise ValueError(f"data set {data!r} is empty; give one with text in it")
    return text


def _end_in_newlines(texts: Iterable[str]) -> Iterator[str]:
    """Append a newline to each document that lacks one, so that no two documents run together."""
    for text in texts:
        yield text if text.endswith("\n") else text + "\n"


def _read_library(root: Path) -> Iterator[str]:
    """The *.py files under `root` by relative path, less installed packages.

    The few that are not UTF-8 (Python's own tests of source encodings) are skipped: they would be mojibake, and
    decoding them by their coding line would train on text that no other data set can hold byte for byte.
    """
    files = dict[str, Path]()
    for folder, below, names in os.walk(root):
        below[:] = (name for name in below if name not in _FOREIGN)  # installed packages have ten times as many files
        paths = (Path(folder, name) for name in names if name.endswith(".py"))
        files |= {path.relative_to(root).as_posix(): path for path in paths if path.is_file()}
    for relative in sorted(files):
        with contextlib.suppress(UnicodeDecodeError):
            yield files[relative].read_bytes().decode()


def _split_name(data: str) -> list[str]:
    """Return [NAME], [NAME, CONFIG or COLUMN] or [NAME, CONFIG, COLUMN]; an empty CONFIG or COLUMN is the default."""
    form, *fields = data.split(":")
    if not 1 <= len(fields) <= 3 or not fields[0]:
        raise ValueError(f"data set {data!r}: write {form}:NAME, {form}:NAME:COLUMN or {form}:NAME:CONFIG:COLUMN")
    return fields


def _read_hf(data: str, *, streaming: bool) -> str:
    """Return one column's rows as text, a document each; nulls are skipped. Raises ValueError for any other value."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ValueError(f"data set {data!r} needs the package 'datasets': pip install datasets") from error
    bars = datasets.utils.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        rows, column = _open_hf(datasets, data, streaming)
        texts = _end_in_newlines(_require_text(_read_cells(rows, data, column), data, column))
        return "".join(_take(texts, STREAM_CHARACTERS if streaming else None))
    except (datasets.exceptions.DatasetsError, OSError, RuntimeError) as error:  # RuntimeError: it has a script
        # The library's DatasetGenerationError says only that there was an error; its cause says which.
        raise ValueError(f"cannot load data set {data!r}: {error.__cause__ or error}") from error
    finally:
        if not bars:
            datasets.enable_progress_bars()


def _open_hf(datasets: Any, data: str, streaming: bool) -> tuple[Any, str]:
    """Return (the train split, the name of its column).

    With two fields, the second is a config if the data set has one of that name, otherwise a column. Code that comes
    with a data set is never run: new versions of the library cannot run it, and we forbid it to older ones.
    """
    name, *rest = _split_name(data)
    configs: list[str] = []
    config = column = ""
    if len(rest) == 2:
        config, column = rest
    elif rest and rest[0]:
        configs = datasets.get_dataset_config_names(name)
        config, column = (rest[0], "") if rest[0] in configs else ("", rest[0])
    column = column or "text"
    try:
        rows = datasets.load_dataset(name, config or None, split="train", streaming=streaming, trust_remote_code=False)
        columns = rows.column_names or list(next(iter(rows), {}))
    except ValueError as error:  # an unknown config or split; the library's message lists the known ones
        raise ValueError(f"cannot load data set {data!r}: {error}") from error
    if column not in columns:
        there = f"it has {', '.join(columns)}" + (f" (and configs {', '.join(configs)})" if configs else "")
        raise ValueError(f"data set {data!r} has no column {column!r}; {there}. Name one as NAME:CONFIG:COLUMN")
    return rows, column


def _read_cells(rows: Any, data: str, column: str) -> Iterator[Any]:
    try:
        for batch in rows.select_columns([column]).iter(batch_size=1000):
            yield from batch[column]
    except ValueError as error:  # from pyarrow, when later rows have another type than the first
        raise ValueError(f"cannot read data set {data!r}: {error}") from error


def _require_text(cells: Iterable[Any], data: str, column: str) -> Iterator[str]:
    for cell in cells:
        if isinstance(cell, str):
            yield cell
        elif cell is not None:
            raise ValueError(f"data set {data!r}: column {column!r} holds {type(cell).__name__}, not text")


def _take(texts: Iterable[str], limit: int | None) -> Iterator[str]:
    """Yield the texts up to `limit` characters in total, and read none after that."""
    for text in texts:
        if limit is not None and len(text) >= limit:
            yield text[:limit]
            return
        limit = None if limit is None else limit - len(text)
        yield text


# The cache.


def _sha256(text: str) -> str:
    digest = hashlib.sha256()
    for start in range(0, len(text), tokenizers.SLICE):
        digest.update(text[start : start + tokenizers.SLICE].encode())
    return digest.hexdigest()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock for writing `folder`. The kernel drops it when the process ends, even by a kill."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read_meta(folder: Path) -> dict[str, Any] | None:
    """Return the meta data of a complete cached corpus; None if it is missing, of another format, or truncated."""
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        sizes = {name: (folder / name).stat().st_size for name in meta["bytes"]}
        whole = meta["format"] == FORMAT and sizes == meta["bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dict(meta) if whole else None


def _make_corpus(folder: Path, meta: dict[str, Any]) -> Corpus:
    kept = ("data", "tokenizer", "sha256", "vocab", "train_tokens", "val_tokens", "dtype")
    return Corpus(train=folder / "train.bin", val=folder / "val.bin", **{name: meta[name] for name in kept})


def _write(folder: Path, text: str, spec: str, source: str | None, report: Progress, known: dict[str, Any]) -> None:
    """Write the corpus beside `folder`, then rename it. The caller holds the lock, so no other process writes there."""
    beside = folder.with_suffix(".tmp")
    _remove(beside)
    try:
        beside.mkdir()
        split = int(len(text) * 0.9)
        report("training the tokenizer", 0.0)
        tokenizer = tokenizers.build(spec, text, split, source)
        report("training the tokenizer", 1.0)
        dtype = "uint16" if tokenizer.vocab <= 1 << 16 else "uint32"
        parts = dict(zip(SPLITS, (text[:split], text[split:]), strict=True))
        counts, done = {}, 0
        for name, part in parts.items():
            with _open_durably(beside / f"{name}.bin") as file:
                counts[name] = _write_tokens(file, tokenizer, part, dtype)
            done += len(part)
            report("tokenising", done / len(text))
        if tokenizer.state is not None:
            with _open_durably(beside / "tokenizer") as file:
                file.write(tokenizer.state.encode())
        meta = {"format": FORMAT, **known, "tokenizer": spec, "vocab": tokenizer.vocab, "dtype": dtype}
        meta |= {f"{name}_tokens": count for name, count in counts.items()}
        meta["bytes"] = {path.name: path.stat().st_size for path in sorted(beside.iterdir())}
        with _open_durably(beside / "meta.json") as file:
            file.write(json.dumps(meta, indent=1).encode())
        sync(beside)
        _remove(folder)  # remove an incomplete corpus
        beside.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _remove(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _write_tokens(file: IO[bytes], tokenizer: tokenizers.Tokenizer, text: str, dtype: str) -> int:
    """Write the tokens of a text as little-endian `dtype`, and return their number."""
    count = 0
    for ids in tokenizer.encode(text):
        assert ids.size == 0 or ids.max() < tokenizer.vocab
        file.write(ids.astype(np.dtype(dtype).newbyteorder("<")).data)
        count += ids.size
    return count


@contextlib.contextmanager
def _open_durably(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that is on disk (fsync) once the block ends."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
