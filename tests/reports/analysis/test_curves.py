import statistics

import pytest
from journals import curve_record, curves, record, trial, write

from te_bench.reports.analysis.curves import comparisons, points
from te_bench.reports.analysis.rows import load_results


def compared(tmp_path, records, **settings):
    [group] = load_results([write(tmp_path / "run", records, **settings)]).groups
    return comparisons(group, ())


def curve(seed, at, losses, times=None, **changes):
    samples = {"val_step": at, "val_loss": losses, "val_time_s": times or [0.1 * s for s in at]}
    return record(trial("training", seed=seed, **changes), samples=samples, work={"tokens": 100, "batch": 4})


def test_points_have_the_spread_over_seeds():
    records = [curve(0, [0.0, 10.0], [4.0, 1.0]), curve(1, [0.0, 10.0], [4.0, 2.0]), curve(2, [0.0, 10.0], [4.0, 6.0])]
    start, end = points(records, "val_step", "val_time_s", "val_loss")
    assert (start.mean, start.deviation) == (4.0, 0.0)
    assert (end.mean, end.low, end.high) == (3.0, 1.0, 6.0)
    assert end.deviation == pytest.approx(statistics.stdev([1.0, 2.0, 6.0]))
    assert end.time_s == pytest.approx(1.0)


def test_seeds_that_log_at_other_steps_are_interpolated():
    records = [curve(0, [0.0, 10.0, 20.0], [4.0, 2.0, 1.0]), curve(1, [0.0, 20.0], [4.0, 2.0], [0.0, 4.0])]
    found = points(records, "val_step", "val_time_s", "val_loss")
    assert [(p.step, p.mean) for p in found] == [(0.0, 4.0), (10.0, 2.5), (20.0, 1.5)]


def test_curves_end_where_the_shortest_ends_and_skip_what_is_not_a_number():
    records = [curve(0, [0.0, 10.0, 20.0], [4.0, None, 1.0]), curve(1, [0.0, 15.0], [4.0, 2.0]), curve(2, [], [])]
    assert [p.step for p in points(records, "val_step", "val_time_s", "val_loss")] == [0.0]
    assert points([curve(2, [], [])], "val_step", "val_time_s", "val_loss") == ()


def test_best_is_the_mean_over_seeds_and_fp8_is_held_to_bf16(tmp_path):
    records = [curve(s, [0.0, 10.0, 20.0], [4.0, best, 1.9]) for s, best in enumerate((1.0, 1.2))]
    records += [curve(s, [0.0, 10.0], [4.0, best], precision="fp8") for s, best in enumerate((1.3, 1.5))]
    [comparison] = compared(tmp_path, records)
    bf16, fp8 = comparison.trainings
    assert (bf16.best, bf16.n) == (pytest.approx(1.1), 2)
    assert bf16.deviation == pytest.approx(statistics.stdev([1.0, 1.2]))
    assert comparison.reference is bf16
    assert comparison.behind(fp8) == pytest.approx(0.3)
    assert comparison.behind(bf16) is None


def test_reference_is_the_bf16_arm_with_most_seeds(tmp_path):
    records = [curve(0, [0.0], [4.0], mode="compile"), *(curve(s, [0.0], [4.0]) for s in range(2))]
    [comparison] = compared(tmp_path, records, baseline=records[0].trial.cell)
    assert comparison.reference.configuration.trial.mode == "eager"
    [comparison] = compared(tmp_path / "fp8", [curve(0, [0.0], [4.0], precision="fp8")])
    assert comparison.reference is None


def test_other_data_or_budget_is_another_comparison(tmp_path):
    settings = ({}, {"data": "stdlib"}, {"steps": None, "budget_s": 60.0}, {"batch": "max"})
    found = compared(tmp_path, [curve(0, [0.0], [4.0], **changes) for changes in settings])
    play = "char, text:play.txt, 500 steps"
    assert [one.title for one in found] == [play, "char, stdlib, 500 steps", "char, text:play.txt, 60.0 s"]
    assert [len(comparison.trainings) for comparison in found] == [2, 1, 1]
    [elsewhere] = compared(tmp_path / "2", [curve(0, [0.0], [4.0], data="text:/home/someone/play.txt")])
    assert elsewhere.title == play


def test_divergence_gives_a_curve_but_no_best(tmp_path):
    [comparison] = compared(tmp_path, curves())
    diverged = comparison.trainings[-1]
    assert diverged.diverged
    assert (diverged.best, diverged.steps_done) == (None, 201)
    assert diverged.validation
    # one diverged seed does not cut the others short
    bad = curve_record(trial("training", seed=1), outcome="diverged", stop=100)
    [comparison] = compared(tmp_path / "2", [curve_record(trial("training")), bad])
    [training] = comparison.trainings
    assert (training.validation[-1].step, training.n, training.diverged) == (500, 1, True)


def test_tokens_and_their_rate(tmp_path):
    [comparison] = compared(tmp_path, [curve_record(trial("training"))])
    [training] = comparison.trainings
    assert (training.tokens, training.batch) == (501 * 16384, 64)  # steps 0 to 500
    assert training.tokens_per_s == pytest.approx(501 * 16384 / 10.0)
