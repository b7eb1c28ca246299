"""What `te-bench run` says of records that a gate could not judge."""

from pathlib import Path

import pytest
from journals import record, step_record, trial

from te_bench.cli.run import _too_few_for_a_gate


@pytest.mark.parametrize(("seeds", "said"), [(1, "1 seed a trial is too few"), (3, "3 seeds a trial are too few")])
def test_too_few_seeds_for_a_gate_are_said_at_the_end_of_a_run(seeds: int, said: str) -> None:
    records = [step_record(trial(seed=seed), 30.0) for seed in range(seeds)]
    [line] = [" ".join(_too_few_for_a_gate(Path("runs/quick"), records))]
    assert f"te-bench gate --baseline runs/quick, {said}" in line
    assert "--seeds 8 adds what is missing" in line


def test_nothing_is_said_of_enough_seeds_nor_of_what_is_not_timed() -> None:
    enough = [step_record(trial(seed=seed), 30.0) for seed in range(5)]
    untimed = [record(trial("training"), samples={"loss": [1.0]})]
    failed = [record(trial(seed=9, attention="math"), outcome="oom", reason="too large")]
    assert _too_few_for_a_gate(Path("runs/quick"), [*enough, *untimed, *failed]) == []
    assert _too_few_for_a_gate(Path("runs/quick"), []) == []
