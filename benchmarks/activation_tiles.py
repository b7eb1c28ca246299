"""Tiles of GELU's fused FP8 casts, at the sizes of a large MLP and of GPT-2 124M in bf16: us, the L2 cold.

    python benchmarks/activation_tiles.py [--json FILE]

On an NVIDIA GPU; half a minute, most of which compiles. Forward, backward with the bias gradient, and that with the output
made again; by launches of our own alone. What ships is `QUANTIZED` of te_bench/kernels/activation/kernels.py. Under
TRITON_INTERPRET=1 a CPU runs one tile, which it does not time.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _race import alone, keep

from te_bench.kernels import launch
from te_bench.kernels.activation import kernels, recomputed

SIZES = {"8192 x 16384": (8192, 16384), "12288 x 3072": (12288, 3072)}
#: ROWS, COLUMNS, num_warps, maxnreg; what ships first. With 80 registers 24 warps share a processor, for 20 with 94.
TILES = [
    (64, 64, 4, None), (64, 64, 4, 80), (128, 64, 8, None), (128, 64, 8, 80), (64, 64, 8, None), (128, 128, 8, None),
    (64, 128, 8, None), (64, 128, 8, 80), (32, 128, 4, None), (32, 128, 4, 80), (128, 64, 16, None), (128, 32, 4, 80),
]  # fmt: skip


def calls(m: int, n: int, device: str) -> dict[str, Callable[[], object]]:
    x, dy = (torch.randn(m, n, device=device).bfloat16() for _ in range(2))
    scale, amax, sums = torch.ones((), device=device), torch.zeros((), device=device), torch.zeros(n, device=device)
    looks: dict[str, Any] = {"amax": amax, "counts": None, "column_sum": sums}
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    return {
        "forward": partial(kernels.forward_quantized, x, "gelu", scale, e4m3, True, True, amax, None),
        "backward": partial(kernels.backward_quantized, dy, x, "gelu", scale, e5m2, True, True, **looks),
        "and again": partial(recomputed.kernel, dy, x, "gelu", scale, e5m2, scale, e4m3, **looks),
    }


def measured(
    rows: int, columns: int, warps: int, registers: int | None, m: int, n: int, device: str
) -> dict[str, float | str]:
    """us of each; an exception's name in place of what has none."""
    tile = {"ROWS": rows, "COLUMNS": columns, "VECTOR": 8, "POLICY": "", "num_warps": warps}
    kernels.QUANTIZED = tile | ({"maxnreg": registers} if registers else {})
    launch.forget()  # its keys know of one tile only
    return {name: alone(call, device) for name, call in calls(m, n, device).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    file = parser.parse_args().json
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = {}
    for size, (m, n) in SIZES.items() if device == "cuda" else [("128 x 128", (128, 128))]:
        for tile in TILES if device == "cuda" else TILES[:1]:
            name = "{}: {} x {} by {} warps, {} registers".format(size, *tile[:3], tile[3] or "free")
            table[name] = measured(*tile, m, n, device)
            print(name, *table[name].items(), flush=True)
            keep(table, file)


if __name__ == "__main__":
    main()
