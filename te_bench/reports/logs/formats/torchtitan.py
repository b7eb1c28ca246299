"""Read torchtitan's console log, with or without colours: "step: 10  loss: 8.2041  grad_norm: ...", "validate step: 10 ...".

Source: pytorch/torchtitan, torchtitan/components/metrics.py. Its TensorBoard folder is read by tensorboard.py.
"""

import re

from te_bench.reports.logs import LogFormat
from te_bench.reports.logs.formats._console import NUMBER, lines_of, read_lines

_PATTERNS = {
    "validation loss": re.compile(rf"\bvalidate step:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>{NUMBER})(?=\s)"),
    "train loss": re.compile(rf"(?<!validate )\bstep:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>{NUMBER})(?=\s)"),
}
_LINE = re.compile(rf"\bstep:\s*\d+\s+loss:\s*{NUMBER}\s+(?:grad_norm|memory):")


FORMAT = LogFormat(
    title="torchtitan's console log",
    recognises=lambda file: "step:" in file.text and any(map(_LINE.search, lines_of(file))),
    read=lambda files: read_lines(files, _PATTERNS),
)
