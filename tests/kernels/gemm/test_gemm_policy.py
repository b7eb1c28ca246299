"""Which GEMM runs: the fastest measured of the shape, cuBLASLt where nothing was measured or little is to be won."""

import functools
from typing import Any

import pytest
import torch
from gemm_checks import FAST, check, integers, layout, product, quantised
from kernel_checks import know

from te_bench.kernels import architecture, gemm, measured
from te_bench.kernels.gemm import PAIRS, policy, table
from te_bench.kernels.gemm.backends import gluon, scaled_mm, triton
from te_bench.kernels.gemm.table import GemmShape
from te_bench.kernels.measured import Timing
from te_bench.kernels.quantize import Operand

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
GPU, PROCESSORS = "NVIDIA H200", 132
SHIPPED = [row for row in measured.read(measured.SHIPPED) if row.operator == "gemm" and row.problem.dtype == "e4m3"]


pytestmark = pytest.mark.usefixtures("own")


def a_row(m: int, n: int, k: int, machine: str = GPU, scales: str = "tensor", **seconds: float) -> Timing:
    shape = GemmShape(m=m, n=n, k=k, dtype="e4m3", scales=scales, fast_accum=scales != "block")
    return Timing(operator="gemm", machine=machine, problem=shape, seconds=seconds, source="a test")


def chosen(m: int, n: int, k: int, granularity: str = "tensor", fast: bool = True, gpu: str = GPU) -> str:
    return policy.choose(m, n, k, granularity=granularity, fast=fast, gpu=gpu, processors=PROCESSORS)


@pytest.mark.parametrize("row", SHIPPED, ids=lambda row: str(row.problem))
def test_a_measured_shape_gets_what_was_fastest_there(row: Timing) -> None:
    p = row.problem
    name = chosen(p.m, p.n, p.k, p.scales, p.fast_accum)
    usual, best = row.seconds["scaled_mm"], min(row.seconds.values())
    assert row.seconds[name] == (best if usual >= 1.05 * best else usual)
    assert set(row.seconds) <= set(gemm.names())


def test_operands_that_are_no_matrices_are_refused() -> None:
    a = Operand(torch.zeros(2, 16, 16, dtype=torch.float8_e4m3fn), torch.ones(()), layout("e4m3", "tensor"))
    with pytest.raises(ValueError, match="contiguous"):
        policy.forward(a, a._replace(data=a.data[0]), out_dtype=torch.bfloat16)


def test_what_was_not_measured_is_cublaslts() -> None:
    assert chosen(12288, 3072, 768, gpu="NVIDIA H100 80GB HBM3") == "scaled_mm"
    assert chosen(12288, 3072, 776) == chosen(12288, 3080, 768) == chosen(0, 3072, 768) == "scaled_mm"
    assert chosen(12288, 3072, 768, "block") == "scaled_mm"


def test_the_nearest_height_counts_and_how_many_tiles_are_many_is_the_gpus() -> None:
    there = "NVIDIA H300"
    know(
        a_row(8192, 4096, 64, there, scaled_mm=2.0, triton=1.0), a_row(65536, 4096, 64, there, scaled_mm=2.0, gluon=1.0)
    )
    assert [chosen(m, 4096, 64, gpu=there) for m in (10000, 50000)] == ["triton", "gluon"]
    options = {"granularity": "tensor", "fast": True, "gpu": there}
    # 8 waves are 2048 tiles of 256 processors: 8192 x 4096. 12000 x 4096 are 3008.
    for processors, name in ((256, "triton"), (257, "gluon"), (400, "scaled_mm")):
        assert policy.choose(12000, 4096, 64, processors=processors, **options) == name


def test_a_backend_that_is_not_the_policys_or_has_no_rival_is_not_chosen() -> None:
    there = "NVIDIA H300"
    know(a_row(8192, 4096, 64, there, scaled_mm=2.0, reference=1.0, gone=0.5), a_row(8192, 64, 64, there, gluon=1.0))
    assert chosen(8192, 4096, 64, gpu=there) == chosen(8192, 64, 64, gpu=there) == "scaled_mm"


def test_a_shape_that_is_none() -> None:
    for wrong in ({"m": 0}, {"dtype": "e5m2"}, {"scales": None}, {"scales": "tile"}, {"epilogue": "gradient"}):
        with pytest.raises(ValueError, match=r"at least 1|no GEMM in|FP8 has scales|in half precision"):
            table.read_problem({"m": 8, "n": 8, "k": 8, "dtype": "e4m3", "scales": "row", **wrong})
    with pytest.raises(ValueError, match="FP8 has scales"):
        table.read_problem({"m": 8, "n": 8, "k": 8, "dtype": "bf16", "fast_accum": True})
    with pytest.raises(ValueError, match="fast_accum with scales per block"):
        table.read_problem({"m": 8, "n": 8, "k": 8, "dtype": "e4m3", "scales": "block", "fast_accum": True})


# What is launched, with a GPU's name in place of the GPU


