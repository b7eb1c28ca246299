"""Advice on a simulated machine: what is measured, predicted, verified and decided."""

import dataclasses
import re
from pathlib import Path

import pytest
from advice_machine import Machine, decided, fused, gathered, question
from journals import record, step_record, trial

from te_bench.advice import advise, answer, candidates, steps
from te_bench.advice.advise import NothingMeasured
from te_bench.experiments import plan
from te_bench.experiments.problems import TrialProblem
from te_bench.experiments.run_options import seconds
from te_bench.experiments.spec import Options, Record, Trial
from te_bench.reports.analysis.measures import of_processes


def test_the_fastest_is_found_predicted_and_verified(tmp_path: Path) -> None:
    """Of recipes that are not told apart the one with a published verdict is advised."""
    machine = Machine(question())
    evidence = gathered(machine)
    found = decided(machine, evidence, tmp_path)
    assert found.use.fused
    assert (found.use.attention, found.use.head, found.use.precision) == ("cudnn", "fp8", "fp8")
    assert found.tied  # recipes take equal times on this machine, but for noise
    assert found.use.recipe == "delayed_scaling_e4m3"
    assert found.tied[0].beside(found.use) == "the same with current scaling"
    assert found.exit_code == 0
    assert found.speedup.n == advise.SEEDS
    truth = machine.step(machine.question.trial(found.have)) / machine.step(machine.question.trial(found.use))
    assert found.speedup.low <= truth * 1.001
    assert found.speedup.value == pytest.approx(truth, rel=0.01)
    assert evidence.predictions[found.use].seconds == pytest.approx(found.seconds, rel=0.01)
    assert not evidence.left_out


def test_every_trial_passes_the_check_of_a_plan_and_seeds_of_a_stage_are_interleaved() -> None:
    machine = Machine(question())
    gathered(machine)
    for asked in machine.asked:
        plan.check(asked)
    kinds = {"survey", "train_step", "linear", "attention", "linear_cross_entropy"}
    assert {asked.workload for asked in machine.asked} == kinds
    assert len({trial.id for trial in machine.asked}) == len(machine.asked)  # nothing twice
    first, second = ([trial.cell for trial in machine.asked if trial.seed == seed] for seed in (1, 2))
    assert first == second[::-1]
    assert len(first) >= 2


def test_predictions_that_are_wrong_are_corrected_by_what_was_verified(tmp_path: Path) -> None:
    """FP8 in fused blocks takes twice as long as its parts say: bf16's fused step is found all the same."""

    def twice(trial: Trial) -> bool:
        return trial.precision == "fp8" and "blocks" in trial.problem

    machine = Machine(question(), times_of_step=lambda trial: 2.0 if twice(trial) else 1.0)
    found = decided(machine, gathered(machine), tmp_path)
    assert found.use == fused()
    assert sum(t.workload == "train_step" and twice(t) for t in machine.asked) <= 2  # the first told of the others


def test_what_the_user_has_is_kept_where_nothing_is_faster(tmp_path: Path) -> None:
    asked = question()
    have = asked.trial(asked.have).cell
    machine = Machine(asked, times_of_step=lambda trial: 1.0 if trial.cell == have else 4.0)
    found = decided(machine, gathered(machine), tmp_path)
    assert (found.keeps, found.exit_code) == (True, 0)


def test_equal_steps_are_undecided_and_the_cheapest_is_named(tmp_path: Path) -> None:
    asked = question()
    base = Machine(asked).step(asked.trial(asked.have))

    def equal(trial: Trial) -> float:
        return base / Machine(asked).step(trial) * (1 + 0.004 * ((trial.seed + len(trial.mode)) % 2))

    machine = Machine(asked, times_of_step=equal)
    found = decided(machine, gathered(machine), tmp_path)
    assert found.exit_code == 3
    assert found.use == asked.have  # nothing to change
    assert found.undecided == f"keep {asked.have.words()} for now"
    assert "3 runs cannot tell" in found.why
    assert found.why.endswith("on a quiet machine run it again with --fresh.")


