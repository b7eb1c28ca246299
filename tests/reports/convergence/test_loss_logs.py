"""Arms of runs by their logs: what is one run, which loss is judged, which runs are pairs, and what is no arm."""

import concurrent.futures
import json
import math
import os
import random
import shutil

import pytest
import run_logs

from te_bench.reports.convergence import loss_logs
from te_bench.reports.convergence.equivalence import Verdict
from te_bench.reports.convergence.loss_csv import Losses
from te_bench.reports.convergence.loss_logs import read_arms
from te_bench.reports.convergence.loss_verdict import answers, judge_losses, prices

STEPS = tuple(range(0, 1001, 10))


def nanogpt(path, val=None, train=None, steps=STEPS):
    """A nanoGPT log whose losses are those of the functions of the step."""
    lines = []
    for step in steps:
        lines += [f"step {step}: train loss 9.0, val loss {val(step):.5f}"] if val else []
        lines += [f"iter {step}: loss {train(step):.5f}, time 10.00ms, mfu 30.00%"] if train else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def arm(folder, offset=0.0, seeds=4, name="seed{}.log", **kinds):
    """A folder of runs that end at 3 + offset + some ten-thousandths by seed."""
    for seed in range(seeds):
        end = 3 + offset + (seed * 7 % 5) * 1e-4 + offset * (seed * 3 % 4 - 1.5) / 20
        given = {kind: lambda step, end=end, low=low: end + low + math.exp(-step / 60) for kind, low in kinds.items()}
        nanogpt(folder / name.format(seed), **given)
    return folder


@pytest.fixture
def two(tmp_path):
    return arm(tmp_path / "a", val=0.0, train=-0.5), arm(tmp_path / "b", 0.001, val=0.0, train=-0.5)


def test_the_last_validation_loss_is_judged_and_seeds_pair_by_their_names(two):
    a, b = read_arms([two[0]], [two[1]])
    assert (list(a.final), a.judged) == (["0", "1", "2", "3"], "the last validation loss (val loss)")
    assert a.final["1"] == pytest.approx(3.0002)
    found = judge_losses(a, b, margin=0.003)
    assert found.verdict is Verdict.EQUIVALENT
    assert found.matched.seeds == ("0", "1", "2", "3")
    assert found.comparison.gap == pytest.approx(0.001, abs=1e-5)


def test_without_validation_on_either_side_the_mean_training_loss_of_the_last_tenth_is_judged(two, tmp_path):
    def train(step):
        return 3 + (step == 1000) * 0.4 + step * 1e-6  # the last batch is no measure

    folder = tmp_path / "train"
    for seed in range(3):
        nanogpt(folder / f"s{seed}.log", train=lambda step, seed=seed: train(step) + seed * 1e-3)
    a, b = read_arms([two[0]], [folder])
    assert a.judged == b.judged == "the mean training loss (train loss) over the last tenth of the steps"
    assert a.training
    assert b.final["0"] == pytest.approx(sum(train(step) for step in range(900, 1001, 10)) / 11)
    found = judge_losses(a, b, margin=0.003)
    assert found.matched.seeds == ("0", "1", "2")
    assert any("which do not show overfitting" in note for note in found.notes)


def test_noise_of_single_batches_is_no_move_of_the_gap_but_a_trend_is(tmp_path):
    def noisy(step, place, trend):
        return 3 + random.Random(1000 * place + step).gauss(0, 0.05) + trend * max(step - 900, 0) / 100

    arms = []
    for place, trend in ((0, 0.0), (3, 0.0), (6, 0.2)):
        folder = tmp_path / f"arm{place}"
        for seed in range(3):
            nanogpt(folder / f"s{seed}.log", train=lambda x, p=place + seed, t=trend: noisy(x, p, t))
        arms.append(folder)
    still, moving = (judge_losses(*read_arms([arms[0]], [arms[n]]), margin=0.01) for n in (1, 2))
    assert "still moves" not in still.reason
    assert moving.reason.startswith("the gap still moves: by +0.")


