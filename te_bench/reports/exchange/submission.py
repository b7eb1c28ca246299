"""Submit a run to results/: say in one sentence each what it lacks, and enter it there if it lacks nothing."""

import json
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from te_bench.experiments import plan as plans
from te_bench.experiments import run_options
from te_bench.experiments.spec import ADVICE, Experiment, Options, Trial
from te_bench.experiments.store import JOURNAL, PACKED, Journal, Plan, load, understood, written
from te_bench.reports.analysis.rows import gaps, identity, trial_of

LISTED = "published.toml"
#: Settings of a problem that come from the user's text, not from the suite.
DATA = ("data", "tokenizer", "corpus", "data_sha256", "vocab", "padded_vocab")


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A run, the folder below results/ that it would get, and what it lacks."""

    run: Path
    folder: str  # h200/speed-b64
    gpu: str
    journal: Journal
    missing: str | None  # why some of the suite's trials have no result
    lacks: tuple[str, ...]  # a sentence each


def is_clean(environment: Mapping[str, Any]) -> bool:
    """Return whether the commit is known and no file differed from it."""
    details = environment.get("details") or {}
    return bool(details.get("git_commit")) and details.get("git_dirty") is False


def is_published(folder: Path) -> bool:
    """Return whether the folder lies below the results/ of a checkout, whose pages are committed."""
    return any((parent / LISTED).is_file() for parent in folder.resolve().parents)


def settled(trial: Trial) -> str:
    """Return a trial's settings that a suite fixes: without its seed, and for a training without the user's text."""
    drop = DATA if trial.workload == "training" else ()
    problem = {key: value for key, value in trial.problem.items() if key not in drop}
    return str(sorted({**trial.to_json(), "problem": sorted(problem.items()), "seed": None}.items()))


def against_the_suite(journal: Journal, today: Experiment) -> tuple[list[str], list[str]]:
    """Return the names of measured trials that today's suite would not run, and of its trials without a record; seeds are
    ignored."""
    planned = {settled(trial): trial.name for trial in today.trials}
    measured = {settled(record.trial): record.trial.name for record in journal.records.values()}
    old = sorted(name for key, name in measured.items() if key not in planned)
    return old, sorted(name for key, name in planned.items() if key not in measured)


def examine(run: Path, results: Path, *, name: str | None = None, missing: str | None = None) -> Submission:
    """Return the run with what it lacks for `results`.

    Raises ValueError for a folder without a journal that this te-bench can read, and for records that are published.
    """
    journal = load(run)
    _check_is_new(run, journal, results)
    if not journal.plans:
        raise ValueError(f"{run} holds a journal without a plan: run te-bench run --out {run} first")
    if any(plan.suite == ADVICE for plan in journal.plans):
        raise ValueError(f"{run} holds advice: submit takes runs of te-bench run")
    name = run.resolve().name if name is None else name
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise ValueError(f"--name {name}: give one folder's name of letters, digits, dots and dashes")
    gpu = " and ".join(sorted({str(identity(body).get("gpu")) for body in journal.environments.values()}))
    said = "-".join(word for word in gpu.split() if not re.fullmatch(r"NVIDIA|GeForce|\d+GB|HBM\w+", word)).lower()
    lacks = [*_of_records(journal, gpu), *gaps([run]), *([] if gpu == "None" else _of_plan(journal, missing))]
    folder = f"{said}/{name}"
    return Submission(run=run, folder=folder, gpu=gpu, journal=journal, missing=missing, lacks=tuple(lacks))


def _check_is_new(run: Path, journal: Journal, results: Path) -> None:
    """Raise ValueError, with the folder's name, if records are published already: no record may stand in two tables."""
    listed = tomllib.loads((results / LISTED).read_text(encoding="utf-8"))
    for folder in sorted(listed.keys() - {"disagreements"}):
        if not written(results / folder):
            continue
        others = load(results / folder).records
        both = journal.records.keys() & others.keys()
        shared = [key for key in both if journal.records[key].started_at == others[key].started_at]
        if shared:
            known = "; ".join(f"known.{what}: {why}" for what, why in listed[folder].get("known", {}).items())
            raise ValueError(
                f"{run}: {len(shared)} of {len(journal.records)} records are published already, in {folder}"
                f"{f' ({known})' if known else ''}: submit a run with other records"
            )


