"""The verdict on branches: of pairs that share a trunk, six at least, and of the part of training that they are."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from convergence_runs import JUDGEMENT, STEPS, arm_trial, study_at, study_of, study_records, write_study

from te_bench.experiments.spec import Record
from te_bench.reports.convergence import planning
from te_bench.reports.convergence.equivalence import Verdict
from te_bench.reports.convergence.study import scope_of
from te_bench.reports.convergence.study_verdict import StudyVerdict
from te_bench.reports.convergence.verdict import judge_study
from te_bench.reports.group_result import load_report
from te_bench.reports.page import render, tables, verdict_tables

BRANCH = {"branch_at": 240}
SCOPE = "FP8 in the last 40 % of training (from step 240 of 400)"


def branches(seeds: int = 6, **more: Any) -> list[Record]:
    return study_records(seeds=range(seeds), sd=0.0002, **BRANCH, **more)


def judged(directory: Path, records: Sequence[Record], seeds: int = 6) -> StudyVerdict:
    return judge_study(study_of(directory / "run", records, {**JUDGEMENT, "seeds": seeds}))


def of_another_trunk(records: Sequence[Record], recipe: str, *seeds: int) -> list[Record]:
    """The same records, of which those of a recipe went on from a trunk that was trained again."""
    return [
        dataclasses.replace(one, work={**one.work, "trunk": {"sha256": "another", "trained": True, "took_s": 60.0}})
        if one.trial.problem["arm"] == "recipe" and one.trial.recipe == recipe and one.trial.seed in seeds
        else one
        for one in records
    ]


@pytest.mark.usefixtures("undrawn")
def test_what_is_claimed_is_said_with_every_verdict(tmp_path: Path) -> None:
    found = judged(
        tmp_path,
        branches(truth={"control": 0.0, "aa": 0.0, "delayed_scaling": 0.0, "rowwise_scaling": 0.02, "broken": 0.05}),
    )
    assert found.sentence.startswith(
        f"{SCOPE}: EQUIVALENT: delayed scaling trains like bf16 (final loss within 0.003 nat)"
    )
    assert "INFERIOR: rowwise scaling ends" in found.sentence
    assert found.sentence.endswith("This says nothing of FP8 before.")
    trunks = "Each pair goes on from one trunk, bf16's first 240 steps. Only trunks are independent of each other."
    assert any(note.startswith(trunks) for note in found.notes)
    written = write_study(tmp_path / "report", branches(), {**JUDGEMENT, "seeds": 6})
    page = render.write_report([written], tmp_path / "report" / "report").with_name("report.md").read_text()
    first = next(line for line in page.splitlines() if line.startswith("**"))
    assert first.startswith(f"**{SCOPE}: EQUIVALENT: ")
    assert "This says nothing of FP8 before." in first
    assert "This says nothing of FP8 before." in " ".join(tables.summary([written]).split())


@pytest.mark.parametrize(("branch_at", "share"), [(1, "99.75"), (240, "40"), (397, "0.75")])
def test_the_part_that_is_judged_is_neither_all_nor_nothing(branch_at: int, share: str) -> None:
    said = f"in the last {share} % of training (from step {branch_at} of 400)"
    assert scope_of(arm_trial("control", 0, branch_at=branch_at)) == said


def test_a_fault_that_began_too_late_to_be_seen_is_told_so(tmp_path: Path) -> None:
    missed = {"truth": {"control": 0.0, "aa": 0.0, "delayed_scaling": 0.0, "broken": 0.0}}
    found = judged(tmp_path, branches(**missed))
    assert found.void is not None
    assert found.void.endswith(". It had the last 160 steps to show: give a smaller --branch-at, or more --steps")
    whole = judge_study(study_of(tmp_path / "whole", study_records(sd=0.0002, **missed)))
    assert whole.void is not None
    assert "--branch-at" not in whole.void


def test_times_of_a_part_of_training_bring_no_time_to_equal_loss(tmp_path: Path) -> None:
    whole = judge_study(study_of(tmp_path / "whole", study_records(sd=0.0002)))
    assert whole.recipes[0].speedup is not None
    found = judged(tmp_path, branches())
    assert all(finding.speedup is None for finding in found.findings)
    table = verdict_tables.gaps(found)
    assert table is not None
    assert "To equal loss" not in str(table)
    [result] = load_report([tmp_path / "run"]).groups
    curves = {curve.configuration.trial.recipe: curve for curve in result.trainings[0].trainings}
    of_fp8 = curves["delayed_scaling"]
    assert of_fp8.tokens_per_s == pytest.approx((STEPS - 4 - 240) * 16384 / (0.009 * (STEPS - 5)), rel=0.01)


def test_pairs_of_two_trunks_are_left_out_and_said_to_be(tmp_path: Path) -> None:
    records = branches(8)
    lost = of_another_trunk(records, "delayed_scaling", 2, 5)
    found = judged(tmp_path, lost, 8)
    delayed, rowwise = found.recipes
    assert (delayed.seeds, len(rowwise.seeds)) == ((0, 1, 3, 4, 6, 7), 8)
    assert delayed.verdict is rowwise.verdict is Verdict.EQUIVALENT
    assert any("delayed scaling, seeds 2, 5: left out: a trunk was trained again" in note for note in found.notes)
    assert found.exit_code == 0
    of_control = arm_trial("control", 0, **BRANCH)
    study = study_at(tmp_path / "run")
    known = planning.spread([study], of_control)
    assert known is not None
    far = [
        dataclasses.replace(one, samples={**one.samples, "val_loss": [9.0] * len(one.samples["val_loss"])})
        if one.work["trunk"]["sha256"] == "another"
        else one
        for one in lost
    ]
    again = planning.spread([study_of(tmp_path / "far", far, {**JUDGEMENT, "seeds": 8})], of_control)
    assert again == known


def test_a_recipe_loses_the_seeds_on_which_the_second_bf16_run_has_another_trunk_and_that_is_said(
    tmp_path: Path,
) -> None:
    again = {"trunk": {"sha256": "another", "trained": True, "took_s": 60.0}}
    records = [
        dataclasses.replace(one, work={**one.work, **again})
        if (one.trial.problem["arm"], one.trial.seed) == ("aa", 2)
        else one
        for one in branches(8)
    ]
    for runs, left in ((1, 8), (2, 7)):
        plan = {**JUDGEMENT, "seeds": 8, "bf16_runs": runs}
        found = judge_study(study_of(tmp_path / str(runs), records, plan))
        assert [len(recipe.seeds) for recipe in found.recipes] == [left, left]
        assert sum(": left out: a trunk" in note for note in found.notes) == (1 if left == 8 else 3)


def test_a_trunk_that_breaks_is_no_divergence_of_fp8_and_no_fault_that_was_caught(tmp_path: Path) -> None:
    """One that was lost and trained again may break where the control's did not."""
    records = [
        dataclasses.replace(one, outcome="diverged", reason="the trunk, in bf16: the loss is nan", samples={}, work={})
        if one.trial.problem["arm"] in ("recipe", "broken") and one.trial.seed == 3
        else one
        for one in branches()
    ]
    found = judged(tmp_path / "lost", records)
    assert {finding.verdict for finding in found.recipes} == {Verdict.INCONCLUSIVE}
    assert found.recipes[0].judgement.reason.endswith("has no result for seed 3 (diverged)")
    assert found.broken is not None
    assert found.broken.verdict is Verdict.INCONCLUSIVE
    own = [dataclasses.replace(one, work={"trunk": {"sha256": "trunk 3"}}) if not one.work else one for one in records]
    assert {finding.verdict for finding in judged(tmp_path / "own", own).recipes} == {Verdict.DIVERGED}


