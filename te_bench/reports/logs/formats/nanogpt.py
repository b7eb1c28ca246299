"""Read console logs of nanoGPT and of other trainers that print a step and a loss on one line.

    nanoGPT          step 250: train loss 1.9, val loss 2.0          iter 10: loss 3.1, time 20.00ms, mfu 30.00%
    LitGPT           iter 250: val loss 2.0, val time: 9.00 ms       Epoch 1 | iter 10 step 5 | loss train: 3.1, val: n/a
    llm.c            s:250 tel:2.0000                                s:10 trl:3.1000 lr:0.000600 norm:1.50
    modded-nanogpt   step:250/1390 val_loss:2.0000 train_time:9ms    step:10/1390 train_loss:3.1000 train_time:1ms
    torchtune                                                        Step 10 | loss:3.1 lr:2e-05
    NeMo             global_step: 10 | reduced_train_loss: 3.1 | train_step_timing in s: 0.9 | val_loss: 2.0

Sources: the print statements of karpathy/nanoGPT, Lightning-AI/litgpt, karpathy/llm.c (main.log),
KellerJordan/modded-nanogpt, meta-pytorch/torchtune and NVIDIA-NeMo. Without a validation loss, the loss of the training
steps is judged, not nanoGPT's train loss of evaluations, which use other batches.
"""

import re

from te_bench.reports.logs import LogFormat
from te_bench.reports.logs.formats._console import NUMBER, read_lines

_STEP = r"\b(?:step |iter |step:|s:|Step |global_step: )(?P<step>\d+)"
_BEFORE = {
    "val loss": (
        rf": train loss {NUMBER}, val loss ",
        ": val loss ",
        " tel:",
        r"/\d+ val_loss:",
        r" \|.*\| val_loss: ",
    ),
    "train loss": (
        *(
            ": loss ",
            r" step \d+ \| loss train: ",
            " trl:",
            r"/\d+ train_loss:",
            r" \| loss:",
            r" \| reduced_train_loss: ",
        ),
    ),
}
_PATTERNS = {
    name: re.compile(rf"{_STEP}(?:{'|'.join(before)})(?P<loss>{NUMBER})(?=[,\s]|$)") for name, before in _BEFORE.items()
}


FORMAT = LogFormat(
    title="the console log of nanoGPT, modded-nanogpt, llm.c, LitGPT, torchtune or NeMo",
    recognises=lambda file: any(pattern.search(file.text) for pattern in _PATTERNS.values()),
    read=lambda files: read_lines(files, _PATTERNS),
)
