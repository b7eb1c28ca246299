"""Without a GPU, but for tests marked `gpu`."""

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from on_cpu import on_the_cpu_unless_marked
from torch import nn

from te_bench.models import cost

__all__ = ["on_the_cpu_unless_marked"]


@pytest.fixture
def compiled_once() -> Iterator[None]:
    """Nothing is compiled a second time."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the elements from which on a model counts as large: with 0 every model does."""
    return functools.partial(monkeypatch.setattr, cost, "ONCE")


class Converted(nn.Linear):
    """What torchao puts in a Linear's place."""


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in of torchao as far as it is called; the recipes that it was asked for."""
    asked: list[str] = []

    def convert(model: nn.Module, *, config: str, module_filter_fn: Callable[[nn.Module, str], bool]) -> nn.Module:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and module_filter_fn(module, name):
                module.__class__ = Converted
        return model

    def from_recipe_name(name: str) -> str:
        asked.append(name)
        return name

    float8: Any = types.ModuleType("torchao.float8")
    float8.convert_to_float8_training = convert
    float8.Float8LinearConfig = types.SimpleNamespace(from_recipe_name=from_recipe_name)
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", float8)
    return asked
