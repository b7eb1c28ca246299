"""Decide by the verified records which choice to use, how much faster it is, and whether that is certain. No torch."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from te_bench.advice.advise import VERIFICATION, Evidence
from te_bench.advice.candidates import Choice
from te_bench.advice.convergence import is_shown, preference
from te_bench.advice.parts import LINEAR, Part, PartTime
from te_bench.advice.predict import Prediction
from te_bench.advice.room import AGAIN, SMALLER
from te_bench.advice.steps import peak, peaks, typical
from te_bench.experiments import host
from te_bench.experiments.spec import Record
from te_bench.reports.analysis.measures import Ratio, of_processes, speedup
from te_bench.reports.analysis.ranking import rank_steps
from te_bench.reports.analysis.rows import Configuration, Group, Results
from te_bench.reports.analysis.steps import measured_steps
from te_bench.reports.convergence.planning import duration
from te_bench.reports.page import text

DECIDED, UNDECIDED = 0, 3  # exit codes
MARGIN = 1.5  # a named budget over the expected seconds: the parts are not known yet
AS_FAST = 1.01  # speed-ups up to this are not told
# The speed-up by one run of each from which "use" is advised on a GPU: published steps of one H200 differ by 6 % at most
# between processes.
LIKELY = 1.25
WIDE = 1.5  # an interval is wide if its end exceeds its beginning times this
ABSURD = 1000.0  # beyond this ratio of its ends an interval is not told in numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The choice to use, and what it is compared with.

    speedup: over the user's step; None if either has no record. tied: choices that are not distinguished from `use`.
    undecided: what to do until it is known whether to change anything; None if that is known. why: the reason. shown: of
    an advised FP8 step that no study shows to train like bf16, the fastest that one shows, over the user's step.
    """

    use: Choice
    have: Choice
    seconds: float
    have_seconds: float | None
    speedup: Ratio | None
    over_best: tuple[Choice, Ratio] | None  # over the fastest step without te-bench, unless that is the user's
    memory: float | None
    have_memory: float | None
    fitting: tuple[Choice, ...]  # the measured steps that take at most --memory, or all where none does
    tied: tuple[Choice, ...]
    undecided: str | None
    why: str
    runs: int
    gpu: str | None  # by name
    shown: tuple[Choice, Ratio | None] | None = None

    @property
    def exit_code(self) -> int:
        return UNDECIDED if self.undecided else DECIDED

    @property
    def keeps(self) -> bool:
        return self.use == self.have


def decide(evidence: Evidence, group: Group, memory: float | None = None) -> Decision:
    """Return the decision by the group's records, which hold all of the run's trials."""
    by_id = {configuration.id: configuration for configuration in group.configurations}
    question = evidence.question
    of_choice = {choice: by_id[question.trial(choice).cell] for choice in evidence.steps}
    fitting = {
        choice: configuration
        for choice, configuration in of_choice.items()
        if memory is None or (held := peak(configuration.ok)) is None or held <= memory
    }
    best, tied, undecided, why = _best(fitting or of_choice, evidence, group.gpu)
    if not fitting:
        undecided, why = "every step that was measured takes more than --memory", _less_memory(evidence)
    chosen, have = of_choice[best], of_choice.get(question.have)
    others = [choice for choice in fitting or of_choice if choice.of_others]
    best_other = min(others, key=lambda choice: typical(evidence.steps[choice]), default=question.have)
    over = None if best_other in (best, question.have) else speedup(of_choice[best_other], chosen)
    proven = (
        [choice for choice in fitting or of_choice if is_shown(choice)] if best.recipe and not is_shown(best) else []
    )
    shown = min(proven, key=lambda choice: typical(evidence.steps[choice]), default=None)
    memory_of, have_memory = (peak(chosen.ok), None) if have is None else peaks(chosen.ok, have.ok)
    return Decision(
        use=best,
        have=question.have,
        seconds=of_processes(chosen.ok, "latency_s") or math.nan,
        have_seconds=None if have is None else of_processes(have.ok, "latency_s"),
        speedup=None if have is None else speedup(have, chosen),
        over_best=None if over is None else (best_other, over),
        memory=memory_of,
        have_memory=have_memory,
        fitting=tuple(fitting or of_choice),
        tied=tuple(tied),
        undecided=undecided,
        why=why,
        runs=len(chosen.ok),
        gpu=group.gpu,
        shown=None if shown is None else (shown, None if have is None else speedup(have, of_choice[shown])),
    )


