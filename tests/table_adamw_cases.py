"""What the tests of the table's AdamW share: small steps, their batches and losses."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_bench.models as te
from te_bench.models import recipe as recipes
from te_bench.models.zoo.gpt import GPT, GPTConfig
from te_bench.training.data import Batches
from te_bench.training.step import Optim, TrainStep

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=50)
OPTIM = Optim(learning_rate=2.0**-8, grad_clip=0.5)
DELAYED, CURRENT = "delayed_scaling", "float8_current_scaling"
Batch = tuple[Tensor, Tensor]


def a_step(
    precision: str,
    optimizer: str | None = "reference",
    *,
    recipe: str = CURRENT,
    head: str | None = None,
    optim: Optim = OPTIM,
    nudge: int | None = None,
    mode: str = "eager",
    blocks: str | None = None,
    halved: bool = False,
    states: str | None = None,
    seed: int = 0,
    **config: Any,
) -> TrainStep:
    """halved: bf16 weights."""
    torch.manual_seed(seed)
    found = recipes.load(recipe) if precision == "fp8" else None
    shape = dataclasses.replace(SMALL, **config)
    model = GPT(shape, attention="manual", padded_vocab_size=64, recipe=found, head=head, blocks=blocks)
    if halved:
        model.halve()
    if nudge is not None:
        model.perturb(nudge)
    return TrainStep(model, optim, precision=precision, mode=mode, optimizer=optimizer, states=states)


class Moved(nn.Module):
    """Every training pass moves its buffers, its scales and torch's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(64, 32), nn.BatchNorm1d(32), te.Linear(32, 64)

    def autocast(self, enabled: bool = True) -> te.autocast:
        return te.autocast(enabled, recipe=recipes.load(DELAYED))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = F.dropout(self.norm(self.tokens(tokens).flatten(0, 1)), 0.5, self.training)
        return F.cross_entropy(self.head(x).float(), targets.flatten())


def a_moved_step(optimizer: str | None = None) -> TrainStep:
    torch.manual_seed(0)
    return TrainStep(Moved(), OPTIM, precision="fp8", mode="eager", optimizer=optimizer)


def a_batch(k: int = 0) -> Batch:
    return Batches(None, block=16, batch=8, vocab=50, seed=7).at(k % 4)


def losses(step: TrainStep, steps: int = 30) -> list[float]:
    """At rates that float32 holds exactly: torch's fused AdamW on a CPU takes them in float64."""
    found = []
    for k in range(steps):
        step.set_rate(2.0**-10 * (1 + k % 3))
        found.append(step(*a_batch(k)).item())
    return found


def weights(step: TrainStep) -> list[Tensor]:
    return [p.detach().clone() for p in step.model.parameters()]


def furthest(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def furthest_gradient(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """The largest |found - wanted| / |wanted| of a parameter's."""
    assert list(wanted) == list(found)
    return max(((wanted[name] - found[name]).norm() / wanted[name].norm()).item() for name in wanted)
