"""What neighbours cost a timing: who runs beside whom, and what rounds come to."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driving import Run

from te_bench.experiments.spec import Options, Record, Trial
from te_bench.gate import neighbours

TRIAL = Trial(workload="ceilings", device="cpu", problem={"edge": 1}, attention="none", protocol="kernel")


class Host:
    """Supervisors whose trials take `alone` seconds, and `beside` with others; the neighbours end three times as often."""

    def __init__(self, alone: float, beside: float, outcome: str = "ok"):
        self.times, self.outcome, self.log = (alone, beside), outcome, []  # type: ignore[var-annotated]

    def supervise(self) -> Any:
        self.log.append([])
        return Supervisor(self, self.log[-1])


class Supervisor:
    def __init__(self, host: Host, log: list[Any]):
        self.host, self.log, self.free, self.running = host, log, [], []  # type: ignore[var-annotated]

    def submit(self, trial: Trial, place: str | None) -> None:
        assert place not in [taken for _, taken in self.running]
        self.log.append((trial.seed, place))
        self.running.append((trial, place))

    def ended(self) -> Iterator[Record]:
        beside = [one for one in self.running if one[0].seed >= neighbours.NEIGHBOURS]
        own = next(one for one in self.running if one not in beside)
        trial, place = beside[0] if beside and len(self.log) < 6 else own
        self.running.remove((trial, place))
        self.free.append(place)
        seconds = self.host.times[bool(beside)]
        ok = {"samples": {"latency_s": [seconds] * 3}} if self.host.outcome == "ok" else {"reason": "it is full"}
        yield Record(trial=trial, environment="e", outcome=self.host.outcome, started_at="", wall_s=1.0, **ok)  # type: ignore[arg-type]

    def kill(self) -> None:
        self.log.append("killed")


def measured(host: Host, directory: Path, **asked: Any) -> neighbours.Disturbance:
    more = {"rounds": 2, "say": lambda line: None, **asked}
    return neighbours.measure(TRIAL, ["a", "b", "c"], host.supervise, directory, **more)


def test_a_round_times_it_alone_beside_others_on_every_place_and_alone(tmp_path: Path) -> None:
    host = Host(alone=0.010, beside=0.011)
    found = measured(host, tmp_path)
    assert found.beside.ratio == pytest.approx(1.1)
    assert found.unchanged.ratio == pytest.approx(1)
    assert found.alone_s == pytest.approx(0.010)
    for number, phases in enumerate((host.log[:3], host.log[3:])):
        before, beside, after = phases
        assert before == after == [(number, "a"), "killed"]
        first, second, own, *again, last = beside
        assert (first[1], second[1], own, last) == ("b", "c", (number, "a"), "killed")
        assert again  # whoever ends begins anew at the same place
        assert {place for _, place in again} <= {"b", "c"}
        assert len({seed for seed, _ in beside[:-1]}) == len(beside[:-1])
    lines = [json.loads(line) for line in (tmp_path / neighbours.FILE).read_text().splitlines()]
    assert [(line["alone_s"], line["beside_s"], line["places"]) for line in lines] == [([0.01, 0.01], 0.011, 3)] * 2


def test_a_steady_drift_is_no_disturbance() -> None:
    drifting = [tuple(0.01 * 1.01 ** (3 * number + turn) for turn in range(3)) for number in range(6)]
    found = neighbours.judged(TRIAL, 8, drifting)  # type: ignore[arg-type]
    assert found.beside.ratio == pytest.approx(1)
    assert found.unchanged.ratio == pytest.approx(1, abs=0.02)


def test_the_bound_is_the_upper_end_of_the_interval() -> None:
    rounds = [(0.010, 0.010 * (1.02 + 0.01 * (-1) ** number), 0.010) for number in range(8)]
    found = neighbours.judged(TRIAL, 8, rounds)
    _, unchanged, beside = neighbours.sentences(found)
    assert unchanged == "alone against alone x1.0000 [1.0000, 1.0000]"
    upper = math.exp(found.beside.log_ratio + found.beside.bound(neighbours.LEVEL))
    assert 1.02 < upper < 1.04
    assert beside.startswith(
        f"beside 7 others x{found.beside.ratio:.4f} [{found.beside.ratio**2 / upper:.4f}, {upper:.4f}]"
    )
    assert beside.endswith(f"at most {100 * (upper - 1):.2f} % longer, with 97.5 % confidence")


def test_a_large_bound_is_said_in_whole_percent() -> None:
    found = neighbours.judged(TRIAL, 2, [(0.010, 0.012, 0.010), (0.010, 0.030, 0.010)])
    upper = math.exp(found.beside.log_ratio + found.beside.bound(neighbours.LEVEL))
    assert upper > 100
    assert f"at most {100 * (upper - 1):.0f} % longer" in neighbours.sentences(found)[-1]


@pytest.mark.parametrize(
    ("asked", "message"),
    [({"rounds": 1}, "--rounds 1: give 2 or more, for an interval"), ({}, "ended oom: it is full")],
)
def test_what_gives_no_answer_is_an_error(tmp_path: Path, asked: dict[str, Any], message: str) -> None:
    host = Host(1, 1, outcome="oom")
    with pytest.raises(ValueError, match=message):
        measured(host, tmp_path, **asked)
    assert all(phase[-1] == "killed" for phase in host.log)


def test_earlier_rounds_are_not_overwritten_and_one_place_has_no_neighbour(tmp_path: Path) -> None:
    host = Host(1, 1)
    measured(host, tmp_path)
    with pytest.raises(ValueError, match="give another --out"):
        measured(host, tmp_path)
    with pytest.raises(ValueError, match="two places or more; this host has one"):
        neighbours.measure(TRIAL, [None], host.supervise, tmp_path, rounds=2, say=print)


def test_a_suite_that_times_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="the suite memory times no trial; choose another"):
        neighbours.first_timed("memory", Options(device="cuda"), None)


@pytest.mark.slow
def test_on_a_cpu_by_real_processes_of_which_none_stays(tmp_path: Path) -> None:
    only = "*t128-d32-full/math/*"
    asked = ("attention", "--device", "cpu", "--only", only, "--rounds", "2", "--out", tmp_path)
    run = Run(
        "neighbours", *asked, main=None, env={"OMP_NUM_THREADS": "1"}
    )  # of two threads each waits for the other's
    done = run.finish()
    assert done.returncode == 0, done.stderr
    assert run.gone()
    *_, unchanged, beside = done.stdout.splitlines()
    assert unchanged.startswith("alone against alone x")
    assert re.fullmatch(r"beside 1 other x[\d.]+ \[[\d.]+, [\d.]+\]: .*, with 97.5 % confidence", beside)
    assert len((tmp_path / neighbours.FILE).read_text().splitlines()) == 2
