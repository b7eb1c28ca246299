"""The gate on journals: pairs by seed, memory and checks, environments, exit codes and which of them comes first."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
from convergence_runs import TRUTH, study_records, write_study
from journals import environment, max_batch_record, record, step_record, trial, write

from te_bench.experiments.spec import Record
from te_bench.gate import output
from te_bench.gate.decision import GateVerdict
from te_bench.gate.memory_and_checks import MIB, FindingKind
from te_bench.gate.stored_runs import Gate, compare
from te_bench.reports.analysis.rows import listed_names
from te_bench.reports.exchange.pytest_stats import parse
from te_bench.reports.page.text import GIB

SEEDS = range(8)
SIDES = ("baseline", "candidate", "candidate")
BEFORE, AFTER = "2026-11-20T12:00:00+00:00", "2026-11-20T15:00:00+00:00"


def steps(
    side: str, attention: str = "flash", *, slower: float = 1.0, gib: float = 10.0, seeds: Any = SEEDS, **work: Any
) -> list[Record]:
    """Steps of 30 ms whose pairs vary by 0.4 %; the same seed is slow on both sides."""
    found = []
    for seed in seeds:
        noise = 1 + 0.004 * math.sin(8 * seed + (1 if side == "candidate" else 2) + len(attention))
        done = step_record(trial(attention=attention, seed=seed), 30 * slower * noise * (1 + 0.1 * seed), gib, side)
        found.append(dataclasses.replace(done, work={**done.work, **work}))
    return found


def changed(records: list[Record], seed: int, **changes: Any) -> list[Record]:
    return [dataclasses.replace(r, **changes) if r.trial.seed == seed else r for r in records]


def gate(tmp_path: Path, baseline, candidate, *, planned=(), identity: Any = None, **options: Any) -> Gate:
    before = write(tmp_path / "a", baseline, body=environment("baseline"))
    after = environment("candidate", code="changed", **(identity or {}))
    return compare(before, write(tmp_path / "b", candidate, body=after, planned=planned), **options)


def messages(found: Gate, kind: FindingKind) -> list[str]:
    return [f"{one.name.rpartition('/V')[2]}: {one.message}" for one in found.findings if one.kind is kind]


def test_an_unchanged_program_passes_though_its_code_s_hash_differs(tmp_path: Path) -> None:
    found = gate(tmp_path, steps("baseline"), steps("candidate"))
    [(name, one)] = found.decision.trials.items()
    assert (found.exit_code, one.verdict, one.pairs, found.findings) == (0, GateVerdict.PASS, 8, ())
    assert name == "train_step/gpt2-b12-t1024-V50304/flash/bf16/eager"
    assert one.ratio == pytest.approx(1, abs=0.003)


def test_a_reader_is_told_plain_names_and_a_program_those_of_only(tmp_path: Path) -> None:
    kinds = [("flash", 1.0), ("cudnn", 1.1)]
    sides = (
        [one for kind, slower in kinds for one in steps(side, kind, slower=slower ** (side != "baseline"))]
        for side in ("baseline", "candidate")
    )
    found = gate(tmp_path, *sides)
    id_, name = "train_step/gpt2-b12-t1024-V50304/cudnn/bf16/eager", "PyTorch eager bf16, cuDNN attention"
    assert [one["name"] for one in output.to_json(found)["trials"]] == [id_.replace("cudnn", "flash"), id_]
    assert f'name="{id_}"' in output.junit(found)
    for shown in ("\n".join(output.terminal(found)), output.markdown(found)):
        assert id_ not in shown
        assert f"{name} is 1.1" in shown
        assert re.search(rf"^(\| )?{name} ", shown, re.MULTILINE)


def test_names_of_several_workloads_and_shapes_differ() -> None:
    shapes = [{"length": length} for length in (128, 256)]
    trials = [trial(), trial("max_batch"), *(trial("attention", **shape) for shape in shapes)]
    named = listed_names({one.cell: one for one in trials})
    assert [*named.values()] == [
        "train step: PyTorch eager bf16",
        "max batch: PyTorch eager bf16",
        "attention: flash, B12 H12 T128 D64 causal",
        "attention: flash, B12 H12 T256 D64 causal",
    ]


def test_too_few_pairs_of_a_users_commands_are_added_by_the_gate_that_times_them(tmp_path: Path) -> None:
    def commands(side: str) -> list[Record]:
        timed = [trial(workload="command", variant="start", seed=seed) for seed in (0, 1)]
        return [step_record(one, 30.0, 1.0, side) for one in timed]

    notes = " ".join(gate(tmp_path, commands("baseline"), commands("candidate")).notes)
    assert "fewer than 5 pairs of seeds, too few for a verdict. te-bench gate --config FILE --base REV" in notes
    assert "te-bench run" not in notes


def test_pairs_are_of_the_same_seed_whatever_the_order(tmp_path: Path) -> None:
    # seeds differ by 10 % each: paired wrongly, nothing could be told
    found = gate(tmp_path, steps("baseline"), steps("candidate", slower=1.05, seeds=reversed(SEEDS)))
    [one] = found.decision.trials.values()
    assert (found.exit_code, one.verdict) == (1, GateVerdict.REGRESSION)
    assert one.ratio == pytest.approx(1.05, abs=0.003)


def test_forward_and_backward_are_two_trials(tmp_path: Path) -> None:
    def calls(side: str, slower: float) -> list[Record]:
        timed = ((trial("attention", "flash", seed=s), 1 + 0.003 * math.sin(8 * s + len(side))) for s in SEEDS)
        return [record(t, side, samples={"forward_s": [1e-3 * x], "backward_s": [slower * x]}) for t, x in timed]

    found = gate(tmp_path, calls("baseline", 1.0), calls("candidate", 1.1))
    assert [name.rpartition("/")[2] for name in found.decision.trials] == ["forward", "backward"]
    assert [one.verdict for one in found.decision.trials.values()][1] is GateVerdict.REGRESSION
    assert found.decision.trials.popitem()[1].ratio == pytest.approx(1.1, abs=0.005)


def in_bursts(side: str, share: float, slower: float, device: str) -> list[Record]:
    """Processes of 20 calls, of which every so many-th is slow: so much that all are by `slower` on average."""
    every, found = round(1 / share), []
    for one in steps(side):
        seed, calls = one.trial.seed, one.samples["latency_s"]
        slow = [call * (1 + slower * every * ((k + seed) % every == 0)) for k, call in enumerate(calls)]
        samples = {"latency_s": slow, "peak_rss_bytes": [1e9]}
        found.append(dataclasses.replace(one, trial=trial(device=device, seed=seed), samples=samples))
    return found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("share", [1 / 2, 1 / 4, 1 / 10])
def test_what_slows_some_calls_only_is_no_pass(tmp_path: Path, share: float, device: str) -> None:
    """What a process counts by does not see it: on a CPU the lowest tenth of its calls, on a GPU their median."""

    def found(slower: float) -> Gate:
        sides = in_bursts("baseline", share, 0.0, device), in_bursts("candidate", share, slower, device)
        return gate(tmp_path / f"{slower}", *sides)

    much = found(0.4)
    [one] = much.decision.trials.values()
    assert (much.exit_code, one.verdict) == (1, GateVerdict.REGRESSION)
    assert one.mean.low > 1.05
    if share < 0.5 or device == "cpu":
        assert one.ratio == pytest.approx(1, abs=0.01)
        assert re.match(r"1.400 times as slow \[1.3\d\d, 1.4\d\d\] over all calls on average, above 5 % \(", one.reason)
    assert found(0.05).exit_code in (1, 3)
    assert found(0.0).exit_code == 0


def test_pairs_in_which_a_gpu_throttled_are_set_aside(tmp_path: Path) -> None:
    candidate = changed(steps("candidate"), 3, device_state={"throttle_reasons": 0x40})
    candidate = changed(candidate, 4, device_state={"throttle_reasons": 0x4 | 0x1})  # at its power cap, as always
    baseline = changed(steps("baseline"), 5, device_state={"throttle_reasons": 0x8})
    found = gate(tmp_path, baseline, candidate)
    [(name, one)] = found.decision.trials.items()
    assert (one.pairs, found.timed.throttled) == (6, {name: 2})


# Co-gates.


@pytest.mark.parametrize("sample", ["peak_allocated_bytes", "peak_rss_bytes"])
def test_memory_that_only_the_baseline_recorded_is_missing(tmp_path: Path, sample: str) -> None:
    def side(name: str, peaks: list[float]) -> list[Record]:
        latency = [record.samples["latency_s"] for record in steps(name)]
        pairs = zip(steps(name), latency, strict=True)
        return [dataclasses.replace(r, samples={"latency_s": times, sample: peaks}) for r, times in pairs]

    without = gate(tmp_path / "a", side("baseline", [1e9]), side("candidate", []))
    assert without.exit_code == 4
    assert "memory recorded in the baseline, not in the candidate" in messages(without, FindingKind.MISSING)[0]
    assert gate(tmp_path / "b", side("baseline", []), side("candidate", [1e9])).exit_code == 0
    assert gate(tmp_path / "c", side("baseline", []), side("candidate", [])).exit_code == 0


@pytest.mark.parametrize(("growth", "code"), [(0, 0), (4 * MIB, 0), (10 * MIB, 0), (16 * MIB, 1), (-64 * MIB, 0)])
def test_memory_may_not_grow_beyond_what_compilers_differ_by(tmp_path: Path, growth: float, code: int) -> None:
    # of 10 GiB 0.1 % and 4 MiB are allowed: 14.2 MiB
    found = gate(tmp_path, steps("baseline"), steps("candidate", gib=10 + growth / GIB))
    assert (found.exit_code, len(messages(found, FindingKind.MEMORY))) == (code, code)
    odd = changed(steps("candidate"), 2, samples=steps("candidate", gib=20)[2].samples)
    assert gate(tmp_path / "odd", steps("baseline"), odd).exit_code == 0  # one process of many


@pytest.mark.parametrize("count", ["launches", "graph_breaks", "recompiles"])
def test_counts_may_not_grow(tmp_path: Path, count: str) -> None:
    before, fewer, more = (steps(side, **{count: n}) for side, n in zip(SIDES, (100, 99, 101), strict=True))
    found = gate(tmp_path / "more", before, more)
    assert (found.exit_code, [f.kind for f in found.findings]) == (1, [FindingKind.COUNT])
    assert "+1: from 100 to 101" in found.findings[0].message
    assert gate(tmp_path / "fewer", before, fewer).exit_code == 0
    assert gate(tmp_path / "unknown", steps("baseline"), fewer).exit_code == 0


def test_the_largest_batch_s_memory_is_compared_at_the_same_batch(tmp_path: Path) -> None:
    def limits(side: str, more: int) -> list[Record]:
        done = max_batch_record("flash", 132)
        tries = [{**t, "peak_allocated_bytes": (t["peak_allocated_bytes"] or 0) + more} for t in done.work["tries"]]
        return [dataclasses.replace(done, environment=side, work={"tries": tries})]

    found = gate(tmp_path / "a", limits("baseline", 0), limits("candidate", 1024 * MIB))
    assert found.exit_code == 1
    assert "at batch 132 +1,024.0 MiB" in messages(found, FindingKind.MEMORY)[0]
    assert gate(tmp_path / "b", limits("baseline", 0), limits("candidate", 0)).exit_code == 0


@pytest.mark.parametrize(("batch", "code"), [(4, 1), (129, 1), (130, 0), (200, 0)])
def test_the_largest_batch_may_not_fall(tmp_path: Path, batch: int, code: int) -> None:
    def limits(side: str, largest: int) -> list[Record]:
        done = max_batch_record("flash", largest)  # as on a CPU: the tries have no peaks
        tries = [{**one, "peak_allocated_bytes": None} for one in done.work["tries"]]
        return [dataclasses.replace(done, environment=side, work={"tries": tries})]

    found = gate(tmp_path, limits("baseline", 132), limits("candidate", batch))
    said = [f"largest batch {batch - 132}: from 132 to {batch}; 2.3 fewer are allowed"] if code else []
    assert found.exit_code == code
    assert [message.partition(": ")[2] for message in messages(found, FindingKind.MEMORY)] == said


def test_other_kernels_are_told(tmp_path: Path) -> None:
    found = gate(tmp_path, steps("baseline"), [dataclasses.replace(r, kernels=["x"]) for r in steps("candidate")])
    [told] = messages(found, FindingKind.KERNELS)
    assert "+ x, - flash_fwd_kernel" in told
    assert found.exit_code == 0


def test_a_renamed_cell_is_missing_and_new_and_no_pass(tmp_path: Path) -> None:
    both = steps("baseline") + steps("baseline", "math")
    found = gate(tmp_path, both, steps("candidate") + steps("candidate", "cudnn"))
    assert found.exit_code == 4
    assert [f.name.split("/")[2] for f in found.findings] == ["math", "cudnn"]
    assert [(f.kind, f.code) for f in found.findings] == [(FindingKind.MISSING, 4), (FindingKind.NEW, 0)]
    assert gate(tmp_path / "new", steps("baseline"), steps("candidate") + steps("candidate", "cudnn")).exit_code == 0


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        *(("ok", worse, 4) for worse in ("oom", "unsupported", "interrupted")),
        ("unsupported", "crashed", 4),
        ("crashed", "failed_check", 4),  # a wrong result is worse than none
        ("interrupted", "timeout", 4),
        ("oom", "oom", 0),
        ("failed_check", "failed_check", 0),
        ("oom", "crashed", 0),
        ("oom", "ok", 0),
        ("ok", "stopped", 0),
    ],
)
def test_outcomes_that_got_worse(tmp_path: Path, old: str, new: str, code: int) -> None:
    def side(name: str, outcome: str) -> list[Record]:
        return steps(name) + changed(steps(name, "math"), 7, outcome=outcome, reason="why")

    found = gate(tmp_path, side("baseline", old), side("candidate", new))
    assert found.exit_code == code
    assert len(messages(found, FindingKind.FAILED)) == code // 4
    if code:
        assert f"{new}, {old} in the baseline: seed 7: why" in messages(found, FindingKind.FAILED)[0]


def test_a_trial_that_was_planned_and_not_run_is_incomplete(tmp_path: Path) -> None:
    rest = tuple(r.trial for r in steps("candidate", seeds=[7]))
    found = gate(tmp_path, steps("baseline"), steps("candidate", seeds=range(7)), planned=rest)
    assert found.exit_code == 4
    fewer = gate(tmp_path / "fewer", steps("baseline"), steps("candidate", seeds=range(7)))
    assert fewer.exit_code == 0  # planned with fewer seeds
    assert "in the baseline only, so in no pair: seed 7" in messages(fewer, FindingKind.NOTE)[0]


def test_a_new_cell_with_a_wrong_result_fails(tmp_path: Path) -> None:
    wrong = changed(steps("candidate", "cudnn", seeds=[0]), 0, outcome="failed_check", reason="dq: error 1 > 0.1")
    found = gate(tmp_path, steps("baseline"), steps("candidate") + wrong)
    assert found.exit_code == 4
    assert "dq: error 1 > 0.1" in messages(found, FindingKind.FAILED)[0]


def test_nothing_that_ended_ok_on_both_sides_is_no_pass(tmp_path: Path) -> None:
    def none(side: str) -> list[Record]:
        return [record(trial(seed=s), side, outcome="unsupported", reason="no GPU") for s in SEEDS]

    found = gate(tmp_path, none("baseline"), none("candidate"))
    assert (found.exit_code, found.decision, found.compared) == (4, None, 0)


def test_a_verdict_that_got_worse(tmp_path: Path) -> None:
    def study(side: str, gaps: dict[str, float]) -> Path:
        return write_study(tmp_path / side, study_records({**TRUTH, **gaps}, sd=0.0005))

    def judged(before: dict[str, float], after: dict[str, float]) -> tuple[int, list[str]]:
        number = len(list(tmp_path.iterdir()))
        found = compare(study(f"{number}a", before), study(f"{number}b", after))
        return found.exit_code, messages(found, FindingKind.VERDICT)

    code, [told] = judged({}, {"rowwise_scaling": 0.05})
    assert (code, "rowwise scaling: INFERIOR, EQUIVALENT in the baseline" in told) == (1, True)
    assert judged({}, {}) == (0, [])
    assert judged({"rowwise_scaling": 0.05}, {"rowwise_scaling": 0.05}) == (0, [])
    code, [told] = judged({}, {"rowwise_scaling": 0.003})
    assert (code, "INCONCLUSIVE, EQUIVALENT in" in told) == (3, True)
    code, [told] = judged({}, {"broken": 0.0})
    assert (code, "no verdict: " in told, "was not caught" in told) == (4, True, True)
    assert judged({"broken": 0.0}, {"broken": 0.0})[0] == 3
    assert judged({"broken": 0.0}, {"rowwise_scaling": 0.05})[0] == 1  # with nothing to excuse it


# Environments and precedence.


def test_another_environment_is_not_judged_unless_allowed(tmp_path: Path) -> None:
    slower = steps("candidate", slower=1.2)
    found = gate(tmp_path / "5", steps("baseline"), slower, identity={"torch": "2.12.0", "driver": "590"})
    assert (found.exit_code, found.decision) == (5, None)
    assert found.mismatch == ("driver: 580.159 -> 590", "torch: 2.11.0 -> 2.12.0")
    options: dict[str, Any] = {"identity": {"torch": "2.12.0"}, "allow_environment_change": True}
    assert gate(tmp_path / "1", steps("baseline"), slower, **options).exit_code == 1
    assert gate(tmp_path / "0", steps("baseline"), steps("candidate"), **options).exit_code == 0
    sides = (write(tmp_path / side, steps(side), body={"id": side}) for side in ("baseline", "candidate"))
    assert compare(*sides).exit_code == 5  # one that was not recorded is not the same


def test_of_several_environments_the_newest_is_read(tmp_path: Path) -> None:
    write(tmp_path / "b", steps("old", slower=1.5), body=environment("old", torch="2.10.0"))
    found = gate(tmp_path, steps("baseline"), steps("candidate"))
    assert found.exit_code == 0
    assert any("candidate also holds older environments" in note for note in found.notes)


@pytest.mark.parametrize("suites", [("speed", "quick"), ("quick", "speed")])
def test_suites_that_share_a_configuration_add_up_their_seeds(tmp_path: Path, suites: tuple[str, str]) -> None:
    def side(name: str, slower: float) -> Path:
        records, body = steps(name, slower=slower), environment(name)
        for suite in suites:
            write(tmp_path / name, records[: 8 if suite == "speed" else 2], suite=suite, body=body)
        return tmp_path / name

    found = compare(side("baseline", 1.0), side("candidate", 1.1))
    [one] = found.trials.values()
    assert (found.exit_code, one.verdict, one.pairs) == (1, GateVerdict.REGRESSION, 8)


def test_of_a_seed_that_two_suites_planned_at_two_commits_the_record_counts(tmp_path: Path) -> None:
    write(tmp_path / "b", steps("candidate", slower=1.1), suite="speed", body=environment("candidate"))
    planned = [one.trial for one in steps("later")]
    write(tmp_path / "b", [], planned=planned, suite="quick", body=environment("later", code="later"))
    found = compare(write(tmp_path / "a", steps("baseline"), body=environment("baseline")), tmp_path / "b")
    assert found.exit_code == 1
    assert not found.findings


def test_a_regression_comes_before_what_is_missing_and_that_before_what_is_undecided(tmp_path: Path) -> None:
    few = range(2)  # pairs that decide nothing
    undecided = steps("baseline", "cudnn", seeds=few), steps("candidate", "cudnn", seeds=few)
    gone = steps("baseline", "math")
    slow = steps("baseline"), steps("candidate", slower=1.3)
    assert gate(tmp_path / "3", steps("baseline") + undecided[0], steps("candidate") + undecided[1]).exit_code == 3
    assert gate(tmp_path / "4", gone + undecided[0], undecided[1]).exit_code == 4
    all_of_them = slow[0] + gone + undecided[0], slow[1] + undecided[1]
    assert gate(tmp_path / "1", *all_of_them).exit_code == 1
    assert gate(tmp_path / "5", *all_of_them, identity={"gpu": "NVIDIA H100"}).exit_code == 5


def test_only(tmp_path: Path) -> None:
    both = steps("baseline") + steps("baseline", "math")
    found = gate(tmp_path, both, steps("candidate", slower=1.3), only="*/math/*")
    assert [(f.kind, f.code) for f in found.findings] == [(FindingKind.MISSING, 4)]
    assert (found.decision, found.exit_code) == (None, 4)
    for pattern, message in (("*/flex/*", "matches no trial"), ("*/cudnn/*", "nothing to compare with")):
        with pytest.raises(ValueError, match=message):
            gate(tmp_path, both, steps("candidate", "cudnn"), only=pattern)


def test_runs_that_were_not_interleaved_are_called_so(tmp_path: Path) -> None:
    def at(side: str, *times: str) -> list[Record]:
        return [dataclasses.replace(r, started_at=times[i % len(times)]) for i, r in enumerate(steps(side))]

    apart = gate(tmp_path / "apart", at("baseline", BEFORE), at("candidate", AFTER))
    assert any("not interleaved" in note for note in apart.notes)
    together = gate(tmp_path / "together", at("baseline", BEFORE, AFTER), at("candidate", BEFORE, AFTER))
    assert together.notes == ()


def test_cells_that_a_name_does_not_tell_apart_are_told_apart(tmp_path: Path) -> None:
    def two(side: str) -> list[Record]:
        found = steps(side)
        return found + [dataclasses.replace(r, trial=trial(seed=r.trial.seed, learning_rate=1.0)) for r in found]

    found = gate(tmp_path, two("baseline"), two("candidate"))
    assert len(found.decision.trials) == 2
    assert all("/eager#" in name for name in found.decision.trials)


# Thresholds of --compare-fail.


def thresholds(found: Gate) -> list[str]:
    return [finding.message for finding in found.findings if finding.kind is FindingKind.THRESHOLD]


@pytest.mark.parametrize(
    ("limit", "exceeded"),
    [("median:2.5%", True), ("median:3.5%", False), ("min:0.0001", True), ("mean:1", False), ("ops:2%", True)],
)
def test_a_threshold_fails_what_the_test_leaves_undecided(tmp_path: Path, limit: str, exceeded: bool) -> None:
    pair = (steps("baseline", seeds=[3, 4]), steps("candidate", slower=1.03, seeds=[3, 4]))
    found = gate(tmp_path, *pair, limits=[parse(limit)])
    assert (found.exit_code, len(thresholds(found))) == ((1, 1) if exceeded else (3, 0))
    for said in thresholds(found):
        assert said.startswith(limit.partition(":")[0])
        assert said.endswith(f"the limit is {limit} (a threshold, no statistics)")
    [name] = found.decision.trials
    assert {f.name for f in found.findings} <= {name}


def test_a_threshold_is_of_the_median_over_processes_that_did_not_throttle(tmp_path: Path) -> None:
    odd = changed(steps("candidate", seeds=range(5)), 2, samples={"latency_s": [1.0] * 20})
    found = gate(tmp_path / "odd", steps("baseline", seeds=range(5)), odd, limits=[parse("max:30%")])
    assert thresholds(found) == []
    slow = [dataclasses.replace(r, device_state={"throttle_reasons": 0x40}) for r in steps("candidate", slower=2)]
    found = gate(tmp_path, steps("baseline"), slow, limits=[parse("median:5%")])
    assert (found.exit_code, thresholds(found)) == (3, [])  # all pairs set aside


def test_each_timed_quantity_and_each_limit_is_held_apart(tmp_path: Path) -> None:
    def calls(side: str, slower: float) -> list[Record]:
        samples = {"forward_s": [1e-3], "backward_s": [slower * 2e-3]}
        return [record(trial("attention", "flash", seed=s), side, samples=samples) for s in SEEDS]

    limits = [parse("median:5%"), parse("min:0.0001"), parse("max:1")]
    found = gate(tmp_path, calls("baseline", 1.0), calls("candidate", 1.1), limits=limits)
    over = [f for f in found.findings if f.kind is FindingKind.THRESHOLD]
    told = [(f.name.rpartition("/")[2], f.message.partition(" ")[0]) for f in over]
    assert told == [("backward", "median"), ("backward", "min")]
    assert gate(tmp_path / "none", calls("baseline", 1.0), calls("candidate", 1.1)).findings == ()


@pytest.mark.parametrize("both", [True, False])
def test_a_process_that_counts_several_times_counts_once(tmp_path: Path, both: bool) -> None:
    """Two processes, each under four seeds, are two pairs and no PASS."""

    def copied(side: str) -> list[Record]:
        done = steps(side)
        return [dataclasses.replace(r, samples=done[r.trial.seed % 2].samples) for r in done]

    found = gate(tmp_path, copied("baseline") if both else steps("baseline"), copied("candidate"))
    assert found.exit_code == 3
    [judgement] = found.decision.trials.values() if found.decision else []
    assert judgement.pairs == 2
    assert "seeds 2, 3, 4, 5, 6, 7" in found.notes[0]


def test_a_baseline_without_any_times_leaves_nothing_to_compare_with(tmp_path: Path) -> None:
    baseline = [dataclasses.replace(r, samples={**r.samples, "latency_s": []}) for r in steps("baseline")]
    found = gate(tmp_path, baseline, steps("candidate"))
    assert found.exit_code == 4
    assert "timed in the candidate, not in the baseline: nothing to compare with" in [f.message for f in found.findings]


@pytest.mark.parametrize("times", [[], [0.0, 0.0], [-0.03, -0.03], [1e308, 1.7e308]])
@pytest.mark.parametrize("seeds", [range(8), range(1)])
def test_times_that_the_candidate_lacks_in_any_pair_are_missing(tmp_path, times, seeds):
    candidate = steps("candidate")
    for seed in seeds:
        candidate = changed(candidate, seed, samples={**candidate[seed].samples, "latency_s": times})
    found = gate(tmp_path, steps("baseline"), candidate)
    missing = [f.message for f in found.findings if f.kind is FindingKind.MISSING]
    assert (found.exit_code, missing) == (4, ["timed in the baseline, not in the candidate"])
