"""--stop-early: a run stops what its looks have decided, and te-bench verdict says what it stopped for."""

import json
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from convergence_runs import JUDGEMENT, TRUTH, study_of, study_records, write_study
from driving import IDLE, PLANTED, rows, te_bench
from in_process import Command, Started
from journals import STARTED, environment, record

from te_bench.experiments.spec import Experiment, Record
from te_bench.experiments.store import Plan, Store, load
from te_bench.reports.analysis.rows import load_results
from te_bench.reports.convergence import stopping
from te_bench.reports.convergence.study import Study, StudyArm, studies
from te_bench.reports.convergence.verdict import judge_study

SIMULATED = PLANTED.with_name("te_bench_simulated.py")
SEQUENTIAL = {**JUDGEMENT, "seeds": 12, "first_look": 4}
SCALE = 0.00065  # nat: gaps (0, x, -x, 0) are within 0.003 at the first of looks (4, 5, 6) by alpha 0.05, not by 0.025
GAPS = {**TRUTH, "float8_block_scaling": 0.02, "float8_current_scaling": 0.0029}


def simulated(verb: str, *arguments: object, **gaps: float | None) -> Any:
    return te_bench(verb, *arguments, main=SIMULATED, env={**IDLE, "TE_BENCH_TEST_GAPS": json.dumps(gaps)}, timeout=200)


def run(out: Path, *arguments: object, seeds: int = 8, **gaps: float | None) -> Any:
    where = ("--device", "cpu", "--data", "random", "--out", out, "--steps", 20, "--margin", 0.003)
    return simulated("run", "convergence", *where, "--seeds", seeds, *arguments, **gaps)


def outcomes(out: Path) -> dict[str, Counter[str]]:
    """{arm or recipe: how its trials ended}."""
    found: dict[str, Counter[str]] = {}
    for row in rows(out):
        kind = row["trial"]["problem"]["arm"]
        found.setdefault(row["trial"]["recipe"] if kind == "recipe" else kind, Counter())[row["outcome"]] += 1
    return found


def test_a_run_stops_what_is_decided_and_the_verdict_agrees(tmp_path: Path) -> None:
    arguments = ("--stop-early", "--recipes", "delayed_scaling,rowwise_scaling")
    done = run(tmp_path, *arguments, rowwise_scaling=0.02)
    assert done.returncode == 0, done.stdout + done.stderr  # stopped is complete
    found = outcomes(tmp_path)
    assert set(found) == {"control", "aa", "delayed_scaling", "rowwise_scaling", "broken"}
    assert all(counts == {"ok": 4, "stopped": 4} for counts in found.values())
    told = [line for line in done.stdout.splitlines() if line.startswith("stopped: ")]
    assert len(told) == 5  # a line an arm, not a line a seed
    assert "s4 and 3 more: EQUIVALENT within 0.003 of the control after 4 of 8 seeds" in _line(
        told, "/delayed_scaling/"
    )
    assert "INFERIOR more than 0.003 above the control after 4 of 8 seeds" in _line(told, "/rowwise_scaling/")
    assert "every configuration has been decided" in _line(told, "-control-")

    judged = simulated("verdict", tmp_path)
    assert judged.returncode == 1, judged.stdout + judged.stderr
    sentence = " ".join(judged.stdout.split())
    assert sentence.startswith(
        "EQUIVALENT: delayed_scaling trains like bf16 (final loss within 0.003 nat); INFERIOR: row"
    )

    again = run(tmp_path, *arguments, rowwise_scaling=0.02)
    assert f"40 of 40 trials are already in {tmp_path}" in again.stdout
    assert len(rows(tmp_path)) == 40


def _line(lines: list[str], part: str) -> str:
    [found] = [line for line in lines if part in line]
    return found


