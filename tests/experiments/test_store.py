"""The journal: valid after a kill at any byte, one writer, a full disk or a folder that cannot be written said plainly."""

import dataclasses
import errno
import json
import lzma
import os
import resource
import socket
import stat
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from te_bench.experiments.spec import Record, Trial
from te_bench.experiments.store import JOURNAL, PACKED, Plan, Store, encode, load

ENVIRONMENT = {"id": "e0", "identity": {"device": "cpu"}, "details": {}}


def trial(seed: int = 0) -> Trial:
    problem = {"model": "gpt2", "batch": 12, "block": 1024, "vocab": 50257, "padded_vocab": 50304}
    return Trial(workload="train_step", device="cpu", problem=problem, attention="flash", seed=seed)


def record(seed: int = 0, outcome: str = "ok") -> Record:
    latency = [0.0338 + 1e-5 * ((7 * i + seed) % 13) for i in range(20)]
    quantities = [{"name": "loss", "error": 2e-5, "limit": 1e-3}, {"name": "grad wte", "error": 4e-3, "limit": 1e-2}]
    return Record(
        trial=trial(seed),
        environment="e0",
        outcome=outcome,
        reason=None if outcome == "ok" else 'said "no" \\ é',
        started_at="2026-11-20T12:00:00.000+00:00",
        wall_s=1.5,
        work_s=1.4,
        check={"reference": "manual attention, fp64", "quantities": quantities},
        work={"tokens": 12288, "flop": 1.05e13},
        samples={"latency_s": latency, "loss": [10.9, 10.4]},
        kernels=["flash_fwd_kernel<bf16, 64, 128>"],
        device_state={"sm_clock_hz": 1.98e9},
    )


def plan() -> Plan:
    trials = tuple(trial(seed).to_json() for seed in range(3))
    return Plan(suite="s", title="t", environment="e0", trials=trials, baseline=None, started_at="2026-11-20T12:00:00")


def fill(directory: Path, seeds: range = range(3)) -> bytes:
    with Store(directory) as store:
        store.add_environment(ENVIRONMENT)
        if not store.journal.plans:
            store.add_plan(plan())
        for seed in seeds:
            if not store.journal.done((trial(seed).id, "e0")):
                store.add(record(seed))
    return (directory / "journal.jsonl").read_bytes()


def lines(directory: Path) -> list[bytes]:
    return (directory / "journal.jsonl").read_bytes().splitlines(keepends=True)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    fill(tmp_path)
    journal = load(tmp_path)
    assert dict(journal.records) == {record(seed).key: record(seed) for seed in range(3)}
    assert journal.environments == {"e0": ENVIRONMENT}
    assert journal.plans == [plan()]
    assert journal.size == (tmp_path / "journal.jsonl").stat().st_size


def test_every_line_is_json_with_its_checksum_first(tmp_path: Path) -> None:
    fill(tmp_path)
    kinds = [json.loads(line)["kind"] for line in lines(tmp_path)]
    assert kinds == ["environment", "plan", "record", "record", "record"]
    assert all(line.startswith(b'{"crc32":"') for line in lines(tmp_path))
    assert json.loads(lines(tmp_path)[-1])["body"]["trial"]["id"] == trial(2).id


def test_a_journal_cut_at_any_byte_of_its_last_record_resumes_to_the_uninterrupted_one(tmp_path):
    whole = fill(tmp_path / "whole")
    last = len(lines(tmp_path / "whole")[-1])
    torn = tmp_path / "torn"
    torn.mkdir()
    for size in range(len(whole) - last, len(whole)):
        (torn / "journal.jsonl").write_bytes(whole[:size])
        assert len(load(torn).records) == 2
        assert load(torn).torn == size - (len(whole) - last)
        assert (torn / "journal.jsonl").stat().st_size == size  # reading changes nothing
        assert fill(torn) == whole


