"""Tables of published answers: what each model was advised, and how far its predictions were off. No torch.

Both read a folder whose subfolders are advise's: DIR/MODEL/advice.json.
"""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from te_bench.advice.candidates import Choice
from te_bench.models import rivals
from te_bench.reports.analysis.measures import Ratio
from te_bench.reports.page import text
from te_bench.reports.page.table import Table, Value, number, speedup, table_of, word

FIELDS = tuple(Choice.__slots__)


def answers(directory: Path) -> Table:
    """A row a model: what its user has, what is advised instead, and by how much that is faster than the best rival."""
    rows = []
    for name, found in _stored(directory):
        answer, problem = found["answer"], found["question"]["problem"]
        rows.append(
            {
                "Model": word(name),
                "Advised": word(_choice(answer["use"]).words() if answer["undecided"] is None else "undecided"),
                "Tokens": word(f"{problem['batch']} × {problem['block']}"),
                "Now, ms": number(answer["have_seconds"], text.milliseconds),
                "Advised, ms": number(answer["seconds"], text.milliseconds),
                "Speed-up": speedup(_ratio(answer["speedup"])),
                "Over the best rival": _over_rivals(found),
                "GiB": number(answer["memory_bytes"], text.gib),
                "GiB now": number(answer["have_memory_bytes"], text.gib),
            }
        )
    note = (
        "Now: the model in eager mode, bf16 autocast, torch's fused AdamW. Rivals: that, torch.compile, torchao and Liger, "
        "as many as were measured; the ratio to the fastest has no interval, for most ran once."
    )
    return _table("advice", "What te-bench advises", rows, directory, note, text_columns=3)


def errors(directory: Path) -> Table:
    """A row a step that was predicted and then measured."""
    rows, wrong = [], []
    for name, found in _stored(directory):
        predicted = {_choice(one): one for one in found["predictions"] if one["records"]}
        for step in found["steps"]:
            if (guess := predicted.get(_choice(step))) is None:
                continue
            error = guess["seconds"] / step["seconds"] - 1
            wrong.append(abs(error))
            rows.append(
                {
                    "Model": word(name),
                    "Step": word(_choice(step).words()),
                    "Predicted, ms": number(guess["seconds"], text.milliseconds),
                    "±, ms": number(guess["bound_s"], text.milliseconds),
                    "Measured, ms": number(step["seconds"], text.milliseconds),
                    "Error": Value(text=f"{100 * error:+.1f} %", sort=error),
                }
            )
    note = ""
    if wrong:
        median, worst = statistics.median(wrong), max(wrong)
        note = f"{len(wrong)} steps: median error {text.percent(median)}, worst {text.percent(worst)}."
    return _table("advice_errors", "Predicted and measured steps", rows, directory, note, text_columns=2)


def _table(
    name: str, caption: str, rows: list[dict[str, Value]], directory: Path, note: str, text_columns: int
) -> Table:
    table = table_of(name, caption, rows, note, text_columns)
    if table is None:
        raise ValueError(f"{directory} holds no advice for a table {name!r}: give a folder of advise's folders")
    return table


def _stored(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(model, advice) of each subfolder, by name."""
    for path in sorted(directory.glob("*/advice.json")):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no advice of te-bench advise: {error}") from None
        if not isinstance(found, dict) or not found.keys() >= {"question", "answer", "steps", "predictions"}:
            raise ValueError(f"{path} is no advice of te-bench advise: it has no question and answer")
        yield path.parent.name, found


def _ratio(said: dict[str, Any] | None) -> Ratio | None:
    return None if said is None else Ratio(value=said["value"], n=said["pairs"], low=said["low"], high=said["high"])


def _choice(said: dict[str, Any]) -> Choice:
    return Choice(**{name: said[name] for name in FIELDS if name in said})


def _over_rivals(found: dict[str, Any]) -> Value:
    """Over the fastest measured step that needs nothing of te-bench's, with the rivals that have no time."""
    theirs, answer = [step for step in found["steps"] if _choice(step).of_others], found["answer"]
    over = (answer.get("over_best") or {}).get("ratio") or answer["speedup"]
    if not theirs or over is None:
        return word(None)
    best = min(theirs, key=lambda step: float(step["seconds"]))
    ratio = 1.0 if _choice(best) == _choice(answer["use"]) else over["value"]
    said = _choice(best).begins
    unknown = [rivals.called(name) for name in answer.get("unmeasured_rivals") or ()]
    said += f"; no time of {text.listed(unknown, 3)}" if unknown else ""
    return Value(text=f"{text.times(ratio)} ({said})", sort=ratio)
