"""The transpose of FP8 matrices is the second layout of their cast, bit for bit."""

import pytest
import torch
from kernel_checks import DEVICES

from te_bench.kernels.quantize import turn
from te_bench.kernels.quantize.backends import reference


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("target", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(("m", "n"), [(128, 128), (2, 1), (258, 130), (64, 400), (6, 127)])
def test_it_is_the_columns_of_the_cast(m: int, n: int, target: torch.dtype, device: str) -> None:
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(m + n)).to(device, torch.bfloat16)
    x[0, 0] = torch.nan
    scale = torch.tensor(300.0, device=device)
    exact = reference.quantize(x, target, scale=scale, rowwise=True, columnwise=True)
    for function in (turn.turn_by_kernel, turn.turn):
        made = function(exact.data)
        assert made.dtype is target
        assert made.is_contiguous()
        assert torch.equal(made.view(torch.uint8), exact.data_t.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_a_matrix_and_odd_and_empty_ones(device: str) -> None:
    whole = torch.arange(64 * 48, device=device).reshape(64, 48).to(torch.uint8)
    for part in (whole[16:32], whole[1:4], whole[:0], whole[:, 3:7], whole.t()):
        assert torch.equal(turn.turn(part), part.t())
