"""The report of one or several runs: index.html (one file, nothing fetched), report.md, records.csv and figures/."""

import base64
import csv
import hashlib
import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from te_bench.reports.analysis import measures
from te_bench.reports.analysis.rows import Cell, Group, Results, Row, identity, load_results, printable
from te_bench.reports.page import figures, gallery, headlines, tables, text
from te_bench.reports.page.files import write_folder
from te_bench.reports.page.table import Table

_TEMPLATES = Path(__file__).parent / "templates"

#: The page's sections: anchor, heading, figures by kind, tables by name. A section without content is left out.
SECTIONS = (
    (
        "verdict",
        "Does FP8 train like bf16?",
        ("verdict_forest", "verdict_gap", "verdict_spikes", "verdict_numerics"),
        ("verdict", "verdict_reasons", "stability"),
    ),
    ("stress", "Where each precision breaks", (), ("stress",)),
    ("ladder", "Time and memory of a training step", ("ladder", "memory"), ("ladder", "memory")),
    ("floor", "The step against its floor", ("floor_kinds",), ("floor", "floor_kinds", "floor_kernels")),
    ("layer", "One transformer layer", ("layer_time",), ("layer", "layer_kinds", "layer_kernels")),
    ("curves", "Loss curves", ("loss_step", "loss_time"), ("curves",)),
    ("max-batch", "Largest batch", ("max_batch",), ("max_batch",)),
    ("attention", "Attention alone", ("attention_forward", "attention_backward"), ("attention", "attention_ratios")),
    ("numerics", "Where to scale q", ("numerics",), ("numerics",)),
    ("errors", "Errors", (), ("errors",)),
    ("failures", "Failed and unsupported trials", (), ("failures",)),
    ("kernels", "Kernels that ran", (), ("kernels",)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one group has to say in a section; `heading` is empty when there is one group only."""

    heading: str
    drawings: tuple[figures.Drawing, ...]
    tables: tuple[Table, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading of the page with its parts."""

    anchor: str
    heading: str
    parts: tuple[Part, ...]


def write_report(directories: Sequence[Path], out: Path) -> Path:
    """Write the report of the runs in `directories` under `out`; the path of its index.html.

    Raises ValueError when a directory holds no journal or its journal no plan, and when `out` cannot be written.
    """
    results = load_results(directories)
    drawn = draw(results)
    content = page(results, drawn)
    files = {
        "report.md": template("report.md.j2", autoescape=False).render(content).encode(),
        "records.csv": records_csv(results).encode(),
        **{f"figures/{drawing.name}.svg": drawing.svg for found in drawn.values() for drawing in found},
        **{f"figures/{drawing.name}.png": drawing.png for found in drawn.values() for drawing in found},
        "index.html": template("report.html.j2", autoescape=True).render(content).encode(),
    }
    write_folder(out, files, "report")
    return out / "index.html"


def draw(results: Results) -> dict[int, tuple[figures.Drawing, ...]]:
    """The figures of each group, by the group's place; names say suite and environment where there are several."""
    drawn = {}
    taken: set[str] = set()
    for place, group in enumerate(results.groups):
        suffix = "" if len(results.groups) == 1 else f"-{text.slug(group.suite)}"
        if sum(other.suite == group.suite for other in results.groups) > 1:
            suffix += f"-{text.slug(group.environment)[:8]}"
        while suffix in taken:  # two names with the same slug
            suffix += f"-{place}"
        taken.add(suffix)
        drawn[place] = tuple(gallery.of_group(group, suffix))
    return drawn


def page(results: Results, drawn: Mapping[int, Sequence[figures.Drawing]]) -> dict[str, Any]:
    """What both templates show."""
    sentences = headlines.headlines(results)
    script = (_TEMPLATES / "report.js").read_text(encoding="utf-8")
    return {
        "title": "; ".join(dict.fromkeys(printable(group.title) for group in results.groups)),
        "headline": sentences[0],
        "other_headlines": sentences[1:],
        "n_ok": results.outcomes.get("ok", 0),
        "n_planned": len(results.rows),
        "outcomes": {outcome: n for outcome, n in results.outcomes.items() if outcome != "ok"},
        "runs": results.runs,
        "sections": [section for section in (_section(results, drawn, *known) for known in SECTIONS) if section.parts],
        "environments": [_environment(results, key) for key in results.environments],
        "commands": commands(results),
        "markdown": tables.markdown,
        "escape_markdown": tables.escape,
        "style": Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
        "script": Markup(script),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "inline": Markup,  # for our own SVG only: matplotlib has escaped the text in it
    }


def _section(
    results: Results,
    drawn: Mapping[int, Sequence[figures.Drawing]],
    anchor: str,
    heading: str,
    kinds: Sequence[str],
    names: Sequence[str],
) -> Section:
    parts = []
    for place, group in enumerate(results.groups):
        part = Part(
            heading=_heading(results, group),
            drawings=tuple(drawing for drawing in drawn[place] if drawing.kind in kinds),
            tables=tuple(table for name in names for table in tables.of_group(group, name)),
        )
        if part.drawings or part.tables:
            parts.append(part)
    return Section(anchor=anchor, heading=heading, parts=tuple(parts))


def _heading(results: Results, group: Group) -> str:
    if len(results.groups) == 1:
        return ""
    title = group.title or group.suite
    return printable(title if len(results.environments) == 1 else f"{title} on {group.where}")


def _environment(results: Results, key: str) -> dict[str, Any]:
    """An environment for reading: its settings, the state of its devices during the run, its packages."""
    body = results.environments[key]
    details = body.get("details") or {}
    known = {**identity(body), **{k: v for k, v in details.items() if k not in ("packages", "gpus")}}
    known = {k: known[k] for k in [*(k for k in _FIRST if k in known), *(k for k in known if k not in _FIRST)]}
    states = [row.record.device_state for row in results.rows if row.record and row.environment == key]
    packages = details.get("packages") or {}
    groups = [group for group in results.groups if group.environment == key]
    return {
        "id": key,
        "name": groups[0].where,
        "settings": {
            printable(k.removesuffix("_bytes").replace("_", " ")): printable(_setting(k, v))
            for k, v in known.items()
            if v is not None
        },
        "state": {name: seen for name, sample, scale in _STATE if (seen := _range(states, sample, scale))},
        "throttling": sorted({reason for state in states for reason in _throttling(state.get("throttle_reasons"))}),
        "packages": {printable(str(name)): printable(str(version)) for name, version in sorted(packages.items())},
    }


#: nvml.h, nvmlClocksEventReasons*: why a clock was held down. 0x1, an idle GPU, says nothing of the run.
_THROTTLING = {
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
_FIRST = ("gpu", "cpu", "cores", "memory_bytes", "driver", "cuda", "cudnn", "torch", "triton", "python", "os", "code")
_STATE = (
    ("SM clock, MHz", "sm_clock_hz", 1e-6),
    ("memory clock, MHz", "memory_clock_hz", 1e-6),
    ("temperature, °C", "temperature_c", 1.0),
    ("power, W", "power_w", 1.0),
    ("load average", "load_average", 1.0),
    ("cores that other programs took", "cpu_others", 1.0),
    ("CPU time that the host took away, %", "cpu_stolen", 100.0),
)


def _range(states: Sequence[Mapping[str, Any]], sample: str, scale: float) -> str:
    seen = [value * scale for state in states for value in measures.numbers([state.get(sample)])]
    if not seen:
        return ""
    low, high = f"{min(seen):,.0f}", f"{max(seen):,.0f}"
    return low if low == high else f"{low} to {high}"


def _throttling(reasons: object) -> list[str]:
    if isinstance(reasons, int):
        return [name for bit, name in _THROTTLING.items() if reasons & bit]
    return [printable(str(reasons))] if reasons else []


def _setting(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**30:.1f} GiB"
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def commands(results: Results) -> list[str]:
    """The commands that measure the same again, one for each suite and device, and then the report."""
    lines = []
    for group in results.groups:
        trials = [row.trial for cell in group.cells for row in cell.rows]
        command = ["te-bench", "run", shlex.quote(printable(group.suite))]
        command += [f"--device {device}" for device in sorted({trial.device for trial in trials})]
        seeds = {len({row.trial.seed for row in cell.rows}) for cell in group.cells}
        command += [f"--seeds {min(seeds)}"] if len(seeds) == 1 else []  # else they are the suite's own numbers
        problems = [trial.problem for trial in trials]
        own = {(str(p["model"]), str(p["data"])) for p in problems if p.get("data") not in (None, "random", "stdlib")}
        command += [f"--data {shlex.quote(printable(f'{model}={data}'))}" for model, data in sorted(own)]
        budgets = {p["budget_s"] for p in problems if p.get("budget_s") is not None}
        command += [f"--budget {budget:g}" for budget in budgets if len(budgets) == 1]
        lines.append(" ".join(command))
    return list(dict.fromkeys(lines))


def records_csv(results: Results) -> str:
    """One line for each planned trial: its settings, how it ended, medians in SI units; empty where not measured."""
    cells = [(group, cell, row) for group in results.groups for cell in group.cells for row in cell.rows]
    problem = sorted({key for _, _, row in cells for key in row.trial.problem})
    lines = [_record(group, cell, row, problem) for group, cell, row in cells]
    stream = io.StringIO()
    names = list(lines[0]) if lines else ["run", "suite", "environment", "trial", "outcome", "reason"]
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in line.items()} for line in lines)
    return stream.getvalue()


def _record(group: Group, cell: Cell, row: Row, problem: Sequence[str]) -> dict[str, Any]:
    trial, record = row.trial, row.record
    samples: Mapping[str, Any] = record.samples if record else {}
    work: Mapping[str, Any] = record.work if record else {}
    medians = {name: measures.median(measures.numbers(samples.get(name))) for name in _MEDIANS}
    worst = measures.worst_quantity(cell, record.check) if record else None
    return {
        "run": row.run,
        "suite": row.suite,
        "environment": row.environment,
        "where": group.where,
        "trial": trial.id,
        "cell": trial.cell,
        "baseline": trial.cell == group.baseline,
        "name": trial.name,
        **{key: getattr(trial, key) for key in ("workload", "device", "attention", "precision", "recipe", "mode")},
        "protocol": trial.protocol,
        "seed": trial.seed,
        **{f"problem_{key}": trial.problem.get(key) for key in problem},
        "outcome": row.outcome,
        "reason": row.reason,
        "started_at": record.started_at if record else None,
        "wall_s": record.wall_s if record else None,
        "work_s": record.work_s if record else None,
        **{f"{name}_median": value for name, value in medians.items()},
        "n_steps": len(measures.numbers(samples.get("latency_s"))) or None,
        "best_val_loss": min(measures.numbers(samples.get("val_loss")), default=None),
        **{key: measures.finite(work.get(key)) for key in ("tokens", "flop", "forward_flop", "backward_flop", "batch")},
        "worst_quantity": worst.quantity if worst else None,
        "worst_error": worst.error if worst else None,
        "worst_limit": worst.limit if worst else None,
    }


_MEDIANS = (
    "latency_s",
    "forward_s",
    "backward_s",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "peak_rss_bytes",
    "max_batch",
    "error_scale_before",
    "error_scale_after",
    "error_sdpa",
)


def _cell(value: object) -> object:
    """Text that a spreadsheet would run as a formula gets an apostrophe in front."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def template(name: str, *, autoescape: bool) -> jinja2.Template:
    """One of the templates beside this file; what it names and is not given is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=autoescape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(name)