@pytest.mark.parametrize(
    ("slowest", "said"),
    [
        (9.0, r" looked [\d.]+ times as fast, but 3 runs cannot tell \(the interval is [\d.]+ to \d+ times\); "),
        (900.0, r"but 3 runs cannot tell \(their times differ wildly\); on a quiet machine"),
    ],
)
def test_an_absurdly_wide_interval_is_told_in_a_clause(tmp_path: Path, slowest: float, said: str) -> None:
    """Without its ends, where those are no numbers to read."""
    asked = question("tiny", "cpu")
    base = Machine(asked).step(asked.trial(asked.have))
    have = asked.trial(asked.have).cell

    def disturbed(trial: Trial) -> float:
        return base / Machine(asked).step(trial) * ((1.0, slowest, 1.2)[trial.seed] if trial.cell == have else 0.9)

    machine = Machine(asked, times_of_step=disturbed)
    found = decided(machine, gathered(machine), tmp_path)
    assert found.use == asked.have
    assert re.search(said, found.why)


def test_nothing_is_advised_whose_interval_holds_1(tmp_path: Path) -> None:
    """Of two steps a one-sided test tells what the 95 % interval that is quoted does not."""
    asked = question("tiny", "cpu")
    base = Machine(asked).step(asked.trial(asked.have))

    def faster(trial: Trial) -> float:
        return base / Machine(asked).step(trial) / (1.0 if trial.precision == "bf16" else (1.25, 1.5, 2.0)[trial.seed])

    fails = dict.fromkeys(("/compile/", "/fp8/", "/manual/", "-head-"), "oom")
    machine = Machine(asked, times_of_step=faster, fails=fails)
    evidence = gathered(machine)
    assert [choice.precision for choice in evidence.steps] == ["bf16", "fp32"]
    found = decided(machine, evidence, tmp_path)
    assert (found.exit_code, found.use) == (3, asked.have)
    assert found.why.startswith("PyTorch eager fp32, flash attention looked 1.55 times as fast, but 3 runs cannot tell")


def test_a_speed_up_that_is_shown_is_advised_beside_a_smaller_change_that_is_not(tmp_path: Path) -> None:
    """torch.compile alone looks as fast as with a chunked head, but varies so much that its own interval holds 1."""
    asked = question("tiny", "cpu")
    have = asked.trial(asked.have)
    base = Machine(asked).step(have)

    def faster(trial: Trial) -> float:
        by = (1.9, 2.0, 2.1) if "head" in trial.problem else (2.3, 1.2, 2.6)
        return base / Machine(asked).step(trial) / (1.0 if trial.cell == have.cell else by[trial.seed])

    fails = dict.fromkeys(("/fp8/", "/manual/", "/fp32/"), "oom")
    machine = Machine(asked, times_of_step=faster, fails=fails)
    found = decided(machine, gathered(machine), tmp_path)
    assert (found.exit_code, found.use.mode, found.use.head) == (0, "compile", "chunked")


def test_a_small_budget_leaves_out_and_says_so_and_one_run_of_each_decides_nothing(tmp_path: Path) -> None:
    least, small, all_of_it = (Machine(question()) for _ in range(3))
    evidence = gathered(least, budget_s=0.0)
    assert [t.workload for t in least.asked] == ["survey", "train_step"]  # whatever the budget
    assert any("steps by" in reason for reason in evidence.left_out)
    assert decided(least, evidence, tmp_path).exit_code == 3
    assert gathered(small, budget_s=30.0).left_out
    assert not gathered(all_of_it).left_out
    assert len(small.asked) < len(all_of_it.asked)


def takes(trial: Trial) -> float:
    """Seconds, as of a small model on a CPU."""
    return {"survey": 5.0, "train_step": 12.0 if trial.mode != "eager" else 5.0}.get(trial.workload, 1.5)


