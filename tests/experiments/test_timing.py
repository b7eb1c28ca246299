"""The clock's protocols under a clock that the test moves."""

import contextlib
import itertools
import statistics
import types
from collections.abc import Callable, Iterator

import pytest
from launches import launched_slowly
from scipy import stats

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


@pytest.mark.parametrize(("protocol", "warm_up", "timed"), [(timing.bench_py, 10, 20), (timing.quickstart, 50, 50)])
def test_each_step_after_those_that_warm_up_is_kept(clock, protocol, warm_up, timed):
    watched = clock(float(i) for i in itertools.count(1))
    assert protocol(watched.call, "cpu") == [float(i) for i in range(warm_up + 1, warm_up + timed + 1)]
    assert watched.calls == warm_up + timed


def test_kernel_stops_as_soon_as_the_median_is_known(clock: Callable[[Iterator[float]], Clock]) -> None:
    watched = clock(itertools.repeat(1e-3))
    samples = timing.kernel(watched.call, "cpu")
    assert len(samples) == timing.KERNEL_MIN
    assert samples == pytest.approx([1e-3] * timing.KERNEL_MIN)
    assert watched.calls == timing.KERNEL_WARMUP + timing.KERNEL_MIN


def test_kernel_goes_on_while_the_median_is_not_known_up_to_the_cap(clock: Callable[[Iterator[float]], Clock]) -> None:
    watched = clock(itertools.cycle([1e-3, 2e-3]))
    assert len(timing.kernel(watched.call, "cpu")) == timing.KERNEL_MAX


def test_kernel_stops_after_three_seconds_but_not_before_thirty_samples(clock):
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


def test_the_points_of_fair_coins_are_scipys() -> None:
    for n in (*range(1, timing.KERNEL_MAX + 1), 2000):  # 2^2000 is no float
        assert [timing.binomial_quantile(q, n) for q in (0.025, 0.975)] == list(stats.binom.ppf((0.025, 0.975), n, 0.5))


class Stream:
    """torch.cuda as far as the clock needs it: notes what happens in which order; every elapsed time is 1 ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.log: list[str] = []
        self.held: list[int] = []
        noted = self.log.append

        class Event:
            def __init__(self, *, enable_timing: bool):
                assert enable_timing

            def record(self) -> None:
                noted("event")

            def elapsed_time(self, other: "Event") -> float:
                return 1.0

        cuda = types.SimpleNamespace(
            Event=Event,
            synchronize=lambda: noted("wait"),
            _sleep=self.hold,
            get_device_properties=lambda: types.SimpleNamespace(L2_cache_size=8),
        )
        flush = types.SimpleNamespace(zero_=lambda: noted("flush"))
        fake = types.SimpleNamespace(cuda=cuda, empty=lambda *_, **__: flush, int8=None)
        monkeypatch.setattr(timing, "torch", fake)

    def call(self) -> None:
        self.log.append("call")

    def hold(self, cycles: int) -> None:
        self.log.append("hold")
        self.held.append(cycles)

    def look(self) -> None:
        self.log.append("look")


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    return Stream(monkeypatch)


@pytest.mark.parametrize(("protocol", "warm_up", "timed"), [(timing.bench_py, 10, 20), (timing.quickstart, 50, 50)])
def test_steps_in_a_row_are_looked_at_before_the_first_and_after_the_last(stream, protocol, warm_up, timed):
    with timing.looking(stream.look):
        assert protocol(stream.call, "cuda") == [1e-3] * timed
    steps = ["call", "event"] * timed
    assert stream.log == ["call"] * warm_up + ["wait", "look", "event", *steps, "wait", "look"]


def test_a_kernel_is_looked_at_around_every_ten_calls_and_never_between_their_events(stream: Stream) -> None:
    with timing.looking(stream.look):
        assert timing.kernel(stream.call, "cuda") == [1e-3] * timing.KERNEL_MIN
    block = ["hold", *["flush", "event", "call", "event"] * 10, "wait", "look"]
    assert stream.log == ["call"] * timing.KERNEL_WARMUP + ["look", *block * 4]  # the first ten do not count


def test_the_gpu_waits_for_the_host_as_long_as_the_first_ten_took_and_more(stream, monkeypatch):
    for seconds, expected in ((2e-4, 1.5 * 10 * 2e-4), (1.0, timing.KERNEL_HELD)):
        stream.held.clear()
        now = itertools.count()
        host = types.SimpleNamespace(perf_counter=lambda s=seconds, n=now: 10 * s * next(n))
        with monkeypatch.context() as patch:
            patch.setattr(timing, "time", host)
            sample = timing._sample_cuda(stream.call)
            for _ in range(3):  # who waits for the GPU waits for the hold, too, which must not lengthen the next
                sample()
        assert stream.held == [0, *[pytest.approx(expected * timing.KERNEL_CLOCK)] * 3]


@pytest.mark.gpu
def test_what_is_launched_slowly_is_not_timed_as_long_as_its_launch() -> None:
    assert statistics.median(timing.kernel(launched_slowly(), "cuda")) < 1e-4


def test_nobody_looks_on_a_cpu_nor_after_the_trial(stream: Stream, clock: Callable[[Iterator[float]], Clock]) -> None:
    with timing.looking(stream.look):
        timing.bench_py(clock(itertools.repeat(1e-3)).call, "cpu")
        timing.kernel(clock(itertools.repeat(1e-3)).call, "cpu")
    with contextlib.suppress(KeyError), timing.looking(stream.look):
        raise KeyError
    timing.bench_py(stream.call, "cuda")
    assert "look" not in stream.log
