"""Norms in a residual stream, in one kernel: the reference's rounding and casts, bit for bit where sums allow it."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from kernel_checks import DEVICES, assert_as_good, assert_quantized_alike, codes, of_copy, supported
from torch import Tensor

from te_bench.kernels import norm
from te_bench.kernels.norm import Norm, Residual, residual_forward
from te_bench.kernels.norm.backends import reference
from te_bench.kernels.quantize import Quantized
from te_bench.kernels.quantize.backends import triton as quantizer

EPS = 1e-5
SHAPES = [(1, 7), (33, 100), (70, 300)]  # of odd height; whole tiles and parts of them
#: With a branch, a bias, a residual and 1 + weight, or without; of several tiles one of each.
CASES = [
    *itertools.product(SHAPES[:2], norm.KINDS, (False, True)),
    (SHAPES[2], "layernorm", True),
    (SHAPES[2], "rmsnorm", False),
]
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
REFERENCE = reference.RESIDUAL


def residual(name: str, device: str) -> Residual:
    problem = {"n": 768, "dtype": "bf16", "kind": "layernorm", "quantized": True}
    return supported(norm, name, device, **problem).residual


@dataclasses.dataclass
class Case:
    """A float32 stream, a bf16 branch and gradient, as under autocast; without branch and bias where not `rich`."""

    x: Tensor
    branch: Tensor | None
    dy: Tensor
    above: Tensor | None  # the gradient of the stream
    weight: Tensor
    bias: Tensor | None
    options: dict[str, Any]


def draw(
    shape: tuple[int, int], kind: str = "layernorm", rich: bool = True, device: str = "cpu", stream: Any = torch.float32
) -> Case:
    generator = torch.Generator().manual_seed(shape[0] * shape[1])
    x, branch, dy, above = (torch.randn(shape, generator=generator).to(device) for _ in range(4))
    weight, bias = (torch.randn(shape[1], generator=generator).to(device) for _ in range(2))
    return Case(
        (x * 2 + 0.5).to(stream),
        branch.to(BF16) if rich else None,
        dy.to(BF16),
        above.to(stream) if rich else None,
        weight,
        bias if rich and kind == "layernorm" else None,
        {"norm": Norm(EPS, rich, kind)},
    )


def looks(case: Case) -> dict[str, Tensor]:
    """Gathered from what is there already: amax 0.5, counts 1, sums 2."""
    device = case.x.device
    return {
        "amax": torch.tensor(0.5, device=device),
        "counts": torch.ones(3, dtype=torch.int64, device=device),
        "column_sum": torch.full((case.x.shape[1],), 2.0, device=device),
    }


def cast(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """At a scale that saturates and underflows."""
    scale = torch.tensor(torch.finfo(dtype).max / 2.9, device=case.x.device)
    return {"via": BF16, "scale": scale, "dtype": dtype}


Made = dict[str, Any]


def run(ours: Residual, case: Case, dtype: torch.dtype | None, **layouts: bool) -> Made:
    """Both directions; dtype None: rounded to bf16 alone. The backward is of the reference's total and statistics."""
    forth, back = looks(case), looks(case)
    layouts = layouts or {"rowwise": True, "columnwise": True}
    given = case.x, case.branch, case.weight, case.bias
    total, _, mean, rstd = REFERENCE.add_forward(*given, dtype=BF16, **case.options)
    backward = case.dy, total, case.weight, mean, rstd
    extra = {"residual": case.above, "biased": case.bias is not None, "column_sum": back["column_sum"], **case.options}
    if dtype is None:
        first = ours.add_forward(*given, dtype=BF16, amax=forth["amax"], **case.options)
        second = ours.backward_rounded(*backward, dtype=BF16, amax=back["amax"], **extra)
    else:
        seen, way = (forth["amax"], forth["counts"]), cast(case, dtype) | layouts
        first = ours.add_forward_quantized(*given, amax=seen[0], counts=seen[1], **way, **case.options)
        dx, copy, *sums = ours.backward_rounded(*backward, dtype=BF16, **extra)
        back_way = {name: way[name] for name in way if name != "via"} | {"amax": back["amax"], "counts": back["counts"]}
        quantise = (reference.quantizer if ours is REFERENCE else quantizer).quantize
        second = dx, quantise(copy, **back_way), *sums
    names = ("total", "y", "mean", "rstd"), ("dx", "g", "dweight", "dbias")
    return dict(zip(names[0], first, strict=True)) | dict(zip(names[1], second, strict=True)) | {
        f"{way} {name}": tensor for way, found in (("y", forth), ("g", back)) for name, tensor in found.items()
    }  # fmt: skip