def test_a_metric_of_any_name_is_judged_on_request(tmp_path):
    for side, off in (("a", 0.0), ("b", 0.001)):
        for seed in range(3):
            rows = [{"step": s, "eval_books_loss": 3 + off + seed * 1e-3 + 1 / (s + 1) ** 4} for s in range(0, 101, 10)]
            folder = tmp_path / side / f"seed{seed}"
            folder.mkdir(parents=True)
            (folder / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    sides = [tmp_path / "a"], [tmp_path / "b"]
    with pytest.raises(ValueError, match=r"which loss is to be judged\? It has eval_books_loss: say --metric NAME"):
        read_arms(*sides)
    a, _ = read_arms(*sides, metric="eval_books_loss")
    assert a.final["1"] == pytest.approx(3.001)
    with pytest.raises(ValueError, match=r"--metric val: .* has no such value; it has eval_books_loss"):
        read_arms(*sides, metric="val")


@pytest.mark.parametrize("given", ["folder", "files", "pattern"])
def test_an_arm_is_a_folder_its_files_or_a_pattern(two, given):
    folder = two[0]
    paths = {"folder": [folder], "files": sorted(folder.iterdir()), "pattern": [str(folder / "seed?.log")]}[given]
    assert read_arms(paths, [two[1]])[0].final == read_arms([folder], [two[1]])[0].final


def test_runs_of_the_same_names_are_pairs_and_others_are_not(tmp_path):
    a, b = (arm(tmp_path / side, off, name="run-{}.log", val=0.0) for side, off in (("a", 0.0), ("b", 0.001)))
    assert judge_losses(*read_arms([a], [b]), margin=0.003).matched.seeds == tuple(f"run-{n}.log" for n in range(4))
    c = arm(tmp_path / "c", 0.001, name="other-{}.log", val=0.0)
    assert judge_losses(*read_arms([a], [c]), margin=0.003).matched.seeds == ()


@pytest.mark.parametrize(
    ("ours", "theirs", "pair"),
    [
        ("bf16_run{}.log", "FP8_run{}.log", "run2.log"),
        ("run-{}.bf16.log", "run-{}.nvfp4.log", "run-2.log"),
        ("run{}/baseline/out.log", "run{}/candidate/out.log", "run2/out.log"),
        ("bf16.{}.log", "te-fp8-e4m3.{}.log", "2.log"),
    ],
)
def test_the_words_of_a_side_do_not_part_the_names_of_a_pair(ours, theirs, pair, tmp_path):
    folders = arm(tmp_path / "a", name=ours, val=0.0), arm(tmp_path / "b", 0.001, name=theirs, val=0.0)
    found = judge_losses(*read_arms([folders[0]], [folders[1]]), margin=0.003)
    assert found.matched.seeds[2] == pair
    assert found.comparison.n == 4


def test_names_that_the_words_of_a_side_alone_tell_apart_stay_as_they_are(tmp_path):
    a = arm(tmp_path / "a", name="bf16_run{}.log", val=0.0)
    for seed, side in enumerate(("fp8", "mxfp8", "nvfp4")):
        nanogpt(
            tmp_path / "b" / f"{side}_run1.log", val=lambda step, seed=seed: 3.01 + seed * 1e-4 + math.exp(-step / 60)
        )
    assert list(read_arms([a], [tmp_path / "b"])[1].final) == ["fp8_run1.log", "mxfp8_run1.log", "nvfp4_run1.log"]
    (a / "bf16_run3.log").rename(a / "fp8_run3.log")
    with pytest.raises(ValueError, match=r"holds runs of both sides, bf16_run2\.log and fp8_run3\.log"):
        judge_losses(*read_arms([a], [tmp_path / "b"]), margin=0.003)


def test_a_folder_of_what_the_trainer_prints_is_told_what_to_give(two, tmp_path):
    for seed in range(3):
        warnings = "Some weights were not initialised.\n" * 200
        text = f"{warnings}{{'loss': 3.{seed}, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': 0.01}}\n"
        run_logs.written(tmp_path / "printed" / f"seed{seed}.log", text)
    with pytest.raises(
        ValueError, match=r"seed0\.log is what Hugging Face's Trainer prints, .*: give its trainer_state\.json"
    ):
        read_arms([two[0]], [tmp_path / "printed"])


def test_a_resumed_log_counts_its_later_losses_and_says_so(two):
    path = two[1] / "seed0.log"
    before = nanogpt(two[1] / "x", val=lambda step: 9.0, steps=range(0, 700, 10)).read_text()
    after = nanogpt(two[1] / "x", val=lambda step: 3.001, steps=range(400, 1001, 10)).read_text()
    (two[1] / "x").unlink()
    path.write_text(before + after)
    _, b = read_arms([two[0]], [two[1]])
    assert b.curves["0"].step == STEPS
    assert b.curves["0"].loss[39:42] == (9.0, 3.001, 3.001)
    assert b.notes == (f"{two[1]} (seed0.log): losses were logged again, as by a resumed run: the later ones count",)


def test_a_run_whose_training_broke_is_diverged_whatever_its_validation_and_its_seed_is_kept(two):
    nanogpt(two[1] / "seed2.log", val=lambda step: 3.0, train=lambda step: math.nan if step > 500 else 3.0)
    found = judge_losses(*read_arms([two[0]], [two[1]]), margin=0.003)
    assert found.verdict is Verdict.DIVERGED
    assert "1 of 4 runs, seed 2: the loss is nan at step 510" in found.reason
    [said] = answers(found)
    assert said.startswith("1 of 4 runs")
    nanogpt(two[1] / "seed2.log", train=lambda step: math.nan, steps=(0, 10))  # before its first validation
    found = judge_losses(*read_arms([two[0]], [two[1]]), margin=0.003)
    assert (found.verdict, len(found.candidate.final)) == (Verdict.DIVERGED, 4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda b: nanogpt(b / "seed1.log", val=lambda s: 3.0, steps=STEPS[:50]), "seed 1 ends at step 490, others at 1000"),
        (lambda b: (b / "d").mkdir() or (b / "d" / "trainer_state.json").write_text("{}"), "mixes logs of several kinds"),
        (lambda b: shutil.copy(b / "seed1.log", b / "seed9.log"), "seeds 1 and 9 are one run, loss for loss"),
    ],
)  # fmt: skip
def test_arms_that_are_none_are_told(two, build, message):
    build(two[1])
    with pytest.raises(ValueError, match=message):
        read_arms([two[0]], [two[1]])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.log", b" \n", "empty.log is empty: nothing was logged"),
        ("core", b"\x7fELF\0\0\1", "core is not a log that te-bench reads: Hugging Face"),
        ("none.log", None, "cannot read .*none.log: No such file"),
        ("seed*.txt", None, r"seed\*.txt matches no file"),
        (
            "prose.txt",
            b"We trained it.\nIt was good.\n",
            "is not a log that te-bench reads .*has no column of numbers",
        ),
        (
            "console.txt",
            b"{'loss': 3.2, 'epoch': 0.1}\n{'eval_loss': 3.1}\n",
            "without steps: give its trainer_state.json",
        ),
        ("finals.csv", b"3.1\n3.2\n", "so it is a whole side by itself: give the file alone"),
        (
            "history.txt",
            b'{"loss": 3.1}\n{"loss": 3.0}\n',
            "history.txt has no _step: give each row the step of its loss",
        ),
        (
            "seed0.log",
            b"iter 0: loss 3.0, time 1.00ms, mfu 1%\n",
            "seed0.log has no validation loss",
        ),  # others have one
    ],
)
def test_files_that_are_no_log_are_told(two, tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    given = [path, *sorted(two[1].iterdir())[1:]] if name in ("finals.csv", "seed0.log") else [path]
    with pytest.raises(ValueError, match=message):
        read_arms([two[0]], given)


def test_a_folder_is_searched_once_whatever_links_lead_to_it_and_for_logs_alone(two):
    before = read_arms([two[0]], [two[1]])[0].final
    (two[0] / "latest").symlink_to(two[0] / "seed1.log")
    (two[0] / "round").symlink_to(two[0])
    (two[0] / "loop").symlink_to(two[0] / "pool")
    (two[0] / "pool").symlink_to(two[0] / "loop")
    log = two[0] / "seed1.log"
    log.write_bytes(log.read_text().encode("utf-16"))  # as PowerShell writes
    (two[0] / "ckpt.pt").write_bytes(b"PK\3\4\0\0step 5: train loss 1.0, val loss 1.0\n")
    (two[0] / "notes.md").write_text("step by step, with a loss of 3.2\n")
    assert read_arms([two[0]], [two[1]])[0].final == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: nothing was logged"),
        (b"\0\1\2", "is not a log that te-bench reads"),
        (b"step,loss\n", "has a header and no rows: nothing was logged"),
        (b"step,loss\n0,4\n5\n9,3\n", "line 3: 1 cells where the first line has 2"),
        (b"step,loss\n0,4\ngarbage\n9,3\n", "line 3: 1 cells where the first line has 2"),
        (b"3.1\n3.2\n3.3\n", "so it is a whole side by itself: give the file itself, not its folder"),
    ],
)
def test_a_csv_in_a_folder_is_refused_for_what_it_is(tmp_path, content, message):
    run_logs.written(tmp_path / "a" / "seed3.csv", content)
    for seed in range(3):
        (tmp_path / "a" / f"seed{seed}.csv").write_text(f"step,loss\n0,{4 + seed}\n5,{3 + seed}\n9,{2 + seed}\n")
    with pytest.raises(ValueError, match=rf"seed3\.csv.*{message}"):
        read_arms([tmp_path / "a"], [tmp_path / "a"])


