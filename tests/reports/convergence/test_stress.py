"""The learning rate at which a precision breaks: what breaks a run, and what so many seeds know of the median."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from convergence_runs import run_record
from journals import write

from te_bench.reports.analysis.rows import load_results
from te_bench.reports.convergence.stress import StressLadder, breaking_point, stress_ladders
from te_bench.reports.group_result import load_report
from te_bench.reports.page import loss_figures
from te_bench.reports.page.gallery import figures_of
from te_bench.reports.page.headlines import headlines
from te_bench.reports.page.training_tables import stress

FACTORS = (1, 4, 16, 64)


def ladder(folder: Path, breaks: dict[str, list[float]], how: str = "diverged") -> StressLadder:
    [group] = load_results([run(folder, breaks, how)]).groups
    [found] = stress_ladders(group)
    return found


def run(folder: Path, breaks: dict[str, list[float]], how: str = "diverged") -> Path:
    """Of each precision the factor at which each seed breaks: diverged, or ending 0.5 above 3.28 where it began at 5.2."""
    records = [
        run_record(
            arm,
            seed,
            0.5 if factor >= at and how == "lost" else 0.01,
            0.001 * seed,
            how if factor >= at and how == "diverged" else "ok",
            lr_factor=factor,
            learning_rate=1e-3 * factor,
        )
        for arm, seeds in breaks.items()
        for seed, at in enumerate(seeds)
        for factor in (FACTORS if arm != "broken" else FACTORS[:1])
    ]
    return write(folder, records, suite="stress", title="Stress")


def test_ladders_of_one_directory_that_begin_at_other_rates_are_apart(tmp_path: Path) -> None:
    records = [
        run_record("control", seed, 0.01, 0.0, "ok", lr_factor=factor, learning_rate=rate * factor, batch=batch)
        for rate, batch in ((1e-3, 8), (3e-3, 8), (1e-3, 16))
        for factor in FACTORS
        for seed in range(3)
    ]
    [group] = load_results([write(tmp_path / "run", records, suite="stress", title="Stress")]).groups
    found = stress_ladders(group)
    assert [ladder.rate for ladder in found] == [1e-3, 3e-3, 1e-3]
    assert all(ladder.factors == FACTORS for ladder in found)


@pytest.mark.parametrize("how", ["diverged", "lost"])
def test_each_precision_breaks_between_two_rates_with_an_interval_over_its_seeds(tmp_path: Path, how: str) -> None:
    breaks = {"control": [64, 64, 64, 64, math.inf, 64], "delayed_scaling": [16, 4, 16, 16, 64, 16]}
    found = ladder(tmp_path / "run", breaks, how)
    bf16, fp8 = found.breaking["bf16"], found.breaking["delayed scaling"]
    assert found.rate == pytest.approx(1e-3)
    assert (bf16.median, bf16.interval) == ((16, 64), (16, math.inf))
    assert (fp8.median, fp8.interval) == ((4, 16), (1, 64))
    assert fp8.confidence == pytest.approx(0.96875)


@pytest.mark.parametrize("at", [1, math.inf])
def test_a_fault_that_was_planted_and_holds_is_named(tmp_path: Path, at: float) -> None:
    found = ladder(tmp_path / "run", {"control": [math.inf] * 3, "broken": [at] * 3}, "lost")
    name = "delayed scaling, broken on purpose: frozen scale"
    assert found.unseen == (() if at == 1 else (name,))
    assert found.breaking[name].median == ((0, 1) if at == 1 else (1, math.inf))
    table = stress(found)
    assert ("Not seen" in table.note) == (at != 1)


def test_more_precisions_than_colours_differ_by_their_marks(tmp_path: Path) -> None:
    one = ladder(tmp_path / "run", {"control": [64] * 3}, "lost")
    many = dataclasses.replace(one, results={f"bf16, {n}": one.results["bf16"] for n in range(10)})
    figure = loss_figures.finals(many)
    assert figure is not None
    [axes], [legend] = figure.axes, figure.legends
    handles = [line for line in legend.get_lines() if line.get_marker() != "None"]
    looks = [(line.get_color(), line.get_marker()) for line in handles]
    assert len({*looks}) == len(looks) == 10
    assert {*looks} == {(line.get_color(), line.get_marker()) for line in axes.lines if line.get_marker() != "None"}


def test_what_never_holds_or_never_breaks_is_said_to_lie_beyond_the_ladder(tmp_path: Path) -> None:
    found = ladder(tmp_path / "run", {"control": [math.inf] * 3, "delayed_scaling": [1, 1, 1]})
    assert found.breaking["bf16"].median == (64, math.inf)
    assert found.breaking["delayed scaling"].median == (0, 1)
    assert found.breaking["bf16"].confidence == pytest.approx(0.75)


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    rng, edges = np.random.default_rng(0), np.array([0.0, *(2.0**k for k in range(-4, 12)), math.inf])
    for n in (3, 6, 12):
        held, confidence = 0, breaking_point([(0.0, 1.0)] * n).confidence
        for points in np.exp(1 + rng.standard_normal((2000, n))):
            places = np.searchsorted(edges, points)
            low, high = breaking_point([(edges[i - 1], edges[i]) for i in places]).interval
            held += low <= math.e <= high
        assert held / 2000 >= confidence - 0.015
        assert confidence >= 0.95 or n < 6


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (
            [64] * 6,
            "No precision is shown to break before bf16. The median seed breaks at these learning rates: bf16 0.016 to ",
        ),
        (
            [4] * 6,
            "delayed scaling is shown to break before bf16. The median seed breaks at these learning rates: bf16 ",
        ),
        (
            [4] * 3,
            "No precision is shown to break before bf16, for which it takes 6 seeds at least. The median seed breaks at ",
        ),
    ],
)
def test_the_headline_says_what_breaks_where_and_names_no_lowest_loss(tmp_path, breaks, said):
    seeds = len(breaks)
    folder = run(
        tmp_path / "run", {"control": [64] * seeds, "delayed_scaling": breaks, "broken": [math.inf] * seeds}, "lost"
    )
    found = headlines(load_report([folder]))
    assert found[0].startswith(said)
    assert "Planted and not seen: delayed scaling, broken on purpose: frozen scale" in found[0]
    assert not any("lowest validation loss" in sentence.lower() for sentence in found)


@pytest.mark.usefixtures("drawn_once")
def test_the_report_shows_every_run_s_loss_by_its_rate_and_how_many_broke(tmp_path: Path) -> None:
    breaks = {"control": [64] * 6, "delayed_scaling": [64, 64, 16, 64, 64, 64], "broken": [1] * 6}
    [result] = load_report([run(tmp_path / "run", breaks, "lost")]).groups
    table = stress(result.stress[0])
    assert table is not None
    shown = {row[0].text: [cell.text for cell in row[-len(FACTORS) :]] for row in table.rows}
    assert [cell.partition(" ")[2] for cell in shown["delayed scaling"]] == ["", "", "(1/6)", "(6/6)"]
    drawn = {one.name: one.inline for one in figures_of(result, "")}["stress"]
    for word in ("peak learning rate", "0.016", "bf16", "delayed scaling, broken on purpose: frozen scale"):
        assert f">{word}<" in drawn


def test_runs_broke_of_as_many_as_were_held_to_a_limit(tmp_path: Path) -> None:
    """A seed that has not run at every rate has no bracket: it is none of those that might have broken."""
    records = [
        run_record(
            "control",
            seed,
            0.5 if factor == 64 else 0.01,
            0.001 * seed,
            "crashed" if seed > 3 and factor == 64 else "ok",
            lr_factor=factor,
            learning_rate=1e-3 * factor,
        )
        for seed in range(6)
        for factor in FACTORS
    ]
    [group] = load_results([write(tmp_path / "run", records, suite="stress", title="Stress")]).groups
    table = stress(stress_ladders(group)[0])
    assert table is not None
    assert table.rows[0][-1].text.endswith(" (4/4)")


@pytest.mark.usefixtures("undrawn")
def test_a_ladder_of_runs_that_all_diverged_has_no_figure(tmp_path: Path) -> None:
    [result] = load_report([run(tmp_path / "run", {"control": [1] * 3, "delayed_scaling": [1] * 3})]).groups
    assert "stress" not in {one.name for one in figures_of(result, "")}


def test_a_rate_that_is_too_low_to_learn_much_breaks_nothing(tmp_path: Path) -> None:
    """A short training learns most above its usual rate; a fault at the usual rate is held to bf16 there."""
    gaps = {1: 0.9, 4: 0.4, 16: 0.01, 64: 0.5}
    records = [
        run_record(arm, seed, gap + worse * (factor == 1), 0.0, lr_factor=factor, learning_rate=1e-3 * factor)
        for arm, worse in (("control", 0.0), ("delayed_scaling", 0.05), ("broken", 0.6))
        for seed in range(6)
        for factor, gap in gaps.items()
        if arm != "broken" or factor == 1
    ]
    [group] = load_results([write(tmp_path / "run", records, suite="stress", title="Stress")]).groups
    [found] = stress_ladders(group)
    brackets = {name: one.median for name, one in found.breaking.items()}
    fault = "delayed scaling, broken on purpose: frozen scale"
    assert brackets == {"bf16": (16, 64), "delayed scaling": (16, 64), fault: (0, 1)}
    assert list(found.limits) == [1, 4, 16, 64]
    assert found.limits[1] > found.limits[4] > found.limits[16] == found.limits[64]