def test_fewer_than_six_trunks_decide_nothing(tmp_path: Path) -> None:
    few = judged(tmp_path / "few", branches(5), 5)
    assert {finding.verdict for finding in few.recipes} == {Verdict.INCONCLUSIVE}
    assert few.recipes[0].judgement.reason == "5 pairs that share a trunk: a verdict on branches takes 6 trunks"
    assert few.exit_code == 4  # nor is A/A shown to be alike
    left = judged(tmp_path / "left", of_another_trunk(branches(), "delayed_scaling", 0))
    assert [finding.verdict for finding in left.recipes] == [Verdict.INCONCLUSIVE, Verdict.EQUIVALENT]
    assert left.exit_code == 3


def test_branches_and_whole_trainings_in_one_folder_are_judged_apart(tmp_path: Path) -> None:
    write_study(tmp_path, [*branches(), *study_records(seeds=range(6), sd=0.0002)], {**JUDGEMENT, "seeds": 6})
    [result] = load_report([tmp_path]).groups
    assert sorted(one.study.branch_at or 0 for one in result.studies) == [0, 240]
    assert {len(one.study.recipes) for one in result.studies} == {2}


def test_a_loss_that_rises_where_fp8_begins_is_seen_against_the_trunk(tmp_path: Path) -> None:
    """Its own first losses are as high: alone they rise above nothing."""
    records = branches()
    for place, one in enumerate(records):
        if (one.trial.recipe, one.trial.seed, one.trial.problem["arm"]) == ("rowwise_scaling", 3, "recipe"):
            high = [loss + 1 for loss in one.samples["loss"]]
            records[place] = dataclasses.replace(one, samples={**one.samples, "loss": high})
    study = study_of(tmp_path, records, {**JUDGEMENT, "seeds": 6})
    [arm] = [arm for arm in study.recipes if arm.name == "rowwise scaling"]
    assert list(arm.diverged) == [3]
    assert "above its minimum" in arm.diverged[3]
