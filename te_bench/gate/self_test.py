"""Measure how well a gate works on this machine: gates of the same code against itself, unchanged and with planted faults.

The result is the rate of alarms on unchanged code, and of slow-downs, leaks and crashes found. Each gate is a complete one
with its own processes. Its answer is a line of DIR/self-test.jsonl, so a long self-test can be continued.
"""

import contextlib
import functools
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from te_bench.experiments.spec import Options
from te_bench.gate import checkouts, places, revisions
from te_bench.gate.decision import GateVerdict, decide
from te_bench.gate.neighbours import first_timed
from te_bench.gate.places import Place
from te_bench.gate.question import FEWEST, Question
from te_bench.gate.stored_runs import Gate
from te_bench.reports.convergence.stability import rate_bound
from te_bench.reports.page import text
from te_bench.reports.page.table import Table, Value, filled, number, word

ANSWERS = "self-test.jsonl"
UNCHANGED = "unchanged"
LEAK = 2**25  # bytes per call
CONFIDENCE = 0.95
REDRAWN = 500  # gates
CERTAIN = 5  # at most so many gates of a fault that is always or never found: a leak, a crash


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """A planted fault, and the exit code that shows that the gate noticed it."""

    name: str
    fault: Mapping[str, Any]
    expected: int
    rounds: int | None = None  # None: until the gate decides


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """The rate of alarms in the gates of one condition, with the exact (Clopper-Pearson) 95 % interval."""

    condition: Condition
    gates: int
    alarms: int  # gates with exit code `expected`; for unchanged code, false alarms (1)
    low: float
    high: float
    undecided: int  # exit code 3
    failed: int  # gates with another exit code than 0, 1, 3 and `expected`: they say nothing of the condition
    longest_s: float
    pairs: float  # mean over trials
    redrawn: float | None = None  # share with a REGRESSION among REDRAWN gates resampled from these gates' pairs


def conditions(slower: Sequence[float]) -> list[Condition]:
    """Return unchanged code, each slow-down, a leak and a crash; the last two show in the first round."""
    return [
        Condition(name=UNCHANGED, fault={}, expected=1),
        *(Condition(name=f"{100 * share:g} % slower", fault={"slower": share}, expected=1) for share in slower),
        Condition(name="leak", fault={"leak": LEAK}, expected=1, rounds=1),
        Condition(name="crash", fault={"crash": True}, expected=4, rounds=1),
    ]


def run(
    question: Question,
    directory: Path,
    machine: dict[str, Any],
    *,
    gates: int,
    slower: Sequence[float],
    where: Sequence[Any] = (Place(),),
    run_each: Callable[..., Iterable[Mapping[str, Any]]] = places.run_each,
    say: Callable[[str], None],
) -> list[Rate]:
    """Run `gates` gates of each condition, the conditions in turn, one gate at each place; gates in `directory` count.

    run_each: of `places`, or of gates_on_ray for a cluster. Of a leak and a crash at most CERTAIN gates are run. The fault
    is planted into the first timed trial. Raise ValueError for a suite that times none.
    """
    if gates < 1:
        raise ValueError(f"--gates {gates}: give 1 or more")
    options = Options(**{**question.options, "device": question.device, "cache": question.cache})
    first = first_timed(question.suite, options, question.only)
    question = replace(question, faulty=first.name.rpartition("/")[0] + "/s*")  # whatever its seed
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / ANSWERS
    planted = conditions(slower)
    asked = _identity(question, machine, len(where))
    known = [answer for answer in _read(path) if answer["asked"] == asked]  # of a self-test that was cut short
    done = Counter(answer["condition"] for answer in known)
    planned = {one.name: gates if one.rounds is None else min(gates, CERTAIN) for one in planted}
    left = [one for turn in range(gates) for one in planted if done[one.name] <= turn < planned[one.name]]
    say(f"{len(left)} gates to run, {len(where)} at once")
    for found in run_each(functools.partial(_run_gate, question, machine), left, where):
        answer = {**found, "asked": asked}
        known.append(answer)
        _append(path, answer)
        done[found["condition"]] += 1
        number = f"gate {done[found['condition']]} of {planned[found['condition']]}, {found['condition']}"
        say(f"{number}: exit code {found['exit_code']} after {found['seconds']:.0f} s")
    return _all_rates(known, planted, asked)


