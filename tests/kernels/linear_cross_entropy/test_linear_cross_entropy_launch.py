"""What Triton would compile apart of the row kernels never goes by the same key; see tests/kernels/test_launch.py."""

import itertools

import pytest
import torch
from launch_checks import Recorder
from torch import Tensor

from te_bench.kernels.linear_cross_entropy import kernels


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Of every launch from now on."""
    found = Recorder()
    monkeypatch.setattr(kernels, "launch", found.launch)
    return found


def matrix(rows: int, columns: int, dtype: torch.dtype, offset: int) -> Tensor:
    return torch.zeros(rows * columns + offset, dtype=dtype)[offset:].view(rows, columns)


def test_rows(recorder: Recorder) -> None:
    dtypes, shapes = (torch.bfloat16, torch.float16, torch.float32), [(n, vp) for n in (1, 4, 16) for vp in (1, 48, 50)]
    for dtype, (n, padded), offset, gradient in itertools.product(dtypes, shapes, (0, 1, 8), (False, True)):
        for vocab in {1, 32, padded}:
            targets, losses = torch.zeros(n + offset, dtype=torch.int64)[offset:], torch.zeros(n + offset)[offset:]
            factor = torch.zeros(()) if gradient else None
            kernels.rows(matrix(n, padded, dtype, offset), targets, losses, vocab, factor)
    assert len(set(recorder.call)) > 30


def test_fp8_rows(recorder: Recorder) -> None:
    e5m2 = torch.float8_e5m2
    for n, padded, first, height, offset in itertools.product(
        (1, 16, 17), (1, 48, 50), (0, 1, 16), (48, 33), (0, 1, 16)
    ):
        logits, targets = matrix(n, padded, torch.bfloat16, offset), torch.zeros(n, dtype=torch.int64)
        for rowwise, columnwise in ((True, True), (True, False), (False, True), (False, False)):
            data = matrix(n, padded, e5m2, offset) if rowwise else None
            data_t = matrix(padded, height, e5m2, offset) if columnwise else None
            kernels.fp8_rows(logits, targets, torch.zeros(n), padded, data, data_t, first)
    assert len(set(recorder.call)) > 100


def test_what_surrounds_them(recorder: Recorder) -> None:
    for n, offset in itertools.product((1, 16, 17, 48), (0, 1, 16)):
        targets, losses = torch.zeros(n + offset, dtype=torch.int64)[offset:], torch.zeros(n + offset)[offset:]
        kernels.mean(losses, kernels.count(targets))
        kernels.scale(losses, torch.ones(()), losses)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            kernels.scale(losses, torch.ones(()), torch.zeros(n, dtype=dtype))
    assert len({compiled.split()[0] for compiled in recorder.call}) == 3
    assert len(set(recorder.call)) > 20
