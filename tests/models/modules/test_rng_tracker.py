"""A tracker of generators, as Megatron-LM has one, draws weights and attention's dropout; te.checkpoint winds it back."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_bench.models as te


class States:
    """Generator states by name; fork swaps one for torch's own."""

    def __init__(self) -> None:
        self.states: dict[str, Tensor] = {}
        for seed, name in enumerate(("model-parallel-rng", "other")):
            self.states[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states[name])
        try:
            yield
        finally:
            self.states[name] = torch.get_rng_state()
            torch.set_rng_state(outside)

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states = dict(states)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda **o: te.Linear(16, 16, device="cpu", **o), ["weight"]),
        (lambda **o: te.Linear(16, 16, device="cpu", rng_tracker_name="other", **o), ["weight"]),
        (lambda **o: te.LayerNormLinear(16, 16, device="cpu", **o), ["weight"]),
        (lambda **o: te.LayerNormMLP(16, 32, device="cpu", **o), ["fc1_weight", "fc2_weight"]),
        (lambda **o: te.TransformerLayer(16, 32, 2, device="cpu", **o), ["layernorm_mlp.fc1_weight"]),
    ],
)
def test_weights_are_drawn_by_the_tracker(make: Any, names: list[str]) -> None:
    found = []
    for seed in (1, 2):  # of torch's own generator
        torch.manual_seed(seed)
        before, states = torch.get_rng_state(), States()
        layer = make(get_rng_state_tracker=lambda states=states: states)
        assert torch.equal(torch.get_rng_state(), before)
        found.append([layer.get_parameter(name).detach() for name in names])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    plain = make()
    assert not torch.equal(plain.get_parameter(names[0]), found[0][0])


def gradients(layer: nn.Module, forward: Any, states: States) -> list[Tensor]:
    torch.manual_seed(5)
    layer.zero_grad()
    x = torch.randn(8, 2, 32, requires_grad=True)
    y = forward(x)
    y.sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *states.get_states().values(), *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize("form", ["te.checkpoint", "checkpoint_core_attention"])
def test_a_checkpoint_draws_dropout_again(form: str) -> None:
    states = States()
    layer = te.TransformerLayer(
        32, 48, 2, hidden_dropout=0.0, attention_dropout=0.5, get_rng_state_tracker=lambda: states, device="cpu"
    )
    begin = copy.deepcopy(states.states)

    def checkpointed(x: Tensor) -> Tensor:
        if form == "te.checkpoint":
            return te.checkpoint(layer, x, get_rng_state_tracker=lambda: states)
        return layer(x, checkpoint_core_attention=True)

    expected = gradients(layer, layer, states)
    after = copy.deepcopy(states.states)
    assert not torch.equal(after["model-parallel-rng"], begin["model-parallel-rng"])
    states.set_states(begin)
    found = gradients(layer, checkpointed, states)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    assert not torch.equal(gradients(layer, layer, states)[0], expected[0])  # it has moved on