@pytest.fixture
def an_h200(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of backends in the order of their launches, each the reference's product."""
    called: list[str] = []
    reference = gemm.load("reference").forward
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(gluon, "INTERPRETED", False)
    monkeypatch.setattr(architecture, "processors", lambda _: PROCESSORS)
    know(a_row(64, 48, 32, scaled_mm=1.06, gluon=1.0))
    original = policy._launcher.__wrapped__
    monkeypatch.setattr(policy, "_launcher", lambda *key: original(*key[:-1], 0))

    def launch(name: str, *args: Any, **options: Any) -> torch.Tensor:
        called.append(name)
        made: torch.Tensor = reference(*args, **options)
        return made

    for name in policy.LAUNCHES:
        monkeypatch.setitem(policy.LAUNCHES, name, functools.partial(launch, name))
    monkeypatch.setattr(scaled_mm, "forward", functools.partial(launch, "scaled_mm"))
    return called


def test_the_choice_is_what_runs_with_everything_handed_on(an_h200: list[str]) -> None:
    operands, bias = integers((64, 48, 32), PAIRS[0]), torch.arange(48.0)
    for out_dtype, fast, ran in ((BF16, True, "gluon"), (BF16, False, "scaled_mm"), (torch.float32, True, "scaled_mm")):
        out = policy.forward(*operands, out_dtype=out_dtype, fast_accum=fast, bias=bias)
        assert torch.equal(out, product(operands, bias).to(out_dtype))
        assert an_h200.pop() == ran
        assert not an_h200
    policy.forward(*integers((64, 48, 48), PAIRS[0]), out_dtype=BF16, fast_accum=True)
    policy.forward(*integers((64, 48, 32), ("row", "row")), out_dtype=BF16, fast_accum=True)
    mixed = quantised(torch.randn(64, 32), torch.randn(48, 32), ("e5m2", "e4m3"), PAIRS[0])
    policy.forward(*mixed, out_dtype=BF16, fast_accum=True)
    assert an_h200 == ["scaled_mm"] * 3


def test_a_backend_that_cannot_is_not_chosen(an_h200: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon, "INTERPRETED", True)
    policy.forward(*integers((64, 48, 32), PAIRS[0]), out_dtype=BF16, fast_accum=True)
    assert an_h200 == ["scaled_mm"]


def test_what_tma_cannot_read_is_padded_by_cublaslts(an_h200: list[str]) -> None:
    """A chunk of a head's rows is the K of dW, and may end anywhere: of 40 the rows of a matrix start at 8 bytes."""
    know(a_row(64, 48, 40, scaled_mm=2.0, gluon=1.0), a_row(64, 52, 32, scaled_mm=2.0, gluon=1.0))
    for shape in ((64, 48, 40), (64, 52, 32)):
        policy.forward(*integers(shape, PAIRS[0]), out_dtype=BF16, fast_accum=True)
    assert an_h200 == ["scaled_mm"] * 2


def test_compiled_it_is_one_operator(an_h200: list[str]) -> None:
    operands = integers((64, 48, 32), PAIRS[0])

    def call(*given: Operand) -> torch.Tensor:
        return policy.forward(*given, out_dtype=BF16, fast_accum=True) * 2

    out = torch.compile(call, fullgraph=True, backend="aot_eager")(*operands)
    assert torch.equal(out, product(operands).to(BF16) * 2)
    assert an_h200 == ["gluon"]


def test_block_scales_go_by_what_was_measured_of_activations_by_weights(an_h200: list[str]) -> None:
    know(a_row(64, 48, 32, scales="block", scaled_mm=2.0, triton=1.0))
    assert chosen(64, 48, 32, "block") == chosen(64, 48, 32, "block", fast=False) == "triton"
    for pair in (("block", "tile"), ("block", "block"), ("tile", "block"), ("row", "row")):
        operands = integers((64, 48, 32), pair)
        out = policy.forward(*operands, out_dtype=BF16, fast_accum=True)
        assert torch.equal(out, product(operands).to(BF16))
    policy.forward(*integers((64, 48, 32), ("block", "tile")), out_dtype=torch.float32)
    assert an_h200 == ["triton", *["scaled_mm"] * 4]


def test_block_scales_go_by_triton_where_cublaslt_has_none(an_h200: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = functools.partial(policy.forward, out_dtype=torch.float32, fast_accum=False)
    pairs = [pair for pair in PAIRS if pair[0] in ("block", "tile")]
    for pair in pairs:
        multiply(*integers((64, 48, 256), pair))
    assert an_h200 == ["scaled_mm"] * len(pairs)
    an_h200.clear()
    monkeypatch.setattr(triton, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    for pair in pairs:
        operands = integers((64, 48, 256), pair)
        assert torch.equal(multiply(*operands).double(), product(operands))
    multiply(*integers((0, 48, 256), pairs[0]))
    multiply(*integers((64, 48, 256), ("row", "row")))
    assert an_h200 == ["triton"] * len(pairs) + ["scaled_mm"] * 2
    with pytest.raises(ValueError, match=r"9\.x only, not 10\.0; by Triton: N 50 must be a multiple of 8"):
        multiply(*integers((64, 50, 256), pairs[0]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    with pytest.raises(ValueError, match=r"9\.x only, not 8\.9; by Triton: TMA needs compute capability 9\.0"):
        multiply(*integers((64, 48, 256), pairs[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(12288, 2304, 768), (12288, 3072, 768), (1536, 50304, 768)], ids=str)
def test_on_a_gpu(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(rows, k, generator=generator, device="cuda") for rows in (m, n))
    operands = quantised(a, b, ("e4m3", "e4m3"), PAIRS[0])
    check(policy.forward(*operands, out_dtype=BF16, fast_accum=True), operands, out_dtype=BF16, floor=FAST)
