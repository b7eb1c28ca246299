"""Compute every number of a report once: journals -> rows -> groups -> results -> tables and figures -> page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from te_bench.reports.analysis.alone import Alone, alone
from te_bench.reports.analysis.attention import AttentionTimes, ScalingErrors, attention_times, scaling_errors
from te_bench.reports.analysis.checks import WorstError, worst_errors
from te_bench.reports.analysis.curves import TrainingComparison, comparisons
from te_bench.reports.analysis.floor import Floor, floor_of
from te_bench.reports.analysis.largest_batch import LargestBatch, largest_batches
from te_bench.reports.analysis.layers import LayerVariant, layer_variants
from te_bench.reports.analysis.ranking import FastestOfKind, StepRanking, fastest_of_each_kind, rank_steps
from te_bench.reports.analysis.rows import Group, Results, load_results
from te_bench.reports.analysis.scaled import ScaledStep, scaled_steps
from te_bench.reports.analysis.steps import measured_steps
from te_bench.reports.convergence.stress import StressLadder, stress_ladders
from te_bench.reports.convergence.study_verdict import StudyVerdict
from te_bench.reports.convergence.verdict import judge_group


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupResult:
    """The results of one suite in one environment; a field is empty if nothing of its kind was measured."""

    group: Group
    steps: StepRanking
    fastest: tuple[FastestOfKind, ...]
    floor: Floor
    layers: tuple[LayerVariant, ...]
    trainings: tuple[TrainingComparison, ...]
    studies: tuple[StudyVerdict, ...]
    hidden: frozenset[str]  # ids of configurations whose losses no page shows
    stress: tuple[StressLadder, ...]
    largest_batches: tuple[LargestBatch, ...]
    scaled: tuple[ScaledStep, ...]
    attention: AttentionTimes
    alone: Mapping[str, Alone]
    scaling_errors: tuple[ScalingErrors, ...]
    errors: tuple[WorstError, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportResult:
    """All results of a report: the rows of several runs, and the result of each of their groups."""

    results: Results
    groups: tuple[GroupResult, ...]

    @property
    def unjudged(self) -> str:
        """The end of a sentence that says how many trials no verdict counts; "" if there are none."""
        number = sum(verdict.study.unjudged for result in self.groups for verdict in result.studies)
        return f", {number} of them of seeds after the first plan's, which no verdict counts" if number else ""


def load_report(directories: Sequence[Path]) -> ReportResult:
    """Return the results of several runs' journals. Raises ValueError as `load_results` does."""
    results = load_results(directories)
    # Not by map: it would take a StopIteration from group_result for its end, and drop this group and all after it.
    return ReportResult(results=results, groups=tuple([group_result(group) for group in results.groups]))


def group_result(group: Group) -> GroupResult:
    """Return all results of a group."""
    configurations = group.of("train_step")
    baseline = next((configuration for configuration in configurations if configuration.id == group.baseline), None)
    steps = measured_steps(configurations, baseline, group.gpu)
    judged, hidden = judge_group(group)
    return GroupResult(
        group=group,
        steps=rank_steps(steps),
        fastest=fastest_of_each_kind(steps),
        floor=floor_of(group, steps),
        layers=layer_variants(group),
        trainings=comparisons(group, hidden),
        studies=judged,
        hidden=hidden,
        stress=stress_ladders(group),
        largest_batches=largest_batches(group),
        scaled=scaled_steps(group),
        attention=attention_times(group),
        alone=alone(group),
        scaling_errors=scaling_errors(group),
        errors=worst_errors(group),
    )
