"""The journal: an append-only JSONL file, one checksummed and fsynced line per event, safe against a kill at any byte.

There are five kinds of line: "environment" (machine and code), "plan" (the trials of a suite), "record" (how one trial
ended), "broken_off" (why a study was given up) and "merged" (the environments of merged runs). A line is
`{"crc32":"0123abcd","kind":...,"body":...}`: valid JSON, with a checksum of everything after it. A record's line has its
done-key and schema before its body, so that a journal can be indexed without parsing every sample.
"""

import codecs
import contextlib
import fcntl
import json
import lzma
import os
import re
import shlex
import socket
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from te_bench import __version__
from te_bench.experiments.spec import SCHEMA, Experiment, Record, Scalar, Trial, canonical_json
from te_bench.training.durable import sync

JOURNAL = "journal.jsonl"
PACKED = f"{JOURNAL}.xz"  # of a published run, which is complete: a fifth of the size
GATE_SIDES, GATE_ANSWER = ("base", "head"), "gate.json"  # in the --out directory of a gate on two revisions
_PREFIX = len('{"crc32":"01234567",')
_RECORD = re.compile(rb'"kind":"record","schema":(\d+),"key":\["([^"\\]*)","([^"\\]*)"\],')
_HOLDER = re.compile(rb"process \d+ on |\Z")  # content of a lock; empty if its holder was killed while taking it
Key = tuple[str, str]  # (trial id, environment id)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What one `te-bench run` will do, written before its first trial."""

    suite: str
    title: str
    environment: str
    trials: tuple[Mapping[str, Any], ...]  # Trial.to_json(), in running order
    baseline: str | None
    started_at: str
    judgement: Mapping[str, Scalar] = field(default_factory=dict)  # Experiment.judgement; older journals have none
    asked: tuple[str, ...] = ()  # Experiment.asked; older journals have none

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        return cls(**{**body, "trials": tuple(body["trials"]), "asked": tuple(body.get("asked", ()))})

    @classmethod
    def of(cls, experiment: Experiment, environment: str) -> Self:
        """Return the plan of an experiment that begins now."""
        return cls(
            suite=experiment.suite,
            title=experiment.title,
            environment=environment,
            trials=tuple(trial.to_json() for trial in experiment.trials),
            baseline=experiment.baseline,
            judgement=experiment.judgement,
            asked=experiment.asked,
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )


class Records(Mapping[Key, Record]):
    """The last record of each done-key; a divergence is never replaced.

    Records are parsed on first use, because parsing floats is most of a journal's cost.
    """

    def __init__(self) -> None:
        self._found: dict[Key, bytes | Record] = {}  # a journal line, or its record

    def __getitem__(self, key: Key) -> Record:
        found = self._found[key]
        if isinstance(found, bytes):
            with understood(f"the record of trial {key[0]}"):
                found = self._found[key] = Record.from_json(json.loads(found)["body"])
        return found

    def __iter__(self) -> Iterator[Key]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def add(self, key: Key, line: bytes) -> None:
        # a divergence is a result, which no repetition replaces
        if key not in self._found or self[key].outcome != "diverged":
            self._found[key] = line


@dataclass(slots=True)
class Journal:
    """A journal read back. `records` holds a record for each done-key."""

    directory: Path | None = None  # from which it was read
    environments: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    hosts: dict[str, frozenset[str]] = field(default_factory=dict)  # {GPU: it and those seen beside it on its host}
    plans: list[Plan] = field(default_factory=list)
    records: Records = field(default_factory=Records)
    merged: set[str] = field(default_factory=set)  # environments of merged runs, of which none continues another
    size: int = 0  # bytes of whole, intact lines
    torn: int = 0  # bytes after them, of a line that a kill or a full disk cut short
    #: {(Trial.cell, environment id): why its study was given up: it has no verdict, and its losses may be seen}.
    broken_off: dict[tuple[str, str], str] = field(default_factory=dict)

    def done(self, key: Key) -> bool:
        """Return whether this trial has ended in this environment; an interrupted trial has not."""
        record = self.records.get(key)
        return record is not None and record.outcome != "interrupted"


def written(directory: Path) -> bool:
    """Return whether DIR holds a journal, packed or not."""
    return any((directory / name).exists() for name in (JOURNAL, PACKED))


def load(directory: Path) -> Journal:
    """Read DIR/journal.jsonl, or its xz file. Ignore an incomplete last line; raise ValueError for other damage."""
    return _parse(*_read(directory))


@dataclass(frozen=True, slots=True)
class Line:
    """One intact line of a journal."""

    raw: bytes  # without its newline
    kind: str
    key: Key | None = None  # a record's
    schema: int = SCHEMA


def lines(directory: Path) -> list[Line]:
    """Return the lines of DIR's journal as written. Raise ValueError as `load` does."""
    data, path = _read(directory)
    return [_line(raw) for raw in data[: _parse(data, path).size].split(b"\n")[:-1]]