def _run_gate(question: Question, machine: dict[str, Any], condition: Condition, place: Place) -> dict[str, Any]:
    began = time.monotonic()
    question = replace(
        question,
        faults={"head": condition.fault} if condition.fault else None,
        only=question.faulty if condition.rounds == 1 else question.only,
        most=condition.rounds,
        gpu=place.gpu or question.gpu,
    )
    with checkouts.temporary() as folder:
        gate = revisions.run(question, folder, machine, say=lambda line: None)
    return {**_answer(gate, condition), "seconds": time.monotonic() - began}


def stored(directory: Path) -> list[Rate]:
    """Return the rates of a finished self-test.

    Answers without means, of before these were judged, are judged anew on their pairs by `decide`. Raise ValueError if there
    are no answers, or answers to several questions.
    """
    path = directory / ANSWERS
    answers = _read(path)
    questions = {json.dumps(answer["asked"], sort_keys=True) for answer in answers}
    if len(questions) != 1:
        raise ValueError(f"{path} holds the answers of {len(questions)} self-tests; give a directory with one")
    asked = answers[0]["asked"]
    answers = [{**answer, "exit_code": _exit_code(answer)} for answer in answers]
    slower = dict.fromkeys(answer["slower"] for answer in answers if answer["slower"])
    return _all_rates(answers, conditions(list(slower)), asked)


def _exit_code(answer: Mapping[str, Any]) -> int:
    """Return the exit code by `decide` on a gate's pairs; the stored one for other findings, or if means were judged."""
    trials, asked = answer["trials"], answer["asked"]
    judged = any(trial.get("means") for trial in trials.values())
    if judged or not trials or answer["condition"] in ("leak", "crash"):
        code: int = answer["exit_code"]
        return code
    ratios = {name: trial["ratios"] for name, trial in trials.items()}
    how: dict[str, Any] = {"margin": asked["margin"], "alpha": asked["alpha"], "looks": revisions.LOOKS, "ended": True}
    verdicts = {one.verdict for one in decide(ratios, **how).judgements.values()}
    return 1 if GateVerdict.REGRESSION in verdicts else 3 if GateVerdict.INCONCLUSIVE in verdicts else 0


def _all_rates(
    answers: Sequence[Mapping[str, Any]], found: Sequence[Condition], asked: Mapping[str, Any]
) -> list[Rate]:
    question = {name: asked[name] for name in ("margin", "alpha", "exit_first")}
    return [measure_rate(one, [a for a in answers if a["condition"] == one.name], **question) for one in found]


def _answer(gate: Gate, condition: Condition) -> dict[str, Any]:
    return {
        "condition": condition.name,
        "slower": condition.fault.get("slower"),
        "exit_code": gate.exit_code,
        "findings": [f"{finding.kind}: {finding.name}" for finding in gate.findings if finding.code],
        "trials": {
            name: {
                "verdict": one.verdict,
                "ratio": one.ratio,
                "pairs": one.pairs,
                "ratios": list(gate.timed.ratios[name]),
                "means": list(gate.timed.means.get(name, [])),
            }
            for name, one in gate.trials.items()
        },
    }


def _identity(question: Question, machine: Mapping[str, Any], at_once: int) -> dict[str, Any]:
    """Return what answers must share to be counted together: question, machine, number of gates at once, code."""
    names = ("device", "suite", "only", "margin", "alpha", "budget_s", "exit_first", "faulty", "timeout_s")
    asked = {name: getattr(question, name) for name in names}
    more = {"data": dict(question.options.get("data") or {}), "looks": list(revisions.LOOKS)}
    return {**asked, **more, "at_once": at_once, "machine": dict(machine["identity"])}


