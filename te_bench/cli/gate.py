"""te-bench gate: did a change make a trial slower, larger or wrong? Compares two revisions, or the records of two runs."""

import contextlib
import functools
import math
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from te_bench.cli.options import (
    Alpha,
    Cache,
    Data,
    Device,
    On,
    Only,
    RayAddress,
    Timeout,
    check_on,
    find_gpus,
    said,
    say,
    warn,
)
from te_bench.experiments.run_options import data_sets, seconds
from te_bench.gate import config as configured
from te_bench.gate.config import Commands
from te_bench.gate.question import ALPHA, MARGIN, Question

_GRAMMAR = re.compile(r"(?P<number>\d+(\.\d+)?|\.\d+) ?%", re.ASCII)
_MOST = 100.0  # %
OUT = Path("runs") / "gate"
#: Options of a gate that measures two revisions.
MEASURING = ("head", "config", "suite", "budget", "exit_first", "device", "data", "cache", "out", "timeout")
OF_SUITES = ("suite", "device", "data", "cache")  # options that commands do not have
UNWRITTEN = 2  # the exit code if the gate passed and a file could not be written

Run = Annotated[Path | None, typer.Option(metavar="DIR", help="--out directory of a run, to compare two runs.")]
Base = Annotated[
    str | None, typer.Option(metavar="REF", help="Revision to compare with, such as the branch to merge into.")
]
Head = Annotated[str, typer.Option(metavar="REF", help="Revision to judge.")]
_CONFIG = "Time the commands in this te-bench.toml, in any repository, instead of a suite."
Config = Annotated[Path | None, typer.Option(metavar="FILE", help=_CONFIG)]
Suite = Annotated[str, typer.Option(help="Suite that both revisions run; see `te-bench list suites`.")]
_BUDGET = "Stop after this time, even if undecided: 90s, 10min or 2h. The first round, with setup, runs whole."
Budget = Annotated[str | None, typer.Option(metavar="TIME", help=_BUDGET)]
_FIRST = "Stop at the first regression; the other trials stay undecided."
ExitFirst = Annotated[bool, typer.Option("-x", "--exitfirst", help=_FIRST)]
SelfTest = Annotated[
    bool, typer.Option("--self-test", help="Gate this te-bench against itself, unchanged and with planted faults.")
]
Gates = Annotated[
    int | None, typer.Option(help="With --self-test: gates of each kind; of leak and crash at most 5. Default: 1.")
]
_AT_ONCE = "With --self-test: gates side by side, each with its own cores and its own GPU. Default: 1."
AtOnce = Annotated[int | None, typer.Option(metavar="N", help=_AT_ONCE)]
Slower = Annotated[
    str | None,
    typer.Option(metavar="N%,...", help="With --self-test: slow-downs to plant. Default: 1%,2%,5%."),
]
Margin = Annotated[str, typer.Option(metavar="N%", help="Smaller slow-downs count as none; may be a decimal: 2.5%.")]
_MDE = "Smallest difference from the margin to detect; limits the number of pairs advised. Default: the margin."
Mde = Annotated[str | None, typer.Option(metavar="N%", help=_MDE)]
AllowEnvironmentChange = Annotated[
    bool, typer.Option("--allow-environment-change", help="Compare even if GPU, driver or packages differ.")
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Directory for the records of both revisions.")]
CompareFail = Annotated[
    list[str] | None,
    typer.Option(
        "--compare-fail",
        metavar="STAT:N%",
        help="Also fail if a statistic grew by more: median:2.5%, min:0.001 (s). A plain threshold; repeatable.",
    ),
]
Markdown = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a pull-request comment.")]
Junit = Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Name trials as --only and the files do.")]
Json = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the whole result as JSON.")]


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the gate as cleanly as Ctrl-C, with exit code 128 + the signal's number."""

    def stop(number: int, _: FrameType | None) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # a second signal must not disturb the clean-up
        warn(f"\nStopped by {signal.Signals(number).name}; the same command continues from here.")
        raise SystemExit(128 + number)

    # a signal that the user ignores, with nohup for instance, stays ignored
    wanted = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    before = {number: signal.signal(number, stop) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@_stoppable()
def gate(
    context: typer.Context,
    base: Base = None,
    head: Head = "HEAD",
    config: Config = None,
    suite: Suite = "quick",
    budget: Budget = None,
    exit_first: ExitFirst = False,
    self_test: SelfTest = False,
    gates: Gates = None,
    at_once: AtOnce = None,
    slower: Slower = None,
    on: On = None,
    ray_address: RayAddress = None,
    baseline: Run = None,
    candidate: Run = None,
    margin: Margin = f"{100 * MARGIN:g}%",
    mde: Mde = None,
    alpha: Alpha = None,
    allow_environment_change: AllowEnvironmentChange = False,
    device: Device = None,
    data: Data = None,
    cache: Cache = None,
    out: Out = OUT,
    timeout: Timeout = 900.0,
    only: Only = None,
    compare_fail: CompareFail = None,
    markdown: Markdown = None,
    junit: Junit = None,
    json: Json = None,
    verbose: Verbose = False,
) -> None:
    """Say whether a change made anything slower, by exit code: 0 no, 1 yes, 2 bad input, 3 undecided, 4 missing or failed,
    5 other environments.
    """
    from te_bench.gate import output, revisions, stored_runs

    commands = None
    if config is not None:
        commands, margin, budget, timeout = _commands(context, config, base, margin, budget, timeout)
        device = "cpu"
    wanted = _wanted(margin, alpha, mde, only, compare_fail)
    files = [(form, path) for form, path in (("markdown", markdown), ("junit", junit), ("json", json)) if path]
    _one_question(base, bool(baseline or candidate), self_test, bool(files))
    check_on(on, ray_address, None)
    if not self_test and (gates, at_once, slower, on) != (None, None, None, None):
        raise ValueError("--gates, --at-once, --slower and --on need --self-test: add it, or leave them out")
    if on is not None and at_once is not None:
        raise ValueError(f"--at-once {at_once}: with --on ray each GPU runs one gate at a time; leave it out")
    if (baseline is None) is not (candidate is None):
        raise ValueError(f"--{'baseline' if candidate else 'candidate'} DIR is missing: a gate compares two runs")
    if baseline is not None and (measuring := said(context, *MEASURING)):
        raise ValueError(f"{measuring}: only for measuring two revisions, and --baseline reads two runs; leave out")
    output.check_writable(files)
    if base is not None or self_test:
        out = out.absolute()  # revisions change their working directory
        question, machine = _question(
            base,
            head,
            device,
            data,
            cache,
            suite=suite,
            budget=budget,
            exit_first=exit_first,
            timeout=timeout,
            elsewhere=on is not None,
            commands=commands,
            **wanted,
        )
        if self_test:
            asked = {
                "gates": 1 if gates is None else gates,
                "slower": _shares("1%,2%,5%" if slower is None else slower),
            }
            _self_test(question, out, machine, on is not None, ray_address, 1 if at_once is None else at_once, asked)
        found = revisions.run(question, out, machine, say=warn)
    elif baseline is not None:
        assert candidate is not None
        found = stored_runs.compare(baseline, candidate, allow_environment_change=allow_environment_change, **wanted)
    else:
        raise ValueError(
            "give the revision to compare with, te-bench gate --base main, or two runs: te-bench gate --baseline DIR "
            "--candidate DIR"
        )
    print("\n".join(output.terminal(replace(found, plain={}) if verbose else found)))
    failed = output.write(found, files)
    sys.stdout.flush()
    print(*failed, sep="\n", end="\n" * bool(failed), file=sys.stderr)
    raise typer.Exit(found.exit_code or UNWRITTEN * bool(failed))


def _commands(
    context: typer.Context, file: Path, base: str | None, margin: str, budget: str | None, timeout: float
) -> tuple[Commands, str, str | None, float]:
    """Read a te-bench.toml. Its margin, budget and timeout apply if the command line gives none."""
    if unfit := said(context, *OF_SUITES):
        raise ValueError(f"{unfit}: only for suites, and --config times commands instead; leave one of them out")
    if base is None:
        raise ValueError(f"--config {file}: add a revision to compare with: te-bench gate --config {file} --base main")
    found = configured.read(file)
    if found.margin is not None and not said(context, "margin"):
        fraction(f"{file}: margin", margin := found.margin)
    if found.budget is not None and budget is None:
        seconds(budget := found.budget, f"{file}: budget")
    return found, margin, budget, timeout if found.timeout is None or said(context, "timeout") else found.timeout


def _wanted(
    margin: str, alpha: float | None, mde: str | None, only: str | None, compare_fail: list[str] | None
) -> dict[str, Any]:
    """Parse the options that apply to two revisions and to two runs."""
    from te_bench.reports.exchange.pytest_stats import parse

    return {
        "margin": fraction("--margin", margin),
        "alpha": ALPHA if alpha is None else alpha,
        "mde": None if mde is None else fraction("--mde", mde),
        "only": only,
        "limits": [parse(expression) for expression in compare_fail or ()],
    }


def _one_question(base: str | None, runs: bool, self_test: bool, files: bool) -> None:
    if sum((base is not None, runs, self_test)) > 1:
        raise ValueError(
            "--base measures two revisions, --baseline reads two runs, --self-test gates this te-bench: give one of them"
        )
    if self_test and files:
        raise ValueError(
            "--self-test writes its answers to --out, not to --markdown, --junit or --json; leave these out"
        )


def _question(
    base: str | None,
    head: str,
    device: str | None,
    data: list[str] | None,
    cache: Path | None,
    *,
    budget: str | None,
    timeout: float,
    elsewhere: bool,
    **wanted: Any,
) -> tuple[Question, dict[str, Any]]:
    """Return the question of a gate that measures, and its machine; without a base, this te-bench against itself.

    elsewhere: the gates run on other hosts, which find their own GPUs.
    """
    from te_bench.experiments import environment
    from te_bench.gate import checkouts

    cache = None if cache is None else cache.absolute()
    on = device or environment.default_device()
    gpus = [] if elsewhere else find_gpus(on, None)[:1]
    root = None if base is None else checkouts.repository(Path.cwd())
    if root and head == "HEAD" and checkouts.dirty(root):
        warn("Uncommitted changes are not judged: --head HEAD is the last commit.")
    question = Question(
        repository=root,
        base="installed" if base is None else base,
        head="installed" if base is None else head,
        device=on,
        options={"data": _absolute(data_sets(data or [])), "cache": None if cache is None else str(cache)},
        budget_s=None if budget is None else seconds(budget),
        timeout_s=timeout,
        cache=cache,
        gpu=gpus[0]["uuid"] if gpus else None,
        **wanted,
    )
    return question, environment.capture(on, gpus)


def _absolute(data: dict[str, str]) -> dict[str, str]:
    """Return the data sets with absolute paths, so that text:PATH or a folder is the same for both revisions."""
    found = {}
    for model, spec in data.items():
        form, _, rest = spec.partition(":")
        name, *more = [rest] if form == "text" else rest.split(":")
        path = Path(name)
        with contextlib.suppress(RuntimeError):  # of ~ without a home folder
            path = path.expanduser()
        here = bool(name) and (form == "text" or (form in ("hf", "hf-stream") and path.is_dir()))
        found[model] = ":".join([form, str(path.absolute()), *more]) if here else spec
    return found


def _shares(slower: str) -> list[float]:
    """Return 0.01 and 0.05 for 1%,5%. Raise ValueError for a repeated share, whose gates would count as one condition's."""
    shares = [fraction("--slower", share) for share in slower.split(",")]
    if len(set(shares)) < len(shares):
        raise ValueError(f"--slower {slower}: give each slow-down once; --gates says how many gates it gets")
    return shares


def _self_test(
    question: Question,
    out: Path,
    machine: dict[str, Any],
    elsewhere: bool,
    ray_address: str | None,
    at_once: int,
    asked: dict[str, Any],
) -> NoReturn:
    """Run the self-test and exit. elsewhere: on the cluster's equal hosts, on a CPU one gate at a time on each host."""
    from te_bench.cli.run import find_hosts
    from te_bench.experiments import on_ray
    from te_bench.gate import gates_on_ray, self_test
    from te_bench.gate.places import places
    from te_bench.reports.page import tables

    if elsewhere:
        with on_ray.connected(ray_address, warn):
            cluster = find_hosts(on_ray.Wanted(device=question.device, by_table=("gemm",)))
            asked |= {"where": cluster.places, "run_each": functools.partial(gates_on_ray.run_each, cluster)}
            rates = self_test.run(question, out, cluster.machine, say=warn, **asked)
    else:
        gpus = [gpu["uuid"] for gpu in find_gpus(question.device, None)]
        asked["where"] = places(at_once, device=question.device, gpus=gpus)
        rates = self_test.run(question, out, machine, say=warn, **asked)
    shown = self_test.table(rates)
    print("\n".join(tables.terminal(shown)))
    say(shown.note)
    raise typer.Exit(0 if self_test.passed(rates, question.alpha) else 1)


def fraction(option: str, given: str) -> float:
    """Return 0.025 for 2.5% or 2.5 %. Raise ValueError for anything else: 0.02 could be a share or a percentage.

    Legal are more than 0 and at most 100 %, because no two times are equal. option: the beginning of the message.
    """
    found = _GRAMMAR.fullmatch(given.strip())
    value = float(found["number"]) if found else math.nan
    if not 0 < value <= _MOST:  # also refuses NaN
        raise ValueError(f"{option} {given}: give more than 0 % and at most 100 %, with the % sign: 2% or 2.5%")
    return value / 100
