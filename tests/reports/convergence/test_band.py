import math

import numpy as np
import pytest
from scipy import stats

from te_bench.reports.convergence.band import band

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


def standard_errors(candidate, control):
    """How many the band of these is wide, to either side."""
    found = band(STEPS, candidate, control)
    return (found.high[0] - found.low[0]) / 2 / stats.sem((candidate - control)[:, -LATE])


def test_the_band_is_about_the_mean_of_the_last_quarter():
    candidate, control = arms(6, gap=0.01)
    found = band(STEPS, candidate, control)
    gaps = (candidate - control)[:, -LATE:]
    half = standard_errors(candidate, control) * stats.sem(gaps)
    assert found.step == tuple(range(3000, 4001, 100))
    assert found.low == pytest.approx(gaps.mean(axis=0) - half)
    assert found.high == pytest.approx(gaps.mean(axis=0) + half)


def test_it_is_wider_than_pointwise_and_narrower_than_bonferroni():
    for seed in range(5):
        assert stats.t.ppf(0.975, 8) < standard_errors(*arms(9, seed=seed)) < stats.t.ppf(1 - 0.025 / LATE, 8)


def test_few_pairs():
    assert band(STEPS, *arms(2)) is None
    for n in (3, 4):
        assert standard_errors(*arms(n)) == pytest.approx(stats.t.ppf(1 - 0.025 / LATE, n - 1))


def test_many_pairs_draw_their_patterns_and_repeat():
    found = band(STEPS, *arms(20))
    assert found == band(STEPS, *arms(20))
    assert 2 < standard_errors(*arms(20)) < 3.5


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
