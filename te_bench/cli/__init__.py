"""The command line: a verb is a stage. list -> plan -> run -> show, merge, report, verdict, gate, export,
history, submit; advise; tune.

Exit codes: 0 done or passed; 1 inferior, or a regression; 2 usage (the message says what is legal); 3 inconclusive; 4
incomplete: some planned trial has no result, none is supported here, or a verdict is void; 5 the environments of a gate or
a merge differ; 70 a fault of te-bench; 128 and the number of the signal that ended it: 130 after Ctrl-C, 143 after SIGTERM,
of a gate 129 after SIGHUP. Nothing heavy is imported before a verb needs it, so `te-bench --help` answers at once.
"""

import te_bench.cli.interrupts  # noqa: F401  # isort: skip  # first: for a Ctrl-C while others are imported

import contextlib
import functools
import gc
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer

from te_bench import __version__
from te_bench.cli import (
    advise,
    evaluate,
    exchange,
    gate,
    interrupts,
    look,
    neighbours,
    report,
    run,
    scaling,
    tune,
)
from te_bench.cli import verdict as judge
from te_bench.cli.options import Once
from te_bench.reports import CONTROL

app = typer.Typer(
    name="te-bench",
    help="Which attention kernel and which precision to train transformers with on your GPU, with proof.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


USAGE, FAULT = 2, 70


def main() -> None:
    """Entry point: a ValueError, a file that can't be used and a missing package are the user's to read; exit code 2."""
    gc.set_threshold(100_000)  # imports make objects by the hundred thousand, and no garbage: a tenth of their time
    with contextlib.ExitStack() as streams:
        nowhere = streams.enter_context(Path(os.devnull).open("w"))  # for a stream that the caller closed
        streams.enter_context(contextlib.redirect_stdout(cast(TextIO, _Printable(sys.stdout or nowhere))))
        streams.enter_context(contextlib.redirect_stderr(cast(TextIO, _Printable(sys.stderr or nowhere))))
        try:
            _require_words(sys.argv)
            app()
        except ValueError as error:
            sys.exit(_refused(str(error)))
        except ModuleNotFoundError as error:
            package = (error.name or "te_bench").partition(".")[0]
            if package == "te_bench":
                sys.exit(_fault())
            sys.exit(_refused(f"needs the package {package}: pip install {package}"))
        except BrokenPipeError:  # `te-bench list | head`
            sys.stderr.close()
            sys.exit(141)
        except OSError as error:
            sys.exit(_refused(f"{error.filename or 'cannot go on'}: {error.strerror or error}"))
        except Exception:
            sys.exit(_fault())


def _require_words(arguments: Sequence[str]) -> None:
    """Raise ValueError for an empty argument, which as a folder would be the current one."""
    for before, word in itertools.pairwise(arguments):
        if not word or (word.startswith("--") and word.endswith("=")):
            raise ValueError(f"the argument {word or 'after ' + before} is empty: is a variable unset?")


def _refused(why: str) -> int:
    print(f"te-bench: {why}", file=sys.stderr)
    return USAGE


def _fault() -> int:
    """What nobody foresaw: its traceback, and an exit code that is no verdict, as Python's own 1 would be."""
    traceback.print_exc()
    print("te-bench: this is a fault of te-bench, and no result", file=sys.stderr)
    return FAULT


class _Printable:
    """A stream whose text moves no cursor and changes no colour: what files, records and names hold is shown as it is.

    `raw` is the stream itself, for the progress bar, which draws.
    """

    def __init__(self, raw: TextIO):
        self.raw = raw

    def write(self, text: str) -> int:
        return self.raw.write(CONTROL.sub("\ufffd", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def _interruptible(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb, ending with 130 on Ctrl-C wherever it was: click's own answer is 1, which is a verdict here."""

    @functools.wraps(verb)
    def run_verb(*arguments: Any, **options: Any) -> None:
        try:
            verb(*arguments, **options)
        except KeyboardInterrupt as interrupt:
            print("\nStopped.", file=sys.stderr)
            raise typer.Exit(interrupts.exit_code(interrupt)) from None

    return run_verb


@app.callback(invoke_without_command=True)
def _without_verb(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        print(f"te-bench {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        from te_bench.cli import welcome

        print("\n".join(welcome.lines()))


def demo(context: typer.Context) -> None:
    """Measure a few steps, in about a minute, and write a first report: te-bench run demo, whose options it takes."""
    app(["run", "demo", *context.args])


#: In the list of commands, whose lines an 80-column terminal would cut.
VERBS: dict[Callable[..., None], str] = {
    demo: "A first report, in about a minute.",
    look.doctor: "What this machine, or a GPU by its name, can run.",
    look.list_: "Suites, models, recipes, attention kernels, rivals, data.",
    advise.advise: "What to train your model with on this machine.",
    look.plan: "A run's trials and how long they take; plan scaling predicts.",
    run.run: "Measure a suite, and write the report.",
    report.show: "What was fastest, smallest, wrong? Bars in the terminal.",
    report.report: "Write the report of a run again.",
    judge.verdict: "Does FP8 train like bf16? By exit code, too.",
    gate.gate: "Is a change slower? By exit code, too.",
    evaluate.evaluate: "Perplexity of a checkpoint, in bf16 and in FP8.",
    report.history: "Times over commits, with change points.",
    exchange.merge: "Join the runs of several machines.",
    exchange.submit: "Check a run and put it into results/.",
    neighbours.neighbours: "Do trials on other GPUs disturb a time?",
    tune.tune: "Measure which kernel is fastest at your shapes.",
    report.embed: "Bring the tables of Markdown files up to date.",
    exchange.export: "Records as pytest-benchmark's JSON.",
    exchange.import_: "pytest-benchmark's JSON as records.",
}
for verb, short in VERBS.items():
    # `te-bench plan scaling --world 1024` is a prediction, not a suite's plan
    cls = scaling.Plan if verb is look.plan else judge.Verdict if verb is judge.verdict else Once
    of_run = {"allow_extra_args": True, "ignore_unknown_options": True} if verb is demo else None
    app.command(verb.__name__.strip("_"), short_help=short, cls=cls, context_settings=of_run)(_interruptible(verb))
