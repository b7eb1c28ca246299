"""What of each suite a user's model gets, and what is said to be left out."""

import dataclasses
import itertools
import sys
from pathlib import Path

import pytest

from te_bench.experiments.plan import resolve
from te_bench.experiments.problems import StepProblem
from te_bench.experiments.spec import Experiment, Options, Trial
from te_bench.models import sources

FACTS = sources.Facts(
    vocab=50257,
    block=None,
    sequence=None,
    parameters=10**6,
    sdpa=2,
    scores=4096,
    tried=32,
    text=True,
    manual=False,
    blocks="model.h",
)

NUMBERS = itertools.count()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planned.py").write_text("")
    return facts(monkeypatch)


def facts(monkeypatch: pytest.MonkeyPatch, **more: object) -> str:
    """A model of which planning finds out these facts; another name each time, as they are found out once."""
    monkeypatch.setattr(sources, "ask", lambda source, tokens: dataclasses.replace(FACTS, **more))
    return f"planned:make{next(NUMBERS)}"


def planned(suite: str, model: str, device: str = "cuda", **more: object) -> Experiment:
    if suite in ("curves", "convergence", "stress"):
        more = {"data": {"": "random"}, **more}
    options = Options(device=device, model=model, seeds=1, **more)  # type: ignore[arg-type]
    return resolve(suite, options)


def steps(experiment: Experiment) -> list[Trial]:
    return [trial for trial in experiment.trials if trial.workload != "ceilings"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"weights": "bf16"},
            "--weights applies to te-bench's own models only; create your model in the dtype that you want",
        ),
        (
            {"states": "fp8"},
            "--states applies to te-bench's own models only; AdamW keeps your model's moments in the dtype",
        ),
    ],
)
def test_weights_and_states_of_your_model_are_its_own(asked: dict[str, str], said: str, model: str) -> None:
    for suite in ("fp8", "convergence"):
        with pytest.raises(ValueError, match=said):
            planned(suite, model, **asked)


def test_a_study_of_your_model_judges_the_same_recipe_first(model: str) -> None:
    experiment = planned("convergence", model, preset="gpt2")
    primary = {t.recipe for t in experiment.trials if t.cell == experiment.judgement["primary"]}
    assert primary == {"delayed_scaling_e4m3"}


