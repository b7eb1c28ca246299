"""Show the published verdicts on convergence, with gap, margin, pairs, power and cost, as a table and as a list."""

import functools
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from te_bench.experiments.problems import TrainingProblem
from te_bench.reports.analysis.naming import recipe_name
from te_bench.reports.analysis.rows import grouped, load_results, printable
from te_bench.reports.convergence.effort import Effort, effort_of
from te_bench.reports.convergence.equivalence import Verdict, level
from te_bench.reports.convergence.speedup import Speedup
from te_bench.reports.convergence.study import Study
from te_bench.reports.convergence.study_verdict import ArmVerdict, StudyVerdict
from te_bench.reports.convergence.verdict import judge_group
from te_bench.reports.page import text
from te_bench.reports.page.table import filled, number, word
from te_bench.reports.page.tables import escape, markdown
from te_bench.reports.page.verdict_tables import half, hours, interval, powers, tighter, within_hosts

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
    def problem(self) -> TrainingProblem:
        return _problem(self.found.study)

    @property
    def shown(self) -> ArmVerdict | None:
        """The recipe that the row shows alone: one with a gap, and a verdict that counts."""
        return self.findings[0] if _alone(self.found, self.findings[0]) else None

    @property
    def place(self) -> tuple[bool, int, bool, int]:
        """Long trainings first, what is void last."""
        words = [str(verdict) for verdict in Verdict]
        steps = self.problem.steps or 0
        rank = words.index(self.label) if self.label in words else len(words)
        return not (self.found.stands or self.found.unfinished), -int(steps), self.shown is None, rank

    @property
    def runs(self) -> str:
        done, planned = self.cost.done, self.cost.planned
        return f"{done} runs" if done == planned else f"{done} of {planned} runs"


def asked(study: Study) -> str:
    """Return a study's training, its first recipe and the number of the others, of those that ran if it was given up."""
    ran = [arm for arm in study.recipes if arm.ended or not study.broken_off]
    recipes = dict.fromkeys(recipe_name(arm.trial.recipe) or arm.name for arm in ran)
    return f"{training(study)}: {named(recipes, most=1)}"


def training(study: Study) -> str:
    """Return model and length of a study: gpt2, 2,035 steps."""
    p = _problem(study)
    branch = "" if p.branch_at is None else f", FP8 from step {p.branch_at:,} on"
    return printable(f"{p.model}, {p.steps:,} steps{branch}")


def _problem(study: Study) -> TrainingProblem:
    return TrainingProblem.of(study.arms[0].trial)


def named(names: Iterable[str], most: int = NAMED) -> str:
    """Return the first names and the number of the others; names have commas."""
    every = list(names)
    return "; ".join([*every[:most], *([f"{len(every) - most} more"] if len(every) > most else [])])


def table(results: Path) -> str:
    """Return a row for each verdict of each published study, in Markdown, and below what holds by tighter margins.

    Pilots and exploration are left out.
    """
    shown = [
        {
            "Training": word(training(row.found.study)),
            "Configuration": word(row.names),
            "Verdict": word(row.label),
            "Margin, nat": number(row.found.margin, lambda margin: f"{margin:g}"),
            "Gap, nat": word(_gap(row)),
            "To equal loss [95 %]": within_hosts(speed.to_equal_loss, speed) if (speed := _speed(row)) else word(None),
            "Pairs": number(row.pairs, text.count),
            "Power": word(powers(row.findings)),
            "Cost of the study": word(f"{row.runs}, {hours(row.cost)}"),
            "Records": word(row.folder),
        }
        for row in _rows(results.resolve())
    ]
    studies = {id(row.found): row.found for row in _rows(results.resolve())}.values()
    closer = [f"**{escape(training(found.study))}.** {escape(said)}\n" for found in studies if (said := tighter(found))]
    made = markdown(filled("verdicts", "Published verdicts", shown, text_columns=3))
    return "\n".join([made, *closer])


