"""Tables of published answers: what each model was advised, and how far its predictions were off. No torch.

Both read a folder whose subfolders are advise's: DIR/MODEL/advice.json.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

from te_bench.advice.published import Answer, choice, stored_answers
from te_bench.reports.page import text
from te_bench.reports.page.table import Table, Value, number, speedup, table_of, word


def answers(directory: Path) -> Table:
    """A row a model: what its user has, what is advised instead, and by how much that is faster than the best rival.

    The caption names the advised step where all models have the same, in place of a column; the note has what has no time.
    """
    found = stored_answers(directory)
    advised = [one.use.words() if one.use else "undecided" for one in found]
    same = len(set(advised)) == 1
    rows = []
    for one, step in zip(found, advised, strict=True):
        said, problem = one.stored["answer"], one.stored["question"]["problem"]
        rows.append(
            {
                "Model": word(one.model),
                "Tokens": word(f"{problem['batch']} × {problem['block']}"),
                **({} if same else {"Advised": word(step)}),
                "Now, ms": number(said["have_seconds"], text.milliseconds),
                "Best rival, ms": number(one.seconds[one.best] if one.best else None, text.milliseconds),
                "Advised, ms": number(said["seconds"], text.milliseconds),
                "Speed-up": speedup(one.speedup),
                "Over the best rival": _over_rivals(one),
                "Now, GiB": number(said["have_memory_bytes"], text.gib),
                "Advised, GiB": number(said["memory_bytes"], text.gib),
            }
        )
    caption = f"Advised for all {len(found)} models: {advised[0]}" if same else "What te-bench advises"
    note = (
        "Now: the model in eager mode, bf16 autocast, torch's fused AdamW. Best rival: the fastest of that, torch.compile, "
        "torchao and Liger, as many as were measured; most ran once, so a ratio to them has no interval."
    )
    return _table("advice", caption, rows, " ".join([note, *_untimed(found)]), text_columns=2 if same else 3)


def errors(directory: Path) -> Table:
    """A row a step that was predicted and then measured."""
    rows, wrong = [], []
    for one in stored_answers(directory):
        predicted = {choice(said): said for said in one.stored["predictions"] if said["records"]}
        for step, seconds in one.seconds.items():
            if (guess := predicted.get(step)) is None:
                continue
            error = guess["seconds"] / seconds - 1
            wrong.append(abs(error))
            rows.append(
                {
                    "Model": word(one.model),
                    "Step": word(step.words()),
                    "Predicted, ms": number(guess["seconds"], text.milliseconds),
                    "±, ms": number(guess["bound_s"], text.milliseconds),
                    "Measured, ms": number(seconds, text.milliseconds),
                    "Error": Value(text=f"{100 * error:+.1f} %", sort=error),
                }
            )
    if not rows:
        raise ValueError(f"{directory} holds no step that was predicted before it was measured")
    median, worst = statistics.median(wrong), max(wrong)
    note = f"{len(wrong)} steps: median error {text.percent(median)}, worst {text.percent(worst)}."
    return _table("advice_errors", "Predicted and measured steps", rows, note, text_columns=2)


def _table(name: str, caption: str, rows: Sequence[dict[str, Value]], note: str, text_columns: int) -> Table:
    table = table_of(name, caption, rows, note, text_columns)
    assert table is not None  # an answer is a row
    return table


def _over_rivals(one: Answer) -> Value:
    """Over the fastest measured step that needs nothing of te-bench's."""
    if one.best is None or one.over is None:
        return word(None)
    return Value(text=f"{text.times(one.over)} ({one.best.begins})", sort=one.over)


def _untimed(found: Sequence[Answer]) -> list[str]:
    """Rivals that have no time, each with its models; those of the same models together."""
    models: dict[str, list[str]] = {}
    for one in found:
        for name in one.untimed:
            models.setdefault(name, []).append(one.model)
    by_models: dict[str, list[str]] = {}
    for name, of in models.items():
        by_models.setdefault(", ".join(of), []).append(name)
    return [f"No time of {text.listed(names, len(names))}: {of}." for of, names in by_models.items()]
