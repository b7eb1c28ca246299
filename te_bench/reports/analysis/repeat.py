"""Write the commands that repeat a group of trials."""

import os
import shlex
from pathlib import Path

from te_bench.experiments.spec import ADVICE
from te_bench.reports.analysis.naming import FOREIGN
from te_bench.reports.analysis.rows import Group, printable


def commands_of(group: Group, out: Path | None = None) -> list[str]:
    """Return a command for each set of options that was used, the oldest first; out: the folder for new results."""
    if group.suite == FOREIGN:
        return ["pytest --benchmark-json FILE && te-bench import FILE"]
    trials = [row.trial for configuration in group.configurations for row in configuration.rows]
    devices = [f"--device {device}" for device in sorted({trial.device for trial in trials})]
    seeds = {len({row.trial.seed for row in configuration.rows}) for configuration in group.configurations}
    alike = min(seeds) if len(seeds) == 1 else None  # differing numbers are the suite's own, or a study's
    problems = [trial.problem for trial in trials]
    known = {"training": (None, "stdlib")}  # the default data of trainings; other steps' tokens are random
    own = {
        (str(trial.problem["model"]), str(trial.problem["data"]))
        for trial in trials
        if trial.problem.get("data") not in known.get(trial.workload, (None, "random"))
    }
    rest = [f"--data {shlex.quote(printable(f'{model}={data}'))}" for model, data in sorted(own)]
    budgets = {p["budget_s"] for p in problems if p.get("budget_s") is not None}
    rest += [f"--budget {budget:g}s" for budget in budgets if len(budgets) == 1]
    rest += [f"--out {shlex.quote(printable(os.path.relpath(out)))}"] if out else []
    lines = []
    for asked in group.asked:
        words = [shlex.quote(printable(word)) for word in (group.suite, *asked)]
        # A study's plan has its number of seeds; its planted fault has fewer runs, and a part of a study has still fewer.
        planned = [number for plan in group.judged if plan.asked == asked if (number := plan.judgement.get("seeds"))]
        number = max(map(int, map(str, planned)), default=alike)
        verb = ["run", *words, *devices, *([f"--seeds {number}"] if number else []), *rest]
        verb = verb if group.suite != ADVICE else [*words, devices[0]]
        lines.append(" ".join(["te-bench", *verb]))
    return lines
