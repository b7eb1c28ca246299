"""Write the answer as Markdown, and as one HTML page that loads nothing: the user's step, the advised step, each gain.

No torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from te_bench.advice import answer
from te_bench.advice.advise import Evidence
from te_bench.advice.candidates import Choice, Question
from te_bench.advice.code import code
from te_bench.advice.decision import Decision, LinearGain, checkpointing, larger_batches, linear_gains
from te_bench.advice.parts import ATTENTION, HEAD, LINEAR, Part, PartTime, parts_of
from te_bench.advice.steps import extent, noisy, peak, typical
from te_bench.advice.traps import Finding
from te_bench.experiments.spec import Record
from te_bench.kernels.attention import Problem
from te_bench.kernels.attention import table as attention_table
from te_bench.kernels.measured import machine_name
from te_bench.models import cost
from te_bench.reports.analysis import floor, naming
from te_bench.reports.analysis.measures import finite, of_processes
from te_bench.reports.files import write_folder
from te_bench.reports.page import text
from te_bench.reports.page.bars import Stack, stacked_bars
from te_bench.reports.page.drawing import Drawing, draw, styled
from te_bench.reports.page.step_figures import FLOOR_KINDS
from te_bench.reports.page.table import Table, Value, number, table_of, word
from te_bench.reports.page.template import rendered

KINDS = {LINEAR: cost.GEMM, ATTENTION: cost.ATTENTION, HEAD: cost.LOSS}  # {workload of a part: kind of work}
NOISY_PARTS = "Noisy: its calls vary widely, or take longer alone than the whole step."
QUARTILE = "A time is the lower quartile of calls; reports tell the median."


MARKDOWN = "advice.md"


def write_page(evidence: Evidence, decision: Decision, findings: Sequence[Finding], out: Path, command: str) -> Path:
    """Write the page under `out`, and return the path of its index.html. Raises ValueError if a file cannot be written."""
    drawing = _steps(evidence, decision)
    content = _content(evidence, decision, findings, command) | {"drawings": [drawing]}
    write_folder(
        out, {"index.html": rendered("advice.html.j2", content), f"figures/{drawing.name}.png": drawing.png}, "advice"
    )
    return out / "index.html"


def markdown(evidence: Evidence, decision: Decision, findings: Sequence[Finding], command: str) -> bytes:
    """Return the page as GitHub's Markdown, without its figure."""
    return rendered("advice.md.j2", _content(evidence, decision, findings, command))


def _content(evidence: Evidence, decision: Decision, findings: Sequence[Finding], command: str) -> dict[str, Any]:
    first, *others = answer.sentences(evidence, decision, findings)
    tables = (
        _gains(linear_gains(evidence), evidence.question.device),
        _others(evidence, decision),
        _verified(evidence),
        _room(evidence),
    )
    return {
        "title": title(evidence.question),
        "headline": first,
        "sentences": [sentence.partition("\n")[::2] for sentence in others],  # words and command
        "code": code(evidence.question, decision.use),
        "drawn": "The step today; advised: the same" if decision.keeps else "The step today and as advised",
        "by_kind": "By the kernels of one step under the profiler."
        if _profile(evidence, decision.use)
        else "A CPU's step by its parts as they were timed alone; rest is what they leave of the measured step.",
        "tables": [table for table in tables if table is not None],
        "findings": findings,
        "left_out": _left_out(evidence),
        "command": command,
    }


def title(question: Question) -> str:
    """Return the question's title, with the model named as on the command line."""
    return question.title.replace(question.model, question.given or question.model, 1)


def by_kind(evidence: Evidence, choice: Choice) -> dict[str, float]:
    """Return {kind of work: seconds} of a measured step: of its GPU kernels, or on a CPU of its parts."""
    profile = _profile(evidence, choice)
    found = dict.fromkeys(FLOOR_KINDS, 0.0)
    if profile:
        for kernel, seconds in profile.items():
            found[floor.kind_of(kernel)] += finite(seconds) or 0.0
        return found
    for part, count in parts_of(evidence.question, evidence.made, choice).items():
        if part in evidence.times:
            found[KINDS[part.workload]] += count * evidence.times[part].seconds
    step = typical(evidence.steps[choice])
    share = min(1.0, step / (sum(found.values()) or 1.0))  # alone, each part has its own call from Python
    return {kind: share * seconds for kind, seconds in found.items()}


def _profile(evidence: Evidence, choice: Choice) -> Mapping[str, Any]:
    return evidence.steps[choice][0].work.get("kernel_s") or {}


