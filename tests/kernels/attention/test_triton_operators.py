"""Our Triton attention as torch.compile sees it, and what it refuses."""

import pytest
import torch
from test_triton import INTERPRETED, drawn
from traced import operators

from te_bench.kernels.attention.backends import triton as ours

# Operators


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_the_operators_keep_their_word() -> None:
    """Shapes, strides and dtypes of their fakes among it."""
    (qkv,) = drawn("cpu", (2, 20, 3 * 2 * 16))
    q, k, v = (x.view(2, 20, 2, 16).transpose(1, 2) for x in qkv.split(32, 2))
    mask = torch.zeros(20, 20, dtype=torch.bool)
    checks = ("test_schema", "test_faketensor")
    operators, given, settings = torch.ops.te_bench, (q, k, v, mask, None, None, None), (-1, 0, 0.25, 0.0, 0, 0)
    torch.library.opcheck(operators.attention_forward.default, (*given, *settings), test_utils=checks)
    results = operators.attention_forward(*given, *settings)
    dout = torch.randn(2, 20, 2, 16).transpose(1, 2)
    args = dout, *given, *results, *settings
    torch.library.opcheck(operators.attention_backward.default, args, test_utils=checks)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_compiled_code_sees_one_operator_each_way() -> None:
    found = operators(ours.BACKEND, drawn("cpu", *[(1, 2, 24, 16)] * 4))
    assert found == [["te_bench.attention_forward.default"], ["te_bench.attention_backward.default"]]


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
