"""Trials on one GPU take turns: threads stand for processes, for a lock is its descriptor's."""

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from te_bench.experiments import exclusive, timing
from te_bench.experiments.instruments import profiling
from te_bench.experiments.spec import Trial

NAP = 0.05


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")


def a_trial(protocol: str = "kernel", device: str = "cuda", world: int | None = None) -> Trial:
    problem = {} if world is None else {"world": world, "parallel": "ddp"}
    return Trial(workload="linear", device=device, problem=problem, attention="-", protocol=protocol)


class Spans:
    """When each of several trials worked, and when it was timed."""

    def __init__(self) -> None:
        self.working: list[tuple[int, float, float]] = []
        self.timed: list[tuple[int, float, float]] = []

    @contextlib.contextmanager
    def span(self, of: list[tuple[int, float, float]], name: int) -> Iterator[None]:
        began = time.perf_counter()
        yield
        of.append((name, began, time.perf_counter()))

    def rank(
        self, name: int, number: int, trial: Trial, ready: threading.Barrier, all_there: threading.Barrier
    ) -> None:
        with exclusive.of_ranks(number, lambda: all_there.wait(10) and None):
            self.trial(name, trial, ready)

    def trial(self, name: int, trial: Trial, ready: threading.Barrier) -> None:
        with exclusive.taking_turns(trial):
            ready.wait(10)  # all of them work at the same time
            with self.span(self.working, name):
                time.sleep(NAP)
            with exclusive.alone(), self.span(self.timed, name):
                time.sleep(NAP)
            with self.span(self.working, name):
                time.sleep(NAP)

    def run(self, trials: list[Trial]) -> None:
        ready = threading.Barrier(len(trials))
        threads = [threading.Thread(target=self.trial, args=(n, t, ready)) for n, t in enumerate(trials)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(self.timed) == len(trials)
        assert len(self.working) == 2 * len(trials)

    def disturbed(self) -> list[tuple[int, int]]:
        """Pairs of a timed trial and another that worked, or was timed, meanwhile."""
        return [
            (name, other)
            for name, began, ended in self.timed
            for other, start, end in [*self.working, *self.timed]
            if other != name and start < ended and began < end
        ]


def test_none_is_timed_while_another_works_or_is_timed() -> None:
    spans = Spans()
    spans.run([a_trial(), a_trial("bench_py"), a_trial("once")])
    assert spans.disturbed() == []


def test_a_trial_over_several_gpus_is_timed_alone_on_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three, two of two and two of one GPU, again and again: nobody waits for whom waits for it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-3,GPU-1,GPU-2")
    spans, worlds = Spans(), (3, 2, 2, 1, 1)
    ready = threading.Barrier(sum(worlds))
    threads = []
    for name, world in enumerate(worlds):
        all_there = threading.Barrier(world)
        threads += [
            threading.Thread(target=spans.rank, args=(name, number, a_trial(world=world), ready, all_there))
            for number in range(world)
        ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(spans.timed) == sum(worlds)
    assert spans.disturbed() == []


def test_the_gpus_are_given_back_when_the_slowest_rank_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1,GPU-2")
    all_there, spans = threading.Barrier(2), Spans()
    started = threading.Event()

    def rank(number: int) -> None:
        of_ranks = exclusive.of_ranks(number, lambda: all_there.wait(10) and None)
        with of_ranks, exclusive.taking_turns(a_trial(world=2)), exclusive.alone(), spans.span(spans.timed, 0):
            started.set()
            time.sleep(NAP * (1 + 4 * number))

    def other() -> None:
        started.wait(10)
        with exclusive.taking_turns(a_trial()), spans.span(spans.working, 1):
            pass

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)] + [threading.Thread(target=other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(spans.timed) == 2
    assert len(spans.working) == 1
    assert spans.disturbed() == []


def test_no_rank_works_before_the_first_holds_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1,GPU-2")
    all_there, began = threading.Barrier(2), list[float]()

    def rank(number: int) -> None:
        with exclusive.of_ranks(number, lambda: all_there.wait(10) and None), exclusive.taking_turns(a_trial(world=2)):
            began.append(time.perf_counter())

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    with exclusive.taking_turns(a_trial(world=2)), exclusive.alone():
        for thread in threads:
            thread.start()
        time.sleep(4 * NAP)
        ended = time.perf_counter()
    for thread in threads:
        thread.join(10)
    assert len(began) == 2
    assert min(began) >= ended


def test_a_trial_holds_those_gpus_that_it_uses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1,GPU-2,GPU-3")
    with exclusive.taking_turns(a_trial(world=2)):
        assert {path.name.split(".")[0] for path in tmp_path.iterdir()} == {"te-bench-GPU-1", "te-bench-GPU-2"}


def test_ranks_are_profiled_from_one_moment_on() -> None:
    """A profiler that begins late in one of them would show all others' collectives waiting for it."""
    order: list[str] = []
    with exclusive.of_ranks(1, lambda: order.append("meet")):
        profiling.kernel_seconds(lambda: order.append("call"), "cpu")
    assert order == ["meet", *["call"] * profiling.PROFILED]


@pytest.mark.parametrize("other", [a_trial("curve"), a_trial("bisection"), a_trial(device="cpu")])
def test_a_training_and_a_cpu_keep_nobody_waiting(other: Trial) -> None:
    spans = Spans()
    spans.run([other, other])
    assert spans.disturbed() != []


def test_the_lock_ends_with_its_trial_also_where_it_raises() -> None:
    with pytest.raises(RuntimeError), exclusive.taking_turns(a_trial()), exclusive.alone():
        raise RuntimeError
    began = time.perf_counter()
    with exclusive.taking_turns(a_trial()), exclusive.alone():
        assert time.perf_counter() - began < 5


def test_a_part_of_a_gpu_has_a_lock_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-GPU-1/7/0")
    with exclusive.taking_turns(a_trial()), exclusive.alone():
        assert {path.name for path in tmp_path.iterdir()} == {
            f"te-bench-MIG-GPU-1-7-0.{k}.lock" for k in ("gate", "work")
        }


def test_a_lock_is_every_user_s(tmp_path: Path) -> None:
    mask = os.umask(0o077)
    try:
        with exclusive.taking_turns(a_trial()):
            assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}
    finally:
        os.umask(mask)


def test_nobody_starves_of_four_that_go_on_and_on() -> None:
    """Each builds for NAP and is timed in no time; a fair share of 2 s is 40 NAPs of building, side by side."""
    done, ended = [0] * 4, time.perf_counter() + 40 * NAP

    def go(name: int) -> None:
        while time.perf_counter() < ended:
            with exclusive.taking_turns(a_trial()):
                time.sleep(NAP)
                with exclusive.alone():
                    done[name] += 1

    threads = [threading.Thread(target=go, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert min(done) >= 5
    assert max(done) <= 3 * min(done)


def test_every_timed_block_asks_to_be_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = 0

    @contextlib.contextmanager
    def counted() -> Iterator[None]:
        nonlocal inside
        inside += 1
        yield

    monkeypatch.setattr(exclusive, "alone", counted)
    for protocol in (timing.bench_py, timing.quickstart, timing.kernel):
        protocol(lambda: None, "cpu")
    assert inside == 3