@pytest.mark.parametrize("suite", ["speed", "nanogpt", "fp8", "memory", "curves", "convergence", "stress"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_suite_of_models_takes_one(suite: str, device: str, model: str) -> None:
    found = steps(planned(suite, model, device))
    assert found
    for trial in found:
        p = StepProblem.of(trial)
        assert (p.model, p.head, p.blocks, p.linears) == (model, None, None, None)
        assert p.source is not None
        assert p.vocab == p.padded_vocab == 50257
        assert trial.attention in ("own", "math", "mem_efficient", "flash", "cudnn")
    assert {trial.precision for trial in found} - {"fp8"}
    assert found[0].attention == "own"


def test_the_plan_says_what_is_left_out(model: str) -> None:
    assert planned("speed", model).left_out == (
        "heads, fused blocks, a padded vocabulary: for te-bench's own models",
        "attention flash4, gluon, triton: the model cannot be asked for it",
        "rivals transformer_engine_block, transformer_engine_current, transformer_engine_delayed: for te-bench's own models",
    )
    assert planned("speed", model, "cpu").left_out[-1] == "rivals: for a GPU"
    assert planned("fp8", model).left_out == ("a padded vocabulary: for te-bench's own models",)


@pytest.mark.parametrize("suite", ["speed", "nanogpt"])
def test_te_benchs_parts_stand_beside_the_model_as_it_is(suite: str, model: str) -> None:
    found = steps(planned(suite, model))
    of_torch = [t for t in found if t.precision != "fp16" and t.mode != "compile-blocks"]
    plain = [t for t in of_torch if t.attention == "own" and "rival" not in t.problem]
    sides = ([t for t in plain if ("parts" in t.problem) == parts] for parts in (True, False))
    ways = [{(t.precision, t.recipe, t.mode, t.problem.get("optimizer")) for t in side} for side in sides]
    assert ways[0] == ways[1]
    assert {t.attention for t in found if "parts" in t.problem} == {"own"}
    assert f"{model}-b12-t1024-V50257-parts-all/own/bf16" in " ".join(t.name for t in found)


@pytest.mark.parametrize("suite", ["speed", "nanogpt"])
def test_rivals_that_train_any_model_stand_beside_it_on_a_gpu(suite: str, model: str) -> None:
    found = [t for t in steps(planned(suite, model)) if "rival" in t.problem]
    assert [(t.problem["rival"], t.attention, t.precision, t.recipe, t.mode) for t in found] == [
        ("liger", "own", "bf16", None, "eager"),
        ("torchao_rowwise", "own", "fp8", "rowwise_scaling", "compile-blocks"),
        ("torchao_rowwise", "own", "fp8", "rowwise_scaling", "compile"),
        ("torchao_tensorwise", "own", "fp8", "float8_current_scaling", "compile-blocks"),
        ("torchao_tensorwise", "own", "fp8", "float8_current_scaling", "compile"),
    ]
    assert not any("optimizer" in t.problem or "parts" in t.problem for t in found)
    assert not any("rival" in t.problem for t in steps(planned(suite, model, "cpu")))


@pytest.mark.parametrize("suite", ["speed", "nanogpt"])
def test_torch_compile_of_each_block_stands_beside_torchaos_on_a_gpu(suite: str, model: str) -> None:
    found = [t for t in planned(suite, model).trials if t.mode == "compile-blocks" and "rival" not in t.problem]
    assert [(t.attention, t.precision, t.recipe) for t in found] == [("own", "bf16", None)]
    assert not {"optimizer", "parts"} & found[0].problem.keys()
    assert not any(t.mode == "compile-blocks" for t in planned(suite, model, "cpu").trials)


@pytest.mark.usefixtures("model")
def test_a_model_without_blocks_has_no_step_per_block(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned("speed", facts(monkeypatch, blocks=""))
    assert not any(trial.mode == "compile-blocks" for trial in found.trials)
    assert {t.problem.get("rival") for t in found.trials} >= {"torchao_tensorwise", "torchao_rowwise", "liger"}
    assert "torch.compile of each block: the model has no nn.ModuleList of blocks" in found.left_out


def test_several_gpus_are_without_rivals_and_the_plan_says_so(model: str) -> None:
    found = planned("scaling", model)
    assert not any("rival" in t.problem for t in steps(found))
    said = "torchtitan's, torchao's and Transformer Engine's steps: over several GPUs for te-bench's own models"
    assert said in found.left_out


@pytest.mark.parametrize("suite", ["fp8", "memory", "curves"])
def test_other_suites_have_neither(suite: str, model: str) -> None:
    assert not any({"parts", "rival"} & set(t.problem) for t in steps(planned(suite, model)))


def test_attention_is_the_model_s_own_where_nothing_can_choose_its_kernel(model, monkeypatch):
    found = planned("nanogpt", facts(monkeypatch, sdpa=0))
    assert {trial.attention for trial in steps(found)} == {"own"}
    said = "attention cudnn, flash, math, mem_efficient: the model calls no scaled_dot_product_attention"
    assert said in found.left_out
    assert "manual" in {trial.attention for trial in steps(planned("nanogpt", facts(monkeypatch, manual=True)))}


def test_a_verdict_on_convergence_is_of_one_attention(model: str) -> None:
    assert {trial.attention for trial in planned("convergence", model).trials} == {"own"}


def test_arguments_are_part_of_a_trial(model: str) -> None:
    shallow, deep = (planned("fp8", model, model_args=(f"layers={n}",)).trials[0] for n in (1, 2))
    assert shallow.id != deep.id
    assert shallow.problem["arguments"] == '{"layers":1}'


def test_the_same_trial_whatever_else_is_said(model: str) -> None:
    found = planned("fp8", model, batch=2, tokens=64)
    assert [t.id for t in found.trials] == [t.id for t in planned("fp8", model, batch=2, tokens=64).trials]
    assert found.asked == ("--model", model, "--batch", "2", "--tokens", "64")
    named = planned("fp8", model, model_args=("a=1", "b=2")).asked
    assert named == ("--model", model, "--model-args", "a=1", "--model-args", "b=2")


@pytest.mark.parametrize(
    ("suite", "more", "about", "sentence"),
    [
        ("convergence", {}, {"text": False}, "the suite convergence trains on text, and this model takes none"),
        ("speed", {"tokens": 99}, {"block": 64}, "--tokens 99: the model's longest sequence has 64; give at most that"),
        ("speed", {"tokens": 9}, {"sequence": 17}, "--tokens 9: the model's sequences all have 17; leave it out"),
        (
            "stress",
            {"tokens": 4096},
            {},
            "--tokens 4096: .* here the length of a run; set the length of a run by --steps",
        ),
        ("convergence", {"tokens": 4096, "preset": "cpu"}, {}, "the length of your model's sequences"),
        ("quick", {}, {}, "--model: the suite quick chooses its models itself; leave it out"),
        (
            "layer",
            {},
            {},
            "--model planned:make[0-9]+: the suite layer knows only te-bench's own layers; give llama3-1b",
        ),
        ("pieces", {}, {}, "--model planned:make[0-9]+: the suite pieces knows only te-bench's own layers; give gpt2"),
    ],
)
def test_what_a_model_cannot_do_is_refused_in_a_sentence(suite, more, about, sentence, model, monkeypatch):
    with pytest.raises(ValueError, match=sentence):
        planned(suite, facts(monkeypatch, **about), **more)


@pytest.mark.parametrize("suite", ["curves", "convergence", "stress"])
@pytest.mark.parametrize(("about", "length"), [({"block": 32}, 32), ({"sequence": 17}, 17)])
def test_a_training_has_sequences_that_the_model_supports(suite, about, length, model, monkeypatch):
    trials = planned(suite, facts(monkeypatch, **about), "cpu").trials
    assert {trial.problem["block"] for trial in trials if trial.workload == "training"} == {length}


def test_options_of_a_model_go_with_one() -> None:
    with pytest.raises(ValueError, match=r"--inputs: it goes with --model package.module:factory"):
        resolve("speed", Options(device="cpu", inputs="a:b"))


def test_planning_imports_no_torch_and_none_of_the_user_s_code(model: str) -> None:
    planned("fp8", model)
    assert "planned" not in sys.modules


@pytest.mark.parametrize("suite", ["curves", "convergence", "stress"])
def test_a_vocabulary_that_holds_no_byte_is_refused_by_what_trains_on_text(suite, monkeypatch, tmp_path, model):
    text = tmp_path / "book.txt"
    text.write_text("to be or not to be, that is the question\n" * 2000)
    own = {"data": {"": f"text:{text}"}, "cache": tmp_path / "cache", "tokens": 64 if suite == "curves" else None}
    said = "planned:make[0-9]+: its vocabulary has 64 tokens, and the text in 'bytes' has 256"
    with pytest.raises(ValueError, match=said):
        planned(suite, facts(monkeypatch, vocab=64), "cpu", **own)
    assert planned(suite, facts(monkeypatch, vocab=256), "cpu", **own).trials
    with pytest.raises(ValueError, match="this model takes none"):
        planned(suite, facts(monkeypatch, vocab=1, text=False), "cpu", **own)