def test_a_folder_of_json_lines_without_a_step_says_what_they_lack(tmp_path):
    run_logs.written(tmp_path / "a" / "seed0.jsonl", '{"loss": 3.1}\n{"loss": 3.0}\n')
    with pytest.raises(ValueError, match=r"seed0\.jsonl has no _step"):
        read_arms([tmp_path / "a"], [tmp_path / "a"])


def test_pipes_are_read_and_devices_are_not(two, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="/dev/null is neither a file, a folder nor a pipe"):
        read_arms([two[0]], ["/dev/null"])
    content = (two[1] / "seed1.log").read_bytes()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def given():
        with concurrent.futures.ThreadPoolExecutor() as pool:
            writing = pool.submit(pipe.write_bytes, content)
            try:
                return read_arms([two[0]], [pipe])[1]
            finally:
                writing.exception()

    assert given().curves["pipe"] == read_arms([two[0]], [two[1]])[1].curves["1"]
    sizes = [path.stat().st_size for path in two[0].iterdir()]
    content *= 40  # more than a pipe holds
    monkeypatch.setattr(loss_logs, "LARGEST", max(sizes))
    with pytest.raises(ValueError, match=r"pipe has more than 0\.0 GiB: no log"):
        given()


def test_a_run_that_died_before_its_first_loss_is_named(two):
    """Empty or with a trace alone, in the folder or below; what is named otherwise, or is no text, is not."""
    (two[0] / "again").mkdir()
    silent = [two[0] / "again" / "seed5.log", two[0] / "seed4.log"]
    silent[0].write_text("Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory\n")
    silent[1].write_text("")
    (two[0] / "notes.md").write_text("step by step\n")
    (two[0] / "cache.log").write_bytes(b"\0\1\2")
    arms = read_arms([two[0]], [two[1]])
    missing = "A training that died before its first loss is missing here, and would count as diverged"
    assert [arm.notes for arm in arms] == [(f"{silent[0]}, {silent[1]}: no loss in them. {missing}",), ()]
    assert list(arms[0].final) == ["0", "1", "2", "3"]
    assert arms[0].notes[0] in judge_losses(*arms, margin=0.003).notes


