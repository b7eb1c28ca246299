"""Tiles of a wide norm's FP8 cast at 8192 x 4096 in bf16, alone and with a residual's addition: us, the L2 cold.

    python benchmarks/norm_tiles.py [--json FILE]

On an NVIDIA GPU; half a minute. The kernel before it, of the sum and its statistics, is in the times. What ships is
`WIDE_CAST` of te_bench/kernels/norm/residual_forward.py. Under TRITON_INTERPRET=1 a CPU runs one tile, which it does not
time.
"""

import argparse
import itertools
from functools import partial
from pathlib import Path

import torch
from _race import alone, keep

from te_bench.kernels import launch
from te_bench.kernels.norm import residual as _residual
from te_bench.kernels.norm import residual_forward

TILES = list(itertools.product((32, 64, 128), (64, 128), (4, 8), (4, 8)))  # ROWS, COLUMNS, VECTOR, num_warps


def measured(rows: int, columns: int, vector: int, warps: int, device: str) -> list[float | str]:
    """us without and with the addition; an exception's name in place of what has none."""
    m, n = (8192 if device == "cuda" else 64), 4096
    x, residual = (torch.randn(m, n, device=device).bfloat16() for _ in range(2))
    weight, bias = torch.ones(n, device=device).bfloat16(), torch.zeros(n, device=device).bfloat16()
    scale, amax = torch.ones((), device=device), torch.zeros((), device=device)
    residual_forward.WIDE_CAST = {"ROWS": rows, "COLUMNS": columns, "VECTOR": vector, "num_warps": warps}
    launch.forget()  # its keys know of one tile only
    found: list[float | str] = []
    for branch in (None, residual):
        call = partial(
            _residual.add_forward_quantized, x, branch, weight, bias, eps=1e-5, via=x.dtype, scale=scale,
            dtype=torch.float8_e4m3fn, rowwise=True, columnwise=True, amax=amax,
        )  # fmt: skip
        found.append(alone(call, device))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    file = parser.parse_args().json
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = {}
    for tile in TILES if device == "cuda" else [(64, 64, 8, 4)]:
        found = table["{} x {}, {} a thread, by {} warps".format(*tile)] = measured(*tile, device)
        print(*tile, *found, flush=True)
        keep(table, file)


if __name__ == "__main__":
    main()
