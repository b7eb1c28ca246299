"""Changes of level: what is found in steps, what is not found in noise, and that the cut is the cheapest there is."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from te_bench.reports.history import change_points
from te_bench.reports.history.change_points import ALPHA, SHORTEST, penalty, segment


def noisy(n: int, seed: int, *, noise: float = 0.01, draw: str = "standard_normal") -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.exp(noise * getattr(random, draw)(size=n))


def test_a_step_is_found_where_it_is_with_its_size() -> None:
    values = noisy(40, 3)
    values[25:] *= 1.05
    found = segment(list(values))
    (change,) = found.changes
    assert change.index == 25
    assert change.first <= 25 <= change.last
    assert change.low < 1.05 < change.high
    assert change.ratio == pytest.approx(found.levels[1] / found.levels[0])
    assert found.bounds == (0, 25, 40)
    assert found.noise == pytest.approx(0.01, rel=0.5)


def test_two_changes_up_and_down_are_two() -> None:
    values = noisy(60, 4)
    values[20:45] *= 0.9
    found = segment(list(values))
    assert [change.index for change in found.changes] == [20, 45]
    assert found.changes[0].high < 1 < found.changes[1].low
    assert found.levels[1] == pytest.approx(0.9, rel=0.01)


def test_the_size_of_a_change_is_that_of_its_neighbours_not_of_the_whole_series() -> None:
    values = noisy(60, 4, noise=0.002)
    values[20:40] *= 2
    values[40:] *= 3
    assert [change.ratio for change in segment(list(values)).changes] == pytest.approx([2, 1.5], rel=0.01)


def test_the_unit_of_time_changes_nothing() -> None:
    values = noisy(40, 5)
    values[12:] *= 1.04
    (seconds,), (milliseconds,) = segment(list(values)).changes, segment(list(values * 1000)).changes
    assert seconds.index == milliseconds.index == 12
    assert seconds.ratio == pytest.approx(milliseconds.ratio)


@pytest.mark.parametrize("place", [0, 1, 20, 38, 39])
def test_one_bad_run_is_no_change_of_level(place: int) -> None:
    alarms, levels = 0, []
    for seed in range(100):
        values = noisy(40, 100 + seed)
        values[place] *= 1.5
        found = segment(list(values))
        alarms += bool(found.changes)
        levels += found.levels
    assert alarms <= (2 if 1 < place < 38 else 5)  # at the ends there are fewer neighbours to tell by
    assert max(abs(level - 1) for level in levels) < 0.05


def test_a_constant_series_and_changes_below_a_tenth_of_a_percent_are_none() -> None:
    assert not segment([0.033] * 50).changes
    assert not segment([0.033] * 25 + [0.033 * 1.0005] * 25).changes
    assert [change.index for change in segment([0.033] * 25 + [0.033 * 1.01] * 25).changes] == [25]


def test_a_short_series_is_not_searched() -> None:
    found = segment([1.0, 1.0, 1.0, 2.0, 2.0][: SHORTEST - 1])
    assert (found.changes, found.noise, found.bounds) == ((), None, (0, 5))
    assert found.levels == (pytest.approx(2 ** (2 / 5)),)
    assert segment([]).levels == ()


@pytest.mark.parametrize("alpha", [0.0, 1.0, 1e-5, math.nan])
def test_an_alpha_that_was_not_simulated_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="--alpha"):
        segment([1.0] * 8, alpha=alpha)


def test_a_stricter_alpha_costs_more() -> None:
    bic = 2 * math.log(30)  # which alarms too often
    assert penalty(30, 0.001) > penalty(30, 0.01) > penalty(30, 0.1) > bic


def cheapest(values: np.ndarray, price: float) -> float:
    """The least cost of any segmentation into segments of at least two, by trying all their ends in turn."""
    n = len(values)
    costs = [-price] + [math.inf] * n
    for end in range(2, n + 1):
        parts = (values[start:end] for start in range(end - 1))
        costs[end] = min(before + ((p - p.mean()) ** 2).sum() + price for before, p in zip(costs, parts, strict=False))
    return costs[n]


LEVELS = st.lists(st.floats(-3, 3, allow_subnormal=False), min_size=SHORTEST, max_size=24)


@given(LEVELS, st.integers(1, 6), st.floats(0.1, 8))
def test_no_segmentation_is_cheaper(levels: list[float], each: int, price: float) -> None:
    random = np.random.default_rng(len(levels) + each)
    values = np.repeat(levels, each)[: len(levels)] + 0.5 * random.standard_normal(len(levels))
    bounds = change_points.cheapest_cuts(values - values.mean(), price)
    segments = [values[start:end] for start, end in itertools.pairwise(bounds)]
    assert (bounds[0], bounds[-1]) == (0, len(values))
    assert min(map(len, segments)) >= 2  # it takes two runs to make a level
    cost = sum(float(((part - part.mean()) ** 2).sum()) + price for part in segments) - price
    assert cost == pytest.approx(cheapest(values, price), abs=1e-9)


# Rates. The seeds are fixed, so these are facts about the code, not luck; the bounds leave room for other versions of numpy.


def changes(series: np.ndarray, alpha: float) -> list[list[int]]:
    """Where `segment` would cut each row; its noise and its penalty, and all rows cut at once instead of each by itself."""
    n = series.shape[1]
    logs = np.log(series)
    noise = np.maximum(change_points.noise_of(logs), change_points.FLOOR)
    scaled = change_points.drawn_in(logs, noise) / noise[:, None]
    sums = np.pad(np.cumsum(scaled - scaled.mean(axis=1, keepdims=True), axis=1), ((0, 0), (1, 0)))
    price = penalty(n, alpha)
    costs = np.full((len(series), n + 1), math.inf)  # of the cheapest segments up to there, but for the sum of squares
    costs[:, 0] = -price
    came_from = np.zeros(costs.shape, dtype=int)
    for end in range(2, n + 1):
        saved = (sums[:, end, None] - sums[:, : end - 1]) ** 2 / (end - np.arange(end - 1))
        found = costs[:, : end - 1] - saved + price
        came_from[:, end] = found.argmin(axis=1)
        costs[:, end] = found.min(axis=1)
    cuts = [[int(row[n])] for row in came_from]
    for row, cut in zip(came_from, cuts, strict=True):
        while cut[-1]:
            cut.append(int(row[cut[-1]]))
    return [cut[-2::-1] for cut in cuts]


def drawn(n: int, series: int, **options: Any) -> np.ndarray:
    return np.array([noisy(n, seed, **options) for seed in range(series)])


def alarms(n: int, series: int, alpha: float, **options: Any) -> float:
    return sum(map(bool, changes(drawn(n, series, **options), alpha))) / series


def found(n: int, at: int, series: int) -> float:
    """How often a step of 5 % before value `at` in noise of 1 % is found, within one place."""
    values = drawn(n, series)
    values[:, at:] *= 1.05
    return sum(any(abs(cut - at) <= 1 for cut in cuts) for cuts in changes(values, ALPHA)) / series


@pytest.mark.parametrize("n", [6, 20, 50, 200])
def test_the_series_of_the_rates_are_cut_as_segment_cuts_them(n: int) -> None:
    for alpha, at in itertools.product((0.01, 0.5), (n - 3, n // 2)):
        values = drawn(n, 10)
        values[:, at:] *= 1.03
        each = [[change.index for change in segment(list(row), alpha=alpha).changes] for row in values]
        assert changes(values, alpha) == each


@pytest.mark.parametrize("n", [6, 20, 50])
def test_noise_gives_no_more_false_alarms_than_alpha(n: int) -> None:
    assert alarms(n, 400, 0.05) <= 0.05


def test_the_false_alarm_rate_is_not_zero_either() -> None:
    assert alarms(30, 400, 0.5) >= 0.1


def test_a_step_of_five_percent_is_found() -> None:
    assert found(40, 20, 100) >= 0.98
    assert found(40, 37, 100) >= 0.95  # three runs after it
    assert found(40, 38, 100) >= 0.85  # two


@pytest.mark.slow
@pytest.mark.parametrize("n", [6, 10, 20, 50, 100, 200])
def test_the_rates_that_the_module_states(n: int) -> None:
    assert alarms(n, 1000, 0.01) <= 0.015  # 0.01 and twice its binomial error
    assert alarms(n, 500, 0.01, noise=0.007, draw="laplace") <= 0.05  # heavier tails than the penalty knows
    if n >= 20:
        assert found(n, n // 2, 500) >= 0.98
        assert found(n, n - 3, 500) >= 0.85


@pytest.mark.slow
def test_the_intervals_hold_the_truth() -> None:
    places = sizes = hits = 0
    for seed in range(600):
        values = noisy(40, 1000 + seed)
        values[22:] *= 1.03
        changes = segment(list(values)).changes
        if len(changes) == 1:
            hits += 1
            places += changes[0].first <= 22 <= changes[0].last
            sizes += changes[0].low <= 1.03 <= changes[0].high
    assert hits >= 400
    assert places / hits >= 0.94
    assert 0.88 <= sizes / hits <= 0.98
