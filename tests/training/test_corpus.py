import dataclasses
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from te_bench.training import corpus, tokenizer
from te_bench.training.corpus import Corpus, check, check_length, load, prepare

TEXT = "First Citizen:\r\nBefore we proceed, hear me speak. Grüße, 日本語 🙂\n\n" * 30

# Prepares argv[1] with argv[2] in the cache argv[3]; argv[4] is the body of a progress callback.
CHILD = """
import os, signal, sys, time
from pathlib import Path
from te_bench.training.corpus import prepare
def progress(what, fraction):
    exec(sys.argv[4])
print(prepare(sys.argv[1], sys.argv[2], cache=Path(sys.argv[3]), progress=progress))
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "input.txt"
    path.write_bytes(TEXT.encode())
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def child(text: Path, cache: Path, progress: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", CHILD, f"text:{text}", "bpe:300", str(cache), progress]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def decoded(found: Corpus) -> str:
    words = found.text_tokenizer()
    return words.decode(found.tokens("train").tolist()) + words.decode(found.tokens("val").tolist())


# Tokens and their files.


def test_chars_follow_nanogpt(text: Path, cache: Path) -> None:
    found = prepare(f"text:{text}", "chars", cache=cache)
    alphabet, split = sorted(set(TEXT)), int(len(TEXT) * 0.9)
    assert found.vocab == len(alphabet)
    assert found.dtype == "uint16"
    assert found.train.read_bytes() == np.array([alphabet.index(c) for c in TEXT[:split]], "<u2").tobytes()
    assert found.val.read_bytes() == np.array([alphabet.index(c) for c in TEXT[split:]], "<u2").tobytes()
    assert (found.train_tokens, found.val_tokens) == (split, len(TEXT) - split)
    assert found.sha256 == hashlib.sha256(TEXT.encode()).hexdigest()
    assert isinstance(found.tokens("train"), np.memmap)
    assert not found.tokens("train").flags.writeable


@given(st.text(min_size=1, max_size=50), st.sampled_from(["bytes", "chars", "bpe:260"]))
@settings(deadline=None, max_examples=40)
def test_any_text_survives(tmp_path_factory: pytest.TempPathFactory, text: str, spec: str) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "t").write_bytes(text.encode())
    found = prepare(f"text:{folder / 't'}", spec, cache=folder)
    assert decoded(found) == text
    assert found.train_tokens == len(found.tokens("train"))
    assert max([*found.tokens("train"), *found.tokens("val")]) < found.vocab


def test_tokenizer_file_and_wide_tokens(text: Path, cache: Path, tmp_path: Path) -> None:
    vocab = {character: 70_000 + i for i, character in enumerate(sorted(set(TEXT)))}
    content = {"model": {"type": "BPE", "vocab": vocab, "merges": []}}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    found = prepare(f"text:{text}", f"file:{path}", cache=cache)
    assert found.dtype == "uint32"
    assert found.vocab == 70_000 + len(vocab)
    assert found.train.stat().st_size == 4 * found.train_tokens
    assert found.tokens("val").tolist() == [vocab[c] for c in TEXT[int(len(TEXT) * 0.9) :]]


@pytest.mark.parametrize(("vocab", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_the_token_type_changes_after_65536(text: Path, cache: Path, vocab: int, dtype: str) -> None:
    with mock.patch.object(tokenizer.Bytes, "vocab", vocab):
        assert prepare(f"text:{text}", "bytes", cache=cache).dtype == dtype


# The cache.


def test_the_second_time_nothing_is_tokenised(text: Path, cache: Path, tmp_path: Path) -> None:
    first = prepare(f"text:{text}", "bpe:300", cache=cache)
    copy = tmp_path / "copy.txt"
    copy.write_bytes(text.read_bytes())
    with mock.patch.object(tokenizer, "build", side_effect=AssertionError):
        assert prepare(f"text:{text}", "bpe:300", cache=cache) == first
        assert prepare(f"text:{copy}", "bpe:300", cache=cache) == dataclasses.replace(first, data=f"text:{copy}")
        assert load(first.key, cache=cache) == first


def test_a_copy_of_the_cache_needs_no_text(text: Path, cache: Path, tmp_path: Path) -> None:
    made = prepare(f"text:{text}", "bpe:300", cache=cache)
    shutil.copytree(made.train.parent, tmp_path / "node" / made.key)
    text.unlink()
    found = prepare(f"cached:{made.key}", "bpe:300", cache=tmp_path / "node")
    assert (found.key, found.data, found.sha256) == (made.key, made.data, made.sha256)
    assert (found.tokens("train") == made.tokens("train")).all()
    with pytest.raises(ValueError, match="tokenised by bpe:300, and this takes tokens of bytes"):
        prepare(f"cached:{made.key}", "bytes", cache=tmp_path / "node")
    with pytest.raises(ValueError, match="no corpus '0000' in the token cache"):
        prepare("cached:0000", "bytes", cache=tmp_path / "node")
    with pytest.raises(ValueError, match="has tokens and no text"):
        corpus.read_text(f"cached:{made.key}")


def test_the_key_is_the_content(text: Path, cache: Path, tmp_path: Path) -> None:
    bpe = prepare(f"text:{text}", "bpe:300", cache=cache)
    saved = tmp_path / "t.json"
    saved.write_bytes(bpe.train.with_name("tokenizer").read_bytes())
    keys = {
        bpe.key,
        *(prepare(f"text:{text}", spec, cache=cache).key for spec in ("bytes", "bpe:301", f"file:{saved}")),
    }
    saved.write_bytes(saved.read_bytes() + b"\n")
    keys.add(prepare(f"text:{text}", f"file:{saved}", cache=cache).key)
    text.write_bytes(TEXT.encode() + b"!")
    keys.add(prepare(f"text:{text}", "bpe:300", cache=cache).key)
    with mock.patch.object(corpus, "FORMAT", corpus.FORMAT + 1):
        keys.add(prepare(f"text:{text}", "bpe:300", cache=cache).key)
    assert len(keys) == 7


def test_two_caches_agree_bit_for_bit(text: Path, tmp_path: Path) -> None:
    one, two = (prepare(f"text:{text}", "bpe:400", cache=tmp_path / name) for name in "ab")
    assert one.key == two.key
    for name in ("train.bin", "val.bin", "tokenizer", "meta.json"):
        assert one.train.with_name(name).read_bytes() == two.train.with_name(name).read_bytes()


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "tokenizer", "meta.json"])
@pytest.mark.parametrize("harm", ["cut", "empty", "gone", "longer"])
def test_a_damaged_file_is_rebuilt(text: Path, cache: Path, name: str, harm: str) -> None:
    found = prepare(f"text:{text}", "chars", cache=cache)
    path = found.train.with_name(name)
    whole = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut": whole[:-1], "empty": b"", "longer": whole + b"x"}[harm])
    with pytest.raises(ValueError, match="prepare it first"):
        load(found.key, cache=cache)
    assert prepare(f"text:{text}", "chars", cache=cache) == found
    assert path.read_bytes() == whole


@pytest.mark.parametrize("content", ["null", "[]", "{}", '{"format": 1}', '{"format": 1, "bytes": 3}'])
def test_a_foreign_meta_is_not_believed(text: Path, cache: Path, content: str) -> None:
    found = prepare(f"text:{text}", "bytes", cache=cache)
    found.train.with_name("meta.json").write_text(content)
    assert prepare(f"text:{text}", "bytes", cache=cache) == found


def test_another_format_is_not_loaded(text: Path, cache: Path) -> None:
    found = prepare(f"text:{text}", "bytes", cache=cache)
    with mock.patch.object(corpus, "FORMAT", corpus.FORMAT + 1), pytest.raises(ValueError, match="prepare it first"):
        load(found.key, cache=cache)


@pytest.mark.parametrize("key", ["", ".", "..", "../x", "0" * 16])
def test_load_knows_no_other_keys(text: Path, cache: Path, key: str) -> None:
    prepare(f"text:{text}", "bytes", cache=cache)
    with pytest.raises(ValueError, match="no corpus"):
        load(key, cache=cache)


@pytest.mark.parametrize("moment", ["training the tokenizer", "tokenising"])
def test_killed_while_writing(text: Path, cache: Path, moment: str) -> None:
    killed = child(text, cache, f"if what == {moment!r}: os.kill(os.getpid(), signal.SIGKILL)")
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    (left,) = cache.glob("*.tmp")
    with pytest.raises(ValueError, match="no corpus"):
        load(left.stem, cache=cache)
    found = prepare(f"text:{text}", "bpe:300", cache=cache)
    assert found.key == left.stem
    assert decoded(found) == TEXT
    assert sorted(path.name for path in cache.iterdir()) == [found.key, f"{found.key}.lock"]


def test_several_processes_prepare_the_same(text: Path, cache: Path) -> None:
    # Each would-be writer lingers, so that the others arrive while the first is at work.
    crowd = [child(text, cache, "if what != 'reading': print(what, fraction); time.sleep(0.3)") for _ in range(3)]
    outputs = [process.communicate()[0].splitlines() for process in crowd]
    assert [process.returncode for process in crowd] == [0, 0, 0]
    assert len({lines[-1] for lines in outputs}) == 1
    assert sorted(len(lines) for lines in outputs) == [1, 1, 5]  # one wrote, two found it there
    assert decoded(prepare(f"text:{text}", "bpe:300", cache=cache)) == TEXT


def test_a_full_disk_leaves_nothing(text: Path, cache: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(ValueError, match=r"cannot write the token cache .*cache: .*--cache DIR"):
            prepare(f"text:{text}", "bytes", cache=cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    assert decoded(prepare(f"text:{text}", "bytes", cache=cache)) == TEXT


def test_a_cache_that_cannot_be_made(text: Path) -> None:
    with pytest.raises(ValueError, match=r"input\.txt/cache: Not a directory.*--cache DIR"):
        prepare(f"text:{text}", "bytes", cache=text / "cache")


def test_a_read_only_cache(text: Path, cache: Path) -> None:
    found = prepare(f"text:{text}", "bytes", cache=cache)
    cache.chmod(0o500)
    try:
        if os.access(cache, os.W_OK):
            pytest.skip("this user may write anywhere")
        assert prepare(f"text:{text}", "bytes", cache=cache) == found
        with pytest.raises(ValueError, match=r"Permission denied.*--cache DIR"):
            prepare(f"text:{text}", "chars", cache=cache)
    finally:
        cache.chmod(0o700)


def test_the_default_cache_follows_xdg(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert corpus.default_cache() == tmp_path / "home/.cache/te-bench"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert prepare(f"text:{text}", "bytes").train.is_relative_to(tmp_path / "xdg/te-bench")


# Where the text comes from.


def test_stdlib_is_every_source_of_the_library_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "b.py": b"b\r\n",
        "a/z.py": b"az",
        "a.py": b"a\n",
        "a/empty.py": b"",
        "a/latin.py": b"# caf\xe9\n",
        "a/notes.txt": b"no\n",
        "site-packages/p.py": b"no\n",
        "dist-packages/p.py": b"no\n",
        "a/__pycache__/p.py": b"no\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path) if name == "stdlib" else "")
    assert corpus.read_text("stdlib") == "a\n" + "\n" + "az\n" + "b\r\n"


def test_folders_of_packages_are_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch and what comes with it hold ten times as many files as the library."""
    for folder in ("json", "site-packages/torch", "json/__pycache__"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "json/a.py").write_text("a\n")
    searched, scandir = list[str](), os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: searched.append(str(folder)) or scandir(folder))
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    assert corpus.read_text("stdlib") == "a\n"
    assert searched == [str(tmp_path), str(tmp_path / "json")]


