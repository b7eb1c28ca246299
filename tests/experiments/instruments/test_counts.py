"""What a record counts beside its times: kernels launched, graph breaks, recompilations."""

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType

from te_bench.experiments.checks import what_ran
from te_bench.experiments.instruments import compilation, profiling
from te_bench.experiments.measurement import CheckFailed, Context, Measurement, Unsupported
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import attention, layer, train_step, training
from te_bench.models import decoder

STEP = {"model": "tiny", "batch": 2, "block": 8, "vocab": 60, "padded_vocab": 64}
COMPILED = Trial(workload="train_step", device="cpu", problem=STEP, attention="flash", precision="fp32", mode="compile")
EAGER = dataclasses.replace(COMPILED, mode="eager")
NONE = {"graph_breaks": 0, "recompiles": 0}


@pytest.fixture
def dynamo(brief: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """torch.compile as Dynamo alone: its graphs run as they were traced, which no count depends on."""
    compiled = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compiled)
    compilation.begin(COMPILED)
    yield functools.partial(compiled, dynamic=False)
    compilation.begin(COMPILED)


def counts(compiled: Any, *shapes: int) -> dict[str, int]:
    for length in shapes:
        compiled(torch.ones(length))
    return compilation.counts(COMPILED)


def counted(work: Mapping[str, Any]) -> dict[str, int]:
    return {name: work[name] for name in NONE if name in work}


def whole(x: Tensor) -> Tensor:
    return x + 1


def broken_twice(x: Tensor) -> Tensor:
    x = x + 1
    torch._dynamo.graph_break()
    x = x * 2
    torch._dynamo.graph_break()
    return x - 1


