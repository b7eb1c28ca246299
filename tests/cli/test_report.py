"""te-bench report, and what it and run say of a journal that lacks something."""

from pathlib import Path

import journals
import pytest
from in_process import Command

from te_bench.experiments import environment, plan
from te_bench.experiments.spec import Options
from te_bench.experiments.store import JOURNAL

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return journals.write(tmp_path / "run", journals.ladder_records(), baseline=journals.baseline_cell())


def test_a_whole_journal_is_reported_without_a_word_beside(command: Command, run: Path) -> None:
    done = command("report", run)
    assert (done.code, done.out, done.err) == (0, f"{run}/report/index.html\n", "")


def test_a_journal_cut_short_says_so(command: Command, run: Path) -> None:
    """In the middle of a line, and where two whole lines are gone besides."""
    whole = (run / JOURNAL).read_bytes()
    lines = whole.splitlines(keepends=True)
    (run / JOURNAL).write_bytes(whole[: -len(lines[-1]) // 2])
    lost, total = "not run, or lost from the journal's end", len(journals.LADDER)
    torn = f"{run}: the journal ends in the middle of a line, which is not read\n"
    missing = f"{total} planned trials have no record: {lost}: run the same te-bench run command again\n"
    assert command("report", run).err == f"{torn}1 of {missing}"
    (run / JOURNAL).write_bytes(b"".join(lines[:-2]))
    assert command("report", run).err == f"2 of {missing}"


@pytest.mark.parametrize(("seeds", "said"), [(1, "1 seed a trial is"), (3, "3 seeds a trial are"), (5, None)])
def test_a_run_says_where_its_seeds_are_too_few_for_a_gate(command, tmp_path, seeds, said):
    """Those of what was timed and ended ok."""
    here = environment.capture("cpu")
    records = [
        journals.step_record(trial, 30.0, where=here["id"])
        if trial.recipe is None
        else journals.record(trial, here["id"], "unsupported", reason="no FP8 here")
        for trial in plan.resolve("fp8", Options(device="cpu", seeds=seeds)).trials
    ]
    out = journals.write(tmp_path / "out", records, suite="fp8", body=here)
    done = command("run", "fp8", "--device", "cpu", "--seeds", seeds, "--out", out)
    told = f"te-bench gate --baseline {out}, {said} too few: a gate needs 5, better 8. This command with --seeds 8 adds"
    assert (done.code, "".join(told.split()) in "".join(done.out.split())) == (0, said is not None)  # wrapped anywhere
    assert ("too few" in " ".join(done.out.split())) == (said is not None)


def test_a_link_called_report_is_not_written_through(command: Command, run: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (run / "report").symlink_to(target)
    before = (run / JOURNAL).read_bytes()
    for arguments in (("report", run), ("run", "quick", "--device", "cpu", "--out", run)):
        done = command(*arguments)
        assert done.code == 2
        assert f"{run}/report is a link, and te-bench does not write through links: remove it" in done.err
    assert not list(target.iterdir())
    assert (run / JOURNAL).read_bytes() == before
    done = command("report", run, "--out", target)  # as it is called by its user
    assert (done.code, done.out) == (0, f"{target}/index.html\n")


def test_figures_that_are_a_link_are_not_written_through(command: Command, run: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "figures").symlink_to(tmp_path / "target")
    done = command("report", run, "--out", tmp_path / "page")
    assert done.code == 2
    assert "figures is a link" in done.err
    assert not list((tmp_path / "target").iterdir())
