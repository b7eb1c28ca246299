"""Mistakes planted in FP8 attention are farther from the definition than the kernels may be."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp8_definition import definition, sqnr
from test_triton_fp8 import INTERPRETED, assert_as_good, drawn, run
from torch import Tensor

from te_bench.kernels.attention import fp8_quantize
from te_bench.kernels.attention.fp8_quantize import Heads
from te_bench.kernels.attention.portable import fp8_backward

# Mistakes


def _quantized(change: Callable[[Heads], Heads]) -> Callable[[pytest.MonkeyPatch], None]:
    right = fp8_quantize.quantize
    return lambda patch: patch.setattr(fp8_quantize, "quantize", lambda *x, keep: [*map(change, right(*x, keep=keep))])


def _values(change: Callable[[Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    return _quantized(lambda made: made if made.data_t is None else made._replace(data_t=change(made.data_t)))


def _backward(change: Callable[[dict[str, Any]], None]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        right = fp8_backward.backward

        def wrong(
            to: Any, dout: Tensor, q: Tensor, k: Tensor, out: Tensor, lse: Tensor, heads: Any, *rest: Any
        ) -> None:
            given = {"dout": dout, "q": q, "k": k, "out": out, "lse": lse, "heads": heads}
            change(given)
            right(to, *given.values(), *rest)

        patch.setattr(fp8_backward, "backward", wrong)

    return plant


def _coarse(x: Tensor) -> Tensor:
    return x.float().to(torch.float8_e5m2).to(x.dtype)


FORWARD_MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a doubled scale": _quantized(lambda made: made._replace(scale_inv=2 * made.scale_inv)),
    "a scale of another head": _quantized(lambda made: made._replace(scale_inv=made.scale_inv.roll(1, 1))),
    "values in order": _values(
        lambda x: x[..., [16 * (i // 16) + 4 * (i % 8 // 2) + 2 * (i % 16 // 8) + i % 2 for i in range(128)]]
    ),
    "no values": _values(torch.zeros_like),
    "values in E5M2": _values(_coarse),
    "the last keys left out": _values(lambda x: torch.cat([x[..., :-64], torch.zeros_like(x[..., -64:])], -1)),
    "sign": _values(lambda x: (-x.float()).to(x.dtype)),
}
BACKWARD_MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "sign of dO": _backward(lambda g: g.update(dout=-g["dout"])),
    "no out in delta": _backward(lambda g: g.update(out=torch.zeros_like(g["out"]))),
    "doubled weights": _backward(lambda g: g.update(lse=g["lse"] - math.log(2))),
    "values of another head": _backward(
        lambda g: g.update(heads=(*g["heads"][:2], g["heads"][2]._replace(data=g["heads"][2].data.roll(1, 1))))
    ),
    "no scale of the values": _backward(
        lambda g: g.update(heads=(*g["heads"][:2], g["heads"][2]._replace(scale_inv=torch.ones_like(g["lse"][..., 0]))))
    ),
    "another head's keys": _backward(lambda g: g.update(k=g["k"].roll(1, 1))),
    "gradients in E5M2": _backward(lambda g: g.update(dout=_coarse(g["dout"] * 1e3) / 1e3)),
}


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("mistake", FORWARD_MISTAKES | BACKWARD_MISTAKES)
def test_a_planted_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (FORWARD_MISTAKES | BACKWARD_MISTAKES)[mistake](monkeypatch)
    tensors = drawn((1, 2, 2, 128, 128, 64, 64, False), "cpu")
    made = run(tensors, False)
    with pytest.raises(AssertionError):
        assert_as_good(tensors, False, made)
    if mistake in BACKWARD_MISTAKES:
        assert sqnr(definition(tensors, False, 0.125)[0], made[0]) > 31, "the forward pass is right"
