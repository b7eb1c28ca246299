"""What ran against what was asked for: GEMMs by precision, fused blocks, head, optimizer, execution mode."""

import dataclasses
import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from te_bench.experiments import store, trial_model
from te_bench.experiments.checks import kernel_parts, training_step, what_ran
from te_bench.experiments.instruments import compilation, fp8_numerics, profiling
from te_bench.experiments.measurement import CheckFailed, Context, Measurement
from te_bench.experiments.spec import Record, Trial
from te_bench.experiments.workloads import layer, max_batch, train_step, training
from te_bench.kernels import linear_cross_entropy
from te_bench.kernels.linear_cross_entropy.backends import chunked
from te_bench.kernels.linear_cross_entropy.backends import fp8 as fp8_head
from te_bench.models import configs, faults, rivals
from te_bench.models import recipe as recipes
from te_bench.models.decoder import NotFused
from te_bench.training.step import TrainStep

PUBLISHED = Path(__file__).parents[3] / "results" / "h200"
TINY = {"model": "tiny", "batch": 2, "block": 16, "vocab": 60, "padded_vocab": 64, "grad_clip": 0.0}
TRIAL = Trial(workload="train_step", device="cpu", problem=TINY, attention="flash", precision="bf16")
LAYER = {"layer": "te_layer", "variant": "fair", "hidden": 64, "ffn": 128, "heads": 4, "sequence": 16, "batch": 2}
LAYER |= {"dropout": 0.0, "mask": "causal"}
RECIPES = [name for name in recipes.names() if not recipes.load(name).keeps_blocks]
BF16_WGRAD = [name for name in RECIPES if recipes.load(name).bf16_wgrad]
FAST = {"blocks": "fused", "optimizer": "reference"}
LINEARS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")  # of a block

pytestmark = pytest.mark.usefixtures("plain_heads")


def a_trial(recipe: str | None = None, mode: str = "eager", device: str = "cpu", **problem: Any) -> Trial:
    precision = "bf16" if recipe is None else "fp8"
    changes: dict[str, Any] = {"problem": {**TINY, **problem}, "precision": precision, "recipe": recipe, "mode": mode}
    return dataclasses.replace(TRIAL, device=device, **changes)


def passes_in_fp8(recipe: str | None) -> int:
    """Of a Linear's three GEMMs. Block formats of Blackwell are emulated: their products are a half-precision GEMM's."""
    if recipe is None or recipes.load(recipe).block_formats:
        return 0
    return 2 if recipes.load(recipe).bf16_wgrad else 3


def in_bf16(model: Any, count: int) -> None:
    """Put a plain Linear with the same weight in the place of `count` of the model's, every second one first."""
    paths = [f"transformer.h.{block}.{name}" for block in range(2) for name in LINEARS]
    for path in sorted(paths, key=lambda path: (paths.index(path) % 2, paths.index(path)))[:count]:
        parent, _, name = path.rpartition(".")
        old = model.get_submodule(path)
        plain = nn.Linear(old.in_features, old.out_features, bias=False, device=old.weight.device)
        plain.weight = old.weight
        setattr(model.get_submodule(parent), name, plain)


