import math

import numpy as np
import pytest
from scipy import stats

from te_bench.reports.convergence.speedup import capability_matched, fieller

STEPS = np.arange(0, 1001, 50)
SLOPE = -1e-4  # nat a step


def control(n=5, noise=0.0, seed=0, slope=SLOPE):
    """Curves that end in a straight line, each seed at its own height."""
    draw = np.random.default_rng(seed)
    line = 3 + slope * STEPS + np.where(STEPS < 700, (700 - STEPS) * 0.01, 0)
    return line + 0.01 * draw.normal(size=(n, 1)) + noise * draw.normal(size=(n, STEPS.size))


def matched(curves, gaps, ours=(0.08, 0.081, 0.079), theirs=(0.1, 0.1, 0.1)):
    return capability_matched(
        STEPS, curves, curves[:, -1] + np.asarray(gaps), control_step_s=theirs, candidate_step_s=ours
    )


def test_steps_that_a_gap_costs_and_time_that_is_left():
    found = matched(control(), [0.002] * 5, ours=(0.08,) * 3)
    assert found.more_steps == pytest.approx(20)  # 0.002 / 0.0001
    assert found.step_time.value == pytest.approx(0.8)
    assert found.less_time == pytest.approx(1 - 0.8 * 1.02)
    assert found.less_time_interval == pytest.approx((found.less_time, found.less_time))
    assert found.reason is None


def test_a_better_candidate_needs_fewer_steps_and_slower_steps_cost_more():
    assert matched(control(), [-0.002] * 5, ours=(0.1,) * 3).less_time == pytest.approx(0.02)
    assert matched(control(), [0.002] * 5, ours=(0.1,) * 3).less_time == pytest.approx(-0.02)


def test_the_interval_has_the_share_of_both_sources():
    gaps = 0.002 + 0.001 * np.array([-1, 0.5, 1, -0.5, 0])
    both = matched(control(), gaps)
    seeds = matched(control(), gaps, ours=(0.08,) * 3)
    steps = matched(control(), [0.002] * 5)
    low, high = both.less_time_interval
    assert low < both.less_time < high
    # the slope is the same for all: Fieller's is the t interval of the gaps, in steps
    t = stats.t.interval(0.95, 4, gaps.mean(), stats.sem(gaps))
    assert seeds.more_steps_interval == pytest.approx([bound / -SLOPE for bound in t])
    assert seeds.less_time_interval == pytest.approx([1 - 0.8 * (1 + bound / -SLOPE / 1000) for bound in t[::-1]])
    for alone in (seeds, steps):
        assert high - low > alone.less_time_interval[1] - alone.less_time_interval[0]


def test_the_interval_holds_the_doubt_of_the_slope():
    """A loss that flattens at its end: a gap costs ten times as many steps by the last eighth's slope."""
    flattening = np.where(STEPS <= 900, STEPS, 900 + 0.1 * (STEPS - 900))
    curves = 3 + SLOPE * flattening + 0.01 * np.arange(5)[:, None]
    found = matched(curves, [0.002] * 5, ours=(0.08,) * 3)
    quarter, eighth = (-np.polyfit(STEPS[late], curves[0, late], 1)[0] for late in (STEPS >= 750, STEPS >= 875))
    assert eighth < 0.5 * quarter
    assert found.more_steps == pytest.approx(0.002 / quarter)
    assert found.more_steps_interval == pytest.approx((0.002 / quarter, 0.002 / eighth))
    low, high = found.to_equal_loss.low, found.to_equal_loss.high
    assert high == pytest.approx(found.to_equal_loss.value)
    assert low == pytest.approx(1 / (0.8 * (1 + 0.002 / eighth / 1000)))


def test_few_losses_in_the_last_eighth_are_filled_up_to_three_and_of_a_quarter_s_three_two_remain():
    for steps, kept in (([0, 1600, 1800, 2000, 2035], 3), ([0, 240, 270, 300], 2)):
        at = np.array(steps)
        curves = np.stack([3 - 0.1 * np.log1p(at), 3.1 - 0.1 * np.log1p(at)])
        found = capability_matched(at, curves, curves[:, -1] + 1e-3, control_step_s=[1, 1], candidate_step_s=[1, 1])
        slope = np.polyfit(at[-kept:], curves[0, -kept:], 1)[0]
        assert found.more_steps_interval[1] == pytest.approx(1e-3 / -slope)


def test_a_loss_whose_last_eighth_does_not_fall_brings_no_interval():
    level = 3 + SLOPE * np.minimum(STEPS, 850) + 0.01 * np.arange(5)[:, None]
    found = matched(level, [0.0005] * 5)
    assert found.less_time is not None
    assert (found.more_steps_interval, found.less_time_interval) == (None, None)
    assert found.reason == "no interval: these seeds do not tell the slope of the last eighth from 0"


def test_fieller_holds_the_ratio_in_95_per_cent():
    draw = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        y = 1 + 0.3 * draw.normal(size=5)
        low, high = fieller(2 * y + draw.normal(size=5), y) or (-math.inf, math.inf)
        held += low <= 2 <= high
    assert abs(held - 1900) <= 4 * math.sqrt(2000 * 0.95 * 0.05)
    assert fieller([1, 2, 3], [-1, 1, 0.5]) is None
    assert fieller([1], [1]) is None


@pytest.mark.parametrize("slope", [0.0, 1e-4])
def test_a_loss_that_does_not_fall_gives_no_figure(slope):
    found = matched(control(slope=slope), [0.002] * 5)
    assert (found.less_time, found.more_steps) == (None, None)
    assert "does not fall over the last quarter" in found.reason


@pytest.mark.parametrize("sign", [1, -1])
def test_a_gap_that_the_slope_does_not_reach_costs_no_number_of_steps(sign):
    reach = -SLOPE * 250  # what the control gains in the last quarter
    near, far = (matched(control(), [sign * share * reach] * 5) for share in (0.99, 1.5))
    assert near.more_steps == pytest.approx(sign * 247.5)
    assert (far.less_time, far.more_steps) == (None, None)
    said = "the gap is 1.5 times what the control gained in the last quarter: too far to extrapolate"
    assert far.reason == said


def test_what_is_missing_is_said():
    one = matched(control(n=1), [0.002])
    assert (one.less_time_interval, one.reason) == (None, "no interval: one seed")
    assert one.less_time is not None
    noisy = matched(control(noise=0.3, seed=3, slope=-1e-3), [0.002] * 5)
    said = "no interval: these seeds do not tell the slope from 0"
    assert (noisy.more_steps_interval, noisy.reason) == (None, said)
    untimed = matched(control(), [0.002] * 5, ours=(), theirs=())
    assert (untimed.less_time, untimed.reason) == (None, "no step times were measured")
    assert untimed.more_steps == pytest.approx(20)
    once = matched(control(), [0.002] * 5, ours=(0.08,), theirs=(0.1,))
    assert (once.less_time_interval, once.reason) == (None, "no interval: the step times of one process only")
    rare = capability_matched([0, 800, 1000], [[3, 2, 1]] * 2, [1, 1], control_step_s=[0.1], candidate_step_s=[0.1])
    assert rare.reason.startswith("the last quarter has 2 validation losses")