def test_wandb_s_files_in_one_folder_are_a_run_each(tmp_path):
    (tmp_path / "flat").mkdir()
    for seed in range(3):
        file = run_logs.wandb_binary(tmp_path / str(seed), 3 + seed * 1e-3, seed)
        file.rename(tmp_path / "flat" / f"run-{seed}.wandb")
    assert list(read_arms([tmp_path / "flat"], [tmp_path / "flat"])[0].final) == ["0", "1", "2"]


def test_a_csv_of_several_runs_stands_against_logs_and_what_was_compared_is_said(two, tmp_path):
    path = tmp_path / "finals.csv"
    path.write_text("seed,val_loss\n0,3.0001\n1,3.0003\n2,3.0005\n3,3.0002\n")
    found = judge_losses(*read_arms([path], [two[1]]), margin=0.01)
    assert found.matched.seeds == ("0", "1", "2", "3")
    assert found.judged == "the last validation loss (val loss); of the baseline final loss"
    with pytest.raises(ValueError, match=r"--metric x: .* is a CSV of several runs, whose columns name the loss"):
        read_arms([path], [two[1]], metric="x")


def test_logs_stand_against_a_csv_of_training_losses_by_their_own(two, tmp_path):
    rows = [f"{step},{seed},{2.5 + seed * 1e-3}" for seed in range(4) for step in STEPS]
    (tmp_path / "table.csv").write_text("\n".join(["step,seed,train_loss", *rows]) + "\n")
    table, logs = read_arms([tmp_path / "table.csv"], [two[1]])
    assert table.training
    assert logs.training
    assert logs.final["0"] == pytest.approx(2.501, abs=1e-4)
    assert f"the validation loss of {two[1]} is not judged, because the other side has none" in logs.notes
    judge_losses(table, logs, margin=0.003)


