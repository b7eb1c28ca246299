"""Blackwell's MXFP8 and NVFP4 in plain PyTorch, bit for bit: blocks, scales, stochastic rounding, Hadamard transform.

Each operation is rounded once, to float32. A cast returns bf16, which represents every product of an element and its
block's scale exactly, so a GEMM of such operands is a bf16 GEMM. Only MXFP8 below 2^-133 is rounded, and above 3.4e38
infinite. Sources: Transformer Engine 2.20 (common/cast/mxfp8, common/cast/nvfp4, common/util/ptx.cuh), whose rules
these are; OCP Microscaling Formats v1.0; NVFP4: arXiv:2509.25149.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from te_bench.kernels.quantize import TENSOR, Layout, Quantized, check_layouts
from te_bench.kernels.quantize.backends.reference import FORMATS, LARGEST, widened

MXFP8_BLOCK, NVFP4_BLOCK = 32, 16
E4M3_LARGEST, E2M1_LARGEST = 448.0, 6.0
NVFP4_LARGEST = E4M3_LARGEST * E2M1_LARGEST  # 2688: the scaled tensor's amax
SMALLEST_SCALE = 0x00400000  # bits of 2^-127, E8M0's smallest, subnormal in float32

#: Bit i: the sign of element i in the Hadamard transform of 16, fixed as in Transformer Engine
#: (pytorch/tensor/nvfp4_tensor.py).
NEGATIVE = 0xD7E8

#: bf16 elements times their block's scale. x = data for MXFP8, data * scale_inv (amax / 2688) for NVFP4.
MXFP8_LAYOUT = Layout(torch.bfloat16, TENSOR, None)
NVFP4_LAYOUT = Layout(torch.bfloat16, TENSOR, torch.float64)


class Elements(NamedTuple):
    """Blocks (..., height, width): the elements in float32, and one scale per block, (...)."""

    values: Tensor
    scales: Tensor


def mxfp8_elements(v: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Elements:
    """Return FP8 elements of v (..., height, width) and E8M0 codes (...) uint8: v is about values * 2^(code - 127).

    v and values are float32; code is that of amax / FP8_MAX rounded up. NaN stays one bad element; infinity gives code
    254 and saturates.
    """
    limit = torch.finfo(dtype).max
    bits = (_amax(v) * (1 / limit)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & ~((exponent == 0) & (mantissa <= SMALLEST_SCALE))
    code = (exponent + up).clamp(max=254)
    inverse = _power_of_two(254 - code)
    return Elements(widened((v * _each(inverse)).clamp_(-limit, limit).to(dtype)), code.to(torch.uint8))


def _power_of_two(code: Tensor) -> Tensor:
    """Return 2^(code - 127) for an E8M0 code from 0 to 254."""
    bits = (code.to(torch.int32) << 23).clamp(min=SMALLEST_SCALE)
    return bits.view(torch.float32)


def nvfp4_elements(v: Tensor, amax: Tensor, random: Tensor | None = None) -> Elements:
    """Return E2M1 elements and E4M3 scales (...) of v (..., height, width): v is about values * scales * amax / 2688.

    amax: () float32, the tensor's. random: bytes of v's shape for stochastic rounding (`e2m1`). v, values and scales
    are float32. A block whose scale underflows to 0 holds elements of +-6 that count as 0.
    """
    # Divide two tensors, as in scale_from_amax: otherwise torch rounds twice.
    encode = (torch.full_like(amax, NVFP4_LARGEST) / amax).clamp(max=LARGEST)
    encode = torch.where((amax > 0) & (encode > 0), encode, 1.0)
    decode = encode.reciprocal()
    sixth = encode * (1 / E2M1_LARGEST)
    wanted = (_amax(v) * sixth).clamp(max=E4M3_LARGEST)
    scales = widened(wanted.to(torch.float8_e4m3fn))
    inverse = (scales * decode).reciprocal().clamp(max=LARGEST)
    return Elements(e2m1(v * _each(inverse), random), scales)


def e2m1(y: Tensor, random: Tensor | None = None) -> Tensor:
    """Round float32 y to the nearest of +-{0, 0.5, 1, 1.5, 2, 3, 4, 6}, ties to even; 6 at most, NaN gives +6.

    random: bytes of y's shape. Then |y| + byte / 256 of a step is rounded down, so |y| goes up with a probability, to
    1/256, by its distance to its neighbours. The step is 0.5 below 2, 1 below 4, else 2.
    """
    y = y.nan_to_num(torch.inf, torch.inf, -torch.inf)
    size = y.abs()
    if random is None:
        step = _step(size)
        size = (size / step).round_() * step
    else:
        size = size + random * (_step(size) / 256)
        step = _step(size)
        size = (size / step).floor_() * step
    return size.clamp_(max=E2M1_LARGEST).copysign_(y)


def _step(size: Tensor) -> Tensor:
    """Return 0.5 below 2, 1 below 4, else 2: half the power of two below size, from its bits."""
    return (size.clamp(1, 7).view(torch.int32) & 0x7F800000).view(torch.float32) / 2


def hadamard(v: Tensor) -> Tensor:
    """Return bf16(v diag(s) H / 4), v (..., 16) float32, H[i, j] = (-1)^popcount(i & j), nearly orthogonal.

    s: signs, -1 where NEGATIVE has a 1.
    """
    element = torch.arange(NVFP4_BLOCK, device=v.device)
    y = torch.where(1 << element & NEGATIVE > 0, -v, v)
    for width in (1, 2, 4, 8):
        a, b = y.unflatten(-1, (-1, 2, width)).unbind(-2)
        y = torch.stack((a + b, a - b), -2).flatten(-3)
    return (y / 4).bfloat16().float()


def alpha(a: Tensor, b: Tensor) -> Tensor:
    """Return the factor of an NVFP4 GEMM's float32 sum, from both scale_inv: fl(fl(gA gB) fl(1 / 2688^2)).

    gA and gB are the tensors' amaxes, recovered exactly from amax / 2688 in float64.
    """
    both = (a * NVFP4_LARGEST).float() * (b * NVFP4_LARGEST).float()
    return both * (1 / NVFP4_LARGEST**2)


def mxfp8(
    x: Tensor,
    dtype: torch.dtype,
    *,
    rows: int = 1,
    rowwise: bool,
    columnwise: bool,
    counts: Tensor | None = None,
) -> Quantized:
    """Return x (M, N) rounded through blocks of rows x 32 of dtype, each orientation by its own, in bf16; rows 1 or 32.

    data_t is a view of memory in x's orientation. counts as in quantize.Backend. Raises ValueError for other rows,
    dtypes and shapes, and if no layout is requested.
    """
    check_mxfp8(x, dtype, rows, rowwise, columnwise)
    v = x.detach().float()

    def cast(a: Tensor, count: bool) -> Tensor:
        blocks = _blocks(a, rows, MXFP8_BLOCK)
        values, codes = mxfp8_elements(blocks, dtype)
        scales = _power_of_two(codes)
        if count and counts is not None:
            _count(counts, blocks, values * _each(scales), (blocks / _each(scales)).abs() > torch.finfo(dtype).max)
        return _matrix(values * _each(scales), *a.shape)

    data = cast(v, True) if rowwise or rows > 1 else None
    data_t = None
    if columnwise:
        data_t = data.t() if rows > 1 and data is not None else _as_columns(cast(v.t().contiguous(), not rowwise))
    return Quantized(data if rowwise else None, None, data_t, None, MXFP8_LAYOUT)


def nvfp4(
    x: Tensor,
    *,
    rows: int = 1,
    rowwise: bool,
    columnwise: bool,
    transform: bool = False,
    seed: Tensor | None = None,
    counts: Tensor | None = None,
) -> Quantized:
    """Return x (M, N) rounded through NVFP4 by blocks of rows x 16, each orientation by its own, in bf16; rows 1 or 16.

    transform: data_t is `hadamard`-transformed along M, zero-padded to a multiple of 16; only a GEMM whose other side
    is transformed, too, may read it. seed: () int64, for stochastic rounding, with separate bytes per orientation
    (`random_bytes`). data_t is a view of memory in x's orientation. counts as in quantize.Backend. Raises ValueError
    for other rows and shapes, and if no layout is requested.
    """
    check_nvfp4(x, rows, rowwise, columnwise, transform, seed)
    v = x.detach().float()

    def cast(a: Tensor, stream: int, count: bool) -> tuple[Tensor, Tensor]:
        m, k = a.shape
        blocks = _blocks(a, rows, NVFP4_BLOCK)
        if transform and stream:
            blocks, k = hadamard(blocks), -(-k // NVFP4_BLOCK) * NVFP4_BLOCK
        amax = blocks.abs().nan_to_num(0.0, torch.inf).amax() if blocks.numel() else blocks.new_zeros(())
        random = None if seed is None else random_bytes(seed, blocks.shape[0] * blocks.shape[1], stream)
        values, scales = nvfp4_elements(blocks, amax, None if random is None else random.view(blocks.shape))
        made, scale_inv = (
            values * _each(scales),
            amax.double() / torch.full_like(amax, NVFP4_LARGEST, dtype=torch.float64),
        )
        if count and counts is not None:
            full = (blocks / scale_inv.float()).abs() > E2M1_LARGEST * _each(scales)
            _count(counts, blocks, made, full)
        return _matrix(made, m, k), scale_inv

    data = scale_inv = data_t = scale_inv_t = None
    if rowwise or rows > 1:
        data, scale_inv = cast(v, 0, True)
    if columnwise and rows > 1 and data is not None:
        data_t, scale_inv_t = data.t(), scale_inv
    elif columnwise:
        data_t, scale_inv_t = cast(v.t().contiguous(), 1, not rowwise)
        data_t = _as_columns(data_t)
    if not rowwise:
        data = scale_inv = None
    return Quantized(data, scale_inv, data_t, scale_inv_t, NVFP4_LAYOUT)


def random_bytes(seed: Tensor, blocks: int, stream: int) -> Tensor:
    """Return (blocks, 16) float32: the bytes of `philox` at (block, stream, 0), word by word, the lowest first."""
    words = philox(seed, torch.arange(blocks, device=seed.device), stream, 0)
    return words.to(torch.int32).view(torch.uint8).float()


def philox(seed: Tensor, first: Tensor, second: int | Tensor, third: int | Tensor, rounds: int = 10) -> Tensor:
    """Return (N, 4) int64, the words of Philox4x32 with key `seed`, () int64, and counter (first, second, third, 0).

    first: (N,) int64, below 2^32. Source: Salmon et al., Parallel Random Numbers, SC 2011.
    """
    zero = torch.zeros_like(first)
    even, odd = torch.stack([first, zero + third]), torch.stack([zero + second, zero])  # counter 0 and 2, 1 and 3
    # Filled, because a capture refuses to copy a host's tensor to the device.
    factors, more = (torch.stack([seed.new_full((), number) for number in pair]) for pair in (_FACTORS, _MORE))
    key = torch.stack([seed & _WORD, (seed >> 32) & _WORD])
    for _ in range(rounds):
        product = even * factors[:, None]  # it overflows int64's sign, but the bits are right
        even, odd = ((product >> 32).flip(0) ^ odd ^ key[:, None]) & _WORD, (product & _WORD).flip(0)
        key = (key + more) & _WORD
    return torch.stack([even[0], odd[0], even[1], odd[1]], 1)


_WORD, _FACTORS, _MORE = 0xFFFFFFFF, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


def check_mxfp8(x: Tensor, dtype: torch.dtype, rows: int, rowwise: bool, columnwise: bool) -> None:
    """Raise ValueError for what `mxfp8` refuses."""
    _check(x, rows, MXFP8_BLOCK, rowwise, columnwise)
    if dtype not in FORMATS:
        raise ValueError(f"dtype {dtype}: {' or '.join(map(str, FORMATS))}")


def check_nvfp4(x: Tensor, rows: int, rowwise: bool, columnwise: bool, transform: bool, seed: Tensor | None) -> None:
    """Raise ValueError for what `nvfp4` refuses."""
    _check(x, rows, NVFP4_BLOCK, rowwise, columnwise)
    if rows > 1 and (transform or seed is not None):
        raise ValueError(f"rows {rows}: neither transformed nor rounded stochastically; give rows=1")


def _check(x: Tensor, rows: int, square: int, rowwise: bool, columnwise: bool) -> None:
    """Raise ValueError unless x is a float (M, N), rows 1 or `square`, and a layout requested."""
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x {tuple(x.shape)} of {x.dtype}: it must be (M, N), of float32, bfloat16 or float16")
    if rows not in (1, square):
        raise ValueError(f"rows {rows}: 1, for activations and gradients, or {square}, for weights")
    check_layouts(rowwise, columnwise)


def _amax(v: Tensor) -> Tensor:
    """Return the largest |v| of each block, ignoring NaN."""
    return v.abs().nan_to_num(0.0, torch.inf).amax((-2, -1))


def _each(scales: Tensor) -> Tensor:
    return scales[..., None, None]


def _blocks(a: Tensor, height: int, width: int) -> Tensor:
    """Return a (M, K) as (blocks down, blocks across, height, width), zero-padded."""
    m, k = a.shape
    padded = torch.nn.functional.pad(a, (0, -k % width, 0, -m % height))
    return padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2)


def _matrix(blocks: Tensor, m: int, k: int) -> Tensor:
    """Reassemble `_blocks`' blocks, in bf16."""
    return blocks.transpose(1, 2).flatten(2).flatten(0, 1)[:m, :k].bfloat16().contiguous()


def _as_columns(a: Tensor) -> Tensor:
    """Return a (N, M) as a view of its transpose, as a half-precision GEMM reads it from x's orientation."""
    return a.t().contiguous().t()


def _count(counts: Tensor, v: Tensor, made: Tensor, full: Tensor) -> None:
    finite = torch.isfinite(v)
    counts.add_(torch.stack([(finite & full).sum(), ((v != 0) & (made == 0)).sum(), (~finite).sum()]))
