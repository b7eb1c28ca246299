"""The order of it: survey, whole steps, the parts that decide, predictions, verification by whole steps. No torch.

Every measurement is a trial, carried out and recorded as those of any suite: what was measured before is not measured again.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from te_bench.advice import parts, predict
from te_bench.advice.candidates import COMPILED, Choice, Question
from te_bench.advice.parts import Made, Part, PartTime
from te_bench.advice.predict import Frame, Prediction
from te_bench.experiments.spec import Record, Trial
from te_bench.reports.analysis.measures import highest, numbers, of_process

SEEDS = 3  # of the winner and of what the user has, where the budget holds them
VERIFIED = 3  # choices that are verified, at least; more while a better one is predicted
MOST_VERIFIED = 6
CLOSE = 1.02  # times the fastest verified step: such a step is measured as often as that one
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_rss_bytes")

#: Seconds of a trial before any was run, by device and kind, of a small model; the run's own replace them.
USUAL = {
    "cuda": {"survey": 15.0, "eager": 15.0, "compiled": 60.0, "part": 5.0},
    "cpu": {"survey": 4.0, "eager": 4.0, "compiled": 40.0, "part": 1.5},
}

CarryOut = Callable[[Sequence[Trial]], Sequence[Record]]
Say = Callable[[str], None]


class NothingMeasured(Exception):
    """No step that could be advised ended ok; the message says what became of them."""


@dataclass(slots=True)
class Pace:
    """How long trials take: the mean of those of their kind that have ended."""

    device: str
    walls: dict[str, list[float]] = field(default_factory=dict)

    def expected(self, trials: Iterable[Trial]) -> float:
        return sum(self._one(kind_of(trial)) for trial in trials)

    def _one(self, kind: str) -> float:
        walls = self.walls.get(kind, [])
        return sum(walls) / len(walls) if walls else USUAL[self.device][kind]

    def learn(self, records: Iterable[Record]) -> None:
        for record in records:
            self.walls.setdefault(kind_of(record.trial), []).append(record.wall_s)


def kind_of(trial: Trial) -> str:
    """Trials of one kind take about as long."""
    if trial.workload not in ("train_step", "survey"):
        return "part"
    return "survey" if trial.workload == "survey" else "compiled" if trial.mode in COMPILED else "eager"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What was measured for a question: the survey, records of steps by choice and seed, times of parts, predictions.

    predictions: as they were before anything was verified. left_out: what there was no time for. wrong: why choices have no
    record that counts.
    """

    question: Question
    made: Made
    survey: Record
    steps: Mapping[Choice, tuple[Record, ...]]
    times: Mapping[Part, PartTime]
    predictions: Mapping[Choice, Prediction]
    left_out: tuple[str, ...]
    wrong: Mapping[Choice, str]
    failed: Mapping[Part, str]  # parts without a time, whose choices are not predicted
    excluded: Mapping[Choice, float]  # by --memory: bytes
    seconds: float  # that all took


