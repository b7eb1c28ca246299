"""Read the logs of other trainers. A file in formats/ reads one kind of log: from the files of a run to its losses by step.

A format is a file with FORMAT. It recognises its logs by their content or the layout of their folder, not by their names.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from te_bench import plugins

HEAD = 4096  # bytes that tell text from others
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # as PowerShell's > and Excel's "Unicode text" write
TORN = "{}: the last line is torn and left out"
_NO_FILES: tuple[Path, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LogFile:
    """A file of a run with its bytes."""

    path: Path
    content: bytes

    @property
    def binary(self) -> bool:
        return b"\0" in self.content[:HEAD] and self.content[:2] not in UTF_16

    @property
    def text(self) -> str:
        """The bytes as UTF-16 if they begin with its mark, else as UTF-8; invalid bytes become U+FFFD."""
        return self.content.decode("utf-16" if self.content[:2] in UTF_16 else "utf-8", errors="replace")


def decimals(number: str) -> int | None:
    """How many a number has as it is written; None of nan and inf.

    A number on a last line without its end may be torn where it has fewer than every number before it.
    """
    return len(number.partition(".")[2]) if number[-1:].isdigit() or number.endswith(".") else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """The values of one run, {name: (step, value) in the order of logging}; losses usually in nat."""

    losses: Mapping[str, Sequence[tuple[float, float]]]
    seed: str | None = None  # where the log says it
    notes: tuple[str, ...] = ()  # what was left out, to be shown
    whole: bool = True  # False for one value a name, the last
    blank: Mapping[str, str] = field(default_factory=dict)  # losses that end in rows without a number, and how


@dataclass(frozen=True, kw_only=True, slots=True)
class LogFormat:
    """How to recognise and read one kind of log. `read` raises ValueError, with file and place, for a damaged log."""

    title: str
    recognises: Callable[[LogFile], bool]
    read: Callable[[Sequence[LogFile]], Series]
    binary: bool = False  # whether its files may be binary, and are recognised by their first bytes
    #: The files of a folder that make it one run, earliest first; empty if the format has no folders.
    run_files: Callable[[Path], Sequence[Path]] = lambda folder: _NO_FILES


FORMATS = plugins.Family(f"{__name__}.formats", "FORMAT", LogFormat)