@pytest.mark.parametrize(
    "tail", [b"\0" * 4096, b"\0" * 100 + b"\n", b"garbage", b"{}\n", b'{"crc32":"00000000","kind":"rec\n']
)
def test_a_tail_of_blocks_that_never_reached_the_disk_is_cut(tmp_path: Path, tail: bytes) -> None:
    whole = fill(tmp_path)
    (tmp_path / "journal.jsonl").write_bytes(whole + tail)
    assert len(load(tmp_path).records) == 3
    assert fill(tmp_path) == whole


def test_a_flipped_bit_anywhere_before_the_last_line_is_found_and_its_line_named(tmp_path: Path) -> None:
    whole = fill(tmp_path)
    starts = [0]
    for line in lines(tmp_path):
        starts.append(starts[-1] + len(line))
    for number in range(2, 5):
        for at in range(starts[number - 1] + 10, starts[number] - 1, 37):
            damaged = bytearray(whole)
            damaged[at] ^= 0x01
            (tmp_path / "journal.jsonl").write_bytes(damaged)
            with pytest.raises(
                ValueError, match=rf"journal\.jsonl, line {number}: checksum mismatch\. Delete that line and rerun"
            ):
                load(tmp_path)
    with pytest.raises(ValueError, match="line 4"):
        Store(tmp_path)
    assert (tmp_path / "journal.jsonl").read_bytes() == damaged  # nothing was cut off behind the damage


@pytest.mark.parametrize(
    ("content", "line"),
    [(b"%(bit)s", 1), (b"%(start)s", 1), (b"%(only)s", 1), (b"%(whole)sa log\nof something else\n", 6)],
    ids=["a bit of the first line", "its start", "the only line", "lines of another file at the end"],
)
def test_a_damaged_line_is_to_be_deleted_the_first_as_any_other(tmp_path: Path, content: bytes, line: int) -> None:
    whole = fill(tmp_path)
    bit = whole.replace(b"e0", b"e1", 1)
    content %= {b"whole": whole, b"bit": bit, b"start": b"[" + whole[1:], b"only": bit[: bit.index(b"\n") + 1]}
    (tmp_path / "journal.jsonl").write_bytes(content)
    for read in (load, Store):
        with pytest.raises(ValueError, match=rf"journal\.jsonl, line {line}: checksum mismatch\. Delete that line"):
            read(tmp_path)
    assert (tmp_path / "journal.jsonl").read_bytes() == content


@pytest.mark.parametrize(
    ("before", "end", "said"),
    [
        (b"", b"\r\n", "its line ends were changed to CRLF"),
        (b"\xef\xbb\xbf", b"\n", "it begins with a byte order mark"),
    ],
)
def test_a_journal_that_was_copied_as_text_is_to_be_copied_again(
    tmp_path: Path, before: bytes, end: bytes, said: str
) -> None:
    (tmp_path / "journal.jsonl").write_bytes(before + fill(tmp_path).replace(b"\n", end))
    for read in (load, Store):
        with pytest.raises(ValueError, match=rf"journal\.jsonl: {said}, .* Copy the journal again as it was"):
            read(tmp_path)


@pytest.mark.parametrize("damaged", [1, 2, 4], ids=["environment", "plan", "record"])
def test_after_the_damaged_line_is_deleted_a_rerun_writes_it_again(tmp_path: Path, damaged: int) -> None:
    whole = fill(tmp_path)
    kept = [line for number, line in enumerate(whole.splitlines(keepends=True), start=1) if number != damaged]
    (tmp_path / "journal.jsonl").write_bytes(b"".join(kept))
    fill(tmp_path)
    assert sorted(lines(tmp_path)) == sorted(whole.splitlines(keepends=True))


