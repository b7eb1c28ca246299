"""The quantisers in plain PyTorch, in float32. Runs anywhere, and torch.compile sees through it.

scale = FP8_MAX / amax; data = cast(saturate(x * scale)); scale_inv = 1 / scale. An amax of 0, infinity or NaN gives scale 1,
and the quotient saturates at the largest float32: the rules of Transformer Engine's Float8CurrentScaling.
"""

import torch
from torch import Tensor

from te_bench.kernels.quantize import (
    GRANULARITIES,
    PLAIN,
    TENSOR,
    Backend,
    Block,
    Layout,
    Operand,
    Quantized,
    check_layouts,
)

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
LARGEST = torch.finfo(torch.float32).max


def scale_from_amax(amax: Tensor, dtype: torch.dtype, power_of_two: bool = False) -> Tensor:
    """Return scale = FP8_MAX / amax, float32 of amax's shape; 1 where amax is 0, infinite or NaN.

    power_of_two rounds it down to a power of two.
    """
    amax = amax.float()
    # Divide two tensors: torch computes a number over a tensor as number * (1 / tensor), which rounds twice and loses
    # all precision above amax 8.5e37, where the reciprocal is subnormal.
    limit = torch.full_like(amax, torch.finfo(dtype).max)
    scale = (limit / amax).clamp(max=LARGEST)
    if power_of_two:  # never subnormal: 448 / the largest float32 is 1.3e-36
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where((amax > 0) & (amax < torch.inf), scale, 1.0)


def widened(data: Tensor) -> Tensor:
    """Convert FP8 data to float32, exactly.

    torch's CPU converts E4M3 one element at a time; through float16's bits it is eight times as fast.
    """
    if data.device.type != "cpu" or data.dtype not in FORMATS or torch.compiler.is_compiling():
        return data.float()
    if data.dtype == torch.float8_e5m2:  # the upper byte of a float16
        return (data.view(torch.uint8).to(torch.int16) << 8).view(torch.float16).float()
    if data.numel() and (data.view(torch.uint8) & 0x7F).amax() == 0x7F:  # NaN, whose bits would make 480
        return data.float()
    bits = data.view(torch.int8).to(torch.int16)  # the sign in bits 7 to 15
    bits <<= 7
    bits &= ~0x4000  # the sign only in bit 15
    return bits.view(torch.float16).float().mul_(2.0**8)  # exponents are biased by 7, float16's by 15


