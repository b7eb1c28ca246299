"""Write a gate's findings for a terminal, a pull request, a JUnit reader and a program."""

import itertools
import json
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from te_bench.gate.decision import FAMILY, MEAN_MARGINS, GateJudgement, GateVerdict
from te_bench.gate.looks import MeasuredRatio
from te_bench.gate.memory_and_checks import GateFinding
from te_bench.gate.stored_runs import REGRESSED, Gate
from te_bench.reports.analysis.rows import unique
from te_bench.reports.files import write_file
from te_bench.reports.page import screen, tables, text
from te_bench.reports.page.table import Table, Value, number, table_of, word

SCHEMA = 2  # of the JSON; 2: the mean of all calls is judged too
MARKER = "<!-- te-bench gate -->"  # a workflow finds its own comment by this marker and updates it
MOST_SAID = 5  # regressions in sentences
_WIDTH = screen.WIDTH
_HEADINGS = {1: "Got worse", 4: "Missing or failed", 3: "Undecided", 0: "Also"}
_ANSWERS = {0: "PASS", 1: "REGRESSION", 3: "INCONCLUSIVE", 4: "INCOMPLETE", 5: "ENVIRONMENT MISMATCH"}


def sentence(gate: Gate) -> str:
    """Return the gate's answer in one sentence."""
    answer = _ANSWERS[gate.exit_code]
    if gate.exit_code == 5:
        return f"{answer}: nothing is judged, because the runs have different environments: {'; '.join(gate.mismatch)}."
    trials = [one.verdict for one in gate.trials.values()]
    counts = [(verdict, trials.count(verdict)) for verdict in GateVerdict]
    said = [f"{n} {verdict}" for verdict, n in counts if n]
    said = [f"{', '.join(said)} of {len(trials)} timed"] if said else ["nothing was timed on both sides"]
    family = _judgements(gate).get(FAMILY)
    said += [f"their geometric mean {family.verdict}"] if family else []
    for code in (1, 4, 3):
        if n := sum(finding.code == code for finding in gate.findings):
            said.append(f"{_HEADINGS[code].lower()}: {n}")
    return f"{answer}: {'; '.join(said)}. Margin {_percent(gate.margin)}, alpha {gate.alpha:g}."


def _judgements(gate: Gate) -> Mapping[str, GateJudgement]:
    """Return the judgements to show: not an undecided mean beside a REGRESSION, which already is the answer."""
    family = gate.judgements.get(FAMILY)
    open_ = family is not None and family.verdict is GateVerdict.INCONCLUSIVE
    return gate.trials if open_ and gate.exit_code == REGRESSED else gate.judgements


def table(gate: Gate, limit: int | None = None) -> Table | None:
    """Return a row for each of `_judgements`, the slowest first; words of names have at most `limit` characters."""
    if gate.decision is None:
        return None
    shown = {name: _named(gate, name) for name in gate.judgements}
    if limit is not None and any(len(word) > limit for name in shown.values() for word in name.split()):
        shown |= _shorten({name: said for name, said in shown.items() if name != FAMILY}, limit)
    ordered = sorted(_judgements(gate).items(), key=lambda item: (item[0] == FAMILY, -(item[1].ratio or 0.0)))
    rows = [_row(shown[name], one, gate.timed.throttled.get(name, 0)) for name, one in ordered]
    bars = f"{_percent(gate.margin)} and {_percent(MEAN_MARGINS * gate.margin)}"
    note = (
        "Ratios: candidate / baseline, of typical calls (on a CPU the lowest tenth, on a GPU the median) and of the mean of "
        f"all calls. To PASS, their intervals must end below 1 + {bars}. Finds is the test's power, not its result: the "
        "slow-down that 80 % of gates call a REGRESSION; fewer gates find a smaller one. Pairs set aside are in parentheses."
        f"{_say_where_no_interval_is(gate)}{_say_how_rare(gate)}"
    )
    return table_of("gate", "Seconds", rows, note)


def _say_where_no_interval_is(gate: Gate) -> str:
    without = [name for name, one in _judgements(gate).items() if one.ratio is not None and one.low is None]
    if not without:
        return ""
    who = f"{_named(gate, without[0])} has" if len(without) == 1 else f"{len(without)} rows have"
    return f" {who} no interval: the pairs do not vary, or are too few to bound the ratio within a factor of 1,000."


def _say_how_rare(gate: Gate) -> str:
    """Say how rare a slow call can be and go unnoticed: in 5 % of cases n calls hold none of a kind that is 1 in n / 3."""
    fewest = min(gate.timed.calls.values(), default=0)
    if not fewest:
        return ""
    made = f" Of each trial either side made at least {fewest:,} calls"
    return (
        f"{made}: a slow-down of fewer than 1 in {fewest // 3:,} calls can go unseen."
        if fewest >= 6
        else f"{made}, too few to see a slow-down of some calls."
    )


