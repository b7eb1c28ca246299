"""Answer a question in this order: survey, steps, deciding parts, predictions, verification, compiled models. No torch.

Every measurement is a trial, run and recorded like those of any suite. A measured trial is not run again.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from te_bench.advice import parts, predict, room
from te_bench.advice.candidates import ATTENTIONS, WHOLE, Choice, Question
from te_bench.advice.parts import ATTENTION, Made, Part, PartTime
from te_bench.advice.predict import Prediction
from te_bench.advice.steps import CLOSE, Pace, frame_of, peak, typical
from te_bench.experiments.spec import Record, Trial
from te_bench.reports.convergence.planning import duration

SEEDS = 3  # runs of the winner and of the user's step, if the budget allows
WITH_PARTS = 1.5  # seconds of a whole answer over those of its steps: the deciding parts are timed, too
STEPS = "steps by "  # followed by the words of a choice
PARTS = "parts alone, on which predictions rest"
VERIFICATION, REPETITIONS = "verification of what is predicted to be faster", "repetitions of the fastest"
VERIFIED = 3  # choices to verify at least; more while a faster one is predicted
MOST_VERIFIED = 6

CarryOut = Callable[[Sequence[Trial]], Sequence[Record]]
Say = Callable[[str], None]


class NothingMeasured(Exception):
    """No step that could be advised ended ok; the message says how each ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """All that was measured for a question: the survey, steps by choice, times of parts, and predictions.

    predictions: those made before any verification. left_out: what the budget did not hold. wrong: why choices have no
    valid record. missing: the number of steps that a budget of whole_s seconds would add. waiting: predictions of unmeasured
    steps, corrected by the measured ones, fastest first; a budget of verified_s holds the first. repeated_s: seconds of the
    left-out repetitions alone. larger: steps of the fastest choice with more sequences, which fit. again: steps of that
    choice with checkpointed blocks, with the same number of sequences or more.
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
    excluded: Mapping[Choice, float]  # {choice that exceeds --memory: predicted bytes}
    seconds: float  # of the whole answer
    budget_s: float
    whole_s: float
    missing: int
    larger: Mapping[int, Record] = field(default_factory=dict)  # by batch
    again: Mapping[int, Record] = field(default_factory=dict)  # by batch
    waiting: tuple[Prediction, ...] = ()
    verified_s: float = 0.0
    repeated_s: float = 0.0

    @property
    def promising(self) -> Prediction | None:
        """The fastest unmeasured step, if the budget ended and it is predicted to be faster than every measured one."""
        least = min(map(typical, self.steps.values()), default=math.inf)
        found = (waiting for waiting in self.waiting if waiting.seconds + waiting.bound_s < least)
        return next(found, None) if VERIFICATION in self.left_out else None


class Run:
    """Answers one question within a budget of seconds."""

    def __init__(
        self,
        question: Question,
        carry_out: CarryOut,
        *,
        budget_s: float,
        memory: float | None,
        room: float | None = None,  # bytes of memory that exist
        known: Collection[str] = (),  # ids of trials that ended in an earlier run, and take no time
        say: Say = print,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.question, self.carry_out, self.memory, self.say = question, carry_out, memory, say
        self.room = room if memory is None else memory
        self.larger: dict[int, Record] = {}
        self.again: dict[int, Record] = {}
        self.clock, self.started, self.budget_s = clock, clock(), budget_s
        self.pace = Pace(question.device)
        self.known = set(known)
        self.records: dict[str, Record] = {}  # by trial id
        self.steps: dict[Choice, list[Record]] = {}
        self.wrong: dict[Choice, str] = {}
        self.failed: dict[Part, str] = {}
        self.left_out: dict[str, list[Trial]] = {}  # {what the budget did not hold: its trials}

    @property
    def left_s(self) -> float:
        return self.budget_s - (self.clock() - self.started)

    def gather(self) -> Evidence:
        """Return all evidence. Raises NothingMeasured if the survey fails or no step ends ok."""
        if self.budget_s:
            self._announce()
        made, survey = self._survey()
        self.question = self.question.with_head(made.converted_head)
        times: dict[Part, PartTime] = {}
        predictions: dict[Choice, Prediction] = {}

        def further(reserve: float, *, repeated: bool = False, first: bool = False) -> None:
            """Time parts, leave `reserve` seconds of the budget, and verify what can be predicted."""
            times.update(self._parts(made, reserve, first=first))
            predictions.update(self._predictions(made, times) | predictions)
            self._verify(predictions, repeated=repeated, first=first)

        def answer() -> None:
            """Verify predictions and repeat the fastest step and the user's: what is measured so far has an answer."""
            further(VERIFIED * self._verification() + self.repetitions(self._fastest()), repeated=True)
            if self.left_out:  # first measure one alternative and verify the best prediction; then repeat
                if len(self.steps) < 2:
                    self._spend(1)
                if not self._verified(predictions):
                    further(self._verification(), first=True)
            self._repeat()

        # How long a GPU's whole model compiles is hard to foresee: have an answer before that.
        late = WHOLE if self.question.device == "cuda" else ()
        self._whole_steps(frame for frame in self.question.frames if frame.mode not in late)
        self.step([(choice, 0) for choice in self.question.choices if self.question.trial(choice).id in self.known])
        if len(self.steps) > 1 and any(map(self.held, self.steps.values())):
            answer()
        self._whole_steps(frame for frame in self.question.frames if frame.mode in late)
        if not any(map(self.held, self.steps.values())) and self._short_of_memory():
            room.smaller(self)
        answer()
        for spend in (False, True):
            if self.left_out:
                if spend:
                    self._spend()
                further(self._verification())
        if self.left_out:
            further(0.0)
        self._repeat()
        room.larger(self)
        times |= self._chosen_attention(made)
        if not self.steps:
            raise NothingMeasured("; ".join(self._reasons()) or "the budget held no step")
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
            excluded={c: p.memory for c, p in predictions.items() if p.memory is not None and not self.fits(p.memory)},
            seconds=self.budget_s - self.left_s,
            budget_s=self.budget_s,
            whole_s=self.budget_s - self.left_s + sum(map(self._expected, self.left_out.values())),
            missing=sum(trial.workload == "train_step" for trials in self.left_out.values() for trial in trials),
            larger=self.larger,
            again=self.again,
            waiting=tuple(self._waiting(predictions)),
            repeated_s=self._expected(self.left_out.get(REPETITIONS, [])),
            verified_s=self.budget_s - self.left_s + self._expected(self.left_out.get(VERIFICATION, [])[:1]),
        )

    def _short_of_memory(self) -> bool:
        """Whether a smaller step may be the answer: a step was too large, or a trial ran out of memory."""
        return bool(self.steps) or any(why.startswith("oom") or "SIGKILL" in why for why in self.wrong.values())

    def _reasons(self) -> list[str]:
        """Return each reason why a step has no valid record once, with the first log that shows it."""
        found: dict[str, str] = {}
        for why in self.wrong.values():
            found.setdefault(why.partition("; see logs/")[0], why)
        return list(found.values())

    def _announce(self) -> None:
        """Say before the first trial how many trials there are, and about how long they take."""
        q = self.question
        steps = [q.trial(frame) for frame in q.frames] + [q.trial(q.have)] * VERIFIED
        steps += [q.trial(q.have, seed) for seed in range(1, SEEDS)] * 2
        expected = self._expected([q.survey(), *steps]) * WITH_PARTS
        said = f"{q.title} on {q.device}: {len(q.choices)} combinations. "
        about = f"about {duration(expected)} if the model is small"
        if q.survey().id in self.known:  # which other trials are known follows from the predictions
            self.say(
                f"{said}What was measured before takes no time; --budget allows {duration(self.budget_s)} for the rest."
            )
            return
        if expected <= self.budget_s:
            said += f"As a rule up to {len(steps)} runs of steps and the parts that decide are measured, {about}"
            self.say(f"{said}; --budget allows {duration(self.budget_s)}.")
            return
        held = max(1, self.affordable([q.survey(), *steps]) - 1)
        said += f"All of it takes {about}; in your {duration(self.budget_s)}: the survey and about "
        self.say(f"{said}{held} {'runs of steps' if held > 1 else 'run of a step'}.")

    def do(self, trials: Sequence[Trial]) -> list[Record]:
        fresh = [trial for trial in dict.fromkeys(t.id for t in trials) if trial not in self.records]
        wanted = [trial for trial in trials if trial.id in fresh]
        if wanted:
            done = list(self.carry_out(wanted))
            self.pace.learn(record for record in done if record.outcome == "ok")
            self.records |= {record.trial.id: record for record in done}
            self.known |= self.records.keys()
        return [self.records[trial.id] for trial in trials]

    def step(self, choices: Sequence[tuple[Choice, int]]) -> None:
        """Measure whole steps by (choice, seed)."""
        for (choice, _), record in zip(
            choices, self.do([self.question.trial(choice, seed) for choice, seed in choices]), strict=True
        ):
            if record.outcome == "ok":
                known = self.steps.setdefault(choice, [])
                known += [] if record in known else [record]
            else:
                self.wrong[choice] = f"{record.outcome}: {record.reason}"

    def _expected(self, trials: Iterable[Trial]) -> float:
        """Return the seconds that the trials take; those that have ended take none."""
        return self.pace.expected(trial for trial in trials if trial.id not in self.known)

    def affordable(self, trials: Sequence[Trial], reserve: float = 0.0) -> int:
        """Return how many of the first trials fit into the budget less the reserve; trials that have ended always fit."""
        for number, trial in enumerate(trials):
            if trial.id not in self.known and self._expected(trials[: number + 1]) > self.left_s - reserve:
                return number
        return len(trials)

    def _fastest(self) -> Choice:
        return min(self.steps, key=lambda choice: typical(self.steps[choice]), default=self.question.have)

    def _verification(self) -> float:
        """Return the seconds of one more step like the fastest."""
        return self.pace.expected([self.question.trial(self._fastest())])

    def repetitions(self, choice: Choice) -> float:
        """Return the seconds to repeat a choice and the user's step; an interval needs both."""
        again = [self.question.trial(c, seed) for seed in range(1, SEEDS) for c in (self.question.have, choice)]
        return self._expected(again)

    def _survey(self) -> tuple[Made, Record]:
        for share in (1, *self.question.shares):
            (record,) = self.do([self.question.survey(share)])
            if record.outcome != "oom":
                break
        if record.outcome == "oom":
            (again,) = self.do([self.question.survey(share, checkpointing=True)])
            record = again if again.outcome == "ok" else record
        if record.outcome != "ok":
            raise NothingMeasured(f"{self.question.model}: {record.outcome}: {record.reason}")
        return Made.of(record.work, share), record

    def _whole_steps(self, frames: Iterable[Choice]) -> None:
        """Measure the user's step whatever the budget; other frames as far as the budget holds them."""
        for frame in frames:
            trial = self.question.trial(frame)
            captured = replace(frame, mode="cudagraph") in self.steps
            if captured and frame.mode == "eager" and trial.id not in self.known:
                self.wrong[frame] = "not measured: one CUDA graph launches the same kernels"
                continue
            if trial.id not in self.known and (why := self._unfit(frame)):
                self.wrong[frame] = why
                continue
            if frame != self.question.have and not self.affordable([trial], self.repetitions(frame)):
                self.left_out[f"{STEPS}{frame.words()}"] = [trial]
                continue
            self.step([(frame, 0)])

    def _unfit(self, frame: Choice) -> str | None:
        """Return why the frame's rival cannot train the model, if a step in another mode said so."""
        reasons = [why for c, why in self.wrong.items() if c.rival == frame.rival]
        return next((why for why in reasons if why.startswith(f"unsupported: rival {frame.rival}: ")), None)

    def _spend(self, most: int | None = None) -> None:
        """Spend the rest of the budget on one step of each mode that was left out in favour of repetitions."""
        for frame in self.question.frames[1:]:
            words, trial = f"{STEPS}{frame.words()}", self.question.trial(frame)
            if words in self.left_out and self.affordable([trial]) and most != 0:
                del self.left_out[words]
                self.step([(frame, 0)])
                most = None if most is None else most - 1

    def _parts(self, made: Made, reserve: float, *, first: bool) -> dict[Part, PartTime]:
        """Time the deciding parts, as far as the budget less the reserve holds; first: only those of one choice."""
        q = self.question
        ahead, others = self._deciding(made)
        wanted = ahead if first else [*ahead, *others]
        known = [part for part in (*ahead, *others) if parts.trial(q, part).id in self.known]
        many = len(known)
        wanted = [*known, *(part for part in wanted if part not in known)]
        trials = [parts.trial(q, part) for part in wanted]
        records = self.do(trials[:many])
        while more := self.affordable(trials[many:], reserve):  # parts may take less time than expected
            records += self.do(trials[many : many + more])
            many += more
        left = [trial for p in (*ahead, *others) if (trial := parts.trial(q, p)).id not in self.known]
        self.left_out.pop(PARTS, None)
        if left:
            self.left_out[PARTS] = left
        found = {}
        for part, record in zip(wanted[:many], records, strict=True):
            if (seconds := parts.time_of(part, record)) is not None:
                found[part] = seconds
            else:
                self.failed[part] = f"{record.outcome}: {record.reason}"
        return found

    def _chosen_attention(self, made: Made) -> dict[Part, PartTime]:
        """Time the attention that te-bench's steps chose, which no prediction needs, as far as the budget holds."""
        chosen = {str(r.work.get("chosen")) for c, records in self.steps.items() if c.parts for r in records}
        names = sorted(chosen.intersection(ATTENTIONS[self.question.device]))
        found = [Part(ATTENTION, shape, name) for name in names for shape in made.attentions]
        trials = [parts.trial(self.question, part) for part in found]
        records = self.do(trials[: self.affordable(trials)])
        timed = {part: parts.time_of(part, record) for part, record in zip(found, records, strict=False)}
        return {part: time for part, time in timed.items() if time is not None}

    def _deciding(self, made: Made) -> tuple[list[Part], list[Part]]:
        """Return the parts of the most promising choice beside the fastest measured step, and all others that decide."""
        q = self.question
        ahead = parts.differing(q, made, q.hopeful(q.frame(self._fastest())) or q.have)
        deciding = parts.deciding(q, made, [choice for choice in q.choices if q.frame(choice) in self.steps])
        return ahead, [part for part in deciding if part not in ahead]

    def _predictions(self, made: Made, times: Mapping[Part, PartTime]) -> dict[Choice, Prediction]:
        frames = {choice: frame_of(records) for choice, records in self.steps.items()}
        found = {c: predict.predict(self.question, made, c, frames, times) for c in self.question.choices}
        return {choice: prediction for choice, prediction in found.items() if prediction is not None}

    def _waiting(self, predictions: Mapping[Choice, Prediction]) -> list[Prediction]:
        """Return the predictions of unmeasured steps, corrected by the measured ones, fastest first."""
        times = predict.corrections(predictions, {choice: typical(runs) for choice, runs in self.steps.items()})
        waiting = [
            replace(prediction, seconds=prediction.seconds * times.get(predict.kind(prediction.choice), 1.0))
            for choice, prediction in predictions.items()
            if choice not in self.steps and choice not in self.wrong and self.fits(prediction.memory)
        ]
        return sorted(waiting, key=lambda prediction: prediction.seconds)

    def _verified(self, predictions: Mapping[Choice, Prediction]) -> int:
        return sum(choice in predictions and choice not in self.question.frames for choice in self.steps)

    def _verify(self, predictions: Mapping[Choice, Prediction], *, repeated: bool, first: bool) -> None:
        """Measure the steps with the best predictions; each result corrects the predictions that follow.

        Beside a captured FP8 step of a user's model the same with the head in bf16 is measured, whatever its prediction.
        repeated: keep enough of the budget for repetitions. first: measure one step only, and only if its predicted gain
        exceeds its bound.
        """
        self.left_out.pop(VERIFICATION, None)
        self._with_bf16_head(repeated=repeated)
        for number in range(self._verified(predictions), MOST_VERIFIED):
            waiting = self._waiting(predictions)
            if not waiting:
                return
            best = waiting[0]
            doubt = best.bound_s if first else -best.bound_s if number < VERIFIED else 0.0
            if best.seconds + doubt > min(map(typical, filter(self.held, self.steps.values())), default=math.inf):
                return
            trial = self.question.trial(best.choice)
            if not self.affordable([trial], self.repetitions(best.choice) if repeated else 0.0):
                later = waiting[: max(1, VERIFIED - number)]
                self.left_out[VERIFICATION] = [self.question.trial(prediction.choice) for prediction in later]
                return
            self.step([(best.choice, 0)])
            if first:
                return
            self._with_bf16_head(repeated=repeated)

    def _with_bf16_head(self, *, repeated: bool) -> None:
        """Measure FP8 with the head in bf16 as soon as a captured FP8 step was measured."""
        captured = [c for c in self.question.choices if c.parts and c.recipe and c.mode == "cudagraph"]
        measured = any(c in self.steps for c in captured)
        for choice in (c for c in captured if measured and c.head):
            words, trial = f"{STEPS}{choice.words()}", self.question.trial(choice)
            self.left_out.pop(words, None)
            if choice in self.steps or choice in self.wrong:
                continue
            if self.affordable([trial], self.repetitions(self._fastest()) if repeated else 0.0):
                self.step([(choice, 0)])
            else:
                self.left_out[words] = [trial]

    def held(self, records: Sequence[Record]) -> bool:
        return self.fits(peak(records))

    def fits(self, memory: float | None) -> bool:
        return self.memory is None or memory is None or memory <= self.memory

    def _repeat(self) -> None:
        """Repeat the fastest step, those close to it and the user's step, in turn, with more seeds.

        Of other steps, read the repetitions that have ended.
        """
        q = self.question
        again = [(choice, seed) for choice in self.steps for seed in range(1, SEEDS)]
        self.step([one for one in again if q.trial(*one).id in self.known])
        fitting = {choice: typical(records) for choice, records in self.steps.items() if self.fits(peak(records))}
        if not fitting:
            return
        ordered = sorted(fitting, key=lambda choice: fitting[choice])
        close = [choice for choice in ordered if fitting[choice] <= CLOSE * fitting[ordered[0]]][:3]
        have = [self.question.have] if self.question.have in self.steps else []
        chosen = list(dict.fromkeys([*close, *have]))
        if len(chosen) == 1:
            chosen += [choice for choice in ordered if choice not in chosen][:1]
        if len(chosen) == 1:  # no other step to compare with
            if self.left_out:
                self.left_out[REPETITIONS] = [q.trial(chosen[0], seed) for seed in range(1, SEEDS)] * 2
            return
        self.left_out.pop(REPETITIONS, None)
        for seed in range(1, SEEDS):
            turn = chosen if seed % 2 == 0 else chosen[::-1]
            trials = [trial for c in turn if (trial := q.trial(c, seed)).id not in self.records]
            if self.affordable(trials) < len(trials):
                self.left_out[REPETITIONS] = [q.trial(c, later) for later in range(seed, SEEDS) for c in turn]
                return
            self.step([(choice, seed) for choice in turn])