def branches_on_data(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x - 1


def left_to_python(x: Tensor) -> Tensor:
    for _ in range(2):
        x = x + 1
        torch._dynamo.graph_break()
    return x


def test_what_traces_whole_has_no_break_however_often_it_is_called(dynamo: Any) -> None:
    assert counts(dynamo(whole), 2, 2, 2) == NONE


@pytest.mark.parametrize(
    ("function", "breaks"), [(broken_twice, {2}), (branches_on_data, {1}), (left_to_python, {1, 2})]
)
def test_a_break_of_any_kind_is_counted(dynamo: Any, function: Any, breaks: set[int]) -> None:
    found = counts(dynamo(function), 2, 2)
    assert found["recompiles"] == 0
    assert found["graph_breaks"] in breaks  # a frame that is given up counts as one or, in torch 2.13, as two


def test_what_is_given_up_at_the_recompilation_limit_is_a_break(dynamo: Any) -> None:
    shapes = range(2, 2 + torch._dynamo.config.recompile_limit)
    assert counts(dynamo(whole), *shapes) == {"graph_breaks": 0, "recompiles": len(shapes) - 1}
    assert counts(dynamo(whole), 50)["graph_breaks"] == 1


def test_another_shape_is_a_recompilation_and_other_code_is_none(dynamo: Any) -> None:
    assert counts(dynamo(whole), 2, 3, 3, 4)["recompiles"] == 2
    assert counts(dynamo(lambda x: x * 3), 2)["recompiles"] == 2


def test_a_trial_begins_with_nothing_compiled_and_eager_modes_count_nothing(dynamo: Any) -> None:
    counts(dynamo(broken_twice), 2, 3)
    assert compilation.counts(EAGER) == {}
    compilation.begin(COMPILED)
    assert compilation.counts(COMPILED) == NONE
    assert counts(dynamo(whole), 2) == NONE


@pytest.mark.usefixtures("dynamo")
def test_a_compiled_step_s_record_has_its_counts_and_an_eager_one_has_none() -> None:
    assert counted(train_step.run(COMPILED, Context()).work) == NONE
    assert counted(train_step.run(COMPILED, Context()).work) == NONE  # once more in the same process
    assert counted(train_step.run(EAGER, Context()).work) == {}


@pytest.mark.usefixtures("dynamo")
def test_a_break_in_the_model_is_in_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decoder.cross_entropy

    def breaking(logits: Tensor, targets: Tensor, *, vocab: int) -> Tensor:
        torch._dynamo.graph_break()
        return right(logits, targets, vocab=vocab)

    monkeypatch.setattr(decoder, "cross_entropy", breaking)
    found = train_step.run(COMPILED, Context()).work
    assert found["graph_breaks"] >= 1
    assert found["recompiles"] == 0


@pytest.mark.usefixtures("dynamo")
def test_the_other_workloads_count_too() -> None:
    shape = {"batch": 2, "heads": 2, "length": 16, "head_dim": 8, "causal": True}
    call = dataclasses.replace(COMPILED, workload="attention", problem=shape)
    assert counted(attention.run(call, Context()).work) == NONE
    sizes = {"layer": "te_layer", "variant": "fair", "hidden": 64, "ffn": 128, "heads": 4, "sequence": 16, "batch": 2}
    one = dataclasses.replace(COMPILED, workload="layer", problem={**sizes, "dropout": 0.0, "mask": "causal"})
    found = layer.run(one, Context()).work
    assert counted(found) == {"graph_breaks": 0, "recompiles": 1}  # the check's x needs a gradient, the timed one none
    assert found["kernel_s"]


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_training_is_compiled_once_and_profiled_at_the_shape_it_trained_at(monkeypatch, dropout):
    """Of eight rows an eager step's check and profile take four."""
    profiled: list[dict[str, int]] = []
    right = profiling.kernels_seen

    def watched(call: Any, device: str) -> profiling.Seen:
        seen = right(call, device)
        profiled.append(compilation.counts(COMPILED))
        return seen

    monkeypatch.setattr(profiling, "kernels_seen", watched)
    problem = {**STEP, "batch": 8, "data": "random", "steps": 3, "eval_every": 3, "eval_tokens": 16, "dropout": dropout}
    trial = dataclasses.replace(COMPILED, workload="training", attention="math", problem=problem)
    found = training.run(trial, Context()).work
    assert counted(found) == NONE
    assert profiled == [NONE]


# Launches.


def event(name: str, *, gpu: bool = True, annotation: bool = False, seconds: float = 1.0) -> Any:
    kind = DeviceType.CUDA if gpu else DeviceType.CPU
    made = {"name": name, "device_type": kind, "device_time": seconds, "is_user_annotation": annotation}
    return types.SimpleNamespace(**made, cpu_parent=None)


KERNELS = [event("gemm", seconds=3.0), event("flash_fwd"), event("gemm", seconds=2.0)]
COPIES = ("Memcpy DtoD (Device -> Device)", "Memset (Device)", "memset32", "memcpy32_post")
REGIONS = ("## Call CompiledFxGraph f ##", "Torch-Compiled Region: 0/0", "nccl:all_reduce", "FSDP::all_gather (h.0)")
OTHERS = [*map(event, COPIES + REGIONS), event("Optimizer.step#AdamW.step", annotation=True)]
OTHERS += [event(name, gpu=False) for name in ("cudaLaunchKernel", "aten::_scaled_dot_product_flash_attention")]


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """seen = profiled(events): what kernels_seen makes of a profiler's events; "log" is the order of calls."""

    def with_events(events: list[Any]) -> tuple[profiling.Seen, list[str]]:
        log: list[str] = []

        class Profile:
            def __init__(self, activities: list[Any], record_shapes: bool):
                pass

            def __enter__(self) -> "Profile":
                log.append("start")
                return self

            def __exit__(self, *_: object) -> None:
                log.append("stop")

            def events(self) -> list[Any]:
                return events

        monkeypatch.setattr(profiling, "profile", Profile)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
        return profiling.kernels_seen(lambda: log.append("call"), "cuda"), log

    return with_events


def test_launches_are_the_kernels_that_ran_each_time_and_nothing_else(profiled: Any) -> None:
    seen, log = profiled([*KERNELS, *OTHERS])
    assert seen.launches == 3
    assert seen.names[0] == "gemm"  # the longest first, each once
    assert seen.names.count("gemm") == 1
    assert "aten::_scaled_dot_product_flash_attention" in seen.names
    assert "cudaLaunchKernel" not in seen.names
    assert seen.counts == {"gemm": 2, "flash_fwd": 1, "cudaLaunchKernel": 1}
    look = ["wait", "start", "call", "wait", "stop"]  # nothing that was queued before, everything of the call
    assert log == 2 * look


def test_launches_that_were_not_counted_are_not_0(profiled: Any) -> None:
    assert profiled(OTHERS)[0].launches is None


def test_the_record_s_work_has_the_launches_beside_what_it_had() -> None:
    timed = Measurement(work={"tokens": 16}, samples={"latency_s": [1.0]})
    seen = profiling.Seen(["aten::_scaled_dot_product_flash_attention_for_cpu"], 7)
    found = what_ran.require_attention(EAGER, seen, timed)
    assert (found.work, found.kernels, found.samples) == ({"tokens": 16, "launches": 7}, seen.names, timed.samples)
    assert what_ran.require_attention(EAGER, profiling.Seen(seen.names), timed).work == {"tokens": 16}
    with pytest.raises(CheckFailed) as caught:
        what_ran.require_attention(EAGER, profiling.Seen(["aten::_scaled_dot_product_attention_math"], 7), timed)
    assert caught.value.measurement.samples == {}


@pytest.mark.usefixtures("brief")
def test_every_workload_s_record_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    right = profiling.kernels_seen
    monkeypatch.setattr(profiling, "kernels_seen", lambda *call: dataclasses.replace(right(*call), launches=7))
    shape = {"batch": 2, "heads": 2, "length": 16, "head_dim": 8, "causal": True}
    sizes = {"layer": "te_layer", "variant": "fair", "hidden": 64, "ffn": 128, "heads": 4, "sequence": 16, "batch": 2}
    runs: list[tuple[Any, dict[str, Any]]] = [
        (train_step, STEP),
        (training, {**STEP, "data": "random", "steps": 2, "eval_every": 2, "eval_tokens": 16}),
        (attention, shape),
        (layer, {**sizes, "dropout": 0.0, "mask": "causal"}),
    ]
    for workload, problem in runs:
        trial = dataclasses.replace(EAGER, workload=workload.__name__.rpartition(".")[2], problem=problem)
        found = workload.run(trial, Context())
        assert found.work["launches"] == 7, workload
        assert len(found.work) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "compile", "compile-blocks", "compile-reduce-overhead", "cudagraph"])
