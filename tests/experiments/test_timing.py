"""The clock's protocols under a clock that the test moves."""

import itertools
from collections.abc import Callable, Iterator

import pytest

from te_bench.experiments import timing


class Clock:
    """perf_counter that only the timed call moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Iterator[float]):
        self.now, self.calls, self.seconds = 100.0, 0, seconds
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def call(self) -> None:
        self.calls += 1
        self.now += next(self.seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterator[float]], Clock]:
    return lambda seconds: Clock(monkeypatch, seconds)


def test_bench_py_keeps_each_of_twenty_steps_after_ten(clock: Callable[[Iterator[float]], Clock]) -> None:
    watched = clock(float(i) for i in itertools.count(1))
    assert timing.bench_py(watched.call, "cpu") == [float(i) for i in range(11, 31)]
    assert watched.calls == 30


def test_quickstart_keeps_each_of_fifty_iterations_after_fifty(clock: Callable[[Iterator[float]], Clock]) -> None:
    watched = clock(float(i) for i in itertools.count(1))
    assert timing.quickstart(watched.call, "cpu") == [float(i) for i in range(51, 101)]
    assert watched.calls == 100


def test_kernel_stops_as_soon_as_the_median_is_known(clock: Callable[[Iterator[float]], Clock]) -> None:
    watched = clock(itertools.repeat(1e-3))
    samples = timing.kernel(watched.call, "cpu")
    assert len(samples) == timing.KERNEL_MIN
    assert samples == pytest.approx([1e-3] * timing.KERNEL_MIN)
    assert watched.calls == timing.KERNEL_WARMUP + timing.KERNEL_MIN


def test_kernel_goes_on_while_the_median_is_not_known_up_to_the_cap(clock: Callable[[Iterator[float]], Clock]) -> None:
    watched = clock(itertools.cycle([1e-3, 2e-3]))
    assert len(timing.kernel(watched.call, "cpu")) == timing.KERNEL_MAX


def test_kernel_stops_after_three_seconds_but_not_before_thirty_samples(
    clock: Callable[[Iterator[float]], Clock],
) -> None:
    assert len(timing.kernel(clock(itertools.cycle([1.0, 2.0])).call, "cpu")) == timing.KERNEL_MIN
    samples = timing.kernel(clock(itertools.cycle([0.02, 0.04])).call, "cpu")  # 0.03 s each: 100 of them are 3 s
    assert 100 <= len(samples) <= 102


def test_kernel_sees_an_interval_narrow_with_samples(clock: Callable[[Iterator[float]], Clock]) -> None:
    """Uniform within 5 %: the order statistics close in on the median like 1 / sqrt(n)."""
    watched = clock(1e-3 * (1 + 0.05 * ((i * 0.6180339887) % 1 - 0.5)) for i in itertools.count())
    samples = timing.kernel(watched.call, "cpu")
    assert timing.KERNEL_MIN < len(samples) < timing.KERNEL_MAX
    assert timing._half_width(samples) <= timing.KERNEL_HALF_WIDTH < timing._half_width(samples[:-1])


def test_the_interval_is_the_order_statistics_one() -> None:
    """n = 30: the 11th and the 21st of 30 (binomial 2.5 % and 97.5 % points of 30 fair coins are 10 and 20)."""
    assert timing._half_width([float(i) for i in range(30, 0, -1)]) == pytest.approx((21 - 11) / 2 / 15.5)
