"""Triton's GEMM: limits, tiles, the operator, and what the compiler makes of the kernels (no GPU needed for that)."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gemm_checks import FORMATS, a_problem, integers, product

from te_bench.kernels.gemm import PAIRS, triton

H200 = dataclasses.replace(a_problem((128, 256, 512), FORMATS[0], ("tensor", "tensor"), "cuda"), capability=(9, 0))
# Not test_schema, which multiplies FP8 tensors.
CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "NVIDIA GPU"),
        ({"capability": (8, 9)}, "8.9 < 9.0"),
        ({"k": 24}, "K 24"),
        ({"n": 12}, "N 12"),
        ({"a_granularity": "tile", "b_granularity": "tile"}, "tile x tile"),
    ],
)
def test_what_it_cannot_do_it_says(changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "INTERPRETED", False)
    assert triton.unsupported(H200) is None
    assert triton.unsupported(dataclasses.replace(H200, a_dtype="e5m2", b_dtype="e5m2", m=1)) is None
    assert reason in str(triton.unsupported(dataclasses.replace(H200, **changes)))


def test_the_interpreter_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "INTERPRETED", True)
    assert triton.unsupported(dataclasses.replace(H200, device="cpu", capability=None)) is None


@pytest.mark.parametrize(("n", "k"), [(12, 32), (16, 24)])
def test_rows_that_tma_cannot_read_are_named(n: int, k: int) -> None:
    operands = integers((16, n, k), ("tensor", "tensor"))
    with pytest.raises(ValueError, match=f"N {n} and K {k}.*pad with zeros"):
        triton.forward(*operands, out_dtype=torch.bfloat16)


def test_the_tile_is_the_one_with_less_of_a_last_wave() -> None:
    def chosen(m: int, n: int, out_dtype: torch.dtype = torch.bfloat16, promote: bool = False) -> triton.Tile:
        return triton.tile(m, n, out_dtype, promote=promote, processors=132)

    assert chosen(8192, 12288) == triton.LARGE
    assert chosen(8192, 12288, torch.float32) == triton.LARGE_FLOAT32
    assert chosen(12288, 768) == triton.SMALL
    assert chosen(128, 128) == triton.SMALL
    assert chosen(8192, 12288, promote=True) == triton.PRECISE


def test_the_operator_is_well_formed() -> None:
    if not triton.INTERPRETED:
        pytest.skip("on a CPU in the interpreter only")
    for pair in (PAIRS[0], PAIRS[3]):
        operands = integers((18, 40, 48), pair)
        for bias in (None, torch.ones(40)):
            torch.library.opcheck(
                torch.ops.te_bench.triton_gemm, (*operands, bias, torch.float32, True), test_utils=CHECKS
            )


@pytest.mark.parametrize("fast_accum", [False, True])
def test_programs_take_several_tiles(fast_accum: bool) -> None:
    """Twenty tiles, more than a group of eight rows of them, for the interpreter's three programs."""
    if not triton.INTERPRETED:
        pytest.skip("on a CPU in the interpreter only")
    operands = integers((1200, 136, 16), ("row", "row"))
    out = triton.forward(*operands, out_dtype=torch.float32, fast_accum=fast_accum)
    assert torch.equal(out.double(), product(operands))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_large_tile_leaves_in_two_halves(
    device: str, out_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tile that only products larger than a test's are given."""
    if device == "cpu" and not triton.INTERPRETED:
        pytest.skip("on a CPU in the interpreter only")
    large = triton.LARGE_FLOAT32 if out_dtype is torch.float32 else triton.LARGE
    monkeypatch.setattr(triton, "tile", lambda *_, **__: large)
    for shape in [(140, 264, 144), (16, 136, 32)]:
        operands = integers(shape, ("row", "row"), device)
        out = triton.forward(*operands, out_dtype=out_dtype, fast_accum=True)
        assert torch.equal(out, product(operands).to(out_dtype))


COMPILE = """
import re, subprocess, sys
from pathlib import Path
import triton as t
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from te_bench.kernels.gemm import _kernels as kernels
from te_bench.kernels.gemm import triton as ours

def spilled(kernel, tile, out, formats=("fp8e4nv", "fp8e4nv"), **flags):
    signature = {
        "a_desc": f"tensordesc<{formats[0]}[{tile.m}, 128]>",
        "b_desc": f"tensordesc<{formats[1]}[{tile.n}, 128]>",
        "d_desc": f"tensordesc<{out}[{tile.m}, {tile.n // tile.halves}]>",
        **dict.fromkeys(("a_scale_inv", "b_scale_inv", "bias"), "*fp32"),
        **dict.fromkeys("MNK", "i32"),
    }
    constants = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": 128, "GROUP_M": 8, "PROGRAMS": 132, "BIAS": True, **flags}
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants,
                       {(i,): [["tt.divisibility", 16]] for i in range(3, 9)})
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    compiled = t.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assembly = Path(sys.argv[1]) / "kernel.ptx"
    assembly.write_text(compiled.asm["ptx"])
    ptxas = Path(triton.backends.nvidia.__file__).parent / "bin" / "ptxas"
    log = subprocess.run([ptxas, "-v", "-arch=sm_90a", assembly, "-o", "/dev/null"],
                         capture_output=True, text=True, check=True)
    line = f"{kernel.fn.__name__} {tile} {out} {formats} {flags}: {compiled.metadata.shared} bytes shared; {log.stderr}"
    assert "wgmma.mma_async" in compiled.asm["ptx"], "no tensor cores: " + line
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"], "no TMA: " + line
    assert compiled.metadata.shared <= 232448, "more than 227 KB of shared memory: " + line
    assert re.findall(r"(\\d+) bytes spill", log.stderr) == ["0", "0"], "spills: " + line
    assert "C7510" not in log.stderr and "C7511" not in log.stderr, "wgmma serialised: " + line

for row in (False, True):
    spilled(kernels.scaled_kernel, ours.LARGE, "bf16", HALVES=2, ROW=row, IMPRECISE=None)
    spilled(kernels.scaled_kernel, ours.SMALL, "bf16", HALVES=1, ROW=row, IMPRECISE=None)
    spilled(kernels.scaled_kernel, ours.PRECISE, "bf16", HALVES=1, ROW=row, IMPRECISE=128)
    spilled(kernels.scaled_kernel, ours.LARGE_FLOAT32, "fp32", HALVES=2, ROW=row, IMPRECISE=None)
spilled(kernels.scaled_kernel, ours.PRECISE, "fp32", ("fp8e5", "fp8e4nv"), HALVES=1, ROW=True, IMPRECISE=128)
for a, b in ((False, False), (False, True), (True, False)):
    spilled(kernels.block_kernel, ours.PRECISE, "fp32", A_TILE=a, B_TILE=b)
"""


@pytest.mark.slow
def test_kernels_compile_for_hopper_without_spills(tmp_path: Path) -> None:
    """With tensor cores, TMA and shared memory that fits; needs no GPU, but a Triton that is not interpreting."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
