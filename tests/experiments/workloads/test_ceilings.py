"""The ceilings: what is timed is what it says, and is checked before."""

import dataclasses

import pytest
import torch
from torch import Tensor

from te_bench.experiments import timing
from te_bench.experiments.measurement import CheckFailed, Context, Measurement
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import ceilings
from te_bench.kernels.gemm.backends import scaled_mm

TRIAL = Trial(
    workload="ceilings", device="cpu", problem={"copy_bytes": 2**20, "edge": 128}, attention="none", protocol="kernel"
)


def run(trial: Trial = TRIAL, **context: bool) -> Measurement:
    return ceilings.run(trial, Context(**context))  # type: ignore[arg-type]


def test_a_cpu_has_a_copy_and_a_bf16_gemm() -> None:
    found = run()
    assert sorted(found.samples) == ["copy_s", "gemm_bf16_s"]
    assert all(len(samples) >= 30 and min(samples) > 0 for samples in found.samples.values())
    assert found.work == {"copy_bytes": 2 * 2**20, "gemm_flop": 2 * 128**3}
    assert [q["name"] for q in found.check["quantities"]] == ["bf16 GEMM"]


def test_the_timed_copy_reads_and_writes_what_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def once(call, device):  # type: ignore[no-untyped-def]
        assert device == "cpu"
        seen.append(call())
        return [1.0]

    monkeypatch.setattr(timing, "kernel", once)
    run()
    product, copied = seen
    assert product.shape == (128, 128)
    assert 2 * copied.nbytes == run().work["copy_bytes"]
    assert copied.float().std().item() == pytest.approx(1, abs=0.01)  # zeros would draw less power


def test_a_wrong_product_is_no_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: right(a, b, out=out).mul_(1.05))
    with pytest.raises(CheckFailed, match="bf16 GEMM: error"):
        run()


@pytest.mark.parametrize("wrong", [{"edge": 0}, {"edge": 100}, {"copy_bytes": -4}, {"copy_bytes": 1}])
def test_sizes_that_would_measure_something_else(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be even and edge"):
        run(dataclasses.replace(TRIAL, problem={**TRIAL.problem, **wrong}))


@pytest.mark.gpu
def test_a_gpu_has_fp8_where_cublaslt_has(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = dataclasses.replace(TRIAL, device="cuda", problem={"copy_bytes": 2**26, "edge": 4096})
    found = run(on_gpu)
    gemms = {name: s for name, s in found.samples.items() if "gemm" in name}
    rate = {name: found.work["gemm_flop"] / sorted(s)[len(s) // 2] for name, s in gemms.items()}
    assert rate["gemm_fp8_s"] > 1.3 * rate["gemm_bf16_s"]
    monkeypatch.setattr(scaled_mm, "unsupported", lambda _: "not here")
    assert "gemm_fp8_s" not in run(on_gpu).samples
