"""Advice on a model that te-bench knows nothing of: what may be chosen, what is predicted, and the code."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from advice_machine import Machine, decided, gathered, survey_work

import te_bench.models as te
from te_bench.advice import answer, candidates, code, convergence, page
from te_bench.advice.candidates import Choice, Question
from te_bench.advice.parts import Made, Part, parts_of
from te_bench.experiments import plan
from te_bench.experiments.spec import OWN_ATTENTION, Options, Record, Trial
from te_bench.models import recipe as recipes
from te_bench.models import rivals

FACTORY = """
import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, width, **how):
        super().__init__()
        self.embedding = nn.Embedding(96, width, **how)
        self.qkv, self.head = nn.Linear(width, 3 * width, **how), nn.Linear(width, 96, **how)

    def forward(self, tokens, targets):
        q, k, v = self.qkv(self.embedding(tokens)).unsqueeze(1).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.cross_entropy(self.head(y.squeeze(1)).flatten(0, 1), targets.flatten())


def make(width=64):
    return Model(width)


def make_half():
    return Model(64, dtype=torch.bfloat16)
"""

ALL = {"parts": "all"}
CAPTURED = ALL | {"mode": "cudagraph"}
FP8 = {"precision": "fp8", "recipe": "delayed_scaling_e4m3"}
E4M3 = "recipe.DelayedScaling(fp8_format=recipe.Format.E4M3)"
ADOPTED = 'adopt(model, parts="all")'

pytestmark = pytest.mark.usefixtures("asked_here")


@pytest.fixture(scope="module")
def asked(asked_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Question]:
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.py").write_text(FACTORY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        options = Options(device="cuda", model="mine:make", model_args=("width=128",), tokens=256, batch=4)
        yield candidates.of_model(options, (9, 0))


def test_its_own_attention_comes_first_and_nothing_of_te_benchs_own_models(asked: Question) -> None:
    assert asked.choices[0] == asked.have == Choice(attention=OWN_ATTENTION)
    assert not any(choice.fused or choice.head or choice.padded for choice in asked.choices)
    assert {choice.attention for choice in asked.choices} == {OWN_ATTENTION, "flash", "cudnn"}
    assert {choice.attention for choice in asked.choices if choice.parts} == {OWN_ATTENTION}
    assert {frame.mode for frame in asked.frames} == {"eager", "cudagraph", "compile", "compile-reduce-overhead"}
    assert {choice.parts for choice in asked.choices if choice.mode == "cudagraph"} == {"all"}
    assert asked.frames[1].parts == "all"  # before what takes a minute to compile
    theirs = [choice for choice in asked.choices if choice.rival]
    modes = {"liger": "eager", "torchao_tensorwise": "compile", "torchao_rowwise": "compile"}
    assert [(choice.rival, choice.mode) for choice in theirs] == list(modes.items())
    assert set(theirs) < set(asked.frames)


def test_a_rival_of_a_recipe_that_advice_does_not_measure_comes_last(asked: Question, monkeypatch) -> None:
    """Such a rival may be a file of the user's own."""
    known = {name: rivals.load(name) for name in rivals.names()}
    known["torchao_rowwise"] = dataclasses.replace(known["torchao_rowwise"], recipe="delayed_scaling")
    monkeypatch.setattr(rivals, "load", known.__getitem__)
    again = candidates.of_model(Options(device="cuda", model="mine:make", tokens=256, batch=4), (9, 0))
    theirs = [(choice.rival, choice.recipe) for choice in again.choices if choice.rival]
    assert theirs[-1] == ("torchao_rowwise", "delayed_scaling")
    assert len(theirs) == len([choice for choice in asked.choices if choice.rival])


def test_a_rival_that_cannot_train_it_is_asked_once(asked: Question) -> None:
    """And not again for each mode, each of which starts a process."""
    theirs = Choice(attention=OWN_ATTENTION, precision="fp8", rival="torchao_rowwise", mode="compile")
    theirs = dataclasses.replace(theirs, recipe="rowwise_scaling")
    modes = [theirs, dataclasses.replace(theirs, mode="compile-reduce-overhead")]
    twice = dataclasses.replace(asked, choices=(*asked.choices, modes[1]))
    machine = Machine(twice, fails={"torchao_rowwise": "unsupported: rival torchao_rowwise: no nn.Linear"})
    evidence = gathered(machine)
    assert [evidence.wrong[choice] for choice in modes] == ["unsupported: rival torchao_rowwise: no nn.Linear"] * 2
    assert sum(trial.problem.get("rival") == "torchao_rowwise" for trial in machine.asked) == 1


