"""Gate stored records: pair two runs' configurations by seed, judge their ratios, compare all else, give an exit code.

The exit code is the first that applies:
5  the environments differ in what can change a result, and --allow-environment-change is not given: nothing is judged
1  a trial is slower by more than the margin, takes more memory or launches, fits a smaller batch, exceeds a
   --compare-fail limit, or a convergence verdict got worse
4  a configuration is missing, a trial failed that did not before, or nothing could be compared
3  some trial, or the geometric mean, is undecided
0  every trial passes
A regression comes first: a workflow that allows exit codes 4 or 3, for a configuration deleted on purpose, must still stop
at a regression.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np

from te_bench.experiments.spec import Record, matches
from te_bench.gate.decision import GateDecision, GateJudgement, GateVerdict, decide
from te_bench.gate.memory_and_checks import FindingKind, GateFinding, Match, compare_match, compare_studies, merge
from te_bench.gate.question import ALPHA, FEWEST, MARGIN, SEEDS
from te_bench.reports.analysis.measures import median, seconds_of
from te_bench.reports.analysis.naming import COMMAND
from te_bench.reports.analysis.rows import (
    TIMED,
    Configuration,
    Group,
    Results,
    differences,
    identity,
    listed_names,
    load_results,
    printable,
)
from te_bench.reports.convergence.equivalence import check_alpha
from te_bench.reports.exchange.pytest_stats import STATS, Limit, summary, why_exceeded

PASSED, REGRESSED, UNDECIDED, INCOMPLETE, MISMATCHED = 0, 1, 3, 4, 5
#: The part of an environment's identity that is expected to differ between the two sides of a gate.
_JUDGED = "code"
#: nvml.h, nvmlClocksEventReasons*: hardware slowdown, software and hardware thermal slowdown, power brake. Not 0x4, the
#: software power cap: an H200 that runs large GEMMs is always at its cap.
_THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
TELLING = 5  # different times in a process; short kernels may share fewer by chance, because clocks are coarse
QUIET = 0.1  # the quantile of a process's samples on a CPU


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedPairs:
    """{trial: its ratios candidate / baseline, by round}: of the processes' typical times and of the mean of all calls.

    A round is a seed of any trial. None: the trial has no pair of that seed, or a GPU throttled in it.
    """

    ratios: dict[str, list[float | None]] = field(default_factory=dict)
    means: dict[str, list[float | None]] = field(default_factory=dict)
    throttled: dict[str, int] = field(default_factory=dict)  # pairs set aside for their clocks
    copies: dict[str, list[int]] = field(default_factory=dict)  # ignored seeds, whose times repeat another seed's
    calls: dict[str, int] = field(default_factory=dict)  # calls in the pairs that count, on the side that has fewer


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """The result of a gate. `decision` is None if no trial was timed on both sides."""

    baseline: str  # names of the sides, for a reader
    candidate: str
    margin: float
    alpha: float
    decision: GateDecision | None = None
    findings: tuple[GateFinding, ...] = ()
    timed: TimedPairs = field(default_factory=TimedPairs)
    mismatch: tuple[str, ...] = ()  # how the environments differ
    allowed: bool = False  # whether the environments may differ
    compared: int = 0  # pairs of records that ended ok
    names: Mapping[str, str] = field(default_factory=dict)  # {Trial.cell: name of its trials in this gate}
    plain: Mapping[str, str] = field(default_factory=dict)  # {name of a trial: its plain name, for a reader}
    notes: tuple[str, ...] = ()

    @property
    def trials(self) -> Mapping[str, GateJudgement]:
        return self.decision.trials if self.decision else {}

    @property
    def more(self) -> Mapping[str, int]:
        return self.decision.more if self.decision else {}

    @property
    def judgements(self) -> Mapping[str, GateJudgement]:
        return self.decision.judgements if self.decision else {}

    @property
    def verdicts(self) -> frozenset[GateVerdict]:
        return frozenset(one.verdict for one in self.judgements.values())

    @property
    def regressed(self) -> bool:
        """Return whether a ratio is a REGRESSION."""
        return GateVerdict.REGRESSION in self.verdicts

    @property
    def exit_code(self) -> int:
        if self.mismatch and not self.allowed:
            return MISMATCHED
        codes = {finding.code for finding in self.findings}
        if self.regressed or REGRESSED in codes:
            return REGRESSED
        if INCOMPLETE in codes or not self.compared:
            return INCOMPLETE
        return UNDECIDED if GateVerdict.INCONCLUSIVE in self.verdicts or UNDECIDED in codes else PASSED


def compare(
    baseline: Path,
    candidate: Path,
    *,
    margin: float = MARGIN,
    alpha: float = ALPHA,
    mde: float | None = None,
    only: str | None = None,
    allow_environment_change: bool = False,
    limits: Sequence[Limit] = (),
    looks: Sequence[int] | None = None,
    names: tuple[str, str] | None = None,
) -> Gate:
    """Judge each configuration's records in `candidate` against those in `baseline`, paired by seed.

    A process counts by its `process_s`, and by its `mean_s`. Of each suite, the most recently planned environment is read.
    `only`: a glob over trial names. limits: thresholds besides the test, as given by --compare-fail. looks: the numbers of
    pairs at which a gate that still measures is judged. names: of the two sides. Raise ValueError for a directory without a
    plan, a glob that matches nothing, a baseline without trials, and what `decide` raises.
    """
    check_alpha(alpha)
    results = tuple(load_results([directory]) for directory in (baseline, candidate))
    sides = tuple(_choose_newest(found, only) for found in results)
    if not any(sides):
        raise ValueError(f"--only {only!r} matches no trial of {baseline} or {candidate}; te-bench report lists them")
    if not sides[0]:
        matching = f" that matches {only!r}" if only else ""
        raise ValueError(f"{baseline} has no trial{matching}: there is nothing to compare with")
    names = names or (printable(str(baseline)), printable(str(candidate)))
    allowed, differs = allow_environment_change, _find_differences(results, sides)
    gate = Gate(baseline=names[0], candidate=names[1], margin=margin, alpha=alpha, mismatch=differs, allowed=allowed)
    if differs and not allowed:
        return gate
    matches = _match(*sides)
    timed = _pair_times(matches)
    plain = _plain(matches)
    few_seeds = _note_few_seeds(sides, timed) if looks is None else ()
    before = (*_note_environments(results, sides), *_note_order(matches), *_note_copies(timed, plain))
    return dataclasses.replace(
        gate,
        decision=(
            decide(timed.ratios, means=timed.means, margin=margin, alpha=alpha, mde=mde, looks=looks)
            if timed.ratios
            else None
        ),
        findings=(
            *chain.from_iterable(map(compare_match, matches)),
            *compare_studies(*sides),
            *_find_exceeded(matches, limits),
        ),
        timed=timed,
        compared=sum(len(match.pairs) for match in matches),
        names={one.id: match.name for match in matches for one in (match.baseline, match.candidate) if one},
        plain=plain,
        notes=(*before, *few_seeds, *_note_added(matches, plain)),
    )


def judge_at_end(gate: Gate, *, looks: Sequence[int], mde: float | None = None) -> Gate:
    """Return `compare`'s gate, judged as one that measures no more pairs."""
    if gate.decision is None:
        return gate
    timed, margin, alpha = gate.timed, gate.margin, gate.alpha
    decision = decide(timed.ratios, means=timed.means, margin=margin, alpha=alpha, mde=mde, looks=looks, ended=True)
    return dataclasses.replace(gate, decision=decision)