def assert_alike(made: Made, exact: Made, case: Case) -> None:
    m = len(case.x)
    assert torch.equal(made["total"], exact["total"])
    for name in ("mean", "rstd", "dx"):
        if exact[name] is None:
            assert made[name] is None
            continue
        assert made[name].dtype == exact[name].dtype
        tiny = 1e-2 if exact[name].dtype is BF16 else 1e-5
        torch.testing.assert_close(made[name], exact[name], rtol=tiny, atol=tiny / 5)
    for name in ("y", "g"):
        if isinstance(exact[name], Quantized):
            assert_quantized_alike(made[name], exact[name])
        else:
            assert made[name].dtype == exact[name].dtype == BF16
            assert (made[name] != exact[name]).sum() <= max(1, exact[name].numel() // 500)
            torch.testing.assert_close(made[name], exact[name], rtol=2**-7, atol=1e-5)
        amax = exact[f"{name} amax"]
        torch.testing.assert_close(made[f"{name} amax"], amax, rtol=2**-7, atol=0)
        apart = (made[f"{name} counts"] - exact[f"{name} counts"]).abs()
        assert (apart <= max(1, case.x.numel() // 1000)).all()
        slack = (m * 2**-24 + 2**-8) * amax.item()
        torch.testing.assert_close(made[f"{name} column_sum"], exact[f"{name} column_sum"], rtol=1e-6, atol=slack)
    for name in ("dweight", "dbias"):
        if exact[name] is None:
            assert made[name] is None
        else:
            torch.testing.assert_close(made[name], exact[name], rtol=1e-5, atol=1e-5 * m)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [None, E4M3, E5M2], ids=str)
@pytest.mark.parametrize(("shape", "kind", "rich"), CASES)
def test_triton_is_the_reference(shape, kind, rich, dtype, device):
    case = draw(shape, kind, rich, device)
    assert_alike(run(residual("triton", device), case, dtype), run(REFERENCE, case, dtype), case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "kind", "rich"), CASES)
def test_wide_rows_by_two_kernels_are_the_reference(shape, kind, rich, device, monkeypatch):
    assert max(n for _, n in SHAPES) < residual_forward.WIDE
    monkeypatch.setattr(residual_forward, "WIDE", 1)
    test_triton_is_the_reference(shape, kind, rich, E4M3 if rich else E5M2, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("shape", [(12288, 768), (12289, 768), (4096, 1600), (300, 16384)], ids=str)
def test_triton_is_the_reference_at_size(shape: tuple[int, int], dtype: torch.dtype | None) -> None:
    case = draw(shape, device="cuda")
    assert_alike(run(residual("triton", "cuda"), case, dtype), run(REFERENCE, case, dtype), case)


@pytest.mark.parametrize(
    ("device", "shape"), [("cpu", (64, 768)), pytest.param("cuda", (12288, 768), marks=pytest.mark.gpu)]
)
def test_by_tiles_it_is_the_cast_of_whole_rows(device: str, shape: tuple[int, int]) -> None:
    """But for the order of sums: on an H200 3 of 9.4 million codes were their neighbours (2026-11-21)."""
    ours, case = residual("triton", device), draw(shape, device=device)
    given, way = (case.x, case.branch, case.weight, case.bias), cast(case, E4M3)
    tiles, rows = torch.zeros((), device=device), torch.zeros((), device=device)
    total, q, mean, rstd = ours.add_forward_quantized(
        *given, rowwise=True, columnwise=True, amax=tiles, **way, **case.options
    )
    wanted, y, mu, root = ours.add_forward(*given, dtype=BF16, amax=rows, **case.options)
    exact = quantizer.quantize(y, E4M3, scale=way["scale"], rowwise=True, columnwise=True)
    assert_quantized_alike(q, exact)
    assert (codes(q.data) != codes(exact.data)).sum() <= max(1, case.x.numel() // 100_000)
    assert torch.equal(total, wanted)
    assert torch.allclose(tiles, rows, rtol=2**-8, atol=0)
    assert mean is not None
    assert mu is not None
    torch.testing.assert_close(mean, mu, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rstd, root, rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_a_stream_in_bf16_and_one_layout_alone(name: str, device: str) -> None:
    ours, case = residual(name, device), draw((34, 140), device=device, stream=BF16)
    assert run(ours, case, None)["total"].dtype == BF16
    for height, rowwise in ((33, True), (34, False)):  # by tiles an odd height is cast row by row alone
        layouts = {"rowwise": rowwise, "columnwise": not rowwise}
        case = draw((height, 140), device=device, stream=BF16)
        made = run(ours, case, E4M3, **layouts)
        for q in (made["y"], made["g"]):
            assert [t is None for t in q[:4]] == [not rowwise] * 2 + [rowwise] * 2
        assert_alike(made, run(REFERENCE, case, E4M3, **layouts), case)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_the_sum_is_the_streams_own_addition(name: str) -> None:
    """Written out with torch's operators, in float64: the rounded total, or x, is normalised."""
    ours, case = residual(name, "cpu"), draw((33, 100))
    assert case.branch is not None
    total, y, mean, rstd = ours.add_forward(
        case.x, case.branch, case.weight, case.bias, dtype=torch.float32, **case.options
    )
    assert torch.equal(total, case.x + case.branch)
    assert case.bias is not None
    exact = torch.nn.functional.layer_norm(total.double(), (100,), case.weight.double() + 1, case.bias.double(), EPS)
    library = torch.nn.functional.layer_norm(total, (100,), case.weight + 1, case.bias, EPS)
    assert_as_good("y", y, library, exact)
    alone = ours.add_forward(case.x, None, case.weight, None, Norm(EPS), dtype=BF16)
    assert alone[0] is case.x
    assert y.dtype == torch.float32
    assert mean.dtype == rstd.dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stream", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_a_total_that_was_not_kept_is_added_up_again(name: str, stream: torch.dtype, device: str) -> None:
    """Bit for bit: the gradients of x and a branch are those of their rounded sum."""
    ours, case = residual(name, device), draw((34, 140), device=device, stream=stream)
    assert case.branch is not None
    total, _, mean, rstd = REFERENCE.add_forward(
        case.x, case.branch, case.weight, case.bias, dtype=BF16, **case.options
    )
    options = {"residual": case.above, "dtype": BF16, **case.options}
    kept = ours.backward_rounded(case.dy, total, case.weight, mean, rstd, **options)
    again = ours.backward_rounded(case.dy, case.x, case.weight, mean, rstd, branch=case.branch, **options)
    other = ours.backward_rounded(case.dy, case.x, case.weight, mean, rstd, **options)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True) if a is not None)
    assert not torch.equal(other[0], again[0])
    with pytest.raises(ValueError, match="of the same shape"):
        ours.backward_rounded(case.dy, case.x, case.weight, mean, rstd, **options | {"branch": case.branch[:1]})


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_bad_input(name: str) -> None:
    ours, case = residual(name, "cpu"), draw((4, 8))
    with pytest.raises(ValueError, match=r"\(4, 7\) of a stream \(4, 8\)"):
        ours.add_forward(case.x, case.x[:, :7], case.weight, None, Norm(EPS), dtype=BF16)
    with pytest.raises(ValueError, match="layout"):
        run(ours, case, E4M3, rowwise=False, columnwise=False)
    with pytest.raises(ValueError, match="rmsnorm none"):
        ours.add_forward(case.x, None, case.weight, case.bias, Norm(EPS, kind="rmsnorm"), dtype=BF16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("target", [None, E4M3], ids=str)
@pytest.mark.parametrize("kind", norm.KINDS)
def test_operators(kind: str, target: torch.dtype | None, device: str) -> None:
    residual("triton", device)
    case = draw((6, 16), kind, device=device)
    seen = looks(case)
    total, _, mean, rstd = REFERENCE.add_forward(
        case.x, case.branch, case.weight, case.bias, dtype=BF16, **case.options
    )
    way = (torch.tensor(9.0, device=device) if target else None, target, target is not None, False)
    counts = seen["counts"] if target else None
    forward = (case.x, case.branch, case.weight, case.bias, EPS, True, kind, BF16, *way, seen["amax"], counts)
    backward = (
        *(case.dy, total, case.weight, mean, rstd, True, case.above, case.bias is not None, BF16),
        *(seen["amax"], seen["column_sum"]),
    )
    made = torch.ops.te_bench
    for operator, arguments in ((made.norm_add_forward, forward), (made.norm_backward_rounded, backward)):
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [None, E4M3])
def test_strided_weights_and_biases(dtype: torch.dtype | None, device: str) -> None:
    ours, case = residual("triton", device), draw((33, 100), device=device)
    assert case.bias is not None
    strided = dataclasses.replace(case, weight=case.weight.repeat_interleave(2)[::2], bias=case.bias[:1].expand(100))
    assert_alike(run(ours, strided, dtype), run(REFERENCE, strided, dtype), strided)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "rich"), [(None, False), (E4M3, True)], ids=["rounded, plain", "FP8, rich"])
