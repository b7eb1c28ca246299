"""te-bench show, report, embed and history: what runs have recorded, in answers, pages and tables."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from te_bench.cli.options import Only

BLOCK = "█"


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="--out directory of a run.")],
    question: Annotated[
        str | None, typer.Argument(help="fastest, memory, error, unsupported or energy. Default: the run's answer.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="And what each name stands for, setting by setting.")
    ] = False,
) -> None:
    """Answer one question about a run: what is fastest, what takes least memory, how far off, what failed and why."""
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


def history(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="--out directories of runs, and of te-bench import.")
    ],
    only: Only = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where history.html, history.md and figures go. Default: none.")
    ] = None,
    alpha: Annotated[float, typer.Option(help="False alarms that a series of mere noise may give.")] = 0.01,
) -> None:
    """Show each configuration's times over commits and where their level changed; to judge is the gate's task."""
    from te_bench.reports.history import series as records
    from te_bench.reports.page import history_page as page

    found = records.load_history(directories, only=only, alpha=alpha)
    print(page.terminal(found), end="")
    if out is not None:
        print(f"history: {page.write_page(found, out)}")
