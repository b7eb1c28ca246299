"""The gate's self-test: its rates, what it goes on with, and, slowly, the faults that it plants for real."""

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from driving import te_bench
from scipy.stats import binom

from te_bench.experiments import environment
from te_bench.gate import revisions, self_test
from te_bench.gate.decision import GateVerdict, decide
from te_bench.gate.places import Place, places
from te_bench.gate.question import Question
from te_bench.gate.self_test import Condition, conditions, interval, measure_rate, passed, redraw
from te_bench.gate.stored_runs import Gate, TimedPairs, process_s
from te_bench.reports.page.embed import embed

RESULTS = Path(__file__).parents[2] / "results" / "gate"
RANDOM = {"data": {"": "random"}}  # whose plan reads no text
QUESTION = Question(repository=None, base="installed", head="installed", device="cpu", options=RANDOM)
MACHINE: dict[str, Any] = {"id": "here", "identity": {}, "details": {}}


def test_the_interval_is_the_shares_that_five_in_a_hundred_such_counts_would_contradict() -> None:
    assert interval(0, 0) == (0.0, 1.0)
    for k, n in ((0, 1), (0, 100), (3, 100), (95, 100), (100, 100)):
        low, high = interval(k, n)
        assert 0 <= low <= k / n <= high <= 1
        assert low == 0 if k == 0 else binom.sf(k - 1, n, low) == pytest.approx(0.025)
        assert high == 1 if k == n else binom.cdf(k, n, high) == pytest.approx(0.025)


def answers(ratios: list[list[float]], *, code: int = 3) -> list[dict[str, Any]]:
    """A gate for each list: two trials with the same ratios."""
    trials = [{"ratios": one, "pairs": len(one)} for one in ratios]
    return [{"exit_code": code, "seconds": 10.0 + i, "trials": {"a": t, "b": t}} for i, t in enumerate(trials)]


def noisy(center: float, gates: int) -> list[list[float]]:
    generator = np.random.default_rng(1)
    return (center * np.exp(0.01 * generator.standard_normal((gates, 9)))).tolist()


def test_redrawn_gates_find_what_is_there_and_nothing_else() -> None:
    asked = {"margin": 0.02, "alpha": 0.05, "gates": 60}
    assert redraw(answers(noisy(1.0, 5)), **asked) == 0
    assert redraw(answers(noisy(1.10, 5)), **asked) == 1
    assert 0 < redraw(answers(noisy(1.03, 5)), **asked) < 1
    assert redraw(answers(noisy(1.0, 1)), **asked) is None  # a gate drawn from one gate is that gate
    assert redraw([], **asked) is None


def test_a_trial_that_was_decided_early_is_drawn_by_the_ratios_that_it_has() -> None:
    """Two trials of other pairs: the slow one is set aside once and undecided for longer."""
    found = answers(noisy(1.10, 3))
    for answer in found:
        answer["trials"]["a"] = {"ratios": [None, *answer["trials"]["a"]["ratios"][1:]], "pairs": 8}
        answer["trials"]["b"] = {"ratios": [1.0, 1.01, 0.99, 1.0, 1.01], "pairs": 5}
    assert redraw(found, margin=0.02, alpha=0.05, gates=5) == 1
    for answer in found:
        answer["trials"]["a"]["ratios"] = [ratio and ratio / 1.10 for ratio in answer["trials"]["a"]["ratios"]]
    assert redraw(found, margin=0.02, alpha=0.05, gates=20) == 0


def test_a_rate_counts_the_code_that_its_condition_expects() -> None:
    slow, *_, crash = conditions([0.05])[1:]
    assert (slow.name, slow.fault, slow.expected) == ("5 % slower", {"slower": 0.05}, 1)
    found = measure_rate(slow, [*answers(noisy(1.1, 2), code=1), *answers(noisy(1.0, 1))], margin=0.02, alpha=0.05)
    assert (found.alarms, found.gates, found.undecided, found.longest_s, found.pairs) == (2, 3, 1, 11.0, 9.0)
    assert measure_rate(crash, answers(noisy(1.0, 2), code=4), margin=0.02, alpha=0.05).alarms == 2
    assert measure_rate(crash, answers(noisy(1.0, 2), code=1), margin=0.02, alpha=0.05).alarms == 0


def test_gates_that_end_with_the_first_regression_are_redrawn_where_none_is_planted() -> None:
    unchanged, slow, *_ = conditions([0.05])
    found = answers(noisy(1.0, 2))
    for exit_first in (False, True):
        of = {"margin": 0.02, "alpha": 0.05, "exit_first": exit_first}
        assert measure_rate(unchanged, found, **of).redrawn == 0
        assert measure_rate(slow, found, **of).redrawn == (None if exit_first else 0)