def test_folders_that_hold_no_run_or_two_logs_of_one_and_texts_of_gigabytes_are_told(two, tmp_path, monkeypatch):
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="none holds no log: Hugging Face"):
        read_arms([two[0]], [tmp_path / "none"])
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "trainer_state.json").write_text("{}")
    (tmp_path / "both" / "events.out.tfevents.1.x").write_text("")
    with pytest.raises(ValueError, match=r"both holds two logs of one run, Hugging Face's .*: name the file of one"):
        read_arms([two[0]], [tmp_path / "both"])
    run_logs.written(tmp_path / "c" / "events.out.tfevents.1.x", run_logs.tfrecord(b""))
    with pytest.raises(ValueError, match=r"c contains no numbers: it was read as TensorBoard's event files$"):
        read_arms([two[0]], [tmp_path / "c"])
    (tmp_path / "c" / "loss_val").mkdir()
    with pytest.raises(ValueError, match=r"c contains no numbers: .*\. Are its losses in folders below\? Name those"):
        read_arms([two[0]], [tmp_path / "c"])
    with pytest.raises(ValueError, match="is given 2 times: a run counts once"):
        read_arms([two[0], two[0] / "seed1.log"], [two[1]])
    monkeypatch.setattr(loss_logs, "LARGEST", 1000)
    with pytest.raises(ValueError, match=r"seed0.log has more than 0.0 GiB: no log"):
        read_arms([two[0] / "seed0.log"], [two[1]])


def test_the_answer_prices_certainty_by_the_spread(two):
    found = judge_losses(*read_arms([two[0]], [two[1]]), margin=0.0011, paired=False)
    assert found.verdict is Verdict.INCONCLUSIVE
    said = " ".join(answers(found))
    needed = found.comparison.seeds_needed_at_gap
    assert f"About {needed - 4} more seeds a side, {needed} in all, would decide it in 80 % of cases" in said
    assert "95 % interval" in said
    assert "The verdict goes by the 90 % interval" in said
    assert "(0.033 %) above" in said
    margins = {price.seeds: price.margin for price in prices(found)}
    assert margins[4] == pytest.approx(found.comparison.detectable)
    assert list(margins.values()) == sorted(margins.values(), reverse=True)
    low, high = found.comparison.interval_95
    assert low < found.comparison.interval[0] < found.comparison.interval[1] < high


def test_empty_event_files_on_both_sides_are_not_the_same_run(tmp_path):
    for side, gap in (("a", 0.0), ("b", 0.001)):
        for seed in range(3):
            run_logs.tensorboard(tmp_path / side / f"seed{seed}", 3 + gap + seed * 1e-4)
            (tmp_path / side / f"seed{seed}" / "events.out.tfevents.1.profile-empty").touch()
    assert judge_losses(*read_arms([tmp_path / "a"], [tmp_path / "b"]), margin=0.003).comparison.n == 3


