"""What a convergence run looks like in the report and on the command line."""

import contextlib
import dataclasses
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from convergence_runs import JUDGEMENT, TRUTH, arm_trial, run_record, study_records, write_study
from journals import record, write

from te_bench import cli
from te_bench.experiments.spec import Record
from te_bench.reports.group_result import load_report
from te_bench.reports.page import gallery, loss_figures, render, tables, verdict_figures
from te_bench.reports.page.drawing import Drawing, draw
from te_bench.reports.page.headlines import headlines
from te_bench.reports.page.table import Table

TRUTHS = {**TRUTH, "float8_block_scaling": 0.02, "float8_current_scaling": 0.0028}
OUTCOMES = {("rowwise_scaling", 2): "diverged"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = study_records(TRUTHS, sd=0.0002, outcomes=OUTCOMES)
    return write_study(tmp_path_factory.mktemp("study") / "run", records, JUDGEMENT)


@pytest.fixture(scope="module")
def drawings(run: Path) -> dict[str, Drawing]:
    [result] = load_report([run]).groups
    return {drawing.name: drawing for drawing in gallery.figures_of(result, "")}


@pytest.mark.parametrize("early", [0.008, -0.5])
def test_no_gap_leaves_its_frame_unseen(tmp_path: Path, early: float) -> None:
    """A gap that was larger early on than at the end is in the frame, or marked at its edge with its size."""
    records = study_records(sd=0.0004)
    for one in records:
        if one.trial.recipe == "rowwise_scaling":
            one.samples["val_loss"][2] += early
    [result] = load_report([write_study(tmp_path / "run", records, JUDGEMENT)]).groups
    [study] = result.studies
    panels = verdict_figures.gap_curves(study).axes
    marked = [text.get_text() for axes in panels for text in axes.texts]
    low, high = panels[0].get_ylim()
    curves = [line for axes in panels for line in axes.lines if len(line.get_xdata()) > 2]
    outside = [y for line in curves for y in line.get_ydata() if not low < y < high]
    assert high < 0.1  # what matters is not flattened
    assert len(marked) == len(outside) == (1 if early < -0.1 else 0)
    assert all(float(text) == pytest.approx(y, abs=1e-3) for text, y in zip(marked, outside, strict=True))


def texts(table: Table) -> dict[str, dict[str, str]]:
    titles = [column.title for column in table.columns]
    return {row[0].text: dict(zip(titles, (value.text for value in row), strict=True)) for row in table.rows}


def test_gaps_reasons_and_stability_of_every_arm(run: Path) -> None:
    [result] = load_report([run]).groups
    [gaps], [reasons], [stability] = (tables.tables_of(result, n) for n in ("verdict", "verdict_reasons", "stability"))
    by_arm = texts(gaps)
    assert {name: row["Verdict"] for name, row in by_arm.items()} == {
        "delayed scaling": "EQUIVALENT",
        "rowwise scaling": "DIVERGED",
        "block scaling": "INFERIOR",
        "current scaling": "INCONCLUSIVE",
        "bf16, A/A": "EQUIVALENT",
        "delayed scaling, broken on purpose: frozen scale": "INFERIOR",
    }
    assert by_arm["delayed scaling"]["Pairs"] == "5"
    assert re.fullmatch(r"\[[+-]0\.00\d\d, [+-]0\.00\d\d\]", by_arm["delayed scaling"]["90 %"])
    assert by_arm["rowwise scaling"]["Gap, nat"] == "—"
    assert texts(reasons)["rowwise scaling"]["Reason"] == "1 of 5 runs, seed 2: the loss is nan at step 200"
    assert texts(stability)["rowwise scaling"]["Diverged"] == "1 of 5"
    assert texts(stability)["bf16"]["Rate below"] == "45.1 %"  # Clopper and Pearson, 0 of 5, one-sided
    for table in (gaps, reasons, stability):
        assert tables.markdown(table).count("\n") == len(table.rows) + 2


def test_a_void_run_says_so_beside_every_verdict(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "run", study_records({**TRUTH, "broken": 0.0}, sd=0.0002))
    [result] = load_report([directory]).groups
    [gaps] = tables.tables_of(result, "verdict")
    assert texts(gaps)["delayed scaling"]["Verdict"] == "EQUIVALENT (void)"
    assert headlines(load_report([directory]))[0].startswith("No verdict: ")


def test_the_page_begins_with_the_verdict_and_shows_its_figures(run: Path, tmp_path: Path) -> None:
    page = render.write_report([run], tmp_path / "report").read_text()
    heading = re.search(r'<p class="lead">(.*?)</p>', page, re.DOTALL)
    assert heading[1].startswith("EQUIVALENT: delayed scaling trains like bf16 (final loss within 0.003 nat); INFERIOR")
    names = {path.stem for path in (tmp_path / "report" / "figures").iterdir()}
    wanted = {"verdict_forest", "verdict_gap", "verdict_time", "verdict_spikes", "verdict_numerics-delayed-scaling"}
    assert wanted <= names
    assert page.index("Does FP8 train like bf16?") < page.index("Loss curves")


def in_fewer_bits(records: list[Record], recipe: str, states: str, keep: str | None = None) -> list[Record]:
    """The runs of a recipe with bf16 weights and such states instead, in bf16 or in FP8 by the recipe `keep`."""
    changed = []
    for one in records:
        if one.trial.problem["arm"] == "recipe" and one.trial.recipe == recipe:
            problem = {**one.trial.problem, "weights": "bf16", "states": states}
            precision = "fp8" if keep else "bf16"
            one = dataclasses.replace(
                one, trial=dataclasses.replace(one.trial, problem=problem, precision=precision, recipe=keep)
            )
        changed.append(one)
    return changed


def test_weights_and_states_are_judged_against_float32_by_name(tmp_path: Path) -> None:
    records = in_fewer_bits(study_records(sd=0.0002, device="cpu"), "delayed_scaling", "bf16")
    of_one = [r for r in records if r.trial.recipe != "rowwise_scaling"]
    text = render.write_report([write_study(tmp_path / "one", of_one)], tmp_path / "report").with_name("report.md")
    page = text.read_text()
    assert "EQUIVALENT: bf16 weights and states train like float32 weights and states (final" in page
    assert "## Do they train like float32?" in page
    assert "Final gaps against float32 weights and states" in page
    assert "| bf16, float32 weights and states |" in page
    assert "like bf16" not in page
    assert "equal loss" not in page  # a CPU's clock times an emulation


def test_names_in_a_headline_are_told_apart(tmp_path: Path) -> None:
    records = in_fewer_bits(study_records(sd=0.0002), "delayed_scaling", "bf16")
    records = in_fewer_bits(records, "rowwise_scaling", "fp8", keep="rowwise_scaling")
    said = headlines(load_report([write_study(tmp_path / "run", records)]))[0]
    both = "bf16 weights and states; rowwise scaling, bf16 weights, FP8 states train like float32 weights and states"
    assert said.startswith(f"EQUIVALENT: {both}")
    # Beside a recipe with float32 weights the question is FP8's.
    mixed = in_fewer_bits(study_records(sd=0.0002), "delayed_scaling", "bf16")
    said = headlines(load_report([write_study(tmp_path / "mixed", mixed)]))[0]
    assert said.startswith("EQUIVALENT: bf16, bf16 weights and states; rowwise scaling train like bf16 (final")


def test_the_gap_by_step_has_a_panel_an_arm_with_a_a_first(drawings: dict[str, Drawing]) -> None:
    drawn = drawings["verdict_gap"].inline
    panels = re.findall(r">([^<>]*) \(mean of \d+", drawn)
    assert panels[0] == "bf16, A/A"
    assert set(panels[1:]) >= {"delayed scaling", "rowwise scaling"}
    assert not any("broken" in panel for panel in panels)
    assert "within the margin 0.003" in drawn


def test_time_to_equal_loss_is_one_number_and_a_figure_with_bf16_beside_each_recipe(run, drawings):
    """Steps take 0.9 of bf16's time, and a gap of almost nothing costs hardly a step."""
    [result] = load_report([run]).groups
    [table] = tables.tables_of(result, "equal_loss")
    rows = texts(table)
    assert "rowwise scaling" not in rows  # diverged: its survivors say nothing of time
    found = result.studies[0].recipes[0].speedup
    assert found.to_equal_loss.value == pytest.approx(1 / (1 - found.less_time))
    assert found.to_equal_loss.low < found.to_equal_loss.value < found.to_equal_loss.high
    number = rows["delayed scaling"]["To equal loss"]
    assert re.fullmatch(r"1\.\d\d× \[\d\.\d\d, \d\.\d\d\]", number)
    assert rows["delayed scaling"]["Step alone"].startswith("1.11×")
    drawn = drawings["verdict_time"].inline
    assert f"delayed scaling: {number}" in drawn
    assert "seeds: smallest to largest" in drawn
    assert all(f">{name}: " in drawn for name in rows)


@pytest.mark.parametrize(
    ("gap", "off"), [(0.2, []), (400.0, ["delayed scaling, broken on purpose: frozen scale (mean of 5)"])]
)
def test_an_arm_above_the_frame_of_the_loss_curves_is_said_to_be(tmp_path: Path, gap: float, off: list[str]) -> None:
    write_study(tmp_path / "run", study_records({**TRUTH, "broken": gap}))
    [result] = load_report([tmp_path / "run"]).groups
    [comparison] = result.trainings
    drawn = draw("loss_step", "loss_step", "", "", loss_figures.losses(comparison, "step")).inline
    assert re.findall(r">([^<>]*), above the frame<", drawn) == off


def test_the_forest_marks_the_margin_and_an_arm_off_its_scale(run: Path, drawings: dict[str, Drawing]) -> None:
    [result] = load_report([run]).groups
    found = result.studies[0]
    drawing = drawings["verdict_forest"]
    comparison = found.broken.judgement.comparison
    assert f"{comparison.gap:+.3f}" in drawing.inline
    assert "within the margin 0.003" in drawing.inline


def test_a_ladder_of_learning_rates_says_where_each_breaks(tmp_path: Path) -> None:
    records = []
    for factor in (1, 2, 4, 8):
        records.append(run_record("control", 0, 0.01 * factor, 0.0, lr_factor=factor))
        broken = {"outcome": "diverged"} if factor == 8 else {}
        records.append(run_record("delayed_scaling", 0, 0.01 * factor, 0.0, **broken, lr_factor=factor))
    records = [dataclasses.replace(r) for r in records]
    [result] = load_report([write(tmp_path / "run", records, suite="stress", title="Stress")]).groups
    [table] = tables.tables_of(result, "stress")
    assert texts(table)["bf16"] == {
        "Precision": "bf16",
        "Breaks": "above 0.008",
        "Interval": "—",
        "1 x": "3.2900",
        "2 x": "3.3000",
        "4 x": "3.3200",
        "8 x": "3.3600",
    }
    assert texts(table)["delayed scaling"]["8 x"] == "1 of 1 diverged"
    assert texts(table)["delayed scaling"]["Breaks"] == "0.004 to 0.008"
    assert tables.tables_of(result, "verdict") == []  # no pairs to judge


# ---- the command line


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def verdict(*arguments: object) -> Done:
    """te-bench verdict in this process: what it prints, and its exit code."""
    out, err = io.StringIO(), io.StringIO()
    asked = mock.patch.object(sys, "argv", ["te-bench", "verdict", *map(str, arguments)])
    printed = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with asked, printed[0], printed[1], pytest.raises(SystemExit) as stopped:
        cli.main()
    return Done(int(stopped.value.code or 0), out.getvalue(), err.getvalue())


def test_exit_code_and_sentence_of_a_run(run: Path) -> None:
    done = verdict(run)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("EQUIVALENT: delayed scaling trains like bf16")
    assert "rowwise scaling: 1 of 5 runs, seed 2" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_a_pilot_without_recipes_tells_its_noise_and_no_verdict(tmp_path: Path) -> None:
    pilot = write_study(tmp_path / "run", study_records({"control": 0.0, "aa": 0.0}, sd=0.0003))
    done = verdict(pilot)
    said = " ".join(done.stdout.split())
    assert done.returncode == 4, done.stderr
    assert said.startswith("No verdict: char, ")
    assert "has no recipe yet. bf16 against itself: EQUIVALENT, ends within 0.003 of the control: gap" in said
    said = " ".join(verdict(pilot, "--margin", "0.0001").stdout.split())
    assert "bf16 against itself: INCONCLUSIVE, too few seeds to tell 0.0001 from nothing" in said
    assert verdict(write_study(tmp_path / "one", study_records({"control": 0.0}))).returncode == 2


def test_an_unfinished_run_says_how_to_go_on(tmp_path: Path) -> None:
    records = study_records(sd=0.0002)
    lost = {("aa", 4): "interrupted", ("broken", 4): "interrupted"}
    begun = [r for r in study_records(sd=0.0002, outcomes=lost) if r.trial.seed != 3]
    planned = [r.trial for r in records]
    directory = write(tmp_path / "my run", begun, planned=planned, suite="convergence", judgement=JUDGEMENT)
    done = verdict(directory)
    assert done.returncode == 4
    first = done.stdout.splitlines()[0]
    assert first.startswith(
        "Unfinished: 7 of 25 trials to go. Go on: te-bench run convergence --device cuda --seeds 5 "
    )
    assert Path(re.findall(r"--out '(.*)'$", first)[0]).resolve() == directory
    assert headlines(load_report([directory]))[0].startswith("Unfinished: 7 of 25 trials to go.")


def test_another_margin_is_exploration(run: Path) -> None:
    done = verdict(run, "--margin", "0.03")
    assert "margin 0.03 was chosen after the plan, which says 0.003" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("losses", "more", "code", "word"),
    [
        ([3.281, 3.280, 3.279, 3.282, 3.278, 3.2805], [], 0, "EQUIVALENT"),
        ([3.330, 3.331, 3.329, 3.332, 3.328, 3.3305], [], 1, "INFERIOR"),
        ([3.290, 3.270, 3.285, 3.262, 3.301, 3.2805], [], 3, "INCONCLUSIVE"),
        ([3.2801, 3.2809, 3.2792, 3.2821, 3.2779, 3.2806], ["--paired"], 0, "EQUIVALENT"),
    ],
)
def test_a_user_s_own_losses(tmp_path: Path, losses: list[float], more: list[str], code: int, word: str) -> None:
    a, b = tmp_path / "a.csv", tmp_path / "b.csv"
    a.write_text("val_loss\n" + "\n".join(map(str, [3.280, 3.281, 3.279, 3.282, 3.278, 3.2805])))
    b.write_text("val_loss\n" + "\n".join(map(str, losses)))
    done = verdict("--baseline", a, "--candidate", b, "--margin", "0.003", *more)
    assert done.returncode == code, done.stderr
    assert done.stdout.startswith(f"{word}: ")


