"""What a convergence run looks like in the report."""

import dataclasses
import re
from pathlib import Path
from statistics import fmean

import pytest
from contrast import faint_texts
from convergence_runs import JUDGEMENT, TRUTH, pool_records, run_record, study_records, write_study
from journals import only_group, result_of
from matplotlib.figure import Figure
from svg_alone import svg_alone

from te_bench.experiments.spec import Record
from te_bench.reports.group_result import load_report
from te_bench.reports.page import equal_loss, gallery, loss_figures, render, tables, verdict_figures
from te_bench.reports.page.drawing import Drawing
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
    with svg_alone():
        return {drawing.name: drawing for drawing in gallery.figures_of(only_group(run), "")}


@pytest.mark.parametrize("early", [0.008, -0.5])
def test_no_gap_leaves_its_frame_unseen(tmp_path: Path, early: float) -> None:
    """A gap that was larger early on than at the end is in the frame, or marked at its edge with its size."""
    records = study_records(sd=0.0004)
    for one in records:
        if one.trial.recipe == "rowwise_scaling":
            one.samples["val_loss"][2] += early
    result = only_group(write_study(tmp_path / "run", records, JUDGEMENT))
    [study] = result.studies
    panels = verdict_figures.gap_curves(study).axes
    marked = [text.get_text() for axes in panels for text in axes.texts]
    low, high = panels[0].get_ylim()
    curves = [line for axes in panels for line in axes.lines if len(line.get_xdata()) > 2]
    outside = [y for line in curves for y in line.get_ydata() if not low < y < high]
    assert high < 0.1  # what matters is not flattened
    assert len(marked) == len(outside) == (1 if early < -0.1 else 0)
    assert all(float(text) == pytest.approx(y, abs=1e-3) for text, y in zip(marked, outside, strict=True))


def test_the_words_beside_one_recipe_s_gap_fit_the_figure(tmp_path: Path) -> None:
    records = study_records({"control": 0.0, "delayed_scaling": 0.001})
    figure = verdict_figures.gap_curves(only_group(write_study(tmp_path / "run", records, JUDGEMENT)).studies[0])
    figure.canvas.draw()
    [words] = figure.texts
    assert 0 < words.get_window_extent().y0 < words.get_window_extent().y1 < figure.bbox.height


def test_the_frame_of_small_gaps_holds_the_margin_and_the_band(tmp_path: Path) -> None:
    records = study_records({"control": 0.0, "delayed_scaling": 1e-4}, sd=2e-4)
    [study] = only_group(write_study(tmp_path / "run", records, JUDGEMENT)).studies
    panels = verdict_figures.gap_curves(study).axes
    bands = [finding.band for finding in (study.aa, *study.recipes) if finding is not None and finding.band]
    low, high = panels[0].get_ylim()
    assert low < -study.margin < study.margin < high
    assert all(low < min(band.low) and max(band.high) < high for band in bands)


def test_recipes_are_compared_with_the_first_seed_by_seed(tmp_path: Path) -> None:
    """Their runs of a seed share its noise, so that the difference is known better than either gap."""
    truth = {**TRUTH, "delayed_scaling": 0.006, "rowwise_scaling": 0.0035}
    [table] = tables.tables_of(
        only_group(write_study(tmp_path / "run", study_records(truth, sd=0.0002), JUDGEMENT)), "between"
    )
    assert "beside delayed scaling" in table.caption
    [(name, gap, ends, pairs)] = [[value.text for value in row] for row in table.rows]
    assert (name, pairs) == ("rowwise scaling", "5")
    low, high = map(float, ends.strip("[]").split(", "))
    assert float(gap) == pytest.approx(-0.0025, abs=3e-4)
    assert low < float(gap) < high < -0.001


def texts(table: Table) -> dict[str, dict[str, str]]:
    titles = [column.title for column in table.columns]
    return {row[0].text: dict(zip(titles, (value.text for value in row), strict=True)) for row in table.rows}


