"""Read published answers, which advise wrote: DIR/MODEL/advice.json. No torch."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from te_bench.advice.candidates import Choice
from te_bench.experiments.store import load, written
from te_bench.reports.analysis import naming
from te_bench.reports.analysis.measures import Ratio, of_processes

FIELDS = tuple(Choice.__slots__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One model's. have: what its user has; use: what is advised, None where that is undecided.

    best: the fastest measured step that needs nothing of te-bench's, which may be `have`; over: how many times as fast as it
    the advised step is. over_rivals: the same for each other project's fastest step. untimed: rivals that have no time.
    bf16: te-bench's fastest measured step in bf16, None where none was measured.
    stored: all of advice.json, which lies in `folder`.
    """

    folder: Path
    have: Choice
    use: Choice | None
    speedup: Ratio | None
    best: Choice | None
    over: float | None
    over_rivals: Mapping[str, float]
    untimed: tuple[str, ...]
    bf16: Choice | None
    seconds: Mapping[Choice, float]
    stored: Mapping[str, Any]

    @property
    def model(self) -> str:
        return self.folder.name

    @property
    def is_ours(self) -> bool:
        """Whether the advised step is te-bench's."""
        return self.use is not None and not self.use.of_others


def stored_answers(directory: Path) -> list[Answer]:
    """Return the answers in the folder's subfolders, by model. Raises ValueError if there is none or one is invalid."""
    found = [_answer(path.parent, stored) for path, stored in _stored(directory)]
    if not found:
        raise ValueError(f"{directory} holds no advice.json in its subfolders: give the folder above advise's folders")
    return found


def energy(one: Answer) -> float | None:
    """Return the advised step's joules as a share of those of the user's step; None where one was not counted."""
    if not written(one.folder):
        return None
    ran = {choice(step): step["records"] for step in one.stored["steps"]}
    ok = {record.trial.id: record for record in load(one.folder).records.values() if record.outcome == "ok"}
    use, have = (
        of_processes([ok[trial] for trial in ran.get(step, ()) if trial in ok], "energy_j") if step else None
        for step in (one.use, one.have)
    )
    return use / have if use and have else None


def choice(said: Mapping[str, Any]) -> Choice:
    return Choice(**{name: said[name] for name in FIELDS if name in said})


def _stored(directory: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(directory.glob("*/advice.json")):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} was not written by te-bench advise: {error}") from None
        if not isinstance(found, dict) or not found.keys() >= {"question", "answer", "steps", "predictions"}:
            raise ValueError(f"{path} was not written by te-bench advise: it has no question and answer")
        yield path, found


def _answer(folder: Path, stored: dict[str, Any]) -> Answer:
    said = stored["answer"]
    have, use = choice(said["have"]), choice(said["use"])
    seconds = {choice(step): float(step["seconds"]) for step in stored["steps"]}
    paired = {have: said["speedup"]["value"]} if said["speedup"] else {}  # preferred to ratios of means
    if best_other := said.get("over_best"):
        paired[choice(best_other)] = best_other["ratio"]["value"]
    over = {
        other: 1.0 if other == use else paired.get(other, took / seconds[use])
        for other, took in sorted(seconds.items(), key=lambda step: step[1])
        if other.of_others and use in seconds
    }
    best = next(iter(over), None)
    in_bf16 = [one for one in seconds if one.precision == "bf16" and not one.of_others]
    by_rival: dict[str, float] = {}
    for other, ratio in over.items():
        if other.begins != have.begins:
            by_rival.setdefault(other.begins, ratio)
    return Answer(
        folder=folder,
        have=have,
        use=use if said["undecided"] is None else None,
        speedup=_ratio(said["speedup"]),
        best=best,
        over=over[best] if best else None,
        over_rivals=by_rival,
        untimed=tuple(naming.rival_name(name) for name in said.get("unmeasured_rivals") or ()),
        bf16=min(in_bf16, key=lambda one: seconds[one], default=None),
        seconds=seconds,
        stored=stored,
    )


def _ratio(said: dict[str, Any] | None) -> Ratio | None:
    return None if said is None else Ratio(value=said["value"], n=said["pairs"], low=said["low"], high=said["high"])