def dequantize(x: Operand, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return data * scale_inv, computed in float32, in `dtype`; data (M, N), or of any shape with one scale.

    Raises ValueError if the scales do not have the layout's shape, or an order other than PLAIN.
    """
    return (widened(x.data) * spread(x)).to(dtype)


def spread(x: Operand) -> Tensor:
    """Return each element's float32 scale_inv, in a shape that multiplies data. Raises ValueError as dequantize."""
    if x.layout.scales is None:
        return torch.ones((), device=x.data.device)
    scale_inv, layout, (height, width) = x.scale_inv.float(), x.layout, x.layout.block
    if layout.order == PLAIN:
        if layout.block == TENSOR and not scale_inv.dim():
            return scale_inv
        if height is not None and x.data.dim() == 2 and scale_inv.shape == layout.scale_shape(*x.data.shape):
            return _spread(scale_inv, layout.block, *x.data.shape)
    raise ValueError(
        f"scale_inv {tuple(scale_inv.shape)} with data {tuple(x.data.shape)}: blocks of {height} x {width}, None for all, "
        f"in the order {layout.order!r}, of which {PLAIN!r} is known here"
    )


def quantize(
    x: Tensor,
    dtype: torch.dtype,
    block: Block = TENSOR,
    *,
    rowwise: bool,
    columnwise: bool,
    scale: Tensor | None = None,
    power_of_two: bool = False,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    column_sum: Tensor | None = None,
    via: torch.dtype | None = None,
) -> Quantized:
    """Compute fp8(x * scale) of x (M, N); see Backend. Raises ValueError as check."""
    check(x, dtype, block, rowwise, columnwise, scale, amax, counts, column_sum, via)
    v = (x if via is None else x.to(via)).detach().float().contiguous()  # elementwise results are contiguous, too
    if amax is not None and v.numel():
        amax.copy_(torch.maximum(amax, v.abs().amax()))
    if column_sum is not None:
        column_sum.add_(v.sum(0))

    def cast(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own = scale_from_amax(_amax_of_blocks(a.abs(), block), dtype, power_of_two) if scale is None else scale.view(())
        each = own if block == TENSOR else _spread(own, block, *a.shape)
        return _cast(a * each, dtype), own.reciprocal(), each

    data, scale_inv, each = cast(v) if rowwise or block == TENSOR else (None, None, None)
    if counts is not None and data is not None and each is not None:
        _count(counts, v, each, data)
    if block == TENSOR and data is not None:
        data_t = data.t().contiguous() if columnwise else None
        return one_scale(dtype, rowwise, columnwise, data, data_t, scale_inv)
    data_t = scale_inv_t = None
    if columnwise:
        # A view of v would give a transposed view of data.
        data_t, scale_inv_t, each = cast(v.t().contiguous())
        if counts is not None and not rowwise:
            _count(counts, v.t(), each, data_t)
    return Quantized(data, scale_inv, data_t, scale_inv_t, Layout(dtype, block, torch.float32))


def one_scale(
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    data: Tensor | None,
    data_t: Tensor | None,
    scale_inv: Tensor | None,
) -> Quantized:
    """Return Quantized with one scale, without what was not requested, where operators return empty tensors."""
    layout = Layout(dtype, TENSOR, torch.float32)
    return Quantized(data, scale_inv, data_t, scale_inv, layout).requested(rowwise, columnwise)


def check(
    x: Tensor,
    dtype: torch.dtype,
    block: Block,
    rowwise: bool,
    columnwise: bool,
    scale: Tensor | None,
    amax: Tensor | None,
    counts: Tensor | None,
    column_sum: Tensor | None,
    via: torch.dtype | None,
) -> None:
    """Raise ValueError unless x is a float (M, N), dtype an FP8 format, a layout requested, and the buffers fit."""
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x {tuple(x.shape)} of {x.dtype}: it must be (M, N), of float32, bfloat16 or float16")
    if dtype not in FORMATS:
        raise ValueError(f"dtype {dtype}: {' or '.join(map(str, FORMATS))}")
    check_layouts(rowwise, columnwise)
    if via not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"via {via}: None (x as it is), torch.bfloat16 or torch.float16")
    if block != TENSOR and (block not in GRANULARITIES or scale is not None or column_sum is not None):
        legal = ", ".join(map(str, GRANULARITIES))
        raise ValueError(f"block {block}: one of {legal}; a given scale and column_sum are for {TENSOR}")
    if scale is None and (amax is not None or via is not None):
        raise ValueError("amax or via without a scale: they are for casts by a given scale")
    for name, buffer, numel, kind in (
        ("scale", scale, 1, torch.float32),
        ("amax", amax, 1, torch.float32),
        ("counts", counts, 3, torch.int64),
        ("column_sum", column_sum, x.shape[1], torch.float32),
    ):
        if buffer is None:
            continue
        fits = buffer.dtype == kind and buffer.numel() == numel and buffer.device == x.device
        if not fits or not buffer.is_contiguous():
            raise ValueError(
                f"{name} {tuple(buffer.shape)} of {buffer.dtype} on {buffer.device} for x {tuple(x.shape)}: it must be "
                f"{numel} of {kind}, contiguous, on {x.device}"
            )


def _amax_of_blocks(a: Tensor, block: Block) -> Tensor:
    """Return the largest element of each block of a (M, N), with `Layout.scale_shape`; 0 of none."""
    height, width = block
    if height is None or width is None:
        dims = (0, 1) if height is None else (1,)
        return a.amax(dims) if a.numel() else a.new_zeros(() if height is None else a.shape[0])
    return _amax_of_each(_amax_of_each(a, 1, width), 0, height)


def _amax_of_each(a: Tensor, dim: int, length: int) -> Tensor:
    """Return the largest of each `length` elements along a dimension, and of the rest at its end."""
    if length == 1 or not a.numel():
        return a[(slice(None),) * dim + (slice(None, None, length),)]
    rest = a.shape[dim] % length
    whole, *ragged = a.split([a.shape[dim] - rest, rest] if rest else [a.shape[dim]], dim)
    largest = [whole.unflatten(dim, (-1, length)).amax(dim + 1)] if whole.numel() else []
    return torch.cat(largest + [part.amax(dim, keepdim=True) for part in ragged], dim)


def _spread(scale: Tensor, block: Block, m: int, n: int) -> Tensor:
    """Return the scale of each element of an (M, N) matrix of blocks; a view where one block spans a dimension."""
    height, width = block
    scale = scale[:, None] if width is None else scale
    if height is not None and height > 1:
        scale = scale[:, None].expand(-1, height, -1).flatten(0, 1)[:m]
    return scale[:, :, None].expand(-1, -1, width or n).flatten(1)[:, :n]


def _cast(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to FP8, saturated, in place: `scaled` may be overwritten."""
    limit = torch.finfo(dtype).max
    return scaled.clamp_(-limit, limit).to(dtype)


def _count(counts: Tensor, v: Tensor, scale: Tensor, data: Tensor) -> None:
    finite = torch.isfinite(v)
    saturated = finite & ((v * scale).abs() > torch.finfo(data.dtype).max)
    underflowed = (v != 0) & (widened(data) == 0)
    counts.add_(torch.stack([saturated.sum(), underflowed.sum(), (~finite).sum()]))


BACKEND = Backend(quantize=quantize)
