"""A look at a step's gradients leaves no trace in it."""

import math
from typing import Any

import pytest
import torch
from table_adamw_cases import Moved, a_batch, a_moved_step
from torch import Tensor, nn

from te_bench.models.modules.linear import Linear
from te_bench.training.step import TrainStep
from te_bench.training.undisturbed import undisturbed

pytestmark = pytest.mark.usefixtures("plain_heads")


def everything(step: TrainStep) -> dict[str, Tensor]:
    """Weights, buffers, scales, amaxes and random numbers; infinities that scales met."""
    state: dict[str, Any] = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    linears = [module for module in step.model.modules() if isinstance(module, Linear)]
    state |= {f"written {i} {j}": t.clone() for i, m in enumerate(linears) for j, t in enumerate(m.written())}
    return {**state, "random": torch.get_rng_state()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("optimizer", [None, "reference"])
def test_a_look_changes_nothing_that_passes_change(optimizer: str | None) -> None:
    looked, blind = a_moved_step(optimizer), a_moved_step(optimizer)
    for k in range(3):
        torch.manual_seed(k)
        first, again = (looked.gradients(*a_batch(3)) for _ in range(2))
        assert first[0] == again[0]
        assert all(torch.equal(first[1][name], again[1][name]) for name in first[1])
        loss = looked(*a_batch(k))
        torch.manual_seed(k)
        assert torch.equal(loss, blind(*a_batch(k)))
        assert_same(everything(looked), everything(blind))


def test_the_first_look_leaves_scales_as_they_were_loaded() -> None:
    """A module makes them in its first pass."""
    trained, other = a_moved_step(), a_moved_step()
    for k in range(3):
        trained(*a_batch(k))
    other.model.load_state_dict(trained.model.state_dict())
    before = {name: tensor.clone() for name, tensor in other.model.state_dict().items()}
    other.gradients(*a_batch(3))
    assert before["head.fp8_amax_history_fwd"].any()
    assert_same(other.model.state_dict(), before)


def test_who_asks_for_it_gets_the_trace() -> None:
    """By it the scales settle before a check."""
    step = a_moved_step()
    before = everything(step)
    step.gradients(*a_batch(), records=True)
    after = everything(step)
    assert isinstance(step.model, Moved)
    assert not torch.equal(step.model.norm.running_mean, before["norm.running_mean"])  # type: ignore[arg-type]
    assert after["head.fp8_amax_history_fwd"].any()
    assert not torch.equal(after["random"], before["random"])


def test_buffers_that_no_pass_can_write_are_left_alone() -> None:
    """NaN is not equal to itself: an expanded buffer of it cannot be written, nor one on the meta device."""
    model = nn.Linear(4, 4)
    model.register_buffer("expanded", torch.full((1,), math.nan).expand(3))
    model.register_buffer("absent", torch.empty(3, device="meta"))
    model.register_buffer("count", torch.zeros(()))
    with undisturbed(model):
        model.count += 1
    assert model.count == 0
