"""GEMMs in half precision with an MLP's activation in their epilogue: the numbers, and when they run."""

import contextlib
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_bench.kernels import architecture, measured
from te_bench.kernels.activation import KINDS
from te_bench.kernels.activation.backends import reference
from te_bench.kernels.gemm import half
from te_bench.kernels.gemm.half import ACTIVATED, GRADIENT, choose
from te_bench.kernels.measured import Timing

BF16 = torch.bfloat16
GPU, PROCESSORS = "NVIDIA H200", 132
SHIPPED = [row for row in measured.read(measured.SHIPPED) if row.operator == "gemm" and row.problem.dtype == "bf16"]


# Which one runs


def chosen(epilogue: str | None, m: int, n: int, k: int, gpu: str = GPU) -> bool:
    return choose(epilogue, m, n, k, gpu=gpu, processors=PROCESSORS)


pytestmark = pytest.mark.usefixtures("own")


@pytest.mark.parametrize("row", SHIPPED, ids=lambda row: str(row.problem))
def test_a_measured_shape_gets_what_was_fastest_there(row: Timing) -> None:
    p, gluons = row.problem, row.seconds["gluon"]
    usual = row.seconds["torch" if p.epilogue is None else "separate"]
    assert chosen(p.epilogue, p.m, p.n, p.k) == (usual >= 1.05 * gluons)
    assert not chosen(p.epilogue, p.m, p.n, p.k, gpu="NVIDIA H100 80GB HBM3")


def test_gpt2s_mlp_and_its_logits_and_nothing_that_was_not_measured() -> None:
    for m in (12288, 65536, 15000):
        assert chosen(ACTIVATED, m, 3072, 768)
        assert chosen(GRADIENT, m, 3072, 768)
    assert chosen(None, 6144, 50304, 768)
    assert not chosen(None, 12288, 768, 3072)
    assert not chosen(ACTIVATED, 1024, 3072, 768)
    assert not chosen(ACTIVATED, 12288, 3072, 776)
    assert not chosen(ACTIVATED, 0, 3072, 768)