def test_the_last_record_of_a_trial_counts_and_an_interrupted_one_is_not_done(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.add(record(0, "interrupted"))
        assert not store.journal.done(record(0).key)
        store.add(record(0, "timeout"))
        assert store.journal.done(record(0).key)
        assert not store.journal.done((trial(0).id, "another machine"))
    assert [r.outcome for r in load(tmp_path).records.values()] == ["timeout"]


def test_fresh_keeps_the_old_journal_aside(tmp_path: Path) -> None:
    whole = fill(tmp_path)
    Store(tmp_path, fresh=True).close()  # wrote nothing, so it sets nothing aside
    assert (tmp_path / JOURNAL).read_bytes() == whole
    with Store(tmp_path, fresh=True) as store:
        assert not store.journal.records
        store.add(record(1))
    aside = [path for path in tmp_path.glob("journal.*.jsonl")]
    assert [path.read_bytes() for path in aside] == [whole]
    assert list(load(tmp_path).records) == [record(1).key]


@pytest.mark.parametrize("head", [True, False], ids=["with a head", "without a head"])
def test_a_record_of_another_schema_is_refused_by_file_line_and_number(tmp_path: Path, head: bool) -> None:
    line = encode("record", {**record().to_json(), "schema": 99}) if head else headless(schema=99)
    (tmp_path / "journal.jsonl").write_bytes(encode("environment", ENVIRONMENT) + line)
    with pytest.raises(ValueError, match=r"journal\.jsonl, line 2: record schema 99; this te-bench reads schema 1"):
        load(tmp_path)
    with pytest.raises(ValueError, match="schema 99"):
        Store(tmp_path)
    (tmp_path / "journal.jsonl").unlink()  # and the lock was let go:
    Store(tmp_path).close()


def test_a_record_line_without_a_head_is_read_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_bytes(headless())
    assert dict(load(tmp_path).records) == {record().key: record()}


def headless(**changes: Any) -> bytes:
    """A record's line as it would be without its key and schema in front."""
    rest = json.dumps({"body": record().to_json() | changes, "kind": "record"}, separators=(",", ":"))[1:].encode()
    return b'{"crc32":"%08x",' % zlib.crc32(rest) + rest + b"\n"


def test_a_published_journal_is_read_as_xz_packed_it_and_not_written(tmp_path: Path) -> None:
    fill(tmp_path)
    before = load(tmp_path)
    packed = tmp_path / PACKED
    packed.write_bytes(lzma.compress((tmp_path / JOURNAL).read_bytes()))
    (tmp_path / JOURNAL).unlink()
    found = load(tmp_path)
    assert (dict(found.records), found.plans, found.size) == (dict(before.records), before.plans, before.size)
    with pytest.raises(ValueError, match=r"journal\.jsonl\.xz belongs to a complete run.*xz -d"):
        Store(tmp_path)
    assert not (tmp_path / JOURNAL).exists()
    for damaged in (packed.read_bytes()[:-40], b"hello"):
        packed.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"journal\.jsonl\.xz is damaged, or no file of xz"):
            load(tmp_path)


def test_a_directory_that_no_run_wrote_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no journal\.jsonl: it is not the --out directory of a te-bench run"):
        load(tmp_path)
    with pytest.raises(ValueError, match="holds no"):
        load(tmp_path / "nowhere")


def test_not_a_number_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    fill(tmp_path)
    before = lines(tmp_path)
    with Store(tmp_path) as store, pytest.raises(ValueError, match="not JSON compliant"):
        store.add(dataclasses.replace(record(5), samples={"loss": [float("nan")]}))
    assert lines(tmp_path) == before


# Faults of the system.

