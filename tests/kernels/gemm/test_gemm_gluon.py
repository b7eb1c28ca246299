"""Gluon's GEMM: limits, room in shared memory; on a GPU, many tiles. Who makes what is in test_gluon_barriers.py."""

import dataclasses

import pytest
import torch
from gemm_checks import FORMATS, a_problem, integers, product

from te_bench.kernels.gemm import PAIRS
from te_bench.kernels.gemm.backends import gluon
from te_bench.kernels.gemm.hopper import plans

H200 = dataclasses.replace(a_problem((128, 256, 512), FORMATS[0], PAIRS[0], "cuda"), capability=(9, 0))
FP32, BF16 = torch.float32, torch.bfloat16


def test_it_needs_a_gpu_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon, "INTERPRETED", True)
    assert "no interpreter" in str(gluon.unsupported(H200))


def test_scales_in_blocks_are_refused_by_name() -> None:
    operands = integers((128, 128, 256), ("block", "tile"))
    with pytest.raises(ValueError, match="block x tile: the Gluon GEMM has none in blocks; take triton"):
        gluon.BACKEND.forward(*operands, out_dtype=BF16)


@pytest.mark.parametrize(
    ("p", "itemsize", "stages"),
    [
        (plans.plan(BF16, promote=False), 2, 6),
        (plans.plan(FP32, promote=False), 4, 6),
        (plans.plan(BF16, promote=True), 2, 4),
        (plans.plan(FP32, promote=True), 4, 4),
        (plans.ACTIVATED, 4, 5),
        (plans.GRADIENT, 2, 5),
    ],
)
def test_blocks_of_k_fill_the_shared_memory(p: plans.Tiling, itemsize: int, stages: int) -> None:
    """227 KB but 1 for barriers; what leaves has so many bytes an element."""
    height, width = p.tile()
    parts = 2 * p.height * p.width // p.parts * p.slots * itemsize
    assert p.stages(itemsize) == stages
    assert parts + stages * (height + width) * 128 <= 226 * 1024
    assert stages == 6 or parts + (stages + 1) * (height + width) * 128 > 226 * 1024, "there is room for another"


# The last has several tiles for each warpgroup: a barrier's second phase is where it goes wrong.
RAGGED = [(128, 128, 128), (16, 136, 32), (1200, 136, 16), (3008, 528, 1040), (20000, 520, 272)]


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS[:2], ids="-".join)
@pytest.mark.parametrize("shape", RAGGED, ids=str)
@pytest.mark.parametrize("fast_accum", [False, True])
def test_exact_where_sums_are(fast_accum: bool, shape: tuple[int, int, int], pair: tuple[str, str]) -> None:
    operands = integers(shape, pair, "cuda")
    bias = torch.arange(-2.0, shape[1] - 2, device="cuda") % 7
    out = gluon.BACKEND.forward(*operands, out_dtype=BF16, fast_accum=fast_accum, bias=bias)
    assert torch.equal(out, product(operands, bias).to(BF16))