def test_a_gpu_without_the_kernel_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    monkeypatch.setattr(architecture, "processors", lambda device: PROCESSORS)
    monkeypatch.setattr(half.gluon, "INTERPRETED", False)
    for capability in ((9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, there=capability: there)
        half._is_chosen.cache_clear()
        assert half._is_chosen(ACTIVATED, 12288, 3072, 768, 0) == (capability == (9, 0))
    half._is_chosen.cache_clear()


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is the faster one on any device."""
    monkeypatch.setattr(half, "_is_chosen", lambda *_: True)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: True))


def test_what_the_kernel_cannot_read_is_not_its(everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.zeros(16, 32, dtype=BF16), torch.zeros(24, 32, dtype=BF16)
    assert half.is_faster(None, a, b)
    assert half.is_faster(ACTIVATED, a.half(), b.half(), "gelu")
    assert half.is_faster(GRADIENT, a, torch.zeros(32, 24, dtype=BF16), "gelu")
    shifted = torch.zeros(24 * 32 + 1, dtype=BF16)[1:].view(24, 32)
    for one, other in (
        (a.float(), b.float()), (a, b.half()), (a.t(), b), (a[:, :24], b[:, :24].contiguous()), (a, shifted),
        (torch.zeros(16, 20, dtype=BF16), torch.zeros(24, 20, dtype=BF16)), (a, b[:20]),
        (a, torch.zeros(24, 40, dtype=BF16)), (a.view(2, 8, 32), b), (a[0], b), (a, b[0]),
    ):  # fmt: skip
        assert not half.is_faster(None, one, other)
    assert not half.is_faster(ACTIVATED, a, b, "geglu")
    assert not half.is_faster(GRADIENT, a, b, "gelu")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not half.is_faster(None, a, b)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_torchs_where_the_kernel_is_not_faster_and_else_the_kernels(given, biased, monkeypatch):
    x, weight = torch.randn(6, 16, dtype=BF16), torch.randn(8, 16, dtype=BF16)
    bias = torch.randn(8, dtype=BF16) if biased else None
    launched: list[Any] = []
    monkeypatch.setattr(half.gluon, "run", lambda *args, **_: launched.append(args))
    for faster in (False, True):
        monkeypatch.setattr(half, "is_faster", lambda *_, faster=faster: faster)
        out = torch.empty(6, 8, dtype=BF16) if given else None
        made = half.multiply(x, weight, bias, out=out)
        assert out is None or made is out
        assert len(launched) == faster
        if not faster:
            torch.testing.assert_close(made, F.linear(x, weight, bias), rtol=2e-2, atol=2e-2)
    assert launched[0][1:4] == (x, weight, bias)
    assert launched[0][4] is made
    monkeypatch.setattr(half, "is_faster", lambda *_: True)
    half.multiply(x, weight, bias, out=torch.empty(8, 6, dtype=BF16).t())
    assert len(launched) == 1  # it writes contiguous matrices


@pytest.mark.parametrize(
    ("changed", "raises"),
    [
        ({"weight": torch.zeros(8, 24, dtype=BF16)}, True),
        ({"bias": torch.zeros(8)}, True),
        ({"bias": torch.zeros(7, dtype=BF16)}, True),
        ({"bias": torch.ones(1, dtype=BF16)}, False),
        ({"x": torch.zeros(2, 3, 16, dtype=BF16)}, False),
        ({"out": torch.zeros(6, 8)}, True),
        ({"out": torch.zeros(6, 16, dtype=BF16)}, False),
    ],
)  # fmt: skip
def test_what_only_pytorch_multiplies_or_refuses_is_pytorchs(changed, raises, everywhere, monkeypatch):
    launched: list[Any] = []
    monkeypatch.setattr(half.gluon, "run", lambda *args, **_: launched.append(args))
    x, weight = torch.ones(6, 16, dtype=BF16), torch.ones(8, 16, dtype=BF16)
    half.multiply(x, weight, torch.zeros(8, dtype=BF16), out=torch.zeros(6, 8, dtype=BF16))
    assert launched
    given: dict[str, Any] = {"x": x, "weight": weight, "bias": None, "out": None} | changed
    launched.clear()
    with pytest.raises(RuntimeError) if raises else contextlib.nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # out gets another shape
        half.multiply(given["x"], given["weight"], given["bias"], out=given["out"])
    assert not launched


class Launched:
    """In the kernel's place: where it is launched, and with what."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda *args, **constants: setattr(self, "call", SimpleNamespace(grid=grid, args=args, **constants))


def launched(monkeypatch: pytest.MonkeyPatch, call: Any) -> SimpleNamespace:
    kernel = Launched()
    monkeypatch.setattr(half.gluon, "_descriptor", lambda x, rows, columns: (x, rows, columns))
    monkeypatch.setattr(half.gluon, "gluon_gemm_kernel", kernel, raising=False)
    monkeypatch.setattr(architecture, "processors", lambda device: PROCESSORS)
    call()
    found: SimpleNamespace = kernel.call  # type: ignore[attr-defined]
    return found


def test_what_the_kernel_is_told_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The right-hand side's block lies as it does; what leaves, by parts; h's place is the gradient's."""
    x, up, down = (torch.zeros(shape, dtype=BF16) for shape in ((512, 192), (256, 192), (192, 256)))
    h, bias = torch.zeros(512, 256, dtype=BF16), torch.zeros(256, dtype=BF16)
    made = launched(monkeypatch, lambda: half.product(x, up, bias, None))
    assert made.grid == (8,)
    assert made.args[0] == (x, 128, 64)
    assert made.args[1] == (up, 128, 64)
    assert [made.args[2][0].shape, *made.args[2][1:]] == [(512, 256), 128, 64]
    assert made.args[3:6] == (None,) * 3
    assert made.args[6] is bias
    assert made.args[7:] == (512, 256, 192)
    assert (made.ACTIVATION, made.GRADIENT, made.PROMOTE, made.A_KIND) == (None, False, False, "none")
    made = launched(monkeypatch, lambda: half.activated(x, up, None, "gelu"))
    y, leaving = made.args[2:4]
    assert y[1:] == leaving[1:] == (128, 32)
    assert y[0] is not leaving[0]
    assert (made.ACTIVATION, made.GRADIENT) == ("gelu", False)
    assert (made.PARTS, made.SLOTS, made.STAGES) == (4, 2, 5)  # 64 KB of h and y beside five blocks of 32
    made = launched(monkeypatch, lambda: half.gradient(x, down, h, "gelu_erf"))
    assert made.args[1] == (down, 64, 128)
    assert made.args[3] == (h, 128, 64)
    assert made.args[7:] == (512, 256, 192)
    assert (made.ACTIVATION, made.GRADIENT, made.PARTS, made.SLOTS) == ("gelu_erf", True, 2, 2)


# The numbers


def drawn(m: int, n: int, k: int, dtype: torch.dtype) -> SimpleNamespace:
    torch.manual_seed(m + n + k)
    shapes = {"x": (m, k), "up": (n, k), "bias": (n,), "g": (m, k), "down": (k, n), "h": (m, n)}
    tensors = {name: torch.randn(shape, device="cuda") for name, shape in shapes.items()}
    tensors["up"] /= k**0.5
    tensors["down"] /= k**0.5
    return SimpleNamespace(**{name: x.to(dtype) for name, x in tensors.items()})


def error(found: Tensor, true: Tensor) -> float:
    return ((found.double() - true).norm() / true.norm()).item()


#: All are rounded once, by half an ulp at most: 0.85 of this on the average, 1.2 where two roundings meet.
LIMIT = {BF16: 2**-9, torch.float16: 2**-12}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("kind", [kind for kind, (_, gated) in KINDS.items() if not gated])
def test_every_activation_and_its_slope_against_float64(kind: str, dtype: torch.dtype) -> None:
    if KINDS[kind][0] == "sigmoid":
        pytest.skip("no such Linear")
    d = drawn(384, 256, 192, dtype)
    h, y = half.activated(d.x, d.up, d.bias, kind)
    assert error(h, d.x.double() @ d.up.double().T + d.bias.double()) < LIMIT[dtype]
    assert error(y, reference.forward(h.double(), kind)) < LIMIT[dtype]
    dh = half.gradient(d.g, d.down, d.h, kind)
    da = (d.g.double() @ d.down.double()).to(dtype).double()
    assert (
        error(dh, reference.backward(da, d.h.double(), kind)) < 1.5 * LIMIT[dtype]
    )  # da is rounded too, here and there


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(12288, 3072, 768), (1, 8, 8), (100, 72, 40), (1000, 3000, 200), (129, 136, 1032)])
def test_shapes_that_tiles_do_not_divide(shape: tuple[int, int, int], biased: bool) -> None:
    d = drawn(*shape, BF16)
    bias = d.bias if biased else None
    h, y = half.activated(d.x, d.up, bias, "gelu_erf")
    true = d.x.double() @ d.up.double().T + (d.bias.double() if biased else 0)
    limit = LIMIT[BF16] * (2 if shape[0] == 1 else 1)  # of eight numbers one error is not near the mean
    assert error(h, true) < limit
    assert error(y, F.gelu(h.double())) < limit
    assert torch.equal(half.product(d.x, d.up, bias, None), h)
    dh = half.gradient(d.g, d.down, d.h, "gelu_erf")
    slope = torch.autograd.functional.vjp(F.gelu, d.h.double(), torch.ones_like(d.h, dtype=torch.float64))[1]
    assert error(dh, (d.g.double() @ d.down.double()) * slope) < 1.5 * limit
    for _ in range(3):
        again, value = half.activated(d.x, d.up, bias, "gelu_erf")
        assert torch.equal(again, h)
        assert torch.equal(value, y)
        assert torch.equal(half.gradient(d.g, d.down, d.h, "gelu_erf"), dh)


@pytest.mark.gpu
def test_what_is_not_finite_stays_in_its_row_and_stays_so() -> None:
    d = drawn(256, 128, 64, BF16)
    d.x[3, 5], d.x[200, 1], d.h[7, 9], d.h[8, 8], d.h[8, 9] = torch.nan, torch.inf, torch.nan, -torch.inf, torch.inf
    h, y = half.activated(d.x, d.up, None, "gelu_erf")
    expected = F.linear(d.x, d.up)
    assert torch.equal(h.isnan(), expected.isnan())
    assert torch.equal(h.isinf(), expected.isinf())
    assert torch.equal(y.isfinite(), expected.isfinite())  # PyTorch's own GELU of an infinity is NaN on a CPU
    dh = half.gradient(d.g, d.down, d.h, "gelu")
    assert dh[7, 9].isnan()
    assert dh.isnan().sum() == 1
    assert dh[8, 8] == 0
    assert dh[8, 9].isfinite()
