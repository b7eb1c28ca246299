"""History: what is one series, in what order, what its points are, and the page made of it."""

import dataclasses
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import journals
import pytest
from contrast import faint_texts

from te_bench.experiments.spec import Record
from te_bench.experiments.store import Journal, load
from te_bench.reports.exchange import pytest_export, pytest_import
from te_bench.reports.history.series import History, from_journals, load_history
from te_bench.reports.page import history_page
from te_bench.reports.page.history_figures import PANELS, of_history, percent_change


def environment(number: int, gpu: str | None = journals.H200, **details: Any) -> dict[str, Any]:
    body = journals.environment(f"env-{number:02}", gpu, code=f"code{number:02}")
    return body | {"details": body["details"] | {"git_commit": f"{number:02}" + "ab" * 19} | details}


def at(record: Record, day: int) -> Record:
    return dataclasses.replace(record, started_at=f"2026-10-{day:02}T12:00:00+00:00")


def run(path: Path, body: dict[str, Any], day: int, *trials: Any) -> Path:
    steps = [journals.step_record(trial, 10.0, where=body["id"]) for trial in trials or (journals.trial(),)]
    return journals.write(path, [at(step, day) for step in steps], body=body)


def commits(root, slower: Mapping[str, Mapping[int, float]], *, number=24, noise=0.004, seeds=2) -> list[Path]:
    """A run a commit; slower: {attention: {commit: factor from there on}}."""
    draw = random.Random(1)
    runs = []
    for commit in range(1, number + 1):
        body, records = environment(commit), []
        for attention, ms in (("manual", 100.0), ("flash", 50.0), ("cudnn", 33.0)):
            factor = 1.0
            for since, by in slower.get(attention, {}).items():
                factor *= by if commit >= since else 1.0
            for seed in range(seeds):
                took, of = ms * factor * draw.gauss(1, noise), journals.trial(attention=attention, seed=seed)
                step = journals.step_record(of, took, where=body["id"])
                records.append(at(step, commit))
        runs.append(journals.write(root / f"run{commit:02}", records, body=body))
    return runs


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> History:
    root = tmp_path_factory.mktemp("commits")
    return load_history(commits(root, {"flash": {15: 1.05}, "cudnn": {8: 0.9}}))


def test_each_cell_is_a_series_of_a_point_a_commit(found: History) -> None:
    cell = "train_step/gpt2-b12-t1024-V50304/{}/bf16/eager"
    assert [one.only for one in found.series] == [*map(cell.format, ("manual", "flash", "cudnn"))]
    kernels = ("written-out", "flash", "cuDNN")
    assert [one.name for one in found.series] == [f"PyTorch eager bf16, {kernel} attention" for kernel in kernels]
    for one in found.series:
        assert [point.commit for point in one.points] == [f"{n:02}abababab" for n in range(1, 25)]
        assert one.where == journals.H200


def test_a_point_is_the_median_over_processes(tmp_path: Path) -> None:
    trials = [journals.trial(seed=seed) for seed in range(3)]
    records = [journals.step_record(trial, ms) for trial, ms in zip(trials, (10.0, 11.0, 30.0), strict=True)]
    ((point,),) = [one.points for one in load_history([journals.write(tmp_path, records)]).series]
    assert point.seconds == pytest.approx(0.011)


def test_changes_are_found_where_they_were_made(found: History) -> None:
    manual, flash, cudnn = found.series
    assert not manual.changes
    ((slow,), (fast,)) = flash.changes, cudnn.changes
    assert flash.points[slow.index].commit == "15abababab"
    assert slow.low < 1.05 < slow.high
    assert cudnn.points[fast.index].commit == "08abababab"
    assert fast.low < 0.9 < fast.high


def test_the_order_of_the_directories_does_not_matter(tmp_path: Path) -> None:
    runs = commits(tmp_path, {"flash": {5: 1.2}}, number=9)
    assert [one.points for one in load_history(runs[::-1]).series] == [one.points for one in load_history(runs).series]


