"""te-bench report and embed: pages and tables of what runs have recorded."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def report(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="--out directories of runs; several are merged.")
    ],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the report goes. Default: DIR/report.")] = None,
) -> None:
    """Write index.html, report.md, records.csv and the figures of one or several runs."""
    from te_bench.experiments.store import own
    from te_bench.reports.analysis import rows
    from te_bench.reports.page import render

    for said in rows.gaps(directories):
        print(said, file=sys.stderr)
    print(render.write_report(directories, out or own(directories[0] / "report")))


def embed(
    pages: Annotated[list[Path], typer.Argument(help="Markdown files with te-bench:table markers.")],
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 when a table is out of date.")] = False,
) -> None:
    """Bring the tables in Markdown files up to date with the records that they name."""
    from te_bench.advice import headline
    from te_bench.advice import tables as advice
    from te_bench.experiments.scaling import published
    from te_bench.gate import self_test
    from te_bench.reports.page import embed as tables
    from te_bench.reports.page import published as records
    from te_bench.reports.page import scaling_tables

    more: tables.More = {
        "self_test": lambda directory: self_test.table(self_test.stored(directory)),
        "advice": lambda directory: [advice.answers(directory)],
        "advice_errors": lambda directory: [advice.errors(directory)],
        "advice_headline": headline.headline,
        "leaderboard": records.leaderboard,
        "plan_scaling": lambda _: scaling_tables.published(published.validate()),
    }
    stale = [page for page in pages if not tables.embed(page, check=check, more=more)]
    if check and stale:
        print(f"out of date: {', '.join(map(str, stale))}. Run: te-bench embed {' '.join(map(str, stale))}")
        raise typer.Exit(1)
