"""The history as tables, and as a page: history.html (one file, nothing fetched), history.md and figures/."""

from pathlib import Path

from te_bench.reports.files import write_folder
from te_bench.reports.history.series import History, TimeSeries
from te_bench.reports.page import tables, text
from te_bench.reports.page.history_figures import of_history, percent_change
from te_bench.reports.page.render import figure_files
from te_bench.reports.page.table import Column, Table, Value, word
from te_bench.reports.page.template import rendered

_WIDE = ("Machine", "Commits", "First level, ms")  # columns that a terminal has no room for


def changes(history: History) -> Table:
    """Every change of level, the greatest slow-down first."""
    found = [(one, change) for one in history.series for change in one.changes]
    found.sort(key=lambda pair: -pair[1].ratio)
    rows = tuple(
        (
            word(one.name),
            word(one.where),
            word(one.commits(change)),
            Value(text=percent_change(change.ratio), sort=change.ratio),
            Value(text=f"[{percent_change(change.low)}, {percent_change(change.high)}]", sort=change.low),
        )
        for one, change in found
    )
    titles = ("Configuration", "Machine", "Commit (or one of)", "Change of time", "95 % interval")
    return Table(
        name="changes",
        caption="Changes of level",
        columns=tuple(Column(title=title, numeric=place > 2) for place, title in enumerate(titles)),
        rows=rows,
        note=_note(history),
    )


def _note(history: History) -> str:
    searched = [one for one in history.series if one.found.noise is not None]
    expected = len(searched) * history.alpha
    return (
        "Found by optimal partitioning (ruptures) of the logarithms, the penalty simulated so that a series of Gaussian "
        f"noise shows a change in at most {text.percent(history.alpha)} of cases: over the {len(searched)} series long "
        f"enough to be searched (6 points) at most {expected:.2g} false changes are expected. The interval of a change's "
        "size takes its place as given."
    )


def series(history: History) -> Table:
    """Every series: how many commits, its noise, its first and last level, and its changes."""
    titles = ("Configuration", "Machine", "Commits", "Points", "Noise", "First level, ms", "Last level, ms", "Changes")
    return Table(
        name="series",
        caption="Series",
        columns=tuple(Column(title=title, numeric=place > 2) for place, title in enumerate(titles)),
        rows=tuple(_row(one) for one in history.series),
        note="Noise is relative, from the steps between neighbours; a dash: too short to be searched for changes.",
    )


def _row(one: TimeSeries) -> tuple[Value, ...]:
    commits = list(dict.fromkeys(point.commit for point in one.points))
    levels = one.found.levels
    return (
        word(one.name),
        word(one.where),
        word(commits[0] if len(commits) == 1 else f"{commits[0]} to {commits[-1]}"),
        Value(text=text.count(len(one.points)), sort=len(one.points)),
        Value(text=text.MISSING if one.found.noise is None else f"{100 * one.found.noise:.2g} %", sort=one.found.noise),
        Value(text=text.milliseconds(levels[0]), sort=levels[0]),
        Value(text=text.milliseconds(levels[-1]), sort=levels[-1]),
        Value(text=text.count(len(one.changes)), sort=len(one.changes)),
    )


def headline(history: History) -> str:
    """What the history says in a sentence."""
    found = [(one, change) for one in history.series for change in one.changes]
    n = len(history.series)
    of = f"{n} series" if n > 1 else "one series"
    if not found:
        return f"No change of level in {of}."
    worst, change = max(found, key=lambda pair: pair[1].ratio)
    number = f"{len(found)} changes" if len(found) > 1 else "One change"
    if change.ratio <= 1:
        return f"{number} of level in {of}, none of them slower."
    slower = percent_change(change.ratio)
    return f"{number} of level in {of}; the greatest slow-down: {slower} in {worst.name} at {worst.commits(change)}."


def terminal(history: History) -> str:
    """Headline and tables in plain text for a terminal of 100 columns."""
    lines = [headline(history)]
    for table in (series(history), changes(history)):
        if table.rows:
            narrow = table.only([column.title for column in table.columns if column.title not in _WIDE])
            lines += ["", table.caption, *tables.terminal(narrow)]
    return "\n".join(lines) + "\n"


def write_page(history: History, out: Path) -> Path:
    """Write the page under `out`; the path of its history.html. Raises ValueError when `out` cannot be written."""
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