def _row(name: str, one: GateJudgement, aside: int) -> dict[str, Value]:
    return {
        "Trial": word(name),
        "Typical call": _ratio(one),
        "All calls": _ratio(one.mean or MeasuredRatio()),
        "Finds": number(one.detectable, lambda share: text.MISSING if share is None else f">= {_percent(share)}"),
        "Pairs": Value(text=f"{one.pairs}{f' ({aside})' if aside else ''}", sort=one.pairs),
        "Verdict": word(one.verdict.value),
    }


def _ratio(one: MeasuredRatio) -> Value:
    if one.ratio is None:
        return word(None)
    interval = "" if one.low is None or one.high is None else f" [{one.low:.3f}, {one.high:.3f}]"
    return Value(text=f"{one.ratio:.3f}{interval}", sort=one.ratio)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _named(gate: Gate, name: str) -> str:
    return gate.plain.get(name, name)


def _shorten(names: Mapping[str, str], limit: int) -> dict[str, str]:
    """Cut {key: name} in the middle; if two then look alike, first drop the words that all names begin and end with."""
    cut = {key: _cut_middle(name, limit) for key, name in names.items()}
    if len(set(cut.values())) == len(cut):
        return cut
    words = [re.split("(?<=[/-])", name) for name in names.values()]
    start = _count_shared(words)
    end = _count_shared([found[start:][::-1] for found in words])
    apart = ["".join(found[start : len(found) - end]).rstrip("/-") for found in words]
    return {key: _cut_middle(f"…{of}", limit) for key, of in zip(names, apart, strict=True)}


def _count_shared(words: Sequence[Sequence[str]]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*words, strict=False)))


def _cut_middle(name: str, limit: int) -> str:
    """Cut a name that is too long in its middle, because trials differ at the ends of their names."""
    if len(name) <= limit:
        return name
    return name[: (limit - 1) // 2] + "…" + name[len(name) - limit // 2 :]


def terminal(gate: Gate) -> list[str]:
    """Return the gate as lines of at most 100 columns."""
    lines = textwrap.wrap(sentence(gate), _WIDTH)
    for said in _regressions(gate):
        lines += _wrap(said)
    full = table(gate)
    if full is not None:
        columns = zip([c.title for c in full.columns], *([v.text for v in row] for row in full.rows), strict=True)
        rest = sum(max(map(len, column)) + 2 for column in list(columns)[1:])
        shown = table(gate, max(12, _WIDTH - rest))
        assert shown is not None
        lines += ["", *tables.terminal(shown), *textwrap.wrap(full.note, _WIDTH), ""]
        for name, one in _undecided(gate).items():
            lines += _wrap(f"{_named(gate, name)}: {one.reason}")
    for heading, found in _sections(gate):
        lines += ["", f"{heading}:"]
        for finding in found:
            lines += _wrap(f"  {_named(gate, finding.name)}: {finding.message}")
    for note in _notes(gate):
        lines += ["", *_wrap(note)]
    return lines


def _wrap(content: str) -> list[str]:
    return textwrap.wrap(content, _WIDTH, subsequent_indent="    ", initial_indent="  " if content[0] == " " else "")


def _regressions(gate: Gate) -> list[str]:
    """Say which trials are slower and by how much, the slowest first; at most MOST_SAID of them."""
    slower = [(name, one) for name, one in gate.judgements.items() if one.verdict is GateVerdict.REGRESSION]
    slower.sort(key=lambda item: (item[0] == FAMILY, -(item[1].ratio or 0.0)))
    said = [f"{_named(gate, name)} is {one.reason}." for name, one in slower]
    return said if len(said) <= MOST_SAID else [*said[:MOST_SAID], f"{len(said) - MOST_SAID} more are in the table."]


def _undecided(gate: Gate) -> dict[str, GateJudgement]:
    """Return the undecided trials; none after a regression, which already is the answer."""
    if gate.exit_code == REGRESSED:
        return {}
    return {name: one for name, one in gate.judgements.items() if one.verdict is GateVerdict.INCONCLUSIVE}


def _sections(gate: Gate) -> list[tuple[str, list[GateFinding]]]:
    """Return the findings by heading, the worst first, without empty headings."""
    found = [(heading, [f for f in gate.findings if f.code == code]) for code, heading in _HEADINGS.items()]
    return [(heading, findings) for heading, findings in found if findings]


def _notes(gate: Gate) -> list[str]:
    allowed = [f"the environments differ, as allowed: {'; '.join(gate.mismatch)}"] if gate.allowed else []
    return [f"Note: {note}." for note in (*(allowed if gate.mismatch else []), *gate.notes)]


def markdown(gate: Gate) -> str:
    """Return a pull request's comment in GitHub's Markdown; text from records is escaped."""
    lines = [MARKER, f"**{tables.escape(sentence(gate))}**", ""]
    lines += [line for said in _regressions(gate) for line in (tables.escape(said), "")]
    lines += [f"Baseline {tables.escape(gate.baseline)}, candidate {tables.escape(gate.candidate)}.", ""]
    shown = table(gate)
    if shown is not None:
        lines += [tables.markdown(shown), f"{tables.escape(shown.note)}", ""]
        lines += [f"- {tables.escape(f'{_named(gate, name)}: {one.reason}')}" for name, one in _undecided(gate).items()]
    for heading, found in _sections(gate):
        lines += ["", f"{heading}:", ""]
        lines += [f"- {tables.escape(f'{_named(gate, finding.name)}: {finding.message}')}" for finding in found]
    lines += [line for note in _notes(gate) for line in ("", tables.escape(note))]
    return "\n".join(lines).rstrip() + "\n"


def junit(gate: Gate) -> str:
    """Return JUnit XML with a test case per trial and finding.

    failure: REGRESSION and what got worse. error: missing, failed, or another environment. skipped: INCONCLUSIVE.
    """
    suite = ElementTree.Element("testsuite", name="te-bench gate", time="0")
    for name, one in gate.judgements.items():
        element = {GateVerdict.REGRESSION: "failure", GateVerdict.INCONCLUSIVE: "skipped"}.get(one.verdict)
        message = one.reason if element else f"{one.verdict}: {one.reason}"
        _add_case(suite, name, "time", element, one.verdict.value, message)
    for finding in gate.findings:
        element = {1: "failure", 3: "skipped", 4: "error"}.get(finding.code)
        _add_case(suite, finding.name, finding.kind.value, element, finding.kind.value, finding.message)
    if gate.exit_code == 5:
        _add_case(suite, "environment", "environment", "error", "mismatch", "; ".join(gate.mismatch))
    elif not len(suite):
        why = "no pair of records ended ok on both sides"
        _add_case(suite, "gate", "compared", "error", "incomplete", why)
    counts = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    suite.attrib |= {"tests": str(len(suite))} | {n: str(len(suite.findall(f"*/{e}"))) for n, e in counts.items()}
    suites = ElementTree.Element("testsuites", suite.attrib)
    suites.append(suite)
    ElementTree.indent(suites)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(suites, encoding="unicode")}\n'


