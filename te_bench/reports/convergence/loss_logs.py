"""Read two arms of a user's trainings, from logs of any kind in `reports/logs/formats`, or from a CSV of several runs.

A file is one run. A folder is one run if a format says so, else it holds the runs below it.
"""

import glob
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path

from te_bench.reports.analysis.naming import first_of
from te_bench.reports.convergence import loss_csv
from te_bench.reports.convergence.loss_csv import Curve, Losses, broken, digest, late_mean, of_curves, seeds_of
from te_bench.reports.logs import FORMATS, HEAD, LogFile, LogFormat, Series
from te_bench.reports.logs.names import TRAINING, VALIDATION, is_held_out, is_loss, plain
from te_bench.reports.logs.rows import of_json

LARGEST = 2**30  # bytes: a larger file beside logs is taken for a corpus
NAMED = 5  # losses, files or runs that a message names at most
SEARCHED = 2**20  # bytes in which a folder's file shows what prints it
PRINTED = b"loss': "  # a Python dictionary, printed
#: What may differ in the names of one run's logs, and what such logs are.
PARTS = (
    # W&B's folders. A file with such a name is a run of its own.
    (re.compile(r"(?<=run-)\d{8}_\d{6}(?=-[^/.]+(?:/|$))"), "one run, which was resumed: name the last of them"),
    (
        re.compile(r"(?<![a-z])(?:rank[-_]?\d+|(?<=attempt_\d/)\d+)(?![a-z\d])"),
        "ranks of one run: name those of one rank",
    ),
    (
        re.compile(r"(?<![a-z])(?:train(?:ing)?|val(?:id(?:ation)?)?|eval|dev|test)(?![a-z])"),
        "two losses of one run: name those of one loss",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """The files of one run, or a table of several runs (`format` None)."""

    place: Path
    files: tuple[LogFile, ...]
    format: LogFormat | None
    runs: str | None = None  # a pattern of those that are this arm's


@dataclass(frozen=True, kw_only=True, slots=True)
class _Log:
    name: str
    place: Path
    series: Series

    @property
    def called(self) -> dict[str, str]:
        """{plain name: name in the log} of its values."""
        return {plain(name): name for name in reversed(list(self.series.losses))}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loss:
    """One loss of a run, by its name in the log."""

    name: str
    curve: Curve
    again: bool = False  # some was logged a second time, as by a resumed run
    several: bool = False  # each step had several, which are averaged
    blank: str | None = None  # the last rows that have no number, and how


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    log: _Log
    validation: _Loss | None
    training: _Loss | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arm:
    source: str
    logs: tuple[_Log, ...]
    digests: Mapping[str, str]
    table: Losses | None = None  # of a CSV that holds several runs, which has chosen its loss itself
    notes: tuple[str, ...] = ()


def read_arms(
    baseline: Sequence[Path | str], candidate: Sequence[Path | str], metric: str | None = None
) -> tuple[Losses, Losses]:
    """Return both arms by one loss: `metric` if given, else the validation loss if every arm has one, else training.

    The validation loss is the last one, the training loss the mean over the last tenth of the steps. Raises ValueError for
    a file that is no log, arms of mixed kinds, damaged logs, and arms without a common loss.
    """
    arms = [_read_arm(paths, metric) for paths in (baseline, candidate)]
    logs = [log for arm in arms for log in arm.logs]
    orders = [_common_first(names, logs) for names in (VALIDATION, TRAINING)]
    runs = [[_run(log, metric, orders) for log in arm.logs] for arm in arms]
    has = [any(run.validation for run in side) for side in runs]
    trained = all(any(run.training for run in side) for arm, side in zip(arms, runs, strict=True) if arm.table is None)
    of_training = trained and any(arm.table is not None and arm.table.training for arm in arms)
    validated = not of_training and all(told for arm, told in zip(arms, has, strict=True) if arm.table is None)
    if not validated and not trained:
        raise ValueError(
            f"{arms[0].source} and {arms[1].source} have no loss in common, one of validation and one of training: "
            "name one that both have by --metric"
        )
    first, second = (
        arm.table or _judged(arm, side, validated, metric, None if validated or metric else _passed_over(arm, told))
        for arm, side, told in zip(arms, runs, has, strict=True)
    )
    return first, second


def _common_first(names: Sequence[str], logs: Sequence[_Log]) -> list[str]:
    """Return the names, those first that all logs with any of them have: both arms need one loss."""
    found = [had for log in logs if (had := {name for name in names if name in log.called})]
    return sorted(names, key=lambda name: not all(name in had for had in found))


def _passed_over(arm: _Arm, validated: bool) -> str | None:
    """Return a note on validation losses that are not judged: only one arm has them, or their names are unknown."""
    if validated:
        return f"the validation loss of {arm.source} is not judged, because the other side has none"
    others = list(dict.fromkeys(name for log in arm.logs for name in log.series.losses if is_held_out(name)))
    return f"{arm.source} has {_listed(others)}, of which --metric judges one" if others else None


def _read_arm(paths: Sequence[Path | str], metric: str | None) -> _Arm:
    named = [one for path in paths for one in _expanded(path)]
    source = str(paths[0]) if len(paths) == 1 else first_of(list(map(str, named)), 1)
    others: list[Path] = []
    found = [one for path in named for one in _found(path, others)]
    tables = [one for one in found if one.format is None]
    if tables and len(found) > 1:
        _table(tables[0])  # whose own fault comes first
        how = "alone" if tables[0].place in named else "itself, not its folder"
        raise ValueError(
            f"{tables[0].place} holds several runs or final losses, so it is a whole side by itself: give the file {how}"
        )
    kinds = {one.format.title: one for one in found if one.format is not None}
    if len(kinds) > 1:
        (one, this), (other, that), *_ = kinds.items()
        raise ValueError(
            f"{source} mixes logs of several kinds: {one} ({this.place}) and {other} ({that.place}); give logs of one kind"
        )
    for place, count in Counter(os.path.realpath(one.place) for one in found).items():
        if count > 1:
            raise ValueError(f"{place} is given {count} times: a run counts once")
    digests = {digest(file): str(file.path) for one in found for file in one.files if file.content}
    if tables and metric is not None:
        raise ValueError(f"--metric {metric}: {tables[0].place} is a CSV of several runs, whose columns name the loss")
    if tables:
        return _Arm(source=source, logs=(), digests=digests, table=_table(tables[0]))
    _of_one_run([str(one.place) for one in found])
    logs = tuple(_log(one, name) for one, name in zip(found, _names(found), strict=True))
    return _Arm(source=source, logs=logs, digests=digests, notes=_without_loss(found, others))


def _table(found: _Found) -> Losses:
    file = found.files[0]
    try:
        return loss_csv.read(file, found.runs)
    except ValueError as error:
        if file.path.suffix.lower() in (".csv", ".tsv"):
            raise
        if PRINTED in file.content:
            raise _printed(file) from error
        if _is_stepless(file):
            raise _no_step(file) from error
        raise ValueError(f"{file.path} is not a log that te-bench reads ({_known()}); as a CSV: {error}") from error


def _is_stepless(file: LogFile) -> bool:
    """Whether the file is of JSON lines with a loss, and so without a step where no format takes it."""
    line = file.content[:HEAD].partition(b"\n")[0]
    try:
        row = of_json(line) if line.startswith(b"{") else None
    except ValueError:
        return False
    return isinstance(row, dict) and any(map(is_loss, row))


def _printed(file: LogFile) -> ValueError:
    return ValueError(f"{file.path} is what Hugging Face's Trainer prints, without steps: give its trainer_state.json")


def _no_step(file: LogFile) -> ValueError:
    return ValueError(f"{file.path} has no _step: give each row the step of its loss, as _step, step or iter")


def _of_one_run(places: Sequence[str]) -> None:
    """Raise ValueError for several logs of one run, which would count as several seeds."""
    for part, what in PARTS:
        first: dict[str, str] = {}
        for place in places:
            if (other := first.setdefault(part.sub("", place.lower()), place)) != place:
                raise ValueError(f"{other} and {place} are {what}")


def _without_loss(found: Sequence[_Found], others: Sequence[Path]) -> tuple[str, ...]:
    """Return a note on text files beside the logs, with a log's suffix, in which no format finds a loss."""
    suffixes = {file.path.suffix for one in found for file in one.files} - {".json"}  # JSON may be a configuration
    silent = [str(path) for path in others if path.suffix in suffixes and not _begun(path).binary]
    if not silent:
        return ()
    return (
        f"{first_of(silent, NAMED)}: no loss in {'it' if len(silent) == 1 else 'them'}. A training that died before its "
        "first loss is missing here, and would count as diverged",
    )


def _expanded(path: Path | str) -> list[Path]:
    """Return the paths that a pattern matches, or the path itself. Raises ValueError if nothing matches."""
    one = Path(path)
    if one.exists() or _of_both(one) or not glob.has_magic(str(path)):
        return [one]
    matched = sorted(Path(found) for found in glob.glob(str(path), recursive=True))  # noqa: PTH207  # absolute ones, too
    if not matched:
        raise ValueError(f"{path} matches no file: give a log, a folder of logs, or a pattern such as 'runs/bf16-*'")
    return matched


def _of_both(path: Path) -> tuple[Path, str] | None:
    """Return the file and the pattern of FILE:PATTERN, which names runs of a table that holds both arms; else None."""
    name, _, runs = str(path).rpartition(":")
    return (Path(name), runs) if runs and not path.exists() and Path(name).is_file() else None


def _found(path: Path, others: list[Path]) -> list[_Found]:
    """Return the runs at a path; add a folder's files that are no logs to `others`."""
    if (both := _of_both(path)) is not None:
        return [_Found(place=path, files=(_file(both[0]),), format=None, runs=both[1])]
    if not path.is_dir():
        file = _file(path)
        return [_Found(place=path, files=(file,), format=_format_of(file))]
    if found := list(_below(path, set(), others)):
        return found
    for file in map(_begun, others):
        if _is_stepless(file):
            raise _no_step(file)
        if not file.binary and PRINTED in _begun(file.path, SEARCHED).content:
            raise _printed(file)
    raise ValueError(f"{path} holds no log: {_known()}")


def _below(folder: Path, seen: set[str], others: list[Path]) -> Iterator[_Found]:
    """Yield the runs of a folder, each folder once even if links lead to it (W&B links its latest run)."""
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
        if path.name.startswith(".") or os.path.realpath(path) in seen:  # resolve() fails on a loop of links
            continue
        if path.is_dir():
            yield from _below(path, seen, others)
        elif path.is_file() and (found := _log_below(path)) is not None:
            seen.add(os.path.realpath(path))
            yield found
        elif path.is_file() and path.stat().st_size <= LARGEST:
            others.append(path)


def _log_below(path: Path) -> _Found | None:
    """Return the log or CSV in a file that was not named, or None.

    A binary file is recognised by its beginning, because checkpoints beside logs have gigabytes.
    """
    if path.stat().st_size > LARGEST:
        return None
    begun = _begun(path)
    kind = _kind(begun if begun.binary else _file(path))
    if kind is None and path.suffix.lower() != ".csv":
        return None
    file = _file(path)
    return _Found(place=path, files=(file,), format=kind or _format_of(file))


def _begun(path: Path, size: int = HEAD) -> LogFile:
    with path.open("rb") as stream:
        return LogFile(path=path, content=stream.read(size))


def _file(path: Path) -> LogFile:
    """Raises ValueError for what cannot be read, is neither a file nor a pipe, or has more than LARGEST bytes of text."""
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise ValueError(f"{path} is neither a file, a folder nor a pipe: give a log")
        with path.open("rb") as stream:
            content = stream.read(LARGEST + 1)
            file = LogFile(path=path, content=content)
            if len(content) > LARGEST and not (file.binary and stat.S_ISREG(mode)):
                raise ValueError(
                    f"{path} has more than {LARGEST / 2**30:.1f} GiB: no log that is read here has so much"
                )
            return replace(file, content=content + stream.read()) if len(content) > LARGEST else file
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def _formats() -> list[LogFormat]:
    """Return all formats, CSV last, because only its first line identifies it."""
    return [FORMATS.load(name) for name in sorted(FORMATS.names(), key=lambda name: (name == "csv", name))]


def _kind(file: LogFile) -> LogFormat | None:
    """Return the first format that recognises the file, or None; text formats are not asked about binary files."""
    return next((one for one in _formats() if (one.binary or not file.binary) and one.recognises(file)), None)


def _format_of(file: LogFile) -> LogFormat | None:
    """Return the format of a named file; None for a table of several runs. Raises ValueError if it is neither."""
    if not file.content.strip():
        raise ValueError(f"{file.path} is empty: nothing was logged")
    if (kind := _kind(file)) is not None:
        return kind
    if file.binary:
        raise ValueError(f"{file.path} is not a log that te-bench reads: {_known()}")
    return None


def _known() -> str:
    return ", ".join(form.title for form in _formats()) + ", or a CSV of several"


def _names(found: Sequence[_Found]) -> list[str]:
    """Return the runs' paths below the folder that they share."""
    if len(found) == 1:
        return [found[0].place.name]
    shared = os.path.commonpath([one.place.absolute().parent for one in found])
    return [str(one.place.absolute().relative_to(shared)) for one in found]


def _log(found: _Found, name: str) -> _Log:
    assert found.format is not None
    series = found.format.read(found.files)
    if not series.losses:
        folders = found.place.is_dir() and any(path.is_dir() for path in found.place.iterdir())
        below = ". Are its losses in folders below? Name those" if folders else ""
        raise ValueError(f"{found.place} contains no numbers: it was read as {found.format.title}{below}")
    return _Log(name=name, place=found.place, series=series)


def _run(log: _Log, metric: str | None, orders: Sequence[Sequence[str]]) -> _Run:
    names = _chosen(log, metric, orders)
    validation, training = (name if name is None else _loss(log, name) for name in names)
    return _Run(log=log, validation=validation, training=training if log.series.whole else None)


def _chosen(log: _Log, metric: str | None, orders: Sequence[Sequence[str]]) -> tuple[str | None, str | None]:
    """Return the names of the validation and of the training loss; `metric` takes the place of its kind."""
    series, by_name = log.series, log.called
    if metric is not None:
        if plain(metric) not in by_name:
            raise ValueError(f"--metric {metric}: {log.place} has no such value; it has {_listed(list(series.losses))}")
        name = by_name[plain(metric)]
        return (None, name) if plain(metric) in TRAINING and series.whole else (name, None)
    validation, training = (next((by_name[name] for name in order if name in by_name), None) for order in orders)
    if validation is None and (training is None or not series.whole):
        raise ValueError(
            f"{log.place}: which loss is to be judged? It has {_listed(list(series.losses))}: "
            + ("say --metric NAME" if series.whole else "the last of each alone, so export the run's history as CSV")
        )
    return validation, training


def _listed(names: Sequence[str]) -> str:
    """Return the first names in words, losses before others."""
    return first_of(sorted(names, key=lambda name: not is_loss(name)), NAMED)


def _loss(log: _Log, name: str) -> _Loss:
    """Return the points in order of steps.

    A resumed run goes back to its checkpoint; the values that it logs again count. Logs of several ranks or micro-batches
    have several losses at every step; their mean counts.
    """
    points, again = _unfiltered(log, name), False
    met = [two for one, two in pairwise(points) if one[0] == two[0] and one[1] != two[1]]
    if several := len({step for step, _ in met}) > len({step for step, _ in points}) / 2:
        ranks = [[*group] for _, group in groupby(points, key=itemgetter(0))]
        points = [(group[0][0], sum(loss for _, loss in group) / len(group)) for group in ranks]
    kept: list[tuple[float, float]] = []
    for step, loss in points:
        while kept and kept[-1][0] >= step:
            again |= kept.pop() != (step, loss)
        kept.append((step, loss))
    if not all(abs(step) < math.inf for step, _ in kept):
        raise ValueError(f"{log.place}: a step is not a finite number")
    curve = Curve(step=tuple(step for step, _ in kept), loss=tuple(loss for _, loss in kept))
    return _Loss(name=name, curve=curve, again=again, several=several, blank=log.series.blank.get(name))


def _unfiltered(log: _Log, name: str) -> list[tuple[float, float]]:
    """Return the points. Hugging Face's Trainer writes 0 for NaN; a 0 with a non-finite gradient norm becomes NaN again."""
    norms = (points for norm, points in log.series.losses.items() if plain(norm).endswith("grad_norm"))
    broke = {step for points in norms for step, value in points if not math.isfinite(value)}
    return [(step, math.nan if loss == 0 and step in broke else loss) for step, loss in log.series.losses[name]]


def _judged(arm: _Arm, runs: Sequence[_Run], validated: bool, metric: str | None, passed_over: str | None) -> Losses:
    curves, broke, short = {}, dict[str, str](), dict[str, str]()
    chosen: list[tuple[_Run, _Loss]] = []
    numbered = zip(_seeds(arm.logs), runs, strict=True)
    for seed, run in sorted(numbered, key=lambda one: (int(one[0]), "") if one[0].isdecimal() else (0, one[0])):
        loss = run.validation if validated else run.training
        if run.training is not None:
            curve = run.training.curve
            broke |= broken(Losses(source="", final={seed: curve.loss[-1]}, curves={seed: curve}, seeded=True))
        if loss is None and seed not in broke:
            raise ValueError(f"{arm.source}: {run.log.name} has no {'validation' if validated else 'training'} loss")
        if loss is not None:
            chosen.append((run, loss))
            blank = [f"{loss.blank} in {arm.source}; if that is NaN, write NaN"] if loss.blank else []
            short |= {seed: "; ".join(why)} if (why := [*blank, *run.log.series.notes]) else {}
        curves[seed] = loss.curve if loss else Curve(step=(0.0,), loss=(float("nan"),))
    found = of_curves(arm.source, curves, (), broke, short)
    which = metric or ("validation loss" if validated else "training loss")
    called = _called([loss.name for _, loss in chosen], which)
    named = which if plain(called) == plain(which) else f"{which} ({called})"
    judged = f"the last {named}" if validated else f"the mean {named} over the last tenth of the steps"
    final = found.final if validated else {seed: late_mean(curve) for seed, curve in curves.items()}
    whole = all(run.log.series.whole for run in runs)
    ended = curves.keys() - broken(found).keys()  # a diverged run may have been stopped early
    told = _notes(arm, chosen, validated)
    return replace(
        found,
        notes=(*([passed_over] if passed_over else []), *arm.notes, *told),
        final=final,
        curves=found.curves if whole else {},
        stops=frozenset() if whole else frozenset(curves[seed].step[-1] for seed in ended),
        digests=arm.digests,
        judged=judged,
        metric=called,
        training=not validated,
    )


def _called(names: Sequence[str], which: str) -> str:
    """Return the arm's name of its loss, or `which` if names differ or say only "loss"."""
    told = {plain(name): name for name in names}
    return which if len(told) != 1 or "loss" in told else next(iter(told.values()))


def _notes(arm: _Arm, chosen: Sequence[tuple[_Run, _Loss]], validated: bool) -> list[str]:
    def those(holds: Callable[[_Run, _Loss], bool]) -> str | None:
        names = [run.log.name for run, loss in chosen if holds(run, loss)]
        return f"{arm.source} ({_listed(names)})" if names else None

    notes = [note for run, _ in chosen for note in run.log.series.notes]
    blank = [
        f"{arm.source} ({run.log.name}): {loss.blank}; if that is NaN, write NaN" for run, loss in chosen if loss.blank
    ]
    notes += blank[:NAMED]
    if where := those(lambda _, loss: loss.again):
        notes.append(f"{where}: losses were logged again, as by a resumed run: the later ones count")
    if where := those(lambda _, loss: loss.several):
        notes.append(f"{where}: every step has several losses, as of several ranks: their mean counts")
    if where := those(lambda run, loss: validated and _ends_early(loss.curve, run.training)):
        notes.append(f"{where}: training went on after the last validation, which is judged")
    if where := those(lambda _, loss: 0.0 in loss.curve.loss):
        notes.append(f"{where}: a loss is exactly 0, which Hugging Face's Trainer writes where it is NaN")
    return notes


def _ends_early(validation: Curve, training: _Loss | None) -> bool:
    return training is not None and validation.step[-1] < training.curve.late


def _seeds(logs: Sequence[_Log]) -> list[str]:
    """Return the seeds in the logs, else those in the runs' names, else the names."""
    said = [log.series.seed for log in logs if log.series.seed is not None]
    return said if len(set(said)) == len(logs) else seeds_of([log.name for log in logs])