def test_steps_below_zero_have_a_last_tenth_too(tmp_path):
    for side in ("a", "b"):
        for seed in range(2):
            path = tmp_path / side / f"seed{seed}.csv"
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"step,train_loss\n-5,4\n-4,3.5\n-3,3.{seed}{ord(side)}\n")
    assert read_arms([tmp_path / "a"], [tmp_path / "b"])[0].final == {"0": 3.097, "1": 3.197}


def test_runs_that_were_as_many_as_it_takes_and_did_not_decide_are_not_told_to_be_one_too_few():
    gaps = (0.0002, -0.0009, 0.0008, 0.0001, 0.0003, 0.0009, 0.0014, 0.0056)
    finals = [{str(seed): 3 + seed * 1e-4 + gap * on for seed, gap in enumerate(gaps)} for on in (0, 1)]
    sides = [Losses(source="", final=final, curves={}, seeded=True) for final in finals]
    found = judge_losses(*sides, margin=0.004)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.comparison.seeds_needed_at_gap == len(gaps)
    assert "these did not. Run some more." in answers(found)[1]


def states(folder, rows, seeds=3):
    """A trainer_state.json a seed, of rows(seed)."""
    for seed in range(seeds):
        run_logs.written(folder / f"seed{seed}" / "trainer_state.json", json.dumps({"log_history": rows(seed)}))
    return folder


def test_nan_that_the_trainer_writes_as_0_is_a_divergence_and_other_zeros_are_told(tmp_path):
    """The Trainer leaves a NaN out of the sum that it logs: of NaN alone 0 is left, beside the gradient norm's NaN."""

    def rows(off, norm, broke_at=10**9):
        def of(seed):
            return [
                {"step": s, "loss": 0.0 if s >= broke_at else 3 + off + seed * 1e-3 + math.exp(-s / 60)}
                | ({} if norm is None else {"grad_norm": norm if s >= broke_at else 1.0})
                for s in STEPS
            ]

        return of

    good = states(tmp_path / "good", rows(0.0, 1.0))
    broke = states(tmp_path / "broke", rows(0.001, math.nan, 950))
    found = judge_losses(*read_arms([good], [broke]), margin=0.01)
    assert (found.verdict, "the loss is nan at step 950" in found.reason) == (Verdict.DIVERGED, True)
    silent = states(tmp_path / "silent", rows(0.001, None, 950))
    found = judge_losses(*read_arms([good], [silent]), margin=0.01)
    assert any("a loss is exactly 0, which Hugging Face's Trainer writes" in note for note in found.notes)


def test_validation_losses_that_are_not_judged_are_named(tmp_path):
    def rows(*names):
        return lambda seed: [
            {"step": s, "loss": 3 + seed * 1e-3} | {name: 3 + seed * 1e-3 for name in names} for s in STEPS
        ]

    none, one = states(tmp_path / "none", rows()), states(tmp_path / "one", rows("eval_loss"))
    several = states(tmp_path / "several", rows("eval_books_loss", "eval_code_loss"))
    a, b = read_arms([one], [none])
    assert (a.notes, b.notes) == ((f"the validation loss of {one} is not judged, because the other side has none",), ())
    a, b = read_arms([none], [several])
    assert b.notes == (f"{several} has eval_books_loss, eval_code_loss, of which --metric judges one",)
    assert (a.training, b.training) == (True, True)
    assert read_arms([none], [several], metric="loss")[1].notes == ()


def test_both_sides_are_judged_by_the_validation_loss_that_both_have(tmp_path):
    def rows(**losses):
        return lambda seed: [{"step": s} | {name: end + seed * 1e-3 for name, end in losses.items()} for s in STEPS]

    a = states(tmp_path / "a", rows(val_loss=9.0, eval_loss=3.0))
    b = states(tmp_path / "b", rows(eval_loss=3.001))
    first, second = read_arms([a], [b])
    assert (first.final["0"], first.judged) == (3.0, second.judged) == (3.0, "the last validation loss (eval_loss)")


