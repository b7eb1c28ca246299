import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest

from te_bench.reports.convergence.loss_arms import match_runs, note_falling, note_outlying, why_diverged, why_moving
from te_bench.reports.convergence.loss_csv import Curve, Losses, broken
from te_bench.reports.convergence.loss_logs import read_arms
from te_bench.reports.convergence.loss_verdict import judge_losses

LONG = "step,loss,seed\n0,4.0,1\n10,3.0,1\n0,4.1,2\n10,3.2,2\n"


def written(tmp_path, text, name="a.csv"):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def read(*paths):
    """An arm as `te-bench verdict` reads it."""
    return read_arms(paths, paths)[0]


@pytest.mark.parametrize(
    "text", ["3.1\n3.2\n", "val_loss\n3.1\n3.2\n", "# ours\n\n 3.1 \n3.2\n", "\ufeffanything\n3.1\n3.2\n"]
)
def test_one_column(tmp_path, text):
    found = read(written(tmp_path, text))
    assert found.final == {"1": 3.1, "2": 3.2}
    assert (found.curves, found.seeded, found.notes) == ({}, False, ())


def test_a_label_column_as_in_the_speedrun_s_losses(tmp_path):
    # three runs of modded-nanogpt (MIT), records/track_1_short
    text = "# final val_loss\nrecord,val_loss\nMFUTweaks,3.2752\nMFUTweaks,3.2776\nUNetValueEmbedsTweaks,3.2793\n"
    found = read(written(tmp_path, text))
    assert list(found.final.values()) == [3.2752, 3.2776, 3.2793]
    [note] = found.notes
    assert "mixes 2 labels (MFUTweaks, UNetValueEmbedsTweaks)" in note


def test_a_seed_column_pairs(tmp_path):
    a = read(written(tmp_path, "seed,val_loss\n7,3.1\n3,3.2\n"))
    b = read(written(tmp_path, "seed;final_loss\n3;3.21\n7;3.11\n", "b.csv"))
    assert a.seeded
    pairs = match_runs(a, b, paired=True)
    assert (pairs.seeds, pairs.baseline, pairs.candidate) == (("7", "3"), (3.1, 3.2), (3.11, 3.21))


def test_long_curves_in_any_order(tmp_path):
    text = "step,loss,seed\n10,3.0,1\n0,4.1,2\n0,4.0,1\n10,3.2,2\n"
    found = read(written(tmp_path, text))
    assert found.curves["1"] == Curve(step=(0, 10), loss=(4.0, 3.0))
    assert found.final == {"1": 3.0, "2": 3.2}
    assert found.seeded


def test_of_several_loss_columns_the_validation_loss_is_taken_and_said(tmp_path):
    text = "step,loss,val_loss,seed\n0,4,4.1,a\n5,3.5,,a\n10,3,3.1,a\n0,4,4.2,b\n10,3,3.2,b\n"
    found = read(written(tmp_path, text))
    assert found.curves["a"] == Curve(step=(0, 10), loss=(4.1, 3.1))
    assert "column val_loss" in found.notes[0]


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("step,loss,valid/loss,seed\n0,4,3,0\n1,3,2,0\n0,4,3,1\n1,3,1.9,1\n", {"0": 2.0, "1": 1.9}),  # logs' name
        ("step,0,1\n0,4.1,4.1\n9,3.2,3.2\n", {"0": 3.2, "1": 3.2}),  # seeds may share two rounded losses
        ("epoch,loss,seed\n0,4,0\n9,3,0\n0,4,1\n9,2.9,1\n", {"0": 3.0, "1": 2.9}),
        ("lr,loss\n2,3\n1,2.9\n3,3.1\n", {"1": 3.0, "2": 2.9, "3": 3.1}),  # in no order
    ],
)
def test_final_losses(tmp_path, text, final):
    assert read(written(tmp_path, text)).final == final


def test_weights_and_biases(tmp_path):
    heads = [f'"{run} - val/loss{span}"' for run in ("fp8-seed3", "fp8-seed12") for span in ("", "__MIN", "__MAX")]
    rows = ["0,4.0,3.9,4.1,4.2,4.2,4.2", "5,,,,3.9,3.9,3.9", "10,3.0,2.9,3.1,3.2,3.2,3.2"]
    found = read(written(tmp_path, "\n".join([",".join(['"Step"', *heads]), *rows])))
    assert found.curves == {"3": Curve(step=(0, 10), loss=(4, 3)), "12": Curve(step=(0, 5, 10), loss=(4.2, 3.9, 3.2))}
    assert found.final == {"3": 3.0, "12": 3.2}


