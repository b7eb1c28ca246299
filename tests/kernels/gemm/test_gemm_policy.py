"""Which GEMM runs: the fastest measured of the shape, cuBLASLt where nothing was measured or little is to be won."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from gemm_checks import FAST, check, integers, product, quantised
from te_bench.kernels.gemm.measured import GPU, ROWS, Row

from te_bench.kernels import gemm
from te_bench.kernels.gemm import PAIRS, Product, measured, policy
from te_bench.kernels.gemm.backends import gluon, scaled_mm

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def chosen(m: int, n: int, k: int, granularity: str = "tensor", fast: bool = True, gpu: str = GPU) -> str:
    return policy.choose(m, n, k, granularity=granularity, fast=fast, gpu=gpu)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row[:5])))
def test_a_measured_shape_gets_what_was_fastest_there(row: Row) -> None:
    name = chosen(*row[:5])
    usual = row.tflops["scaled_mm"]
    assert row.tflops[name] >= usual
    others = [name for name, speed in row.tflops.items() if speed >= 1.05 * usual]
    assert (name == "scaled_mm") == (not others)
    assert row.tflops[name] == max(row.tflops.values()) or max(row.tflops.values()) < 1.05 * usual


def test_every_shape_was_measured_once_with_rivals_of_the_registry() -> None:
    assert len({row[:5] for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert set(row.tflops) <= set(gemm.names())
        assert row.granularity in ("tensor", "row")
    assert "cu" in measured.MEASURED


def test_the_table_is_as_its_benchmark_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    script = importlib.import_module("gemm_policy")
    written = Path(measured.__file__).read_text(encoding="utf-8")
    assert script.source(list(ROWS), GPU, measured.MEASURED) == written


def test_gpt2s_products() -> None:
    """The three that Gluon wins, at other batches too where tiles are many; where they are few, at this one alone."""
    for m in (12288, 15000, 65536, 8192):
        assert chosen(m, 2304, 768) == chosen(m, 3072, 768) == "gluon"
    for m in (1536, 3072, 12288):
        assert chosen(m, 50304, 768) == "gluon"  # of a part of the logits
    assert chosen(12288, 768, 3072) == chosen(12288, 768, 3072, fast=False) == "scaled_mm"
    assert chosen(12288, 768, 768, "row") == "gluon"
    assert chosen(15361, 768, 768, "row") == chosen(9000, 768, 768, "row") == "scaled_mm"
    assert chosen(1024, 2304, 768) == "scaled_mm"


def test_operands_that_are_no_matrices_are_refused() -> None:
    a, one = torch.zeros(2, 16, 16, dtype=torch.float8_e4m3fn), torch.ones(())
    with pytest.raises(ValueError, match="contiguous"):
        policy.forward(a, a[0], one, one, out_dtype=torch.bfloat16)


def test_what_was_not_measured_is_cublaslts() -> None:
    assert chosen(12288, 3072, 768, gpu="NVIDIA H100 80GB HBM3") == "scaled_mm"
    assert chosen(12288, 3072, 776) == chosen(12288, 3080, 768) == chosen(0, 3072, 768) == "scaled_mm"
    assert chosen(12288, 3072, 768, "block") == "scaled_mm"


def test_the_nearest_height_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(m, 4096, 64, "tensor", True, {"scaled_mm": 100, name: 200}) for m, name in ((8192, "a"), (65536, "b"))]
    monkeypatch.setattr(policy, "ROWS", rows)
    assert (chosen(10000, 4096, 64), chosen(50000, 4096, 64)) == ("a", "b")


# What is launched, with a GPU's name in place of the GPU


@pytest.fixture
def an_h200(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of backends in the order of their launches, each the reference's product."""
    called: list[str] = []
    reference = gemm.load("reference").forward
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(gluon, "INTERPRETED", False)
    monkeypatch.setattr(policy, "ROWS", [Row(64, 48, 32, "tensor", True, {"scaled_mm": 100, "gluon": 106})])
    original = policy._launch.__wrapped__
    monkeypatch.setattr(policy, "_launch", lambda *key: original(*key[:-1], 0))

    def launch(a: Any, b: Any, a_inv: Any, b_inv: Any, bias: Any, out_dtype: Any, fast: bool, *_: Any) -> Product:
        called.append("gluon")
        return Product(reference(a, b, a_inv, b_inv, out_dtype=out_dtype, fast_accum=fast, bias=bias), None, None)

    def usual(*args: Any, **options: Any) -> torch.Tensor:
        called.append("scaled_mm")
        made: torch.Tensor = reference(*args, **options)
        return made

    monkeypatch.setitem(policy.LAUNCHES, "gluon", launch)
    monkeypatch.setattr(scaled_mm, "forward", usual)
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
    monkeypatch.setattr(gluon, "MISSING", "no Gluon")
    policy.forward(*integers((64, 48, 32), PAIRS[0]), out_dtype=BF16, fast_accum=True)
    assert an_h200 == ["scaled_mm"]


def test_compiled_it_is_one_operator(an_h200: list[str]) -> None:
    operands = integers((64, 48, 32), PAIRS[0])

    def call(*given: torch.Tensor) -> torch.Tensor:
        return policy.forward(*given, out_dtype=BF16, fast_accum=True) * 2

    out = torch.compile(call, fullgraph=True, backend="aot_eager")(*operands)
    assert torch.equal(out, product(operands).to(BF16) * 2)
    assert an_h200 == ["gluon"]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(12288, 2304, 768), (12288, 3072, 768), (1536, 50304, 768)], ids=str)
def test_on_a_gpu(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(rows, k, generator=generator, device="cuda") for rows in (m, n))
    operands = quantised(a, b, ("e4m3", "e4m3"), PAIRS[0])
    check(policy.forward(*operands, out_dtype=BF16, fast_accum=True), operands, out_dtype=BF16, floor=FAST)
