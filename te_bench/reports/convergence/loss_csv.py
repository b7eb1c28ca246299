"""Read a user's losses from one CSV: final losses, curves by seed, or Weights & Biases' export of several runs.

A CSV of one run is a log: `reports/logs/formats/csv.py` reads it.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase as fnmatch
from itertools import pairwise
from pathlib import Path

from te_bench.reports.analysis.naming import first_of
from te_bench.reports.convergence.stability import sustained_rises
from te_bench.reports.logs import TORN, LogFile
from te_bench.reports.logs.names import VALIDATION, is_loss, is_trained, plain, precision, without_side
from te_bench.reports.logs.rows import STEP
from te_bench.reports.logs.table import SEED, SPAN, TIMES, WANDB, Table, number, number_at, numeric, step_at, table_of

LOSS = (*VALIDATION, "final_loss", "loss", "value")  # the first of these that a file has is its loss
LAST = 0.1  # the last share of training: training losses are its mean, and a gap must not move in it
NAMED = 5  # runs that a message names at most
TELLING = 3  # equal losses that show a copied run; one or two rounded losses may be equal by chance
WIDE = r"(?:s|seed)?[-_ ]?\d+"  # the header of a seed's column

_Point = tuple[int, float, float]  # line, step, loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Losses of one run at rising steps."""

    step: tuple[float, ...]
    loss: tuple[float, ...]

    @property
    def late(self) -> float:
        """The step at which the last tenth begins of what the run trained: it began an interval before its first loss."""
        first, last = self.step[0], self.step[-1]
        before = first - (self.step[1] - first) if len(self.step) > 1 else first
        return last - LAST * (last - (before if first < 0 else max(0.0, before)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """One arm by seed: final losses, and curves if the source has them. Seeds without names are numbered by row."""

    source: str
    final: Mapping[str, float]
    curves: Mapping[str, Curve]
    seeded: bool  # the seeds are the source's own, so two arms can be paired by them
    notes: tuple[str, ...] = ()  # what was taken for granted, to be shown
    repeated: tuple[str, ...] = ()  # names that several runs share, numbered here
    digests: Mapping[str, str] = field(default_factory=dict)  # of the files' bytes: the files
    judged: str = "final loss"  # what `final` holds
    metric: str | None = None  # what the source calls the loss, where it calls it anything
    stops: frozenset[float] = frozenset()  # the last steps, of a source that has no curves
    training: bool = False  # the losses are of training batches: noisy, and blind to overfitting
    broke: Mapping[str, str] = field(default_factory=dict)  # runs of which the source tells that they broke, and why
    short: Mapping[str, str] = field(default_factory=dict)  # runs that may end before they did, and why

    @property
    def judges_loss(self) -> bool:
        """Whether it is a loss, in nat, as far as its name tells: not a perplexity, which may rise by more than RISE."""
        return self.metric is None or is_loss(self.metric)


def read(file: LogFile, runs: str | None = None) -> Losses:
    """Return one arm's losses from a file in one of these layouts; comments (#) and blank lines are skipped.

    Final losses: one column, with or without a header, and optionally a label (text) or a seed column. Curves: columns
    step, loss, seed, or a step and a column for each seed, named by its number. Weights & Biases: "Step" and a column
    "run - metric" for each run, without its __MIN and __MAX. Its "Step" counts log calls; a column "run -
    train/global_step" or similar has the run's steps. The final loss of a curve is its last, but a training loss is the
    mean over the last tenth of the run, because the last is that of one batch. Losses may be NaN or infinite (`broken`
    finds these runs); leave cells empty that were not logged. `runs`: a pattern of the names of the arm's runs, in a file
    that holds others, too.

    Raises ValueError, with file and line, for text instead of a number, a repeated step or seed, fewer than two seeds,
    runs of unequal lengths, an ambiguous or missing column, a file that is not text, and a pattern that no run matches.
    """
    found, source = table_of(file), str(file.path)
    if runs is None:
        return replace(_losses(source, found), digests={digest(file): source})
    chosen, names = _of_runs(found, runs)
    source = f"{source}:{runs}"
    return replace(_losses(source, chosen), digests={f"{digest(file)} {name}": source for name in names})


def _of_runs(table: Table, runs: str) -> tuple[Table, list[str]]:
    """Return a table of only the runs whose names match a pattern, and these names; a label of rows stands for a name."""
    for label in _labels(table):
        named = list(dict.fromkeys(row[label] for _, row in table.rows))
        if chosen := [name for name in named if fnmatch(name.lower(), runs.lower())]:
            return replace(table, rows=tuple((n, row) for n, row in table.rows if row[label] in chosen)), chosen
    seed, header = table.column(SEED), table.header or ()
    of = {c: name.rpartition(WANDB)[0] for c, name in enumerate(header) if WANDB in name}
    named = list(dict.fromkeys(of.values() if seed is None else (row[seed] for _, row in table.rows)))
    chosen = [name for name in named if fnmatch(name.lower(), runs.lower())]
    if not chosen:
        has = f"its runs are {first_of(named, NAMED)}" if named else "it names no runs, as a column run does"
        raise ValueError(f"{table.path}:{runs} matches none: {has}")
    if seed is not None:
        return replace(table, rows=tuple((n, row) for n, row in table.rows if row[seed] in chosen)), chosen
    kept = [c for c in range(len(header)) if of.get(c, chosen[0]) in chosen]
    rows = tuple((n, tuple(row[c] for c in kept)) for n, row in table.rows)
    return replace(table, header=tuple(header[c] for c in kept), rows=rows), chosen


def _labels(table: Table) -> list[int]:
    """Return the columns of text, which may name the side."""
    seed = table.column(SEED)
    width = len(table.rows[0][1])
    return [c for c in range(width) if c != seed and not any(numeric(row[c]) or not row[c] for _, row in table.rows)]


def late_mean(curve: Curve) -> float:
    """Return the mean loss over the last tenth of the run."""
    late = [loss for step, loss in zip(curve.step, curve.loss, strict=True) if step >= curve.late]
    return sum(late) / len(late)


def digest(file: LogFile) -> str:
    return hashlib.sha256(file.content).hexdigest()


def _losses(source: str, table: Table) -> Losses:
    runs = [WANDB in name for name in table.header or ()]
    if any(runs) and table.column(STEP) is not None:
        return _wandb(source, table)
    axis = next((name for name in table.header or () if WANDB not in name), None)
    if any(runs) and axis is not None and (sum(runs) > 1 or axis.lower().startswith(TIMES)):
        raise _other_axis(table, axis)
    if table.column(STEP) is not None:
        return _long(source, table)
    return _finals(source, table)


def broken(arm: Losses) -> dict[str, str]:
    """Return {seed: why its run diverged}: a loss is not finite, or a rise lasts until the end."""
    found = dict(arm.broke)
    for seed, final in arm.final.items():
        if seed in found:
            continue
        curve = arm.curves.get(seed)
        at = next((n for n, loss in enumerate(curve.loss) if not math.isfinite(loss)), None) if curve else None
        if curve and at is not None:
            found[seed] = f"the loss is {curve.loss[at]} at step {curve.step[at]:g}"
        elif not math.isfinite(final):
            found[seed] = f"the final loss is {final}"
        elif (
            curve and arm.judges_loss and (rises := sustained_rises(curve.step, curve.loss)) and rises[-1].last is None
        ):
            rise = rises[-1]
            found[seed] = (
                f"the loss rose {rise.height:.2g} above its minimum by step {rise.first:g} and did not come back"
            )
    return found


def _point(table: Table, line: int, step: str, loss: str) -> _Point:
    return line, step_at(table, line, step), number_at(table, line, loss)


def _other_axis(table: Table, name: str) -> ValueError:
    return ValueError(f"{table.path}: the x-axis is {name}: export with Step as the x-axis")


def _finals(source: str, table: Table) -> Losses:
    width = len(table.rows[0][1])
    seed = table.column(SEED)
    columns = [c for c in range(width) if c != seed and any(numeric(row[c]) for _, row in table.rows)]
    loss = _loss(table) if len(columns) > 1 else next(iter(columns), None)
    names = [(table.header[c] if table.header else "") or f"column {c + 1}" for c in columns]
    if not columns:
        raise ValueError(f"{table.path} has no column of numbers: give one loss a line, or columns step, loss, seed")
    if loss is None:
        comma = "" if table.header else "; were the commas decimal ones, write points"
        raise ValueError(
            f"{table.path}: {', '.join(names)} are all numbers; call the column of final losses loss, or give columns "
            f"step, loss, seed{comma}"
        )
    notes = [_taken(table, loss)] if len(columns) > 1 else []
    if table.torn is not None:
        raise ValueError(
            f"{table.path}: its last line, {','.join(table.torn)}, has no end, and lacks cells or decimals that every other "
            "has. It may be torn, and a run would be lost: write it in full, and end it"
        )
    rising = [c for c in columns if c != loss and seed is None and _rises([row[c] for _, row in table.rows])]
    if rising:
        name = names[columns.index(rising[0])].removeprefix("column ")
        raise ValueError(
            f"{table.path}: its column {name} rises row by row: this looks like one run's curve. Rename it to step, or give "
            "one column of final losses"
        )
    if seed is None and table.gap is not None:
        raise ValueError(
            f"{table.path}, line {table.gap} has no loss: without seeds rows are pairs, and every later one would be of "
            "another seed; write nan for a run that diverged, or add a column seed"
        )
    final: dict[str, float] = {}
    texts = _labels(table)
    for place, (line, row) in enumerate(table.rows, start=1):
        name = row[seed] if seed is not None else str(place)
        if name in final:
            for other in (head for head in table.header or () if head.lower().startswith(TIMES)):
                raise _other_axis(table, other)
            raise ValueError(
                f"{table.path}, line {line}: seed {name} a second time; one final loss a seed, or add a column step"
            )
        final[name] = number_at(table, line, row[loss])
    if seed is not None:
        final = dict(zip(seeds_of(list(final)), final.values(), strict=True))
    kinds = list(dict.fromkeys(row[texts[0]] for _, row in table.rows)) if texts else []
    if 1 < len(kinds) < len(final):
        notes.append(f"{table.path} mixes {len(kinds)} labels ({', '.join(kinds[:3])}), taken as one configuration")
    _two(table.path, len(final))
    metric = table.header[loss] if table.header and is_loss(table.header[loss]) else None  # it may be the arm's name
    found = Losses(source=source, final=final, curves={}, seeded=seed is not None, notes=tuple(notes), metric=metric)
    return replace(found, training=metric is not None and is_trained(metric))


def _rises(cells: Sequence[str]) -> bool:
    values = [value for cell in cells if (value := number(cell)) is not None]
    return values[:1] < values[-1:] and values == sorted(values)


def _loss(table: Table) -> int | None:
    names = list(map(plain, table.header or ()))
    return next((names.index(name) for name in LOSS if name in names), None)


def _taken(table: Table, column: int) -> str:
    return f"{table.path}: the losses are those of the column {(table.header or ())[column]}"


def _long(source: str, table: Table) -> Losses:
    step, loss, seed = table.column(STEP), _loss(table), table.column(SEED)
    assert step is not None
    assert table.header is not None
    others = [c for c in range(len(table.header)) if c not in (step, seed)]
    if loss is None and len(others) == 1:
        loss = others[0]
    if loss is None and seed is None and all(re.fullmatch(WIDE, table.header[c].lower()) for c in others):
        return _wide(source, table, {c: table.header[c] for c in others})
    if loss is None or seed is None:
        raise ValueError(
            f"{table.path} has the columns {', '.join(table.header)}: call the one with the losses loss, or give step and "
            "a column a seed, called by its number"
        )
    several = sum(plain(table.header[c]) in LOSS for c in others) > 1
    points: dict[str, list[_Point]] = {}
    for line, row in table.rows:
        run = points.setdefault(row[seed], [])
        if row[loss] or len(others) == 1:  # with other columns, a row without a loss logged something else
            run.append(_point(table, line, row[step], row[loss]))
    seeds = zip(seeds_of(list(points)), points.items(), strict=True)
    curves = {name: _curve(table.path, run, found) for name, (run, found) in seeds}
    _two(source, len(curves))
    found = _whole_curves(source, table, curves, (_taken(table, loss),) if several else ())
    return _called(table.header[loss], found) if is_loss(table.header[loss]) else found


def _called(metric: str, found: Losses) -> Losses:
    """Return the arm with the name of its loss; a training loss becomes a mean, because the last is that of one batch."""
    if not is_trained(metric):
        return replace(found, metric=metric, judged=f"the last {metric}")
    final = {seed: late_mean(curve) for seed, curve in found.curves.items()}
    judged = f"the mean {metric} over the last tenth of the steps"
    return replace(found, metric=metric, final=final, judged=judged, training=True)


def _wandb(source: str, table: Table) -> Losses:
    assert table.header is not None
    columns = {c: name for c, name in enumerate(table.header) if WANDB in name and not name.lower().endswith(SPAN)}
    metrics = {name.rpartition(WANDB)[2] for name in columns.values()} - {*STEP}
    if len(metrics) != 1:
        raise ValueError(f"{table.path} holds {', '.join(sorted(metrics))}: export one metric, the validation loss")
    [metric] = metrics
    parts = ((c, n.rpartition(WANDB)) for c, n in columns.items())
    runs = {c: run for c, (run, _, what) in parts if what == metric}
    return _called(metric, _wide(source, table, runs, _training_steps(table, runs)))


def _training_steps(table: Table, runs: Mapping[int, str]) -> dict[int, int]:
    """Return {column of a run's losses: column of its training steps}; {} unless all runs have a step with each loss."""
    for name in STEP if len(set(runs.values())) == len(runs) else ():
        columns = {c: table.column([f"{run}{WANDB}{name}".lower()]) for c, run in runs.items()}
        found = {c: column for c, column in columns.items() if column is not None}
        full = all(row[column] for c, column in found.items() for _, row in table.rows if row[c])
        if len(found) == len(runs) and full:
            return found
    return {}


def _wide(source: str, table: Table, runs: Mapping[int, str], steps: Mapping[int, int] | None = None) -> Losses:
    """Return an arm by its columns; steps: {column of a run's losses: column of its steps}, if not the table's."""
    common = table.column(STEP)
    assert common is not None
    step = {c: (steps or {}).get(c, common) for c in runs}
    points: dict[int, list[_Point]] = {c: [] for c in runs}
    for line, row in table.rows:
        for c in runs:
            if row[c]:  # empty where a run logged at other steps
                points[c].append(_point(table, line, row[step[c]], row[c]))
    seeds = seeds_of(list(runs.values()))
    counts = Counter(seeds)
    repeated = tuple(name for name, count in counts.items() if count > 1)
    names = [f"{name} ({seeds[: n + 1].count(name)})" if name in repeated else name for n, name in enumerate(seeds)]
    notes = tuple(f"{table.path}: {counts[name]} runs are called {name}, numbered in their order" for name in repeated)
    curves = {name: _curve(table.path, name, points[c]) for name, c in zip(names, runs, strict=True)}
    _two(source, len(curves))
    return replace(_whole_curves(source, table, curves, notes), repeated=repeated)


def _whole_curves(source: str, table: Table, curves: Mapping[str, Curve], notes: tuple[str, ...]) -> Losses:
    """The arm of a table's curves, told where its last line is torn."""
    if table.torn is None:
        return of_curves(source, curves, notes)
    told = TORN.format(table.path)
    return of_curves(source, curves, (*notes, told), short=dict.fromkeys(curves, told))


def seeds_of(runs: Sequence[str]) -> list[str]:
    """Return the seed in each run's name ("fp8-seed3", "bf16_s3": 3), which pairs arms; else the names without their side.

    Runs of both precisions in one arm keep their names.
    """
    if {"low", "high"} <= set(map(precision, runs)):
        return list(runs)
    hits = [re.search(r"(?<![a-z])s(?:eed)?[-_= ]?(\d+)(?!\d)", run.lower()) for run in runs]
    seeds = [str(int(hit.group(1))) for hit in hits if hit]
    apart = (seeds, list(map(without_side, runs)))
    return next((names for names in apart if len(set(names)) == len(runs) and all(names)), list(runs))


def _curve(path: Path, seed: str, points: Sequence[_Point]) -> Curve:
    if not points:
        raise ValueError(f"{path}: {seed} has no losses: export it again")
    ordered = sorted(points, key=lambda point: point[1])
    for (_, before, _), (line, step, _) in pairwise(ordered):
        if step == before:
            raise ValueError(f"{path}, line {line}: step {step:g} of {seed} a second time; keep one, the resumed run's")
    return Curve(step=tuple(step for _, step, _ in ordered), loss=tuple(loss for _, _, loss in ordered))


def of_curves(
    source: str,
    curves: Mapping[str, Curve],
    notes: tuple[str, ...] = (),
    broke: Mapping[str, str] | None = None,
    short: Mapping[str, str] | None = None,
) -> Losses:
    """Return one arm by its runs' curves; the final loss is the last. Raises ValueError for copied or shorter runs.

    `broke`: runs that are known to have diverged by other losses than these, and why. `short`: those that may
    end before they did, by a torn line or rows without a loss, and why.
    """
    _apart(source, curves)
    final = {seed: curve.loss[-1] for seed, curve in curves.items()}
    found = Losses(
        source=source, final=final, curves=dict(curves), seeded=True, notes=notes, broke=broke or {}, short=short or {}
    )
    told = broken(found)  # such a run may have been stopped for it
    ends = {seed: curve.step[-1] for seed, curve in curves.items() if seed not in told}
    if len(set(ends.values())) > 1:
        seed = min(ends, key=ends.__getitem__)
        raise ValueError(
            f"{source}: seed {seed} ends at step {ends[seed]:g}, others at {max(ends.values()):g}: a run that ended "
            f"early has no final loss; run it to the end{why_short(found, seed)}"
        )
    return found


def why_short(arm: Losses, seed: str | None = None) -> str:
    """What to add of a run, or of any, that may end before it did; "" where nothing tells."""
    told = arm.short.get(seed) if seed else next(iter(arm.short.values()), None)
    return f"; {told}" if told else ""


def _apart(source: str, curves: Mapping[str, Curve]) -> None:
    """Raise ValueError for two seeds with equal curves: a run that counts twice hides how far seeds vary."""
    seen: dict[Curve, str] = {}
    for seed, curve in curves.items():
        if (first := seen.setdefault(curve, seed)) != seed and len(curve.step) >= TELLING:
            raise ValueError(f"{source}: seeds {first} and {seed} are one run, loss for loss: a run counts once")


def _two(source: Path | str, seeds: int) -> None:
    if seeds < 2:
        raise ValueError(f"{source} holds one seed only: a verdict needs 3 at least, and 8 to be worth much")