def test_the_real_stdlib_is_there() -> None:
    text = corpus.read_text("stdlib")
    assert len(text) > 5_000_000
    assert "def dataclass(" in text
    assert "import pytest\n" not in text


def test_errors_of_a_text_file(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "t.txt"
    for content, words in ((b"", "is empty"), (b"ab\xff", r"t\.txt is not UTF-8: .* byte offset 2")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            prepare(f"text:{path}", "bytes", cache=cache)
    with pytest.raises(ValueError, match=r"Is a directory.*text:PATH"):
        prepare(f"text:{tmp_path}", "bytes", cache=cache)
    with pytest.raises(ValueError, match=r"missing: No such file.*text:PATH"):
        prepare(f"text:{tmp_path}/missing", "bytes", cache=cache)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("stdlb", ["'stdlb'", "Did you mean stdlib", "text:PATH", "random"]),
        ("hf-streem:x", ["Did you mean hf-stream:NAME[:CONFIG][:COLUMN]"]),
        ("stdlib:x", ["takes no argument"]),
        ("random:7", ["takes no argument"]),
        ("text:", ["text:PATH"]),
        ("cached:", ["cached:KEY"]),
        ("cached:../x", ["cached:KEY"]),
        ("hf:", ["hf:NAME:CONFIG:COLUMN"]),
        ("hf:a:b:c:d", ["hf:NAME:CONFIG:COLUMN"]),
        ("x" * 5000, ["Known: stdlib"]),
    ],
)
def test_bad_names_are_explained(data: str, words: list[str]) -> None:
    for refuse in (check, prepare):
        with pytest.raises(ValueError) as caught:
            refuse(data, "bytes")
        assert all(word in str(caught.value) for word in words), caught.value


