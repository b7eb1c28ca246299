"""A text of Python sources that anyone rebuilds byte for byte."""

import hashlib
import io
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from te_bench.training import python_sources
from te_bench.training.python_sources import main


def source(name: str) -> bytes:
    return "".join(f"def {name}_{line}():\n    return {line}\n" for line in range(12)).encode()


FILES = {f"package/{name}.py": source(name) for name in ("a", "b", "c", "d", "e")}


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A wheel, an sdist and a file of its own; some files are in two of them, some are no text, some are too short."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "one-1.0-py3-none-any.whl", "w") as wheel:
        for name in ("package/a.py", "package/b.py"):
            wheel.writestr(name, FILES[name])
        wheel.writestr("package/__init__.py", "")
        wheel.writestr("package/data.json", "{}" * 400)
        wheel.writestr("package/latin.py", b"# caf\xe9" * 99)
    with tarfile.open(folder / "two-2.0.tar.gz", "w:gz") as sdist:
        for name in ("package/b.py", "package/c.py", "package/d.py"):  # b again, with a Windows line's end
            body = FILES[name].replace(b"\n", b"\r\n") if name.endswith("b.py") else FILES[name]
            entry = tarfile.TarInfo(f"two-2.0/{name}")
            entry.size = len(body)
            sdist.addfile(entry, io.BytesIO(body))
    (folder / "three").mkdir()
    (folder / "three" / "e.py").write_bytes(FILES["package/e.py"])
    return folder


def test_each_file_of_a_folder_s_archives_is_taken_once(wheels: Path, tmp_path: Path) -> None:
    digest = main([str(tmp_path / "out.txt"), str(wheels)])
    text = (tmp_path / "out.txt").read_bytes()
    assert hashlib.sha256(text).hexdigest() == digest
    assert sorted(text.split(b"\n\n")[:-1]) == sorted(body.strip() for body in FILES.values())


def test_the_text_depends_on_the_contents_alone(wheels, tmp_path, capsys):
    digest = main([str(tmp_path / "out.txt"), str(wheels)])
    (wheels / "one-1.0-py3-none-any.whl").rename(wheels / "zzz.zip")
    (wheels / "three" / "e.py").rename(wheels / "three" / "aa.py")
    assert main([str(tmp_path / "again.txt"), str(wheels)]) == digest
    assert f"SHA-256 {digest}" in capsys.readouterr().out
    text = (tmp_path / "out.txt").read_bytes()
    order = re.findall(rb"def (\w)_0", text)
    assert order != sorted(order)  # shuffled, so that a tenth is like the rest
    (wheels / "three" / "aa.py").write_bytes(source("f"))
    assert main([str(tmp_path / "other.txt"), str(wheels)]) != digest


def test_installed_packages_come_in_the_order_of_their_paths_or_shuffled(tmp_path, capsys):
    digest = main([str(tmp_path / "sources.txt"), "pluggy", "iniconfig"])
    text = (tmp_path / "sources.txt").read_bytes()
    assert text.index(b"class PluginManager") < text.index(b"class IniConfig")
    again = main([str(tmp_path / "mixed.txt"), "iniconfig", "pluggy", "--shuffled"])
    mixed = (tmp_path / "mixed.txt").read_bytes()
    assert again != digest
    assert again == main([str(tmp_path / "same.txt"), "pluggy", "iniconfig", "--shuffled"])
    assert sorted(mixed.splitlines()) == sorted(text.splitlines())  # the same files
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none.txt"), "no-such-package"])
    assert "no-such-package is no folder, and not installed" in capsys.readouterr().err
    assert not (tmp_path / "none.txt").exists()


@pytest.mark.parametrize("record", ["stubs/__init__.pyi,,\n", None], ids=["stubs", "no RECORD"])
def test_an_installed_package_without_sources_is_told(record, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "site" / "stubs-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: stubs\nVersion: 1.0\n")
    if record:
        (folder / "RECORD").write_text(record)
    monkeypatch.syspath_prepend(folder.parent)
    for sources in (["stubs"], ["pluggy", "stubs"]):
        with pytest.raises(SystemExit):
            main([str(tmp_path / "none.txt"), *sources])
        assert "stubs is installed, and its installer recorded no .py file of it" in capsys.readouterr().err
        assert not (tmp_path / "none.txt").exists()


def test_what_cannot_be_read_is_told(wheels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for sources, message in (
        ([str(wheels), "pluggy"], "name folders, or installed packages, not both"),
        ([str(wheels)], "cut.whl cannot be read"),
    ):
        (wheels / "cut.whl").write_bytes(b"PK")
        with pytest.raises(SystemExit):
            main([str(tmp_path / "none.txt"), *sources])
        assert message in capsys.readouterr().err


def corrupt(path: Path) -> None:
    """A zip whose compressed data are overwritten, and its directory is not."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.py", source("a"))
    body = bytearray(path.read_bytes())
    body[40:80] = b"\xff" * 40
    path.write_bytes(body)


def encrypted(path: Path) -> None:
    """A zip that says it is."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.py", source("a"))
    body = bytearray(path.read_bytes())
    body[6] |= 1
    body[body.find(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(body)


@pytest.mark.parametrize("spoil", [corrupt, encrypted])
def test_an_archive_that_cannot_be_unpacked_is_told(spoil, tmp_path, capsys):
    spoil(tmp_path / "bad.whl")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none.txt"), str(tmp_path)])
    assert "bad.whl cannot be read" in capsys.readouterr().err


def test_a_text_that_would_be_empty_or_has_no_place_is_told(wheels, tmp_path, capsys):
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "wheels").symlink_to(wheels)
    for out, folder, message in (
        (tmp_path / "none.txt", tmp_path / "linked", "no .py file of 200 bytes or more"),
        (tmp_path / "missing" / "none.txt", wheels, "No such file or directory"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([str(out), str(folder)])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
        assert not out.exists()


def test_every_package_of_the_list_has_one_version() -> None:
    lines = Path(python_sources.__file__).with_suffix(".txt").read_text().splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert len(pinned) >= 10
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", line) for line in pinned)
