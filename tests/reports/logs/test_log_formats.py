"""Each format reads a log of its kind to the losses that were written, and says in a sentence what it cannot read."""

import base64
import json
import math
from pathlib import Path

import pytest
import run_logs as logs

from te_bench.reports.logs import FORMATS, LogFile
from te_bench.reports.logs.formats.tensorboard import crc32c
from te_bench.reports.logs.names import is_loss

# torch 2.13's SummaryWriter: eval/loss 4.0 at 0, 3.5 at 50 (as a tensor), 3.0 at 100; train/loss 3.25 at 50; a text.
EVENTS = base64.b64decode(
    "SAAAAAAAAAD+kkidCTC+QoPqwdpBGg1icmFpbi5FdmVudDoyUi4KLHRlbnNvcmJvYXJkLnN1bW1hcnkud3JpdGVyLmV2ZW50X2ZpbGVfd3JpdGVy"
    "gtDV2B0AAAAAAAAAYC/fIwl0w0KD6sHaQSoSChAKCWV2YWwvbG9zcxUAAIBA5ErQ9zEAAAAAAAAAnYOD6Qnow0KD6sHaQRAyKiQKIgoJZXZhbC9s"
    "b3NzQggIASoEAABgQEoLCgkKB3NjYWxhcnMsipjnIAAAAAAAAAAp7alQCQvEQoPqwdpBEDIqEwoRCgp0cmFpbi9sb3NzFQAAUEC1VCNrRQAAAAAA"
    "AADr5miwCXPEQoPqwdpBEAEqOAo2ChFub3RlL3RleHRfc3VtbWFyeUIXCAcSBBICCAFCDWxvc3Mgb2Ygd29yZHNKCAoGCgR0ZXh06NPI0R8AAAAA"
    "AAAAUUtEGAmQxEKD6sHaQRBkKhIKEAoJZXZhbC9sb3NzFQAAQEA+CJlO"
)

WRITERS = {
    "nanogpt": (logs.nanogpt, "run.log", "val loss", "train loss"),
    "torchtitan": (logs.torchtitan, "run.log", "validation loss", "train loss"),
    "megatron": (logs.megatron, "run.log", "validation loss", "lm loss"),
    "huggingface": (logs.huggingface, "run", "eval_loss", "loss"),
    "wandb": (logs.wandb_jsonl, "run", "val/loss", "train/loss"),
    "tensorboard": (logs.tensorboard, "run", "eval/loss", "train/loss"),
    "csv": (logs.wandb_csv, "run.csv", "val/loss", "train/loss"),
}


def read(name, *paths):
    return FORMATS.load(name).read([LogFile(path=path, content=path.read_bytes()) for path in paths])


def test_every_format_is_tested_here():
    assert sorted(WRITERS) == FORMATS.names()


@pytest.mark.parametrize("name", WRITERS)
def test_it_reads_the_losses_that_were_logged_and_no_other_format_takes_it(name, tmp_path):
    write, place, validation, training = WRITERS[name]
    path = write(tmp_path / place, 3.0)
    found = read(name, path)
    assert {name for name in found.losses if is_loss(name)} == {validation, training}
    both = zip((validation, training), (logs.course(3.0), logs.course(2.5, 0.01)), strict=True)
    for loss, expected in both:
        assert [step for step, _ in found.losses[loss]] == list(logs.STEPS)
        assert [value for _, value in found.losses[loss]] == pytest.approx(expected, abs=1e-4)
    file = LogFile(path=path, content=path.read_bytes())
    assert [other for other in FORMATS.names() if FORMATS.load(other).recognises(file)] == [name]


def test_tensorboard_s_own_writer_is_read_to_the_bit(tmp_path):
    assert crc32c(b"123456789") == 0xE3069283  # RFC 3720's check value
    found = read("tensorboard", logs.written(tmp_path / "events", EVENTS))
    assert found.losses == {"eval/loss": [(0, 4.0), (50, 3.5), (100, 3.0)], "train/loss": [(50, 3.25)]}
    assert found.notes == ()


