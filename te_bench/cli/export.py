"""te-bench export and import: records as pytest-benchmark's JSON, and back."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from te_bench.cli.options import Only


def export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="--out of a run.")],
    pytest_benchmark: Annotated[Path, typer.Option(metavar="FILE", help="The JSON file to write.")],
    only: Only = None,
    environment: Annotated[
        str | None, typer.Option(metavar="ID", help="Default: the one that was planned in last.")
    ] = None,
) -> None:
    """Write the timed records of a run as the JSON of pytest-benchmark, which CI tools read."""
    from te_bench.reports.exchange import pytest_export

    number, others = pytest_export.write(directory, pytest_benchmark, only=only, environment=environment)
    print(f"{number} benchmarks: {pytest_benchmark}")
    if others:
        print(f"left out: records of {', '.join(others)}; --environment ID exports them", file=sys.stderr)


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON of `export` or of pytest --benchmark-json.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The journal's directory; one that exists goes on.")],
) -> None:
    """Read pytest-benchmark's JSON into a journal, for history and gate."""
    from te_bench.reports.exchange import pytest_import

    added, known = pytest_import.write(file, out)
    print(f"{added} records added to {out}{f', {known} were there already' if known else ''}")
    print(*pytest_import.describe(file), sep="\n")
