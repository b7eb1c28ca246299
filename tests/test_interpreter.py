"""The quickened interpreter is in force, computes what Triton's own does, and leaves triton.language as it found it."""

from collections.abc import Callable
from typing import Any

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


def test_device_functions_patch_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls a program: the launch alone does. Where another release goes another way, see interpreter.py."""
    calls: list[Any] = []
    right: Callable[..., Any] = interpreter._patch_builtin
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *given: (calls.append(given), right(*given))[1])
    four_times()
    of_a_launch = len(calls)
    four_times_kernel[(8,)](torch.zeros(128, dtype=torch.bfloat16), torch.empty(128), 16, False)
    assert len(calls) == 2 * of_a_launch > 0