def curves(path: Path, loss: Callable[[int, int], float], every: int = 200) -> Path:
    rows = [f"{step},{loss(step, seed)},{seed}" for seed in range(4) for step in range(0, 1001, every)]
    path.write_text("step,loss,seed\n" + "\n".join(rows))
    return path


def test_curves_whose_gap_still_opens_carry_no_verdict(tmp_path: Path) -> None:
    def falling(step: int, seed: int) -> float:
        return 4 - step / 1000 + seed / 10

    a = curves(tmp_path / "a.csv", falling)
    still = curves(tmp_path / "b.csv", lambda step, seed: falling(step, seed) + seed * 1e-4)
    opening = curves(
        tmp_path / "c.csv", lambda step, seed: falling(step, seed) + seed * 1e-4 + 0.02 * (step - 1000) / 1000
    )
    done = verdict("--baseline", a, "--candidate", still, "--margin", "0.003", "--paired")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("EQUIVALENT: ")
    assert "Note: " in done.stdout
    assert "the loss still falls, by 0.2 over the last 200 steps" in " ".join(done.stdout.split())
    done = verdict("--baseline", a, "--candidate", opening, "--margin", "0.003", "--paired")
    assert done.returncode == 3
    assert done.stdout.startswith("INCONCLUSIVE: the gap still moves: by +0.004 over the last 200 steps")
    assert "More seeds alone do not help: the gap still moves" in done.stdout