def test_its_trials_hold_the_source_and_pass_the_plans_check(asked: Question) -> None:
    for choice in asked.choices:
        trial = asked.trial(choice)
        plan.check(trial)
        assert trial.problem["arguments"] == '{"width":128}'
        assert trial.problem["sha256"]
    assert len({asked.trial(choice).id for choice in asked.choices}) == len(asked.choices)
    assert len({choice.words() for choice in asked.choices}) == len(asked.choices)


class Chooses(Machine):
    """Steps with te-bench's parts, which choose Gluon's attention."""

    def _record(self, trial: Trial) -> Record:
        found = super()._record(trial)
        chosen = {"chosen": "gluon"} if trial.problem.get("parts") else {}
        return dataclasses.replace(found, work={**found.work, **chosen})


def test_the_attention_of_an_advised_step_is_timed_alone_or_said_not_to_be(asked: Question, tmp_path: Path) -> None:
    (call,) = survey_work(asked)["attentions"]
    call |= {"batch": 1, "heads": 32, "kv_heads": 8, "length": 8192, "keys": 8192}  # Llama 3.2 1B's
    fast: dict[str, Any] = {"survey": {"attentions": [call]}}
    fast["times_of_step"] = lambda trial: 0.1 if trial.problem.get("parts") else 1.0
    machine = Chooses(asked, **fast)
    evidence = gathered(machine)
    found = decided(machine, evidence, tmp_path)
    assert "Gluon attention" in answer.sentences(evidence, found, [])[0]
    rows = [
        line for line in page.markdown(evidence, found, [], "").decode().splitlines() if "| Gluon attention |" in line
    ]
    assert len(rows) == 1
    assert float(rows[0].split("|")[2]) > 0
    known = {record.trial.id for record in machine.records if record.trial.attention != "gluon"}
    found = dataclasses.replace(found, gpu="NVIDIA H200")
    evidence = gathered(Chooses(asked, **fast), budget_s=0.0, known=known)
    (row,) = [
        line for line in page.markdown(evidence, found, [], "").decode().splitlines() if "| Gluon attention |" in line
    ]
    assert row.split("|")[2].strip() == "—"
    assert "not timed alone; chosen by the nearest measured shape, B4 H16 T8192 D64" in row


def test_linears_that_stay_in_bf16_are_counted_so(asked: Question) -> None:
    linear = {"rows": 1024, "in_features": 128, "out_features": 384, "calls": 3, "kept": 1}
    made = Made.of(survey_work(asked, linears=[linear]))
    found = parts_of(asked, made, Choice(attention=OWN_ATTENTION, **FP8))
    sizes = (("tokens", 1024), ("in_features", 128), ("out_features", 384))
    assert found[Part("linear", sizes, FP8["recipe"], "fp8")] == 2
    assert found[Part("linear", sizes, "bf16")] == 1
    assert {part.rival for part in found if part.workload == "attention"} == {"flash"}  # what the survey saw


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("recipe", [None, FP8["recipe"]])
def test_the_parts_of_te_convert_have_one_head(asked: Question, kept: int, recipe: str | None) -> None:
    """A head that shares the embedding's weight stays in bf16 as a Linear; one of its own is in FP8 as one."""
    head = {"rows": 1024, "in_features": 128, "out_features": asked.vocab, "calls": 1, "kept": kept}
    made = Made.of(survey_work(asked, head=None, linears=[{**head, "names": ["module.lm_head"]}]))
    precision = {"precision": "fp8", "recipe": recipe} if recipe else {}
    found = parts_of(asked, made, Choice(attention=OWN_ATTENTION, parts="all", **precision))  # type: ignore[arg-type]
    heads = [(p.workload, p.rival) for p in found if p.workload != "attention"]
    assert heads == [("linear_cross_entropy", "fp8" if recipe else "chunked")]


