"""te-bench merge, export, import and submit: move records from one place to another."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from te_bench.cli.options import Only
from te_bench.cli.run import INCOMPLETE

OTHER_ENVIRONMENT = 5

AllowEnvironmentChange = Annotated[
    bool, typer.Option("--allow-environment-change", help="Merge even if GPU, driver, packages or code differ.")
]


def merge(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="--out directories of runs of one sweep.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The merged run; DIR must hold no journal yet.")],
    allow_environment_change: AllowEnvironmentChange = False,
) -> None:
    """Join the journals of several runs into one, each trial once. The result can be reported, continued and gated."""
    from te_bench.reports.exchange import merge as merged

    found = merged.merge(runs, out, allow_environment_change=allow_environment_change)
    differ = "; ".join(found.mismatch)
    if differ and not allow_environment_change:
        print(f"nothing is merged, because the runs have different environments: {differ}.", file=sys.stderr)
        print("--allow-environment-change merges them anyway; a report shows each one separately.", file=sys.stderr)
        raise typer.Exit(OTHER_ENVIRONMENT)
    for note in (*([f"the environments differ, as allowed: {differ}"] if differ else []), *found.notes):
        print(f"Note: {note}.", file=sys.stderr)
    print(f"{found.records} of {found.planned} planned trials have ended: {out}")


def export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="--out directory of a run.")],
    pytest_benchmark: Annotated[Path, typer.Option(metavar="FILE", help="The JSON file to write.")],
    only: Only = None,
    environment: Annotated[
        str | None, typer.Option(metavar="ID", help="Environment to export. Default: the most recently planned.")
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
    out: Annotated[Path, typer.Option(metavar="DIR", help="The journal's directory; an existing journal is extended.")],
) -> None:
    """Read pytest-benchmark's JSON into a journal, for history and gate."""
    from te_bench.reports.exchange import pytest_import

    added, known, others = pytest_import.write(file, out)
    print(f"{added} records added to {out}{f', {known} were there already' if known else ''}")
    if others:
        said = "other measurements of these were" if others > 1 else "other measurement of these was"
        print(f"{others} {said} not taken: import {'them' if others > 1 else 'it'} into another --out", file=sys.stderr)
    print(*pytest_import.describe(file), sep="\n")


def submit(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="--out directory of a run on a GPU.")],
    name: Annotated[str | None, typer.Option(help="The folder's name in results/GPU. Default: the run's own.")] = None,
    missing: Annotated[
        str | None, typer.Option(metavar="WHY", help="Why some trials of the suite were not run, or crashed.")
    ] = None,
) -> None:
    """Check a run, copy it to results/GPU/NAME of the current checkout, and print the pull request's commands.

    Nothing is pushed. If the run lacks anything, each problem is listed and nothing is copied (exit code 4).
    """
    from te_bench.reports.analysis.rows import load_results
    from te_bench.reports.exchange import submission
    from te_bench.reports.page import environments, render

    above = (path / "results" for path in (Path.cwd(), *Path.cwd().parents))
    results = next((path for path in above if (path / "published.toml").is_file()), None)
    if results is None:
        again = shlex.join(["te-bench", "submit", str(run.absolute())])
        raise ValueError(
            f"{Path.cwd()} is in no clone of te-bench: submit copies a run to results/ of one. Clone te-bench's repository, "
            f"and there run {again}"
        )
    found = submission.examine(run, results, name=name, missing=missing)
    if found.lacks:
        print("\n".join(found.lacks), file=sys.stderr)
        raise typer.Exit(INCOMPLETE)
    [command, *others] = environments.commands(load_results([run]))
    folder = submission.enter(found, results, "; ".join([command, *others]))
    render.write_report([folder], folder / "report")
    branch = f"results-{found.folder.replace('/', '-')}"
    title = shlex.quote(f"Results: {found.folder}")
    print(f"{folder}: the journal and its report; README.md and published.toml in results/ name it. Now:\n")
    print(
        f"    git switch -c {branch}\n    git add results\n    git commit -m {title}\n    git push -u origin {branch}"
    )
    print(f"    gh pr create --title {title} --body {shlex.quote(command)}")