def test_a_gpu_s_launches_are_the_same_every_time(mode: str) -> None:
    trial = dataclasses.replace(COMPILED, device="cuda", precision="bf16", mode=mode)
    trial = dataclasses.replace(trial, problem={**STEP, "block": 64, "grad_clip": 0.0})
    runs = [train_step.run(trial, Context()) for _ in range(2)]
    first, second = (run.work for run in runs)
    assert first["launches"] == second["launches"] > 10, {*runs[0].kernels} ^ {*runs[1].kernels}
    assert set(first["kernel_s"]) & set(second["kernel_s"])
    assert 1e-5 < sum(first["kernel_s"].values()) < 1
    assert "kernel_s" not in train_step.run(trial, Context(check=False)).work
    assert counted(first) == ({} if mode == "eager" else NONE)


@pytest.mark.parametrize("backward", ["", "_backward"])
def test_attention_that_a_compiler_made_of_written_out_attention_is_called_so(backward: str) -> None:
    """Seen of torch 2.13 on a CPU: Inductor's fuse_attention takes a ViT's softmax(q k^T) v for flash attention."""
    seen = profiling.Seen([f"aten::_scaled_dot_product_flash_attention_for_cpu{backward}"])
    timed = Measurement(samples={"latency_s": [1.0]})
    compiled = dataclasses.replace(COMPILED, attention="manual", mode="compile")
    with pytest.raises(
        Unsupported, match=r"^torch.compile turned the written-out attention into flash attention: "
    ) as e:
        what_ran.require_attention(compiled, seen, timed)
    assert (e.value.measurement.samples, e.value.measurement.kernels) == ({}, seen.names)
    for other in ({"mode": "eager"}, {"attention": "math"}):  # which no compiler explains
        with pytest.raises(CheckFailed, match="but flash ran"):
            what_ran.require_attention(dataclasses.replace(compiled, **other), seen, timed)
