"""Every FP8 GEMM: against float64 of the dequantised operands, then against theory for what quantising cost."""

import dataclasses
import itertools
import re
from typing import Any

import pytest
import torch
from gemm_checks import (
    FAST,
    FORMATS,
    Operands,
    a_problem,
    check,
    decibels,
    draw,
    floor,
    integers,
    layout,
    product,
    quantised,
    theory,
)
from torch import Tensor

from te_bench.kernels import gemm
from te_bench.kernels.gemm import PAIRS, Backend, policy
from te_bench.kernels.gemm.backends import gluon, triton
from te_bench.kernels.gemm.operands import DTYPES, granularities
from te_bench.kernels.quantize import Layout, Operand

SHAPES = [(1, 3, 5), (17, 64, 96), (130, 264, 304), (300, 272, 144)]
# scaled_mm is tested on a CPU too, in test_gemm_scaled_mm.py; Gluon has no interpreter.
RIVALS = [(name, "cpu") for name in gemm.names() if name not in ("gluon", "scaled_mm")]
RIVALS += [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in gemm.names()]
each_rival = pytest.mark.parametrize(("name", "device"), RIVALS)
each_pair = pytest.mark.parametrize("pair", PAIRS, ids="-".join)

Shape = tuple[int, int, int]
Pair = tuple[str, str]


def supported(name: str, shape: Shape, formats: Pair, pair: Pair, device: str) -> Backend:
    """The backend; skips the test, with the backend's own reason, where it has one."""
    backend = gemm.load(name)
    reason = backend.unsupported(a_problem(shape, formats, pair, device))
    if reason:
        pytest.skip(reason)
    return backend


@each_rival
@each_pair
@pytest.mark.parametrize(
    ("shape", "formats"),
    [*((s, FORMATS[0]) for s in SHAPES[:3]), *((SHAPES[1], f) for f in FORMATS[1:])],
    ids=lambda x: "x".join(map(str, x)),
)
def test_error_is_at_most_twice_the_library_s(name: str, device: str, shape: Shape, formats: Pair, pair: Pair) -> None:
    backend = supported(name, shape, formats, pair, device)
    operands = quantised(*draw(shape, device), formats, pair)
    bias = (
        torch.randn(shape[1], generator=torch.Generator().manual_seed(0)).to(device) * product(operands).std().float()
    )
    cases = [
        (torch.float32, None, False),
        (torch.float32, bias, True),
        (torch.float16, bias, False),
        (torch.bfloat16, bias.bfloat16(), True),
        (torch.bfloat16, bias, False),
    ]
    for out_dtype, added, fast_accum in cases:
        out = backend.forward(*operands, out_dtype=out_dtype, fast_accum=fast_accum, bias=added)
        check(out, operands, out_dtype=out_dtype, floor=floor(name, device, fast_accum), bias=added)
        assert out.is_contiguous()


@each_rival
@each_pair
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact_where_sums_are(name: str, device: str, shape: Shape, pair: Pair) -> None:
    """Integers, padded or not: bit for bit. Padding adds zeros, and a stray scale or row would show."""
    backend = supported(name, shape, FORMATS[0], pair, device)
    operands = integers(shape, pair, device)
    bias = torch.arange(-2.0, shape[1] - 2, device=device)
    for fast_accum in (False, True):
        out = backend.forward(*operands, out_dtype=torch.float32, fast_accum=fast_accum, bias=bias)
        assert torch.equal(out.double(), product(operands, bias))


@each_pair
@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_quantising_costs_what_theory_says(formats: Pair, pair: Pair) -> None:
    """Signal to quantisation noise of normal operands, dB, within 0.3 of the integral (DESIGN.md allows 1).

    E4M3 x E4M3 28.5, E4M3 x E5M2 24.6; E5M2 x E5M2 (22.6) or a saturating scale are far outside. By the reference:
    what the others make of the same operands is held to float64, above.
    """
    m, n, k = 256, 256, 1024
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    out = gemm.load("reference").forward(*quantised(a, b, formats, pair), out_dtype=torch.float32)
    under_one_scale = {"tensor": m * k, "row": k, "block": 128, "tile": 128 * 128}
    expected = theory(formats, (under_one_scale[pair[0]], under_one_scale[pair[1]]))
    assert decibels(out, a.double() @ b.double().t()) == pytest.approx(expected, abs=0.3)


