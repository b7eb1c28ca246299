"""The --compare-fail grammar: pytest-benchmark's own, with decimals; what is gone or cannot be read fails."""

import argparse
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_benchmark.utils import parse_compare_fail

from te_bench.reports.exchange.compare_fail import STATS, Limit, LimitComparison, judge, parse
from te_bench.reports.exchange.pytest_stats import summary


def export(**rounds: list[float]) -> dict[str, Any]:
    return {"benchmarks": [{"fullname": name, "stats": summary(values)} for name, values in rounds.items()]}


def judged(limit: str, before: float, after: float) -> LimitComparison:
    return judge([parse(limit)], export(a=[before]), export(a=[after]))


@pytest.mark.parametrize(
    ("expression", "limit"),
    [
        ("median:2.5%", Limit(stat="median", limit=2.5, percent=True)),
        ("min:5%", Limit(stat="min", limit=5, percent=True)),
        ("mean:0.001", Limit(stat="mean", limit=0.001, percent=False)),
        ("max:.5%", Limit(stat="max", limit=0.5, percent=True)),
        ("iqr:1e-6", Limit(stat="iqr", limit=1e-6, percent=False)),
        (" stddev:0% ", Limit(stat="stddev", limit=0, percent=True)),
        ("ops:2.%", Limit(stat="ops", limit=2, percent=True)),
    ],
)
def test_the_grammar(expression: str, limit: Limit) -> None:
    assert parse(expression) == limit
    assert parse(str(limit)) == limit


@pytest.mark.parametrize(
    "bad",
    [
        *(
            "",
            "median",
            "median:",
            "median:5%%",
            "median:-5%",
            "average:5%",
            "median:nan",
            "rounds:5",
            "median=5%",
            "5%",
        ),
        *("median:1e999", "median:5 %", "outliers:1", "median:\u0665%", "median:5%,min:3%"),
    ],
)
def test_anything_else_is_refused_and_told_what_is_legal(bad: str) -> None:
    with pytest.raises(ValueError, match=r"STAT:N%.*STAT is one of min, max, mean, median, stddev, iqr"):
        parse(bad)


@given(
    st.sampled_from(STATS[:6]),
    st.integers(0, 500),
    st.sampled_from(["%", ""]),
    st.floats(1e-6, 1.0),
    st.floats(0.5, 2.0),
)
def test_what_pytest_benchmark_can_say_it_says_too(
    stat: str, limit: int, unit: str, before: float, factor: float
) -> None:
    """Its own checks are the reference, wherever its grammar, whole percentages, reaches."""
    rounds = [before, 1.1 * before, 1.3 * before]
    slower = [factor * value for value in rounds]
    old, new = summary(rounds), summary(slower)
    theirs = parse_compare_fail(f"{stat}:{limit}{unit}").fails(new, old)
    ours = judge([parse(f"{stat}:{limit}{unit}")], export(a=rounds), export(a=slower))
    if abs(100 * (factor - 1) - limit) > 1e-6:  # rounding decides exactly at the limit
        assert bool(theirs) == (not ours.passed)


def test_decimals_are_ours_alone() -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_compare_fail("median:2.5%")
    assert judged("median:2.5%", 1.0, 1.024).passed
    assert not judged("median:2.5%", 1.0, 1.026).passed


def test_seconds_are_seconds() -> None:
    assert judged("min:0.002", 0.010, 0.0119).passed
    (failure,) = judged("min:0.002", 0.010, 0.0125).failures
    assert failure.change == pytest.approx(0.0025)


def test_faster_passes_and_of_ops_slower_is_less() -> None:
    assert judged("mean:0%", 1.0, 0.5).passed
    assert judged("ops:5%", 1.0, 0.5).passed
    (failure,) = judged("ops:5%", 1.0, 1.25).failures
    assert failure.change == pytest.approx(20)
    assert failure.reason == "ops fell by 20%, from 1 to 0.8; the limit is ops:5%"


def test_a_benchmark_that_is_gone_fails_once_and_a_new_one_is_said() -> None:
    found = judge([parse("min:5%"), parse("max:5%")], export(a=[1.0], b=[1.0]), export(a=[1.0], c=[9.0]))
    (failure,) = found.failures
    assert (failure.fullname, failure.limit) == ("b", None)
    assert "missing" in failure.reason
    assert (found.judged, found.added, found.passed) == (("a", "b"), ("c",), False)


def test_every_limit_counts() -> None:
    found = judge([parse("min:5%"), parse("max:5%")], export(a=[1.0, 2.0]), export(a=[1.0, 3.0]))
    assert [str(failure.limit) for failure in found.failures] == ["max:5%"]


def test_from_zero_to_anything_is_too_much_and_to_zero_is_not() -> None:
    assert not judge([parse("stddev:500%")], export(a=[1.0]), export(a=[1.0, 1.1])).passed
    assert judge([parse("stddev:0%")], export(a=[1.0]), export(a=[1.0])).passed


@pytest.mark.parametrize("value", [None, "fast", float("nan"), True])
@pytest.mark.parametrize("side", ["baseline", "candidate"])
def test_a_statistic_that_is_no_number_fails(value: object, side: str) -> None:
    files = {"baseline": export(a=[1.0]), "candidate": export(a=[1.0])}
    files[side]["benchmarks"][0]["stats"]["median"] = value
    (failure,) = judge([parse("median:5%")], files["baseline"], files["candidate"]).failures
    assert failure.reason == f"the {side} has no number for median"


def test_what_would_pass_anything_is_refused() -> None:
    with pytest.raises(ValueError, match="no benchmark"):
        judge([parse("min:5%")], export(), export(a=[1.0]))
    with pytest.raises(ValueError, match="at least one limit"):
        judge([], export(a=[1.0]), export(a=[1.0]))
