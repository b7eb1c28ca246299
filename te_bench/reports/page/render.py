"""Write the report of one or several runs: index.html (one file that loads nothing), report.md, records.csv, figures/."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from te_bench.reports.analysis.rows import printable
from te_bench.reports.files import write_folder
from te_bench.reports.group_result import ReportResult, load_report
from te_bench.reports.page import gallery, headlines, tables, text
from te_bench.reports.page.drawing import Drawing
from te_bench.reports.page.environments import commands, shown_environment
from te_bench.reports.page.records_csv import records_csv
from te_bench.reports.page.template import rendered

HEADING = 60  # characters that fit in two lines on a telephone 400 pixels wide
FEWER_BITS = "Do they train like float32?"  # the heading of a verdict on weights and states
ANSWERS = ("verdict_brief", "attention_choice")  # tables that stand before their section's figures
#: The page's sections: anchor, heading, kinds of figures, names of tables. A section without content is left out.
SECTIONS = (
    (
        "verdict",
        "Does FP8 train like bf16?",
        ("verdict_forest", "verdict_time", "verdict_gap", "verdict_spikes", "verdict_numerics"),
        ("verdict_brief", "verdict", "verdict_reasons", "between", "equal_loss", "stability"),
    ),
    ("stress", "Where each precision breaks", ("stress",), ("stress",)),
    ("ladder", "Time and memory of a training step", ("ladder", "memory"), ("ladder", "memory")),
    ("scaling", "A training step on more GPUs", ("scaling",), ("scaling", "scaling_memory")),
    ("floor", "The step against its floor", ("floor_kinds",), ("floor", "floor_kinds", "floor_kernels")),
    ("layer", "One transformer layer", ("layer_time",), ("layer", "layer_kinds", "layer_kernels")),
    ("curves", "Loss curves", ("loss_step", "loss_time"), ("curves",)),
    ("max-batch", "Largest batch", ("max_batch",), ("max_batch",)),
    ("attention", "Attention alone", ("attention",), ("attention_choice", "attention", "attention_ratios")),
    ("heads", "Heads alone", (), ("heads",)),
    ("pieces", "Norms and activations alone", (), ("pieces",)),
    ("gemms", "GEMMs alone", (), ("gemms",)),
    ("benchmarks", "Benchmarks", (), ("benchmarks",)),
    ("numerics", "Where to scale q", ("numerics",), ("numerics",)),
    ("errors", "Errors", (), ("errors",)),
    ("failures", "Failed and unsupported trials", (), ("failures",)),
    ("kernels", "Kernels that ran", (), ("kernels",)),
    ("configurations", "Configurations in full", (), ("specifications",)),
)


def write_report(directories: Sequence[Path], out: Path) -> Path:
    """Write the report of the runs in `directories` under `out`, and return the path of its index.html.

    Raises ValueError if a directory has no journal or its journal no plan, and if `out` cannot be written.
    """
    report = load_report(directories)
    drawn = draw(report)
    content = page(report, drawn)
    files = {
        "report.md": rendered("report.md.j2", content),
        "records.csv": records_csv(report).encode(),
        **figure_files([drawing for found in drawn for drawing in found]),
        "index.html": rendered("report.html.j2", content),
    }
    write_folder(out, files, "report")
    return out / "index.html"


def figure_files(drawings: Sequence[Drawing]) -> dict[str, bytes]:
    """Return {path below the page: content}: each figure as SVG and as PNG."""
    svg = {f"figures/{drawing.name}.svg": drawing.svg for drawing in drawings}
    return svg | {f"figures/{drawing.name}.png": drawing.png for drawing in drawings}


def draw(report: ReportResult) -> list[list[Drawing]]:
    """Return the figures of each group; their names have suite and environment if there are several."""
    drawn = []
    taken: set[str] = set()
    groups = [result.group for result in report.groups]
    for place, result in enumerate(report.groups):
        suite, environment = result.group.suite, result.group.environment
        suffix = "" if len(groups) == 1 else f"-{text.slug(suite)}"
        if sum(other.suite == suite for other in groups) > 1:
            suffix += f"-{text.slug(environment)[:8]}"
        while suffix in taken:  # two names may have the same slug
            suffix += f"-{place}"
        taken.add(suffix)
        drawn.append(gallery.figures_of(result, suffix))
    return drawn


def page(report: ReportResult, drawn: Sequence[Sequence[Drawing]]) -> dict[str, Any]:
    """Return the content of both templates."""
    sentences, results = headlines.headlines(report, commands=False), report.results
    titles = list(dict.fromkeys(printable(group.title or group.suite) for group in results.groups))
    heading, rest = _headed(titles)
    judged = [verdict.study for result in report.groups for verdict in result.studies]
    others = {"verdict": FEWER_BITS} if judged and all(study.fewer_bits for study in judged) else {}
    sections = [
        _section(report, drawn, anchor, others.get(anchor, heading), kinds, names)
        for anchor, heading, kinds, names in SECTIONS
    ]
    return {
        "title": "; ".join(titles),
        "heading": heading,
        "rest_of_title": rest,
        "headline": sentences[0],
        "other_headlines": sentences[1:],
        "n_ok": results.outcomes.get("ok", 0),
        "n_planned": len(results.rows),
        "outcomes": {outcome: n for outcome, n in results.outcomes.items() if outcome != "ok"},
        "unjudged": report.unjudged,
        "runs": results.runs,
        "sections": [section for section in sections if section["parts"]],
        "environments": [shown_environment(results, key) for key in results.environments],
        "commands": commands(results),
    }


def _headed(titles: Sequence[str]) -> tuple[str, str]:
    """Return a heading that fits in two lines on a telephone, and the rest of the titles, to stand above it."""
    heading = "; ".join(titles)
    if len(heading) <= HEADING:
        return heading, ""
    heading = titles[0].partition(": ")[0]
    return heading, "; ".join(part for title in titles if (part := title.removeprefix(heading).removeprefix(": ")))


def _section(
    report: ReportResult,
    drawn: Sequence[Sequence[Drawing]],
    anchor: str,
    heading: str,
    kinds: Sequence[str],
    names: Sequence[str],
) -> dict[str, Any]:
    """Return a section of the page with each group's part, which has a heading of its own if there are several."""
    parts = []
    for result, drawings in zip(report.groups, drawn, strict=True):
        group = result.group
        several = f"{group.title or group.suite} on {group.where}"
        title = several if len(report.results.environments) > 1 else group.title or group.suite
        part = {
            "heading": printable(title) if len(report.groups) > 1 else "",
            "answers": [table for name in names if name in ANSWERS for table in tables.tables_of(result, name)],
            "drawings": [drawing for drawing in drawings if drawing.kind in kinds],
            "tables": [table for name in names if name not in ANSWERS for table in tables.tables_of(result, name)],
        }
        if part["drawings"] or part["tables"]:
            parts.append(part)
    return {"anchor": anchor, "heading": heading, "parts": parts}
