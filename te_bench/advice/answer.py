"""Put the answer into words, at most LINES lines on a terminal, and into JSON that names the records of each number.

No torch.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from te_bench.advice import convergence
from te_bench.advice.advise import STEPS, Evidence
from te_bench.advice.candidates import COMPILED, Choice, Question
from te_bench.advice.code import NOTHING, code
from te_bench.advice.decision import (
    AS_FAST,
    Decision,
    Paid,
    between,
    budget_of,
    checkpointing,
    fp8_in_words,
    ids,
    larger_batches,
    linear_gains,
)
from te_bench.advice.predict import Prediction
from te_bench.advice.steps import extent, noisy, peak, typical
from te_bench.advice.traps import Finding
from te_bench.experiments.spec import OWN_ATTENTION, Record
from te_bench.reports.analysis import naming
from te_bench.reports.analysis.measures import Ratio
from te_bench.reports.page import screen, text

LINES = 23
MEASURES = "A larger --budget would also measure"


def sentences(evidence: Evidence, decision: Decision, findings: Sequence[Finding]) -> list[str]:
    """Return what is advised and why, the most important first; a sentence's command is on a line of its own."""
    question = evidence.question
    said = [_promising(evidence, decision), _use(evidence, decision), decision.why, _faster(evidence, decision)]
    said += [" ".join(filter(None, [_memory(question, decision), _predicted(evidence, decision.use)]))]
    said += [_checkpointing(evidence, decision.use)]
    said += [_shown(evidence, decision)]
    said += [convergence.in_words(question, decision.use, decision.seconds, beside=decision.shown is None)]
    said += [fp8_in_words(evidence, decision.use, decision.fitting)]
    if findings:
        others = f" {len(findings) - 1} more: see Traps." if len(findings) > 1 else ""
        said += [f"Trap: {findings[0].what} {findings[0].mend}{others}"]
    said += [_without_fp8(evidence, decision), _larger(evidence, decision.use)]
    if decision.tied and not decision.undecided:
        alike = "; or ".join(choice.beside(decision.use) for choice in decision.tied)
        said += [f"Not distinguished from it: {alike}."]
    if evidence.left_out:
        budgeted = "--budget" in decision.why  # then `why` names the budget that is needed
        said += [f"{'No time for' if budgeted else MEASURES}: {_named(evidence.left_out)}."]
    return [sentence for sentence in said if sentence]


def terminal(evidence: Evidence, decision: Decision, findings: Sequence[Finding], page: str) -> str:
    """Return the sentences and the code in LINES lines; the page holds what is too long, and the last sentence's end."""
    copied = code(evidence.question, decision.use)
    unknown = decision.undecided and copied == [NOTHING]
    lines = [] if unknown else [f"    {line}" for line in copied]
    wrap = textwrap.TextWrapper(screen.WIDTH, subsequent_indent="  ", break_on_hyphens=False, placeholder=" ...")
    kept: list[str] = []
    *first, last = sentences(evidence, decision, findings)
    for number, sentence in enumerate(first):
        words, _, command = sentence.partition("\n")
        wrapped = [*wrap.wrap(words), *([f"  {command}"] if command else [])]  # in one line, to be copied
        if len(kept) + len(wrapped) + len(lines) + 1 <= LINES:
            kept += wrapped
        elif number == 0:
            kept += wrapped[:2]
    wrap.max_lines = LINES - len(kept) - len(lines) - 1
    kept += wrap.wrap(last) if wrap.max_lines > 0 else []
    return "\n".join([*kept, *lines, f"report: {page}"])


def _named(left_out: Sequence[str]) -> str:
    """Return all names in one line: steps by torch.compile bf16; te-bench bf16, torch.compile; a larger batch."""
    steps = [words.removeprefix(STEPS) for words in left_out if words.startswith(STEPS)]
    others = [words for words in left_out if not words.startswith(STEPS)]
    return "; ".join([STEPS + "; ".join(steps), *others] if steps else others)


