"""Compute loss curves: what each training of a comparison reached, and how far seeds alone move the bf16 one."""

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath

import numpy as np

from te_bench.experiments.spec import Record
from te_bench.reports.analysis.measures import finite, median, numbers
from te_bench.reports.analysis.ranking import rank
from te_bench.reports.analysis.rows import Configuration, Group, grouped, printable


@dataclass(frozen=True, kw_only=True, slots=True)
class LossPoint:
    """A loss at a step, `time_s` after training began, over the seeds that logged the step."""

    step: float
    time_s: float
    mean: float
    low: float
    high: float
    deviation: float | None  # sample standard deviation; None for one seed


@dataclass(frozen=True, kw_only=True)
class Training:
    """One configuration of `training`: its losses by step, mean over seeds, and its best validation loss."""

    configuration: Configuration
    drawn: tuple[Record, ...]  # records of the curves `train` and `validation`
    lowest: Mapping[tuple[str, int], float]  # validation loss of each seed that ended ok
    deviation: float | None  # sample standard deviation of these lowest losses over seeds
    steps_done: float | None
    tokens: float | None  # of all its steps
    tokens_per_s: float | None
    batch: float | None  # the batch used, even if the plan said "max"
    hidden: bool = False  # no loss may be seen yet, so that drawn and lowest are empty; deviation is known

    @property
    def best(self) -> float | None:
        return statistics.fmean(self.lowest.values()) if self.lowest else None

    @property
    def n(self) -> int:
        return len(self.lowest)

    @cached_property  # takes seconds for long runs, and tables do not need it
    def train(self) -> tuple[LossPoint, ...]:
        return points(self.drawn, "step", "time_s", "loss")

    @cached_property
    def validation(self) -> tuple[LossPoint, ...]:
        return points(self.drawn, "val_step", "val_time_s", "val_loss")

    @property
    def diverged(self) -> bool:
        return any(row.outcome == "diverged" for row in self.configuration.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingComparison:
    """Trainings on the same data under the same budget; `reference`: the bf16 one, None if there is none."""

    title: str
    trainings: tuple[Training, ...]
    reference: Training | None
    lowest: tuple[Training, ...]  # with the lowest validation loss, or not distinguished from it by paired seeds

    @property
    def timed(self) -> bool:
        """Whether each training had its GPU alone, so that its clock counts."""
        return not any("share" in training.configuration.trial.problem for training in self.trainings)

    def behind(self, training: Training) -> float | None:
        """Return the best validation loss minus the bf16 one's, over the seeds of both: above 0 is worse."""
        if self.reference is None or training is self.reference:
            return None
        both = [seed for seed in training.lowest if seed in self.reference.lowest]
        ours, theirs = ([side.lowest[seed] for seed in both] for side in (training, self.reference))
        return statistics.fmean(ours) - statistics.fmean(theirs) if both else None


def comparisons(group: Group, hidden: Collection[str]) -> tuple[TrainingComparison, ...]:
    """Return a group's trainings, grouped where their curves may be compared, in the plan's order.

    hidden: ids of configurations whose losses may not be seen yet.
    """
    together = grouped(group.of("training"), lambda configuration: configuration.course)
    return tuple(_comparison(configurations, group.baseline, hidden) for configurations in together.values())


def _comparison(
    configurations: Sequence[Configuration], baseline: str | None, hidden: Collection[str]
) -> TrainingComparison:
    trainings = tuple(_training(configuration, configuration.id in hidden) for configuration in configurations)
    bf16 = [one for one in trainings if one.configuration.trial.precision == "bf16" and one.validation]
    # The reference has the most seeds; among equals it is the suite's baseline, else the first planned.
    reference = max(bf16, key=lambda training: (training.n, training.configuration.id == baseline), default=None)
    problem = configurations[0].trial.problem
    length = f"{problem['steps']} steps" if problem.get("steps") else f"{problem.get('budget_s')} s"
    kind, colon, name = str(problem.get("data") or "").partition(":")
    data = f"{kind}{colon}{PurePath(name).name if kind == 'text' else name}"  # a file without its folder
    title = ", ".join(str(word) for word in (problem.get("model"), data, length) if word)
    ended = sorted((training for training in trainings if training.best is not None), key=lambda t: t.best or 0.0)
    best = rank([lowest_losses(training.configuration) for training in ended]).best
    return TrainingComparison(
        title=printable(title), trainings=trainings, reference=reference, lowest=tuple(ended[place] for place in best)
    )


def _training(configuration: Configuration, hidden: bool) -> Training:
    diverged = [row.record for row in configuration.rows if row.record and row.outcome == "diverged"]
    drawn = configuration.ok or diverged  # a diverged seed would shorten the others' curves; tables count it
    lowest = lowest_losses(configuration)
    work = drawn[0].work if drawn else {}
    steps = [max(found) + 1 for record in drawn if (found := numbers(record.samples.get("step")))]  # steps begin at 0
    times = [max(found) for record in drawn if (found := numbers(record.samples.get("time_s")))]
    last, time, per_step = median(steps), median(times), finite(work.get("tokens"))
    trunk = finite(configuration.trial.problem.get("branch_at")) or 0.0  # a branch's clock leaves out these steps
    tokens, clocked = (
        (last - before) * per_step if last is not None and per_step is not None else None for before in (0.0, trunk)
    )
    timed = time if "share" not in configuration.trial.problem else None
    return Training(
        configuration=configuration,
        drawn=() if hidden else tuple(drawn),
        lowest={} if hidden else lowest,
        deviation=statistics.stdev(lowest.values()) if len(lowest) > 1 else None,
        steps_done=last,
        tokens=tokens,
        tokens_per_s=clocked / timed if clocked and timed else None,
        batch=finite(work.get("batch")),
        hidden=hidden,
    )


def lowest_losses(configuration: Configuration) -> dict[tuple[str, int], float]:
    """Return {(run, seed): the lowest validation loss} for seeds that ended ok and have one."""
    done = [(row.run, row.trial.seed, row.record) for row in configuration.rows if row.record and row.outcome == "ok"]
    losses = {(run, seed): numbers(record.samples.get("val_loss")) for run, seed, record in done}
    return {pair: min(found) for pair, found in losses.items() if found}


def points(records: Sequence[Record], step: str, time: str, loss: str) -> tuple[LossPoint, ...]:
    """Return mean and spread over records at the first record's steps that all reach; other records are interpolated.

    Under a budget of time, every seed logs at its own steps. Records without the curve do not count.
    """
    logged = [curve for record in records if (curve := _curve(record, step, time, loss))]
    if not logged:
        return ()
    start, end = max(steps[0] for steps, _, _ in logged), min(steps[-1] for steps, _, _ in logged)
    at = [step for step in logged[0][0] if start <= step <= end]
    times, losses = (np.array([np.interp(at, curve[0], curve[of]) for curve in logged]) for of in (1, 2))
    deviations = losses.std(axis=0, ddof=1).tolist() if len(logged) > 1 else [None] * len(at)
    over = (times.mean(axis=0), losses.mean(axis=0), losses.min(axis=0), losses.max(axis=0))
    found = zip(at, *(each.tolist() for each in over), deviations, strict=True)
    return tuple(
        LossPoint(step=s, time_s=t, mean=mean, low=low, high=high, deviation=off)
        for s, t, mean, low, high, off in found
    )


def _curve(record: Record, step: str, time: str, loss: str) -> list[tuple[float, ...]]:
    """Return steps, times and losses in the order of steps, without points that are not finite."""
    steps, losses = (record.samples.get(name) or [] for name in (step, loss))
    times = record.samples.get(time) or [0.0] * len(steps)
    rows = zip(steps, times, losses, strict=False)
    known = sorted((s, finite(t) or 0.0, x) for s, t, x in rows if finite(s) is not None and finite(x) is not None)
    return list(zip(*known, strict=True))
