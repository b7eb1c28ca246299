"""The Python sources of installed packages as one text file: a corpus that anyone can rebuild from pinned versions.

    python examples/python_sources.py sources.txt numpy scipy pandas
    te-bench run convergence --data text:sources.txt

Prints each package's version and size, and the SHA-256 of the whole. Files are in the order of their paths, so the tenth
that te-bench holds out is the end of the last package: how well what was learnt of others carries over. --shuffled
orders the files of all packages by the hashes of their paths: the tenth held out is like the rest.
"""

import argparse
import hashlib
import importlib.metadata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path


def sources(package: str) -> list[tuple[str, Path]]:
    """Name and place of the package's .py files as its installer recorded them. Raises ValueError where there is none."""
    try:
        files = importlib.metadata.files(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(f"{package} is not installed: pip install {package}") from error
    found = [(file.as_posix(), Path(str(file.locate()))) for file in files or () if file.suffix == ".py"]
    return sorted(found, key=lambda file: file[1])


def main(arguments: Sequence[str] | None = None) -> str:
    """Write the file; returns its SHA-256."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("packages", nargs="+")
    parser.add_argument("--shuffled", action="store_true")
    chosen = parser.parse_args(arguments)
    try:
        files = [(package, name, path) for package in chosen.packages for name, path in sources(package)]
    except ValueError as error:
        parser.error(str(error))
    if chosen.shuffled:
        files.sort(key=lambda file: hashlib.sha256(file[1].encode()).digest())
    total, sizes = hashlib.sha256(), Counter[str]()
    with chosen.out.open("wb") as out:
        for package, _, path in files:
            text = path.read_text(encoding="utf-8", errors="ignore").strip().encode() + b"\n\n"
            total.update(text)
            sizes[package] += out.write(text)
        for package in chosen.packages:
            print(f"{package} {importlib.metadata.version(package)}: {sizes[package] / 1e6:.1f} MB")
        print(f"{chosen.out}: {out.tell() / 1e6:.1f} MB, SHA-256 {total.hexdigest()}")
    return total.hexdigest()


if __name__ == "__main__":
    main()
