"""GEMMs with an epilogue, and those that add to a float32 D: against float64, stage by stage, on a CPU and on a GPU."""

import dataclasses
from typing import Any

import pytest
import torch
from fused_checks import EPILOGUES, Given, check_product, given
from gemm_checks import FAST, FLOAT32, FORMATS, OPCHECKS, Operands, a_problem, draw, floor, integers, product, quantised
from torch import Tensor

from te_bench.kernels import gemm, quantize
from te_bench.kernels.gemm import PAIRS, Backend, Epilogue, Product
from te_bench.kernels.gemm.backends import gluon, triton
from te_bench.kernels.gemm.operands import DTYPES, take_apart
from te_bench.kernels.gemm.portable import tiles as _tiles
from te_bench.kernels.quantize import Operand

RIVALS = [(name, "cpu") for name in ("reference", "triton")]
RIVALS += [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in ("gluon", "reference", "triton")]
each_rival = pytest.mark.parametrize(("name", "device"), RIVALS)
SHAPE = (144, 272, 304)  # neither a multiple of a tile, both of 16 bytes of FP8


def backend_of(name: str, device: str, pair: tuple[str, str] = PAIRS[0]) -> Backend:
    """Skips the test, with the backend's own reason, where it has one."""
    backend = gemm.load(name)
    if reason := backend.unsupported(a_problem(SHAPE, FORMATS[0], pair, device)):
        pytest.skip(reason)
    return backend


def run(backend: Backend, g: Given, **more: Any) -> Product:
    assert backend.fused is not None
    return backend.fused(*g.operands, **g.options(), **more)


def a_case(
    kind: str, device: str = "cpu", pair: tuple[str, str] = PAIRS[0], formats: tuple[str, str] = FORMATS[0],
    out_dtype: torch.dtype = torch.bfloat16, shape: tuple[int, int, int] = SHAPE,
) -> Given:  # fmt: skip
    return given(quantised(*draw(shape, device), formats, pair), EPILOGUES[kind], out_dtype)


CASES = [(kind, PAIRS[0], FORMATS[0], torch.bfloat16) for kind in EPILOGUES]
CASES += [("everything", pair, FORMATS[0], torch.bfloat16) for pair in PAIRS[1:]]
CASES += [("gelu in FP8", PAIRS[0], formats, torch.bfloat16) for formats in FORMATS[1:]]
CASES += [("residual", PAIRS[0], FORMATS[0], torch.float32), ("gelu kept", PAIRS[0], FORMATS[0], torch.float32)]
CASES += [("everything", PAIRS[0], FORMATS[0], torch.float16)]


@each_rival
@pytest.mark.parametrize(("kind", "pair", "formats", "out_dtype"), CASES, ids=str)
def test_every_part_is_right(
    name: str, device: str, kind: str, pair: tuple[str, str], formats: tuple[str, str], out_dtype: torch.dtype
) -> None:
    g = a_case(kind, device, pair, formats, out_dtype)
    for fast_accum in (False, True) if pair in PAIRS[:2] else (False,):
        amax = None if g.scale is None else torch.zeros((), device=device)
        made = run(backend_of(name, device, pair), g, fast_accum=fast_accum, amax=amax)
        check_product(made, g, floor=floor(name, device, fast_accum), amax=amax)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["everything", "gelu in FP8"])
