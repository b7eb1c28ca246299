"""te-bench gate: did a change make any trial slower, larger or wrong, by the records of two runs."""

import math
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from te_bench.cli.options import Alpha, Only

_GRAMMAR = re.compile(r"(?P<number>\d+(\.\d+)?|\.\d+) ?%", re.ASCII)
_MOST = 100.0  # %
Run = Annotated[Path | None, typer.Option(metavar="DIR", help="--out of a run.")]


def gate(
    baseline: Run = None,
    candidate: Run = None,
    margin: Annotated[
        str, typer.Option(metavar="N%", help="A slow-down by less counts as none; decimals are fine: 2.5%.")
    ] = "2%",
    mde: Annotated[
        str | None,
        typer.Option(
            metavar="N%",
            help="How near to the margin a ratio may stay untold: bounds the pairs said to be needed. Default: the margin.",
        ),
    ] = None,
    alpha: Alpha = None,
    allow_environment_change: Annotated[
        bool, typer.Option("--allow-environment-change", help="Compare even where GPU, driver or packages differ.")
    ] = False,
    only: Only = None,
    compare_fail: Annotated[
        list[str] | None,
        typer.Option(
            "--compare-fail",
            metavar="STAT:N%",
            help="Fail too where a statistic grew by more: median:2.5%, min:0.001 (s). A plain threshold; repeatable.",
        ),
    ] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a pull-request comment.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write everything as JSON.")] = None,
) -> None:
    """Say whether a change made it slower: 0 no, 1 yes, 3 undecided, 4 missing or failed, 5 other environments."""
    if baseline is None or candidate is None:
        raise ValueError("give the runs to compare: te-bench gate --baseline DIR --candidate DIR")
    from te_bench.reports import gate_output, gate_records
    from te_bench.reports.compare_fail import parse

    found = gate_records.compare(
        baseline,
        candidate,
        margin=fraction("margin", margin),
        alpha=gate_records.ALPHA if alpha is None else alpha,
        mde=None if mde is None else fraction("mde", mde),
        only=only,
        allow_environment_change=allow_environment_change,
        limits=[parse(expression) for expression in compare_fail or ()],
    )
    print("\n".join(gate_output.terminal(found)))
    files = (("markdown", markdown), ("junit", junit), ("json", json))
    gate_output.write(found, [(form, path) for form, path in files if path is not None])
    sys.stdout.flush()
    raise typer.Exit(found.exit_code)


def fraction(option: str, given: str) -> float:
    """0.025 of 2.5% or 2.5 %. Raises ValueError for anything else: 0.02 could be a share or a percentage.

    More than 0 and at most 100 %: no two times are ever equal.
    """
    found = _GRAMMAR.fullmatch(given.strip())
    value = float(found["number"]) if found else math.nan
    if not 0 < value <= _MOST:  # nor is NaN
        raise ValueError(f"--{option} {given}: give a percentage above 0, with its sign, such as 2% or 2.5%")
    return value / 100