@pytest.mark.parametrize(
    ("places", "what"),
    [
        (("seed0/attempt_0/0/std.log", "seed0/attempt_0/1/std.log"), "are ranks of one run"),
        (("seed0-rank0.log", "seed0-rank1.log"), "are ranks of one run"),
        (("seed0/train/x.log", "seed0/validation/x.log"), "are two losses of one run"),
        (("loss_train.log", "loss_val.log"), "are two losses of one run"),
        (("run-20250901_120000-ab1/x.log", "run-20250902_080000-ab1/x.log"), "are one run, which was resumed"),
    ],
)
def test_logs_of_one_run_are_no_seeds(two, tmp_path, places, what):
    for n, place in enumerate(places):
        nanogpt(tmp_path / "c" / place, val=lambda step, n=n: 3 + n + math.exp(-step / 60))
    with pytest.raises(ValueError, match=what):
        read_arms([two[0]], [tmp_path / "c"])


def test_logs_that_are_named_by_their_time_are_a_run_each(two, tmp_path):
    """As W&B's folders are named, which are of one run where nothing else differs; files are not."""
    for n in range(3):
        path = tmp_path / "c" / f"run-2025090{n + 1}_120000-fp8.log"
        nanogpt(path, val=lambda step, n=n: 3 + n * 1e-3 + math.exp(-step / 60))
    assert len(read_arms([two[0]], [tmp_path / "c"])[1].final) == 3


def test_losses_of_several_ranks_in_one_log_count_as_their_mean(two, tmp_path):
    for seed in range(4):
        lines = [
            f"{rank}: iter {step}: loss {2.5 + seed * 1e-3 + rank:.4f}, time 10.00ms, mfu 30.00%"
            for step in STEPS
            for rank in range(3)
        ]
        run_logs.written(tmp_path / "c" / f"seed{seed}.log", "\n".join(lines) + "\n")
    _, c = read_arms([two[0]], [tmp_path / "c"])
    assert c.final["2"] == pytest.approx(3.502)
    assert "every step has several losses, as of several ranks: their mean counts" in c.notes[0]


def test_a_validation_long_before_the_end_is_told(tmp_path):
    for side, off in (("a", 0.0), ("b", 0.001)):
        for seed in range(3):
            validated = nanogpt(tmp_path / "x", val=lambda s, e=3 + off + seed * 1e-3: e, steps=range(0, 801, 100))
            trained = nanogpt(tmp_path / "y", train=lambda s: 3.0 - s * 1e-5)
            run_logs.written(tmp_path / side / f"seed{seed}.log", validated.read_text() + trained.read_text())
    a, _ = read_arms([tmp_path / "a"], [tmp_path / "b"])
    assert any("training went on after the last validation, which is judged" in note for note in a.notes)


def test_summaries_of_other_lengths_are_not_compared(tmp_path):
    for side, end in (("a", 1000), ("b", 500)):
        for seed in range(3):
            summary = json.dumps({"val/loss": 3 + seed * 1e-3, "_step": end})
            run_logs.written(tmp_path / side / f"seed{seed}" / "wandb-summary.json", summary)
    with pytest.raises(ValueError, match=r"the curves end at step 1000 in .* and at step 500 in"):
        judge_losses(*read_arms([tmp_path / "a"], [tmp_path / "b"]), margin=0.003)


def test_a_summary_of_a_run_that_broke_early_is_a_divergence_and_no_other_length(tmp_path):
    for side, off in (("a", 0.0), ("b", 5e-4)):
        for seed in range(3):
            row = {"val/loss": 3 + off + seed * 1e-3, "_step": 1000}
            if side == "b" and seed == 1:
                row = {"val/loss": "NaN", "_step": 300}
            run_logs.written(tmp_path / side / f"seed{seed}" / "wandb-summary.json", json.dumps(row))
    found = judge_losses(*read_arms([tmp_path / "a"], [tmp_path / "b"]), margin=0.003)
    assert found.verdict is Verdict.DIVERGED