def _less_memory(evidence: Evidence) -> str:
    later = [words for words in (SMALLER, AGAIN) if words in evidence.left_out]
    if later:
        return f"{budget_of(evidence.whole_s)} tries {' and '.join(later)}."
    again = " by checkpointed blocks" if any(choice.checkpointing for choice in evidence.steps) else ""
    return f"One sequence at a time{again} takes more, too: give it more memory, or shorter sequences (--tokens)."


@dataclass(frozen=True, kw_only=True, slots=True)
class Larger:
    """A larger batch that fits: its choice, and its speed per token over `than`, the steps of the requested batch."""

    batch: int
    choice: Choice
    faster: float
    record: Record
    than: tuple[Record, ...]


def larger_batches(evidence: Evidence) -> list[Larger]:
    """Return the larger batches, the fastest per token first."""
    found = []
    question = evidence.question
    for batch, record in (*evidence.larger.items(), *evidence.again.items()):
        again = record.trial.problem.get("checkpointing") is not None
        of = {replace(choice, checkpointing=again): choice for choice in evidence.steps}
        choice = next(c for c in of if question.of_batch(c, batch).id == record.trial.id)
        than = evidence.steps[of[choice]]
        faster = batch / question.batch * typical(than) / typical([record])
        found.append(Larger(batch=batch, choice=choice, faster=faster, record=record, than=than))
    return sorted((larger for larger in found if larger.batch > question.batch), key=lambda larger: -larger.faster)


@dataclass(frozen=True, kw_only=True, slots=True)
class Paid:
    """The records of a step with checkpointed blocks, and of the same step without, to tell what they save and cost."""

    choice: Choice
    without: tuple[Record, ...]
    records: tuple[Record, ...]

    @property
    def slower(self) -> float:
        """The seconds of the step with checkpointed blocks over those without."""
        return typical(self.records) / typical(self.without)

    @property
    def memory(self) -> tuple[float, float] | None:
        """The peaks in bytes without and with checkpointed blocks; None if one is unknown."""
        before, after = peaks(self.without, self.records)
        return None if before is None or after is None else (before, after)


def checkpointing(evidence: Evidence) -> list[Paid]:
    """Return what checkpointing costs, for each step of the requested batch that was measured with and without it."""
    question = evidence.question
    ids_of = {record.trial.id: record for record in evidence.again.values()}
    found = []
    for without, records in evidence.steps.items():
        if (choice := question.checkpointed(without)) is None:
            continue
        once = ids_of.get(question.trial(choice).id)
        again = evidence.steps.get(choice) or (() if once is None else (once,))
        if again:
            found.append(Paid(choice=choice, without=records, records=again))
    return found


def group_of(results: Results, suite: str, environment: str) -> Group:
    return next(g for g in results.groups if (g.suite, g.environment) == (suite, environment))


def _best(
    found: Mapping[Choice, Configuration], evidence: Evidence, gpu: str | None
) -> tuple[Choice, list[Choice], str | None, str]:
    """Return the choice, those not distinguished from it, and what is undecided and why."""
    have = evidence.question.have
    by_id = {configuration.id: choice for choice, configuration in found.items()}
    repeated = [configuration for configuration in found.values() if len(configuration.ok) > 1]
    ranking = rank_steps(measured_steps(repeated, found.get(have), gpu))
    fastest = [by_id[step.configuration.id] for step in ranking.fastest]
    if len(found) == 1 and (repeated or not evidence.left_out):  # no other step to compare with
        return next(iter(found)), [], None, ""
    if not fastest:
        return _of_single_runs(found, evidence)
    fastest.sort(key=lambda c: preference(c, have, peak(found[c].ok)))
    # Only the fastest is known to beat the user's step; the quoted interval of another may hold 1.
    cheapest = next((c for c in fastest if have not in found or c == have or _is_shown(found[have], found[c])), have)
    tied = [choice for choice in fastest if choice != cheapest]
    if cheapest == have and tied:
        why = f"{_looked(found[have], found[tied[0]], tied[0])}, but {len(found[have].ok)} runs cannot tell"
        return (
            have,
            tied,
            _for_now(have),
            f"{why}{_disturbed(found[have], found[tied[0]])}; on a quiet machine run it again with --fresh.",
        )
    return cheapest, tied, None, ""