def test_gaps_reasons_and_stability_of_every_arm(run: Path) -> None:
    result = only_group(run)
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
    low, high = map(float, by_arm["delayed scaling"]["95 %"].strip("[]").split(", "))
    tested = tuple(map(float, by_arm["delayed scaling"]["90 %"].strip("[]").split(", ")))
    assert low < tested[0] < float(by_arm["delayed scaling"]["Gap, nat"]) < tested[1] < high
    assert float(by_arm["delayed scaling"]["± of 95 %"]) == pytest.approx((high - low) / 2, abs=1.01e-4)
    assert "The test uses the 90 % interval" in gaps.note
    assert by_arm["rowwise scaling"]["Gap, nat"] == "—"
    assert texts(reasons)["rowwise scaling"]["Reason"] == "1 of 5 runs, seed 2: the loss is nan at step 200"
    assert texts(stability)["rowwise scaling"]["Diverged"] == "1 of 5"
    assert texts(stability)["bf16"]["Rate below"] == "45.1 %"  # Clopper and Pearson, 0 of 5, one-sided
    for table in (gaps, reasons, stability):
        assert tables.markdown(table).count("\n") == len(table.rows) + 2


def test_a_plan_s_tighter_margin_has_its_verdicts_below_the_table(tmp_path: Path) -> None:
    """One recipe alone is INFERIOR at it; beside five it is not, by Holm's correction."""
    others = ("float8_block_scaling", "float8_current_scaling", "mxfp8", "nvfp4")
    truth = {**TRUTH, **dict.fromkeys(others, 0.0), "rowwise_scaling": 0.0043}
    records = study_records(truth, range(8), sd=0.0008)
    stated = {**JUDGEMENT, "seeds": 8, "margin": 0.01, "tighter": 0.003}
    [brief] = tables.tables_of(only_group(write_study(tmp_path / "run", records, stated)), "verdict_brief")
    said = brief.note.partition("At 0.003 nat, also fixed beforehand: ")[2]
    assert "delayed scaling EQUIVALENT;" in said
    assert "rowwise scaling INCONCLUSIVE (INFERIOR alone, not after Holm's correction)" in said
    [plain] = tables.tables_of(only_group(write_study(tmp_path / "plain", records, JUDGEMENT)), "verdict_brief")
    assert "beforehand" not in plain.note


def test_losses_beside_the_control_alone_are_not_told_as_beside_bf16(tmp_path: Path) -> None:
    """A verdict's gap is to the mean of the control and A/A, so the two numbers differ."""
    run = write_study(tmp_path / "run", study_records(sd=0.002), {**JUDGEMENT, "bf16_runs": 2})
    [table] = tables.tables_of(only_group(run), "curves")
    by_name = texts(table)
    assert "Less bf16's" not in by_name["delayed scaling"]
    control, ours = (float(by_name[n]["Best validation loss"].split()[0]) for n in ("bf16", "delayed scaling"))
    beside = float(by_name["delayed scaling"]["Less the control's"].replace("−", "-"))
    assert beside == pytest.approx(ours - control, abs=1.01e-4)
    assert "The control is bf16; a verdict's gap may be to the mean of it and of A/A." in table.note


def test_final_losses_stand_by_configuration_and_seed(run: Path) -> None:
    [losses] = tables.tables_of(only_group(run), "losses")
    rows, seeds = texts(losses), [f"Seed {seed}" for seed in range(5)]
    assert [column.title for column in losses.columns] == ["Configuration", *seeds]
    assert list(rows)[:2] == ["bf16", "bf16, A/A"]
    assert all(re.fullmatch(r"3\.2\d{3}", rows["bf16"][seed]) for seed in seeds)
    assert rows["rowwise scaling"]["Seed 2"] == "—"  # it diverged


def test_a_void_run_says_so_beside_every_verdict(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "run", study_records({**TRUTH, "broken": 0.0}, sd=0.0002))
    result = only_group(directory)
    [gaps] = tables.tables_of(result, "verdict")
    assert texts(gaps)["delayed scaling"]["Verdict"] == "EQUIVALENT (void)"
    assert headlines(load_report([directory]))[0].startswith("No verdict: ")


@pytest.mark.usefixtures("undrawn")
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
            said = {"precision": "fp8" if keep else "bf16", "recipe": keep}
            one = dataclasses.replace(one, trial=dataclasses.replace(one.trial, problem=problem, **said))
        changed.append(one)
    return changed


@pytest.mark.usefixtures("undrawn")
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
    assert "| Rate below | p against float32 weights and states |" in page
    assert "equal loss" not in page  # a CPU's clock times an emulation


