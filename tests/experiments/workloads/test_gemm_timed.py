"""A GEMM of the workload `gemm`: checked, then timed, and no wrong one passes."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planting import once
from torch import Tensor

from te_bench.experiments import timing
from te_bench.experiments.measurement import CheckFailed, Context, Measurement, Unsupported
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import gemm as workload
from te_bench.kernels import gemm
from te_bench.kernels.activation.backends import reference as activation
from te_bench.kernels.gemm import half
from te_bench.kernels.quantize import Operand

SIZES = {"m": 48, "n": 32, "k": 64}
FP8 = {**SIZES, "dtype": "e4m3", "scales": "tensor", "fast_accum": True, "backend": "reference"}
BLOCK = {**FP8, "k": 192, "scales": "block", "fast_accum": False}
HALF = {**SIZES, "dtype": "bf16", "backend": "torch"}
ACTIVATED = {**SIZES, "dtype": "bf16", "epilogue": "activated", "backend": "separate"}
GRADIENT = {**ACTIVATED, "epilogue": "gradient"}


@pytest.fixture(autouse=True)
def _once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "kernel", once)
    monkeypatch.setattr(workload, "CHECKED_TOGETHER", 20 * 32)  # rows in three parts, the last of 8


def run(problem: dict[str, object], device: str = "cpu") -> Measurement:
    trial = Trial(workload="gemm", device=device, problem=problem, attention="none", protocol="kernel")  # type: ignore[arg-type]
    return workload.run(trial, Context())


@pytest.mark.parametrize("problem", [FP8, {**FP8, "scales": "row"}, BLOCK, HALF, ACTIVATED, GRADIENT], ids=str)
def test_is_checked_and_timed(problem: dict[str, object]) -> None:
    found = run(problem)
    assert [len(seconds) for seconds in found.samples.values()] == [1]
    assert found.work == {"flop": 2 * 48 * 32 * (192 if problem is BLOCK else 64)}
    names = ["D", "f(D)"] if problem.get("epilogue") == "activated" else ["D"]
    assert [q["name"] for q in found.check["quantities"]] == names
    assert all(q["error"] <= q["limit"] for q in found.check["quantities"])


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": torch.zeros_like,
    "sign": torch.neg,
    "double": lambda x: 2 * x,
    "one element": lambda x: torch.where(x.abs() == x.abs().max(), 0, x),
    "not a number": lambda x: torch.where(torch.arange(x.numel()).view(x.shape) == 7, torch.nan, x),
    "2 % too large": lambda x: 1.02 * x,
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("problem", [FP8, {**FP8, "scales": "row"}, BLOCK], ids=["tensor", "row", "block"])
def test_a_wrong_fp8_product_fails(problem: dict[str, object], wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gemm.load("reference")
    spoilt = dataclasses.replace(right, forward=lambda *args, **options: WRONG[wrong](right.forward(*args, **options)))
    monkeypatch.setattr(gemm, "load", lambda name: spoilt if name == "triton" else right)
    with pytest.raises(CheckFailed, match="D: error"):
        run({**problem, "backend": "triton"})


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("which", [0, 1])
def test_a_wrong_epilogue_fails(which: int, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def activated(x: Tensor, up: Tensor, bias: None, kind: str) -> tuple[Tensor, ...]:
        h = x @ up.t()
        return tuple(WRONG[wrong](t) if i == which else t for i, t in enumerate((h, activation.forward(h, kind))))

    monkeypatch.setattr(half, "activated", activated)
    monkeypatch.setattr(half, "unsupported", lambda *_: None)
    with pytest.raises(CheckFailed, match=r"^D: error" if which == 0 else r"^f\(D\): error"):
        run({**ACTIVATED, "backend": "gluon"})


def test_what_cannot_run_here_says_why() -> None:
    for problem in ({**FP8, "backend": "scaled_mm"}, *({**p, "backend": "gluon"} for p in (FP8, HALF, GRADIENT))):
        with pytest.raises(Unsupported, match=f"{problem['backend']}: "):
            run(problem)
    with pytest.raises(Unsupported, match="multiples of 8"):
        run({**HALF, "n": 30, "backend": "gluon"})


@pytest.mark.parametrize(("which", "element"), [(None, None), (0, (5, 1)), (1, (0, 1))], ids=str)
def test_blocks_by_te_benchs_kernel_fail_with_one_scale_doubled(
    which: int | None, element: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, load = gemm.load("triton"), gemm.load

    def forward(*operands: Operand, **options: Any) -> Tensor:
        given = list(operands)
        if which is not None:
            scale_inv = given[which].scale_inv.clone()
            scale_inv[element] *= 2
            given[which] = given[which]._replace(scale_inv=scale_inv)
        out: Tensor = right.forward(*given, **options)
        return out

    spoilt = dataclasses.replace(right, forward=forward)
    monkeypatch.setattr(gemm, "load", lambda name: spoilt if name == "triton" else load(name))
    with pytest.raises(CheckFailed, match="D: error") if which is not None else contextlib.nullcontext():
        assert run({**BLOCK, "backend": "triton"}).samples


@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem",
    [{**FP8, "backend": name} for name in ("scaled_mm", "triton", "gluon")]
    + [{**BLOCK, "backend": name} for name in ("scaled_mm", "triton")]
    + [{**p, **by} for p in (HALF, ACTIVATED, GRADIENT) for by in ({}, {"backend": "gluon"})],
    ids=str,
)
def test_on_a_gpu(problem: dict[str, object]) -> None:
    if problem["backend"] == "gluon" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    found = run({**problem, "m": 1000, "n": 512, "k": 768}, "cuda")
    assert found.kernels
