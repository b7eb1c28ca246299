"""Turn records of a convergence run into arms: the final loss of each seed, or why it has none."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from te_bench.experiments.environment import OF_TIMES
from te_bench.experiments.problems import TrainingProblem
from te_bench.experiments.spec import Record, Scalar, Trial
from te_bench.experiments.store import Plan
from te_bench.reports.analysis.measures import finite, step_seconds
from te_bench.reports.analysis.naming import WHOLE, arm_name, judges_fewer_bits
from te_bench.reports.analysis.repeat import commands_of
from te_bench.reports.analysis.rows import NOT_RUN, Configuration, Group, Row, grouped, printable, trial_of
from te_bench.reports.convergence import pooled, skewed
from te_bench.reports.convergence.stability import Stability, stability

#: The note on a verdict on one recipe after a pilot. Source: docs/convergence-statistics.md.
AFTER_PILOT = (
    "A pilot's spread may have chosen the number of seeds. Then a single recipe whose gaps are as skewed as an exponential "
    "distribution is called good in 7 of 100 studies at the margin where alpha is 5 %, and in 10 where fewer than 8 seeds "
    "were chosen"
)
LATE = 0.1  # the last share of training, over which a final training loss is the mean
LEFT = (NOT_RUN, "interrupted")  # outcomes of trials that a rerun of the command measures
KINDS = ("control", "aa", "recipe", "broken")
#: {setting that a study's arms share, beside the course: its words in a title}.
SETTINGS = {"batch": "batch", "accumulate": "micro-batches", "learning_rate": "learning rate", "warmup": "warm-up"}


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

    @property
    def samples(self) -> Mapping[str, Any]:
        """What the run logged; empty without a record."""
        return self.record.samples if self.record else {}

    @cached_property
    def curve(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(steps, validation losses); every arm is evaluated by the same bf16 path."""
        pairs = zip(self.samples.get("val_step") or [], self.samples.get("val_loss") or [], strict=False)
        known = [(at, loss) for at, loss in pairs if finite(at) is not None and finite(loss) is not None]
        return tuple(at for at, _ in known), tuple(loss for _, loss in known)

    @cached_property
    def stability(self) -> Stability | None:
        """The stability of the training loss and the gradient norm; None if the run logged nothing."""
        samples = self.samples
        if not samples.get("step"):
            return None
        steps, losses, norms = (  # of a branch with its trunk's, which are needed to see a rise
            [*(samples.get(f"trunk_{name}") or []), *(samples.get(name) or [])]
            for name in ("step", "loss", "grad_norm")
        )
        norms = [float("nan") if x is None else x for x in norms]  # the journal has null for non-finite values
        return stability(steps, losses, norms if len(norms) == len(steps) else ())

    @property
    def diverged(self) -> str | None:
        """Why this run counts as diverged, or None. If a trunk diverged, in bf16, only the control counts as diverged."""
        if self.row.outcome == "diverged":
            p = TrainingProblem.of(self.row.trial)
            in_trunk = p.branch_at is not None and self.record is not None and self.trunk is None
            return None if in_trunk and p.arm != "control" else self.row.reason or "diverged"
        return self.stability.reason if self.stability else None

    @property
    def final(self) -> float | None:
        """The validation loss after the last step; None if the run did not get there."""
        steps, losses = self.curve
        reached = self.row.outcome == "ok" and steps and steps[-1] == self.row.trial.problem.get("steps")
        return losses[-1] if reached else None

    @property
    def native(self) -> float | None:
        """The final loss, evaluated as the arm trains: in FP8."""
        losses = self.samples.get("val_loss_native")
        return finite(losses[-1]) if losses and self.final is not None else None

    @property
    def trained(self) -> float | None:
        """The mean training loss over the last tenth of the steps; None if the run did not get there."""
        steps, losses = self.samples.get("step") or [], self.samples.get("loss") or []
        late = [
            x for at, x in zip(steps, losses, strict=False) if finite(x) is not None and at >= (1 - LATE) * steps[-1]
        ]
        return sum(late) / len(late) if late and self.final is not None else None

    @property
    def trunk(self) -> str | None:
        """The SHA-256 of a branch's initial weights; None for a training from the first step."""
        told = self.record.work.get("trunk") if self.record else None
        return None if told is None else str(told["sha256"])

    @property
    def step_s(self) -> float | None:
        """Seconds per step by the training clock; None on a CPU, which emulates, and on a shared GPU."""
        timed = "share" not in self.row.trial.problem and self.row.trial.device != "cpu"
        return step_seconds(self.samples) if timed else None

    @property
    def host(self) -> tuple[object, ...]:
        """The key of the run's host: step times are compared only within one host.

        Without its name a host is known by its GPUs. Records without the other fields are of an environment whose identity
        has them.
        """
        state = self.record.device_state if self.record else {}
        return state.get("host", self.row.host), *(state.get(name) for name in (*OF_TIMES, "host_cores"))


