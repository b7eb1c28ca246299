"""A CSV of one run: Weights & Biases' history, TensorBoard's download, or a step and its losses.

Source: the columns of wandb's Run.history() and of TensorBoard's "download data" (Wall time, Step, Value). A CSV that holds
several runs, or final losses, is no log: `convergence/loss_csv.py` reads it.
"""

import re
from collections.abc import Sequence

from te_bench.reports.convergence import loss_csv
from te_bench.reports.logs import LogFile, LogFormat, Series
from te_bench.reports.logs._names import TRAINING, is_loss, plain
from te_bench.reports.logs._rows import series_of

TAG = r"tag-(.+)$"  # of a download's name: run-bf16_s0-tag-train_loss.csv


def _read(files: Sequence[LogFile]) -> Series:
    [file] = files
    found = loss_csv.history(file)
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


FORMAT = LogFormat(title="a CSV of one run", recognises=lambda file: loss_csv.history(file) is not None, read=_read)
