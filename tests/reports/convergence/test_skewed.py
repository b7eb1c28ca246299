"""The error rates that docs/convergence-statistics.md states, by simulation of gaps whose mean is the margin."""

import math

import numpy as np
import pytest
from scipy import stats

from te_bench.reports.convergence import skewed
from te_bench.reports.convergence.equivalence import Verdict, compare

MARGIN = 1.0
#: Shapes of gaps with mean 0 and a standard deviation near 1.
SHAPES = {
    "normal": lambda draw, size: draw.standard_normal(size),
    "t3": lambda draw, size: draw.standard_t(3, size),
    "exponential": lambda draw, size: draw.standard_exponential(size) - 1,
    "exponential, to the left": lambda draw, size: 1 - draw.standard_exponential(size),
    "one in ten 4 sd high": lambda draw, size: draw.standard_normal(size) + 4 * (draw.random(size) < 0.1) - 0.4,
    "one in ten 4 sd low": lambda draw, size: draw.standard_normal(size) - 4 * (draw.random(size) < 0.1) + 0.4,
}


def most(rate, simulations):
    """What a true rate exceeds in one of 10,000 such simulations; and 0.15 points, which the tables may be off by."""
    return stats.binom.ppf(0.9999, simulations, rate) / simulations + 0.0015


def rate(shape, looks, limits, simulations=20_000):
    found = skewed.simulated(SHAPES[shape], looks, simulations, seed=11)
    return float(np.mean((found <= np.array(limits)[:, None]).any(axis=0)))


@pytest.mark.parametrize("alpha", [0.05, 0.0125])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gap_of_the_margin_is_called_good_in_at_most_alpha_of_cases(shape, alpha):
    for n in (3, 4, 5, 8, 13):
        assert rate(shape, (n,), (skewed.critical(n - 1, alpha),)) <= most(alpha, 20_000), n


def test_student_s_t_would_not_hold():
    for n, least in ((3, 0.14), (8, 0.13), (13, 0.11)):
        gaps = SHAPES["exponential"](np.random.default_rng(1), (20_000, n))
        t = gaps.mean(axis=1) / (gaps.std(axis=1, ddof=1) / math.sqrt(n))
        assert np.mean(t <= stats.t.ppf(0.05, n - 1)) > least


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_verdicts_on_runs_at_the_margin(shape, n):
    """The same through `compare`: losses in, a verdict out, in both directions."""
    simulations = 400
    draw = np.random.default_rng(n)
    gaps = SHAPES[shape](draw, (simulations, n)) / 10
    control = draw.standard_normal((simulations, n))
    found = [compare(base + gap + MARGIN, base, margin=MARGIN).verdict for gap, base in zip(gaps, control, strict=True)]
    good = sum(verdict in (Verdict.EQUIVALENT, Verdict.NON_INFERIOR) for verdict in found)
    assert good <= stats.binom.ppf(0.999, simulations, 0.052)
    assert sum(verdict is Verdict.INFERIOR for verdict in found) <= stats.binom.ppf(0.999, simulations, 0.052)


@pytest.mark.parametrize("n", [4, 13])
def test_the_table_is_what_simulations_give(n):
    """Of other draws than those that made it."""
    for alpha in (0.05, 0.0125):
        worst = max(rate(shape, (n,), (skewed.critical(n - 1, alpha),)) for shape in SHAPES)
        assert worst == pytest.approx(alpha, rel=0.15)


def test_a_claim_is_made_where_the_interval_says_so():
    draw = np.random.default_rng(4)
    for _ in range(50):
        mean = skewed.mean_of(draw.standard_exponential(6))
        low, high = mean.interval(0.05)
        assert mean.p_below(high) == pytest.approx(0.05, rel=1e-3)
        assert mean.p_above(low) == pytest.approx(0.05, rel=1e-3)
        assert mean.p_below(high + 1e-9) < 0.05 * (1 + 1e-3)


def test_more_gaps_than_the_table_has_take_those_of_fewer():
    assert skewed.critical(21, 0.05) == skewed.critical(19, 0.05)
    assert skewed.critical(10_000, 0.05) == skewed.critical(99, 0.05)
    assert math.isinf(skewed.critical(5, 1e-7))
    with pytest.raises(ValueError, match="2 gaps: their skewness cannot be known"):
        skewed.critical(1, 0.05)