@pytest.mark.parametrize("budget_s", [30.0, 45.0, 60.0, 90.0])
def test_one_of_each_comes_before_repetitions_and_the_budget_is_used(budget_s: float) -> None:
    machine = Machine(question("tiny", "cpu"), wall=takes)
    evidence = gathered(machine, budget_s=budget_s)
    steps = [trial for trial in machine.asked if trial.workload == "train_step"]
    first_again = next((place for place, trial in enumerate(steps) if trial.seed), len(steps))
    assert len({trial.cell for trial in steps[:first_again]}) >= 2
    assert machine.clock <= budget_s
    assert not evidence.left_out or budget_s - machine.clock < 13.0  # less than the dearest trial
    assert len({trial.id for trial in machine.asked}) == len(machine.asked)
    for records in evidence.steps.values():
        assert len({record.trial.id for record in records}) == len(records)


def takes_long(trial: Trial) -> float:
    """Seconds, as of Llama's 1B on an H100; of a step that was checked before, less."""
    steps = {"eager": 33.5, "cudagraph": 37.0, "compile": 110.0, "compile-reduce-overhead": 110.0}
    step = steps[trial.mode] * (0.45 if trial.seed else 1.0)
    return {"survey": 15.5, "train_step": step, "linear": 2.5}.get(trial.workload, 3.0)


@pytest.mark.parametrize("budget_s", [150.0, 180.0, 220.0, 260.0, 320.0])
def test_what_is_promising_is_verified_before_anything_is_repeated(budget_s: float) -> None:
    machine = Machine(question(), wall=takes_long)
    evidence = gathered(machine, budget_s=budget_s)
    steps = [trial for trial in machine.asked if trial.workload == "train_step"]
    frames = {machine.question.trial(frame).cell for frame in machine.question.frames}
    first = next(place for place, trial in enumerate(steps) if trial.cell not in frames)
    assert not any(trial.seed for trial in steps[:first])
    verified = [choice for choice in evidence.steps if choice not in machine.question.frames]
    assert any(choice.recipe and choice.attention == "cudnn" and choice.fused for choice in verified)
    assert machine.clock <= budget_s + 37.0


def test_what_is_promising_and_not_measured_is_named_first_and_its_budget_measures_it(tmp_path: Path) -> None:
    machine = Machine(question(), wall=takes_long)
    evidence = gathered(machine, budget_s=118.0)
    promised = evidence.promising
    assert promised.choice.recipe
    assert promised.choice not in evidence.steps
    first, *others = answer.sentences(evidence, decided(machine, evidence, tmp_path), [])
    ms = machine.step(machine.question.trial(promised.choice)) * 1e3
    promise = r"Most promising, not measured: (.+), predicted ([\d.]+) to ([\d.]+) ms a step \(what you have: [\d.]+\);"
    said = re.fullmatch(promise + r" --budget (\d+min|\d+s) measures it\.", first)
    assert said[1] == promised.choice.words()
    assert float(said[2]) < ms < float(said[3])
    assert others[0].startswith("Undecided: ")
    assert any(sentence.startswith("No FP8 step was measured; ") for sentence in others)
    ended = {trial.id for trial in machine.asked}
    again = Machine(question(), wall=takes_long)
    more = gathered(again, budget_s=seconds(said[4]), known=ended)
    assert (
        min(map(steps.typical, more.steps.values())) <= promised.seconds + promised.bound_s
    )  # that one, or a faster one
    assert not any("Most promising" in s for s in answer.sentences(more, decided(again, more, tmp_path / "more"), []))


