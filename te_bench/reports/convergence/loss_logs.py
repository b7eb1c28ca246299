"""Two arms of somebody else's trainings, from logs of any kind in `reports/logs/formats`, or from one CSV with several runs.

A file is one run; a folder is one run where a format says so, else whatever runs lie below it.
"""

import glob
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from te_bench.reports.convergence import loss_csv
from te_bench.reports.convergence.loss_arms import LAST
from te_bench.reports.convergence.loss_csv import Curve, Losses, broken, digest, of_curves, seeds_of
from te_bench.reports.logs import FORMATS, HEAD, LogFile, LogFormat, Series
from te_bench.reports.logs.names import TRAINING, VALIDATION, is_loss, plain

LARGEST = 2**30  # bytes: a larger file beside logs is a corpus
NAMED = 5  # losses or files that a message names


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """The files of one run, or a table of several (`format` None)."""

    place: Path
    files: tuple[LogFile, ...]
    format: LogFormat | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    name: str
    series: Series
    validation: Curve | None
    training: Curve | None
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arm:
    source: str
    runs: tuple[_Run, ...]
    digests: frozenset[str]
    table: Losses | None = None  # of a CSV that holds several runs, which has chosen its loss itself
    notes: tuple[str, ...] = ()


def read_arms(
    baseline: Sequence[Path | str], candidate: Sequence[Path | str], metric: str | None = None
) -> tuple[Losses, Losses]:
    """Both arms by one loss: `metric` where given, else the validation loss where every arm has one, else the training loss.

    The validation loss is the last; the training loss the mean over the last tenth of the steps. Raises ValueError for
    what is no log, arms of mixed kinds, logs that are damaged, and arms that have no loss in common.
    """
    arms = [_read_arm(paths, metric) for paths in (baseline, candidate)]
    validated = all(any(run.validation for run in arm.runs) for arm in arms if arm.table is None)
    trained = all(any(run.training for run in arm.runs) for arm in arms if arm.table is None)
    if not validated and not trained:
        raise ValueError(
            f"{arms[0].source} and {arms[1].source} have no loss in common, one of validation and one of training: "
            "name one that both have by --metric"
        )
    first, second = (arm.table or _judged(arm, validated, metric) for arm in arms)
    return first, second


def _read_arm(paths: Sequence[Path | str], metric: str | None) -> _Arm:
    named = [one for path in paths for one in _expanded(path)]
    source = str(paths[0]) if len(paths) == 1 else f"{named[0]} and {len(named) - 1} more" if len(named) > 1 else ""
    others: list[Path] = []
    found = [one for path in named for one in _found(path, others)]
    tables = [one for one in found if one.format is None]
    if tables and len(found) > 1:
        raise ValueError(
            f"{tables[0].place} holds several runs, or final losses: such a file is a whole arm, give it alone"
        )
    kinds = {one.format.title: one for one in found if one.format is not None}
    if len(kinds) > 1:
        (one, this), (other, that), *_ = kinds.items()
        raise ValueError(
            f"{source} mixes logs of several kinds: {one} ({this.place}) and {other} ({that.place}); name those of one kind"
        )
    for place, count in Counter(os.path.realpath(one.place) for one in found).items():
        if count > 1:
            raise ValueError(f"{place} is given {count} times: a run counts once")
    digests = frozenset(digest(file) for one in found for file in one.files if file.content)
    if tables and metric is not None:
        raise ValueError(f"--metric {metric}: {tables[0].place} is a CSV of several runs, whose columns say the loss")
    if tables:
        return _Arm(source=source, runs=(), digests=digests, table=loss_csv.read(tables[0].files[0]))
    runs = tuple(_run(one, name, metric) for one, name in zip(found, _names(found), strict=True))
    return _Arm(source=source, runs=runs, digests=digests, notes=_without_loss(found, others))


def _without_loss(found: Sequence[_Found], others: Sequence[Path]) -> tuple[str, ...]:
    """What to say of files beside the logs, of text and named as a log is, in which no format finds a loss."""
    suffixes = {file.path.suffix for one in found for file in one.files} - {".json"}  # configurations are that, too
    silent = [str(path) for path in others if path.suffix in suffixes and not _begun(path).binary]
    if not silent:
        return ()
    more = f" and {len(silent) - NAMED} more" if len(silent) > NAMED else ""
    return (
        f"{', '.join(silent[:NAMED])}{more}: no loss in {'it' if len(silent) == 1 else 'them'}. A training that died before "
        "its first loss is missing here, and would count as diverged",
    )


