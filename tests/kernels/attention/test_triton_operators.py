"""Our Triton attention, in FP8 too, as torch.compile sees it, and what it refuses."""

from typing import Any

import pytest
import test_triton_fp8 as fp8
import torch
from test_packed import ROWS, starts, tensors_of
from test_triton import INTERPRETED, drawn
from torch import Tensor
from traced import operators

from te_bench.kernels.attention.backends import triton as ours
from te_bench.kernels.attention.backends import triton_fp8

# Operators


def one_length() -> tuple[list[Tensor], tuple[Any, ...], tuple[Any, ...]]:
    """q, k, v, dout; what else is given, and settings: views of one tensor under a mask."""
    (qkv,) = drawn("cpu", (2, 20, 3 * 2 * 16))
    q, k, v = (x.view(2, 20, 2, 16).transpose(1, 2) for x in qkv.split(32, 2))
    mask = torch.zeros(20, 20, dtype=torch.bool)
    return [q, k, v, torch.randn(2, 20, 2, 16).transpose(1, 2)], (mask, None, None, None), (-1, 0, 0.25, 0.0, 0, 0)


def packed() -> tuple[list[Tensor], tuple[Any, ...], tuple[Any, ...]]:
    begin = starts(ROWS, "cpu")
    tensors = [x.transpose(0, 1)[None] for x in tensors_of(ROWS, 4, "cpu")]
    return tensors, (None, None, begin, begin), (-1, 0, 0.25, 0.0, 70, 70)


def transposed() -> tuple[list[Tensor], tuple[Any, ...], tuple[Any, ...]]:
    """Features that are no neighbours, as of an einsum."""
    tensors = [x.transpose(2, 3) for x in drawn("cpu", *[(2, 2, 16, 20)] * 4)]
    return tensors, (None, None, None, None), (-1, 0, 0.25, 0.0, 0, 0)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("case", [one_length, packed, transposed])
def test_the_operators_keep_their_word(case):
    """Shapes, strides and dtypes of their fakes among it."""
    (*qkv, dout), more, settings = case()
    checks, made = ("test_schema", "test_faketensor"), torch.ops.te_bench
    torch.library.opcheck(made.attention_forward.default, (*qkv, *more, *settings), test_utils=checks)
    args = dout, *qkv, *more, *made.attention_forward(*qkv, *more, *settings), *settings
    torch.library.opcheck(made.attention_backward.default, args, test_utils=checks)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("keep", [True, False])
def test_the_operators_in_fp8_keep_their_word(keep: bool) -> None:
    q, k, v, dout = fp8.drawn((2, 2, 1, 20, 30, 16, 24, True), "cpu")
    checks, made, given = ("test_schema", "test_faketensor"), torch.ops.te_bench, (q, k, v, True, 0.25, keep)
    torch.library.opcheck(made.fp8_attention_forward.default, given, test_utils=checks)
    if keep:
        args = dout, q, k, *made.fp8_attention_forward(*given), True, 0.25, keep, False
        only = "test_faketensor"  # the other one has no FP8 inputs
        torch.library.opcheck(made.fp8_attention_backward.default, args, test_utils=only)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(("backend", "name"), [(ours.BACKEND, "attention"), (triton_fp8.BACKEND, "fp8_attention")])
def test_compiled_code_sees_one_operator_each_way(backend, name):
    found = operators(backend, drawn("cpu", *[(1, 2, 24, 16)] * 4))
    assert found == [[f"te_bench.{name}_forward.default"], [f"te_bench.{name}_backward.default"]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.zeros(1, 2, 3)}, "q is"),
        ({"k": torch.zeros(1, 2, 3, 8)}, r"must be \(B, H, T, D\)"),
        ({"v": torch.zeros(1, 2, 5, 4)}, r"must be \(B, H, T, D\)"),
        ({"v": torch.zeros(1, 2, 3, 4).half()}, "v is"),
        ({"q": torch.zeros(1, 3, 3, 4)}, "must divide"),
        ({"dropout": 1.5}, "dropout=1.5"),
        ({"mask": torch.zeros(3, 3)}, "must be bool"),
        ({"mask": torch.zeros(4, 4, dtype=torch.bool)}, "must broadcast to"),
        ({"mask": torch.zeros(1, 1, 1, 3, 3, dtype=torch.bool)}, "must broadcast to"),
        ({name: torch.zeros(1, 2, 3, 300) for name in "qkv"}, "at most 256"),
        ({"window": (-2, 0)}, r"window=\(-2, 0\)"),
    ],
)
def test_what_is_no_attention_is_refused(changes: dict[str, object], words: str) -> None:
    given = {name: torch.zeros(1, 2, 3, 4) for name in "qkv"} | {"scale": 1.0} | changes
    q, k, v = (given.pop(name) for name in "qkv")
    with pytest.raises(ValueError, match=words):
        ours.attention(q, k, v, **given)  # type: ignore[arg-type]
