"""pytest-benchmark's JSON: every field of its stats, its commands on our files, our import of its, what CI tools read."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import journals
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_benchmark.stats import Stats

from te_bench.experiments.store import load
from te_bench.reports.analysis.rows import load_results
from te_bench.reports.exchange import pytest_export, pytest_import
from te_bench.reports.exchange.pytest_stats import summary


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=40))
def test_the_statistics_are_pytest_benchmarks(seconds: list[float]) -> None:
    theirs = Stats()
    for value in seconds:
        theirs.update(value)
    ours = summary(seconds)
    expected = theirs.as_dict()
    assert set(expected) <= set(ours)
    for field, value in expected.items():
        if field in ("outliers", "stddev_outliers", "iqr_outliers", "rounds"):
            assert ours[field] == value, field
        else:
            assert ours[field] == pytest.approx(value, rel=1e-12), field
    assert (ours["data"], ours["iterations"]) == (seconds, 1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal with every workload and every outcome."""
    return journals.everything(tmp_path_factory.mktemp("run") / "h200", seeds=2)


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("export") / "deep" / "h200.json"
    pytest_export.write(run, file)
    return file


def value_of(file: Path) -> dict[str, Any]:
    value = json.loads(file.read_text())
    assert isinstance(value, dict)
    return value


def test_the_shape_is_that_of_a_file_that_pytest_benchmark_writes(exported: Path, theirs: Path) -> None:
    ours, own = value_of(exported), value_of(theirs)
    assert list(own) == [key for key in ours if key != "te_bench"]
    for key in ("machine_info", "commit_info"):
        assert set(own[key]) <= set(ours[key])
    for benchmark in ours["benchmarks"]:
        assert set(own["benchmarks"][0]) == set(benchmark)
        assert set(own["benchmarks"][0]["stats"]) == set(benchmark["stats"])
        assert set(own["benchmarks"][0]["options"]) <= set(benchmark["options"])
    assert ours["version"] == own["version"]  # constraints.txt pins it


def test_seconds_names_and_the_gpu_are_in_it(exported: Path) -> None:
    benchmarks = {benchmark["name"]: benchmark for benchmark in value_of(exported)["benchmarks"]}
    fast = benchmarks["train_step/gpt2-b12-t1024-V50304/cudnn/bf16/cudagraph/s0"]
    assert fast["fullname"] == f"nanogpt::{fast['name']}"
    assert fast["stats"]["median"] == pytest.approx(0.0261, rel=0.01)
    assert fast["stats"]["rounds"] == 20
    assert fast["params"] == fast["params"] | {"attention": "cudnn", "mode": "cudagraph", "seed": 0, "batch": 12}
    extra = fast["extra_info"]
    assert (extra["gpu"], extra["driver"], extra["torch"]) == (journals.H200, "580.159", "2.11.0")
    assert extra["peak_allocated_bytes"] == 9.2 * 2**30
    assert fast["options"]["timer"] == "torch.cuda.Event"
    assert fast["group"] == "train_step/gpt2-b12-t1024-V50304"
    ways = [name for name in benchmarks if name.startswith("attention/")]
    assert {name.rsplit("/", 1)[1] for name in ways} == {"forward", "backward"}


def test_only_what_was_timed_and_ended_ok_is_a_benchmark(run: Path, exported: Path) -> None:
    records = load(run).records.values()
    timed = [r for r in records if r.outcome == "ok" and set(r.samples) & set(pytest_export.TIMED)]
    each = sum(len(set(r.samples) & set(pytest_export.TIMED)) for r in timed)
    assert len(value_of(exported)["benchmarks"]) == each
    assert each < len(records)


def test_samples_are_said_once(exported: Path) -> None:
    records = value_of(exported)["te_bench"]["records"]
    assert not any(set(pytest_export.TIMED) & set(record["samples"]) for record in records)
    assert any("peak_allocated_bytes" in record["samples"] for record in records)


def test_github_action_benchmark_and_bencher_find_what_they_read(exported: Path) -> None:
    """The first in extractPytestResult: fullname, stats.ops, .stddev, .mean, .rounds; of two of one name one is lost.

    The other in its python_pytest adapter: machine_info, commit_info, a name of 1 to 1024 characters, decimals.
    """
    value = value_of(exported)
    assert isinstance(value["machine_info"], dict)
    assert isinstance(value["commit_info"], dict)
    for benchmark in value["benchmarks"]:
        stats = benchmark["stats"]
        assert 0 < len(benchmark["fullname"]) <= 1024
        for field in ("ops", "rounds", "median", "iqr", "mean", "stddev"):
            assert math.isfinite(stats[field])
            assert 0 <= stats[field] < 1e19  # nanoseconds in a rust_decimal
        assert stats["ops"] == pytest.approx(1 / stats["mean"])
    assert len({benchmark["fullname"] for benchmark in value["benchmarks"]}) == len(value["benchmarks"])