HOLD = """
import sys
from pathlib import Path
from te_bench.experiments.store import Store
with Store(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_writer_is_told_the_process_the_host_and_the_command_of_the_first(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path), "run", "quick"]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    by = f"process {holder.pid} on {socket.gethostname()}"
    told = rf"{tmp_path} is in use by {by} since .* \(-c {tmp_path} run quick\)"
    with pytest.raises(ValueError, match=told):
        Store(tmp_path)
    load(tmp_path)  # reading is free
    holder.kill()
    holder.communicate()
    Store(tmp_path).close()  # the lock went with its holder


@pytest.mark.parametrize("content", [b"held by a database\n", b"12345\n", b"\0"])
def test_somebody_elses_lock_is_refused_and_not_written(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lock").write_bytes(content)
    for fresh in (False, True):
        with pytest.raises(ValueError, match=rf"{tmp_path}/lock was not written by te-bench: move it"):
            Store(tmp_path, fresh=fresh)
    assert (tmp_path / "lock").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    (tmp_path / "lock").unlink()
    os.mkfifo(tmp_path / "lock")  # which is not waited for
    with pytest.raises(ValueError, match="lock was not written by te-bench"):
        Store(tmp_path)


def test_a_lock_whose_holder_was_killed_as_it_took_it_is_taken(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    Store(tmp_path).close()
    assert (tmp_path / "lock").read_bytes().startswith(b"process %d on " % os.getpid())
    Store(tmp_path).close()
    assert (tmp_path / "lock").read_bytes().count(b"process") == 1


@pytest.mark.parametrize("name", ["lock", "journal.jsonl"])
@pytest.mark.parametrize("content", [b"", b"of somebody else\n", None], ids=["empty", "full", "absent"])
def test_nothing_is_written_through_a_link(tmp_path: Path, name: str, content: bytes | None) -> None:
    out, target = tmp_path / "out", tmp_path / "target"
    out.mkdir()
    if content is not None:
        target.write_bytes(content)
    (out / name).symlink_to(target)
    with pytest.raises(
        ValueError, match=rf"{out}/{name} is a link, and te-bench does not write through links: remove it"
    ):
        Store(out)
    assert (target.read_bytes() if target.exists() else None) == content


def test_every_line_is_on_the_disk_before_the_call_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the directory's entry of a new journal."""
    on_disk: dict[int, int] = {}
    real = os.fsync

    def fsync(file: int) -> None:
        real(file)
        on_disk[os.fstat(file).st_ino] = os.fstat(file).st_size

    monkeypatch.setattr(os, "fsync", fsync)
    with Store(tmp_path) as store:
        assert tmp_path.stat().st_ino in on_disk
        adding = ((store.add_environment, ENVIRONMENT), (store.add_plan, plan()), (store.add, record()))
        for add, value in adding:
            add(value)
            status = (tmp_path / JOURNAL).stat()
            assert on_disk[status.st_ino] == status.st_size > 0


