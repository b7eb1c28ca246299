"""Read Weights & Biases: a run folder (its .wandb file, wandb-history.jsonl or wandb-summary.json), or one of these files.

A history may have any name: one JSON object a line, with a step and a loss.
Source: wandb/wandb, sdk/internal/datastore.py (a log of blocks in LevelDB's format, with zlib's CRC-32) and
proto/wandb_internal.proto. The web page's CSV exports are read as CSV.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from te_bench.reports.logs import TORN, LogFile, LogFormat, Series
from te_bench.reports.logs.formats._protobuf import fields, one, several
from te_bench.reports.logs.names import is_loss
from te_bench.reports.logs.rows import STEP, of_json, series_of

HEADER = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
BLOCK, HEAD = 2**15, 7  # bytes
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
HISTORY, CONFIG, RUN = 2, 5, 17  # fields of a Record
FIRST_LINES = 20  # lines of a history to search for a loss: it may log other things first
HISTORY_JSON, SUMMARY_JSON = "wandb-history.jsonl", "wandb-summary.json"


def _run_files(folder: Path) -> list[Path]:
    """Return a run folder's most complete file: .wandb, history, or summary. Several .wandb files are not one run."""
    if found := sorted(folder.glob("*.wandb")):
        return found if len(found) == 1 else []
    places = [folder / below / name for name in (HISTORY_JSON, SUMMARY_JSON) for below in ("", "files")]
    return [path for path in places if path.is_file()][:1]


def _read(files: Sequence[LogFile]) -> Series:
    [file] = files
    if file.content.startswith(HEADER):
        return _binary(file)
    if file.path.name == SUMMARY_JSON:
        summary = _object(file, file.text, "")
        return replace(series_of([summary], file.path), whole=False)
    rows, notes = [], []
    lines = file.text.split("\n")  # not splitlines: a JSON string may hold its other line ends
    for n, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(_object(file, line, f", line {n}"))
        except ValueError:
            if n < len(lines):
                raise
            notes.append(TORN.format(file.path))
    found = series_of(rows, file.path)
    return replace(found, notes=(*found.notes, *notes))


def _object(file: LogFile, text: str, where: str) -> dict[str, Any]:
    try:
        found = of_json(text)
    except ValueError as error:
        raise ValueError(f"{file.path}{where}: not JSON ({error}): export the run's history as CSV") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file.path}{where}: not a JSON object: export the run's history as CSV")
    return found


def _binary(file: LogFile) -> Series:
    rows: list[dict[str, Any]] = []
    seed, end = None, len(HEADER)
    try:
        for after, record in _records(file):
            end = after
            for number, value in fields(record):
                if number == HISTORY and isinstance(value, bytes):
                    rows.append(_items(value))
                elif number in (CONFIG, RUN) and isinstance(value, bytes):
                    config = _items(one(value, 4) if number == RUN else value)
                    seed = config.get("seed", seed)
    except ValueError as error:
        raise ValueError(
            f"{file.path}: {error} after byte {end}: sync the run (wandb sync) and export its history as CSV"
        ) from error
    torn = (f"{file.path}: the last record is torn and left out",) if end < len(file.content.rstrip(b"\0")) else ()
    found = series_of(rows, file.path)
    return replace(found, seed=str(seed) if isinstance(seed, int) else None, notes=(*found.notes, *torn))


def _items(message: bytes) -> dict[str, Any]:
    """Return a message's items (1): each a key (1), or a nested key's words (2), and a value in JSON (16)."""
    found = {}
    for item in several(message, 1):
        key = one(item, 1) or b".".join(several(item, 2))
        if value := one(item, 16):
            found[key.decode("utf-8", errors="replace")] = of_json(value)
    return found


def _records(file: LogFile) -> Iterator[tuple[int, bytes]]:
    """Yield (end, data) of each whole record; an incomplete one ends the file. Raises ValueError for a wrong checksum."""
    content, at, parts = file.content, len(HEADER), b""
    while at + HEAD <= len(content):
        if BLOCK - at % BLOCK < HEAD:  # no room for a header in the rest of the block
            at += BLOCK - at % BLOCK
            continue
        check, size, kind = struct.unpack_from("<IHB", content, at)
        data = content[at + HEAD : at + HEAD + size]
        if len(data) < size or kind == 0:
            return
        if kind not in (FULL, FIRST, MIDDLE, LAST) or zlib.crc32(data, zlib.crc32(bytes([kind]))) != check:
            raise ValueError("a record fails its checksum")
        at += HEAD + size
        parts = data if kind in (FULL, FIRST) else parts + data
        if kind in (FULL, LAST):
            yield at, parts


def _recognises(file: LogFile) -> bool:
    return file.content.startswith(HEADER) or file.path.name in (HISTORY_JSON, SUMMARY_JSON) or _is_history(file)


def _is_history(file: LogFile) -> bool:
    """Return whether one of the file's first lines is a JSON object with a step and a loss."""
    for line in file.content[:BLOCK].split(b"\n")[:FIRST_LINES]:
        try:
            row = of_json(line) if line.startswith(b"{") else None
        except ValueError:
            return False
        if isinstance(row, dict) and any(map(is_loss, row)) and any(name in STEP for name in row):
            return True
    return False


TITLE = "Weights & Biases' run folder or JSON lines"
FORMAT = LogFormat(title=TITLE, recognises=_recognises, read=_read, binary=True, run_files=_run_files)
