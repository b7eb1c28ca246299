"""Read TensorBoard's event files: scalars of every tag, as simple values and as tensors. A folder's files are one run.

Source: tensorflow/core/lib/io/record_writer.h (length, masked CRC32C, data, masked CRC32C), event.proto, summary.proto,
tensor.proto. CRC32C: RFC 3720, appendix B.4.
"""

import functools
import struct
from collections.abc import Iterator, Sequence

from te_bench.reports.logs import LogFile, LogFormat, Series
from te_bench.reports.logs.formats._protobuf import fields, one, several

POLYNOMIAL = 0x82F63B78  # Castagnoli's, bits reversed
MASK = 0xA282EAD8
DTYPES = {1: "f", 2: "d"}  # DT_FLOAT, DT_DOUBLE


def crc32c(data: bytes) -> int:
    """Return the 32-bit CRC by Castagnoli's polynomial."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


@functools.cache
def _table() -> tuple[int, ...]:
    def entry(value: int) -> int:
        for _ in range(8):
            value = (value >> 1) ^ (POLYNOMIAL if value & 1 else 0)
        return value

    return tuple(map(entry, range(256)))


def masked(crc: int) -> int:
    """Return a CRC as a record stores it: rotated by 15 bits, plus a constant."""
    return ((crc >> 15 | crc << 17) + MASK) & 0xFFFFFFFF


def _read(files: Sequence[LogFile]) -> Series:
    losses: dict[str, list[tuple[float, float]]] = {}
    notes = []
    for file in files:
        end = 0
        for start, end, record in _records(file):
            try:
                scalars = list(_scalars(record))
            except ValueError as error:
                raise _damaged(file, start) from error
            # Only records with scalars are checked: the megabytes of graphs and images would take minutes.
            if scalars and masked(crc32c(record)) != struct.unpack_from("<I", file.content, end - 4)[0]:
                raise _damaged(file, start)
            for tag, step, value in scalars:
                losses.setdefault(tag, []).append((step, value))
        if end < len(file.content):
            notes.append(f"{file.path}: the last record is torn and left out")
    return Series(losses=losses, notes=tuple(notes))


def _records(file: LogFile) -> Iterator[tuple[int, int, bytes]]:
    """Yield (first byte, end, data) of each whole record; as in TensorBoard, an incomplete record ends the file."""
    at = 0
    while at + 12 <= len(file.content):
        size, check = struct.unpack_from("<QI", file.content, at)
        if masked(crc32c(file.content[at : at + 8])) != check:
            raise _damaged(file, at)
        end = at + 16 + size
        if end > len(file.content):
            return
        yield at, end, file.content[at + 12 : end - 4]
        at = end


def _damaged(file: LogFile, at: int) -> ValueError:
    return ValueError(f"{file.path}: the record at byte {at} fails its checksum: the file is damaged, copy it again")


def _scalars(event: bytes) -> Iterator[tuple[str, float, float]]:
    step, summaries = 0, []
    for number, value in fields(event):
        if number == 2 and isinstance(value, int):
            step = value - 2**64 if value >= 2**63 else value
        elif number == 5 and isinstance(value, bytes):
            summaries.append(value)
    for summary in summaries:
        for entry in several(summary, 1):
            tag = one(entry, 1).decode("utf-8", errors="replace")
            if (found := _number(entry)) is not None:
                yield tag, float(step), found


def _number(entry: bytes) -> float | None:
    """Return the simple value (2), or the one element of a float tensor (8): content (4), float_val (5), double_val (6)."""
    simple, tensor = one(entry, 2), one(entry, 8)
    if len(simple) == 4:
        return float(struct.unpack("<f", simple)[0])
    kind = next((DTYPES.get(value) for number, value in fields(tensor) if number == 1 and isinstance(value, int)), None)
    if kind is None:
        return None
    packed = one(tensor, 4) or one(tensor, 5 if kind == "f" else 6)
    return float(struct.unpack(f"<{kind}", packed)[0]) if len(packed) == struct.calcsize(kind) else None


def _recognises(file: LogFile) -> bool:
    if len(file.content) < 12:
        return "tfevents" in file.path.name
    return bool(masked(crc32c(file.content[:8])) == struct.unpack_from("<I", file.content, 8)[0])


FORMAT = LogFormat(
    title="TensorBoard's event files",
    recognises=_recognises,
    read=_read,
    binary=True,
    run_files=lambda folder: sorted(folder.glob("*tfevents*")),  # their names begin with their times
)
