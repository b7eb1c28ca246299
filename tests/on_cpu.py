"""Modules choose the GPU where there is one, as Transformer Engine's do: tests that are not marked `gpu` see none."""

import pytest
import torch


@pytest.fixture(autouse=True)
def on_the_cpu_unless_marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
