"""te-bench evaluate: perplexity and last-word accuracy of a checkpoint."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from te_bench.cli.options import Device, Json
from te_bench.cli.run import INCOMPLETE


def evaluate(
    checkpoint: Annotated[
        Path, typer.Argument(help="nanoGPT's ckpt.pt, a file of `run --checkpoints`, or a Hugging Face folder.")
    ],
    data: Annotated[
        str | None, typer.Option(metavar="SPEC", help="Text for perplexity: text:PATH, hf:NAME, stdlib.")
    ] = None,
    last_word: Annotated[
        Path | None, typer.Option(metavar="FILE", help='Passages for last-word accuracy, JSON lines of {"text": ...}.')
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="FP8 recipe. Default: the checkpoint's own. none: bf16 alone.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="SPEC", help="Tokenizer of the text. Default: the checkpoint's own.")
    ] = None,
    device: Device = None,
    split: Annotated[str, typer.Option(help="Part of the text: val (the last tenth, held out), train or all.")] = "val",
    block: Annotated[int | None, typer.Option(help="Tokens of a window. Default: the model's longest.")] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens from one window to the next. Default: half a block.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Windows or passages at once.")] = 8,
    tokens: Annotated[int | None, typer.Option(help="Tokens to score. Default: all.")] = None,
    as_json: Json = False,
) -> None:
    """Measure the perplexity and last-word accuracy of a checkpoint, in bf16 and in its FP8 recipe."""
    from te_bench.experiments import environment, evaluation

    where = device or environment.default_device()
    found = evaluation.evaluate(
        checkpoint,
        data,
        passages=last_word,
        recipe=recipe,
        device=where,
        tokenizer=tokenizer,
        split=split,
        block=block,
        stride=stride,
        batch=batch,
        max_tokens=tokens,
    )
    print(json.dumps(evaluation.to_json(found), indent=2) if as_json else evaluation.summary(found))
    broken = [way.recipe or way.precision for way in found.arms if not way.finite]
    if broken:
        why = "weights or activations hold NaN or infinity, or overflow"
        print(f"te-bench: no result in {' and '.join(broken)}: the loss is not finite: {why}", file=sys.stderr)
        raise typer.Exit(INCOMPLETE)