@styled
def _steps(evidence: Evidence, decision: Decision) -> Drawing:
    shown = [choice for choice in dict.fromkeys((decision.have, decision.use)) if choice in evidence.steps]
    stacks = []
    for choice in shown:
        parts = {kind: 1e3 * seconds for kind, seconds in by_kind(evidence, choice).items()}
        step = 1e3 * typical(evidence.steps[choice])
        today = "today and as advised" if decision.keeps else "today"
        whose = today if choice == decision.have else "advised"
        stacks.append(
            Stack(
                name=f"{whose}: {choice.words()}",
                parts=parts,
                rest=max(step - sum(parts.values()), 0.0),
                remark=f"{text.plain(step)} ms{'' if any(parts.values()) else ', its parts were not timed alone'}",
            )
        )
    caption = "Time of one step by kind of work"
    alt = f"{caption}: {title(evidence.question)}"
    return draw("steps", "steps", caption, alt, stacked_bars(stacks, FLOOR_KINDS, "ms a step"))


def _of_parts(noisy: Iterable[bool]) -> str:
    """Return how to read the times of parts alone, of which some may be noisy."""
    return f"{QUARTILE} {NOISY_PARTS}" if any(noisy) else QUARTILE


def _gains(gains: Sequence[LinearGain], device: str) -> Table | None:
    rows = [
        {
            "Linear": word(f"{g.sizes[1]} to {g.sizes[2]}, {g.sizes[0]} rows"),
            "Gain a step, ms": Value(text=_marked(_signed_ms(g.saved_s), noisy=g.noisy), sort=g.saved_s),
            "FP8 over bf16": number(g.ratio, lambda ratio: text.MISSING if ratio is None else text.times(ratio)),
            "Calls": number(g.calls, text.count),
            "bf16, ms": number(g.bf16.seconds, text.milliseconds),
            "FP8, ms": number(None if g.fp8 is None else g.fp8.seconds, text.milliseconds),
            "Fastest recipe": word(naming.recipe_name(g.recipe) or text.MISSING),
        }
        for g in gains
    ]
    note = "Forward and both gradients of one call, with every cast; below 1× FP8 loses. "
    if device == "cuda":
        note += "A step with te-bench's kernels gains more: there casts are part of other kernels. "
    note += _of_parts(g.noisy for g in gains)
    return table_of("linears", "The gain of each Linear in FP8", rows, note)


def _marked(value: str, *, noisy: bool) -> str:
    return f"{value}, noisy" if noisy else value


def _signed_ms(seconds: float | None) -> str:
    return text.MISSING if seconds is None else f"{1e3 * seconds:+.3g}"


def _others(evidence: Evidence, decision: Decision) -> Table | None:
    """Return the table of attention and heads, each timed alone; the advised step's attention says if it was not."""
    found: list[tuple[Part, PartTime]] = [i for i in evidence.times.items() if i[0].workload != LINEAR]
    rows = [
        {
            "Part": word(f"{_part(part)}{', compiled' if part.mode != 'eager' else ''}"),
            "One call, ms": Value(text=_marked(text.milliseconds(time.seconds), noisy=time.noisy), sort=time.seconds),
            "Problem": word(_problem(part)),
        }
        for part, time in sorted(found, key=lambda item: (item[0].workload, item[1].seconds))
    ]
    name = answer.chosen_attention(evidence, decision.use) if decision.use.parts else None
    untimed = [
        part
        for shape in evidence.made.attentions
        if name and (part := Part(ATTENTION, shape, name)) not in evidence.times
    ]
    rows = [
        {
            "Part": word(_part(part)),
            "One call, ms": number(None),
            "Problem": word(f"{_problem(part)}: {_why(evidence.question, part, decision.gpu)}"),
        }
        for part in untimed
    ] + rows
    note = f"Forward and backward, each part alone. {_of_parts(time.noisy for _, time in found)}"
    return table_of("parts", "Attention and heads", rows, note)


def _part(part: Part) -> str:
    """Return a part's plain name: cuDNN attention; FP8 head and loss; a Linear by current scaling."""
    if part.workload == ATTENTION:
        return naming.attention_name(part.rival)
    if part.workload == HEAD:
        return f"{naming.HEADS[None if part.rival == 'reference' else part.rival]} and loss"
    return f"{part.workload} by {naming.recipe_name(part.rival)}"


def _why(question: Question, part: Part, gpu: str | None) -> str:
    """Return that a step's attention was not timed alone, and by which measured shape it was chosen."""
    asked = Problem(dtype=part.precision, dropout=0.0, device=question.device, capability=None, **dict(part.problem))
    row = attention_table.nearest(machine_name(question.device, gpu), asked)
    if row is None or row[0].fastest()[0] != part.rival:  # the table may have changed since
        return "not timed alone"
    near = row[0].problem
    shape = {name: getattr(near, name) for name in ("batch", "heads", "length", "head_dim")}
    shape |= {} if near.kv_heads in (None, near.heads) else {"kv_heads": near.kv_heads}
    which = "nearest measured shape" if row[1] else "times in te-bench's table for"
    return f"not timed alone; chosen by the {which}, {_problem(part._replace(problem=tuple(shape.items())))}"


