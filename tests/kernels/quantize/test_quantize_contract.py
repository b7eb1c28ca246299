"""Every quantiser, in both layouts and at every granularity, bitwise against tables written out in NumPy."""

import functools
import math
from collections.abc import Callable

import fp8_tables as tables
import kernel_checks
import numpy as np
import pytest
import torch
from fp8_tables import E4M3, E5M2, FORMATS
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICES
from torch import Tensor

from te_bench.kernels import quantize
from te_bench.kernels.quantize import NONFINITE, ROW, SQUARE, STRIP, TENSOR, Backend, Layout, Quantized
from te_bench.kernels.quantize.backends.reference import dequantize

KINDS = ("scaled", "tensor", "row", "block1", "block128")
SHAPES = {(1, 1): torch.float32, (17, 33): torch.bfloat16, (64, 208): torch.float16, (257, 130): torch.bfloat16}
GIVEN = 2.3  # the scale of "scaled"


backend = functools.partial(kernel_checks.supported, quantize)


def run(
    of: Backend, kind: str, x: Tensor, dtype: torch.dtype, layouts: tuple[bool, bool] = (True, True), **more
) -> Quantized:
    asked = {"rowwise": layouts[0], "columnwise": layouts[1], **more}
    if kind == "scaled":
        asked["scale"] = torch.tensor(GIVEN, device=x.device)
    return of.quantize(x, dtype, BLOCKS[kind], **asked)


def sample(shape: tuple[int, int], dtype: torch.dtype, special: bool = False, seed: int = 0) -> Tensor:
    """Gaussians of very different sizes by row and column; special: with 0, subnormals, the largest, infinity, NaN too."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= 10 ** torch.empty(shape[0], 1).uniform_(-3, 2, generator=generator)
    x *= 10 ** torch.empty(1, shape[1]).uniform_(-1, 1, generator=generator)
    x = x.to(dtype)
    if special:
        # Triton's interpreter reads subnormal bf16 as 0 (3.7): test_subnormal_bfloat16 is for GPUs.
        largest, tiny = (
            torch.finfo(dtype).max,
            torch.finfo(dtype).smallest_normal / (1 if dtype == torch.bfloat16 else 4),
        )
        x[:, 0], x[0] = 0, 0
        x[1, :4] = torch.tensor([tiny, -tiny, 0.0, -0.0]).to(dtype)
        x[2] = tiny
        x[3, 5:9] = torch.tensor([largest, -largest, 1.0, 1e-6]).to(dtype)
        x[4, 9], x[5, 10], x[6, 11] = math.inf, -math.inf, math.nan
    return x


BLOCKS = {"scaled": TENSOR, "tensor": TENSOR, "row": ROW, "block1": STRIP, "block128": SQUARE}


def expected(x: Tensor, name: str, kind: str, power_of_two: bool) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Codes, scale_inv and counts of the rowwise layout of x; the columnwise one is that of x's transpose."""
    v = x.float().numpy()
    if kind == "scaled":
        each, inverse = np.float32(GIVEN), np.float32(1) / np.float32(GIVEN)
    else:
        each, inverse = tables.scales(v, name, kind, power_of_two)
    return tables.encode(tables.multiply(v, each), name), inverse, tables.tallies(v, each, name)


