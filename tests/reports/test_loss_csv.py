import numpy as np
import pytest

from te_bench.reports.loss_csv import Curve, Losses, decayed, matched, read

LONG = "step,loss,seed\n0,4.0,1\n10,3.0,1\n0,4.1,2\n10,3.2,2\n"


def written(tmp_path, text, name="a.csv"):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text", ["3.1\n3.2\n", "val_loss\n3.1\n3.2\n", "# ours\n\n 3.1 \n3.2\n", "\ufeffanything\n3.1\n3.2\n"]
)
def test_one_column(tmp_path, text):
    found = read(written(tmp_path, text))
    assert found.final == {"1": 3.1, "2": 3.2}
    assert (found.curves, found.labels, found.seeded, found.notes) == ({}, {}, False, ())


def test_a_label_column_as_in_the_speedrun_s_losses(tmp_path):
    # three runs of modded-nanogpt (MIT), records/track_1_short
    text = "# final val_loss\nrecord,val_loss\nMFUTweaks,3.2752\nMFUTweaks,3.2776\nUNetValueEmbedsTweaks,3.2793\n"
    found = read(written(tmp_path, text))
    assert list(found.final.values()) == [3.2752, 3.2776, 3.2793]
    assert found.labels == {"1": "MFUTweaks", "2": "MFUTweaks", "3": "UNetValueEmbedsTweaks"}
    [note] = found.notes
    assert "mixes 2 labels (MFUTweaks, UNetValueEmbedsTweaks)" in note


def test_a_seed_column_pairs(tmp_path):
    a = read(written(tmp_path, "seed,val_loss\n7,3.1\n3,3.2\n"))
    b = read(written(tmp_path, "seed;final_loss\n3;3.21\n7;3.11\n", "b.csv"))
    assert a.seeded
    pairs = matched(a, b, paired=True)
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


def test_weights_and_biases(tmp_path):
    heads = [f'"{run} - val/loss{span}"' for run in ("fp8-seed3", "fp8-seed12") for span in ("", "__MIN", "__MAX")]
    rows = ["0,4.0,3.9,4.1,4.2,4.2,4.2", "5,,,,3.9,3.9,3.9", "10,3.0,2.9,3.1,3.2,3.2,3.2"]
    found = read(written(tmp_path, "\n".join([",".join(['"Step"', *heads]), *rows])))
    assert found.curves == {
        "3": Curve(step=(0, 10), loss=(4.0, 3.0)),
        "12": Curve(step=(0, 5, 10), loss=(4.2, 3.9, 3.2)),
    }
    assert found.final == {"3": 3.0, "12": 3.2}


def test_weights_and_biases_of_two_metrics_is_ambiguous(tmp_path):
    text = "Step,a - train/loss,a - val/loss\n0,1,2\n"
    with pytest.raises(ValueError, match="holds train/loss, val/loss: export one metric"):
        read(written(tmp_path, text))


