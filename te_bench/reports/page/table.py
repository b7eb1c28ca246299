"""The parts of a report's table: values that know how they sort, columns, rows."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from te_bench.reports.analysis import ranking
from te_bench.reports.analysis.measures import Ratio
from te_bench.reports.analysis.ranking import StepRanking
from te_bench.reports.analysis.rows import Configuration, printable
from te_bench.reports.analysis.steps import MeasuredStep
from te_bench.reports.page import text


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A cell's text, and what it sorts by; None sorts last. detail: what a page shows under the pointer."""

    text: str
    sort: float | str | None
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A heading with its unit; numeric columns are aligned to the right."""

    title: str
    numeric: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of values under columns; caption: what the table holds; note: how to read it."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    note: str = ""

    def only(self, titles: Collection[str]) -> "Table":
        """Return the table with only the columns of these titles."""
        kept = [i for i, column in enumerate(self.columns) if column.title in titles]
        columns = tuple(self.columns[i] for i in kept)
        return replace(self, columns=columns, rows=tuple(tuple(row[i] for i in kept) for row in self.rows))


def word(content: object) -> Value:
    """Return a text value on one line; a dash for None and ""."""
    shown = printable(str(content)) if content not in (None, "") else text.MISSING
    return Value(text=shown, sort=None if shown == text.MISSING else shown)


def number(value: float | None, show: Callable[[float | None], str] = text.plain) -> Value:
    return Value(text=show(value), sort=value)


def speedup(ratio: Ratio | None, remark: str = "") -> Value:
    """Return a ratio with its interval, followed by a remark; a dash for None."""
    return Value(text=text.speedup(ratio) + remark, sort=ratio.value) if ratio else word(None)


def rank(found: StepRanking, step: MeasuredStep) -> Value:
    """Return the ranking's word for a step, sorted from the fastest on; a dash if nothing was ranked."""
    said = found.word(step) if found.fastest else None
    place = ranking.WORDS.index(said) if said in ranking.WORDS else None
    return Value(text=said or text.MISSING, sort=place)


def repetitions(configuration: Configuration) -> Value:
    """Return n_ok/n_planned of a configuration."""
    return Value(text=f"{len(configuration.ok)}/{len(configuration.rows)}", sort=len(configuration.ok))


def label(configuration: Configuration, *, baseline: bool = False) -> Value:
    """Return a configuration's name with the attention that `auto` chose, and its outcome if no repetition ended ok."""
    chosen = sorted({str(record.work["chosen"]) for record in configuration.ok if "chosen" in record.work})
    remarks = [*(["baseline"] if baseline else []), *(f"chose {name}" for name in chosen)]
    remarks += [] if configuration.outcome == "ok" else [configuration.outcome]
    shown = word(configuration.label + (f" ({', '.join(remarks)})" if remarks else ""))
    return replace(shown, detail=configuration.specification)


ENERGY_NOTE = "Joules: of all GPUs, by their own counters, over at least three seconds."


def ranking_notes(found: StepRanking, steps: Sequence[MeasuredStep]) -> list[str]:
    """Return how to read the speed-ups of these steps and the words of their ranking."""
    pairs = [step.speedup.n for step in steps if step.speedup and not step.is_baseline]
    notes = [interval_note(pairs)] if pairs else []
    if found.reason:
        notes.append(f"Not distinguished: paired runs do not tell these from the fastest ({found.reason}).")
    if found.slower:
        notes.append("Slower: than the fastest, by paired t-tests at 5 % over all comparisons.")
    return notes


def interval_note(pairs: Sequence[int]) -> str:
    """Return how to read speed-ups over so many pairs each."""
    if max(pairs) < 2:
        return "n = 1: one run of each, so speed-ups have no interval."
    return "Speed-ups are geometric means over paired seeds with 95 % t-intervals."


def kernel_rows(
    configuration: Configuration,
    kernels: Mapping[str, float],
    kind_of: Callable[[str], str],
    most: int,
    titles: tuple[str, str],
) -> list[dict[str, Value]]:
    """Return rows of a configuration's longest kernels: name, kind, kernel, ms; titles: of the first and last column."""
    return [
        {
            titles[0]: word(configuration.label),
            "Kind": word(kind_of(name)),
            "Kernel": word(text.shortened(name, 80)),
            titles[1]: number(seconds, text.milliseconds),
        }
        for name, seconds in list(kernels.items())[:most]
    ]


def table_of(
    name: str, caption: str, rows: Sequence[Mapping[str, Value]], note: str = "", text_columns: int = 1
) -> Table | None:
    """Return a table as `filled` does; None without rows."""
    return filled(name, caption, rows, note, text_columns) if rows else None


def filled(
    name: str, caption: str, rows: Sequence[Mapping[str, Value]], note: str = "", text_columns: int = 1
) -> Table:
    """Return a table of one or more rows {title: value}: first columns text, without numeric ones that have no values."""
    columns = [Column(title=title, numeric=place >= text_columns) for place, title in enumerate(rows[0])]
    kept = [one for one in columns if not one.numeric or any(row[one.title].sort is not None for row in rows)]
    values = tuple(tuple(row[one.title] for one in kept) for row in rows)
    return Table(name=name, caption=caption, columns=tuple(kept), rows=values, note=note)
