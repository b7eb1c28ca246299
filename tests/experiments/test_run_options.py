"""The options of a run: one declaration each, from what is said to what a suite is asked."""

import dataclasses
import re

import pytest

from te_bench.experiments import run_options
from te_bench.experiments.presets import PRESETS
from te_bench.experiments.run_options import OPTIONS, Options


def test_every_field_declares_how_it_is_said() -> None:
    assert list(OPTIONS) == [field.name for field in dataclasses.fields(Options)]
    flags = [option.flag for option in OPTIONS.values()]
    assert len(set(flags)) == len(flags)
    assert all(flag.startswith("--") and "_" not in flag for flag in flags)


def test_the_help_names_every_preset() -> None:
    for preset in PRESETS:
        assert re.search(rf" {preset}[,.]", OPTIONS["preset"].help)


def test_what_was_not_said_is_left_to_the_suite() -> None:
    assert run_options.read({"seeds": None, "fused": False}, "cpu") == Options(device="cpu")
    assert run_options.read({"seeds": 0, "device": "cuda"}, "cpu") == Options(device="cuda", seeds=0)


def test_the_settings_of_the_fused_step_are_shown_beside_a_recipe() -> None:
    assert run_options.shown({"model": "gpt2"}) == ""
    assert run_options.shown({"blocks": "fused", "head": "chunked"}) == ", fused"
    assert run_options.shown({"blocks": "fused", "head": "fp8"}) == ", fused, FP8 head"
    assert run_options.shown({"weights": "bf16", "states": "fp8"}) == ", bf16 weights, FP8 states"
    assert run_options.shown({"weights": "bf16", "states": "bf16"}) == ", bf16 weights and states"


def test_weights_and_states_may_be_said_to_be_the_default() -> None:
    whole = Options(device="cpu", weights="float32", states="float32")
    run_options.check(whole)
    assert run_options.fewer_bits(whole) == {}
    with pytest.raises(ValueError, match=r"'bf61'. Did you mean bf16\? Known: float32, bf16\."):
        run_options.check(Options(device="cpu", weights="bf61"))


def test_data_belongs_to_a_model_or_to_all() -> None:
    said = run_options.data_sets(["char=text:a=b", "hf:x:y", "tiny=random"])
    assert said == {"char": "text:a=b", "": "hf:x:y", "tiny": "random"}
    assert run_options.data_sets(["text:a=b"]) == {"": "text:a=b"}


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["stdlib", "random"], "--data random: every model has the data set stdlib already; give each model one"),
        (["a=stdlib", "a=stdlib"], "--data a=stdlib: the model a has the data set stdlib already"),
    ],
)
def test_two_data_sets_for_one_model_are_refused(specs: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_options.data_sets(specs)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("90s", 90),
        ("0.5s", 0.5),
        ("30m", 1800),
        ("10min", 600),
        ("1.5h", 5400),
        (" 2H ", 7200),
        ("2 h", 7200),
    ],
)
def test_a_budget_has_a_unit(said: str, seconds: float) -> None:
    assert run_options.seconds(said) == run_options.read({"budget_s": said}, "cpu").budget_s == seconds


def test_the_options_of_a_suite_are_those_of_the_verb() -> None:
    given = {"seeds": 3, "model": "tiny", "recipes": "a, b", "as_pilot": True, "suite": "quick", "retry": True}
    found = run_options.read(given, "cpu")
    assert (found.seeds, found.model, found.recipes, found.as_pilot) == (3, "tiny", ("a", "b"), True)
    assert run_options.read({"as_pilot": False}, "cpu").as_pilot is None  # not asked for
