"""te-bench verdict: does each FP8 recipe train like bf16, by the records of a run or by a user's own losses."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from te_bench.cli.options import Alpha, Margin, say

Curves = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="CSV", help="Final losses (one column), or curves: step, loss, seed; or W&B's, TensorBoard's."
    ),
]


def verdict(
    directories: Annotated[
        list[Path] | None, typer.Argument(metavar="[DIR]...", help="--out of a convergence run.")
    ] = None,
    baseline: Curves = None,
    candidate: Curves = None,
    paired: Annotated[bool, typer.Option("--paired", help="Pair the runs of both files by seed, or by row.")] = False,
    margin: Margin = None,
    alpha: Alpha = None,
) -> None:
    """Say whether FP8 trains like bf16: 0 it does, 1 it does not, 3 undecided, 4 void or incomplete."""
    if directories and (baseline or candidate):
        raise ValueError("give a run's directory, or --baseline and --candidate, not both")
    if directories:
        code = _of_runs(directories, margin, alpha)
    elif baseline and candidate:
        if margin is None:
            raise ValueError(
                "--margin: state the largest gap in loss that you would accept, such as 0.003, before you look"
            )
        code = _of_losses(baseline, candidate, paired, margin, 0.05 if alpha is None else alpha)
    else:
        raise ValueError("give the --out directory of te-bench run convergence, or --baseline A.csv --candidate B.csv")
    sys.stdout.flush()
    raise typer.Exit(code)


def _of_runs(directories: list[Path], margin: float | None, alpha: float | None) -> int:
    """Print the verdict of every study in the runs; the exit code of the worst."""
    from te_bench.reports.analysis.rows import load_results
    from te_bench.reports.convergence.study import studies
    from te_bench.reports.convergence.study_verdict import INCOMPLETE
    from te_bench.reports.convergence.verdict import judge_noise, judge_study
    from te_bench.reports.page import tables, verdict_tables

    groups = load_results(directories).groups
    known = [(group, study) for group in groups for study in studies(group)]
    whole = [(group, study) for group, study in known if study.whole]
    pilots = [(study, found) for _, study in known if (found := judge_noise(study, margin=margin, alpha=alpha))]
    if not whole and pilots:  # bf16 and A/A, run first to see whether the recipes are worth their time
        for study, found in pilots:
            said = f"No verdict: {study.title} has no recipe yet. bf16 against itself: {found.verdict}, {found.reason}."
            say(said)
        return INCOMPLETE
    if not whole:
        why = "no bf16 control and recipe to compare" if known else "no convergence run"
        raise ValueError(f"{directories[0]} holds {why}: te-bench run convergence --out {directories[0]}")
    for group, study in known:
        if not study.whole:
            print(f"Note: left out, for it has no control and recipes together: {study.title}, {group.where}.")
    judged = [judge_study(study, margin=margin, alpha=alpha) for _, study in whole]
    for (group, study), one in zip(whole, judged, strict=True):
        if len(whole) > 1:
            print(f"== {study.title}, {group.where}")
        say(one.sentence)
        print()
        brief = verdict_tables.brief(one)
        assert brief is not None
        print("\n".join(tables.terminal(brief)), end="\n\n")
        for finding in one.findings:
            why, name = finding.missing or finding.judgement.reason, finding.arm.name
            said = why if why.startswith(name) else f"{name}: {why}"
            say(said, indent="  ")
        for note in (*one.notes, *([] if one.study.pilot else [one.study.assumption])):
            say(f"Note: {note}.", indent="  ")
    return max((one.exit_code for one in judged), key=_SEVERITY.index)


def _of_losses(baseline: list[Path], candidate: list[Path], paired: bool, margin: float, alpha: float) -> int:
    """Print the verdict on a user's own losses; its exit code."""
    from te_bench.reports.convergence import loss_arms, loss_csv
    from te_bench.reports.convergence.equivalence import Verdict, check_test, compare
    from te_bench.reports.convergence.skewed import ASSUMPTION
    from te_bench.reports.page import tables, verdict_tables

    arms = [loss_csv.read(paths[0] if len(paths) == 1 else paths) for paths in (baseline, candidate)]
    matched = loss_arms.match_runs(*arms, paired=paired)
    notes = [note for arm in arms for note in arm.notes]
    if why := loss_arms.why_diverged(arms[1]):  # whatever the others end on: the runs that survived are a biased choice
        check_test(margin, alpha)
        verdict = Verdict.DIVERGED
        print(f"{verdict}: {why}")
    else:
        found = compare(matched.candidate, matched.baseline, margin=margin, alpha=alpha, paired=paired)
        moving = loss_arms.why_moving(arms[0], arms[1], margin)
        known = all(arm.curves for arm in arms)
        why_not = loss_arms.why_overfitted(arms[0], margin) or (moving if known else None)
        verdict = Verdict.INCONCLUSIVE if why_not else found.verdict
        print(f"{verdict}: {why_not or found.reason}\n")
        print("\n".join(tables.terminal(verdict_tables.losses(found, verdict))))
        notes += [moving] if moving and not known else []
        notes += [loss_arms.note_far(matched, place) for place in found.outliers]
        notes += [ASSUMPTION]
        notes += [far for arm in arms if (far := loss_arms.note_outlying(arm))]
        notes += [fall for arm in arms if (fall := loss_arms.note_falling(arm, margin))]
    for note in notes:
        print(f"Note: {note}.")
    return {Verdict.EQUIVALENT: 0, Verdict.NON_INFERIOR: 0, Verdict.INFERIOR: 1, Verdict.DIVERGED: 1}.get(verdict, 3)


_SEVERITY = (0, 3, 1, 4)  # exit codes, the worst last
