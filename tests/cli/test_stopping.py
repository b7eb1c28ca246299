"""A pool's looks: a run stops what they decided, te-bench verdict says what it stopped for, and a pilot stays hidden."""

import dataclasses
import json
import re
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
from convergence_runs import JUDGEMENT, TRUTH, pool_records, study_at, study_of, study_records, write_study
from driving import IDLE, PLANTED, rows, te_bench
from journals import STARTED, environment, record

from te_bench.experiments.spec import Record
from te_bench.experiments.store import Plan, Store, load
from te_bench.reports.convergence import stopping
from te_bench.reports.convergence.equivalence import Verdict
from te_bench.reports.convergence.study import Study
from te_bench.reports.convergence.verdict import judge_study

SIMULATED = PLANTED.with_name("te_bench_simulated.py")
ROUNDS, RATIO = 8, 3  # looks after 3, 6 and 8 rounds
POOLED = {**JUDGEMENT, "seeds": ROUNDS, "pool": RATIO}
GAPS = {**TRUTH, "float8_block_scaling": 0.02, "float8_current_scaling": 0.0028}


def simulated(verb: str, *arguments: object, **gaps: float | None) -> Any:
    return te_bench(verb, *arguments, main=SIMULATED, env={**IDLE, "TE_BENCH_TEST_GAPS": json.dumps(gaps)}, timeout=200)


def run(out: Path, *arguments: object, **gaps: float | None) -> Any:
    where = ("--device", "cpu", "--data", "random", "--out", out, "--steps", 20, "--margin", 0.02)
    return simulated("run", "convergence", "--preset", "cpu-pool", *where, *arguments, **gaps)


def outcomes(out: Path) -> dict[str, Counter[str]]:
    """{arm or recipe: how its trials ended}."""
    found: dict[str, Counter[str]] = {}
    for row in rows(out):
        kind = row["trial"]["problem"]["arm"]
        found.setdefault(row["trial"]["recipe"] if kind == "recipe" else kind, Counter())[row["outcome"]] += 1
    return found


@pytest.mark.slow
def test_a_run_stops_what_is_decided_and_the_verdict_agrees(tmp_path: Path) -> None:
    arguments = ("--recipes", "delayed_scaling,rowwise_scaling", "--seeds", 5)
    done = run(tmp_path, *arguments, rowwise_scaling=0.1)
    assert done.returncode == 0, done.stdout + done.stderr  # stopped is complete
    found = outcomes(tmp_path)
    assert set(found) == {"control", "aa", "delayed_scaling", "rowwise_scaling", "broken"}
    assert found["broken"] == {"ok": 3}
    assert found["control"].total() == found["aa"].total() == 5  # of two recipes: one bf16 run a round beside A/A's
    for name in ("delayed_scaling", "rowwise_scaling"):
        assert found[name]["ok"] in (3, 4)  # to the first look, and what was under way
        assert found[name]["ok"] + found[name]["stopped"] == 5
    assert found["control"]["stopped"]
    told = [line for line in done.stdout.splitlines() if line.startswith("stopped: ")]
    for part, why in (
        ("/rowwise_scaling/", "INFERIOR ends more than 0.02 nat above the control: gap"),
        ("/delayed_scaling/", "EQUIVALENT ends within 0.02 nat of the control"),
        ("-control-", "every configuration has been decided"),
    ):
        assert [why in line for line in told if part in line] == [True]

    judged = simulated("verdict", tmp_path)
    assert judged.returncode == 1, judged.stdout + judged.stderr
    sentence = " ".join(judged.stdout.split())
    good = "EQUIVALENT: delayed scaling trains like bf16 (final loss within 0.02 nat)"
    assert sentence.startswith(f"{good}; INFERIOR: row")
    assert "vary twice as much as bf16's" in sentence  # what the error rate of this design rests on
    page = (tmp_path / "report" / "report.md").read_text()
    assert "| Runs | Of bf16 |" in page
    assert "| Training loss | Gap in training |" in page
    assert "| Gap, % |" in page


