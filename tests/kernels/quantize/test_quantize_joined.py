"""Three matrices cast as one: what `quantize` makes of them side by side, bit for bit."""

import pytest
import torch
from kernel_checks import DEVICES
from torch import Tensor

from te_bench.kernels.quantize import joined
from te_bench.kernels.quantize.backends import reference

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16


def draw(m: int, width: int, device: str, dtype: torch.dtype = BF16, stride: int | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(m + width)
    whole = [torch.randn(m, stride or width, generator=generator) * 10**k for k in range(3)]
    return [x.to(device, dtype)[:, :width] for x in whole]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("m", "width", "turn", "stride", "dtype", "target"),
    [
        (130, 64, 64, None, BF16, E4M3),
        (64, 192, 192, 256, BF16, E5M2),
        (2, 128, 128, None, torch.float16, E4M3),
        (6, 256, 64, None, BF16, E5M2),
        (6, 256, 64, None, BF16, E4M3),
        (130, 384, 128, 400, BF16, E5M2),
    ],
)
def test_it_is_scaled_of_them_dealt_out_in_turn(m, width, turn, stride, dtype, target, device):
    parts, scale = draw(m, width, device, dtype, stride), torch.tensor(3.0, device=device)
    amax, wanted = (torch.tensor(0.5, device=device) for _ in range(2))
    sums, total = (torch.full((3 * width,), 2.0, device=device) for _ in range(2))
    assert joined.fits(parts, turn)
    data, data_t, scale_inv = joined.kernel(parts, turn, scale, target, amax, sums)
    whole = torch.stack([x.unflatten(1, (-1, turn)) for x in parts], 2).flatten(1)
    looks = {"amax": wanted, "column_sum": total}
    exact = reference.quantize(whole, target, scale=scale, rowwise=True, columnwise=True, **looks)
    torch.testing.assert_close(sums, total, rtol=1e-5, atol=1e-5 * whole.float().abs().sum(0).max().item())
    assert torch.equal(data.view(torch.uint8), exact.data.view(torch.uint8))
    assert torch.equal(data_t.view(torch.uint8), exact.data_t.view(torch.uint8))
    assert torch.equal(scale_inv, exact.scale_inv)
    assert torch.equal(amax, wanted)
    made = joined.joined(parts, turn, scale, target)
    assert torch.equal(made.data.view(torch.uint8), data.view(torch.uint8))


def test_what_does_not_fit() -> None:
    assert not joined.fits(draw(3, 64, "cpu"), 64)
    assert not joined.fits(draw(4, 65, "cpu"), 65)
    assert not joined.fits(draw(4, 64, "cpu", torch.float32), 64)
    assert not joined.fits(draw(4, 64, "cpu")[:2], 64)
    one, two, three = draw(64, 64, "cpu")
    assert not joined.fits([one, two, three.t()], 64)
    assert not joined.fits([one, two, three[:32]], 64)
    assert not joined.fits(draw(4, 128, "cpu"), 32)
    assert not joined.fits(draw(4, 192, "cpu"), 128)


@pytest.mark.parametrize("device", DEVICES)
def test_the_operator(device: str) -> None:
    scale, amax = torch.tensor(3.0, device=device), torch.tensor(0.5, device=device)
    arguments = draw(4, 64, device), 64, scale, E5M2, amax, torch.zeros(192, device=device)
    torch.library.opcheck(
        torch.ops.te_bench.quantize_joined.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
    compiled = torch.compile(joined.joined, fullgraph=True, backend="aot_eager")
    made, eager = compiled(*arguments), joined.joined(*arguments)
    assert torch.equal(made.data_t.view(torch.uint8), eager.data_t.view(torch.uint8))
