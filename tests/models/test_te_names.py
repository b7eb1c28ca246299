"""Names that Transformer Engine's users import beside its modules, and what they answer here."""

import importlib
from typing import Any

import pytest
import torch

import te_bench.models as te
from te_bench.kernels.gemm import block_scaled
from te_bench.models import fp8, recipe
from te_bench.models.quantization import FP8GlobalStateManager

HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: request.param)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(block_scaled, "LACKS", {})
    monkeypatch.setattr(block_scaled, "disproof", lambda device: None)


@pytest.mark.parametrize(
    ("gpu", "able"),
    [
        (None, {"is_fp8_available", "is_fp8_block_scaling_available", "is_bf16_available"}),
        (HOPPER, {"is_fp8_available", "is_fp8_block_scaling_available", "is_bf16_available"}),
        ((8, 9), {"is_fp8_available", "is_bf16_available"}),
        ((10, 0), {f"is_{name}_available" for name in ("fp8", "fp8_block_scaling", "bf16", "mxfp8", "nvfp4")}),
        (AMPERE, {"is_bf16_available"}),
        ((7, 5), set()),
    ],
    indirect=["gpu"],
)
@pytest.mark.usefixtures("gpu")
def test_what_is_available_is_what_autocast_takes(able: set[str]) -> None:
    names = [name for name in te.__all__ if name.startswith("is_") and name.endswith("_available")]
    assert len(names) == 5
    for name in names:
        yes, reason = getattr(te, name)(return_reason=True)
        assert getattr(te, name)() is yes
        assert yes is (name in able), name
        assert (reason == "") is yes
    for name, asked in (
        ("is_fp8_available", recipe.DelayedScaling()),
        ("is_fp8_block_scaling_available", recipe.Float8BlockScaling()),
    ):
        _, reason = getattr(te, name)(return_reason=True)
        if reason:
            with pytest.raises(ValueError) as told:
                te.autocast(recipe=asked)
            assert str(told.value) == reason
        else:
            te.autocast(recipe=asked)


def test_versions() -> None:
    assert len(te.get_cudnn_version()) == 3
    if not torch.cuda.is_available():
        assert te.get_device_compute_capability() == (0, 0)


@pytest.mark.parametrize(("encoded", "version"), [(8907, (8, 9, 7)), (91002, (9, 10, 2)), (None, (0, 0, 0))])
def test_cudnns_version(encoded: Any, version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: encoded)
    assert te.get_cudnn_version() == version


def test_packages_have_their_modules() -> None:
    assert te.distributed.checkpoint is te.checkpoint
    for name in ("DotProductAttention", "MultiheadAttention", "RotaryPositionEmbedding"):
        assert getattr(te.attention, name) is getattr(te, name)
    rope = importlib.import_module("te_bench.models.attention.rope")
    assert rope.apply_rotary_pos_emb is te.apply_rotary_pos_emb
    assert te.recipe.DelayedScaling() == te.get_default_recipe()
    assert te.quantization.autocast is te.autocast


def test_recipes_answer_what_they_are() -> None:
    questions = ("delayed", "float8_current_scaling", "float8_per_tensor_scaling", "float8_block_scaling")
    questions += ("mxfp8", "nvfp4", "custom")
    said = {
        name: {question for question in questions if getattr(recipe.load(name), question)()} for name in recipe.names()
    }
    current = {"float8_current_scaling", "float8_per_tensor_scaling"}
    assert said == {
        "delayed_scaling": {"delayed", "float8_per_tensor_scaling"},
        "delayed_scaling_e4m3": {"delayed", "float8_per_tensor_scaling"},
        "float8_current_scaling": current,
        "float8_current_scaling_dpa": current,
        "float8_current_scaling_e4m3": current,
        **{f"float8_current_scaling_bf16_{part}": current for part in ("end", "first", "wgrad")},
        "float8_block_scaling": {"float8_block_scaling"},
        "rowwise_scaling": set(),
        "rowwise_scaling_bf16_wgrad": set(),
        "mxfp8_block_scaling": {"mxfp8"},
        "nvfp4_block_scaling": {"nvfp4"},
        "nvfp4_block_scaling_bf16_end": {"nvfp4"},
    }
    assert recipe.DelayedScaling.delayed()


@pytest.mark.parametrize("name", ["E4M3", "E5M2", "HYBRID"])
def test_formats_have_their_largest_numbers(name: str) -> None:
    format = recipe.Format[name]
    assert format.value.max_fwd == torch.finfo(format.forward).max
    assert format.value.max_bwd == torch.finfo(format.backward).max


def test_the_global_state_is_the_innermost_autocasts() -> None:
    state, asked = FP8GlobalStateManager, recipe.Float8CurrentScaling()
    for is_available in (
        "is_fp8_available",
        "is_fp8_block_scaling_available",
        "is_mxfp8_available",
        "is_nvfp4_available",
    ):
        assert getattr(state, is_available)() == getattr(te, is_available)(return_reason=True)
    assert state.get_fp8_recipe() == te.get_default_recipe()
    assert not state.with_fp8_parameters()
    for enabled in (True, False):
        with te.autocast(enabled=enabled, calibrating=not enabled, recipe=asked, amax_reduction_group="group"):
            assert state.is_fp8_enabled() is enabled
            assert state.is_fp8_calibration() is not enabled
            assert state.get_fp8_recipe() == asked
            assert state.get_fp8_group() == "group"
    assert not state.is_fp8_enabled()
    assert state.get_fp8_group() is None


def test_reset_forgets_an_autocast_that_was_left_open() -> None:
    layer, asked = te.Linear(16, 16, device="cpu"), recipe.DelayedScaling(amax_history_len=2)

    def scale() -> float:
        with te.autocast(recipe=asked):
            layer(torch.ones(16, 16))
        return float(layer.state_dict()["fp8_scale_fwd"][0])

    opened = te.autocast(recipe=asked)
    opened.__enter__()
    assert scale() == 1.0
    FP8GlobalStateManager.reset()
    assert not fp8.is_fp8_enabled()
    assert scale() == 448.0  # the outermost again: its end is a step
    opened.__exit__(None, None, None)
    assert not fp8.is_fp8_enabled()
    assert scale() == 448.0
