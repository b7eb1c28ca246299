"""A user's own losses from CSV: final losses, curves by seed, and what Weights & Biases and TensorBoard export."""

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

STEP = ("step", "_step", "iter", "iteration", "global_step", "trainer/global_step", "train/global_step")
# the first of these that a file has is the loss
LOSS = ("val_loss", "val/loss", "validation_loss", "eval_loss", "eval/loss", "final_loss", "loss", "value")
SEED = ("seed", "run", "run_id")
TENSORBOARD = ("wall time", "step", "value")
WANDB = " - "  # between the run's name and the metric's
SPAN = ("__MIN", "__MAX")  # companions of a W&B column: the extremes of the points that one row stands for

LAST = 0.1  # the share of training over which a curve must have settled
FEWEST_POINTS = 3

_Point = tuple[int, float, float]  # line, step, loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Losses of one run at rising steps."""

    step: tuple[float, ...]
    loss: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """One arm by seed: final losses, and curves where the source has them. Seeds that the source does not name are rows."""

    source: str
    final: Mapping[str, float]
    curves: Mapping[str, Curve]
    labels: Mapping[str, str]  # of a label column
    seeded: bool  # the seeds are the source's own, so two arms can be paired by them
    notes: tuple[str, ...] = ()  # what was taken for granted, to be shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Matched:
    """Two arms ready to be compared; paired, place i of both has the seed `seeds[i]`."""

    seeds: tuple[str, ...]
    baseline: tuple[float, ...]
    candidate: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Table:
    path: Path
    header: tuple[str, ...] | None
    rows: tuple[tuple[int, tuple[str, ...]], ...]  # line number, cells

    def column(self, names: Sequence[str]) -> int | None:
        lower = [name.lower() for name in self.header or ()]
        return next((lower.index(name) for name in names if name in lower), None)


def read(path: Path | str | Sequence[Path | str]) -> Losses:
    """One arm's losses, in whichever of these layouts the file has; comments (#) and blank lines are skipped.

    One column of final losses, with or without a header, beside it a label (text) or a seed column. Whole curves:
    columns step, loss, seed. Weights & Biases: "Step" and a column "run - metric" a run, its __MIN and __MAX left out.
    TensorBoard: "Wall time", "Step", "Value", one run a file: a directory or several files. The final loss of a curve
    is its last, so export the validation loss: the last training loss is that of one batch.

    Raises ValueError, with file and line, for what is not a finite number, a step or seed given twice, fewer than two
    seeds, runs of unequal lengths, several columns that could be meant or none, and a file that cannot be read.
    """
    paths = _files(path)
    tables = [_table(each) for each in paths]
    boards = [table.header is not None and tuple(map(str.lower, table.header)) == TENSORBOARD for table in tables]
    source = str(path) if isinstance(path, Path | str) else ", ".join(map(str, paths))
    if all(boards):
        return _of_curves(source, _tensorboard(tables), ())
    if len(tables) > 1:
        other = paths[boards.index(False)]
        raise ValueError(f"{other}: several files are read as TensorBoard's export only; put the runs into one file")
    [table] = tables
    if table.column(STEP) is not None and any(WANDB in name for name in table.header or ()):
        return _of_curves(source, _wandb(table), ())
    if table.column(STEP) is not None:
        return _long(source, table)
    return _finals(source, table)


def matched(baseline: Losses, candidate: Losses, *, paired: bool) -> Matched:
    """The two arms' final losses, paired by seed, or by row where neither source names its seeds.

    Raises ValueError for seeds that only one arm has, numbers of runs that differ when paired, and curves that end at
    different steps, for they have not seen the same data.
    """
    arms = baseline, candidate
    ends = [sorted({curve.step[-1] for curve in arm.curves.values()}) for arm in arms]
    if all(ends) and ends[0] != ends[1]:
        told = " and ".join(f"at step {end[-1]:g} in {arm.source}" for end, arm in zip(ends, arms, strict=True))
        raise ValueError(f"the curves end {told}: compare runs of one length")
    if not paired:
        return Matched(seeds=(), baseline=tuple(baseline.final.values()), candidate=tuple(candidate.final.values()))
    if baseline.seeded != candidate.seeded:
        named, rows = arms if baseline.seeded else arms[::-1]
        raise ValueError(
            f"{named.source} names its seeds and {rows.source} does not: name them in both, or compare unpaired"
        )
    for one, other in (arms, arms[::-1]):
        only = [seed for seed in one.final if seed not in other.final]
        if only and not baseline.seeded:
            raise ValueError(
                f"{len(one.final)} losses in {one.source} and {len(other.final)} in {other.source} cannot be paired: give "
                "both arms the same seeds, or compare unpaired"
            )
        if only:
            seeds = f"seed {only[0]} is" if len(only) == 1 else f"seeds {', '.join(only)} are"
            raise ValueError(
                f"{seeds} only in {one.source}: pairs need every seed in both arms; run what is missing, leave it out of "
                "both, or compare unpaired"
            )
    return Matched(
        seeds=tuple(baseline.final),
        baseline=tuple(baseline.final.values()),
        candidate=tuple(candidate.final[seed] for seed in baseline.final),
    )


