"""FP8 state in the state dict, in copies, and on its way to other devices and dtypes."""

import copy
import io
from pathlib import Path

import pytest
import torch
from module_cases import randomise
from torch import Tensor, nn

import te_bench.models as te
from te_bench.models import recipe


def make(device: str = "cpu", length: int = 3) -> tuple[nn.Module, recipe.Recipe]:
    torch.manual_seed(0)
    layers = nn.Sequential(te.LayerNormMLP(32, 48, device=device), te.Linear(32, 16, device=device))
    return randomise(layers), recipe.DelayedScaling(amax_history_len=length)


def train(model: nn.Module, asked: recipe.Recipe, steps: range) -> list[Tensor]:
    """Plain SGD; losses."""
    losses = []
    device = next(model.parameters()).device
    for step in steps:
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).to(device) * 2.0**step
        with te.autocast(recipe=asked):
            loss = model(x).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 1e-3 * p.grad
        losses.append(loss.detach())
    return losses


def same(a: nn.Module | dict[str, Tensor], b: nn.Module) -> bool:
    """Take a state dict of `a` before another model trains: the end of any autocast takes in waiting amaxes."""
    left, right = a.state_dict() if isinstance(a, nn.Module) else a, b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight, asked = make()
    expected = train(straight, asked, range(6))
    final = {key: value.clone() for key, value in straight.state_dict().items()}
    first, _ = make()
    train(first, asked, range(3))
    torch.save(first.state_dict(), tmp_path / "model.pt")
    torch.manual_seed(9)
    second = nn.Sequential(te.LayerNormMLP(32, 48), te.Linear(32, 16))
    missing = second.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert not missing.missing_keys
    assert not missing.unexpected_keys
    assert all(torch.equal(a, b) for a, b in zip(train(second, asked, range(3, 6)), expected[3:], strict=True))
    assert same(final, second)


def test_a_loaded_state_survives_until_it_is_used() -> None:
    """Saving what was loaded and never run gives back what was loaded."""
    model, asked = make()
    train(model, asked, range(2))
    idle, _ = make()
    idle.load_state_dict(model.state_dict())
    assert same(idle, model)
    assert same(copy.deepcopy(idle), model)


def test_loading_into_a_model_that_has_run_overwrites_its_state() -> None:
    model, asked = make()
    train(model, asked, range(3))
    other, _ = make()
    train(other, asked, range(5))
    other.load_state_dict(model.state_dict())
    assert same(other, model)
    losses = train(other, asked, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(losses, train(model, asked, range(3, 5)), strict=True))


def test_what_is_in_the_state_dict() -> None:
    model, asked = make()
    assert not any("fp8" in key for key in model.state_dict())
    train(model, asked, range(1))
    state = {key: value for key, value in model.state_dict().items() if "fp8" in key}
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    assert shapes == {
        "0.fp8_scale_fwd": (6,),
        "0.fp8_amax_history_fwd": (3, 6),
        "0.fp8_limit_fwd": (6,),
        "0.fp8_scale_bwd": (4,),
        "0.fp8_amax_history_bwd": (3, 4),
        "0.fp8_limit_bwd": (4,),
        "1.fp8_scale_fwd": (3,),
        "1.fp8_amax_history_fwd": (3, 3),
        "1.fp8_limit_fwd": (3,),
        "1.fp8_scale_bwd": (2,),
        "1.fp8_amax_history_bwd": (3, 2),
        "1.fp8_limit_bwd": (2,),
    }
    assert {value.dtype for value in state.values()} == {torch.float32}
    state["1.fp8_scale_fwd"].fill_(7.0)  # a copy: the model's own scales stay
    assert not (model.state_dict()["1.fp8_scale_fwd"] == 7.0).any()
    stateless = te.Linear(16, 16)
    with te.autocast(recipe=recipe.Float8BlockScaling()):
        stateless(torch.ones(4, 16)).sum().backward()
    assert list(stateless.state_dict()) == ["weight", "bias"]


