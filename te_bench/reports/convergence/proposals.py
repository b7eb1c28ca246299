"""Search the designs of a convergence study in pairs that a budget holds: all recipes or one, whole trainings or branches.

A design concludes if its seeds have the power that a plan must have, by the spread that plans count on.
"""

import dataclasses
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from te_bench.experiments.plan import resolve
from te_bench.experiments.run_options import MOST_SEEDS
from te_bench.experiments.spec import Experiment, Options, Trial
from te_bench.reports.analysis.naming import arm_name
from te_bench.reports.convergence import planning
from te_bench.reports.convergence.budget import command
from te_bench.reports.convergence.earlier_runs import EarlierRuns, Machine, first_judgement
from te_bench.reports.convergence.forecast import forecast
from te_bench.reports.convergence.prediction import Option, gaps_of, listed, measured, nat

CLOSE = 0.05  # a design that proves less is worth naming for so much more power at the largest of GAPS


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A design with a number of seeds."""

    recipes: str
    number: int  # of recipes
    left_out: int  # recipes of the study as asked that are not in this design
    scope: str | None  # of branches: the part of training that they judge
    asked: bool  # the command line's own design
    option: Option  # its seeds, cost and power
    words: tuple[str, ...]  # of the command that runs it, without --seeds

    @property
    def command(self) -> str:
        return shlex.join([*self.words, "--seeds", str(self.option.rounds)])

    @property
    def shows(self) -> str:
        """What the design shows, and of what it shows nothing."""
        after = self.option.power_of_others
        which = "it" if self.number == 1 else "each" if after is None else "the first"
        said = f"whether {which} trains like bf16" + (f" {self.scope}" if self.scope else "")
        if after is not None:
            others = f"{self.number - 1} others pass" if self.number > 2 else "other passes"
            hardest = " the hardest" if self.number > 2 else ""
            said += f"; the {others} only where it does,{hardest} with a power of {listed(after)}"
        left = f"{self.left_out} other recipes" if self.left_out > 1 else "other recipe"
        nothing = [f"of the {left}"] if self.left_out else []
        nothing += ["of FP8 before"] if self.scope else []
        return said + (f"; nothing {' or '.join(nothing)}" if nothing else "")

    def replaces(self, other: "Proposal") -> bool:
        """Return whether it shows as much as the other design, with about as much power."""
        fewer, shorter = self.number < other.number, self.scope is not None and other.scope is None
        return not fewer and not shorter and self.option.at_half >= other.option.at_half - CLOSE

    def to_json(self) -> dict[str, Any]:
        told = {key: getattr(self, key) for key in ("recipes", "shows", "asked", "command")}
        return {**told, **dataclasses.asdict(self.option)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposals:
    """The designs that conclude within a budget, the strongest first; least: the one that concludes in the least time."""

    budget_s: float
    margin: float
    gap: float | None  # that was measured so far
    machine: Machine
    found: tuple[Proposal, ...]
    least: Proposal
    untaught: bool  # the data are random tokens, which teach no model

    @property
    def instead(self) -> bool:
        """Whether designs conclude, and that of the command line does not."""
        return bool(self.found) and not any(one.asked for one in self.found)

    def to_json(self) -> list[dict[str, Any]]:
        return [one.to_json() for one in self.found]

    def sentences(self) -> Iterator[tuple[str, str]]:
        """Yield a sentence, and the command that it is about or ""."""
        within = planning.duration(self.budget_s)
        gaps = ", ".join(nat(gap) for gap in gaps_of(self.margin, self.gap))
        said = f"Designs that conclude within {within}{self.machine.on}, the strongest first"
        if self.instead:
            said = (
                f"As asked, the study does not conclude within {within}{self.machine.on}. These do, the strongest first"
            )
        yield (
            f"{said}. Power is the chance that a recipe, or the one that is judged first, and A/A are called EQUIVALENT "
            f"within {self.margin:g} nat, where its true gap in nat is {gaps}{measured(self.gap)}:",
            "",
        )
        for one in self.found:
            seconds = one.option.seconds or 0.0
            takes = f"{self.machine.hours(seconds)}{self.machine.elapsed(seconds)}"
            cost = f"{one.option.rounds} seeds, {one.option.runs} runs, {takes}"
            said = f"  {one.recipes}: {cost}, power {listed(one.option.power)}. Shows {one.shows}"
            yield said + self._untaught, one.command

    def least_time(self) -> str:
        """Return the least time in which a design concludes, and its command; "" if one does in the budget."""
        if self.found:
            return ""
        takes = planning.duration((self.least.option.seconds or 0.0) / self.machine.slots)
        within = f"--budget {planning.duration(self.budget_s)}"
        least = f"no design concludes in {within}; the least takes about {takes}{self.machine.on}"
        return f"{least}{self._untaught}:\n  {self.least.command}"

    @property
    def _untaught(self) -> str:
        """What stands beside a command that would train on random tokens."""
        return ". Random tokens teach a model nothing: run it with --data text:FILE" if self.untaught else ""


def search(asked: Options, earlier: EarlierRuns, out: Path | None) -> Proposals | None:
    """Return the designs for the budget in `asked`; None where nothing is left to choose, or time or spread is unknown.

    Nothing is left in a pool, in a pilot, in a run that has begun and with --seeds. out: the value of --out.
    """
    one = _of_one_seed(asked)
    if asked.budget_s is None or asked.seeds or asked.as_pilot or "pool" in one.judgement:
        return None
    if first_judgement(one, earlier.journal):
        return None
    found, least, gap = list[Proposal](), list[Proposal](), None
    for options, only in _designs(one, asked):
        try:
            experiment = _of_one_seed(options, only)
        except ValueError:  # other options exclude the design, as --weights does --branch-at
            continue
        about = forecast(experiment, earlier)
        gap = about.gap if gap is None else gap  # of a branch as of the whole training
        about = dataclasses.replace(about, gap=gap)
        fewest, takes = about.needed, about.takes
        if fewest is None or fewest > MOST_SEEDS or takes is None:
            continue
        words = command("convergence", options, earlier.machine, earlier.timings)
        words += [*(["--only", only] if only else []), *(["--out", str(out)] if out else [])]
        recipes, every = _recipes(experiment), _recipes(one)
        proposal = Proposal(
            recipes=_names(recipes, about.primary),
            number=len(recipes),
            left_out=len(every) - len(recipes),
            scope=about.scope,
            asked=options == asked and only is None,
            option=about.option(fewest),
            words=tuple(words),
        )
        least.append(proposal)
        most = min(MOST_SEEDS, takes.within(asked.budget_s * earlier.machine.slots))
        if most < fewest:
            continue
        proposal = dataclasses.replace(proposal, option=about.option(max(fewest, about.enough(most))))
        if not any(other.replaces(proposal) for other in found):
            found.append(proposal)
    if not least:
        return None
    return Proposals(
        budget_s=asked.budget_s,
        margin=float(str(one.judgement["margin"])),
        gap=gap,
        machine=earlier.machine,
        found=tuple(sorted(found, key=lambda one: -one.option.at_half)),
        least=min(least, key=lambda one: one.option.seconds or 0.0),
        untaught="random" in asked.data.values(),
    )


def _of_one_seed(options: Options, only: str | None = None) -> Experiment:
    return resolve("convergence", dataclasses.replace(options, budget_s=None, seeds=1), only=only)


def _designs(one: Experiment, asked: Options) -> Iterator[tuple[Options, str | None]]:
    """Yield options and --only of designs, those that prove more first: as asked, one recipe alone, and branches of both."""
    control = next((trial for trial in one.trials if trial.problem.get("arm") == "control"), one.trials[0])
    branch_at = planning.branch_of(control) if asked.branch_at is None else None
    recipes = _recipes(one)
    ways: list[tuple[Options, str | None]] = [(asked, None)]
    if len(recipes) > 1 and recipes[0].recipe is not None:
        if one.judgement.get("primary") == recipes[0].cell:  # it stays a part of its plan, in which it is judged first
            ways.append((asked, f"*-control-*,*-aa-*,*-broken-*,*/{recipes[0].recipe}/*"))
        else:
            ways.append((dataclasses.replace(asked, recipes=(recipes[0].recipe,)), None))
    for step in (asked.branch_at, *([branch_at] if branch_at else [])):
        for options, part in ways:
            yield dataclasses.replace(options, branch_at=step), part


def _recipes(experiment: Experiment) -> list[Trial]:
    return [trial for trial in experiment.trials if trial.problem.get("arm") == "recipe"]


def _names(recipes: list[Trial], primary: str | None) -> str:
    if len(recipes) == 1:
        return arm_name(recipes[0])
    return f"{len(recipes)} recipes" + (f", {primary} first" if primary else "")