def _choose_newest(results: Results, only: str | None) -> list[Group]:
    """Return, for each suite, the group of its newest environment, with the rows that `only` matches."""
    groups: dict[str, Group] = {}
    for group in results.groups:
        groups.setdefault(group.suite, group)
    chosen = [dataclasses.replace(one, configurations=_filter(one.configurations, only)) for one in groups.values()]
    return [group for group in chosen if group.configurations]


def _filter(configurations: Sequence[Configuration], only: str | None) -> tuple[Configuration, ...]:
    if only is None:
        return tuple(configurations)
    chosen = ((one, tuple(row for row in one.rows if matches(row.trial.name, only))) for one in configurations)
    kept = [dataclasses.replace(one, rows=rows) for one, rows in chosen]
    return tuple(configuration for configuration in kept if configuration.rows)


def _find_differences(results: Sequence[Results], sides: Sequence[Sequence[Group]]) -> tuple[str, ...]:
    """Return the differences, except in code, between environments that measured the same configurations."""
    found: dict[str, None] = {}
    for before in sides[0]:
        configurations = {configuration.id for configuration in before.configurations}
        for after in sides[1]:
            if not configurations & {configuration.id for configuration in after.configurations}:
                continue
            groups = zip(results, (before, after), strict=True)
            old, new = (identity(result.environments[group.environment]) for result, group in groups)
            found |= dict.fromkeys(differences(old, new, apart=_JUDGED))
    return tuple(found)


