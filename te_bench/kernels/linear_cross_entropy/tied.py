# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Embeddings of a model whose head shares the token table: one gradient for both, in the head gradient's memory.

Autograd alone would zero a second (Vp, D), add the rows' gradients there and add it to the first: 0.46 GB of traffic
for GPT-2's 0.155 GB table. Here rows are added in place, a token's in the order of its positions, which is the same in
every run. One kernel looks up and adds token and position rows.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels.autograd import once_differentiable
from te_bench.kernels.launch import launch, traits
from te_bench.kernels.tile import rounded

INTERPRETED: bool = triton.knobs.runtime.interpret
# A token's rows that are read at once: a token that occurs 600 times among 12288 takes 75 steps.
ROWS = 8
ELEMENTS = 2048  # of a tile: ROWS rows by the columns that remain, so that a thread adds its own
CONSTANTS: dict[str, Any] = {"ROWS": ROWS, "COLUMNS": ELEMENTS // ROWS, "num_warps": 2}
LOOKUP: dict[str, Any] = {"ROWS": 8, "COLUMNS": 256, "num_warps": 4}  # four times 16 bytes per thread from each table


@triton.jit
def embed_kernel(table, positions, tokens, out, N, T, V, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write table[tokens[i]] + positions[i % T] to out[i] for i < N; NaN for a token outside table (V, D).

    positions may be None: nothing is added.
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (i < N)[:, None] & (cols < D)
    token = tl.load(tokens + i, mask=i < N, other=0)
    there = inside & ((token >= 0) & (token < V))[:, None]
    row = tl.load(table + token.to(tl.int64)[:, None] * D + cols, mask=there, other=float("nan"))
    if positions is not None:
        row += tl.load(positions + (i % T).to(tl.int64)[:, None] * D + cols, mask=inside, other=0.0)
    tl.store(out + i.to(tl.int64)[:, None] * D + cols, row, mask=inside)


@triton.jit
def _next(tokens, places, i, N, ROWS: tl.constexpr):
    """Return the tokens from i on (-1 beyond the end), their places, and the last of these tokens."""
    at = i + tl.arange(0, ROWS)
    end = i + ROWS - 1
    near = tl.load(tokens + at, mask=at < N, other=-1)
    return near, tl.load(places + at, mask=at < N, other=0), tl.load(tokens + end, mask=end < N, other=-1)


@triton.jit
def add_rows_kernel(table, rows, tokens, places, N, V, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the sum of rows[places[i]] over all i with tokens[i] = t to table[t], for t < V; tokens (N,) are sorted.

    There is a program for each i and COLUMNS columns: the first one of a token adds for all of them.
    """
    i = tl.program_id(0)
    # Most tokens occur once, and programs wait for memory more than they add: request everything at once.
    before = tl.load(tokens + i - 1, mask=i > 0, other=-1)
    token = tl.load(tokens + i)
    near, place, last = _next(tokens, places, i, N, ROWS)
    if (token != before) & (token >= 0) & (token < V):
        cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = cols < D
        there = table + token.to(tl.int64) * D + cols
        was = tl.load(there, mask=inside, other=0.0)
        total = tl.zeros((COLUMNS,), tl.float32)
        more = i
        while more < N:
            mask = (near == token)[:, None] & inside[None, :]
            found = tl.load(rows + place.to(tl.int64)[:, None] * D + cols[None, :], mask=mask, other=0.0)
            more = tl.where(last == token, more + ROWS, N)
            near, place, last = _next(tokens, places, more, N, ROWS)
            total += tl.sum(found.to(tl.float32), 0)
        tl.store(there, rounded(was + total, table.dtype.element_ty), mask=inside)


def add_rows(table: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Add the sum of rows[i] over all i with tokens[i] = t to table[t], in float32; (Vp, D), (N, D), (N,) int64."""
    if not (table.is_cuda or INTERPRETED):
        table.index_add_(0, tokens, rows.to(table.dtype))
    elif rows.numel():
        add_rows_by_kernel(table, rows, tokens)


def add_rows_by_kernel(table: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """`add_rows` by the kernel, for at least one row."""
    (n, d), rows = rows.shape, rows.contiguous()
    ordered, places = tokens.int().sort(stable=True)
    places = places.int()
    across = -(-d // CONSTANTS["COLUMNS"])
    key = (*traits(table, rows, ordered, places), n, len(table), d)
    args = table, rows, ordered, places, n, len(table), d
    launch(add_rows_kernel, n, key, table.get_device(), args, CONSTANTS, across)


def embed(table: Tensor, positions: Tensor | None, tokens: Tensor) -> Tensor:
    """Return table[tokens] + positions[:T]: (Vp, D), (at least T, D) or None, (B, T) int64 -> (B, T, D).

    On a GPU an unknown token's row is NaN, where PyTorch ends the process; on a CPU it raises IndexError. Raises
    ValueError for positions that are too few or of another width.
    """
    length = tokens.shape[1]
    if positions is not None and (len(positions) < length or positions.shape[1:] != table.shape[1:]):
        raise ValueError(
            f"positions {tuple(positions.shape)} of {length} tokens and a table {tuple(table.shape)}: at least {length} "
            f"rows of {table.shape[1]} columns are added to the tokens'"
        )
    can_launch = (table.is_cuda or INTERPRETED) and tokens.dtype in (torch.int64, torch.int32)
    alike = positions is None or table.dtype is positions.dtype
    if not can_launch or not alike or not tokens.numel():
        found = F.embedding(tokens, table)
        return found if positions is None else found + positions[:length]
    positions = None if positions is None else positions.contiguous()
    return embed_by_kernel(table.contiguous(), positions, tokens.contiguous())


def embed_by_kernel(table: Tensor, positions: Tensor | None, tokens: Tensor) -> Tensor:
    """`embed` by the kernel, for at least one token."""
    (batch, length), (known, d) = tokens.shape, table.shape
    out = torch.empty((batch, length, d), dtype=table.dtype, device=table.device)
    sizes = tokens.numel(), length, known, d
    grid = -(-sizes[0] // LOOKUP["ROWS"]), -(-d // LOOKUP["COLUMNS"])
    key = (*traits(table, positions, tokens, out), *sizes)
    launch(embed_kernel, grid[0], key, table.get_device(), (table, positions, tokens, out, *sizes), LOOKUP, grid[1])
    return out


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, table: Tensor, positions: Tensor | None, tokens: Tensor, padding: int | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(tokens)
        ctx.padding = padding
        ctx.set_materialize_grads(False)
        ctx.table = table.shape, table.dtype
        ctx.positions = None if positions is None else (len(positions), positions.dtype)
        return embed(table, positions, tokens), table.view_as(table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor | None, dtable: Tensor | None) -> tuple[Tensor | None, ...]:
        if drows is None:
            return dtable, None, None, None
        (tokens,) = ctx.saved_tensors
        dpositions = None
        if ctx.needs_input_grad[1]:
            rows, dtype = ctx.positions
            dpositions = drows.sum(0).to(dtype)
            if unused := rows - len(dpositions):
                dpositions = F.pad(dpositions, (0, 0, 0, unused))
        if dtable is None:
            dtable = drows.new_zeros(ctx.table[0], dtype=ctx.table[1])
        dtable = dtable.contiguous()  # an expanded tensor has no memory of its own
        if ctx.padding is not None:
            drows = drows.masked_fill((tokens == ctx.padding)[..., None], 0)
        add_rows(dtable, drows.flatten(0, -2), tokens.flatten())
        return dtable, dpositions, None, None


def tied(table: Tensor, positions: Tensor | None, tokens: Tensor, padding: int | None = None) -> tuple[Tensor, Tensor]:
    """Return `embed`, and the table again for the head: its incoming gradient is overwritten by that of both.

    table (Vp, D), positions (at least T, D) or None; tokens (B, T) int64 -> (B, T, D), (Vp, D). Nothing else may read
    the second result's gradient. padding: a token whose embedding gets no gradient.
    """
    embedded, again = _Tied.apply(table, positions, tokens, padding)
    return embedded, again