def test_theory_of_one_scale_a_tensor_is_the_design_s() -> None:
    assert theory(("e4m3", "e4m3"), (2**18, 2**18)) == pytest.approx(28.5, abs=0.1)
    assert theory(("e4m3", "e5m2"), (2**18, 2**18)) == pytest.approx(24.6, abs=0.1)


def mutants(operands: Operands, bias: Tensor, pair: Pair) -> dict[str, Tensor]:
    """Products of broken GEMMs, by what broke them. b is square, so that its transpose fits."""
    a, b = operands
    forward = gemm.load("reference").forward

    def multiply(a: Operand = a, b: Operand = b, added: Tensor = bias) -> Tensor:
        return forward(a, b, out_dtype=torch.bfloat16, bias=added)

    def scaled(x: Operand, scale_inv: Tensor) -> Operand:
        return x._replace(scale_inv=scale_inv)

    def in_e5m2(x: Operand) -> Operand:
        return x._replace(data=x.data.view(DTYPES["e5m2"]), layout=x.layout._replace(format=DTYPES["e5m2"]))

    good = multiply()
    without_row = good.clone()
    without_row[1] = 0
    dropped = a.data.float()
    dropped[:, 128:256] = 0
    m, (n, k) = a.data.shape[0], b.data.shape
    other = quantised(*draw((m, n, k), seed=1), ("e4m3", "e4m3"), pair)
    broken = {
        "zeroed": torch.zeros_like(good),
        "one row zeroed": without_row,
        "sign flipped": -good,
        "not a number": good * float("nan"),
        "float32 output": good.float(),
        "doubled scale of a": multiply(scaled(a, a.scale_inv * 2)),
        "doubled scale of b": multiply(b=scaled(b, b.scale_inv * 2)),
        "scale instead of its inverse": multiply(scaled(a, 1 / a.scale_inv)),
        "wrong format of a": multiply(in_e5m2(a)),
        "wrong format of b": multiply(b=in_e5m2(b)),
        "dropped K tile": multiply(a._replace(data=dropped.to(a.data.dtype))),
        "stale scale of a": multiply(scaled(a, other.a.scale_inv)),
        "stale scale of b": multiply(b=scaled(b, other.b.scale_inv)),
        "transposed weight": multiply(b=b._replace(data=b.data.t().contiguous())),
        "no bias": multiply(added=bias * 0),
        "bias twice": multiply(added=bias * 2),
    }
    if pair != ("tensor", "tensor"):
        broken["scales of the next row of a"] = multiply(scaled(a, a.scale_inv.roll(1, 0)))
        broken["scales of the next row of b"] = multiply(b=scaled(b, b.scale_inv.roll(1, 0)))
    if a.scale_inv.dim() == 2:
        broken["scales of the next K block"] = multiply(scaled(a, a.scale_inv.roll(1, 1)))
    return broken


@each_pair
def test_broken_gemms_fail_the_check(pair: Pair) -> None:
    """With the loosest floor of all, in bfloat16: fast accumulation's."""
    shape = (192, 384, 384)
    operands = quantised(*draw(shape), FORMATS[0], pair)
    bias = torch.randn(384, generator=torch.Generator().manual_seed(0)) * product(operands).std().float()
    good = gemm.load("reference").forward(*operands, out_dtype=torch.bfloat16, bias=bias)
    check(good, operands, out_dtype=torch.bfloat16, floor=FAST, bias=bias)
    passed = []
    for name, out in mutants(operands, bias, pair).items():
        try:
            check(out, operands, out_dtype=torch.bfloat16, floor=FAST, bias=bias)
        except AssertionError:
            continue
        passed.append(name)
    assert not passed


