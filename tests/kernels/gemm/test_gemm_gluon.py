"""Gluon's GEMM: limits, room in shared memory, who makes which stretch of K; on a GPU, every plan."""

import dataclasses
import itertools
import types
from typing import Any

import pytest
import torch
from fused_checks import EPILOGUES, check_product, given
from gemm_checks import FAST, FORMATS, PROMOTED, a_problem, draw, integers, layout, product, quantised

from te_bench.kernels.gemm import PAIRS, Epilogue
from te_bench.kernels.gemm.backends import gluon
from te_bench.kernels.gemm.hopper import kernels, plans
from te_bench.kernels.gemm.hopper.plans import Plan

H200 = dataclasses.replace(a_problem((128, 256, 512), FORMATS[0], PAIRS[0], "cuda"), capability=(9, 0))
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "NVIDIA GPU"),
        ({"capability": (8, 9)}, "8.9 is not 9.0"),
        ({"capability": (10, 0)}, "10.0 is not 9.0"),
        ({"k": 24}, "K 24"),
        ({"n": 12}, "N 12"),
        ({"a": layout("e4m3", "block"), "b": layout("e4m3", "tile")}, "block x tile"),
        ({"n": 264, "epilogue": Epilogue(target="e4m3")}, "N 264"),
    ],
)
def test_what_it_cannot_do_it_says(changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon, "INTERPRETED", False)
    assert gluon.unsupported(H200) is None
    assert gluon.unsupported(dataclasses.replace(H200, a=layout("e4m3", "row"), b=layout("e4m3", "row"))) is None
    assert reason in str(gluon.unsupported(dataclasses.replace(H200, **changes)))


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
    assert plans.sums(*shape, promote=False, whole=False, processors=132) == max(measured, key=lambda p: measured[p])
    assert plans.sums(*shape, promote=False, whole=True, processors=132) == (plans.SUM, True)
    for whole in (False, True):
        assert plans.sums(*shape, promote=True, whole=whole, processors=132) == (plans.SUM_PROMOTED, whole)


# Who makes what: the kernels' own functions, run as Python with what they launch replaced

Stretch = tuple[int, int, int, int]  # first step in the ring, length, row, column


