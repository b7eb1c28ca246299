"""AdamW in Triton: one launch over all parameters, after one for two numbers that all share, and one over all gradients
(with a second stage) for their norm.

Every result is the reference's, bit for bit, except the norm's last digits.
"""

import ctypes
import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.adamw import Backend, Parameter, Problem, Table, kernels
from te_bench.kernels.adamw.backends import reference
from te_bench.kernels.adamw.kernels import COLUMNS, PIECE, ROWS, SUMS, WARPS
from te_bench.kernels.launch import launch
from te_bench.kernels.tile import FLOATS, FP8, lacks_triton

WIDEST = 2**31 // max(ROWS, COLUMNS)  # offsets inside a tile are 32-bit
TILE = {"ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS}
SMALLEST = -1e5  # instead of log2(0): 2 to it is 0, too


def unsupported(p: Problem) -> str | None:
    return lacks_triton(p.device) or (architecture.lacks_fp8(p.capability) if p.fp8 else None)


def table(parameters: Sequence[Parameter]) -> Table:
    """Return the parameters, their addresses and tiles on their device; call it before any capture.

    Raises ValueError as the reference's, and for matrices with 2^25 or more rows or columns.
    """
    checked = reference.table(parameters)
    rows: list[list[int]] = []
    tiles: dict[tuple[torch.dtype, torch.dtype], list[Tensor]] = {}
    for i, p in enumerate(p for p in checked.parameters if p.weight.numel()):
        rows.append(_row(p))
        height, width = rows[-1][kernels.HEIGHT.value], rows[-1][kernels.WIDTH.value]
        if p.data_t is not None and max(height, width) >= WIDEST:
            raise ValueError(f"data_t of a weight {tuple(p.weight.shape)}: rows and columns must be below {WIDEST}")
        own_tiles = torch.arange(-(-height // ROWS) * -(-width // COLUMNS), dtype=torch.int32)
        tiles.setdefault(reference.form(p), []).append(torch.stack([torch.full_like(own_tiles, i), own_tiles], 1))
    if not rows:
        return checked
    device = checked.parameters[0].weight.device
    counts = [sum(map(len, own)) for own in tiles.values()]
    starts = itertools.accumulate(counts, initial=0)
    return Table(
        parameters=checked.parameters,
        target=checked.target,
        rows=torch.tensor(rows, dtype=torch.int64).to(device),
        tiles=torch.cat([one for own in tiles.values() for one in own]).to(device),
        forms=tuple(zip(tiles, starts, counts, strict=False)),
    )


def move(old: Table, parameters: Sequence[Parameter]) -> Table:
    """Write other addresses of `old`'s parameters into the memory that a captured graph reads; not during a capture.

    Raises ValueError for tensors that do not fit together, and for shapes, dtypes and copies other than old's.
    """
    made = table(parameters)
    if _form(made) != _form(old):
        raise ValueError("other shapes, dtypes or copies than the table's: build another one, and capture again")
    if old.rows is not None:
        old.rows.copy_(made.rows)
    return replace(made, rows=old.rows, tiles=old.tiles)


def _form(table: Table) -> list[tuple[Any, ...]]:
    """Return everything in a table but addresses."""
    copies = ((p.bf16, p.data, p.data_t) for p in table.parameters)
    asked = ([None if t is None else t.dtype for t in three] for three in copies)
    return [
        (p.weight.shape, p.grad.dtype, *reference.form(p), *three)
        for p, three in zip(table.parameters, asked, strict=True)
    ]


def _row(p: Parameter) -> list[int]:
    """Return p's row of the table, in the order of kernels.py's fields."""
    numel = p.weight.numel()
    height, width = p.weight.shape if p.data_t is not None else (-(-numel // COLUMNS), COLUMNS)
    tensors = [getattr(p, name) for name in reference.TENSORS]
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    lengths = (numel, width, height) if p.data_t is not None else (numel,)
    aligned = not any(n % 16 for n in (*addresses[:7], *lengths))
    (decay,) = struct.unpack("q", struct.pack("d", p.weight_decay))
    row = [*addresses, decay, height, width, numel, int(aligned), int(p.grad.dtype is torch.bfloat16)]
    assert len(row) == kernels.FIELDS.value
    return row


def step(
    table: Table,
    *,
    rate: Tensor,
    step: Tensor,
    betas: tuple[float, float],
    eps: float,
    multiplier: Tensor | None = None,
    seed: Tensor | None = None,
) -> None:
    """Apply AdamW's step-th update to every parameter, in place, and write its copies, in one launch per form.

    Raises ValueError as the reference's.
    """
    reference.check_step(table, rate, step, betas, eps, multiplier, seed)
    if table.tiles is None:
        return
    beta1, beta2 = betas
    from_grad = 1 - beta1 >= 0.5
    half = any(p.bf16 is not None for p in table.parameters)
    powers = {
        "LOG_BETA1": math.log2(beta1) if beta1 else SMALLEST,
        "LOG_BETA2": math.log2(beta2) if beta2 else SMALLEST,
    }
    shared = torch.empty(2, dtype=torch.float32, device=rate.device)
    launch(kernels.numbers_kernel, 1, betas, rate.get_device(), (rate, step, shared), {**powers, "num_warps": 1})
    constants = {
        "FROM_GRAD": from_grad,
        "HALF": half,
        "TARGET": None if table.target is None else FP8[table.target],
        "PIECE": PIECE,
        **TILE,
        # Keep multiplications and additions apart that the reference rounds separately.
        "enable_fp_fusion": False,
    }
    # Round here, because Triton's interpreter keeps Python's float64.
    lerp_weight, *numbers = (ctypes.c_float(x).value for x in (1 - beta1, 1 - beta2, beta2, eps))
    numbers = [lerp_weight - 1 if from_grad else lerp_weight, *numbers]
    for form, start, programs in table.forms:
        own_seed = None if form == (torch.float32, torch.float32) else seed
        key = (from_grad, half, table.target, multiplier is None, form)
        args = (table.rows, table.tiles, start, rate, step, shared, multiplier, own_seed, *numbers)
        dtypes = {name: {**FLOATS, **FP8}[dtype] for name, dtype in zip(("w_dtype", "m_dtype"), form, strict=True)}
        registers = kernels.REGISTERS if form[1] is torch.float8_e4m3fn else {}
        launch(kernels.step_kernel, programs, key, rate.get_device(), args, dtypes | constants | registers)
    # The kernel bypasses autograd: a backward pass that saved an old weight, or a copy of it, must find out.
    read = ((p.weight, p.bf16, p.data, p.data_t, p.scale_inv) for p in table.parameters)
    written = [t for those in read for t in those if t is not None]
    torch.autograd.graph.increment_version(written)


def norm(table: Table, max_norm: float) -> tuple[Tensor, Tensor]:
    """Return norm = sqrt(sum of all g^2) and min(1, max_norm / (norm + 1e-6)), () float32, the same bits in every run.

    Raises ValueError unless max_norm is positive.
    """
    reference.check_norm(max_norm)
    if table.tiles is None:
        return reference.norm(table, max_norm)
    programs, device = len(table.tiles), table.tiles.get_device()
    partial = torch.empty(programs, dtype=torch.float32, device=table.tiles.device)
    found, multiplier = torch.empty_like(partial[0]), torch.empty_like(partial[0])
    launch(kernels.squares_kernel, programs, (), device, (table.rows, table.tiles, partial), TILE)
    args = (partial, found, multiplier, programs, float(max_norm))
    launch(kernels.norm_kernel, 1, (programs,), device, args, {"SUMS": SUMS, "num_warps": WARPS})
    return found, multiplier


BACKEND = Backend(
    table=table, step=step, norm=norm, unsupported=unsupported, move=move, kernels={"cuda": r"^step_kernel$"}
)
