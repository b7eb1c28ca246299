"""Show the history as tables, and as a page: history.html (one file that loads nothing), history.md and figures/."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from te_bench.reports.files import write_folder
from te_bench.reports.history.change_points import SHORTEST
from te_bench.reports.history.series import History, TimeSeries
from te_bench.reports.page import tables, text
from te_bench.reports.page.history_figures import of_history, percent_change
from te_bench.reports.page.render import figure_files
from te_bench.reports.page.table import Column, Table, Value, number, word
from te_bench.reports.page.template import rendered

_ONLY = "Name for --only"
_WIDE = ("Machine", "Commits", "First level, ms", _ONLY)  # columns that do not fit on a terminal


def changes(history: History) -> Table:
    """Return the table of all changes of level, the greatest slow-down first."""
    found = [(one, change) for one in history.series for change in one.changes]
    found.sort(key=lambda pair: -pair[1].ratio)
    rows = [
        {
            "Configuration": word(one.name),
            "Machine": word(one.where),
            "Commit (or one of)": word(one.commits(change)),
            "Change of time": Value(text=percent_change(change.ratio), sort=change.ratio),
            "95 % interval": Value(
                text=f"[{percent_change(change.low)}, {percent_change(change.high)}]", sort=change.low
            ),
        }
        for one, change in found
    ]
    return _table("changes", "Changes of level", rows, _note(history))


def _table(name: str, caption: str, rows: Sequence[Mapping[str, Value]], note: str) -> Table:
    """Return a table of rows {title: value}; all columns are kept, and the first three and _ONLY are text."""
    columns = tuple(
        Column(title=title, numeric=place > 2 and title != _ONLY) for place, title in enumerate(rows[0] if rows else ())
    )
    values = tuple(tuple(row.values()) for row in rows)
    return Table(name=name, caption=caption, columns=columns, rows=values, note=note)


def _note(history: History) -> str:
    searched = _searched(history)
    expected = searched * history.alpha
    return (
        "Found by optimal partitioning (ruptures) of the logarithms, the penalty simulated so that a series of Gaussian "
        f"noise shows a change in at most {text.percent(history.alpha)} of cases: over the {searched} series long "
        f"enough to be searched ({SHORTEST} points) at most {expected:.2g} false changes are expected. The interval of a "
        "change's size takes its place as given."
    )


def series(history: History) -> Table:
    """Return the table of all series: commits, noise, first and last level, and changes."""
    note = (
        "Noise is relative, from the steps between neighbours; a dash: too short to be searched for changes, the levels are "
        "the first and the last point."
    )
    return _table("series", "Series", [_row(one) for one in history.series], note)


def _row(one: TimeSeries) -> dict[str, Value]:
    commits = list(dict.fromkeys(point.commit for point in one.points))
    noise = one.found.noise
    levels = [point.seconds for point in one.points] if noise is None else one.found.levels
    return {
        "Configuration": word(one.name),
        "Machine": word(one.where),
        "Commits": word(text.span(commits[0], commits[-1])),
        "Points": number(len(one.points), text.count),
        "Noise": Value(text=text.MISSING if noise is None else f"{100 * noise:.2g} %", sort=noise),
        "First level, ms": number(levels[0], text.milliseconds),
        "Last level, ms": number(levels[-1], text.milliseconds),
        "Changes": number(len(one.changes), text.count),
        _ONLY: word(one.only),
    }


def _searched(history: History) -> int:
    return sum(one.found.noise is not None for one in history.series)


def headline(history: History) -> str:
    """Return the history in a sentence."""
    found = [(one, change) for one in history.series for change in one.changes]
    n, searched = len(history.series), _searched(history)
    if not searched:
        none = f"None of {n} series has" if n > 1 else "The series does not have"
        return f"{none} the {SHORTEST} points that a search takes."
    of = f"{n} series" if n > 1 else "one series"
    of = f"{searched} of {n} series (the others have fewer than {SHORTEST} points)" if searched < n else of
    if not found:
        return f"No change of level in {of}."
    worst, change = max(found, key=lambda pair: pair[1].ratio)
    number = f"{len(found)} changes" if len(found) > 1 else "One change"
    if change.ratio <= 1:
        return f"{number} of level in {of}, none of them slower."
    slower = percent_change(change.ratio)
    return f"{number} of level in {of}; the greatest slow-down: {slower} in {worst.name} at {worst.commits(change)}."


def terminal(history: History) -> str:
    """Return headline and tables in plain text for a terminal of 100 columns."""
    lines = [headline(history)]
    for table in (series(history), changes(history)):
        if table.rows:
            narrow = table.only([column.title for column in table.columns if column.title not in _WIDE])
            lines += ["", table.caption, *tables.terminal(narrow)]
    return "\n".join(lines) + "\n"


def write_page(history: History, out: Path) -> Path:
    """Write the page under `out`, and return the path of its history.html. Raises ValueError if it cannot be written."""
    drawings = of_history(history)
    content = {
        "headline": headline(history),
        "runs": history.runs,
        "drawings": drawings,
        "tables": [table for table in (changes(history), series(history)) if table.rows],
    }
    files = {
        "history.md": rendered("history.md.j2", content),
        **figure_files(drawings),
        "history.html": rendered("history.html.j2", content),
    }
    write_folder(out, files, "history")
    return out / "history.html"
