"""The answer in words, in JSON and as a page, from a simulated machine."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from advice_machine import Machine, decided, fused, gathered, question

from te_bench.advice import answer, candidates, code, convergence, page, traps
from te_bench.advice.advise import VERIFICATION, Evidence
from te_bench.advice.candidates import Choice
from te_bench.advice.decision import Decision, between, fp8_in_words, linear_gains
from te_bench.advice.steps import typical
from te_bench.experiments import plan
from te_bench.experiments.spec import Trial
from te_bench.models import recipe as recipes
from te_bench.reports.analysis.rows import load_results
from te_bench.reports.convergence.published import PUBLISHED
from te_bench.reports.convergence.study import studies
from te_bench.reports.convergence.verdict import judge_study
from te_bench.reports.page import text

ROOT = Path(__file__).resolve().parents[2]
Answered = tuple[Evidence, Decision]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Answered:
    machine = Machine(question())
    evidence = gathered(machine)
    return evidence, decided(machine, evidence, tmp_path_factory.mktemp("run"))


def test_the_best_of_others_is_named_where_it_is_faster_than_what_one_has(answered: Answered) -> None:
    evidence, found = answered
    others = {choice: typical(records) for choice, records in evidence.steps.items() if choice.of_others}
    best, ratio = found.over_best
    assert others[best] == min(others.values()) < others[found.have]
    assert ratio.value == pytest.approx(others[best] / typical(evidence.steps[found.use]), rel=0.05)
    said = " ".join(answer.terminal(evidence, found, traps.of_evidence(evidence), "index.html").split())
    assert f"the best that was measured without te-bench ({best.words()})" in said


def test_a_step_with_a_part_of_te_benchs_is_not_of_others() -> None:
    ours: list[dict[str, Any]] = [{"recipe": "delayed_scaling", "precision": "fp8"}, {"attention": "gluon"}]
    ours += [{"head": "chunked"}, {"parts": "all", "mode": "cudagraph"}, {"mode": "cudagraph"}]
    assert not any(Choice(**{"attention": "flash", **one}).of_others for one in ours)
    assert Choice(attention="flash", mode="compile").of_others
    assert Choice(attention="own", precision="fp8", recipe="rowwise_scaling", rival="torchao_rowwise").of_others


def test_a_tie_is_told_by_what_is_there() -> None:
    alone = Choice(attention="own", precision="fp8", recipe="delayed_scaling", mode="cudagraph")
    parts = dataclasses.replace(alone, parts="all")
    assert parts.beside(alone) == "the same with te-bench's attention"
    assert alone.beside(parts) == "the same with the model's own attention"
    plain = Choice(attention="own", mode="compile")
    assert plain.beside(dataclasses.replace(plain, attention="cudnn")) == "the same with the model's own attention"


def test_the_terminal_says_it_in_so_many_lines(answered: Answered) -> None:
    evidence, found = answered
    said = answer.terminal(evidence, found, traps.of_evidence(evidence), "advice/index.html")
    lines = said.splitlines()
    assert len(lines) <= answer.LINES
    assert max(map(len, lines)) <= 125
    assert lines[0].startswith("Use te-bench FP8, ")
    assert f"  {convergence.command(evidence.question, found.use)}" in lines  # to be copied
    text = " ".join(said.split())
    words = ["as fast as what you have", "3 runs of each", "Predicted:", "Measured:", "Convergence:", "Trap:", "GPU"]
    assert all(word in text for word in [*words, 'blocks="fused"']), text
    assert lines[-1] == "report: advice/index.html"


def test_json_names_the_records_of_every_number(answered: Answered) -> None:
    evidence, found = answered
    said = json.loads(json.dumps(answer.to_json(evidence, found, traps.of_evidence(evidence))))
    known = {record.trial.id for records in evidence.steps.values() for record in records}
    known |= {time.record.trial.id for time in evidence.times.values()} | {evidence.survey.trial.id}

    def every(value: Any) -> list[str]:
        if isinstance(value, dict):
            return value.get("records", []) + [r for v in value.values() for r in every(v)]
        return [r for v in value for r in every(v)] if isinstance(value, list) else []

    assert set(every(said)) <= known
    assert said["answer"]["speedup"]["pairs"] == 3
    assert all(step["records"] for step in said["steps"])
    assert all(prediction["records"] or not prediction["gains_s"] for prediction in said["predictions"])
    assert len(said["linears"]) == 4


def test_the_page_shows_today_and_the_advised_step(answered: Answered, tmp_path: Path) -> None:
    evidence, found = answered
    findings = traps.of_evidence(evidence)
    html = page.write_page(evidence, found, findings, tmp_path / "advice", "te-bench advise --model gpt2").read_text()
    words = (
        "today: PyTorch eager bf16, flash attention",
        "advised: te-bench FP8",
        "The gain of each Linear",
        "decoder.load",
        "Traps",
    )
    assert [word for word in words if word not in html] == []
    assert "http" not in html.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert 'content="width=device-width' in html
    assert (tmp_path / "advice" / "figures" / "steps.png").exists()


def test_the_page_of_what_stays_says_so_and_each_table_has_one_title(tmp_path: Path) -> None:
    asked = question()
    have = asked.trial(asked.have).cell
    machine = Machine(asked, times_of_step=lambda trial: 1.0 if trial.cell == have else 4.0)
    evidence = gathered(machine)
    index = page.write_page(evidence, decided(machine, evidence, tmp_path), [], tmp_path / "advice", "te-bench advise")
    html = index.read_text()
    assert "<h2>The step today; advised: the same</h2>" in html
    assert "<caption><span>Steps that were measured</span></caption>" in html
    assert "<h2>Steps that were measured</h2>" not in html


def test_the_page_of_a_cpu_says_only_what_is_true_there(tmp_path: Path) -> None:
    """FP8 loses there, memory is resident, and float32's parts were not timed."""
    asked = question("tiny", "cpu")
    machine = Machine(asked, times_of_step=lambda trial: 0.1 if trial.precision == "fp32" else 1.0)
    evidence = gathered(machine)
    found = decided(machine, evidence, tmp_path)
    assert found.use.precision == "fp32"
    evidence = dataclasses.replace(evidence, predictions={})
    said = page.markdown(evidence, found, [], "te-bench advise").decode()
    assert "gains more" not in said
    assert "Predictions were made" not in said
    assert "Predicted, ms" not in said
    assert "| Resident, GiB |" in said
    assert "Peak, GiB" not in said
    assert "| all logits and loss" in said
    assert "reference and loss" not in said
    index = page.write_page(evidence, found, [], tmp_path / "advice", "te-bench advise")
    assert "its parts were not timed alone" in index.read_text()