@pytest.mark.parametrize(
    ("text", "validation", "training"),
    [
        # The source of the run stands before its losses, as modded-nanogpt writes it.
        (
            'print(f"step:{step}/{steps} val_loss:{val_loss:.4f}")\nstep:0/1390 val_loss:10.8258 train_time:0ms '
            "step_avg:nanms\nstep:10/1390 train_loss:9.0001 train_time:99ms\nstep:1390/1390 val_loss:3.2766\n",
            [(0, 10.8258), (1390, 3.2766)],
            [(10, 9.0001)],
        ),
        (
            "s:0 tel:11.0279\ns:10 trl:9.5000 lr:0.000600 norm:1.50\ns:19560 tel:3.2722\n",
            [(0, 11.0279), (19560, 3.2722)],
            [(10, 9.5)],
        ),
        (
            "Epoch 1 | iter 128 step 1 | loss train: 10.998, val: n/a | iter time: 12.00 ms (step)\n"
            "iter 256: val loss 9.1234, val time: 10.00 ms\n",
            [(256, 9.1234)],
            [(128, 10.998)],
        ),
        ("Step 1 | loss:2.085338592529297 lr:2e-05 tokens_per_second_per_gpu:57.8\n", None, [(1, 2.085338592529297)]),
        (
            # It repeats the last validation loss on every line.
            "Training epoch 0, iteration 7/9 | lr: 6e-4 | global_step: 7 | peak_memory_usage: 9 | reduced_train_loss: 7.9\n"
            "Training epoch 0, iteration 8/9 | lr: 6e-4 | global_step: 8 | reduced_train_loss: 7.1 | val_loss: 4.106\n"
            "Training epoch 0, iteration 9/9 | lr: 3e-5 | global_step: 9 | reduced_train_loss: 1.2 | val_loss: 4.106\n",
            [(8, 4.106)],
            [(7, 7.9), (8, 7.1), (9, 1.2)],
        ),
        (  # in colours, and with a stray line as another trainer prints it
            "\x1b[32mstep:1/2 train_loss:\x1b[0m9.0 t\n\x1b[32mstep:2/2 train_loss:8.0\x1b[0m\nbest so far s:5 tel:1.0\n",
            None,
            [(1, 9.0), (2, 8.0)],
        ),
    ],
    ids=["modded-nanogpt", "llm.c", "LitGPT", "torchtune", "NeMo", "colours"],
)
def test_other_trainers_that_print_a_step_and_a_loss_on_one_line_are_read_as_nanogpt_is(
    text, validation, training, tmp_path
):
    path = logs.written(tmp_path / "run.txt", text)
    losses = {"train loss": training} if validation is None else {"val loss": validation, "train loss": training}
    assert dict(read("nanogpt", path).losses) == losses
    file = LogFile(path=path, content=path.read_bytes())
    assert [name for name in FORMATS.names() if FORMATS.load(name).recognises(file)] == ["nanogpt"]


@pytest.mark.parametrize("byte", [3, 9, 100, 130, len(EVENTS) - 6])
def test_an_event_file_with_a_flipped_bit_is_refused(byte, tmp_path):
    damaged = bytearray(EVENTS)
    damaged[byte] ^= 4
    with pytest.raises(ValueError, match=r"the record at byte \d+ fails its checksum: the file is damaged"):
        read("tensorboard", logs.written(tmp_path / "events", bytes(damaged)))


def test_a_torn_event_file_ends_before_its_last_record(tmp_path):
    found = read("tensorboard", logs.written(tmp_path / "events", EVENTS[:-9]))
    assert found.losses["eval/loss"] == [(0, 4.0), (50, 3.5)]
    assert found.notes == (f"{tmp_path / 'events'}: the last record is torn and left out",)


def test_wandb_s_own_file_is_read_over_the_ends_of_blocks_with_the_seed_of_its_config(tmp_path):
    path = logs.wandb_binary(tmp_path, 3.0, 17)
    assert path.stat().st_size > 3 * 2**15
    found = read("wandb", path)
    assert found.seed == "17"
    assert [loss for _, loss in found.losses["val/loss"]] == logs.course(3.0)
    assert [step for step, _ in found.losses["val/loss"]] == list(logs.STEPS)  # not the _step of each call
    whole = path.read_bytes()
    torn = read("wandb", logs.written(path, whole[:-50]))
    assert len(torn.losses["val/loss"]) == len(logs.STEPS) - 1
    assert "torn" in torn.notes[0]
    damaged = bytearray(whole)
    damaged[40_000] ^= 1
    with pytest.raises(ValueError, match=r"a record fails its checksum after byte \d+: sync the run \(wandb sync\)"):
        read("wandb", logs.written(path, bytes(damaged)))


def test_a_summary_of_wandb_has_one_loss_of_each_name(tmp_path):
    path = logs.written(tmp_path / "wandb-summary.json", json.dumps({"val/loss": 3.1, "_step": 7, "_wandb": {"x": 1}}))
    found = read("wandb", path)
    assert (dict(found.losses), found.whole) == ({"val/loss": [(7, 3.1)]}, False)