def enter(submission: Submission, results: Path, command: str) -> Path:
    """Copy the journal to its folder in `results`, add it to README.md and published.toml there, and return the folder.

    Raises ValueError if the folder exists.
    """
    folder, journal, plan = results / submission.folder, submission.journal, submission.journal.plans[-1]
    if folder.exists():
        raise ValueError(f"{folder} is published already: choose another --name")
    folder.mkdir(parents=True)
    file = JOURNAL if (submission.run / JOURNAL).exists() else PACKED
    shutil.copyfile(submission.run / file, folder / file)
    options = ", ".join(f"{key} = {_toml(value)}" for key, value in _options(plan).items())
    lines = [f'["{submission.folder}"]', f"suite = {_toml(plan.suite)}"]
    lines += [f"options = {{ {options} }}"] if options else []
    lines += ["trains = true"] if _trains(journal) else []
    lines += [f"known.missing = {_toml(submission.missing)}"] if submission.missing else []
    listed = results / LISTED
    before, table, after = listed.read_text(encoding="utf-8").partition("\n[disagreements]")
    listed.write_text("\n".join([before.rstrip("\n"), "", *lines, ""]) + table + after, encoding="utf-8")
    commits = sorted({body["details"]["git_commit"][:7] for body in journal.environments.values()})
    day = max(record.started_at[:10] for record in journal.records.values())
    row = (
        f"`{submission.folder}`",
        f"`{command}`",
        f"{submission.gpu}, {day}, clean tree of commit `{'`, `'.join(commits)}`",
    )
    with (results / "README.md").open("a", encoding="utf-8") as readme:  # it ends with the table
        readme.write(f"| {' | '.join(row)} |\n")
    return folder


def _toml(value: Any) -> str:
    """Return a string, number or list in TOML, which has no surrogates."""
    return json.dumps(value, ensure_ascii=False)


def _of_records(journal: Journal, gpu: str) -> Iterator[str]:
    """Yield a sentence for each fault of the machine, the code and the records."""
    if gpu == "None":
        yield "This run is of a CPU; only runs on a GPU are published."
        return  # mending other faults would not help
    if " and " in gpu:
        yield f"This run is of {gpu}; only runs on GPUs of one kind are published."
    for key, body in journal.environments.items():
        if not is_clean(body):
            commit = (body.get("details") or {}).get("git_commit")
            what = f"is of commit {commit[:7]} with uncommitted changes" if commit else "names no commit"
            yield f"Environment {key} {what}: run it again from a checkout of a commit without changes."
    records = list(journal.records.values())
    if records and all(record.outcome != "ok" for record in records):
        yield f"None of {len(records)} trials ended ok: there is nothing to publish."
        return
    for what, found in {
        "failed the check": [record for record in records if record.outcome == "failed_check"],
        "were interrupted": [record for record in records if record.outcome == "interrupted"],
        "ended ok and hold no check": [record for record in records if record.outcome == "ok" and not record.check],
    }.items():
        if found:
            yield f"{len(found)} of {len(records)} trials {what}, {found[0].trial.name} first: run again."


def _of_plan(journal: Journal, missing: str | None) -> Iterator[str]:
    """Yield a sentence for each difference between the run and today's suite."""
    suite, asked = journal.plans[0].suite, _options(journal.plans[0])
    if any((plan.suite, _options(plan)) != (suite, asked) for plan in journal.plans):
        yield "The journal's plans are of several suites or options: publish each in a folder of its own."
        return
    options: dict[str, Any] = {name: tuple(said) if isinstance(said, list) else said for name, said in asked.items()}
    data = {"": "random"} if _trains(journal) else {}
    old, absent = against_the_suite(journal, plans.resolve(suite, Options(device="cuda", data=data, **options)))
    if old:
        yield f"Today's suite {suite} does not have {_count(old)}: run today's code."
    if absent and not missing:
        yield f"The suite {suite} has no record of {_count(absent)}: run it, or give the reason with --missing."
    records = list(journal.records.values())
    broken = [record.trial.name for record in records if record.outcome in ("crashed", "timeout")]
    if broken and not missing:
        yield (
            f"{len(broken)} of {len(records)} trials crashed or ran out of time, {broken[0]} first: run them again, or give "
            "the reason with --missing."
        )
    if missing and not absent and not broken:
        yield "Nothing of the suite is missing: leave out --missing."


def _count(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} configurations, {names[0]} first"


def _trains(journal: Journal) -> bool:
    return any(record.trial.workload == "training" for record in journal.records.values())


def _options(plan: Plan) -> dict[str, Any]:
    """Return the options of a plan's command and trials, as in published.toml: without --only, tuples as lists."""
    flags = {option.flag: (name, option) for name, option in run_options.OPTIONS.items()}
    budgets = {trial_of(value).problem.get("budget_s") for value in plan.trials} - {None}
    found: dict[str, Any] = {"budget_s": budgets.pop()} if len(budgets) == 1 else {}
    words = iter(plan.asked)
    for flag in words:
        if flag == "--only":
            next(words, None)
            continue
        with understood(f"the option {flag} of a plan"):
            name, option = flags[flag]
            if option.type == list[str]:
                found.setdefault(name, []).append(next(words, ""))
                continue
            value = True if option.type is bool else option.type(next(words, ""))
            value = option.read(value) if option.read else value
        found[name] = list(value) if isinstance(value, tuple) else value
    return found