def test_one_run_of_each_on_a_gpu_names_what_to_use_and_the_budget_that_repeats_it(tmp_path: Path) -> None:
    machine = Machine(question(), wall=takes_long)
    evidence = gathered(machine, budget_s=150.0)
    found = decided(machine, evidence, tmp_path)
    assert (found.exit_code, found.use.recipe is None, found.runs) == (3, False, 1)
    assert found.undecided == f"use {found.use.words()} for now"
    said = re.fullmatch(r"One run of each gives no interval; --budget (\d+min|\d+s) repeats them\.", found.why)
    assert said is not None
    again = Machine(question(), wall=takes_long)
    more = gathered(again, budget_s=seconds(said[1]), known={trial.id for trial in machine.asked})
    decision = decided(again, more, tmp_path / "more")
    assert (decision.exit_code, decision.use, decision.runs) == (0, found.use, advise.SEEDS)
    plain, have = Machine(question()), machine.question.trial(machine.question.have)

    def barely(trial: Trial) -> float:
        return (1.0 if trial.cell == have.cell else 0.9) * plain.step(have) / plain.step(trial)

    alike = Machine(question(), wall=takes_long, times_of_step=barely)
    kept = decided(alike, gathered(alike, budget_s=150.0), tmp_path / "alike")
    assert kept.undecided == f"keep {kept.have.words()} for now"  # processes may differ by as much


def test_a_gpu_has_an_answer_before_whole_models_are_compiled(tmp_path: Path) -> None:
    """As BERT large on an H200: two compilations take most of the default budget."""
    walls = {"survey": 18.0, "linear": 2.5, "attention": 6.0, "linear_cross_entropy": 6.0}

    def wall(trial: Trial) -> float:
        step = 200.0 if trial.mode in candidates.WHOLE else 28.0
        return walls.get(trial.workload, step * (0.45 if trial.seed else 1.0))

    machine = Machine(question(), wall=wall)
    evidence = gathered(machine, budget_s=600.0)
    found = decided(machine, evidence, tmp_path)
    assert (found.exit_code, found.use.precision, found.use.mode, found.runs) == (0, "fp8", "cudagraph", advise.SEEDS)
    compiled = next(place for place, trial in enumerate(machine.asked) if trial.mode in candidates.WHOLE)
    assert any(
        trial.cell == machine.question.trial(found.use).cell and trial.seed for trial in machine.asked[:compiled]
    )
    assert machine.clock <= 600.0 + 200.0


def test_where_nothing_is_promising_what_was_measured_is_repeated_before_parts_are_timed() -> None:
    """No part makes a step in float32 another, which is the fastest here."""
    faster = {"fp32": 0.1}
    machine = Machine(question("tiny", "cpu"), wall=takes, times_of_step=lambda t: faster.get(t.precision, 1.0))
    gathered(machine, budget_s=33.0)
    assert any(trial.seed for trial in machine.asked)
    first_again = next(place for place, trial in enumerate(machine.asked) if trial.seed)
    assert {trial.workload for trial in machine.asked[:first_again]} == {"survey", "train_step"}


def test_what_ended_before_takes_nothing_of_the_budget() -> None:
    """Every trial of a run that measured all is given again within a second."""
    machine = Machine(question(), wall=takes_long)
    gathered(machine)
    again, said = Machine(question(), wall=takes_long), list[str]()
    ended = {trial.id for trial in machine.asked}
    evidence = gathered(again, budget_s=1.0, known=ended, say=said.append)
    assert {trial.id for trial in again.asked} == ended
    assert not evidence.left_out
    assert again.clock == 0.0
    assert "All of it takes" not in said[0]


def test_a_small_budget_answers_by_all_that_a_large_one_measured(tmp_path: Path) -> None:
    """What ended before is in the answer, even where the budget holds nothing of what is still to come."""
    machine = Machine(question("tiny", "cpu"), wall=takes)
    before = gathered(machine, budget_s=100.0)
    assert before.left_out
    again, said = Machine(question("tiny", "cpu"), wall=takes), list[str]()
    ended = {trial.id for trial in machine.asked}
    evidence = gathered(again, budget_s=0.1, known=ended, say=said.append)
    assert {trial.id for trial in again.asked} == ended
    assert evidence.steps.keys() == before.steps.keys()
    assert said[0].endswith("What was measured before takes no time; --budget allows 1 s for the rest.")


