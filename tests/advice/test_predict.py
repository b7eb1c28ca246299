"""Predictions are a measured step less what it does without, plus what it has."""

import dataclasses

import pytest
from advice_machine import Machine, fused, gathered, question
from journals import record, trial

from te_bench.advice import parts, predict
from te_bench.advice.predict import Frame


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine(question())


def test_each_prediction_is_right_on_a_machine_where_parts_add_up(machine: Machine) -> None:
    evidence = gathered(machine)
    assert set(evidence.predictions) == set(machine.question.choices)
    for choice, prediction in evidence.predictions.items():
        truth = machine.step(machine.question.trial(choice))
        assert prediction.seconds == pytest.approx(truth, rel=2e-3)
        assert prediction.bound_s >= 0.02 * prediction.seconds * 0.5


def test_gains_say_what_saves(machine: Machine) -> None:
    evidence = gathered(machine)
    gains = evidence.predictions[fused("delayed_scaling_e4m3", head="fp8")].gains
    assert gains["attention"] == pytest.approx(12 * 0.1e-3)
    assert gains["linear_cross_entropy"] == pytest.approx(1e-3)
    assert gains["linear"] > 0


def test_in_fused_blocks_another_recipe_takes_as_much_more_as_its_linears_do_alone(machine: Machine) -> None:
    """Delayed scaling knows its scales before the kernel that could cast; a recipe that does not reads the values again."""
    evidence = gathered(machine)
    slower = dict(evidence.times)
    for part, time in evidence.times.items():
        if part.rival == "rowwise_scaling":
            slower[part] = dataclasses.replace(time, seconds=time.seconds + 1e-4)
    frame = {machine.question.frame(fused("delayed_scaling_e4m3")): Frame(seconds=0.1, memory=None)}
    both = (fused(recipe) for recipe in ("delayed_scaling_e4m3", "rowwise_scaling"))
    known, other = (predict.predict(machine.question, evidence.made, one, frame, slower) for one in both)
    needed = parts.parts_of(machine.question, evidence.made, fused())
    calls = sum(count for part, count in needed.items() if part.workload == "linear")
    assert other.seconds - known.seconds == pytest.approx(calls * 1e-4)


def test_the_models_own_head_counts_in_a_compiled_step_as_it_is_compiled(machine: Machine) -> None:
    """On an H100 the head of GPT-2 alone takes 25 ms in eager mode, and all of a compiled step 29 ms."""
    evidence = gathered(machine)
    have = machine.question.have
    for mode, gain in (("eager", 3.5e-3), ("compile", 0.0)):
        choice = dataclasses.replace(have, mode=mode, head="chunked", padded=True)
        found = evidence.predictions[choice]
        assert found.gains["linear_cross_entropy"] == pytest.approx(gain)
    heads = {part.mode for part in evidence.times if part.rival == "reference"}
    assert heads == {"eager", "compile"}
    assert {part.mode for part in evidence.times if part.rival != "reference"} == {"eager"}


def test_a_part_without_a_time_gives_no_prediction() -> None:
    machine = Machine(question(), fails={"attention/": "crashed"})
    evidence = gathered(machine)
    assert {choice.attention for choice in evidence.predictions} == {machine.question.have.attention}
    assert {part.rival for part in evidence.failed} == {"flash", "cudnn", "gluon", "triton"}
    assert set(evidence.failed.values()) == {"crashed: planted"}


def test_parts_that_take_longer_alone_than_the_step_count_for_less(machine: Machine) -> None:
    """As on a CPU where each part alone is called from Python: no step takes less than nothing."""
    evidence = gathered(machine)
    have = machine.question.have
    frames = {have: Frame(seconds=1e-4, memory=None)}
    choice = dataclasses.replace(have, attention="cudnn", head="chunked")
    found = predict.predict(machine.question, evidence.made, choice, frames, evidence.times)
    assert 0 < found.seconds < 1e-4
    assert found.memory is None


@pytest.mark.parametrize(("kernels", "gains"), [(None, True), (0.95, True), (0.8, False)])
def test_where_the_gpu_waits_for_python_faster_parts_gain_nothing(machine, kernels, gains):
    evidence = gathered(machine)
    have = machine.question.have
    choice = dataclasses.replace(have, attention="cudnn", head="chunked")
    frame = Frame(seconds=1.0, memory=None, kernels=kernels)
    found = predict.predict(machine.question, evidence.made, choice, {have: frame}, evidence.times)
    assert sum(found.gains.values()) > 0
    assert (found.seconds < 1.0) == gains


def test_a_head_without_logits_is_predicted_to_take_less_memory(machine: Machine) -> None:
    evidence = gathered(machine)
    have = machine.question.have
    both = (dataclasses.replace(have, head=head) for head in (None, "chunked"))
    with_logits, without = (evidence.predictions[one].memory for one in both)
    assert without == with_logits - 4 * machine.question.tokens * 50257


def test_calls_that_others_disturbed_do_not_decide_over_a_part() -> None:
    """As on two cores of which one is busy."""
    quiet, disturbed = [2.5e-4] * 40, [2.4e-2] * 60
    part = parts.Part("linear", (("tokens", 1), ("in_features", 1), ("out_features", 1)), "bf16")
    made = record(trial("linear"), samples={"kernel_s": [*disturbed, *quiet]})
    found = parts.time_of(part, made)
    assert found.seconds == pytest.approx(2.5e-4)