def stand_in(monkeypatch: pytest.MonkeyPatch, program: int, programs: int, loads: list[Any]) -> Any:
    k = kernels
    language = types.SimpleNamespace(
        cdiv=lambda x, y: -(-x // y), program_id=lambda _: program, num_programs=lambda _: programs, static_range=range,
        NVMMADistributedLayout=lambda *_: None, zeros=lambda *_: None, int16=None,
    )  # fmt: skip
    copies = types.SimpleNamespace(
        async_copy_global_to_shared=lambda desc, at, *_: loads.append((desc.name, at)), store_wait=lambda _: None
    )
    for name in ("_tile_origin", "_steps_of_program", "_steps_in_tile", "_next_position"):
        monkeypatch.setattr(k, name, getattr(getattr(k, name), "fn", getattr(k, name)))
    monkeypatch.setattr(k, "gl", language)
    monkeypatch.setattr(k, "tma", copies)
    monkeypatch.setattr(k, "mbarrier", types.SimpleNamespace(wait=lambda *_: None, expect=lambda *_: None))
    monkeypatch.setattr(k, "WARPGROUPS", 2)
    monkeypatch.setattr(k, "_await_turn", lambda *_: None)  # test_gluon_barriers.py is about who waits
    return k


def fetched(k: Any, shape: tuple[int, int, int], p: Plan, stream: bool, loads: list[Any]) -> list[tuple[int, int, int]]:
    """Row, column and k of what the program fetches, block after block."""
    place = types.SimpleNamespace(index=lambda _: None)
    a, b = (
        types.SimpleNamespace(name=name, block_type=types.SimpleNamespace(shape=[rows, 128], nbytes=rows * 128))
        for name, rows in (("a", p.height), ("b", p.width))
    )
    k._fetch.fn(a, b, place, place, place, place, *shape, False, p.turns, 4, 8, stream)
    boxes, blocks = 1 if p.turns else 2, []
    for index in range(0, len(loads), boxes + 1):
        *of_a, (name, (column, depth)) = loads[index : index + boxes + 1]
        assert (name, {kind for kind, _ in of_a}, {at[1] for _, at in of_a}) == ("b", {"a"}, {depth})
        assert [at[0] for _, at in of_a] == [of_a[0][1][0] + box * p.height for box in range(boxes)]
        blocks.append((of_a[0][1][0], column, depth))
    return blocks


def made(
    k: Any, shape: tuple[int, int, int], p: Plan, adds: bool, stream: bool, who: int, monkeypatch: pytest.MonkeyPatch
) -> list[Stretch]:
    """What a warpgroup multiplies, and where it leaves that."""
    steps: list[tuple[int, int]] = []
    places: list[tuple[int, int]] = []
    monkeypatch.setattr(k, "_product", lambda *args: steps.append((args[6], args[7])))
    monkeypatch.setattr(k, "add_by_parts", lambda *args: places.append((args[5], args[6])))
    monkeypatch.setattr(k, "store_by_parts", lambda *args: places.append((args[9], args[10])))
    tile = "tensor", False, p.height, p.width, 128, p.parts, p.slots, p.turns, 4, 8
    operand = types.SimpleNamespace(dtype=types.SimpleNamespace(primitive_bitwidth=8))
    if adds:
        k._multiply_and_add.fn(operand, None, None, None, None, None, None, None, *shape, who, *tile, stream)
    else:
        nothing = (None,) * 5
        k._multiply.fn(
            operand, None, None, None, None, nothing, nothing, None, None, None, None, *shape, who,
            tile[0], False, tile[1], None, False, None, 1, False, *tile[2:],
        )  # fmt: skip
    return [(*step, *place) for step, place in zip(steps, places, strict=True)]


@pytest.mark.parametrize("p", [plans.TURNS, plans.HALVES, plans.PROMOTED], ids=["turns", "halves", "promoted"])
@pytest.mark.parametrize(("adds", "stream"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("shape", [(128, 128, 128), (3072, 768, 1536), (1200, 136, 16), (768, 776, 2048)], ids=str)
@pytest.mark.parametrize("programs", [1, 5, 6])
def test_every_block_of_every_tile_is_multiplied_once_by_who_expects_it(
    programs: int, shape: tuple[int, int, int], adds: bool, stream: bool, p: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    height, width = p.tile()
    tiles = [(row, column) for row in range(0, shape[0], height) for column in range(0, shape[1], width)]
    wanted = {(*tile, k) for tile in tiles for k in range(0, shape[2], 128)}
    programs = min(programs, len(wanted) if stream else len(tiles))
    seen: list[tuple[int, int, int]] = []
    counts = []
    for program in range(programs):
        loads: list[Any] = []
        k = stand_in(monkeypatch, program, programs, loads)
        blocks = fetched(k, shape, p, stream, loads)
        groups = [made(k, shape, p, adds, stream, who, monkeypatch) for who in (0, 1)]
        for who, stretches in enumerate(groups):
            for first, length, row, column in stretches:
                origin = row - (0 if p.turns else who * p.height)
                assert {block[:2] for block in blocks[first : first + length]} == {(origin, column)}
                assert length > 0
        if p.turns:
            merged = sorted(groups[0] + groups[1])
            assert merged[::2] == groups[0], "not in turns"
        else:
            merged = groups[0]
            assert [stretch[:2] for stretch in groups[1]] == [stretch[:2] for stretch in merged]
        ends = [0, *itertools.accumulate(stretch[1] for stretch in merged)]
        assert [stretch[0] for stretch in merged] == ends[:-1]
        assert ends[-1] == len(blocks)
        seen += blocks
        counts.append(len(blocks))
    assert len(seen) == len(set(seen)) == len(wanted)
    assert set(seen) == wanted
    if stream:
        assert max(counts) - min(counts) <= 1


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
