"""te-bench verdict: does each FP8 recipe train like bf16? Judges the records of a run, or anybody's logs."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand

from te_bench.cli.options import Alpha, Margin, say
from te_bench.experiments.store import GATE_SIDES, JOURNAL, written
from te_bench.reports.page import screen

PAGE = b'<meta name="generator" content="te-bench">'
SEVERAL = ("--baseline", "--candidate")
_LOGS = (
    "A log per seed, or a folder of logs: W&B, TensorBoard, torchtitan, Hugging Face, Megatron, NeMo, torchtune, nanoGPT, "
    "llm.c, LitGPT, CSV. Of one CSV for both sides, its runs: 'both.csv:bf16-*'."
)
Logs = Annotated[list[Path] | None, typer.Option(metavar="PATH...", help=_LOGS)]


class Verdict(TyperCommand):
    """A command whose --baseline and --candidate take all paths up to the next option, as shells expand patterns."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        taken: list[str] = []
        option: str | None = None
        for word in args:
            if word.startswith("-"):
                option = next((name for name in SEVERAL if word.partition("=")[0] == name), None)
            elif option is not None and taken[-1] != option:
                taken.append(option)
            taken.append(word)
        return super().parse_args(ctx, taken)


def verdict(
    directories: Annotated[
        list[Path] | None, typer.Argument(metavar="DIR", help="--out directories of convergence runs.")
    ] = None,
    baseline: Logs = None,
    candidate: Logs = None,
    paired: Annotated[
        bool | None,
        typer.Option(
            help="Pair the runs by seed, or by row. Default: by seed if most have a partner; others are left out."
        ),
    ] = None,
    metric: Annotated[str | None, typer.Option(help="The loss to judge. Default: validation, else training.")] = None,
    margin: Margin = None,
    alpha: Alpha = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the answer as a single page.")] = None,
    break_off: Annotated[
        str | None,
        typer.Option(
            metavar="WHY",
            help="Give up DIR's unfinished study: its gaps are shown from then on, and it never has a verdict.",
        ),
    ] = None,
) -> None:
    """Say whether FP8 trains like bf16, by exit code: 0 it does, 1 it does not, 3 undecided, 4 void or incomplete."""
    if directories and (baseline or candidate):
        raise ValueError("give a run's directory, or --baseline and --candidate, not both")
    if directories and (metric or html or paired is not None):
        raise ValueError(
            "--metric, --html and --paired go with --baseline and --candidate; for a run use te-bench report"
        )
    for path in directories or []:
        if path.exists() and not any(map(written, (path, *(path / side for side in GATE_SIDES)))):
            raise ValueError(
                f"{path} is no te-bench run, whose folder holds {JOURNAL}: give other trainers' logs by side, --baseline "
                "BF16-LOGS --candidate FP8-LOGS"
            )
    if break_off is not None:
        _break_off(directories or [], break_off)
    if directories:
        code = _of_runs(directories, margin, alpha)
    elif baseline and candidate:
        if margin is None:
            raise ValueError(
                "--margin: state the largest gap in loss that you would accept, such as 0.003, before you see the result"
            )
        code = _of_logs(baseline, candidate, paired, metric, margin, 0.05 if alpha is None else alpha, html)
    else:
        raise ValueError("give the --out directory of te-bench run convergence, or --baseline LOGS --candidate LOGS")
    sys.stdout.flush()
    raise typer.Exit(code)


def _break_off(directories: list[Path], why: str) -> None:
    """Write into the journal of the one directory that its study is given up. Raises ValueError if nothing is hidden."""
    from te_bench.experiments.store import Store
    from te_bench.reports.analysis.rows import load_results
    from te_bench.reports.convergence.verdict import judge_group

    if len(directories) != 1 or not why.strip():
        raise ValueError("--break-off takes one --out directory of a convergence run, and a reason")
    groups = load_results(directories).groups
    hidden = [(configuration, group.environment) for group in groups for configuration in judge_group(group)[1]]
    if not hidden:
        raise ValueError(f"--break-off: {directories[0]} holds no study whose planned runs are not done")
    with Store(directories[0]) as store:
        store.break_off(why.strip(), hidden)


