"""Read trainer_state.json of Hugging Face's Trainer, in its output folder or in the last checkpoint there.

Source: huggingface/transformers, trainer_callback.py, TrainerState.log_history.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from te_bench.reports.logs import LogFile, LogFormat, Series
from te_bench.reports.logs.rows import of_json, series_of

STATE = "trainer_state.json"


def _run_files(folder: Path) -> list[Path]:
    """Return the folder's own state and its last checkpoint's; `_read` takes the one with more steps."""
    checkpoints = [p for p in folder.glob(f"checkpoint-*/{STATE}") if re.fullmatch(r"checkpoint-\d+", p.parent.name)]
    last = sorted(checkpoints, key=lambda path: int(path.parent.name.rpartition("-")[2]))[-1:]
    return [path for path in (*last, folder / STATE) if path.is_file()]


def _read(files: Sequence[LogFile]) -> Series:
    found = [series_of(_history(file), file.path) for file in files]
    far = max(found, key=lambda one: max((step for points in one.losses.values() for step, _ in points), default=0.0))
    # train_loss is the mean over the whole training, which Trainer logs after its last step
    return replace(far, losses={name: points for name, points in far.losses.items() if name != "train_loss"})


def _history(file: LogFile) -> list[dict[str, Any]]:
    try:
        state = of_json(file.content)
    except ValueError as error:
        raise ValueError(f"{file.path} is not a complete JSON file ({error}): copy it again") from error
    rows = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{file.path} has no log_history: give the {STATE} that the Trainer wrote")
    return rows


FORMAT = LogFormat(
    title="Hugging Face's trainer_state.json",
    recognises=lambda file: b'"log_history"' in file.content or file.path.name == STATE,
    read=_read,
    run_files=_run_files,
)