def decayed(curves: Mapping[str, Curve], margin: float) -> str | None:
    """None when the curves have settled, else why not: the next tenth of training would still lower the mean by `margin`.

    The fall is that of a line through the mean curve's last tenth (three points at least), extrapolated over as much again:
    gaps at the end of curves that still fall are those of the moment. `margin` in the unit of the losses.
    """
    if not curves:
        return "no curves: whether the runs had settled cannot be told from final losses"
    ends = [curve.step[-1] for curve in curves.values()]
    end, tenth = min(ends), LAST * min(ends)
    at = sorted({step for curve in curves.values() for step in curve.step if step <= end})
    first = max(curve.step[0] for curve in curves.values())
    at = [step for step in at if step >= first]
    late = [step for step in at if step >= end - tenth]
    late = late if len(late) >= FEWEST_POINTS else at[-FEWEST_POINTS:]
    if len(late) < FEWEST_POINTS or end <= 0:
        return f"{len(at)} points a curve: too few to tell whether the runs had settled; log {FEWEST_POINTS} at least"
    mean = np.mean([np.interp(late, curve.step, curve.loss) for curve in curves.values()], axis=0)
    fall = -float(np.polyfit(late, mean, 1)[0]) * tenth
    if fall < margin:
        return None
    return (
        f"still falling: the next tenth of training, {tenth:g} steps, would lower the loss by {fall:.2g} more, which is not "
        f"below the margin {margin:g}; decay the learning rate to the end, or train longer"
    )


def _files(path: Path | str | Sequence[Path | str]) -> list[Path]:
    if not isinstance(path, Path | str):
        return [Path(each) for each in path]
    one = Path(path)
    if not one.is_dir():
        return [one]
    found = sorted(one.glob("*.csv"))
    if not found:
        raise ValueError(f"{one} holds no .csv file: name the directory of TensorBoard's exports, or a file")
    return found