def test_a_bare_path_is_told_how_to_be_written(text: Path) -> None:
    with pytest.raises(ValueError, match=f"write text:{text}"):
        check(str(text), "bytes")


def test_a_bad_tokenizer_is_refused_before_the_text_is_read() -> None:
    with pytest.raises(ValueError, match="Did you mean bytes"):
        prepare("text:/nowhere", "byte")


def test_every_listed_form_is_legal() -> None:
    for data in corpus.DATASETS:
        check(data.replace("[", "").replace("]", ""), "bytes")
    for spec in tokenizer.TOKENIZERS:
        check("random", spec.replace("SIZE", "300"))


def test_random_has_nothing_to_prepare() -> None:
    with pytest.raises(ValueError, match="drawn while training"):
        prepare("random", "bytes")


def test_shorter_than_a_block(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "t").write_text("x" * 100)
    found = prepare(f"text:{tmp_path / 't'}", "bytes", cache=cache)
    check_length(found, 9)
    with pytest.raises(ValueError, match=r"shorter than a block: its val part has 10 tokens .* block 10 needs 11"):
        check_length(found, 10)
    with pytest.raises(ValueError, match=r"train part has 90 tokens .* block 90 needs 91"):
        check_length(found, 90)
    (tmp_path / "t").write_text("x")
    tiny = prepare(f"text:{tmp_path / 't'}", "chars", cache=cache)
    assert (tiny.train_tokens, tiny.val_tokens, len(tiny.tokens("train"))) == (0, 1, 0)


