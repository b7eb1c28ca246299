"""The attention workloads: timed with their check, and the appendix's numerics."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from te_bench.experiments import timing
from te_bench.experiments.measurement import CheckFailed, Context, Unsupported
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import attention, attention_numerics
from te_bench.kernels import attention as kernels

SHAPE = {"batch": 2, "heads": 2, "length": 16, "head_dim": 8, "causal": True}
TRIAL = Trial(workload="attention", device="cpu", problem=SHAPE, attention="flash", precision="fp32", protocol="kernel")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "KERNEL_SECONDS", 0.0)


def test_forward_and_backward_are_timed_apart_and_their_work_is_counted() -> None:
    found = attention.run(TRIAL, Context())
    assert {name: len(values) >= 30 for name, values in found.samples.items()} == {
        "forward_s": True,
        "backward_s": True,
    }
    assert found.work == {"forward_flop": 4 * 2 * 2 * 16**2 * 8 // 2, "backward_flop": 5 * 2 * 2 * 16**2 * 8}
    assert [q["name"] for q in found.check["quantities"]] == ["out", "dq", "dk", "dv"]
    full = attention.run(dataclasses.replace(TRIAL, problem={**SHAPE, "causal": False}), Context())
    assert full.work["forward_flop"] == 2 * found.work["forward_flop"]


def replaced(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """flash's forward becomes change(its forward); manual, the reference, stays."""
    real = kernels.load
    wrong = dataclasses.replace(real("flash"), forward=change(real("flash").forward))
    monkeypatch.setattr(kernels, "load", lambda name: wrong if name == "flash" else real(name))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["math", "flash"])
@pytest.mark.parametrize("length", [16, 128])
def test_right_kernels_pass_on_every_seed(name: str, precision: str, length: int) -> None:
    shape = {**SHAPE, "length": length, "head_dim": 32, "heads": 4}
    for seed in range(20):
        trial = dataclasses.replace(TRIAL, attention=name, precision=precision, problem=shape, seed=seed)
        attention.check_attention(trial, attention._bind(trial, kernels.load(name).forward))


@pytest.mark.parametrize(
    "change",
    [
        lambda f: lambda q, k, v, *, causal, scale: -f(q, k, v, causal=causal, scale=scale),
        lambda f: lambda q, k, v, *, causal, scale: 0 * f(q, k, v, causal=causal, scale=scale),
        lambda f: lambda q, k, v, *, causal, scale: f(q, k, v, causal=causal, scale=2 * scale),
        lambda f: lambda q, k, v, *, causal, scale: f(q, k, v, causal=not causal, scale=scale),
        lambda f: lambda q, k, v, *, causal, scale: f(q, k, v.detach(), causal=causal, scale=scale) + 0 * v,
        lambda f: lambda q, k, v, *, causal, scale: f(q, k, v, causal=causal, scale=scale) * float("nan"),
    ],
    ids=["sign", "zero", "scale", "mask", "no gradient of v", "NaN"],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_wrong_kernel_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any], precision: str
) -> None:
    replaced(monkeypatch, change)
    with pytest.raises(CheckFailed, match=r"error .* > ") as caught:
        attention.run(dataclasses.replace(TRIAL, precision=precision), Context())
    assert caught.value.measurement.samples == {}


def test_another_kernel_than_the_one_asked_for_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    math = kernels.load("math").forward
    replaced(monkeypatch, lambda f: math)
    for workload in (attention, attention_numerics):
        with pytest.raises(CheckFailed, match="asked for flash, but"):
            workload.run(TRIAL, Context())


def test_what_the_backend_cannot_do_is_unsupported() -> None:
    for workload in (attention, attention_numerics):
        with pytest.raises(Unsupported, match="cudnn: needs an NVIDIA GPU"):
            workload.run(dataclasses.replace(TRIAL, attention="cudnn"), Context())


def test_numerics_has_one_error_of_each_kind_a_draw_and_they_are_small() -> None:
    found = attention_numerics.run(dataclasses.replace(TRIAL, precision="bf16"), Context())
    assert set(found.samples) == {"error_scale_before", "error_scale_after", "error_sdpa"}
    for errors in found.samples.values():
        assert len(errors) == attention_numerics.DRAWS == len(set(errors))
        assert all(0 < error < 0.05 for error in errors)
    assert found.check["draws"] == attention_numerics.DRAWS
    fp32 = attention_numerics.run(TRIAL, Context())
    assert fp32.check["allclose"] == (fp32.check["allclose_draws"] == attention_numerics.DRAWS)
    assert max(fp32.samples["error_sdpa"]) < 1e-5


def test_numerics_draws_differ_between_seeds() -> None:
    draws = [
        attention_numerics.run(dataclasses.replace(TRIAL, seed=seed), Context()).samples["error_sdpa"]
        for seed in (0, 1)
    ]
    assert not set(draws[0]) & set(draws[1])