def _problem(part: Part) -> str:
    settings = dict(part.problem)
    if part.workload == HEAD:
        return f"{settings['n']} rows of {settings['d']} to {settings['padded']} classes"
    heads = f"{settings['heads']}/{settings['kv_heads']}" if "kv_heads" in settings else f"{settings['heads']}"
    return f"B{settings['batch']} H{heads} T{settings['length']} D{settings['head_dim']}, {part.precision}"


def _verified(evidence: Evidence) -> Table | None:
    rows = []
    counted = any(of_processes(records, "energy_j") for records in evidence.steps.values())
    for choice in sorted(evidence.steps, key=lambda choice: typical(evidence.steps[choice])):
        records, prediction = evidence.steps[choice], evidence.predictions.get(choice)
        guessed = None if choice in evidence.question.frames or prediction is None else prediction.seconds
        measured = typical(records)
        off = None if guessed is None else guessed / measured - 1
        low, high = map(text.milliseconds, extent(records))
        wide = noisy(records)
        said = text.milliseconds(measured)
        rows.append(
            {
                "Step": word(choice.words()),
                "Measured, ms": Value(text=f"{said}, noisy: {low} to {high}" if wide else said, sort=measured),
                "Predicted, ms": number(guessed, text.milliseconds),
                "Off by": number(off, text.signed_percent),
                **({"J": number(of_processes(records, "energy_j"))} if counted else {}),
                _peak_title(evidence.question): number(peak(records), text.gib),
                "Runs": number(len(records), text.count),
            }
        )
    notes = ["Measured: the geometric mean of its runs' medians."]
    if len({len(records) for records in evidence.steps.values()}) > 1:
        notes.append("Reports pair runs: what ran less often has there the baseline's time over its speed-up.")
    if any(row["Predicted, ms"].sort is not None for row in rows):
        notes.append("Predictions were made before these steps were measured; a step without one was measured first.")
    if any("noisy" in row["Measured, ms"].text for row in rows):
        notes.append("Noisy: the slowest run took over 1.2 times the fastest.")
    note = " ".join(notes)
    return table_of("steps-measured", "Steps that were measured", rows, note)


def _peak_title(question: Question) -> str:
    return "Peak, GiB" if question.device == "cuda" else "Resident, GiB"


def _room(evidence: Evidence) -> Table | None:
    """Return the table of steps with more sequences or checkpointed blocks, below the same steps without."""
    more, paid = larger_batches(evidence), checkpointing(evidence)
    choices = [*(found.choice for found in more), *(found.choice for found in paid)]
    of = {replace(choice, checkpointing=False) for choice in choices}
    have = evidence.question.batch
    runs: dict[tuple[Choice, int], Sequence[Record]] = {
        (choice, have): records
        for choice, records in evidence.steps.items()
        if replace(choice, checkpointing=False) in of
    }
    runs |= {(found.choice, have): found.records for found in paid}
    runs |= {(found.choice, found.batch): (found.record,) for found in more}
    speeds = {step: step[1] / typical(records) for step, records in runs.items()}
    rows = []
    for (choice, batch), records in runs.items():
        ratio = speeds[choice, batch] / next(iter(speeds.values()))
        rows.append(
            {
                "Step": word(choice.words()),
                "Sequences": number(batch, text.count),
                "Speed per token": Value(text=text.times(ratio), sort=ratio),
                "Step, ms": number(typical(records), text.milliseconds),
                _peak_title(evidence.question): number(peak(records), text.gib),
                "Runs": number(len(records), text.count),
            }
        )
    note = (
        "Checkpointed blocks keep their inputs alone and compute again in the backward pass: memory saved for time paid. "
        "Speed per token: over the first row."
    )
    return table_of("room", "Memory against batch", rows, note)


def _left_out(evidence: Evidence) -> list[str]:
    """Return what was not measured, with the reason: time, an error, or memory."""
    found = [f"For lack of time: {reason}." for reason in evidence.left_out]
    found += [f"{choice.words()}: {reason}" for choice, reason in evidence.wrong.items()]
    found += [f"{_part(part)}, so no prediction: {why}" for part, why in evidence.failed.items()]
    found += [f"{what}: {why}." for what, why in evidence.question.left_out.items()]
    if evidence.excluded:
        found.append(f"{len(evidence.excluded)} combinations that are predicted to take more than --memory.")
    return found
