"""Gluon's FP8 attention: where it is chosen. test_gluon_attention_barriers and _arithmetic have its kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.attention.backends import triton_fp8
from te_bench.kernels.attention.fp8_quantize import Heads
from te_bench.kernels.attention.hopper import fp8_launch as launch
from te_bench.kernels.attention.portable import fp8_backward, fp8_forward


@pytest.mark.parametrize(
    ("changes", "gluon"),
    [
        ({}, True),
        ({"width": 64}, False),
        ({"features": 64}, False),
        ({"width": 64, "features": 64}, False),
        ({"device": "cpu"}, False),
        ({"capability": (8, 9)}, False),
        ({"capability": (10, 0)}, False),
        ({"interpret": True}, False),
    ],
    ids=str,
)
def test_where_it_is(changes: dict[str, Any], gluon: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "width": 128, "features": 128, "device": "cuda", "capability": (9, 0), "interpret": False,
    } | changes  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: given["capability"])
    monkeypatch.setattr(triton_fp8.triton.knobs.runtime, "interpret", given["interpret"])
    monkeypatch.setattr(triton_fp8, "_has_gluon", triton_fp8._has_gluon.__wrapped__)  # it remembers each device

    class There(Tensor):
        device = torch.device(given["device"])  # type: ignore[assignment]

    assert triton_fp8._in_gluon(torch.empty(1, 2, 5, given["width"]).as_subclass(There), given["features"]) is gluon


def test_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "processors", lambda _: 132)
    for sizes, pays in (((1, 22, 1024), True), ((1, 21, 1024), False), ((64, 64, 511), False), ((8, 32, 512), True)):
        assert launch.forward_pays(torch.empty(*sizes, 0)) is pays, sizes
    for rows, keys, pays in ((1, 256, True), (4096, 255, False), (2**24 - 64, 256, True), (2**24 - 63, 256, False)):
        given = torch.empty(1, 1, rows, 0), torch.empty(1, 1, keys, 0)
        assert launch.backward_pays(*given) is pays, (rows, keys)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("pays", [False, True])
def test_who_is_chosen(pays: bool, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gluon's forward pass has the same bits in every run, its backward pass has not."""
    ran = list[str]()
    monkeypatch.setattr(triton_fp8, "_in_gluon", lambda *_: True)
    for name in ("forward", "backward"):
        monkeypatch.setattr(launch, f"{name}_pays", lambda *_: pays)
        monkeypatch.setattr(launch, name, lambda *_, name=name: (ran.append(f"Gluon's {name}"), (None, None))[1])
    monkeypatch.setattr(fp8_forward, "forward", lambda *_: (ran.append("Triton's forward"), (None, None))[1])
    monkeypatch.setattr(fp8_backward, "backward", lambda *_: ran.append("Triton's backward"))
    q = torch.empty(1, 1, 5, 128)
    monkeypatch.setattr(triton_fp8.fp8_quantize, "quantize", lambda *_, keep: [Heads(q, q, q)] * 3)
    triton_fp8._forward(q, q, q, True, 1.0, True)
    triton_fp8._backward(*[q] * 11, True, 1.0, True, deterministic)
    whose = ["Gluon" if pays else "Triton", "Gluon" if pays and not deterministic else "Triton"]
    assert ran == [f"{whose[0]}'s forward", f"{whose[1]}'s backward"]
