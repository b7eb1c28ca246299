"""Records of a convergence run to arms: what each seed of each arm ended on, and whether it ended at all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from te_bench.experiments.spec import Record, Scalar, Trial
from te_bench.reports.analysis import finite, median, numbers
from te_bench.reports.rows import Cell, Group, Row, arm_name, printable
from te_bench.reports.sequential import looks
from te_bench.reports.stability import Stability, stability

KINDS = ("control", "aa", "recipe", "broken")


@dataclass(frozen=True)
class Run:
    """One seed of one arm."""

    row: Row

    @property
    def seed(self) -> int:
        return self.row.trial.seed

    @property
    def record(self) -> Record | None:
        return self.row.record

    @cached_property
    def curve(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(steps, validation losses): of every arm by one bf16 path."""
        return self._series("val_step", "val_loss")

    @cached_property
    def stability(self) -> Stability | None:
        """What the training loss and the gradient norm went through; None for a run that logged nothing."""
        samples = self.record.samples if self.record else {}
        steps, losses = samples.get("step") or [], samples.get("loss") or []
        if not steps:
            return None
        # A value that was not finite is null in the journal.
        norms = [float("nan") if x is None else x for x in samples.get("grad_norm") or []]
        return stability(steps, losses, norms if len(norms) == len(steps) else ())

    @property
    def diverged(self) -> str | None:
        """Why this run counts as diverged, or None."""
        if self.row.outcome == "diverged":
            return self.row.reason or "diverged"
        return self.stability.reason if self.stability else None

    @property
    def final(self) -> float | None:
        """The validation loss after the last step; None for a run that did not get there."""
        return self._at_end(self.curve)

    @property
    def native(self) -> float | None:
        """The same, evaluated as the arm trains: in FP8."""
        return self._at_end(self._series("val_step", "val_loss_native"))

    @property
    def step_s(self) -> float | None:
        """Seconds per step: the training clock between the first and the last read of the loss."""
        steps, times = (self._samples(name) for name in ("step", "time_s"))
        if len(steps) < 2 or len(steps) != len(times) or steps[-1] <= steps[0]:
            return None
        first = next((t for t in times if t > 0), 0.0)  # compiled steps are not on the clock
        begin = max((i for i, t in enumerate(times) if t == first), default=0)  # all steps of one read carry its time
        return (times[-1] - times[begin]) / (steps[-1] - steps[begin]) if steps[-1] > steps[begin] else None

    def _samples(self, name: str) -> list[float]:
        return list(numbers(self.record.samples.get(name))) if self.record else []

    def _series(self, x: str, y: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        steps, values = (self.record.samples.get(name) or [] if self.record else [] for name in (x, y))
        pairs = [(s, v) for s, v in zip(steps, values, strict=False) if finite(s) is not None and finite(v) is not None]
        return tuple(s for s, _ in pairs), tuple(v for _, v in pairs)

    def _at_end(self, curve: tuple[tuple[float, ...], tuple[float, ...]]) -> float | None:
        steps, losses = curve
        reached = self.row.outcome == "ok" and steps and steps[-1] == self.row.trial.problem.get("steps")
        return losses[-1] if reached else None


@dataclass(frozen=True)
class Arm:
    """One arm: its runs by seed, in the order of the seeds."""

    kind: str
    name: str
    cell: Cell
    runs: Mapping[int, Run]

    @property
    def trial(self) -> Trial:
        return self.cell.trial

    @property
    def finals(self) -> dict[int, float]:
        return {seed: run.final for seed, run in self.runs.items() if run.final is not None}

    @property
    def natives(self) -> dict[int, float]:
        return {seed: run.native for seed, run in self.runs.items() if run.native is not None}

    @property
    def diverged(self) -> dict[int, str]:
        return {seed: run.diverged for seed, run in self.runs.items() if run.diverged}

    @property
    def step_s(self) -> list[float]:
        return [run.step_s for run in self.runs.values() if run.step_s is not None]


@dataclass(frozen=True)
class Study:
    """The arms of one convergence run that share data, schedule and seeds, and what the plan fixed beforehand."""

    title: str
    control: Arm | None
    aa: Arm | None
    recipes: tuple[Arm, ...]
    broken: Arm | None
    judgement: Mapping[str, Scalar]
    notes: tuple[str, ...]

    @property
    def arms(self) -> tuple[Arm, ...]:
        return tuple(arm for arm in (self.control, self.aa, *self.recipes, self.broken) if arm is not None)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Every seed that any arm was planned with."""
        return tuple(sorted({seed for arm in self.arms for seed in arm.runs}))

    @property
    def looks(self) -> tuple[int, ...]:
        """The numbers of seeds at which a sequential plan looks; empty for one that judges once, at its end."""
        first, seeds = self.number("first_look"), self.number("seeds")
        return looks(int(first), int(seeds)) if first and seeds else ()

    def number(self, setting: str) -> float | None:
        """A number of the plan's judgement."""
        return finite(self.judgement.get(setting))


def studies(group: Group) -> tuple[Study, ...]:
    """The convergence arms of a group, those of a course together."""
    together: dict[tuple[object, ...], list[Cell]] = {}
    for cell in group.of("training"):
        if cell.trial.problem.get("arm") in KINDS and "lr_factor" not in cell.trial.problem:  # the stress ladder has
            together.setdefault(cell.course, []).append(cell)
    return tuple(_study(group, cells) for cells in together.values())


def _study(group: Group, cells: Sequence[Cell]) -> Study:
    arms = [_arm(cell) for cell in cells]
    found = {kind: [arm for arm in arms if arm.kind == kind] for kind in KINDS}
    problem = cells[0].trial.problem
    title = f"{problem.get('model')}, {problem.get('data')}, {problem.get('steps')} steps"
    return Study(
        title=printable(title),
        control=next(iter(found["control"]), None),
        aa=next(iter(found["aa"]), None),
        recipes=tuple(found["recipe"]),
        broken=next(iter(found["broken"]), None),
        judgement=group.judgement,
        notes=group.changed,
    )


def _arm(cell: Cell) -> Arm:
    runs: dict[int, Run] = {}
    for row in sorted(cell.rows, key=lambda row: (row.trial.seed, row.outcome != "ok")):
        runs.setdefault(row.trial.seed, Run(row))  # a seed that two runs hold counts once
    return Arm(kind=str(cell.trial.problem["arm"]), name=printable(arm_name(cell.trial)), cell=cell, runs=runs)


def typical_step_s(arm: Arm) -> float | None:
    """The median over seeds of an arm's seconds per step."""
    return median(arm.step_s)
