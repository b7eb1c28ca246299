"""Advice times torch.compile of each block of a user's model beside that of the whole, and tells its users to prefer it."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from advice_machine import GPU, Machine, decided, gathered, question, survey_work
from journals import record, trial, write
from typer.testing import CliRunner

from te_bench.advice import answer, candidates, code, traps
from te_bench.advice.candidates import Choice, Question
from te_bench.advice.traps import PerBlock
from te_bench.cli import app
from te_bench.experiments.spec import OWN_ATTENTION, Options, Record

MODE = "compile-blocks"
BLOCKS = Choice(attention=OWN_ATTENTION, mode=MODE)
WHOLE = dataclasses.replace(BLOCKS, mode="compile")
LINE = "for block in model.model.layers: block.compile(dynamic=False)"
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64}
CONFIG |= {"num_attention_heads": 2, "vocab_size": 96, "max_position_embeddings": 64, "num_hidden_layers": 2}
BARE = """
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(96, 64), nn.Linear(64, 96)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))
"""

pytestmark = pytest.mark.usefixtures("asked_here")


def of_llama(folder: Path, device: str = "cuda") -> Question:
    pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    options = Options(device=device, model=str(folder / "config.json"), tokens=64, batch=4)
    return candidates.of_model(options, (9, 0) if device == "cuda" else None)


@pytest.fixture
def asked(tmp_path: Path) -> Question:
    return of_llama(tmp_path)


def test_a_users_model_is_timed_so_before_it_is_compiled_whole_and_by_torchao_in_both_ways(asked, tmp_path):
    of_blocks = [choice for choice in asked.choices if choice.mode == MODE]
    assert of_blocks[0] == BLOCKS
    assert {choice.attention for choice in of_blocks} == {OWN_ATTENTION}
    assert not any(choice.parts for choice in of_blocks)
    modes = [frame.mode for frame in asked.frames]
    assert max(i for i, mode in enumerate(modes) if mode == MODE) < modes.index("compile")
    for name in ("torchao_tensorwise", "torchao_rowwise"):
        assert [choice.mode for choice in asked.choices if choice.rival == name] == [MODE, "compile"]
    assert len({choice.words() for choice in asked.choices}) == len(asked.choices)
    assert not any(choice.mode == MODE for choice in (*of_llama(tmp_path, "cpu").choices, *question().choices))


def test_it_has_a_plain_name(asked: Question) -> None:
    assert BLOCKS.words() == "torch.compile bf16, per block"
    theirs = next(choice for choice in asked.choices if choice.rival == "torchao_rowwise" and choice.mode == MODE)
    assert theirs.words() == "torchao FP8, rowwise scaling, torch.compile per block"
    assert BLOCKS.of_others


def test_a_model_without_blocks_is_told_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bare_of_blocks.py").write_text(BARE)
    monkeypatch.syspath_prepend(tmp_path)
    asked = candidates.of_model(Options(device="cuda", model="bare_of_blocks:Model", tokens=64, batch=4), (9, 0))
    assert MODE not in {choice.mode for choice in asked.choices}
    assert asked.left_out["torch.compile per block"] == "the model has no nn.ModuleList of blocks"


def test_such_steps_are_measured_whole_and_te_benchs_fp8_in_them_is_predicted(asked: Question) -> None:
    machine = Machine(asked)
    evidence = gathered(machine)
    assert {BLOCKS, WHOLE} <= evidence.steps.keys()
    in_fp8 = dataclasses.replace(BLOCKS, precision="fp8", recipe="delayed_scaling_e4m3")
    assert asked.frame(in_fp8) == BLOCKS
    assert evidence.predictions[in_fp8].seconds == pytest.approx(machine.step(asked.trial(in_fp8)), rel=2e-3)


def test_torch_compile_has_a_time_if_either_way_has_one(asked: Question) -> None:
    whole_fails = gathered(Machine(asked, fails={"/compile/": "timeout", "reduce-overhead": "timeout"}))
    assert answer.unmeasured_rivals(whole_fails) == []
    cannot = {f"/{MODE}": "unsupported", "/compile/": "timeout", "reduce-overhead": "timeout"}
    assert "torch.compile" in answer.unmeasured_rivals(gathered(Machine(asked, fails=cannot)))


def test_the_fastest_of_it_is_advised_with_lines_of_torch_alone(asked: Question, tmp_path: Path) -> None:
    machine = Machine(asked, times_of_step=lambda trial: 0.1 if trial.mode == MODE and not trial.recipe else 1.0)
    evidence = gathered(machine)
    found = decided(machine, evidence, tmp_path / "run")
    assert answer.sentences(evidence, found, [])[0] == "Use torch.compile bf16, per block."
    lines = code.code(asked, found.use)
    assert lines[-2:] == ['with torch.autocast("cuda", dtype=torch.bfloat16):', "    loss = model(**batch).loss"]
    assert lines[-3] == LINE
    assert lines[-4].startswith("model.config.use_cache = False")
    assert "te_bench" not in "\n".join(lines)


def test_its_code_runs_and_compiles_one_block_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    names: dict[str, Any] = {"batch": {"input_ids": tokens, "labels": tokens}}
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        exec("\n".join(code.code(of_llama(tmp_path, "cpu"), BLOCKS)), names)
    assert names["loss"].item() > 0
    torch._dynamo.reset()


def step(milliseconds: float, mode: str, seed: int = 0, breaks: int = 0) -> Record:
    samples = {"latency_s": [milliseconds / 1e3] * 20}
    kernels = ["fmha_cutlassF_bf16"] if mode == "compile" else ["void pytorch_flash::flash_fwd_kernel<64>"]
    work = {"graph_breaks": breaks}
    return record(trial(mode=mode, seed=seed), samples=samples, kernels=kernels, work=work)


SURVEY = record(trial("survey"), work=survey_work(question(), vocab=50304))
CACHE = "model.config.use_cache = False"
TRY = "Try torch.compile of each block (not timed here), where attention should keep its kernel"


@pytest.mark.parametrize(
    ("blocks", "mend"),
    [
        (None, "Leave torch.compile out"),
        (PerBlock([LINE]), f"{TRY}: {LINE}."),
        (PerBlock([f"{CACHE}  # why", LINE]), f"{TRY}, with {CACHE}: {LINE}."),
        (PerBlock([LINE], [step(15, MODE)]), f"Compile each block (15.0 ms a step): {LINE}."),
        (PerBlock([LINE], [step(22, MODE)]), "Leave torch.compile out: per block it takes 22.0 ms a step."),
        (PerBlock([LINE], [step(35, MODE)]), "Leave torch.compile out"),
    ],
)
def test_the_mend_of_a_slow_compile_is_to_compile_each_block(blocks: PerBlock | None, mend: str) -> None:
    eager = [step(20, "eager", seed) for seed in range(2)]
    found = traps.findings(SURVEY, eager, [step(30, "compile")], blocks=blocks)
    assert {finding.name for finding in found} == {"compile", "compiled_attention"}
    assert all(finding.mend.startswith(mend) for finding in found), [finding.mend for finding in found]
    measured = blocks is not None and bool(blocks.runs)
    assert measured or not any("ms" in finding.mend for finding in found)


def test_untimed_blocks_are_no_mend_of_a_compile_that_keeps_attentions_kernel() -> None:
    eager = [step(20, "eager", seed) for seed in range(2)]
    compiled = [dataclasses.replace(step(30, "compile"), kernels=eager[0].kernels)]
    for runs, mend in (
        ([], "Leave torch.compile out."),
        ([step(15, MODE)], f"Compile each block (15.0 ms a step): {LINE}."),
    ):
        (found,) = traps.findings(SURVEY, eager, compiled, blocks=PerBlock([LINE], runs))
        assert (found.name, found.mend) == ("compile", mend)


@pytest.mark.parametrize("transformers", [True, False])
def test_only_a_transformers_model_is_told_to_try_what_was_not_timed(transformers: bool, asked: Question) -> None:
    """It makes a mask under torch.compile of the whole. Another model's reason is not known."""
    if not transformers:
        asked = dataclasses.replace(asked, problem={k: v for k, v in asked.problem.items() if k != "config"})
    ran = {BLOCKS: (), asked.have: (step(20, "eager"),), WHOLE: (step(30, "compile"),)}
    evidence = dataclasses.replace(gathered(Machine(asked)), steps=ran)
    mends = {finding.mend for finding in traps.of_evidence(evidence) if finding.name == "compiled_attention"}
    assert {mend.startswith(TRY) for mend in mends} == {"each block" in mend for mend in mends} == {transformers}