def test_commits_measured_out_of_order_are_put_in_the_order_of_their_times(tmp_path: Path) -> None:
    runs = [
        run(tmp_path / str(day), environment(commit, git_commit_time=f"2026-0{commit}-01T00:00:00+02:00"), day)
        for day, commit in enumerate((5, 1, 3), start=1)  # measured on three days, the oldest commit second
    ]
    (one,) = load_history(runs).series
    assert [point.commit[:2] for point in one.points] == ["01", "03", "05"]
    assert one.points[0].at == "2025-12-31T22:00:00+00:00"
    assert one.points[0].measured_at == "2026-10-02T12:00:00+00:00"


def test_one_commit_without_a_time_puts_all_in_the_order_of_measurement(tmp_path: Path) -> None:
    bodies = environment(5, git_commit_time="2026-05-01T00:00:00Z"), environment(1)
    (one,) = load_history([run(tmp_path / str(day), body, day) for day, body in enumerate(bodies, start=1)]).series
    assert [point.commit[:2] for point in one.points] == ["05", "01"]


def test_a_family_has_one_order_so_that_its_panels_agree(tmp_path: Path) -> None:
    both = journals.trial(attention="flash"), journals.trial(attention="cudnn")
    runs = [
        run(tmp_path / str(day), environment(9 - day, git_commit_time=f"2026-0{9 - day}-01T00:00:00Z"), day, *both)
        for day in range(1, 9)  # the newest commit first
    ]
    runs.append(
        run(tmp_path / "9", environment(9), 9, both[0])
    )  # without a commit time, and with one of the two series
    flash, cudnn = load_history(runs).series
    assert [point.commit for point in flash.points[:8]] == [point.commit for point in cudnn.points]


def test_machines_with_the_same_gpu_are_told_apart_by_their_cpu(tmp_path: Path) -> None:
    runs = []
    for cpu, day in (("AMD EPYC", 1), ("Intel Xeon", 2)):
        body = environment(day)
        body["identity"]["cpu"] = cpu
        runs.append(run(tmp_path / str(day), body, day))
    assert [one.where for one in load_history(runs[:1]).series] == [journals.H200]
    where = [one.where for one in load_history(runs).series]
    assert [label.split(", ")[:2] for label in where] == [[journals.H200, "AMD EPYC"], [journals.H200, "Intel Xeon"]]


def test_machines_quantities_and_settings_are_series_of_their_own(tmp_path: Path) -> None:
    for name, gpu in (("a", journals.H200), ("b", "NVIDIA H100")):
        body = environment(1, gpu) | {"id": f"env-{name}"}
        records = [journals.step_record(journals.trial(note=note), 10.0, where=body["id"]) for note in ("x", "y")]
        records += [dataclasses.replace(r, environment=body["id"]) for r in journals.attention_records()[:1]]
        journals.write(tmp_path / name, records, body=body)
    found = load_history([tmp_path / "a", tmp_path / "b"])
    names = [one.only for one in found.series]
    assert (
        len(set(names)) == len({one.name for one in found.series}) == 4
    )  # two configurations whose names are alike, forward and backward
    assert sorted({one.where for one in found.series}) == ["NVIDIA H100", journals.H200]
    assert len(found.series) == 8
    assert {name.rsplit("/", 1)[1] for name in names if name.startswith("attention/")} == {"forward", "backward"}


def test_a_copied_run_counts_once_and_a_driver_is_a_point(tmp_path: Path) -> None:
    first = journals.environment("env-a")
    second = journals.environment("env-b", driver="590.1")
    runs = (("a", first, 1), ("copy", first, 1), ("b", second, 2))
    (one,) = load_history([run(tmp_path / name, body, day) for name, body, day in runs]).series
    assert [point.run for point in one.points] == ["a", "b"]


def test_dirty_and_unknown_commits_are_marked(tmp_path: Path) -> None:
    bodies = environment(1, git_dirty=True), environment(2, git_commit=None)
    (one,) = load_history([run(tmp_path / str(day), body, day) for day, body in enumerate(bodies, start=1)]).series
    assert [point.commit for point in one.points] == ["01abababab+", "~code02"]


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    runs = [commits(tmp_path / side, {}, number=1)[0] for side in ("left", "right")]
    assert load_history(runs).runs == ("left/run01", "right/run01")


