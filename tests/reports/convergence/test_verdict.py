"""Verdicts on runs whose truth is known, and what may not be concluded from runs that cannot carry it."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from convergence_runs import (
    JUDGEMENT,
    STEPS,
    TRUTH,
    arm_trial,
    pool_records,
    run_record,
    study_at,
    study_of,
    study_records,
    write_study,
)

from te_bench.experiments.spec import Record
from te_bench.experiments.store import Store, encode, load
from te_bench.reports.analysis import curves
from te_bench.reports.analysis.rows import load_results
from te_bench.reports.convergence import planning
from te_bench.reports.convergence.equivalence import Verdict
from te_bench.reports.convergence.study import studies
from te_bench.reports.convergence.study_verdict import StudyVerdict
from te_bench.reports.convergence.verdict import judge_study
from te_bench.reports.group_result import load_report
from te_bench.reports.page import answers, render, tables, training_tables

GAPS = {**TRUTH, "float8_block_scaling": 0.02}


def judged(
    directory: Path, *, judgement: dict[str, Any] | None = None, margin: float | None = None, **options: Any
) -> StudyVerdict:
    """Verdicts of a run that was planned with as many seeds as it has, five at least, unless `judgement` says otherwise."""
    options.setdefault("sd", 0.0002)
    judgement = judgement or {**JUDGEMENT, "seeds": max(5, len(options.get("seeds", range(5))))}
    return judge_study(study_of(directory / "run", study_records(**options), judgement), margin=margin)


def altered(directory: Path, which: Callable[[Record], bool], samples: Callable[[Any], Any], **judgement: Any) -> Any:
    """The verdict of a study of which those records that are `which` have other samples, made of their own."""
    records = study_records(seeds=range(judgement.get("seeds", 5)), sd=0.0002)
    for place, one in enumerate(records):
        if which(one):
            records[place] = dataclasses.replace(one, samples={**one.samples, **samples(one.samples)})
    return judge_study(study_of(directory / "run", records, {**JUDGEMENT, **judgement}))


def of_rowwise(seed: int) -> Callable[[Record], bool]:
    return lambda one: (one.trial.recipe, one.trial.seed) == ("rowwise_scaling", seed)


def by_name(found: StudyVerdict) -> dict[str, Verdict]:
    return {finding.arm.name: finding.verdict for finding in found.recipes}


def test_truth_is_told(tmp_path: Path) -> None:
    found = judged(tmp_path, truth=GAPS)
    good = dict.fromkeys(("delayed scaling", "rowwise scaling"), Verdict.EQUIVALENT)
    assert by_name(found) == good | {"block scaling": Verdict.INFERIOR}
    assert found.aa.verdict is Verdict.EQUIVALENT
    assert found.broken.verdict is Verdict.INFERIOR
    assert found.void is None
    assert found.exit_code == 1
    assert found.sentence.startswith("EQUIVALENT: delayed scaling and rowwise scaling train like bf16")
    gap = {f.arm.name: f.judgement.comparison.gap for f in found.recipes if f.judgement.comparison}
    assert gap["block scaling"] == pytest.approx(0.02, abs=0.003)


@pytest.mark.parametrize(("truth", "code"), [(TRUTH, 0), ({**TRUTH, "rowwise_scaling": 0.0025}, 3)])
def test_exit_codes_of_a_pass_and_of_doubt(tmp_path: Path, truth: dict[str, float], code: int) -> None:
    assert judged(tmp_path, truth=truth).exit_code == code


def test_pairs_are_of_one_seed(tmp_path: Path) -> None:
    """Noise that both arms of a seed share is ten times the margin: only paired differences can see through it."""
    records = []
    for seed in range(5):
        for arm, gap in TRUTH.items():
            own = 0.0003 * ((seed * 7 + len(arm)) % 5 - 2)
            records.append(run_record(arm, seed, gap, 0.03 * (seed - 2) + own))
    records.reverse()  # whatever the order in the journal
    found = judge_study(study_of(tmp_path / "run", records))
    assert by_name(found)["delayed scaling"] is Verdict.EQUIVALENT
    comparison = found.recipes[0].judgement.comparison
    assert comparison.correlation > 0.99


@pytest.mark.parametrize("two", [True, False])
def test_a_recipe_is_held_to_the_mean_of_as_many_bf16_runs_of_a_seed_as_the_plan_says(
    tmp_path: Path, two: bool
) -> None:
    plan = {**JUDGEMENT, "bf16_runs": 2} if two else JUDGEMENT
    study = study_of(tmp_path / "run", study_records(sd=0.002), plan)
    found = judge_study(study)
    recipe, control, aa = study.recipes[0].finals, study.control.finals, study.aa.finals
    base = {seed: (loss + aa[seed]) / 2 if two else loss for seed, loss in control.items()}
    c = found.recipes[0].judgement.comparison
    assert c.gap == pytest.approx(sum(recipe[seed] - base[seed] for seed in base) / 5)
    assert c.n == 5
    assert found.aa.judgement.comparison.gap == pytest.approx(sum(aa[seed] - control[seed] for seed in base) / 5)
    ends, gaps = found.recipes[0].gap_curve
    assert (ends[-1], gaps[-1]) == (STEPS, pytest.approx(c.gap))
    spread = planning.spread([study], arm_trial("control", 0))
    sds = [stdev(arm.finals[seed] - base[seed] for seed in base) for arm in study.recipes]
    assert spread.gap_sd == pytest.approx(math.sqrt(sum(sd**2 for sd in sds) / len(sds)))


def test_a_seed_without_its_second_bf16_run_has_no_verdict(tmp_path: Path) -> None:
    records = [one for one in study_records() if (one.trial.problem["arm"], one.trial.seed) != ("aa", 3)]
    found = judge_study(study_of(tmp_path / "run", records, {**JUDGEMENT, "bf16_runs": 2}))
    assert set(by_name(found).values()) == {Verdict.INCONCLUSIVE}
    assert found.recipes[0].judgement.reason == "bf16, A/A has 4 of the 5 seeds of the plan"
    once = judge_study(study_of(tmp_path / "once", records))
    assert once.recipes[0].judgement.comparison is not None


def test_the_planted_fault_needs_three_runs_or_those_of_the_plan(tmp_path: Path) -> None:
    def until(seeds: int, **plan: Any) -> StudyVerdict:
        kept = [r for r in study_records(sd=0.0002) if r.trial.problem["arm"] != "broken" or r.trial.seed < seeds]
        return judge_study(study_of(tmp_path / f"{seeds} of {plan}", kept, {**JUDGEMENT, **plan}))

    assert until(3).exit_code == 0
    assert until(3).broken.verdict is Verdict.INFERIOR
    assert "has 2 of the 3 seeds of the plan" in str(until(2).void)
    assert "has 3 of the 4 seeds of the plan" in str(until(3, fault_runs=4).void)
    assert until(4, fault_runs=4).exit_code == 0


def test_an_experiment_that_could_not_have_told_is_void(tmp_path: Path) -> None:
    blind = judged(tmp_path / "blind", truth={**TRUTH, "broken": 0.0})
    assert blind.exit_code == 4
    first, of_it, more = str(blind.sentence).split(". ")
    assert first == "No verdict: the fault planted on purpose was not caught, and a bad recipe might not be either"
    assert of_it.startswith("Of the fault: ends within 0.003 nat of the control")
    assert more == "More steps make its gap larger."
    noisy = judged(tmp_path / "noisy", truth={**TRUTH, "aa": 0.01})
    assert noisy.exit_code == 4
    assert "A/A configuration, bf16 against itself, is not EQUIVALENT" in str(noisy.void)
    for arm, word in (("aa", "A/A"), ("broken", "broken")):
        without = judged(tmp_path / arm, truth={name: gap for name, gap in TRUTH.items() if name != arm})
        assert without.exit_code == 4
        assert f"the {word} configuration is missing" in str(without.void)


def test_an_aa_arm_that_does_not_tell_voids_the_verdict(tmp_path: Path) -> None:
    """INCONCLUSIVE is not EQUIVALENT: bf16 differs from itself by too much to tell."""
    noisy = iter([run_record("aa", seed, 0.0, 0.004 * (seed % 3 - 1)).samples for seed in range(5)])
    found = altered(tmp_path, lambda one: one.trial.problem["arm"] == "aa", lambda _: next(noisy))
    assert found.aa.verdict is Verdict.INCONCLUSIVE
    assert "A/A configuration, bf16 against itself, is not EQUIVALENT" in str(found.void)
    assert found.exit_code == 4


def risen(samples: Any) -> Any:
    """Validation losses that are least in the middle and 0.2 higher at the end; the gaps as they were."""
    end = samples["val_step"][-1]
    points = zip(samples["val_loss"], samples["val_step"], strict=True)
    return {"val_loss": [3.28 + (x - 3.28) * step / end + 0.2 * max(0.0, 2 * step / end - 1) for x, step in points]}


def test_a_control_that_overfits_voids_the_verdict(tmp_path: Path) -> None:
    assert judged(tmp_path / "fits").void is None
    found = altered(tmp_path / "overfits", lambda one: True, risen)
    assert "bf16 overfits: its validation loss ends" in str(found.void)
    assert found.exit_code == 4


@pytest.mark.parametrize(
    ("name", "more", "what"), [("loss", 0.2, "trained_gap"), ("val_loss_native", 1.0, "native_gap")]
)
def test_the_gap_in_training_or_natively_stands_beside_and_decides_nothing(tmp_path, name, more, what):
    found = altered(tmp_path, lambda one: one.trial.recipe, lambda own: {name: [x + more for x in own[name]]})
    assert by_name(found)["delayed scaling"] is Verdict.EQUIVALENT
    assert getattr(found.recipes[0], what) == pytest.approx(more, abs=0.03)


def test_a_native_loss_that_is_told_at_the_end_alone_stands_beside_as_all_of_them_do(tmp_path: Path) -> None:
    def last(samples: Any) -> Any:
        return {**samples, "val_loss_native": samples["val_loss_native"][-1:]}

    whole, ends = (
        altered(tmp_path / name, lambda record: True, which) for name, which in (("all", dict), ("end", last))
    )
    gaps = [one.native_gap for one in whole.recipes]
    assert gaps == [one.native_gap for one in ends.recipes] != [None] * len(gaps)


def test_a_verdict_on_one_recipe_whose_seeds_a_pilot_may_have_chosen_says_so(tmp_path: Path) -> None:
    truth = {arm: gap for arm, gap in TRUTH.items() if arm != "rowwise_scaling"}
    for name, recipes in (("one", truth), ("two", TRUTH)):
        directory = write_study(tmp_path / name, study_records(recipes))
        told = [judge_study(study_at(directory)).notes]
        [whole] = load(directory).plans
        pilot = {"judgement": {**whole.judgement, "seeds": 3, "pilot": True}, "started_at": "2020-01-01"}
        with Store(directory) as store:
            store.add_plan(dataclasses.replace(whole, **pilot))
        told.append(judge_study(study_at(directory)).notes)
        assert [any("A pilot's spread may have chosen" in note for note in notes) for notes in told] == [
            False,
            name == "one",
        ]


@pytest.mark.parametrize("others", [(), ("delayed_scaling",)])
def test_a_pilot_of_one_recipe_of_several_says_so_too(tmp_path: Path, others: tuple[str, ...]) -> None:
    def began(one: Record) -> str:
        piloted = one.trial.seed < 3 and one.trial.recipe in (None, "rowwise_scaling", *others)
        return f"{2019 if piloted else 2999}-01-01T00:00:00.000+00:00"

    records = [dataclasses.replace(one, started_at=began(one)) for one in study_records(sd=0.0002)]
    directory = write_study(tmp_path / "run", records)
    [plan] = load(directory).plans
    pilot = {"judgement": {**plan.judgement, "seeds": 3, "pilot": True}, "started_at": "2019-01-01T00:00:00+00:00"}
    with Store(directory) as store:
        store.add_plan(dataclasses.replace(plan, **pilot))
    said = any("A pilot's spread may have chosen" in note for note in judge_study(study_at(directory)).notes)
    assert said == (not others)


def test_two_seeds_that_are_one_run_carry_no_verdict(tmp_path: Path) -> None:
    first = next(filter(of_rowwise(0), study_records(sd=0.0002)))
    found = altered(tmp_path, of_rowwise(3), lambda _: first.samples)
    assert by_name(found) == {"delayed scaling": Verdict.EQUIVALENT, "rowwise scaling": Verdict.INCONCLUSIVE}
    assert "seeds 0, 3 ended on the very same loss" in found.recipes[1].judgement.reason


@pytest.mark.parametrize(
    ("sd", "lost", "told"),
    [
        (0.0, (), "delayed scaling, seeds 0, 2 ended on the very same loss, 3.281: they are one run"),
        (
            2e-3,
            ("control", 0),
            "delayed scaling has 8 of the 8 rounds of the plan, and bf16 has no result for seed 0 (",
        ),
        (2e-3, ("delayed_scaling", 0), "delayed scaling has 7 of the 8 rounds of the plan (seed 0: oom)"),
    ],
)
def test_a_pool_says_what_it_lacks_for_a_verdict(tmp_path: Path, sd: float, lost: Any, told: str) -> None:
    """Two runs that are one, or a run that was lost: never that 8 of 8 rounds are not finished."""
    plan, truth = {**JUDGEMENT, "seeds": 8, "pool": 2}, {**TRUTH, "delayed_scaling": 0.001}
    records = pool_records(truth, 8, 2, sd=sd, outcomes={lost: "oom"} if lost else {})
    found = judge_study(study_of(tmp_path / "run", records, plan))
    assert str(found.reason(found.recipes[0])).startswith(told)


def test_more_rounds_of_a_pool_are_said_to_be_rounds(tmp_path: Path) -> None:
    """A round is several seeds."""
    records = pool_records({**TRUTH, "delayed_scaling": 0.0025}, 20, 2, sd=0.002)
    found = judge_study(study_of(tmp_path / "run", records, {**JUDGEMENT, "seeds": 20, "pool": 2}))
    needed = found.recipes[0].judgement.seeds_needed
    assert f"; at least {needed} rounds needed)" in found.headline


def test_a_gap_far_from_the_others_is_noted(tmp_path: Path) -> None:
    far = run_record("rowwise_scaling", 3, 0.0, 0.05).samples
    found = altered(tmp_path, of_rowwise(3), lambda _: far, seeds=8)
    [far] = [note for note in found.notes if note.startswith("rowwise scaling, seed 3: its gap +0.0")]
    assert "lies far from the others" in far


def test_a_divergence_that_another_record_of_its_trial_follows_still_counts(tmp_path: Path) -> None:
    broke = study_records(sd=0.0002, outcomes={("rowwise_scaling", 3): "diverged"})
    ended = [*filter(of_rowwise(3), study_records(sd=0.0002))]
    for records in ([*broke, *ended], [*ended, *broke]):
        found = judge_study(study_of(tmp_path / str(len(list(tmp_path.iterdir()))), records))
        assert by_name(found)["rowwise scaling"] is Verdict.DIVERGED


def test_a_broken_arm_that_diverges_is_caught(tmp_path: Path) -> None:
    found = judged(tmp_path, outcomes={("broken", 1): "diverged"})
    assert found.broken.verdict is Verdict.DIVERGED
    assert found.void is None


def test_one_diverged_run_is_diverged_whatever_the_others_end_on(tmp_path: Path) -> None:
    found = judged(tmp_path, seeds=range(8), outcomes={("rowwise_scaling", 3): "diverged"})
    assert by_name(found) == {"delayed scaling": Verdict.EQUIVALENT, "rowwise scaling": Verdict.DIVERGED}
    assert found.exit_code == 1
    diverged = found.recipes[1]
    table = training_tables.stability(found)
    assert table is not None
    [row] = [row for row in table.rows if row[0].text == diverged.arm.name]
    assert [value.text for value in row[1:3]] == ["1 of 8", "47.1 %"]  # Clopper and Pearson, 1 of 8
    assert diverged.speedup is None  # survivors are a biased choice


def test_a_loss_that_rose_and_stayed_is_diverged_though_the_run_ended(tmp_path: Path) -> None:
    steps = lambda loss: [x + 2.0 * (i > len(loss) // 2) for i, x in enumerate(loss)]  # noqa: E731
    found = altered(tmp_path, of_rowwise(2), lambda own: {"loss": steps(own["loss"])})
    assert by_name(found)["rowwise scaling"] is Verdict.DIVERGED
    assert "did not come back" in found.recipes[1].judgement.reason


def test_where_bf16_diverges_nothing_is_concluded(tmp_path: Path) -> None:
    """The seeds that are left are a biased choice, and who diverged with it has diverged all the same."""
    outcomes = {("control", 3): "diverged", ("rowwise_scaling", 3): "diverged"}
    found = judged(tmp_path, seeds=range(5), outcomes=outcomes)
    assert found.exit_code == 4
    assert "bf16 itself diverged on seed 3" in str(found.void)
    assert by_name(found)["rowwise scaling"] is Verdict.DIVERGED


def test_a_divergence_counts_whichever_other_run_of_the_seed_ended(tmp_path: Path) -> None:
    ended, broke = (
        write_study(tmp_path / name, study_records(sd=0.0002, outcomes=outcomes))
        for name, outcomes in (("ended", {}), ("broke", {("rowwise_scaling", 3): "diverged"}))
    )
    later = [dataclasses.replace(r, started_at="2026-11-20T13:00:00+00:00") for r in study_records(sd=0.0002)]
    again = write_study(tmp_path / "again", later)
    for directories in ([ended, broke], [broke, ended], [broke, again], [again, broke]):
        found = judge_study(study_at(*directories))
        if again in directories:
            assert by_name(found)["rowwise scaling"] is Verdict.DIVERGED
            assert any("rowwise scaling, seed 3 was run twice" in note for note in found.notes)


def test_each_study_of_a_directory_has_the_margin_of_its_own_plan(tmp_path: Path) -> None:
    wide = study_records(GAPS, sd=0.0002, steps=STEPS)
    narrow = study_records(GAPS, sd=0.0002, model="gpt2")
    directory = write_study(tmp_path / "run", wide, {**JUDGEMENT, "margin": 0.05})
    write_study(directory, narrow, JUDGEMENT)
    [group] = load_results([directory]).groups
    verdict_of = {study.title.split(",")[0]: by_name(judge_study(study)) for study in studies(group)}
    assert verdict_of["char"]["block scaling"] is Verdict.EQUIVALENT
    assert verdict_of["gpt2"]["block scaling"] is Verdict.INFERIOR


def test_studies_of_one_directory_that_differ_in_their_schedule_are_apart_and_say_so(tmp_path: Path) -> None:
    for warmup, rate in ((0, 1e-3), (80, 1e-3), (0, 3e-4)):
        records = study_records(GAPS, sd=0.0002, warmup=warmup, learning_rate=rate, accumulate=None)
        write_study(tmp_path / "run", records)
    [group] = load_results([tmp_path / "run"]).groups
    assert [study.title.partition("steps, ")[2] for study in studies(group)] == [
        "learning rate 0.001, warm-up 0",
        "learning rate 0.001, warm-up 80",
        "learning rate 0.0003, warm-up 0",
    ]


def test_seeds_that_were_planned_and_left_out_are_missing(tmp_path: Path) -> None:
    found = judged(tmp_path, seeds=range(3))
    assert set(by_name(found).values()) == {Verdict.INCONCLUSIVE}
    assert found.recipes[0].judgement.reason == "delayed scaling has 3 of the 5 seeds of the plan"
    assert found.exit_code == 4


def test_seeds_added_after_the_first_plan_are_not_judged(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "run", study_records(sd=0.0002))
    later = study_records({**TRUTH, "delayed_scaling": 0.5}, seeds=range(5, 8))
    write_study(directory, later, {**JUDGEMENT, "seeds": 8})
    found = judge_study(study_at(directory))
    assert by_name(found)["delayed scaling"] is Verdict.EQUIVALENT
    assert found.recipes[0].seeds == (0, 1, 2, 3, 4)
    assert any("seeds from 5 on were added after the first plan" in note for note in found.notes)
    added = 3 * len(TRUTH)
    said = " ".join(answers.answer(load_report([directory]), None))
    assert f", {added} of them of seeds after the first plan's, which no verdict counts." in said
    assert f"trials ok, {added} of them of seeds" in tables.summary([directory])


def test_a_study_on_fresh_seeds_judges_none_of_those_before(tmp_path: Path) -> None:
    """Nor takes them for its own: they may have shown what to judge."""
    fresh = {**JUDGEMENT, "first_seed": 3}
    directory = write_study(tmp_path / "run", study_records(seeds=range(3, 8), sd=0.0002), fresh)
    write_study(directory, study_records({**TRUTH, "delayed_scaling": 0.5}, seeds=range(3)), JUDGEMENT)
    found = judge_study(study_at(directory))
    assert by_name(found)["delayed scaling"] is Verdict.EQUIVALENT
    assert found.recipes[0].seeds == (3, 4, 5, 6, 7)
    assert any("seeds before 3 were added after the first plan" in note for note in found.notes)
    assert found.study.unjudged == 3 * len(TRUTH)


def test_a_configuration_added_after_the_first_plan_is_noted(tmp_path: Path) -> None:
    def notes(first: dict[str, float]) -> list[str]:
        directory = write_study(tmp_path / str(len(first)), study_records(first, sd=0.0002))
        write_study(directory, study_records(GAPS, sd=0.0002))
        return [note for note in judge_study(study_at(directory)).notes if "added after the first plan" in note]

    [said] = notes(TRUTH)
    assert said.startswith("block scaling was added after the first plan")
    assert notes({"control": 0.0, "aa": 0.0}) == []  # no verdict could have been seen


def test_the_family_is_all_recipes_whatever_became_of_them(tmp_path: Path) -> None:
    truth = {**TRUTH, "float8_block_scaling": 0.0, "float8_current_scaling": 0.0}
    lost = {(name, 1): "crashed" for name in ("rowwise_scaling", "float8_block_scaling", "float8_current_scaling")}
    whole = judged(tmp_path / "whole", truth=truth, sd=0.002)
    damaged = judged(tmp_path / "damaged", truth=truth, outcomes=lost, sd=0.002)
    adjusted = damaged.recipes[0].judgement.claims.equivalent
    alone = damaged.recipes[0].judgement.comparison
    assert adjusted == pytest.approx(4 * alone.claims.equivalent)
    assert whole.recipes[0].judgement.family == damaged.recipes[0].judgement.family == 4


def test_the_recipe_that_the_plan_judges_first_is_not_among_the_others(tmp_path: Path) -> None:
    truth = {**TRUTH, "float8_block_scaling": 0.0, "float8_current_scaling": 0.0}
    primary = arm_trial("float8_block_scaling", 0).cell
    found = judged(tmp_path, truth=truth, sd=0.002, judgement={**JUDGEMENT, "seeds": 5, "primary": primary})
    assert {one.arm.name: one.judgement.family for one in found.recipes} == {
        **dict.fromkeys(("delayed scaling", "rowwise scaling", "current scaling"), 3),
        "block scaling": 1,
    }
    assert found.study.primary.name == "block scaling"


@pytest.mark.parametrize("first", [True, False])
def test_who_is_judged_first_is_as_the_first_plan_says(tmp_path: Path, first: bool) -> None:
    primary = {"primary": arm_trial("rowwise_scaling", 0).cell}
    directory = write_study(tmp_path / "run", study_records(sd=0.0002), {**JUDGEMENT, **(primary if first else {})})
    assert not any("judged first" in note for note in judge_study(study_at(directory)).notes)
    [plan] = load(directory).plans
    other = {"judgement": {**JUDGEMENT, **({} if first else primary)}, "started_at": "2999-01-01"}
    with Store(directory) as store:
        store.add_plan(dataclasses.replace(plan, **other))
    found = judge_study(study_at(directory))
    assert "which recipe is judged first became another after the first plan: the first one counts" in found.notes
    assert (found.study.primary is not None) == first


def test_a_recipe_that_cannot_run_here_is_left_out_and_said(tmp_path: Path) -> None:
    outcomes = {("rowwise_scaling", seed): "unsupported" for seed in range(5)}
    found = judged(tmp_path, outcomes=outcomes)
    assert by_name(found) == {"delayed scaling": Verdict.EQUIVALENT}
    assert found.exit_code == 0
    assert any("rowwise scaling is left out: unsupported" in note for note in found.notes)
    first = {"primary": arm_trial("rowwise_scaling", 0).cell}
    without = judged(tmp_path / "first", outcomes=outcomes, judgement={**JUDGEMENT, **first})
    assert by_name(without) == by_name(found)
    assert {*without.notes} - {*found.notes} == {"It was to be judged first; the others are judged together without it"}


def test_an_aa_arm_that_is_the_control_itself_shows_nothing(tmp_path: Path) -> None:
    control = iter([r.samples for r in study_records(sd=0.0002) if r.trial.problem["arm"] == "control"])
    found = altered(tmp_path, lambda one: one.trial.problem["arm"] == "aa", lambda _: next(control))
    assert "its perturbation was lost" in str(found.void)


@pytest.mark.parametrize("outcome", ["oom", "timeout", "crashed", "failed_check"])
def test_a_seed_without_a_result_leaves_no_verdict(tmp_path: Path, outcome: str) -> None:
    """The runs that are there are not a random choice of those that were planned."""
    found = judged(tmp_path, seeds=range(8), outcomes={("rowwise_scaling", 3): outcome})
    assert by_name(found) == {"delayed scaling": Verdict.EQUIVALENT, "rowwise scaling": Verdict.INCONCLUSIVE}
    assert found.recipes[1].judgement.reason == f"rowwise scaling has no result for seed 3 ({outcome})"
    assert found.exit_code == 4


def test_arms_of_unlike_seeds_are_not_paired(tmp_path: Path) -> None:
    records = [r for r in study_records(seeds=range(8), sd=0.0002) if not of_rowwise(6)(r)]
    found = judge_study(study_of(tmp_path / "run", records, {**JUDGEMENT, "seeds": 8}))
    assert by_name(found)["rowwise scaling"] is Verdict.INCONCLUSIVE
    assert found.recipes[1].judgement.reason == "rowwise scaling has 7 of the 8 seeds of the plan"
    unplanned = judge_study(study_of(tmp_path / "unplanned", records, {}))
    assert "seed 6 was run in one of rowwise scaling and bf16 only" in unplanned.recipes[1].judgement.reason


def test_one_seed_carries_nothing(tmp_path: Path) -> None:
    found = judged(tmp_path, seeds=[0], judgement={**JUDGEMENT, "seeds": 1})
    assert set(by_name(found).values()) == {Verdict.INCONCLUSIVE}
    assert "1 pair of seeds" in found.recipes[0].judgement.reason
    assert found.exit_code == 4  # nor does the A/A arm


def test_a_learning_rate_that_has_not_decayed_carries_nothing(tmp_path: Path) -> None:
    found = judged(tmp_path, min_learning_rate=5e-4)
    assert set(by_name(found).values()) == {Verdict.INCONCLUSIVE}
    assert "came down to 0.0005 of 0.001 only" in found.recipes[0].judgement.reason


def test_a_run_cut_short_is_no_result(tmp_path: Path) -> None:
    found = altered(tmp_path, of_rowwise(1), lambda own: {name: own[name][:-1] for name in ("val_step", "val_loss")})
    assert "no result for seed 1" in found.recipes[1].judgement.reason


def test_the_plan_s_margin_counts_and_another_is_said(tmp_path: Path) -> None:
    wide = judged(tmp_path / "wide", truth=GAPS, judgement={**JUDGEMENT, "margin": 0.03})
    assert set(by_name(wide).values()) == {Verdict.EQUIVALENT}
    assert wide.notes == ()
    later = judged(tmp_path / "later", truth=GAPS, margin=0.03)
    assert any("margin 0.03 was chosen after the plan, which says 0.003" in note for note in later.notes)
    assert later.sentence.startswith("Exploration, no test: EQUIVALENT")
    assert (wide.exit_code, later.exit_code) == (0, 3)
    for impossible in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="margin"):
            judged(tmp_path / str(impossible), margin=impossible)


def test_faster_steps_less_a_gap_are_time_saved(tmp_path: Path) -> None:
    """Steps take 0.9 of the time, and a gap of 0.02 costs steps: by the curve's own slope at the end."""
    found = judged(tmp_path, truth=GAPS, sd=0.0001)
    even, behind = found.recipes[0].speedup, found.recipes[2].speedup
    assert even.less_time == pytest.approx(0.1, abs=0.01)
    quarter = [3.28 + 2 / (1 + step / 20) for step in (0.75 * STEPS, STEPS)]
    slope = (quarter[0] - quarter[1]) / (0.25 * STEPS)
    assert behind.more_steps == pytest.approx(0.02 / slope, rel=0.15)
    assert behind.less_time == pytest.approx(1 - 0.9 * (1 + behind.more_steps / STEPS), abs=1e-3)


