"""te-bench history: the times of configurations over commits, and where their level changed."""

from pathlib import Path
from typing import Annotated

import typer

from te_bench.cli.options import Only


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