def _line(raw: bytes) -> Line:
    if record := _RECORD.match(raw, _PREFIX):
        return Line(raw, "record", (record[2].decode(), record[3].decode()), int(record[1]))
    value = json.loads(raw)
    kind, body = value["kind"], value["body"]
    if kind != "record":
        return Line(raw, kind)
    return Line(
        raw, kind, (body["trial"]["id"], body["environment"]), body["schema"]
    )  # an older line, without key and schema before its body


def _read(directory: Path) -> tuple[bytes, Path]:
    """Return a journal's bytes, unpacked, and their file."""
    path, packed = directory / JOURNAL, directory / PACKED
    if path.exists():
        return path.read_bytes(), path
    if not packed.exists() and all(written(directory / side) for side in GATE_SIDES):
        base, head = (shlex.quote(str(directory / side)) for side in GATE_SIDES)
        raise ValueError(
            f"{directory} is the directory of a gate: {directory / GATE_ANSWER} has its answer, and te-bench gate "
            f"--baseline {base} --candidate {head} judges its records again; give it the gate's --margin"
        )
    if not packed.exists():
        raise ValueError(f"{directory} holds no {JOURNAL}: it is not the --out directory of a te-bench run")
    try:
        return lzma.decompress(packed.read_bytes()), packed
    except lzma.LZMAError as error:
        raise ValueError(f"{packed} is damaged, or no file of xz: {error}") from error


