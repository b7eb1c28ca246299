"""Read a CSV of one run: Weights & Biases' history, TensorBoard's download, or a step and its losses.

Source: the columns of wandb's Run.history() and of TensorBoard's "download data" (Wall time, Step, Value). A CSV with
several runs or final losses is not a log: `convergence/loss_csv.py` reads it.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from te_bench.reports.logs import TORN, LogFile, LogFormat, Series
from te_bench.reports.logs.names import TRAINING, is_loss, plain
from te_bench.reports.logs.rows import RANK, STEP, series_of
from te_bench.reports.logs.table import SEED, SPAN, TIMES, WANDB, number, number_at, step_at, table_of

TAG = r"tag-(.+)$"  # in the name of a download: run-bf16_s0-tag-train_loss.csv


def _read(files: Sequence[LogFile]) -> Series:
    [file] = files
    history = _history(file)
    assert history is not None
    rows, torn, seed = history
    step = next(name for name in STEP if name in rows[0])
    at = {row[step] for row in rows}
    if len(at) == len(rows) and None not in at:
        rows.sort(key=lambda row: row[step])  # in any order, where no step has two rows
    found = series_of(rows, file.path, "an empty cell")
    return replace(found, seed=seed, notes=(*found.notes, *((TORN.format(file.path),) if torn else ())))


def _history(file: LogFile) -> tuple[list[dict[str, Any]], bool, str | None] | None:
    """The rows of a CSV of one run, {column in lower case: number, None of an empty cell}; None for any other CSV.

    Beside them, whether a torn last line is left out, and the seed, if a column says it. One run has a step, one column
    beside it or some with "loss" in their names, and one seed at most; or W&B's columns, "run - metric", of a single run.
    Raises ValueError, with the line, for a step or a loss that is no number.
    """
    try:
        table = table_of(file)
    except ValueError:
        return None
    names = [name.lower() for name in table.header or ()]
    step, run = table.column(STEP), table.column(SEED)
    seeds = set() if run is None else {row[run] for _, row in table.rows}
    if step is None or len(seeds) > 1 or len({n.rpartition(WANDB)[0] for n in names if WANDB in n}) > 1:
        return None
    if any(WANDB in name for name in names):  # W&B's own "Step" counts log calls
        names = ["_step" if name == "step" else name.rpartition(WANDB)[2] for name in names]
    axes = {*STEP, *RANK, *SEED}
    others = [c for c, n in enumerate(names) if not (n in axes or n.startswith(TIMES) or n.endswith(SPAN))]
    losses = [c for c in others if is_loss(names[c])]
    if not losses and len(others) == 1:
        losses, names[others[0]] = others, _unnamed(file)
    if not losses:
        return None
    strict = [c for c, name in enumerate(names) if c in losses or (name in STEP and (name != "epoch" or c == step))]
    loose = [c for c, name in enumerate(names) if c in others or name in ("epoch", *RANK)]
    rows: list[dict[str, Any]] = []
    for line, row in table.rows:
        found: dict[str, Any] = {names[c]: value for c in loose if (value := number(row[c])) is not None}
        at = {c: step_at if names[c] in STEP else number_at for c in strict}
        rows.append(found | {names[c]: at[c](table, line, row[c]) if row[c] else None for c in strict})
    return rows, table.torn is not None, next(iter(seeds), None)


def _unnamed(file: LogFile) -> str:
    """Return the name of a CSV's only value column: a training loss if the file's name says so, else a validation loss."""
    tag = re.search(TAG, file.path.stem)
    return "train_loss" if tag and plain(tag[1]) in TRAINING else "val_loss"


FORMAT = LogFormat(title="a CSV of one run", recognises=lambda file: _history(file) is not None, read=_read)
