"""te-bench merge: one run of the parts that several machines, or days, have measured."""

import sys
from pathlib import Path
from typing import Annotated

import typer

OTHER_ENVIRONMENT = 5

AllowEnvironmentChange = Annotated[
    bool, typer.Option("--allow-environment-change", help="Merge even where GPU, driver, packages or code differ.")
]


def merge(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="--out directories of runs of one sweep.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the merged run goes; it must hold no journal yet.")],
    allow_environment_change: AllowEnvironmentChange = False,
) -> None:
    """Join the journals of several runs into one, each trial once, which can be reported, gone on with and gated."""
    from te_bench.reports.exchange import merge as merged

    found = merged.merge(runs, out, allow_environment_change=allow_environment_change)
    differ = "; ".join(found.mismatch)
    if differ and not allow_environment_change:
        print(f"nothing is merged, for the runs are of different environments: {differ}.", file=sys.stderr)
        print("--allow-environment-change merges them all the same; a report shows each apart.", file=sys.stderr)
        raise typer.Exit(OTHER_ENVIRONMENT)
    for note in (*([f"the environments differ, which was allowed: {differ}"] if differ else []), *found.notes):
        print(f"Note: {note}.", file=sys.stderr)
    print(f"{found.records} of {found.planned} planned trials have ended: {out}")
