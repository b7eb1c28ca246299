"""What Triton would compile apart of the row kernels never goes by the same key; see tests/kernels/test_launch.py."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from te_bench.kernels.linear_cross_entropy import kernels

HOPPER = make_backend(GPUTarget("cuda", 90, 32))


def specialization(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> str:
    """What Triton's JIT looks for a compiled kernel by."""
    jit = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
    bind = create_function_from_signature(jit.signature, jit.params, HOPPER)
    _, special, options = bind(*args, **constants)
    return f"{special} {options}"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[Any, ...], str]:
    """Keys and what would be compiled by them, of every launch from now on."""
    found: dict[tuple[Any, ...], str] = {}

    def launch(kernel: Any, grid: int, key: tuple[Any, ...], device: int, args: Any, constants: dict[str, Any]) -> None:
        compiled = specialization(kernel, args, constants)
        assert found.setdefault((kernel.__name__, *key), compiled) == compiled

    monkeypatch.setattr(kernels, "launch", launch)
    return found


def matrix(rows: int, columns: int, dtype: torch.dtype, offset: int) -> Tensor:
    return torch.zeros(rows * columns + offset, dtype=dtype)[offset:].view(rows, columns)


def test_rows(known: dict[tuple[Any, ...], str]) -> None:
    dtypes, shapes = (torch.bfloat16, torch.float16, torch.float32), [(n, vp) for n in (1, 4, 16) for vp in (1, 48, 50)]
    for dtype, (n, padded), offset, gradient in itertools.product(dtypes, shapes, (0, 1, 8), (False, True)):
        for vocab in {1, 32, padded}:
            targets, losses = torch.zeros(n + offset, dtype=torch.int64)[offset:], torch.zeros(n + offset)[offset:]
            factor = torch.zeros(()) if gradient else None
            kernels.rows(matrix(n, padded, dtype, offset), targets, losses, vocab, factor)
    assert len(set(known.values())) > 30


def test_fp8_rows(known: dict[tuple[Any, ...], str]) -> None:
    e5m2 = torch.float8_e5m2
    for n, padded, first, height, offset in itertools.product(
        (1, 16, 17), (1, 48, 50), (0, 1, 16), (48, 33), (0, 1, 16)
    ):
        logits, targets = matrix(n, padded, torch.bfloat16, offset), torch.zeros(n, dtype=torch.int64)
        for rowwise, columnwise in ((True, True), (True, False), (False, True), (False, False)):
            data = matrix(n, padded, e5m2, offset) if rowwise else None
            data_t = matrix(padded, height, e5m2, offset) if columnwise else None
            kernels.fp8_rows(logits, targets, torch.zeros(n), padded, data, data_t, first)
    assert len(set(known.values())) > 100


def test_what_surrounds_them(known: dict[tuple[Any, ...], str]) -> None:
    for n, offset in itertools.product((1, 16, 17, 48), (0, 1, 16)):
        targets, losses = torch.zeros(n + offset, dtype=torch.int64)[offset:], torch.zeros(n + offset)[offset:]
        kernels.mean(losses, kernels.count(targets))
        kernels.scale(losses, torch.ones(()), losses)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            kernels.scale(losses, torch.ones(()), torch.zeros(n, dtype=dtype))
    assert len({key[0] for key in known}) == 3
    assert len(set(known.values())) > 20
