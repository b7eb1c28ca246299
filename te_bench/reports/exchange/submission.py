"""A run that is offered for results/: what it lacks, a sentence each, and what is entered beside it if it lacks nothing."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from te_bench.experiments import plan as plans
from te_bench.experiments import run_options
from te_bench.experiments.spec import Experiment, Options, Trial
from te_bench.experiments.store import JOURNAL, PACKED, Journal, Plan, load, understood
from te_bench.reports.analysis.rows import gaps, identity, trial_of

#: Of the user's text, not of the suite.
DATA = ("data", "tokenizer", "corpus", "data_sha256", "vocab", "padded_vocab")


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A run, the folder below results/ that it would have, and how it was planned."""

    run: Path
    folder: str  # h200/speed-b64
    journal: Journal
    missing: str | None  # why trials of the suite were not run
    lacks: tuple[str, ...]  # what stands against publishing it, a sentence each

    @property
    def suite(self) -> str:
        return self.journal.plans[-1].suite

    @property
    def options(self) -> dict[str, Any]:
        return _options(self.journal.plans[-1])

    @property
    def commits(self) -> list[str]:
        return sorted({str(_details(self.journal, key).get("git_commit"))[:7] for _, key in self.journal.records})


def is_clean(environment: Mapping[str, Any]) -> bool:
    """Whether a commit is known and no file differed from it."""
    details = environment.get("details") or {}
    return bool(details.get("git_commit")) and details.get("git_dirty") is False


def settled(trial: Trial) -> str:
    """What a suite fixes about a trial: not its seed, and of a training not the user's text."""
    drop = DATA if trial.workload == "training" else ()
    problem = {key: value for key, value in trial.problem.items() if key not in drop}
    return str(sorted({**trial.to_json(), "problem": sorted(problem.items()), "seed": None}.items()))


def against_the_suite(journal: Journal, today: Experiment) -> tuple[list[str], list[str]]:
    """Of measured trials those that today's suite would not run, and of its own those without a record: a name for each,
    seeds aside."""
    planned = {settled(trial): trial.name for trial in today.trials}
    measured = {settled(record.trial): record.trial.name for record in journal.records.values()}
    old = sorted(name for key, name in measured.items() if key not in planned)
    return old, sorted(name for key, name in planned.items() if key not in measured)


def examine(run: Path, *, name: str | None = None, missing: str | None = None) -> Submission:
    """What a run lacks. Raises ValueError for a folder without a journal, and for one that this te-bench cannot read."""
    journal = load(run)
    if not journal.plans:
        raise ValueError(f"{run} holds a journal without a plan: run te-bench run --out {run} first")
    gpus = {identity(journal.environments.get(key, {})).get("gpu") for _, key in journal.records}
    name = name or run.resolve().name
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise ValueError(f"--name {name}: give one folder's name of letters, digits, dots and dashes")
    folder = f"{_machine(gpus)}/{name}"
    lacks = [*_of_hardware(gpus), *_of_code(journal), *gaps([run]), *_of_records(journal), *_of_plan(journal, missing)]
    return Submission(run=run, folder=folder, journal=journal, missing=missing, lacks=tuple(lacks))


def enter(submission: Submission, results: Path, command: str) -> Path:
    """Copy the journal to its folder in `results`, and enter it in README.md and published.toml there; the folder.

    Raises ValueError where something was published under this name.
    """
    folder = results / submission.folder
    if folder.exists():
        raise ValueError(f"{folder} is published already: choose another --name")
    folder.mkdir(parents=True)
    journal = JOURNAL if (submission.run / JOURNAL).exists() else PACKED
    shutil.copyfile(submission.run / journal, folder / journal)
    trains = any(record.trial.workload == "training" for record in submission.journal.records.values())
    lines = ["", f'["{submission.folder}"]', f"suite = {json.dumps(submission.suite)}"]
    if options := submission.options:
        lines.append(f"options = {{ {', '.join(f'{key} = {json.dumps(value)}' for key, value in options.items())} }}")
    lines += ["trains = true"] if trains else []
    lines += [f"known.missing = {json.dumps(submission.missing)}"] if submission.missing else []
    listed = results / "published.toml"
    before, table, after = listed.read_text(encoding="utf-8").partition("\n[disagreements]")
    listed.write_text("\n".join([before.rstrip("\n"), *lines, ""]) + table + after, encoding="utf-8")
    [gpu] = {identity(submission.journal.environments[key])["gpu"] for _, key in submission.journal.records}
    day = max(record.started_at[:10] for record in submission.journal.records.values())
    trees = f"clean tree of commit {', '.join(f'`{commit}`' for commit in submission.commits)}"
    with (results / "README.md").open("a", encoding="utf-8") as readme:  # whose end is the table
        readme.write(f"| `{submission.folder}` | `{command}` | {gpu}, {day}, {trees} |\n")
    return folder