@dataclass(frozen=True)
class StudyArm:
    """One arm: its runs by seed, in order."""

    kind: str
    name: str
    configuration: Configuration
    runs: Mapping[int, Run]

    @property
    def trial(self) -> Trial:
        return self.configuration.trial

    @property
    def finals(self) -> dict[int, float]:
        return {seed: run.final for seed, run in self.runs.items() if run.final is not None}

    @property
    def natives(self) -> dict[int, float]:
        return {seed: run.native for seed, run in self.runs.items() if run.native is not None}

    @property
    def trained(self) -> dict[int, float]:
        return {seed: run.trained for seed, run in self.runs.items() if run.trained is not None}

    @property
    def diverged(self) -> dict[int, str]:
        return {seed: run.diverged for seed, run in self.runs.items() if run.diverged}

    @property
    def ended(self) -> set[int]:
        """Seeds with a result: a final loss or a divergence."""
        return set(self.finals) | set(self.diverged)


@dataclass(frozen=True)
class Study:
    """The arms of one convergence run with the same data, schedule and seeds, and what the plan fixed."""

    title: str
    control: StudyArm | None
    aa: StudyArm | None
    recipes: tuple[StudyArm, ...]
    broken: StudyArm | None
    judgement: Mapping[str, Scalar]
    notes: tuple[str, ...]
    unjudged: int = 0  # trials of seeds that were added after the first plan
    fewer_bits: bool = False  # judges fewer bits of weights and states against float32, not FP8 against bf16
    gpu: str | None = None
    again: str = ""  # the command that runs the remaining trials
    broken_off: str | None = None  # why it was given up: it has no verdict

    @property
    def to_go(self) -> int:
        """The number of planned runs that did not start, or were interrupted."""
        return sum(run.row.outcome in LEFT for arm in self.arms for run in arm.runs.values())

    @property
    def reference(self) -> str:
        """What the recipes are compared with."""
        return WHOLE if self.fewer_bits else "bf16"

    @property
    def whose(self) -> str:
        """The reference as a short genitive."""
        return "float32's" if self.fewer_bits else "bf16's"

    @property
    def arms(self) -> tuple[StudyArm, ...]:
        return tuple(arm for arm in (self.control, self.aa, *self.recipes, self.broken) if arm is not None)

    @property
    def whole(self) -> bool:
        """Whether there is a control and a recipe."""
        return self.control is not None and bool(self.recipes)

    @property
    def seeds(self) -> tuple[int, ...]:
        """All planned seeds."""
        return tuple(sorted({seed for arm in self.arms for seed in arm.runs}))

    @property
    def pool(self) -> int | None:
        """bf16 runs for each run of a recipe, if all recipes share them; None if runs are compared in pairs."""
        ratio = self.number("pool")
        return None if ratio is None else int(ratio)

    @property
    def primary(self) -> StudyArm | None:
        """The recipe that is judged before the others, if the plan names one."""
        return next((arm for arm in self.recipes if arm.trial.cell == self.judgement.get("primary")), None)

    @property
    def two_bf16_runs(self) -> bool:
        """Whether recipes are compared with the mean of the control's run and A/A's."""
        return self.number("bf16_runs") == 2

    def beside(self, arm: StudyArm) -> tuple[StudyArm, ...]:
        """Return the bf16 arms whose mean an arm is compared with, by seed: for a recipe also A/A if the plan says so."""
        assert self.control is not None
        return (self.control, self.aa) if self.aa and self.two_bf16_runs and arm.kind == "recipe" else (self.control,)

    def base(
        self, arm: StudyArm, losses: Callable[[StudyArm], Mapping[int, float]] = lambda side: side.finals
    ) -> dict[int, float]:
        """Return {seed: mean of the losses of these arms, by default the final ones} for seeds that all of them have."""
        sides = [losses(side) for side in self.beside(arm)]
        return {seed: fmean(side[seed] for side in sides) for seed in sides[0] if all(seed in side for side in sides)}

    @property
    def rounds(self) -> int:
        """The number of planned runs of each recipe."""
        return int(self.number("seeds") or len(self.seeds))

    @property
    def branch_at(self) -> int | None:
        """The number of bf16 steps, the trunk, that each pair shares; None if FP8 trains from the first step on."""
        return None if self.control is None else TrainingProblem.of(self.control.trial).branch_at

    @property
    def scope(self) -> str | None:
        """The part of training that the verdict is about; None if it is all of it."""
        return None if self.control is None else scope_of(self.control.trial)

    @property
    def assumption(self) -> str:
        """The assumption behind the error rate of the verdicts."""
        return skewed.ASSUMPTION if self.pool is None else pooled.ASSUMPTION

    @property
    def pilot(self) -> bool:
        """Whether only a pilot is planned yet, whose spread alone is shown."""
        return bool(self.judgement.get("pilot")) and not self.broken_off

    def number(self, setting: str) -> float | None:
        """Return a number of the plan's judgement, or None."""
        return finite(self.judgement.get(setting))


