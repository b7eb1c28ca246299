"""Python sources as one text to train on: anyone rebuilds it, without a network, from packages of pinned versions.

    pip download --only-binary=:all: --platform any --python-version 3.13 --no-deps -d wheels -r python_sources.txt
    python -m te_bench.training.python_sources python.txt wheels
    te-bench run convergence --preset gpt2 --data text:python.txt

python_sources.txt lies beside this file; some of its packages ask for Python 3.12, their sources for none.
Of folders of wheels, sdists or .py files each different file is taken once, in the order of the hashes of their contents:
neither the archives' names nor the machine matter, and the tenth that te-bench holds out is like the rest. Of installed
packages, named instead, files come in the order of their paths; --shuffled orders them by the hashes of their paths.
Prints the SHA-256 of the text, which every trial records.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import itertools
import lzma
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

SHORTEST = 200  # bytes: most shorter files are empty or import names

#: Exceptions of zipfile and tarfile for archives that are cut, corrupt, encrypted (RuntimeError) or in an unknown
#: format.
UNREADABLE = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError)


def of_folder(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (archive or file, source) of every .py file in the folder: in wheels, zips and tarballs, and unpacked.

    Raises ValueError for an archive that cannot be read.
    """
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        try:
            if path.suffix in (".whl", ".zip"):
                with zipfile.ZipFile(path) as archive:
                    for member in archive.namelist():
                        if member.endswith(".py"):
                            yield name, archive.read(member)
            elif path.suffixes[-2:-1] == [".tar"] or path.suffix in (".tgz", ".tar"):
                with tarfile.open(path) as archive:
                    for entry in archive:
                        if entry.isfile() and entry.name.endswith(".py") and (file := archive.extractfile(entry)):
                            yield name, file.read()
            elif path.suffix == ".py" and path.is_file():
                yield name.partition("/")[0], path.read_bytes()
        except UNREADABLE as error:
            raise ValueError(
                f"{path} cannot be read: {error}; download it again, or take it out of {folder}"
            ) from error


def different(files: Iterator[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Return (archive, text) of each different UTF-8 file of at least SHORTEST bytes, ordered by the texts' hashes."""
    found: dict[bytes, tuple[str, bytes]] = {}
    for name, source in files:
        with contextlib.suppress(UnicodeDecodeError):
            text = source.decode().replace("\r\n", "\n").strip().encode()
            if len(text) >= SHORTEST:
                digest = hashlib.sha256(text).digest()
                found[digest] = min(found.get(digest, (name, text)), (name, text))
    return [found[digest] for digest in sorted(found)]


def of_package(package: str) -> list[tuple[str, Path]]:
    """Return (name, path) of the package's .py files as its installer recorded them. Raises ValueError for none."""
    try:
        files = importlib.metadata.files(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(f"{package} is no folder, and not installed: pip install {package}") from error
    found = [(file.as_posix(), Path(str(file.locate()))) for file in files or () if file.suffix == ".py"]
    if not found:
        raise ValueError(
            f"{package} is installed, and its installer recorded no .py file of it; name a folder of its sources instead"
        )
    return sorted(found, key=lambda file: file[1])


def of_packages(packages: Sequence[str], *, shuffled: bool) -> Iterator[tuple[str, bytes]]:
    """Yield (package and version, text) of installed packages' files."""
    files = [(package, name, path) for package in packages for name, path in of_package(package)]
    if shuffled:
        files.sort(key=lambda file: hashlib.sha256(file[1].encode()).digest())
    versions = {package: f"{package} {importlib.metadata.version(package)}" for package in packages}
    return ((versions[p], path.read_text(encoding="utf-8", errors="ignore").strip().encode()) for p, _, path in files)


def main(arguments: Sequence[str] | None = None) -> str:
    """Write the text to a file, and return its SHA-256."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("sources", nargs="+", metavar="FOLDER|PACKAGE", help="folders, or names of installed packages")
    parser.add_argument("--shuffled", action="store_true", help="of installed packages; folders always are")
    chosen = parser.parse_args(arguments)
    folders = [Path(source) for source in chosen.sources if Path(source).is_dir()]
    if folders and len(folders) < len(chosen.sources):
        parser.error("name folders, or installed packages, not both: their files are ordered in different ways")
    total, sizes = hashlib.sha256(), Counter[str]()
    try:
        if folders:
            files: Iterator[tuple[str, bytes]] = iter(
                different(file for folder in folders for file in of_folder(folder))
            )
        else:
            files = of_packages(chosen.sources, shuffled=chosen.shuffled)
        if (first := next(files, None)) is None:  # of folders: of_package refuses a package without files
            raise ValueError(
                f"{', '.join(chosen.sources)}: no .py file of {SHORTEST} bytes or more; links to folders are not followed"
            )
        with chosen.out.open("wb") as out:
            for name, source in itertools.chain([first], files):
                text = source + b"\n\n"
                total.update(text)
                sizes[name] += out.write(text)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    for name, size in sizes.items():
        print(f"{name}: {size / 1e6:.1f} MB")
    print(f"{chosen.out}: {sum(sizes.values()) / 1e6:.1f} MB, SHA-256 {total.hexdigest()}")
    return total.hexdigest()


if __name__ == "__main__":
    main()
