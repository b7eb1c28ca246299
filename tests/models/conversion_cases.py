"""A model to convert, with a layer of each kind, and what the results of conversions are held to."""

import torch
from torch import Tensor, nn

import te_bench.models as te
from te_bench.models import fp8, recipe

RECIPES = [recipe.DelayedScaling(amax_history_len=4), *(recipe.load(name) for name in recipe.names()[1:])]


def error(x: Tensor, exact: Tensor) -> float:
    return ((x - exact).norm() / exact.norm()).item()


class Tiny(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 64)
        self.down = nn.Linear(64, width, bias=False)

    def forward(self, x: Tensor, fail: BaseException | None = None, again: int = 0) -> Tensor:
        assert fp8.is_fp8_enabled() is isinstance(self.up, te.Linear)
        if fail is not None:
            raise fail
        if again:
            x = self(x, again=again - 1)
            assert fp8.is_fp8_enabled()
        out: Tensor = self.down(self.up(self.norm(x)).relu())
        return out


def an_input() -> Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(2))


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)