def test_progress_is_told(text: Path, cache: Path) -> None:
    told: list[tuple[str, float]] = []
    report: Callable[[str, float], None] = lambda what, fraction: told.append((what, fraction))  # noqa: E731
    prepare(f"text:{text}", "bpe:300", cache=cache, progress=report)
    assert [what for what, _ in told] == ["reading"] * 2 + ["training the tokenizer"] * 2 + ["tokenising"] * 2
    assert told[-1][1] == 1.0


def test_preparing_needs_neither_torch_nor_datasets(text: Path, cache: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from te_bench.training.corpus import prepare;"
        f"prepare('text:{text}', 'bytes', cache=Path({str(cache)!r}));"
        "print(sorted({'torch', 'datasets', 'tokenizers', 'te_bench.training.data'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


# Hugging Face data sets, from folders on this disk.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", str(tmp_path / "hf-modules"))
    (tmp_path / "set").mkdir()
    return tmp_path / "set"


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    if path.suffix == ".parquet":
        pytest.importorskip("pandas").DataFrame(rows).to_parquet(path)
    elif path.suffix == ".csv":
        pytest.importorskip("pandas").DataFrame(rows).to_csv(path, index=False)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


ROWS: list[dict[str, object]] = [{"text": "Grüße", "code": "x = 1\n", "n": 1}, {"text": "b\n", "code": "y", "n": 2}]


@pytest.mark.parametrize("form", ["hf", "hf-stream"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_rows_are_documents(folder: Path, form: str, suffix: str) -> None:
    write_rows(folder / f"rows.{suffix}", ROWS)
    assert corpus.read_text(f"{form}:{folder}") == "Grüße\nb\n"
    assert corpus.read_text(f"{form}:{folder}:code") == "x = 1\ny\n"
    assert corpus.read_text(f"{form}:{folder}::code") == "x = 1\ny\n"
    assert corpus.read_text(f"{form}:{folder}:default") == "Grüße\nb\n"
    assert corpus.read_text(f"{form}:{folder}:default:code") == "x = 1\ny\n"


@pytest.mark.parametrize("form", ["hf", "hf-stream"])
def test_faults_of_a_data_set(folder: Path, form: str, cache: Path) -> None:
    write_rows(folder / "rows.jsonl", ROWS)
    cases = {
        "nope": r"no column 'nope'; it has text, code, n \(and configs default\)",
        ":nope": r"no column 'nope'; it has text, code, n\.",
        "n": "column 'n' holds int, not text",
        "nope:text": "nope.*default",
    }
    for rest, words in cases.items():
        with pytest.raises(ValueError, match=words):
            prepare(f"{form}:{folder}:{rest}", "bytes", cache=cache)
    with pytest.raises(ValueError, match=r"cannot load data set .*absent"):
        prepare(f"{form}:{folder}/absent", "bytes", cache=cache)
    (folder / "rows.jsonl").rename(folder / "test.jsonl")
    with pytest.raises(ValueError, match=r"cannot load data set .*train"):
        prepare(f"{form}:{folder}", "bytes", cache=cache)
    assert not cache.exists()


@pytest.mark.parametrize("form", ["hf", "hf-stream"])
def test_broken_rows_are_explained(folder: Path, form: str) -> None:
    (folder / "rows.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(ValueError, match=f"cannot load data set '{form}:.*JSON"):
        corpus.read_text(f"{form}:{folder}")


@pytest.mark.parametrize("form", ["hf", "hf-stream"])
def test_rows_that_break_off_late_are_explained(folder: Path, form: str) -> None:
    write_rows(folder / "rows-1.jsonl", ROWS)
    (folder / "rows-2.jsonl").write_text('{"text": "a", "code": "b", "n": 3}\n{"text": \n')
    with pytest.raises(ValueError, match=f"data set '{form}:.*JSON"):
        corpus.read_text(f"{form}:{folder}")


@pytest.mark.parametrize("form", ["hf", "hf-stream"])
def test_nulls_are_left_out(folder: Path, form: str) -> None:
    write_rows(folder / "rows.jsonl", [{"text": "a"}, {"text": None}, {"text": "b"}])
    assert corpus.read_text(f"{form}:{folder}") == "a\nb\n"


def test_a_stream_stops_after_its_characters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And reads no further: what is broken behind them goes unseen."""
    write_rows(folder / "rows-1.jsonl", [{"text": f"row {i}"} for i in range(3000)])
    monkeypatch.setattr(corpus, "STREAM_CHARACTERS", 10)
    assert len(corpus.read_text(f"hf:{folder}")) > 10_000
    (folder / "rows-2.jsonl").write_text('{"text": \n')
    assert corpus.read_text(f"hf-stream:{folder}") == "row 0\nrow "


def test_no_code_of_a_data_set_is_run(folder: Path) -> None:
    marker = folder.parent / "ran"
    (folder / "set.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(ValueError, match="cannot load data set"):
        corpus.read_text(f"hf:{folder}")
    assert not marker.exists()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="'hf:x' needs the package 'datasets': pip install datasets"):
        corpus.read_text("hf:x")
