import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
from journals import HOSTILE

from te_bench.gate import output
from te_bench.gate.decision import decide
from te_bench.gate.memory_and_checks import FindingKind, GateFinding
from te_bench.gate.stored_runs import Gate, TimedPairs

LONG = "train_step/gpt2-b12-t1024-V50304/cudnn/fp8/float8_current_scaling/compile-reduce-overhead"
LAYER = "layer/te_layer-fair-b4-s2048-h32/cudnn/fp8/float8_current_scaling/compile-reduce-overhead"


def ratios(slower: float, scale: float = 0.003) -> list[float]:
    return [(1 + slower) * math.exp(scale * math.sin(8 * i)) for i in range(10)]


def found(code: int, kind: FindingKind = FindingKind.MEMORY, message: str = "what happened") -> GateFinding:
    return GateFinding(name=LONG, kind=kind, code=code, message=message)


def gate(**changes) -> Gate:
    data = {LONG: ratios(0.05), LAYER: ratios(0.0), "short": ratios(0.02, 0.03), "quick": ratios(-0.2)}
    findings = found(1), found(4, FindingKind.MISSING), found(3, FindingKind.VERDICT), found(0, FindingKind.NEW)
    known = {"baseline": "runs/a", "candidate": "runs/b", "margin": 0.02, "alpha": 0.05, "decision": decide(data)}
    known |= {"findings": findings}
    return Gate(**(known | {"compared": 40, "timed": TimedPairs(throttled={"short": 2})} | changes))


def test_the_terminal_has_every_verdict_in_a_hundred_columns() -> None:
    lines = output.terminal(gate())
    assert max(map(len, lines)) <= 100
    counted = "1 REGRESSION, 1 PASS, 1 IMPROVED, 1 INCONCLUSIVE of 4 timed"
    assert lines[0].startswith(f"REGRESSION: {counted}; their geometric")
    rows = [line.split() for line in lines if line.endswith(("  REGRESSION", "  PASS", "  IMPROVED", "  INCONCLUSIVE"))]
    assert [row[-1] for row in rows[:4]] == ["REGRESSION", "INCONCLUSIVE", "PASS", "IMPROVED"]  # the slowest first
    assert rows[0][0].startswith("train_step/gpt2")
    assert rows[0][0].endswith("reduce-overhead")
    assert float(rows[0][1]) == pytest.approx(1.05, abs=0.002)
    text = "\n".join(lines)
    assert "10 (2)" in text
    assert ">= 2." in text  # the minimum detectable effect
    assert text.index("Got worse:") < text.index("Missing or failed:") < text.index("Undecided:") < text.index("Also:")
    text = " ".join(text.split())
    assert "To PASS, their intervals must end below 1 + 2 % and 5 %." in text
    assert "Finds is the test's power, not its result" in text


def test_names_that_are_cut_stay_apart() -> None:
    differing = ("V50257/math", "V50257/flash", "V50304/flash")
    names = [f"train_step/gpt2-b12-t1024-{one}/fp8/float8_current_scaling/cudagraph" for one in differing]
    lines = output.terminal(gate(decision=decide({name: ratios(0.0) for name in names}), findings=()))
    rows = [line.split()[0] for line in lines if line.endswith("  PASS") and "geometric" not in line]
    assert len(set(rows)) == len(names)
    assert any("304" in row for row in rows)
    assert max(map(len, lines)) <= 100


def test_a_regression_is_said_with_its_factor_and_interval() -> None:
    """In words before the table, the slowest first; of many the slowest five."""

    def said(found: Gate) -> list[str]:
        lines = output.terminal(found)
        return " ".join(" ".join(lines[: lines.index("")]).split()).partition(" alpha 0.05. ")[2].split(". ")

    one = gate(decision=decide({"a": ratios(0.12), "b": ratios(0.0)}), findings=())
    low, high = one.trials["a"].low, one.trials["a"].high
    assert 1.05 < low < 1.12 < high < 1.2
    words = f"is 1.120 times as slow [{low:.3f}, {high:.3f}], above the margin of 2 % (10 pairs)"
    assert said(one)[0] == f"a {words}"
    assert words.replace("[", "\\[").replace("]", "\\]") in output.markdown(one)
    many = gate(decision=decide({f"t{n}": ratios(0.1 + n / 100) for n in range(7)}), findings=())
    assert [sentence.split()[0] for sentence in said(many)] == ["t6", "t5", "t4", "t3", "t2", "3"]
    [calls] = said(gate(decision=decide({"a": ratios(0.0)}, means={"a": ratios(0.4)}), findings=()))
    assert calls.startswith("a is 1.400 times as slow [1.3")
    assert "] over all calls on average, above 5 % (10 pairs), though typical calls take +0." in calls


def test_a_ratio_that_nothing_bounds_has_no_interval_and_it_is_said_why() -> None:
    one = gate(decision=decide({"a": ratios(0.0), "b": [1.0, 3.0]}), findings=())
    family = one.judgements["geometric mean"]
    assert (family.low, family.high, output.to_json(one)["family"]["low"]) == (None, None, None)
    text = " ".join(" ".join(output.terminal(one)).split())
    assert "∞" not in text
    assert "0.000" not in text
    assert "2 rows have no interval: the pairs do not vary, or are too few to bound the ratio within" in text
    assert "no interval" not in " ".join(output.terminal(gate()))