def _promising(evidence: Evidence, decision: Decision) -> str:
    """Return a sentence about the unmeasured step with the best prediction, if it beats every measured step."""
    promised = evidence.promising
    if promised is None:
        return ""
    have = decision.have_seconds
    beside = "" if have is None else f" (what you have: {text.milliseconds(have)})"
    return (
        f"Most promising, not measured: {promised.choice.words()}, predicted {between(promised)} ms a step{beside}; "
        f"{budget_of(evidence.verified_s)} measures it."
    )


def _use(evidence: Evidence, decision: Decision) -> str:
    if decision.undecided:
        return f"Undecided: {decision.undecided}."
    if decision.keeps:
        return f"Keep what you have, {decision.have.words()}: {_nothing(evidence, decision)}."
    return f"Use {decision.use.words()}{_attention(evidence, decision.use)}."


def _nothing(evidence: Evidence, decision: Decision) -> str:
    """Return that no step is faster; of those that --memory forbids, the fastest that is."""
    best = min(evidence.steps, key=lambda choice: typical(evidence.steps[choice]))
    if best in decision.fitting:
        return "nothing that was measured is faster"
    held = text.gib(peak(evidence.steps[best]) or math.nan)
    takes = f"{best.words()}, {measured_in_words(evidence.steps[best])}, takes {held} GiB"
    return f"nothing that was measured and fits into --memory is faster; {takes}"


def _attention(evidence: Evidence, use: Choice) -> str:
    name = chosen_attention(evidence, use)
    return f", {naming.attention_name(name)}" if name else ""


def chosen_attention(evidence: Evidence, use: Choice) -> str | None:
    """Return which kernel computed attention, where the choice leaves that to the model or to te-bench's table."""
    seen = {record.work.get("chosen") for record in evidence.steps.get(use, ())} - {None}
    if use.attention != OWN_ATTENTION or len(seen) != 1 or (name := str(seen.pop())).startswith("none"):
        return None
    return name


def _faster(evidence: Evidence, decision: Decision) -> str:
    if decision.have_seconds is None:
        ended = evidence.wrong.get(decision.have, "it did not run here")
        return f"What you have has no time, so that there is no speed-up: {text.shortened(ended, 160)}."
    if decision.keeps:
        return ""
    said = f"{text.speedup(decision.speedup)} as fast as what you have ({decision.have.words()}), "
    said += f"{decision.runs} runs of each" if decision.runs > 1 else "one run of each"
    if decision.over_best is not None:
        other, ratio = decision.over_best
        fits = " and fits" if len(decision.fitting) < len(evidence.steps) else ""
        said += (
            f"; {text.speedup(ratio)} as fast as the best that was measured{fits} without te-bench ({other.words()})"
        )
    unknown = [naming.rival_name(name) for name in unmeasured_rivals(evidence)]
    return f"{said}. Not measured: {text.listed(unknown, len(unknown))}." if unknown else f"{said}."


def unmeasured_rivals(evidence: Evidence) -> list[str]:
    """Return the rivals without a time that could train the model, torch.compile among them."""
    cannot = {choice for choice, reason in evidence.wrong.items() if reason.startswith("unsupported")}
    steps: dict[str, set[Choice]] = {}
    for choice in evidence.question.frames:
        if choice.rival or (choice.of_others and choice.mode in COMPILED):
            steps.setdefault(choice.rival or "torch.compile", set()).add(choice)
    return [name for name, found in steps.items() if not found & evidence.steps.keys() and not found <= cannot]


def _shown(evidence: Evidence, decision: Decision) -> str:
    """Return a sentence about the fastest step that a study shows to train like bf16, if the advised one is not shown."""
    if decision.shown is None:
        return ""
    choice, ratio = decision.shown
    said = (
        f"Shown to train like bf16 on GPT-2: {choice.beside(decision.use)}, {measured_in_words(evidence.steps[choice])}"
    )
    if ratio is None:
        return f"{said}."
    once = "" if ratio.low is not None else ", by one run"
    return f"{said}, {text.speedup(ratio)} as fast as what you have{once}."


