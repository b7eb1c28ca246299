"""te-bench in this process, and a machine with the GPUs that a test wants."""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

from te_bench import cli
from te_bench.experiments import environment
from te_bench.experiments.spec import Trial


class Done(NamedTuple):
    code: int
    out: str
    err: str


class Started(NamedTuple):
    trials: Sequence[Trial]
    environment: dict[str, Any]
    options: dict[str, Any]


# A process has one command, and asks once for its options, for versions, for its commit and for the hash of its own code.
_options = functools.cache(typer.main.get_command)
_own_version, _own_git = functools.cache(environment._version), functools.cache(environment._git)
_usual_hash, _own_hash = environment.code_hash, functools.cache(environment.code_hash)


def _code_hash(package: Path | None = None) -> str:
    return _own_hash() if package is None else _usual_hash(package)


class Command:
    """command("plan", "quick") runs te-bench in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        self.monkeypatch, self.capsys = monkeypatch, capsys
        monkeypatch.setattr(typer.main, "get_command", _options)
        monkeypatch.setattr(environment, "code_hash", _code_hash)
        monkeypatch.setattr(environment, "_version", _own_version)
        monkeypatch.setattr(environment, "_git", _own_git)
        monkeypatch.setenv("COLUMNS", "100")

    def __call__(self, *arguments: object) -> Done:
        self.monkeypatch.setattr(sys, "argv", ["te-bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        code = stopped.value.code
        return Done(code if isinstance(code, int) else 0, *self.capsys.readouterr())


def gpus(
    monkeypatch: pytest.MonkeyPatch, number: int = 2, *, cuda: str | None = "13.0", name: str = "NVIDIA H200"
) -> None:
    """A machine with so many GPUs, and a torch built for this CUDA."""
    found = [{"index": i, "name": name, "uuid": f"GPU-{'abcdef'[i]}", "driver": "580.1"} for i in range(number)]
    monkeypatch.setattr(environment, "nvidia_gpus", lambda: found)
    monkeypatch.setattr(environment, "_torch_build", lambda: {"version": "2.13.0", "cuda": cuda})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
