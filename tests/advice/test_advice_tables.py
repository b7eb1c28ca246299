"""Tables of published advice, from advice.json of a simulated machine."""

import json
from pathlib import Path

import pytest
from advice_machine import Machine, decided, gathered, question

from te_bench.advice import answer, tables, traps
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


def test_an_answer_is_a_row(published: Path) -> None:
    table = tables.answers(published)
    assert column(table, "Model") == ["quick", "slow"]
    assert all(str(said).startswith("te-bench FP8, ") for said in column(table, "Advised"))
    for name in ("quick", "slow"):
        advice = json.loads((published / name / "advice.json").read_text())
        ours = ("fused", "recipe", "head")
        plain = [s["seconds"] for s in advice["steps"] if s["mode"] != "cudagraph" and not any(s[one] for one in ours)]
        row = next(row for row in table.rows if row[0].text == name)
        over = [one.title for one in table.columns].index("Over the best rival")
        assert row[over].sort == pytest.approx(min(plain) / advice["answer"]["seconds"], rel=1e-3)  # of paired seeds


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
    with pytest.raises(ValueError, match="is no advice of te-bench advise"):
        tables.errors(tmp_path)
    (tmp_path / "broken" / "advice.json").write_text("{}")
    with pytest.raises(ValueError, match="it has no question and answer"):
        tables.answers(tmp_path)