def test_an_answer_for_it(asked: Question, tmp_path: Path) -> None:
    machine = Machine(asked)
    evidence = gathered(machine)
    found = decided(machine, evidence, tmp_path)
    assert found.use.attention != OWN_ATTENTION or found.use.parts
    lines = code.code(asked, found.use)
    compile("\n".join(lines), "advice", "exec")
    assert "from mine import make" in lines
    assert 'model = make(width=128).to("cuda")' in lines


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({**FP8, "recipe": "rowwise_scaling", **ALL}, ['te.convert(model, recipe.RowwiseScaling(), parts="all")']),
        ({**ALL, "mode": "compile"}, ['te.convert(model, parts="all")', "torch.compile(model"]),
        ({"attention": "cudnn"}, ["sdpa_kernel(SDPBackend.CUDNN_ATTENTION)"]),
        ({"mode": "compile-reduce-overhead"}, ['mode="reduce-overhead"']),
        (
            FP8 | CAPTURED,
            [
                'model = make(width=128).to("cuda")',
                f'# model.module holds your weights\nmodel = adopt(model, recipe={E4M3}, parts="all")\n',
                "optim = Optim(learning_rate=0.0001, weight_decay=0.01, grad_clip=0.0)",
                'TrainStep(model, optim, precision="fp8", mode="cudagraph", optimizer="triton")',
                "loss = step(inputs, targets)",
            ],
        ),
        (
            {**ALL, "mode": "compile", "checkpointing": True},
            ["# before the optimizer is made\ncheckpoint_blocks(model)  # before the step is made\nmodel = torch.comp"],
        ),
        ({**CAPTURED, "checkpointing": True}, [ADOPTED, "checkpoint_blocks(model)", 'mode="cudagraph"']),
        ({**CAPTURED, "accumulate": 2}, [ADOPTED, ", accumulate=2)"]),
    ],
)
def test_the_code(asked: Question, choice: dict[str, Any], wanted: list[str]) -> None:
    lines = "\n".join(code.code(asked, Choice(**{"attention": OWN_ATTENTION, **choice})))
    compile(lines, "advice", "exec")
    for word in wanted:
        assert word in lines


def test_the_code_of_written_out_attention_asks_transformers_for_it(asked: Question) -> None:
    named = dataclasses.replace(asked, problem={"config": "{}"}, given="here", cls="LlamaForCausalLM", text=True)
    for attention, said in (("manual", True), (OWN_ATTENTION, False)):
        lines = "\n".join(code.code(named, Choice(attention=attention, mode="compile")))
        assert ('AutoConfig.from_pretrained("here", attn_implementation="eager")' in lines) is said


@pytest.mark.parametrize(
    ("cls", "targets"),
    [
        ("LlamaForCausalLM", "the next tokens"),
        ("BertForMaskedLM", "hidden tokens, -100 elsewhere"),
        ("T5ForConditionalGeneration", "labels"),
    ],
)
def test_the_code_of_a_graph_says_what_targets_are(asked: Question, cls: str, targets: str) -> None:
    named = dataclasses.replace(asked, problem={"config": "{}"}, given="here", cls=cls, text=True)
    lines = code.code(named, Choice(attention=OWN_ATTENTION, parts="all", mode="cudagraph"))
    assert lines[-1].endswith(f"; targets: {targets}")


def test_what_te_bench_captures_trains_by_its_own_adamw_and_all_others_by_torchs(asked: Question) -> None:
    optimizers = {
        (choice.parts, choice.mode == "cudagraph"): asked.trial(choice).problem.get("optimizer")
        for choice in asked.choices
    }
    assert optimizers == {(None, False): None, ("all", False): None, ("all", True): "triton"}
    half = candidates.of_model(Options(device="cuda", model="mine:make_half", tokens=256, batch=4), (9, 0))
    captured = Choice(attention=OWN_ATTENTION, parts="all", mode="cudagraph")
    assert captured in half.choices
    assert "optimizer" not in half.trial(captured).problem  # it has no float32 weights
    assert "optimizer" not in "".join(code.code(half, captured))


