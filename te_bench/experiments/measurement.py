"""The input and output of a workload, and the exceptions by which it gives no result.

A workload is a file with `run(trial: Trial, context: Context) -> Measurement`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Paths on this machine, and what was done before; nothing in it may change a result."""

    cache: Path | None = None  # folder for token files; None: the default one
    checkpoints: Path | None = None  # folder for trained models, as TRIAL-ID.pt; None: keep none
    trunks: Path | None = None  # folder of trunks that branches share (experiments.trunks); None: each trains its own
    check: bool = True  # False in later rounds of a gate, whose first round has checked the trial


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The workload's part of a Record; see spec.Record for the meaning of each field."""

    check: Mapping[str, Any] = field(default_factory=dict)
    work: Mapping[str, Any] = field(default_factory=dict)
    samples: Mapping[str, list[float]] = field(default_factory=dict)
    kernels: list[str] = field(default_factory=list)


class NoResult(Exception):
    """The trial has no result, for this reason; `measurement` keeps what is still valid."""

    outcome: ClassVar[str]  # of spec.OUTCOMES

    def __init__(self, reason: str, measurement: Measurement | None = None):
        super().__init__(reason)
        self.measurement = measurement or Measurement()


class Unsupported(NoResult):
    """This machine or these packages cannot run the trial."""

    outcome = "unsupported"


class Interrupted(NoResult):
    """A part of the trial was ended from outside; a rerun repeats the trial."""

    outcome = "interrupted"


class CheckFailed(NoResult):
    """The result is wrong or came from another kernel; the timings, if any, are dropped."""

    outcome = "failed_check"


class Diverged(NoResult):
    """The loss is not finite; samples up to that step are kept."""

    outcome = "diverged"


class Unsaved(NoResult):
    """The training ended, but its model could not be written; the samples are kept."""

    outcome = "crashed"


def ran_out(error: Exception) -> str | None:
    """Return "GPU" or "host", whose memory the error says has run out; None for any other error."""
    text = str(error)
    if isinstance(error, RuntimeError) and ("out of memory" in text or "_ALLOC_FAILED" in text):  # cuBLAS's and cuDNN's
        return "GPU"
    return "host" if isinstance(error, MemoryError) or "allocate memory" in text else None


def require(name: str, reason: str | None) -> None:
    """Raise Unsupported if there is a reason why `name` cannot run here."""
    if reason:
        raise Unsupported(f"{name}: {reason}")