def test_tensorboard_directory_or_files(tmp_path):
    for seed, last in ((0, 3.0), (1, 3.2)):
        written(tmp_path, f"Wall time,Step,Value\n1.7e9,0,4.0\n1.7e9,10,{last}\n", f"runs/bf16_s{seed}.csv")
    found = read(tmp_path / "runs")
    assert found.final == {"0": 3.0, "1": 3.2}
    assert found.curves["0"] == Curve(step=(0, 10), loss=(4.0, 3.0))
    files = [tmp_path / "runs" / f"bf16_s{seed}.csv" for seed in (0, 1)]
    assert read(*files).curves == found.curves
    for n in (0, 1):  # files of one name in two directories, as TensorBoard names its downloads
        written(tmp_path, f"Wall time,Step,Value\n1,0,{n + 1}\n", f"seed{n}/loss.csv")
    assert read(tmp_path / "seed0/loss.csv", tmp_path / "seed1/loss.csv").final == {"0": 1, "1": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3.1\nabout 3\n", "line 2: 'about 3' is not a number"),
        ("step,loss,seed\n0,4,1\nnan,4,1\n", "line 3: the step is nan"),
        ("val_loss\n3.1\n" + "3" * 131_073 + "\n", r"a\.csv, line 3: field larger than field limit"),
        ('# x\nval_loss\n"3.1\n3.2\n', "line 3: a cell does not end on its line: close its quote"),
        ('run,val_loss\n"a\nb",3.1\nc,3.2\n', "line 2: a cell does not end on its line"),
        ("seed;val_loss\n1;3,21\n2;3,22\n", "line 2: '3,21' is not a number: write decimals with a point, not a comma"),
        ("1;3,21\n2;3,22\n", "column 1, column 2 are all numbers; .*; were the commas decimal ones, write points"),
        ("a;3,21\nb;3,22\n", "line 1: '3,21' is not a number: write decimals with a point"),
        ("val_loss\n3,21\n", "line 2: 2 cells where the first line has 1. A comma separates cells"),
        ("3,21\n3,22\n", "were the commas decimal ones, write points"),
        ("Step,a - train/loss,b - val/loss\n0,1,2\n", "holds train/loss, val/loss: export one metric"),
        ("loss\n3.1\n3_28\n3.2\n", "'3_28' is not a number"),
        ("Relative Time (Process),a - loss,b - loss\n1,4,4\n", "x-axis is Relative Time .Process.: export with Step"),
        ("_runtime,a - loss\n1,4\n", "the x-axis is _runtime: export with Step as the x-axis"),
        ("tokens,loss,seed\n0,4,1\n9,3,1\n", "the x-axis is tokens: export with Step as the x-axis"),
        *(
            (
                f"{name},loss\n0,4\n5,3.5\n9,3\n",
                f"its column {name or 1} rises row by row: this looks like one run's curve",
            )
            for name in ("tokens", "time", "batch", "")
        ),
        ("step,x,y\n0,1,2\n", "or give step and a column a seed, called by its number"),
        ("3.1\n", "holds one seed only"),
        ("run,note\na,good\nb,bad\n", "no column of numbers"),
        ("x,y\n1,2\n3,4\n", "x, y are all numbers; call the column of final losses loss"),
        ("step,x,y,seed\n0,1,2,3\n", "call the one with the losses loss"),
        ("seed,loss\n1,3\n1,4\n", "line 3: seed 1 a second time"),
        ("seed,loss\n1,3\n2,\n", "line 3: no loss; write nan for a run that diverged, or leave the line out"),
        ("step,0,1,2\n0,4,4.1,4\n5,3,3.2,3\n9,2,2.1,2\n", "seeds 0 and 2 are one run, loss for loss: a run counts"),
        ("step,loss,seed\n0,4,1\n0,3,1\n0,4,2\n", "line 3: step 0 of 1 a second time"),
        ("step,loss,seed\n0,4,1\n5,3,1\n0,3,2\n", "seed 2 ends at step 0, others at 5"),
        ("Step,a - loss,b - loss\n0,,1\n", "a has no losses"),
        ("3.1\n3.2,4\n", "line 2: 2 cells where the first line has 1"),
        ("loss\n", "has a header and no rows"),
        ("# nothing\n", "is empty"),
    ],
)
def test_bad_files_are_told_with_their_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read(written(tmp_path, text))


