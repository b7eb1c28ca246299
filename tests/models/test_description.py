"""What a decoder says of itself: every word that is wrong is named when it is built, before anything computes by it."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from te_bench.models.parts import AttentionPart, MLPPart, NormPart

FILE = Path(__file__).parent / "zoo" / "third" / "sandwich.py"


@pytest.fixture
def sandwich() -> Any:
    """A third decoder's file, for this test alone."""
    spec = importlib.util.spec_from_file_location("sandwich_of_its_own", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(sandwich: Any) -> Any:
    return sandwich.MODEL(sandwich.CONFIGS["sandwich"], attention="manual", blocks="fused", head="chunked")


def change_parts(sandwich: Any, monkeypatch: pytest.MonkeyPatch, kind: type, **changes: Any) -> None:
    true = sandwich.MODEL.parts

    def parts(self: Any) -> Any:
        return tuple(part._replace(**changes) if isinstance(part, kind) else part for part in true(self))

    monkeypatch.setattr(sandwich.MODEL, "parts", parts)


NORM = NormPart.of(nn.LayerNorm(16))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (AttentionPart, {"heads": 2}, r"parts\(\)\[1\]: \(2, 2, 16\), where \(4, 2, 16\)"),
        (AttentionPart, {"heads": 8, "groups": 4, "head_dim": 8}, r": \(8, 4, 8\), where"),
        (AttentionPart, {"turns": 3}, r"turns of parts\(\)\[1\] leave of its groups: 2"),
        (AttentionPart, {"q_norm": NORM}, r"parts\(\)\[1\] with a q_norm: True, where False"),
        (AttentionPart, {"norm": NORM}, r"parts\(\)\[1\].norm.weight: \[16\], where \[64\]"),
        (MLPPart, {"activation": "swiglu"}, r"activation of parts\(\)\[0\]: swiglu, where gelu"),
        (MLPPart, {"activation": "gelu_erf"}, "gelu_erf"),
    ],
)
def test_a_wrong_part(
    sandwich: Any, monkeypatch: pytest.MonkeyPatch, kind: type, changes: dict[str, Any], message: str
) -> None:
    change_parts(sandwich, monkeypatch, kind, **changes)
    with pytest.raises(ValueError, match="Sandwich.*" + message):
        build(sandwich)


def test_linears_that_changed_places(sandwich: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    true = sandwich.MODEL.parts

    def parts(self: Any) -> Any:
        return tuple(p._replace(up=p.down, down=p.up) if isinstance(p, MLPPart) else p for p in true(self))

    monkeypatch.setattr(sandwich.MODEL, "parts", parts)
    with pytest.raises(ValueError, match=r"parts\(\)\[0\].up.weight: \[64, 128\], where \[128, 64\]"):
        build(sandwich)


def test_a_part_that_is_left_out(sandwich: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    true = sandwich.MODEL.parts
    monkeypatch.setattr(sandwich.MODEL, "parts", lambda self: true(self)[:-1])
    with pytest.raises(ValueError, match=r"number of AttentionParts: 1, where 2"):
        build(sandwich)


def test_a_norm_that_stands_for_another(sandwich: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    true = sandwich.MODEL.parts

    def parts(self: Any) -> Any:
        mlp, attention, *others = true(self)
        return (mlp._replace(norm=attention.norm), attention, *others)

    monkeypatch.setattr(sandwich.MODEL, "parts", parts)
    with pytest.raises(
        ValueError, match=r"in no part and no table: \['slices.0.bread.weight', 'slices.0.bread.bias'\]"
    ):
        build(sandwich)


def test_a_tensor_that_is_made_for_its_part(sandwich: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    true = sandwich.MODEL.parts

    def parts(self: Any) -> Any:
        mlp, attention, *others = true(self)
        return (mlp, attention._replace(qkv=attention.qkv._replace(weight=attention.qkv.weight + 0)), *others)

    monkeypatch.setattr(sandwich.MODEL, "parts", parts)
    with pytest.raises(ValueError, match="what of its tensors is no parameter: 1, where 0"):
        build(sandwich)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": nn.LayerNorm(16)}, r"the last norm.weight: \[16\], where \[64\]"),
        ({"norm": nn.RMSNorm(64, eps=1e-5)}, "kind of the last norm: rmsnorm, where layernorm"),
        ({"positions": nn.Embedding(64, 64)}, "a table of positions: True"),
        ({"head": nn.Linear(64, 256)}, "a bias of the head: True"),
        ({"head": nn.Linear(32, 256, bias=False)}, r"head's weight: \[256, 32\], where \[256, 64\]"),
    ],
)
def test_a_wrong_table(sandwich: Any, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str) -> None:
    true = sandwich.MODEL.tables
    monkeypatch.setattr(sandwich.MODEL, "tables", lambda self: true(self)._replace(**changes))
    with pytest.raises(ValueError, match="Sandwich.*" + message):
        build(sandwich)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_norms": True}, r"parts\(\)\[1\] with a q_norm: False, where True"),
        ({"vectors": 0}, "the number of all parameters: "),
        ({"activation": "nonsense"}, "unknown activation of Sandwich 'nonsense'"),
        ({"norm": "nonsense"}, "unknown norm of Sandwich 'nonsense'"),
        ({"layers": 3}, "number of AttentionParts: 2, where 3"),
        ({"learned_positions": True}, "a table of positions: False, where True"),
    ],
)
def test_a_wrong_shape(sandwich: Any, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str) -> None:
    true = sandwich.SandwichConfig.shape.fget
    monkeypatch.setattr(
        sandwich.SandwichConfig, "shape", property(lambda self: dataclasses.replace(true(self), **changes))
    )
    with pytest.raises(ValueError, match=message):
        build(sandwich)


def test_biases_of_head_norms(sandwich: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    change_parts(sandwich, monkeypatch, AttentionPart, q_norm=NORM, k_norm=NORM)
    true = sandwich.SandwichConfig.shape.fget
    monkeypatch.setattr(
        sandwich.SandwichConfig, "shape", property(lambda self: dataclasses.replace(true(self), head_norms=True))
    )
    with pytest.raises(ValueError, match=r"a bias of parts\(\)\[1\].q_norm: True, where False"):
        build(sandwich)


def test_angles_that_are_no_pairs(sandwich: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandwich.MODEL, "angles", lambda self, length: torch.zeros(length, 7))
    with pytest.raises(ValueError, match=r"angles\(1\): \[1, 7\], where \[1, 16\]"):
        build(sandwich)


def test_norms_that_say_not_what_they_are() -> None:
    class Own(nn.Module):
        weight, eps = torch.ones(4), 1e-5

    with pytest.raises(ValueError, match="a Own says not which norm it is"):
        NormPart.of(Own())
    with pytest.raises(ValueError, match=r"RMSNorm.*set its eps to a number"):
        NormPart.of(nn.RMSNorm(4))
    with pytest.raises(ValueError, match=r"LayerNorm.*a norm with a gain; give it one"):
        NormPart.of(nn.LayerNorm(4, elementwise_affine=False))