def test_a_name_that_two_trials_share_is_told_apart_by_their_ids(tmp_path: Path) -> None:
    trials = [journals.trial(note=note) for note in ("a", "b")]  # a setting that names do not show
    run = journals.write(tmp_path, [journals.step_record(trial, 10.0) for trial in trials])
    names = [benchmark["name"] for benchmark in pytest_export.export(load(run))["benchmarks"]]
    assert names == [f"{trial.name}#{trial.id[:8]}" for trial in trials]


# Its own commands.


def run_here(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *map(str, arguments)]
    alone = {key: os.environ[key] for key in os.environ if key != "PYTEST_XDIST_WORKER"}  # which disables benchmarks
    return subprocess.run(command, cwd=cwd, env=alone, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("by", ["group", "param:attention"])
def test_pytest_benchmark_compares_two_of_our_files(exported: Path, tmp_path: Path, by: str) -> None:
    slower = journals.write(tmp_path / "slow", journals.ladder_records(slower=1.25), baseline=journals.baseline_cell())
    pytest_export.write(slower, tmp_path / "slow.json")
    arguments = [exported, tmp_path / "slow.json", "--group-by", by, "--columns", "median,iqr,rounds"]
    arguments += ["--csv", tmp_path / "table", "-k", "cudagraph"]
    done = run_here("pytest_benchmark", "compare", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cudnn/bf16/cudagraph" in done.stdout
    assert "26.1" in done.stdout  # milliseconds
    assert "32.6" in done.stdout  # 25 % more
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 1 + 3  # two seeds, and the slower run


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that pytest-benchmark wrote, of a parametrised benchmark and a plain one."""
    root = tmp_path_factory.mktemp("theirs")
    (root / "test_it.py").write_text(
        "import pytest\n\n\n@pytest.mark.parametrize('n', [10, 20])\ndef test_sum(benchmark, n):\n"
        "    benchmark.extra_info['gpu'] = 'NVIDIA H200'\n"
        "    benchmark.pedantic(sum, args=(range(n),), rounds=7)\n\n\n"
        "def test_len(benchmark):\n    benchmark.pedantic(len, args=('abc',), rounds=3)\n"
    )
    done = run_here("pytest", "-q", "-p", "no:cacheprovider", "--benchmark-json", "out.json", "test_it.py", cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "out.json"


# Round trips.


def test_our_journal_comes_back_as_it_was(run: Path, exported: Path, tmp_path: Path) -> None:
    records = load(run).records
    assert pytest_import.write(exported, tmp_path / "back") == (len(records), 0, 0)
    before, after = load(run), load(tmp_path / "back")
    assert dict(before.records) == dict(after.records)  # samples, checks, kernels and failures too
    assert before.environments == after.environments
    assert before.plans == after.plans
    assert load_results([tmp_path / "back"]).outcomes == load_results([run]).outcomes


def test_importing_again_adds_nothing(exported: Path, tmp_path: Path) -> None:
    first = pytest_import.write(exported, tmp_path)
    journal = (tmp_path / "journal.jsonl").read_bytes()
    assert pytest_import.write(exported, tmp_path) == (0, first[0], 0)
    assert (tmp_path / "journal.jsonl").read_bytes() == journal


def test_parts_of_one_run_come_together_in_one_journal(run: Path, tmp_path: Path) -> None:
    for number, only in enumerate(("*/cudagraph/*", "*/eager/*", "*/cudagraph/*")):
        pytest_export.write(run, tmp_path / "x.json", only=only)
        added, known, _ = pytest_import.write(tmp_path / "x.json", tmp_path / "back")
        assert (added > 0, known > 0) == (number < 2, number == 2)
    back = load(tmp_path / "back")
    assert len(back.plans) == 2
    names = {row.trial.name for row in load_results([tmp_path / "back"]).rows}
    assert names == {record.trial.name for record in back.records.values()}
    assert {name.split("/")[-2] for name in names} == {"cudagraph", "eager"}


def test_a_record_whose_benchmark_was_taken_out_does_not_come_back(exported: Path, tmp_path: Path) -> None:
    value = value_of(exported)
    gone = value["benchmarks"].pop(0)["extra_info"]["te_bench"]["trial"]
    _, _, records = pytest_import.journal(value, "edited.json")
    assert gone not in {record.trial.id for record in records}
    assert len(records) == len(value["te_bench"]["records"]) - 1


def test_the_rounds_that_count_are_those_of_the_benchmarks(exported: Path) -> None:
    value = value_of(exported)
    benchmark = value["benchmarks"][0]
    benchmark["stats"]["data"] = [1.0, 2.0]
    _, _, records = pytest_import.journal(value, "edited.json")
    (changed,) = [r for r in records if r.trial.id == benchmark["extra_info"]["te_bench"]["trial"]]
    assert changed.samples["latency_s"] == [1.0, 2.0]


def test_their_file_becomes_records_and_goes_back_as_it_came(theirs: Path, tmp_path: Path) -> None:
    assert pytest_import.write(theirs, tmp_path / "run") == (3, 0, 0)
    journal, own = load(tmp_path / "run"), value_of(theirs)
    records = list(journal.records.values())
    rounds = {record.trial.problem["variant"]: record.samples["latency_s"] for record in records}
    assert rounds == {b["fullname"]: b["stats"]["data"] for b in own["benchmarks"]}
    ((identifier, body),) = journal.environments.items()
    assert {record.environment for record in records} == {identifier}
    assert body["identity"]["gpu"] == "NVIDIA H200"
    assert body["identity"]["python"] == own["machine_info"]["python_version"]
    assert body["identity"]["cpu"] == own["machine_info"]["cpu"].get("brand_raw", own["machine_info"]["processor"])
    assert load_results([tmp_path / "run"]).outcomes == {"ok": 3}

    again = pytest_export.export(journal)
    for before, after in zip(own["benchmarks"], again["benchmarks"], strict=True):
        kept = ("group", "name", "fullname", "params", "param")
        assert {key: after[key] for key in kept} == {key: before[key] for key in kept}
        for field in ("data", "rounds", "iterations", "outliers"):
            assert after["stats"][field] == before["stats"][field]
        assert after["stats"]["median"] == pytest.approx(before["stats"]["median"])


def test_files_of_two_commits_are_two_environments(theirs: Path) -> None:
    value = value_of(theirs)
    ids = set()
    for commit, dirty in (("a" * 40, False), ("b" * 40, False), ("a" * 40, True)):
        value["commit_info"] |= {"id": commit, "dirty": dirty}
        environment, _, _ = pytest_import.journal(value, "x.json")
        assert environment["details"]["git_commit"] == commit
        ids.add(environment["id"])
    assert len(ids) == 3


def test_a_time_without_a_zone_is_utc(theirs: Path) -> None:
    value = value_of(theirs) | {"datetime": "2026-11-01T10:00:00.5"}
    assert pytest_import.journal(value, "x")[2][0].started_at == "2026-11-01T10:00:00+00:00"
    value["datetime"] = "2026-11-01T10:00:00+02:00"
    assert pytest_import.journal(value, "x")[2][0].started_at == "2026-11-01T08:00:00+00:00"


# What is refused, and how.


def test_a_file_without_rounds_says_how_to_write_one_with_them(theirs: Path, tmp_path: Path) -> None:
    value = value_of(theirs)
    del value["benchmarks"][1]["stats"]["data"]
    (tmp_path / "saved.json").write_text(json.dumps(value))
    with pytest.raises(ValueError, match="--benchmark-save-data"):
        pytest_import.write(tmp_path / "saved.json", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("", "is not JSON"),
        ("[1]", "holds no benchmarks"),
        ('{"benchmarks": [{"name": "x"}]}', "holds no benchmarks"),
        ('{"benchmarks": []}', "nothing to import"),
        ('{"benchmarks": [{"fullname": "x", "stats": {}}, {"fullname": "x", "stats": {}}]}', "x occurs more than"),
        ('{"benchmarks": [{"fullname": "x", "stats": {"data": [1.0]}}]}', "datetime None"),
        ('{"benchmarks": [], "te_bench": {"schema": 99}}', "schema 99"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        pytest_import.write(tmp_path / "x.json", tmp_path / "run")


def two_environments(directory: Path) -> Path:
    first, second = (journals.environment(name, code=name) for name in ("env-old", "env-new"))
    journals.write(directory, [journals.step_record(journals.trial(), 10.0, where="env-old")], body=first)
    return journals.write(directory, [journals.step_record(journals.trial(), 11.0, where="env-new")], body=second)


def test_the_newest_environment_is_exported_and_others_by_id(tmp_path: Path) -> None:
    journal = load(two_environments(tmp_path))
    newest, older = pytest_export.export(journal), pytest_export.export(journal, environment="env-o")
    assert newest["benchmarks"][0]["stats"]["median"] == pytest.approx(0.011)
    assert older["benchmarks"][0]["stats"]["median"] == pytest.approx(0.010)
    assert pytest_export.write(tmp_path, tmp_path / "new.json") == (1, ("env-old",))
    for wanted in ("env", "other"):
        with pytest.raises(ValueError, match="--environment"):
            pytest_export.export(journal, environment=wanted)


def test_only_chooses_by_name_and_says_when_nothing_matches(run: Path) -> None:
    found = pytest_export.export(load(run), only="*/cudagraph/*")
    assert {benchmark["params"]["mode"] for benchmark in found["benchmarks"]} == {"cudagraph"}
    kept = {trial["mode"] for plan in found["te_bench"]["plans"] for trial in plan["trials"]}
    assert kept == {"cudagraph"}
    with pytest.raises(ValueError, match="match 'nothing'"):
        pytest_export.export(load(run), only="nothing")