def _machine(gpus: set[str | None]) -> str:
    """The folder of a GPU: its name as people say it, h100 of NVIDIA H100 80GB HBM3."""
    words = " ".join(sorted(filter(None, gpus))).split()
    return "-".join(word for word in words if not re.fullmatch(r"NVIDIA|GeForce|\d+GB|HBM\w+", word)).lower()


def _details(journal: Journal, environment: str) -> Mapping[str, Any]:
    return journal.environments.get(environment, {}).get("details") or {}


def _of_hardware(gpus: set[str | None]) -> list[str]:
    if gpus - {None}:
        return [] if len(gpus) == 1 else [f"The records are of several machines, {gpus}: publish those of one GPU."]
    return ["No GPU is named: records of a CPU are not published."]


def _of_code(journal: Journal) -> list[str]:
    """What is not known of the commits."""
    said = []
    for key in sorted({key for _, key in journal.records}):
        if not is_clean(journal.environments.get(key, {})):
            commit = _details(journal, key).get("git_commit")
            what = f"is of commit {commit[:7]} with uncommitted changes" if commit else "names no commit"
            said.append(f"Environment {key} {what}: run it again from a checkout of a commit without changes.")
    return said


def _of_records(journal: Journal) -> list[str]:
    """What is wrong with the records themselves."""
    kinds = {
        "failed the check": [r for r in journal.records.values() if r.outcome == "failed_check"],
        "were interrupted": [r for r in journal.records.values() if r.outcome == "interrupted"],
        "ended ok and hold no check": [r for r in journal.records.values() if r.outcome == "ok" and not r.check],
    }
    return [
        f"{len(found)} of {len(journal.records)} trials {what}, {found[0].trial.name} first: run them again."
        for what, found in kinds.items()
        if found
    ]


def _of_plan(journal: Journal, missing: str | None) -> list[str]:
    """How the plans differ from what the suite makes today."""
    asked = [_options(plan) for plan in journal.plans]
    if any(options != asked[0] for options in asked) or len({plan.suite for plan in journal.plans}) > 1:
        return ["The journal's plans are of several suites or options: publish each in a folder of its own."]
    trains = any(record.trial.workload == "training" for record in journal.records.values())
    options: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in asked[0].items()
    }
    today = plans.resolve(
        journal.plans[0].suite, Options(device="cuda", data={"": "random"} if trains else {}, **options)
    )
    old, absent = against_the_suite(journal, today)
    said = []
    if old:
        said.append(
            f"{len(old)} configurations are not of today's suite {today.suite}, {old[0]} first: run today's code."
        )
    if absent and not missing:
        said.append(
            f"{len(absent)} configurations of the suite {today.suite} have no record, {absent[0]} first: "
            "run them, or say by --missing why they were not run."
        )
    if missing and not absent:
        said.append("Nothing of the suite is missing: leave out --missing.")
    return said


def _options(plan: Plan) -> dict[str, Any]:
    """The options that a plan's words and trials tell, as published.toml has them: without --only, tuples as lists."""
    flags = {option.flag: (name, option) for name, option in run_options.OPTIONS.items()}
    budgets = {trial_of(value).problem.get("budget_s") for value in plan.trials} - {None}
    found: dict[str, Any] = {"budget_s": budgets.pop()} if len(budgets) == 1 else {}
    words = list(plan.asked)
    while words:
        flag = words.pop(0)
        if flag == "--only":
            words.pop(0)
            continue
        with understood(f"the option {flag} of a plan"):
            name, option = flags[flag]
        if option.type is bool:
            found[name] = True
        elif option.type == list[str]:
            found.setdefault(name, []).append(words.pop(0))
        else:
            value = option.type(words.pop(0))
            value = option.read(value) if option.read else value
            found[name] = list(value) if isinstance(value, tuple) else value
    return found
