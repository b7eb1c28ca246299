"""Triton's GEMM: limits and tiles; what the compiler makes of it is in tests/kernels/test_compiled.py."""

import dataclasses
from typing import Any

import pytest
import torch
from gemm_checks import FORMATS, a_problem, integers, product

from te_bench.kernels.gemm.backends import triton
from te_bench.kernels.gemm.portable import tiles

H200 = dataclasses.replace(a_problem((128, 256, 512), FORMATS[0], ("tensor", "tensor"), "cuda"), capability=(9, 0))


def test_the_interpreter_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "INTERPRETED", True)
    assert triton.unsupported(dataclasses.replace(H200, device="cpu", capability=None)) is None


@pytest.mark.parametrize(("n", "k"), [(12, 32), (16, 24)])
def test_rows_that_tma_cannot_read_are_named(n: int, k: int) -> None:
    operands = integers((16, n, k), ("tensor", "tensor"))
    with pytest.raises(ValueError, match=f"N {n} and K {k}.*pad with zeros"):
        triton.BACKEND.forward(*operands, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_operands_that_tma_cannot_read_are_copied(device: str) -> None:
    if device == "cpu" and not triton.INTERPRETED:
        pytest.skip("on a CPU in the interpreter only")
    operands = integers((16, 136, 32), ("tensor", "tensor"), device)
    odd = []
    for x in operands:
        room = torch.zeros(x.data.numel() + 1, dtype=torch.uint8, device=device)
        room[1:] = x.data.view(torch.uint8).flatten()
        odd.append(x._replace(data=room[1:].view(x.data.dtype).view(x.data.shape)))
    out = triton.BACKEND.forward(*odd, out_dtype=torch.float32)
    assert torch.equal(out.double(), product(operands))


def test_the_tile_is_the_one_with_less_of_a_last_wave() -> None:
    def chosen(
        m: int, n: int, out_dtype: torch.dtype = torch.bfloat16, promote: bool = False, **how: Any
    ) -> tiles.Tile:
        return tiles.tile(m, n, out_dtype, promote=promote, processors=132, **how)

    assert chosen(8192, 12288) == tiles.LARGE
    assert chosen(8192, 12288, torch.float32) == tiles.LARGE_FLOAT32
    assert chosen(12288, 768) == tiles.SMALL
    assert chosen(128, 128) == tiles.SMALL
    assert chosen(8192, 12288, promote=True) == chosen(8192, 12288, kind="tile") == tiles.PRECISE


@pytest.mark.parametrize("fast_accum", [False, True])
def test_programs_take_several_tiles(fast_accum: bool) -> None:
    """Twenty tiles, more than a group of eight rows of them, for the interpreter's three programs."""
    if not triton.INTERPRETED:
        pytest.skip("on a CPU in the interpreter only")
    operands = integers((1200, 136, 16), ("row", "row"))
    out = triton.BACKEND.forward(*operands, out_dtype=torch.float32, fast_accum=fast_accum)
    assert torch.equal(out.double(), product(operands))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_large_tile_leaves_in_two_halves(device, out_dtype, monkeypatch):
    """The tile that only products larger than a test's are given."""
    if device == "cpu" and not triton.INTERPRETED:
        pytest.skip("on a CPU in the interpreter only")
    large = tiles.LARGE_FLOAT32 if out_dtype is torch.float32 else tiles.LARGE
    monkeypatch.setattr(triton, "tile", lambda *_, **__: large)
    for shape in [(140, 264, 144), (16, 136, 32)]:
        operands = integers(shape, ("row", "row"), device)
        out = triton.BACKEND.forward(*operands, out_dtype=out_dtype, fast_accum=True)
        assert torch.equal(out, product(operands).to(out_dtype))
