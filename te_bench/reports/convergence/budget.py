"""Choose the number of seeds of a convergence run by its time, and name the pilot to run if records lack times."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from te_bench.experiments import run_options
from te_bench.experiments.spec import Experiment, Options
from te_bench.reports.convergence import planning
from te_bench.reports.convergence.design import MOST_ROUNDS, Design, design_of, trial_seconds
from te_bench.reports.convergence.earlier_runs import EarlierRuns, Machine, first_judgement
from te_bench.reports.convergence.forecast import Forecast, fewest_seeds, forecast
from te_bench.reports.convergence.prediction import listed
from te_bench.reports.convergence.skewed import FEWEST


class BudgetError(ValueError):
    """--budget gives no number of seeds: it is too small for a verdict, or the time of a seed is unknown."""


class TooSmallError(BudgetError):
    """--budget is too small for a verdict."""


def seeds_of_budget(one: Experiment, asked: Options, earlier: EarlierRuns, out: Path) -> tuple[int, str | None]:
    """Return how many seeds, or rounds of a pool, --budget takes, and a sentence on what the rest of it would buy or None.

    It takes as many as hardly gain from more, at most what fits; and those of the plan if a run has begun.

    Raises BudgetError if the budget is too small for a verdict, or neither a record nor an estimate gives the time of a
    configuration, and ValueError if it is too small for --seeds.
    """
    machine = earlier.machine
    first = first_judgement(one, earlier.journal)
    if first and asked.seeds is None:
        return int(str(first["seeds"])), None
    taken, _ = trial_seconds(one.trials, earlier)
    missing = [name for name, time in taken.items() if time is None]
    if missing:
        raise BudgetError(_ask_for_pilot(one, asked, machine, out, missing))
    about: Design | Forecast
    if "pool" in one.judgement:
        about, unit, fewest, limit = design_of(one, earlier), "rounds", FEWEST, MOST_ROUNDS
    else:
        about, unit, fewest, limit = forecast(one, earlier), "seeds", fewest_seeds(one), run_options.MOST_SEEDS
    takes = about.takes
    assert takes is not None
    assert asked.budget_s is not None
    most = min(limit, takes.within(asked.budget_s * machine.slots))
    budget = planning.duration(asked.budget_s)
    if most < fewest:
        needed = fewest if asked.as_pilot or not about.known else about.needed
        if needed is None:
            raise TooSmallError(
                f"--budget {budget} holds no verdict, and by the planned spread no number of {unit} would"
            )
        what, least = "pilot" if asked.as_pilot else "verdict", planning.duration(takes.of(needed) / machine.slots)
        raise TooSmallError(f"--budget {budget}: a {what} needs {needed} {unit}, which take about {least}{machine.on}")
    if asked.seeds is not None and asked.seeds > most:
        asked_s = planning.duration(takes.of(asked.seeds) / machine.slots)
        raise ValueError(
            f"--seeds {asked.seeds} take about {asked_s}{machine.on}, and --budget is {budget}: give --seeds {most}, or a "
            "larger budget"
        )
    seeds = asked.seeds or (most if asked.as_pilot else about.enough(most))
    if asked.seeds or seeds == most:
        return seeds, None
    return seeds, (
        f"{seeds} {unit} suffice for half the margin. --seeds {most}, which --budget {budget} holds, take "
        f"{machine.hours(takes.of(most))} and have a power of {listed(about.option(most).power)} in place of "
        f"{listed(about.option(seeds).power)}"
    )


def _ask_for_pilot(one: Experiment, asked: Options, machine: Machine, out: Path, missing: Sequence[str]) -> str:
    """Return a message with the pilot to run first, because the time of a seed is unknown."""
    pooled = "pool" in one.judgement  # a pool's pilot also gives the spread, and its rounds begin the plan
    folder = str(out) if pooled else f"{out}-pilot"
    # A pilot of pairs is shorter than the run: its time does not depend on the schedule or on when FP8 begins.
    less = {"as_pilot": None} | (
        {} if pooled else dict.fromkeys(("steps", "tokens", "warmup", "branch_at", "bf16_from"))
    )
    words = command(one.suite, replace(asked, **less), machine)
    # As many runs at the same time as in the run.
    seeds = 1 if asked.share is None else -(-machine.slots // len(one.trials))
    short = ["--seeds", str(seeds), "--steps", str(planning.pilot_steps(one.trials[0].problem))]
    words += ["--as-pilot"] if pooled else short
    words += ["--out", folder]
    option = "--out" if pooled else "--pilot"
    unknown = f"{len(missing)} of {len(one.trials)} configurations, such as {missing[0]}"
    return (
        f"--budget: no record says how long a seed takes on this machine ({unknown}). Run a pilot\n"
        f"  {shlex.join(words)}\nand give the same command again with {option} {shlex.quote(folder)}"
    )


def command(suite: str, asked: Options, machine: Machine, pilots: Sequence[Path] = ()) -> list[str]:
    """Return the words of the command that runs the suite as asked, but for --seeds and --out; pilots: of --pilot."""
    words = ["te-bench", "run", suite, "--device", asked.device]
    words += [] if machine.asked is None else ["--gpus", machine.asked]
    words += run_options.words(asked)
    for model, data in asked.data.items():
        words += ["--data", f"{model}={data}" if model else data]
    words += [] if asked.cache is None else ["--cache", str(asked.cache)]
    return words + [word for folder in pilots for word in ("--pilot", str(folder))]