@pytest.mark.parametrize("gpus", [1, 3])
@pytest.mark.parametrize("draw", range(4))
def test_what_stopped_is_what_the_verdict_says(tmp_path: Path, draw: int, gpus: int) -> None:
    """Whatever the truth, and however many trials are under way when a look decides."""
    rng = np.random.default_rng(draw)
    aa = 0.0029 if draw == 3 else 0.0
    truth = {**TRUTH, "float8_block_scaling": 0.0, "rowwise_scaling": float(rng.normal(0, 0.002)), "aa": aa}
    records = study_records(truth, seeds=range(8), sd=0.00005, outcomes={("float8_block_scaling", 2): "diverged"})
    store = begun(tmp_path, records)
    needless = stopping.stopping_rule("convergence", store.journal, "env-h200")
    waiting, under_way = deque(records), deque[Record]()
    while waiting or under_way:
        while waiting and len(under_way) < gpus:
            one = waiting.popleft()
            if why := needless(one.trial):
                store.add(record(one.trial, outcome="stopped", reason=why))
            else:
                under_way.append(one)
        if under_way:
            store.add(under_way.popleft())
    store.close()
    found = judge_study(read(tmp_path))
    for finding in found.recipes:
        reasons = {run.row.reason for run in finding.arm.runs.values() if run.row.outcome == "stopped"}
        assert len(reasons) <= 1
        assert all(str(reason).upper().startswith(finding.verdict) for reason in reasons)
    spared = [run for arm in (found.study.control, found.study.aa) if arm for run in arm.runs.values()]
    if any(run.row.outcome == "stopped" for run in spared):
        aa, broken = (stopping.why_decided(found.study, arm) for arm in (found.study.aa, found.study.broken) if arm)
        shown = str(aa).startswith("EQUIVALENT") and str(broken).startswith("INFERIOR")
        assert (found.void is None) == shown
    else:
        assert draw == 3  # else a look before the last one decides them all


def begun(directory: Path, records: list[Record]) -> Store:
    """A run of these trials whose plan is written and whose records are not."""
    store = Store(directory)
    store.add_environment(environment())
    planned = tuple(one.trial.to_json() for one in records)
    settings = {"suite": "convergence", "title": "Convergence", "environment": "env-h200", "baseline": None}
    store.add_plan(Plan(**settings, trials=planned, started_at=STARTED, judgement={**SEQUENTIAL, "seeds": 8}))
    return store


def read(directory: Path) -> Study:
    [group] = load_results([directory]).groups
    [found] = studies(group)
    return found


# ---- the rule


def decided(study: Study, arm: StudyArm) -> str | None:
    return stopping.why_needless(study, arm.trial)


def by_name(study: Study) -> dict[str, str | None]:
    return {arm.name: decided(study, arm) for arm in study.arms}


def study(directory: Path, truth: dict[str, float] = TRUTH, judgement: Any = SEQUENTIAL, **options: Any) -> Study:
    return study_of(directory / "run", study_records(truth, **{"seeds": range(6), "sd": 0.00005, **options}), judgement)


def test_recipes_stop_alone_and_what_they_are_judged_beside_goes_on(tmp_path: Path) -> None:
    found = by_name(study(tmp_path, GAPS))
    assert str(found.pop("float8_block_scaling")).startswith("INFERIOR")
    assert str(found.pop("delayed_scaling")).startswith("EQUIVALENT")
    assert str(found.pop("rowwise_scaling")).startswith("EQUIVALENT")
    assert set(found.values()) == {None}  # one recipe is undecided yet


def test_everything_stops_once_every_arm_is_decided(tmp_path: Path) -> None:
    found = by_name(study(tmp_path))
    assert found.pop("bf16") == "every configuration has been decided"
    assert all(found.values())


@pytest.mark.parametrize("arm", ["aa", "broken"])
def test_nothing_the_claims_rest_on_stops_while_it_is_undecided(tmp_path: Path, arm: str) -> None:
    """Noise in the A/A arm, or a fault that ends near the margin: no look has told yet."""
    found = study(tmp_path, {**TRUTH, arm: 0.0029})
    assert [decided(found, one) for one in found.arms if one.kind in ("control", "aa", "broken")] == [None] * 3
    assert all(decided(found, one) for one in found.recipes)


def test_each_recipe_has_its_share_of_alpha(tmp_path: Path) -> None:
    """Between the bounds of alpha and alpha / 2: alone it is decided, beside another it is not."""
    pair = {"control": 0.0, "aa": 0.0, "delayed_scaling": 0.0, "rowwise_scaling": 0.0, "broken": 0.1}
    alone = {name: gap for name, gap in pair.items() if name != "rowwise_scaling"}
    told = []
    for truth in (alone, pair):
        records = study_records(truth, seeds=range(4), sd=0.0)
        gaps = dict(enumerate((0.0, SCALE, -SCALE, 0.0)))
        moved = [_moved(one, gaps[one.trial.seed]) if one.trial.recipe == "delayed_scaling" else one for one in records]
        directory = tmp_path / str(len(truth))
        found = study_of(directory, moved, {**SEQUENTIAL, "seeds": 6})
        told.append(decided(found, found.recipes[0]))
    assert str(told[0]).startswith("EQUIVALENT")
    assert told[1] is None