def test_a_candidate_that_broke_is_diverged_with_its_seeds(tmp_path: Path) -> None:
    a, b = tmp_path / "a.csv", tmp_path / "b.csv"
    a.write_text("seed,loss\n1,3.1\n2,3.2\n7,3.3\n")
    b.write_text("seed,loss\n1,3.1\n2,3.2\n7,nan\n")
    for more in ([], ["--paired"]):
        done = verdict("--baseline", a, "--candidate", b, "--margin", "0.003", *more)
        assert done.returncode == 1, done.stderr
        assert done.stdout.startswith("DIVERGED: 1 of 3 runs, seed 7: the final loss is nan")
    done = verdict("--baseline", b, "--candidate", a, "--margin", "0.003")
    assert done.returncode == 2
    assert "the baseline itself broke" in done.stderr


def test_one_run_far_off_is_told_and_sizes_beyond_reason_are_readable(tmp_path: Path) -> None:
    a, b = tmp_path / "a.csv", tmp_path / "b.csv"
    a.write_text("3.280\n3.281\n3.279\n3.282\n")
    b.write_text("3.280\n3.281\n1e30\n3.282\n")
    done = verdict("--baseline", a, "--candidate", b, "--margin", "0.003", "--paired")
    assert done.returncode == 3, done.stderr
    assert "row 3 ends 1e+30 above the median of its runs; write nan if it diverged" in " ".join(done.stdout.split())
    assert "+2.5e+29" in done.stdout
    assert max(map(len, done.stdout.splitlines()[2:16])) < 100
    assert done.stderr == ""