@pytest.mark.parametrize("tile", ["FUSED_LARGE", "FUSED_SMALL", "FUSED_TWICE", "FUSED_BLOCKS"])
def test_every_tile(tile: str, kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles a program, in parts of each size; large tiles are else given to larger products only."""
    chosen = getattr(_tiles, tile)
    if tile in ("FUSED_LARGE", "FUSED_TWICE") and kind == "everything":
        chosen = chosen._replace(stages=2)  # a residual takes the other stages' place
    backend = backend_of("triton", device)
    monkeypatch.setattr(triton, "tile", lambda *_, **__: chosen)
    g = a_case(kind, device, shape=(272, 304, 144))
    check_product(run(backend, g, fast_accum=True), g, floor=floor("triton", device, True))


@each_rival
def test_the_parts_do_not_depend_on_what_else_is_asked_for(name: str, device: str) -> None:
    """FP8 alone is that of the out that would be there; what is kept is what a GEMM alone would leave; bit for bit."""
    backend, whole = backend_of(name, device), a_case("everything", device)
    everything = run(backend, whole)
    alone = run(backend, whole._replace(epilogue=dataclasses.replace(whole.epilogue, out=False, keep=False)))
    assert alone.out is alone.pre is None
    assert alone.quantized is not None
    assert everything.quantized is not None
    assert torch.equal(alone.quantized.data.view(torch.uint8), everything.quantized.data.view(torch.uint8))
    assert torch.equal(alone.quantized.data_t.view(torch.uint8), everything.quantized.data_t.view(torch.uint8))
    plain = backend.forward(*whole.operands, out_dtype=whole.out_dtype, bias=whole.bias)
    if device == "cpu" or name == "reference":  # on a GPU another tile adds up in another order
        assert torch.equal(plain, everything.pre)


@each_rival
def test_an_amax_is_of_d_alone_and_only_grows(name: str, device: str) -> None:
    """Zero operands and a bias of -3: beyond D's rows a tile holds the bias' activation too, beyond its columns zeros."""
    backend = backend_of(name, device)
    one = torch.ones((), device=device)
    zeros = Operands(
        *(Operand(torch.zeros_like(x.data), one, x.layout) for x in integers((16, 48, 32), PAIRS[0], device))
    )
    bias = torch.full((48,), -3.0, device=device)
    residual = torch.full((16, 48), 3.0, device=device, dtype=torch.bfloat16)  # Gluon has no room for a wider one
    e = Epilogue(residual=True, target="e4m3")
    g = Given(zeros, e, torch.bfloat16, bias, residual, torch.ones((), device=device))
    for before, after in ((0.0, 0.0), (2.0, 2.0)):
        amax = torch.full((), before, device=device)
        run(backend, g, amax=amax)
        assert amax == after
    g.residual[3, 5] = float("nan")
    run(backend, g, amax=amax)
    assert amax.isnan()


def broken(g: Given) -> dict[str, Product]:
    """Products of broken kernels, by what broke them."""
    forward = gemm.load("reference")

    def but(**changes: Any) -> Product:
        changed = g._replace(**changes)
        return run(forward, changed)

    good = run(forward, g)
    assert good.quantized is not None
    q, e = good.quantized, g.epilogue
    shifted = good.out.clone()
    shifted[:, 128:] = shifted[:, :-128].clone()
    erf = torch.nn.functional.gelu(good.pre.float()) + g.residual.float()
    cast = quantise(g, erf.to(g.out_dtype))
    return {
        "no activation": but(epilogue=dataclasses.replace(e, activation="relu")),
        "the bias after the activation": good._replace(pre=(good.pre.float() - g.bias).to(g.out_dtype)),
        "the exact GELU": good._replace(out=erf.to(g.out_dtype), quantized=cast),
        "no residual": but(residual=g.residual * 0),
        "the residual twice": but(residual=g.residual * 2),
        "what is kept is the output": good._replace(pre=good.out),
        "no bias": but(bias=g.bias * 0),
        "columns of the left half": good._replace(out=shifted),
        "the FP8 before the residual": good._replace(quantized=quantise(g, (erf - g.residual.float()).to(g.out_dtype))),
        "twice the scale": but(scale=g.scale * 2),
        "wrapped around": good._replace(quantized=q._replace(data=(q.data.view(torch.uint8) ^ 0x80).view(q.data.dtype))),
        "not transposed": good._replace(quantized=q._replace(data_t=q.data.reshape(q.data_t.shape))),
        "transposed by halves": good._replace(quantized=q._replace(data_t=q.data_t.roll(128, 0))),
        "the scale for its inverse": good._replace(quantized=q._replace(scale_inv=g.scale)),
    }  # fmt: skip


def quantise(g: Given, out: Tensor) -> Any:
    return quantize.load("reference").scaled(
        out, g.scale, DTYPES[str(g.epilogue.target)], rowwise=True, columnwise=True
    )


def test_broken_epilogues_fail_the_check() -> None:
    """With the loosest floor of all, in bfloat16, but for the exact GELU: 5e-4 is fast accumulation's noise."""
    g = a_case("everything", shape=(256, 256, 384))
    check_product(run(gemm.load("reference"), g), g, floor=FAST)
    passed = []
    for name, made in broken(g).items():
        try:
            check_product(made, g, floor=FLOAT32 if name == "the exact GELU" else FAST)
        except AssertionError:
            continue
        passed.append(name)
    assert passed == ["the exact GELU"]  # 16 bits cannot tell; the next test does


@each_rival
def test_gelu_is_its_tanh_approximation(name: str, device: str) -> None:
    """In float32 the exact one is up to 4.7e-4 away."""
    backend, g = backend_of(name, device), a_case("gelu kept", device, out_dtype=torch.float32)
    made = run(backend, g)
    expected = torch.nn.functional.gelu(made.pre.double(), approximate="tanh")
    exact = torch.nn.functional.gelu(made.pre.double())
    assert (made.out - expected).abs().max() < 1e-5 < 1e-4 < (made.out - exact).abs().max()


# Accumulation


@each_rival
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("shape", [(144, 264, 1296), (17, 72, 32)], ids=str)
def test_accumulation_adds_exactly_where_sums_are_exact(
    name: str, device: str, pair: tuple[str, str], shape: tuple[int, int, int]
) -> None:
    """Integers on top of what is there; twice, so that an overwritten D shows."""
    backend = backend_of(name, device, pair)
    assert backend.accumulate is not None
    operands = integers(shape, pair, device)
    before = torch.randint(-9, 9, shape[:2], generator=torch.Generator().manual_seed(0)).float().to(device)
    for fast_accum in (False, True):
        out = before.clone()
        for times in (1, 2):
            backend.accumulate(*operands, out=out, fast_accum=fast_accum)
            assert torch.equal(out.double(), before + times * product(operands))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shares", [1, 2, 3, 5])
@pytest.mark.parametrize("tile", ["LARGE_FLOAT32", "SMALL"])
def test_every_share_of_k_is_added_once(tile: str, shares: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of("triton", device)
    monkeypatch.setattr(triton, "split", lambda *_, **__: (getattr(_tiles, tile), shares))
    for pair in (PAIRS[1], PAIRS[3] if tile == "SMALL" else PAIRS[0]):  # block scales are for tiles of 128 columns
        operands, out = integers((144, 264, 1200), pair, device), torch.ones(144, 264, device=device)
        assert backend.accumulate is not None
        backend.accumulate(*operands, out=out, fast_accum=True)
        assert torch.equal(out.double(), product(operands) + 1)


def test_k_is_split_where_tiles_are_too_few() -> None:
    """GPT-2's weight gradients over 12288 tokens, on an H200's 132 processors, and one that needs no splitting."""
    for m, n in ((768, 3072), (3072, 768), (768, 768), (2304, 768)):
        chosen, shares = _tiles.split(m, n, 12288, promote=False, processors=132)
        tiles = -(-m // chosen.m) * -(-n // chosen.n) * shares
        assert shares > 1
        assert tiles / (-(-tiles // 132) * 132) > 0.8  # of the processors' waves
    assert _tiles.split(50304, 768, 128, promote=False, processors=132)[1] == 1
    assert _tiles.split(768, 3072, 12288, promote=True, processors=132)[0] == _tiles.PRECISE


@pytest.mark.parametrize("promote", [False, True])
def test_no_share_is_empty(promote: bool) -> None:
    for k in range(16, 6000, 80):
        for processors in (3, 132):
            _, shares = _tiles.split(128, 256, k, promote=promote, processors=processors)
            blocks = -(-k // 128)
            each = -(-blocks // shares)
            assert (shares - 1) * each < blocks <= shares * each


def test_a_deterministic_sum_is_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of("triton", "cpu")
    monkeypatch.setattr(triton, "split", lambda *_, **__: pytest.fail("split"))
    operands, out = integers((32, 32, 512), PAIRS[0]), torch.zeros(32, 32)
    torch.use_deterministic_algorithms(True)
    try:
        assert backend.accumulate is not None
        backend.accumulate(*operands, out=out)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(out.double(), product(operands))


# The contract


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation": "swiglu"}, "swiglu.*Known: gelu"),
        ({"keep": True}, "keep=True without an activation"),
        ({"out": False}, "leave nothing"),
        ({"target": "e3m4"}, "e3m4"),
        ({"target": "e4m3", "rowwise": False}, "at least one layout"),
    ],
)
def test_an_epilogue_that_makes_no_sense_says_so(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Epilogue(**fields)


@pytest.mark.parametrize("name", ["gluon", "reference", "triton"])
@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("everything", {"residual": None}, "residual=True in the epilogue"),
        ("gelu", {"residual": torch.ones(144, 272)}, "residual=False in the epilogue"),
        ("everything", {"residual": torch.ones(144, 271)}, r"residual \(144, 271\).*\(144, 272\)"),
        ("everything", {"scale": None}, "target='e4m3' in the epilogue"),
        ("gelu", {"scale": torch.ones(())}, "target=None in the epilogue"),
        ("everything", {"scale": torch.ones(1)}, r"scale torch.float32 \(1,\)"),
        ("everything", {"out_dtype": torch.float32}, "bfloat16 or float16"),
        ("gelu", {"bias": torch.ones(3)}, r"bias has shape \(3,\)"),
    ],
)
def test_tensors_that_do_not_fit_an_epilogue_are_named(
    name: str, kind: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(gemm.load(name), a_case(kind)._replace(**changes))
    with pytest.raises(ValueError, match="an amax is gathered of"):
        run(gemm.load(name), a_case("gelu"), amax=torch.zeros(()))


@pytest.mark.parametrize("name", ["gluon", "reference", "triton"])
@pytest.mark.parametrize("out", [torch.ones(32, 31), torch.ones(32, 32).bfloat16(), torch.ones(32, 64)[:, ::2]])
def test_a_product_is_added_to_a_float32_matrix(name: str, out: Tensor) -> None:
    accumulate = gemm.load(name).accumulate
    assert accumulate is not None
    with pytest.raises(ValueError, match="added to a contiguous float32"):
        accumulate(*integers((32, 32, 32), PAIRS[0]), out=out)


def test_a_backend_without_epilogues_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "INTERPRETED", False)
    monkeypatch.setattr(gluon, "INTERPRETED", False)
    plain = dataclasses.replace(a_problem((144, 272, 304), FORMATS[0], PAIRS[0], "cuda"), capability=(9, 0))
    for wanted in ({"epilogue": Epilogue(activation="gelu")}, {"accumulate": True}):
        for name in gemm.names():
            backend, reason = gemm.load(name), gemm.load(name).unsupported(dataclasses.replace(plain, **wanted))
            has = backend.fused is not None and backend.accumulate is not None
            assert has == (reason is None), f"{name}: {reason}"
            assert has or "epilogue" in str(reason)


@pytest.mark.parametrize(
    ("shape", "epilogue", "reason"),
    [
        ((144, 264, 32), Epilogue(target="e4m3"), "N 264"),
        ((24, 256, 32), Epilogue(target="e4m3", columnwise=True), "M 24"),
    ],
)
def test_fp8_that_tma_cannot_write_is_named(shape: tuple[int, int, int], epilogue: Epilogue, reason: str) -> None:
    operands = integers(shape, PAIRS[0])
    problem = dataclasses.replace(a_problem(shape, FORMATS[0], PAIRS[0], "cuda"), epilogue=epilogue)
    assert reason in str(triton.unsupported(problem))
    assert triton.unsupported(dataclasses.replace(problem, epilogue=Epilogue(activation="gelu"))) in (
        None, "needs an NVIDIA GPU (or TRITON_INTERPRET=1, set before Triton is imported)"
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"{reason} must be a multiple of 16.*pad with zeros"):
        gemm.load("triton").fused(*operands, out_dtype=torch.bfloat16, epilogue=epilogue, scale=torch.ones(()))


def test_compiles_without_graph_breaks() -> None:
    backend = backend_of("triton", "cpu")
    fused, accumulate = backend.fused, backend.accumulate
    assert fused is not None
    assert accumulate is not None
    for kind in ("gelu in FP8", "everything", "residual"):
        g = a_case(kind, shape=(32, 48, 64))
        torch.compiler.reset()  # its limit of recompilations is the whole process's
        amax, again = (None, None) if g.scale is None else torch.zeros(2)
        sums = torch.zeros(2, 32, 48)

        @torch.compile(fullgraph=True, backend="aot_eager")
        def call(*operands: Operand, given: Given, amax: Tensor | None, out: Tensor) -> Product:
            accumulate(*operands, out=out)
            return fused(*operands, **given.options(), amax=amax)

        compiled = call(*g.operands, given=g, amax=amax, out=sums[0])
        eager = run(triton.BACKEND, g, amax=again)
        accumulate(*g.operands, out=sums[1])
        check_product(compiled, g, floor=FLOAT32)
        assert compiled.out is None or torch.equal(compiled.out, eager.out)
        assert amax is again is None or torch.equal(amax, again)
        assert torch.equal(sums[0], sums[1])


def test_the_operators_are_well_formed() -> None:
    backend_of("triton", "cpu")
    operands, scale = integers((32, 48, 64), PAIRS[0]), torch.ones(())
    for target, amax in ((None, None), ("e4m3", torch.zeros(()))):
        tensors = None, None, None if target is None else scale, amax
        arguments = (
            *take_apart(*operands),
            *tensors,
            torch.bfloat16,
            True,
            "gelu",
            True,
            False,
            True,
            target,
            True,
            False,
        )
        torch.library.opcheck(torch.ops.te_bench.triton_gemm_fused, arguments, test_utils=OPCHECKS)
    arguments = (*take_apart(*operands), torch.zeros(32, 48), True, False)
    torch.library.opcheck(torch.ops.te_bench.triton_gemm_accumulate, arguments, test_utils=OPCHECKS)
