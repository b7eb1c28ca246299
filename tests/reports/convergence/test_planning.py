"""What seeds can show and what they cost, on records whose spread and pace are known."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from convergence_runs import JUDGEMENT, TRUTH, arm_trial, run_record, study_of, study_records
from journals import record

from te_bench.experiments import plan
from te_bench.experiments.spec import Options, Record
from te_bench.reports.convergence import design, planning, power
from te_bench.reports.convergence.planning import Spread
from te_bench.reports.convergence.skewed import mean_of

ASSUMED = Spread(sd=0.0019, correlation=0.0, pairs=8)
SURE = 1_000_000  # pairs, by which the spread's upper bound is the spread

# ---- power


def test_an_outlook_is_the_exact_power_of_its_seeds_alone_and_after_holm_by_the_spread_s_upper_bound() -> None:
    spread = Spread(sd=0.0019, correlation=0.5, pairs=8)
    found = planning.outlook(seeds=8, margin=0.004, alpha=0.05, recipes=4, spread=spread)
    assert spread.gap_sd == pytest.approx(0.0019)  # sd sqrt(2 (1 - 1/2))
    sd = power.at_most(0.0019, 7)
    assert found.alone.power == pytest.approx(power.power(8, sd, 0.004, alpha=0.05))
    assert found.hardest.power == pytest.approx(power.power(8, sd, 0.004, alpha=0.0125))
    assert found.hardest.power < found.alone.power
    needed = tuple(power.seeds_needed(sd, 0.004, alpha=alpha) for alpha in (0.05, 0.0125))
    assert (found.alone.seeds_needed, found.hardest.seeds_needed) == needed


def test_power_is_what_simulated_runs_show() -> None:
    """5,000 runs of 6 pairs with the sd and correlation of the spread: how often TOST claims equivalence."""
    spread = Spread(sd=0.0019, correlation=0.4, pairs=SURE)
    found = planning.outlook(seeds=6, margin=0.003, alpha=0.05, recipes=1, spread=spread)
    covariance = spread.sd**2 * np.array([[1, spread.correlation], [spread.correlation, 1]])
    pairs = np.random.default_rng(3).multivariate_normal([0, 0], covariance, size=(5000, 6))
    gaps = pairs[..., 0] - pairs[..., 1]
    limits = [mean_of(row).interval(0.05) for row in gaps]
    shown = np.mean([low > -0.003 and high < 0.003 for low, high in limits])
    assert found.alone.power == pytest.approx(float(shown), abs=0.02)


def test_a_recipe_and_aa_are_shown_as_often_as_by_simulated_runs_of_two_bf16_a_seed() -> None:
    """A/A, one run less another, varies more than a recipe's loss less the mean of two, and may void what is shown."""
    spread = Spread(sd=0.0019, correlation=0.4, pairs=SURE, bf16_runs=2)
    found = planning.outlook(seeds=6, margin=0.004, alpha=0.05, recipes=1, spread=spread)
    shared, own = (spread.sd * math.sqrt(part) for part in (spread.correlation, 1 - spread.correlation))
    draw = np.random.default_rng(4)
    recipe, control, aa = shared * draw.standard_normal((5000, 6)) + own * draw.standard_normal((3, 5000, 6))

    def shown(gaps: np.ndarray) -> np.ndarray:
        ends = np.array([mean_of(row).interval(0.05) for row in gaps])
        return np.abs(ends).max(axis=1) < 0.004

    both = shown(recipe - (control + aa) / 2), shown(aa - control)
    assert found.alone.power == pytest.approx(float(both[0].mean()), abs=0.02)
    assert power.power(6, spread.aa_sd, 0.004) == pytest.approx(float(both[1].mean()), abs=0.02)
    assert found.chance(6) == pytest.approx(float((both[0] & both[1]).mean()), abs=0.02)
    assert found.aa_is_weaker
    spread = Spread(sd=0.0019, correlation=0.4, pairs=9, bf16_runs=2)
    enough = next(n for n in range(3, 40) if planning.outlook(
        seeds=n, margin=0.004, alpha=0.05, recipes=1, spread=spread
    ).decisive.power >= power.POWER)  # fmt: skip
    assert planning.outlook(seeds=enough, margin=0.004, alpha=0.05, recipes=1, spread=spread).underpowered


def test_one_seed_shows_nothing() -> None:
    found = planning.outlook(seeds=1, margin=0.003, alpha=0.05, recipes=2, spread=ASSUMED)
    assert (found.alone.power, found.alone.detectable) == (None, None)
    assert found.alone.seeds_needed == power.seeds_needed(ASSUMED.gap_sd_at_most, 0.003)


# ---- spread


def test_the_spread_is_that_of_the_pairs_on_record(tmp_path: Path) -> None:
    study = study_of(tmp_path / "run", study_records(seeds=range(40), sd=0.001), {**JUDGEMENT, "seeds": 40})
    found = planning.spread([study], arm_trial("control", 99))
    assert found.pairs == 40
    assert found.gap_sd == pytest.approx(0.001 * math.sqrt(2), rel=0.2)
    assert found.sd == pytest.approx(math.hypot(0.001, 0.002), rel=0.3)  # a run's own noise and its seed's
    gaps = [[arm.finals[s] - study.control.finals[s] for s in range(40)] for arm in study.recipes]
    assert found.gap_sd == pytest.approx(math.sqrt(np.mean([np.var(g, ddof=1) for g in gaps])))