def scope_of(trial: Trial) -> str | None:
    """Return the part of training that a study judges: "in the last 41 % of training (from step 1,200 of 2,035)"."""
    p = TrainingProblem.of(trial)
    if p.branch_at is None or p.steps is None:
        return None
    share = 100 * (1 - p.branch_at / p.steps)
    said = f"{share:.0f}" if 1 <= share <= 99 else f"{share:.4g}"  # never "the last 0 %"
    return f"in the last {said} % of training (from step {p.branch_at:,} of {p.steps:,})"


def studies(group: Group) -> tuple[Study, ...]:
    """Return the studies of a group: convergence arms with the same data, schedule and batch.

    Studies with the same title add their differing settings to it. Raises ValueError for two control arms in one study.
    """
    trainings = ((one, one.trial.problem) for one in group.of("training"))
    # Runs of the stress ladder are not arms.
    arms = [one for one, problem in trainings if problem.get("arm") in KINDS and "lr_factor" not in problem]
    together = grouped(arms, lambda one: (*one.course, *map(one.trial.problem.get, SETTINGS)))
    titles = _titles([configurations[0].trial.problem for configurations in together.values()])
    return tuple(_study(group, *one) for one in zip(titles, together.values(), strict=True))


def _titles(problems: Sequence[Mapping[str, Scalar]]) -> list[str]:
    titles = [_title(problem) for problem in problems]
    found = []
    for title, problem in zip(titles, problems, strict=True):
        alike = [other for other, its in zip(problems, titles, strict=True) if its == title]
        differ = [key for key in SETTINGS if len({other.get(key) for other in alike}) > 1]
        told = ((SETTINGS[key], problem.get(key)) for key in differ)
        found.append(", ".join([title, *(f"{said} {1 if value is None else value}" for said, value in told)]))
    return found


def _title(problem: Mapping[str, Scalar]) -> str:
    title = printable(f"{problem.get('model')}, {problem.get('data')}, {problem.get('steps')} steps")
    branch = problem.get("branch_at")
    return title if branch is None else f"{title}, FP8 from step {branch:,} on"


def _study(group: Group, title: str, configurations: Sequence[Configuration]) -> Study:
    trial = configurations[0].trial
    scope = scope_of(trial)
    plans = _plans(group, configurations)
    judgement, notes = _judgement(plans)
    notes += [
        f"{printable(arm_name(one.trial))} was added after the first plan, when its verdict may have been seen: another "
        "configuration after a look; a study of its own has another --out"
        for one in _added(plans, configurations)
    ]
    if scope:
        notes.append(
            f"Each pair goes on from one trunk, bf16's first {trial.problem['branch_at']:,} steps. Only trunks are "
            "independent of each other. The verdict says nothing of FP8 in those steps"
        )
    seeds = finite(judgement.get("seeds"))
    if seeds is not None:
        seeds *= finite(judgement.get("pool")) or 1
    fewer_bits = judges_fewer_bits([configuration.trial for configuration in configurations])
    first = finite(judgement.get("first_seed")) or 0
    judged = None if seeds is None else range(int(first), int(first + seeds))
    arms = [_arm(configuration, fewer_bits, notes, judged) for configuration in configurations]
    found = {kind: [arm for arm in arms if arm.kind == kind] for kind in KINDS}
    if len(found["control"]) > 1:
        raise ValueError(
            f"{title}: {len(found['control'])} bf16 control configurations; judge runs of other settings apart"
        )
    piloted = any(plan.judgement.get("pilot") for plan in _all_plans(group, configurations))
    by_spread = piloted and not {"pilot", "pool"} & judgement.keys()
    # With --only, a pilot may have one recipe, whose gaps alone then chose the number of seeds.
    chose = (
        [arm for arm in found["recipe"] if len(found["recipe"]) == 1 or _ran_before(plans[0], arm)] if by_spread else []
    )
    notes += [AFTER_PILOT] if len(chose) == 1 else []
    unable = [a for a in found["recipe"] if a.runs and {r.row.outcome for r in a.runs.values()} == {"unsupported"}]
    notes += [f"{arm.name} is left out: {next(iter(arm.runs.values())).row.reason}" for arm in unable]
    if any(arm.trial.cell == judgement.get("primary") for arm in unable):
        notes.append("It was to be judged first; the others are judged together without it")
    return Study(
        title=title,
        control=next(iter(found["control"]), None),
        aa=next(iter(found["aa"]), None),
        recipes=tuple(arm for arm in found["recipe"] if arm not in unable),
        broken=next(iter(found["broken"]), None),
        judgement=judgement,
        fewer_bits=fewer_bits,
        gpu=group.gpu,
        again=_again(group, configurations, plans),
        broken_off=next(
            (printable(why).rstrip(".") for why in (group.broken_off.get(c.id) for c in configurations) if why), None
        ),
        notes=tuple(dict.fromkeys(notes)),
        unjudged=sum(judged is not None and row.trial.seed not in judged for c in configurations for row in c.rows),
    )