@pytest.mark.parametrize("head", ["step,0,1", "step,seed0,seed1", "step,s_0,s_1"])
def test_a_column_a_seed_as_pandas_writes(tmp_path, head):
    found = read(written(tmp_path, f"{head}\n0,4.0,4.1\n5,,3.5\n10,3.0,3.2\n"))
    assert found.curves == {"0": Curve(step=(0, 10), loss=(4, 3)), "1": Curve(step=(0, 5, 10), loss=(4.1, 3.5, 3.2))}


def test_runs_of_one_display_name_are_all_kept_and_make_no_pairs(tmp_path):
    head = "Step,fp8 - val/loss,fp8 - val/loss,other - val/loss"
    found = read(written(tmp_path, f"{head}\n0,4,4,4\n10,3.0,3.2,3.1\n"))
    assert found.final == {"fp8 (1)": 3.0, "fp8 (2)": 3.2, "other": 3.1}
    assert "2 runs are called fp8, numbered" in found.notes[0]
    other = read(written(tmp_path, f"{head}\n0,4,4,4\n10,3.1,3.2,3.3\n", "b.csv"))
    assert match_runs(found, other, paired=False).baseline == (3.0, 3.2, 3.1)
    with pytest.raises(ValueError, match="several runs have the name fp8, so they have no pairs"):
        match_runs(found, other, paired=True)


def test_one_file_is_not_both_arms(tmp_path):
    a, b = read(written(tmp_path, "3.1\n3.2\n")), read(written(tmp_path, "3.1\n3.2\n", "b.csv"))
    for other in (a, b):
        names = r".*a\.csv and .*b\.csv" if other is b else r"[^ ]*a\.csv"
        with pytest.raises(ValueError, match=rf"hold the same file, byte for byte \({names}\)"):
            match_runs(a, other, paired=False)
    match_runs(a, read(written(tmp_path, "3.1\n3.20\n", "c.csv")), paired=True)  # the same losses may be


def test_runs_that_broke_are_told_and_no_control_may_be_among_them(tmp_path):
    good = read(written(tmp_path, "seed,loss\n3,3.1\n4,3.2\n5,3.3\n"))
    bad = read(written(tmp_path, "seed,loss\n3,3.1\n4,NaN\n5,inf\n", "b.csv"))
    assert broken(good) == {}
    assert why_diverged(good) is None
    assert why_diverged(bad) == "2 of 3 runs, seeds 4, 5: the final loss is nan"
    match_runs(good, bad, paired=True)
    with pytest.raises(
        ValueError, match=r"b\.csv: the baseline itself diverged, seeds 4, 5: .* Nothing can be concluded"
    ):
        match_runs(bad, good, paired=True)


def test_curves_that_broke(tmp_path):
    back = [4, 3, 3, 3, 6, 6, 6, 6, 3, 3, 3, 3]
    runs = {"spike": [4, 3, 9, *[3] * 9], "back": back, "rise": [*back[:8], *[6] * 4], "nan": [4, 3, 3, "nan"]}
    rows = [f"{10 * n},{loss},{seed}" for seed, losses in runs.items() for n, loss in enumerate(losses)]
    found = read(written(tmp_path, "step,loss,seed\n" + "\n".join(rows)))  # the NaN stopped its run: no uneven lengths
    assert set(broken(found)) == {"rise", "nan"}
    assert "the loss rose 2 above its minimum by step 70" in broken(found)["rise"]
    assert broken(found)["nan"] == "the loss is nan at step 30"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_what_windows_writes(tmp_path, encoding):
    path = tmp_path / "a.csv"
    path.write_bytes("loss\r\n3.1\r\n3.2\r\n".encode(encoding))
    assert read(path).final == {"1": 3.1, "2": 3.2}


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "latin.csv").write_bytes("d\xe9lai,loss\n0,3.1\n1,3.2\n".encode("latin-1"))
    with pytest.raises(ValueError, match="it is not UTF-8 text; export or save it as CSV in UTF-8"):
        read(tmp_path / "latin.csv")
    with pytest.raises(ValueError, match="cannot read"):
        read(tmp_path / "missing.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no log"):
        read(tmp_path / "empty")
    with pytest.raises(ValueError, match="so it is a whole side by itself: give the file alone"):
        read(written(tmp_path, LONG), board := written(tmp_path, "Wall time,Step,Value\n1,0,4\n", "b.csv"))
    with pytest.raises(ValueError, match=r"b\.csv is given 2 times"):
        read(board, tmp_path / "." / "b.csv")


