"""Each trap is found where it is planted, and in a clean model none."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from advice_machine import question, survey_work
from journals import record, trial
from torch import Tensor, nn

from te_bench.advice import traps
from te_bench.advice.decision import LinearGain
from te_bench.advice.parts import PartTime
from te_bench.experiments.spec import Record
from te_bench.experiments.workloads.survey import look
from te_bench.kernels import attention
from te_bench.models import adopted

CLEAN = survey_work(question(), vocab=50304)
(CALL,) = CLEAN["attentions"]


def survey(**changes: Any) -> Record:
    return record(trial("survey"), work={**CLEAN, **changes})


def step(milliseconds: float, mode: str, breaks: int = 0, seed: int = 0) -> Record:
    samples = {"latency_s": [milliseconds / 1e3] * 20}
    return record(trial(mode=mode, seed=seed), samples=samples, work={"graph_breaks": breaks})


def gain(bf16_ms: float, fp8_ms: float) -> LinearGain:
    bf16, fp8 = (PartTime(seconds=ms / 1e3, products=None, record=record(trial())) for ms in (bf16_ms, fp8_ms))
    return LinearGain(sizes=(4096, 768, 768), calls=12, bf16=bf16, fp8=fp8, recipe="delayed_scaling")


def call(**changes: Any) -> dict[str, Any]:
    return {"attentions": [{**CALL, **changes}]}


def test_a_gpu_that_waits_for_python_is_told() -> None:
    profiles = ({"kernel_s": {"gemm": gemm, "norm": 0.02}} for gemm in (0.06, 0.075))
    waits, busy = (dataclasses.replace(step(100, "eager"), work=work) for work in profiles)
    (found,) = traps.findings(survey(), [waits], [])
    assert found.name == "launches"
    assert found.what == "The GPU waits for Python in 20.0 % of a step."
    assert found.seconds == pytest.approx(0.02)
    assert traps.findings(survey(), [busy], []) == []


PLANTED: dict[str, tuple[str, Mapping[str, Any], str]] = {
    "a mask": ("attention", call(kernel="math", mask=True), "given a mask"),
    "a mask, mem_efficient": ("attention", call(kernel="mem_efficient", mask=True), "given a mask"),
    "a dtype": ("attention", call(kernel="math", dtype="float32"), "dtype is float32"),
    "a head size": ("attention", call(kernel="math", head_dim=257), "heads have 257 features"),
    "attention's dropout": ("attention", call(kernel="math", dropout=0.1), "dropout is 0.1"),
    "written out": ("attention", {"written_out": 12}, "every score is written"),
    "vocabulary": ("vocabulary", {"vocab": 50257}, "not aligned"),
    "logits": ("logits", {"losses": [{"classes": 50304, "dtype": "float32", "elements": 2**29}]}, "twice as large"),
    "experts": ("experts", {"experts_in_float32": 4}, "does not reach grouped_mm"),
    "norms": ("norms", {"norms": 2**24, "norms_in_float32": 2**24}, "computes and returns them in float32"),
    "optimizer": ("optimizer", {"optimizer": {"name": "AdamW", "fused": False}}, "several kernels"),
    "dropout": ("dropout", {"dropout": {"h.0.drop": 0.2}}, "have none"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_trap_is_found_with_its_reason_and_its_mend(planted: str) -> None:
    name, changes, why = PLANTED[planted]
    found = {finding.name: finding for finding in traps.findings(survey(**changes), (), ())}
    assert why in found[name].why
    assert found[name].mend.endswith(".")
    assert found[name].records
    assert set(found) <= {name, "dropout"}  # dropout in attention is one of its own, too


def test_a_classifiers_few_rows_need_no_padding() -> None:
    """As a ViT's: 64 images, 1000 classes."""
    head = {"rows": 64, "in_features": 1024, "out_features": 1000, "calls": 1, "kept": 0}
    assert traps.findings(survey(vocab=1000, linears=[*CLEAN["linears"], head]), (), ()) == []
    (found,) = traps.findings(survey(vocab=1000, linears=[*CLEAN["linears"], {**head, "rows": 8192}]), (), ())
    assert found.name == "vocabulary"


def test_a_clean_model_has_none() -> None:
    eager, compiled = step(20, "eager"), step(15, "compile")
    assert traps.findings(survey(optimizer={"name": "AdamW", "fused": True}), [eager], [compiled], [gain(2, 1)]) == []


def test_a_compile_that_is_slower_and_graph_breaks_are_found_with_their_cost() -> None:
    eager, compiled = [step(78, "eager", seed=seed) for seed in range(3)], step(100, "compile", breaks=3)
    slower, broken = traps.findings(survey(), eager, [compiled])
    assert slower.name == "compile"
    assert slower.seconds == pytest.approx(0.022)
    assert slower.records == (*(record.trial.id for record in eager), compiled.trial.id)
    assert broken.name == "graph_breaks"
    assert "3 times" in broken.what


