import math

import numpy as np
import pytest
from scipy import integrate, stats
from statsmodels.stats.power import TTestIndPower, TTestPower

from te_bench.reports import power


@pytest.mark.parametrize(("cv", "n", "published"), [(0.30, 40, 0.815845), (0.20, 20, 0.834680)])
def test_power_is_that_of_a_published_table(cv, n, published):
    # PowerTOST's 2x2 crossover, true ratio 0.95, limits 0.8 to 1.25: on the logarithms se = sd sqrt(2 / n), n - 2 df
    sd = math.sqrt(math.log(1 + cv**2))
    found = power.exact_power(math.log(1.25), se=sd * math.sqrt(2 / n), df=n - 2, gap=math.log(0.95))
    assert found == pytest.approx(published, abs=1e-6)


@pytest.mark.parametrize("df", [1, 2, 4, 30, 1000])
@pytest.mark.parametrize(("margin", "gap"), [(3.0, 0.0), (8.0, 2.0), (30.0, -3.0)])
def test_power_agrees_with_adaptive_quadrature(df, margin, gap):
    quantile = stats.t.ppf(0.95, df)

    def integrand(x):
        reach = margin - quantile * x
        return (
            2 * df * x * stats.chi2.pdf(df * x * x, df) * (stats.norm.cdf(reach - gap) - stats.norm.cdf(-reach - gap))
        )

    slow, _ = integrate.quad(
        integrand, 0, margin / quantile, limit=500, epsabs=1e-13, points=[min(1, margin / quantile / 2)]
    )
    assert power.exact_power(margin, se=1, df=df, gap=gap) == pytest.approx(slow, abs=1e-9)


@pytest.mark.parametrize(("sd", "table"), [(0.0013, [30, 9, 5, 3, 2]), (0.0019, [63, 17, 8, 4, 3])])
def test_seeds_needed_unpaired(sd, table):
    margins = (0.001, 0.002, 0.003, 0.005, 0.0082)
    assert [power.seeds_needed(power.gap_sd(sd), margin, paired=False) for margin in margins] == table


def test_seeds_needed_is_the_fewest_and_pairs_that_go_together_need_fewer():
    sd = power.gap_sd(0.0019)
    n = power.seeds_needed(sd, 0.003)
    assert power.power(n, sd, 0.003) >= power.POWER > power.power(n - 1, sd, 0.003)
    assert power.gap_sd(0.0019, 0.5) == pytest.approx(0.0019)
    assert power.seeds_needed(power.gap_sd(0.0019, 0.8), 0.003) < n
    assert power.seeds_needed(sd, 0.003, gap=0.001) > n
    assert power.seeds_needed(sd, 0.003, alpha=0.0125) > n


@pytest.mark.parametrize("gap", [0.003, -0.003, 0.01, math.nextafter(0.003, 0)])
def test_no_number_of_seeds_shows_what_is_not_so(gap):
    assert power.seeds_needed(0.002, 0.003, gap=gap) is None


@pytest.mark.parametrize("paired", [True, False])
def test_seeds_beyond_a_bound_are_those_of_statsmodels(paired):
    excess, sd = 0.002, 0.004
    n = power.seeds_beyond(sd, excess, paired=paired)
    # statsmodels' effect of two samples is in standard deviations of one run: sd / sqrt(2)
    judge, effect = (TTestPower(), excess / sd) if paired else (TTestIndPower(), math.sqrt(2) * excess / sd)
    with_n, with_fewer = (judge.power(effect, m, 0.05, alternative="larger") for m in (n, n - 1))
    assert with_n >= power.POWER > with_fewer
    assert power.seeds_beyond(sd, excess, alpha=0.0125, paired=paired) > n
    assert power.seeds_beyond(sd, 0.0) is None
    assert power.seeds_beyond(sd, 1e-7) is None  # more than a million


@pytest.mark.parametrize("df", [1, 4, 30])
def test_detectable_is_the_margin_of_eighty_per_cent(df):
    margin = power.detectable(se=0.001, df=df, alpha=0.05)
    assert power.exact_power(margin, se=0.001, df=df) == pytest.approx(0.8, abs=1e-6)


def test_power_rises_with_the_margin_from_nothing():
    rates = [power.exact_power(margin, se=1, df=4) for margin in np.linspace(0.01, 12, 40)]
    assert rates == sorted(rates)
    assert rates[0] < 1e-4
    assert rates[-1] == pytest.approx(1, abs=1e-4)


def test_pairs_have_half_the_degrees_of_freedom():
    assert power.power(5, 0.002, 0.003) == power.exact_power(0.003, se=0.002 / math.sqrt(5), df=4)
    assert power.power(5, 0.002, 0.003, paired=False) == power.exact_power(0.003, se=0.002 / math.sqrt(5), df=8)