def test_what_wandb_s_page_exports_of_one_run_is_a_log(tmp_path):
    text = '"Step","fp8-seed3 - val/loss","fp8-seed3 - val/loss__MIN","fp8-seed3 - _step"\n0,4.0,3.9,0\n10,3.0,2.9,10\n'
    assert dict(read("csv", logs.written(tmp_path / "x.csv", text)).losses) == {"val/loss": [(0, 4.0), (10, 3.0)]}
    calls = "Step,a - val/loss,a - train/global_step\n1,4.0,50\n3,3.0,100\n"  # of its log function, which Step counts
    assert dict(read("csv", logs.written(tmp_path / "z.csv", calls)).losses) == {"val/loss": [(50, 4.0), (100, 3.0)]}
    two = logs.written(tmp_path / "y.csv", "Step,a - val/loss,b - val/loss\n0,4,4\n")
    assert not FORMATS.load("csv").recognises(LogFile(path=two, content=two.read_bytes()))


@pytest.mark.parametrize(("text", "value"), [('"NaN"', "nan"), ("NaN", "nan"), ('"Infinity"', "inf")])
def test_what_is_not_finite_is_a_loss_in_wandb(text, value, tmp_path):
    path = logs.written(tmp_path / "wandb-history.jsonl", '{"_step":0,"loss":2}\n{"_step":1,"loss":' + text + "}\n")
    assert str(read("wandb", path).losses["loss"][1][1]) == value


@pytest.mark.parametrize(
    ("name", "torn"),
    [
        ("nanogpt", "step 110: train loss 2.9, val loss 3.0"),
        ("torchtitan", "titan - root - INFO - step: 110  loss: 3.0"),
        ("megatron", " validation loss at iteration 110 | lm loss value: 3.0000"),
        ("wandb", '{"_step": 11, "iter": 110, "val/lo'),
        *(("csv", f"11,11,110,{cells}") for cells in ("3.0001,2.5", "3.0001,2.", "3.0001,na", "3.0")),
    ],
)
def test_a_torn_last_line_is_no_loss(name, torn, tmp_path):
    write, place, *losses = WRITERS[name]
    path = write(tmp_path / place, 3.0)
    path.write_bytes(path.read_bytes() + torn.encode())
    found = read(name, path)
    assert {len(found.losses[loss]) for loss in losses} == {len(logs.STEPS)}
    told = f"{path}: the last line is torn and left out"
    assert found.notes == (
        () if name in ("torchtitan", "megatron") else (told,)
    )  # whose losses are no line's last word


@pytest.mark.parametrize("name", ["nanogpt", "torchtitan", "megatron", "wandb", "csv"])
def test_a_whole_last_line_counts_without_its_end(name, tmp_path):
    write, place, validation, _ = WRITERS[name]
    path = write(tmp_path / place, 3.0)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert read(name, path).losses[validation][-1][0] == 100


@pytest.mark.parametrize(("last", "counts"), [("nan", True), ("9.1234", True), ("9.123", False)])
def test_a_last_loss_that_is_shorter_than_others_is_torn_only_where_decimals_are_missing(last, counts, tmp_path):
    lines = ["step 0: train loss 10.9, val loss 10.9123\n", f"step 1: train loss 9.1, val loss {last}"]
    found = read("nanogpt", logs.written(tmp_path / "x.log", "".join(lines)))
    assert len(found.losses["val loss"]) == 1 + counts
    assert bool(found.notes) != counts


def test_what_a_launcher_writes_before_each_line_is_no_matter(tmp_path):
    for name in ("nanogpt", "torchtitan", "megatron"):
        write, _, validation, training = WRITERS[name]
        path = write(tmp_path / name, 3.0)
        plain = read(name, path).losses
        path.write_text("".join(f"0: [2025-09-11 14:08] {line}" for line in path.read_text().splitlines(keepends=True)))
        assert read(name, path).losses == plain != {validation: [], training: []}


def test_nan_is_a_loss_in_every_console_log(tmp_path):
    lines = {
        "nanogpt": "step 1: train loss nan, val loss nan\n",
        "torchtitan": "step:  1  loss:     nan  grad_norm:     nan  memory: 1GiB\nvalidate step: 1  loss: nan  memory: 1\n",
        "megatron": " iteration 1/ 9 | lm loss: NAN | x\n validation loss at iteration 1 | lm loss value: NAN | \n",
    }
    for name, text in lines.items():
        found = read(name, logs.written(tmp_path / name, text))
        assert str(found.losses[WRITERS[name][2]][0][1]) == "nan"


