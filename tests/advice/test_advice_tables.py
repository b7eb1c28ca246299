"""Tables and the headline of published advice, from advice.json of a simulated machine."""

import dataclasses
import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import journals
import pytest
from advice_machine import Machine, decided, gathered, question
from typer.testing import CliRunner

from te_bench.advice import answer, headline, tables, traps
from te_bench.cli import app
from te_bench.reports.page.table import Table


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two machines: one as predicted, one whose FP8 steps take a tenth longer."""
    folder = tmp_path_factory.mktemp("advise")
    for name, factor in (("quick", 1.0), ("slow", 1.1)):
        machine = Machine(question(), times_of_step=lambda trial, by=factor: by if trial.precision == "fp8" else 1.0)
        evidence = gathered(machine)
        found = decided(machine, evidence, tmp_path_factory.mktemp("run"))
        (folder / name).mkdir()
        advice = answer.to_json(evidence, found, traps.of_evidence(evidence))
        (folder / name / "advice.json").write_text(json.dumps(advice))
    return folder


def column(table: Table, title: str) -> list[float | str | None]:
    place = [one.title for one in table.columns].index(title)
    return [row[place].sort for row in table.rows]


def changed(published: Path, folder: Path, **answers: dict[str, Any]) -> Path:
    """A copy in which parts of the answers of models are others."""
    shutil.copytree(published, folder)
    for model, parts in answers.items():
        path = folder / model / "advice.json"
        advice = json.loads(path.read_text())
        advice["answer"] |= parts
        path.write_text(json.dumps(advice))
    return folder


def steps_of_others(advice: dict[str, Any]) -> dict[str, float]:
    """{mode: seconds} of the steps that need nothing of te-bench's."""
    plain = [s for s in advice["steps"] if not (s["mode"] == "cudagraph" or s["fused"] or s["recipe"] or s["head"])]
    return {mode: min(s["seconds"] for s in plain if s["mode"] == mode) for mode in {s["mode"] for s in plain}}


def test_an_answer_is_a_row(published: Path) -> None:
    table = tables.answers(published)
    assert column(table, "Model") == ["quick", "slow"]
    assert table.caption.startswith("Advised for all 2 models: te-bench FP8, ")  # in place of a column
    for place, name in enumerate(("quick", "slow")):
        advice = json.loads((published / name / "advice.json").read_text())
        best = min(steps_of_others(advice).values())
        assert column(table, "Best without te-bench, ms")[place] == best
        over = best / advice["answer"]["seconds"]
        assert column(table, "Over it")[place] == pytest.approx(over, rel=1e-3)  # of paired seeds


def test_answers_that_differ_have_a_column_and_rivals_without_a_time_one_note(published: Path, tmp_path: Path) -> None:
    torchao = ["torchao_tensorwise", "torchao_rowwise"]
    slow = {"undecided": "nothing is distinguished", "unmeasured_rivals": [*torchao, "liger"]}
    table = tables.answers(changed(published, tmp_path / "of", quick={"unmeasured_rivals": torchao}, slow=slow))
    first, second = column(table, "Advised")
    assert str(first).startswith("te-bench FP8, ")
    assert second == "undecided"
    assert "for all" not in table.caption
    assert table.note.endswith(
        " No time of torchao FP8, current scaling and torchao FP8, rowwise scaling: quick, slow. No time of Liger: slow."
    )


def test_a_page_has_answers_in_a_sentence_and_a_picture(published: Path, tmp_path: Path) -> None:
    of = changed(published, tmp_path / "of", slow={"undecided": "nothing is distinguished"})
    page, picture = tmp_path / "README.md", of / "headline.svg"
    page.write_text("<!-- te-bench:table of advice_headline -->\n<!-- /te-bench:table -->\n")
    done = CliRunner().invoke(app, ["embed", str(page)])
    assert done.exit_code == 0, done.output
    advice = json.loads((of / "quick" / "advice.json").read_text())
    said, shown = page.read_text(), "\n".join(ElementTree.fromstring(picture.read_text()).itertext())
    now, step, times = (advice["answer"][name] for name in ("have_seconds", "seconds", "speedup"))
    assert (
        f"**1 of 2 models train {times['value']:.2f} times as fast as in PyTorch eager bf16, all by te-bench FP8,"
        in said
    )
    bf16 = min(s["seconds"] for s in advice["steps"] if s["mode"] == "cudagraph" and not s["recipe"])
    shown_times = " → ".join(f"{seconds * 1e3:.3g}" for seconds in (now, bf16, step))
    assert f"quick {shown_times}, {times['value']:.2f}×" in said
    without = f"te-bench is {now / bf16:.2f} times as fast; FP8 makes that step {bf16 / step:.2f} times as fast."
    assert f"\n- **Without FP8** {without}\n" in said
    others = steps_of_others(advice)
    compiled = min(seconds for mode, seconds in others.items() if mode != "eager")
    against = f"(torch.compile bf16 for one model): {min(others.values()) / step:.2f} times as fast."
    assert (
        f"\n- **Against the fastest step without te-bench** {against} No rival was timed compiled block by block."
        in said
    )
    for part in ("quick", shown_times, "torch.compile bf16", f"{compiled * 1e3:.3g}"):
        assert f"\n{part}\n" in shown
    assert "slow" not in shown
    assert CliRunner().invoke(app, ["embed", "--check", str(page)]).exit_code == 0
    picture.write_text("another")
    assert CliRunner().invoke(app, ["embed", "--check", str(page)]).exit_code == 1