def observed(trial: Trial, change: Callable[[TrainStep], None] = lambda step: None) -> dict[str, Any]:
    """The parts of the trial's step, as `change` leaves it. Raises CheckFailed where they are not what was asked for."""
    compilation.begin(trial)  # as a trial does: past Dynamo's limit of compilations a step runs eagerly
    step = trial_model.step_of(trial)
    change(step)
    batch = train_step.random_batches(trial)[0]
    for _ in range(3 if trial.device == "cuda" or trial.mode != "eager" else 1):
        step(*batch)
    asked = what_ran.expected_of_step(trial, batch[0].numel() // step.optim.accumulate)
    seen = profiling.kernels_seen(lambda: step(*batch), trial.device)
    found = what_ran.require(trial, seen, Measurement(samples={"latency_s": [1.0]}), asked)
    ran: dict[str, int] = found.work["ran"]
    return ran


def gemms(ran: dict[str, int]) -> tuple[int, ...]:
    return ran["gemm_fp8"], ran["gemm_half"], ran["gemm_float"]


# A step


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_honest_fp8_step_passes_and_its_record_says_what_ran(recipe: str) -> None:
    ran = observed(a_trial(recipe))
    emulated = 24 if recipes.load(recipe).block_formats else 0
    half = emulated + 8 * recipes.load(recipe).bf16_wgrad
    assert gemms(ran) == (24 - half, 3 + half, 0)  # 8 Linears, a head
    assert ran["block_format_casts"] == emulated
    assert ran["optimizer_torch"] >= 1
    assert ran["fused_blocks"] == ran["compiled"] == ran["head_chunked"] == 0


@pytest.mark.parametrize(("recipe", "count"), [*zip(RECIPES, itertools.cycle([1, 2, 4, 8]), strict=False)])
def test_an_fp8_step_with_linears_in_bf16_fails(recipe: str, count: int) -> None:
    emulated, each = recipes.load(recipe).block_formats, 2 if recipes.load(recipe).bf16_wgrad else 3
    what = "casts to MXFP8 or NVFP4" if emulated else "GEMMs in FP8"
    with pytest.raises(CheckFailed, match=f"{what}: {8 * each} expected, {(8 - count) * each} ran") as caught:
        observed(a_trial(recipe), lambda step: in_bf16(step.model, count))
    found = caught.value.measurement
    assert found.samples == {}
    assert found.work["ran"]["gemm_half"] == (27 if emulated else 27 - (8 - count) * each)


def test_a_weight_gradient_in_fp8_under_the_name_of_bf16_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, step_of = a_trial("rowwise_scaling_bf16_wgrad"), trial_model.step_of
    for more in ({}, FAST):
        assert gemms(observed(a_trial("rowwise_scaling_bf16_wgrad", **more)))[0] == 16
    monkeypatch.setattr(trial_model, "step_of", lambda _: step_of(a_trial("rowwise_scaling")))
    with pytest.raises(CheckFailed, match="GEMMs in FP8: 16 expected, 24 ran; GEMMs in half precision: 11 expected, 3"):
        observed(asked)


def test_blocks_that_a_recipe_keeps_in_bf16_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = a_trial("nvfp4_block_scaling_bf16_end")
    for trial in (kept, a_trial("nvfp4_block_scaling_bf16_end", **FAST)):
        ran = observed(trial)
        assert (ran["block_format_casts"], ran["gemm_half"]) == (12, 27)
    for name in ("first", "end"):
        for more in ({}, FAST):
            assert observed(a_trial(f"float8_current_scaling_bf16_{name}", **more))["gemm_fp8"] == 12
    step_of = trial_model.step_of
    monkeypatch.setattr(trial_model, "step_of", lambda _: step_of(a_trial("nvfp4_block_scaling")))
    with pytest.raises(CheckFailed, match="casts to MXFP8 or NVFP4: 12 expected, 24 ran"):
        observed(kept)


@pytest.mark.parametrize("fault", faults.names())
def test_a_planted_fault_is_of_the_same_parts(fault: str) -> None:
    keeps_scales = fault in ("frozen_scale", "nan_at_depth", "short_history")
    recipe = "delayed_scaling" if keeps_scales else "float8_current_scaling"
    assert observed(a_trial(recipe, fault=fault))["gemm_fp8"] == 24


@pytest.mark.parametrize(
    ("precision", "problem", "expected"),
    [
        ("fp32", {}, {"gemm_float": 27}),
        ("fp32", {"head": "chunked"}, {"gemm_float": 24, "head_chunked": 1}),
        ("bf16", {"accumulate": 2}, {"gemm_half": 54}),
        ("bf16", FAST, {"gemm_half": 27, "fused_blocks": 3, "optimizer_reference": 1}),
        ("fp8", FAST | {"head": "fp8", "batch": 4, "accumulate": 2}, dict(gemm_fp8=48, fused_blocks=6, head_fp8=2)),
    ],
)
def test_every_part_of_an_honest_step_is_counted(precision, problem, expected):
    trial = a_trial("delayed_scaling" if precision == "fp8" else None, **problem)
    ran = observed(dataclasses.replace(trial, precision=precision))
    assert {part: ran[part] for part in expected} == expected
    assert sum(ran[part] for part in kernel_parts.GEMMS) == sum(expected.get(part, 0) for part in kernel_parts.GEMMS)


def test_a_bf16_step_with_linears_in_fp8_fails() -> None:
    asked = a_trial("float8_current_scaling")
    step, batch = trial_model.step_of(asked), train_step.random_batches(asked)[0]
    seen = profiling.kernels_seen(lambda: step(*batch), "cpu")
    with pytest.raises(CheckFailed, match="GEMMs in FP8: 0 expected, 24 ran"):
        what_ran.require(a_trial(), seen, Measurement(), what_ran.expected_of_step(a_trial(), 32))


def another_head(step: TrainStep, name: str | None) -> None:
    model: Any = step.model
    model.heads = None if name is None else dict.fromkeys((True, False), linear_cross_entropy.load(name))


@pytest.mark.parametrize(
    ("asked", "ran", "reason"),
    [
        ("fp8", "chunked", "head fp8: 1 or more expected, 0 ran"),
        ("fp8", None, "head fp8: 1 or more expected, 0 ran"),
        ("chunked", "fp8", "head fp8: 0 expected, 1 ran"),
        (None, "chunked", "head chunked: 0 expected, 1 ran"),
    ],
)
def test_another_head_fails(asked: str | None, ran: str | None, reason: str) -> None:
    trial = a_trial("float8_current_scaling", **({} if asked is None else {"head": asked}))
    with pytest.raises(CheckFailed, match=reason):
        observed(trial, lambda step: another_head(step, ran))


@pytest.mark.parametrize(("asked", "ran"), [("reference", None), (None, "reference")])
def test_another_optimizer_fails(asked: str | None, ran: str | None) -> None:
    trial, other = (a_trial(**({} if name is None else {"optimizer": name})) for name in (asked, ran))
    made = trial_model.step_of(other)
    with pytest.raises(CheckFailed, match=f"optimizer {asked or 'torch'}: 1 or more expected, 0 ran"):
        observed(trial, lambda step: step.__dict__.update(made.__dict__))


@pytest.fixture
def dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile as Dynamo alone."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("dynamo")
def test_a_compiled_step_passes_and_one_that_was_not_compiled_fails() -> None:
    ran = observed(a_trial(mode="compile"))
    assert (ran["compiled"] >= 1, ran["gemm_half"]) == (True, 27)
    with pytest.raises(CheckFailed, match=r"what torch.compile made: 1 or more expected, 0 ran"):
        observed(a_trial(mode="compile"), lambda step: setattr(step, "forward", step.model))
    with pytest.raises(CheckFailed, match=r"what torch.compile made: 0 expected, [1-9]"):
        observed(a_trial(), lambda step: setattr(step, "forward", torch.compile(step.model)))


@pytest.mark.slow
@pytest.mark.usefixtures("dynamo")
def test_a_compiled_fp8_step_shows_every_emulated_gemm() -> None:
    ran = observed(a_trial("float8_current_scaling", "compile"))
    assert gemms(ran) == (24, 3, 0)


def test_fused_blocks_that_are_compiled_for_a_cpu_are_unsupported() -> None:
    with pytest.raises(trial_model.Unsupported, match="blocks fused: compiled for a CPU, no record shows"):
        trial_model.require_supported(a_trial(mode="compile", blocks="fused"))


def listen(step: TrainStep) -> None:
    step.model.get_submodule("transformer.h.1.mlp").register_forward_hook(lambda *_: None)


def freeze(step: TrainStep) -> None:
    step.model.get_submodule("transformer.h.1.mlp.c_fc").requires_grad_(False)


@pytest.mark.parametrize("recipe", [None, "float8_current_scaling"])
@pytest.mark.parametrize(("change", "why"), [(listen, "h.1.mlp has a hook"), (freeze, "h.1.mlp.c_fc.weight is f")])
def test_blocks_that_were_to_be_fused_and_are_not_fail_and_warn(recipe, change, why):
    with pytest.warns(NotFused, match=why), pytest.raises(CheckFailed, match="fused blocks: 3 expected, 0 ran"):
        observed(a_trial(recipe, blocks="fused"), change)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("workload", "more"),
    [
        (train_step, {}),
        (training, {"data": "random", "steps": 2, "eval_every": 2, "eval_tokens": 32}),
        (max_batch, {"memory_limit_gib": 64}),
    ],
)
def test_a_whole_trial_with_a_linear_in_bf16_is_a_failed_check_without_times(workload, more, monkeypatch):
    """Of max_batch the first try alone."""
    monkeypatch.setattr(
        training_step, "begin", lambda trial, *_: (trial_model.step_of(trial), {})
    )  # it would see some of them by their numbers
    monkeypatch.setattr(max_batch, "largest", lambda _: (1, []))
    made = trial_model.step_of

    def half(trial: Trial) -> TrainStep:
        step = made(trial)
        in_bf16(step.model, 1)
        return step

    name = workload.__name__.rpartition(".")[2]
    trial = dataclasses.replace(a_trial("float8_current_scaling", **more), workload=name)
    monkeypatch.setattr(trial_model, "step_of", half)
    with pytest.raises(CheckFailed, match="GEMMs in FP8: 24 expected, 21 ran") as caught:
        workload.run(trial, Context())
    assert caught.value.measurement.samples == {}