def test_the_code_of_a_graph_has_the_users_own_functional_loss(asked: Question) -> None:
    problem = {**asked.problem, "loss": "mine.functional:judge"}
    choice = Choice(attention=OWN_ATTENTION, parts="all", mode="cudagraph")
    lines = code.code(dataclasses.replace(asked, problem=problem), choice)
    assert "from mine.functional import judge" in lines
    assert 'model = adopt(model, parts="all", loss=judge)  # model.module holds your weights' in lines


def test_a_rival_that_is_faster_is_advised_with_its_lines(asked: Question, tmp_path: Path) -> None:
    machine = Machine(asked, times_of_step=lambda trial: 0.1 if "torchao_rowwise" in trial.problem.values() else 1.0)
    evidence = gathered(machine)
    found = decided(machine, evidence, tmp_path)
    assert found.use.rival == "torchao_rowwise"
    assert found.exit_code == 0
    assert not any(choice.rival for choice in evidence.predictions)
    said = answer.sentences(evidence, found, [])
    assert said[0] == "Use torchao FP8, rowwise scaling, torch.compile."
    assert "no verdict is published for torchao FP8, rowwise scaling" in " ".join(said)
    lines = code.code(asked, found.use)
    compile("\n".join(lines), "advice", "exec")
    assert 'from_recipe_name("rowwise")' in "\n".join(lines)
    assert "model = torch.compile(model, dynamic=False)" in lines
    assert "te_bench" not in "\n".join(lines)


def test_a_rival_that_is_not_there_is_left_out_with_its_reason(asked: Question) -> None:
    names = ("liger", "torchao_rowwise", "torchao_tensorwise")
    evidence = gathered(Machine(asked, fails=dict.fromkeys(names, "unsupported")))
    assert {choice.rival for choice in evidence.wrong if choice.rival} == set(names)


def test_rivals_without_a_time_are_named_and_those_that_cannot_train_it_are_not(asked, tmp_path):
    machine = Machine(asked, fails={"liger": "unsupported", "torchao_rowwise": "timeout"})
    evidence = gathered(machine)
    assert answer.unmeasured_rivals(evidence) == ["torchao_rowwise"]
    said = answer.sentences(evidence, decided(machine, evidence, tmp_path), [])
    assert sum("Not measured: torchao FP8, rowwise scaling." in sentence for sentence in said) == 1
    hurried = gathered(Machine(asked, fails={"torchao": "unsupported", "compile": "timeout"}))
    assert answer.unmeasured_rivals(hurried) == ["torch.compile"]


def test_beside_an_advised_step_in_fp8_stands_the_fastest_without(asked: Question, tmp_path: Path) -> None:
    def seconds(trial: Trial) -> float:
        return 1.0 if "parts" not in trial.problem else 0.6 if trial.recipe is None else 0.5

    machine = Machine(asked, times_of_step=seconds)
    evidence = gathered(machine)
    found = decided(machine, evidence, tmp_path)
    assert found.use.recipe
    (plain,) = [sentence for sentence in answer.sentences(evidence, found, []) if sentence.startswith("Without FP8: ")]
    assert plain.startswith("Without FP8: te-bench bf16, ")


def test_an_eager_step_of_te_benchs_kernels_is_measured_where_none_can_be_captured(asked: Question) -> None:
    eager = Choice(attention=OWN_ATTENTION, parts="all")
    captured = gathered(Machine(asked))
    assert eager not in captured.steps
    assert captured.wrong[eager] == "not measured: one CUDA graph launches the same kernels"
    assert eager in gathered(Machine(asked, fails={"/cudagraph/": "unsupported"})).steps


def ran(asked: Question, choice: Choice) -> tuple[str, dict[str, Any]]:
    """The code for it, and the names it leaves."""
    tokens, lines = torch.zeros(2, 16, dtype=torch.int64), "\n".join(code.code(asked, choice))
    names: dict[str, Any] = {"inputs": tokens, "targets": tokens, "batch": {"input_ids": tokens, "labels": tokens}}
    exec(lines, names)
    assert names["loss"].item() > 0
    return lines, names