def _is_shown(have: Configuration, choice: Configuration) -> bool:
    """Return whether the interval of the choice's speed-up excludes 1, if it has an interval."""
    told = speedup(have, choice)
    return told is None or told.low is None or told.low > 1


def _of_single_runs(
    found: Mapping[Choice, Configuration], evidence: Evidence
) -> tuple[Choice, list[Choice], str | None, str]:
    have = evidence.question.have
    best = min(found, key=lambda choice: typical(found[choice].ok))
    more = budget_of(evidence.whole_s)
    if best == have and len(found) == 1:
        steps = "1 more step" if evidence.missing == 1 else f"{evidence.missing} more steps"
        only = f"in {duration(evidence.budget_s)} only what you have was measured"
        return have, [], only, f"{more} measures {steps}."
    cannot = f"but one run of each cannot tell; {more} repeats them."
    if have not in found:
        return best, [], f"use {best.words()} for now", f"It is the fastest that ran and fits, {cannot}"
    if best == have:
        return have, [], _for_now(have), f"Nothing looked faster, {cannot}"
    ratio = speedup(found[have], found[best])
    if evidence.question.device == "cuda" and evidence.repeated_s and ratio is not None and ratio.value >= LIKELY:
        soon = budget_of(evidence.repeated_s)
        return best, [], f"use {best.words()} for now", f"One run of each gives no interval; {soon} repeats them."
    return have, [best], _for_now(have), f"{_looked(found[have], found[best], best)}, {cannot}"


def _for_now(have: Choice) -> str:
    return f"keep {have.words()} for now"


def _looked(have: Configuration, other: Configuration, choice: Choice) -> str:
    ratio = speedup(have, other)
    return f"{choice.words()} looked " + (
        f"{ratio.value:.3g} times as fast" if ratio is not None and ratio.value > AS_FAST else "as fast"
    )


def _disturbed(have: Configuration, other: Configuration) -> str:
    """Return a clause that says whether the machine was busy and the interval wide; "" for neither."""
    ratio = speedup(have, other)
    said = []
    if any(host.disturbance(record.device_state) for record in (*have.ok, *other.ok)):
        said.append("the machine was busy")
    if ratio is not None and ratio.low and ratio.high and ratio.high > WIDE * ratio.low:
        high = f"{ratio.high:.2g}" if ratio.high < 99.5 else f"{ratio.high:.0f}"
        ends = f"{ratio.low:.2g} to {high} times"
        said.append(f"the interval is {ends}" if ratio.high <= ABSURD * ratio.low else "their times differ wildly")
    return f" ({', '.join(said)})" if said else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearGain:
    """One size of Linear: its calls a step, its seconds in bf16 and by the fastest recipe, and that recipe."""

    sizes: tuple[int, int, int]  # rows, in_features, out_features
    calls: int
    bf16: PartTime
    fp8: PartTime | None
    recipe: str | None
    step_s: float = math.inf  # seconds of the step with this Linear in bf16

    @property
    def ratio(self) -> float | None:
        """The time in bf16 over that in FP8; above 1, FP8 is faster."""
        return None if self.fp8 is None else self.bf16.seconds / self.fp8.seconds

    @property
    def noisy(self) -> bool:
        """Whether a time was disturbed: its calls differ much, or take longer than the step that contains them."""
        times = [time for time in (self.bf16, self.fp8) if time is not None]
        return any(time.noisy for time in times) or self.calls * self.bf16.seconds > self.step_s

    @property
    def saved_s(self) -> float | None:
        """Seconds that FP8 saves in one step."""
        return None if self.fp8 is None else self.calls * (self.bf16.seconds - self.fp8.seconds)

    @property
    def pays_from(self) -> float | None:
        """How many times wider the Linear must be for FP8's products to save what its casts cost; None if unknown.

        Products grow with the square of the width, casts of activations with the width.
        """
        if self.fp8 is None or self.fp8.products is None or self.bf16.products is None:
            return None
        saved = self.bf16.products - self.fp8.products
        casts = (self.fp8.seconds - self.fp8.products) - (self.bf16.seconds - self.bf16.products)
        return max(casts / saved, 0.0) if saved > 0 else None


