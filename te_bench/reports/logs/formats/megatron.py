"""Megatron-LM's console log: "iteration 100/ 5000 | ... | lm loss: 3.2E+00 |" and "validation loss at iteration 100 | ...".

Source: NVIDIA/Megatron-LM, megatron/training/training.py. The loss on the test set is left out. Forks that print in the
same way (Megatron-DeepSpeed) are read as well.
"""

import re

from te_bench.reports.logs import LogFile, LogFormat
from te_bench.reports.logs.formats._console import NUMBER, read_lines

_PATTERNS = {
    "validation loss": re.compile(
        r"validation loss at iteration (?P<step>\d+)(?: on validation set)?\s*\|\s*"
        rf"lm loss value: (?P<loss>{NUMBER})\s*\|"
    ),
    "lm loss": re.compile(rf"\biteration\s+(?P<step>\d+)/\s*\d+ \|.*\blm loss: (?P<loss>{NUMBER})(?=\s)"),
}
_LINE = re.compile(rf"\|\s*lm loss(?: value)?: {NUMBER}")


def _recognises(file: LogFile) -> bool:
    return _LINE.search(file.text) is not None


FORMAT = LogFormat(
    title="Megatron-LM's console log", recognises=_recognises, read=lambda files: read_lines(files, _PATTERNS)
)
