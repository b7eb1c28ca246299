"""Branches of a study: what they share with the trunk, that each goes on exactly from its end, and a trunk that is lost.

And trainings that end in bf16, which go on from their own first part in the same way.
"""

import dataclasses
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from convergence_runs import arm_trial

from te_bench.experiments import curve, trial_model, trunks
from te_bench.experiments.checks import training_step, what_ran
from te_bench.experiments.instruments import profiling
from te_bench.experiments.measurement import CheckFailed, Context, Diverged, Measurement
from te_bench.experiments.problems import trunk_of
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import training
from te_bench.training import checkpoints, resume
from te_bench.training import corpus as corpora

pytestmark = pytest.mark.usefixtures("one_thread")  # tiny models, for which a second one waits
BRANCH_AT = 5
TINY = {"model": "tiny", "batch": 4, "block": 8, "vocab": 256, "padded_vocab": 256, "tokenizer": "bytes"}
TINY |= {"learning_rate": 3e-3, "min_learning_rate": 0.0, "warmup": 2, "steps": 9, "eval_every": 3, "eval_tokens": 64}
TINY |= {"evaluate": "both", "order": "once"}
FUSED = {"head": "chunked", "optimizer": "reference", "blocks": "fused"}


@pytest.fixture
def arm(tmp_path: Path) -> Any:
    """arm("recipe", "delayed_scaling") of a study that branches, or does not: branch_at=None."""
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 200)
    corpus = corpora.prepare(f"text:{text}", "bytes", cache=tmp_path / "cache")

    def of(kind: str, recipe: str | None = None, **problem: Any) -> Trial:
        own = {"aa": {"perturb_ulp": 1}, "broken": {"fault": "flushed_gradients"}}.get(kind, {})
        problem = {
            **TINY,
            "data": "text:text.txt",
            "corpus": corpus.key,
            "branch_at": BRANCH_AT,
            "arm": kind,
            **own,
            **problem,
        }
        return Trial(
            workload="training",
            device="cpu",
            problem={name: value for name, value in problem.items() if value is not None},
            attention="math" if problem.get("dropout") else "flash",
            precision="bf16" if recipe is None else "fp8",
            recipe=recipe,
            protocol="curve",
            seed=3,
        )

    return of


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(cache=tmp_path / "cache", trunks=tmp_path / "trunks")


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings without their checks, which are most of the time of so short ones."""
    monkeypatch.setattr(training_step, "begin", lambda trial, *_: (trial_model.step_of(trial), {}))
    monkeypatch.setattr(
        profiling, "kernels_seen", lambda call, device: [call() for _ in range(profiling.LOOKS[device])]
    )

    def seen(trial: Trial, seen: Any, measurement: Measurement, asked: Any) -> Measurement:
        return dataclasses.replace(measurement, work={**measurement.work, "ran": {}})

    monkeypatch.setattr(what_ran, "require", seen)


@pytest.mark.usefixtures("plain_heads", "unchecked")
@pytest.mark.parametrize(
    "problem",
    [{}, {"dropout": 0.2, "accumulate": 2}, {**FUSED, "accumulate": 2}, {"optimizer": "reference"}],
    ids=["modules", "dropout, micro-batches", "fused, micro-batches", "table"],
)
def test_a_control_that_branches_ends_where_one_that_does_not_ends(arm: Any, context: Context, problem: Any) -> None:
    """Bit for bit, whether it trained the trunk itself or found it: weights, moments, rate, batches and masks go on."""
    straight = training.run(arm("control", branch_at=None, **problem), context).samples
    for trained in (True, False):
        found = training.run(arm("control", **problem), context)
        assert found.work["trunk"]["trained"] is trained
        assert found.samples["step"] == list(range(BRANCH_AT, 9))
        for name in ("loss", "grad_norm"):
            assert found.samples[f"trunk_{name}"] + found.samples[name] == straight[name]
        assert found.samples["trunk_val_step"] + found.samples["val_step"] == straight["val_step"] == [3, 6, 9]
        assert found.samples["trunk_val_loss"] + found.samples["val_loss"] == straight["val_loss"]


@pytest.mark.slow
@pytest.mark.usefixtures("plain_heads", "unchecked")
@pytest.mark.parametrize("problem", [{}, {"dropout": 0.5}, FUSED], ids=["modules", "dropout", "fused"])
def test_all_arms_go_on_from_one_trunk(arm: Any, context: Context, problem: Any) -> None:
    arms = [arm("control", **problem), arm("aa", **problem)]
    arms += [
        arm("recipe", name, **problem) for name in ("delayed_scaling", "float8_current_scaling", "rowwise_scaling")
    ]
    arms += [arm("broken", "float8_current_scaling", **problem)]
    arms += [arm("recipe", "float8_current_scaling", **{**problem, "head": "fp8"})] if "head" in problem else []
    assert all(trunk_of(one) == trunk_of(arms[0]) for one in arms)
    found = [training.run(one, context) for one in arms]
    assert [one.work["trunk"]["trained"] for one in found] == [True, *[False] * (len(arms) - 1)]
    assert len({one.work["trunk"]["sha256"] for one in found}) == 1
    for one in found:
        assert {name: one.samples[name] for name in one.samples if name.startswith("trunk_")} == {
            name: found[0].samples[name] for name in found[0].samples if name.startswith("trunk_")
        }
    first = [one.samples["loss"][0] for one in found]
    assert first == pytest.approx([first[0]] * len(first), abs=0.02)  # of the same weights, batch and masks
    ends = [tuple(one.samples["loss"][1:]) for one in found]
    assert len(set(ends)) == len(ends)  # A/A's, too, whose weights are moved where it begins


@pytest.mark.usefixtures("plain_heads")
@pytest.mark.parametrize("problem", [{}, FUSED], ids=["modules", "fused"])
def test_the_scales_of_a_branch_begin_with_it(arm, context, problem, monkeypatch):
    """Whatever the check has passed through the model before, whose weights were those of the beginning."""
    one = arm("recipe", "delayed_scaling", **problem)
    checked = training.run(one, context).samples
    monkeypatch.setattr(training_step, "begin", lambda trial, *_: (trial_model.step_of(trial), {}))
    assert training.run(one, context).samples["loss"] == checked["loss"]


@pytest.mark.usefixtures("plain_heads", "unchecked")
@pytest.mark.parametrize(
    "problem",
    [{}, {"dropout": 0.2, "accumulate": 2}, {**FUSED, "accumulate": 2}],
    ids=["modules", "dropout, micro-batches", "fused, micro-batches"],
)
def test_bf16_that_ends_in_bf16_ends_where_it_would_have_ended(arm: Any, context: Context, problem: Any) -> None:
    straight = training.run(arm("control", branch_at=None, **problem), context).samples
    found = training.run(arm("control", branch_at=None, bf16_from=5, **problem), context).samples
    for name in ("step", "loss", "grad_norm", "val_step", "val_loss"):
        assert found[name] == straight[name]


@pytest.mark.usefixtures("plain_heads")
@pytest.mark.parametrize(  # either way of computing, and scales that are kept or not
    ("problem", "recipe"),
    [({}, "delayed_scaling"), (FUSED, "float8_current_scaling"), ({**FUSED, "head": "fp8"}, "delayed_scaling")],
    ids=["modules", "fused", "fused, FP8 head"],
)
def test_fp8_that_ends_in_bf16_leaves_its_own_way_there(arm, context, problem, recipe, tmp_path):
    whole = training.run(arm("recipe", recipe, branch_at=None, **problem), context).samples
    saves = dataclasses.replace(context, checkpoints=tmp_path)
    one = arm("recipe", recipe, branch_at=None, bf16_from=5, **problem)
    found = training.run(one, saves)
    samples, ran, ended = found.samples, found.work["ran"], found.work["ended"]["ran"]
    assert samples["step"] == whole["step"]
    assert samples["loss"][:5] == whole["loss"][:5]
    assert all(here != there for here, there in zip(samples["loss"][5:], whole["loss"][5:], strict=True))
    assert samples["loss"] == pytest.approx(whole["loss"], abs=0.02)
    assert samples["val_loss_native"] == [samples["val_loss"][-1]]  # it ends in the precision that judges it
    assert ran["gemm_fp8"] > 0 == ended["gemm_fp8"]
    assert ended["gemm_half"] > ran["gemm_half"]
    saved = checkpoints.load(tmp_path / f"{one.id}.pt")
    assert saved.recipe is None


@pytest.mark.usefixtures("plain_heads", "unchecked")
@pytest.mark.parametrize(("bf16_from", "seconds"), [(None, 7), (4, 7), (5, 7), (6, 7), (8, 6)])
def test_the_clock_stands_still_for_the_change_and_counts_the_steps_after_it(
    arm, context, monkeypatch, bf16_from, seconds
):
    """Of nine steps the first two are not on it, nor is a last one that alone follows the change."""
    now, train, build = [0.0], training.train, trial_model.step_of

    def second_each(*given: Any) -> Any:
        for found in train(*given):
            now[0] += 1
            yield found

    def slowly(*given: Any) -> Any:
        now[0] += 1000
        return build(*given)

    monkeypatch.setattr(curve, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(training, "train", second_each)
    monkeypatch.setattr(trial_model, "step_of", slowly)
    one = arm("recipe", "float8_current_scaling", branch_at=None, bf16_from=bf16_from)
    assert training.run(one, context).samples["time_s"][-1] == seconds


def moments_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    right = resume.load

    def load(step: Any, *given: Any, **how: Any) -> int:
        number = right(step, *given, **how)
        for state in step.optimizer.state.values():
            state["exp_avg"].zero_()
        return number

    monkeypatch.setattr(resume, "load", load)


def weights_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    right = resume.load

    def load(step: Any, *given: Any, **how: Any) -> int:
        number = right(step, *given, **how)
        with torch.no_grad():
            next(step.model.parameters()).mul_(1.001)
        return number

    monkeypatch.setattr(resume, "load", load)


def still_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        training, "end_of", lambda one: dataclasses.replace(one, problem={**one.problem, "bf16_from": None})
    )


def a_step_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    right = training.train
    monkeypatch.setattr(training, "train", lambda step, at, where, first: right(step, at, where, first and first + 1))


def the_schedule_again(monkeypatch: pytest.MonkeyPatch) -> None:
    right = training.train

    def train(step: Any, at: Any, where: Any, first: int) -> Any:
        return right(step, at, lambda number: where(number) and where(number - first), first)

    monkeypatch.setattr(training, "train", train)


GOES_ON = "^step 5 does not go on in bf16 from the weights and moments before it$"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (moments_lost, GOES_ON),
        (weights_moved, GOES_ON),
        (still_in_fp8, GOES_ON),
        (a_step_lost, "^step 6 came after 5 steps from 0 on$"),
        (the_schedule_again, r"^step 5 trained at the learning rate 0\.003: 0\.00123953 expected$"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_bf16_that_does_not_go_on_where_fp8_ended_fails(arm, context, monkeypatch, fault, reason):
    fault(monkeypatch)
    with pytest.raises(CheckFailed, match=reason):
        training.run(arm("recipe", "delayed_scaling", branch_at=None, bf16_from=5), context)


@pytest.mark.usefixtures("unchecked")
def test_weights_are_moved_once_where_the_last_part_has_its_own_step(arm: Any, context: Context) -> None:
    straight = training.run(arm("aa", branch_at=None), context).samples
    assert training.run(arm("aa", branch_at=None, bf16_from=5), context).samples["loss"] == straight["loss"]


@pytest.mark.usefixtures("unchecked")
def test_one_that_diverges_in_fp8_never_comes_to_bf16(arm, context, monkeypatch):
    monkeypatch.setattr(resume, "save", lambda *_: pytest.fail("it went on"))
    one = arm("recipe", "delayed_scaling", branch_at=None, bf16_from=5, learning_rate=1e30, grad_clip=0.0)
    with pytest.raises(Diverged, match=r"loss is (nan|inf) (at|after) step [0-4]$"):
        training.run(one, context)


@pytest.mark.usefixtures("unchecked")
def test_one_whose_state_the_disk_has_no_room_for_is_not_trained(arm, context, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**4))
    monkeypatch.setattr(training, "train", lambda *_: pytest.fail("it was trained"))
    with pytest.raises(OSError, match=rf"^the state of step 5 takes \d+ MB or more in {tempfile.gettempdir()}"):
        training.run(arm("recipe", "delayed_scaling", branch_at=None, bf16_from=5), context)


def killed_at_its_change(one: Trial, context: Context) -> None:
    resume.load = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    training.run(one, context)


@pytest.mark.usefixtures("unchecked")
def test_one_that_is_killed_at_its_change_leaves_no_state_behind(arm, context, monkeypatch, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    one = arm("recipe", "float8_current_scaling", branch_at=None, bf16_from=5)
    child = multiprocessing.get_context("fork").Process(target=killed_at_its_change, args=(one, context))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while list(scratch.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(scratch.iterdir())


@pytest.mark.usefixtures("unchecked")
def test_without_a_folder_each_trains_a_trunk_of_its_own(arm: Any, context: Context) -> None:
    kept, own = (training.run(arm("control"), dataclasses.replace(context, trunks=at)) for at in (context.trunks, None))
    assert own.work["trunk"]["trained"]
    assert own.samples["loss"] == kept.samples["loss"]


@pytest.mark.usefixtures("unchecked")
def test_a_trunk_that_is_lost_is_trained_again_and_said_to_be(arm: Any, context: Context) -> None:
    first = training.run(arm("control"), context).work["trunk"]
    assert context.trunks is not None
    shutil.rmtree(context.trunks)
    again = training.run(arm("aa"), context).work["trunk"]
    assert (first["trained"], again["trained"]) == (True, True)
    assert first["sha256"] == again["sha256"]  # on a CPU; on a GPU the hash tells them apart


@pytest.mark.usefixtures("unchecked")
def test_a_trunk_that_breaks_is_a_divergence_of_bf16_which_is_trained_once(
    arm: Any, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    for kind in (("recipe", "delayed_scaling"), ("control",)):
        with pytest.raises(Diverged, match=r"^the trunk, in bf16: the .*loss is (nan|inf)") as caught:
            training.run(arm(*kind, learning_rate=1e30, grad_clip=0.0), context)
        told.append((str(caught.value), caught.value.measurement.samples))
        monkeypatch.setattr(trunks, "require_room", lambda *_: pytest.fail("it was trained again"))
    assert told[0] == told[1]
    assert told[0][1]["trunk_loss"]
    assert context.trunks is not None
    assert [path.name for path in context.trunks.glob("*/*")] == ["broke.json"]


@pytest.mark.usefixtures("unchecked")
def test_a_trunk_that_the_disk_has_no_room_for_is_not_trained(
    arm: Any, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    monkeypatch.setattr(training, "train", lambda *_: pytest.fail("it was trained"))
    with pytest.raises(OSError, match=r"^the trunk takes \d+ MB or more in .*trunks; 1 MB are free there$"):
        training.run(arm("control"), context)


@pytest.mark.usefixtures("unchecked")
def test_the_peak_of_a_branch_is_that_of_its_training(arm, context, monkeypatch):
    """Going on from the trunk holds weights and moments twice, on a GPU as much as half of a small model's training."""
    once, load = 2**29, resume.load
    straight = training.run(arm("control", branch_at=None), context).samples["peak_rss_bytes"][0]

    def greedy(*given: Any, **how: Any) -> int:
        assert torch.ones(once // 4).sum() > 0
        return load(*given, **how)

    monkeypatch.setattr(resume, "load", greedy)
    branched = training.run(arm("control"), context).samples["peak_rss_bytes"][0]
    assert branched < straight + once / 2


def grown(folder: Path) -> dict[str, list[float]]:
    folder.mkdir(parents=True)
    (folder / "state").write_text("whole")
    return {"loss": [1.0]}


def test_one_that_dies_while_it_writes_leaves_no_half_trunk(tmp_path: Path) -> None:
    control = arm_trial("control", 0)

    def dies(folder: Path) -> Any:
        folder.mkdir(parents=True)
        (folder / "state").write_text("ha")
        raise KeyboardInterrupt

    for _ in range(2):  # a second one finds what the first has left
        with pytest.raises(KeyboardInterrupt):
            trunks.find(control, tmp_path, dies)
        assert not (tmp_path / control.id).exists()
    found = trunks.find(control, tmp_path, grown)
    assert (found.folder / "state").read_text() == "whole"
    assert (found.trained, found.samples) == (True, {"loss": [1.0]})
    assert sorted(path.name for path in tmp_path.iterdir()) == [control.id, f"{control.id}.lock"]


def test_a_trunk_for_which_the_disk_has_no_room_leaves_it_to_the_record_that_says_so(tmp_path: Path) -> None:
    def fills_the_disk(folder: Path) -> Any:
        grown(folder)
        raise OSError("cannot write the checkpoint: no space")

    with pytest.raises(OSError, match=r"^cannot write the checkpoint: no space; [\d,]+ MB are free there$"):
        trunks.find(arm_trial("control", 0), tmp_path, fills_the_disk)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_two_that_want_a_trunk_at_the_same_time_train_it_once(tmp_path: Path) -> None:
    control, times, found = arm_trial("control", 0), [], []

    def slowly(folder: Path) -> Any:
        times.append(time.monotonic())
        time.sleep(0.2)
        return grown(folder)

    def want() -> None:
        found.append(trunks.find(control, tmp_path, slowly))

    threads = [threading.Thread(target=want) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(times) == 1
    assert sorted(one.trained for one in found) == [False, False, True]
    assert all(one.took_s >= 0.1 for one in found)
    other = trunks.find(arm_trial("control", 1), tmp_path, grown)
    assert other.folder != found[0].folder


@pytest.mark.gpu
@pytest.mark.usefixtures("unchecked")
def test_captured_steps_go_on_from_a_trunk_of_captured_steps(arm: Any, context: Context) -> None:
    """Into the very tensors that the graph reads, and with the masks that an unbranched run would draw."""

    def on_a_gpu(one: Trial) -> Trial:
        return dataclasses.replace(one, device="cuda", mode="cudagraph", attention="flash")

    asked = {"block": 64, "dropout": 0.1, "steps": 20, "branch_at": 10}
    straight = training.run(on_a_gpu(arm("control", **{**asked, "branch_at": None})), context).samples
    arms = [arm("control", **asked), arm("aa", **asked), arm("recipe", "delayed_scaling", **asked)]
    found = [training.run(on_a_gpu(one), context) for one in arms]
    assert len({one.work["trunk"]["sha256"] for one in found}) == 1
    assert found[0].samples["trunk_loss"] + found[0].samples["loss"] == pytest.approx(straight["loss"], rel=1e-3)
    ends = training.run(on_a_gpu(arm("control", **{**asked, "branch_at": None, "bf16_from": 10})), context).samples
    assert ends["loss"] == pytest.approx(straight["loss"], rel=1e-3)
    first = [one.samples["loss"][0] for one in found]
    assert first == pytest.approx([first[0]] * len(first), abs=0.02)