def check(q: Quantized, counts: Tensor, x: Tensor, name: str, kind: str, power_of_two: bool = False) -> None:
    """The one check of a quantiser: both layouts bit for bit, all scales, all counts."""
    data, inverse, tallies = expected(x, name, kind, power_of_two)
    data_t, inverse_t, _ = expected(x.t(), name, kind, power_of_two)
    for ours, codes, dtype in ((q.data, data, FORMATS[name][0]), (q.data_t, data_t, FORMATS[name][0])):
        assert ours.dtype == dtype
        assert ours.is_contiguous()
        assert ours.shape == codes.shape
        assert (tables.codes(ours) == codes).all()
    for scale_inv, wanted in ((q.scale_inv, inverse), (q.scale_inv_t, inverse_t)):
        assert scale_inv.dtype == torch.float32
        assert scale_inv.shape == wanted.shape
        assert (scale_inv.cpu().numpy() == wanted).all()
    assert counts.tolist() == tallies
    assert q.layout == Layout(FORMATS[name][0], BLOCKS[kind], torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("of", quantize.names())
def test_bitwise_in_both_layouts(of: str, name: str, kind: str, device: str) -> None:
    found, dtype = backend(of, device), FORMATS[name][0]
    cases = [(shape, source, False) for shape, source in SHAPES.items()]
    cases += [((40, 150), source, True) for source in (torch.float32, torch.bfloat16, torch.float16)]
    for i, (shape, source, special) in enumerate(cases):
        x = sample(shape, source, special, seed=i)
        more = {} if kind == "scaled" else {"power_of_two": i % 2 == 1}
        counts = torch.zeros(3, dtype=torch.int64, device=device)
        q = run(found, kind, x.to(device), dtype, counts=counts, **more)
        check(q, counts, x, name, kind, bool(more.get("power_of_two")))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of", quantize.names())
def test_one_layout_is_what_both_contain(of: str, kind: str, device: str) -> None:
    found, x = backend(of, device), sample((36, 140), torch.bfloat16).to(device)
    both = run(found, kind, x, E4M3)
    tallied = []
    for layouts in ((True, False), (False, True)):
        counts = torch.zeros(3, dtype=torch.int64, device=device)
        one = run(found, kind, x, E4M3, layouts, counts=counts)
        tallied.append(counts[NONFINITE].item())
        for i, there in enumerate((layouts[0], layouts[0], layouts[1], layouts[1])):
            if there:
                assert torch.equal(one[i].float(), both[i].float())
            else:
                assert one[i] is None
    assert tallied == [0, 0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of", quantize.names())
def test_any_strides(of: str, kind: str, device: str) -> None:
    found, wide = backend(of, device), sample((36, 300), torch.bfloat16).to(device)
    for x in (wide[:, 3:144], wide[::2, :141], wide.t()[:141]):
        counts = torch.zeros(3, dtype=torch.int64, device=device)
        check(run(found, kind, x, E5M2, counts=counts), counts, x.cpu(), "e5m2", kind)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of", quantize.names())
def test_nothing_at_all(of: str, kind: str, device: str) -> None:
    found = backend(of, device)
    for shape in ((0, 130), (130, 0), (0, 0)):
        counts = torch.zeros(3, dtype=torch.int64, device=device)
        q = run(found, kind, torch.empty(shape, device=device), E4M3, counts=counts)
        assert (q.data.shape, q.data_t.shape) == (shape, shape[::-1])
        blocks = tuple(-(-length // 128) for length in shape)
        inverse, inverse_t = {
            "row": (shape[:1], shape[1:]),
            "block1": ((shape[0], blocks[1]), (shape[1], blocks[0])),
            "block128": (blocks, blocks[::-1]),
        }.get(kind, ((), ()))
        assert (q.scale_inv.shape, q.scale_inv_t.shape) == (inverse, inverse_t)
        assert counts.tolist() == [0, 0, 0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("of", quantize.names())
def test_amax_counts_and_column_sums_add_up(of: str, device: str) -> None:
    found = backend(of, device)
    a, b = (sample((300, 70), torch.bfloat16, seed=seed) for seed in (1, 2))
    b[7, 7] = -1e5
    table = torch.zeros(3, device=device)  # views at odd addresses, as delayed scaling has them
    amax, counts = table[1], torch.zeros(3, dtype=torch.int64, device=device)
    sums = torch.ones(70, device=device)
    for x, largest in ((a, a.abs().max()), (b, b.abs().max()), (a, b.abs().max())):
        run(found, "scaled", x.to(device), E4M3, amax=amax, counts=counts, column_sum=sums)
        assert amax.item() == largest.float().item()
    assert table[::2].tolist() == [0, 0]
    one, other = (expected(x, "e4m3", "scaled", False)[2] for x in (a, b))
    assert counts.tolist() == [2 * p + q for p, q in zip(one, other, strict=True)]
    exact = 1 + 2 * a.double().sum(0) + b.double().sum(0)
    bound = 1e-6 * (1 + 2 * a.double().abs().sum(0) + b.double().abs().sum(0))
    assert ((sums.cpu().double() - exact).abs() <= bound).all()
    alone = torch.zeros(70, device=device)
    run(found, "tensor", a.to(device), E4M3, column_sum=alone)
    assert ((alone.cpu().double() - a.double().sum(0)).abs() <= bound).all()
    again = torch.zeros(70, device=device)
    run(found, "tensor", a.to(device), E4M3, (False, True), column_sum=again)
    assert torch.equal(alone, again)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("via", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of", quantize.names())
def test_rounded_on_the_way(of: str, via: torch.dtype, device: str) -> None:
    """What a cast of the rounded matrix makes, to the bit but for the order of its sums, and not the matrix's own."""
    found = backend(of, device)
    for shape in ((300, 70), (33, 150)):
        x = sample(shape, torch.float32, seed=3).to(device)
        x[5, :2] = torch.tensor([194.6, 1e5])  # saturates as bfloat16's 195 x 2.3, is float16's infinity
        answers = []
        for y, more in ((x, {"via": via}), (x.to(via), {}), (x, {})):
            amax, counts = torch.zeros((), device=device), torch.zeros(3, dtype=torch.int64, device=device)
            sums = torch.zeros(shape[1], device=device)
            q = run(found, "scaled", y, E4M3, amax=amax, counts=counts, column_sum=sums, **more)
            answers.append([*q[:4], amax, counts, sums])
        *exact, sums = zip(*answers[:2], strict=True)
        assert all(torch.equal(a.float(), b.float()) for a, b in exact)
        # Kernels of two input types have tiles of their own: the terms come in another order.
        apart = torch.where(sums[0] == sums[1], 0, (sums[0] - sums[1]).abs())
        assert (apart <= shape[0] * 2.0**-24 * x.to(via).float().abs().sum(0)).all()
        for i in (0, 2, 4, 6):
            assert not torch.equal(answers[0][i].float(), answers[2][i].float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("of", quantize.names())
def test_powers_of_two_at_every_boundary(of: str, name: str, device: str) -> None:
    """A row for each amax: around 1.75 x 2^k, where the power changes, around 2^k, and the largest and the smallest."""
    middle = (1.75 * 2.0 ** torch.arange(-126.0, 127.0)).view(torch.int32)
    even = (2.0 ** torch.arange(-126.0, 128.0)).view(torch.int32)
    bits = torch.cat([middle - 1, middle, middle + 1, even - 1, even, even + 1, torch.tensor([1, 0x7F7FFFFF, 0])])
    x = bits.view(torch.float32)[:, None]
    q = backend(of, device).quantize(
        x.to(device), FORMATS[name][0], ROW, rowwise=True, columnwise=False, power_of_two=True
    )
    assert (q.scale_inv.cpu().numpy() == tables.scales(x.numpy(), name, "row", True)[1]).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("of", quantize.names())
def test_infinity_and_nan_in_an_amax(of: str, device: str) -> None:
    found = backend(of, device)
    amax = torch.zeros((), device=device)
    for value in (3.0, 3.0 + 2.0**-22):  # neighbours in float32
        run(found, "scaled", torch.tensor([[value, 1.0]], device=device), E4M3, amax=amax)
        assert amax.item() == value
    amax.zero_()
    for value, seen in (
        (-3.0, 3.0),
        (-math.inf, math.inf),
        (5.0, math.inf),
        (-math.nan, math.nan),
        (math.inf, math.nan),
    ):
        run(found, "scaled", torch.tensor([[value, 1.0]], device=device), E4M3, amax=amax)
        assert amax.item() == pytest.approx(seen, nan_ok=True)


@pytest.mark.parametrize("of", quantize.names())
def test_what_is_wrong_is_named(of: str) -> None:
    found, x, ok = quantize.load(of), torch.ones(4, 4), {"rowwise": True, "columnwise": False}
    one = torch.ones(())
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: found.quantize(x, E4M3, rowwise=False, columnwise=False), "at least one layout"),
        (lambda: found.quantize(x[0], E4M3, **ok), r"x \(4,\)"),
        (lambda: found.quantize(x.int(), E4M3, ROW, **ok), "int32"),
        (lambda: found.quantize(x, torch.float8_e4m3fnuz, **ok), "e4m3fnuz"),
        (lambda: found.quantize(x, E4M3, (64, 128), **ok), r"block \(64, 128\)"),
        (lambda: found.quantize(x, E4M3, ROW, scale=one, **ok), "a given scale and column_sum are for"),
        (lambda: found.quantize(x, E4M3, STRIP, column_sum=x[0], **ok), "a given scale and column_sum are for"),
        (lambda: found.quantize(x, E4M3, amax=one, **ok), "without a scale"),
        (lambda: found.quantize(x, E4M3, scale=one.double(), **ok), "scale"),
        (lambda: found.quantize(x, E4M3, scale=torch.ones(2), **ok), "scale"),
        (lambda: found.quantize(x, E4M3, scale=one, amax=torch.zeros(4), **ok), "amax"),
        (lambda: found.quantize(x, E4M3, scale=one, column_sum=torch.zeros(5), **ok), "column_sum"),
        (lambda: found.quantize(x, E4M3, counts=torch.zeros(3), **ok), "counts"),
        (lambda: found.quantize(x, E4M3, scale=one.to("meta"), **ok), "scale .* on meta .* on cpu"),
        (lambda: found.quantize(x, E4M3, scale=one, amax=one.to("meta"), **ok), "amax .* on meta .* on cpu"),
        (lambda: found.quantize(x, E4M3, scale=one, via=torch.float32, **ok), "via torch.float32"),
    ]
    for call, named in wrong:
        with pytest.raises(ValueError, match=named):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_subnormal_bfloat16(kind: str) -> None:
    x = torch.full((130, 4), 2.0**-130, dtype=torch.bfloat16)
    x[0], x[1] = 2.0**-133, 1.0
    counts = torch.zeros(3, dtype=torch.int64, device="cuda")
    q = run(backend("triton", "cuda"), kind, x.cuda(), E4M3, counts=counts)
    check(q, counts, x, "e4m3", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_dequantised_it_is_x_again_up_to_half_a_unit(kind: str) -> None:
    x = sample((257, 130), torch.float32)
    for dtype, unit in ((E4M3, 2.0**-4), (E5M2, 2.0**-3)):
        q = run(quantize.load("reference"), kind, x, dtype)
        for back in (dequantize(q.by_rows()), dequantize(q.by_columns()).t()):
            saturated = x.abs() > torch.finfo(dtype).max / GIVEN if kind == "scaled" else torch.tensor(False)
            # Below the smallest normal number units stop shrinking; that times scale_inv is largest where x's group is.
            inverse = q.scale_inv if kind == "scaled" else x.abs().max() / torch.finfo(dtype).max
            floor = torch.finfo(dtype).smallest_normal * inverse
            assert (((back - x).abs() <= unit * 1.0001 * x.abs().clamp(min=floor)) | saturated).all()
    assert dequantize(q.by_rows(), torch.bfloat16).dtype == torch.bfloat16


def test_dequantize_names_a_scale_that_does_not_fit() -> None:
    q = run(quantize.load("reference"), "block1", torch.ones(256, 256), E4M3)
    with pytest.raises(ValueError, match=r"scale_inv \(256, 1\)"):
        dequantize(q.by_rows()._replace(scale_inv=q.scale_inv[:, :1]))


@pytest.mark.parametrize("kind", KINDS[1:])
@settings(max_examples=15, deadline=None)
@given(rows=st.lists(st.lists(st.floats(width=32), min_size=5, max_size=5), min_size=1, max_size=6))
def test_any_numbers_in_triton_as_in_the_reference(kind: str, rows: list[list[float]]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    triton, x = backend("triton", device), torch.tensor(rows)
    counts = torch.zeros(3, dtype=torch.int64, device=device)
    q = run(triton, kind, x.to(device), E4M3, counts=counts)
    check(q, counts, x, "e4m3", kind)


@pytest.mark.parametrize("of", quantize.names())
@pytest.mark.parametrize("device", DEVICES)
def test_autocast_and_autograd_change_nothing(of: str, device: str) -> None:
    found, x = backend(of, device), sample((33, 150), torch.float32).to(device)
    for kind in KINDS:
        plain = run(found, kind, x, E4M3)
        leaf = x.clone().requires_grad_()
        amax = {"amax": torch.zeros((), device=device)} if kind == "scaled" else {}
        with torch.autocast(device, torch.bfloat16):
            q = run(found, kind, leaf, E4M3, **amax)
        assert not any(t.requires_grad for t in (*q[:4], *amax.values()))
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(plain[:4], q[:4], strict=True))


@pytest.mark.parametrize("of", quantize.names())
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_without_a_break(of: str, device: str) -> None:
    found, x = backend(of, device), sample((33, 150), torch.bfloat16).to(device)
    for kind, layouts in (*((kind, (True, True)) for kind in KINDS[:-1]), (KINDS[-1], (False, True))):

        def step(
            x: Tensor, counts: Tensor, amax: Tensor, kind: str = kind, layouts: tuple[bool, bool] = layouts
        ) -> Quantized:
            more = {"amax": amax} if kind == "scaled" else {}
            return run(found, kind, x * 2, E4M3, layouts, counts=counts, **more)

        torch.compiler.reset()
        answers = []
        for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            counts, amax = torch.zeros(3, dtype=torch.int64, device=device), torch.zeros((), device=device)
            answers.append((*call(x, counts, amax)[:4], counts, amax))
        for eager, compiled in zip(*answers, strict=True):
            assert (eager is None) == (compiled is None)
            assert eager is None or torch.equal(eager.float(), compiled.float())
