import pytest

from te_bench.reports.analysis.measures import Ratio
from te_bench.reports.page import text

PLAIN = {0.0: "0.00", 0.01234: "0.0123", 0.5: "0.500", 1.234: "1.23", 27.38: "27.4", 103.81: "103.8", 4210.4: "4,210"}
SCIENTIFIC = {0.0: "0", 0.00123: "1.2e-3", 12.0: "1.2e1"}
THOUSANDS = {875.4: "875", 9_999.0: "9,999", 448_613.0: "449 k", 1.2e6: "1.20 M"}


@pytest.mark.parametrize(
    ("show", "shown"),
    [(text.plain, {**PLAIN, 2.5e-5: "2.5e-5"}), (text.scientific, SCIENTIFIC), (text.thousands, THOUSANDS)],
)
def test_numbers_have_the_digits_that_a_reader_wants(show, shown):
    assert {value: show(value) for value in shown} == shown
    assert show(None) == "—"


def test_speedup_never_invents_an_interval():
    assert text.speedup(Ratio(value=3.788, n=1)) == "3.79×"
    assert text.speedup(Ratio(value=3.788, n=3, low=3.7, high=3.88)) == "3.79× [3.70, 3.88]"
    assert text.speedup(None) == "—"


def test_ratios_and_hours_keep_digits_at_any_size():
    assert [text.times(value) for value in (0.0043, 0.1, 12.345, 0.0)] == ["0.00430×", "0.10×", "12.35×", "0.00×"]
    assert text.speedup(Ratio(value=0.0043, n=3, low=0.004, high=0.0047)) == "0.00430× [0.00400, 0.00470]"
    hours = {0.0: "0", 0.1: "0.000028", 540.0: "0.15", 18_000.0: "5", 358_560.0: "100", 4_000_000.0: "1,111"}
    assert {seconds: text.hours(seconds) for seconds in hours} == hours


def test_units():
    assert text.gib(9.1 * 2**30) == "9.10"
    assert text.tera(4.01e14) == "401.0"
    assert text.milliseconds(0.0274) == "27.4"
    assert text.percent(0.4061) == "40.6 %"
    assert text.loss(1.46971) == "1.4697"
    assert text.loss(1.46971, 0.002) == "1.4697 ± 0.0020"
    assert [f(None) for f in (text.gib, text.tera, text.milliseconds, text.percent, text.loss, text.count)] == ["—"] * 6
    assert [text.shortened(name, 6) for name in ("abcdef", "abcdefg")] == ["abcdef", "abcde…"]