def test_a_gpus_page_explains_the_columns_that_it_has(answered: Answered) -> None:
    said = page.markdown(*answered, [], "te-bench advise").decode()
    assert "gains more" in said
    assert "Predictions were made before" in said
    assert "| Peak, GiB |" in said


def test_a_linear_that_takes_longer_alone_than_its_step_is_marked(answered: Answered) -> None:
    evidence, _ = answered
    gain = linear_gains(evidence)[0]
    assert not gain.noisy
    assert dataclasses.replace(gain, step_s=0.5 * gain.calls * gain.bf16.seconds).noisy


def test_a_steps_kinds_add_up_to_no_more_than_the_step(answered: Answered) -> None:
    evidence, found = answered
    for choice in (found.have, found.use):
        assert 0 < sum(page.by_kind(evidence, choice).values()) <= 1.001 * evidence.predictions[choice].seconds


def test_the_code_compiles_says_the_choice_and_runs() -> None:
    ours, others = fused(candidates.DELAYED, head="fp8"), Choice(attention="cudnn", mode="compile", padded=True)
    e4m3 = "recipe=recipe.DelayedScaling(fp8_format=recipe.Format.E4M3)"
    for choice, wanted in (
        (ours, ['head="fp8"', 'blocks="fused"', e4m3, 'optimizer="triton"']),
        (others, ['attention="cudnn"', "padded_vocab_size=50304", 'mode="compile"']),
    ):
        lines = "\n".join(code.code(question(), choice))
        compile(lines, "advice", "exec")
        assert all(word in lines for word in wanted), lines
    asked = question("tiny", "cpu")
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    names: dict[str, Any] = {}
    lines = code.code(asked, Choice(attention="flash", head="chunked"))
    assert lines[-1].endswith("  # loss = step(tokens, targets)")
    exec("\n".join(lines), names)
    assert names["step"](tokens, tokens).item() > 0