def _without_fp8(evidence: Evidence, decision: Decision) -> str:
    """Return a sentence about the fastest step without FP8, if the advised step uses FP8."""
    if decision.use.recipe is None or decision.undecided or decision.keeps:
        return ""
    plain = [choice for choice in decision.fitting if choice.precision == "bf16" and choice != decision.have]
    best = min(plain, key=lambda choice: typical(evidence.steps[choice]), default=None)
    have = decision.have_seconds
    if best is None or (have is not None and typical(evidence.steps[best]) >= have):
        return ""
    said = f"Without FP8: {best.words()}, {measured_in_words(evidence.steps[best])}"
    adds = "" if best.of_others else f"; FP8 is {text.times(typical(evidence.steps[best]) / decision.seconds)} as fast"
    return f"{said}{adds}."


def _memory(question: Question, decision: Decision) -> str:
    if decision.memory is None or decision.have_memory is None or decision.keeps:
        return ""
    what = "Memory" if question.device == "cuda" else "Resident memory"
    return f"{what}: {text.gib(decision.memory)} instead of {text.gib(decision.have_memory)} GiB."


def _predicted(evidence: Evidence, choice: Choice) -> str:
    prediction, measured = evidence.predictions.get(choice), measured_in_words(evidence.steps[choice])
    if prediction is None or choice in evidence.question.frames:
        return f"Measured: {measured}."
    return f"Predicted: {between(prediction)} ms a step. Measured: {measured}."


def _larger(evidence: Evidence, use: Choice) -> str:
    """Return a sentence about the measured larger batch that is fastest per token."""
    of_use = (one for one in larger_batches(evidence) if replace(one.choice, checkpointing=use.checkpointing) == use)
    best = next(of_use, None)
    if best is None:
        return ""
    held = peak([best.record])
    fits = "fits, too" if best.choice == use else "fits by checkpointed blocks"
    takes = "" if held is None else f", {text.gib(held)} GiB"
    return f"A batch of {best.batch} {fits}{takes}: {text.times(best.faster)} as fast per token, by one run."


def _checkpointing(evidence: Evidence, use: Choice) -> str:
    """Return what checkpointed blocks save and cost in the advised step, else in the measured step that has them."""
    others = [choice for choice in evidence.steps if choice.checkpointing and choice.accumulate < use.accumulate]
    if others and not use.checkpointing:
        records = evidence.steps[min(others, key=lambda choice: peak(evidence.steps[choice]) or math.inf)]
        held = peak(records)
        takes = "" if held is None else f", {text.gib(held)} GiB"
        return f"Checkpointed blocks in place of micro-batches: {measured_in_words(records)}{takes}."
    known = {paid.choice: paid for paid in checkpointing(evidence)}
    paid = known.get(replace(use, checkpointing=True)) or next(iter(known.values()), None)
    if paid is not None:
        return saved_in_words(paid)
    ended = evidence.wrong.get(replace(use, checkpointing=False), "") if use.checkpointing else ""
    return "Without checkpointed blocks this step runs out of memory." if ended.startswith("oom") else ""


def saved_in_words(paid: Paid) -> str:
    """Return for example: Checkpointed blocks save 12.1 of 43.9 GiB and cost 28.0 % more time."""
    cost = f"{text.percent(paid.slower - 1)} more time" if paid.slower > AS_FAST else "no time that shows"
    saved = ""
    if paid.memory is not None:
        before, after = paid.memory
        shows = after < before
        saved = (
            f"save {text.gib(before - after)} of {text.gib(before)} GiB and " if shows else "save no memory here and "
        )
    return f"Checkpointed blocks {saved}cost {cost}{', by one run' if len(paid.records) == 1 else ''}."


def measured_in_words(records: Sequence[Record]) -> str:
    """Return for example: 251 ms a step (3 runs: 95 to 564). Only noisy steps have the range."""
    said = f"{text.milliseconds(typical(records))} ms a step"
    if not noisy(records):
        return said
    low, high = map(text.milliseconds, extent(records))
    return f"{said} ({len(records)} runs: {low} to {high})"