def of_file(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Question:
    """What may be chosen for the factory in a new file."""
    (folder / f"{folder.name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    return candidates.of_model(Options(device="cpu", model=f"{folder.name}:make"), None)


@pytest.mark.parametrize("name", [*candidates.RECIPES, "delayed_scaling"])
def test_the_code_converts_by_the_recipe_that_was_measured(name: str, tmp_path: Path, monkeypatch) -> None:
    cpu, wanted = of_file(FACTORY, tmp_path, monkeypatch), recipes.load(name)
    given: list[Any] = []
    monkeypatch.setattr(te, "convert", lambda model, recipe, **parts: given.append((recipe, parts)))
    choice = {"attention": OWN_ATTENTION, "precision": "fp8", "recipe": name}
    ran(cpu, Choice(**choice))
    ran(cpu, Choice(**choice, **ALL))
    assert given == [(wanted, {}), (wanted, ALL)]
    *lines, _, _ = code.code(cpu, Choice(**choice, **CAPTURED))  # the step and its loss are a GPU's
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    assert (names["model"].recipe, names["model"].parts) == (wanted, "all")


@pytest.mark.parametrize("how", [{}, ALL])
def test_the_code_of_delayed_scaling_with_e4m3_gradients_runs_as_it_is(how, tmp_path, monkeypatch):
    lines, _ = ran(of_file(FACTORY, tmp_path, monkeypatch), Choice(attention=OWN_ATTENTION, **FP8, **how))
    assert f"te.convert(model, {E4M3}" in lines


@pytest.mark.parametrize(
    "choice",
    [{"attention": "flash"}, ALL, {"precision": "fp32"}, {"accumulate": 2}, {"precision": "fp32", "accumulate": 4}],
)
def test_the_code_runs_as_it_is(choice, tmp_path, monkeypatch):
    cpu = of_file(FACTORY, tmp_path, monkeypatch)
    lines, names = ran(cpu, Choice(**{"attention": OWN_ATTENTION, **choice}))
    assert all(p.grad is not None for p in names["model"].parameters()) == ("backward" in lines)
    assert code.code(cpu, cpu.have) == ["# Nothing to change."]


def test_an_undecided_answer_does_not_say_that_nothing_is_to_change(tmp_path, monkeypatch):
    machine = Machine(of_file(FACTORY, tmp_path, monkeypatch))
    evidence = gathered(machine, budget_s=0.0)
    said = answer.terminal(evidence, decided(machine, evidence, tmp_path), [], "index.html")
    assert said.startswith("Undecided")
    assert "Nothing to change" not in said


def test_the_code_of_a_model_that_takes_tokens_alone_computes_the_loss(tmp_path, monkeypatch):
    logits = "self.head(y.squeeze(1))"
    bare = FACTORY.replace("tokens, targets", "tokens")
    bare = bare.replace(f"F.cross_entropy({logits}.flatten(0, 1), targets.flatten())", logits)
    lines, _ = ran(of_file(bare, tmp_path, monkeypatch), Choice(attention="flash"))
    assert "as you call it" not in lines


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], None])
def test_the_code_of_a_config_runs_as_it_is(architectures: list[str] | None, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64, "num_hidden_layers": 1}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | ({"architectures": architectures} if architectures else {})))
    ran(candidates.of_model(Options(device="cpu", model=str(path)), None), Choice(attention="flash"))


def test_the_code_of_a_config_without_a_class_names_the_one_that_was_measured(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    config.save_pretrained(tmp_path)
    question = candidates.of_model(Options(device="cuda", model=str(tmp_path)), (9, 0))
    lines = code.code(question, Choice(attention=OWN_ATTENTION, parts="all", mode="cudagraph"))
    assert lines[0] == "from transformers import AutoConfig, BertForMaskedLM"
    assert lines[-1].endswith("; targets: hidden tokens, -100 elsewhere")


def test_the_command_that_proves_it_names_the_model_and_its_arguments_if_it_learns_text(asked: Question) -> None:
    choice = Choice(attention=OWN_ATTENTION, **FP8)
    assert "--model mine:make --model-args width=128 --recipes delayed_scaling_e4m3 " in convergence.command(
        asked, choice
    )
    judged = dataclasses.replace(choice, recipe="delayed_scaling")
    said = convergence.in_words(dataclasses.replace(asked, text=False), judged, 0.02)
    assert ("EQUIVALENT" in said, "te-bench run" in said) == (True, False)
