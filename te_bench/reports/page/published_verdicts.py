"""Show the published verdicts on convergence, with margin, pairs, power and cost, as a table and as a sentence."""

import functools
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from te_bench.experiments.problems import TrainingProblem
from te_bench.reports.analysis.naming import recipe_name
from te_bench.reports.analysis.rows import grouped, load_results, printable
from te_bench.reports.convergence.effort import Effort, effort_of
from te_bench.reports.convergence.equivalence import Verdict
from te_bench.reports.convergence.study import Study
from te_bench.reports.convergence.study_verdict import ArmVerdict, StudyVerdict
from te_bench.reports.convergence.verdict import judge_group
from te_bench.reports.page import text
from te_bench.reports.page.table import Table, filled, number, word
from te_bench.reports.page.verdict_tables import hours, powers

NAMED = 3  # configurations that are named at most; the rest is counted


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """The recipes of a study with one verdict."""

    folder: str
    found: StudyVerdict
    cost: Effort
    label: str
    findings: tuple[ArmVerdict, ...]

    @property
    def names(self) -> str:
        return named(finding.arm.name for finding in self.findings)

    @property
    def pairs(self) -> int | None:
        """The fewest pairs behind the verdict; None where there is none yet."""
        return min((c.n for finding in self.findings if (c := finding.judgement.comparison)), default=None)

    @property
    def void(self) -> bool:
        return self.found.void is not None and not self.found.unfinished

    @property
    def runs(self) -> str:
        return (
            str(self.cost.planned)
            if self.cost.done == self.cost.planned
            else f"{self.cost.done} of {self.cost.planned}"
        )


def asked(study: Study) -> str:
    """Return a study's training, its first recipe and the number of the others, of those that ran if it was given up."""
    ran = [arm for arm in study.recipes if arm.ended or not study.broken_off]
    recipes = dict.fromkeys(recipe_name(arm.trial.recipe) or arm.name for arm in ran)
    return f"{training(study)}: {named(recipes, most=1)}"


def training(study: Study) -> str:
    """Return model and length of a study: gpt2, 2,035 steps."""
    p = TrainingProblem.of(study.arms[0].trial)
    branch = "" if p.branch_at is None else f", FP8 from step {p.branch_at:,} on"
    return printable(f"{p.model}, {p.steps:,} steps{branch}")


def named(names: Iterable[str], most: int = NAMED) -> str:
    """Return the first names and the number of the others; names have commas."""
    every = list(names)
    return "; ".join([*every[:most], *([f"{len(every) - most} more"] if len(every) > most else [])])


def table(results: Path) -> Table:
    """Return a row for each verdict of each published study; pilots and exploration are left out."""
    shown = [
        {
            "Training": word(training(row.found.study)),
            "Configurations": word(row.names),
            "Verdict": word(row.label),
            "Margin, nat": number(row.found.margin, lambda margin: f"{margin:g}"),
            "Pairs": number(row.pairs, text.count),
            "Power": word(powers(row.findings)),
            "Runs": word(row.runs),
            "Cost": word(hours(row.cost)),
            "Records": word(row.folder),
        }
        for row in _rows(results.resolve())
    ]
    return filled("verdicts", "Published verdicts", shown, text_columns=3)


def sentence(results: Path) -> str:
    """Return the verdicts that are not void, and what is not finished, study by study."""
    rows = [row for row in _rows(results.resolve()) if not row.void]
    return f"{'. '.join(map(_said, grouped(rows, lambda row: row.folder).values()))}.\n"


def _said(rows: Sequence[_Row]) -> str:
    of = rows[0]
    what = f"**{training(of.found.study)}, margin {of.found.margin:g} nat, {hours(of.cost)}.**"
    if of.found.unfinished:
        return f"{what} Not finished: {of.runs} runs"
    verdicts = [
        f"{row.label}{f' with {row.pairs} pairs, power {powers(row.findings)}' if row.pairs else ''}: {row.names}"
        for row in rows
    ]
    return f"{what} {'. '.join(verdicts)}"


@functools.cache  # two pages show them, and reading takes seconds
def _rows(results: Path) -> list[_Row]:
    """Return the verdicts, then the studies that are not finished, then those that are void; results: an absolute path."""
    words = [str(verdict) for verdict in Verdict]

    def place(row: _Row) -> tuple[bool, bool, int]:
        return row.void, row.found.unfinished, words.index(row.label) if row.label in words else len(words)

    return sorted(_of_folders(results), key=place)


def _of_folders(results: Path) -> Iterator[_Row]:
    listed = tomllib.loads((results / "published.toml").read_text(encoding="utf-8"))
    for folder in (folder for folder, said in listed.items() if said.get("suite") == "convergence"):
        for group in load_results([results / folder]).groups:
            for found in judge_group(group)[0]:
                if found.study.pilot or found.study.broken_off:
                    continue
                cost = effort_of(found.study)
                for label, findings in grouped(found.recipes, found.label).items():
                    yield _Row(folder=folder, found=found, cost=cost, label=label, findings=tuple(findings))
