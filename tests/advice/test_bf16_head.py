"""FP8 with the head in bf16, which a study shows to train like bf16: measured, ranked and told beside a faster one."""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from advice_machine import Machine, decided, gathered, survey_work
from typer.testing import CliRunner

from te_bench.advice import answer, candidates, code, convergence, page
from te_bench.advice.advise import STEPS, Evidence
from te_bench.advice.candidates import CHUNKED, CURRENT, DELAYED, Choice, Question
from te_bench.advice.convergence import preference
from te_bench.advice.parts import Made, parts_of
from te_bench.cli import app
from te_bench.experiments import plan, trial_model
from te_bench.experiments.spec import OWN_ATTENTION, Options, Trial
from te_bench.models import recipe as recipes

pytest.importorskip("transformers")

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 64,
}  # fmt: skip
FP8 = Choice(attention=OWN_ATTENTION, precision="fp8", recipe=DELAYED, mode="cudagraph", parts="all")
BF16_HEAD = dataclasses.replace(FP8, head=CHUNKED)
WORDS = "te-bench FP8, delayed scaling E4M3, bf16 head, one CUDA graph"
HEAD = {"rows": 64, "in_features": 64, "out_features": 128, "calls": 1, "kept": 1, "names": ["module.lm_head"]}

pytestmark = pytest.mark.usefixtures("asked_here")


@pytest.fixture(scope="module")
def asked(asked_here: None, tmp_path_factory: pytest.TempPathFactory) -> Question:
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return candidates.of_model(Options(device="cuda", model=str(folder), tokens=64, batch=1), (9, 0))


class Causal(Machine):
    """A machine of one causal model: eager mode takes 200 ms, te-bench's captured steps what is said."""

    def __init__(self, question: Question, *, head: str | None = "lm_head", **options: Any):
        self.ms = {"bf16": 140.0, "fp8": 108.0, "head": 118.0, "other": 115.0} | options.pop("ms", {})
        found = survey_work(question, head=None, converted_head=head)
        super().__init__(question, survey={**found, "linears": [*found["linears"], HEAD]}, **options)

    def step(self, trial: Trial) -> float:
        p: Mapping[str, Any] = trial.problem
        captured = "parts" in p and trial.mode == "cudagraph"
        of = (
            "bf16" if trial.recipe is None else "other" if trial.recipe != DELAYED else "head" if "head" in p else "fp8"
        )
        return 1e-3 * (self.ms[of] if captured else 200.0)


def steps_of(machine: Machine) -> list[Trial]:
    return [trial for trial in machine.asked if trial.workload == "train_step"]


def test_it_is_measured_directly_after_the_first_captured_fp8_step_and_it_alone(asked: Question) -> None:
    machine = Causal(asked)
    evidence = gathered(machine)
    trials = steps_of(machine)
    first = next(place for place, trial in enumerate(trials) if trial.precision == "fp8" and "parts" in trial.problem)
    assert trials[first + 1].id == asked.trial(BF16_HEAD).id
    assert {c for c in evidence.steps if c.parts and c.head} == {BF16_HEAD}
    assert BF16_HEAD.words() == WORDS
    plan.check(trials[first + 1])
    assert (trials[first + 1].problem["parts"], trials[first + 1].problem["head"]) == ("all", CHUNKED)


def test_a_budget_for_one_step_holds_the_faster_one(asked: Question) -> None:
    question = asked.with_head("lm_head")
    assert question.hopeful(question.frame(FP8)) == FP8


@pytest.mark.parametrize("head", [None, ""])
def test_a_model_without_such_a_head_has_no_such_choice(asked: Question, head: str | None) -> None:
    evidence = gathered(Causal(asked, head=head))
    assert not any(choice.head for choice in evidence.question.choices)
    assert not any(choice.head for choice in evidence.steps)
    assert not any("bf16 head" in words for words in evidence.left_out)


