"""How many seeds a convergence run has time for, and the pilot to run where no record tells."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from te_bench.experiments import run_options
from te_bench.experiments.spec import Experiment, Options
from te_bench.reports.convergence import planning
from te_bench.reports.convergence.design import design_of, trial_seconds
from te_bench.reports.convergence.earlier_runs import EarlierRuns, Machine, first_judgement
from te_bench.reports.convergence.forecast import fewest_seeds


def seeds_of_budget(one: Experiment, asked: Options, earlier: EarlierRuns, out: Path) -> int:
    """As many seeds as --budget holds, or those of a run that has begun.

    Raises ValueError for a budget that is too small for a verdict or for the --seeds that were asked for, and for
    configurations whose time neither a record nor an assumption says.
    """
    machine = earlier.machine
    first = first_judgement(one, earlier.journal)
    if first and asked.seeds is None:
        return int(str(first["seeds"]))
    if "pool" in one.judgement:
        return _rounds_of_budget(one, asked, earlier, out)
    taken, _ = trial_seconds(one.trials, earlier)
    missing = [name for name, time in taken.items() if time is None]
    if missing:
        raise ValueError(_ask_for_pilot(one, asked, machine, out, missing))
    assert asked.budget_s is not None
    fault = {trial.name for trial in one.trials if trial.problem["arm"] == "broken"}
    seed_s = sum(time or 0.0 for name, time in taken.items() if name not in fault)
    takes = planning.SeedSeconds(
        seed_s=seed_s, fault_s=sum(taken[name] or 0.0 for name in fault), faults=int(str(one.judgement["fault_runs"]))
    )
    most = planning.seeds_within(
        asked.budget_s, slots=machine.slots, takes=takes, where=machine.on, fewest=fewest_seeds(one)
    )
    if asked.seeds is not None and asked.seeds > most:
        needed = planning.duration(takes.of(asked.seeds) / machine.slots)
        raise ValueError(
            f"--seeds {asked.seeds} take about {needed}{machine.on}, and --budget is "
            f"{planning.duration(asked.budget_s)}: give --seeds {most}, or a larger budget"
        )
    return asked.seeds or most


def _rounds_of_budget(one: Experiment, asked: Options, earlier: EarlierRuns, out: Path) -> int:
    """The same of a plan whose recipes share a pool of bf16 runs."""
    design = design_of(one, earlier)
    if design.seconds(1) is None:
        missing = [trial.name for trial in one.trials]
        raise ValueError(_ask_for_pilot(one, asked, earlier.machine, out, missing))
    assert asked.budget_s is not None
    most = design.rounds_within(asked.budget_s)
    if asked.seeds is not None and asked.seeds > most:
        raise ValueError(f"--seeds {asked.seeds}: --budget {planning.duration(asked.budget_s)} holds {most} rounds")
    return asked.seeds or most


def _ask_for_pilot(one: Experiment, asked: Options, machine: Machine, out: Path, missing: Sequence[str]) -> str:
    """What to run first, where nothing says how long a seed takes."""
    pooled = "pool" in one.judgement  # a pool's pilot tells the spread too, and its rounds are the first of the plan
    folder = str(out) if pooled else f"{out}-pilot"
    words = ["te-bench", "run", one.suite, "--device", asked.device]
    words += [] if machine.asked is None else ["--gpus", machine.asked]
    # A pilot of pairs is shorter than the run: a schedule costs no time, nor does where FP8 begins and ends.
    less = {"as_pilot": None} | (
        {} if pooled else dict.fromkeys(("steps", "tokens", "warmup", "branch_at", "bf16_from"))
    )
    words += run_options.words(replace(asked, **less))
    for model, data in asked.data.items():
        words += ["--data", f"{model}={data}" if model else data]
    words += [] if asked.cache is None else ["--cache", str(asked.cache)]
    # As many beside each other as in the run.
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
