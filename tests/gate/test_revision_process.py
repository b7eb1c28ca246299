"""The process of a revision in a live gate: what it talks, and that it asks to be run first."""

import os
import socket

import pytest

from te_bench.gate import revision_process


def test_who_may_not_go_before_others_is_timed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def setpriority(*arguments: int) -> None:
        asked.append(arguments)
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", setpriority)
    monkeypatch.setattr(revision_process, "NICE", 0)  # which the group of this session has
    revision_process.raise_priority()
    assert asked == [(os.PRIO_PROCESS, 0, 0)]


@pytest.mark.parametrize("junk", [b"hello\n", b"[1]\n", b'{"a": \n'])
def test_nonsense_on_the_socket_is_the_end_of_a_process(junk: bytes) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(junk)
    with pytest.raises(EOFError):
        revision_process.Lines(ours).receive(1.0)
    theirs.sendall(b'{"a": 1}\n')
    assert revision_process.Lines(ours).receive(1.0) == {"a": 1}
    with pytest.raises(TimeoutError):
        revision_process.Lines(ours).receive(0.01)