HOST = {"cpu": "AMD EPYC 9654", "driver": "580.1", "cores": 16, "host_cores": 16}


def on_hosts(directory: Path, here: dict[str, Any], there: dict[str, Any], first: int) -> Path:
    """A run of which the FP8 trials of seeds from `first` on were elsewhere, and took ten times as long."""
    records = study_records(seeds=range(5), sd=0.0002)
    for place, one in enumerate(records):
        elsewhere = one.trial.precision == "fp8" and one.trial.seed >= first
        slow = {"time_s": [10 * second for second in one.samples["time_s"]]} if elsewhere else {}
        state = there if elsewhere else here
        records[place] = dataclasses.replace(one, samples={**one.samples, **slow}, device_state=state)
    return write_study(directory / "run", records)


@pytest.mark.parametrize(
    ("here", "differs"),
    [
        ({"host_cores": 16}, {"host_cores": 32}),  # all that records of an earlier te-bench say
        *((HOST, differs) for differs in ({"cpu": "Xeon"}, {"driver": "580.2"}, {"cores": 8}, {"host_cores": 32})),
        ({**HOST, "host": "a"}, {"host": "b"}),
    ],
)
def test_step_times_are_compared_within_a_host_and_losses_over_all(tmp_path, here, differs):
    run = on_hosts(tmp_path, here, {**here, **differs}, first=2)
    delayed = judge_study(study_at(run)).recipes[0]
    assert delayed.judgement.comparison.n == 5
    assert (delayed.speedup.step_time.n, round(delayed.speedup.step_time.value, 2)) == (2, 0.9)
    for name, column in (("verdict", "To equal loss"), ("equal_loss", "Step alone")):
        assert cell(run, name, "delayed scaling", column).endswith("] (2 of 5 pairs share a host)")


