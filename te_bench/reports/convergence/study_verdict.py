"""The verdict on a convergence study: each configuration's against bf16, and the verdict on all of them."""

from dataclasses import dataclass
from statistics import fmean

from te_bench.experiments.run_options import fewer_words
from te_bench.reports.analysis.rows import NOT_RUN
from te_bench.reports.convergence.band import Band
from te_bench.reports.convergence.equivalence import CandidateVerdict, Verdict, in_words
from te_bench.reports.convergence.speedup import Speedup
from te_bench.reports.convergence.study import Study, StudyArm

PASSED, FAILED, UNDECIDED, INCOMPLETE = 0, 1, 3, 4  # exit codes
GOOD = (Verdict.EQUIVALENT, Verdict.NON_INFERIOR)
CAUGHT = (Verdict.INFERIOR, Verdict.DIVERGED)
NOT_FINISHED, WAITS = "not finished", "waits for the others"


@dataclass(frozen=True, kw_only=True)
class ArmVerdict:
    """The verdict on one arm against the control."""

    arm: StudyArm
    seeds: tuple[int, ...]  # that ended in both arms
    judgement: CandidateVerdict
    native_gap: float | None = None  # of losses evaluated as the arm trains; the verdict does not use it
    trained_gap: float | None = None  # of training losses over the last tenth of the steps; likewise
    speedup: Speedup | None = None
    band: Band | None = None
    # Steps at which every pair was evaluated, and the mean gaps there.
    gap_curve: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    missing: str | None = None  # planned seeds without a result
    hidden: bool = False  # its gap and its losses, until its planned runs are done

    @property
    def verdict(self) -> Verdict:
        return self.judgement.verdict


