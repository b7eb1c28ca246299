"""Generate tables and a headline in hand-written Markdown from a journal, so that its numbers are the records' numbers.

<!-- te-bench:table ../results/h200/nanogpt ladder -->
<!-- /te-bench:table -->

"headline" is a sentence and a picture, which is written into the folder. "sentence" is only the sentence.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from te_bench.reports.files import write_atomically
from te_bench.reports.group_result import GroupResult, load_report
from te_bench.reports.page import tables
from te_bench.reports.page.table import Table

if TYPE_CHECKING:
    from te_bench.reports.page.drawing import Drawing

_START = re.compile(r"^<!-- te-bench:table (?P<directory>\S+) (?P<name>\S+) -->[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Headline:
    """An answer as a sentence in Markdown, and a picture."""

    sentence: str
    picture: "Drawing"


#: {name: function that makes a table, headline or sentence of a folder}.
More = Mapping[str, Callable[[Path], Table | Sequence[Table] | Headline | str]]
CAPABILITIES, GPUS, HEADLINE, SENTENCE = "capabilities", "gpus", "headline", "sentence"
_END = "<!-- /te-bench:table -->"


def embed(page: Path, *, check: bool, more: More = MappingProxyType({})) -> bool:
    """Update every generated table of a Markdown file. Return True, or with `check` whether the file was up to date.

    With `check` nothing is written. more: tables of folders without a journal, by name; those of a list have captions and
    notes.

    Raises ValueError for an unknown table, a marker without its end, a journal that cannot be read, and a file without any
    marker.
    """
    try:
        before = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {page}: {error}") from error
    after, position = "", 0
    pictures: dict[Path, bytes] = {}
    load = functools.cache(lambda directory: load_report([directory]).groups)  # several tables may use one run
    for marker in _START.finditer(before):
        if marker.start() < position:
            raise ValueError(f"{page}: a te-bench:table begins inside another one: add {_END} between them")
        end = before.find(_END, marker.end())
        if end < 0:
            raise ValueError(f"{page}: {marker.group()} has no end: add a line {_END}")
        directory, name = marker["directory"], marker["name"]
        run = page.parent / directory
        found = _made(load, run, name, more)
        if isinstance(found, Headline):
            file = f"{found.picture.name}.svg"
            pictures[run / file] = found.picture.svg
            found = f"{found.sentence}\n\n![{tables.escape(found.picture.alt)}]({directory}/{file})\n"
        after += f"{before[position : marker.end()]}\n\n{found}\n"
        position = end
    if position == 0:
        raise ValueError(f"{page} holds no generated table: add <!-- te-bench:table DIR NAME --> and {_END}")
    after += before[position:]
    drawn = all(path.is_file() and path.read_bytes() == svg for path, svg in pictures.items())
    if check or (after == before and drawn):
        return after == before and drawn
    for path, svg in pictures.items():
        write_atomically(path, svg)
    write_atomically(page, after.encode())
    return True


def _made(load: Callable[[Path], Sequence[GroupResult]], directory: Path, name: str, more: More) -> str | Headline:
    """Return a headline, or all tables of one name of a run as Markdown, with their groups' titles if there are several."""
    if name in (HEADLINE, SENTENCE):
        from te_bench.reports.page import readme_headline

        [result] = load(directory)
        if name == SENTENCE:
            return f"{readme_headline.sentence(result)}\n"
        return Headline(sentence=readme_headline.sentence(result), picture=readme_headline.figure(result))
    if name in more:
        made = more[name](directory)
        if isinstance(made, (Headline, str)):
            return made
        return tables.markdown(made) if isinstance(made, Table) else "\n".join(map(_captioned, made))
    if name in (CAPABILITIES, GPUS):  # from backends, not from a run
        from te_bench.reports.page import attention_capabilities, gpus

        return tables.markdown({CAPABILITIES: attention_capabilities, GPUS: gpus}[name].table())
    if name not in tables.TABLES:
        raise ValueError(
            f"unknown table {name!r}. Known: {', '.join([*tables.TABLES, *more, CAPABILITIES, GPUS, HEADLINE, SENTENCE])}."
        )
    found = [(result.group, table) for result in load(directory) for table in tables.tables_of(result, name)]
    if not found:
        raise ValueError(f"{directory} holds nothing for a table {name!r}")
    if len(found) == 1:
        return tables.markdown(found[0][1])
    titled = [f"**{tables.escape(t.caption)}, {tables.escape(g.where)}**\n\n{tables.markdown(t)}" for g, t in found]
    return "\n".join(titled)


def _captioned(table: Table) -> str:
    note = f"\n{tables.escape(table.note)}\n" if table.note else ""
    return f"**{tables.escape(table.caption)}**\n\n{tables.markdown(table)}{note}"