def arm(name, final, *, seeded=True, end=None):
    curves = {} if end is None else {seed: Curve(step=(0, end), loss=(4, loss)) for seed, loss in final.items()}
    return Losses(source=name, final=final, curves=curves, seeded=seeded)


def test_a_run_that_ends_far_above_its_arm_is_told():
    assert note_outlying(arm("A", {"0": 3.1, "1": 3.2, "2": 3.3})) is None
    worse = arm("A", {"0": 3.1, "1": 12.0, "2": 3.3}, seeded=False)
    assert note_outlying(worse).startswith("A: row 1 ends 8.7 above the median of its runs; write nan if it diverged")


def test_arms_that_do_not_pair_are_told():
    a, b = arm("A", {"1": 1.0, "2": 2.0, "3": 3.0}), arm("B", {"1": 1.0, "2": 2.0})
    with pytest.raises(
        ValueError, match="no run of one side has its seed in the other: seeds 1, 2, 3 of A and seed 4 of C"
    ):
        match_runs(a, arm("C", {"4": 1.0}), paired=True)
    unpaired = match_runs(a, b, paired=False)
    assert (unpaired.baseline, unpaired.candidate) == ((1, 2, 3), (1, 2))
    rows = [arm(name, {str(i): 1.0 for i in range(n)}, seeded=False) for name, n in (("A", 3), ("B", 2))]
    with pytest.raises(ValueError, match="3 losses in A and 2 in B cannot be paired"):
        match_runs(*rows, paired=True)
    with pytest.raises(ValueError, match="A names its seeds and B does not"):
        match_runs(a, rows[1], paired=True)
    lengths = [arm(name, {"1": 1.0, "2": 2.0}, end=end) for name, end in (("A", 100), ("B", 90))]
    for paired in (True, False):
        with pytest.raises(ValueError, match="curves end at step 100 in A and at step 90 in B"):
            match_runs(*lengths, paired=paired)


@pytest.mark.parametrize(
    ("seeds", "pairs"),
    [
        (("12345678", "1235678"), "1235678"),
        (("12345678", "1357"), "1357"),
        (("3567", "12345678"), "3567"),
        (("1234567", "2345678"), "234567"),
        (("12345678", "6789"), "678"),
        (("1234567", "567890"), ""),  # a chance meeting, which would cost most runs
        (("12345678", "890"), ""),
        (("12", "12"), "12"),
    ],
)
def test_seeds_that_are_in_both_arms_are_pairs_by_default_if_most_runs_have_one(seeds, pairs):
    a, b = (
        arm(name, {s: 3 + int(s) + off for s in side}) for name, off, side in zip("AB", (0, 0.5), seeds, strict=True)
    )
    found = match_runs(a, b, paired=None)
    assert found.seeds == tuple(pairs)
    if pairs:
        assert (found.baseline, found.candidate) == (
            tuple(3 + int(s) for s in pairs),
            tuple(3.5 + int(s) for s in pairs),
        )
    else:
        assert (len(found.baseline), len(found.candidate)) == tuple(map(len, seeds))
        assert match_runs(a, b, paired=True).seeds == tuple(s for s in seeds[0] if s in seeds[1])


def curves(name, *losses):
    """An arm of one run for each function of the step."""
    runs = {str(n): Curve(step=at, loss=tuple(map(float, loss(np.array(at))))) for n, (at, loss) in enumerate(losses)}
    return Losses(source=name, final={seed: run.loss[-1] for seed, run in runs.items()}, curves=runs, seeded=True)


DENSE, SPARSE = tuple(map(float, range(0, 1001, 20))), (0.0, 200.0, 400.0, 600.0, 800.0, 1000.0)


def cosine(s):
    """A loss under a learning rate that decays to 0 by half a cosine: flat at the end, and 0.05 above it a fifth before."""
    return 3 + (1 + np.cos(np.pi * s / 1000)) / 2