def test_tensorboard_directory_or_files(tmp_path):
    for seed, last in ((0, 3.0), (1, 3.2)):
        written(tmp_path, f"Wall time,Step,Value\n1.7e9,0,4.0\n1.7e9,10,{last}\n", f"runs/bf16_s{seed}.csv")
    found = read(tmp_path / "runs")
    assert found.final == {"0": 3.0, "1": 3.2}
    assert found.curves["0"] == Curve(step=(0, 10), loss=(4.0, 3.0))
    files = [tmp_path / "runs" / f"bf16_s{seed}.csv" for seed in (0, 1)]
    assert read(files).curves == found.curves
    for n in (0, 1):  # files of one name in two directories, as TensorBoard names its downloads
        written(tmp_path, f"Wall time,Step,Value\n1,0,{n + 1}\n", f"seed{n}/loss.csv")
    assert read([tmp_path / "seed0/loss.csv", tmp_path / "seed1/loss.csv"]).final == {"0": 1, "1": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("val_loss\n3.1\nNaN\n", "a.csv, line 3: the loss is NaN. A run that diverged"),
        ("# x\n3.1\ninf\n", "line 3: the loss is inf"),
        ("3.1\nabout 3\n", "line 2: 'about 3' is not a number"),
        ("step,loss,seed\n0,4,1\n10,nan,1\n", "line 3: the loss is nan"),
        ("3.1\n", "holds one seed only"),
        ("step,loss\n0,4\n10,3\n", "no column seed: one seed only"),
        ("step,loss,seed\n0,4,1\n10,3,1\n", "holds one seed only"),
        ("Wall time,Step,Value\n1,0,4\n", "holds one seed only"),
        ("run,note\na,good\nb,bad\n", "no column of numbers"),
        ("x,y\n1,2\n3,4\n", "x, y are all numbers; call the column of final losses loss"),
        ("step,x,y,seed\n0,1,2,3\n", "call the one with the losses loss"),
        ("seed,loss\n1,3\n1,4\n", "line 3: seed 1 a second time"),
        ("step,loss,seed\n0,4,1\n0,3,1\n", "line 3: step 0 of 1 a second time"),
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


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="cannot read"):
        read(tmp_path / "missing.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no \.csv"):
        read(tmp_path / "empty")
    with pytest.raises(ValueError, match="several files are read as TensorBoard"):
        read([written(tmp_path, LONG), written(tmp_path, "Wall time,Step,Value\n1,0,4\n", "b.csv")])


def arm(name, final, *, seeded=True, end=None):
    curves = {} if end is None else {seed: Curve(step=(0, end), loss=(4, loss)) for seed, loss in final.items()}
    return Losses(source=name, final=final, curves=curves, labels={}, seeded=seeded)


def test_arms_that_do_not_pair_are_told():
    a, b = arm("A", {"1": 1.0, "2": 2.0, "3": 3.0}), arm("B", {"1": 1.0, "2": 2.0})
    for pair in ((a, b), (b, a)):
        with pytest.raises(ValueError, match="seed 3 is only in A"):
            matched(*pair, paired=True)
    unpaired = matched(a, b, paired=False)
    assert (unpaired.baseline, unpaired.candidate) == ((1, 2, 3), (1, 2))
    rows = [arm(name, {str(i): 1.0 for i in range(n)}, seeded=False) for name, n in (("A", 3), ("B", 2))]
    with pytest.raises(ValueError, match="3 losses in A and 2 in B cannot be paired"):
        matched(*rows, paired=True)
    with pytest.raises(ValueError, match="A names its seeds and B does not"):
        matched(a, rows[1], paired=True)
    lengths = [arm(name, {"1": 1.0, "2": 2.0}, end=end) for name, end in (("A", 100), ("B", 90))]
    for paired in (True, False):
        with pytest.raises(ValueError, match="curves end at step 100 in A and at step 90 in B"):
            matched(*lengths, paired=paired)


def curves(of, ends=(1000, 1000), every=20):
    steps = [tuple(map(float, range(0, end + 1, every))) for end in ends]
    return {str(n): Curve(step=at, loss=tuple(of(s) + n / 10 for s in at)) for n, at in enumerate(steps)}


def test_curves_that_have_settled():
    assert decayed(curves(lambda s: 3 + np.exp(-s / 100)), 0.003) is None
    assert decayed(curves(lambda s: 3 + s / 1000), 0.003) is None  # a rise is no fall


def test_curves_that_still_fall():
    falling = curves(lambda s: 4 - 5e-5 * s)  # 0.005 a tenth
    assert decayed(falling, 0.0051) is None
    reason = decayed(falling, 0.005)
    assert reason.startswith("still falling: the next tenth of training, 100 steps, would lower the loss by 0.005 more")


def test_curves_with_few_points_or_of_different_steps():
    assert decayed({}, 0.003).startswith("no curves")
    assert "2 points a curve" in decayed(curves(lambda s: 3.0, every=1000), 0.003)
    # 250 apart: no three in the last tenth, so the line reaches back
    assert decayed(curves(lambda s: 4 - 5e-5 * s, every=250), 0.004).startswith("still falling")
    mixed = {**curves(lambda s: 3.0, every=20), "x": Curve(step=(0.0, 1000.0), loss=(3.0, 3.0))}
    assert decayed(mixed, 0.003) is None
