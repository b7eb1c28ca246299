"""Recipes against a pool of bf16 runs: the rates and the power that docs/convergence-statistics.md states, by simulation."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from te_bench.reports.convergence import pool_study, pooled
from te_bench.reports.convergence.equivalence import Verdict, holm

#: Shapes of runs with mean 0; a pair is a recipe's and bf16's.
SHAPES = {
    "normal": lambda draw, size: draw.standard_normal(size),
    "half": lambda draw, size: draw.standard_normal(size) / 2,
    "twice": lambda draw, size: 2 * draw.standard_normal(size),
    "t3": lambda draw, size: draw.standard_t(3, size),
    "exponential": lambda draw, size: draw.standard_exponential(size) - 1,
    "exponential, to the left": lambda draw, size: 1 - draw.standard_exponential(size),
    "one in ten 4 sd high": lambda draw, size: draw.standard_normal(size) + 4 * (draw.random(size) < 0.1) - 0.4,
    "one in ten 4 sd low": lambda draw, size: draw.standard_normal(size) - 4 * (draw.random(size) < 0.1) + 0.4,
}
PAIRS = [
    *((shape, "normal") for shape in SHAPES),
    *((shape, shape) for shape in ("exponential", "exponential, to the left", "one in ten 4 sd high", "t3")),
    ("normal", "exponential"),
    ("normal", "exponential, to the left"),
    ("normal", "one in ten 4 sd low"),
    ("normal", "twice"),
]
MARGIN = 1.0


def most(rate, simulations):
    """What a true rate exceeds in one of 10,000 such simulations; and what the table may be off by."""
    return stats.binom.ppf(0.9999, simulations, rate) / simulations + 0.03 * rate


def called_good(recipe, bf16, rounds, ratio, alpha, simulations=20_000, seed=5):
    """Share of studies whose recipe, at a true gap of the margin, is called less than the margin above bf16 at some look."""
    draw = np.random.default_rng([seed, rounds, ratio])
    ours = SHAPES[recipe](draw, (simulations, rounds)) + MARGIN
    looked = pooled.looks_at(ours, SHAPES[bf16](draw, (simulations, ratio * rounds)), rounds, ratio)
    return float(np.mean(pooled.p_below(looked, MARGIN, rounds, ratio) <= alpha))


@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
def test_a_gap_of_the_margin_is_called_good_in_at_most_alpha_of_cases(pair):
    for rounds, ratio, alpha in ((4, 3, 0.05), (8, 1, 0.05), (12, 3, 0.05 / 6), (20, 2, 0.0125)):
        assert called_good(*pair, rounds, ratio, alpha, 10_000) <= most(alpha, 10_000), rounds


@pytest.mark.simulations
@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
@pytest.mark.parametrize("ratio", pooled.RATIOS)
def test_the_same_of_more_designs(pair, ratio):
    for rounds in (3, 5, 7, 10, 15, 26, 33):
        for alpha in (0.05, 0.05 / 6):
            assert called_good(*pair, rounds, ratio, alpha, 60_000) <= most(alpha, 60_000), (rounds, alpha)


def test_the_table_is_what_simulations_of_other_draws_give():
    """No stricter than the worst of its shapes needs."""
    for rounds, ratio in ((6, 3), (20, 2)):
        shapes = ("normal", "twice", "exponential", "one in ten 4 sd high")
        worst = max(called_good(shape, "normal", rounds, ratio, 0.05) for shape in shapes)
        assert worst == pytest.approx(0.05, rel=0.1)


def studies(draw, gap, *, rounds, ratio, recipes, sd, count):
    """p-values (recipes, count) that each recipe is within MARGIN, of normal runs; and all runs."""
    pool = sd * draw.standard_normal((count, ratio * rounds))
    found = []
    for _ in range(recipes):
        looked = pooled.looks_at(sd * draw.standard_normal((count, rounds)) + gap, pool, rounds, ratio)
        mirrored = [pooled.Look(gap=-look.gap, se=look.se) for look in looked]
        sides = [pooled.p_below(one, MARGIN, rounds, ratio) for one in (looked, mirrored)]
        found.append(np.maximum(*sides))
    return np.array(found)


@pytest.mark.parametrize(("gap", "sd"), [(0, 0.8), (MARGIN / 3, 0.65), (MARGIN / 2, 0.55)])
def test_a_plan_s_power_is_the_share_of_studies_that_conclude(gap, sd):
    """Through Holm, study by study, of draws that are not the plan's."""
    count, design = 1500, {"rounds": 12, "ratio": 3, "recipes": 6}
    p = studies(np.random.default_rng(17), gap, sd=sd, count=count, **design)
    shown = np.mean([np.mean(np.array(holm(each)) <= 0.05) for each in p.T])
    said = pooled.power(12, sd, MARGIN, ratio=3, recipes=6, gap=gap)
    assert 0.3 < said < 0.95  # where a wrong power would be seen
    assert shown == pytest.approx(said, abs=4 * math.sqrt(said * (1 - said) / count))