def _add_case(suite: ElementTree.Element, name: str, what: str, element: str | None, kind: str, message: str) -> None:
    """Add a test case with a name of its own: readers take equal names for one test run twice. element: None if passed."""
    group = f"te-bench.gate.{what}"
    taken = {case.get("name") for case in suite if case.get("classname") == group}
    case = ElementTree.SubElement(suite, "testcase", classname=group, name=unique(name, taken), time="0")
    said = ElementTree.SubElement(case, element or "system-out", {"message": message} if element else {})
    said.text = message
    if element in ("failure", "error"):  # in Jenkins' schema a skipped case has no type
        said.set("type", kind)


def to_json(gate: Gate) -> dict[str, Any]:
    """Return the gate as a JSON value; ratios are candidate / baseline, shares are of 1, unknown values are null."""
    return {
        "schema": SCHEMA,
        "exit_code": gate.exit_code,
        "answer": _ANSWERS[gate.exit_code],
        "sentence": sentence(gate),
        "baseline": gate.baseline,
        "candidate": gate.candidate,
        "margin": gate.margin,
        "mean_margin": MEAN_MARGINS * gate.margin,
        "alpha": gate.alpha,
        "environment_mismatch": list(gate.mismatch),
        "environment_change_allowed": gate.allowed,
        "notes": list(gate.notes),
        "pairs_compared": gate.compared,
        "trials": [_to_json(name, one, gate) for name, one in gate.trials.items()],
        "family": _to_json(FAMILY, gate.judgements[FAMILY], gate) if FAMILY in gate.judgements else None,
        "findings": [
            {"name": f.name, "kind": f.kind.value, "exit_code": f.code, "message": f.message} for f in gate.findings
        ],
    }


def _to_json(name: str, one: GateJudgement, gate: Gate) -> dict[str, Any]:
    fields = ("reason", "pairs", "ratio", "low", "high", "detectable", "needed")
    known = {field: getattr(one, field) for field in fields}
    mean = None if one.mean is None else asdict(one.mean)
    counts = {"throttled": gate.timed.throttled.get(name, 0), "calls": gate.timed.calls.get(name)}
    return {"name": name, "verdict": one.verdict.value, **known, "mean": mean, **counts}


def check_writable(files: Sequence[tuple[str, Path]]) -> None:
    """Raise ValueError for a file that cannot be written; to be called before anything is measured."""
    for form, path in files:
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        why = "Is a directory" if path.is_dir() else None if folder.is_dir() else f"{folder} is no directory"
        if why is None and not os.access(folder, os.W_OK):
            why = f"you have no permission to write in {folder}"
        if why is not None:
            raise ValueError(f"cannot write {path}: {why}. Choose another --{form}.")


def write(gate: Gate, files: Sequence[tuple[str, Path]]) -> list[str]:
    """Write the gate as "markdown", "junit" or "json" to each file, whole or not at all; return what failed."""

    def dumped(gate: Gate) -> str:
        return json.dumps(to_json(gate), indent=2, allow_nan=False) + "\n"

    made, failed = {"markdown": markdown, "junit": junit, "json": dumped}, list[str]()
    for form, path in files:
        try:
            write_file(path, made[form](gate).encode(), f"--{form}")
        except ValueError as error:
            failed.append(str(error))
    return failed