@pytest.mark.parametrize("name", [*candidates.RECIPES, "delayed_scaling"])
def test_the_code_makes_the_recipe_that_was_measured(name: str) -> None:
    """Also one of no class of its own: it is loaded by the name of its file."""
    asked, tokens = question("tiny", "cpu"), torch.zeros(1, 8, dtype=torch.int64)
    choice = Choice(attention="flash", precision="fp8", recipe=name, head="fp8")
    names: dict[str, Any] = {}
    exec("\n".join(code.code(asked, choice)), names)
    assert names["model"].recipe == recipes.load(name)
    assert names["step"](tokens, tokens).item() > 0
    plan.check(asked.trial(choice))


class Costly(Machine):
    """FP8's casts cost a hundred times as much, in fused blocks too: only wider Linears would pay."""

    def linear(self, m: int, k: int, n: int, precision: str) -> tuple[float, float]:
        products, casts = super().linear(m, k, n, precision)
        return products, 100 * casts

    def step(self, trial: Trial) -> float:
        return super().step(trial) * (2.0 if trial.precision == "fp8" else 1.0)


def test_fp8_that_does_not_pay_says_from_which_width_on_it_would(answered: Answered, tmp_path: Path) -> None:
    evidence, found = answered
    assert found.use.recipe
    assert fp8_in_words(evidence, found.use, evidence.steps) == ""
    machine = Costly(question())
    evidence = gathered(machine)
    use = decided(machine, evidence, tmp_path).use
    said = fp8_in_words(evidence, use, evidence.steps)
    assert any(choice.recipe for choice in evidence.steps)
    assert said.startswith("No FP8 step that was measured is faster: the best takes ")
    assert "times this width on" in said
    on_cpu = dataclasses.replace(evidence, question=question("tiny", "cpu"))
    assert "emulates" in fp8_in_words(on_cpu, use, on_cpu.steps)


def test_of_fp8_that_was_not_measured_the_prediction_is_told_with_its_bound(tmp_path: Path) -> None:
    """Even where FP8's Linears alone are faster nothing is said of a step that no trial had."""
    machine = Machine(question())
    evidence = gathered(machine)
    steps = {choice: records for choice, records in evidence.steps.items() if choice.recipe is None}
    waiting = tuple(evidence.predictions[fused(recipe)] for recipe in (candidates.DELAYED,))
    unmeasured = dataclasses.replace(evidence, steps=steps, waiting=waiting)
    use = min(steps, key=lambda choice: typical(steps[choice]))
    said = fp8_in_words(unmeasured, use, unmeasured.steps)
    wanted = f"No FP8 step was measured: the best is predicted to take {between(waiting[0])} ms, "
    assert said.startswith(wanted)
    assert "its Linears alone take" in said
    assert "--budget" not in said
    tight = dataclasses.replace(unmeasured, left_out=(VERIFICATION,), waiting=(), whole_s=120.0)
    assert "no FP8 step was measured or predicted" in fp8_in_words(tight, use, tight.steps)
    slower = dataclasses.replace(waiting[0], seconds=2 * typical(steps[use]))
    tight = dataclasses.replace(tight, waiting=(slower,))
    assert "; --budget 3min measures it; " in fp8_in_words(tight, use, tight.steps)