def test_the_spread_is_of_single_runs_where_a_recipe_is_held_to_the_mean_of_two(tmp_path: Path) -> None:
    plan_of = {**JUDGEMENT, "seeds": 80, "bf16_runs": 2}
    study = study_of(tmp_path / "run", study_records(seeds=range(80), sd=0.002), plan_of)
    found = planning.spread([study], arm_trial("control", 0))
    bf16, recipes = (np.array([list(arm.finals.values()) for arm in arms]) for arms in (study.arms[:2], study.recipes))
    assert found.sd == pytest.approx(np.concatenate([bf16, recipes]).std(ddof=1, axis=1).mean(), rel=0.01)
    assert found.correlation == pytest.approx(np.corrcoef(bf16, recipes)[:2, 2:].mean(), abs=0.03)
    assert found.gap_sd == pytest.approx((recipes - bf16.mean(axis=0)).std(ddof=1, axis=1).mean(), rel=0.01)
    assert found.aa_sd == pytest.approx((bf16[1] - bf16[0]).std(ddof=1), rel=0.2)


def test_the_gap_to_expect_of_a_measured_training_is_gpt2_s_share_of_bf16_s_loss(tmp_path: Path) -> None:
    """Whatever the recipes' own gaps are, which a plan never reads."""
    for number, gap in enumerate((0.0, 0.5)):
        records = study_records({**TRUTH, "delayed_scaling": gap}, seeds=range(5))
        study = study_of(tmp_path / f"{number}", records)
        assert planning.spread([study], arm_trial("control", 0)).gap == pytest.approx(0.0019 * 3.28, rel=0.01)
        assert design.run_spread([study], arm_trial("control", 0)).gap == pytest.approx(0.0019 * 3.28, rel=0.01)


def test_runs_of_one_seed_that_end_alike_count_as_one_run_in_a_spread(tmp_path: Path) -> None:
    """Four configurations of seven seeds: 24 degrees of freedom if their runs have nothing in common, and 6 if all."""
    truth = {**TRUTH, "rowwise_scaling": 0.1}
    plan = {**JUDGEMENT, "seeds": 7}
    alike, mixed = (study_of(tmp_path / f"{sd}", study_records(truth, range(7), sd=sd), plan) for sd in (0.0, 0.2))
    same, apart = (design.run_spread([study], arm_trial("control", 0)) for study in (alike, mixed))
    assert same.df == pytest.approx(6)
    assert same.sd == pytest.approx(np.std(list(alike.control.finals.values()), ddof=1))
    assert 20 < apart.df <= 24


def test_neither_a_recipe_s_gap_nor_another_training_s_spread_is_our_spread(tmp_path: Path) -> None:
    truths = [{**TRUTH, "delayed_scaling": gap} for gap in (0.0, 0.5)]
    studies = [[study_of(tmp_path / f"{n}", study_records(one, seeds=range(5)))] for n, one in enumerate(truths)]
    near, far = (planning.spread(study, arm_trial("control", 0)) for study in studies)
    assert near.gap_sd == pytest.approx(far.gap_sd)
    for change in ({"steps": 800}, {"learning_rate": 2e-3}, {"batch": 32}, {"warmup": 7}, {"accumulate": 2}):
        assert planning.spread(studies[0], arm_trial("control", 0, **change)) is None
    assert planning.unlike([], arm_trial("control", 0)) is None
    said = planning.unlike(studies[0], arm_trial("control", 0, steps=800))
    assert said == "its training is another: steps 400 there, 800 here"


def test_too_few_pairs_and_pairs_that_do_not_vary_are_no_spread(tmp_path: Path) -> None:
    few = study_of(tmp_path / "few", study_records(seeds=range(2)))
    same = study_of(tmp_path / "same", [run_record(arm, s, 0.0, 0.0) for s in range(5) for arm in TRUTH])
    for study in (few, same):
        assert planning.spread([study], arm_trial("control", 0)) is None
    assert planning.spread([], arm_trial("control", 0)) is None


# ---- time


