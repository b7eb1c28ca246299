"""The suites that measure a model take any by its name, and a GPT's trials stay those of the records that are there."""

import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from te_bench.experiments import plan, suite_trials, trial, trial_model
from te_bench.experiments.measurement import Context, Unsupported
from te_bench.experiments.spec import Experiment, Options
from te_bench.models.configs import configs

STEPS = ("nanogpt", "speed", "fp8", "memory")
TRAININGS = ("curves", "convergence", "stress")
LLAMAS = ("llama3-1b", "llama3-3b", "llama3-8b", "qwen3-0.6b")


def resolve(suite: str, device: str, **options: Any) -> Experiment:
    data: Mapping[str, str] = (
        {"": "random"} if suite in TRAININGS or (suite in ("quick", "demo") and device == "cpu") else {}
    )
    return plan.resolve(suite, Options(device=device, seeds=1, data=data, cache=Path("nowhere"), **options))


@pytest.mark.parametrize(
    ("device", "model"), [("cpu", "llama-tiny"), ("cpu", "tiny"), *(("cuda", name) for name in (*LLAMAS, "gpt2-xl"))]
)
@pytest.mark.parametrize("suite", [*STEPS, *TRAININGS])
def test_a_suite_takes_a_model_by_its_name(suite: str, device: str, model: str) -> None:
    experiment = resolve(suite, device, model=model)
    trials = [t for t in experiment.trials if t.workload != "ceilings"]
    own = {"tiny": 50257, "gpt2-xl": 50257}.get(model) or configs()[model].vocab_size
    if (suite, device) == ("speed", "cpu"):
        own = 250  # whatever the model: all that the reference optimizer can update
    vocabularies = {(t.problem["vocab"], t.problem["padded_vocab"]) for t in trials}
    assert (own, -(-own // 64) * 64) in vocabularies <= {(own, own), (own, -(-own // 64) * 64)}
    assert {t.problem["model"] for t in trials} == {model}
    assert model in experiment.title or suite_trials.called({"model": model}) in experiment.title
    assert len({t.id for t in trials}) == len({t.name for t in trials}) == len(trials) >= 3
    assert experiment.baseline == trials[0].cell
    if suite in STEPS:
        assert {t.problem["block"] for t in trials} == {configs()[model].block_size}


def test_the_batch_and_the_tokens_of_a_sequence_are_the_users() -> None:
    def sizes(suite: str, **options: Any) -> set[tuple[Any, ...]]:
        trials = [t for t in resolve(suite, "cuda", **options).trials if t.workload != "ceilings"]
        return {(t.problem["model"], t.problem.get("batch"), t.problem["block"]) for t in trials}

    for suite in ("speed", "nanogpt", "fp8"):
        assert sizes(suite, model="llama3-1b", batch=1, tokens=8192) == {("llama3-1b", 1, 8192)}
        assert sizes(suite, model="llama3-1b", batch=4, tokens=2048) == {("llama3-1b", 4, 2048)}
        assert sizes(suite, model="llama3-1b") == {("llama3-1b", 1, 8192)}  # no more tokens than GPT-2's usual step
        assert sizes(suite, model="llama3-1b", tokens=2048) == {("llama3-1b", 6, 2048)}
        assert sizes(suite, tokens=512) == {("gpt2", 12, 512)}
    assert sizes("memory", model="llama3-1b", tokens=2048) == {("llama3-1b", None, 2048)}
    assert sizes("curves", model="llama3-1b", batch=2, tokens=4096) == {("llama3-1b", 2, 4096)}
    assert sizes("convergence", model="llama3-1b", batch=2) == {("llama3-1b", 2, 1024)}
    assert sizes("stress", model="qwen3-0.6b", batch=2) == {("qwen3-0.6b", 2, 1024)}
    with pytest.raises(ValueError, match=r"--batch: the suite memory chooses its batches itself; leave it out"):
        resolve("memory", "cuda", batch=1)
    with pytest.raises(ValueError, match=r"--tokens: the quickstart's layer has its own; give it with --model"):
        resolve("layer", "cuda", tokens=64)


@pytest.mark.parametrize(
    ("device", "options", "sizes"),
    [
        ("cuda", {"model": "llama3-8b", "batch": 4, "tokens": 2048}, (4, 2048)),
        ("cuda", {"model": "llama3-8b", "batch": 1, "tokens": 8192}, (1, 8192)),
        ("cuda", {"model": "llama3-8b"}, (1, 8192)),
        ("cuda", {"model": "llama3-8b", "tokens": 2048}, (4, 2048)),
        ("cpu", {"model": "llama-tiny", "batch": 3, "tokens": 16}, (3, 16)),
    ],
)
def test_the_suite_of_a_layer_takes_a_models(device: str, options: dict[str, Any], sizes: tuple[int, int]) -> None:
    experiment = resolve("layer", device, **options)
    trials, shape = experiment.trials, configs()[options["model"]].shape
    assert {(t.problem["batch"], t.problem["sequence"]) for t in trials} == {sizes}
    assert {(t.problem["model"], t.problem["ffn"]) for t in trials} == {(options["model"], shape.ffn)}
    assert {t.problem["variant"] for t in trials} == {"fair"}
    assert {t.recipe for t in trials if t.problem["layer"] == "te_layer"} == {None, *suite_trials.recipes()}
    assert len({t.id for t in trials}) == len({t.name for t in trials}) == len(trials)
    assert experiment.title == f"A layer of {options['model']}: {sizes[0]} x {sizes[1]} tokens"
    first = trials[0]
    assert (experiment.baseline, first.problem["layer"]) == (first.cell, "plain_sdpa")
    if device == "cuda":
        assert (first.attention, first.precision, first.mode) == ("cudnn", "bf16", "compile")
        peers = {t.problem["layer"] for t in trials} - {"plain_sdpa", "te_layer"}
        assert peers == {"torchao_tensorwise", "torchao_rowwise", "transformer_engine"}
        modes = {t.mode for t in trials if t.problem["layer"] == "te_layer" and t.recipe == "delayed_scaling"}
        assert modes == {"eager", "compile", "cudagraph"}


def test_a_gpts_layer_is_the_quickstarts_whose_sizes_are_fixed() -> None:
    said = "--model gpt2: a GPT's layer is the quickstart's layer; leave --model out, or give llama3"
    with pytest.raises(ValueError, match=said):
        resolve("layer", "cuda", model="gpt2")
    with pytest.raises(ValueError, match=r"--batch: the quickstart's layer has its own; give it with --model"):
        resolve("layer", "cuda", batch=8)


@pytest.mark.parametrize("suite", ["speed", "nanogpt", "fp8", "layer", "memory", "curves"])
def test_a_sequence_that_no_model_takes_is_refused_before_anything_runs(suite: str) -> None:
    with pytest.raises(ValueError, match="--tokens 1048577: give at most 1048576"):
        resolve(suite, "cpu", model="llama-tiny", tokens=2**20 + 1)


def test_training_tokens_are_steps_of_the_batch_that_is_asked_for() -> None:
    steps = {t.problem["steps"] for t in resolve("stress", "cuda", model="llama3-1b", batch=2, tokens=204800).trials}
    assert steps == {100}  # of 2 x 1024 tokens


def test_attention_that_keeps_scores_is_left_out_where_they_do_not_fit() -> None:
    """16 layers of 32 heads of 8192 x 8192 scores: 64 GiB in bf16."""
    for suite in ("nanogpt", "memory", "curves"):
        trials = resolve(suite, "cuda", model="llama3-1b").trials
        long = {t.attention for t in trials if t.problem["block"] == 8192}
        assert "flash" in long
        assert not long & set(suite_trials.KEEPS_SCORES)
        assert "manual" in {t.attention for t in resolve(suite, "cuda", model="llama3-1b", tokens=512).trials}


def test_rungs_that_a_vocabulary_without_padding_makes_alike_are_one() -> None:
    gpt, llama = (resolve("nanogpt", "cuda", model=name, tokens=512).trials for name in ("gpt2", "llama3-1b"))
    assert len(gpt) - len(llama) == 1  # flash in eager mode, without padding and with it
    assert {(t.attention, t.precision, t.mode) for t in gpt} == {(t.attention, t.precision, t.mode) for t in llama}


@pytest.mark.parametrize("model", [*LLAMAS, "llama-tiny"])
def test_what_cannot_run_says_so_before_anything_is_built(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper every attention of the suites reads shared keys; heads of 16 features gluon has not."""
    monkeypatch.setattr(trial_model, "capability", lambda device: (9, 0))
    monkeypatch.setattr(trial_model.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("te_bench.kernels.attention.backends.gluon.INTERPRETED", False)
    monkeypatch.setattr("te_bench.kernels.attention.backends.flash4.INSTALLED", True)
    reasons = set()
    for asked in resolve("speed", "cuda", model=model).trials:
        if asked.workload == "train_step" and not {"linears", "rival"} & set(asked.problem):
            try:
                trial_model.require_supported(asked)
            except Unsupported as error:
                reasons.add(str(error))
    assert reasons == ({"gluon: head_dim 16, of v 16: 64 or 128 for both"} if model == "llama-tiny" else set())


@pytest.mark.parametrize(
    ("suite", "chosen"),
    [("nanogpt", "*/flash/bf16/eager/*"), ("fp8", "*/delayed_scaling/*"), ("stress", "*lr1/*bf16*")],
)
def test_a_tiny_llama_is_measured_and_checked(suite: str, chosen: str) -> None:
    options = {"model": "llama-tiny", "batch": 2, **({"steps": 20} if suite == "stress" else {})}
    [asked] = [t for t in resolve(suite, "cpu", **options).trials if fnmatch.fnmatch(t.name, chosen)]
    reply = trial.run(asked, Context())
    assert (reply["outcome"], reply["reason"]) == ("ok", None)
    assert {"loss", "grad model.layers.1.mlp.gate_up_proj.weight"} <= {q["name"] for q in reply["check"]["quantities"]}
    assert all(loss < 7 for loss in reply["samples"]["loss"])
    if suite != "stress":
        assert reply["work"]["tokens"] == 2 * 64
        assert len(reply["samples"]["latency_s"]) == 20


#: suite -> the ids of its baseline on a CPU and on a GPU, as they were when GPT was the only model (2026-11-24), a tiny GPT
#: with one thread.
BASELINES: dict[str, tuple[str, str]] = {
    "quick": ("13eaf2342b3d0d0d", "dee06eafe593b0d6"),
    "nanogpt": ("3666eb9f28b1a61d", "6aeaae97b18bab30"),
    "speed": ("4835f1eb8cf65f4d", "dee06eafe593b0d6"),
    "fp8": ("fb1d5685545885ce", "5a1a792a2602c40a"),
    "memory": ("1e8aa1a46eeb93c3", "e8213d7f0c87b63f"),
    "curves": ("4d0cbd50b996b721", "195797c883b1c419"),
    "convergence": ("af6ccf81a27edde0", "509c256fa4dea642"),
    "stress": ("d5a4bafa866ad4a2", "63c540ba1eb76fe3"),
    "layer": ("567799ddfdf0888e", "c36e07d5a07857fd"),
}


@pytest.mark.parametrize(("device", "number"), [("cpu", 0), ("cuda", 1)])
@pytest.mark.parametrize("suite", BASELINES)
def test_a_gpts_trials_are_those_of_earlier_records(suite: str, device: str, number: int) -> None:
    """tests/test_published.py holds whole plans to records; these are the CPU's too."""
    assert resolve(suite, device).baseline == BASELINES[suite][number]


@pytest.mark.parametrize("suite", ["quick", "speed", "fp8", "curves"])
def test_a_tiny_model_s_steps_have_one_thread_of_a_cpu(suite: str) -> None:
    """Beside other programs two threads wait for each other: a step of 6 ms took 219."""
    steps = [t for t in resolve(suite, "cpu").trials if t.problem.get("model") == "tiny"]
    assert {t.problem.get("threads") for t in steps} == {1}
    assert "threads" not in {name for t in resolve(suite, "cuda").trials for name in t.problem}