def test_hosts_without_names_are_told_apart_by_their_gpus(tmp_path: Path) -> None:
    run = on_hosts(tmp_path, {**HOST, "uuid": "GPU-a"}, {**HOST, "uuid": "GPU-c"}, first=2)
    path = run / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    [machine] = [json.loads(line)["body"] for line in lines if b'"kind":"environment"' in line]

    def shared(*hosts: list[str]) -> str | None:
        seen = [{**machine["details"], "gpus": [{"uuid": gpu} for gpu in gpus]} for gpus in hosts]
        more = [encode("environment", {**machine, "details": details}) for details in seen]
        path.write_bytes(b"".join([*lines, *more]))
        return judge_study(study_at(run)).recipes[0].speedup.within_hosts

    apart = "2 of 5 pairs share a host"
    assert shared() == apart  # no line names their hosts
    assert shared(["GPU-a", "GPU-b"], ["GPU-c"]) == apart  # two machines of one kind
    for sessions in ([["GPU-a", "GPU-c"], ["GPU-c"]], [["GPU-c"], ["GPU-a", "GPU-c"]]):
        assert shared(*sessions) is None


@pytest.mark.usefixtures("undrawn")
def test_pairs_of_which_none_shares_a_host_are_said_to_be(tmp_path: Path) -> None:
    run = on_hosts(tmp_path, HOST, {**HOST, "driver": "580.2"}, first=0)
    found = judge_study(study_at(run)).recipes[0]
    assert (found.speedup.step_time, found.speedup.less_time) == (None, None)
    for name, column in (("verdict", "To equal loss"), ("equal_loss", "Step alone"), ("equal_loss", "Why not")):
        assert cell(run, name, "delayed scaling", column) == "no pair shares a host"
    written = render.write_report([run], tmp_path / "report").parent
    assert not list(written.rglob("verdict_time*"))  # no time of theirs is drawn beside another host's


def cell(run: Path, table: str, name: str, title: str) -> str:
    [found] = tables.tables_of(load_report([run]).groups[0], table)
    place = [column.title for column in found.columns].index(title)
    return next(row[place].text for row in found.rows if row[0].text == name)


@pytest.mark.usefixtures("undrawn")
def test_trials_that_shared_a_gpu_say_nothing_of_time(tmp_path: Path) -> None:
    found = judged(tmp_path, truth=GAPS, sd=0.0001, share=4)
    assert found.recipes[0].judgement.comparison is not None
    assert found.recipes[0].speedup is None
    [comparison] = curves.comparisons(load_results([tmp_path / "run"]).groups[0], ())
    assert not comparison.timed
    assert not any(arm.tokens_per_s for arm in comparison.trainings)
    written = render.write_report([tmp_path / "run"], tmp_path / "report").parent
    assert {"loss_step.svg"} <= {path.name for path in written.rglob("*.svg")}
    assert not list(written.rglob("loss_time*"))
    assert not list(written.rglob("verdict_time*"))
    assert not any(run.step_s for arm in found.study.arms for run in arm.runs.values())
