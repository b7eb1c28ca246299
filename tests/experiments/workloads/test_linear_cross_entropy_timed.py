"""A head of the workload `linear_cross_entropy`: checked, then timed, and no wrong one passes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planting import once, only_timed
from torch import Tensor

from te_bench.experiments import timing
from te_bench.experiments.checks import kernel_parts
from te_bench.experiments.measurement import CheckFailed, Context, Measurement
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import linear_cross_entropy as workload
from te_bench.kernels import linear_cross_entropy
from te_bench.kernels.linear_cross_entropy import kernels

HEADS = ["chunked", "fp8", "reference"]  # of no other package
SHAPE = {"n": 60, "d": 32, "vocab": 90, "padded": 96}


@pytest.fixture(autouse=True)
def _once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "kernel", once)
    monkeypatch.setattr(workload, "CHECKED_TOGETHER", 25 * 96)  # rows in three parts, the last of 10
    monkeypatch.setattr(kernels, "INTERPRETED", False)


def run(head: str, precision: str = "bf16", device: str = "cpu", mode: str = "eager") -> Measurement:
    problem = {**SHAPE, "head": head}
    return workload.run(
        Trial(
            workload="linear_cross_entropy", device=device, problem=problem, attention="none", precision=precision,
            protocol="kernel", mode=mode,
        ),
        Context(),
    )  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("head", HEADS)
def test_is_checked_and_timed(head: str, precision: str) -> None:
    found = run(head, precision)
    assert found.samples.keys() == {"kernel_s", "peak_rss_bytes"}
    assert len(found.samples["kernel_s"]) == 1
    assert found.work.keys() == {"flop", "ran"}
    assert found.work["flop"] == 6 * 60 * 32 * 96
    assert {name for name in HEADS if found.work["ran"].get(f"head_{name}")} == {head} - {"reference"}
    of_each = [f"{name}{test}" for name in ("dx", "dW") for test in ("", ", scale", ", worst row")]
    assert [q["name"] for q in found.check["quantities"]] == ["loss", *of_each]


def test_compiled_it_is_checked_as_it_is_timed() -> None:
    found = run("reference", mode="compile")
    assert found.check["quantities"]
    assert (found.work["graph_breaks"], found.work["recompiles"]) == (0, 0)
    assert found.work["ran"]["compiled"]


class _Spoilt(torch.autograd.Function):
    """The identity, whose gradient is another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wrong: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.wrong = wrong
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.wrong(dx), None


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": torch.zeros_like,
    "sign": torch.neg,
    "double": lambda x: 2 * x,
    "a row": lambda x: torch.where((torch.arange(len(x)) == x.norm(dim=1).argmax())[:, None], 0, x),
    "not a number": lambda x: torch.where((torch.arange(len(x)) == 3)[:, None], torch.nan, x),
}


@pytest.mark.parametrize("wrong", [*WRONG, "loss", "padding"])
@pytest.mark.parametrize("which", ["x", "weight"])
@pytest.mark.parametrize("head", ["chunked", "fp8"])
def test_a_wrong_head_fails(head: str, which: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, load = linear_cross_entropy.load(head), linear_cross_entropy.load

    def forward(x: Tensor, weight: Tensor, targets: Tensor, *, vocab: int) -> Tensor:
        if wrong == "padding":
            vocab = len(weight)
        if wrong in WRONG:
            x = _Spoilt.apply(x, WRONG[wrong]) if which == "x" else x
            weight = _Spoilt.apply(weight, WRONG[wrong]) if which == "weight" else weight
        loss = right.forward(x, weight, targets, vocab=vocab)
        return loss + (0.05 * loss).detach() if wrong == "loss" else loss

    spoilt = dataclasses.replace(right, forward=forward)
    monkeypatch.setattr(linear_cross_entropy, "load", lambda name: spoilt if name == head else load(name))
    with pytest.raises(CheckFailed):
        run(head)


@pytest.mark.parametrize("head", HEADS)
def test_a_head_that_is_wrong_only_when_timed_fails(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, load, now = linear_cross_entropy.load(head), linear_cross_entropy.load, only_timed(monkeypatch, "kernel")

    def forward(x: Tensor, weight: Tensor, *given: Any, **said: Any) -> Tensor:
        weight = _Spoilt.apply(weight, torch.zeros_like) if now() else weight
        return right.forward(x, weight, *given, **said)

    spoilt = dataclasses.replace(right, forward=forward)
    monkeypatch.setattr(linear_cross_entropy, "load", lambda name: spoilt if name == head else load(name))
    with pytest.raises(CheckFailed, match=r"^dW"):
        run(head)


@pytest.mark.parametrize("whole", [True, False], ids=["loaded", "within"])
@pytest.mark.parametrize(("asked", "who"), [(a, b) for a in HEADS for b in HEADS if a != b and "fp8" not in (a, b)])
def test_a_head_by_another_backend_fails(asked: str, who: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    load = linear_cross_entropy.load
    other = load(who) if whole else dataclasses.replace(load(asked), forward=load(who).forward)
    monkeypatch.setattr(linear_cross_entropy, "load", lambda name: other if name == asked else load(name))
    kernel_parts.kernels_of.cache_clear()
    with pytest.raises(CheckFailed, match=r"^head chunked: (0|1 or more) expected, [01] ran$") as caught:
        run(asked, "fp32")
    assert caught.value.measurement.samples == {}


@pytest.mark.gpu
@pytest.mark.parametrize("head", HEADS)
def test_on_a_gpu(head: str) -> None:
    assert run(head, device="cuda").kernels


@pytest.mark.gpu
def test_on_a_gpu_compiled() -> None:
    assert any("triton" in name for name in run("reference", device="cuda", mode="compile").kernels)
