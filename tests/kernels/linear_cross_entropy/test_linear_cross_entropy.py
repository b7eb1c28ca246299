"""Linear cross-entropies by the rule error <= 2 x the reference's at the same dtype + floor; chunks, edges, memory."""

import dataclasses
import gc
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lce_checks import (
    PLACES,
    REFERENCE,
    Case,
    Forward,
    assert_right,
    autocast_run,
    draw,
    exact,
    integers,
    prepare,
    relative,
    run,
)
from torch import Tensor

from te_bench.kernels import linear_cross_entropy, quantize
from te_bench.kernels.gemm import half
from te_bench.kernels.linear_cross_entropy import Problem, autograd, kernels
from te_bench.kernels.linear_cross_entropy.backends import chunked

CHUNKED = linear_cross_entropy.load("chunked").forward
CHUNKED_NAMES = ("chunked", "fp8")
OPERATORS = {"chunked": "linear_cross_entropy", "fp8": "linear_cross_entropy_fp8"}
OWN = (*CHUNKED_NAMES, "reference")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: N, D, V, Vp, rows, strip: one row; odd sizes without padding, uneven chunks and strips; one chunk
CASES = [(1, 8, 5, 8, None, None), (33, 7, 67, 67, 10, 4), (255, 32, 203, 208, None, 64), (300, 16, 130, 192, 128, 48)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "d", "vocab", "padded", "rows", "strip"), CASES)
def test_chunked_is_as_good_as_the_reference(n, d, vocab, padded, rows, strip, dtype, place, monkeypatch):
    device = prepare(place, monkeypatch)
    if place == "interpreted" and n > 100:  # 30 ms a row: the shape of the row is what matters there
        n, rows, strip = 21, rows and 8, strip and 3
    assert_right(CHUNKED, draw(n, d, vocab, padded, dtype, device), rows=rows, strip=strip)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows_of_weight", [50257, 50304])
def test_chunked_is_as_good_at_size(rows_of_weight: int, dtype: torch.dtype) -> None:
    assert_right(CHUNKED, draw(4000, 768, 50257, rows_of_weight, dtype, "cuda"), rows=1500, strip=700)


def test_logits_are_made_by_the_faster_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stood in for by what it is to compute."""
    case = integers(70, 32, 100, 128, prepare("plain", monkeypatch))
    wanted, made = run(CHUNKED, case, rows=40, strip=32), []

    def product(x: Tensor, weight: Tensor, bias: None, out: Tensor) -> Tensor:
        made.append(len(x))
        return out.copy_(x @ weight.t())

    monkeypatch.setattr(half, "is_faster", lambda epilogue, *_: epilogue is None)
    monkeypatch.setattr(half, "product", product)
    assert all(map(torch.equal, run(CHUNKED, case, rows=40, strip=32), wanted))
    assert made == [32, 8, 30]


def test_the_reference_is_the_formula() -> None:
    case = draw(33, 16, 50, 64, torch.float64)
    for mine, right in zip(run(REFERENCE, case), exact(case), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("place", PLACES)
def test_chunks_do_not_change_the_loss(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise, where the logits are exact: a row's loss depends on the row only, the mean is of all rows at once.

    Gradients of float32 leaves change by the order of a float32 sum. A bf16 dW, rounded a few times, errs at most twice as
    much as one that is rounded once.
    """
    n = 20 if place == "interpreted" else 70
    case = integers(n, 32, 100, 128, prepare(place, monkeypatch))
    whole, truth = run(CHUNKED, case), exact(case)
    in_float32 = autocast_run(CHUNKED, case)
    logits = (case.x.double() @ case.weight[:100].double().t()).bfloat16().double()
    assert whole.loss.item() == pytest.approx(F.cross_entropy(logits, case.targets, ignore_index=-1).item(), rel=1e-6)
    for rows, strip in [(1, 1), (7, 7), (16, 5), (n - 1, 12), (4096, 4096)]:
        parts = run(CHUNKED, case, rows=rows, strip=strip)
        assert torch.equal(parts.loss, whole.loss)
        for mine, once, right in zip(parts[1:], whole[1:], truth[1:], strict=True):
            assert relative(mine, right) <= 2 * relative(once, right)
        for mine, right in zip(autocast_run(CHUNKED, case, rows=rows, strip=strip)[1:], in_float32[1:], strict=True):
            assert relative(mine, right.double()) < 2**-20


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", OWN)
def test_without_targets_the_loss_is_nan_and_the_gradients_are_0(name, place, monkeypatch):
    """As F.cross_entropy has it, for no rows as for rows of which none counts."""
    case = draw(6, 16, 20, 32, torch.bfloat16, prepare(place, monkeypatch))
    none = case._replace(targets=torch.full_like(case.targets, -1))
    empty = case._replace(x=case.x[:0], targets=case.targets[:0])
    for this in (none, empty):
        result = run(linear_cross_entropy.load(name).forward, this)
        assert result.loss.isnan()
        assert result.dx.shape == this.x.shape
        assert result.dw.shape == this.weight.shape
        assert not result.dx.any()
        assert not result.dw.any()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", [1e4, 1e30])
