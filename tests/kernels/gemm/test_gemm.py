"""FP8 GEMMs: against float64 of the dequantised operands, then against theory for what quantising cost."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from te_bench.kernels import gemm
from te_bench.kernels.gemm import Problem
from te_bench.kernels.quantize.reference import quantize

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FORMATS = [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3")]
SHAPES = [(16, 16, 16), (48, 32, 64), (128, 256, 512), (17, 64, 96)]
H200 = Problem(m=128, n=256, k=512, a_dtype="e4m3", b_dtype="e4m3", device="cuda", capability=(9, 0))


def operands(shape: tuple[int, int, int], formats: tuple[str, str], device: str = "cpu") -> list[Tensor]:
    """a, b, a_scale_inv, b_scale_inv, and the unquantised a and b after them."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(m * n + k)
    exact = [torch.randn(rows, k, generator=generator).to(device) for rows in (m, n)]
    (a, a_inv), (b, b_inv) = (quantize(x, DTYPES[name]) for x, name in zip(exact, formats, strict=True))
    return [a, b, a_inv, b_inv, *exact]


def dequantised_product(a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor) -> Tensor:
    return (a.double() * a_inv.double()) @ (b.double() * b_inv.double()).t()


def relative(x: Tensor, truth: Tensor) -> float:
    return ((x.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("formats", [*FORMATS, ("e5m2", "e5m2")], ids="-".join)
@pytest.mark.parametrize("shape", [*SHAPES, (1, 3, 5)], ids=str)
def test_reference_is_float64_of_the_dequantised(
    shape: tuple[int, int, int], formats: tuple[str, str], out_dtype: torch.dtype
) -> None:
    *packed, _, _ = operands(shape, formats)
    out = gemm.load("reference").forward(*packed, out_dtype=out_dtype)
    assert out.dtype == out_dtype
    assert out.shape == shape[:2]
    assert relative(out, dequantised_product(*packed)) < {torch.float32: 1e-6, torch.bfloat16: 2**-8}[out_dtype]


def test_reference_is_not_touched_by_autocast() -> None:
    *packed, _, _ = operands((64, 64, 256), ("e4m3", "e4m3"))
    without = gemm.load("reference").forward(*packed, out_dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = gemm.load("reference").forward(*packed, out_dtype=torch.float32)
    assert torch.equal(without, within)


def test_reference_is_exact_where_float32_is() -> None:
    """Small integers: every product and every sum is a float32."""
    a, b = (torch.randint(-8, 9, (rows, 32), generator=torch.Generator().manual_seed(rows)) for rows in (5, 7))
    one = torch.ones(())
    out = gemm.load("reference").forward(
        a.to(DTYPES["e4m3"]), b.to(DTYPES["e4m3"]), one * 2, one * 4, out_dtype=torch.float32
    )
    assert torch.equal(out, (a.double() @ b.double().t() * 8).float())


def decibels(out: Tensor, truth: Tensor) -> float:
    return 20 * math.log10(1 / relative(out, truth))


@pytest.mark.parametrize(
    ("formats", "theory"), [(("e4m3", "e4m3"), 28.5), (("e4m3", "e5m2"), 24.6), (("e5m2", "e4m3"), 24.6)]
)
@pytest.mark.parametrize(
    "name", [n if n == "reference" else pytest.param(n, marks=pytest.mark.gpu) for n in gemm.names()]
)
def test_quantising_costs_what_theory_says(name: str, formats: tuple[str, str], theory: float) -> None:
    """Signal to quantisation noise of Gaussian operands, dB: a mantissa of m bits leaves 2^-2m / 24 or so of the power.

    E5M2 x E5M2 (22.6) or a doubled scale (saturation) are outside the 1 dB.
    """
    device = "cpu" if name == "reference" else "cuda"
    *packed, a, b = operands((256, 256, 1024), formats, device)
    out = gemm.load(name).forward(*packed, out_dtype=torch.float32 if name == "reference" else torch.bfloat16)
    assert decibels(out, a.double() @ b.double().t()) == pytest.approx(theory, abs=1.0)


def test_mutations_leave_the_band_of_theory() -> None:
    multiply = gemm.load("reference").forward
    *packed, a, b = operands((256, 256, 1024), ("e4m3", "e4m3"))
    truth = a.double() @ b.double().t()
    wrong_format = operands((256, 256, 1024), ("e4m3", "e5m2"))[:4]
    assert decibels(multiply(*wrong_format, out_dtype=torch.float32), truth) < 27.5
    saturated = [x if x.dim() == 0 else (x.float() * 2).clamp(-448, 448).to(x.dtype) for x in packed[:2]] + [
        inverse / 2 for inverse in packed[2:]
    ]
    assert decibels(multiply(*saturated, out_dtype=torch.float32), truth) < 27.5


@pytest.mark.gpu
@pytest.mark.parametrize("fast_accum", [False, True])
@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
@pytest.mark.parametrize("shape", [*SHAPES, (12288, 768, 3072)], ids=str)
def test_scaled_mm_is_the_reference(shape: tuple[int, int, int], formats: tuple[str, str], fast_accum: bool) -> None:
    backend = gemm.load("scaled_mm")
    m, n, k = shape
    problem = dataclasses.replace(
        H200, m=m, n=n, k=k, a_dtype=formats[0], b_dtype=formats[1], capability=torch.cuda.get_device_capability()
    )
    reason = backend.unsupported(problem)
    if reason:
        pytest.skip(reason)
    *packed, _, _ = operands(shape, formats, "cuda")
    out = backend.forward(*packed, out_dtype=torch.bfloat16, fast_accum=fast_accum)
    truth = dequantised_product(*packed)
    rounded = relative(truth.bfloat16(), truth)
    # Hopper's tensor core adds with 14 bits: 2^-13 of the largest product, a tenth of a percent of the sum.
    assert relative(out, truth) <= 2 * rounded + (2e-3 if fast_accum else 5e-4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "NVIDIA GPU"),
        ({"capability": (8, 0)}, "8.0 < 8.9"),
        ({"k": 24}, "K 24"),
        ({"n": 8}, "N 8"),
        ({"a_dtype": "e5m2", "b_dtype": "e5m2"}, "E5M2 x E5M2"),
    ],
)
def test_what_scaled_mm_cannot_do_it_says(changes: dict[str, object], reason: str) -> None:
    unsupported = gemm.load("scaled_mm").unsupported
    assert unsupported(H200) is None
    assert unsupported(dataclasses.replace(H200, a_dtype="e5m2")) is None
    assert reason in str(unsupported(dataclasses.replace(H200, **changes)))  # type: ignore[arg-type]


def test_the_reference_can_do_everything() -> None:
    odd = dataclasses.replace(H200, device="cpu", n=3, k=5, capability=None, a_dtype="e5m2", b_dtype="e5m2")
    assert gemm.load("reference").unsupported(odd) is None


def test_unknown_gemm_names_what_is_known() -> None:
    with pytest.raises(ValueError, match="reference, scaled_mm"):
        gemm.load("cublas")