@pytest.mark.parametrize(("gap", "under_way_at_once"), [(0.0028, 3), (0.005, 1)])
def test_what_stopped_is_what_the_verdict_says(tmp_path: Path, gap: float, under_way_at_once: int) -> None:
    """Whatever the truth, and however many trials are under way when a look decides."""
    truth = {**TRUTH, "rowwise_scaling": gap, "float8_block_scaling": 0.0}
    records = pool_records(truth, ROUNDS, RATIO, sd=0.0004, outcomes={("float8_block_scaling", 6): "diverged"})
    store = begun(tmp_path, records)
    needless = stopping.stopping_rule("convergence", store.journal, "env-h200")
    waiting, under_way = deque(records), deque[Record]()
    while waiting or under_way:
        while waiting and len(under_way) < under_way_at_once:
            one = waiting.popleft()
            if why := needless(one.trial):
                store.add(record(one.trial, outcome="stopped", reason=why))
            else:
                under_way.append(one)
        if under_way:
            store.add(under_way.popleft())
    store.close()
    found = judge_study(study_at(tmp_path))
    assert found.void is None
    for finding in found.recipes:
        reasons = {run.row.reason for run in finding.arm.runs.values() if run.row.outcome == "stopped"}
        assert all(str(reason).startswith(finding.verdict) for reason in reasons)
        assert finding.missing is None
    told = {finding.arm.name: finding.verdict for finding in found.recipes}
    assert told["delayed scaling"] is Verdict.EQUIVALENT
    assert told["block scaling"] is Verdict.DIVERGED
    if gap > 0.003:
        assert told["rowwise scaling"] is Verdict.INFERIOR
        assert any(run.row.outcome == "stopped" for run in found.recipes[1].arm.runs.values())


def begun(directory: Path, records: list[Record], judgement: Any = POOLED) -> Store:
    """A run of these trials whose plan is written and whose records are not."""
    store = Store(directory)
    store.add_environment(environment())
    store.add_plan(plan(records, judgement))
    return store


def plan(records: list[Record], judgement: Any) -> Plan:
    planned = tuple(one.trial.to_json() for one in records)
    settings = {"suite": "convergence", "title": "Convergence", "environment": "env-h200", "baseline": None}
    return Plan(**settings, trials=planned, started_at=STARTED, judgement=judgement)


# ---- the rule


def by_name(study: Study) -> dict[str, str | None]:
    return {arm.name: stopping.why_needless(study, arm.trial) for arm in study.arms}


def study(
    directory: Path, truth: dict[str, float] = TRUTH, judgement: Any = POOLED, rounds: int = 6, **options: Any
) -> Study:
    return study_of(directory / "run", pool_records(truth, rounds, RATIO, **{"sd": 0.0002, **options}), judgement)


def test_recipes_stop_alone_and_what_they_are_judged_beside_goes_on(tmp_path: Path) -> None:
    found = by_name(study(tmp_path, GAPS))
    assert str(found.pop("block scaling")).startswith("INFERIOR")
    assert str(found.pop("delayed scaling")).startswith("EQUIVALENT")
    assert str(found.pop("rowwise scaling")).startswith("EQUIVALENT")
    assert set(found.values()) == {None}  # one recipe is undecided yet


def test_bf16_stops_once_every_configuration_is_decided(tmp_path: Path) -> None:
    found = study(tmp_path)
    told = by_name(found)
    assert told.pop(found.broken.name) is None  # it has three runs anyway
    assert told["bf16"] == "every configuration has been decided"
    assert all(told.values())


def test_bf16_goes_on_while_aa_is_undecided(tmp_path: Path) -> None:
    found = study(tmp_path, {**TRUTH, "aa": 0.0026}, sd=0.0004)
    told = by_name(found)
    assert told["bf16"] is None
    assert all(told[arm.name] for arm in found.recipes)


def test_rounds_that_would_hardly_tell_are_spared(tmp_path: Path) -> None:
    """At the margin, with noise: not told after 6 of 8 rounds, and two more would not do."""
    found = study(tmp_path, {**TRUTH, "rowwise_scaling": 0.003}, sd=0.001)
    assert "the other 2 rounds would hardly tell" in str(by_name(found)["rowwise scaling"])


def test_a_run_that_ended_far_from_the_others_is_named(tmp_path: Path) -> None:
    records = pool_records(TRUTH, ROUNDS, RATIO, sd=0.0002)
    place = next(i for i, one in enumerate(records) if one.trial.recipe == "delayed_scaling" and one.trial.seed == 6)
    values = records[place].to_json()
    losses = values["samples"]["val_loss"]
    values["samples"] = {**values["samples"], "val_loss": [*losses[:-1], losses[-1] + 0.01]}
    records[place] = Record.from_json(values)
    [note] = judge_study(study_of(tmp_path, records, POOLED)).notes
    assert note.startswith("delayed scaling, seed 6: its loss 3.29")
    assert "lies far from the others'" in note


def test_a_look_waits_for_all_runs_before_it(tmp_path: Path) -> None:
    waiting = study(tmp_path / "a", sd=0.00001, outcomes={("control", 1): "interrupted"})
    assert set(by_name(waiting).values()) == {None}
    later = study(tmp_path / "b", sd=0.00001, outcomes={("control", 15): "interrupted"})  # of the sixth round
    assert all(by_name(later)[arm.name] for arm in later.recipes)


def test_a_plan_of_pairs_never_stops(tmp_path: Path) -> None:
    directory = write_study(tmp_path, study_records(seeds=range(6), sd=0.0001))
    journal = load(directory)
    rule = stopping.stopping_rule("convergence", journal, journal.plans[0].environment)
    assert {rule(record.trial) for record in journal.records.values()} == {None}