def test_final_losses_alone_say_what_they_cannot_tell(tmp_path: Path) -> None:
    a, b = tmp_path / "a.csv", tmp_path / "b.csv"
    a.write_text("3.280\n3.281\n3.279\n")
    curves(b, lambda step, seed: 3.28 + seed / 1e4)  # one arm's curves are none of the gap
    done = verdict("--baseline", a, "--candidate", b, "--margin", "0.05")
    assert done.returncode == 0, done.stderr
    assert "Note: no curves of both configurations" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the --out directory"),
        (["--baseline", "a.csv"], "give the --out directory"),
        (["--baseline", "a.csv", "--candidate", "b.csv"], "--margin: state the largest gap"),
        (["--baseline", "a.csv", "--candidate", "b.csv", "--margin", "0"], "margin 0.0"),
        (["--baseline", "a.csv", "--candidate", "b.csv", "--margin", "0.003", "--alpha", "0.7"], "alpha 0.7"),
        (["--baseline", "one.csv", "--candidate", "b.csv", "--margin", "0.003"], "one.csv"),
        (
            ["--baseline", "nan.csv", "--candidate", "b.csv", "--margin", "0.003"],
            "nan.csv: the baseline itself broke, row 2",
        ),
        (["--baseline", "a.csv", "--candidate", "./a.csv", "--margin", "0.003"], "hold the same file"),
        (["--baseline", "a.csv", "--candidate", "long.csv", "--margin", "0.003", "--paired"], "cannot be paired"),
        (["--baseline", "none.csv", "--candidate", "b.csv", "--margin", "0.003"], "none.csv"),
        (["run", "--baseline", "a.csv", "--candidate", "b.csv"], "not both"),
        (["empty"], "journal.jsonl"),
    ],
)
def test_bad_input_is_told(tmp_path: Path, arguments: list[str], message: str) -> None:
    for name, losses in {
        "a": "1\n2\n3\n",
        "b": "1\n2\n4\n",
        "one": "1\n",
        "nan": "1\nnan\n2\n",
        "long": "1\n2\n3\n4\n",
    }.items():
        (tmp_path / f"{name}.csv").write_text(losses)
    (tmp_path / "empty").mkdir()
    with contextlib.chdir(tmp_path):
        done = verdict(*arguments)
    assert done.returncode == 2, done.stdout
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("size", "code"), [("1e99", 2), ("1e-90", 3), ("1e-300", 3)])
def test_sizes_that_no_loss_has_give_no_verdict_and_no_traceback(tmp_path: Path, size: str, code: int) -> None:
    a, b = tmp_path / "a.csv", tmp_path / "b.csv"
    a.write_text("".join(f"{n}{size[1:]}\n" for n in (1, 2, 3, 5)))
    b.write_text("".join(f"{n}{size[1:]}\n" for n in (2, 1, 5, 3)))
    done = verdict("--baseline", a, "--candidate", b, "--margin", size if code == 3 else "0.003")
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_what_files_hold_moves_no_cursor(tmp_path: Path) -> None:
    a, b = tmp_path / "a.csv", tmp_path / "b.csv"
    for path in (a, b):
        path.write_text(
            "name,loss\n" + "".join(f"\x1b[31m\x1b]0;x\x07{n % 2},{3 + n / 7 + len(path.name)}\n" for n in range(4))
        )
    b.write_text(b.read_text() + "x,3.9\n")
    a.write_text(a.read_text() + "x,3.8\n")
    for arguments in (("--margin", "0.003"), ("--margin", "0.003", "--paired")):
        done = verdict("--baseline", a, "--candidate", b, *arguments)
        assert "mixes 3 labels" in done.stdout
        assert "\x1b" not in done.stdout + done.stderr
        assert "\x07" not in done.stdout + done.stderr
    wrong = verdict("--baseline", tmp_path / "\x1b[31mno.csv", "--candidate", b, "--margin", "1")
    assert wrong.returncode == 2
    assert "\x1b" not in wrong.stderr


def test_a_baseline_that_overfits_carries_no_verdict(tmp_path: Path) -> None:
    a = curves(tmp_path / "a.csv", lambda step, seed: 3 + abs(step - 500) / 1000 + seed / 10)
    b = curves(tmp_path / "b.csv", lambda step, seed: 3 + abs(step - 500) / 1000 + seed / 10 + seed * 1e-4)
    done = verdict("--baseline", a, "--candidate", b, "--margin", "0.003", "--paired")
    assert done.returncode == 3, done.stderr
    assert "the baseline overfits: its loss ends" in done.stdout


def test_the_assumption_is_printed(run: Path) -> None:
    assert "The error rate holds for gaps that are normal" in " ".join(verdict(run).stdout.split())


def test_a_run_of_another_suite_is_told(tmp_path: Path) -> None:
    write(tmp_path / "run", [record(arm_trial("control", 0), outcome="oom")], suite="nanogpt")
    done = verdict(tmp_path / "run")
    assert done.returncode == 2
    assert "no bf16 control and recipe to compare" in done.stderr
