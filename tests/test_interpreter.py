"""The quickened interpreter is in force, computes what Triton's own does, and leaves triton.language as it found it."""

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="nothing is interpreted on a GPU")


@triton.jit
def twice(x):  # type: ignore[no-untyped-def]
    return x + x


@triton.jit
def four_times_kernel(x, y, N: tl.constexpr, BROKEN: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * N + tl.arange(0, N)
    if BROKEN:
        raise ValueError("on purpose")
    tl.store(y + at, twice(twice(tl.load(x + at).to(tl.float32))))


def four_times(broken: bool = False) -> torch.Tensor:
    x = torch.arange(32, dtype=torch.bfloat16)
    y = torch.empty(32)
    four_times_kernel[(2,)](x, y, 16, broken)
    return y


def language() -> list[dict[str, Any]]:
    return [dict(vars(part)) for part in (tl, tl.core, tl.math, tl.tensor, tl.dtype)]


@pytest.mark.parametrize("broken", [False, True])
def test_a_launch_leaves_the_language_as_it_was(broken: bool) -> None:
    four_times()  # Triton's first leaves as a tensor's own what it had inherited
    before = language()
    if broken:
        with pytest.raises(interpreter.InterpreterError, match="on purpose"):
            four_times(broken=True)
    assert torch.equal(four_times(), 4.0 * torch.arange(32))
    assert language() == before


FORMATS = [tl.float8e5, tl.float8e4nv, tl.float16, tl.bfloat16, tl.float32]
PAIRS = [(a, b) for a in FORMATS for b in FORMATS if a.primitive_bitwidth != b.primitive_bitwidth]


@pytest.mark.parametrize("rounding", [None, interpreter._ir.ROUNDING_MODE.RTNE])
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_a_conversion_is_tritons_own_bit_for_bit(source, target, rounding, turned):
    """Of every number where there are at most 65,536; with subnormal ones, infinities and NaN, and without."""
    convert = interpreter._convert_float
    bits = source.primitive_bitwidth
    if bits == 32:
        every = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
        every[:6] = 0, 1, 0x007FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000
    else:
        every = np.arange(2**bits, dtype=f"uint{bits}")
    normal = every[6:] if bits == 32 else every
    for given in (every, normal[(normal & 0x7F800000) != 0] if bits == 32 else normal[:1]):
        x = given.reshape(-1, 1).T if turned else given
        ours, right = (f(x, source, target, rounding) for f in (convert, convert.__wrapped__))
        assert ours.dtype == right.dtype
        assert ours.shape == right.shape
        assert np.array_equal(ours, right)
