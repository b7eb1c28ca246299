"""Delayed scaling's state through torch.distributed.checkpoint; on two ranks: test_fp8_process_group."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from test_state import train as sgd
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import te_bench.models as te
from te_bench.models import recipe

ASKED = recipe.DelayedScaling(amax_history_len=3)
STATE = {"scale_fwd", "amax_history_fwd", "limit_fwd", "scale_bwd", "amax_history_bwd", "limit_bwd"}


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(te.LayerNormMLP(32, 48, device="cpu"), te.Linear(32, 16, device="cpu"))


def train(model: nn.Module, steps: range) -> list[Tensor]:
    return sgd(model, ASKED, steps)


def look(model: nn.Module) -> nn.Module:
    """The model, which has scales to load now: a pass without gradients leaves them fresh."""
    with torch.no_grad(), te.autocast(recipe=ASKED):
        model(torch.ones(8, 32))
    return model


def test_round_trip() -> None:
    model = make()
    train(model, range(3))
    state = get_model_state_dict(model)
    assert {name.removeprefix("1.fp8_") for name in state if name.startswith("1.fp8_")} == STATE
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    fresh, used = make(1), make(2)
    train(used, range(5))
    for other in (fresh, used):
        set_model_state_dict(other, {name: value.clone() for name, value in state.items()})
        found = other.state_dict()
        assert all(torch.equal(found[name], value) for name, value in state.items())
    expected = train(model, range(3, 6))
    del model
    assert all(torch.equal(a, b) for a, b in zip(train(fresh, range(3, 6)), expected, strict=True))


def test_a_wrapped_model_has_the_same_keys() -> None:
    model = make()
    train(model, range(2))
    state = get_model_state_dict(torch.compile(model))  # called "_orig_mod" inside of it; nothing is compiled here
    assert list(state) == list(model.state_dict())
    other = torch.compile(look(make(1)))
    set_model_state_dict(other, state)
    assert torch.equal(other.state_dict()["_orig_mod.1.fp8_scale_fwd"], model.state_dict()["1.fp8_scale_fwd"])


def test_from_a_directory(tmp_path: Path) -> None:
    model = make()
    train(model, range(3))
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    other = look(make(1))
    state = get_model_state_dict(other)
    dcp.load({"model": state}, checkpoint_id=tmp_path / "saved", no_dist=True)
    set_model_state_dict(other, state)
    expected = train(model, range(3, 5))
    del model
    assert all(torch.equal(a, b) for a, b in zip(train(other, range(3, 5)), expected, strict=True))


def test_state_is_no_buffer_to_those_who_send_buffers_around() -> None:
    layer = te.Linear(16, 16, device="cpu")
    assert not hasattr(layer, "fp8_scale_fwd")
    with te.autocast(recipe=ASKED):
        layer(torch.ones(4, 16)).sum().backward()
    assert not list(layer.named_buffers())
    assert torch.equal(layer.fp8_scale_fwd, layer.state_dict()["fp8_scale_fwd"])
