"""te-bench show: one question about a run, answered in the terminal."""

import sys
from pathlib import Path
from typing import Annotated

import typer

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