def test_absent_keys_and_transformer_engines_are_tolerated() -> None:
    model, asked = make()
    train(model, asked, range(2))
    state = model.state_dict()
    plain = {key: value for key, value in state.items() if "fp8" not in key}
    theirs = {**plain, "0._extra_state": torch.zeros(9, dtype=torch.uint8), "1._extra_state": io.BytesIO(b"pickle")}
    fresh, _ = make()
    for offered in (plain, theirs):
        assert str(fresh.load_state_dict(offered)) == "<All keys matched successfully>"
    del state["1.fp8_amax_history_bwd"]
    fresh.load_state_dict(state)
    train(fresh, asked, range(2, 3))
    assert len(state) == len(model.state_dict()) - 1  # loading takes nothing from the caller's dictionary


def test_another_history_length_is_named() -> None:
    model, asked = make()
    train(model, asked, range(2))
    other, longer = make(length=5)
    other.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match=r"is \(3, 6\), this module's \(5, 6\): .*amax_history_len=3.*fresh scales"):
        train(other, longer, range(1))
    running, _ = make()
    train(running, longer, range(1))
    with pytest.raises(ValueError, match="amax_history_len=3"):
        running.load_state_dict(model.state_dict())


def test_a_checkpoint_of_delayed_scaling_under_another_recipe() -> None:
    model, asked = make()
    train(model, asked, range(2))
    other, _ = make()
    other.load_state_dict(model.state_dict())
    train(other, recipe.Float8CurrentScaling(), range(1))
    assert torch.equal(other.state_dict()["1.fp8_scale_fwd"], model.state_dict()["1.fp8_scale_fwd"])


def test_copies_go_their_own_way() -> None:
    model, asked = make()
    train(model, asked, range(3))
    twin = copy.deepcopy(model)
    assert same(model, twin)
    expected = train(copy.deepcopy(model), asked, range(3, 5))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert all(torch.equal(a, b) for a, b in zip(train(twin, asked, range(3, 5)), expected, strict=True))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_leave_scales_in_float32(dtype: torch.dtype) -> None:
    model, asked = make()
    train(model, asked, range(2))
    before = {key: value for key, value in model.state_dict().items() if "fp8" in key}
    model.to(dtype)
    after = model.state_dict()
    assert after["1.weight"].dtype == dtype
    assert all(torch.equal(after[key], value) for key, value in before.items())
    if dtype is torch.bfloat16:
        model.to(torch.float32)
        train(model, asked, range(2, 4))
        assert not torch.equal(model.state_dict()["1.fp8_scale_fwd"], before["1.fp8_scale_fwd"])


def test_a_changed_dtype_drops_kept_weights() -> None:
    layer = te.Linear(16, 16)
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        layer(torch.ones(4, 16), is_first_microbatch=True)
        layer.double().float()
        with pytest.raises(ValueError, match="is_first_microbatch=True"):
            layer(torch.ones(4, 16), is_first_microbatch=False)


def test_scales_that_moved_go_on_being_updated() -> None:
    """After _apply the tables are others: casts, updates and the state dict must all see the same ones."""
    model, asked = make()
    twin, _ = make()
    train(model, asked, range(2))
    train(twin, asked, range(2))
    state = model[1]._state
    old = state.forward.scale
    state.to(torch.device("cpu:0"))  # to PyTorch another device than "cpu": everything is copied
    assert state.forward.scale.data_ptr() != old.data_ptr()
    losses = train(model, asked, range(2, 5))
    final = {key: value.clone() for key, value in model.state_dict().items()}
    assert all(torch.equal(a, b) for a, b in zip(losses, train(twin, asked, range(2, 5)), strict=True))
    assert same(final, twin)


@pytest.mark.gpu
def test_from_a_gpu_to_a_cpu_and_back(tmp_path: Path) -> None:
    straight, asked = make("cuda")
    expected = train(straight, asked, range(6))
    model, _ = make("cuda")
    train(model, asked, range(3))
    model.cpu()
    assert {value.device.type for value in model.state_dict().values()} == {"cpu"}
    torch.save(model.state_dict(), tmp_path / "model.pt")
    fresh, _ = make("cuda")
    fresh.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    model.cuda()
    for again in (model, fresh):
        losses = train(again, asked, range(3, 6))
        assert all(torch.equal(a, b) for a, b in zip(losses, expected[3:], strict=True))