def test_any_of_six_recipes_at_the_margin_is_called_equivalent_in_at_most_alpha_of_studies():
    p = studies(np.random.default_rng(19), MARGIN, rounds=12, ratio=3, recipes=6, sd=0.4, count=10_000)
    assert np.mean([min(holm(each)) <= 0.05 for each in p.T]) <= most(0.05, 10_000)


def test_least_margin_and_rounds_needed_are_where_the_power_is_80_percent():
    margin = pooled.least_margin(15, 3, 0.0125, 0.8)
    assert pooled.power(15, 1.0, margin, ratio=3, alpha=0.0125) == pytest.approx(0.8, abs=0.01)
    needed = pooled.rounds_needed(1.0, margin, ratio=3, share=0.8, alpha=0.0125)
    assert abs(needed - 15) <= 1
    assert pooled.rounds_needed(1.0, 1.0, ratio=3, share=0.8, gap=1.0) is None
    assert pooled.rounds_needed(1.0, 0.01, ratio=3, share=0.8) is None  # more than are ever run


def test_looks():
    assert [*map(pooled.looks, (12, 20, 4, 3))] == [(5, 8, 12), (8, 14, 20), (3, 4), (3,)]


def test_early_looks_claim_only_what_is_overwhelming_and_the_last_has_almost_all_of_alpha():
    for rounds in (12, 20, 40):
        first, second, last = pooled.critical(rounds, 3, 0.05)
        assert first < second < last < -1.9
        shapes = ("twice", "exponential", "one in ten 4 sd high")
        fixed = min(np.quantile(_statistics(shape, rounds, 3), 0.05) for shape in shapes)  # without looks, the worst
        assert last == pytest.approx(fixed, rel=0.08)


def _statistics(shape, rounds, ratio):
    draw = np.random.default_rng(2)
    ours, theirs = SHAPES[shape](draw, (20_000, rounds)), draw.standard_normal((20_000, ratio * rounds))
    look = pooled.looks_at(ours, theirs, rounds, ratio)[-1]
    return look.gap / look.se


def test_a_spread_is_the_pooled_one_or_the_own_where_that_is_larger():
    draw = np.random.default_rng(3)
    alike, wide, pool = draw.normal(size=9), 5 * draw.normal(size=9), draw.normal(size=27)
    both = (alike.var() * 9 + pool.var() * 27) / 34
    least = math.sqrt(both / 9 + both / 27)
    assert pooled.standard_error(pooled.side(alike), pooled.side(pool)) >= least * (1 - 1e-12)
    assert pooled.standard_error(pooled.side(wide), pooled.side(pool)) >= math.sqrt(wide.var(ddof=1) / 9)


def test_what_a_look_has_shown_stays_shown():
    draw = np.random.default_rng(4)
    ours, pool = 0.01 * draw.normal(size=12), 0.01 * draw.normal(size=36)
    early = pooled.claims(pooled.looks_at(ours[:5], pool, 12, 3), MARGIN, 12, 3)
    ours[5:] += 100
    late = pooled.claims(pooled.looks_at(ours, pool, 12, 3), MARGIN, 12, 3)
    assert late.equivalent <= early.equivalent < 0.05


def test_no_claim_is_made_at_a_level_that_was_not_simulated():
    assert pooled.critical(8, 3, 1e-9) == (-math.inf,) * 3


# ---- studies


def arm(kind, name, losses, seeds):
    return SimpleNamespace(kind=kind, name=name, finals=dict(zip(seeds, map(float, losses), strict=True)))


def study(draw, gaps, rounds=12, ratio=3, sd=0.3, shape="normal"):
    """Recipes with these true gaps beside a pool, by the seeds of the suite's rounds."""
    seeds = range(ratio * rounds)
    pool = sd * draw.standard_normal(len(seeds))
    aa = [seed for seed in seeds if seed % ratio == ratio - 1]
    control = [seed for seed in seeds if seed % ratio != ratio - 1]
    each = [(f"r{i}", gap + sd * SHAPES[shape](draw, rounds)) for i, gap in enumerate(gaps)]
    recipes = tuple(arm("recipe", name, losses, range(0, ratio * rounds, ratio)) for name, losses in each)
    bf16, ulp = arm("control", "bf16", pool[control], control), arm("aa", "A/A", pool[aa], aa)
    return SimpleNamespace(pool=ratio, rounds=rounds, control=bf16, aa=ulp, recipes=recipes)


