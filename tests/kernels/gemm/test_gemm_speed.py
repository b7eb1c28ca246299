"""On an H200: our GEMMs beside cuBLASLt's, and with an epilogue beside cuBLASLt's followed by the separate kernel.

All there is to measure, tables and geometric means: pytest -m "gpu and slow" -n 0 tests/kernels/gemm/test_gemm_speed.py
"""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gemm_checks import FORMATS, Operands, check, quantised
from kernel_checks import seconds
from torch import Tensor
from triton.runtime.errors import OutOfResources

from te_bench.kernels.activation.backends import triton as activation
from te_bench.kernels.gemm import PAIRS, Epilogue
from te_bench.kernels.gemm.backends import gluon, scaled_mm, triton
from te_bench.kernels.gemm.portable import tiles as _tiles
from te_bench.kernels.quantize import Operand, Quantized
from te_bench.kernels.quantize.backends import triton as quantize

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
UP: list[Shape] = [(12288, 3072, 768), (65536, 3072, 768), (16384, 4096, 1024), (8192, 16384, 4096)]
DOWN: list[Shape] = [(12288, 768, 3072), (12288, 768, 768), (65536, 768, 3072), (8192, 4096, 16384)]
WGRAD: list[Shape] = [
    (3072, 768, 12288),
    (768, 3072, 12288),
    (768, 768, 12288),
    (2304, 768, 12288),
    (4096, 16384, 8192),
]

# What the tile's choice could be among; "chosen" is what it is.
FAST = {"large": _tiles.LARGE, "small": _tiles.SMALL, "quarters": _tiles.FUSED_LARGE, "twice": _tiles.FUSED_TWICE}
PROMOTED = {"half, twice": _tiles.FUSED_BLOCKS}
FUSED = {"large": _tiles.FUSED_LARGE, "small": _tiles.FUSED_SMALL, "twice": _tiles.FUSED_TWICE}


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
            tiles = FAST if fast_accum else {} if coarse else PROMOTED
            table.row(shape, rivals[0], rivals[1], rivals[2] if coarse else None, tiles)
        table.mean(1.02 if coarse else 1.15)