def test_trials_that_did_not_end_ok_are_no_points_even_where_they_were_timed(tmp_path: Path) -> None:
    wrong = dataclasses.replace(journals.step_record(journals.trial(mode="compile"), 5.0), outcome="failed_check")
    records = [journals.step_record(journals.trial(), 10.0), wrong]
    assert len(load_history([journals.write(tmp_path, records)]).series) == 1


def test_only_chooses_by_name(tmp_path: Path) -> None:
    runs = commits(tmp_path, {}, number=1)
    assert [one.only.split("/")[2] for one in load_history(runs, only="*/flash/*").series] == ["flash"]
    with pytest.raises(ValueError, match=r"--only nothing: no timed series matches; there are train_step/"):
        load_history(runs, only="nothing")


def test_a_run_without_times_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no history to show"):
        load_history([journals.write(tmp_path, [journals.record(journals.trial(), outcome="oom")])])


def test_imported_files_of_pytest_benchmark_have_a_history(tmp_path: Path) -> None:
    value = pytest_export.export(load(journals.write(tmp_path / "run", [journals.step_record(journals.trial(), 10.0)])))
    del value["te_bench"]  # as if pytest-benchmark had written it
    runs = {}
    for commit in range(1, 9):
        value["commit_info"] |= {"id": f"{commit}" * 40, "time": f"2026-0{commit}-01T00:00:00+00:00"}
        value["benchmarks"][0]["stats"]["data"] = [0.01 if commit < 5 else 0.02] * 5
        body, _, records = pytest_import.journal(value, "x.json")
        journal = Journal(environments={body["id"]: body})
        journal.records._found = {record.key: record for record in records}
        runs[f"run{commit}"] = journal
    (one,) = from_journals(runs).series
    assert one.name == "nanogpt::train_step/gpt2-b12-t1024-V50304/flash/bf16/eager/s0"
    assert [point.commit[:1] for point in one.points] == list("12345678")
    (change,) = one.changes
    assert one.points[change.index].commit == "5555555555"
    assert change.ratio == pytest.approx(2)


# Tables, page and figures.


def test_the_table_names_the_commit_the_size_and_its_interval(found: History) -> None:
    table = history_page.changes(found)
    first, second = ([value.text for value in row] for row in table.rows)
    assert first[0] == "PyTorch eager bf16, flash attention"  # the greatest slow-down first
    assert first[2].startswith("15abababab")
    assert first[3].startswith("+")
    assert second[3].startswith("−10.")
    assert second[4].startswith("[−10.")
    assert "3 series" in table.note
    assert "0.03 false changes" in table.note


def test_a_change_that_may_lie_at_several_commits_says_which(tmp_path: Path) -> None:
    found = load_history(commits(tmp_path, {"flash": {13: 1.012}}, noise=0.004, seeds=1))
    (change,) = found.series[1].changes
    assert change.first < change.last
    told = found.series[1].commits(change)
    names = [point.commit for point in found.series[1].points]
    assert told == f"{names[change.index]} ({names[change.first]}..{names[change.last]})"


def test_headline_and_terminal_name_the_greatest_slow_down(found: History, tmp_path: Path) -> None:
    said = history_page.headline(found)
    assert said.startswith("2 changes of level in 3 series; the greatest slow-down: +")
    assert "flash attention at 15abababab" in said
    quiet = load_history(commits(tmp_path / "quiet", {}, number=7))
    assert history_page.headline(quiet) == "No change of level in 3 series."
    faster = load_history(commits(tmp_path / "faster", {"cudnn": {8: 0.8}}, number=16), only="*/cudnn/*")
    assert history_page.headline(faster) == "One change of level in one series, none of them slower."

    lines = history_page.terminal(found).splitlines()
    assert max(map(len, lines[1:])) <= 100
    assert any("flash attention " in line and "15abababab" in line and " +" in line for line in lines[1:])


