"""docs/gpus.md says of each GPU what doctor says of it."""

from pathlib import Path

import pytest

from te_bench.experiments import gpu_support
from te_bench.kernels import measured
from te_bench.kernels.architecture import GPUS
from te_bench.models import recipe
from te_bench.reports.page import gpus, tables

PAGE = Path(__file__).resolve().parents[3] / "docs" / "gpus.md"

pytestmark = pytest.mark.usefixtures("as_on_a_gpu")


def test_the_page_is_doctors_own_words() -> None:
    assert tables.markdown(gpus.table()) in PAGE.read_text()


def test_every_gpu_kernel_and_recipe_is_in_the_table() -> None:
    shown = {question for questions in gpus.ROWS.values() for question in questions}
    said = [row for capability in ((9, 0), (10, 0)) for row in gpu_support.rows("", capability)]
    able = {(operator, name) for operator, name, answer in said if not answer.startswith(gpu_support.NO)}
    assert {question for question in able if question[1] in gpu_support.OWN} <= shown <= able
    assert {name for operator, name in shown if operator == "FP8 recipe"} == set(recipe.names())
    titles = [column.title for column in gpus.table().columns[1:]]
    assert sorted(name for title in titles for name in title.split(", ")) == sorted([*GPUS, gpus.CPU])


def test_the_page_is_the_same_where_its_reader_has_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(row for row in measured.timings("attention") if "triton" in row.seconds)
    own = measured.Timing(**{name: getattr(row, name) for name in row.__slots__} | {"machine": GPUS["L4"].machine})
    before = gpus.table()
    monkeypatch.setattr(measured, "timings", lambda operator: (own,) if operator == "attention" else ())
    assert "measured" in {answer for _, _, answer in gpu_support.rows(own.machine, GPUS["L4"].capability)}
    assert gpus.table() == before