@pytest.mark.usefixtures("one_thread")
def test_the_record_of_a_largest_batch_has_what_ran_beside_its_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_batch, "largest", lambda _: (1, []))
    trial = dataclasses.replace(a_trial(memory_limit_gib=64), workload="max_batch")
    work = max_batch.run(trial, Context()).work
    assert (work["ran"]["gemm_half"], work["tries"]) == (27, [])


def test_a_look_at_the_numerics_of_fused_blocks_goes_by_their_modules_and_does_not_warn() -> None:
    trial = a_trial("float8_current_scaling", blocks="fused")
    step, batch = trial_model.step_of(trial), train_step.random_batches(trial)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotFused)
        assert len(fp8_numerics.probe(step, *batch)) > 8
    listen(step)
    with pytest.warns(NotFused):
        step(*batch)


def test_a_model_says_once_for_each_reason_that_it_is_not_fused() -> None:
    trial = a_trial(blocks="fused")
    step, batch = trial_model.step_of(trial), train_step.random_batches(trial)[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(*batch)
        assert not caught
        for change in (listen, freeze):
            change(step)
            for _ in range(2):
                step(*batch)
    assert [warning.category for warning in caught] == [NotFused]
    assert "h.1.mlp has a hook" in str(caught[0].message)


def products(run: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    return sum(re.fullmatch(r"aten::(mm|addmm)", event.name) is not None for event in profiler.events() or [])


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for head in (chunked, fp8_head):
        for name, rows in {"LOGITS_BYTES": 2 * 128, "STRIP_BYTES": 2 * 256, "CHUNK_BYTES": 0}.items():
            monkeypatch.setattr(head, name, rows * 64, raising=False)


@pytest.mark.parametrize("head", [chunked, fp8_head])
@pytest.mark.parametrize("rows", [128, 500, 600])
@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.usefixtures("small_chunks")
def test_a_head_says_how_many_gemms_it_is_made_of(head: Any, rows: int, rounded: bool) -> None:
    x, weight = (torch.randn(n, 128, dtype=torch.bfloat16).requires_grad_() for n in (rows, 64))
    weight = weight if rounded else weight.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = products(lambda: head.forward(x, weight, torch.zeros(rows).long(), vocab=60).backward())
    assert sum(head.gemms(rows, 128, 64, 2, rounded)) == loss


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("more", [{}, {"optimizer": "reference"}, {"optimizer": "reference", "weights": "bf16"}])
@pytest.mark.usefixtures("small_chunks")
def test_a_head_is_counted_by_the_dtype_of_its_weights_gradient(
    tied: bool, more: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is bfloat16 where an optimizer's copy stands for a weight, but not for one that is the embedding's, too."""
    model = dataclasses.replace(configs.CONFIGS["llama-tiny"], tie_word_embeddings=tied)  # type: ignore[call-arg]
    monkeypatch.setitem(configs.CONFIGS, "llama-tiny", model)
    trial = a_trial(head="fp8", model="llama-tiny", batch=4, block=64, **more)
    step, batch = trial_model.step_of(trial), train_step.random_batches(trial)[0]
    asked = what_ran.expected_of_step(dataclasses.replace(trial, device="cuda"), 4 * 64)
    most = [asked[part][1] for part in kernel_parts.GEMMS]
    assert sum(map(int, most)) == products(lambda: step(*batch))  # type: ignore[arg-type]


@pytest.mark.usefixtures("small_chunks")
def test_a_head_behind_compiled_blocks_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that the embedding shares has one gradient for both there, which is not rounded."""
    model = dataclasses.replace(configs.CONFIGS["llama-tiny"], tie_word_embeddings=True)  # type: ignore[call-arg]
    monkeypatch.setitem(configs.CONFIGS, "llama-tiny", model)
    how: dict[str, Any] = {"head": "fp8", "model": "llama-tiny", "optimizer": "reference"}
    eager, blocks, whole = (
        what_ran.expected_of_step(a_trial(mode=mode, device="cuda", **how), 4 * 64)["gemm_fp8"]
        for mode in ("eager", "compile-blocks", "compile")
    )
    assert eager == blocks != whole


def test_the_plan_of_a_step_in_few_bits_counts_its_heads_chunks() -> None:
    few = {"model": "llama3-1b", "block": 8192, "vocab": 128256, "padded_vocab": 128256, "batch": 1}
    few |= {"head": "fp8", "optimizer": "triton", "weights": "bf16"}
    asked = what_ran.expected_of_step(a_trial("float8_current_scaling", device="cuda", **few), 8192)
    assert asked["gemm_fp8"] == (233, 233)


@pytest.mark.parametrize("recipe", [None, "delayed_scaling"])
def test_gemms_that_overlap_with_collectives_are_as_many_as_a_group_has_ranks(recipe: str | None) -> None:
    """On a GPU, of fprop and dgrad; wgrad is one, and the head's none of them."""
    divided = {"device": "cuda", "model": "llama-tiny", "parallel": "fsdp2+tp", "world": 8, "shard": 4, "batch": 2}
    apart, overlapped = (
        what_ran.expected_of_step(a_trial(recipe, **divided, sequence_parallel=True, **more), 32)
        for more in ({}, {"overlap": "symmetric"})
    )
    part, linears = "gemm_half" if recipe is None else "gemm_fp8", 4 * 2
    assert {name for name in apart if apart[name] != overlapped[name]} == {part}
    assert [b - a for a, b in zip(apart[part], overlapped[part], strict=True)] == [2 * 3 * linears] * 2  # type: ignore[operator]


#: A kernel of each title's, launched once for each part.
OF_RIVALS = {
    "Transformer Engine": "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<Traits>(Params)",
    "Liger": "_rms_norm_forward_kernel",
}


@pytest.mark.parametrize("name", rivals.names())
def test_a_rival_s_own_head_may_be_one_of_te_bench_s_backends(name: str) -> None:
    """Suite `heads` times Liger's loss alone; in Liger's step the same kernels are what was asked for."""
    trial = a_trial(rivals.load(name).recipe, device="cuda", model="llama-tiny", rival=name)
    asked = what_ran.expected_of_step(trial, 32)["head_liger"]
    assert asked == ((1, None) if name == "liger" else (0, 0))


@pytest.mark.parametrize("name", [name for name in rivals.names() if rivals.load(name).kernels])
def test_a_rival_s_step_is_told_by_its_kernels_whatever_its_recipe(name: str) -> None:
    trial = a_trial(rivals.load(name).recipe, device="cuda", model="llama-tiny", rival=name)
    asked = what_ran.expected_of_step(trial, 32)
    expected = {part: asked[part] for part in (f"rival_{title}" for title in OF_RIVALS)}
    for title, kernel in OF_RIVALS.items():
        four, three = (kernel_parts.parts({kernel: times}, "cuda") for times in (4, 3))
        assert (what_ran.disagreement(expected, four) is None) == (title == rivals.load(name).title)
        assert what_ran.disagreement(expected, three) is not None


# A layer


def iterated(recipe: str | None, change: Callable[[nn.Module], None] = lambda layer: None, **problem: Any) -> Any:
    changes: dict[str, Any] = {"problem": {**LAYER, **problem}, "precision": "bf16" if recipe is None else "fp8"}
    trial = dataclasses.replace(TRIAL, workload="layer", recipe=recipe, **changes)
    p = layer.config_of(trial)
    iteration = layer.Iteration(layer.layers.load(str(trial.problem["layer"])), p, 0)
    change(iteration.module)
    iteration()
    seen = profiling.kernels_seen(iteration, "cpu")
    return what_ran.require(trial, seen, Measurement(), what_ran.expected_of_layer(trial)).work["ran"]


@pytest.mark.parametrize("name", ["te_basic", "te_fused", "te_layer"])
@pytest.mark.parametrize("recipe", [None, "delayed_scaling", "float8_block_scaling"])
def test_a_layer_is_twelve_gemms(name: str, recipe: str | None) -> None:
    assert gemms(iterated(recipe, layer=name)) == ((0, 12, 0) if recipe is None else (12, 0, 0))


def test_a_layer_with_a_linear_in_bf16_fails() -> None:
    def plain(module: Any) -> None:
        old = module.projection
        module.projection = nn.Linear(old.in_features, old.out_features, dtype=torch.bfloat16)

    why = "GEMMs in FP8: 12 expected, 9 ran; GEMMs in half precision: 0 expected, 3 ran"
    with pytest.raises(CheckFailed, match=why):
        iterated("float8_current_scaling", plain, layer="te_basic")


# Names of a GPU's kernels, from the published journals

ONCE = pytest.mark.xdist_group("published kernels")  # one worker, which reads the journals once


@functools.cache
def published() -> list[Record]:
    """An ok record of each configuration of a step or a layer that was measured on an H200."""
    found: dict[Any, Record] = {}
    for folder in sorted(PUBLISHED.iterdir()):
        for record in store.load(folder).records.values() if store.written(folder) else ():
            t = record.trial
            if record.outcome == "ok" and t.workload in ("train_step", "training", "max_batch", "layer"):
                names = ("model", "head", "optimizer", "blocks", "linears", "layer", "variant", "accumulate")
                made = [t.problem.get(name) for name in names]
                found.setdefault((t.workload, t.attention, t.precision, t.recipe, t.mode, *made), record)
    return list(found.values())


def asked_of(trial: Trial) -> what_ran.Expected:
    if trial.workload == "layer":
        return what_ran.expected_of_layer(trial, linears=2 if trial.problem["variant"] == "mlp" else 4)
    return what_ran.expected_of_step(trial, 12 * 1024)


#: Until 2026-11-23 the Gluon GEMM's name did not say of which precision it was; a profiler of those days had no host events.
UNTOLD: set[str] = {"gluon_gemm_kernel"}
UNSEEN = ("graphs", "host_launches")


@ONCE
def test_the_published_records_are_of_what_they_were_asked_for() -> None:
    """Which parts ran; how often is in no record of those days."""
    assert len(published()) > 80
    for record in published():
        ran = kernel_parts.parts({name: 1 for name in record.kernels if name not in UNTOLD}, "cuda")
        for part, (least, most) in asked_of(record.trial).items():
            if part not in UNSEEN:
                assert (ran[part] > 0) == (least > 0) or (least == 0 and most is None), (record.trial.name, part, ran)


def gpu_counts(record: Record, **replaced: int) -> dict[str, int]:
    """Counts that the record's kernels could have had: of each part what was asked for, shared out over its names."""
    counts: dict[str, int] = {}
    asked = asked_of(record.trial)
    kinds = {name: kernel_parts.gemm_of(name) for name in record.kernels if name not in UNTOLD}
    for kind in kernel_parts.GEMMS:
        names = [name for name, of in kinds.items() if of == kind]
        total = replaced.get(kind, asked[kind][0])
        for name, more in zip(names, itertools.chain([total - len(names) + 1], itertools.repeat(1)), strict=False):
            counts[name] = more
    counts |= {name: 1 for name in record.kernels if kinds.get(name) is None and name not in UNTOLD}
    for part, (least, _) in asked.items():
        names = (
            []
            if part in (*kernel_parts.GEMMS, *UNSEEN)
            else [n for n in counts if kernel_parts.parts({n: 1}, "cuda")[part]]
        )
        counts |= {name: max(1, least - len(names) + 1) for name in names[:1]}
    return counts | ({"cudaGraphLaunch": 1} if asked["graphs"][0] else {})


def verdict(record: Record, counts: dict[str, int]) -> str | None:
    return what_ran.disagreement(asked_of(record.trial), kernel_parts.parts(counts, "cuda"))


@ONCE
def test_honest_counts_of_every_published_configuration_pass() -> None:
    for record in published():
        assert verdict(record, gpu_counts(record)) is None, record.trial.name


@ONCE
def test_linears_in_bf16_fail_in_every_published_fp8_configuration() -> None:
    emulated = ("mxfp8_block_scaling", "nvfp4_block_scaling")  # by bf16 GEMMs
    in_fp8 = [r for r in published() if r.trial.precision == "fp8" and r.trial.recipe not in emulated]
    assert len(in_fp8) > 30
    for record, linears in itertools.product(in_fp8, (1, 2)):
        counts = gpu_counts(record)
        kernel = max((n for n in counts if kernel_parts.gemm_of(n) == "gemm_fp8"), key=lambda n: counts[n])
        counts[kernel] -= 3 * linears
        assert "GEMMs in FP8" in str(verdict(record, counts)), record.trial.name
        counts["nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNN"] = 3 * linears
        assert "GEMMs in FP8" in str(verdict(record, counts)), record.trial.name


@ONCE
def test_a_graph_that_was_not_replayed_fails() -> None:
    captured = [record for record in published() if record.trial.mode in ("cudagraph", "compile-reduce-overhead")]
    for record in captured:
        counts = gpu_counts(record)
        assert verdict(record, {**counts, "cudaGraphLaunch": 0}) is not None
        if record.trial.mode == "cudagraph":
            assert "launched one by one" in str(verdict(record, {**counts, "cudaLaunchKernel": 12}))
            assert verdict(record, {**counts, "cudaLaunchKernel": 2, "cuLaunchKernel": 2}) is None


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_qrtst_144x128_128x6_1x2_h_bz_coopA_algo2_TNN", "gemm_fp8"),
        ("nvjet_qqtst_128x128_128x6_2x1_v_bz_coopA_TNT", "gemm_fp8"),  # CUDA 12
        ("nvjet_sm100_qqtst_128x256_128x5_2x1_2cta_v_bz_TNT", "gemm_fp8"),
        ("sm89_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x64x64_stage3_warpsize2x2x1_kernel", "gemm_fp8"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::float_e4m3_t>>", "gemm_fp8"),
        ("scaled_kernel", "gemm_fp8"),
        ("gluon_gemm_fp8_kernel", "gemm_fp8"),
        ("block_scaled_gemm_kernel", "gemm_fp8"),
        ("gluon_gemm_half_kernel", "gemm_half"),
        ("nvjet_sm90_tss_128x256_64x4_2x1_v_bz_coopA_TNN", "gemm_half"),
        ("nvjet_sm90_hsh_128x256_64x4_2x1_v_bz_coopA_TNN", "gemm_half"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "gemm_half"),
        ("void cutlass::Kernel2<cutlass_75_tensorop_s1688gemm_bf16_64x64_tn_align1>", "gemm_half"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x256_16x4_nt_align4>", "gemm_float"),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_kernel", "gemm_float"),
        ("ampere_sgemm_128x64_nn", "gemm_float"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", None),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>", None),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", None),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64", None),
        ("triton_poi_fused__scaled_mm__to_copy_clamp_mul_t_transpose_view_11", None),
        ("gluon_attention_forward_kernel", None),
        ("_cast_kernel", None),
        ("te_bench::policy_gemm", None),  # the host's
        *((name, None) for name in ("mxfp8_cast_kernel", "block_formats_finish_kernel", "block_pack_kernel")),
    ],
)
def test_a_kernel_s_name_tells_its_precision(kernel: str, kind: str | None) -> None:
    assert kernel_parts.gemm_of(kernel) == kind


def test_a_gpu_s_casts_to_block_formats_are_told_by_their_kernels() -> None:
    seen = {"mxfp8_cast_kernel": 2, "nvfp4_cast_kernel": 3, "nvfp4_amax_kernel": 3, "te_bench::nvfp4_cast": 3}
    assert kernel_parts.parts(seen, "cuda")["block_format_casts"] == 5


@pytest.mark.parametrize("name", ["mxfp8_block_scaling", "nvfp4_block_scaling"])
def test_where_a_gpu_multiplies_a_block_format_no_half_precision_passes_for_it(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, fp8, half in (((9, 0), 0, 24), ((10, 0), 24, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        expected = what_ran.expected_of_step(a_trial(name, device="cuda"), 64)
        assert expected["gemm_fp8"] == (fp8, fp8)
        assert expected["gemm_half"][0] >= half
        assert expected["block_format_casts"] == (24, 24)
        ran = {"gemm_fp8": 24 - fp8, "gemm_half": 3 + 24 - half}
        assert "GEMMs in FP8" in str(what_ran.disagreement({k: expected[k] for k in ran}, ran))


def test_a_product_whose_dtype_no_profiler_tells_is_of_the_trial_s_precision() -> None:
    untold = {"aten::mm": 27, "te_bench::reference_gemm": 3}
    ran = [kernel_parts.parts(untold, "cpu", half=half) for half in (True, False)]
    assert [gemms(parts) for parts in ran] == [(3, 27, 0), (3, 0, 27)]
    told = kernel_parts.parts({"aten::mm float": 1, "aten::addmm c10::BFloat16": 2}, "cpu")
    assert (told["gemm_half"], told["gemm_float"]) == (2, 1)


# On a GPU

STEP = {**TINY, "batch": 4, "block": 64}
COMPILED = ["compile", "compile-reduce-overhead"]
EVERY = [*itertools.product([None, *RECIPES], ["eager", "cudagraph"])]
FUSED = {"blocks": "fused", "optimizer": "triton"}
MODES = ["eager", *COMPILED, "cudagraph"]
GPT2 = {"model": "gpt2", "batch": 12, "block": 1024, "vocab": 50257, "padded_vocab": 50304}


@pytest.mark.gpu
@pytest.mark.parametrize(("recipe", "mode"), [*EVERY, *itertools.product([None, "float8_block_scaling"], COMPILED)])
def test_a_gpu_s_honest_step_passes_in_every_mode(recipe: str | None, mode: str) -> None:
    ran = observed(a_trial(recipe, mode, "cuda", **STEP))
    in_fp8 = 8 * passes_in_fp8(recipe)
    assert (ran["gemm_fp8"], ran["gemm_half"]) == (in_fp8, 27 - in_fp8), ran


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head", "recipe", "mode"),
    [
        (head, recipe, mode)
        for head in ("chunked", "fp8")
        for recipe, mode in (*EVERY, *itertools.product([None, "delayed_scaling"], COMPILED))
        if not (head == "fp8" and recipe in BF16_WGRAD)  # which refuses it
    ],
)
def test_a_gpu_s_honest_fused_step_passes_in_every_mode(head: str, recipe: str | None, mode: str) -> None:
    ran = observed(a_trial(recipe, mode, "cuda", **STEP, **FUSED, head=head))
    assert ran["fused_blocks"] == 5, ran


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("attention", "mode"),
    [
        *itertools.product(["manual", "math", "mem_efficient", "cudnn", "gluon", "flex"], ["eager"]),
        *itertools.product(["manual", "math", "flex"], ["compile"]),
    ],
)
def test_a_gpu_s_honest_step_passes_with_every_attention(attention: str, mode: str) -> None:
    problem = {**GPT2, "batch": 2, "accumulate": 2}
    trial = dataclasses.replace(a_trial(None, mode, "cuda", **problem), attention=attention)
    assert observed(trial)["gemm_half"] >= 294


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize(("problem", "mode"), [({}, "eager"), ({**FUSED, "head": "fp8"}, "cudagraph")])
def test_a_gpu_s_gpt2_step_passes_by_the_kernels_of_its_shapes(recipe, problem, mode):
    """At these shapes GEMMs are the Gluon kernel's, too."""
    if problem and recipe in BF16_WGRAD:
        problem = FUSED  # such a recipe refuses an FP8 head
    ran = observed(a_trial(recipe, mode, "cuda", **GPT2, **problem))
    in_fp8 = 48 * passes_in_fp8(recipe)
    if problem.get("head") == "fp8":
        expected = (in_fp8 + fp8_head.gemms(12288, 768, 50304, 2, False)[0], 144 - in_fp8)
    else:
        expected = (in_fp8, 144 - in_fp8 + 3)
    assert (ran["gemm_fp8"], ran["gemm_half"]) == expected, ran


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [1, 4, 8])
def test_a_gpu_s_fp8_step_with_linears_in_bf16_fails_in_every_mode(count: int, mode: str) -> None:
    with pytest.raises(CheckFailed, match=f"GEMMs in FP8: 24 expected, {24 - 3 * count} ran"):
        observed(a_trial("float8_current_scaling", mode, "cuda", **STEP), lambda step: in_bf16(step.model, count))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torchao_tensorwise", "torchao_rowwise"])
def test_a_gpu_s_torchao_step_passes_and_fails_without_a_conversion(name: str) -> None:
    pytest.importorskip("torchao")
    recipe = "float8_current_scaling" if name == "torchao_tensorwise" else "rowwise_scaling"
    trial = a_trial(recipe, "compile", "cuda", **STEP, linears=name)
    assert observed(trial)["gemm_fp8"] == 24
    with pytest.raises(CheckFailed, match="GEMMs in FP8: 24 expected, 21 ran"):
        observed(trial, lambda step: in_bf16(step.model, 1))


@pytest.mark.gpu
def test_a_gpu_s_step_that_is_not_captured_or_not_compiled_fails() -> None:
    def as_eager(step: TrainStep) -> None:
        step.__dict__.update(trial_model.step_of(a_trial(None, "eager", "cuda", **STEP)).__dict__)

    for mode, part in (("cudagraph", "replays"), ("compile", "what torch.compile made")):
        with pytest.raises(CheckFailed, match=part):
            observed(a_trial(None, mode, "cuda", **STEP), as_eager)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "compile", "cudagraph"])
@pytest.mark.parametrize("recipe", [None, *(name for name in RECIPES if not recipes.load(name).fp8_dpa)])
def test_a_gpu_s_layer_is_twelve_gemms(recipe: str | None, mode: str) -> None:
    changes: dict[str, Any] = {"problem": {**LAYER, "hidden": 256, "ffn": 512, "sequence": 64}, "mode": mode}
    changes |= {"device": "cuda", "precision": "bf16" if recipe is None else "fp8", "recipe": recipe}
    trial = dataclasses.replace(TRIAL, workload="layer", **changes)
    compilation.begin(trial)
    p = layer.config_of(trial)
    iteration = layer.Iteration(layer.layers.load("te_layer"), p, 0, mode=mode)
    for _ in range(3):
        iteration()
    seen = profiling.kernels_seen(iteration, "cuda")
    ran = what_ran.require(trial, seen, Measurement(), what_ran.expected_of_layer(trial)).work["ran"]
    in_fp8 = 4 * passes_in_fp8(recipe)
    assert (ran["gemm_fp8"], ran["gemm_half"]) == (in_fp8, 12 - in_fp8), ran