def test_convergence_of_bf16_needs_no_proof_and_of_fp8_names_the_command() -> None:
    asked = question()
    assert "nothing changes" in convergence.in_words(asked, dataclasses.replace(fused(), fused=False, head=None), 0.02)
    for others in (fused(), Choice(attention="own", rival="liger"), Choice(attention="gluon")):
        assert "no whole training compared" in convergence.in_words(asked, others, 0.02)
    said = convergence.in_words(asked, fused("delayed_scaling"), 0.02)
    assert "INCONCLUSIVE" in said
    judged = (
        "GPT-2 124M with an FP8 head, 100 M tokens: 0.0060 [0.0043, 0.0083] nat above bf16, INCONCLUSIVE within 0.005"
    )
    passed = "by delayed scaling E4M3 with a bf16 head 0.0025 [-0.0008, 0.0046], EQUIVALENT (docs/convergence.md)"
    assert f"{judged}; {passed}. A pilot " in said
    e4m3 = convergence.in_words(asked, fused("delayed_scaling_e4m3"), 0.02)
    assert "GPT-2 124M, 100 M tokens: 0.0025" in e4m3
    assert "1.14× [1.10, 1.15] as fast, estimated from 5 of 20 pairs, which share a host (results/" in e4m3
    assert "; by " not in e4m3
    command = "te-bench run convergence --preset gpt2-short --model gpt2 --recipes delayed_scaling"
    command += " --fused --head bf16 --as-pilot"
    assert f"A pilot tells in 7 GPU minutes how many seeds your model takes:\n{command}" in said
    assert " --fused --head fp8 --as-pilot" in convergence.command(asked, dataclasses.replace(fused(), head="fp8"))
    assert "--head" not in convergence.command(asked, dataclasses.replace(fused(), fused=False))
    other = convergence.in_words(asked, fused("rowwise_scaling"), 0.02)
    assert "no verdict is published" in other
    assert "GPU hours" in convergence.in_words(asked, fused("rowwise_scaling"), 20.0)


def test_the_published_verdicts_are_those_of_the_records() -> None:
    found = {}
    for records in {published.records for published in PUBLISHED}:
        (group,) = load_results([ROOT / "results" / records]).groups
        for verdict in map(judge_study, studies(group)):
            found |= {(records, one.arm.name): (verdict, one) for one in verdict.findings}
    for said in PUBLISHED:
        verdict, one = found[said.records, said.arm]
        c = one.judgement.comparison
        assert c is not None
        assert c.interval is not None
        gap = "{:.4f} [{:.4f}, {:.4f}]".format(c.gap, *c.interval)
        assert (said.verdict, said.margin, said.gap) == (verdict.label(one), verdict.margin, gap)
        ratio = one.speedup.to_equal_loss if one.speedup else None
        assert said.sooner == (text.speedup(ratio) if ratio else None)
        assert said.on == (one.speedup.within_hosts if one.speedup and ratio else None)


def test_what_was_left_out_is_said(tmp_path: Path) -> None:
    machine = Machine(question(), fails={"/fp8/": "failed_check"})
    evidence = gathered(machine, budget_s=0.0)
    found = decided(machine, evidence, tmp_path)
    said = answer.terminal(evidence, found, [], "index.html")
    assert said.startswith("Undecided: in 0 s only what you have was measured.")
    assert "No time for" in said
    assert said.count("--budget") == 1  # the one with a time


def test_what_a_larger_budget_would_measure_is_named_as_far_as_the_terminal_has_room(answered: Answered) -> None:
    evidence, decision = answered
    names = [f"torch.compile bf16, mode {number}" for number in range(60)]
    evidence = dataclasses.replace(evidence, left_out=(*(f"steps by {name}" for name in names), "a larger batch"))
    last = answer.sentences(evidence, decision, [])[-1]
    assert last == f"A larger --budget would also measure: steps by {'; '.join(names)}; a larger batch."
    lines = answer.terminal(evidence, decision, [], "index.html").splitlines()
    assert len(lines) <= answer.LINES
    said = next(line for line in lines if "mode 0;" in line)
    assert said.startswith("A larger --budget would also measure: steps by torch.compile bf16, mode 0; ")
    assert sum(line.endswith(" ...") for line in lines) == 1


def test_every_sentence_is_one_thought(answered: Answered, tmp_path: Path) -> None:
    machine = Machine(question(), times_of_step=lambda trial: 3.0 if trial.mode == "compile" else 1.0)
    evidence = gathered(machine)
    findings = traps.of_evidence(evidence)
    said = answer.sentences(evidence, decided(machine, evidence, tmp_path), findings)
    assert any("torch.compile makes the step slower" in sentence for sentence in said)
    assert next(f.name for f in findings) == "compile"
    assert all(sentence.partition("\n")[0].endswith((".", "takes:")) for sentence in said)