def timed(seconds_a_step: float, steps: int, beside: float, outcome: str = "ok", arm: str = "control") -> Record:
    """A training whose loss was read after every tenth step, two steps before the clock."""
    done = steps if outcome == "ok" else steps // 2
    reads = [seconds_a_step * (10 * (1 + step // 10) - 2) for step in range(done)]
    samples = {"step": [float(step) for step in range(done)], "time_s": reads}
    whole = record(arm_trial(arm, 0, steps=steps), outcome=outcome, samples=samples)
    return dataclasses.replace(whole, wall_s=beside + seconds_a_step * done)


@pytest.mark.parametrize("steps", [20, 30, 400])
@pytest.mark.parametrize("outcome", ["ok", "diverged"])
def test_the_pace_of_a_short_run_is_that_of_a_long_one(steps: int, outcome: str) -> None:
    found = planning.pace(timed(0.25, 2 * steps, 7.0, outcome))
    assert found.step_s == pytest.approx(0.25)
    assert found.fixed_s == pytest.approx(7.0)
    assert found.seconds(1000) == pytest.approx(257.0)


def test_runs_that_failed_or_were_read_once_tell_no_pace() -> None:
    assert planning.pace(timed(0.25, 10, 7.0)) is None
    assert planning.pace(record(arm_trial("control", 0), outcome="ok")) is None
    for outcome in ("oom", "crashed", "timeout", "stopped", "interrupted"):
        assert planning.pace(dataclasses.replace(timed(0.25, 40, 7.0), outcome=outcome)) is None


def test_seconds_are_scaled_to_the_planned_steps_by_the_median_record() -> None:
    records = [timed(0.2, 40, 5.0), timed(0.3, 40, 5.0), timed(9.0, 40, 5.0)]
    control, other = arm_trial("control", 7, steps=1000), arm_trial("delayed_scaling", 7, steps=1000)
    found = planning.seconds([control, other], records)
    assert found == {control.name: pytest.approx(305.0), other.name: None}


def test_who_costs_what() -> None:
    """A/A what bf16 does, a fault what its recipe does, what is unsupported the time to say so; other sizes are unknown."""
    records = [timed(0.2, 40, 5.0), timed(0.1, 40, 5.0, arm="delayed_scaling")]
    aa, broken = arm_trial("aa", 1, steps=100), arm_trial("broken", 1, steps=100)
    assert list(planning.seconds([aa, broken], records).values()) == [pytest.approx(25.0), pytest.approx(15.0)]
    refused = dataclasses.replace(records[0], outcome="unsupported", wall_s=0.4)
    assert list(planning.seconds([arm_trial("control", 1)], [refused]).values()) == [pytest.approx(0.4)]
    control = arm_trial("control", 0, steps=100)
    sizes = {"batch": 32, "block": 64, "model": "gpt2", "accumulate": 2, "threads": 1}
    sizes |= {"parts": "all", "evaluate": None, "eval_tokens": 1024, "early_eval_tokens": 1024}
    others = [dataclasses.replace(control, problem={**control.problem, key: value}) for key, value in sizes.items()]
    others += [dataclasses.replace(control, mode="compile"), dataclasses.replace(control, device="cpu")]
    for other in others:
        assert list(planning.seconds([other], records[:1]).values()) == [None]


@pytest.mark.parametrize("preset", ["cpu", "char", "gpt2"])
@pytest.mark.parametrize("steps", [None, 77, 20])
def test_a_pilot_evaluates_as_often_as_the_whole_run(preset: str, steps: int | None) -> None:
    def problem(steps: int | None) -> dict[str, int]:
        options = Options(device="cpu", preset=preset, data={"": "random"}, steps=steps, seeds=1)
        found = plan.resolve("convergence", options).trials[0].problem
        return {key: int(str(found[key])) for key in ("steps", "eval_every")}

    whole = problem(steps)
    pilot = problem(planning.pilot_steps(whole))
    assert pilot["steps"] <= max(60, whole["steps"] // 20)
    assert pilot["steps"] >= min(planning.PILOT_STEPS, whole["steps"])
    evaluations = [-(-p["steps"] // p["eval_every"]) for p in (whole, pilot)]
    assert abs(evaluations[0] - evaluations[1]) <= max(1, evaluations[0] // 5)


def test_durations_are_what_to_allow() -> None:
    said = {0.2: "1 s", 119: "119 s", 121: "3 min", 7199: "120 min", 7201: "2.1 h", 36000: "10 h"}
    assert {seconds: planning.duration(seconds) for seconds in said} == said


def test_a_spread_of_few_pairs_is_planned_for_at_its_upper_bound() -> None:
    """In four of five cases the true spread is below it, whatever number of pairs told the estimate."""
    draw = np.random.default_rng(0)
    for pairs in (3, 5, 8, 20):
        estimates = draw.standard_normal((4000, pairs)).std(axis=1, ddof=1)
        bounds = [Spread(sd=sd / math.sqrt(2), correlation=0.0, pairs=pairs).gap_sd_at_most for sd in estimates]
        assert np.mean(np.array(bounds) >= 1) == pytest.approx(0.8, abs=0.03)


def test_a_plan_has_power_by_the_upper_bound_or_is_underpowered() -> None:
    spread = Spread(sd=0.001, correlation=0.5, pairs=5)
    few = planning.outlook(seeds=6, margin=0.003, alpha=0.05, recipes=1, spread=spread)
    assert power.power(6, spread.gap_sd, 0.003) > 0.8
    assert few.underpowered
    enough = planning.outlook(seeds=few.needed, margin=0.003, alpha=0.05, recipes=1, spread=spread)
    assert not enough.underpowered
    nothing_to_claim = planning.outlook(seeds=3, margin=0.003, alpha=0.05, recipes=0, spread=spread)
    assert not nothing_to_claim.underpowered
