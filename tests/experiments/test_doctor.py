"""doctor: other projects' packages, all in one form, with the reason where they can't run."""

import importlib.util
from typing import Any

import pytest
import torch

from te_bench.experiments import doctor
from te_bench.kernels.attention.backends import flash4

INSTALL = {
    "flash-attn-4 (attention)": "'flash-attn-4>=4.0.0b3'",
    "liger-kernel (linear cross-entropy)": "liger-kernel",
    "liger-kernel (layernorm)": "liger-kernel",
    "liger-kernel (rmsnorm)": "liger-kernel",
    "torchao (layer torchao_rowwise)": "torchao==",
    "torchao (layer torchao_tensorwise)": "torchao==",
    "transformer_engine (layer transformer_engine)": "--no-build-isolation 'transformer_engine[pytorch]'",
}
MODULES = ("liger_kernel", "torchao", "transformer_engine", "transformer_engine_torch")


def install(monkeypatch: pytest.MonkeyPatch, *modules: str, flash: bool) -> None:
    """Of the rivals these modules alone are there."""
    find = importlib.util.find_spec

    def spec(name: str, *more: Any) -> Any:
        return (object() if name in modules else None) if name in MODULES else find(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", spec)
    monkeypatch.setattr(flash4, "INSTALLED", flash)


def rivals(device: str = "cpu", capability: tuple[int, int] | None = None) -> dict[str, str]:
    return doctor.rivals(device, capability)


def test_every_rival_that_is_missing_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, flash=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for found in (rivals(), rivals("cuda", (9, 0))):
        assert found.keys() == INSTALL.keys()
        for name, answer in found.items():
            assert answer.startswith(f"missing: pip install {INSTALL[name]}")


def test_every_rival_that_is_there_says_why_a_cpu_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *MODULES, flash=True)
    found = rivals()
    assert found.keys() == INSTALL.keys()
    assert all(answer.startswith("needs an NVIDIA GPU") for answer in found.values()), found


def test_on_a_gpu_that_can_each_is_asked_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *MODULES, flash=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert set(rivals("cuda", (9, 0)).values()) == {"ok"}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    old = rivals("cuda", (8, 0))
    assert old["flash-attn-4 (attention)"] == "compute capability 8.0 < 9.0"
    assert "8.9 or newer" in old["torchao (layer torchao_rowwise)"]
    assert old["liger-kernel (rmsnorm)"] == "ok"
    install(monkeypatch, "transformer_engine", flash=True)  # without the extension that it needs
    assert rivals("cuda", (9, 0))["transformer_engine (layer transformer_engine)"].startswith("missing: ")


def test_rivals_are_in_a_section_of_their_own() -> None:
    found = doctor.examine()
    assert found["rivals"].keys() == INSTALL.keys()
    assert not {"torchao", "transformer_engine"} & found["packages"].keys()