def test_a_baseline_that_is_called_fp8_is_told(tmp_path):
    for side, off in (("bf16", 0.0), ("fp8", 0.001)):
        arm(tmp_path / side, off, val=0.0)
    order = "is that the right way round?"
    for sides, told in ((("fp8", "bf16"), True), (("bf16", "fp8"), False)):
        found = judge_losses(*read_arms(*([tmp_path / side] for side in sides)), margin=0.003)
        assert any(order in note for note in found.notes) is told


@pytest.mark.parametrize(("every", "said"), [(10, None), (1, "at 11 and 101 steps of the last tenth")])
def test_training_losses_at_other_steps_are_told(tmp_path, every, said):
    for side, off, steps in (("a", 0.0, STEPS), ("b", 5e-4, range(0, 1001, every))):
        for seed in range(3):
            end = 3 + off + seed * 1e-3
            nanogpt(tmp_path / side / f"seed{seed}.log", train=lambda s, end=end: end, steps=steps)
    found = judge_losses(*read_arms([tmp_path / "a"], [tmp_path / "b"]), margin=0.003)
    assert any("steps of the last tenth: their means are of other batches" in note for note in found.notes) is bool(
        said
    )
    assert said is None or any(said in note for note in found.notes)


def test_a_value_that_is_no_loss_is_judged_with_a_word(tmp_path):
    for side in ("a", "b"):
        # One that rises by more than a loss of a run that trains does
        states(
            tmp_path / side,
            lambda seed: [
                {"step": s, "eval_perplexity": 25 + seed / 100 + s / 500, "eval_accuracy": 0.5 + seed / 100}
                for s in STEPS
            ],
        )
    for path in (tmp_path / "b").rglob("*.json"):
        path.write_text(path.read_text() + "\n")
    found = judge_losses(*read_arms([tmp_path / "a"], [tmp_path / "b"], "eval_perplexity"), margin=0.3)
    assert "eval_perplexity is judged as a loss is: more is worse; read its unit for nat" in found.notes
    assert found.verdict is Verdict.EQUIVALENT
    with pytest.raises(ValueError, match="eval_accuracy: more of it is better"):
        judge_losses(*read_arms([tmp_path / "a"], [tmp_path / "b"], "eval_accuracy"), margin=0.003)


@pytest.mark.parametrize("begin", [0, 100_000])
def test_the_last_tenth_is_of_what_a_run_trained_and_not_of_its_steps_number(begin, tmp_path):
    """Runs that go on from a checkpoint: FP8 costs 0.0055 at their end, and nothing in their first part."""
    for side, gap in (("a", 0.0), ("b", 0.0055)):
        for seed in range(5):
            base = 3 + seed * 1e-2 + gap * seed * 1e-3
            nanogpt(
                tmp_path / side / f"seed{seed}.log",
                train=lambda s, base=base, gap=gap: base + gap * min(1.0, (s - begin) / 2500),
                steps=range(begin, begin + 5001, 10),
            )
    found = judge_losses(*read_arms([tmp_path / "a"], [tmp_path / "b"]), margin=0.005)
    assert found.comparison.gap == pytest.approx(0.0055, abs=2e-5)
    assert found.verdict is Verdict.INFERIOR


def test_a_baseline_whose_evaluations_are_noisy_does_not_overfit_by_their_noise(tmp_path):
    draw = random.Random(0)
    noise = [[draw.gauss(0, 0.006) for _ in range(11)] for _ in range(5)]
    for rise, said in ((0.0, False), (0.03, True)):
        folder = tmp_path / str(rise)
        for side in "ab":
            for seed in range(5):
                nanogpt(
                    folder / side / f"seed{seed}.log",
                    val=lambda s, seed=seed, side=side, rise=rise: (
                        3
                        + noise[seed][s // 100]
                        + rise * (s == 1000)
                        + (side == "b") * (1 + seed) * 1e-5
                        + max(0, 600 - s) / 1000
                    ),
                    steps=range(0, 1001, 100),
                )
        found = judge_losses(*read_arms([folder / "a"], [folder / "b"]), margin=0.003)
        assert ("the baseline overfits" in found.reason) is said