@dataclass(frozen=True, kw_only=True)
class StudyVerdict:
    """The verdicts on one study's configurations, and the verdict on all of them."""

    study: Study
    margin: float
    alpha: float
    recipes: tuple[ArmVerdict, ...]
    aa: ArmVerdict | None
    broken: ArmVerdict | None
    void: str | None  # why no verdict counts
    exploration: bool  # margin or alpha were chosen after the plan
    notes: tuple[str, ...]
    unfinished: bool = False  # void because runs are missing
    sound: bool = True  # but for missing runs nothing makes it void

    @property
    def findings(self) -> tuple[ArmVerdict, ...]:
        return tuple(found for found in (*self.recipes, self.aa, self.broken) if found is not None)

    def gap_percent(self, finding: ArmVerdict) -> float | None:
        """Return the gap in per cent of the mean of bf16's final losses."""
        c, control = finding.judgement.comparison, self.study.control
        if c is None or control is None or not control.finals:
            return None
        return 100 * c.gap / fmean(control.finals.values())

    def label(self, finding: ArmVerdict) -> str:
        """Return the verdict as shown in tables."""
        if finding.hidden or (finding.missing and (self.unfinished or self.study.broken_off)):
            return NOT_FINISHED
        if self._waits(finding):
            return WAITS
        if finding not in self.recipes or self.stands:
            return str(finding.verdict)
        open_ended = self.unfinished and any(other is not None and other.hidden for other in (self.aa, self.broken))
        return f"{finding.verdict} ({NOT_FINISHED if open_ended else 'void'})"

    def _waits(self, finding: ArmVerdict) -> bool:
        """Whether runs of others may still change a recipe's verdict: until they are done Holm counts them as lost."""
        if finding not in self.recipes:
            return False
        c, undecided = finding.judgement.comparison, finding.verdict is Verdict.INCONCLUSIVE
        alone = c is not None and c.verdict is not Verdict.INCONCLUSIVE
        return undecided and alone and any(other.hidden for other in self.recipes)

    def reason(self, finding: ArmVerdict) -> str | None:
        """Return the reason for an arm's verdict; None if only trials that have not run yet are missing."""
        open_ended = self.unfinished or self.study.broken_off
        if open_ended and (finding.missing or "").endswith(f"({NOT_RUN})"):
            return None
        return finding.missing or finding.judgement.reason

    @property
    def stands(self) -> bool:
        """Whether the verdicts of configurations whose runs are done count."""
        return self.sound if self.unfinished else not self.void

    @property
    def exit_code(self) -> int:
        """4: void or incomplete; 1: a recipe is INFERIOR or DIVERGED; 3: one is INCONCLUSIVE; 0: all are as good as bf16.

        An exploration returns 3 instead of 0.
        """
        if self.void:
            return INCOMPLETE
        if any(found.verdict in CAUGHT for found in self.recipes):
            return FAILED
        if any(found.missing for found in self.recipes):
            return INCOMPLETE
        good = all(found.verdict in GOOD for found in self.recipes)
        return PASSED if good and not self.exploration else UNDECIDED

    @property
    def sentence(self) -> str:
        """The verdict in words; for an unfinished run it ends with the command that continues it."""
        return f"{self.headline} Go on: {self.study.again}" if self._to_go else self.headline

    @property
    def headline(self) -> str:
        """The verdict in words, without a command."""
        if self.void and not self.unfinished:
            return f"No verdict: {self.void}."
        said = [self._said()] if self.stands and self._shown() else []
        said += [f"Unfinished: {to_go}."] if (to_go := self._to_go) else []
        why = "; ".join(found.missing or found.judgement.reason for found in self.recipes)
        return " ".join(said) or f"No verdict: {why}."

    @property
    def _to_go(self) -> str:
        if self.unfinished:
            return f"{self.void} to go"
        left = self.study.to_go if not self.void and any(found.hidden for found in self.findings) else 0
        return f"{left} trials to go" if left else ""

    def _shown(self) -> list[ArmVerdict]:
        """Return the recipes whose runs are done, and those that diverged before."""
        return [found for found in self.recipes if not found.hidden or found.verdict is Verdict.DIVERGED]

    def _said(self) -> str:
        like, margin = self.study.reference, self.margin
        words: tuple[tuple[str, bool, str, str, str], ...] = (
            (Verdict.EQUIVALENT, False, "trains", "train", f" like {like} (final loss within {margin:g} nat)"),
            (Verdict.NON_INFERIOR, False, "is", "are", f" not worse than {like} by {margin:g} nat"),
            (Verdict.INFERIOR, False, "ends", "end", f" more than {margin:g} nat above {like}"),
            (Verdict.DIVERGED, False, "diverged", "diverged", ""),
            (Verdict.INCONCLUSIVE, True, "ends", "end", f" above {like}, perhaps by more than {margin:g} nat"),
            (Verdict.INCONCLUSIVE, False, "is", "are", " undecided"),
            (WAITS, False, "is", "are", " done, and judged with the others"),
        )
        parts = []
        for verdict, worse, one, several, what in words:
            told = [f for f in self._shown() if verdict == self._word(f) and worse is _shown_worse(f, verdict)]
            if told:
                verb = several if len(told) > 1 or self.study.fewer_bits else one  # "weights" is plural
                parts.append(f"{verdict}: {_all([self._named(f) for f in told])} {verb}{what}")
        lost = [found.arm.name for found in self.recipes if found.hidden and found.verdict is not Verdict.DIVERGED]
        if lost and not self.study.to_go:
            parts.append(f"{NOT_FINISHED}: {_all(lost)}")
        if (first := self.study.primary) is not None and any(found.judgement.waits for found in self.recipes):
            parts.append(f"{first.name} is judged first, and the others pass only where it does")
        said = ("Exploration, no test: " if self.exploration else "") + "; ".join(parts) + "."
        return said if self.study.scope is None else f"FP8 {self.study.scope}: {said} This says nothing of FP8 before."

    def _word(self, found: ArmVerdict) -> str:
        return WAITS if self._waits(found) else str(found.verdict)

    def _named(self, found: ArmVerdict) -> str:
        needed, name = found.judgement.seeds_needed, found.arm.name
        if self.study.fewer_bits and found.arm.trial.recipe is None:  # bf16 is also the reference's, so leave it out
            name = " and ".join(fewer_words(found.arm.trial.problem))
        c = found.judgement.comparison
        if found.verdict is not Verdict.INCONCLUSIVE or c is None or c.interval is None:
            return name
        unit = "seeds" if self.study.pool is None else "rounds"
        more = f"; at least {needed} {unit} needed" if needed and not self._waits(found) else ""
        return f"{name} ({in_words(c.gap, c.interval, c.alpha)}{more})"


def _shown_worse(found: ArmVerdict, verdict: str) -> bool:
    """Whether an undecided arm's interval is above 0, and reaches beyond the margin."""
    c = found.judgement.comparison
    if verdict != Verdict.INCONCLUSIVE or c is None or c.interval is None:
        return False
    return c.interval[0] > 0 and c.interval[1] > c.margin


def _all(names: list[str]) -> str:
    """Return A, B and C; names with commas are separated by semicolons."""
    if len(names) == 1 or any("," in name for name in names):
        return "; ".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