def _read(path: Path) -> list[dict[str, Any]]:
    """Return every answer, without lines that a kill left incomplete."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def _append(path: Path, answer: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        if file.tell() and not path.read_bytes().endswith(b"\n"):  # a kill left an incomplete line
            file.write("\n")
        file.write(json.dumps(answer) + "\n")
        file.flush()
        os.fsync(file.fileno())


def measure_rate(
    condition: Condition, answers: Sequence[Mapping[str, Any]], *, margin: float, alpha: float, exit_first: bool = False
) -> Rate:
    """Return how often a condition raised the alarm.

    Gates that end at the first regression are not resampled if a fault is planted: they never reached their later looks.
    """
    alarms, n = sum(answer["exit_code"] == condition.expected for answer in answers), len(answers)
    low, high = interval(alarms, n)
    pairs = [trial["pairs"] for answer in answers for trial in answer["trials"].values()]
    whole = condition.rounds is None and not (exit_first and condition.fault)
    return Rate(
        condition=condition,
        gates=n,
        alarms=alarms,
        low=low,
        high=high,
        undecided=sum(answer["exit_code"] == 3 for answer in answers),
        failed=sum(answer["exit_code"] not in (0, 1, 3, condition.expected) for answer in answers),
        longest_s=max((answer["seconds"] for answer in answers), default=0.0),
        pairs=sum(pairs) / len(pairs) if pairs else 0.0,
        redrawn=redraw(answers, margin=margin, alpha=alpha) if whole else None,
    )


def redraw(answers: Sequence[Mapping[str, Any]], *, margin: float, alpha: float, gates: int = REDRAWN) -> float | None:
    """Return the share with a REGRESSION among `gates` gates whose pairs are resampled from the answers' pairs.

    This gives more gates than there is time to run, but of the same pairs, so the share has no interval. A resampled gate
    has as many pairs of each trial as most answers have of their longest undecided trial, and the looks of such a gate. A
    trial with many pairs, because they were noisy, is drawn from all of them. None for fewer than two gates.
    """
    known: dict[str, list[Sequence[float]]] = {}  # {trial: (ratio, mean) of its pairs, or (ratio,)}
    for answer in answers:
        for name, trial in answer["trials"].items():
            pairs = zip(trial["ratios"], *([trial["means"]] if trial.get("means") else []), strict=True)
            known.setdefault(name, []).extend(pair for pair in pairs if None not in pair)
    longest = [max(trial["pairs"] for trial in answer["trials"].values()) for answer in answers if answer["trials"]]
    most = statistics.median_high(longest) if longest else 0
    if len(longest) < 2 or most < FEWEST or not all(known.values()):
        return None
    looks = revisions.looks_within(most)
    generator = np.random.default_rng(0)
    found = 0
    for _ in range(gates):
        drawn = {name: generator.choice(pairs, size=most).T.tolist() for name, pairs in known.items()}
        ratios, means = ({name: kinds[i] for name, kinds in drawn.items() if i < len(kinds)} for i in (0, 1))
        decided = decide(ratios, means=means or None, margin=margin, alpha=alpha, looks=looks)
        found += any(one.verdict is GateVerdict.REGRESSION for one in decided.judgements.values())
    return found / gates


def interval(k: int, n: int) -> tuple[float, float]:
    """Return the exact 95 % interval of a share of which k of n were seen (Clopper & Pearson 1934, Biometrika 26:404)."""
    if n == 0:
        return 0.0, 1.0  # no gate of this condition has run
    one_sided = (1 + CONFIDENCE) / 2
    return 1 - rate_bound(n - k, n, one_sided), rate_bound(k, n, one_sided)


def passed(rates: Sequence[Rate], alpha: float) -> bool:
    """Return whether every leak and crash was noticed, and unchanged code raised no more alarms than alpha can explain.

    Not if a condition has no gate, or a gate of unchanged code failed.
    """
    noticed = all(one.alarms == one.gates for one in rates if one.condition.rounds == 1)
    quiet = all(one.low <= alpha and not one.failed for one in rates if not one.condition.fault)
    return noticed and quiet and all(one.gates for one in rates)


def table(rates: Sequence[Rate]) -> Table:
    """Return one row per condition. The column of failed gates is there if there are any."""
    any_failed = any(one.failed for one in rates)
    rows = [
        {
            "Planted": word(one.condition.name),
            "Alarms": Value(text=f"{one.alarms} of {one.gates}", sort=one.alarms),
            "Interval": word(f"{100 * one.low:.0f} to {100 * one.high:.0f} %"),
            "Redrawn": number(one.redrawn, lambda share: text.MISSING if share is None else f"{100 * share:.1f} %"),
            "Undecided": Value(text=f"{one.undecided}", sort=one.undecided),
            **({"Failed": Value(text=f"{one.failed}", sort=one.failed)} if any_failed else {}),
            "Pairs": number(one.pairs, lambda pairs: f"{pairs or 0:.1f}"),
            "Longest, s": number(one.longest_s, lambda seconds: f"{seconds or 0:.0f}"),
        }
        for one in rates
    ]
    note = (
        "Alarms: gates with exit code 1, for a crash 4; for unchanged code they are false. Interval: exact, 95 %. Redrawn: "
        f"alarms in {REDRAWN} gates resampled from all ratios. Undecided: exit code 3. "
        f"{'Failed: any other exit code. ' * any_failed}Pairs: mean per trial."
    )
    return filled("self-test", "Self-test", rows, note)  # there are conditions