def _parse(data: bytes, path: Path) -> Journal:
    journal = Journal(directory=path.parent)
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if number == len(lines):  # without a newline: empty, or cut short by a kill
            if journal.size == 0 and line[:9] != b'{"crc32":'[: len(line)]:
                raise ValueError(_damage(path, number, lines))  # not te-bench's file: never truncate it
            break
        if not _intact(line):
            if number > 1 and number == len(lines) - 1 and lines[-1] == b"":  # not all of it reached the disk
                break
            raise ValueError(_damage(path, number, lines))
        try:
            with understood("what it says"):
                _add(journal, line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        journal.size += len(line) + 1
    journal.torn = len(data) - journal.size
    return journal


@contextlib.contextmanager
def understood(what: str) -> Iterator[None]:
    """Raise ValueError for valid JSON with unknown fields, which a later te-bench may have written."""
    try:
        yield
    except (AssertionError, AttributeError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(
            f"{what} is not in the fields of te-bench {__version__}. Use the te-bench that wrote it."
        ) from error


def _damage(path: Path, number: int, lines: Sequence[bytes]) -> str:
    """Return the message for a damaged line, with its remedy; the line's kind cannot be trusted."""
    begins, ends = lines[number - 1][:3] == codecs.BOM_UTF8, lines[number - 1][-1:] == b"\r"
    if (begins or ends) and _intact(lines[number - 1].removeprefix(codecs.BOM_UTF8).removesuffix(b"\r")):
        what = "it begins with a byte order mark" if begins else "its line ends were changed to CRLF"
        return f"{path}: {what}, so that no checksum holds. Copy the journal again as it was, as a binary file."
    if not lines[number - 1].startswith(b'{"crc32":') and not any(map(_intact, lines)):
        return f"{path} is not a te-bench journal: te-bench did not write line {number}. Choose another directory."
    return (
        f"{path}, line {number}: checksum mismatch. Delete that line and rerun on the same machine with the same code: "
        "that repeats its trial, or writes its plan or environment again."
    )


def own(path: Path) -> Path:
    """Return the path, for te-bench to write there. Raise ValueError for a link, whose target may not be te-bench's."""
    if path.is_symlink():
        raise ValueError(
            f"{path} is a link, and te-bench does not write through links: remove it, or choose another --out."
        )
    return path


def _intact(line: bytes) -> bool:
    return line[:10] == b'{"crc32":"' and line[10:18] == b"%08x" % zlib.crc32(line[_PREFIX:])


def _add(journal: Journal, raw: bytes) -> None:
    """Add one intact line to the journal. Raise ValueError for an unknown schema."""
    line = _line(raw)
    if line.schema != SCHEMA:
        raise ValueError(
            f"record schema {line.schema}; this te-bench reads schema {SCHEMA}. Use the te-bench that wrote it."
        )
    if line.key is not None:
        journal.records.add(line.key, raw)
        return
    body = json.loads(raw)["body"]
    if line.kind == "environment":
        journal.environments[body["id"]] = body
        gpus = frozenset(gpu["uuid"] for gpu in body.get("details", {}).get("gpus", ()) if gpu.get("uuid"))
        gpus = gpus.union(*(journal.hosts[gpu] for gpu in gpus if gpu in journal.hosts))
        journal.hosts |= dict.fromkeys(gpus, gpus)
    elif line.kind == "plan":
        journal.plans.append(Plan.from_json(body))
    elif line.kind == "broken_off":
        configurations = body.get("configurations")
        if configurations is None:  # an older line: all that was planned
            plans = journal.plans
            configurations = [(Trial.from_json(t).cell, plan.environment) for plan in plans for t in plan.trials]
        journal.broken_off |= dict.fromkeys(map(tuple, configurations), body["why"])
    elif line.kind == "merged":
        journal.merged.update(body["environments"])


def encode(kind: str, body: Mapping[str, Any]) -> bytes:
    """Return one journal line with its newline."""
    head: dict[str, Any] = {"kind": kind}
    if kind == "record":
        head |= {"schema": body["schema"], "key": [body["trial"]["id"], body["environment"]]}
    start = "".join(f"{canonical_json(name)}:{canonical_json(value)}," for name, value in head.items())
    rest = f'{start}"body":{canonical_json(body)}}}'.encode()
    return b'{"crc32":"%08x",' % zlib.crc32(rest) + rest + b"\n"


class Store:
    """The journal opened for writing, with one writer at a time; every append is on the disk before it returns."""

    def __init__(self, directory: Path, *, fresh: bool = False):
        """Create or open DIR. fresh: begin an empty journal; the existing one stays until `begin`.

        Raise ValueError if another run holds DIR, or if DIR cannot be written.
        """
        self.directory, self.journal, self._fresh, self._file = directory, Journal(), fresh, -1
        path, packed = directory / JOURNAL, directory / PACKED
        with contextlib.ExitStack() as opened:  # closed again if anything here fails
            self._opened = opened
            try:
                if packed.exists() and not path.exists():
                    said = f"{packed} belongs to a complete run: choose another --out, or unpack it to continue (xz -d)"
                    raise ValueError(said)
                directory.mkdir(parents=True, exist_ok=True)
                own(path)
                self._lock = _lock(directory)
                opened.callback(os.close, self._lock)
            except OSError as error:
                raise _unwritable(directory, error) from error
            if not fresh:
                self.begin()
            self._opened = opened.pop_all()

    def begin(self) -> None:
        """Open the journal; the first write calls this. A fresh start sets the old journal aside. Later calls do nothing."""
        if self._file >= 0:
            return
        path = self.directory / JOURNAL
        try:
            if self._fresh and path.exists():
                stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
                path.rename(self.directory / f"journal.{stamp}.jsonl")  # measurements are never deleted
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._opened.callback(os.close, self._file)
            self.journal = _parse(path.read_bytes(), path)
            os.ftruncate(self._file, self.journal.size)
            os.lseek(self._file, self.journal.size, os.SEEK_SET)
            sync(self.directory)
        except OSError as error:
            raise _unwritable(self.directory, error) from error

    def add_environment(self, body: Mapping[str, Any]) -> None:
        """Record the machine, unless its environment's last line is this machine: several machines may share one id."""
        if self.journal.environments.get(body["id"]) != body:
            self._append("environment", body)

    def add_plan(self, plan: Plan) -> None:
        self._append("plan", {name: getattr(plan, name) for name in plan.__slots__})

    def add(self, record: Record) -> None:
        self._append("record", record.to_json())

    def break_off(self, why: str, configurations: Iterable[tuple[str, str]]) -> None:
        """Record why studies are given up: those with one of the configurations, (Trial.cell, environment id)."""
        at = datetime.now(UTC).isoformat(timespec="seconds")
        self._append("broken_off", {"why": why, "at": at, "configurations": sorted(configurations)})

    def copy(self, copied: Iterable[Line]) -> None:
        """Append lines of other journals unchanged, all of them or none."""
        self._write([line.raw for line in copied])

    def add_merged(self, environments: Iterable[str]) -> None:
        self._append("merged", {"environments": sorted(environments)})

    def _append(self, kind: str, body: Mapping[str, Any]) -> None:
        self._write([encode(kind, body)[:-1]])

    def _write(self, added: Sequence[bytes]) -> None:
        self.begin()
        data = b"".join(line + b"\n" for line in added)
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
            os.fsync(self._file)
        except OSError as error:  # a full disk: restore the journal
            os.ftruncate(self._file, self.journal.size)
            os.lseek(self._file, self.journal.size, os.SEEK_SET)
            raise ValueError(
                f"cannot write {self.directory / JOURNAL}: {error.strerror}. Earlier measurements are safe."
            ) from error
        self.journal.size += len(data)
        for line in added:
            _add(self.journal, line)

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _unwritable(directory: Path, error: OSError) -> ValueError:
    return ValueError(f"cannot write to {directory}: {error.strerror}. Choose another --out.")


def _lock(directory: Path) -> int:
    """Hold DIR/lock until the process ends; write the holder into it."""
    path = own(directory / "lock")
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)  # do not wait on a pipe
    try:
        holder = os.read(file, 4096) if stat.S_ISREG(os.fstat(file).st_mode) else b"no file"
        if not _HOLDER.match(holder):
            raise ValueError(f"{path} was not written by te-bench: move it, or choose another --out.")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        who = holder.decode(errors="replace").strip() or "another process"
        raise ValueError(f"{directory} is in use by {who}. Wait for it, or choose another --out.") from None
    except BaseException:
        os.close(file)
        raise
    os.ftruncate(file, 0)
    os.lseek(file, 0, os.SEEK_SET)
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    since = datetime.now(UTC).isoformat(timespec="seconds")
    os.write(file, f"process {os.getpid()} on {socket.gethostname()} since {since} ({command})\n".encode())
    return file