def test_where_only_what_the_user_has_was_measured_nothing_is_decided(tmp_path: Path) -> None:
    machine = Machine(question("tiny", "cpu"), wall=takes)
    found = decided(machine, gathered(machine, budget_s=10.0), tmp_path)
    assert (found.keeps, found.exit_code) == (True, 3)
    assert found.undecided == "in 10 s only what you have was measured"
    assert re.fullmatch(r"--budget \d+(s|min) measures \d more steps\.", found.why)


def test_the_opening_line_says_what_all_takes_and_what_the_budget_holds() -> None:
    said: list[str] = []
    for budget_s in (20.0, 90.0, 9000.0):
        gathered(Machine(question("tiny", "cpu")), budget_s=budget_s, say=said.append)
    everything = r"(\d+ s|\d min) if the model is small"
    assert re.search(
        rf"All of it takes about {everything}; in your 20 s: the survey and about 2 runs of steps\.$", said[0]
    )
    assert re.search(r"(in your|--budget allows) 90 s\b", said[1])
    assert re.search(
        rf"up to 10 runs of steps and the parts that decide are measured, about {everything}; --budget allows 2\.5 h\.$",
        said[2],
    )


def test_what_takes_too_much_memory_is_not_advised(tmp_path: Path) -> None:
    machine = Machine(question(), gib=lambda trial: 30.0 if "blocks" in trial.problem else 10.0)
    limit = 20 * 2.0**30
    evidence = gathered(machine, memory=limit)
    found = decided(machine, evidence, tmp_path, limit)
    assert not found.use.fused
    assert found.memory <= limit
    assert any(choice.fused for choice in evidence.excluded)


def test_what_does_not_fit_is_not_said_to_be_slower_and_is_compared_with_nothing(tmp_path: Path) -> None:
    """All but the user's step, and all but that and captured ones, take too much memory."""
    limit = 5 * 2.0**30
    asked = question()
    have = asked.trial(asked.have).cell
    machine = Machine(asked, gib=lambda trial: 4.0 if trial.cell == have else 12.0)
    evidence = gathered(machine, memory=limit)
    found = decided(machine, evidence, tmp_path, limit)
    said = answer.terminal(evidence, found, [], "index.html")
    assert found.keeps
    assert "nothing that was measured and fits into --memory is faster; " in " ".join(said.split())
    machine = Machine(question(), gib=lambda trial: 4.0 if trial.mode in ("eager", "cudagraph") else 12.0)
    evidence = gathered(machine, memory=limit)
    found = decided(machine, evidence, tmp_path / "fused", limit)
    said = answer.terminal(evidence, found, [], "index.html")
    assert found.use.mode == "cudagraph"
    assert "Without FP8: torch.compile" not in said
    assert found.over_best is None or found.over_best[0].mode == "eager"


def grows(trial: Trial) -> float:
    """GiB of a step: 4, and one for each sequence at a time."""
    return 4.0 + trial.problem["batch"]


def test_where_no_step_fits_the_batch_is_cut_into_micro_batches_of_as_many_tokens(tmp_path: Path) -> None:
    machine = Machine(question(batch=16), gib=grows)
    limit = 6.5 * 2.0**30
    evidence = gathered(machine, memory=limit)
    found = decided(machine, evidence, tmp_path, limit)
    assert found.use.accumulate == 8
    assert found.exit_code == 0
    assert found.memory == 6 * 2**30
    cut = [t for t in machine.asked if t.problem.get("accumulate") and "checkpointing" not in t.problem and not t.seed]
    workloads = [t.workload for t in machine.asked[: machine.asked.index(cut[-1])]]
    assert set(workloads) == {"survey", "train_step"}  # what fits comes before what is faster
    assert [t.problem["batch"] for t in cut] == [8, 2]  # two points tell that 4 at a time do not fit
    assert all(t.problem["batch"] * t.problem["accumulate"] == 16 for t in cut)
    for made in cut:
        plan.check(made)
    said = answer.terminal(evidence, found, [], "index.html")
    assert "8 micro-batches" in said
    assert ", accumulate=8)" in said