def _rows(operands: Operands, count: int) -> Operands:
    """The operands of the first `count` rows of D, a multiple of 128."""
    a, b = operands
    height, _ = a.layout.block
    scales = a.scale_inv if height is None else a.scale_inv[: count // height]
    return Operands(Operand(a.data[:count], scales, a.layout), b)


def same(ours: Tensor, theirs: Tensor) -> None:
    """But for roundings that sums in another order tip: in FP8 an element in fifty, by a step of up to a quarter."""
    x, y = ours.float(), theirs.float()
    assert (x - y).norm() < 5e-2 * y.norm(), f"{((x - y).norm() / y.norm()).item():.2e}"


def gelu_apart(
    operands: Operands, options: dict[str, Any], scale: Tensor, amax: Tensor, columnwise: bool
) -> tuple[Tensor, Quantized]:
    x = scaled_mm.forward(*operands, **options)
    cast = {"scale": scale, "dtype": torch.float8_e4m3fn, "amax": amax}
    return x, activation.forward_quantized(x, "gelu", **cast, rowwise=True, columnwise=columnwise)


@pytest.mark.parametrize("columnwise", [False, True], ids=["rows", "both layouts"])
def test_gelu_in_fp8(columnwise: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """fprop + bias + GELU, its input kept, into the FP8 that the next GEMM reads; against GEMM, then activation and cast."""
    table = Table(f"bias, GELU, FP8 in {'both layouts' if columnwise else 'rows'}", capsys)
    epilogue = Epilogue(activation="gelu", keep=True, out=False, target="e4m3", columnwise=columnwise)
    for shape in UP:
        operands, bias = drawn(shape), torch.randn(shape[1], device="cuda").bfloat16()
        scale, amax = torch.tensor(60.0, device="cuda"), torch.zeros((), device="cuda")
        options = {"out_dtype": torch.bfloat16, "fast_accum": True, "bias": bias}
        more = {"epilogue": epilogue, "scale": scale, "amax": amax}
        fused = [functools.partial(rival.BACKEND.fused, *operands, **options, **more) for rival in (triton, gluon)]
        apart = functools.partial(gelu_apart, operands, options, scale, amax, columnwise)
        pre, cast = apart()
        for made in (rival() for rival in fused):
            same(made.pre, pre)
            same(made.quantized.data, cast.data)
            if columnwise:
                assert torch.equal(made.quantized.data.view(torch.uint8).t(), made.quantized.data_t.view(torch.uint8))
        table.row(shape, apart, *fused, FUSED)
    table.mean(1.10)


def residual_apart(operands: Operands, options: dict[str, Any], residual: Tensor) -> Tensor:
    return scaled_mm.forward(*operands, **options) + residual


def test_residual(capsys: pytest.CaptureFixture[str]) -> None:
    """fprop + bias + residual; against GEMM, then an addition."""
    table = Table("bias, residual", capsys)
    for shape in DOWN:
        operands, bias = drawn(shape), torch.randn(shape[1], device="cuda").bfloat16()
        residual = torch.randn(shape[:2], device="cuda").bfloat16()
        options = {"out_dtype": torch.bfloat16, "fast_accum": True, "bias": bias}
        more = {"epilogue": Epilogue(residual=True), "residual": residual}
        fused = [functools.partial(rival.BACKEND.fused, *operands, **options, **more) for rival in (triton, gluon)]
        apart = functools.partial(residual_apart, operands, options, residual)
        for rival in fused:
            same(rival().out, apart())
        table.row(shape, apart, *fused, FUSED)
    table.mean(1.10)


def fp8_apart(operands: Operands, options: dict[str, Any], scale: Tensor, amax: Tensor) -> Quantized:
    x = scaled_mm.forward(*operands, **options)
    return quantize.scaled(x, scale, torch.float8_e5m2, rowwise=True, columnwise=True, amax=amax)


def test_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    """dgrad into E5M2 in both layouts and its amax; against GEMM, then the cast."""
    table = Table("E5M2 in both layouts", capsys)
    epilogue = Epilogue(out=False, target="e5m2", columnwise=True)
    for shape in (*UP, *DOWN):
        operands = drawn(shape, FORMATS[2])
        scale, amax = torch.tensor(1000.0, device="cuda"), torch.zeros((), device="cuda")
        options = {"out_dtype": torch.bfloat16, "fast_accum": False}
        more = {"epilogue": epilogue, "scale": scale, "amax": amax}
        fused = [functools.partial(rival.BACKEND.fused, *operands, **options, **more) for rival in (triton, gluon)]
        apart = functools.partial(fp8_apart, operands, options, scale, amax)
        cast = apart()
        for made in (rival().quantized for rival in fused):
            same(made.data, cast.data)
            same(made.data_t, cast.data_t)
        table.row(shape, apart, *fused, {})
    table.mean(1.10)


def sum_apart(operands: Operands, main: Tensor, fast_accum: bool) -> Tensor:
    return main.add_(scaled_mm.forward(*operands, out_dtype=torch.float32, fast_accum=fast_accum))


@pytest.mark.parametrize("fast_accum", [True, False])
def test_weight_gradient(fast_accum: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """dW, float32, += dY^T X, K split where tiles are few; against a GEMM into float32, then an addition."""
    table = Table(f"main gradient, {'fast' if fast_accum else 'promoted'}", capsys)
    for shape in WGRAD:
        operands, main = drawn(shape, FORMATS[2]), torch.zeros(shape[:2], device="cuda")
        options = {"fast_accum": fast_accum}
        apart = functools.partial(sum_apart, operands, main, fast_accum)
        adds = [
            functools.partial(rival.BACKEND.accumulate, *operands, out=main, **options) for rival in (triton, gluon)
        ]
        for add in adds:
            main.zero_()
            add()
            same(main, scaled_mm.forward(*operands, out_dtype=torch.float32, **options))
        table.row(shape, apart, *adds, {})
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        _, shares = _tiles.split(*shape, promote=not fast_accum, processors=processors)
        table.say(f"    K in {shares} shares")
    table.mean(1.10)
