"""The error rates that docs/convergence-statistics.md states, by simulation of gaps whose mean is the margin."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from te_bench.reports.convergence import planning, skewed
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


@pytest.mark.parametrize("spread", [0.17, 0.33, 0.67])
@pytest.mark.parametrize("n", [3, 5, 10])
def test_two_bf16_runs_of_which_one_is_a_a_s_let_few_recipes_pass(n, spread):
    """Control and A/A count in the recipe's gap, and a recipe passes where A/A is EQUIVALENT, too.

    spread: what single runs vary by, as a share of the margin.
    """
    draw, simulations, limit = np.random.default_rng(8), 20_000, skewed.critical(n - 1, 0.05)

    def below(gaps, bound):
        mean, sd = gaps.mean(axis=1), gaps.std(axis=1, ddof=1)
        skewness = stats.skew(gaps, axis=1, bias=False)
        return skewed.worse((mean - bound) / (sd / math.sqrt(n)), skewness) <= limit

    for of_bf16, of_recipe in itertools.product(SHAPES, SHAPES):
        shapes = [SHAPES[of_bf16], SHAPES[of_bf16], SHAPES[of_recipe]]
        control, aa, recipe = (spread * shape(draw, (simulations, n)) for shape in shapes)
        good = below(recipe + MARGIN - (control + aa) / 2, MARGIN)
        valid = below(aa - control, MARGIN) & below(control - aa, MARGIN)
        assert good.mean() <= most(0.036, simulations)
        if valid.mean() > 0.8:
            assert good[valid].mean() <= most(0.036, int(valid.sum()))


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


def planned_by_a_pilot(gaps: np.ndarray, recipes: int, fewest: int) -> np.ndarray:
    """Seeds of each study by the gaps of its pilot, (studies, recipes, pairs), as a plan with --pilot counts them."""
    variance, most = gaps.var(axis=2, ddof=1).mean(axis=1), 100
    steps = np.ceil(50 * np.log(variance) / 2)  # of 2 %, upwards
    needed = {}
    for step in np.unique(steps):
        spread = planning.Spread(sd=math.exp(step / 50) / math.sqrt(2), correlation=0.0, pairs=gaps.shape[2])
        found = planning.outlook(seeds=fewest, margin=MARGIN, alpha=0.05, recipes=recipes, spread=spread)
        needed[step] = min(max(found.needed or most, fewest), most)
    return np.array([needed[step] for step in steps])


def wrong_after_a_pilot(shape, recipes, fewest, simulations=20_000):
    """The largest share, over gaps that vary by 0.1 to 1.2 of the margin, of studies that call one recipe good at alpha 5 %.

    Its true gap is the margin. The other recipes, whose gaps are independent of it, have all been called good before it:
    Holm leaves it all of alpha.
    """
    unit, rates = 1 / np.std(SHAPES[shape](np.random.default_rng(0), (10**6,))), []
    for sd in (0.1, 0.2, 0.3, 0.5, 0.8, 1.2):
        draw = np.random.default_rng(5)
        gaps = sd * unit * SHAPES[shape](draw, (simulations, 100)) + MARGIN
        others = sd * unit * SHAPES[shape](draw, (simulations, recipes - 1, 3))
        seeds = planned_by_a_pilot(np.concatenate((gaps[:, None, :3], others), axis=1), recipes, fewest)
        wrong = 0
        for n in np.unique(seeds):
            own = gaps[seeds == n, :n]
            off = own - own.mean(axis=1, keepdims=True)
            spread = own.std(axis=1, ddof=1)
            skewness = ((off / spread[:, None]) ** 3).sum(axis=1) * n / ((n - 1) * (n - 2))
            found = skewed.worse((own.mean(axis=1) - MARGIN) / spread * math.sqrt(n), skewness)
            wrong += int(np.sum(found <= skewed.critical(n - 1, 0.05)))
        rates.append(wrong / simulations)
    return max(rates)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "one", "six"),
    [
        ("normal", 0.039, 0.045),
        ("t3", 0.035, 0.047),
        ("exponential", 0.067, 0.053),
        ("one in ten 4 sd high", 0.053, 0.051),
    ],
)
def test_seeds_that_a_pilot_s_spread_chose_err_as_often_as_the_docs_say(shape, one, six):
    """A pilot of three pairs counts in the study; eight seeds or more, as many as its spread asks for."""
    for recipes, told in ((1, one), (6, six)):
        assert wrong_after_a_pilot(shape, recipes, 8) == pytest.approx(told, abs=0.005)