def test_where_one_sequence_takes_too_much_that_is_said(tmp_path: Path) -> None:
    machine = Machine(question(), gib=grows)
    limit = 4.5 * 2.0**30
    found = decided(machine, gathered(machine, memory=limit), tmp_path, limit)
    assert found.exit_code == 3
    assert found.undecided == "every step that was measured takes more than --memory"
    assert found.why.startswith("One sequence at a time by checkpointed blocks takes more, too")
    assert min(trial.problem["batch"] for trial in machine.asked if trial.workload == "train_step") == 1
    machine = Machine(question())  # nor with the least micro-batches where all take as much
    found = decided(machine, gathered(machine, memory=2.0**30), tmp_path / "less", 2.0**30)
    assert found.exit_code == 3
    assert "--memory" in found.undecided


def test_what_runs_out_of_memory_is_surveyed_and_trained_in_micro_batches(tmp_path: Path) -> None:
    """The survey of a part of the batch counts for the whole of it."""
    asked = question()
    machine = Machine(asked)
    record_of = machine._record

    def short_of_memory(trial: Trial) -> Record:
        much = trial.problem["batch"] if trial.workload in ("survey", "train_step") else 0
        return record(trial, outcome="oom", reason="planted") if much > 3 else record_of(trial)

    machine._record = short_of_memory  # type: ignore[method-assign]
    evidence = gathered(machine)
    found = decided(machine, evidence, tmp_path)
    assert found.use.accumulate == 4
    assert (found.speedup, found.exit_code) == (None, 0)
    assert set(evidence.steps) == {found.use}
    assert evidence.made.head[0] == 4 * asked.tokens  # of the machine's survey, which is of all tokens


def test_of_larger_batches_that_fit_the_fastest_per_token_is_told(tmp_path: Path) -> None:
    def per_token(trial: Trial) -> float:
        return {12: 1.0, 24: 1.8, 48: 3.4}[trial.problem["batch"]]

    machine = Machine(question(), gib=grows, times_of_step=per_token)
    evidence = gathered(machine, room=80 * 2.0**30)
    assert sorted(evidence.larger) == [24, 48]  # 96 would take 100 GiB
    found = decided(machine, evidence, tmp_path)
    said = answer.sentences(evidence, found, [])
    (larger,) = (sentence for sentence in said if sentence.startswith("A batch of "))
    assert larger == "A batch of 48 fits, too, 52.0 GiB: 1.18× as fast per token, by one run."
    assert not any("A batch of" in sentence for sentence in answer.sentences(gathered(Machine(question())), found, []))


def test_memory_is_compared_by_what_both_steps_show() -> None:
    have, use = ({"peak_allocated_bytes": [5.0], "peak_reserved_bytes": [8.0]}, {"peak_reserved_bytes": [6.0]})
    both = [[record(trial(seed=seed), samples=samples)] for seed, samples in enumerate((have, use))]
    assert steps.peaks(*both) == [8.0, 6.0]
    assert steps.peak(both[0]) == 5.0


def test_runs_that_differ_are_told_by_the_mean_of_all_and_their_range() -> None:
    """As the report tells them, not by the first run."""
    runs = [step_record(trial(seed=seed), ms) for seed, ms in enumerate((95, 296, 564))]
    assert steps.typical(runs) == of_processes(runs, "latency_s") == pytest.approx(0.2513, rel=0.01)
    assert answer.measured_in_words(runs) == "251.2 ms a step (3 runs: 95.0 to 564.0)"
    assert answer.measured_in_words(runs[:1]) == "95.0 ms a step"


