"""Gluon's GEMM: limits, room in shared memory; on a GPU, every plan. Who makes what is in test_gluon_barriers.py."""

import dataclasses

import pytest
import torch
from fused_checks import EPILOGUES, check_product, given
from gemm_checks import FAST, FORMATS, PROMOTED, a_problem, draw, integers, product, quantised

from te_bench.kernels.gemm import PAIRS, Epilogue
from te_bench.kernels.gemm.backends import gluon
from te_bench.kernels.gemm.hopper import plans
from te_bench.kernels.gemm.hopper.plans import Plan

H200 = dataclasses.replace(a_problem((128, 256, 512), FORMATS[0], PAIRS[0], "cuda"), capability=(9, 0))
FP32, BF16 = torch.float32, torch.bfloat16


def test_it_needs_gluon_and_no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon, "INTERPRETED", True)
    assert "no interpreter" in str(gluon.unsupported(H200))
    monkeypatch.setattr(gluon, "MISSING", "Triton 3.1 has no Gluon for Hopper: pip install")
    assert "pip install" in str(gluon.unsupported(H200))


def test_scales_in_blocks_are_refused_by_name() -> None:
    operands = integers((128, 128, 256), ("block", "tile"))
    with pytest.raises(ValueError, match="block x tile: the Gluon GEMM has none in blocks; take triton"):
        gluon.BACKEND.forward(*operands, out_dtype=BF16)


# Shared memory


@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("promote", [False, True])
@pytest.mark.parametrize("kind", EPILOGUES)
def test_every_epilogue_leaves_room_for_two_blocks_of_k(kind: str, promote: bool, out_dtype: torch.dtype) -> None:
    """Counted buffer by buffer, as the kernel allocates them."""
    e = EPILOGUES[kind]
    if e.target is not None and out_dtype is FP32:
        pytest.skip("FP8 is made of 2 bytes")
    residual = torch.empty(0, dtype=out_dtype) if e.residual else None
    p = plans.plan(out_dtype, promote=promote, epilogue=e, residual=residual)
    height, width = p.tile()
    of_a_part = p.height * p.width // p.parts
    buffers = [of_a_part * out_dtype.itemsize] * e.keep  # pre
    buffers += [of_a_part] * ((e.rowwise + e.columnwise) if e.target else 0)  # data, data_t
    if e.residual:
        buffers += [of_a_part * out_dtype.itemsize] * p.parts  # and out in its place
    elif e.out or (e.target and e.columnwise):
        buffers += [of_a_part * out_dtype.itemsize] * p.slots
    stages = p.stages(out_dtype, e, residual)
    assert 2 <= stages <= 6
    used = stages * (height + width) * 128 + 2 * sum(buffers)
    assert used <= 227 * 1024 - 1024
    assert stages == 6 or used + (height + width) * 128 > 227 * 1024 - 1024, "there is room for another"


def test_where_there_is_no_room_it_says_so() -> None:
    residual = torch.empty(0, dtype=FP32)
    everything = EPILOGUES["everything"]
    with pytest.raises(ValueError, match="give the residual in out's type"):
        plans.plan(BF16, promote=True, epilogue=everything, residual=torch.empty(0, dtype=torch.float64))
    assert plans.plan(BF16, promote=False, epilogue=Epilogue(residual=True), residual=residual) == plans.TURNS


#: TFLOP/s of a fast sum into (M, N), K = 12288 (the last 8192), by plan and whether tiles are shared (H200, 2026-11-21).
SUMS = {
    (3072, 768): {(plans.SUM, False): 863, (plans.SUM_HALVES, False): 1012, (plans.SUM, True): 720},
    (768, 3072): {(plans.SUM, False): 907, (plans.SUM_HALVES, False): 909, (plans.SUM, True): 736},
    (768, 768): {(plans.SUM, False): 585, (plans.SUM_HALVES, False): 543, (plans.SUM, True): 393},
    (2304, 768): {(plans.SUM, False): 805, (plans.SUM_HALVES, False): 949, (plans.SUM, True): 1042},
    (50304, 768): {(plans.SUM, False): 824, (plans.SUM_HALVES, False): 1235, (plans.SUM, True): 1294},
    (4096, 16384): {(plans.SUM, False): 911, (plans.SUM_HALVES, False): 1013, (plans.SUM, True): 1274},
}


@pytest.mark.parametrize("shape", SUMS, ids=str)
def test_a_sum_goes_by_the_fastest_plan_measured(shape: tuple[int, int]) -> None:
    measured = SUMS[shape]
    assert plans.plan_sum(*shape, promote=False, whole=False, processors=132) == max(
        measured, key=lambda p: measured[p]
    )
    assert plans.plan_sum(*shape, promote=False, whole=True, processors=132) == (plans.SUM, True)
    for whole in (False, True):
        assert plans.plan_sum(*shape, promote=True, whole=whole, processors=132) == (plans.SUM_PROMOTED, whole)


# On a GPU

PLANS = {
    "turns": plans.TURNS,
    "turns, wide": Plan(64, 256, True, 4),
    "halves": plans.HALVES,
    "halves, square": Plan(128, 128, False, 2),
}
# The last has several tiles for each warpgroup: a barrier's second phase is where it goes wrong.
RAGGED = [(128, 128, 128), (16, 136, 32), (1200, 136, 16), (3008, 528, 1040), (20000, 520, 272)]


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS[:2], ids="-".join)
@pytest.mark.parametrize("shape", RAGGED, ids=str)
@pytest.mark.parametrize("name", [*PLANS, "promoted", "promoted, in turns"])
def test_every_plan_is_exact_where_sums_are(name: str, shape: tuple[int, int, int], pair: tuple[str, str]) -> None:
    p = PLANS.get(name) or plans.PROMOTED._replace(turns=name != "promoted")
    operands = integers(shape, pair, "cuda")
    bias = torch.arange(-2.0, shape[1] - 2, device="cuda") % 7
    out = gluon.launch(*operands, out_dtype=BF16, fast_accum=name in PLANS, bias=bias, chosen=p).out
    assert out is not None
    assert torch.equal(out, product(operands, bias).to(BF16))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(144, 272, 304), (12048, 528, 1040)], ids=str)
@pytest.mark.parametrize("kind", EPILOGUES)
@pytest.mark.parametrize("name", [*PLANS, "promoted"])
def test_every_plan_s_epilogues(name: str, kind: str, shape: tuple[int, int, int]) -> None:
    """Several tiles a warpgroup, the last of them ragged."""
    p = PLANS.get(name, plans.PROMOTED)
    g = given(quantised(*draw(shape, "cuda"), FORMATS[0], PAIRS[0]), EPILOGUES[kind], BF16)
    if p.stages(BF16, g.epilogue, g.residual) < 2:
        pytest.skip("no room")
    amax = None if g.scale is None else torch.zeros((), device="cuda")
    made = gluon.launch(*g.operands, **g.options(), fast_accum=name in PLANS, amax=amax, chosen=p)
    check_product(made, g, floor=FAST if name in PLANS else PROMOTED, amax=amax)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(128, 128, 128), (768, 776, 2048), (768, 768, 12288), (3072, 768, 4096)], ids=str)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("p", [plans.SUM, plans.SUM_HALVES], ids=["turns", "halves"])
def test_every_plan_s_sums(p: Plan, whole: bool, shape: tuple[int, int, int]) -> None:
    operands, out = integers(shape, PAIRS[0], "cuda"), torch.ones(shape[:2], device="cuda")
    for times in (1, 2):
        gluon.launch_accumulate(*operands, out, True, whole, chosen=p)
        assert torch.equal(out.double(), 1 + times * product(operands))