def test_a_headline_names_the_fastest_steps_of_others_and_the_ways_that_none_was_timed(published, tmp_path) -> None:
    of = changed(published, tmp_path / "of")
    for path in of.glob("*/advice.json"):
        advice = json.loads(path.read_text())
        advice["steps"] = [step for step in advice["steps"] if step["mode"] != "compile-reduce-overhead"]
        for step in advice["steps"]:
            step["seconds"] *= 100 if path.parent.name == "slow" and step["mode"] == "compile" else 1
        path.write_text(json.dumps(advice))
    said = headline.headline(of).sentence
    assert " (torch.compile bf16 for one model and PyTorch eager bf16 for one model): " in said
    assert said.endswith(" times as fast. No rival was timed in CUDA graphs or compiled block by block.")


def test_a_headline_names_what_no_rival_was_timed_for_and_is_of_te_benchs_steps(published, tmp_path):
    alone = changed(published, tmp_path / "alone")
    for path in alone.glob("*/advice.json"):
        advice = json.loads(path.read_text())
        advice["steps"] = [s for s in advice["steps"] if s["mode"] in ("eager", "cudagraph")]
        path.write_text(json.dumps(advice))
    made = headline.headline(alone)
    assert made.sentence.endswith("\n- No rival was timed for 2 models.")
    assert "CUDA graphs." not in made.sentence
    assert b">quick*</text>" in made.picture.svg
    undecided = {"undecided": "nothing is distinguished"}
    with pytest.raises(ValueError, match="no model is advised a step"):
        headline.headline(changed(published, tmp_path / "none", quick=undecided, slow=undecided))


def test_a_headline_counts_the_models_whose_bf16_step_it_is_of(published: Path, tmp_path: Path) -> None:
    assert "**Without FP8** te-bench is" in (both := headline.headline(published).sentence)
    assert "(2 models); FP8" not in both
    of = changed(published, tmp_path / "of")
    advice = json.loads((path := of / "slow" / "advice.json").read_text())
    advice["steps"] = [s for s in advice["steps"] if s["recipe"] or s["mode"] != "cudagraph"]
    path.write_text(json.dumps(advice))
    assert " times as fast (one model); FP8 makes that step " in headline.headline(of).sentence


def test_a_headline_has_the_energy_of_the_models_that_count_it(published: Path, tmp_path: Path) -> None:
    of = changed(published, tmp_path / "of")
    assert "energy" not in headline.headline(of).sentence
    steps = {name: journals.step_record(journals.trial(mode=name), 10.0) for name in ("eager", "cudagraph")}
    counted = {"eager": [200.0, 100.0, 90.0], "cudagraph": [40.0, 44.0, 90.0]}
    records = [dataclasses.replace(r, samples={**r.samples, "energy_j": counted[n]}) for n, r in steps.items()]
    journals.write(of / "quick", records)
    path = of / "quick" / "advice.json"
    advice = json.loads(path.read_text())
    for step in advice["steps"]:
        step["records"] = [steps[step["mode"]].trial.id] if step["mode"] in steps else []
    path.write_text(json.dumps(advice))
    made = headline.headline(of)
    assert "\n- **Energy**: 56 % less a step (one model).\n" in made.sentence
    assert "\N{MINUS SIGN}56 %" in made.picture.svg.decode()


def test_an_error_is_of_a_step_that_was_predicted_before(published: Path) -> None:
    table = tables.errors(published)
    by_model: dict[object, list[float]] = {}
    for model, error in zip(column(table, "Model"), column(table, "Error"), strict=True):
        assert isinstance(error, float)
        by_model.setdefault(model, []).append(error)
    assert max(map(abs, by_model["quick"])) < 0.1
    assert min(by_model["slow"]) == pytest.approx(min(by_model["quick"]) / 1.1 - 0.1 / 1.1, abs=0.05)
    assert f"{len(table.rows)} steps: median error" in table.note


def test_a_folder_without_advice_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no advice"):
        tables.answers(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "advice.json").write_text("{")
    with pytest.raises(ValueError, match="was not written by te-bench advise"):
        tables.errors(tmp_path)
    (tmp_path / "broken" / "advice.json").write_text("{}")
    with pytest.raises(ValueError, match="it has no question and answer"):
        tables.answers(tmp_path)
