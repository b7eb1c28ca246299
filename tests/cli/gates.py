"""What the tests of gates on two revisions share: how long a call takes, rounds of a tenth of a second, what came of it."""

from collections import Counter
from pathlib import Path

from te_bench.experiments.store import load

FAST, SLOW = 0.002, 0.006  # seconds a call
#: Of pairs.py.
QUICK = {"TURN_S": 0.004, "TIMED_S": 0.03, "MOST_TURNS": 6, "SHARED": ()}


def outcomes(out: Path) -> Counter[tuple[str, str]]:
    """{(trial, outcome): records} of the head."""
    return Counter((r.trial.problem["model"], r.outcome) for r in load(out / "head").records.values())
