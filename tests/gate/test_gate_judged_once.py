"""The rounds of a live gate: what is read after each, and how the last is judged. Revisions that run: tests/cli."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from journals import environment, step_record, trial, write

from te_bench.experiments.spec import Record
from te_bench.gate import revisions, stored_runs
from te_bench.gate.decision import GateVerdict
from te_bench.gate.paired_sweep import PairedPlan
from te_bench.gate.question import Question

ROUNDS = 8  # between two looks


def steps(side: str, slower: float) -> list[Record]:
    """Steps of 30 ms, a round each, whose pairs vary by 0.4 %."""
    times = [30 * slower * (1 + 0.004 * math.sin(8 * seed + slower)) for seed in range(ROUNDS)]
    return [step_record(trial(seed=seed), ms, 10.0, side) for seed, ms in enumerate(times)]


def test_a_gate_that_ends_between_two_looks_is_judged_there_by_what_was_read_once(tmp_path, monkeypatch):
    for side, slower in (("base", 1.0), ("head", 1.03)):
        write(tmp_path / side, steps(side, slower), body=environment(side, code=side))
    cell = trial().cell
    planned = PairedPlan(title="quick", baseline=cell, trials={side: {cell: {}} for side in revisions.SIDES})
    monkeypatch.setattr(revisions.paired_sweep, "run_round", lambda *_, **__: None)
    read: list[Path] = []
    load = stored_runs.load_results

    def noted(directories: Any) -> Any:
        read.extend(directories)
        return load(directories)

    monkeypatch.setattr(stored_runs, "load_results", noted)
    question = Question(repository=None, base="base", head="head", device="cpu", budget_s=0.0)
    store = SimpleNamespace(begin=lambda: None)
    sides = [SimpleNamespace(commit=side, store=store) for side in revisions.SIDES]
    processes: Any = SimpleNamespace(starting_s=0.0, start=lambda: planned, revisions=sides)
    found = revisions.run_rounds(question, tmp_path, processes, {"looks": (6, 16)}, 0.0, lambda _: None)

    assert read == [tmp_path / side for side in revisions.SIDES]
    [one] = found.decision.trials.values()
    assert (one.verdict, one.pairs) == (GateVerdict.REGRESSION, 6)
