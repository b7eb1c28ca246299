"""The journal: an append-only JSONL file, one checksummed and fsynced line per event, safe against a kill at any byte.

Three kinds of line: "environment" (what machine and code), "plan" (which trials a suite asked for) and "record" (how one
trial ended). A line is `{"crc32":"0123abcd","kind":...}`: valid JSON, its checksum over everything after it.
"""

import fcntl
import json
import os
import socket
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from te_bench.experiments.spec import Record, canonical_json

JOURNAL = "journal.jsonl"
_PREFIX = len('{"crc32":"01234567",')


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What one `te-bench run` set out to do, written before its first trial."""

    suite: str
    title: str
    environment: str
    trials: tuple[Mapping[str, Any], ...]  # Trial.to_json(), in running order
    baseline: str | None
    started_at: str


@dataclass(slots=True)
class Journal:
    """A journal read back. `records` holds the last record of each done-key."""

    environments: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)
    records: dict[tuple[str, str], Record] = field(default_factory=dict)
    size: int = 0  # bytes that are whole, intact lines

    def done(self, key: tuple[str, str]) -> bool:
        """True when this trial has ended in this environment; an interrupted one has not."""
        record = self.records.get(key)
        return record is not None and record.outcome != "interrupted"


def load(directory: Path) -> Journal:
    """Read DIR/journal.jsonl. Ignores a torn last line; raises ValueError for damage anywhere else."""
    path = directory / JOURNAL
    if not path.exists():
        raise ValueError(f"{directory} holds no {JOURNAL}: it is not the --out directory of a te-bench run")
    return _parse(path.read_bytes(), path)


def _parse(data: bytes, path: Path) -> Journal:
    journal = Journal()
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if number == len(lines):  # no newline after it: empty, or torn by a kill
            break
        if not _intact(line):
            if number == len(lines) - 1 and lines[-1] == b"":  # a last line whose bytes did not all reach the disk
                break
            raise ValueError(f"{path}, line {number}: checksum mismatch. Delete that line; a rerun repeats its trial.")
        _add(journal, json.loads(line))
        journal.size += len(line) + 1
    return journal


def _intact(line: bytes) -> bool:
    return line[:10] == b'{"crc32":"' and line[10:18] == b"%08x" % zlib.crc32(line[_PREFIX:])


def _add(journal: Journal, value: dict[str, Any]) -> None:
    kind, body = value["kind"], value["body"]
    if kind == "record":
        record = Record.from_json(body)
        journal.records[record.key] = record
    elif kind == "environment":
        journal.environments[body["id"]] = body
    elif kind == "plan":
        journal.plans.append(Plan(**{**body, "trials": tuple(body["trials"])}))


def encode(kind: str, body: Mapping[str, Any]) -> bytes:
    """One journal line, newline included."""
    rest = canonical_json({"body": body, "kind": kind})[1:].encode()
    return b'{"crc32":"%08x",' % zlib.crc32(rest) + rest + b"\n"


class Store:
    """The journal opened for writing: one writer at a time, torn tail cut, every append on the disk before it returns."""

    def __init__(self, directory: Path, *, fresh: bool = False):
        """Create or open DIR. Raises ValueError when another run holds it, or when it cannot be written."""
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(directory)
        except OSError as error:
            raise ValueError(f"cannot write to {directory}: {error.strerror}. Choose another --out.") from error
        path = directory / JOURNAL
        if fresh and path.exists():
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
            path.rename(directory / f"journal.{stamp}.jsonl")  # kept: nothing measured is ever deleted
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self.journal = _parse(path.read_bytes(), path)
        except ValueError:
            self.close()
            raise
        os.ftruncate(self._file, self.journal.size)
        os.lseek(self._file, self.journal.size, os.SEEK_SET)
        _fsync_directory(directory)

    def add_environment(self, body: Mapping[str, Any]) -> None:
        if body["id"] not in self.journal.environments:
            self._append("environment", body)

    def add_plan(self, plan: Plan) -> None:
        self._append("plan", {name: getattr(plan, name) for name in plan.__slots__})

    def add(self, record: Record) -> None:
        self._append("record", record.to_json())

    def _append(self, kind: str, body: Mapping[str, Any]) -> None:
        line = encode(kind, body)
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
            os.fsync(self._file)
        except OSError as error:  # a full disk: leave the journal as it was
            os.ftruncate(self._file, self.journal.size)
            os.lseek(self._file, self.journal.size, os.SEEK_SET)
            raise ValueError(
                f"cannot write {self.directory / JOURNAL}: {error.strerror}. What was measured before is safe."
            ) from error
        self.journal.size += len(line)
        _add(self.journal, json.loads(line))

    def close(self) -> None:
        os.close(self._file)
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lock(directory: Path) -> int:
    """Hold DIR/lock until the process ends, with who holds it written inside."""
    file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(file, 4096).decode(errors="replace").strip() or "another process"
        os.close(file)
        raise ValueError(f"{directory} is in use by {holder}. Wait for it, or choose another --out.") from None
    os.ftruncate(file, 0)
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    since = datetime.now(UTC).isoformat(timespec="seconds")
    os.write(file, f"process {os.getpid()} on {socket.gethostname()} since {since} ({command})\n".encode())
    return file


def _fsync_directory(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
