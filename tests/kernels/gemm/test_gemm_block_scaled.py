"""Blackwell's GEMMs of MXFP8 and NVFP4: what they read is what was cast, and their products are the emulated ones.

Triton's interpreter has no tl.dot_scaled: on a CPU the tests compute that instruction, from the bytes that it is given.
"""

import dataclasses
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from gemm_checks import floor
from kernel_checks import DEVICES
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import te_bench.models as te
from te_bench.kernels.gemm import block_formats as gemms
from te_bench.kernels.gemm import block_scaled
from te_bench.kernels.quantize import Operand, block_casts, packing
from te_bench.kernels.quantize.block_formats import MXFP8_LAYOUT, NVFP4_LAYOUT
from te_bench.kernels.tile import INTERPRETED
from te_bench.models.recipe import Format, MXFP8BlockScaling, NVFP4BlockScaling, Recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRID = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
WIDTHS = {"e4m3": 32, "e5m2": 32, "e2m1": 16}


def numbers(codes: Tensor, name: str) -> Tensor:
    """The elements (rows, K) of bytes (rows, K or K / 2)."""
    if name == "e2m1":
        return GRID[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
    return codes.view({"e4m3": E4M3, "e5m2": E5M2}[name]).float()


def factors(codes: Tensor, name: str) -> Tensor:
    return codes.view(E4M3).double() if name == "e2m1" else torch.exp2(codes.double() - 127)


def unpacked(data: Tensor, scales: Tensor, name: str) -> Tensor:
    """Elements times scales, float64, each scale by its published place: 128 x 4 tiles."""
    elements = numbers(data.cpu().view(torch.uint8), name).double()
    columns = elements.shape[1] // WIDTHS[name]
    r, c = torch.arange(len(elements))[:, None], torch.arange(columns)
    place = ((r // 128 * (columns // 4) + c // 4) * 32 + r % 32) * 16 + r % 128 // 32 * 4 + c % 4
    each = factors(scales.cpu().view(torch.uint8).flatten()[place], name)
    return elements * each.repeat_interleave(WIDTHS[name], 1)


def drawn(m: int, k: int, device: str = "cpu") -> Tensor:
    """Rows of very different sizes, so that NVFP4's scales are also subnormal, and 0."""
    generator = torch.Generator().manual_seed(m + k)
    x = torch.randn(m, k, generator=generator) * torch.exp2(-20 * torch.rand(m, 1, generator=generator))
    return x.bfloat16().to(device)


def cast(x: Tensor, name: str, **how: Any) -> Any:
    both = {"rowwise": True, "columnwise": True}
    return block_casts.nvfp4(x, **both, **how) if name == "e2m1" else block_casts.mxfp8(
        x, {"e4m3": E4M3, "e5m2": E5M2}[name], **both, **how
    )  # fmt: skip


CASTS = [
    ("e4m3", {}), ("e4m3", {"rows": 32}), ("e5m2", {}), ("e2m1", {}), ("e2m1", {"rows": 16}),
    ("e2m1", {"transform": True, "seed": torch.tensor(5)}),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "how"), CASTS)
def test_packing_keeps_every_number_of_a_cast(name: str, how: dict[str, Any], device: str) -> None:
    """Of both orientations, to the bit, -0 included."""
    given = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in how.items()}
    q = cast(drawn(150, 300, device), name, **given)
    for x in (q.data, q.data_t):
        data, scales = packing.packed(x, name)
        found, (m, k) = unpacked(data, scales, name), x.shape
        assert torch.equal(found[:m, :k], x.cpu().double())
        assert torch.equal(found[:m, :k].signbit(), x.cpu().signbit())
        assert not found[m:].any()
        assert not found[:, k:].any()
        assert data.shape[0] % 128 == data.stride(0) % 128 == 0


@pytest.mark.parametrize("name", WIDTHS)
def test_packing_keeps_extremes(name: str) -> None:
    """NaN, which NVFP4 has not, infinity, both ends of the scales, and every pair of a scale and an element."""
    if name == "e2m1":
        scales = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()
        x = (scales[:, None, None] * GRID[:, None] * torch.ones(16)).reshape(-1, 16)
        drawn = torch.randint(16, (4, 16), generator=torch.Generator().manual_seed(0))
        x = torch.cat([x, (scales[:, None, None] * GRID[drawn]).reshape(-1, 16)])
    else:
        x = torch.zeros(4, 32)
        x[0, :2] = torch.tensor([math.nan, 448.0])
        x[1, 0], x[2, 0], x[3, 0] = 2.0**-126, 2.0**127, math.inf  # the interpreter knows no subnormal bf16
    data, codes = packing.packed(x.bfloat16(), name)
    found = unpacked(data, codes, name)[: len(x), : x.shape[1]].bfloat16().float()
    assert torch.equal(found.nan_to_num(-1.0), x.nan_to_num(-1.0))
    assert torch.equal(found.isnan(), x.isnan())


@pytest.fixture
def scaled_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """tl.dot_scaled in Triton's interpreter, in float64: bytes (M, K), (K, N), scales (M, blocks), (N, blocks)."""
    if not INTERPRETED:
        pytest.skip("on a CPU in the interpreter only")
    from triton.runtime import interpreter

    def dot(_: Any, a: Any, a_scale: Any, a_name: str, b: Any, b_scale: Any, b_name: str, acc: Any, *rest: Any) -> Any:
        def bits(x: Any) -> Tensor:
            return torch.from_numpy(x.handle.data.view(np.uint8).copy())

        def values(codes: Tensor, scale: Any, name: str) -> Tensor:
            each = factors(bits(scale), name)
            return numbers(codes, name).double() * each.repeat_interleave(WIDTHS[name], 1)

        product = values(bits(a), a_scale, a_name) @ values(bits(b).t().contiguous(), b_scale, b_name).t()
        summed = (product.numpy() + acc.handle.data).astype(np.float32)
        return interpreter.tl.tensor(interpreter.TensorHandle(summed, interpreter.tl.float32), acc.type)

    monkeypatch.setattr(interpreter.TritonSemantic, "dot_scaled", dot)


def operands(shape: tuple[int, int, int], name: str, device: str) -> tuple[Operand, Operand, torch.dtype]:
    """As wgrad's: both contract what they were not stored along."""
    m, n, k = shape
    a, b = cast(drawn(k, m, device) * 32, name), cast(drawn(k, n, device), "e2m1" if name == "e2m1" else "e4m3")
    return a.by_columns(), b.by_columns(), E5M2 if name == "e5m2" else E4M3


def multiply(a: Operand, b: Operand, a_dtype: torch.dtype, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    return block_scaled.multiply(a.data, b.data, a.scale_inv, b.scale_inv, dtype, bias, a_dtype)


def held_to_the_emulation(name: str, device: str) -> None:
    for shape in ((130, 70, 200), (257, 140, 400)):
        a, b, a_dtype = operands(shape, name, device)
        bias = torch.randn(shape[1], device=device)
        for dtype, added in ((torch.float32, None), (torch.bfloat16, bias), (torch.float16, bias.bfloat16())):
            found = multiply(a, b, a_dtype, dtype, added)
            emulated = gemms.forward(a, b, out_dtype=torch.float32, bias=added, emulate=True)
            step = 0 if dtype is torch.float32 else torch.finfo(dtype).eps / 2
            assert found.dtype == dtype
            sums = 2 * floor("block_scaled", device, fast_accum=False) * emulated.abs().max().item()
            torch.testing.assert_close(found.float(), emulated, rtol=1.01 * step, atol=sums + 1e-7)


@pytest.mark.usefixtures("scaled_dots")
@pytest.mark.parametrize("name", WIDTHS)
def test_products_are_the_emulated_ones(name: str) -> None:
    held_to_the_emulation(name, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", WIDTHS)
def test_products_are_the_emulated_ones_on_a_gpu(name: str) -> None:
    """Of MXFP8 also on a Hopper, for which Triton writes the product in bf16: a test of all but the instruction."""
    capability = torch.cuda.get_device_capability()
    if capability < ((10, 0) if name == "e2m1" else (9, 0)):
        pytest.skip(str(block_scaled.unsupported("cuda", capability)))
    held_to_the_emulation(name, "cuda")


@pytest.mark.usefixtures("scaled_dots")
@pytest.mark.parametrize("name", WIDTHS)
def test_what_is_wrong_is_seen(name: str) -> None:
    a, b, a_dtype = operands((130, 70, 200), name, "cpu")
    right = multiply(a, b, a_dtype, torch.float32)

    def error(a: Operand, b: Operand) -> float:
        return ((multiply(a, b, a_dtype, torch.float32) - right).norm() / right.norm()).item()

    assert error(a, b) == 0
    assert error(a._replace(data=a.data.roll(1, 0)), b) > 0.1
    assert error(a, b._replace(data=b.data.roll(WIDTHS[name], 1))) > 0.1
    if a.scale_inv is not None:
        assert error(a._replace(scale_inv=2 * a.scale_inv), b) == 1


def test_sums_of_integers_are_exact(scaled_dots: None) -> None:
    """Bit for bit, by tiles that are full and that are not, over several steps of K."""
    generator = torch.Generator().manual_seed(0)
    for layout, m, n, k in ((MXFP8_LAYOUT, 256, 128, 384), (NVFP4_LAYOUT, 140, 129, 520), (MXFP8_LAYOUT, 1, 3, 5)):
        a, b = (torch.randint(-3, 4, (rows, k), generator=generator).bfloat16() for rows in (m, n))
        scale_inv = None if layout is MXFP8_LAYOUT else torch.tensor(1 / 2688.0, dtype=torch.float64) * 2688
        sides = [Operand(x, scale_inv, layout) for x in (a, b)]
        expected = gemms.forward(*sides, out_dtype=torch.float32, emulate=True)
        assert torch.equal(multiply(*sides, E4M3, torch.float32), expected)


@pytest.mark.usefixtures("scaled_dots")
@pytest.mark.parametrize(
    "asked", [MXFP8BlockScaling(), MXFP8BlockScaling(fp8_format=Format.HYBRID), NVFP4BlockScaling()]
)
def test_a_linear_takes_it_where_it_runs_and_not_to_emulate(asked: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients are the emulated ones, the compiler's as well."""
    calls, multiply = [], block_scaled.multiply
    monkeypatch.setattr(block_scaled, "multiply", lambda *given: calls.append(1) or multiply(*given))

    def results(recipe: Recipe, compiles: bool = False) -> list[Tensor]:
        torch.manual_seed(0)
        layer, x = te.Linear(48, 40, device="cpu"), torch.randn(50, 48, requires_grad=True)
        run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiles else layer
        torch.manual_seed(1)
        with te.autocast(recipe=recipe):
            y = run(x)
        y.square().sum().backward()
        return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]

    emulated = results(asked)
    monkeypatch.setattr(block_scaled, "supported", lambda device: True)
    again = results(dataclasses.replace(asked, emulate=True))
    assert not calls
    native, compiled = results(asked), results(asked, compiles=True)
    assert len(calls) == 6
    assert all(map(torch.equal, emulated, again))
    assert all(map(torch.equal, native, compiled))
    for found, right in zip(native, emulated, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5 * right.abs().max().item())


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch, scaled_dots: None) -> None:
    """The CPU is a GPU with such tensor cores, on which nothing has been multiplied yet."""
    monkeypatch.setattr(block_scaled, "capability_of", lambda device: (10, 0))
    monkeypatch.setattr(block_scaled, "LACKS", {})


def rows_in_order(data: Tensor, scales: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """A tile's scales by rows, as they would be without the tensor core's own order."""
    return data, scales.view(*scales.shape[:3], 32, 4, 4).transpose(3, 4).reshape(scales.shape).contiguous()


def tiles_exchanged(data: Tensor, scales: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return data, scales.view(torch.uint8).flip(2).view(scales.dtype)


def of_e5m2(data: Tensor, scales: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return data, scales + 1 if name == "e5m2" else scales


def of_nvfp4(data: Tensor, scales: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return rows_in_order(data, scales, name) if name == "e2m1" else (data, scales)


def refused(data: Tensor, scales: Tensor, name: str) -> tuple[Tensor, Tensor]:
    raise RuntimeError("an instruction that ptxas refuses")


FAULTS = [
    (rows_in_order, "its product of MXFP8 is wrong"),
    (tiles_exchanged, "its product of MXFP8 is wrong"),
    (of_nvfp4, "its product of NVFP4 is wrong"),
    (of_e5m2, "its product of MXFP8 with E5M2 is wrong"),
    (refused, "its product of MXFP8 fails: RuntimeError: an instruction that ptxas refuses"),
]


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize(("fault", "said"), FAULTS)
def test_a_gpu_that_multiplies_wrongly_emulates_and_warns_once(
    fault: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = packing.packed
    monkeypatch.setattr(packing, "packed", lambda x, name: fault(*packed(x, name), name))
    a, b, a_dtype = operands((33, 40, 50), "e4m3", "cpu")
    emulated = gemms.forward(a, b, out_dtype=torch.float32, a_dtype=a_dtype, emulate=True)
    with pytest.warns(UserWarning, match=f"block_scaled: {said} on cpu. MXFP8 and NVFP4 are emulated") as warned:
        found = gemms.forward(a, b, out_dtype=torch.float32, a_dtype=a_dtype)
    assert len(warned) == 1
    assert torch.equal(found, emulated)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(gemms.forward(a, b, out_dtype=torch.float32, a_dtype=a_dtype), emulated)
    assert block_scaled.unsupported("cuda", (10, 0)) == said
    assert MXFP8BlockScaling().by_half_gemms("cuda", (10, 0))
    assert block_scaled.unsupported("cuda", (12, 0)) is None


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("lack", [None, "its product of NVFP4 is wrong"])
def test_who_asks_for_mxfp8_first_has_it_compared(lack: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_scaled, "disproof", lambda device: lack)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        available, reason = te.is_mxfp8_available(return_reason=True)
    assert available is (lack is None)
    assert len(warned) == (lack is not None)
    assert reason.startswith(f"{lack}; te.recipe.MXFP8BlockScaling()" if lack else "")


@pytest.mark.usefixtures("blackwell")
def test_a_gpu_that_multiplies_rightly_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast, in other modes and with another default device, too; a user's random numbers stay."""
    calls, multiply = [], block_scaled.multiply
    monkeypatch.setattr(block_scaled, "multiply", lambda *given: calls.append(1) or multiply(*given))
    state = torch.get_rng_state()
    with (
        warnings.catch_warnings(),
        torch.autocast("cpu", torch.bfloat16),
        torch.device("meta"),
        FlopCounterMode(display=False) as flop,
    ):
        warnings.simplefilter("error")
        assert all(block_scaled.supported(torch.device("cpu")) for _ in range(3))
    assert len(calls) == len(WIDTHS)
    assert flop.get_total_flops() == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert block_scaled.unsupported("cuda", (10, 0)) is None


@pytest.mark.usefixtures("blackwell")
def test_nothing_is_compared_in_a_capture_but_before(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_initialized", lambda: True)
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        capture.setattr(block_scaled, "multiply", lambda *given: pytest.fail("multiplied in a capture"))
        with pytest.warns(UserWarning, match="run a step before the capture"):
            assert not block_scaled.supported(device)
    assert block_scaled.supported(device)
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_initialized", lambda: True)
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert block_scaled.supported(device)


@pytest.mark.parametrize(
    ("device", "capability", "reason"),
    [
        ("cpu", None, "needs an NVIDIA GPU"),
        ("cuda", (8, 9), "a tensor core with block scales needs compute capability 10.0, this GPU has 8.9"),
        ("cuda", (9, 0), "a tensor core with block scales needs compute capability 10.0, this GPU has 9.0"),
        ("cuda", (10, 0), None),
        ("cuda", (10, 3), None),
        ("cuda", (12, 0), None),
    ],
)
def test_where_it_runs(device: str, capability: tuple[int, int] | None, reason: str | None) -> None:
    assert block_scaled.unsupported(device, capability) == reason
