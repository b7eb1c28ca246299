"""The Python sources of installed packages as one text file: a corpus that anyone can rebuild from pinned versions.

    python examples/python_sources.py sources.txt numpy scipy pandas
    te-bench run convergence --data text:sources.txt

Prints each package's version and size, and the SHA-256 of the whole. Files are in the order of their paths.
"""

import argparse
import hashlib
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path


def sources(package: str) -> list[Path]:
    """The package's .py files as its installer recorded them. Raises ValueError where it is not installed."""
    try:
        files = importlib.metadata.files(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(f"{package} is not installed: pip install {package}") from error
    return sorted(Path(str(file.locate())) for file in files or () if file.suffix == ".py")


def main(arguments: Sequence[str] | None = None) -> str:
    """Write the file; returns its SHA-256."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("packages", nargs="+")
    chosen = parser.parse_args(arguments)
    try:
        paths = {package: sources(package) for package in chosen.packages}
    except ValueError as error:
        parser.error(str(error))
    total = hashlib.sha256()
    with chosen.out.open("wb") as out:
        for package, files in paths.items():
            begin = out.tell()
            for path in files:
                text = path.read_text(encoding="utf-8", errors="ignore").strip().encode() + b"\n\n"
                total.update(text)
                out.write(text)
            print(f"{package} {importlib.metadata.version(package)}: {(out.tell() - begin) / 1e6:.1f} MB")
        print(f"{chosen.out}: {out.tell() / 1e6:.1f} MB, SHA-256 {total.hexdigest()}")
    return total.hexdigest()


if __name__ == "__main__":
    main()