def test_a_pool_counts_runs_of_what_it_compares_with(tmp_path: Path) -> None:
    truth = {arm: gap for arm, gap in TRUTH.items() if arm != "rowwise_scaling"}
    records = in_fewer_bits(pool_records(truth, 6, 3, sd=0.0002), "delayed_scaling", "bf16")
    [found] = only_group(write_study(tmp_path, records, {**JUDGEMENT, "seeds": 6, "pool": 3})).studies
    [table] = tables.tables_of(only_group(tmp_path), "verdict")
    titles = [column.title for column in table.columns]
    assert titles[titles.index("Runs") + 1] == f"Of {found.study.reference}" == "Of float32 weights and states"


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
    assert [name for name, drawing in drawings.items() if faint_texts(drawing.inline)] == []
    panels = re.findall(r">([^<>]*) \(mean of \d+", drawn)
    assert panels[0] == "bf16, A/A"
    assert set(panels[1:]) >= {"delayed scaling", "rowwise scaling"}
    assert not any("broken" in panel for panel in panels)
    assert "the margin 0.003" in drawn


def test_time_to_equal_loss_is_one_number_and_a_figure_with_bf16_beside_each_recipe(run, drawings):
    """Steps take 0.9 of bf16's time, and a gap of almost nothing costs hardly a step."""
    result = only_group(run)
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


@pytest.mark.parametrize("runs", [1, 2])
def test_the_figure_of_time_to_equal_loss_is_of_the_loss_that_a_recipe_is_held_to(tmp_path: Path, runs: int) -> None:
    written = write_study(tmp_path / "run", study_records(sd=0.002), {**JUDGEMENT, "bf16_runs": runs})
    [found] = only_group(written).studies
    figure = equal_loss.figure(found)
    assert figure is not None
    [level] = {line.get_ydata()[0] for axes in figure.axes for line in axes.lines if list(line.get_xdata()) == [0, 1]}
    finals = [arm.finals.values() for arm in (found.study.control, found.study.aa)[:runs]]
    assert level == pytest.approx(fmean(loss for one in finals for loss in one))


def test_a_recipe_that_ends_before_the_frame_of_bf16_is_drawn(tmp_path: Path) -> None:
    records = [
        one
        if one.trial.recipe != "delayed_scaling" or one.trial.problem["arm"] != "recipe"
        else dataclasses.replace(
            one, samples={**one.samples, **{at: [t / 3 for t in one.samples[at]] for at in ("time_s", "val_time_s")}}
        )
        for one in study_records(sd=0.0002)
    ]
    [found] = only_group(write_study(tmp_path, records)).studies
    figure = equal_loss.figure(found)
    assert figure is not None
    panels = {axes.get_title(loc="left").partition(":")[0]: axes for axes in figure.axes}
    [recipe] = [line for line in panels["delayed scaling"].lines if line.get_linestyle() == "--"]
    left, right = panels["delayed scaling"].get_xlim()
    assert sum(left <= at <= right for at in recipe.get_xdata()) >= 5


def above_the_frame(figure: Figure) -> list[str]:
    """What the legend says of curves that are above the frame, before these words."""
    [legend] = figure.legends
    said = [" ".join(words.get_text().split()) for words in legend.get_texts()]
    return [re.sub(",? above the frame$", "", words) for words in said if re.search(r"\).* above the frame$", words)]


@pytest.mark.parametrize(
    ("gap", "off"), [(0.2, []), (400.0, ["delayed scaling, broken on purpose: frozen scale (mean of 5)"])]
)
def test_an_arm_above_the_frame_of_the_loss_curves_is_said_to_be(tmp_path: Path, gap: float, off: list[str]) -> None:
    write_study(tmp_path / "run", study_records({**TRUTH, "broken": gap}))
    result = only_group(tmp_path / "run")
    [comparison] = result.trainings
    assert above_the_frame(loss_figures.losses(comparison, "step")) == off


def test_a_curve_outside_one_panel_alone_is_said_to_be_outside_of_that(tmp_path: Path) -> None:
    """A fault that never learns: its validation loss is in the frame, its training loss above the others' steep fall."""
    records = study_records()
    for one in records:
        if one.trial.problem["arm"] == "broken":
            one.samples["loss"] = [300.0] * len(one.samples["loss"])
    [comparison] = only_group(write_study(tmp_path / "run", records)).trainings
    [said] = above_the_frame(loss_figures.losses(comparison, "step"))
    assert said.endswith("(mean of 5), training loss")


