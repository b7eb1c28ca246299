"""Parse the wire format of protocol buffers, as far as event files and W&B's records need it: fields by number.

Source: protobuf.dev/programming-guides/encoding.
"""

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of each field: an int for a varint, else bytes. Raises ValueError for an invalid message."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == VARINT:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        size = {FIXED64: 8, FIXED32: 4}.get(kind)
        if kind == BYTES:
            size, at = _varint(message, at)
        if size is None or at + size > len(message):
            raise ValueError("not a protocol buffer")
        yield key >> 3, message[at : at + size]
        at += size


def one(message: bytes, number: int) -> bytes:
    """Return the last field of this number, or b"" if there is none."""
    return next(
        (value for found, value in reversed(list(fields(message))) if found == number and isinstance(value, bytes)), b""
    )


def several(message: bytes, number: int) -> list[bytes]:
    """Return all fields of this number."""
    return [value for found, value in fields(message) if found == number and isinstance(value, bytes)]


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 70:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("not a protocol buffer")
