"""Published answers are what te-bench says of their records today, and of a clean tree."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from te_bench.cli import app
from te_bench.experiments.store import load
from te_bench.reports.exchange.submission import is_clean
from te_bench.reports.page import render

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path.parent for path in (ROOT / "results").glob("*/advise/*/journal.jsonl*"))
#: Of each family the smallest is a fast test.
LARGER = {"bert-large", "gpt2-medium", "llama-3.2-3b", "vit-l"}
ROWS = [pytest.param(path, marks=[pytest.mark.slow] * (path.name in LARGER), id=path.name) for path in FOLDERS]


@pytest.mark.usefixtures("asked_here", "undrawn")
@pytest.mark.parametrize("folder", ROWS)
def test_a_published_answer_is_made_from_its_records(folder, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(render, "write_report", lambda *_: None)  # of which the answer is no part
    journal = load(folder)
    assert all(is_clean(environment) for environment in journal.environments.values())
    _, _, *sizes = journal.plans[-1].asked  # --model, and where its config.json was
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("advice.*"))
    words = ["--model", f"examples/configs/{folder.name}", *sizes, "--out", str(tmp_path / "run"), "--recorded"]
    done = CliRunner().invoke(app, ["advise", *words])
    assert done.exit_code == 0, done.output
    today, published = (answer_of(path) for path in (tmp_path / "run", folder))
    assert today == published
    today, published = ((path / "advice.md").read_text().split("## Records")[0] for path in (tmp_path / "run", folder))
    assert today == published


def answer_of(folder: Path) -> dict[str, Any]:
    """Without how long it took."""
    said: dict[str, Any] = json.loads((folder / "advice.json").read_text())
    return {**said, "took_s": None}