@pytest.mark.parametrize("steps", [SPARSE, DENSE])
def test_a_gap_that_stays_has_settled_though_the_loss_falls(steps):
    a = curves("A", (steps, cosine), (steps, lambda s: cosine(s) + 0.1))
    b = curves("B", (steps, lambda s: cosine(s) + 0.002), (steps, lambda s: cosine(s) + 0.1 + 0.001 * s / 1000))
    assert why_moving(a, b, 0.003) is None
    assert "A: the loss still falls, by 0." in note_falling(a, 0.003)
    assert note_falling(a, 0.5) is None
    assert note_falling(curves("A", (steps, lambda s: 3 + s)), 0.003) is None  # a rise is no fall


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("steps", "told"), [(DENSE, 100), (SPARSE, 200)])
def test_a_gap_that_opens_or_closes_by_the_margin_has_not_settled(steps, told, sign):
    a = curves("A", (steps, cosine), (steps, cosine))
    b = curves("B", *[(steps, lambda s: cosine(s) + sign * 0.004 * np.maximum(s - 800, 0) / told)] * 2)
    move = sign * 0.004
    assert why_moving(a, b, 0.0041) is None
    reason = why_moving(a, b, 0.0039)
    assert reason.startswith(f"the gap still moves: by {move:+.2g} over the last {told} steps")


def test_the_gap_is_of_the_arms_means_whatever_their_seeds_and_steps():
    a = curves("A", (DENSE, cosine), (DENSE, lambda s: cosine(s) + 1), (DENSE, lambda s: cosine(s) + 2))
    b = curves("B", (DENSE, lambda s: cosine(s) + 5e-4 * s), (DENSE[::2], cosine))  # 0.025 a tenth in the mean
    assert why_moving(a, b, 0.02).startswith("the gap still moves: by +0.025")
    assert why_moving(a, b, 0.03) is None


def test_curves_that_tell_nothing():
    a, none = curves("A", (DENSE, cosine), (DENSE, cosine)), arm("B", {"1": 3.0, "2": 3.1})
    assert why_moving(a, none, 0.003).startswith("a configuration has no curves")
    assert note_falling(none, 0.003) is None
    few = curves("B", ((0.0, 1000.0), cosine))
    assert why_moving(a, few, 0.003).startswith("2 points a curve")
    assert why_moving(a, few, 0.003).endswith("or judge a loss that was logged more often (--metric)")
    training = dataclasses.replace(a, training=True)
    assert "--metric" not in why_moving(training, few, 0.003)


@pytest.mark.parametrize("between", ["", "  ", "# 3.28"])
def test_a_row_left_out_is_refused_where_rows_are_pairs(tmp_path, between):
    with pytest.raises(ValueError, match="line 2 has no loss: without seeds rows are pairs"):
        read(written(tmp_path, f"3.1\n{between}\n3.2\n3.3\n"))
    assert len(read(written(tmp_path, f"seed,loss\n1,3.1\n{between}\n2,3.2\n")).final) == 2
    assert len(read(written(tmp_path, "\n3.1\n# a second batch\n3.2\n\n")).final) == 2


def test_a_training_step_that_wandb_exports_beside_its_count_of_log_calls_is_the_step(tmp_path):
    head = "Step,a-s0 - val/loss,a-s0 - train/global_step,a-s1 - val/loss,a-s1 - train/global_step"
    rows = ["0,4.0,0,4.1,0", "1,3.5,100,,", "3,,,3.6,100", "7,3.0,200,3.1,200"]
    found = read(written(tmp_path, "\n".join([head, *rows])))
    assert {seed: curve.step for seed, curve in found.curves.items()} == {"0": (0, 100, 200), "1": (0, 100, 200)}
    assert found.final == {"0": 3.0, "1": 3.1}
    lacking = read(written(tmp_path, "\n".join([head, *rows[:-1], "7,3.0,200,3.1,"])))  # of one run not always there
    assert {seed: curve.step for seed, curve in lacking.curves.items()} == {"0": (0, 1, 7), "1": (0, 3, 7)}


def wandb(tmp_path, name, metric, ends, steps=range(0, 101, 10)):
    """An export of several runs; each ends at its end, but for the last step."""
    heads = [f"run-s{n} - {metric}" for n in range(len(ends))]
    rows = [f"{s}," + ",".join(str(round(end + (s == 100), 6)) for end in ends) for s in steps]
    return written(tmp_path, "\n".join([",".join(["Step", *heads]), *rows]), name)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("val/loss", "train/loss"),
        ("val/loss", "grad_norm"),
        ("eval_loss", "val/ppl"),
        ("eval/books_loss", "train_loss"),
    ],
)
def test_losses_of_other_names_are_not_compared(tmp_path, ours, theirs):
    sides = [wandb(tmp_path, f"{n}.csv", name, (3.0, 3.1, 3.2)) for n, name in enumerate((ours, theirs))]
    with pytest.raises(ValueError, match=rf"0.csv has the loss {ours} and .*1.csv {theirs}: compare one loss"):
        match_runs(*read_arms(*([side] for side in sides)), paired=None)


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [("val/loss", "eval_loss", False), ("loss", "val_loss", True), ("loss_bf16", "loss_fp8", True), ("x", "y", False)],
)
def test_names_that_do_not_tell_whether_they_are_one_loss_are_named(tmp_path, ours, theirs, told):
    rows = "\n".join(f"{s},{n},{3 + n / 10}" for s in (0, 5, 10) for n in range(3))
    sides = [written(tmp_path, f"step,seed,{name}\n{rows}", f"{n}.csv") for n, name in enumerate((ours, theirs))]
    sides[1].write_text(sides[1].read_text() + "\n")
    found = judge_losses(*read_arms(*([side] for side in sides)), margin=0.2)
    said = f"the baseline's loss is called {ours} and the candidate's {theirs}: see that they are one loss"
    assert (said in found.notes) is told


