"""Count what a study has cost and what its plan costs: runs, and hours of its GPUs or CPU."""

from dataclasses import dataclass

from te_bench.experiments.spec import Trial
from te_bench.reports.convergence.design import trial_seconds
from te_bench.reports.convergence.earlier_runs import EarlierRuns, Machine
from te_bench.reports.convergence.study import LEFT, Study


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """Runs done of those planned, and seconds of the device; planned_s: None where no record gives the rest's time."""

    done: int
    planned: int
    spent_s: float
    planned_s: float | None
    on_gpu: bool


def effort_of(study: Study) -> Effort:
    """Return what the study's runs took, and will take by the records of its own runs, or by a plan's assumption."""
    rows = [run.row for arm in study.arms for run in arm.runs.values()]
    left = [row.trial for row in rows if row.outcome in LEFT]
    records = tuple(row.record for row in rows if row.record is not None)
    device = rows[0].trial.device
    spent = sum(_on_device(record.trial, record.wall_s) for record in records)
    rest: list[float] = []
    if left:
        machine = Machine(device=device, chip=study.gpu, slots=1)
        earlier = EarlierRuns(machine=machine, records=records, studies=(), journal=None)
        taken = trial_seconds([row.trial for row in rows], earlier)[0]
        rest = [_on_device(trial, seconds) for trial in left if (seconds := taken[trial.name]) is not None]
    return Effort(
        done=len(rows) - len(left),
        planned=len(rows),
        spent_s=spent,
        planned_s=spent + sum(rest) if len(rest) == len(left) else None,
        on_gpu=device == "cuda",
    )


def _on_device(trial: Trial, seconds: float) -> float:
    """Return the seconds of all GPUs of a run, or of its share of the GPU where runs share one."""
    world, share = (int(str(trial.problem.get(key) or 1)) for key in ("world", "share"))
    return seconds * world / share
