"""On an H200: our GEMMs beside cuBLASLt's.

All there is to measure, tables and geometric means: pytest -m "gpu and slow" -n 0 tests/kernels/gemm/test_gemm_speed.py
"""

import functools
import statistics
from collections.abc import Callable

import pytest
import torch
from gemm_checks import FORMATS, Operands, check, quantised
from kernel_checks import seconds
from triton.runtime.errors import OutOfResources

from te_bench.kernels.gemm import PAIRS
from te_bench.kernels.gemm.backends import gluon, scaled_mm, triton
from te_bench.kernels.gemm.portable import tiles as _tiles
from te_bench.kernels.quantize import Operand

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.alone]

Shape = tuple[int, int, int]
Call = Callable[[], object]

# Of h200-peers.md: large squares, and GPT-2 124M's at 12 x 1024 tokens.
TABLE: list[Shape] = [
    (8192, 8192, 8192),
    (8192, 12288, 4096),
    (8192, 4096, 4096),
    (8192, 16384, 4096),
    (8192, 4096, 16384),
    (12288, 2304, 768),
    (12288, 768, 768),
    (12288, 3072, 768),
    (12288, 768, 3072),
    (12288, 50304, 768),
]
# What the tile's choice is among.
FAST = {"large": _tiles.LARGE, "small": _tiles.SMALL}


def drawn(shape: Shape, formats: tuple[str, str] = FORMATS[0], pair: tuple[str, str] = PAIRS[0]) -> Operands:
    m, n, k = shape
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(rows, k, generator=generator, device="cuda") for rows in (m, n))
    return quantised(a, b * k**-0.5, formats, pair)


def with_tile(tile: _tiles.Tile, call: Call) -> Call:
    def there() -> object:
        usual, triton.tile = triton.tile, lambda *_, **__: tile
        try:
            return call()
        finally:
            triton.tile = usual

    return there


class Table:
    """Rows of interleaved measurements (ABBA), and the geometric mean of what they say."""

    def __init__(self, title: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.title, self.capsys, self.ratios = title, capsys, dict[str, list[float]]()
        self.say(title)

    def say(self, line: str) -> None:
        with self.capsys.disabled():
            print(f"\n{line}", end="")

    def row(
        self, shape: Shape, library: Call, ours: Call, in_gluon: Call | None, candidates: dict[str, _tiles.Tile]
    ) -> None:
        """TFLOP/s of all, and of Triton's with each of the tiles that the GPU has room for."""
        tried, flop = {"cuBLASLt": library, "Triton": ours}, 2e-12 * shape[0] * shape[1] * shape[2]
        tried |= {} if in_gluon is None else {"Gluon": in_gluon}
        for name, tile in candidates.items():
            try:
                with_tile(tile, ours)()
            except OutOfResources:
                continue
            tried[name] = with_tile(tile, ours)
        samples: dict[str, list[float]] = {name: [] for name in tried}
        for name in (*tried, *reversed(tried)):
            samples[name].append(seconds(tried[name]))
        took = {name: statistics.mean(times) for name, times in samples.items()}
        ratios = {name: took["cuBLASLt"] / took[name] for name in ("Triton", "Gluon") if name in took}
        for name, ratio in (*ratios.items(), ("the faster", max(ratios.values()))):
            self.ratios.setdefault(name, []).append(ratio)
        rates = ", ".join(f"{name} {flop / time:.0f}" for name, time in took.items())
        said = " ".join(f"{ratio:.3f}" for ratio in ratios.values())
        self.say(f"  {' x '.join(map(str, shape)):22s} {said}  TFLOP/s: {rates}")

    def mean(self, bar: float) -> None:
        means = ", ".join(f"{name} {statistics.geometric_mean(ratios):.3f}" for name, ratios in self.ratios.items())
        self.say(f"  {self.title}: geometric mean {means}, bar {bar}\n")


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_plain(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Bars: 1.02 per tensor and per row, 1.15 per block."""
    coarse = pair[0] in ("tensor", "row")
    for fast_accum in (True, False) if coarse else (False,):
        table = Table(f"{' x '.join(pair)}, {'fast' if fast_accum else 'promoted'}", capsys)
        for shape in TABLE:
            operands = drawn(shape, pair=pair)
            options = {"out_dtype": torch.bfloat16, "fast_accum": fast_accum}
            backends = (scaled_mm, triton, gluon) if coarse else (scaled_mm, triton)
            rivals = [functools.partial(rival.BACKEND.forward, *operands, **options) for rival in backends]
            # Each of the K / 32 additions of the 14-bit accumulator cuts up to 2^-13 of the sum: errors add as
            # their root (worst of 8 M elements at K = 8192, both rivals: 9.4e-3).
            floor = 2e-3 * (max(1.0, shape[2] / 768) ** 0.5 if fast_accum else 1.0)
            for rival in rivals:  # a thousand rows tell a wrong kernel
                check(rival()[:1024], _rows(operands, 1024), out_dtype=torch.bfloat16, floor=floor)
            table.row(shape, rivals[0], rivals[1], rivals[2] if coarse else None, FAST if fast_accum else {})
        table.mean(1.02 if coarse else 1.15)


def _rows(operands: Operands, count: int) -> Operands:
    """The operands of the first `count` rows of D, a multiple of 128."""
    a, b = operands
    height, _ = a.layout.block
    scales = a.scale_inv if height is None else a.scale_inv[: count // height]
    return Operands(Operand(a.data[:count], scales, a.layout), b)
