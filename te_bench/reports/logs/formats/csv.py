"""A CSV of one run: Weights & Biases' history, TensorBoard's download, or a step and its losses.

Source: the columns of wandb's Run.history() and of TensorBoard's "download data" (Wall time, Step, Value). A CSV that holds
several runs, or final losses, is no log: `convergence/loss_csv.py` reads it.
"""

import re
from collections.abc import Sequence

from te_bench.reports.logs import LogFile, LogFormat, Series
from te_bench.reports.logs.names import TRAINING, is_loss, plain
from te_bench.reports.logs.rows import STEP, series_of
from te_bench.reports.logs.table import SEED, TIMES, WANDB, number_at, table_of

TAG = r"tag-(.+)$"  # of a download's name: run-bf16_s0-tag-train_loss.csv


def _read(files: Sequence[LogFile]) -> Series:
    [file] = files
    found = _history(file)
    assert found is not None
    rows, columns = found
    named = {name: name if is_loss(name) else _unnamed(file) for name in columns}
    renamed = [{named.get(name, name): value for name, value in row.items()} for _, row in rows]
    return Series(
        losses={name: sorted(points, key=lambda point: point[0]) for name, points in series_of(renamed).items()}
    )


def _unnamed(file: LogFile) -> str:
    """What the one column that is called Value or so holds: a training loss where the file's name says it."""
    tag = re.search(TAG, file.path.stem)
    return "train_loss" if tag and plain(tag[1]) in TRAINING else "val_loss"


def _history(file: LogFile) -> tuple[list[tuple[int, dict[str, float]]], tuple[str, ...]] | None:
    """The rows of a CSV of one run, (line, {column: number}), and its columns in lower case; None for any other CSV.

    One run has a step, one column beside it or some with "loss" in their names, and no seeds. Raises ValueError, with the
    line, for a step or a loss that is no number.
    """
    try:
        table = table_of(file)
    except ValueError:
        return None
    names = tuple(name.lower() for name in table.header or ())
    step = table.column(STEP)
    if step is None or table.column(SEED) is not None or any(WANDB in name for name in names):
        return None
    others = [c for c, name in enumerate(names) if name not in STEP and not name.startswith(TIMES)]
    losses = [c for c in others if "loss" in names[c]] or (others if len(others) == 1 else [])
    if not losses:
        return None
    wanted = [c for c, name in enumerate(names) if name in STEP or c in losses]
    rows = [(line, {names[c]: number_at(table, line, row[c]) for c in wanted if row[c]}) for line, row in table.rows]
    return rows, tuple(names[c] for c in losses)


FORMAT = LogFormat(title="a CSV of one run", recognises=lambda file: _history(file) is not None, read=_read)