def _expanded(path: Path | str) -> list[Path]:
    """The paths that a pattern matches; a path itself."""
    one = Path(path)
    if one.exists() or not glob.has_magic(str(path)):
        return [one]
    matched = sorted(Path(found) for found in glob.glob(str(path), recursive=True))  # noqa: PTH207  # absolute ones, too
    if not matched:
        raise ValueError(f"{path} matches no file: give a log, a folder of logs, or a pattern such as 'runs/bf16-*'")
    return matched


def _found(path: Path, others: list[Path]) -> list[_Found]:
    """others: is added the files of a folder that are no logs."""
    if not path.is_dir():
        file = _file(path)
        return [_Found(place=path, files=(file,), format=_format_of(file))]
    if found := list(_below(path, set(), others)):
        return found
    raise ValueError(f"{path} holds no log: {_known()}")


def _below(folder: Path, seen: set[str], others: list[Path]) -> Iterator[_Found]:
    """The runs of a folder, each folder once, whatever links lead to it (W&B has its latest run under two names)."""
    seen.add(os.path.realpath(folder))
    claims = [(form, files) for form in _formats() if (files := form.run_files(folder))]
    if len(claims) > 1:
        both = " and ".join(f"{form.title} ({files[-1].name})" for form, files in claims)
        raise ValueError(f"{folder} holds two logs of one run, {both}: name the file of one")
    for form, files in claims:
        yield _Found(place=folder, files=tuple(map(_file, files)), format=form)
    if claims:
        return
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_symlink(), path)):
        if path.name.startswith(".") or os.path.realpath(path) in seen:  # unlike resolve, silent on a loop of links
            continue
        if path.is_dir():
            yield from _below(path, seen, others)
        elif path.is_file() and (found := _log_below(path)) is not None:
            seen.add(os.path.realpath(path))
            yield found
        elif path.is_file() and path.stat().st_size <= LARGEST:
            others.append(path)


def _log_below(path: Path) -> _Found | None:
    """A file that was not named: a log, a CSV of several runs, or None.

    A binary file is told by its beginning: checkpoints beside logs have gigabytes.
    """
    if path.stat().st_size > LARGEST:
        return None
    begun = _begun(path)
    kind = _kind(begun if begun.binary else _file(path))
    if kind is None and path.suffix.lower() != ".csv":
        return None
    return _Found(place=path, files=(_file(path),), format=kind)


def _begun(path: Path) -> LogFile:
    with path.open("rb") as stream:
        return LogFile(path=path, content=stream.read(HEAD))


def _file(path: Path) -> LogFile:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    return LogFile(path=path, content=content)


def _formats() -> list[LogFormat]:
    """CSV last: nothing but its first line tells it."""
    return [FORMATS.load(name) for name in sorted(FORMATS.names(), key=lambda name: (name == "csv", name))]


def _kind(file: LogFile) -> LogFormat | None:
    """The first format that takes the file; one of text takes no binary."""
    return next((one for one in _formats() if (one.binary or not file.binary) and one.recognises(file)), None)


def _format_of(file: LogFile) -> LogFormat | None:
    """The format of a file that was named; None for a table of several runs. Raises ValueError for what is neither."""
    if not file.content.strip():
        raise ValueError(f"{file.path} is empty: nothing was logged")
    if not file.binary and len(file.content) > LARGEST:
        raise ValueError(
            f"{file.path} has {len(file.content) / 2**30:.1f} GiB of text: no log that is read here has so much"
        )
    if (kind := _kind(file)) is not None:
        return kind
    if file.binary:
        raise ValueError(f"{file.path} is none of the logs that are read here: {_known()}")
    return None


def _known() -> str:
    return ", ".join(form.title for form in _formats()) + ", or a CSV of several"


def _names(found: Sequence[_Found]) -> list[str]:
    """The runs' places below the folder that they share."""
    if len(found) == 1:
        return [found[0].place.name]
    shared = os.path.commonpath([one.place.absolute().parent for one in found])
    return [str(one.place.absolute().relative_to(shared)) for one in found]