def test_of_the_trainer_s_states_the_one_that_came_furthest_counts(tmp_path):
    run_files = FORMATS.load("huggingface").run_files
    for step in (90, 100, 20):
        history = [{"step": at, "eval_loss": at / 10} for at in range(0, step + 1, 10)]
        logs.written(tmp_path / f"checkpoint-{step}" / "trainer_state.json", json.dumps({"log_history": history}))
    assert [path.parent.name for path in run_files(tmp_path)] == ["checkpoint-100"]
    logs.written(tmp_path / "trainer_state.json", json.dumps({"log_history": [{"step": 0, "eval_loss": 9}]}))
    assert read("huggingface", *run_files(tmp_path)).losses["eval_loss"][-1] == (100, 10)


DEEP = '{"log_history": ' + 100_000 * "[" + "\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *((name, DEEP, "nested too deeply") for name in ("huggingface", "wandb")),
        ("huggingface", '{"log_history": [', "is not a complete JSON file"),
        ("huggingface", '{"best_metric": 1}', "has no log_history"),
        ("wandb", '{"loss": 1}\nnot JSON\n{"loss": 2}\n', "line 2: not JSON"),
        ("csv", "step,loss\n0,4\n5,about 3\n", "line 3: 'about 3' is not a number"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(name, content, message, tmp_path):
    path = Path(logs.written(tmp_path / "log", content))
    with pytest.raises(ValueError, match=message):
        read(name, path)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ('{"step": null, "loss": 3.0}', (0, 3.0)),
        ('{"step": [1], "loss": 3.0}', (0, 3.0)),
        ('{"step": 1, "loss": 1' + 400 * "0" + "}", (1, math.inf)),
        ('{"step": 1, "loss": -1' + 400 * "0" + "}", (1, -math.inf)),
    ],
)
def test_numbers_of_json_that_are_none_or_too_large(row, expected, tmp_path):
    path = logs.written(tmp_path / "trainer_state.json", f'{{"log_history": [{row}]}}')
    assert read("huggingface", path).losses == {"loss": [expected]}


def test_a_history_of_json_lines_is_told_by_what_it_holds(tmp_path):
    rows = ['{"_step": 0, "gpu": 1}', '{"_step": 1, "note": "a\u2028b", "val/loss": 3.0}']
    path = logs.written(tmp_path / "metrics.jsonl", "\n".join(rows) + "\n")
    file = LogFile(path=path, content=path.read_bytes())
    assert [name for name in FORMATS.names() if FORMATS.load(name).recognises(file)] == ["wandb"]
    assert read("wandb", path).losses["val/loss"] == [(1, 3.0)]
    corpus = LogFile(path=path, content=b'{"text": "a step, a loss"}\n')
    assert not FORMATS.load("wandb").recognises(corpus)


def megatron_line(step, losses, skipped=0):
    """As training_log prints it: a loss that is NaN is left out."""
    return (
        f" [2025-09-11 14:08:38] iteration {step:8d}/     100 | consumed samples: 2560 | {losses} loss scale: 1.0 | "
        f"grad norm: 1.234 | number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |\n"
    )


def test_megatron_prints_no_nan_and_a_0_for_steps_that_were_skipped(tmp_path):
    lines = [megatron_line(n, f"lm loss: {loss} |") for n, loss in ((10, "3.000000E+00"), (20, "0.000000E+00"))]
    lines += [megatron_line(30, "lm loss: 0.000000E+00 |", 10), megatron_line(40, "", 10), megatron_line(50, "")]
    found = read("megatron", logs.written(tmp_path / "x", "".join(lines))).losses["lm loss"]
    assert [(step, math.isnan(loss)) for step, loss in found] == [(10, False), (20, False), (50, True)]


@pytest.mark.parametrize("again", [False, True])
def test_megatron_that_stops_at_a_nan_is_told_by_its_exception(again, tmp_path):
    stopped = "AssertionError: Rank 3: found NaN in local forward loss calculation. Device: 3\n"
    lines = [megatron_line(n, "lm loss: 3.000000E+00 |") for n in (10, 20)]
    lines += [stopped, *([lines[1]] if again else [])]
    found = read("megatron", logs.written(tmp_path / "x", "".join(lines))).losses["lm loss"]
    assert math.isnan(found[-1][1]) is not again
    assert found[-1][0] == (20 if again else 21)


def test_megatron_s_several_validation_sets_are_a_loss_each(tmp_path):
    lines = [megatron_line(10, "lm loss: 3.000000E+00 |")]
    lines += [
        f" validation-{n} loss at iteration 10 | lm loss value: {3 + n}.5E+00 | lm loss PPL: 1 | \n" for n in (0, 1)
    ]
    found = read("megatron", logs.written(tmp_path / "x", "".join(lines))).losses
    assert found == {"validation-0 loss": [(10, 3.5)], "validation-1 loss": [(10, 4.5)], "lm loss": [(10, 3.0)]}