def test_series_too_short_to_be_searched_are_counted_apart_and_show_what_was_measured(tmp_path: Path) -> None:
    runs = commits(tmp_path / "runs", {"flash": {4: 2.0}}, number=5)
    short = load_history(runs)
    assert history_page.headline(short) == "None of 3 series has the 6 points that a search takes."
    alone = load_history(runs, only="*/flash/*")
    assert history_page.headline(alone) == "The series does not have the 6 points that a search takes."
    table = history_page.series(alone)
    row = dict(zip([column.title for column in table.columns], table.rows[0], strict=True))
    assert row["Noise"].text == "—"
    ends = [alone.series[0].points[place].seconds for place in (0, -1)]
    assert [row[f"{which} level, ms"].sort for which in ("First", "Last")] == ends

    sixth = commits(tmp_path / "more", {"flash": {4: 2.0}}, number=6)[5]
    some = load_history(
        [*runs, journals.write(tmp_path / "flash", list(load(sixth).records.values())[2:4], body=environment(6))]
    )
    said = history_page.headline(some)
    assert said.startswith("One change of level in 1 of 3 series (the others have fewer than 6 points); the greatest")


@pytest.fixture(scope="module")
def page(found: History, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return history_page.write_page(found, tmp_path_factory.mktemp("page"))


def test_the_page_holds_its_figures_and_fetches_nothing(page: Path) -> None:
    html = page.read_text()
    assert "<svg" in html
    assert faint_texts(html) == []
    assert "15abababab" in html
    assert "http" not in html.replace("http://www.w3.org/", "").replace("http-equiv", "")
    assert {path.name for path in (page.parent / "figures").iterdir()} == {"history-1.svg", "history-1.png"}
    assert (page.parent / "figures" / "history-1.png").read_bytes().startswith(b"\x89PNG")
    text = (page.parent / "history.md").read_text()
    assert "](figures/history-1.svg)" in text
    assert "## Changes of level\n\n| Configuration | Machine |" in text
    assert "| PyTorch eager bf16, flash attention |" in text
    assert "-b12-t1024-V50304/flash/bf16/eager |" in text  # for --only
    assert "|\n\nFound by" in text  # a note is no row


def test_the_same_records_give_the_same_bytes(found: History, page: Path, tmp_path: Path) -> None:
    again = history_page.write_page(found, tmp_path)
    for name in ("history.html", "history.md", "figures/history-1.svg", "figures/history-1.png"):
        assert (again.parent / name).read_bytes() == (page.parent / name).read_bytes()


def test_hostile_names_are_text(tmp_path: Path) -> None:
    hostile = journals.step_record(journals.trial(attention=journals.HOSTILE), 10.0)
    out = history_page.write_page(load_history([journals.write(tmp_path / "run", [hostile])]), tmp_path / "out")
    for file in (out, tmp_path / "out" / "history.md"):
        assert "<script>alert" not in file.read_text()


@pytest.mark.usefixtures("undrawn")
def test_a_large_family_is_drawn_in_parts(tmp_path: Path) -> None:
    for configurations, parts in ((PANELS, ["history-1"]), (PANELS + 1, ["history-1", "history-2"])):
        trials = [journals.trial(note=number) for number in range(configurations)]
        drawn = of_history(load_history([run(tmp_path / str(configurations), journals.environment(), 1, *trials)]))
        assert [drawing.name for drawing in drawn] == parts
    assert drawn[1].caption.endswith("part 2 of 2")


def test_the_figure_shows_levels_and_changes(found: History) -> None:
    (drawing,) = of_history(found)
    assert drawing.inline.count("stroke-dasharray") >= 2  # a dashed line a change, and one in the legend
    for one in found.series:
        assert one.name in drawing.inline
    sizes = [percent_change(change.ratio) for one in found.series for change in one.changes]
    assert len(sizes) == 2
    assert all(f">{size}<" in drawing.inline for size in sizes)