def test_the_rule_reads_the_journal_as_it_stands(tmp_path: Path) -> None:
    directory = write_study(tmp_path, pool_records(TRUTH, 6, RATIO, sd=0.0001), POOLED)
    journal = load(directory)
    trials = [one.trial for one in journal.records.values() if one.trial.problem["arm"] != "broken"]
    assert all(map(stopping.stopping_rule("convergence", journal, journal.plans[0].environment), trials))
    assert not any(map(stopping.stopping_rule("convergence", journal, "another environment"), trials))
    assert not any(map(stopping.stopping_rule("stress", journal, journal.plans[0].environment), trials))


def test_within_a_time_no_trial_is_begun_that_would_end_later_and_a_rerun_goes_on(tmp_path: Path) -> None:
    arguments = ("--recipes", "delayed_scaling", "--seeds", 4)
    none = run(tmp_path, *arguments, "--within", "0.001s")
    assert none.returncode == 4, none.stdout + none.stderr
    assert (sum(outcomes(tmp_path).values(), Counter()), "15 trials would not have ended" in none.stdout) == ({}, True)
    assert re.search(r"needs --within at least \d+ s$", none.stdout, re.MULTILINE)  # the same command would begin none
    assert "go on: te-bench run convergence" not in none.stdout
    assert "Unfinished: 15 of 15 trials to go" in none.stdout
    assert "15 not run yet" in (tmp_path / "report" / "report.md").read_text()
    ended = run(tmp_path, *arguments, "--within", "1h")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "would not have ended" not in ended.stdout
    assert not any("loss" in line for line in ended.stderr.splitlines() if line.startswith("["))  # gaps are hidden
    assert sum(map(Counter.total, outcomes(tmp_path).values())) == 15


def test_within_less_than_any_trial_takes_says_what_the_shortest_does(tmp_path: Path) -> None:
    arguments = ("--recipes", "delayed_scaling", "--seeds", 4)
    assert run(tmp_path, *arguments, "--only", "*-broken-*").returncode == 0
    with Store(tmp_path) as store:
        ended = list(store.journal.records.values())
        for one in ended:
            store.add(dataclasses.replace(one, wall_s=1000.0))
    none = run(tmp_path, *arguments, "--within", "5min")
    left = 15 - len(ended)
    said = f"{left} trials would not have ended --within 5min: the shortest takes 17 min, and with its start te-bench needs"
    assert (none.returncode, said in none.stdout) == (4, True), none.stdout + none.stderr


def test_within_no_time_writes_the_plan_and_begins_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "--recipes", "delayed_scaling", "--seeds", 4, "--within", "0s")
    assert (done.returncode, load(tmp_path).records) == (4, {}), done.stdout + done.stderr
    assert len(load(tmp_path).plans[0].trials) == 15
    assert "15 trials left: --within 0s begins none" in done.stdout


# ---- a pilot


def test_a_pilot_prints_no_loss_while_it_runs(tmp_path: Path) -> None:
    """As a plan does, see the test of --within."""
    done = run(tmp_path, "--recipes", "delayed_scaling", "--seeds", 3, "--as-pilot")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert lines
    assert not any("loss" in line for line in lines)


def test_a_pilot_s_means_stay_hidden_and_its_runs_count_in_the_plan_that_follows(tmp_path: Path) -> None:
    records = pool_records(GAPS, ROUNDS, RATIO, sd=0.0004)
    first = [one for one in records if one.trial.seed < 3 * RATIO]
    store = begun(tmp_path, first, {**POOLED, "seeds": 3, "pilot": True})
    for one in first:
        store.add(one)
    found = judge_study(study_at(tmp_path))
    assert str(found.void).startswith("these runs are a pilot")
    assert all(finding.judgement.comparison is None for finding in found.findings)
    assert set(by_name(study_at(tmp_path)).values()) == {None}  # it stops nothing either
    store.add_plan(plan(records, POOLED))
    for one in records[len(first) :]:
        store.add(one)
    store.close()
    found = judge_study(study_at(tmp_path))
    assert found.void is None
    assert {finding.judgement.comparison.n for finding in found.recipes if finding.judgement.comparison} <= {3, 6, 8}
    assert not any("added after" in note for note in found.notes)


def test_the_tighter_margin_that_a_plan_states_is_no_exploration(tmp_path: Path) -> None:
    stated = {**POOLED, "margin": 0.01, "tighter": 0.003}
    one = study(tmp_path, judgement=stated, rounds=ROUNDS)
    assert judge_study(one, margin=0.003).exit_code == judge_study(one).exit_code == 0
    assert judge_study(one, margin=0.003).margin == 0.003
    assert judge_study(one, margin=0.004).exploration