def _note_environments(results: Sequence[Results], sides: Sequence[Sequence[Group]]) -> list[str]:
    return [
        f"the {name} also holds older environments, which are ignored: the newest of each suite is read"
        for name, result, side in zip(("baseline", "candidate"), results, sides, strict=True)
        if {group.environment for group in result.groups} - {group.environment for group in side}
    ]


def _note_order(matches: Sequence[Match]) -> list[str]:
    pairs = [pair for match in matches for pair in match.pairs.values()]
    times = [sorted(pair[side].started_at for pair in pairs) for side in (0, 1)]
    if len(pairs) < 2 or not (times[0][-1] < times[1][0] or times[1][-1] < times[0][0]):
        return []
    return [
        "the two runs were not interleaved: any change of the machine between them, such as its load, counts as the "
        "candidate's, and no interval accounts for that"
    ]


def _note_copies(timed: TimedPairs, plain: Mapping[str, str]) -> list[str]:
    return [
        f"{plain[name]}: ignored, because one side repeats the times of an earlier seed: seed{'s' * (len(seeds) > 1)} "
        f"{', '.join(map(str, seeds))}"
        for name, seeds in timed.copies.items()
    ]


def _note_added(matches: Sequence[Match], plain: Mapping[str, str]) -> list[str]:
    """Say what to do if nothing could be compared because trials run in the candidate only."""
    added = [plain[match.name] for match in matches if match.candidate and match.candidate.ok]
    if not added or any(match.pairs for match in matches):
        return []
    what = f"{added[0]}, merge it" if len(added) == 1 else f"these {len(added)} trials, merge them"
    return [f"if the candidate adds {what} first or allow exit code {INCOMPLETE}"]


def _note_few_seeds(sides: Sequence[Sequence[Group]], timed: TimedPairs) -> list[str]:
    """Say what to do about stored trials with too few pairs for a claim."""
    pairs = [sum(ratio is not None for ratio in ratios) for ratios in timed.ratios.values()]
    few = sum(number < FEWEST for number in pairs)
    if not few:
        return []
    said = f"{few} of {len(pairs)} timed trials have fewer than {FEWEST} pairs of seeds, too few for a verdict. "
    if all(one.trial.workload == COMMAND for side in sides for group in side for one in group.configurations):
        return [f"{said}te-bench gate --config FILE --base REV --budget TIME times more pairs of these commands"]
    suites = " or ".join(dict.fromkeys(group.suite for side in sides for group in side))
    return [
        f"{said}To add the seeds that the run in DIR lacks, run te-bench run {printable(suites)} --seeds {SEEDS} --out DIR "
        "on each side, with that side's code and that run's other options"
    ]


def _match(baseline: Sequence[Group], candidate: Sequence[Group]) -> list[Match]:
    """Return every configuration of either run, the baseline's first; the name is the trial's without the seed."""
    before, after = map(merge, (baseline, candidate))
    known = {**after, **before}
    order = [*before, *(key for key in after if key not in before)]
    trials = {key: known[key].trial for key in order}
    names = {
        key: str(one.problem["variant"]) if one.workload == COMMAND else one.name.rpartition("/")[0]
        for key, one in trials.items()
    }
    taken = list(names.values())
    return [
        Match(
            name=printable(names[key] + (f"#{key[:8]}" if taken.count(names[key]) > 1 else "")),
            baseline=before.get(key),
            candidate=after.get(key),
        )
        for key in order
    ]


