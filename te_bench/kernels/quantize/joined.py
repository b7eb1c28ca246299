# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Cast matrices side by side as one: the gradients of q, k and v, separate in attention and one matrix for GEMMs."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels.launch import launch, traits
from te_bench.kernels.operators import define
from te_bench.kernels.quantize import Quantized
from te_bench.kernels.quantize.backends import reference
from te_bench.kernels.quantize.kernels import GATHERING, TILE, UNALIGNED, add_sums, cast, float32, store, store_t
from te_bench.kernels.tile import FP8, empty_pair, larger, magnitude, publish, read_amax

PARTS = 3
HALVES = (torch.bfloat16, torch.float16)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _joined_kernel(
    first,
    second,
    third,
    scale,
    data,
    data_t,
    scale_inv,
    amax,
    sums,
    stride,
    M,
    WIDTH: tl.constexpr,
    TURN: tl.constexpr,
    TARGET: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    POLICY: tl.constexpr,
):
    """quantize's _cast_kernel for three matrices (M, WIDTH), TURN columns of each in turn; COLUMNS divides TURN."""
    N: tl.constexpr = 3 * WIDTH
    ACROSS: tl.constexpr = N // COLUMNS
    index = tl.program_id(0)
    factor = tl.load(scale)
    before = 0
    if amax is not None:
        before = read_amax(amax)
    column = index % ACROSS * COLUMNS
    part = column % (3 * TURN) // TURN
    x = tl.where(part == 0, first, tl.where(part == 1, second, third))
    rows = index // ACROSS * ROWS + 2 * tl.arange(0, ROWS // 2)
    start = column // (3 * TURN) * TURN + column % TURN
    x_cols = tl.max_contiguous(tl.multiple_of(start, COLUMNS) + tl.arange(0, COLUMNS), [VECTOR])
    at = x + rows.to(tl.int64)[:, None] * stride + x_cols[None, :]
    a = tl.load(at, mask=(rows < M)[:, None], other=0.0)
    b = tl.load(at + stride, mask=(rows + 1 < M)[:, None], other=0.0)
    if index == 0:
        tl.store(scale_inv, tl.div_rn(1.0, factor))
    low, high = cast(a, factor, TARGET), cast(b, factor, TARGET)
    cols = tl.max_contiguous(column + tl.arange(0, COLUMNS), [VECTOR])
    store(low, high, data, N, rows, cols, M, N, POLICY)
    store_t(low, high, data_t, index, cols, M, N, ROWS, COLUMNS, POLICY)
    if sums is not None:
        tl.store(sums + (index // ACROSS).to(tl.int64) * N + cols, tl.sum(a.to(tl.float32) + b.to(tl.float32), 0))
    if amax is not None:
        publish(magnitude(larger(a, b).to(tl.float32)), None, amax, None, before)


def fits(parts: Sequence[Tensor], turn: int) -> bool:
    """Return whether the kernel supports the parts: three alike, half precision, even height, turns of whole tiles."""
    first = parts[0]
    alike = all(
        p.dim() == 2 and (p.shape, p.stride(), p.dtype) == (first.shape, first.stride(), first.dtype) for p in parts
    )
    if len(parts) != PARTS or not alike or first.dtype not in HALVES or not first.numel() or first.shape[1] % turn:
        return False
    return first.stride(1) == 1 and first.shape[0] % 2 == 0 and turn % TILE["COLUMNS"] == 0


def interleave(parts: Sequence[Tensor], turn: int) -> Tensor:
    """Return (M, N) of three (M, N / 3): `turn` columns of each in turn."""
    return torch.cat([p.unflatten(1, (-1, turn)) for p in parts], 2).flatten(1)


def joined(
    parts: Sequence[Tensor],
    turn: int,
    scale: Tensor,
    dtype: torch.dtype,
    amax: Tensor | None = None,
    column_sum: Tensor | None = None,
) -> Quantized:
    """Quantise interleave(parts, turn) by a given scale, bit for bit, in both layouts; three (M, N / 3) that fit."""
    assert fits(parts, turn)
    if torch.compiler.is_compiling():
        made = _operator([p.detach() for p in parts], turn, scale, dtype, amax, column_sum)
    else:
        made = (kernel if parts[0].is_cuda else _plain)(parts, turn, scale, dtype, amax, column_sum)
    return reference.one_scale(dtype, True, True, *made)


def kernel(
    parts: Sequence[Tensor],
    turn: int,
    scale: Tensor,
    dtype: torch.dtype,
    amax: Tensor | None,
    column_sum: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return data, data_t, scale_inv, by the kernel."""
    m, width = parts[0].shape
    data, data_t = empty_pair(m, PARTS * width, parts[0], dtype, rowwise=True, columnwise=True)
    assert data is not None
    assert data_t is not None
    scale_inv = float32(data)
    tile = TILE if column_sum is None else GATHERING
    stride, down = parts[0].stride(0), -(-m // tile["ROWS"])
    sums = None if column_sum is None else float32(data, down, PARTS * width)
    grid = down * (PARTS * width // tile["COLUMNS"])
    key = (*traits(*parts), stride, m, width, turn, dtype, amax is None, sums is None)
    args = (*parts, scale, data, data_t, scale_inv, amax, sums, stride, m)
    constants = {"WIDTH": width, "TURN": turn, "TARGET": FP8[dtype], **tile}
    launch(_joined_kernel, grid, key, data.get_device(), args, constants)
    if column_sum is not None and sums is not None:
        add_sums(sums, column_sum)
    return data, data_t, scale_inv


def _plain(
    parts: Sequence[Tensor],
    turn: int,
    scale: Tensor,
    dtype: torch.dtype,
    amax: Tensor | None,
    column_sum: Tensor | None,
) -> tuple[Any, Any, Any]:
    q = reference.quantize(
        interleave(parts, turn), dtype, scale=scale, rowwise=True, columnwise=True, amax=amax, column_sum=column_sum
    )
    return q.data, q.data_t, q.scale_inv


def _fake(parts: list[Tensor], turn: int, scale: Tensor, dtype: torch.dtype, *_: Any) -> Any:
    m, width = parts[0].shape
    return *empty_pair(m, PARTS * width, parts[0], dtype, rowwise=True, columnwise=True), float32(parts[0])


_operator = define("quantize_joined", kernel, _fake, plain=_plain, writes=("amax", "column_sum"))