class Run:
    """One question being answered, within a budget of seconds."""

    def __init__(
        self, question: Question, carry_out: CarryOut, *, budget_s: float, memory: float | None, say: Say = print
    ):
        self.question, self.carry_out, self.memory, self.say = question, carry_out, memory, say
        self.started, self.budget_s = time.monotonic(), budget_s
        self.pace = Pace(question.device)
        self.records: dict[str, Record] = {}  # by trial id
        self.steps: dict[Choice, list[Record]] = {}
        self.wrong: dict[Choice, str] = {}
        self.failed: dict[Part, str] = {}
        self.left_out: list[str] = []

    @property
    def left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self.started)

    def gather(self) -> Evidence:
        """Raises NothingMeasured where not even a step of the model as it is can be looked at, or none ended ok."""
        self._announce()
        made, survey = self._survey()
        self._whole_steps()
        times = self._parts(made)
        predictions, excluded = self._predictions(made, times)
        self._verify(predictions)
        self._repeat()
        if not self.steps:
            raise NothingMeasured("; ".join(dict.fromkeys(self.wrong.values())) or "the budget held no step")
        return Evidence(
            question=self.question,
            made=made,
            survey=survey,
            steps={choice: tuple(records) for choice, records in self.steps.items()},
            times=times,
            predictions=predictions,
            left_out=tuple(self.left_out),
            wrong=self.wrong,
            failed=self.failed,
            excluded=excluded,
            seconds=time.monotonic() - self.started,
        )

    def _announce(self) -> None:
        """Before anything starts: how many trials, and about how long."""
        q = self.question
        whole = [q.trial(frame) for frame in q.frames]
        again = [q.trial(q.have)] * (VERIFIED + 2 * (SEEDS - 1))
        count = len(whole) + len(again) + 1
        expected = self.pace.expected([q.survey(), *whole, *again])
        minutes = max(1, round(min(expected * 1.5, self.budget_s) / 60))
        self.say(
            f"{q.title} on {q.device}: {len(q.choices)} combinations. {count} steps and the parts that decide are measured, "
            f"about {minutes} min; --budget allows {self.budget_s / 60:.3g}."
        )

    def _do(self, trials: Sequence[Trial]) -> list[Record]:
        fresh = [trial for trial in dict.fromkeys(t.id for t in trials) if trial not in self.records]
        wanted = [trial for trial in trials if trial.id in fresh]
        if wanted:
            done = list(self.carry_out(wanted))
            self.pace.learn(record for record in done if record.outcome == "ok")
            self.records |= {record.trial.id: record for record in done}
        return [self.records[trial.id] for trial in trials]

    def _step(self, choices: Sequence[tuple[Choice, int]]) -> None:
        """Whole steps by (choice, seed)."""
        for (choice, _), record in zip(
            choices, self._do([self.question.trial(choice, seed) for choice, seed in choices]), strict=True
        ):
            if record.outcome == "ok":
                self.steps.setdefault(choice, []).append(record)
            else:
                self.wrong[choice] = f"{record.outcome}: {record.reason}"

    def _affordable(self, trials: Sequence[Trial], reserve: float = 0.0) -> int:
        """How many of them, from the first on, the budget holds beside the reserve."""
        for number in range(len(trials)):
            if self.pace.expected(trials[: number + 1]) > self.left_s - reserve:
                return number
        return len(trials)

    def _repetitions(self, choice: Choice) -> float:
        """Seconds that it takes to run a choice and what the user has again, without which there is no interval."""
        return (SEEDS - 1) * self.pace.expected([self.question.trial(c) for c in (self.question.have, choice)])

    def _survey(self) -> tuple[Made, Record]:
        (record,) = self._do([self.question.survey()])
        if record.outcome != "ok":
            raise NothingMeasured(f"{self.question.model}: {record.outcome}: {record.reason}")
        return Made.of(record.work), record

    def _whole_steps(self) -> None:
        """What the user has whatever the budget; then the other frames, as far as it holds them."""
        frames = self.question.frames
        self._step([(frames[0], 0)])
        for frame in frames[1:]:
            if not self._affordable([self.question.trial(frame)], self._repetitions(frame)):
                self.left_out.append(f"steps by {frame.words()}")
                continue
            self._step([(frame, 0)])

    def _parts(self, made: Made) -> dict[Part, PartTime]:
        q = self.question
        applicable = [choice for choice in q.choices if q.frame(choice) in self.steps]
        wanted = parts.deciding(q, made, applicable)
        fastest = min(self.steps, key=lambda choice: typical(self.steps[choice]), default=q.have)
        reserve = VERIFIED * self.pace.expected([q.trial(fastest)]) + self._repetitions(fastest)
        many = self._affordable([parts.trial(q, part) for part in wanted], reserve)
        if many < len(wanted):
            names = dict.fromkeys(f"{part.workload} by {part.rival}" for part in wanted[many:])
            self.left_out.append(f"{len(wanted) - many} of {len(wanted)} parts alone ({', '.join(names)})")
        found = {}
        for part, record in zip(wanted[:many], self._do([parts.trial(q, p) for p in wanted[:many]]), strict=True):
            if (seconds := parts.time_of(part, record)) is not None:
                found[part] = seconds
            else:
                self.failed[part] = f"{record.outcome}: {record.reason}"
        return found

    def _predictions(
        self, made: Made, times: Mapping[Part, PartTime]
    ) -> tuple[dict[Choice, Prediction], dict[Choice, float]]:
        frames = {choice: frame_of(records) for choice, records in self.steps.items()}
        found = {c: predict.predict(self.question, made, c, frames, times) for c in self.question.choices}
        predictions = {choice: prediction for choice, prediction in found.items() if prediction is not None}
        excluded = {
            choice: prediction.memory
            for choice, prediction in predictions.items()
            if self.memory is not None and prediction.memory is not None and prediction.memory > self.memory
        }
        return predictions, excluded

    def _verify(self, predictions: Mapping[Choice, Prediction]) -> None:
        """Whole steps of the best as they are predicted, each prediction corrected by those before it."""
        for number in range(MOST_VERIFIED):
            measured = {choice: typical(records) for choice, records in self.steps.items()}
            correction = predict.corrected(predictions, measured)
            waiting = [
                prediction
                for choice, prediction in predictions.items()
                if choice not in self.steps and choice not in self.wrong and self._fits(prediction.memory)
            ]
            if not waiting:
                return
            best = min(waiting, key=correction.of)
            hoped = correction.of(best) - (best.bound_s if number < VERIFIED else 0.0)
            if hoped > min(measured.values()):
                return
            if not self._affordable([self.question.trial(best.choice)], self._repetitions(best.choice)):
                self.left_out.append(f"verification of {best.choice.words()} and what is slower")
                return
            self._step([(best.choice, 0)])

    def _fits(self, memory: float | None) -> bool:
        return self.memory is None or memory is None or memory <= self.memory

    def _repeat(self) -> None:
        """The fastest, those close to it and what the user has, in turn, with more seeds."""
        fitting = {choice: typical(records) for choice, records in self.steps.items() if self._fits(peak(records))}
        if not fitting:
            return
        ordered = sorted(fitting, key=lambda choice: fitting[choice])
        close = [choice for choice in ordered if fitting[choice] <= CLOSE * fitting[ordered[0]]][:3]
        have = [self.question.have] if self.question.have in self.steps else []
        chosen = list(dict.fromkeys([*close, *have]))
        if len(chosen) == 1:
            chosen += [choice for choice in ordered if choice not in chosen][:1]
        for seed in range(1, SEEDS):
            turn = chosen if seed % 2 == 0 else chosen[::-1]
            if self._affordable([self.question.trial(choice, seed) for choice in turn]) < len(turn):
                self.left_out.append(f"{SEEDS - seed} of {SEEDS} repetitions")
                return
            self._step([(choice, seed) for choice in turn])


def typical(records: Sequence[Record]) -> float:
    """Seconds of a step in the first of its processes, which all steps have."""
    return of_process(records[0], "latency_s") or float("inf")


def peak(records: Sequence[Record]) -> float | None:
    """Bytes at their peak: allocated, where that was recorded, else reserved, else resident."""
    return peaks(records)[0]


def peaks(*steps: Sequence[Record]) -> list[float | None]:
    """The peak of each step, all of the first kind that all have: torch's own graphs show what they reserve alone."""
    for sample in PEAKS:
        found = [highest(v for record in records for v in numbers(record.samples.get(sample))) for records in steps]
        if all(value is not None for value in found):
            return found
    return [None] * len(steps)


def frame_of(records: Sequence[Record]) -> Frame:
    return Frame(seconds=typical(records), memory=peak(records))
