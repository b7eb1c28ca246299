"""Show all published records as a gallery of results/, and the fastest steps by GPU, the table of docs/leaderboard.md."""

import posixpath
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from te_bench.experiments.store import JOURNAL, PACKED
from te_bench.reports.analysis.attention import attention_times
from te_bench.reports.analysis.curves import comparisons
from te_bench.reports.analysis.largest_batch import largest_batches
from te_bench.reports.analysis.layers import layer_variants
from te_bench.reports.analysis.naming import SHAPED, precision_name, whose
from te_bench.reports.analysis.ranking import fastest_of_each_kind
from te_bench.reports.analysis.rows import Configuration, Group, Results, environment_labels, load_results
from te_bench.reports.analysis.steps import MeasuredStep, emulates_blocks, measured_steps
from te_bench.reports.convergence.verdict import judge_group
from te_bench.reports.exchange.submission import is_clean
from te_bench.reports.page import template, text
from te_bench.reports.page.environments import shown_environment
from te_bench.reports.page.published_verdicts import asked
from te_bench.reports.page.table import Table, label, number, repetitions, speedup, table_of, word

_ROW = re.compile(r"^\| `(?P<folder>[^`]+)` \| (?P<command>.+) \| (?P<measured>.+) \|$", re.MULTILINE)
_COMMITS = re.compile(r"`([0-9a-f]{7,40})`")
_ALONE = {**dict.fromkeys(SHAPED, "attention alone"), "layer": "one layer", "ceilings": "ceilings of the GPU"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A folder with a journal under results/, and what README.md and published.toml there say about it."""

    folder: str  # h200/speed
    results: Results
    command: str
    measured: str
    listed: bool  # whether published.toml has it: a run of a suite, not a side of a gate
    known: Mapping[str, str]  # its known faults
    files: Mapping[str, str]  # {what it is called: path under results/} of files to read


def runs(results: Path, made: Path | None = None) -> Iterator[Run]:
    """Yield every run under `results`, by its folder's name. Raises ValueError if README.md there has no row of one.

    made: a folder with further pages of the runs, at the same paths.
    """
    said = {row["folder"]: row for row in _ROW.finditer((results / "README.md").read_text(encoding="utf-8"))}
    listed = tomllib.loads((results / "published.toml").read_text(encoding="utf-8"))
    for path in sorted(path.parent for path in results.rglob(f"{JOURNAL}*") if path.name in (JOURNAL, PACKED)):
        folder = path.relative_to(results).as_posix()
        row = said.get(folder) or said.get(folder.rpartition("/")[0])  # a gate has a journal for each side
        if row is None:
            raise ValueError(f"{results / 'README.md'} says nothing of {folder}: add a row `{folder}`")
        there = {"advice": "advice/index.html", "report": "report/index.html", "records.csv": "report/records.csv"}
        there |= {"answer": "../gate.json", "journal": JOURNAL, "journal (xz)": PACKED}  # a gate's answer
        found = {
            name: posixpath.normpath(f"{folder}/{file}")
            for name, file in there.items()
            if any((root / folder / file).is_file() for root in (results, made or results))
        }
        yield Run(
            folder=folder,
            results=load_results([path]),
            command=row["command"],
            measured=row["measured"],
            listed=folder in listed,
            known=listed.get(folder, {}).get("known", {}),
            files=found,
        )


def gallery(results: Path, base: str, made: Path | None = None) -> str:
    """Return the page as HTML without a frame: entries to filter, and environments, two of which can be compared.

    base: the path from the page to the contents of `results` and `made`.
    """
    found = list(runs(results, made))
    bodies = {key: body for run in found for key, body in run.results.environments.items()}
    names = environment_labels(bodies)
    entries = [_entry(run, group, names) for run in found for group in run.results.groups]
    shown = {key: run.results for run in found for key in run.results.environments}
    environments = [shown_environment(shown[key], key) | {"name": names[key]} for key in sorted(names, key=names.get)]  # type: ignore[arg-type]
    rows = [row for entry in entries for row in entry["rows"]]
    columns = {"GPU": (entries, "gpu"), "Suite": (entries, "suite")}
    columns |= {"Model": (rows, "model"), "Configuration": (rows, "kind")}
    filters = {title: sorted({one[key] for one in of}) for title, (of, key) in columns.items()}
    content = {"entries": entries, "environments": environments, "filters": filters, "n": len(rows), "base": base}
    return template.rendered("gallery.html.j2", content).decode()


def _entry(run: Run, group: Group, names: Mapping[str, str]) -> dict[str, Any]:
    environment = run.results.environments[group.environment]
    clean = is_clean(environment)
    verdicts, hidden = judge_group(group)
    figures = _figures(group, hidden)
    rows = [row for configuration in group.configurations for row in configuration.rows]
    return {
        "id": text.slug(f"{run.folder}-{group.environment[:8]}"),
        "folder": run.folder,
        # without its suite, which is beside it
        "title": "; ".join(asked(one.study) for one in verdicts) or group.title.split(": ", 1)[-1],
        "gpu": group.gpu or "CPU",
        "suite": "gate" if "answer" in run.files else group.suite,
        "day": max((row.record.started_at[:10] for row in rows if row.record), default=text.MISSING),
        "n_ok": sum(row.outcome == "ok" for row in rows),
        "n_planned": len(rows),
        "command": run.command.split("`"),  # every second piece is code
        "measured": run.measured.split("`"),
        "commits": [environment["details"]["git_commit"][:7]] if clean else _COMMITS.findall(run.measured),
        "clean": clean,
        "environment": group.environment,
        "where": names[group.environment],
        "known": run.known,
        "files": run.files,
        "rows": [
            {
                "model": _model(configuration),
                "kind": f"{whose(configuration.trial)} {precision_name(configuration.trial)}",
                "label": label(configuration, baseline=configuration.id == group.baseline),
                "shape": configuration.shape,
                "figure": figures.get(configuration.id, text.MISSING),
                "repetitions": repetitions(configuration).text,
            }
            for configuration in group.configurations
        ],
    }


def _model(configuration: Configuration) -> str:
    trial = configuration.trial
    return str(trial.problem.get("model") or _ALONE.get(trial.workload, trial.workload))


def _figures(group: Group, hidden: Collection[str]) -> dict[str, str]:
    """Return {configuration: its main figure}: time, batch, or loss unless that is hidden."""
    found = {step.configuration.id: step for step in _steps(group)}
    found |= {layer.step.configuration.id: layer.step for one in layer_variants(group) for layer in one.layers}
    figures = {key: f"{text.milliseconds(step.latency_s)} ms" for key, step in found.items() if step.latency_s}
    for time in attention_times(group).times:
        passes = [text.milliseconds(seconds) for seconds in (time.forward_s, time.backward_s) if seconds]
        figures |= {time.configuration.id: f"{' + '.join(passes)} ms"} if passes else {}
    for training in (training for comparison in comparisons(group, hidden) for training in comparison.trainings):
        figures |= {training.configuration.id: f"loss {text.loss(training.best)}"} if training.best else {}
    for largest in largest_batches(group):
        batch = text.count(largest.max_batch, or_more=largest.capped)
        figures |= {largest.configuration.id: f"batch {batch}"} if largest.max_batch else {}
    return figures


def _steps(group: Group) -> tuple[MeasuredStep, ...]:
    steps = group.of("train_step")
    return measured_steps(steps, next((one for one in steps if one.id == group.baseline), None), group.gpu)


def leaderboard(results: Path) -> list[Table]:
    """Return a table of the fastest step of each kind, for each published run of suite `speed` that timed two kinds.

    Steps that emulate MXFP8 or NVFP4 are left out.
    """
    found = []
    for run in filter(lambda run: run.listed, runs(results)):
        for group in (group for group in run.results.groups if group.suite == "speed"):
            fastest = fastest_of_each_kind([one for one in _steps(group) if not emulates_blocks(one.configuration)])
            shown = [
                {
                    "Configuration": word(one.name),
                    "ms/step": number(one.seconds, text.milliseconds),
                    "Times as long": speedup(one.times_as_long),
                    "tokens/s": number(one.step.tokens_per_s, text.thousands),
                    "ok/planned": repetitions(one.step.configuration),
                }
                for one in fastest
            ]
            caption = f"{group.gpu}: {group.title.removeprefix('Fastest step: ')} ({run.folder})"
            table = table_of("leaderboard", caption, shown)
            found += [table] if table and len(fastest) > 1 else []
    return found
