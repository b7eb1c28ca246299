"""Make tables of published answers: what each model was advised, and how far predictions were off. No torch.

Both read a folder whose subfolders advise wrote: DIR/MODEL/advice.json.
"""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from te_bench.advice.published import Answer, choice, energy, stored_answers
from te_bench.reports.page import text
from te_bench.reports.page.table import Table, Value, filled, number, speedup, word


def answers(directory: Path) -> Table:
    """Return a row for each model: the user's step, the advised step, and its speed over the best rival.

    If all models have the same advised step, the caption names it in place of a column. The note lists rivals without a
    time. Raises ValueError if the folder holds no answers.
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
                **({} if same else {"Advised": word(step)}),
                "Speed-up": speedup(one.speedup),
                "ms a step": _change(said["have_seconds"], said["seconds"], text.milliseconds),
                "te-bench bf16, ms": number(one.seconds[one.bf16] if one.bf16 else None, text.milliseconds),
                "Best without te-bench, ms": _best(one),
                "Over it": word(None) if one.over is None else Value(text=text.times(one.over), sort=one.over),
                "Energy": number(None if (share := energy(one)) is None else share - 1, text.signed_percent),
                "GiB": _change(said["have_memory_bytes"], said["memory_bytes"], text.gib),
                "Tokens": Value(
                    text=f"{problem['batch']} × {problem['block']}", sort=problem["batch"] * problem["block"]
                ),
            }
        )
    caption = f"Advised for all {len(found)} models: {advised[0]}" if same else "What te-bench advises"
    note = (
        "ms a step and GiB: of the model in eager mode, bf16 autocast, torch's fused AdamW, then as advised. "
        "te-bench bf16: the fastest step of te-bench's kernels without FP8. Energy: of the advised step, beside eager's. "
        "Best without te-bench: the fastest of eager mode, torch.compile, torchao and Liger, as many as were measured. "
        "Over it: how many times as fast as that the advised step is; no interval, because most rivals ran once."
    )
    return filled("advice", caption, rows, " ".join([note, *_untimed(found)]), text_columns=1 if same else 2)


def errors(directory: Path) -> Table:
    """Return a row for each predicted and then measured step. Raises ValueError if there is none."""
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
                    "Error": number(error, text.signed_percent),
                }
            )
    if not rows:
        raise ValueError(f"{directory} holds no step that was predicted and then measured")
    median, worst = statistics.median(wrong), max(wrong)
    note = f"{len(wrong)} steps: median error {text.percent(median)}, worst {text.percent(worst)}."
    return filled("advice_errors", "Predicted and measured steps", rows, note, text_columns=2)


def _change(now: float | None, advised: float | None, show: Callable[[float | None], str]) -> Value:
    return Value(text=f"{show(now)} → {show(advised)}", sort=advised)


def _best(one: Answer) -> Value:
    """Return the fastest measured step without te-bench, by a short name; precision only where it differs."""
    if one.best is None:
        return word(None)
    name = one.have.mode if one.best == one.have else one.best.begins.removesuffix(f" {one.have.precision}")
    seconds = one.seconds[one.best]
    return Value(text=f"{name}, {text.milliseconds(seconds)}", sort=seconds)


def _untimed(found: Sequence[Answer]) -> list[str]:
    """Return sentences that list the rivals without a time, with their models; rivals of the same models share one."""
    models: dict[str, list[str]] = {}
    for one in found:
        for name in one.untimed:
            models.setdefault(name, []).append(one.model)
    by_models: dict[str, list[str]] = {}
    for name, of in models.items():
        by_models.setdefault(", ".join(of), []).append(name)
    return [f"No time of {text.listed(names, len(names))}: {of}." for of, names in by_models.items()]