def test_a_study_s_verdicts_are_by_holm_over_its_recipes():
    found = pool_study.judge_recipes(study(np.random.default_rng(1), [0, 0, 3, 1]), MARGIN, 0.05, {})
    verdicts = [judged.verdict for judged in found.values()]
    assert verdicts[:3] == [Verdict.EQUIVALENT, Verdict.EQUIVALENT, Verdict.INFERIOR]
    assert verdicts[3] is Verdict.INCONCLUSIVE
    for judged in found.values():
        c = judged.comparison
        assert (c.n, c.n_control, c.paired, judged.family) == (12, 36, False, 4)
        assert c.interval[0] < c.gap < c.interval[1]


def test_power_and_what_it_could_have_shown_are_those_of_holm_s_hardest_step():
    for judged in pool_study.judge_recipes(study(np.random.default_rng(1), [0] * 4, sd=0.8), MARGIN, 0.05, {}).values():
        c = judged.comparison
        hardest = {"ratio": 3, "alpha": 0.05 / 4}
        assert 0.1 < c.power < 0.95
        assert c.power == pytest.approx(pooled.power(12, c.sd / math.sqrt(2), MARGIN, **hardest))
        assert pooled.power(12, c.sd / math.sqrt(2), c.detectable, **hardest) == pytest.approx(0.8, abs=0.01)


def test_aa_is_held_to_the_control_s_runs_alone():
    one = study(np.random.default_rng(2), [0])
    c = pool_study.judge_aa(one, MARGIN, 0.05).comparison
    assert (c.n, c.n_control) == (12, 24)
    assert c.gap == pytest.approx(np.mean(list(one.aa.finals.values())) - np.mean(list(one.control.finals.values())))


def test_a_recipe_that_passes_alone_says_so_and_is_not_said_to_be_undistinguished():
    found = pool_study.judge_recipes(study(np.random.default_rng(0), [0, 0, 3, 0.7]), MARGIN, 0.05, {})
    alone = [one for one in found.values() if one.comparison.verdict is Verdict.EQUIVALENT is not one.verdict]
    assert [one.verdict for one in alone] == [Verdict.INCONCLUSIVE]
    assert alone[0].reason.startswith("EQUIVALENT on its own, not after Holm over 4 candidates: gap +0.")


def test_the_rounds_that_aa_needs_are_those_beside_the_control_s_runs_alone():
    one = study(np.random.default_rng(3), [0], ratio=2, sd=1.2)
    judged = pool_study.judge_aa(one, MARGIN, 0.05)
    assert judged.verdict is Verdict.INCONCLUSIVE
    c, of = judged.comparison, {"share": 0.8, "gap": judged.comparison.gap}
    assert judged.seeds_needed == pooled.rounds_needed(c.sd / math.sqrt(2), MARGIN, ratio=1, **of)
    assert judged.seeds_needed > pooled.rounds_needed(c.sd / math.sqrt(2), MARGIN, ratio=2, **of)


def test_rounds_that_would_show_a_recipe_not_worse_are_not_spared():
    """Far below bf16 no round shows EQUIVALENT, and most that follow show NON_INFERIOR."""
    draw = np.random.default_rng(7)
    for _ in range(40):
        whole = study(draw, [-MARGIN], rounds=10, ratio=2, sd=0.55)
        early = SimpleNamespace(**vars(whole) | {"recipes": (arm("recipe", "r0", [], []),)})
        early.recipes[0].finals.update({seed: whole.recipes[0].finals[seed] for seed in range(0, 8, 2)})
        judged = pool_study.judge_recipes(early, MARGIN, 0.05, {})["r0"]
        if pool_study.why_decided(early, judged, recipe=True):
            assert judged.verdict is Verdict.NON_INFERIOR


def test_a_plan_s_power_with_aa_is_the_share_of_studies_that_pass_and_whose_aa_does(monkeypatch):
    draw, count = np.random.default_rng(23), 300
    design = {"rounds": 6, "ratio": 2}
    said = pooled.power(6, 0.5, MARGIN, ratio=2, recipes=2, with_aa=True)
    assert said < pooled.power(6, 0.5, MARGIN, ratio=2, recipes=2) - 0.15  # A/A is held to half as many runs
    for told in ("power", "rounds_needed"):  # beside a verdict, in nine tenths of the time
        monkeypatch.setattr(pooled, told, lambda *_, **__: None)
    shown = 0.0
    for _ in range(count):
        one = study(draw, [0, 0], sd=0.5, **design)
        recipes = pool_study.judge_recipes(one, MARGIN, 0.05, {}).values()
        good = np.mean([judged.verdict is Verdict.EQUIVALENT for judged in recipes])
        shown += good * (pool_study.judge_aa(one, MARGIN, 0.05).verdict is Verdict.EQUIVALENT) / count
    assert shown == pytest.approx(said, abs=4 * math.sqrt(said * (1 - said) / count))