def test_compiles_without_graph_breaks(dtype: torch.dtype | None, rich: bool, device: str) -> None:
    ours, case = residual("triton", device), draw((17, 32), rich=rich, device=device)
    names = [field.name for field in dataclasses.fields(Residual)]
    compiled = {name: torch.compile(getattr(ours, name), fullgraph=True, backend="aot_eager") for name in names}
    assert_alike(run(Residual(**compiled), case, dtype), run(ours, case, dtype), case)


@pytest.mark.gpu
def test_sums_are_the_same_in_every_run() -> None:
    ours, case = residual("triton", "cuda"), draw((4096, 768), device="cuda")
    first = run(ours, case, E5M2)
    for _ in range(5):
        again = run(ours, case, E5M2)
        assert all(torch.equal(first[name], again[name]) for name in ("dx", "dweight", "dbias", "g column_sum"))


@pytest.mark.gpu
@pytest.mark.alone
def test_bandwidth() -> None:
    """Bytes an element, least: forward 4 + 2 read, 4 + 2 written; backward 2 + 4 + 4 read, 4 + 2 written, and the cast's."""
    ours, case = residual("triton", "cuda"), draw((12288, 768), device="cuda")
    options: dict[str, Any] = {"scale": torch.ones((), device="cuda"), "rowwise": True, "columnwise": True}
    amax, mean, rstd = (torch.zeros(n, device="cuda") for n in (1, 12288, 12288))

    def forward() -> object:
        return ours.add_forward_quantized(
            case.x, case.branch, case.weight, None, Norm(EPS), via=BF16, dtype=E4M3, amax=amax, **options
        )

    def backward() -> object:
        _, copy, *_ = ours.backward_rounded(
            case.dy, case.x, case.weight, mean, rstd, norm=Norm(EPS), dtype=BF16, residual=case.above, biased=False
        )
        return quantizer.quantize(copy, E5M2, amax=amax, **options)

    elements = case.x.numel()
    assert of_copy(forward, 12 * elements, case.x, "add, norm, FP8") > 0.65  # 0.81 (H200, 2026-11-21)
    assert of_copy(backward, 16 * elements, case.x, "norm backward, add, FP8") > 0.5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n", "kind"), [(96, "layernorm"), (96, "rmsnorm"), (2048, "rmsnorm"), (2100, "layernorm")])
def test_columns_are_made_again_by_the_statistics(n: int, kind: str, device: str) -> None:
    """Bit for bit, of narrow rows by one kernel and of wide ones by its second alone."""
    generator = torch.Generator().manual_seed(n)
    x, weight, bias = (torch.randn(*size, generator=generator).to(device) for size in ((34, n), (n,), (n,)))
    given = x, None, weight, bias if kind == "layernorm" else None
    options: dict[str, Any] = {"norm": Norm(EPS, kind=kind), "via": BF16, "scale": torch.tensor(100.0, device=device)}
    for ours in (REFERENCE, residual("triton", device)):
        amax = torch.zeros((), device=device)
        way = {"dtype": E4M3, **options}
        _, both, *statistics = ours.add_forward_quantized(*given, rowwise=True, columnwise=True, amax=amax, **way)
        _, again, *_ = ours.add_forward_quantized(
            *given, rowwise=False, columnwise=True, statistics=tuple(statistics), **way
        )
        assert again.data is None
        assert torch.equal(again.data_t.view(torch.uint8), both.data_t.view(torch.uint8))
        assert torch.equal(again.scale_inv_t, both.scale_inv_t)