def _moved(one: Record, gap: float) -> Record:
    values = one.to_json()
    values["samples"] = {**one.samples, "val_loss": [*one.samples["val_loss"][:-1], one.samples["val_loss"][-1] + gap]}
    return Record.from_json(values)


def test_a_pair_is_not_looked_at_before_those_of_earlier_seeds_have_ended(tmp_path: Path) -> None:
    waiting = study(tmp_path / "a", sd=0.00001, outcomes={("control", 2): "interrupted"})
    assert set(by_name(waiting).values()) == {None}
    later = study(tmp_path / "b", sd=0.00001, outcomes={("control", 5): "interrupted"})
    assert all(decided(later, arm) for arm in later.recipes)


def test_a_recipe_that_diverged_waits_for_its_control(tmp_path: Path) -> None:
    """Its control may diverge too, and then it is the pair that is left out."""
    early = study(tmp_path / "a", outcomes={("delayed_scaling", 1): "diverged", ("control", 1): "interrupted"})
    assert decided(early, early.recipes[0]) is None
    ended = study(tmp_path / "b", outcomes={("delayed_scaling", 1): "diverged"})
    assert str(decided(ended, ended.recipes[0])).startswith("diverged: 1 of 6 runs, seed 1")


def test_a_plan_without_looks_never_stops(tmp_path: Path) -> None:
    directory = write_study(tmp_path, study_records(seeds=range(6), sd=0.0001))
    journal = load(directory)
    rule = stopping.stopping_rule("convergence", journal, journal.plans[0].environment)
    assert {rule(record.trial) for record in journal.records.values()} == {None}


def test_the_rule_reads_the_journal_as_it_stands(tmp_path: Path) -> None:
    directory = write_study(tmp_path, study_records(seeds=range(6), sd=0.0001), SEQUENTIAL)
    journal = load(directory)
    trials = [record.trial for record in journal.records.values()]
    assert all(map(stopping.stopping_rule("convergence", journal, journal.plans[0].environment), trials))
    assert not any(map(stopping.stopping_rule("convergence", journal, "another environment"), trials))
    assert not any(map(stopping.stopping_rule("stress", journal, journal.plans[0].environment), trials))


@pytest.mark.usefixtures("started")
def test_a_run_that_began_without_looks_cannot_get_them_later(command: Command, tmp_path: Path) -> None:
    asked = ("run", "convergence", "--device", "cpu", "--data", "random", "--out", tmp_path / "out")
    assert command(*asked).code == 130
    done = command(*asked, "--stop-early")
    assert done.code == 2
    assert "--stop-early: this run was planned without, and losses that may have been looked at cannot" in done.err
    assert len(load(tmp_path / "out").plans) == 1
    assert command(*asked, "--stop-early", "--fresh").code == 130


def test_trials_that_a_look_may_spare_go_one_after_the_other(
    command: Command, monkeypatch: pytest.MonkeyPatch, started: list[Started], tmp_path: Path
) -> None:
    monkeypatch.setattr("te_bench.experiments.host.cores", lambda: 4)
    asked = ("run", "convergence", "--device", "cpu", "--data", "random", "--seeds", 8, "--out")
    for where, more in (("all", ()), ("early", ("--stop-early",)), ("char", ("--model", "char"))):
        assert command(*asked, tmp_path / where, *more).code == 130
    assert [run.options["executor"].free for run in started] == [[None] * 4, [None], [None]]


def test_another_machine_s_plan_does_not_forbid_looks(tmp_path: Path) -> None:
    journal = load(write_study(tmp_path, study_records(seeds=range(2))))
    looking = Experiment(suite="convergence", title="", trials=(), judgement=SEQUENTIAL)
    stopping.check_stop_early(looking, journal, "another environment")
    with pytest.raises(ValueError, match="--stop-early: this run was planned without"):
        stopping.check_stop_early(looking, journal, "env-h200")
