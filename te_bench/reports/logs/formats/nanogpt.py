"""Read nanoGPT's console log: "step 250: train loss 1.9, val loss 2.0" and "iter 10: loss 3.1, time 20.00ms, mfu 30.00%".

Source: karpathy/nanoGPT, train.py. Without a validation loss, the loss of the training steps is judged, not the train loss
of evaluations, which use other batches.
"""

import re

from te_bench.reports.logs import LogFormat
from te_bench.reports.logs.formats._console import NUMBER, read_lines

_PATTERNS = {
    "val loss": re.compile(rf"\bstep (?P<step>\d+): train loss {NUMBER}, val loss (?P<loss>{NUMBER})"),
    "train loss": re.compile(rf"\biter (?P<step>\d+): loss (?P<loss>{NUMBER})(?=,)"),
}
_LINE = re.compile(rf"\b(?:step \d+: train loss {NUMBER}, val loss|iter \d+: loss {NUMBER}, time)")


FORMAT = LogFormat(
    title="nanoGPT's console log",
    recognises=lambda file: _LINE.search(file.text) is not None,
    read=lambda files: read_lines(files, _PATTERNS),
)
