"""Read console logs of nanoGPT and of other trainers that print a step and a loss on one line.

    nanoGPT          step 250: train loss 1.9, val loss 2.0          iter 10: loss 3.1, time 20.00ms, mfu 30.00%
    LitGPT           iter 250: val loss 2.0, val time: 9.00 ms       Epoch 1 | iter 10 step 5 | loss train: 3.1, val: n/a
    llm.c            s:250 tel:2.0000                                s:10 trl:3.1000 lr:0.000600 norm:1.50
    modded-nanogpt   step:250/1390 val_loss:2.0000 train_time:9ms    step:10/1390 train_loss:3.1000 train_time:1ms
    torchtune                                                        Step 10 | loss:3.1 lr:2e-05
    NeMo             global_step: 10 | reduced_train_loss: 3.1 | train_step_timing in s: 0.9 | val_loss: 2.0

Sources: the print statements of karpathy/nanoGPT, Lightning-AI/litgpt, karpathy/llm.c (main.log),
KellerJordan/modded-nanogpt, meta-pytorch/torchtune and NVIDIA-NeMo. Without a validation loss, the loss of the training
steps is judged, not nanoGPT's train loss of evaluations, which use other batches. NeMo repeats its last validation loss on
every line; a repetition is no validation.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from te_bench.reports.logs import LogFile, LogFormat, Series
from te_bench.reports.logs.formats._console import NUMBER, lines_of, read_lines

_STEP, _LOSS = r"(?P<step>\d+)", rf"(?P<loss>{NUMBER})(?=[,\s]|$)"


def _patterns(training: str, validation: str | None = None) -> dict[str, re.Pattern[str]]:
    found = {} if validation is None else {"val loss": re.compile(validation)}
    return found | {"train loss": re.compile(training)}


_NEMO = _patterns(
    rf"\bglobal_step: {_STEP} \|.*\breduced_train_loss: {_LOSS}", rf"\bglobal_step: {_STEP} \|.*\bval_loss: {_LOSS}"
)
_TRAINERS = (
    _patterns(rf"\biter {_STEP}: loss {_LOSS}", rf"\bstep {_STEP}: train loss {NUMBER}, val loss {_LOSS}"),
    _patterns(rf"\biter {_STEP} step \d+ \| loss train: {_LOSS}", rf"\b(?:iter|step) {_STEP}: val loss {_LOSS}"),
    _patterns(rf"\bs:{_STEP} trl:{_LOSS}", rf"\bs:{_STEP} tel:{_LOSS}"),
    _patterns(rf"\bstep:{_STEP}/\d+ train_loss:{_LOSS}", rf"\bstep:{_STEP}/\d+ val_loss:{_LOSS}"),
    _patterns(rf"\bStep {_STEP} \| loss:{_LOSS}"),
    _NEMO,
)


def _who_printed(files: Sequence[LogFile]) -> list[dict[str, re.Pattern[str]]]:
    texts = ["".join(lines_of(file)) for file in files]
    return [one for one in _TRAINERS if any(pattern.search(text) for text in texts for pattern in one.values())]


def _read(files: Sequence[LogFile]) -> Series:
    """Read the lines of the trainer that printed most of them, so that no stray line is taken for a loss."""
    both = [(patterns, read_lines(files, patterns)) for patterns in _who_printed(files)]
    patterns, found = max(both, key=lambda one: sum(map(len, one[1].losses.values())))
    if patterns is not _NEMO or "val loss" not in found.losses:
        return found
    printed = found.losses["val loss"]
    fresh = [printed[0], *(after for before, after in pairwise(printed) if before[1] != after[1])]
    return replace(found, losses={**found.losses, "val loss": fresh})


FORMAT = LogFormat(
    title="the console log of nanoGPT, modded-nanogpt, LitGPT, torchtune or NeMo, or llm.c's main.log",
    recognises=lambda file: bool(_who_printed([file])),
    read=_read,
)
