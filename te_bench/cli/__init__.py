"""The command line: each command is a stage. list -> plan -> run -> show, merge, report, verdict, gate, export,
history, submit; advise; tune.

Exit codes: 0 done or passed; 1 inferior, or a regression; 2 wrong usage (the message says what is legal); 3 inconclusive; 4
incomplete: a planned trial has no result, no trial is supported here, or a verdict is void; 5 the environments of a gate or
a merge differ; 70 a fault of te-bench; 128 + N after signal N: 130 after Ctrl-C, 143 after SIGTERM, for a gate 129 after
SIGHUP, 141 where the reader of the output has gone (`| head`). Commands import heavy packages only when they need them, so
`te-bench --help` answers at once.
"""

import te_bench.cli.interrupts  # noqa: F401  # isort: skip  # first, for a Ctrl-C during the other imports

import contextlib
import functools
import gc
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
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
    help="Find out which attention kernel and which precision to train your transformer with on your GPU.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


USAGE, FAULT = 2, 70
CLOSED = 141  # 128 + SIGPIPE


def main() -> None:
    """Run the command line. A ValueError, a missing package and a file error are messages to the user, with exit code 2."""
    gc.set_threshold(100_000)  # imports create many objects and no garbage; collection took a tenth of their time
    with contextlib.ExitStack() as streams:
        nowhere = streams.enter_context(Path(os.devnull).open("w"))  # for a stream that the caller closed
        streams.enter_context(contextlib.redirect_stdout(cast(TextIO, _Printable(sys.stdout or nowhere))))
        streams.enter_context(contextlib.redirect_stderr(cast(TextIO, _Printable(sys.stderr or nowhere))))
        try:
            _require_words(sys.argv)
            try:
                app()
            finally:
                sys.stdout.flush()  # what fails later would have Python's exit code
        except ValueError as error:
            sys.exit(_refused(str(error)))
        except ModuleNotFoundError as error:
            package = (error.name or "te_bench").partition(".")[0]
            if package == "te_bench":
                sys.exit(_fault())
            sys.exit(_refused(f"needs the package {package}: pip install {package}"))
        except OSError as error:
            sys.exit(_refused(f"{error.filename or 'cannot go on'}: {error.strerror or error}"))
        except Exception:
            sys.exit(_fault())


def _require_words(arguments: Sequence[str]) -> None:
    """Raise ValueError for an empty argument, which as a folder would be the current one."""
    for before, word in itertools.pairwise(arguments):
        if not word or (word.startswith("--") and word.find("=") == len(word) - 1):
            raise ValueError(f"the argument {word or 'after ' + before} is empty: is a variable unset?")


def _refused(why: str) -> int:
    print(f"te-bench: {why}", file=sys.stderr)
    return USAGE


def _fault() -> int:
    """Report a fault of te-bench with its traceback; return a code that no verdict uses, unlike Python's own 1."""
    traceback.print_exc()
    print("te-bench: this is a fault of te-bench, and no result", file=sys.stderr)
    return FAULT


class _Printable:
    """A stream without control characters, so that text from files, records and names cannot move the cursor.

    `raw` is the stream itself, which the progress bar needs to draw.
    """

    def __init__(self, raw: TextIO):
        self.raw = raw

    def write(self, text: str) -> int:
        with self._read():
            return self.raw.write(CONTROL.sub("\ufffd", text))

    def flush(self) -> None:
        with self._read():
            self.raw.flush()

    @contextlib.contextmanager
    def _read(self) -> Iterator[None]:
        """Exit with 141 where nobody reads the stream any more: click's own exit code 1 would be a verdict."""
        try:
            yield
        except BrokenPipeError:
            with Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), self.raw.fileno())  # for what Python still flushes at its end
            sys.exit(CLOSED)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def _interruptible(verb: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that Ctrl-C exits with 130: click's own exit code 1 would be a verdict."""

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
    """Measure a few steps, in about a minute, and write a first report. Takes the options of te-bench run demo."""
    app(["run", "demo", *context.args])


#: Summaries in the list of commands; an 80-column terminal cuts longer ones.
VERBS: dict[Callable[..., None], str] = {
    demo: "A first report, in about a minute.",
    look.doctor: "What this machine, or a named GPU, can run.",
    look.list_: "Suites, models, recipes, attention kernels, rivals, data.",
    advise.advise: "What to train your model with on this machine.",
    look.plan: "List a run's trials and their time, or predict many GPUs.",
    run.run: "Measure a suite, and write the report.",
    report.show: "A run's answers in the terminal: speed, memory, failures.",
    report.report: "Write the report of a run again.",
    judge.verdict: "Does FP8 train like bf16? Answers by exit code, too.",
    gate.gate: "Is a change slower? Answers by exit code, too.",
    evaluate.evaluate: "Perplexity of a checkpoint, in bf16 and in FP8.",
    report.history: "Times over commits, with change points.",
    exchange.merge: "Join the runs of several machines.",
    exchange.submit: "Check a run and put it into results/.",
    neighbours.neighbours: "Do trials on other GPUs change a measured time?",
    tune.tune: "Measure which kernel is fastest at your shapes.",
    report.embed: "Update the tables in Markdown files from records.",
    exchange.export: "Write records as pytest-benchmark's JSON.",
    exchange.import_: "Read pytest-benchmark's JSON into records.",
}
for verb, short in VERBS.items():
    # `te-bench plan scaling --world 1024` is a prediction, not a suite's plan
    cls = scaling.Plan if verb is look.plan else judge.Verdict if verb is judge.verdict else Once
    of_run = {"allow_extra_args": True, "ignore_unknown_options": True} if verb is demo else None
    app.command(verb.__name__.strip("_"), short_help=short, cls=cls, context_settings=of_run)(_interruptible(verb))