@pytest.fixture(scope="module")
def by_time(tmp_path_factory: pytest.TempPathFactory) -> Figure:
    """Loss against time of eight recipes, of which one has not run."""
    names = [*TRUTH, "float8_block_scaling", "float8_current_scaling", "mxfp8", "nvfp4", "delayed_scaling_e4m3"]
    truth = dict.fromkeys(names, 0.0) | {"broken": 0.5, "rowwise_scaling": 0.003}
    outcomes = {("float8_block_scaling", seed): "interrupted" for seed in range(5)}
    run = write_study(tmp_path_factory.mktemp("time") / "run", study_records(truth, outcomes=outcomes))
    [comparison] = only_group(run).trainings
    return loss_figures.losses(comparison, "time_s")


def test_loss_against_time_leaves_out_what_only_shows_that_a_study_works(by_time: Figure) -> None:
    [legend] = by_time.legends
    names = [words.get_text() for words in legend.get_texts()]
    assert any(name.startswith("delayed scaling (mean of 5)") for name in names)
    assert not any("A/A" in name or "broken" in name or "not run" in name for name in names)


def panel_heights(figure: Figure) -> list[float]:
    """The panels' heights in inches, as drawn."""
    figure.canvas.draw()
    return [axes.get_window_extent().height / figure.dpi for axes in figure.axes]


def test_a_long_legend_makes_the_figure_taller_and_not_its_panels(tmp_path: Path, by_time: Figure) -> None:
    [comparison] = only_group(write_study(tmp_path / "run", study_records())).trainings
    short = loss_figures.losses(comparison, "time_s")
    assert len(short.legends[0].texts) + 4 <= len(by_time.legends[0].texts)
    assert panel_heights(by_time) == pytest.approx(panel_heights(short), rel=0.15)


def test_curves_of_one_figure_differ_in_colour_or_marker(by_time: Figure) -> None:
    curves = by_time.axes[0].lines
    styles = {(line.get_color(), line.get_marker()) for line in curves}
    assert len(styles) == len(curves) == 7


def test_loss_against_time_shows_the_last_part_with_the_whole_band(by_time: Figure) -> None:
    """The loss falls from 4.4 to 3.28: a scale of the whole fall hides a band of some thousandths."""
    panel = by_time.axes[0]
    low, high = panel.get_ylim()
    ends = [line.get_ydata()[-1] for line in panel.lines]
    assert max(ends) < high < 1.16 * min(ends)
    for band in panel.collections:
        [path] = band.get_paths()
        assert low < path.vertices[:, 1].min()


def test_the_forest_marks_the_margin_and_an_arm_off_its_scale(run: Path, drawings: dict[str, Drawing]) -> None:
    result = only_group(run)
    found = result.studies[0]
    drawing = drawings["verdict_forest"]
    comparison = found.broken.judgement.comparison
    assert f"{comparison.gap:+.3f}" in drawing.inline
    assert "the margin 0.003" in drawing.inline


def test_a_study_without_a_gap_to_judge_has_no_forest(tmp_path: Path) -> None:
    write_study(tmp_path / "run", study_records(seeds=[0]))
    [found] = only_group(tmp_path / "run").studies
    assert verdict_figures.forest(found) is None


def test_a_ladder_of_learning_rates_says_where_each_breaks(tmp_path: Path) -> None:
    records = []
    for factor in (1, 2, 4, 8):
        rung = {"lr_factor": factor, "learning_rate": 1e-3 * factor}
        records.append(run_record("control", 0, 0.01 * factor, 0.0, **rung))
        broken = {"outcome": "diverged"} if factor == 8 else {}
        records.append(run_record("delayed_scaling", 0, 0.01 * factor, 0.0, **broken, **rung))
    result = result_of(tmp_path, records, suite="stress", title="Stress")
    [table] = tables.tables_of(result, "stress")
    finals = {"1 x": "3.2900", "2 x": "3.3000", "4 x": "3.3200", "8 x": "3.3600"}
    assert texts(table)["bf16"] == {"Precision": "bf16", "Breaks": "above 0.008", "Interval": "—", **finals}
    assert texts(table)["delayed scaling"]["8 x"] == "1 of 1 diverged"
    assert texts(table)["delayed scaling"]["Breaks"] == "0.004 to 0.008"
    assert tables.tables_of(result, "verdict") == []  # no pairs to judge
