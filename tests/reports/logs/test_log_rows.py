"""What counts the steps of a log in rows, a CSV or JSON lines: epochs, ranks, and rows without a number."""

import json

import pytest
import run_logs as logs

from te_bench.reports.convergence.loss_logs import read_arms
from te_bench.reports.convergence.loss_verdict import judge_losses


def csv_of(rows):
    """Rows of numbers by name, as a CSV; a value that is None is an empty cell."""
    names = list(rows[0])
    lines = [",".join("" if row[name] is None else str(row[name]) for name in names) for row in rows]
    return "\n".join([",".join(names), *lines]) + "\n"


def json_of(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def arm(folder, rows, write=csv_of, seeds=3):
    """A log a seed, of rows(seed)."""
    ending = "csv" if write is csv_of else "jsonl"
    for seed in range(seeds):
        logs.written(folder / f"seed{seed}.{ending}", write(rows(seed)))
    return folder


def both(tmp_path, rows, write=csv_of):
    """The curves and notes of an arm whose runs have rows(seed)."""
    a = arm(tmp_path / "a", rows, write)
    return read_arms([a], [a])[0]


def loss_at(n, seed, off=0.0):
    return round(3 + off + seed * 1e-3 + (seed * n % 7) * 1e-6 + 1 / (n + 1) ** 2, 6)


@pytest.mark.parametrize("name", ["iters", "iterations", "train_step", "epoch", "Steps", "Epoch"])
def test_one_run_of_many_rows_is_one_run_whatever_its_steps_are_called(name, tmp_path):
    found = both(tmp_path, lambda seed: [{name: n, "loss": loss_at(n, seed)} for n in range(50)])
    assert len(found.final) == 3
    assert found.curves["0"].step == tuple(range(50))


def test_keras_history_is_a_run_by_its_epochs(tmp_path):
    found = both(tmp_path, lambda seed: [{"epoch": n, "loss": 9 - n, "val_loss": loss_at(n, seed)} for n in range(8)])
    assert (found.metric, found.curves["1"].step) == ("val_loss", tuple(range(8)))


@pytest.mark.parametrize("write", [csv_of, json_of])
@pytest.mark.parametrize("first", [0, 1])
def test_steps_that_start_again_with_each_epoch_go_on(first, write, tmp_path):
    def rows(seed):
        every = [(epoch, step) for epoch in range(5) for step in range(20)]
        return [{"epoch": e, "step": s + first, "loss": loss_at(20 * e + s, seed)} for e, s in every]

    found = both(tmp_path, rows, write)
    assert found.curves["2"].step == tuple(range(first, 100 + first))
    assert found.curves["2"].loss[-1] == loss_at(99, 2)
    assert found.notes == ()


def test_a_validation_at_the_end_of_each_epoch_stands_at_its_steps(tmp_path):
    def rows(seed):
        every = [(epoch, step) for epoch in range(5) for step in range(20)]
        return [
            {"epoch": e, "step": s, "loss": 3.0, "val_loss": loss_at(20 * e + s, seed) if s == 19 else None}
            for e, s in every
        ]

    assert both(tmp_path, rows).curves["0"].step == (19, 39, 59, 79, 99)
    late = both(tmp_path / "late", lambda seed: [row for row in rows(seed) if row["val_loss"] is not None])
    assert late.curves["0"].loss == tuple(loss_at(n, 0) for n in (19, 39, 59, 79, 99))


@pytest.mark.parametrize("write", [csv_of, json_of])
def test_steps_that_start_again_without_an_epoch_are_refused(write, tmp_path):
    a = arm(tmp_path / "a", lambda seed: [{"step": n % 20, "loss": loss_at(n, seed)} for n in range(100)], write)
    with pytest.raises(ValueError, match=r"seed0\..*: its step falls back to where it began, .* add a column epoch"):
        read_arms([a], [a])


def test_a_csv_of_a_resumed_run_counts_its_later_losses(tmp_path):
    steps = [*range(0, 70), *range(40, 101)]
    found = both(tmp_path, lambda seed: [{"step": s, "loss": loss_at(n, seed)} for n, s in enumerate(steps)])
    assert found.curves["0"].step == tuple(range(101))
    assert found.curves["0"].loss[40] == loss_at(70, 0)
    assert "losses were logged again, as by a resumed run" in found.notes[0]


@pytest.mark.parametrize("write", [csv_of, json_of])
def test_ranks_are_averaged_where_they_are_named_or_side_by_side(write, tmp_path):
    def rows(seed, ranks):
        return [{"rank": r, "step": s, "loss": 3 + r + seed * 1e-3 + s * 1e-6} for r, s in ranks]

    blocks = [(r, s) for r in range(3) for s in range(30)]
    found = both(tmp_path, lambda seed: rows(seed, blocks), write)
    assert found.curves["0"].step == tuple(range(30))
    assert found.curves["1"].loss[0] == pytest.approx(4.001)
    beside = [(r, s) for s in range(30) for r in range(3)]
    unnamed = both(
        tmp_path / "b", lambda seed: [{"step": x["step"], "loss": x["loss"]} for x in rows(seed, beside)], write
    )
    assert unnamed.curves == found.curves
    assert "their mean counts" in unnamed.notes[0]


@pytest.mark.parametrize(("write", "what"), [(json_of, "null"), (csv_of, "an empty cell")])
def test_rows_without_a_number_at_the_end_are_named_with_the_word_for_nan(write, what, tmp_path):
    def rows(last, off=0.0):
        return lambda seed: [{"step": n, "loss": loss_at(n, seed, off) if n <= last(seed) else None} for n in range(50)]

    a = arm(tmp_path / "a", rows(lambda seed: 49), write)
    b = arm(tmp_path / "b", rows(lambda seed: 44, 1e-4), write)
    said = f"steps 45 to 49 have {what} for loss in .*b; if that is NaN, write NaN"
    with pytest.raises(
        ValueError, match=f"at step 49 in .*a and at step 44 in .*b: compare runs of one length; {said}"
    ):
        judge_losses(*read_arms([a], [b]), margin=0.003)
    c = arm(tmp_path / "c", rows(lambda seed: 48 if seed == 1 else 49), write)
    with pytest.raises(
        ValueError, match=f"seed 1 ends at step 48, .*; step 49 has {what} for loss in .*c; if that is NaN"
    ):
        read_arms([a], [c])
    note = f"{b} (seed0.{'csv' if write is csv_of else 'jsonl'}): steps 45 to 49 have {what} for loss; if that is NaN"
    assert read_arms([b], [b])[0].notes[0].startswith(note)


def test_rows_that_logged_something_else_lack_no_number(tmp_path):
    """As pandas writes JSON lines: every name in every row, null where it was not logged."""

    def rows(seed):
        return [{"step": n, "loss": 3.0, "val_loss": loss_at(n, seed) if n % 10 == 0 else None} for n in range(100)]

    found = both(tmp_path, rows, json_of)
    assert (found.notes, found.curves["0"].step[-1]) == ((), 90)


def test_a_rank_that_is_the_only_one_leaves_a_resumed_run_as_it_was_logged(tmp_path):
    steps = [*range(10, 90), *range(20, 101)]
    found = both(
        tmp_path, lambda seed: [{"rank": 0, "step": s, "loss": loss_at(n, seed)} for n, s in enumerate(steps)], json_of
    )
    assert found.curves["0"].loss[-81] == loss_at(80, 0)
    assert "losses were logged again, as by a resumed run" in found.notes[0]


@pytest.mark.parametrize("write", [csv_of, json_of])
def test_a_last_row_without_a_step_does_not_turn_steps_into_numbers_of_rows(write, tmp_path):
    """Sides of two lengths, logged equally often: their last row has a loss and no step."""

    def rows(every):
        return lambda seed: [
            *({"step": every * n, "loss": loss_at(n, seed)} for n in range(101)),
            {"step": None, "loss": loss_at(100, seed)},
        ]

    a, b = arm(tmp_path / "a", rows(10), write), arm(tmp_path / "b", rows(20), write)
    found = read_arms([a], [a])[0]
    assert found.curves["0"].step[-1] == 1000
    assert "loss is left out of the rows without step, 1 of 102" in found.notes[0]
    with pytest.raises(ValueError, match=r"the curves end at step 1000 in .* and at step 2000"):
        judge_losses(*read_arms([a], [b]), margin=0.003)
    few = arm(
        tmp_path / "few",
        lambda seed: [{"step": n if n < 9 else None, "loss": loss_at(n, seed)} for n in range(20)],
        write,
    )
    said = "the steps of loss are the numbers of its rows, because of rows without step, 11 of 20"
    assert said in read_arms([few], [few])[0].notes[0]


def test_steps_that_are_written_as_text_are_steps(tmp_path):
    found = both(tmp_path, lambda seed: [{"step": str(10 * n), "loss": loss_at(n, seed)} for n in range(9)], json_of)
    assert found.curves["0"].step[-1] == 80


@pytest.mark.parametrize("write", [csv_of, json_of])
def test_a_run_that_was_resumed_within_a_fraction_of_an_epoch_begins_no_new_one(write, tmp_path):
    steps = [*range(0, 71, 10), *range(56, 101, 4)]
    found = both(
        tmp_path,
        lambda seed: [{"step": s, "epoch": s / 100, "loss": loss_at(n, seed)} for n, s in enumerate(steps)],
        write,
    )
    assert found.curves["0"].step[-1] == 100
    assert "losses were logged again" in found.notes[0]


def test_a_csv_a_seed_may_say_its_seed_in_a_column(tmp_path):
    found = both(tmp_path, lambda seed: [{"step": n, "seed": 7 + seed, "loss": loss_at(n, seed)} for n in range(9)])
    assert list(found.final) == ["7", "8", "9"]


def test_of_two_names_of_steps_the_one_that_counts_through_is_taken(tmp_path):
    """A step within epochs, a count of all of them, and a last row that has neither."""

    def rows(seed):
        run = [{"step": n % 20, "global_step": n, "loss": loss_at(n, seed)} for n in range(100)]
        return [*run, {"step": None, "global_step": None, "loss": loss_at(100, seed)}]

    assert both(tmp_path, rows, json_of).curves["0"].step[-1] == 99