def test_huge_logits(size: float, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = draw(20, 16, 100, 128, dtype, prepare(place, monkeypatch), size=size)
        assert_right(CHUNKED, case, rows=8)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CHUNKED_NAMES)
def test_what_the_padding_yields_does_not_matter(name: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of the padding above all others, by a weight of the same amax, so that FP8's scale stays."""
    case = draw(20, 16, 50, 64, torch.bfloat16, prepare(place, monkeypatch))
    loud = case._replace(weight=case.weight.clone())
    loud.weight[50:] = case.weight[:50].abs().max()
    forward = linear_cross_entropy.load(name).forward
    quiet, other = run(forward, case), run(forward, loud)
    assert torch.equal(quiet.loss, other.loss)
    assert torch.equal(quiet.dx, other.dx)
    assert torch.equal(quiet.dw, other.dw)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("target", [-2, -100, 50, 63, 64, 10**9])
@pytest.mark.parametrize("name", CHUNKED_NAMES)
def test_a_target_outside_of_the_vocabulary_is_loud(name, target, place, monkeypatch):
    case = draw(6, 16, 50, 64, torch.bfloat16, prepare(place, monkeypatch))
    case.targets[3] = target
    result = run(linear_cross_entropy.load(name).forward, case)
    assert result.loss.isnan()
    assert result.dx[3].isnan().all()
    assert result.dx[:3].isfinite().all()
    assert not result.dw[50:].any()  # the padding's gradient is 0 even then


@pytest.mark.parametrize("name", OWN)
def test_nan_is_seen_and_an_ignored_one_is_not(name: str) -> None:
    case = draw(6, 16, 50, 64)
    case.x[1, 2] = torch.nan
    forward = linear_cross_entropy.load(name).forward
    if name != "fp8":  # by its amax a NaN changes the scale, and multiplied by 0 it comes back in dW
        ignored = case._replace(targets=torch.where(torch.arange(6) == 1, -1, case.targets))
        assert forward(ignored.x, ignored.weight, ignored.targets, vocab=50).isfinite()
    assert forward(case.x, case.weight, case.targets, vocab=50).isnan()


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_decides_the_dtype_of_the_products(name: str, dtype: torch.dtype) -> None:
    """Gradients come back in the parameters' dtype. In bf16 the loss is another than in float32."""
    case = draw(40, 32, 100, 128)
    forward = linear_cross_entropy.load(name).forward
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run(forward, case._replace(x=case.x.to(dtype)))
    assert (cast.loss.dtype, cast.dx.dtype, cast.dw.dtype) == (torch.float32, dtype, torch.float32)
    if name == "chunked":
        plain = run(forward, case.to(torch.bfloat16))
        assert torch.equal(cast.loss, plain.loss)
        assert torch.equal(
            3 * (cast.dw / 3).bfloat16(), plain.dw
        )  # rounded, then multiplied by the loss's own gradient
        assert not torch.equal(cast.dw, plain.dw.float()), "dW went through bf16"
        assert not torch.equal(cast.loss, run(forward, case).loss)


@pytest.mark.parametrize("name", CHUNKED_NAMES)
def test_only_what_is_needed_is_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare("plain", monkeypatch)
    case = draw(40, 32, 100, 128)
    forward = linear_cross_entropy.load(name).forward
    both = run(forward, case, rows=16)
    for index in (0, 1):
        leaves = [tensor.clone() for tensor in case[:2]]
        leaves[index].requires_grad_()
        loss = forward(*leaves, case.targets, vocab=100, rows=16)
        assert torch.equal(loss.detach(), both.loss)
        assert torch.equal(torch.autograd.grad(3 * loss, leaves[index])[0], both[1 + index])
        with torch.no_grad():
            assert not forward(*leaves, case.targets, vocab=100).requires_grad
    operator = getattr(torch.ops.te_bench, OPERATORS[name])
    for need_dx, need_dw in ((False, False), (True, False), (False, True)):
        _, dx, dw = operator(*case, torch.float32, None, None, torch.float32, need_dx, need_dw)
        assert (dx.numel() > 0, dw.numel() > 0) == (need_dx, need_dw)


@pytest.mark.parametrize("name", CHUNKED_NAMES)
def test_backward_twice_and_no_second_derivative(name: str) -> None:
    case = draw(10, 16, 20, 32)
    x = case.x.requires_grad_()
    loss = linear_cross_entropy.load(name).forward(x, case.weight, case.targets, vocab=20)
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    for squared in (loss**2, loss):  # the gradient of the latter's loss needs none itself
        (dx,) = torch.autograd.grad(squared, x, create_graph=True)
        assert torch.equal(dx, first * 2 * loss if squared is not loss else first)
        with pytest.raises(ValueError, match="second derivatives, which te-bench's kernels do not have"):
            dx.sum().backward()


def test_strided_operands() -> None:
    case = draw(20, 16, 50, 64)
    for name in CHUNKED_NAMES:
        forward = linear_cross_entropy.load(name).forward
        wanted = forward(case.x, case.weight, case.targets, vocab=50)
        x, weight = case.x.t().contiguous().t(), torch.cat([case.weight, case.weight], 1)[:, :16]
        targets = torch.stack([case.targets, case.targets], 1)[:, 0]
        assert forward(x, weight, targets, vocab=50).item() == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize("name", CHUNKED_NAMES)
def test_bad_input(name: str) -> None:
    forward, (x, weight, targets, _) = linear_cross_entropy.load(name).forward, draw(6, 16, 50, 64)
    for arguments, options, reason in [
        ((x[None], weight, targets), {}, "flatten batch and sequence"),
        ((x, weight.t(), targets), {}, r"weight \(16, 64\)"),
        ((x, weight, targets[:5]), {}, r"int64 \(6,\)"),
        ((x, weight, targets.int()), {}, "torch.int32"),
        ((x, weight, targets), {"vocab": 65}, "from 1 to 64"),
        ((x, weight, targets), {"vocab": 0}, "from 1 to 64"),
        ((x, weight, targets.to("meta")), {}, "targets on meta"),
        ((x.bfloat16(), weight, targets), {}, "under torch.autocast"),
        ((x.double(), weight.double(), targets), {}, "float64"),
        ((x, weight, targets), {"rows": 0}, "rows=0"),
        ((x, weight, targets), {"strip": -1}, "strip=-1"),
    ]:
        with pytest.raises(ValueError, match=reason):
            forward(*arguments, **{"vocab": 50, **options})
    with pytest.raises(ValueError, match="from 1 to 64"):
        REFERENCE(x, weight, targets, vocab=65)


def test_what_can_not_run_says_why() -> None:
    problem = Problem(d=768, vocab=50257, padded=50304, dtype="bf16", device="cuda", capability=(7, 5))
    assert linear_cross_entropy.names() == ["chunked", "fp8", "liger", "reference"]
    reasons = {name: linear_cross_entropy.load(name).unsupported(problem) for name in linear_cross_entropy.names()}
    assert reasons["reference"] is None
    assert "8.0" in str(reasons["chunked"])
    assert "8.9" in str(reasons["fp8"])
    on_a_cpu = dataclasses.replace(problem, device="cpu", capability=None)
    assert "GPU" in str(linear_cross_entropy.load("liger").unsupported(on_a_cpu))


@pytest.mark.parametrize(("n", "padded", "itemsize"), [(12288, 50304, 2), (16384, 50304, 2), (12288, 50304, 4)])
def test_chunks_are_even_and_within_budget(n: int, padded: int, itemsize: int) -> None:
    budget = 300 * 2**20
    rows = autograd.chunk_rows(n, padded, itemsize, budget)
    assert rows % 128 == 0
    assert rows * padded * itemsize <= budget
    least = -(-n * padded * itemsize // budget)
    assert -(-n // rows) in (least, least + 1)
    assert autograd.chunk_rows(5, 50304, 2, budget) == 128
    assert autograd.chunk_rows(10**6, 10**9, 2, budget) == 128
    assert autograd.chunk_rows(0, 50304, 2, budget) == 3072
    assert [(part.start, part.stop) for part in autograd.slices(10, 4)] == [(0, 4), (4, 8), (8, 10)]


def test_chunks_of_large_vocabularies_take_the_least_room() -> None:
    """Of a bf16 dW by few chunks, where float32 sums would take more; in FP8 by one, as long as W's layouts take as much."""
    for n, d, rounded, rows in (
        (8192, 4096, True, 2048), (32768, 4096, True, 8192), (32768, 4096, False, 2432), (32768, 2048, True, 2432),
        (2048, 4096, True, 2048), (0, 4096, True, 1),
    ):  # fmt: skip
        assert chunked.rows_of(n, d, 128256, 2, rounded=rounded) == rows
    fp8 = linear_cross_entropy.load("fp8")
    assert fp8.gemms(8192, 4096, 128256, 2, False) == (16 + 8 + 1, 0)
    assert fp8.gemms(8192, 2048, 128256, 2, False) == (16 + 8 + 1, 0)
    assert fp8.gemms(8192, 2048, 128256, 2, True) == (16 + 8 + 1 + 16, 0)  # a further chunk, 8192 classes at a time
    assert fp8.gemms(16384, 2048, 128256, 2, False) == (32 + 16 + 1 + 3 * 16, 0)


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that was allocated at once during the call, beyond what was before it."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def test_the_logits_are_never_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """1024 x 4096 logits in float32 are 16 MiB; a chunk of 64 rows and what its formula needs are a few."""
    prepare("plain", monkeypatch)
    case = draw(1024, 16, 4090, 4096)
    whole = 1024 * 4096 * 4
    for name in CHUNKED_NAMES:
        forward = linear_cross_entropy.load(name).forward
        assert peak_bytes(lambda f=forward: run(f, case, rows=64)) < whole / 2, name  # type: ignore[misc]
    assert peak_bytes(lambda: run(REFERENCE, case)) >= whole


def gradients_of_leaves(forward: Forward, case: Case, **options: int) -> tuple[Tensor, ...]:
    leaves = case.x.detach().requires_grad_(), case.weight.detach().requires_grad_()
    return torch.autograd.grad(forward(*leaves, case.targets, vocab=case.vocab, **options), leaves)


def into(out: Tensor, *_: object) -> None:
    """A GEMM by its room alone."""
    out.zero_()


def test_the_peak_of_a_bf16_weight_is_its_gradients_and_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient is there in float32 too. In FP8 dW is not there before the operands' two layouts are gone."""
    prepare("interpreted", monkeypatch)
    monkeypatch.setitem(kernels.ROW, "BLOCK", 1024)
    n, d, classes, rows = 32, 1024, 1024, 16
    case = draw(n, d, classes, classes, torch.bfloat16)
    gradients = 2 * d * (classes + n)
    logits = 2 * rows * classes
    chunked = importlib.import_module("te_bench.kernels.linear_cross_entropy.backends.chunked")
    monkeypatch.setattr(chunked, "_product", lambda a, b, out, accumulate: out.zero_())  # a CPU's may copy an operand
    peak = peak_bytes(lambda: gradients_of_leaves(CHUNKED, case, rows=rows))
    assert gradients + logits <= peak < 1.2 * (gradients + logits)

    fp8 = importlib.import_module("te_bench.kernels.linear_cross_entropy.backends.fp8")
    monkeypatch.setattr(fp8, "_quantized", lambda *_: tuple(map(e4m3_of_zeros, case[:2])))
    monkeypatch.setattr(fp8, "_gemm_into", into)
    monkeypatch.setattr(fp8, "_gemm", lambda a, b, dtype: torch.zeros(len(a.data), len(b.data), dtype=dtype))
    n = 512
    case = draw(n, d, classes, classes, torch.bfloat16)
    monkeypatch.setattr(fp8, "_rows", lambda *_: None)
    operands, dx, g_t, g = 2 * d * (classes + n), 2 * d * n, n * classes, rows * classes
    peak = peak_bytes(lambda: gradients_of_leaves(fp8.forward, case, strip=rows))
    assert operands + dx + g_t + g + 2 * g <= peak < 1.1 * (operands + dx + g_t + g + 2 * g)


def e4m3_of_zeros(x: Tensor) -> quantize.Quantized:
    one, layout = torch.ones(()), quantize.Layout(torch.float8_e4m3fn, quantize.TENSOR, torch.float32)
    data, data_t = (torch.zeros(shape, dtype=layout.format) for shape in (x.shape, x.t().shape))
    return quantize.Quantized(data, one, data_t, one, layout)


def arguments(case: Case) -> tuple[Any, ...]:
    return (*case, torch.bfloat16, 16, 8, case.weight.dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("needs", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("name", CHUNKED_NAMES)
def test_operators(name: str, needs: tuple[bool, bool], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        prepare("plain", monkeypatch)
    operator = getattr(torch.ops.te_bench, OPERATORS[name])
    for n in (40, 0):
        case = draw(40, 16, 50, 64, device=device)
        case = case._replace(x=case.x[:n], targets=case.targets[:n])
        tests = ("test_schema", "test_faketensor") if n else ("test_faketensor",)
        torch.library.opcheck(operator.default, (*arguments(case), *needs), test_utils=tests)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", CHUNKED_NAMES)
def test_compiles_without_graph_breaks(name: str, autocast: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        prepare("plain", monkeypatch)
    torch._dynamo.reset()
    case = draw(40, 16, 50, 64, torch.float32 if autocast else torch.bfloat16, device)
    forward = linear_cross_entropy.load(name).forward

    def step(x: Tensor, weight: Tensor, targets: Tensor, *, vocab: int) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            return forward(x * 1.0, weight, targets, vocab=vocab)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for mine, right in zip(run(compiled, case), run(step, case), strict=True):
        assert mine.dtype is right.dtype
        assert torch.equal(mine, right)