def test_saturation_and_another_format_leave_the_band_of_theory() -> None:
    """What the check cannot see, for the dequantised operands are wrong as well: theory does."""
    a, b = (torch.randn(256, 1024, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    truth, expected = a.double() @ b.double().t(), theory(("e4m3", "e4m3"), (2**18, 2**18))
    multiply = gemm.load("reference").forward
    good = quantised(a, b, ("e4m3", "e4m3"), ("tensor", "tensor"))
    assert decibels(multiply(*good, out_dtype=torch.float32), truth) == pytest.approx(expected, abs=0.3)
    other = quantised(a, b, ("e4m3", "e5m2"), ("tensor", "tensor"))
    assert decibels(multiply(*other, out_dtype=torch.float32), truth) < expected - 1
    clipped = [
        Operand((data.float() * 2).clamp(-448, 448).to(data.dtype), inverse / 2, of) for data, inverse, of in good
    ]
    assert decibels(multiply(*clipped, out_dtype=torch.float32), truth) < expected - 1


@each_rival
@each_pair
def test_empty_operands_give_empty_products(name: str, device: str, pair: Pair) -> None:
    backend = supported(name, (0, 32, 32), FORMATS[0], pair, device)
    operands = integers((0, 32, 32), pair, device)
    assert backend.forward(*operands, out_dtype=torch.bfloat16, bias=torch.ones(32, device=device)).shape == (0, 32)
    operands = integers((32, 0, 32), pair, device)
    assert backend.forward(*operands, out_dtype=torch.bfloat16).shape == (32, 0)


@each_rival
def test_a_sum_over_nothing_is_the_bias(name: str, device: str) -> None:
    backend = supported(name, (16, 32, 0), FORMATS[0], ("tensor", "tensor"), device)
    operands = integers((16, 32, 0), ("tensor", "tensor"), device)
    out = backend.forward(*operands, out_dtype=torch.float32, bias=torch.ones(32, device=device))
    assert torch.equal(out, torch.ones(16, 32, device=device))


@each_rival
@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[3]], ids="-".join)
def test_compiles_without_graph_breaks(name: str, device: str, pair: Pair) -> None:
    shape = (48, 32, 272)
    backend = supported(name, shape, FORMATS[0], pair, device)
    operands = integers(shape, pair, device)
    bias = torch.ones(32, device=device)

    torch.compiler.reset()  # its limit of recompilations is the whole process's

    @torch.compile(fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    def call(*operands: Operand) -> Tensor:
        return backend.forward(*operands, out_dtype=torch.float32, bias=bias) * 2

    assert torch.equal(call(*operands), backend.forward(*operands, out_dtype=torch.float32, bias=bias) * 2)


@each_rival
def test_autocast_changes_nothing(name: str, device: str) -> None:
    shape = (64, 64, 256)
    backend = supported(name, shape, FORMATS[0], ("tensor", "tensor"), device)
    operands = quantised(*draw(shape, device), FORMATS[0], ("tensor", "tensor"))
    without = backend.forward(*operands, out_dtype=torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        within = backend.forward(*operands, out_dtype=torch.float32)
    assert torch.equal(without, within)


E4M3, ONE = DTYPES["e4m3"], torch.ones(())
PER_TENSOR = layout("e4m3", "tensor")
#: What no GEMM here multiplies.
STRANGE = {
    "scales of a byte": Layout(E4M3, (1, 32), torch.float8_e8m0fnu),
    "blocks of 1 x 32": Layout(E4M3, (1, 32), torch.float32),
    "float64 scales": Layout(E4M3, (None, None), torch.float64),
    "an order of the hardware's": Layout(E4M3, (1, 128), torch.float32, "interleaved by 128 x 4"),
    "not scaled": Layout(torch.bfloat16, (None, None), None),
}


@pytest.mark.parametrize("name", gemm.names())
@pytest.mark.parametrize("strange", STRANGE)
def test_a_layout_that_is_not_multiplied_is_refused_by_name(strange: str, name: str) -> None:
    known, unknown = (Operand(torch.ones(16, 32).to(E4M3), ONE, of) for of in (PER_TENSOR, STRANGE[strange]))
    message = re.escape(
        f"{unknown.layout} is none that FP8 GEMMs multiply: E4M3 or E5M2 with float32 scales per tensor"
    )
    for backend, operands in itertools.product((gemm.load(name), policy), ((unknown, known), (known, unknown))):
        with pytest.raises(ValueError, match=message):
            backend.forward(*operands, out_dtype=torch.bfloat16)
    problem = dataclasses.replace(a_problem((16, 32, 32), FORMATS[0], PAIRS[0], "cuda"), b=unknown.layout)
    assert re.match(message, str(gemm.load(name).unsupported(problem)))


H200 = dataclasses.replace(a_problem((128, 256, 512), FORMATS[0], PAIRS[0], "cuda"), capability=(9, 0))
BLOCKS = {"a": layout("e4m3", "block"), "b": layout("e4m3", "tile")}
E5M2 = layout("e5m2", "tensor")


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        *((name, {"device": "cpu"}, "NVIDIA GPU") for name in ("gluon", "scaled_mm", "triton")),
        *((name, {"a": layout("e4m3", "row")}, "row x tensor") for name in gemm.names()),
        *((name, {"k": 24}, "K 24") for name in ("gluon", "triton")),
        *((name, {"n": 12}, "N 12") for name in ("gluon", "triton")),
        ("scaled_mm", {"capability": (8, 0)}, "8.0 < 8.9"),
        ("scaled_mm", {"a": E5M2, "b": E5M2}, "E5M2 x E5M2"),
        ("scaled_mm", BLOCKS | {"a": layout("e5m2", "block")}, "E5M2 with block scales"),
        ("scaled_mm", BLOCKS | {"capability": (10, 0)}, "9.x only, not 10.0"),
        ("triton", {"capability": (8, 9)}, "TMA needs compute capability 9.0, this GPU has 8.9"),
        ("triton", {"capability": (8, 0)}, "FP8 needs compute capability 8.9, this GPU has 8.0"),
        ("gluon", {"capability": (8, 9)}, "8.9 is not 9.0"),
        ("gluon", {"capability": (10, 0)}, "10.0 is not 9.0"),
        ("gluon", BLOCKS, "block x tile"),
    ],
)
def test_what_a_backend_cannot_do_it_says(name, changes, reason, monkeypatch):
    for module in (gluon, triton):
        monkeypatch.setattr(module, "INTERPRETED", False)
    unsupported = gemm.load(name).unsupported
    assert unsupported(H200) is None
    assert unsupported(dataclasses.replace(H200, a=layout("e4m3", "row"), b=layout("e4m3", "row"), m=1)) is None
    assert (unsupported(dataclasses.replace(H200, a=E5M2, b=E5M2)) is None) == (name != "scaled_mm")
    assert reason in str(unsupported(dataclasses.replace(H200, **changes)))