def to_json(evidence: Evidence, decision: Decision, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return everything that was found; `records` are trial ids of the journal in the same folder."""
    question = evidence.question
    return {
        "question": {"model": question.model, "device": question.device, "problem": dict(question.problem)},
        "answer": {
            "sentences": sentences(evidence, decision, findings),
            "use": asdict(decision.use),
            "have": asdict(decision.have),
            "code": code(question, decision.use),
            "undecided": decision.undecided and f"{decision.undecided}. {decision.why}",
            "speedup": _ratio(decision.speedup),
            "unmeasured_rivals": unmeasured_rivals(evidence),
            "over_best": decision.over_best
            and {**asdict(decision.over_best[0]), "ratio": _ratio(decision.over_best[1])},
            "seconds": decision.seconds,
            "memory_bytes": decision.memory,
            "have_seconds": decision.have_seconds,
            "have_memory_bytes": decision.have_memory,
            "not_distinguished": [asdict(choice) for choice in decision.tied],
            "records": [*ids(evidence.steps[decision.use]), *ids(evidence.steps.get(decision.have, ()))],
        },
        "steps": [_step(evidence, choice) for choice in evidence.steps],
        "most_promising_not_measured": evidence.promising and _prediction(evidence, evidence.promising),
        "predictions": [
            _prediction(evidence, p) for p in sorted(evidence.predictions.values(), key=lambda p: p.seconds)
        ],
        "larger_batches": [
            {**asdict(larger.choice), "batch": larger.batch, "faster_per_token": larger.faster}
            | {"seconds": typical([larger.record]), "memory_bytes": peak([larger.record])}
            | {"records": [*ids([larger.record]), *ids(larger.than)]}
            for larger in larger_batches(evidence)
        ],
        "checkpointing": [
            {**asdict(paid.choice), "times_the_seconds": paid.slower}
            | dict(zip(("memory_bytes_without", "memory_bytes"), paid.memory or (None, None), strict=True))
            | {"records": ids([*paid.without, *paid.records])}
            for paid in checkpointing(evidence)
        ],
        "linears": [
            {"rows": g.sizes[0], "in_features": g.sizes[1], "out_features": g.sizes[2], "calls": g.calls}
            | {"bf16_s": g.bf16.seconds, "fp8_s": g.fp8 and g.fp8.seconds, "recipe": g.recipe}
            | {"records": ids([t.record for t in (g.bf16, g.fp8) if t is not None])}
            for g in linear_gains(evidence)
        ],
        "findings": [asdict(finding) for finding in findings],
        "survey": evidence.survey.trial.id,
        "left_out": list(evidence.left_out),
        "does_not_apply": dict(question.left_out),
        "excluded_by_memory": [{**asdict(c), "memory_bytes": held} for c, held in evidence.excluded.items()],
        "not_measured": [{**asdict(choice), "reason": reason} for choice, reason in evidence.wrong.items()],
        "parts_without_a_time": [
            {
                "workload": part.workload,
                "by": part.rival,
                "mode": part.mode,
                "problem": dict(part.problem),
                "reason": why,
            }
            for part, why in evidence.failed.items()
        ],
        "took_s": evidence.seconds,
    }


def _prediction(evidence: Evidence, found: Prediction) -> dict[str, Any]:
    records = [evidence.times[part].record.trial.id for part in found.parts]
    return {
        **asdict(found.choice),
        **{"seconds": found.seconds, "bound_s": found.bound_s, "memory_bytes": found.memory},
        **{"gains_s": dict(found.gains), "records": records},
    }


def _ratio(ratio: Ratio | None) -> dict[str, Any] | None:
    return None if ratio is None else {"value": ratio.value, "low": ratio.low, "high": ratio.high, "pairs": ratio.n}


def _step(evidence: Evidence, choice: Choice) -> dict[str, Any]:
    records = evidence.steps[choice]
    return {**asdict(choice), "seconds": typical(records), "memory_bytes": peak(records), "records": ids(records)}
