"""Compare two runs without statistics: memory, launches, checks, missing trials, worse verdicts.

A finding carries the exit code that it alone asks for: 1 the candidate got worse, 3 undecided, 4 the candidate lacks a
result that the baseline has, 0 for information only.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from te_bench.experiments.spec import Record
from te_bench.reports.analysis.measures import highest, numbers, seconds_of
from te_bench.reports.analysis.naming import first_of
from te_bench.reports.analysis.rows import NOT_RUN, TIMED, Configuration, Group, Row, grouped, printable
from te_bench.reports.convergence.equivalence import Verdict
from te_bench.reports.convergence.study import studies
from te_bench.reports.convergence.study_verdict import CAUGHT, GOOD, StudyVerdict
from te_bench.reports.convergence.verdict import judge_study
from te_bench.reports.page.text import shortened

MIB = 2**20
#: {sample: (bytes, share)}: growth that is allowed, because processes of one program differ. On a GPU eager steps
#: allocate the same in every process; compiled steps differ by up to 2.4 MiB and 0.045 % (40 configurations, H200). On a
#: CPU the resident memory of 8 processes of one trial differed by up to 140 MiB of 620.
ALLOWED = {"peak_allocated_bytes": (4 * MIB, 0.001), "peak_rss_bytes": (128 * MIB, 0.1)}
FEWER = (1, 0.01)  # (rows, share) by which the largest batch may fall
_MEMORY = {"peak_allocated_bytes": "peak allocated", "peak_rss_bytes": "peak resident"}
#: Counts of one step in Record.work, if the workload took them. None may grow.
COUNTS = {"launches": "kernel launches", "graph_breaks": "graph breaks", "recompiles": "recompiles"}
_ENDED = ("ok", "stopped")  # outcomes without a fault
_UNENDED = ("interrupted", NOT_RUN)  # outcomes that the same command runs again
_LONGEST = 60  # characters of a kernel's name


class FindingKind(StrEnum):
    """The subject of a finding."""

    MEMORY = "memory"
    COUNT = "count"
    KERNELS = "kernels"
    FAILED = "failed"
    MISSING = "missing"
    NEW = "new"
    VERDICT = "verdict"
    THRESHOLD = "threshold"  # of --compare-fail
    NOTE = "note"


@dataclass(frozen=True, kw_only=True, slots=True)
class GateFinding:
    """One difference between baseline and candidate; `code` is the exit code that it asks for."""

    name: str  # of the trial, without its seed, or of the study
    kind: FindingKind
    code: int
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """One configuration in both runs; None: that run did not plan it."""

    name: str
    baseline: Configuration | None
    candidate: Configuration | None

    @property
    def pairs(self) -> dict[int, tuple[Record, Record]]:
        """Return {seed: (baseline, candidate)} of the trials that ended ok on both sides."""
        before, after = by_seed(self.baseline), by_seed(self.candidate)
        found = {seed: (before[seed].record, after[seed].record) for seed in sorted(before.keys() & after.keys())}
        return {seed: (b, c) for seed, (b, c) in found.items() if b and c and b.outcome == "ok" and c.outcome == "ok"}


def by_seed(configuration: Configuration | None) -> dict[int, Row]:
    return {row.trial.seed: row for row in configuration.rows} if configuration else {}


def merge(side: Iterable[Group]) -> dict[str, Configuration]:
    """Return {id: configuration} over all suites: one row a seed, that of the latest record."""
    rows: dict[str, dict[int, Row]] = {}
    known = {}
    for one in (one for group in side for one in group.configurations):
        kept, known[one.id] = rows.setdefault(one.id, {}), one
        for row in one.rows:
            seed = row.trial.seed
            kept[seed] = max(kept.get(seed, row), row, key=lambda row: row.record.started_at if row.record else "")
    return {key: replace(one, rows=tuple(rows[key].values())) for key, one in known.items()}


def compare_match(match: Match) -> list[GateFinding]:
    """Return every finding in one configuration."""
    if match.candidate is None:
        return [_missing(match, "in the baseline, not in the candidate")]
    if match.baseline is None:
        wrong = [row for row in match.candidate.rows if row.outcome == "failed_check"]
        told = f"new in the candidate: {match.candidate.outcome}"
        return [
            _finding(match, FindingKind.NEW, 0, told),
            *([_failure(match, wrong, "failed_check", "new")] if wrong else []),
        ]
    compared = (_compare_outcomes, _find_untimed, _compare_memory, _compare_counts, _compare_kernels)
    return [finding for compare in compared for finding in compare(match)]


def _finding(match: Match, kind: FindingKind, code: int, message: str, suffix: str = "") -> GateFinding:
    return GateFinding(name=match.name + suffix, kind=kind, code=code, message=message)


def _note(match: Match, message: str) -> GateFinding:
    return _finding(match, FindingKind.NOTE, 0, message)


def _missing(match: Match, message: str, suffix: str = "") -> GateFinding:
    return _finding(match, FindingKind.MISSING, 4, message, suffix)


def _compare_outcomes(match: Match) -> list[GateFinding]:
    """Find changed outcomes by seed; equal changes share one finding."""
    before, after = by_seed(match.baseline), by_seed(match.candidate)
    both = [after[seed] for seed in sorted(before.keys() & after.keys())]
    changes = grouped(both, lambda row: (before[row.trial.seed].outcome, row.outcome))
    found = []
    for (old, new), rows in changes.items():
        if _is_worse(old, new):
            found.append(_failure(match, rows, new, f"{old} in the baseline"))
        elif old not in _ENDED and new in _ENDED:
            what, why = "is unsupported" if old == "unsupported" else "fails", before[rows[0].trial.seed].reason
            said = f"runs in the candidate and {what} in the baseline: {why or old}"
            found.append(_note(match, printable(said if len(rows) == 1 else f"{_format_seeds(rows)}: {said}")))
        elif new not in _ENDED or old not in _ENDED:
            found.append(_note(match, f"{new}, {'as' if old == new else old} in the baseline: {_format_seeds(rows)}"))
    for side, own, others in (("baseline", before, after), ("candidate", after, before)):
        if only := [row for seed, row in own.items() if seed not in others]:
            found.append(_note(match, f"in the {side} only, so in no pair: {_format_seeds(only)}"))
    return found


def _find_untimed(match: Match) -> Iterable[GateFinding]:
    """Find times that some pair has in the baseline only: an untimed candidate cannot be called slower."""
    for sample, suffix in TIMED.items():
        if any(seconds_of(old, sample) and not seconds_of(new, sample) for old, new in match.pairs.values()):
            yield _missing(match, "timed in the baseline, not in the candidate", suffix)
    timed = [[any(seconds_of(record, sample) for sample in TIMED) for record in pair] for pair in match.pairs.values()]
    if any(new for _, new in timed) and not any(old for old, _ in timed):
        yield _missing(match, "timed in the candidate, not in the baseline: nothing to compare with")


def _is_worse(old: str, new: str) -> bool:
    """Return whether the candidate lacks a sound result for a reason that the baseline does not share."""
    if new in _ENDED or new == old or (new in _UNENDED and old in _UNENDED):
        return False
    return old in (*_ENDED, "unsupported", *_UNENDED) or new in ("failed_check", *_UNENDED)


def _failure(match: Match, rows: list[Row], outcome: str, before: str) -> GateFinding:
    message = f"{outcome}, {before}: {_format_seeds(rows)}: {rows[0].reason or 'no reason recorded'}"
    return _finding(match, FindingKind.FAILED, 4, printable(message))


def _format_seeds(rows: list[Row]) -> str:
    seeds = [str(row.trial.seed) for row in rows]
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"


def _compare_memory(match: Match) -> Iterable[GateFinding]:
    """Find peaks whose growth (median over the pairs) exceeds ALLOWED, and peaks that only the baseline recorded.

    A peak is missing if the baseline recorded it in some pair and the candidate in none.
    """
    for sample, name in _MEMORY.items():
        sides = [[numbers(r.samples.get(sample)) for r in side] for side in zip(*match.pairs.values(), strict=True)]
        if sides and any(sides[0]) and not any(sides[1]):
            yield _missing(match, f"{name} memory recorded in the baseline, not in the candidate")
        peaks = _measured_in_both(match, "samples", sample)
        yield from _compare_peaks(match, sample, name, peaks)
    yield from _compare_largest_batch(match)
    tried = [(_peaks_of_tries(b), _peaks_of_tries(c)) for b, c in match.pairs.values()]
    if any(old for old, _ in tried) and not any(new for _, new in tried):
        yield _missing(match, "peak memory of each batch recorded in the baseline, not in the candidate")
    batches = [max(old.keys() & new.keys()) for old, new in tried if old.keys() & new.keys()]
    if batches:
        batch = min(batches)  # the largest batch that fits on both sides in every pair
        peaks = [(old[batch], new[batch]) for old, new in tried if batch in old and batch in new]
        yield from _compare_peaks(match, "peak_allocated_bytes", f"peak allocated at batch {batch}", peaks)


def _compare_peaks(match: Match, sample: str, name: str, peaks: list[tuple[float, float]]) -> Iterable[GateFinding]:
    if not peaks:
        return
    least, share = ALLOWED[sample]
    old = statistics.median(b for b, _ in peaks)
    growth, allowed = statistics.median(c - b for b, c in peaks), least + share * old
    if growth > allowed:
        sizes = f"{growth / MIB:+,.1f} MiB on {old / MIB:,.1f} MiB ({100 * growth / old:+.2g} %)"
        yield _finding(match, FindingKind.MEMORY, 1, f"{name} {sizes}; {allowed / MIB:.1f} MiB are allowed")


def _compare_largest_batch(match: Match) -> Iterable[GateFinding]:
    """Find a largest batch that fell (median over the pairs) by more than FEWER."""
    least, share = FEWER
    if largest := _measured_in_both(match, "samples", "max_batch"):
        old, new = (statistics.median(side) for side in zip(*largest, strict=True))
        fall, allowed = statistics.median(b - c for b, c in largest), least + share * old
        if fall > allowed:
            said = f"largest batch {-fall:+g}: from {old:g} to {new:g}; {allowed:.1f} fewer are allowed"
            yield _finding(match, FindingKind.MEMORY, 1, said)


def _peaks_of_tries(record: Record) -> dict[int, float]:
    """Return {batch: peak allocated bytes} of the batches of a max_batch trial that fit."""
    tries = record.work.get("tries") or []
    return {t["batch"]: peak for t in tries if t.get("fits") for peak in numbers([t.get("peak_allocated_bytes")])}


def _compare_counts(match: Match) -> Iterable[GateFinding]:
    """Find counts of one step that grew, by the median over the pairs."""
    for key, name in COUNTS.items():
        counted = _measured_in_both(match, "work", key)
        if counted and (growth := statistics.median(c - b for b, c in counted)) > 0:
            old, new = (statistics.median(side) for side in zip(*counted, strict=True))
            yield _finding(match, FindingKind.COUNT, 1, f"{name} {growth:+g}: from {old:g} to {new:g}")


def _measured_in_both(match: Match, field: str, key: str) -> list[tuple[float, float]]:
    """Return (baseline, candidate) of each pair whose records both hold the value; of a list, its highest."""
    found = []
    for pair in match.pairs.values():
        values = (getattr(record, field).get(key) for record in pair)
        old, new = (highest(numbers(value if isinstance(value, list) else [value])) for value in values)
        if old is not None and new is not None:
            found.append((old, new))
    return found


def _compare_kernels(match: Match) -> Iterable[GateFinding]:
    """Report names of kernels that came or went, as information only: a renamed kernel is no fault."""
    sides = list(match.pairs.values())
    old, new = ({name for pair in sides for name in pair[side].kernels} for side in (0, 1))
    words = [f"+ {_shorten(n)}" for n in sorted(new - old)] + [f"- {_shorten(n)}" for n in sorted(old - new)]
    if words:
        yield _finding(match, FindingKind.KERNELS, 0, f"other kernels ran: {first_of(words, 3)}")


def _shorten(kernel: object) -> str:
    return shortened(printable(str(kernel)), _LONGEST)


def compare_studies(baseline: Iterable[Group], candidate: Iterable[Group]) -> list[GateFinding]:
    """Find convergence verdicts of the candidate that are worse than the baseline's, recipe by recipe.

    Code 1: a recipe became INFERIOR or DIVERGED. 3: a recipe became INCONCLUSIVE that was as good as bf16, or both
    verdicts are void. 4: only the candidate's is void. `compare_match` handles studies without a control or a recipe.
    """
    old, new = ({s.title: s for group in groups for s in studies(group) if s.whole} for groups in (baseline, candidate))
    both = [title for title in new if title in old]
    judged = [(judge_study(old[title]), judge_study(new[title])) for title in both]
    return [finding for pair in judged for finding in _compare_verdicts(*pair)]


def _compare_verdicts(old: StudyVerdict, new: StudyVerdict) -> list[GateFinding]:
    title = f"verdict/{new.study.title}"
    if new.void:
        said = f"no verdict{', nor in the baseline' if old.void else ''}: {new.void}"
        return [GateFinding(name=title, kind=FindingKind.VERDICT, code=3 if old.void else 4, message=printable(said))]
    before = {} if old.void else {finding.arm.name: finding.verdict for finding in old.recipes}
    found = []
    for finding in new.recipes:
        was = before.get(finding.arm.name)
        code = _exit_code(was, finding.verdict)
        if code:
            message = f"{finding.verdict}, {was or 'not judged'} in the baseline: {finding.judgement.reason}"
            name = f"{title}/{finding.arm.name}"
            found.append(GateFinding(name=name, kind=FindingKind.VERDICT, code=code, message=printable(message)))
    return found


def _exit_code(was: Verdict | None, now: Verdict) -> int:
    if now in CAUGHT:
        return 0 if was in CAUGHT else 1
    return 3 if was in GOOD and now not in GOOD else 0
