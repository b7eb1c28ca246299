# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The step of delayed scaling: amaxes in row 0 of each history become scales, and the histories advance.

On a GPU it is one launch for all modules; elsewhere, and under torch.compile, plain PyTorch.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_bench.kernels import launch as _launch

SLOTS = 16  # columns of a history per program: 3 x 4 slots of a module with four GEMMs in one
LONGEST = 512  # rows of a history in registers at a time
TABLES = 64  # address tables kept; a model needs one, two while being captured


def update(
    histories: Sequence[Tensor],
    scales: Sequence[Tensor],
    limits: Sequence[Tensor],
    *,
    margin: float,
    algorithm: str,
    nonfinite: Sequence[Tensor],
) -> None:
    """Set scale = (limit / amax) / 2^margin for each slot with an amax, in place; then roll its history by -1.

    Each state has history (L, n), scale (n,), limit (n,) float32, nonfinite (n,) int64; row 0 gathers. amax is the
    largest of the slot's L rows ("max") or row 0 ("most_recent"). If row 0 is 0, the slot is unchanged. If it is
    infinity or NaN, nonfinite += 1, the scale stays, and the history gets 0. An amax that is 0 or not finite keeps the
    scale; a quotient beyond float32 gives its largest. The new row 0 is 0. Raises ValueError for shapes that do not
    fit.
    """
    if algorithm not in ("max", "most_recent"):
        raise ValueError(f"algorithm {algorithm!r}: max or most_recent")
    states = list(zip(histories, scales, limits, nonfinite, strict=True))
    for history, *rows in states:
        if history.dim() != 2 or any(t.shape != history.shape[1:] or not t.is_contiguous() for t in rows):
            shapes = ", ".join(str(tuple(t.shape)) for t in rows)
            raise ValueError(
                f"history {tuple(history.shape)} with scale, limit, nonfinite of {shapes}: (L, n) and (n,)"
            )
        if not history.is_contiguous():
            raise ValueError(f"history {tuple(history.shape)} of stride {history.stride()}: it must be contiguous")
    by_device: dict[int, list[tuple[Tensor, Tensor, Tensor, Tensor]]] = {}
    for state in states:
        by_device.setdefault(state[0].get_device(), []).append(state)
    for device, found in by_device.items():
        if device >= 0 and not torch.compiler.is_compiling():
            launch(found, margin, algorithm)
            continue
        for state in found:
            _step(*state, margin, algorithm)


def _step(history: Tensor, scale: Tensor, limit: Tensor, nonfinite: Tensor, margin: float, algorithm: str) -> None:
    staged = history[0]
    gathered, bad = staged != 0, ~torch.isfinite(staged)
    clean = torch.cat([torch.where(bad, 0.0, staged)[None], history[1:]])
    amax = clean[0] if algorithm == "most_recent" else clean.amax(0)
    # Divide tensors by tensors: torch multiplies by a number's reciprocal, which rounds once more.
    new = (limit / amax / torch.full_like(amax, 2.0**margin)).clamp(max=torch.finfo(torch.float32).max)
    usable = gathered & ~bad & (amax > 0) & torch.isfinite(amax)
    moved = torch.cat([torch.zeros_like(staged)[None], clean[2:], clean[:1]])[: len(history)]
    scale.copy_(torch.where(usable, new, scale))
    nonfinite.add_(bad)
    history.copy_(torch.where(gathered, moved, history))


@triton.jit
def _update_kernel(table, divisor, MOST_RECENT: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr):
    """Update SLOTS slots of a state per program; a table row: addresses of history, scale, limit, nonfinite; L; n."""
    entry = table + tl.program_id(0) * 6
    history = tl.load(entry).to(tl.pointer_type(tl.float32))
    scale = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
    limit = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
    nonfinite = tl.load(entry + 3).to(tl.pointer_type(tl.int64))
    length = tl.load(entry + 4).to(tl.int32)
    n = tl.load(entry + 5).to(tl.int32)
    slots = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    there = slots < n
    staged = tl.load(history + slots, mask=there, other=0.0)
    bits = staged.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bad = bits >= 0x7F800000
    clean = tl.where(bad, 0.0, staged)
    gathered = there & (bits > 0)
    largest = tl.where(bad, 0, bits)
    if not MOST_RECENT:
        for start in tl.range(1, length, ROWS):
            rows = start + tl.arange(0, ROWS)
            mask = (rows < length)[:, None] & gathered[None, :]
            old = tl.load(history + rows[:, None] * n + slots[None, :], mask=mask, other=0.0)
            largest = tl.maximum(largest, tl.max(old.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))
    usable = gathered & (bad == 0) & (largest > 0) & (largest < 0x7F800000)
    amax = tl.where(usable, largest, 0x3F800000).to(tl.float32, bitcast=True)
    quotient = tl.div_rn(tl.div_rn(tl.load(limit + slots, mask=usable, other=1.0), amax), divisor)
    tl.store(scale + slots, tl.minimum(quotient, 3.4028234663852886e38), mask=usable)
    tl.store(nonfinite + slots, tl.load(nonfinite + slots, mask=bad, other=0) + 1, mask=bad)
    tl.debug_barrier()  # here and below: a thread stores where its neighbour loads
    for start in tl.range(1, length - 1, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < length - 1)[:, None] & gathered[None, :]
        old = tl.load(history + (rows + 1)[:, None] * n + slots[None, :], mask=mask, other=0.0)
        tl.debug_barrier()
        tl.store(history + rows[:, None] * n + slots[None, :], old, mask=mask)
        tl.debug_barrier()
    tl.store(history + (length - 1) * n + slots, clean, mask=gathered & (length > 1))
    tl.debug_barrier()
    tl.store(history + slots, tl.zeros((SLOTS,), tl.float32), mask=gathered)


_tables: dict[tuple[int, ...], Tensor] = {}
_captured: dict[tuple[int, ...], Tensor] = {}  # read at every replay of a graph, which keeps no inputs: never dropped


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def launch(states: Sequence[tuple[Tensor, ...]], margin: float, algorithm: str) -> None:
    """Run `update` by one kernel. The first call for given tensors copies addresses: make it before a capture."""
    entries: list[int] = []
    for state in states:
        entries += [t.data_ptr() for t in state]
        entries += state[0].shape
    device = states[0][0].device
    known = (device.index or 0, *entries)
    table = _tables.get(known)
    if table is None:
        if len(_tables) >= TABLES:
            _tables.clear()
        table = _tables[known] = torch.tensor(entries, dtype=torch.int64, device=device).view(-1, 6)
    if _capturing(device):
        _captured[known] = table
    length, n = max(entries[4::6]), max(entries[5::6])
    most_recent, rows = algorithm == "most_recent", min(LONGEST, triton.next_power_of_2(length))
    constants = {"MOST_RECENT": most_recent, "ROWS": rows, "SLOTS": SLOTS, "num_warps": 4}
    key, args = (most_recent, rows), (table, float(2.0**margin))
    _launch.launch(_update_kernel, len(states), key, table.get_device(), args, constants, -(-n // SLOTS))
