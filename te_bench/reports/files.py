"""Write files whole or not at all, and the folder of a page."""

import re
from collections.abc import Mapping
from pathlib import Path

from te_bench.experiments.store import own
from te_bench.training.durable import replacing


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file's content in one step: a reader sees either the old bytes or the new ones."""
    with replacing(path, durable=False) as temporary:
        temporary.write_bytes(data)


def write_folder(out: Path, files: Mapping[str, bytes], what: str) -> None:
    """Write the files of `what`, its figures in figures/, under `out`. Raises ValueError when that cannot be written.

    Figures that the Markdown there before linked to, and `files` has not, are deleted.
    """
    try:
        own(out / "figures").mkdir(parents=True, exist_ok=True)
        linked = [link for name in files if name.endswith(".md") for link in _figures_of(out / name)]
        for name, data in files.items():
            write_atomically(out / name, data)
        for name in linked:
            if name not in files:
                (out / name).unlink(missing_ok=True)
                (out / name).with_suffix(".png").unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write the {what} to {out}: {error.strerror}. Choose another --out.") from error


def _figures_of(page: Path) -> list[str]:
    return (
        re.findall(r"\]\((figures/[^/()]+\.svg)\)", page.read_text(encoding="utf-8", errors="replace"))
        if page.is_file()
        else []
    )


def write_file(path: Path, data: bytes, option: str) -> None:
    """Write a file and its parent folders. Raises ValueError, which names `option`, if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}. Choose another {option}.") from error
