"""te-bench export, import and history as a user types them."""

import json
from pathlib import Path

import journals
import pytest
from in_process import Command

from te_bench.experiments.store import load

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return journals.write(tmp_path / "run", journals.ladder_records(), baseline=journals.baseline_cell())


def test_export_and_import_give_the_journal_back(command: Command, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    done = command("export", run, "--pytest-benchmark", file)
    assert (done.code, done.out, done.err) == (0, f"{len(journals.LADDER)} benchmarks: {file}\n", "")
    done = command("import", file, "--out", tmp_path / "back")
    said = f"{len(journals.LADDER)} records added to {tmp_path / 'back'}\n"
    assert (done.code, done.out.startswith(said)) == (0, True), done
    what = f": {len(journals.LADDER)} trials on NVIDIA H200, of commit "
    assert what in done.out.removeprefix(said)
    assert dict(load(tmp_path / "back").records) == dict(load(run).records)
    again = command("import", file, "--out", tmp_path / "back")
    assert again.out.startswith(f"0 records added to {tmp_path / 'back'}, {len(journals.LADDER)} were there already\n")
    assert what in again.out


def test_a_second_measurement_of_a_commit_is_not_called_there_already(command: Command, tmp_path: Path) -> None:
    value = {"benchmarks": [{"fullname": "a", "stats": {"data": [0.1]}}], "datetime": "2026-01-01", "machine_info": {}}
    (tmp_path / "x.json").write_text(json.dumps(value))
    command("import", tmp_path / "x.json", "--out", tmp_path / "r")
    value |= {"datetime": "2026-01-02", "benchmarks": [{"fullname": "a", "stats": {"data": [0.2]}}]}
    (tmp_path / "x.json").write_text(json.dumps(value))
    again = command("import", tmp_path / "x.json", "--out", tmp_path / "r")
    assert again.out.splitlines()[0] == f"0 records added to {tmp_path / 'r'}"
    assert again.err == "1 other measurement of these was not taken: import it into another --out\n"
    assert command("import", tmp_path / "x.json", "--out", tmp_path / "other").err == ""


def test_export_says_what_it_leaves_out(command: Command, run: Path, tmp_path: Path) -> None:
    newer = journals.environment("env-newer", code="newer")
    journals.write(run, [journals.step_record(journals.trial(), 9.0, where="env-newer")], body=newer)
    done = command("export", run, "--pytest-benchmark", "x.json")
    assert done.out == "1 benchmarks: x.json\n"
    assert done.err == "left out: records of env-h200; --environment ID exports them\n"
    command("export", run, "--pytest-benchmark", "x.json", "--environment", "env-h", "--only", "*/cudagraph/*")
    names = [benchmark["name"] for benchmark in json.loads((tmp_path / "x.json").read_text())["benchmarks"]]
    assert names == ["train_step/gpt2-b12-t1024-V50304/cudnn/bf16/cudagraph/s0"]


def test_what_another_tool_timed_is_shown(command: Command, tmp_path: Path) -> None:
    timed = {"data": [0.14, 0.15, 0.16]}
    benchmarks = [{"fullname": f"tests/test_a.py::test_{name}", "name": name, "stats": timed} for name in ("a", "b")]
    (tmp_path / "x.json").write_text(
        json.dumps({"benchmarks": benchmarks, "machine_info": {}, "datetime": "2026-01-01"})
    )
    assert command("import", tmp_path / "x.json", "--out", tmp_path / "r").code == 0
    said = command("show", tmp_path / "r", "fastest").out
    assert "tests/test_a.py::test_a" in said
    assert "150.0 ms" in said or "150 ms" in said
    assert command("report", tmp_path / "r").code == 0
    page = (tmp_path / "r" / "report" / "report.md").read_text()
    assert "| tests/test_a.py::test_b | 150.0 | 3 | 1/1 |" in page
    assert "pytest --benchmark-json FILE && te-bench import FILE --out my-run" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export", "nowhere", "--pytest-benchmark", "x.json"), "holds no journal.jsonl"),
        (("export", "run", "--pytest-benchmark", "run/journal.jsonl/x.json"), "cannot write"),
        (("export", "run", "--pytest-benchmark", "x.json", "--only", "none"), "match 'none'"),
        (("import", "nowhere.json", "--out", "y"), "cannot read nowhere.json"),
        (("history", "nowhere"), "holds no journal.jsonl"),
        (("history", "run", "--only", "none"), "no timed series matches"),
        (("history", "run", "--alpha", "2"), "--alpha 2"),
        (("history", "run", "--out", "run/journal.jsonl"), "cannot write the history"),
    ],
)
def test_what_cannot_be_done_is_exit_2(command: Command, run: Path, arguments: tuple[str, ...], message: str) -> None:
    done = command(*arguments)
    assert done.code == 2
    assert message in done.err


def test_history_prints_a_table_and_writes_a_page_where_asked(command: Command, run: Path, tmp_path: Path) -> None:
    done = command("history", run, "--only", "*/flash/*")
    assert done.code == 0
    assert done.out.startswith("None of 4 series has the 6 points that a search takes.\n")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # nothing is written unasked
    done = command("history", run, "--out", tmp_path / "page")
    assert done.out.endswith(f"history: {tmp_path / 'page' / 'history.html'}\n")
    assert (tmp_path / "page" / "figures" / "history-1.svg").exists()