def test_a_compile_that_takes_attentions_fast_kernel_away_is_found() -> None:
    eager, compiled = step(20, "eager"), step(15, "compile")
    kernels = ["void pytorch_flash::flash_fwd_kernel<64>", "fmha_cutlassF_bf16_aligned_64x64", "nvjet_tst"]
    eager = dataclasses.replace(eager, kernels=[kernels[0], kernels[2]])
    for ran, said in (([kernels[1]], "memory-efficient"), ([kernels[2]], "none of SDPA's")):
        (found,) = traps.findings(survey(), [eager], [dataclasses.replace(compiled, kernels=ran)])
        assert (found.name, said in found.what) == ("compiled_attention", True)
    assert traps.findings(survey(), [eager], [dataclasses.replace(compiled, kernels=eager.kernels)]) == []


def test_a_compile_that_gives_attention_a_mask_is_found_with_its_cost() -> None:
    """The kernels of Llama 3.2 1B on an H200: cuDNN's in both modes."""
    kernels = [f"cudnn_generated_fort_native_sdpa_sm90_flash_{way}" for way in ("fprop_wgmma", "bprop")]

    def ran(ms: float, mode: str, *attention: float) -> Record:
        record = step(ms, mode)
        seconds = dict(zip(kernels, attention, strict=True)) | {"nvjet_sm90_tst_128x256": 0.17}
        return dataclasses.replace(record, kernels=kernels, work={**record.work, "kernel_s": seconds})

    eager = ran(209, "eager", 0.0101, 0.0267)
    masked, _ = traps.findings(survey(), [eager], [ran(238, "compile", 0.0346, 0.0890)])
    assert masked.name == "compiled_attention"
    assert masked.seconds == pytest.approx(0.0868)
    assert "123.6 ms of a step, in eager mode 36.8" in masked.what
    assert traps.findings(survey(), [eager], [ran(200, "compile", 0.0107, 0.0302)]) == []


def test_one_run_within_the_spread_of_the_others_decides_nothing() -> None:
    """Of eager's runs one was slower than compile's only one; and of one run of each nobody knows the spread."""
    assert (
        traps.findings(survey(), [step(100, "eager")], [step(101, "compile")]) == []
    )  # no slower than two runs differ
    spread = [step(ms, "eager", seed=seed) for seed, ms in enumerate((90, 95, 300))]
    for eager in (spread, spread[:1]):
        (found,) = traps.findings(survey(), eager, [step(250, "compile")])
        assert "looked slower (one run)" in found.what
        assert "not decided" in found.what
        assert found.seconds is None


def test_a_linear_that_is_too_small_for_fp8_is_found_with_its_cost_unless_its_times_were_disturbed() -> None:
    small = gain(1.0, 1.5)
    noisy = dataclasses.replace(small, fp8=dataclasses.replace(small.fp8, spread=3.0))
    assert traps.findings(survey(), (), (), [noisy, dataclasses.replace(small, step_s=0.005)]) == []
    (found,) = traps.findings(survey(), (), (), [gain(1.0, 1.5), gain(3.0, 2.0)])
    assert found.name == "small_fp8_layer"
    assert found.seconds == pytest.approx(12 * 0.5e-3)
    assert "768 to 768" in found.what


def test_the_dearest_comes_first_and_costs_that_were_measured_are_told() -> None:
    found = traps.findings(
        survey(vocab=50257, written_out=12),
        [step(10, "eager", seed=seed) for seed in range(2)],
        [step(12, "compile")],
        seconds={"attention": 0.05},
        noisy={"attention"},
    )
    assert [finding.name for finding in found] == ["attention", "compile", "vocabulary"]
    assert [finding.cost for finding in found] == ["50.0 ms a step (noisy)", "2.00 ms a step", "not measured"]


class Planted(nn.Module):
    """A model of one block with a mask where a flag would do, dropout, an odd vocabulary and float32 logits."""

    def __init__(self, dropout: float):
        super().__init__()
        self.embedding, self.qkv, self.head = nn.Embedding(1001, 64), nn.Linear(64, 192), nn.Linear(64, 1001)
        self.dropout = dropout

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        q, k, v = (t.view(2, 600, 1, 64).transpose(1, 2) for t in self.qkv(self.embedding(tokens)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return F.cross_entropy(self.head(y.reshape(2, 600, 64)).float().flatten(0, 1), targets.flatten())


def test_a_model_that_trains_slowly_is_seen_through() -> None:
    adopted.pin(adopted.OWN)
    tokens = torch.zeros(2, 600, dtype=torch.int64)
    found = traps.findings(record(trial("survey"), work=look(Planted(0.1), tokens, tokens, "bf16")), (), ())
    assert {finding.name for finding in found} == {"attention", "vocabulary", "logits", "dropout"}
    assert "math" in next(f.what for f in found if f.name == "attention")


def test_kernels_are_told_as_the_attention_backends_tell_them() -> None:
    for name in ("flash", "cudnn"):
        assert attention.load(name).kernels["cuda"] in traps.FAST_KERNEL.pattern
    assert attention.load("mem_efficient").kernels["cuda"] == traps.MEM_EFFICIENT.pattern
