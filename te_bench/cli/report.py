"""te-bench show, report, embed and history: show records as answers, pages and tables."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from te_bench.cli.options import Only

BLOCK = "█"


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="--out directory of a run.")],
    question: Annotated[
        str | None, typer.Argument(help="verdict, fastest, memory, error, unsupported or energy. Default: an overview.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also list the settings of each configuration.")] = False,
) -> None:
    """Answer a question about a run: what is fastest, what needs least memory, how large are errors, what failed and why."""
    from te_bench import plugins
    from te_bench.reports.group_result import load_report
    from te_bench.reports.page import answers

    if question is not None:
        plugins.check("question", question, list(answers.QUESTIONS))
    report = load_report([run])
    plain = not _draws_blocks(getattr(sys.stdout, "encoding", None))
    for line in answers.answer(report, question, run=str(run), ascii_only=plain):
        print(line)
    if verbose:
        print("\n".join(["", *answers.specifications(report)]))


def _draws_blocks(encoding: str | None) -> bool:
    try:
        BLOCK.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def report(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="--out directories of runs; several are merged.")
    ],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The report. Default: DIR/report.")] = None,
) -> None:
    """Write index.html, report.md, records.csv and the figures of one or several runs."""
    from te_bench.experiments.store import own
    from te_bench.reports.analysis import rows
    from te_bench.reports.page import render

    for said in rows.gaps(directories):
        print(said, file=sys.stderr)
    print(render.write_report(directories, out or own(directories[0] / "report")))


def embed(
    pages: Annotated[list[Path], typer.Argument(metavar="FILE", help="Markdown files with te-bench:table markers.")],
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if a table is out of date.")] = False,
) -> None:
    """Update the tables in Markdown files from the records that the files name."""
    from te_bench.advice import headline
    from te_bench.advice import tables as advice
    from te_bench.experiments.scaling import published
    from te_bench.gate import self_test
    from te_bench.reports.page import embed as tables
    from te_bench.reports.page import published as records
    from te_bench.reports.page import published_verdicts as verdicts
    from te_bench.reports.page import scaling_tables

    more: tables.More = {
        "self_test": lambda directory: self_test.table(self_test.stored(directory)),
        "advice": lambda directory: [advice.answers(directory)],
        "advice_errors": lambda directory: [advice.errors(directory)],
        "advice_headline": headline.headline,
        "leaderboard": records.leaderboard,
        "verdicts": verdicts.table,
        "verdict_summary": verdicts.summary,
        "plan_scaling": lambda _: scaling_tables.published(published.validate()),
    }
    stale = [page for page in pages if not tables.embed(page, check=check, more=more)]
    if check and stale:
        print(f"out of date: {', '.join(map(str, stale))}. Run: te-bench embed {' '.join(map(str, stale))}")
        raise typer.Exit(1)


def history(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="--out directories of runs or of te-bench import.")
    ],
    only: Only = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write history.html, history.md and figures here. Default: print only."),
    ] = None,
    alpha: Annotated[float, typer.Option(help="Rate of false alarms for a series without a change.")] = 0.01,
) -> None:
    """Show each configuration's times over commits, and where their level changed. The gate judges; this command shows."""
    from te_bench.reports.history import series as records
    from te_bench.reports.page import history_page as page

    found = records.load_history(directories, only=only, alpha=alpha)
    print(page.terminal(found), end="")
    if out is not None:
        print(f"history: {page.write_page(found, out)}")
