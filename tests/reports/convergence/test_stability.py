import math

import numpy as np
import pytest
from scipy import stats

from te_bench.reports.convergence.stability import (
    FEWEST_BEFORE,
    Rise,
    rate_bound,
    rate_p_value,
    spikes,
    stability,
    sustained_rises,
)


def curve(n=400, noise=0.02, seed=0):
    steps = np.arange(n) * 10.0
    return steps, 3 + 5 * np.exp(-np.arange(n) / 60) + noise * np.random.default_rng(seed).normal(size=n)


def test_an_even_run_is_stable():
    found = stability(*curve(), grad_norm=np.random.default_rng(1).lognormal(sigma=0.2, size=400))
    assert found.reason is None
    assert (found.non_finite, found.rises, found.loss_spikes, found.grad_spikes) == (None, (), (), ())
    assert found.loss_judged == found.grad_judged == 400 - FEWEST_BEFORE


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_value_that_is_not_finite(value):
    steps, loss = curve()
    loss[250:] = value
    found = stability(steps, loss)
    assert (found.non_finite, found.reason) == (2500.0, f"the loss is {value} at step 2500")
    norms = np.ones(400)
    norms[120] = value
    found = stability(steps, loss, norms)
    assert (found.non_finite, found.reason) == (1200.0, f"the gradient norm is {value} at step 1200")


def test_a_spike_is_no_divergence():
    steps, loss = curve()
    loss[300:308] += 5  # 8 of 17: the median stays
    found = stability(steps, loss)
    assert found.reason is None
    assert len(found.loss_spikes) == 1  # neighbours are one event


def test_a_rise_that_lasts_is_divergence_also_to_the_very_end():
    steps, loss = curve()
    loss[300:] += 0.6
    found = stability(steps, loss)
    [rise] = found.rises
    assert found.reason is not None
    assert 3000 < rise.first <= 3090
    assert rise.last is None
    assert rise.height == pytest.approx(0.6, abs=0.05)
    steps, loss = curve()
    loss[-9:] += 2  # the run's end is no return
    assert stability(steps, loss).reason is not None


def test_a_rise_that_came_back_is_told_and_is_no_divergence():
    steps, loss = curve()
    loss[200:240] += 2
    found = stability(steps, loss)
    assert found.reason is None
    [rise] = found.rises
    assert 2000 < rise.first < rise.last < 2500


def test_less_than_half_a_nat_is_no_rise_and_noise_does_not_lower_the_minimum():
    steps, loss = curve(noise=0.2)
    assert np.max(loss - np.minimum.accumulate(loss)) > 0.5  # of single losses
    assert sustained_rises(steps, loss) == ()
    steps, loss = curve()
    loss[300:] += 0.4
    assert sustained_rises(steps, loss) == ()


def test_short_runs():
    assert sustained_rises([0, 1, 2], [3.0, 9.0, 9.0]) == ()
    assert sustained_rises([0, 1, 2, 3, 4], [3.0, 3.0, 3.0, 3.0, 9.0]) == ()
    assert sustained_rises([0, 1, 2, 3, 4], [3.0, 3.0, 3.0, 9.0, 9.0]) == (Rise(first=4, last=None, height=6),)
    assert spikes(range(FEWEST_BEFORE), np.ones(FEWEST_BEFORE)) == ()


def test_spikes_are_measured_in_robust_deviations_of_what_came_before():
    values = np.random.default_rng(3).normal(size=300)
    at = [50, 90, 140, 180, 220, 260]
    values[at] = 20
    values[210] = -20  # downwards is none
    found = spikes(range(300), values)
    assert found == tuple(at)
    for place, beyond in ((50, 0.01), (260, 0.01), (90, -0.01)):
        before = values[max(0, place - 128) : place]
        values[place] = np.median(before) + (7 + beyond) * stats.median_abs_deviation(before, scale=1 / 1.4826)
    assert spikes(range(300), values) == (50, 140, 180, 220, 260)


def test_spikes_are_judged_from_the_thirty_third_value_on():
    values = np.random.default_rng(4).normal(size=60)
    values[FEWEST_BEFORE] = values[10] = 30
    assert spikes(range(60), values) == (FEWEST_BEFORE,)


def test_an_earlier_spike_hides_no_later_one_and_level_values_no_rise():
    values = np.random.default_rng(5).normal(size=400)
    values[[150, 200, 250]] = 1000, 15, 15
    assert spikes(range(400), values) == (150, 200, 250)
    assert spikes(range(50), [1.0] * 49 + [1.1]) == (49,)
    assert spikes(range(50), [1.0] * 50) == ()


def test_false_rate_on_noise():
    draw = np.random.default_rng(6)
    assert spikes(range(20_000), draw.normal(size=20_000)) == ()
    assert len(spikes(range(20_000), draw.lognormal(sigma=0.3, size=20_000))) <= 12  # 1 in 7,000: 3 expected


def test_rate_bound_is_clopper_and_pearson_s_and_fisher_s_test_is_between_arms():
    for events, runs, bound in ((0, 10, 0.2589), (0, 30, 0.0950), (3, 3, 1.0)):
        assert rate_bound(events, runs) == pytest.approx(bound, abs=1e-4)
    assert stats.binom.cdf(2, 9, rate_bound(2, 9, confidence=0.9)) == pytest.approx(0.1)
    assert rate_p_value((3, 3), (0, 3)) == pytest.approx(0.1)  # 2 of the 20 ways to choose 3 of 6
    assert rate_p_value((0, 5), (0, 5)) == 1
