"""The question that a live gate is asked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from te_bench.gate.config import Commands
from te_bench.reports.exchange.pytest_stats import Limit

#: MARGIN: smaller slow-downs, as a share, count as none. ALPHA: the error rate of each claim.
MARGIN, ALPHA = 0.02, 0.05
#: The fewest pairs for a claim. If processes of one program run at either of two speeds (memory layout), all n pairs show
#: the same difference in up to 4^-n of cases: 0.1 % for 5, and no noise among the pairs reveals it.
FEWEST = 5
#: Advised for each of two stored runs. With pairs that vary by 0.4 %, as a GPU's do, 80 % of gates find a slow-down of
#: 3.0 % with eight seeds, of 3.7 % with five.
SEEDS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """The revisions to compare, the trials to compare them by, and the time to spend."""

    repository: Path | None  # None: both sides are this te_bench's own files, for a self-test
    base: str  # refs
    head: str
    device: str
    suite: str = "quick"
    only: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of spec.Options; a revision ignores those that it lacks
    margin: float = MARGIN
    alpha: float = ALPHA
    mde: float | None = None
    budget_s: float | None = None
    most: int | None = None  # rounds; None: until each trial has as many pairs as the last look
    exit_first: bool = False
    limits: Sequence[Limit] = ()
    timeout_s: float = 900.0
    cache: Path | None = None
    gpu: str | None = None
    faults: Mapping[str, Mapping[str, Any]] | None = None  # for a self-test: {revision's name: fault to plant}
    faulty: str = "*"  # the trials that get the fault
    commands: Commands | None = None  # timed instead of a suite's trials