def linear_gains(evidence: Evidence) -> list[LinearGain]:
    """Return the gain of each size of Linear whose time in bf16 is known, the most expensive first."""
    found = []
    have = evidence.question.have
    step_s = typical(evidence.steps[have]) if have in evidence.steps else math.inf
    for sizes, calls in evidence.made.linears.items():
        problem = tuple(zip(("tokens", "in_features", "out_features"), sizes, strict=True))
        own = {part: time for part, time in evidence.times.items() if part[:2] == (LINEAR, problem)}
        half = own.get(Part(LINEAR, problem, "bf16"))
        if half is None:
            continue
        fp8 = {part.rival: time for part, time in own.items() if part.precision == "fp8"}
        best = min(fp8, key=lambda name: fp8[name].seconds, default=None)
        fastest = fp8[best] if best else None
        found.append(LinearGain(sizes=sizes, calls=calls, bf16=half, fp8=fastest, recipe=best, step_s=step_s))
    return sorted(found, key=lambda gain: -gain.calls * gain.bf16.seconds)


def fp8_in_words(evidence: Evidence, use: Choice, fitting: Collection[Choice]) -> str:
    """Return whether FP8 pays for this model here, by the steps that fit or else predictions, and from which width on."""
    if use.recipe:
        return ""
    if evidence.question.device == "cpu":
        if evidence.promising is not None and evidence.promising.choice.recipe:  # the first sentence tells it
            return "A CPU emulates FP8: this says nothing about a GPU."
        return "FP8 does not pay on a CPU, which emulates it: this says nothing about a GPU."
    said, wider = _linears_in_words([gain for gain in linear_gains(evidence) if gain.ratio is not None])
    seconds = typical(evidence.steps[use])
    without = f"{text.milliseconds(seconds)} without"
    measured = {choice: typical(evidence.steps[choice]) for choice in fitting if choice.recipe}
    if measured:
        best = min(measured, key=lambda choice: measured[choice])
        takes = f"{text.milliseconds(measured[best])} ms, {without} ({best.words()}){said}"
        if measured[best] < seconds:
            return f"The fastest FP8 step that was measured takes {takes}."
        return f"No FP8 step that was measured is faster: the best takes {takes}{wider}."
    predicted = next((waiting for waiting in evidence.waiting if waiting.choice.recipe), None)
    if predicted is None:
        return f"Whether FP8 pays is not known: no FP8 step was measured or predicted{said}."
    if predicted == evidence.promising:  # the first sentence tells it
        return f"No FP8 step was measured{said}."
    promised = f"No FP8 step was measured: the best is predicted to take {between(predicted)} ms, {without}"
    if VERIFICATION in evidence.left_out:
        return f"{promised}; {budget_of(evidence.whole_s)} measures it{said}."
    return f"{promised}{said}{wider}."


def _linears_in_words(known: Sequence[LinearGain]) -> tuple[str, str]:
    """Return two clauses: the Linears' time alone, and the width from which FP8 would pay; "" for what is unknown."""
    if not known:
        return "", ""
    bf16, fp8 = (sum(g.calls * getattr(g, of).seconds for g in known) for of in ("bf16", "fp8"))
    wider = [gain.pays_from for gain in known if gain.pays_from is not None and gain.pays_from > 1]
    slower = f"; FP8 would pay from about {max(wider):.2g} times this width on" if wider and fp8 >= bf16 else ""
    return f"; its Linears alone take {fp8 * 1e3:.3g} ms a step, bf16's {bf16 * 1e3:.3g}", slower


def between(prediction: Prediction) -> str:
    """Return a prediction's range in milliseconds, by its bound: 111 to 129."""
    low, high = (max(prediction.seconds + sign * prediction.bound_s, 0.0) for sign in (-1, 1))
    return f"{text.milliseconds(low)} to {text.milliseconds(high)}"


def budget_of(seconds: float) -> str:
    """Return the budget that suffices for so many expected seconds: --budget 5min."""
    return f"--budget {duration(MARGIN * seconds).replace(' ', '')}"


def ids(records: Sequence[Record]) -> list[str]:
    return [record.trial.id for record in records]
