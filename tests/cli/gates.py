"""What the tests of gates on two revisions share: how long a call takes, rounds of a tenth of a second, what came of it."""

from collections import Counter
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from te_bench.experiments.store import load
from te_bench.gate import stored_runs
from te_bench.gate.decision import GateDecision, Ratios

FAST, SLOW = 0.002, 0.006  # seconds a call
#: Of paired_trial.
QUICK = {"TURN_S": 0.004, "TIMED_S": 0.03, "MOST_TURNS": 6, "SHARED": ()}


def outcomes(out: Path) -> Counter[tuple[str, str]]:
    """{(trial, outcome): records} of the head."""
    return Counter((r.trial.problem["model"], r.outcome) for r in load(out / "head").records.values())


def judge_as(monkeypatch: pytest.MonkeyPatch, ratios: Mapping[str, float], noise: float = 0.01) -> None:
    """Judge every trial by pairs of this ratio, half above and half below by `noise`, and by none that was measured."""
    decide = stored_runs.decide

    def as_given(found: Ratios, **options: Any) -> GateDecision:
        means = {name: ratio for name in found for model, ratio in ratios.items() if f"/{model}/" in name}
        assert means.keys() == found.keys()
        signs = {name: zip(found[name], cycle((1 - noise, 1 + noise)), strict=False) for name in found}
        judged = {name: [one and means[name] * sign for one, sign in signs[name]] for name in found}
        return decide(judged, **{**options, "means": judged})

    monkeypatch.setattr(stored_runs, "decide", as_given)
