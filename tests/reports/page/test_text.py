import pytest

from te_bench.reports.analysis.measures import Ratio
from te_bench.reports.page import text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "—"),
        (0.0, "0.00"),
        (0.01234, "0.0123"),
        (0.5, "0.500"),
        (1.234, "1.23"),
        (27.38, "27.4"),
        (103.81, "103.8"),
        (4210.4, "4,210"),
        (2.5e-5, "2.5e-5"),
    ],
)
def test_plain(value, shown):
    assert text.plain(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(None, "—"), (0.0, "0"), (0.00123, "1.2e-3"), (12.0, "1.2e1")])
def test_scientific(value, shown):
    assert text.scientific(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "—"), (875.4, "875"), (9_999.0, "9,999"), (448_613.0, "449 k"), (1.2e6, "1.20 M")]
)
def test_thousands(value, shown):
    assert text.thousands(value) == shown


def test_speedup_never_invents_an_interval():
    assert text.speedup(Ratio(value=3.788, n=1)) == "3.79×"
    assert text.speedup(Ratio(value=3.788, n=3, low=3.7, high=3.88)) == "3.79× [3.70, 3.88]"
    assert text.speedup(None) == "—"


def test_units():
    assert text.gib(9.1 * 2**30) == "9.10"
    assert text.tera(4.01e14) == "401.0"
    assert text.milliseconds(0.0274) == "27.4"
    assert text.percent(0.4061) == "40.6 %"
    assert text.loss(1.46971) == "1.4697"
    assert text.loss(1.46971, 0.002) == "1.4697 ± 0.0020"
    assert [f(None) for f in (text.gib, text.tera, text.milliseconds, text.percent, text.loss, text.count)] == ["—"] * 6


def test_shortened():
    assert text.shortened("abcdef", 6) == "abcdef"
    assert text.shortened("abcdefg", 6) == "abcde…"