def test_a_pool_of_one_bf16_run_a_round_has_no_aa_to_show():
    assert pooled.power(6, 0.1, MARGIN, ratio=1) == 1
    assert pooled.power(6, 0.1, MARGIN, ratio=1, with_aa=True) == 0


def test_the_least_alpha_is_one_that_claims_and_power_reach():
    """exp(log(alpha)) is not above it."""
    runs = np.array([0.0, 0.1, -0.1, 0.05])
    looked = pooled.looks_at(runs, np.tile(runs, 2), 4, 2)
    assert pooled.claims(looked, 1000.0, 4, 2).verdict(pooled.LEAST_ALPHA) is Verdict.EQUIVALENT
    assert pooled.power(4, 0.1, 1000.0, ratio=2, alpha=pooled.LEAST_ALPHA, with_aa=True) == 1


def test_a_run_that_is_missing_ends_the_rounds_that_are_looked_at():
    one = study(np.random.default_rng(3), [0])
    del one.control.finals[3 * 9]  # of round 9: looks after 5 and 8 rounds stand, the last does not
    assert pool_study.judge_recipes(one, MARGIN, 0.05, {})["r0"].comparison.n == 8
    del one.recipes[0].finals[0]
    judged = pool_study.judge_recipes(one, MARGIN, 0.05, {})["r0"]
    assert judged.comparison is None
    assert "the first look is after 5" in judged.reason


def test_a_plan_of_too_few_rounds_is_inconclusive_and_says_so():
    """A try of two rounds has a report: its losses, and no claim."""
    for rounds in (1, 2):
        one = study(np.random.default_rng(4), [0, 9], rounds=rounds)
        found = [*pool_study.judge_recipes(one, MARGIN, 0.05, {}).values(), pool_study.judge_aa(one, MARGIN, 0.05)]
        for judged in found:
            assert (judged.verdict, judged.comparison) == (Verdict.INCONCLUSIVE, None)
            assert judged.reason == f"a plan of {rounds} round{'s' * (rounds > 1)}: of fewer than 3 no spread is known"


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        *(pytest.param(name, marks=pytest.mark.simulations) for name in ("normal", "exponential")),
        "one in ten 4 sd high",
    ],
)
def test_studies_at_the_margin_end_in_a_false_claim_in_at_most_alpha_of_cases(shape, monkeypatch):
    """Runs in, verdicts out: any of four recipes EQUIVALENT or NON_INFERIOR though each one's gap is the margin."""
    for told in ("power", "rounds_needed"):  # beside a verdict, in nine tenths of the time
        monkeypatch.setattr(pooled, told, lambda *_, **__: None)
    draw, count, wrong = np.random.default_rng(6), 300, 0
    for _ in range(count):
        found = pool_study.judge_recipes(study(draw, [MARGIN] * 4, rounds=6, shape=shape), MARGIN, 0.05, {})
        wrong += any(judged.verdict in (Verdict.EQUIVALENT, Verdict.NON_INFERIOR) for judged in found.values())
    assert wrong <= stats.binom.ppf(0.999, count, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("sd", [0.3, 0.6, 0.9])
def test_rounds_that_a_pilot_s_spread_chose_cost_no_error(sd):
    """The pilot's rounds count; its spread, not its means, says how many follow."""
    simulations, ratio, pilot = 3000, 3, 3
    draw, wrong = np.random.default_rng(8), 0
    chosen = {}
    for _ in range(simulations):
        ours, pool = sd * draw.standard_normal(60) + MARGIN, sd * draw.standard_normal(180)
        others = sd * draw.standard_normal((4, pilot))
        squares = pilot * (ours[:pilot].var() + ratio * pool[: ratio * pilot].var() + others.var(axis=1).sum())
        spread = math.sqrt(squares / (5 * (pilot - 1) + ratio * pilot - 1))
        key = round(spread, 2)
        if key not in chosen:
            needed = pooled.rounds_needed(key, MARGIN, ratio=ratio, share=0.8, alpha=0.0125, most=60)
            chosen[key] = max(needed or 60, 4)
        rounds = min(chosen[key], 60)
        looked = pooled.looks_at(ours[:rounds], pool[: ratio * rounds], rounds, ratio)
        wrong += float(pooled.p_below(looked, MARGIN, rounds, ratio)) <= 0.05
    assert wrong <= stats.binom.ppf(0.999, simulations, 0.05)