def test_a_survey_from_before_there_was_the_choice_leaves_nothing_out(asked: Question) -> None:
    machine = Causal(asked)
    del machine.survey["converted_head"]
    evidence = gathered(machine)
    assert not any(choice.head for choice in evidence.question.choices)


def test_what_the_budget_does_not_hold_is_named(asked: Question) -> None:
    machine = Causal(asked)
    gathered(machine)
    known = {record.trial.id for record in machine.records if record.trial.problem.get("head") != CHUNKED}
    known |= {record.trial.id for record in machine.records if record.trial.workload != "train_step"}
    again = gathered(Causal(asked), budget_s=0.0, known=known)
    assert f"{STEPS}{WORDS}" in again.left_out
    assert BF16_HEAD not in again.steps


def test_its_parts_are_those_of_fp8_with_a_chunked_head(asked: Question) -> None:
    made = Made.of(Causal(asked).survey)
    ours, theirs = (parts_of(asked, made, choice) for choice in (BF16_HEAD, FP8))
    assert [p.rival for p in ours - theirs] == ["chunked"]
    assert [p.rival for p in theirs - ours] == ["fp8"]


def test_its_prediction_holds_as_much_memory_as_the_step_in_bf16(asked: Question) -> None:
    evidence = gathered(Causal(asked))
    assert evidence.predictions[BF16_HEAD].memory == evidence.predictions[FP8].memory == 10 * 2**30


def told(machine: Machine, folder: Path, **options: Any) -> tuple[Evidence, answer.Decision, list[str]]:
    evidence = gathered(machine, **options)
    found = decided(machine, evidence, folder)
    return evidence, found, answer.sentences(evidence, found, [])


def test_beside_a_faster_step_it_is_told_in_one_sentence_and_not_once_more(asked: Question, tmp_path: Path) -> None:
    evidence, found, said = told(Causal(asked), tmp_path)
    assert found.use == FP8
    (shown,) = [sentence for sentence in said if "Shown to train like bf16" in sentence]
    assert shown == (
        "Shown to train like bf16 on GPT-2: the same with the head in bf16, 118.0 ms a step, 1.69× as fast as what you "
        "have, by one run."
    )
    (convergence_,) = [sentence for sentence in said if sentence.startswith("Convergence: ")]
    assert "INCONCLUSIVE within 0.005 (docs/convergence.md). A pilot " in convergence_
    assert "EQUIVALENT" not in convergence_
    lines = answer.terminal(evidence, found, [], "advice.md").splitlines()
    assert len(lines) <= answer.LINES
    assert "the same with the head in bf16, 118.0 ms a step" in " ".join(" ".join(lines).split())
    assert WORDS in page.markdown(evidence, found, [], "").decode()


def test_where_it_ran_as_often_it_has_an_interval(asked: Question, tmp_path: Path) -> None:
    _, found, said = told(Causal(asked, ms={"head": 109.5}), tmp_path)
    assert found.use == FP8
    (shown,) = [sentence for sentence in said if "Shown to train like bf16" in sentence]
    assert ", 1.83× [1.8" in shown
    assert shown.endswith("] as fast as what you have.")


def test_where_it_is_as_fast_it_is_advised(asked: Question, tmp_path: Path) -> None:
    def in_turn(trial: Trial) -> float:
        return 1 + 0.004 * ((trial.seed + ("head" in trial.problem)) % 2)

    _, found, said = told(Causal(asked, ms={"head": 108.0}, times_of_step=in_turn), tmp_path)
    assert found.use == BF16_HEAD
    assert FP8 in found.tied
    assert said[0] == f"Use {WORDS}."
    assert "Not distinguished from it: the same with the head in FP8" in " ".join(said)
    assert "Shown to train like bf16" not in " ".join(said)
    assert "EQUIVALENT within 0.005" in " ".join(said)
    assert "A pilot tells in " in " ".join(said)
    assert " --recipes delayed_scaling_e4m3 --fused --head bf16 --as-pilot" in " ".join(said)


