"""Trials and records: JSON both ways, and an id that sees every field."""

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from te_bench.experiments.spec import MODES, OUTCOMES, PRECISIONS, Options, Record, Trial, canonical_json

numbers = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), numbers, st.text(max_size=8))
problems = st.dictionaries(st.text(max_size=8), scalars, max_size=5)
trials = st.builds(
    Trial,
    workload=st.text(max_size=8),
    device=st.sampled_from(["cpu", "cuda"]),
    problem=problems,
    attention=st.text(max_size=8),
    precision=st.sampled_from(PRECISIONS),
    recipe=st.none() | st.text(max_size=8),
    mode=st.sampled_from(MODES),
    protocol=st.text(max_size=8),
    seed=st.integers(0, 2**31),
)
json_objects = st.dictionaries(st.text(max_size=8), st.recursive(scalars, st.lists, max_leaves=4), max_size=3)
records = st.builds(
    Record,
    trial=trials,
    environment=st.text(max_size=16),
    outcome=st.sampled_from(OUTCOMES),
    reason=st.none() | st.text(),
    started_at=st.text(max_size=8),
    wall_s=numbers,
    work_s=st.none() | numbers,
    check=json_objects,
    work=json_objects,
    samples=st.dictionaries(st.text(max_size=8), st.lists(numbers, max_size=4), max_size=3),
    kernels=st.lists(st.text(max_size=8), max_size=3),
    device_state=json_objects,
)


@given(trials)
def test_a_trial_survives_json_with_its_id(trial: Trial) -> None:
    again = Trial.from_json(json.loads(canonical_json(trial.to_json())))
    assert again == trial
    assert (again.id, again.cell, again.name) == (trial.id, trial.cell, trial.name)


@given(records)
def test_a_record_survives_json(record: Record) -> None:
    value = json.loads(canonical_json(record.to_json()))
    assert value["trial"]["id"] == record.trial.id
    assert Record.from_json(value) == record
    assert Record.from_json(value).key == record.key


OTHER: dict[str, Any] = {
    "workload": "layer",
    "device": "cuda",
    "problem": {"batch": 2},
    "attention": "flash",
    "precision": "fp8",
    "recipe": "float8_current_scaling",
    "mode": "compile",
    "protocol": "kernel",
    "seed": 1,
}
TRIAL = Trial(workload="train_step", device="cpu", problem={"batch": 1, "x": None, "rate": 1.5}, attention="manual")


def test_every_field_is_in_the_test_below() -> None:
    assert list(OTHER) == [field.name for field in dataclasses.fields(Trial)]


@pytest.mark.parametrize("field", OTHER)
def test_the_id_sees_every_field_and_the_cell_all_but_the_seed(field: str) -> None:
    changed = dataclasses.replace(TRIAL, **{field: OTHER[field]})
    assert changed.id != TRIAL.id
    assert (changed.cell == TRIAL.cell) == (field == "seed")


@given(problems, problems)
def test_two_problems_have_one_id_only_when_they_are_one(a: dict[str, Any], b: dict[str, Any]) -> None:
    ids = [dataclasses.replace(TRIAL, problem=problem).id for problem in (a, b)]
    assert (ids[0] == ids[1]) == (canonical_json(a) == canonical_json(b))


def test_the_id_is_the_same_in_every_version_and_order_of_settings() -> None:
    """A change here would orphan every record ever written."""
    assert (TRIAL.id, TRIAL.cell) == ("4406fac56525e57e", "325ba0cd5dfa32cc")
    assert dataclasses.replace(TRIAL, problem=dict(reversed(TRIAL.problem.items()))).id == TRIAL.id


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_one_has_no_id(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        _ = dataclasses.replace(TRIAL, problem={"rate": value}).id


def test_the_name_shows_what_tells_trials_apart() -> None:
    problem = {"model": "gpt2", "batch": 12, "block": 1024, "vocab": 50257, "padded_vocab": 50304}
    step = dataclasses.replace(TRIAL, problem=problem, attention="flash", precision="bf16", seed=2)
    assert step.name == "train_step/gpt2-b12-t1024-V50304/flash/bf16/eager/s2"
    shape = {"batch": 1, "heads": 4, "length": 256, "head_dim": 64, "causal": False}
    assert dataclasses.replace(TRIAL, problem=shape).name == "train_step/b1-h4-t256-d64-full/manual/bf16/eager/s0"


def test_the_name_shows_a_head_and_an_optimizer_where_there_are_any() -> None:
    problem: dict[str, Any] = {"model": "gpt2", "batch": 12, "padded_vocab": 50304}
    plain = dataclasses.replace(TRIAL, problem=problem)
    fast = dataclasses.replace(TRIAL, problem={**problem, "head": "fp8", "optimizer": "triton"})
    assert plain.name == "train_step/gpt2-b12-V50304/manual/bf16/eager/s0"
    assert fast.name == "train_step/gpt2-b12-V50304-head-fp8-adamw-triton/manual/bf16/eager/s0"
    assert fast.id != plain.id


def test_a_record_of_another_outcome_or_schema_is_refused() -> None:
    with pytest.raises(AssertionError):
        Record(trial=TRIAL, environment="e", outcome="fine", started_at="", wall_s=0.0)
    value = Record(trial=TRIAL, environment="e", outcome="ok", started_at="", wall_s=0.0).to_json()
    with pytest.raises(ValueError, match="record schema 7; this te-bench reads schema 1"):
        Record.from_json({**value, "schema": 7})


def test_data_is_chosen_by_model_then_for_all_then_by_the_suite() -> None:
    options = Options(device="cpu", data={"char": "text:a", "": "text:b"})
    assert options.data_for("char") == "text:a"
    assert options.data_for("gpt2") == "text:b"
    assert Options(device="cpu").data_for("gpt2") == "stdlib"
