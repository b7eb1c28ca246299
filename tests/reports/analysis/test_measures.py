import pytest
import scipy.stats

from te_bench.reports.analysis.measures import quantile


@pytest.mark.parametrize("q", [0.0, 0.05, 0.5, 0.95, 1.0])
def test_quantile_interpolates(q):
    values = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6]
    assert quantile(values, q) == pytest.approx(scipy.stats.scoreatpercentile(values, 100 * q))