def test_a_layout_says_what_shares_a_scale_and_not_the_shape() -> None:
    """Of one row, and of one block, the scales of two layouts have the same shape."""
    names = ("tensor", "row", "block", "tile")
    assert [layout("e4m3", name).scale_shape(300, 272) for name in names] == [(), (300,), (300, 3), (3, 3)]
    for pair in PAIRS:
        assert granularities(*(layout("e4m3", name) for name in pair)) == pair
    alike = integers((1, 1, 272), ("block", "tile"))
    assert alike.a.scale_inv.shape == alike.b.scale_inv.shape
    assert torch.equal(gemm.load("reference").forward(*alike, out_dtype=torch.float32).double(), product(alike))


def ones(shape: tuple[int, ...], scale_inv: Tensor = ONE, granularity: str = "tensor") -> Operand:
    return Operand(torch.ones(shape).to(E4M3), scale_inv, layout("e4m3", granularity))


@pytest.mark.parametrize("name", ["gluon", "reference", "triton"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": Operand(torch.ones(16, 32), ONE, PER_TENSOR)}, "a is torch.float32.*quantise it"),
        ({"a": ones((2, 16, 32))}, r"a is .* of shape \(2, 16, 32\)"),
        ({"b": Operand(torch.ones(32, 33).to(E4M3)[:, :32], ONE, PER_TENSOR)}, "b is .*contiguous"),
        ({"b": ones((32, 32))._replace(layout=layout("e5m2", "tensor"))}, "b is .*e4m3fn.*e5m2, as its layout says"),
        ({"b": ones((32, 48))}, r"K is 32 in a .* but 48 in b"),
        ({"bias": torch.ones(31)}, r"bias has shape \(31,\): it must be \(32,\)"),
        ({"a": ones((16, 32), torch.ones(16), "row")}, "row x tensor cannot be multiplied.*row x row"),
        ({"a": ones((16, 32), torch.ones(7))}, r"scale_inv of a .* \(7,\): scales per tensor of a \(16, 32\)"),
        ({"b": ones((32, 32), ONE.double())}, "scale_inv of b is torch.float64"),
    ],
)
def test_operands_that_do_not_fit_are_named(name: str, changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"a": ones((16, 32)), "b": ones((32, 32)), "bias": None, **changes}
    with pytest.raises(ValueError, match=message):
        gemm.load(name).forward(**given, out_dtype=torch.bfloat16)


def test_the_reference_can_do_everything() -> None:
    odd = a_problem((17, 3, 5), ("e5m2", "e5m2"), ("block", "tile"), "cpu")
    assert gemm.load("reference").unsupported(odd) is None