def test_what_cannot_run_is_left_out_with_its_reason(tmp_path: Path) -> None:
    machine = Machine(question(), fails={"gluon": "unsupported", "fp8": "failed_check"})
    evidence = gathered(machine)
    found = decided(machine, evidence, tmp_path)
    assert found.use.recipe is None
    assert "gluon" not in found.use.attention


def test_a_baseline_that_does_not_run_has_no_speedup(tmp_path: Path) -> None:
    machine = Machine(question(), fails={"train_step/gpt2-b12-t1024-V50257/flash/bf16/eager": "oom"})
    evidence = gathered(machine)
    found = decided(machine, evidence, tmp_path)
    assert (found.speedup, found.have_seconds) == (None, None)
    assert any(
        said.startswith("What you have has no time, so that there is no speed-up: oom")
        for said in answer.sentences(evidence, found, [])
    )


@pytest.mark.parametrize("failing", ["survey", "train_step"])
def test_nothing_measured_says_why(failing: str) -> None:
    with pytest.raises(NothingMeasured, match="oom: planted"):
        gathered(Machine(question(), fails={failing: "oom"}))


def test_what_fails_everywhere_is_said_once_and_no_smaller_batch_is_tried() -> None:
    """Each trial has a log of its own, which is no other reason."""
    machine = Machine(question())
    record_of = machine._record

    def crashed(trial: Trial) -> Record:
        if trial.workload != "train_step":
            return record_of(trial)
        return record(trial, outcome="crashed", reason=f"RuntimeError: planted; see logs/{trial.id}.log")

    machine._record = crashed  # type: ignore[method-assign]
    with pytest.raises(NothingMeasured, match=r"^crashed: RuntimeError: planted; see logs/\w+\.log$"):
        gathered(machine)
    assert {trial.problem["batch"] for trial in machine.asked if trial.workload == "train_step"} == {12}


def test_what_a_machine_or_a_model_cannot_do_is_no_choice_and_said() -> None:
    on_cpu, dropping = question("tiny", "cpu"), question("char")
    old = candidates.of_model(Options(device="cuda", model="gpt2"), (8, 0))
    assert not any(choice.fused for asked in (on_cpu, dropping) for choice in asked.choices)
    assert "fused blocks" in on_cpu.left_out
    assert dropping.left_out["fused blocks"] == "no fused kernel has dropout"
    assert any(choice.precision == "fp32" for choice in on_cpu.choices)
    assert on_cpu.problem["batch"] == 4
    assert not any(choice.recipe for choice in old.choices)
    assert "no FP8 tensor cores" in old.left_out["FP8"]
    assert "delayed_scaling" not in old.left_out


def test_of_delayed_scalings_two_formats_of_gradients_only_e4m3_is_a_choice() -> None:
    asked = question()
    assert {choice.recipe for choice in asked.choices} == {None, *candidates.RECIPES}
    assert candidates.RECIPES[0] == "delayed_scaling_e4m3"
    assert "delayed_scaling_e4m3" in asked.left_out["delayed_scaling"]


def test_choices_are_given_once_and_the_users_first() -> None:
    asked = question()
    assert asked.choices[0] == asked.have == asked.frames[0]
    assert len(set(asked.choices)) == len(asked.choices)
    assert dataclasses.replace(asked.have, padded=True) in asked.choices


def test_on_a_cpu_a_tiny_model_s_steps_and_parts_have_one_thread() -> None:
    """Beside other programs two threads wait for each other: its whole advice took 4.6 minutes, and takes 2.6."""
    asked = candidates.of_model(Options(device="cpu", model="tiny"), None)
    part = candidates.alone(asked, "linear", {"tokens": 8, "in_features": 64, "out_features": 64})
    trials = [asked.survey(), part, *map(asked.trial, asked.choices)]
    assert {t.problem.get("threads") for t in trials} == {1}
    for each in trials:
        TrialProblem.of(each)
    larger = candidates.of_model(Options(device="cpu", model="gpt2"), None)
    assert "threads" not in larger.survey().problem
