"""te-bench without a verb."""

import importlib.metadata
import os

from in_process import Command

from te_bench.experiments import environment

WIDTH = 80


def version(distribution: str) -> str:
    """Of a machine with one rival."""
    if distribution != "torchao":
        raise importlib.metadata.PackageNotFoundError(distribution)
    return "0.18.0"


def test_it_says_what_is_here_and_what_to_type_next(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "nvidia_gpus", lambda: [])
    monkeypatch.setattr(importlib.metadata, "version", version)
    empty = command()
    assert empty.code == 0
    assert "none: FP8 is emulated" in empty.out
    assert "rivals  torchao 0.18.0\n" in empty.out
    assert "runs    none in this folder" in empty.out
    assert "te-bench advise --model tiny " in empty.out
    assert "te-bench show" not in empty.out

    monkeypatch.setattr(environment, "nvidia_gpus", lambda: [{"name": "NVIDIA H200"}] * 2)
    for number in range(5):
        journal = tmp_path / "runs" / f"speed-{number}" / "journal.jsonl"
        journal.parent.mkdir(parents=True)
        journal.touch()
        os.utime(journal, (number, number))
    there = command()
    assert "2 x NVIDIA H200" in there.out
    assert "runs/speed-4, runs/speed-3, runs/speed-2 and 2 more" in there.out
    assert "te-bench advise --model gpt2 " in there.out
    assert "te-bench show DIR" in there.out
    assert max(map(len, (empty.out + there.out).splitlines())) <= WIDTH


def test_no_line_of_the_help_is_cut(command: Command) -> None:
    shown = command("--help").out
    assert "..." not in shown.partition("Commands:")[2]
    assert max(map(len, shown.splitlines())) <= WIDTH
