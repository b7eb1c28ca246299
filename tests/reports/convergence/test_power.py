import math

import numpy as np
import pytest
from scipy import integrate, stats

from te_bench.reports.convergence import power
from te_bench.reports.convergence.equivalence import compare
from te_bench.reports.convergence.skewed import mean_of


@pytest.mark.parametrize(("cv", "n", "published"), [(0.30, 40, 0.815845), (0.20, 20, 0.834680)])
def test_power_is_that_of_a_published_table(cv, n, published):
    # PowerTOST's 2x2 crossover, true ratio 0.95, limits 0.8 to 1.25: on the logarithms se = sd sqrt(2 / n), n - 2 df
    sd = math.sqrt(math.log(1 + cv**2))
    se = sd * math.sqrt(2 / n)
    reach = stats.t.ppf(0.95, n - 2)
    found = power.exact_power(math.log(1.25) / se, reach=reach, df=n - 2, gap=math.log(0.95) / se)
    assert found == pytest.approx(published, abs=1e-6)


@pytest.mark.parametrize("df", [1, 2, 4, 30, 1000])
@pytest.mark.parametrize(("margin", "gap"), [(3.0, 0.0), (8.0, 2.0), (30.0, -3.0)])
def test_power_agrees_with_adaptive_quadrature(df, margin, gap):
    quantile = stats.t.ppf(0.95, df)

    def integrand(x):
        reach = margin - quantile * x
        within = stats.norm.cdf(reach - gap) - stats.norm.cdf(-reach - gap)
        return 2 * df * x * stats.chi2.pdf(df * x * x, df) * within

    end = margin / quantile
    slow, _ = integrate.quad(integrand, 0, end, limit=500, epsabs=1e-13, points=[min(1, end / 2)])
    assert power.exact_power(margin, reach=quantile, df=df, gap=gap) == pytest.approx(slow, abs=1e-9)


def test_seeds_needed_is_the_fewest_and_pairs_that_go_together_need_fewer():
    sd = power.gap_sd(0.0019)
    n = power.seeds_needed(sd, 0.003)
    assert power.power(n, sd, 0.003) > power.POWER - 0.01 > power.power(n - 2, sd, 0.003)
    assert power.gap_sd(0.0019, 0.5) == pytest.approx(0.0019)
    assert power.seeds_needed(power.gap_sd(0.0019, 0.8), 0.003) < n
    assert power.seeds_needed(sd, 0.003, gap=0.001) > n
    assert power.seeds_needed(sd, 0.003, alpha=0.0125) > n


@pytest.mark.parametrize("gap", [0.003, -0.003, 0.01, math.nextafter(0.003, 0)])
def test_no_number_of_seeds_shows_what_is_not_so(gap):
    assert power.seeds_needed(0.002, 0.003, gap=gap) is None


@pytest.mark.parametrize(("n", "alpha"), [(3, 0.05), (5, 0.0125), (13, 0.05)])
def test_power_is_what_simulated_normal_gaps_show(n, alpha):
    margin = power.detectable(se=1 / math.sqrt(n), df=n - 1, alpha=alpha)
    gaps = np.random.default_rng(n).normal(size=(4000, n))
    for share, gap in ((1.0, 0.0), (1.3, 0.0), (1.3, 0.25 * margin)):
        limits = [mean_of(row + gap).interval(alpha) for row in gaps]
        shown = np.mean([-share * margin < low and high < share * margin for low, high in limits])
        assert shown == pytest.approx(power.power(n, 1.0, share * margin, gap=gap, alpha=alpha), abs=0.03)


@pytest.mark.parametrize("paired", [True, False])
def test_seeds_beyond_a_bound_see_it_in_four_cases_of_five(paired):
    excess, sd = 0.002, 0.004
    n = power.seeds_beyond(sd, excess, paired=paired)
    draw = np.random.default_rng(0)
    gaps = draw.normal(excess, sd, size=(2000, n))
    if not paired:
        arms = draw.normal(0, sd / math.sqrt(2), size=(2, 2000, n))
        found = (compare(a + excess, b, margin=1e-12, paired=False) for a, b in arms.swapaxes(0, 1)[:500])
        seen = [one.claims.inferior <= 0.05 for one in found]
    else:
        seen = [mean_of(row).p_above(0.0) <= 0.05 for row in gaps]
    assert np.mean(seen) == pytest.approx(0.81, abs=0.06)
    assert power.seeds_beyond(sd, excess, alpha=0.0125, paired=paired) > n
    assert power.seeds_beyond(sd, 0.0) is None
    assert power.seeds_beyond(sd, 1e-7) is None  # more than a million


@pytest.mark.parametrize("df", [2, 4, 30])
def test_detectable_is_the_margin_of_eighty_per_cent(df):
    margin = power.detectable(se=0.001, df=df, alpha=0.05)
    assert power.tost_power(margin, se=0.001, df=df) == pytest.approx(0.8, abs=0.01)


def test_two_gaps_show_nothing():
    assert power.power(2, 1e-9, 0.003) == 0
    assert power.detectable(se=0.001, df=1) is None
    assert power.seeds_needed(1e-9, 0.003) == 3


def test_power_rises_with_the_margin_from_nothing():
    rates = [power.tost_power(margin, se=1, df=4) for margin in np.linspace(0.01, 12, 40)]
    assert rates == sorted(rates)
    assert rates[0] < 1e-4
    assert rates[-1] > 0.9


def test_pairs_have_half_the_degrees_of_freedom():
    assert power.power(5, 0.002, 0.003) == power.tost_power(0.003, se=0.002 / math.sqrt(5), df=4)
    assert power.power(5, 0.002, 0.003, paired=False) == power.tost_power(0.003, se=0.002 / math.sqrt(5), df=8)