def _table(path: Path) -> _Table:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    lines = [
        (n, line)
        for n, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not lines:
        raise ValueError(f"{path} is empty: give one loss a line, or columns step, loss, seed")
    delimiter = max(",;\t", key=lines[0][1].count)
    cells = csv.reader((line for _, line in lines), delimiter=delimiter, skipinitialspace=True)
    rows = [(n, tuple(cell.strip() for cell in row)) for (n, _), row in zip(lines, cells, strict=True)]
    header = None if any(_number(cell) is not None for cell in rows[0][1]) else rows.pop(0)[1]
    width = len(header or rows[0][1])
    for n, row in rows:
        if len(row) != width:
            raise ValueError(f"{path}, line {n}: {len(row)} cells where the first line has {width}")
    if not rows:
        raise ValueError(f"{path} has a header and no rows: nothing was logged")
    return _Table(path=path, header=header, rows=tuple(rows))


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _finite(table: _Table, line: int, cell: str) -> float:
    value = _number(cell)
    if value is None:
        raise ValueError(f"{table.path}, line {line}: {cell!r} is not a number")
    if not math.isfinite(value):
        raise ValueError(
            f"{table.path}, line {line}: the loss is {cell}. A run that diverged has no final loss: say so, and leave it out"
        )
    return value


def _finals(source: str, table: _Table) -> Losses:
    width = len(table.rows[0][1])
    seed = table.column(SEED)
    numeric = [c for c in range(width) if c != seed and any(_number(row[c]) is not None for _, row in table.rows)]
    loss = table.column(LOSS) if len(numeric) > 1 else next(iter(numeric), None)
    names = [(table.header or [f"column {c + 1}" for c in range(width)])[c] for c in numeric]
    if not numeric:
        raise ValueError(f"{table.path} has no column of numbers: give one loss a line, or columns step, loss, seed")
    if loss is None:
        raise ValueError(f"{table.path}: {', '.join(names)} are all numbers; call the column of final losses loss")
    notes = [_taken(table, loss)] if len(numeric) > 1 else []
    final: dict[str, float] = {}
    labels: dict[str, str] = {}
    texts = [c for c in range(width) if c not in (seed, *numeric)]
    for place, (line, row) in enumerate(table.rows, start=1):
        name = row[seed] if seed is not None else str(place)
        if name in final:
            raise ValueError(
                f"{table.path}, line {line}: seed {name} a second time; one final loss a seed, or add a column step"
            )
        final[name] = _finite(table, line, row[loss])
        labels |= {name: row[texts[0]]} if texts else {}
    kinds = list(dict.fromkeys(labels.values()))
    if 1 < len(kinds) < len(final):
        notes.append(f"{table.path} mixes {len(kinds)} labels ({', '.join(kinds[:3])}), taken as one arm")
    _two(table.path, len(final))
    return Losses(source=source, final=final, curves={}, labels=labels, seeded=seed is not None, notes=tuple(notes))


def _taken(table: _Table, column: int) -> str:
    return f"{table.path}: the losses are those of the column {(table.header or ())[column]}"


def _long(source: str, table: _Table) -> Losses:
    step, loss, seed = (table.column(names) for names in (STEP, LOSS, SEED))
    assert step is not None
    assert table.header is not None
    others = [c for c in range(len(table.header)) if c not in (step, seed)]
    if loss is None and len(others) == 1:
        loss = others[0]
    if loss is None:
        raise ValueError(f"{table.path} has the columns {', '.join(table.header)}: call the one with the losses loss")
    if seed is None:
        raise ValueError(
            f"{table.path} has no column seed: one seed only; a verdict needs 2 at least, told apart by a column seed"
        )
    several = sum(table.header[c].lower() in LOSS for c in others) > 1
    points: dict[str, list[_Point]] = {}
    for line, row in table.rows:
        run = points.setdefault(row[seed], [])
        if row[loss] or len(others) == 1:  # beside other columns, a row that logged something else has no loss
            run.append((line, _finite(table, line, row[step]), _finite(table, line, row[loss])))
    curves = {name: _curve(table.path, name, found) for name, found in points.items()}
    return _of_curves(source, curves, (_taken(table, loss),) if several else ())


def _wandb(table: _Table) -> dict[str, Curve]:
    step = table.column(STEP)
    assert step is not None
    assert table.header is not None
    columns = {c: name for c, name in enumerate(table.header) if WANDB in name and not name.endswith(SPAN)}
    metrics = {name.rpartition(WANDB)[2] for name in columns.values()} - {"_step", *STEP}
    if len(metrics) != 1:
        raise ValueError(f"{table.path} holds {', '.join(sorted(metrics))}: export one metric, the validation loss")
    [metric] = metrics
    runs = {c: name.rpartition(WANDB)[0] for c, name in columns.items() if name.rpartition(WANDB)[2] == metric}
    points: dict[int, list[_Point]] = {c: [] for c in runs}
    for line, row in table.rows:
        for c in runs:
            if row[c]:  # runs that logged at other steps leave the cell empty
                points[c].append((line, _finite(table, line, row[step]), _finite(table, line, row[c])))
    seeds = _seeds(list(runs.values()))
    return {seed: _curve(table.path, seed, points[c]) for seed, c in zip(seeds, runs, strict=True)}


def _tensorboard(tables: Sequence[_Table]) -> dict[str, Curve]:
    paths = [table.path for table in tables]
    names = [path.stem for path in paths]
    names = names if len(set(names)) == len(names) else [str(path) for path in paths]
    return {
        seed: _curve(
            table.path, seed, [(n, _finite(table, n, row[1]), _finite(table, n, row[2])) for n, row in table.rows]
        )
        for seed, table in zip(_seeds(names), tables, strict=True)
    }


def _seeds(runs: Sequence[str]) -> list[str]:
    """The seed in each run's name ("fp8-seed3", "bf16_s3": 3), so that arms pair; the names where they do not tell."""
    hits = [re.search(r"(?<![a-z])s(?:eed)?[-_= ]?(\d+)(?!\d)", run.lower()) for run in runs]
    seeds = [str(int(hit.group(1))) for hit in hits if hit]
    return seeds if len(set(seeds)) == len(runs) else list(runs)


def _curve(path: Path, seed: str, points: Sequence[_Point]) -> Curve:
    if not points:
        raise ValueError(f"{path}: {seed} has no losses; export it again, or leave it out")
    ordered = sorted(points, key=lambda point: point[1])
    for (_, before, _), (line, step, _) in pairwise(ordered):
        if step == before:
            raise ValueError(f"{path}, line {line}: step {step:g} of {seed} a second time; keep one, the resumed run's")
    return Curve(step=tuple(step for _, step, _ in ordered), loss=tuple(loss for _, _, loss in ordered))


def _of_curves(source: str, curves: Mapping[str, Curve], notes: tuple[str, ...]) -> Losses:
    _two(source, len(curves))
    ends = {curve.step[-1] for curve in curves.values()}
    if len(ends) > 1:
        short = min(curves, key=lambda seed: curves[seed].step[-1])
        raise ValueError(
            f"{source}: seed {short} ends at step {min(ends):g}, others at {max(ends):g}: a run that ended early has "
            "no final loss; run it to the end, or leave it out"
        )
    final = {seed: curve.loss[-1] for seed, curve in curves.items()}
    return Losses(source=source, final=final, curves=dict(curves), labels={}, seeded=True, notes=notes)


def _two(source: Path | str, seeds: int) -> None:
    if seeds < 2:
        raise ValueError(f"{source} holds one seed only: a verdict needs 2 at least, and 5 to be worth much")