def test_beside_a_regression_an_undecided_mean_has_no_row() -> None:
    """Which would be too few pairs, of the trials that had all rounds."""
    one = gate(decision=decide({"a": ratios(0.12), "b": [1.0, 3.0]}), findings=())
    assert (one.exit_code, one.judgements["geometric mean"].verdict) == (1, "INCONCLUSIVE")
    for shown in (output.markdown(one), " ".join(" ".join(output.terminal(one)).split())):
        assert "geometric mean" not in shown
        assert "b has no interval: the pairs do not vary" in shown
    assert output.to_json(one)["family"]["verdict"] == "INCONCLUSIVE"


def test_beside_a_regression_nothing_is_said_to_be_undecided() -> None:
    one = gate(findings=())
    assert one.exit_code == 1
    open_ = gate(findings=(), decision=decide({"short": ratios(0.02, 0.03)}))
    assert open_.exit_code == 3
    for shown in (output.markdown, lambda g: " ".join(output.terminal(g))):
        assert "pairs would decide it" not in shown(one)
        assert "pairs would decide it" in shown(open_)


def test_how_rare_a_slow_call_may_be_and_go_unseen_is_told() -> None:
    shown = " ".join(" ".join(output.terminal(gate(timed=TimedPairs(calls={LONG: 90, LAYER: 400})))).split())
    assert "at least 90 calls: a slow-down of fewer than 1 in 30 calls can go unseen" in shown
    shown = " ".join(" ".join(output.terminal(gate(timed=TimedPairs(calls={LONG: 5})))).split())
    assert "at least 5 calls, too few to see a slow-down of some calls." in shown
    assert "1 in 1 " not in shown
    assert output.to_json(gate(timed=TimedPairs(calls={LONG: 90})))["trials"][0]["calls"] == 90


def test_what_records_say_stays_text_in_markdown() -> None:
    shown = output.markdown(gate(findings=(found(4, message=f"{HOSTILE} | a"),), baseline="a|b"))
    assert shown.startswith(output.MARKER)
    assert "<script" not in shown
    assert "\\| a" in shown
    assert "Baseline a\\|b, candidate runs/b." in shown
    rows = [line for line in shown.splitlines() if line.startswith("| ")]
    assert len(rows) == 6  # a heading, four trials, their mean


def test_junit_counts_what_it_holds() -> None:
    suites = ElementTree.fromstring(output.junit(gate()))
    [suite] = suites
    assert (suites.tag, suite.tag) == ("testsuites", "testsuite")
    cases = {(case.get("classname"), case.get("name")): case for case in suite}
    assert len(cases) == len(suite) == 9  # readers tell cases apart by these two
    by_tag = {tag: [c.get("name") for c in suite if c.find(tag) is not None] for tag in ("failure", "error", "skipped")}
    assert by_tag["failure"] == [LONG, LONG]
    assert by_tag["error"] == [LONG]
    assert by_tag["skipped"][0] == "short"
    for tag, attribute in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        assert int(suite.get(attribute)) == int(suites.get(attribute)) == len(by_tag[tag])
    assert int(suite.get("tests")) == 9
    failure = cases["te-bench.gate.time", LONG].find("failure")
    assert failure.get("type") == "REGRESSION"
    assert failure.get("message").startswith("1.050 times as slow [1.04")
    assert all(float(case.get("time")) == 0 for case in suite)


def test_two_findings_of_a_trial_are_two_test_cases() -> None:
    twice = (found(1, message="allocated"), found(1, message="allocated at batch 4"))
    suite = ElementTree.fromstring(output.junit(gate(findings=twice)))[0]
    names = [(case.get("classname"), case.get("name")) for case in suite]
    assert len(set(names)) == len(names)


def test_junit_is_no_green_page_when_nothing_was_judged() -> None:
    mismatch = gate(decision=None, findings=(), mismatch=("torch: 2.11.0 -> 2.12.0",), compared=0)
    nothing = gate(decision=None, findings=(), compared=0)
    for one, code in ((mismatch, 5), (nothing, 4)):
        assert one.exit_code == code
        suite = ElementTree.fromstring(output.junit(one))[0]
        assert (suite.get("tests"), suite.get("errors")) == ("1", "1")


def test_json_is_all_of_it(tmp_path: Path) -> None:
    output.write(gate(), [("json", tmp_path / "new" / "gate.json")])
    value = json.loads((tmp_path / "new" / "gate.json").read_text(), parse_constant=pytest.fail)
    assert (value["exit_code"], value["answer"], value["schema"]) == (1, "REGRESSION", 2)
    assert [trial["verdict"] for trial in value["trials"]] == ["REGRESSION", "PASS", "INCONCLUSIVE", "IMPROVED"]
    assert value["trials"][2]["throttled"] == 2
    assert value["trials"][0]["low"] > 1.02
    assert value["trials"][0]["detectable"] > 0.02
    assert value["family"]["name"] == "geometric mean"
    assert [finding["exit_code"] for finding in value["findings"]] == [1, 4, 3, 0]


def test_what_was_allowed_and_noted_is_told_everywhere() -> None:
    one = gate(mismatch=("torch: 2.11.0 -> 2.12.0",), allowed=True, notes=("the runs were apart",))
    for shown in ("\n".join(output.terminal(one)), output.markdown(one)):
        assert "as allowed: torch: 2.11.0 -&gt; 2.12.0" in shown.replace("->", "-&gt;")
        assert "Note: the runs were apart." in shown
    assert output.to_json(one)["notes"] == ["the runs were apart"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "gate.md"
    old.write_text("old")

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    said = f"cannot write {old}: No space left on device. Choose another --markdown."
    assert output.write(gate(), [("markdown", old)]) == [said]
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
