import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from scipy.special import stdtrit
from statsmodels.stats.power import TTestPower

from te_bench.gate.slowdown import Estimate, Likeness, detectable, estimate, likeness, plan_pairs, trimmed, widening
from te_bench.reports.convergence.sequential import t_levels

RESULTS = Path(__file__).parents[2] / "results" / "gate"
QUIET = np.array([0.004, -0.006, 0.001, 0.003, -0.002, 0.005, -0.004, 0.0, 0.002, -0.003])


def test_of_few_pairs_it_is_the_t_test():
    logs = [0.01, 0.03, 0.02, 0.05, 0.0]
    found = estimate(logs)
    for bound in (0.0, 0.02, 0.1):
        above = stats.ttest_1samp(logs, bound, alternative="greater").pvalue
        assert found.p_above(bound) == pytest.approx(above)
        assert found.p_below(bound) == pytest.approx(1 - above)
    reach = stats.t.ppf(0.99, 4) * stats.sem(logs)
    assert (found.log_ratio, found.bound(0.01)) == pytest.approx((0.022, reach))


def test_the_trimmed_mean_and_its_error_by_hand():
    # of 6 the ends are left out of the mean, and drawn in to their neighbours in the sum of squares
    found = estimate([9.0, 1.0, 2.0, 3.0, 4.0, -7.0])
    winsorized = np.array([1.0, 1, 2, 3, 4, 4])
    squares = np.sum((winsorized - winsorized.mean()) ** 2)
    assert (found.n, found.df, found.log_ratio) == (6, 3, pytest.approx(2.5))
    assert found.se == pytest.approx(math.sqrt(squares / (4 * 3)))
    assert found.sd == pytest.approx(found.se * math.sqrt(6))
    assert [trimmed(n) for n in (2, 5, 6, 14, 15, 24, 25, 40)] == [0, 0, 1, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("wild", [math.log(1.5), math.log(20), -math.log(20)])
def test_one_wild_pair_neither_alarms_nor_hides(wild):
    for shift in (0.0, 0.05):
        logs = QUIET + shift
        logs[4] = wild
        found = estimate(logs)
        assert found.log_ratio == pytest.approx(shift, abs=0.003)
        assert (found.p_above(0.02) < 1e-4) is (shift > 0)
        assert (found.p_below(0.02) < 1e-4) is (shift == 0)


def test_ratios_without_spread_show_nothing():
    for constant in (0.0, 0.3, -0.3):
        found = estimate([constant] * 8)
        assert (found.p_above(0.02), found.p_below(0.02), found.se) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_what_is_detectable_agrees_with_statsmodels(n):
    effect = TTestPower().solve_power(nobs=n, alpha=0.05, power=0.8, alternative="larger")
    assert detectable(0.01, n, alpha=0.05) == pytest.approx(0.01 * effect, rel=1e-4)


@pytest.mark.parametrize(("sd", "mde", "alpha"), [(0.01, 0.01, 0.05), (0.01, 0.0044, 0.025), (0.003, 0.02, 0.001)])
def test_planned_pairs_are_the_fewest_that_detect(sd, mde, alpha):
    n = plan_pairs(sd, mde, alpha=alpha)
    assert detectable(sd, n, alpha=alpha) <= mde < detectable(sd, n - 1, alpha=alpha)


def test_planned_pairs_have_the_power():
    n, rng = plan_pairs(0.01, 0.008, alpha=0.01), np.random.default_rng(3)
    quantile = -stdtrit(n - 2 * trimmed(n) - 1, 0.01)
    found = [estimate(row) for row in 0.01 * rng.standard_normal((2000, n)) + 0.008]
    # trimming costs normal noise a few points of what a known sd promises
    assert 0.72 <= np.mean([e.log_ratio > quantile * e.se for e in found]) <= 0.83
    # but not of what the sd as estimated promises
    assert plan_pairs(float(np.mean([e.sd for e in found])), 0.008, alpha=0.01) >= n


def test_the_ends_of_planning():
    assert plan_pairs(10.0, 1e-4, alpha=0.05) is None
    assert detectable(0.01, 1, alpha=0.05) is None


def test_likeness_is_that_of_the_process_whatever_the_number_of_pairs():
    rng = np.random.default_rng(2)
    for alike in (0.0, 0.5):
        for n, gates in ((10, 600), (36, 200)):
            noise = rng.standard_normal((gates, n + 40))
            for k in range(1, n + 40):
                noise[:, k] += alike * noise[:, k - 1]
            found = likeness(list(noise[:, 40:]))
            assert found.estimate == pytest.approx(alike, abs=0.08)
            assert found.pairs == gates * n
            assert found.off == pytest.approx(1.645 / math.sqrt(gates * n))
    assert likeness([[1.0, 2.0]]).bound(likeness([])) == 0.95  # of too few pairs everything is possible
    assert likeness([[1.0] * 9]).estimate == 0.0


def test_pairs_of_live_gates_hardly_resemble_the_ones_before():
    answers = (json.loads(line) for path in RESULTS.glob("*/self-test.jsonl") for line in path.read_text().splitlines())
    trials = [trial for answer in answers if answer["condition"] == "unchanged" for trial in answer["trials"].values()]
    found = likeness([[math.log(ratio) for ratio in trial["ratios"] if ratio is not None] for trial in trials])
    assert found.pairs > 5000
    assert found.estimate == pytest.approx(0.03, abs=0.03)


def test_a_series_that_is_shown_to_be_more_alike_than_its_gate_is_held_to_its_own():
    together, own = Likeness(estimate=0.0, pairs=100), Likeness(estimate=0.6, pairs=36)
    assert together.bound(Likeness(estimate=0.2, pairs=36)) == pytest.approx(0.1645)
    assert together.bound(own) == 0.6
    assert own.bound(own) == pytest.approx(0.6 + 1.645 / 6)


@pytest.mark.parametrize("alike", [0.3, 0.7])
def test_the_widening_is_what_an_autoregression_does_to_the_t_statistic(alike):
    n, rng = 10, np.random.default_rng(4)
    noise = rng.standard_normal((20000, n + 40))
    for k in range(1, n + 40):
        noise[:, k] += alike * noise[:, k - 1]
    logs = noise[:, 40:]
    wider = math.sqrt(logs.mean(1).var() / (logs.var(1, ddof=1).mean() / n))
    assert wider == pytest.approx(widening(n, alike), rel=0.03)
    assert estimate(list(logs[0]), alike=alike).se == pytest.approx(widening(n, alike) * estimate(list(logs[0])).se)
    assert widening(n, 0.0) == 1


def noise(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Log-ratios in units of the undisturbed pairs' standard deviation, as the table in slowdown.py has them."""
    rng = np.random.default_rng(seed)
    if kind == "t3":
        return rng.standard_t(3, size=shape)
    normal, hit = rng.standard_normal(shape), rng.random(shape)
    if kind == "one side":
        return normal + (hit < 0.05) * rng.choice([-1, 1], shape) * rng.exponential(20, shape)
    return np.where(hit < {"normal": 0.0, "1 in 20": 0.05, "1 in 10": 0.1}[kind], 10 * normal, normal)


@functools.cache
def looked_at(kind: str, looks: tuple[int, ...], simulations: int) -> list[list[Estimate]]:
    return [[estimate(row[:n]) for n in looks] for row in noise(kind, (simulations, looks[-1]), seed=11)]


def rejections(found: list[list[Estimate]], looks: tuple[int, ...], alpha: float, *, slower: float) -> float:
    """Share of the rows of which log ratio > 0 is claimed at any look, were they all higher by `slower`."""
    levels = t_levels(looks, alpha)
    claimed = [any(e.p_above(-slower) <= level for e, level in zip(row, levels, strict=True)) for row in found]
    return sum(claimed) / len(found)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.05, 0.05 / 6])
@pytest.mark.parametrize(
    ("kind", "power"),
    [("normal", (97, 88)), ("t3", (91, 72)), ("1 in 20", (94, 82)), ("1 in 10", (91, 74)), ("one side", (94, 82))],
)
def test_false_alarms_and_power_over_all_looks(kind, power, alpha):
    looks, simulations = (6, 10, 15, 20), 2000
    found = looked_at(kind, looks, simulations)
    assert rejections(found, looks, alpha, slower=0.0) <= stats.binom.ppf(0.999, simulations, alpha) / simulations
    assert rejections(found, looks, alpha, slower=1.0) >= power[alpha < 0.05] / 100
