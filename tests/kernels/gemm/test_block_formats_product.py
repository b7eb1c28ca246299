"""What finishes a product of NVFP4 operands on a GPU: scale, bias and rounding in one pass, bit for bit as in PyTorch."""

import pytest
import torch
from kernel_checks import DEVICES

from te_bench.kernels.gemm import block_formats
from te_bench.kernels.quantize import Operand
from te_bench.kernels.quantize.block_formats import MXFP8_LAYOUT, alpha


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16])
def test_a_product_is_scaled_biased_and_rounded_once(dtype: torch.dtype, bias: torch.dtype | None, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    out = (torch.randn(33, 72, generator=generator) * 1e4).to(device)
    added = None if bias is None else torch.randn(72, generator=generator).to(bias).to(device)
    for amaxes in ((0.37, 3.1), (0.0, 5.0)):
        a, b = (torch.tensor(amax, dtype=torch.float32, device=device).double() / 2688 for amax in amaxes)
        exact = out * alpha(a, b) + (0 if added is None else added.float())
        assert torch.equal(block_formats.finish(out, a, b, dtype, added), exact.to(dtype))
    unscaled = (out + (0 if added is None else added.float())).to(dtype)
    assert torch.equal(block_formats.finish(out, None, None, dtype, added), unscaled)
    strided = None if added is None else added.repeat_interleave(2)[::2]
    assert torch.equal(block_formats.finish(out, None, None, dtype, strided), unscaled)


@pytest.mark.parametrize("shape", [(1,), (7,), (4, 1)])
def test_a_bias_that_does_not_fit_is_refused(shape: tuple[int, ...]) -> None:
    """A kernel would read beyond it."""
    a, b = (Operand(torch.ones(rows, 32, dtype=torch.bfloat16), None, MXFP8_LAYOUT) for rows in (4, 8))
    with pytest.raises(ValueError, match=r"bias has shape .*must be \(8,\)"):
        block_formats.forward(a, b, out_dtype=torch.float32, bias=torch.ones(shape))