def test_a_verdict_that_shows_it_comes_before_one_that_does_not(asked: Question) -> None:
    current = dataclasses.replace(FP8, recipe=CURRENT)
    ranked = sorted((current, FP8, BF16_HEAD), key=lambda choice: preference(choice, asked.have, 1.0))
    assert ranked == [BF16_HEAD, FP8, current]
    assert [convergence.is_shown(choice) for choice in ranked] == [True, False, False]
    assert preference(asked.have, asked.have, 9.0) < preference(BF16_HEAD, asked.have, 1.0)  # fewer changes first


@pytest.mark.parametrize("missing", ["/fp8/", "head-chunked"])
def test_where_it_has_no_time_the_other_study_is_quoted(asked: Question, missing: str, tmp_path: Path) -> None:
    _, found, said = told(Causal(asked, fails={missing: "oom"}), tmp_path)
    assert not any("Shown to train" in sentence for sentence in said)
    assert ("EQUIVALENT (docs/convergence.md)" in " ".join(said)) == (found.use == FP8)


@pytest.mark.parametrize("choice", [FP8, BF16_HEAD], ids=["fp8", "bf16"])
def test_the_command_judges_the_very_step_that_is_advised_and_no_other(asked: Question, choice: Choice) -> None:
    """The same parts, head, optimizer, mode and formats, in the trial and in the model that it and the printed code make."""
    begin, *words = convergence.command(asked, choice).removeprefix("te-bench run ").split()
    done = CliRunner().invoke(app, ["plan", begin, *words, "--device", "cuda", "--data", "random", "--json"])
    assert done.exit_code == 0, done.output
    known = {field.name for field in dataclasses.fields(Trial)}
    trials = [
        Trial.from_json({name: value for name, value in one.items() if name in known})
        for one in json.loads(done.stdout)["trials"]
    ]
    assert Counter(t.problem["arm"] for t in trials) == dict.fromkeys(("control", "aa", "recipe", "broken"), 3)
    judged, advised = next(t for t in trials if t.problem["arm"] == "recipe"), asked.trial(choice)
    for name in ("device", "attention", "precision", "recipe", "mode"):
        assert getattr(judged, name) == getattr(advised, name)
    for name in ("parts", "head", "optimizer", "config"):
        assert judged.problem.get(name) == advised.problem.get(name)
    trained = trial_model.model_of(dataclasses.replace(judged, device="cpu"))
    printed = made_by(code.code(asked.with_head("lm_head"), choice))
    assert (trained.recipe, trained.conversion) == (printed.recipe, printed.conversion)
    assert ("module.lm_head" in trained.converted) == choice.fp8_head


def made_by(lines: list[str]) -> Any:
    """The model of the lines of code on a CPU; their step and its loss are a GPU's."""
    names: dict[str, Any] = {}
    exec("\n".join(line.replace('.to("cuda")', "") for line in lines[:-2]), names)
    return names["model"]


def test_the_code_leaves_the_head_in_bf16(asked: Question) -> None:
    lines = code.code(asked.with_head("lm_head"), BF16_HEAD)
    compile("\n".join(lines), "advice", "exec")
    adopted = 'model = adopt(model, recipe=fp8, parts="all", filter=lambda name, module: name != "lm_head")'
    place = lines.index(adopted)
    assert lines[place - 2 : place] == [
        "fp8 = recipe.DelayedScaling(fp8_format=recipe.Format.E4M3)",
        "# model.module holds your weights",
    ]
    assert len(adopted) <= code.WIDTH
    model = made_by(lines)
    assert (model.recipe, model.parts, model.fp8_heads) == (recipes.load(DELAYED), "all", [])
    assert model.module._te_head_in_fp8 is False
    assert not any(name.endswith("lm_head") for name in model.converted)
