"""A recipe with scales of its own is one file: blocks of 1 x 32 and scales that are powers of two, in a byte each.

That is MXFP8's arithmetic. Linear, its relatives, fused blocks and te.numerics know nothing of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from module_cases import randomise
from torch import Tensor, nn

import te_bench.models as te
from te_bench.kernels.gemm.backends import reference
from te_bench.kernels.quantize import Layout, Operand, Quantized
from te_bench.kernels.quantize.backends.reference import dequantize
from te_bench.models import recipe
from te_bench.models.recipe import Recipe, Slot, State

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
SHARED = Layout(E4M3, (1, 32), E8M0)


@dataclass(frozen=True)
class Microscaling(Recipe):
    """scale_inv of 32 elements = the power of two from amax / 448 upwards, 2^-127 to 2^127; the GEMM is the reference's."""

    def quantize(
        self, x: Tensor, role: str, slot: Slot, *, rowwise: bool, columnwise: bool, column_sum: Tensor | None = None
    ) -> Quantized:
        if column_sum is not None:
            column_sum += x.sum(0, dtype=torch.float32)
        row = _cast(x) if rowwise else (None, None)
        return Quantized(*row, *(_cast(x.t()) if columnwise else (None, None)), SHARED)

    def gemm(self, a: Operand, b: Operand, gemm: str, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        assert a.layout == b.layout == SHARED
        return reference.dequantized(a, b, out_dtype=out_dtype, bias=bias)


def _cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (rows, K) by blocks along K, of which the last may be shorter."""
    rows, k = x.shape
    v = nn.functional.pad(x.detach().float(), (0, -k % 32)).view(rows, -1, 32)
    exponent = torch.log2(v.abs().amax(2) / 448).ceil().clamp(-127, 127)
    scale_inv = torch.exp2(exponent)
    data = (v / scale_inv[:, :, None]).clamp(-448, 448).to(E4M3)
    return data.view(rows, -1)[:, :k].contiguous(), scale_inv.to(E8M0)


class Steps(State):
    """How many steps the recipe has taken, as something that it keeps of a module."""

    saved = ("microscaling_steps",)

    def __init__(self, recipe: Recipe, gemms: int, device: torch.device):
        self.recipe, self.steps = recipe, torch.zeros((), device=device)
        self.slots = {(role, gemm): Slot() for role in ("input", "weight", "grad_output") for gemm in range(gemms)}

    @property
    def device(self) -> torch.device:
        return self.steps.device

    def figures(self, role: str, gemm: int) -> dict[str, float]:
        return {"steps": self.steps.item()}

    def tensors(self) -> dict[str, Tensor]:
        return {"microscaling_steps": self.steps}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        if "microscaling_steps" in saved:
            self.steps.copy_(saved["microscaling_steps"])

    def to(self, device: torch.device) -> None:
        self.steps = self.steps.to(device)


@dataclass(frozen=True)
class CountedMicroscaling(Microscaling):
    def make_state(self, gemms: int, device: torch.device) -> State:
        return Steps(self, gemms, device)

    def update(self, states: Sequence[Any], group: Any = None) -> None:
        for state in states:
            state.steps += 1


def snr(exact: Tensor, found: Tensor) -> float:
    """Signal to noise, in dB."""
    return 20 * torch.log10(exact.norm() / (found - exact).norm()).item()


def test_both_orientations_have_scales_of_their_own() -> None:
    x = torch.randn(40, 72) * 10 ** torch.empty(40, 72).uniform_(-2, 2)
    q = Microscaling().quantize(x, "input", Slot(), rowwise=True, columnwise=True)
    assert (q.scale_inv.shape, q.scale_inv_t.shape) == ((40, 3), (72, 2))
    for operand, exact in ((q.by_rows(), x), (q.by_columns(), x.t())):
        assert operand.scale_inv.dtype == E8M0
        assert snr(exact, dequantize(operand)) > 28


def test_linear_multiplies_what_the_recipe_made() -> None:
    torch.manual_seed(0)
    layer = te.Linear(72, 40, device="cpu")
    x, dy = torch.randn(24, 72, requires_grad=True), torch.randn(24, 40)
    with te.autocast(recipe=Microscaling()):
        y = layer(x)
    y.backward(dy)
    weight = layer.weight.detach()
    rows, columns = ({"rowwise": way, "columnwise": not way} for way in (True, False))

    def cast(t: Tensor, **way: bool) -> Tensor:
        q = Microscaling().quantize(t.detach(), "", Slot(), **way)
        return dequantize(q.by_rows() if way["rowwise"] else q.by_columns())

    assert torch.equal(y, cast(x, **rows) @ cast(weight, **rows).t() + layer.bias)
    assert torch.equal(x.grad, cast(dy, **rows) @ cast(weight, **columns).t())
    assert torch.equal(layer.weight.grad, cast(dy, **columns) @ cast(x, **columns).t())
    torch.testing.assert_close(layer.bias.grad, dy.sum(0))


def losses(asked: Recipe | None) -> list[float]:
    """Of 60 steps towards another layer's outputs."""
    torch.manual_seed(0)
    layer, x = te.Linear(64, 32, device="cpu"), torch.randn(128, 64)
    wanted = x @ torch.randn(64, 32) / 8
    optimizer, found = torch.optim.AdamW(layer.parameters(), lr=1e-2, weight_decay=0), []
    for _ in range(60):
        with te.autocast(enabled=asked is not None, recipe=asked):
            loss = nn.functional.mse_loss(layer(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_it_trains_a_linear() -> None:
    exact, found = losses(None), losses(Microscaling())
    assert found[-1] < 0.1 * found[0]
    assert found != exact
    assert all(abs(a - b) < 0.02 * exact[0] for a, b in zip(exact, found, strict=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda: te.LayerNormLinear(64, 96, device="cpu"),
        lambda: te.LayerNormMLP(64, 128, device="cpu"),
        lambda: te.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cpu"),
    ],
)
def test_it_trains_the_other_modules(make: Callable[[], nn.Module]) -> None:
    """A TransformerLayer by its fused path: nobody listens to its modules."""
    module, x = randomise(make()), torch.randn(32, 2, 64)
    results = []
    for asked in (None, Microscaling()):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        with te.autocast(enabled=asked is not None, recipe=asked):
            y = module(leaf)
        y.square().mean().backward()
        results.append([y.detach(), leaf.grad, *(p.grad for p in module.parameters())])
    for exact, found in zip(*results, strict=True):
        if exact.norm() > 1e-6:  # the gradient of a key's bias is 0
            assert snr(exact, found) > 15


def test_it_compiles() -> None:
    layer, x = te.Linear(64, 32, device="cpu"), torch.randn(16, 64)
    found = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        layer.zero_grad()
        with te.autocast(recipe=Microscaling()):
            y = run(x)
        y.square().sum().backward()
        found.append([y.detach(), *(p.grad.clone() for p in layer.parameters())])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(eager, compiled)


def test_what_it_keeps_goes_into_state_dicts_and_te_numerics() -> None:
    layer, x = te.Linear(64, 32, device="cpu"), torch.randn(16, 64)
    for _ in range(3):
        with te.autocast(recipe=CountedMicroscaling()):
            layer(x)
    assert te.numerics(layer)[""]["weight"] == {"steps": 3}
    assert layer.fp8_microscaling_steps == 3
    other = te.Linear(64, 32, device="cpu")
    other.load_state_dict(layer.state_dict())
    assert other.state_dict()["fp8_microscaling_steps"] == 3
    with te.autocast(recipe=CountedMicroscaling()):
        other(x)
    assert te.numerics(other)[""]["weight"] == {"steps": 4}
    with te.autocast(recipe=recipe.DelayedScaling()):  # of another recipe: nothing to go on with
        other(x)
    assert "scale" in te.numerics(other)[""]["weight"]
