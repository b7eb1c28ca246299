"""te-bench submit: a run of yours for results/ of te-bench's repository."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

INCOMPLETE = 4


def submit(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="--out of a run on a GPU.")],
    name: Annotated[str | None, typer.Option(help="The folder's name in results/GPU. Default: the run's own.")] = None,
    missing: Annotated[
        str | None, typer.Option(metavar="WHY", help="Why trials of the suite were not run, if some were not.")
    ] = None,
) -> None:
    """Check a run, copy it to results/GPU/NAME of the checkout you stand in, and print the pull request's commands.

    Nothing is pushed. What the run lacks is said in a sentence each, and then nothing is copied (exit code 4).
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