def test_it_fails_on_an_unnoticed_crash_and_on_more_alarms_than_chance_allows() -> None:
    unchanged, *_, crash = conditions([])

    def of(condition: Condition, alarms: int, gates: int) -> self_test.Rate:
        found = answers([[1.0] * 5] * gates)
        for answer in found[:alarms]:
            answer["exit_code"] = condition.expected
        return measure_rate(condition, found, margin=0.02, alpha=0.05)

    assert passed([of(unchanged, 0, 3), of(crash, 3, 3)], 0.05)
    assert passed([of(unchanged, 1, 3), of(crash, 3, 3)], 0.05)  # 1 in 3 may be chance
    assert not passed([of(unchanged, 3, 6), of(crash, 3, 3)], 0.05)
    assert not passed([of(unchanged, 0, 3), of(crash, 2, 3)], 0.05)
    assert not passed([of(unchanged, 0, 0), of(crash, 3, 3)], 0.05)  # no gate says nothing
    assert not passed([of(unchanged, 0, 3), of(crash, 0, 0)], 0.05)
    shown = self_test.table([of(unchanged, 0, 3), of(crash, 3, 3)])
    assert [row[1].text for row in shown.rows] == ["0 of 3", "3 of 3"]


def test_it_fails_if_gates_of_unchanged_code_do_and_counts_them() -> None:
    unchanged, *_, crash = conditions([])
    codes = {"margin": 0.02, "alpha": 0.05}
    ended = [answer for code in (0, 3, 4, 5) for answer in answers([[1.0] * 5], code=code)]
    rates = [measure_rate(unchanged, ended, **codes), measure_rate(crash, answers([[1.0] * 5], code=4), **codes)]
    assert [(one.alarms, one.undecided, one.failed) for one in rates] == [(0, 1, 2), (1, 0, 0)]
    assert not passed(rates, 0.05)
    shown = self_test.table(rates)
    assert [value.text for [value] in shown.only(["Failed"]).rows] == ["2", "0"]
    assert "Failed: any other exit code." in shown.note
    assert not self_test.table(rates[1:]).only(["Failed"]).columns


def test_the_texts_of_a_suite_are_tokenised_into_the_cache(tmp_path: Path) -> None:
    text, cache = tmp_path / "text.txt", tmp_path / "cache"
    text.write_text("To be, or not to be. " * 500)
    options = {"data": {"": f"text:{text}"}, "cache": str(cache)}
    question = dataclasses.replace(QUESTION, options=options, cache=cache)
    asked: dict[str, Any] = {"gates": 1, "slower": [], "run_each": lambda *_: [], "say": lambda line: None}
    assert [one.gates for one in self_test.run(question, tmp_path, MACHINE, **asked)] == [0, 0, 0]
    assert list(cache.iterdir())


def test_it_goes_on_where_it_was_cut_short_and_counts_no_other_question(tmp_path, monkeypatch):
    asked: list[tuple[Any, Any]] = []

    def gate(question: Question, folder: Path, machine: Any, *, say: Any) -> Gate:
        asked.append((question.faults, question.only))
        assert question.gpu == "GPU-1"
        ratios = {"a": noisy(1.0, 1)[0]}
        decision = decide(ratios, looks=(9,))
        timed = TimedPairs(ratios=ratios)
        return Gate(baseline="a", candidate="b", margin=0.02, alpha=0.05, decision=decision, timed=timed, compared=9)

    monkeypatch.setattr(revisions, "run", gate)
    said: list[str] = []
    more: dict[str, Any] = {"where": [Place(gpu="GPU-1")], "say": said.append}
    self_test.run(QUESTION, tmp_path, MACHINE, gates=1, slower=[0.1], **more)
    victim = "train_step/tiny-b2-t64-V50257/manual/fp32/eager/s*"
    head: Any = [None, *({"head": f} for f in ({"slower": 0.1}, {"leak": self_test.LEAK}, {"crash": True}))]
    assert asked == list(zip(head, [None, None, victim, victim], strict=True))
    path = tmp_path / self_test.ANSWERS
    path.write_text(path.read_text()[:-20])  # killed while it wrote the last line
    asked.clear()
    said.clear()
    rates = self_test.run(QUESTION, tmp_path, MACHINE, gates=2, slower=[0.1], **more)
    assert (said[0], said[-1][:24]) == ("5 gates to run, 1 at once", "gate 2 of 2, crash: exit")
    assert [fault for fault, _ in asked] == [head[3], *head]
    assert [one.gates for one in rates] == [2, 2, 2, 2]
    assert [_whole(line) for line in path.read_text().splitlines()].count(True) == 8
    assert self_test.stored(tmp_path) == rates
    page = tmp_path / "page.md"
    page.write_text("<!-- te-bench:table . self_test -->\n<!-- /te-bench:table -->\n")
    assert embed(page, check=False, more={"self_test": lambda folder: self_test.table(self_test.stored(folder))})
    assert "| 10 % slower | 0 of 2 |" in page.read_text()
    asked.clear()
    self_test.run(dataclasses.replace(QUESTION, margin=0.05), tmp_path, MACHINE, gates=1, slower=[], **more)
    assert len(asked) == 3
    with pytest.raises(ValueError, match="--gates 0"):
        self_test.run(QUESTION, tmp_path, MACHINE, gates=0, slower=[], **more)


