"""FP8's linear cross-entropy against float64 of the dequantised operands, then against the unquantised by theory's noise."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import codes
from lce_checks import PLACES, Case, Result, autocast_run, draw, exact, prepare, relative, run
from torch import Tensor

from te_bench.kernels import linear_cross_entropy, quantize
from te_bench.kernels.linear_cross_entropy import kernels
from te_bench.kernels.linear_cross_entropy.backends import fp8, reference

FP8 = linear_cross_entropy.load("fp8").forward
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LEAST_DB = 20.0  # of the gradients; theory has 24.6 for E5M2 x E4M3, the logits' own noise takes from it


def dequantised(t: Tensor) -> Tensor:
    packed = quantize.load("reference").quantize(t.bfloat16(), E4M3, rowwise=True, columnwise=False)
    return packed.data.double() * packed.scale_inv.double()


def emulated(case: Case) -> Result:
    """In float64, but for the FP8 operands and the bf16 of the logits."""
    x, weight = dequantised(case.x), dequantised(case.weight)
    logits = (x @ weight.t()).bfloat16().double()[:, : case.vocab]
    counts = (case.targets != -1).double()[:, None]
    onehot = F.one_hot(case.targets.clamp(min=0), case.vocab)
    g = (logits.softmax(1) - onehot) * counts
    packed = (g.float() * 2**15).to(E5M2).double() / 2**15
    packed = F.pad(packed, (0, len(weight) - case.vocab))
    loss = F.cross_entropy(logits, case.targets, ignore_index=-1)
    factor = 3 / counts.sum()
    return Result(loss, packed @ weight * factor, packed.t() @ x * factor)


def decibels(value: Tensor, truth: Tensor) -> float:
    return -20 * math.log10(relative(value, truth))


def assert_right(forward: Callable[..., Tensor], case: Case, **options: int) -> None:
    ours, emulation, truth = run(forward, case, **options), emulated(case), exact(case)
    # A logit or a gradient beside a rounding's midpoint may go either way, by the order of a float32 sum; on a GPU one in
    # ten may, by the tensor core's 14-bit sums: a whole step of bf16 or of E5M2, which few rows do not average away.
    few = len(case.targets) ** -0.5 if case.x.is_cuda else 0.0
    assert ours.loss.item() == pytest.approx(emulation.loss.item(), rel=1e-4 + few * 2**-8)
    for name in ("dx", "dw"):
        mine, wanted, right = (getattr(result, name) for result in (ours, emulation, truth))
        assert relative(mine, wanted) < 4e-3 + few * 0.1 * case.vocab**-0.5, name
        assert decibels(mine, right) > LEAST_DB, name
    assert not ours.dw[case.vocab :].any()
    assert not ours.dx[case.targets == -1].any()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("n", "d", "vocab", "padded", "rows", "strip"),
    [(1, 16, 5, 16, None, None), (33, 16, 67, 67, 10, 4), (300, 48, 130, 192, 128, 48), (255, 32, 203, 208, None, 64)],
)
def test_is_float64_of_what_fp8_keeps(n, d, vocab, padded, rows, strip, place, monkeypatch):
    device = prepare(place, monkeypatch)
    if place == "interpreted" and n > 100:
        n, rows, strip = 37, rows and 16, strip and 6
    assert_right(FP8, draw(n, d, vocab, padded, torch.bfloat16, device, size=1.0), rows=rows, strip=strip)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_is_float64_of_what_fp8_keeps_at_size(dtype: torch.dtype) -> None:
    assert_right(FP8, draw(4000, 768, 50257, 50304, dtype, "cuda", size=1.0), rows=1500, strip=700)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("height", "middle", "layouts"),
    [
        *((300, 144, layouts) for layouts in ((True, True), (True, False), (False, True), (False, False))),
        *((height, middle, (True, True)) for height, middle in ((300, 143), (299, 144))),
    ],
    ids=str,
)
def test_both_layouts_of_the_gradient(height, middle, layouts, place, monkeypatch):
    """Two strips into one chunk; every code is the formula's or, one in a thousand, beside it. Odd strips too."""
    device, vocab, padded = prepare(place, monkeypatch), 130, 150
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(height, padded, generator=generator) * 4).to(device, torch.bfloat16)
    targets = torch.randint(-1, vocab, (height,), generator=generator).to(device)
    losses = torch.empty(height, device=device)
    g = torch.zeros(height, padded, dtype=E5M2, device=device) if layouts[0] else None
    g_t = torch.zeros(padded, height, dtype=E5M2, device=device) if layouts[1] else None
    before = logits.clone()
    few = place == "interpreted"
    parts = (slice(middle, middle + 16), slice(280, height)) if few else (slice(0, middle), slice(middle, height))
    for part in parts:
        g_part = None if g is None else g[part]
        fp8._rows(logits[part], targets[part], losses[part], vocab, g_part, g_t, part.start)
        exact_losses, gradient = reference.rows(before[part].double(), targets[part], vocab)
        torch.testing.assert_close(losses[part], exact_losses.float())
        wanted = codes((gradient.float() * 2**15).to(E5M2))
        for layout in (g, None if g_t is None else g_t.view(torch.uint8).t().contiguous().view(E5M2)):
            if layout is not None:
                apart = (codes(layout[part]) - wanted).abs()
                assert apart.max() <= 1
                assert (apart > 0).sum() <= max(1, wanted.numel() // 1000)
    assert torch.equal(logits, before)
    if g is not None and g_t is not None:
        assert torch.equal(g.view(torch.uint8).t(), g_t.view(torch.uint8))


def test_a_chunk_of_operands_that_are_not_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and strips change the gradients by no more than the order of a float32 sum, of some classes at a time."""
    prepare("plain", monkeypatch)
    monkeypatch.setattr(fp8, "SHARE_BYTES", 1)
    case = draw(64, 32, 270, 272, torch.bfloat16)
    whole, rounded, wanted = autocast_run(FP8, case), run(FP8, case), emulated(case)
    for rows, strip in [(16, 16), (48, 5), (7, 3)]:
        parts = autocast_run(FP8, case, rows=rows, strip=strip)
        assert torch.equal(parts.loss, whole.loss)
        for mine, right in zip(parts[1:], whole[1:], strict=True):
            assert relative(mine, right.double()) < 2**-20
        for mine, once, right in zip(run(FP8, case, rows=rows, strip=strip)[1:], rounded[1:], wanted[1:], strict=True):
            assert relative(mine, right) <= 2 * relative(once, right)


def test_logits_of_a_part_of_a_strip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: a row's gradient depends on its own logits alone. Parts of 128 rows, the last of what is left."""
    prepare("plain", monkeypatch)
    case, seen = draw(700, 16, 40, 48, torch.bfloat16), []
    whole = run(FP8, case, rows=600, strip=300)
    monkeypatch.setattr(fp8, "LOGITS_BYTES", 1)

    def spy(logits: Tensor, *rest: object) -> None:
        seen.append(len(logits))
        ROWS(logits, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(fp8, "_rows", spy)
    for mine, wanted in zip(run(FP8, case, rows=600, strip=300), whole, strict=True):
        assert torch.equal(mine, wanted)
    assert seen == [128, 128, 44, 128, 128, 44, 100]


def after_rows(change: Callable[[Tensor, Tensor, slice], None]) -> Callable[..., None]:
    """The row pass, then a change of g and g_t, of which it wrote all and the given columns."""
    rows = fp8._rows

    def broken(logits: Tensor, targets: Tensor, losses: Tensor, vocab: int, g: Tensor, g_t: Tensor, first: int) -> None:
        rows(logits, targets, losses, vocab, g, g_t, first)
        change(g.view(torch.uint8), g_t.view(torch.uint8), slice(first, first + len(logits)))

    return broken


def late_strip(logits: Tensor, targets: Tensor, losses: Tensor, vocab: int, g: Tensor, g_t: Tensor, first: int) -> None:
    ROWS(logits, targets, losses, vocab, g, g_t, first and first - 1)


def exchanged(a: quantize.Operand, b: quantize.Operand, *rest: object) -> Tensor:
    """wgrad's x_t, of 16 rows of x, from last to first."""
    flipped = b._replace(data=b.data.view(torch.uint8).flip(1).view(E4M3))
    return GEMM(a, flipped if b.data.shape[1] == 16 else b, *rest)  # type: ignore[arg-type]


def coarse(x: Tensor, weight: Tensor, *needs: bool) -> tuple[quantize.Quantized, quantize.Quantized]:
    """x with one bit less of E4M3."""
    qx, qw = QUANTIZED(x, weight, *needs)
    return qx._replace(data=qx.data.view(torch.uint8).bitwise_and(0xFE).view(E4M3)), qw


ROWS, GEMM, QUANTIZED = fp8._rows, fp8._gemm, fp8._quantized
MISTAKES: dict[str, tuple[object, str, object]] = {
    "a bit of g missing": (fp8, "_rows", after_rows(lambda g, g_t, part: g.bitwise_and_(0xFE))),
    "a bit of g_t missing": (fp8, "_rows", after_rows(lambda g, g_t, part: g_t[:, part].bitwise_and_(0xFE))),
    "minus g": (fp8, "_rows", after_rows(lambda g, g_t, part: g.bitwise_xor_(0x80))),
    "g_t of the neighbouring column": (fp8, "_rows", after_rows(lambda g, g_t, part: g_t.copy_(g_t.roll(1, 0)))),
    "a strip in the wrong place": (fp8, "_rows", late_strip),
    "rows of x exchanged": (fp8, "_gemm", exchanged),
    "scale doubled": (kernels, "GRADIENT_SCALE", 2.0**16),
    "a bit of x missing": (fp8, "_quantized", coarse),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mutations_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare("plain", monkeypatch)
    case = draw(64, 32, 50, 64, torch.bfloat16, size=1.0)
    assert_right(FP8, case, rows=16, strip=8)
    monkeypatch.setattr(*MISTAKES[name])  # type: ignore[call-overload]
    with pytest.raises(AssertionError):
        assert_right(FP8, case, rows=16, strip=8)
