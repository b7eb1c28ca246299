"""Tables in hand-written Markdown, generated from a journal, so that a README's numbers are the records' numbers.

<!-- te-bench:table ../results/h200/nanogpt ladder -->
<!-- /te-bench:table -->
"""

import re
from pathlib import Path

from te_bench.reports import tables
from te_bench.reports.files import write_atomically
from te_bench.reports.rows import load_results

_START = re.compile(r"^<!-- te-bench:table (?P<directory>\S+) (?P<name>\S+) -->[ \t]*$", re.MULTILINE)
SELF_TEST, CAPABILITIES = "self_test", "capabilities"
_END = "<!-- /te-bench:table -->"


def embed(page: Path, *, check: bool) -> bool:
    """Bring every generated table of a Markdown file up to date; True when it is, False when `check` finds it is not.

    With `check` nothing is written. Raises ValueError for an unknown table, a marker without its end, a journal that
    cannot be read, and a file without any marker.
    """
    try:
        before = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {page}: {error}") from error
    after, position = "", 0
    for marker in _START.finditer(before):
        if marker.start() < position:
            raise ValueError(f"{page}: a te-bench:table begins inside another one: add {_END} between them")
        end = before.find(_END, marker.end())
        if end < 0:
            raise ValueError(f"{page}: {marker.group()} has no end: add a line {_END}")
        content = _tables(page.parent / marker["directory"], marker["name"])
        after += f"{before[position : marker.end()]}\n\n{content}\n"
        position = end
    if position == 0:
        raise ValueError(f"{page} holds no generated table: add <!-- te-bench:table DIR NAME --> and {_END}")
    after += before[position:]
    if check or after == before:
        return after == before
    write_atomically(page, after.encode())
    return True


def _tables(directory: Path, name: str) -> str:
    """All tables of one name of a run, each under its group's title when there are several."""
    if name == SELF_TEST:  # of a gate, which leaves answers and no journal
        from te_bench.reports import self_test

        return tables.markdown(self_test.table(self_test.stored(directory)))
    if name == CAPABILITIES:  # of the attention backends, which say it themselves
        from te_bench.reports import attention_capabilities

        return tables.markdown(attention_capabilities.table())
    if name not in tables.TABLES:
        raise ValueError(f"unknown table {name!r}. Known: {', '.join([*tables.TABLES, SELF_TEST, CAPABILITIES])}.")
    groups = load_results([directory]).groups
    found = [(group, table) for group in groups for table in tables.of_group(group, name)]
    if not found:
        raise ValueError(f"{directory} holds nothing for a table {name!r}")
    if len(found) == 1:
        return tables.markdown(found[0][1])
    titled = [f"**{tables.escape(t.caption)}, {tables.escape(g.where)}**\n\n{tables.markdown(t)}" for g, t in found]
    return "\n".join(titled)
