"""The command line: a verb is a stage. list -> plan -> run -> report, verdict, gate, export, history; tune.

Exit codes: 0 done or passed; 1 inferior, or a regression; 2 usage (the message says what is legal); 3 inconclusive; 4
incomplete: some planned trial has no result, or a verdict is void; 5 the environments of a gate differ.
130 after Ctrl-C; of a gate 143 after SIGTERM and 129 after SIGHUP. Nothing heavy is imported before a verb needs it, so
`te-bench --help` answers at once.
"""

import functools
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from te_bench import __version__
from te_bench.cli import evaluate, export, gate, history, look, report, run, tune
from te_bench.cli import verdict as judge

app = typer.Typer(
    name="te-bench",
    help="Which attention kernel and which precision to train transformers with on your GPU, with proof.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Entry point: a ValueError, a file that can't be used and a missing package are the user's to read; exit code 2."""
    try:
        app()
    except ValueError as error:
        print(f"te-bench: {error}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        package = (error.name or "te_bench").partition(".")[0]
        if package == "te_bench":  # a fault of ours
            raise
        print(f"te-bench: needs the package {package}: pip install {package}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # `te-bench list | head`
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:
        print(f"te-bench: {error.filename or 'cannot go on'}: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)


def _interruptible(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb, ending with 130 on Ctrl-C wherever it was: click's own answer is 1, which is a verdict here."""

    @functools.wraps(verb)
    def run_verb(*arguments: Any, **options: Any) -> None:
        try:
            verb(*arguments, **options)
        except KeyboardInterrupt:
            print("\nStopped.", file=sys.stderr)
            raise typer.Exit(130) from None

    return run_verb


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        print(f"te-bench {__version__}")
        raise typer.Exit


for verb in (
    look.list_,
    look.plan,
    run.run,
    report.report,
    judge.verdict,
    gate.gate,
    evaluate.evaluate,
    tune.tune,
    report.embed,
    export.export,
    export.import_,
    history.history,
    look.doctor,
):
    app.command(verb.__name__.strip("_"))(_interruptible(verb))
