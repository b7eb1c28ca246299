"""From a suite's name to trials in order: names are checked, rivals interleave, options that nobody heeds are refused."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from te_bench.experiments import plan
from te_bench.experiments.spec import Options, Trial
from te_bench.reports.analysis.naming import plain_names

STEP: dict[str, Any] = {"model": "tiny", "batch": 2, "block": 64, "vocab": 250, "padded_vocab": 256}
TRIAL = Trial(workload="train_step", device="cpu", problem=STEP, attention="manual")
RIVALS = ("manual", "math", "flash", "cudnn")


def rivals(number: int, seed: int) -> list[Trial]:
    return [dataclasses.replace(TRIAL, attention=name, seed=seed) for name in RIVALS[:number]]


@given(st.integers(1, 4), st.integers(1, 6), st.randoms())
def test_rivals_alternate_forwards_and_backwards(number: int, seeds: int, random: object) -> None:
    """ABBA: in each round every rival once; each round is the one before it, reversed."""
    order = plan.interleave([trial for seed in range(seeds) for trial in rivals(number, seed)])
    rounds = [order[i : i + number] for i in range(0, len(order), number)]
    assert [{trial.seed for trial in group} for group in rounds] == [{seed} for seed in range(seeds)]
    names = [[trial.attention for trial in group] for group in rounds]
    assert names[0] == list(RIVALS[:number])
    assert all(after == before[::-1] for before, after in itertools.pairwise(names))


@given(st.lists(st.tuples(st.sampled_from(RIVALS), st.integers(0, 5)), max_size=20))
def test_interleaving_loses_and_repeats_nothing(pairs: list[tuple[str, int]]) -> None:
    trials = [dataclasses.replace(TRIAL, attention=name, seed=seed) for name, seed in pairs]
    order = plan.interleave(trials)
    assert sorted(t.id for t in order) == sorted(t.id for t in trials)
    assert [t.seed for t in order] == sorted(seed for _, seed in pairs)


def test_drift_that_is_linear_in_time_cancels_between_two_rivals() -> None:
    order = plan.interleave([trial for seed in range(4) for trial in rivals(2, seed)])
    when = {name: sum(i for i, t in enumerate(order) if t.attention == name) for name in RIVALS[:2]}
    assert when["manual"] == when["math"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("workload", "train_stp", "unknown workload 'train_stp'. Did you mean train_step"),
        ("attention", "falsh", "unknown attention backend 'falsh'. Did you mean flash"),
        ("precision", "bf61", "unknown precision 'bf61'. Did you mean bf16"),
        ("mode", "compiled", "unknown mode 'compiled'. Did you mean compile"),
        ("protocol", "bench_pi", "unknown protocol 'bench_pi'. Did you mean bench_py"),
        ("recipe", "float8_curent_scaling", "unknown recipe 'float8_curent_scaling'. Did you mean float8_current"),
    ],
)
def test_a_trial_with_an_unknown_name_is_refused_with_the_near_matches(field: str, value: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        plan.check(dataclasses.replace(TRIAL, **{field: value}))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("head", "chunkd", "unknown head 'chunkd'. Did you mean chunked"),
        ("optimizer", "trition", "unknown optimizer 'trition'. Did you mean triton"),
        ("blocks", "fuse", "unknown blocks 'fuse'. Did you mean fused"),
        ("rival", "torchao_rowise", "unknown rival 'torchao_rowise'. Did you mean torchao_rowwise"),
        ("linears", "torchao_rowise", "unknown linears 'torchao_rowise'. Did you mean torchao_rowwise"),
    ],
)
def test_a_head_and_an_optimizer_are_checked_where_a_problem_has_them(setting: str, value: str, message: str) -> None:
    known = {**STEP, "head": "fp8", "optimizer": "reference"}
    plan.check(dataclasses.replace(TRIAL, problem=known))
    with pytest.raises(ValueError) as caught:
        plan.check(dataclasses.replace(TRIAL, problem={**known, setting: value}))
    assert str(caught.value).startswith(message)


PIECE = {"m": 8, "n": 8, "backend": "triton"}


@pytest.mark.parametrize(
    ("workload", "problem", "message"),
    [
        ("gemm", {"m": 8, "n": 8, "k": 8, "dtype": "bf16", "backend": "tritn"}, "backend 'tritn'. Known: torch, gluon"),
        ("gemm", {"m": 8, "n": 8, "k": 8, "dtype": "bf16", "backend": "separate"}, "backend 'separate'. Known: torch"),
        ("linear_cross_entropy", {"n": 8, "d": 8, "vocab": 8, "padded": 8, "head": "chunkd"}, "head 'chunkd'. Did you"),
        ("piece", {**PIECE, "kind": "rmsnrm", "call": "forward"}, "kind 'rmsnrm'. Did you mean rmsnorm"),
        ("piece", {**PIECE, "kind": "rmsnorm", "call": "backward_quantized"}, "call of rmsnorm 'backward_quantized'."),
        (
            "piece",
            {**PIECE, "kind": "gelu", "call": "forward", "backend": "liger"},
            "backend 'liger'. Known: reference",
        ),
    ],
)
def test_who_is_timed_alone_is_checked_too(workload: str, problem: dict[str, Any], message: str) -> None:
    trial = Trial(workload=workload, device="cpu", problem=problem, attention="none", protocol="kernel")
    with pytest.raises(ValueError, match=f"unknown {message}"):
        plan.check(trial)


@pytest.mark.parametrize("key", ["rival", "linears"])
def test_a_rival_and_its_recipe_go_together(key: str) -> None:
    problem = {**STEP, key: "torchao_tensorwise"}
    peer = dataclasses.replace(TRIAL, precision="fp8", recipe="float8_current_scaling", problem=problem)
    plan.check(peer)
    with pytest.raises(ValueError, match="torchao_tensorwise is the recipe float8_current_scaling, not rowwise"):
        plan.check(dataclasses.replace(peer, recipe="rowwise_scaling"))
    with pytest.raises(ValueError, match="torchao_tensorwise has its own blocks or head; leave out te-bench's"):
        plan.check(dataclasses.replace(peer, problem={**problem, "blocks": "fused"}))


def test_fp8_and_a_recipe_go_together() -> None:
    fp8 = dataclasses.replace(TRIAL, precision="fp8", recipe="float8_current_scaling")
    plan.check(fp8)
    with pytest.raises(ValueError, match=r"fp8 needs a recipe\. Known: .*float8_current_scaling"):
        plan.check(dataclasses.replace(fp8, recipe=None))
    with pytest.raises(ValueError, match="the recipe float8_current_scaling is for fp8; leave it out"):
        plan.check(dataclasses.replace(fp8, precision="bf16"))


@pytest.mark.parametrize(
    ("suite", "options", "message"),
    [
        ("quik", {}, "unknown suite 'quik'. Did you mean quick?"),
        ("quick", {"device": "cdua"}, "unknown device 'cdua'. Did you mean cuda"),
        ("quick", {"seeds": 0}, "--seeds 0: give 1 or more"),
        ("quick", {"seeds": -1}, "--seeds -1: give 1 or more"),
        ("convergence", {"seeds": 10**9}, "--seeds 1000000000: give at most 1000"),
        ("quick", {"batch": 4}, "--batch: the suite quick chooses its batches itself; leave it out"),
        ("quick", {"budget_s": 5.0}, "--budget: the suite quick has no time-budget trial"),
        ("nanogpt", {"data": {"": "random"}}, "--data: the suite nanogpt trains on no data set"),
        ("quick", {"data": {"gpt3": "random", "": "random"}}, "unknown model of --data 'gpt3'. Known: tiny."),
        ("quick", {"data": {"": "stdlb"}}, "unknown data set 'stdlb'"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, suite: str, options: dict[str, object], message: str) -> None:
    said = {"device": "cpu", "cache": tmp_path, "data": {"": "random"}, **options}
    with pytest.raises(ValueError) as caught:
        plan.resolve(suite, Options(**said))
    assert str(caught.value).startswith(message)


def test_only_chooses_by_one_pattern_or_several_and_keeps_the_baseline() -> None:
    options = Options(device="cpu")
    whole = plan.resolve("nanogpt", options)
    some = plan.resolve("nanogpt", options, only="*/flash/*/s0")
    assert {t.attention for t in some.trials} == {"flash"}
    assert {t.seed for t in some.trials} == {0}
    assert {t.id for t in some.trials} < {t.id for t in whole.trials}
    assert some.baseline == whole.baseline == next(t.cell for t in whole.trials if t.attention == "manual")
    some = plan.resolve("nanogpt", options, only="*/flash/*/s0, */manual/bf16/*/s1")
    assert {(t.attention, t.seed) for t in some.trials} == {("flash", 0), ("manual", 1)}
    with pytest.raises(ValueError, match=r"--only 'flush' matches no trial of nanogpt") as caught:
        plan.resolve("nanogpt", options, only="flush")
    assert "train_step/gpt2-b12-t1024-V50257/manual/bf16/eager/s0" in str(caught.value)
    assert str(caught.value).endswith("These are a CPU's; --device cuda plans a GPU's.")
    with pytest.raises(ValueError, match=r"--only 'flush' matches no trial of nanogpt") as caught:
        plan.resolve("nanogpt", Options(device="cuda"), only="flush")
    assert "CPU" not in str(caught.value)


def test_steps_are_divided_where_it_is_asked_for_and_only_there() -> None:
    """Trials of another kind stay as they are, the baseline is the same step, and no id of an undivided trial changes."""
    usual = plan.resolve("speed", Options(device="cpu"))
    divided = plan.resolve("speed", Options(device="cpu", gpus_per_trial=2, parallel="ddp"))
    steps = {trial.id for trial in usual.trials if trial.workload == "train_step"}
    assert steps
    assert all("world" not in trial.problem for trial in usual.trials)
    own = ({k: v for k, v in t.problem.items() if k not in ("parallel", "world")} for t in divided.trials)
    undone = [dataclasses.replace(t, problem=p) for t, p in zip(divided.trials, own, strict=True)]
    assert [trial.id for trial in undone] == [trial.id for trial in usual.trials]
    assert all(t.problem["world"] == 2 and "ddp-x2" in t.name for t in divided.trials if t.workload == "train_step")
    assert [t.id for t in divided.trials if t.workload != "train_step"] == [
        t.id for t in usual.trials if t.id not in steps
    ]
    assert divided.baseline == divided.trials[0].cell


def test_a_gather_in_fp8_is_of_steps_in_fp8() -> None:
    options = Options(device="cpu", gpus_per_trial=2, parallel="fsdp2", gather="fp8")
    trials = plan.resolve("fp8", options).trials
    assert {t.precision for t in trials} == {"bf16", "fp8"}
    assert all((t.problem.get("gather") == "fp8") is (t.precision == "fp8") for t in trials)
    assert all("fsdp2-x2-gather-fp8" in t.name for t in trials if t.precision == "fp8")
    with pytest.raises(ValueError, match="--gather: the suite convergence has no step in FP8 at a fixed batch"):
        plan.resolve("convergence", options)


def test_sequence_parallelism_is_of_steps_whose_layers_ranks_share() -> None:
    """In the suite that has such steps of its own accord, too: te-bench's, for other projects' always have it."""
    asked = Options(device="cpu", gpus_per_trial=2, parallel="tp", sequence_parallel=True)
    steps = [t for t in plan.resolve("fp8", asked).trials if t.workload == "train_step"]
    assert all(t.problem["sequence_parallel"] and "tp-x2-sp" in t.name for t in steps)
    for trial in plan.resolve("scaling", Options(device="cpu", sequence_parallel=True)).trials:
        shares = trial.problem.get("parallel") == "tp" and "rival" not in trial.problem
        assert ("sequence_parallel" in trial.problem) is shares
    divided = Options(device="cpu", gpus_per_trial=2, parallel="ddp", sequence_parallel=True)
    with pytest.raises(
        ValueError, match="--sequence-parallel: the suite fp8 has no step whose ranks share layers; give"
    ):
        plan.resolve("fp8", divided)


def test_an_overlap_is_of_sequence_parallelism_where_the_record_can_prove_it() -> None:
    divided: dict[str, Any] = {"device": "cpu", "gpus_per_trial": 2, "parallel": "tp", "overlap": "symmetric"}
    asked = Options(**divided, sequence_parallel=True)
    steps = [t for t in plan.resolve("fp8", asked).trials if t.workload == "train_step"]
    assert all(t.problem["overlap"] == "symmetric" and "tp-x2-sp-overlap-symmetric" in t.name for t in steps)
    scaling = Options(device="cpu", sequence_parallel=True, overlap="symmetric")
    for trial in plan.resolve("scaling", scaling).trials:
        assert ("overlap" in trial.problem) is ("sequence_parallel" in trial.problem)
    with pytest.raises(ValueError, match="--overlap symmetric goes with --sequence-parallel, whose collectives it"):
        plan.resolve("fp8", Options(**divided))
    with pytest.raises(ValueError, match=r"unknown --overlap 'symetric'. Did you mean symmetric\?"):
        plan.resolve("fp8", dataclasses.replace(asked, overlap="symetric"))
    with pytest.raises(ValueError, match="--overlap: the suite convergence has no step at a fixed batch; leave it out"):
        plan.resolve("convergence", asked)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"parallel": "tp", "world": 2, "overlap": "symmetric"},
            "overlap applies to a train_step or scaling with sequence_parallel",
        ),
        ({"parallel": "ddp"}, "a step over ranks needs a mode, parallel, and 2 ranks or more, world"),
        ({"world": 2}, "a step over ranks needs a mode"),
        ({"parallel": "ddp", "world": 1}, "a step over ranks needs a mode"),
        ({"parallel": "dpd", "world": 2}, "unknown mode of parallelism 'dpd'. Did you mean ddp"),
        ({"parallel": "fsdp2", "world": 2, "gather": "fp8"}, "gather fp8 applies to a train_step in FP8 over ranks by"),
        ({"parallel": "hsdp", "world": 4}, "shard, the ranks of a group, goes with fsdp2.tp and hsdp"),
        (
            {"parallel": "ddp", "world": 2, "shard": 2},
            "shard, the ranks of a group, goes with fsdp2.tp and hsdp, and only",
        ),
        ({"parallel": "ddp", "world": 2, "sequence_parallel": True}, "sequence_parallel applies to fsdp2.tp and tp"),
        (
            {"parallel": "tp", "world": 3, "sequence_parallel": True},
            "sequences of 64 tokens do not divide into 3 ranks: give other --tokens, or leave --sequence-parallel out",
        ),
        ({"parallel": "ddp", "world": 4}, "a batch of 2 does not divide into 4 ranks: give --batch 4"),
    ],
)
def test_ranks_that_cannot_be_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan.check(dataclasses.replace(TRIAL, problem={**STEP, **more}))


def test_a_training_over_ranks_has_steps_and_a_batch() -> None:
    """Ranks that read clocks of their own would not stop at the same step."""
    only = "over ranks a training needs a number of steps and a batch: leave --gpus-per-trial out, or choose conv"
    with pytest.raises(ValueError, match=only):
        plan.resolve("curves", Options(device="cpu", gpus_per_trial=2, parallel="ddp"))


@pytest.mark.parametrize("suite", ["fp8", "scaling", "memory", "curves"])
def test_checkpointing_is_a_setting_of_every_suites_steps(suite: str) -> None:
    plain, again = (plan.resolve(suite, Options(device="cpu", model="tiny", checkpointing=on)) for on in (None, True))
    checkpointed = [dict(t.problem) | {"checkpointing": "blocks"} for t in plain.trials]
    assert checkpointed == [dict(t.problem) for t in again.trials]
    assert "checkpointing" not in plain.trials[0].problem
    assert again.baseline in {trial.cell for trial in again.trials}


def test_rivals_have_weights_and_states_in_the_dtypes_that_torchs_optimizer_has() -> None:
    """A rival of float32 beside te-bench's bf16 would be no rival; its states have the weights' dtype, whatever is asked."""
    asked: dict[str, Any] = {"device": "cuda", "model": "llama3-8b", "batch": 1, "tokens": 8192, "seeds": 1}
    found = plan.resolve("speed", Options(**asked, weights="bf16", states="fp8"))
    steps = [t for t in found.trials if t.workload == "train_step"]
    kept = {
        ("optimizer" in t.problem, "rival" in t.problem): (t.problem["weights"], t.problem["states"]) for t in steps
    }
    assert kept == {(True, False): ("bf16", "fp8"), (False, True): ("bf16", "bf16"), (False, False): ("bf16", "bf16")}
    assert found.baseline in {t.cell for t in steps}
    names = plain_names({t.cell: t for t in steps})
    said = {tuple(w for w in name.split(", ") if "weights" in w or "states" in w) for name in names.values()}
    assert said == {("bf16 weights and states",), ("bf16 weights", "FP8 states")}
    states = plan.resolve("speed", Options(**asked, states="bf16"))
    assert {t.problem.get("states") for t in states.trials if "optimizer" in t.problem} == {"bf16"}
    assert not any({"weights", "states"} & t.problem.keys() for t in states.trials if "optimizer" not in t.problem)


def test_weights_and_states_are_refused_where_no_step_could_heed_them() -> None:
    for suite in ("attention", "stress", "scaling"):
        with pytest.raises(ValueError, match=f"--weights: the suite {suite} has no training step that heeds it"):
            plan.resolve(suite, Options(device="cpu", weights="bf16"))
    with pytest.raises(ValueError, match="--states: the suite fp8 has no training step that heeds it"):
        plan.resolve(
            "fp8", Options(device="cpu", weights="bf16", states="fp8")
        )  # torch's AdamW has bf16's beside the weights
    with pytest.raises(ValueError, match="; give it to convergence or speed, or leave it out"):
        plan.resolve("fp8", Options(device="cpu", states="bf16"))
    for asked in ({"weights": "bf16"}, {"states": "bf16"}):
        for suite, data in (("convergence", {"": "random"}), ("speed", {})):  # which that message names
            trials = plan.resolve(suite, Options(device="cpu", seeds=1, data=data, **asked)).trials
            assert any(asked.items() <= trial.problem.items() for trial in trials)
    with pytest.raises(ValueError, match="on one GPU alone, for ranks would round apart; leave --parallel out"):
        plan.resolve("fp8", Options(device="cpu", gpus_per_trial=2, parallel="ddp", states="bf16"))
    with pytest.raises(ValueError, match="Did you mean bf16"):
        plan.resolve("fp8", Options(device="cpu", weights="bf61"))


def test_options_of_steps_are_refused_where_no_step_could_heed_them() -> None:
    with pytest.raises(ValueError, match="--checkpointing: the suite attention has no training step that heeds it"):
        plan.resolve("attention", Options(device="cpu", checkpointing=True))
    divided = Options(device="cpu", gpus_per_trial=2, parallel="ddp", checkpointing=True)
    with pytest.raises(ValueError, match="--parallel: the suite memory has no training step that heeds it"):
        plan.resolve("memory", divided)
    found = plan.resolve("fp8", divided)
    assert all(t.problem["parallel"] == "ddp" and t.problem["checkpointing"] == "blocks" for t in found.trials)


@pytest.mark.parametrize(
    ("suite", "asked", "said"),
    [
        ("nanogpt", {"device": "cpu"}, "a step of gpt2, 12 x 1024 tokens, is 9.2 TFLOP. This run is on a CPU"),
        (
            "speed",
            {"device": "cpu", "model": "llama3-1b", "batch": 1, "tokens": 8192},
            "is 47.9 TFLOP",
        ),  # of 256 classes
        ("convergence", {"device": "cpu", "preset": "gpt2-short"}, "3.8 min for each, and a trial has 300 steps. To"),
        (
            "convergence",
            {"device": "cpu", "preset": "gpt2", "batch": 12, "accumulate": 4, "data": {"": "random"}},
            "gpt2, 4 x 12 x 1024 tokens, is 36.7 TFLOP",
        ),
        ("nanogpt", {"device": "cuda"}, None),
        ("speed", {"device": "cpu"}, None),
        ("attention", {"device": "cpu"}, None),
    ],
)
def test_a_model_that_is_large_for_a_cpu_is_told_beforehand(suite, asked, said):
    options = Options(**asked)
    slow = plan.slow_on_a_cpu(plan.resolve(suite, options).trials, options)
    assert slow is None if said is None else said in str(slow)