def _of_runs(directories: list[Path], margin: float | None, alpha: float | None) -> int:
    """Print the verdict of every study in the runs; return the exit code of the worst."""
    from te_bench.reports.analysis.rows import load_results
    from te_bench.reports.convergence.study import studies
    from te_bench.reports.convergence.study_verdict import INCOMPLETE
    from te_bench.reports.convergence.verdict import judge_noise, judge_study
    from te_bench.reports.page import tables, verdict_tables

    groups = load_results(directories).groups
    known = [(group, study) for group in groups for study in studies(group)]
    whole = [(group, study) for group, study in known if study.whole]
    pilots = [(study, found) for _, study in known if (found := judge_noise(study, margin=margin, alpha=alpha))]
    if not whole and pilots:  # only bf16 and A/A: a trial run before the recipes
        for study, found in pilots:
            said = f"No verdict: {study.title} has no recipe yet. bf16 against itself: {found.verdict}, {found.reason}."
            say(said)
        return INCOMPLETE
    if not whole:
        why = "no convergence run: te-bench run convergence, then te-bench verdict runs/convergence"
        if known:
            why = f"no bf16 control and recipe to compare: te-bench run convergence --out {shlex.quote(str(directories[0]))}"
        raise ValueError(f"{directories[0]} holds {why}")
    for group, study in known:
        if not study.whole:
            say(f"Note: left out, because it lacks a control or a recipe: {study.title}, {group.where}.", indent="  ")
    judged = [judge_study(study, margin=margin, alpha=alpha) for _, study in whole]
    for (group, study), one in zip(whole, judged, strict=True):
        if len(whole) > 1:
            print(f"== {study.title}, {group.where}")
        say(one.headline)
        if goes_on := one.sentence.removeprefix(one.headline).strip():
            print(goes_on)  # a command is not wrapped
        of = "" if len(whole) > 1 else f"{study.title}, {group.where}. "
        say(f"{of}{verdict_tables.effort(one)}.")
        print()
        brief = verdict_tables.brief(one)
        assert brief is not None
        print("\n".join(tables.terminal(brief, screen.columns())), end="\n\n")
        for finding in one.findings:
            if (reason := one.reason(finding)) is not None:
                name = finding.arm.name
                say(reason if reason.startswith(name) else f"{name}: {reason}", indent="  ")
        more = [] if one.study.pilot else [one.study.assumption]
        if more and one.study.two_bf16_runs:
            more = [
                f"a recipe is compared with the mean of {one.study.whose} two runs of each seed, the control's and A/A's; "
                "A/A and the planted fault are compared with the control's",
                *more,
            ]
        if (first := one.study.primary) is not None:
            more.insert(0, f"{first.name} is judged first, by itself; another recipe passes only where it does")
        for note in (*one.notes, *more):
            say(f"Note: {note}.", indent="  ")
    return max((one.exit_code for one in judged), key=_SEVERITY.index)


def _of_logs(
    baseline: list[Path],
    candidate: list[Path],
    paired: bool | None,
    metric: str | None,
    margin: float,
    alpha: float,
    html: Path | None,
) -> int:
    """Print the verdict on somebody's own losses, and write its page; its exit code.

    Raises ValueError for a page that would replace anything but an earlier page: a path too many names a log.
    """
    if html is not None and html.exists() and not _is_page(html):
        raise ValueError(
            f"--html {html} is there and is no page of te-bench: it is left as it is, choose another --html"
        )
    from te_bench.reports.convergence import loss_verdict
    from te_bench.reports.convergence.loss_logs import read_arms
    from te_bench.reports.page import loss_page, tables

    arms = read_arms(baseline, candidate, metric)
    found = loss_verdict.judge_losses(*arms, margin=margin, alpha=alpha, paired=paired)
    say(f"{found.verdict}: {found.reason}")
    print()
    if (table := loss_page.losses(found)) is not None:
        print("\n".join(tables.terminal(table, screen.columns())), end="\n\n")
    say(f"Judged: {found.judged}.")
    for sentence in loss_verdict.answers(found):
        say(sentence)
    for note in found.notes:
        say(f"Note: {note}.", indent="  ")
    if html is not None:
        print(f"page: {loss_page.write_page(found, html)}")
    return found.exit_code


def _is_page(path: Path) -> bool:
    return path.is_file() and PAGE in path.read_bytes()[:4096]


_SEVERITY = (0, 3, 1, 4)  # exit codes, the worst last
