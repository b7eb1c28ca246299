"""Read tables of text: a CSV's header and cells, with line numbers for messages."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from te_bench.reports.logs import UTF_16, LogFile, decimals
from te_bench.reports.logs.rows import STEP

SEED = ("seed", "run", "run_id")
WANDB = " - "  # between the run's name and the metric's in W&B's columns
TIMES = ("relative time", "wall time", "_runtime", "_timestamp", "tokens", "epoch")  # x-axes other than the step
SPAN = ("__min", "__max")  # W&B's companion columns: the extremes of the points that a row stands for


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The cells of a CSV file as text."""

    path: Path
    header: tuple[str, ...] | None
    rows: tuple[tuple[int, tuple[str, ...]], ...]  # line number, cells
    gap: int | None = None  # a line between rows that has nothing, or a loss behind a #
    torn: tuple[str, ...] | None = None  # the last line's cells, where it has no end and is left out

    def column(self, names: Sequence[str]) -> int | None:
        lower = [name.lower() for name in self.header or ()]
        return next((lower.index(name) for name in names if name in lower), None)


def table_of(file: LogFile) -> Table:
    """Return the cells of a file. Raises ValueError, with the line, if the file is not a table of text."""
    path, content = file.path, file.content
    try:
        text = content.decode("utf-16" if content[:2] in UTF_16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {path}: it is not UTF-8 text; export or save it as CSV in UTF-8") from error
    lines = [
        (n, line)
        for n, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not lines:
        raise ValueError(f"{path} is empty: give one loss a line, or columns step, loss, seed")
    # If two marks are equally frequent, not the comma: it may be a decimal comma.
    delimiter = max("\t;,", key=lambda mark: (lines[0][1].count(mark), mark == "," and mark not in lines[0][1]))
    rows = _cells(path, lines, delimiter)
    head = rows[0][1]
    wide = len(head) > 2 and head[0].lower() in STEP and all(map(str.isdigit, head[1:]))  # columns named by seeds
    header = rows.pop(0)[1] if wide or not any(map(numeric, head)) else None
    width = len(header or rows[0][1])
    torn = rows.pop()[1] if len(rows) > 1 and not text.endswith(("\n", "\r")) and _torn(rows, width) else None
    for n, row in rows:
        if len(row) != width:
            comma = ". A comma separates cells: write decimals with a point" if delimiter == "," else ""
            raise ValueError(f"{path}, line {n}: {len(row)} cells where the first line has {width}{comma}")
    if not rows:
        raise ValueError(f"{path} has a header and no rows: nothing was logged")
    between = dict(enumerate(text.splitlines()[rows[0][0] - 1 : rows[-1][0]], start=rows[0][0]))
    kept = {n for n, _ in rows}
    left_out = {n: line.strip().lstrip("# ") for n, line in between.items() if n not in kept}
    gap = next((n for n, line in left_out.items() if not line or numeric(line)), None)
    return Table(path=path, header=header, rows=tuple(rows), gap=gap, torn=torn)


def _torn(rows: Sequence[tuple[int, tuple[str, ...]]], width: int) -> bool:
    """Whether the last row lacks cells, or its last cell lacks decimals that every one above it has, or the whole number."""
    last = rows[-1][1]
    above = [row[len(last) - 1] for _, row in rows[:-1] if len(row) == width]
    if len(last) < width:
        return True
    if len(last) > width or not last[-1] or not any(above) or not all(numeric(cell) for cell in above if cell):
        return False
    digits = decimals(last[-1])
    known = [one for cell in above if cell and (one := decimals(cell)) is not None]
    return not numeric(last[-1]) or (digits is not None and digits < min(known, default=0))


def _cells(path: Path, lines: Sequence[tuple[int, str]], delimiter: str) -> list[tuple[int, tuple[str, ...]]]:
    reader = csv.reader((line for _, line in lines), delimiter=delimiter, skipinitialspace=True)
    rows: list[tuple[int, tuple[str, ...]]] = []
    try:
        for row in reader:
            n = lines[len(rows)][0]
            if reader.line_num != len(rows) + 1:
                raise ValueError(
                    f"{path}, line {n}: a cell does not end on its line: close its quote, take out line breaks"
                )
            rows.append((n, tuple(cell.strip() for cell in row)))
    except csv.Error as error:
        raise ValueError(f"{path}, line {lines[reader.line_num - 1][0]}: {error}") from error
    return rows


def number(cell: str) -> float | None:
    """Return the cell as a number, or None if it is not one."""
    try:
        return None if "_" in cell else float(cell)  # Python reads 3_28 as 328
    except ValueError:
        return None


def numeric(cell: str) -> bool:
    """Return whether the cell is a number, even with a decimal comma, which messages then mention."""
    return number(cell.replace(",", ".")) is not None


def number_at(table: Table, line: int, cell: str) -> float:
    """Return the cell as a number. Raises ValueError, with the line, if it is empty or text."""
    value = number(cell)
    if not cell:
        raise ValueError(
            f"{table.path}, line {line}: no loss; write nan for a run that diverged, or leave the line out"
        )
    if value is None:
        comma = ": write decimals with a point, not a comma" if numeric(cell) else ""
        raise ValueError(f"{table.path}, line {line}: {cell!r} is not a number{comma}")
    return value


def step_at(table: Table, line: int, cell: str) -> float:
    """Return the cell as a step. Raises ValueError, with the line, if it is empty, text, NaN or infinite."""
    step = number_at(table, line, cell)
    if not math.isfinite(step):
        raise ValueError(f"{table.path}, line {line}: the step is {cell}: give a finite number")
    return step
