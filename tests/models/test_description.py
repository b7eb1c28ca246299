"""What a decoder says of itself: every word that is wrong is named when it is built, before anything computes by it."""

import dataclasses
import importlib.util
from collections.abc import Callable
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


NORM = NormPart.of(nn.LayerNorm(16))
Parts = tuple[Any, ...]


def each(kind: type, **changes: Any) -> Callable[[Parts], Parts]:
    """Every part of a kind with these changes."""
    return lambda parts: tuple(part._replace(**changes) if isinstance(part, kind) else part for part in parts)


def changed_places(parts: Parts) -> Parts:
    return tuple(p._replace(up=p.down, down=p.up) if isinstance(p, MLPPart) else p for p in parts)


def norm_of_the_next(parts: Parts) -> Parts:
    return parts[0]._replace(norm=parts[1].norm), *parts[1:]


def made_for_its_part(parts: Parts) -> Parts:
    mlp, attention, *others = parts
    return mlp, attention._replace(qkv=attention.qkv._replace(weight=attention.qkv.weight + 0)), *others


def table(**changes: Any) -> Callable[[Any], Any]:
    return lambda tables: tables._replace(**changes)


def shape(**changes: Any) -> Callable[[Any], Any]:
    return lambda right: dataclasses.replace(right, **changes)


#: Attributes of the decoder, or its configuration's shape; what is said of each in place of what is right.
WRONG: list[tuple[dict[str, Callable[[Any], Any]], str]] = [
    ({"parts": each(AttentionPart, heads=2)}, r"Sandwich.*parts\(\)\[1\]: \(2, 2, 16\), where \(4, 2, 16\)"),
    ({"parts": each(AttentionPart, heads=8, groups=4, head_dim=8)}, r"Sandwich.*: \(8, 4, 8\), where"),
    ({"parts": each(AttentionPart, turns=3)}, r"Sandwich.*turns of parts\(\)\[1\] leave of its groups: 2"),
    ({"parts": each(AttentionPart, q_norm=NORM)}, r"Sandwich.*parts\(\)\[1\] with a q_norm: True, where False"),
    ({"parts": each(AttentionPart, norm=NORM)}, r"Sandwich.*parts\(\)\[1\].norm.weight: \[16\], where \[64\]"),
    ({"parts": each(MLPPart, activation="swiglu")}, r"Sandwich.*activation of parts\(\)\[0\]: swiglu, where gelu"),
    ({"parts": each(MLPPart, activation="gelu_erf")}, "Sandwich.*gelu_erf"),
    ({"parts": changed_places}, r"parts\(\)\[0\].up.weight: \[64, 128\], where \[128, 64\]"),
    ({"parts": lambda parts: parts[:-1]}, "number of AttentionParts: 1, where 2"),
    ({"parts": norm_of_the_next}, r"in no part and no table: \['slices.0.bread.weight', 'slices.0.bread.bias'\]"),
    ({"parts": made_for_its_part}, "what of its tensors is no parameter: 1, where 0"),
    ({"tables": table(norm=nn.LayerNorm(16))}, r"Sandwich.*the last norm.weight: \[16\], where \[64\]"),
    ({"tables": table(norm=nn.RMSNorm(64, eps=1e-5))}, "Sandwich.*kind of the last norm: rmsnorm, where layernorm"),
    ({"tables": table(positions=nn.Embedding(64, 64))}, "Sandwich.*a table of positions: True"),
    ({"tables": table(head=nn.Linear(64, 256))}, "Sandwich.*a bias of the head: True"),
    (
        {"tables": table(head=nn.Linear(32, 256, bias=False))},
        r"Sandwich.*head's weight: \[256, 32\], where \[256, 64\]",
    ),
    ({"shape": shape(head_norms=True)}, r"parts\(\)\[1\] with a q_norm: False, where True"),
    ({"shape": shape(vectors=0)}, "the number of all parameters: "),
    ({"shape": shape(activation="nonsense")}, "unknown activation of Sandwich 'nonsense'"),
    ({"shape": shape(norm="nonsense")}, "unknown norm of Sandwich 'nonsense'"),
    ({"shape": shape(layers=3)}, "number of AttentionParts: 2, where 3"),
    ({"shape": shape(learned_positions=True)}, "a table of positions: False, where True"),
    (
        {"parts": each(AttentionPart, q_norm=NORM, k_norm=NORM), "shape": shape(head_norms=True)},
        r"a bias of parts\(\)\[1\].q_norm: True, where False",
    ),
    ({"angles": lambda _: torch.zeros(1, 7)}, r"angles\(1\): \[1, 7\], where \[1, 16\]"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_what_is_said_wrong_is_named(sandwich: Any, monkeypatch: pytest.MonkeyPatch, wrong: Any, message: str) -> None:
    for name, change in wrong.items():
        owner = sandwich.SandwichConfig if name == "shape" else sandwich.MODEL
        true = getattr(owner, name)
        said: Any = lambda self, *given, true=true, change=change: change(true(self, *given))  # noqa: E731
        if isinstance(true, property):
            said = property(lambda self, true=true, change=change: change(true.fget(self)))
        monkeypatch.setattr(owner, name, said)
    with pytest.raises(ValueError, match=message):
        sandwich.MODEL(sandwich.CONFIGS["sandwich"], attention="manual", blocks="fused", head="chunked")


def test_norms_that_say_not_what_they_are() -> None:
    class Own(nn.Module):
        weight, eps = torch.ones(4), 1e-5

    with pytest.raises(ValueError, match="a Own says not which norm it is"):
        NormPart.of(Own())
    with pytest.raises(ValueError, match=r"RMSNorm.*set its eps to a number"):
        NormPart.of(nn.RMSNorm(4))
    with pytest.raises(ValueError, match=r"LayerNorm.*a norm with a gain; give it one"):
        NormPart.of(nn.LayerNorm(4, elementwise_affine=False))