def _run(found: _Found, name: str, metric: str | None) -> _Run:
    assert found.format is not None
    series = found.format.read(found.files)
    place = found.place
    if not series.losses:
        raise ValueError(f"{place} has no number in it: it was read as {found.format.title}")
    validation, training = _chosen(place, series, metric)
    notes = list(series.notes)
    curves = []
    for loss in (validation, training):
        curve, again = _curve(place, series.losses[loss]) if loss else (None, 0)
        if again:
            notes.append(f"{place}: {again} losses were logged again, as by a resumed run: the later ones count")
        curves.append(curve)
    first, second = curves
    return _Run(
        name=name, series=series, validation=first, training=second if series.whole else None, notes=tuple(notes)
    )


def _chosen(place: Path, series: Series, metric: str | None) -> tuple[str | None, str | None]:
    """The names of the validation and of the training loss; a metric that was asked for stands in the first place."""
    by_name = {plain(name): name for name in reversed(list(series.losses))}
    if metric is not None:
        if plain(metric) not in by_name:
            raise ValueError(f"--metric {metric}: {place} has no such value; it has {_listed(list(series.losses))}")
        name = by_name[plain(metric)]
        return (None, name) if plain(metric) in TRAINING and series.whole else (name, None)
    validation = next((by_name[name] for name in VALIDATION if name in by_name), None)
    training = next((by_name[name] for name in TRAINING if name in by_name), None)
    if validation is None and (training is None or not series.whole):
        raise ValueError(
            f"{place}: which loss is to be judged? It has {_listed(list(series.losses))}: "
            + ("say --metric NAME" if series.whole else "the last of each alone, so export the run's history as CSV")
        )
    return validation, training


def _listed(names: Sequence[str]) -> str:
    """The first names, those of losses before others."""
    names = sorted(names, key=lambda name: not is_loss(name))
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _curve(place: Path, points: Sequence[tuple[float, float]]) -> tuple[Curve, int]:
    """The points in order of their steps, and how many were logged again: a resumed run goes back to its checkpoint."""
    kept: list[tuple[float, float]] = []
    again = 0
    for step, loss in points:
        while kept and kept[-1][0] >= step:
            again += kept.pop() != (step, loss)
        kept.append((step, loss))
    if not all(abs(step) < float("inf") for step, _ in kept):
        raise ValueError(f"{place}: a step is not a finite number")
    return Curve(step=tuple(step for step, _ in kept), loss=tuple(loss for _, loss in kept)), again


def _judged(arm: _Arm, validated: bool, metric: str | None) -> Losses:
    curves, broke = {}, dict[str, str]()
    numbered = zip(_seeds(arm.runs), arm.runs, strict=True)
    for seed, run in sorted(numbered, key=lambda one: (int(one[0]), "") if one[0].isdecimal() else (0, one[0])):
        curve = run.validation if validated else run.training
        if run.training is not None:
            alone = Losses(source="", final={seed: run.training.loss[-1]}, curves={seed: run.training}, seeded=True)
            broke |= broken(alone)
        if curve is None and seed not in broke:
            raise ValueError(f"{arm.source}: {run.name} has no {'validation' if validated else 'training'} loss")
        curves[seed] = curve or Curve(step=(0.0,), loss=(float("nan"),))
    notes = (*arm.notes, *(note for run in arm.runs for note in run.notes))
    found = of_curves(arm.source, curves, notes, broke)
    which = metric or ("validation loss" if validated else "training loss")
    judged = f"the last {which}" if validated else f"the mean {which} over the last tenth of the steps"
    final = found.final if validated else {seed: _late(curve) for seed, curve in curves.items()}
    whole = all(run.series.whole for run in arm.runs)
    return replace(
        found,
        final=final,
        curves=found.curves if whole else {},
        digests=arm.digests,
        judged=judged,
        training=not validated,
    )


def _late(curve: Curve) -> float:
    """The mean over the last tenth of the steps."""
    start = curve.step[-1] - LAST * abs(curve.step[-1])  # some write steps below 0
    late = [loss for step, loss in zip(curve.step, curve.loss, strict=True) if step >= start]
    return sum(late) / len(late)


def _seeds(runs: Sequence[_Run]) -> list[str]:
    """The seeds that the logs say, else those in the runs' names, else the names."""
    said = [run.series.seed for run in runs if run.series.seed is not None]
    return said if len(set(said)) == len(runs) else seeds_of([run.name for run in runs])
