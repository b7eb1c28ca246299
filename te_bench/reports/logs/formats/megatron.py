"""Read Megatron-LM's console log: "iteration 100/ 5000 | ... | lm loss: 3.2E+00 |", "validation loss at iteration 100 |".

Source: NVIDIA/Megatron-LM, megatron/training/training.py. The loss on the test set is left out. Forks with the same output
(Megatron-DeepSpeed) are read as well.

Megatron does not print a loss of NaN, and prints no loss, or 0, if all steps were skipped. A run that stops at a NaN says
so in its exception (megatron/core/rerun_state_machine.py).
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from te_bench.reports.logs import LogFile, LogFormat, Series
from te_bench.reports.logs.formats._console import NUMBER, read_lines

_TRAINING = "lm loss"
_ITERATION = r"\biteration\s+(?P<step>\d+)/\s*\d+ \|"
_PATTERN = re.compile(rf"{_ITERATION}.*\blm loss: (?P<loss>{NUMBER})(?=\s)")
_VALIDATION = re.compile(r"validation(-\d+)? loss at iteration \d")  # several sets have numbers
_SKIPPED = re.compile(r"\| number of skipped iterations:\s*(\d+)")
_ZERO = re.compile(r" lm loss: 0\.0+E\+00 \|")
_STOPPED = re.compile(r"found (?:NaN|Inf) in local")
_LINE = re.compile(rf"\|\s*lm loss(?: value)?: {NUMBER}")


def _recognises(file: LogFile) -> bool:
    return _LINE.search(file.text) is not None


def _read(files: Sequence[LogFile]) -> Series:
    sets = dict.fromkeys(found[1] or "" for file in files for found in _VALIDATION.finditer(file.text))
    patterns = {f"validation{one} loss": _validation(one) for one in sets} | {_TRAINING: _PATTERN}
    found = read_lines(files, patterns, _completed)
    steps = list(re.finditer(_ITERATION, files[-1].text))
    if not (steps and _STOPPED.search(files[-1].text, steps[-1].end())):
        return found
    stopped = float(steps[-1]["step"]) + 1
    return replace(found, losses={**found.losses, _TRAINING: [*found.losses.get(_TRAINING, ()), (stopped, math.nan)]})


def _validation(one: str) -> re.Pattern[str]:
    place = rf"validation{one} loss at iteration (?P<step>\d+)(?: on validation set)?"
    return re.compile(rf"{place}\s*\|\s*lm loss value: (?P<loss>{NUMBER})\s*\|")


def _completed(line: str) -> str:
    """Return the line with the NaN that Megatron does not print, and without the 0 of skipped steps."""
    skipped = _SKIPPED.search(line)
    if skipped is None:
        return line
    if int(skipped[1]):
        return _ZERO.sub("", line)
    return line if "lm loss:" in line else line.replace(skipped[0], f"| lm loss: nan {skipped[0]}")


FORMAT = LogFormat(title="Megatron-LM's console log", recognises=_recognises, read=_read)