def _plain(matches: Sequence[Match]) -> dict[str, str]:
    """Return {name of what is timed: its plain name}."""
    both = {match.name: match.candidate or match.baseline for match in matches}
    named = listed_names({name: one.trial for name, one in both.items() if one})
    ends = {suffix: suffix.replace("/", ", ") for suffix in TIMED.values()}
    return {name + suffix: said + end for name, said in named.items() for suffix, end in ends.items()}


def _pair_times(matches: Sequence[Match]) -> TimedPairs:
    rounds = sorted({seed for match in matches for seed in match.pairs})
    timed = TimedPairs()
    for match in matches:
        for sample, suffix in TIMED.items():
            pairs = {seed: pair for seed, pair in match.pairs.items() if _ratio(pair, sample) is not None}
            if not pairs:
                continue
            copies = _find_copies(pairs, sample)
            free = {seed: pair for seed, pair in pairs.items() if seed not in copies and not any(map(_throttled, pair))}
            name = match.name + suffix
            known = [seed for seed in rounds if seed <= max(pairs)]  # a trial that was decided has no later rounds
            for into, of in ((timed.ratios, process_s), (timed.means, mean_s)):
                into[name] = [_ratio(free[seed], sample, of) if seed in free else None for seed in known]
            throttled = len(pairs) - len(free) - len(copies)
            timed.throttled.update({name: throttled} if throttled else {})
            timed.copies.update({name: copies} if copies else {})
            counts = ([len(seconds_of(one, sample)) for one in side] for side in zip(*free.values(), strict=True))
            timed.calls[name] = min(map(sum, counts), default=0)
    return timed


def _find_copies(pairs: Mapping[int, tuple[Record, Record]], sample: str) -> list[int]:
    """Return seeds for which a side repeats the times of an earlier seed exactly, which only copied records do."""
    found: set[int] = set()
    for side in (0, 1):
        seen: set[tuple[float, ...]] = set()
        for seed, pair in pairs.items():
            times = tuple(seconds_of(pair[side], sample))
            if len(set(times)) >= TELLING and times in seen:
                found.add(seed)
            seen.add(times)
    return sorted(found)


def _find_exceeded(matches: Sequence[Match], limits: Sequence[Limit]) -> list[GateFinding]:
    """Return a finding for each statistic that grew beyond a limit; pairs in which a GPU throttled are ignored."""
    found = []
    for match in matches if limits else ():
        for sample, suffix in TIMED.items():
            pairs = [pair for pair in match.pairs.values() if _ratio(pair, sample) and not any(map(_throttled, pair))]
            sides = [_summarize(records, sample) for records in zip(*pairs, strict=True)]
            said = [why_exceeded(limit, *sides) for limit in limits] if sides else []
            found += [
                GateFinding(
                    name=match.name + suffix,
                    kind=FindingKind.THRESHOLD,
                    code=REGRESSED,
                    message=f"{why} (a threshold, no statistics)",
                )
                for why in said
                if why
            ]
    return found


def _summarize(records: Sequence[Record], sample: str) -> dict[str, float]:
    """Return each of pytest-benchmark's statistics of a process's samples, in seconds: the median over the processes."""
    found = [summary(seconds_of(record, sample)) for record in records]
    return {name: statistics.median(one[name] for one in found) for name in STATS}


Of = Callable[[Sequence[float], str], float | None]


def mean_s(seconds: Sequence[float], device: str) -> float | None:
    """Return the mean of all samples, which also shows a slow-down of few calls; None if there are none."""
    return statistics.fmean(seconds) if seconds else None


def process_s(seconds: Sequence[float], device: str) -> float | None:
    """Return a process's typical time: the median of its samples or, on a CPU, their 10 % quantile; None without samples.

    Other load on a shared CPU only ever adds time, and unevenly. With this quantile pairs vary least (paired_trial.py has
    the numbers).
    """
    if not seconds or device != "cpu":
        return median(seconds)
    return float(np.quantile(seconds, QUIET))


def _ratio(pair: tuple[Record, Record], sample: str, of: Of = process_s) -> float | None:
    """Return the candidate's seconds over the baseline's."""
    old, new = (of(seconds_of(record, sample), record.trial.device) for record in pair)
    return new / old if old and new else None


def _throttled(record: Record) -> bool:
    reasons = record.device_state.get("throttle_reasons")
    return isinstance(reasons, int | float) and bool(int(reasons) & _THROTTLED)