def test_a_share_whose_file_system_syncs_no_folders_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by SMB; other errors of a disk are told of."""
    usual, said = os.fsync, errno.EINVAL

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(said, os.strerror(said))
        usual(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with Store(tmp_path / "run") as store:
        store.add(record(0))
    assert len(load(tmp_path / "run").records) == 1
    said = errno.EIO
    with pytest.raises(ValueError, match=r"cannot write to .*: Input/output error"):
        Store(tmp_path / "other")


def test_a_path_that_cannot_be_a_directory_is_refused_with_the_system_s_word(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, why in ((tmp_path / "file" / "out", "Not a directory"), (tmp_path / "file", "File exists")):
        with pytest.raises(ValueError, match=rf"cannot write to {path}: {why}\. Choose another --out\."):
            Store(path)
    with pytest.raises(ValueError, match="cannot write to /proc/te-bench: No such file or directory"):
        Store(Path("/proc/te-bench"))
    with pytest.raises(ValueError, match=r"cannot write to a{300}: File name too long\. Choose another --out\."):
        Store(Path("a" * 300))
    (tmp_path / "journal.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"cannot write to .*: Is a directory"):
        Store(tmp_path)


def test_a_read_only_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    if os.getuid():
        with pytest.raises(ValueError, match=r"cannot write to .*: Permission denied"):
            Store(tmp_path)
        return

    def as_nobody() -> None:
        for parent in tmp_path.parents[:3]:
            parent.chmod(0o755)
        os.setuid(65534)
        with pytest.raises(ValueError, match=r"cannot write to .*: Permission denied"):
            Store(tmp_path)

    assert in_a_child(as_nobody) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("room", [0, 1, 600])
def test_a_disk_that_fills_up_leaves_the_journal_as_it_was(tmp_path: Path, room: int) -> None:
    """RLIMIT_FSIZE ends a write in the middle of a line, as a full disk does."""
    before = fill(tmp_path)

    def write() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, resource.RLIM_INFINITY))
        with Store(tmp_path) as store:
            for _ in range(2):
                with pytest.raises(
                    ValueError, match=r"cannot write .*: File too large\. Earlier measurements are safe"
                ):
                    store.add(record(3))
                assert (tmp_path / "journal.jsonl").read_bytes() == before
            assert not store.journal.done(record(3).key)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            store.add(record(3))  # there is room again

    assert in_a_child(write) == 0
    assert (tmp_path / "journal.jsonl").read_bytes() == before + encode("record", record(3).to_json())


def in_a_child(call: Callable[[], None]) -> int:
    """The exit code of `call` in a forked process, which may limit itself as it likes; 0 when it returned."""
    pid = os.fork()
    if pid == 0:
        try:
            call()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.slow
def test_a_hundred_thousand_records_load_in_three_seconds(tmp_path: Path) -> None:
    known = [(trial(seed).id.encode(), encode("record", record(seed).to_json())[20:-1]) for seed in range(1000)]
    with (tmp_path / "journal.jsonl").open("wb") as file:
        for number in range(100_000):
            name, rest = known[number % 1000]
            rest = rest.replace(name, b"%016x" % number)
            file.write(b'{"crc32":"%08x",' % zlib.crc32(rest) + rest + b"\n")
    start = time.process_time()  # of a core, whoever else has it meanwhile
    journal = load(tmp_path)
    assert time.process_time() - start < 3.0
    assert len(journal.records) == 100_000
    assert journal.records[f"{99_999:016x}", "e0"].samples == record(999).samples


@pytest.mark.parametrize("text", ["hello", "hello\n", '{"a": 1}\n', "{", "a log\nof something else\n"])
def test_somebody_elses_file_is_no_journal_and_not_cut(tmp_path: Path, text: str) -> None:
    (tmp_path / JOURNAL).write_text(text)
    if text == "{":  # could be the first byte of ours, torn
        Store(tmp_path).close()
        return
    for read in (load, Store) if text.endswith("\n") else (Store,):
        with pytest.raises(ValueError, match=r"journal\.jsonl is not a te-bench journal"):
            read(tmp_path)
    assert (tmp_path / JOURNAL).read_text() == text


def test_a_plan_keeps_its_judgement_and_an_older_one_has_none(tmp_path: Path) -> None:
    asked = {"margin": 0.003, "alpha": 0.05, "seeds": 5, "steps": 100}
    with Store(tmp_path) as store:
        store.add_plan(dataclasses.replace(plan(), judgement=asked))
    assert load(tmp_path).plans[0].judgement == asked
    body = {name: getattr(plan(), name) for name in Plan.__slots__ if name != "judgement"}
    (tmp_path / "journal.jsonl").write_bytes(encode("plan", body))
    assert load(tmp_path).plans[0].judgement == {}


@pytest.mark.parametrize("kind", ["plan", "record", "environment"])
def test_a_line_in_fields_that_are_not_known_is_refused_in_a_sentence(tmp_path: Path, kind: str) -> None:
    bodies = {
        "plan": {name: getattr(plan(), name) for name in Plan.__slots__} | {"later": 1},
        "record": record().to_json() | {"later": 1},
        "environment": {"identity": {}},
    }
    (tmp_path / JOURNAL).write_bytes(encode(kind, bodies[kind]))
    with pytest.raises(ValueError, match=r"not in the fields of te-bench .*Use the te-bench that wrote it"):
        list(load(tmp_path).records.values())