def test_a_training_loss_is_the_mean_of_the_last_tenth(tmp_path):
    found = read(wandb(tmp_path, "a.csv", "train/loss", (3.0, 3.1)))
    assert found.training
    assert found.final == pytest.approx({"0": 3.5, "1": 3.6})  # of 90 and of 100
    assert found.judged == "the mean train/loss over the last tenth of the steps"
    found = read(wandb(tmp_path, "b.csv", "val/loss", (3.0, 3.1)))
    assert (found.final, found.judged) == ({"0": 4.0, "1": 4.1}, "the last val/loss")


def test_an_export_of_both_sides_is_no_side(tmp_path):
    both = [f"{side}-s{n} - val/loss" for side in ("bf16", "fp8") for n in range(3)]
    rows = "\n".join(f"{s}," + ",".join(str(3 + n / 10) for n in range(6)) for s in (0, 5, 10))
    sides = [
        written(tmp_path, "Step," + ",".join(both) + "\n" + rows),
        wandb(tmp_path, "b.csv", "val/loss", (3.0, 3.1, 3.2)),
    ]
    with pytest.raises(ValueError, match=r"a.csv holds runs of both sides, bf16-s2 and fp8-s2: give each side its own"):
        match_runs(*read_arms(*([side] for side in sides)), paired=None)


def test_the_time_to_read_a_csv_grows_with_its_rows_and_not_with_their_square(tmp_path):
    draw = np.random.default_rng(0)
    sides = [written(tmp_path, "\n".join(map(repr, (3 + draw.normal(size=30_000) / 9).tolist())), n) for n in "ab"]
    begun = time.process_time()
    found = judge_losses(*read_arms(*([side] for side in sides)), margin=0.05, paired=True)
    assert time.process_time() - begun < 5  # 1 s, and 10 s by the square
    assert found.comparison.n == 30_000


@pytest.mark.parametrize(("last", "torn"), [("3.2", True), ("3", True), ("3.2801", False), ("nan", False)])
def test_final_losses_whose_last_line_is_torn_are_refused_for_a_run_would_be_lost(tmp_path, last, torn):
    path = written(tmp_path, f"seed,val_loss\n0,3.28\n1,3.2811\n2,{last}")
    if torn:
        with pytest.raises(ValueError, match=rf"its last line, 2,{last}, has no end, and lacks cells or decimals"):
            read(path)
    path.write_text(path.read_text() + ("\n" if torn else ""))
    assert len(read(path).final) == 3


def test_a_torn_last_line_of_several_curves_is_left_out_and_told(tmp_path):
    wide = read(written(tmp_path, "step,0,1\n0,4.0,4.15\n5,3.5,3.55\n9,3.0,3."))
    assert wide.curves["1"].step == (0, 5)
    assert wide.notes == (f"{tmp_path / 'a.csv'}: the last line is torn and left out",)
    with pytest.raises(ValueError, match=r"seed 1 ends at step 0, others at 9: .*; .*a\.csv: the last line is torn"):
        read(written(tmp_path, "seed,step,loss\n0,0,4.0\n0,9,3.0\n1,0,4.1\n1,9,3"))


def test_a_side_of_one_table_is_chosen_by_a_column_of_labels_too(tmp_path):
    rows = [f"{side},{seed},{3 + seed / 100}" for side in ("bf16", "fp8") for seed in range(3)]
    path = written(tmp_path, "\n".join(["precision,seed,loss", *rows]) + "\n", "mix.csv")
    a, b = read_arms([Path(f"{path}:bf16")], [Path(f"{path}:fp8")])
    assert list(a.final) == list(b.final) == ["0", "1", "2"]
