import math

import numpy as np
import pytest
from scipy import stats

from te_bench.reports.convergence.band import band
from te_bench.reports.convergence.equivalence import compare
from te_bench.reports.convergence.skewed import mean_of

STEPS = np.arange(0, 4001, 100)  # 11 of them in the last quarter
LATE = 11


def arms(n, gap=0.0, seed=0, correlation=0.9):
    """Difference curves of n seeds, correlated from step to step, over control curves that cancel."""
    draw = np.random.default_rng(seed)
    noise = draw.normal(size=(n, STEPS.size))
    for step in range(1, STEPS.size):
        noise[:, step] = correlation * noise[:, step - 1] + math.sqrt(1 - correlation**2) * noise[:, step]
    control = 3 + draw.normal(size=(n, 1)) + np.exp(-STEPS / 500)
    return control + gap + 0.002 * noise, control


def holds(found, truth=0.0):
    return all(low <= truth <= high for low, high in zip(found.low, found.high, strict=True))


def verdict_s(candidate, control):
    """The verdict's 95 % interval at each step of the last quarter."""
    return np.array([mean_of(gaps).interval(0.025) for gaps in (candidate - control)[:, -LATE:].T])


def longer(candidate, control):
    """How many times as long as the verdict's interval the band of these is."""
    found = band(STEPS, candidate, control)
    low, high = verdict_s(candidate, control).T
    return (found.high[0] - found.low[0]) / (high[0] - low[0])


@pytest.mark.parametrize("n", [3, 5, 8, 12, 20])
def test_the_band_holds_the_verdict_s_interval_at_the_last_step(n):
    """Of skewed gaps, too: flips of signs alone leave the side of the long tail too short."""
    draw = np.random.default_rng(2)
    control = 3 + draw.standard_normal((n, 1)) + np.zeros(STEPS.size)
    for _ in range(10):
        candidate = control + 0.002 * (draw.standard_exponential((n, 1)) + 0.1 * draw.standard_normal(control.shape))
        low, high = compare(candidate[:, -1], control[:, -1], margin=0.005).interval_95
        found = band(STEPS, candidate, control)
        assert found.low[-1] - 1e-12 <= low < high <= found.high[-1] + 1e-12


def test_the_band_is_as_many_times_longer_than_the_verdict_s_interval_at_every_step():
    candidate, control = arms(6, gap=0.01)
    found = band(STEPS, candidate, control)
    mean, (low, high) = (candidate - control)[:, -LATE:].mean(axis=0), verdict_s(candidate, control).T
    times = longer(candidate, control)
    assert found.step == tuple(range(3000, 4001, 100))
    assert found.low == pytest.approx(mean - times * (mean - low))
    assert found.high == pytest.approx(mean + times * (high - mean))


def test_it_is_wider_than_pointwise_and_narrower_than_bonferroni():
    for seed in range(5):
        assert 1 < longer(*arms(9, seed=seed)) < stats.t.ppf(1 - 0.025 / LATE, 8) / stats.t.ppf(0.975, 8)


def test_few_pairs():
    assert band(STEPS, *arms(2)) is None
    for n in (3, 4):
        times = stats.t.ppf(1 - 0.025 / LATE, n - 1) / stats.t.ppf(0.975, n - 1)
        assert longer(*arms(n)) == pytest.approx(times)


def test_many_pairs_draw_their_patterns_and_repeat():
    found = band(STEPS, *arms(20))
    assert found == band(STEPS, *arms(20))
    assert 1 < longer(*arms(20)) < 1.7


def test_steps_at_which_no_gap_varies():
    candidate, control = arms(6)
    candidate[:, -1] = control[:, -1]
    found = band(STEPS, candidate, control)
    assert (found.low[-1], found.high[-1]) == (0, 0)
    assert band(STEPS, control, control).high == (0,) * LATE


@pytest.mark.parametrize(("n", "correlation"), [(3, 0.0), (5, 0.5), (5, 0.99), (8, 0.9)])
def test_it_holds_the_whole_curve_as_often_as_it_says(n, correlation):
    held = np.mean([holds(band(STEPS, *arms(n, seed=seed, correlation=correlation))) for seed in range(400)])
    assert held >= 0.90  # a pointwise band holds 11 uncorrelated steps in 57 %


def test_it_sees_a_gap():
    assert not holds(band(STEPS, *arms(8, gap=0.02)))
