"""The verdict on a convergence study: each configuration's against bf16, and the verdict on all of them."""

from dataclasses import dataclass
from statistics import fmean

from te_bench.experiments.run_options import fewer_words
from te_bench.reports.analysis.rows import NOT_RUN
from te_bench.reports.convergence.band import Band
from te_bench.reports.convergence.equivalence import CandidateVerdict, Verdict
from te_bench.reports.convergence.speedup import Speedup
from te_bench.reports.convergence.study import Study, StudyArm

PASSED, FAILED, UNDECIDED, INCOMPLETE = 0, 1, 3, 4  # exit codes
GOOD = (Verdict.EQUIVALENT, Verdict.NON_INFERIOR)
CAUGHT = (Verdict.INFERIOR, Verdict.DIVERGED)


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
            return "not finished"
        return f"{finding.verdict}{' (void)' if self.void and finding in self.recipes else ''}"

    def reason(self, finding: ArmVerdict) -> str | None:
        """Return the reason for an arm's verdict; None if only trials that have not run yet are missing."""
        open_ended = self.unfinished or self.study.broken_off
        if open_ended and (finding.missing or "").endswith(f"({NOT_RUN})"):
            return None
        return finding.missing or finding.judgement.reason

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
        """The verdict in one sentence; for an unfinished run it ends with the command that continues it."""
        if self.unfinished:
            return f"Unfinished: {self.void} to go. Go on: {self.study.again}"
        if self.void:
            return f"No verdict: {self.void}."
        like = self.study.reference
        words = {
            Verdict.EQUIVALENT: ("trains", "train", f" like {like} (final loss within {self.margin:g} nat)"),
            Verdict.NON_INFERIOR: ("is", "are", f" not worse than {like} by {self.margin:g} nat"),
            Verdict.INFERIOR: ("ends", "end", f" more than {self.margin:g} nat above {like}"),
            Verdict.DIVERGED: ("diverged", "diverged", ""),
            Verdict.INCONCLUSIVE: ("is", "are", " undecided"),
        }
        parts = []
        for verdict, (one, several, what) in words.items():
            names = [self._named(f) for f in self.recipes if f.verdict is verdict]
            if names:
                verb = several if len(names) > 1 or self.study.fewer_bits else one  # "weights" is plural
                parts.append(f"{verdict}: {_all(names)} {verb}{what}")
        if (first := self.study.primary) is not None and any(found.judgement.waits for found in self.recipes):
            parts.append(f"{first.name} is judged first, and the others pass only where it does")
        said = ("Exploration, no test: " if self.exploration else "") + "; ".join(parts) + "."
        return said if self.study.scope is None else f"FP8 {self.study.scope}: {said} This says nothing of FP8 before."

    def _named(self, found: ArmVerdict) -> str:
        needed, name = found.judgement.seeds_needed, found.arm.name
        if self.study.fewer_bits and found.arm.trial.recipe is None:  # bf16 is also the reference's, so leave it out
            name = " and ".join(fewer_words(found.arm.trial.problem))
        if found.verdict is Verdict.INCONCLUSIVE and needed:
            return f"{name} (at least {needed} seeds needed)"
        return name


def _all(names: list[str]) -> str:
    """Return A, B and C; names with commas are separated by semicolons."""
    if len(names) == 1 or any("," in name for name in names):
        return "; ".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