def summary(results: Path) -> str:
    """Return what the longest trainings of each model showed, a line for each recipe, in Markdown."""
    lines = list[str]()
    rows = [row for row in _rows(results.resolve()) if row.found.stands and not row.findings[0].hidden]
    for of_model in grouped(rows, lambda row: row.problem.model).values():
        longest = [row for row in of_model if row.problem.steps == of_model[0].problem.steps]
        for of_training in grouped(longest, lambda row: (training(row.found.study), _tokens(row.problem))).values():
            first = of_training[0]
            lines += [f"{training(first.found.study)}, {_tokens(first.problem):.0f} M tokens a run:", ""]
            lines += [f"- {_said(row)}." for row in of_training] + [""]
    return "\n".join(lines)


def _tokens(p: TrainingProblem) -> float:
    return int(p.steps or 0) * int(p.batch) * p.block * int(p.accumulate or 1) / 1e6


def _said(row: _Row) -> str:
    cost = f"{row.runs}, {hours(row.cost)}"
    if row.shown is None or (c := row.shown.judgement.comparison) is None:
        return f"**{row.names}: {row.label}** ({cost})"
    study, power = row.found.study, powers([row.shown])
    share, side = abs(row.found.gap_percent(row.shown) or 0), "above" if c.gap > 0 else "below"
    ends = (
        f"It ends {abs(c.gap):.4f} nat ({share:.2f} %) {side} {study.reference}"
        if c.gap
        else f"It ends as {study.reference} does"
    )
    known = [f"{level(c.alpha)} {interval(c.interval)}"] if c.interval else []
    known += [f"{c.n} seeds{f', power {power} at a gap of 0' if power else ''}", cost]
    said = f"**{row.names}: {row.label} at a margin of {c.margin:g} nat.** {ends} ({'; '.join(known)})"
    speed = _speed(row)
    if speed is None or speed.to_equal_loss is None:
        return said
    on = f" from the {speed.within_hosts.replace('share', 'that share')}" if speed.within_hosts else ""
    return f"{said}. It reaches {study.whose} final loss {text.speedup(speed.to_equal_loss)} as fast, we estimate{on}"


def _gap(row: _Row) -> str | None:
    c = None if row.shown is None else row.shown.judgement.comparison
    if c is None:
        return None
    if c.interval is None or (ends := c.interval_95) is None:
        return text.signed(c.gap)
    known = f"95 % {interval(ends)} (±{text.loss(half(ends))})"
    return f"{text.signed(c.gap)}, {level(c.alpha)} {interval(c.interval)}, {known}"


def _speed(row: _Row) -> Speedup | None:
    return None if row.shown is None else row.shown.speedup


@functools.cache  # two pages show them, and reading takes seconds
def _rows(results: Path) -> list[_Row]:
    return sorted(_of_folders(results), key=lambda row: row.place)


def _of_folders(results: Path) -> Iterator[_Row]:
    listed = tomllib.loads((results / "published.toml").read_text(encoding="utf-8"))
    for folder in (folder for folder, said in listed.items() if said.get("suite") == "convergence"):
        for group in load_results([results / folder]).groups:
            for found in judge_group(group)[0]:
                if found.study.pilot or found.study.broken_off:
                    continue
                cost = effort_of(found.study)
                for (label, _), findings in grouped(found.recipes, functools.partial(_together, found)).items():
                    yield _Row(folder=folder, found=found, cost=cost, label=label, findings=tuple(findings))


def _together(found: StudyVerdict, finding: ArmVerdict) -> tuple[str, str]:
    """Return what the findings of a row share: a gap that counts has a row of its own."""
    return found.label(finding), finding.arm.name if _alone(found, finding) else ""


def _alone(found: StudyVerdict, finding: ArmVerdict) -> bool:
    return found.stands and finding.judgement.comparison is not None
