"""cuBLASLt's GEMM: the padding and layouts around it, which a CPU can check."""

from typing import Any

import pytest
import torch
from gemm_checks import OPCHECKS, Operands, integers, layout, product
from torch import Tensor

from te_bench.kernels import architecture
from te_bench.kernels.gemm import PAIRS
from te_bench.kernels.gemm.backends import reference, scaled_mm
from te_bench.kernels.gemm.operands import take_apart
from te_bench.kernels.quantize import STRIP, Layout, Operand
from te_bench.kernels.quantize.backends import triton as quantizer

SHAPES = [(1, 3, 5), (17, 64, 96), (130, 257, 300), (130, 264, 304), (48, 128, 512), (129, 16, 128)]
#: Neither N nor K is a multiple of 16, both are, and N alone is none. torch makes a kernel of each shape, for half a second.
UNLIKE = [(1, 3, 5), (17, 64, 96), (34, 72, 112)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

OF_ONE_SCALE = torch._scaled_mm


def on_a_cpu(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """torch._scaled_mm, whose scales per row torch 2.11 has on a GPU alone."""
    if a_scale.dim() == 0 or torch.__version__ >= (2, 13):
        return OF_ONE_SCALE(a, b, a_scale, b_scale, bias, *rest)
    assert (a_scale.shape, b_scale.shape) == ((a.shape[0], 1), (1, b.shape[1]))
    one = torch.ones(())
    out = OF_ONE_SCALE(a, b, one, one, None, None, torch.float32, rest[2]) * a_scale * b_scale
    return (out if bias is None else out + bias).to(rest[1])


@pytest.mark.parametrize("pair", [("tensor", "tensor"), ("row", "row")], ids="-".join)
@pytest.mark.parametrize("shape", UNLIKE, ids=str)
def test_padding_is_exact(shape: tuple[int, int, int], pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has the operator on a CPU too, with the same demands on N and K."""
    monkeypatch.setattr(torch, "_scaled_mm", on_a_cpu)
    operands = integers(shape, pair)
    bias = torch.arange(shape[1]) % 64 - 2.0
    cases = [(torch.float32, None), (torch.float32, bias), (torch.float16, None), (torch.bfloat16, bias)]
    for out_dtype, added in [*cases, (torch.bfloat16, bias.bfloat16())]:
        out = scaled_mm.forward(*operands, out_dtype=out_dtype, bias=added)
        # PyTorch's CPU kernel rounds before it adds the bias, so that only exact sums are compared.
        if out_dtype is torch.float32 or added is None:
            assert torch.equal(out, product(operands, added).to(out_dtype))
        assert out.shape == shape[:2]
        assert out.is_contiguous()


@pytest.mark.parametrize("shape", [(1,), (17, 1), (17, 64)])
def test_a_bias_that_torch_would_broadcast_is_refused(shape: tuple[int, ...]) -> None:
    operands = integers((17, 64, 96), ("tensor", "tensor"))
    with pytest.raises(ValueError, match=r"bias has shape .*: it must be \(64,\)"):
        scaled_mm.forward(*operands, out_dtype=torch.float32, bias=torch.ones(shape))


@pytest.mark.parametrize("shape", UNLIKE[::2], ids=str)
def test_row_scales_leave_in_every_dtype_where_they_are_cutlasss(shape, monkeypatch):
    """Ada's and Blackwell's kernel of row scales leaves in bfloat16 alone (pytorch/pytorch, ScaledBlas.cpp)."""

    def cutlass(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        assert rest[1] is torch.bfloat16 or a_scale.dim() == b_scale.dim() == 0
        return on_a_cpu(a, b, a_scale, b_scale, bias, *rest)

    monkeypatch.setattr(torch, "_scaled_mm", cutlass)
    monkeypatch.setattr(architecture, "of_device", lambda _: architecture.ARCHITECTURES[8, 9])
    operands = integers(shape, ("row", "row"))
    bias = torch.arange(shape[1]) % 64 - 2.0
    for out_dtype in DTYPES:
        out = scaled_mm.forward(*operands, out_dtype=out_dtype)
        assert torch.equal(out, product(operands).to(out_dtype))
        if out_dtype is not torch.bfloat16:
            out = scaled_mm.forward(*operands, out_dtype=out_dtype, bias=bias)
            assert torch.equal(out, product(operands, bias).to(out_dtype))
        assert out.is_contiguous()


def cublaslt(
    a: Tensor,
    b: Tensor,
    a_scale: list[Tensor],
    a_recipe: list[int],
    a_swizzle: list[int],
    b_scale: list[Tensor],
    b_recipe: list[int],
    b_swizzle: list[int],
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """torch._scaled_mm_v2 on Hopper, from its demands: pytorch/pytorch#166752 and cuBLAS, "Scaling factors layouts"."""
    (m, k), n = a.shape, b.shape[1]
    assert a.is_contiguous()
    assert b.stride() == (1, k)
    assert n % 16 == 0
    assert k % 128 == 0
    assert bias is None or (out_dtype != torch.float32 and bias.dtype == out_dtype and bias.shape == (n,))
    assert a_swizzle == b_swizzle == []

    def read(scale: Tensor, recipe: int, rows: int) -> tuple[Tensor, Layout]:
        blocks = k // 128
        if recipe == torch.nn.functional.ScalingType.BlockWise1x128.value:
            assert scale.shape == (rows, blocks)
            assert rows % 4 == 0
            assert scale.stride() == (
                1,
                rows,
            )  # torch 2.11 takes (1, 1) for one block of K, but of both operands or none
            return scale.contiguous(), layout("e4m3", "block")
        rounded = -(-blocks // 4) * 4
        assert recipe == torch.nn.functional.ScalingType.BlockWise128x128.value
        assert scale.shape == (rounded, -(-rows // 128))
        assert scale.stride() == (1, rounded)
        return scale[:blocks].t().contiguous(), layout("e4m3", "tile")

    both = Operand(a, *read(a_scale[0], a_recipe[0], m)), Operand(b.t(), *read(b_scale[0], b_recipe[0], n))
    return reference.forward(*both, out_dtype=out_dtype, bias=bias)


@pytest.mark.parametrize("pair", PAIRS[2:], ids="-".join)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 128, 1024)], ids=str)
def test_block_scales_arrive_in_cublaslt_s_layouts(shape, pair, monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm_v2", cublaslt)
    operands = integers(shape, pair)
    bias = torch.arange(shape[1]) % 64 - 2.0
    for out_dtype in DTYPES:
        for added in (None, bias):
            out = scaled_mm.forward(*operands, out_dtype=out_dtype, bias=added)
            assert torch.equal(out, product(operands, added).to(out_dtype))
            assert out.is_contiguous()


def test_scales_need_not_be_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight's 128 x 128 scales are shared by both of its layouts, as a transpose."""
    monkeypatch.setattr(torch, "_scaled_mm_v2", cublaslt)
    a, b = integers((48, 256, 512), ("block", "tile"))
    transposed = b._replace(scale_inv=b.scale_inv.t().contiguous().t())
    out = scaled_mm.forward(a, transposed, out_dtype=torch.float32)
    assert torch.equal(out.double(), product(Operands(a, b)))


@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[3]], ids="-".join)
def test_compiles_without_graph_breaks(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm_v2", cublaslt)
    shape = (17, 3, 300)
    operands = integers(shape, pair)
    bias = torch.ones(shape[1])

    torch.compiler.reset()  # its limit of recompilations is the whole process's

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(*operands: Operand) -> Tensor:
        return scaled_mm.forward(*operands, out_dtype=torch.float32, bias=bias) * 2

    assert torch.equal(call(*operands).double(), product(operands, bias) * 2)


def test_the_operator_is_well_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm_v2", cublaslt)
    operands = integers((18, 40, 300), ("block", "tile"))
    for bias in (None, torch.ones(40)):
        arguments = (*take_apart(*operands), torch.bfloat16, False, bias)
        torch.library.opcheck(torch.ops.te_bench.scaled_mm, arguments, test_utils=OPCHECKS)


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_the_library_prints_nothing(pair: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    """One version of torch printed the shapes of 128 x 128 by 1 x 128 products."""
    scaled_mm.forward(*integers((256, 256, 256), pair, "cuda"), out_dtype=torch.bfloat16)
    torch.cuda.synchronize()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("columnwise", [False, True])
def test_block_scales_lie_as_cublaslt_reads_them(columnwise: bool) -> None:
    """Else every product begins with a transpose: 90 us of a pass of the quickstart's layer (H200)."""
    q = quantizer.quantize(torch.randn(256, 384), torch.float8_e4m3fn, STRIP, rowwise=True, columnwise=True)
    scales, rows = (q.scale_inv_t, 384) if columnwise else (q.scale_inv, 256)
    assert scales.shape == (rows, 2 if columnwise else 3)
    given = scaled_mm._layout(scales, rows, "block")
    assert given.data_ptr() == scales.data_ptr()
    assert given.stride() == (1, rows)
