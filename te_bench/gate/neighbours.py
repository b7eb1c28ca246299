"""Measure how much trials on a host's other places disturb the time of one trial.

A round times the trial three times in fresh processes on the first place: alone, beside others, alone. In the second run
every other place repeats the same trial with seeds of its own until the timed run ends, so the timed run meets every phase
of its neighbours. A round's ratio is the time beside others over the geometric mean of the two times alone; a steady drift
cancels. The ratio of the two times alone, inverted in every other round, shows the error of such a ratio without neighbours.
"""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from te_bench.experiments import plan
from te_bench.experiments.runner import Supervisor
from te_bench.experiments.spec import Options, Record, Trial
from te_bench.gate.revision_process import WARM_UP
from te_bench.gate.slowdown import Estimate, estimate
from te_bench.reports.analysis.measures import seconds_of
from te_bench.reports.analysis.rows import TIMED

FILE = "neighbours.jsonl"
FEWEST = 2  # rounds
LEVEL = 0.025  # of each side of a 95 % interval
NEIGHBOURS = 10_000  # the neighbours' first seed

Place = str | None
Supervise = Callable[[], Supervisor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance:
    """The result of `rounds` rounds: ratios of times, each with its 95 % interval."""

    trial: Trial
    places: int
    rounds: int
    alone_s: float  # median over rounds
    unchanged: Estimate
    beside: Estimate


def first_timed(suite: str, options: Options, only: str | None) -> Trial:
    """Return the first timed trial of a suite. Raise ValueError if it times none."""
    found = [trial for trial in plan.resolve(suite, options, only=only).trials if trial.protocol in WARM_UP]
    if not found:
        raise ValueError(f"the suite {suite} times no trial; choose another")
    return found[0]


def measure(
    trial: Trial,
    places: Sequence[Place],
    supervise: Supervise,
    directory: Path,
    *,
    rounds: int,
    say: Callable[[str], None],
) -> Disturbance:
    """Run the rounds; append each as a line to DIR/neighbours.jsonl. Raise ValueError if a trial does not end ok."""
    if rounds < FEWEST:
        raise ValueError(f"--rounds {rounds}: give {FEWEST} or more, for an interval")
    if len(places) < 2:
        raise ValueError("a trial has neighbours only if there are two places or more; this host has one")
    path = directory / FILE
    if path.exists():
        raise ValueError(f"{path} has the rounds of an earlier run; give another --out")
    directory.mkdir(parents=True, exist_ok=True)
    found: list[tuple[float, float, float]] = []
    for number in range(rounds):
        this = replace(trial, seed=number)
        records = [_timed(this, at, supervise) for at in (places[:1], places, places[:1])]
        before, beside, after = map(_seconds, records)
        found.append((before, beside, after))
        states = [dict(record.device_state) for record in records]
        line: dict[str, Any] = {"trial": this.to_json(), "places": len(places), "alone_s": [before, after]}
        with path.open("a") as file:
            file.write(json.dumps({**line, "beside_s": beside, "device_states": states}) + "\n")
        said = " ".join(f"{1e3 * seconds:.4g}" for seconds in (before, beside, after))
        say(f"round {number + 1} of {rounds}: alone, beside, alone: {said} ms")
    return judged(trial, len(places), found)


def judged(trial: Trial, places: int, rounds: Sequence[tuple[float, float, float]]) -> Disturbance:
    """Return the ratios of rounds, each (seconds alone, beside others, alone again)."""
    turns = [math.log(after / before) * (-1) ** number for number, (before, _, after) in enumerate(rounds)]
    return Disturbance(
        trial=trial,
        places=places,
        rounds=len(rounds),
        alone_s=statistics.median(math.sqrt(before * after) for before, _, after in rounds),
        unchanged=estimate(turns),
        beside=estimate([math.log(beside / math.sqrt(before * after)) for before, beside, after in rounds]),
    )


def _timed(trial: Trial, places: Sequence[Place], supervise: Supervise) -> Record:
    """Return the trial's record on the first place, while the other places run it with other seeds, started earlier."""
    supervisor = supervise()
    seed = NEIGHBOURS
    try:
        for place in places[1:]:
            supervisor.submit(replace(trial, seed=seed), place)
            seed += 1
        supervisor.submit(trial, places[0])
        while True:
            for record in supervisor.ended():
                if record.outcome != "ok":
                    raise ValueError(f"{record.trial.name} ended {record.outcome}: {record.reason}")
                if record.trial.id == trial.id:
                    return record
                supervisor.submit(replace(trial, seed=seed), supervisor.free.pop())
                seed += 1
    finally:
        supervisor.kill()


def _seconds(record: Record) -> float:
    """Return the sum of the medians of the trial's timed calls, in seconds. Raise ValueError for an untimed record."""
    medians = [statistics.median(found) for sample in TIMED if (found := seconds_of(record, sample))]
    if not medians:
        raise ValueError(f"{record.trial.name} was not timed; choose another by --only")
    return sum(medians)


def sentences(found: Disturbance) -> list[str]:
    """Return the answer: how much longer a trial takes beside others, and the error of that ratio."""
    others = "1 other" if found.places == 2 else f"{found.places - 1} others"
    worst = 100 * (math.exp(found.beside.log_ratio + found.beside.bound(LEVEL)) - 1)
    bound = f"at most {worst:.{0 if worst >= 10 else 2}f} % longer" if worst > 0 else "no longer"
    return [
        f"{found.trial.name.rpartition('/')[0]}: {1e3 * found.alone_s:.4g} ms alone, {found.rounds} rounds",
        f"alone against alone {_interval(found.unchanged)}",
        f"beside {others} {_interval(found.beside)}: {bound}, with 97.5 % confidence",
    ]


def _interval(one: Estimate) -> str:
    away = one.bound(LEVEL)
    low, high = (math.exp(one.log_ratio + sign * away) for sign in (-1, 1))
    return f"x{one.ratio:.4f} [{low:.4f}, {high:.4f}]"