def test_what_no_chance_decides_is_tried_a_few_times(tmp_path: Path) -> None:
    tried: list[str] = []

    def run_each(gate: Any, left: list[Any], where: Any) -> list[Any]:
        tried.extend(one.name for one in left)
        return []

    self_test.run(QUESTION, tmp_path, MACHINE, gates=20, slower=[0.1], run_each=run_each, say=lambda line: None)
    assert {name: tried.count(name) for name in tried} == {"unchanged": 20, "10 % slower": 20, "leak": 5, "crash": 5}


def _whole(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def test_a_process_counts_by_its_quiet_samples_on_a_cpu_and_by_its_median_on_a_gpu() -> None:
    seconds = [1.0, 1.1, *[3.0] * 9]  # something else ran for most of the time
    assert process_s(seconds, "cpu") == pytest.approx(1.1)
    assert process_s(seconds, "cuda") == 3.0
    assert process_s([], "cpu") is None
    assert process_s([], "cuda") is None


@pytest.mark.slow
def test_the_published_pairs_are_judged_by_the_rule_of_a_gate_of_today() -> None:
    """The numbers of docs/gate-statistics.md; the gates ended by an older rule, which found 110 and 104."""
    found: Counter[str] = Counter()
    for path in RESULTS.glob("*/self-test.jsonl"):
        for rate in self_test.stored(path.parent):
            found[rate.condition.name] += rate.alarms if "h200" not in path.parent.name else 0
    assert [found[name] for name in ("unchanged", "10 % slower", "5 % slower", "leak", "crash")] == [
        0,
        106,
        75,
        111,
        111,
    ]


@pytest.mark.alone
def test_planted_faults_are_noticed_on_this_machine(tmp_path: Path) -> None:
    """A slow-down by half, two gates side by side: what smaller ones it takes is measured in results/gate."""
    machine = environment.capture("cpu")
    question = dataclasses.replace(QUESTION, only="train_step/*manual*", budget_s=90.0)
    rates = self_test.run(question, tmp_path, machine, gates=1, slower=[0.5], where=places(2, device="cpu"), say=print)
    alarms = {"unchanged": 0, "50 % slower": 1, "leak": 1, "crash": 1}
    assert {one.condition.name: one.alarms for one in rates} == alarms
    answers = [json.loads(line) for line in (tmp_path / self_test.ANSWERS).read_text().splitlines()]
    assert {answer["asked"]["at_once"] for answer in answers} == {2}
    [slower] = [answer for answer in answers if answer["slower"]]
    [trial] = slower["trials"].values()
    assert (trial["verdict"], math.isclose(trial["ratio"], 1.5, rel_tol=0.1)) == (GateVerdict.REGRESSION, True)


@pytest.mark.slow
def test_an_error_on_a_host_is_said_as_it_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="needs ray: pip install '.[cluster]'")
    from te_bench.gate import gates_on_ray

    said = "the te_bench of a is 1, that of the head 2"
    failed = ray.exceptions.RayTaskError("_run_there", f"a traceback\nValueError: {said}", ValueError(said))

    def get(_: object) -> None:
        raise failed.as_instanceof_cause()

    task = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: "ref"))
    monkeypatch.setattr(ray, "remote", lambda **_: lambda _: task)
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray, "get", get)
    wanted = SimpleNamespace(of_each=lambda _: {}, device="cpu")
    cluster: Any = SimpleNamespace(head=lambda: None, of=lambda _: SimpleNamespace(resources={}), wanted=wanted)
    place: Any = SimpleNamespace(node="0" * 56, host="a")
    with pytest.raises(ValueError, match="the te_bench of a") as caught:
        list(gates_on_ray.run_each(cluster, lambda task, place: {}, ["task"], [place]))
    assert str(caught.value) == said


SHORT = """
from te_bench import cli
from te_bench.gate import self_test

all_of_them = self_test.conditions
self_test.conditions = lambda slower: all_of_them(slower)[-2:]  # those of one round
cli.main()
"""


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_on_a_cluster_each_gate_is_one_as_here(tmp_path: Path) -> None:
    """Its answers count for a self-test without a cluster, too, which has nothing left to run."""
    pytest.importorskip("ray", reason="needs ray: pip install '.[cluster]'")
    main = tmp_path / "short.py"
    main.write_text(SHORT)
    asked = ("--suite", "attention", "--only", "*t128-d32-full/math/*", "--slower", "50%", "--budget", "5s")
    command = ("gate", "--self-test", "--device", "cpu", *asked, "--out", tmp_path)
    # of RAY_TMPDIR: no `ray start` has left the address of its cluster there
    done = te_bench(*command, "--on", "ray", main=main, env={"RAY_TMPDIR": str(tmp_path)})
    assert "on ray: 1 trial at a time, on 1 host" in done.stdout, done.stderr
    found = [json.loads(line) for line in (tmp_path / self_test.ANSWERS).read_text().splitlines()]
    assert [(one["condition"], one["exit_code"]) for one in found] == [("leak", 1), ("crash", 4)]
    again = te_bench(*command, main=main)
    assert "0 gates to run, 1 at once" in again.stderr
    assert done.stdout.endswith(again.stdout)
