"""What a live gate is asked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from te_bench.gate.config import Commands
from te_bench.reports.exchange.pytest_stats import Limit

#: A slow-down by less than this share counts as none, and the error rate of each claim.
MARGIN, ALPHA = 0.02, 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is compared, by which trials, and how long that may take."""

    repository: Path | None  # None: both sides are this te_bench's own files, which is a self-test
    base: str  # refs
    head: str
    device: str
    suite: str = "quick"
    only: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of spec.Options, as far as a revision knows it
    margin: float = MARGIN
    alpha: float = ALPHA
    mde: float | None = None
    budget_s: float | None = None
    most: int | None = None  # rounds; None: until each trial has as many pairs as the last of LOOKS
    exit_first: bool = False
    limits: Sequence[Limit] = ()
    timeout_s: float = 900.0
    cache: Path | None = None
    gpu: str | None = None
    faults: Mapping[str, Mapping[str, Any]] | None = None  # of a self-test: {revision's name: what to plant}
    faulty: str = "*"  # into which trials
    commands: Commands | None = None  # to time instead of the trials of a suite
