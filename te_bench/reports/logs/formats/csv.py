"""Read a CSV of one run: Weights & Biases' history, TensorBoard's download, or a step and its losses.

Source: the columns of wandb's Run.history() and of TensorBoard's "download data" (Wall time, Step, Value). A CSV with
several runs or final losses is not a log: `convergence/loss_csv.py` reads it.
"""

import re
from collections.abc import Sequence

from te_bench.reports.logs import LogFile, LogFormat, Series
from te_bench.reports.logs.names import TRAINING, is_loss, plain
from te_bench.reports.logs.rows import STEP, series_of
from te_bench.reports.logs.table import SEED, SPAN, TIMES, WANDB, number, number_at, table_of

TAG = r"tag-(.+)$"  # in the name of a download: run-bf16_s0-tag-train_loss.csv


def _read(files: Sequence[LogFile]) -> Series:
    [file] = files
    rows = _history(file)
    assert rows is not None
    return Series(losses={name: sorted(points, key=lambda one: one[0]) for name, points in series_of(rows).items()})


def _history(file: LogFile) -> list[dict[str, float]] | None:
    """Return the rows {column in lower case: number} of a CSV of one run; None for any other CSV.

    One run has no seeds, and a step with either one other column or columns with "loss" in their names; or W&B's columns
    "run - metric" of one run. Raises ValueError, with the line, if a step or a loss is not a number.
    """
    try:
        table = table_of(file)
    except ValueError:
        return None
    names = [name.lower() for name in table.header or ()]
    step = table.column(STEP)
    if step is None or table.column(SEED) is not None or len({n.rpartition(WANDB)[0] for n in names if WANDB in n}) > 1:
        return None
    if any(WANDB in name for name in names):  # W&B's own "Step" counts log calls
        names = ["_step" if name == "step" else name.rpartition(WANDB)[2] for name in names]
    others = [c for c, name in enumerate(names) if not (name in STEP or name.startswith(TIMES) or name.endswith(SPAN))]
    losses = [c for c in others if is_loss(names[c])]
    if not losses and len(others) == 1:
        losses, names[others[0]] = others, _unnamed(file)
    if not losses:
        return None
    strict = [c for c, name in enumerate(names) if c in losses or name in STEP]
    rows = []
    for line, row in table.rows:
        loose = {names[c]: value for c in others if (value := number(row[c])) is not None}
        rows.append(loose | {names[c]: number_at(table, line, row[c]) for c in strict if row[c]})
    return rows


def _unnamed(file: LogFile) -> str:
    """Return the name of a CSV's only value column: a training loss if the file's name says so, else a validation loss."""
    tag = re.search(TAG, file.path.stem)
    return "train_loss" if tag and plain(tag[1]) in TRAINING else "val_loss"


FORMAT = LogFormat(title="a CSV of one run", recognises=lambda file: _history(file) is not None, read=_read)