def _ran_before(plan: Plan, arm: StudyArm) -> bool:
    """Return whether a run of the arm had begun before the plan was made."""
    return any(run.record is not None and run.record.started_at < plan.started_at for run in arm.runs.values())


def _again(group: Group, configurations: Sequence[Configuration], plans: Sequence[Plan]) -> str:
    """Return the command of these configurations' newest plan with the most remaining trials."""
    left = {row.trial.id for one in configurations for row in one.rows if row.outcome in LEFT}
    has = [(len(left & {trial_of(value).id for value in plan.trials}), number) for number, plan in enumerate(plans)]
    asked = (plans[max(has)[1]].asked,) if has else group.asked
    of_study = dataclasses.replace(group, configurations=tuple(configurations), asked=asked)
    return commands_of(of_study, group.directory)[-1]


def _all_plans(group: Group, configurations: Sequence[Configuration]) -> list[Plan]:
    own = {row.trial.id for configuration in configurations for row in configuration.rows}
    return [plan for plan in group.judged if any(trial_of(value).id in own for value in plan.trials)]


def _plans(group: Group, configurations: Sequence[Configuration]) -> list[Plan]:
    """Return the plans with a trial of these configurations, oldest first.

    If all are pilots' plans, only the longest counts. A pilot shows only the spread, which may then decide the plan.
    """
    plans = _all_plans(group, configurations)
    longest = sorted(plans, key=lambda plan: -(finite(plan.judgement.get("seeds")) or 0.0))[:1]
    return [plan for plan in plans if not plan.judgement.get("pilot")] or longest


def _added(plans: Sequence[Plan], configurations: Sequence[Configuration]) -> list[Configuration]:
    """Return the recipes that were missing in the first plan with a recipe, which could have a verdict."""
    recipes = {one.trial.cell: one for one in configurations if one.trial.problem.get("arm") == "recipe"}
    for plan in plans:
        if planned := recipes.keys() & {trial_of(value).cell for value in plan.trials}:
            return [one for cell, one in recipes.items() if cell not in planned]
    return []


def _judgement(plans: Sequence[Plan]) -> tuple[Mapping[str, Scalar], list[str]]:
    """Return what the first plan fixed, and how later plans differ."""
    if not plans:
        return {}, []
    first = plans[0].judgement
    changed = {
        key: f"{key} was {first.get(key)} in the first plan and became {value}: the first one counts"
        for plan in plans[1:]
        for key, value in plan.judgement.items()
        if value != first.get(key) and key != "primary"
    }
    if any(plan.judgement.get("primary") != first.get("primary") for plan in plans[1:]):
        changed["primary"] = "which recipe is judged first became another after the first plan: the first one counts"
    return first, list(changed.values())


def _arm(configuration: Configuration, fewer_bits: bool, notes: list[str], judged: range | None) -> StudyArm:
    """Return the arm with runs of the planned seeds. If a seed was run twice, a divergence counts before other results."""
    name, runs = printable(arm_name(configuration.trial, fewer_bits)), {}
    ranks = {"diverged": 0, "ok": 1}
    for row in sorted(configuration.rows, key=lambda row: (row.trial.seed, ranks.get(row.outcome, 2))):
        seed = row.trial.seed
        if judged is not None and seed not in judged:
            which = f"from {judged.stop} on" if seed >= judged.stop else f"before {judged.start}"
            notes.append(f"seeds {which} were added after the first plan and are not judged: more seeds after a look")
        elif seed not in runs:
            runs[seed] = Run(row)
        elif row.record is not None and runs[seed].record is not None:
            notes.append(f"{name}, seed {seed} was run twice: one run counts, a diverged one first")
    return StudyArm(kind=str(configuration.trial.problem["arm"]), name=name, configuration=configuration, runs=runs)