def test_graph_breaks_between_the_pieces_of_a_block_are_told() -> None:
    (found,) = traps.findings(SURVEY, (), (), blocks=PerBlock([LINE], [step(15, MODE, breaks=2)]))
    assert found.what == "torch.compile per block breaks the graph 2 times."


def test_what_does_not_run_is_no_mend(asked: Question) -> None:
    slow = {"times_of_step": lambda trial: 2.0 if trial.mode == "compile" else 1.0}
    mends = {
        outcome: next(
            finding.mend
            for finding in traps.of_evidence(gathered(Machine(asked, fails={f"/{MODE}": outcome}, **slow)))
            if finding.name == "compile"
        )
        for outcome in ("ok", "unsupported")
    }
    assert mends["ok"].startswith("Compile each block (")
    assert LINE in mends["ok"]
    assert mends["unsupported"] == "Leave torch.compile out."


@pytest.mark.parametrize("knows", [True, False])
def test_an_answer_from_older_records_does_not_say_that_there_was_no_time_for_it(
    knows: bool, asked: Question, tmp_path: Path
) -> None:
    """A survey of these records counts blocks if the te-bench that made them knew the mode."""
    machine = Machine(asked, survey={"blocks": 2} if knows else {}, wall=lambda trial: 100.0)
    gathered(machine, budget_s=450.0)
    assert all(record.trial.mode != MODE for record in machine.records)
    have = asked.trial(asked.have).cell
    body = {
        **GPU,
        "details": {**GPU["details"], "gpus": [{"uuid": "GPU-0", "capability": [9, 0], "memory_bytes": 2**37}]},
    }
    write(tmp_path / "run", machine.records, suite="advise", body=body, baseline=have)
    sizes = ["--model", str(tmp_path / "config.json"), "--tokens", "64", "--batch", "4"]
    done = CliRunner().invoke(app, ["advise", *sizes, "--out", str(tmp_path / "run"), "--recorded"])
    assert done.exit_code in (0, 3), done.output
    left_out = json.loads((tmp_path / "run" / "advice.json").read_text())["left_out"]
    assert "steps by torch.compile bf16" in left_out
    assert ("steps by torch.compile bf16, per block" in left_out) is knows
