"""The --compare-fail grammar: pytest-benchmark's own, with decimals."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_benchmark.utils import parse_compare_fail

from te_bench.reports.exchange.pytest_stats import STATS, Limit, parse, summary, why_exceeded


def exceeded(limit: str, before: list[float], after: list[float]) -> str | None:
    return why_exceeded(parse(limit), summary(before), summary(after))


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
def test_what_pytest_benchmark_can_say_it_says_too(stat, limit, unit, before, factor):
    """Its own checks are the reference, wherever its grammar, whole percentages, reaches."""
    rounds = [before, 1.1 * before, 1.3 * before]
    slower = [factor * value for value in rounds]
    theirs = parse_compare_fail(f"{stat}:{limit}{unit}").fails(summary(slower), summary(rounds))
    ours = exceeded(f"{stat}:{limit}{unit}", rounds, slower)
    if abs(100 * (factor - 1) - limit) > 1e-6:  # rounding decides exactly at the limit
        assert bool(theirs) == bool(ours)


def test_decimals_are_ours_alone() -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_compare_fail("median:2.5%")
    assert not exceeded("median:2.5%", [1.0], [1.024])
    assert exceeded("median:2.5%", [1.0], [1.026])


def test_seconds_are_seconds() -> None:
    assert not exceeded("min:0.002", [0.010], [0.0119])
    assert exceeded("min:0.002", [0.010], [0.0125]) == "min grew by 0.0025, from 0.01 to 0.0125; the limit is min:0.002"


def test_faster_passes_and_of_ops_slower_is_less() -> None:
    assert not exceeded("mean:0%", [1.0], [0.5])
    assert not exceeded("ops:5%", [1.0], [0.5])
    assert exceeded("ops:5%", [1.0], [1.25]) == "ops fell by 20%, from 1 to 0.8; the limit is ops:5%"


def test_from_zero_to_anything_is_too_much_and_to_zero_is_not() -> None:
    assert exceeded("stddev:500%", [1.0], [1.0, 1.1])
    assert not exceeded("stddev:0%", [1.0], [1.0])
