"""Read console logs of nanoGPT and its kin, which print a step and a loss on one line.

    nanoGPT          step 250: train loss 1.9, val loss 2.0          iter 10: loss 3.1, time 20.00ms, mfu 30.00%
    LitGPT           iter 250: val loss 2.0, val time: 9.00 ms       Epoch 1 | iter 10 step 5 | loss train: 3.1, val: n/a
    llm.c            s:250 tel:2.0000                                s:10 trl:3.1000 lr:0.000600 norm:1.50
    modded-nanogpt   step:250/1390 val_loss:2.0000 train_time:9ms    step:10/1390 train_loss:3.1000 train_time:1ms

Sources: the print statements of karpathy/nanoGPT, Lightning-AI/litgpt, karpathy/llm.c (main.log) and
KellerJordan/modded-nanogpt. Without a validation loss, the loss of the training steps is judged, not nanoGPT's train loss of
evaluations, which use other batches.
"""

import re

from te_bench.reports.logs import LogFormat
from te_bench.reports.logs.formats._console import NUMBER, read_lines

_STEP = r"\b(?:step |iter |step:|s:)(?P<step>\d+)"
_PATTERNS = {
    "val loss": re.compile(rf"{_STEP}(?::(?: train loss {NUMBER},)? val loss |/\d+ val_loss:| tel:)(?P<loss>{NUMBER})"),
    "train loss": re.compile(
        rf"{_STEP}(?:: loss |/\d+ train_loss:| trl:| step \d+ \| loss train: )(?P<loss>{NUMBER})(?=[,\s])"
    ),
}


FORMAT = LogFormat(
    title="the console log of nanoGPT, modded-nanogpt, llm.c or LitGPT",
    recognises=lambda file: any(pattern.search(file.text) for pattern in _PATTERNS.values()),
    read=lambda files: read_lines(files, _PATTERNS),
)
