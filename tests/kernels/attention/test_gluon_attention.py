"""Gluon's attention beyond the contract: limits, what TMA reads, which kernels; on a GPU, NaN, repeats, operators."""

import contextlib
import dataclasses
import functools
import itertools
import math
import sys
import types
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from test_contract import a_problem, assert_as_good_as_manual, by_definition, draw, gradients, largest, run, supported
from torch._subclasses.fake_tensor import FakeTensorMode

from te_bench.kernels import architecture
from te_bench.kernels.attention.autograd import without_masks
from te_bench.kernels.attention.backends import gluon
from te_bench.kernels.attention.hopper import launch
from te_bench.kernels.attention.hopper import parts as _gluon_parts
from te_bench.kernels.attention.hopper.launch import Tiling

H200 = dataclasses.replace(a_problem(), capability=(9, 0))
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "NVIDIA GPU"),
        ({"capability": (8, 9)}, "8.9 is not 9.0"),
        ({"capability": (10, 0)}, "10.0 is not 9.0"),
        ({"dtype": "fp32"}, "fp32"),
        ({"head_dim": 96}, "head_dim 96"),
        ({"head_dim": 256}, "head_dim 256"),
        ({"v_head_dim": 128}, "of v 128"),
        ({"mask": True, "causal": False}, "take triton"),
        ({"window": (256, 0)}, "window"),
        ({"dropout": 0.1}, "dropout 0.1"),
    ],
)
def test_what_it_cannot_do_it_says(changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon, "INTERPRETED", False)
    for fine in ({}, {"causal": False}, {"head_dim": 128, "kv_heads": 4}, {"kv_length": 70, "dtype": "fp16"}):
        assert gluon.unsupported(dataclasses.replace(H200, **fine)) is None
    assert reason in str(gluon.unsupported(dataclasses.replace(H200, **changes)))


def test_it_needs_a_gpu_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon, "INTERPRETED", True)
    assert "no interpreter" in str(gluon.unsupported(H200))


def test_what_it_cannot_take_it_refuses_by_name() -> None:
    q = torch.empty(1, 2, 8, 64, dtype=BF16)
    with pytest.raises(ValueError, match="on cpu: 64 or 128, on the GPU"):
        gluon.BACKEND.forward(q, q, q, causal=True, scale=1.0)
    with pytest.raises(ValueError, match="float32: four dimensions"):
        gluon.BACKEND.forward(q.float(), q, q, causal=True, scale=1.0)
    with pytest.raises(ValueError, match="take triton"):
        gluon.BACKEND.forward(q, q, q, causal=True, scale=1.0, dropout=0.1)


# Launching


def test_too_many_registers_are_refused() -> None:
    with pytest.raises(AssertionError, match="registers to fetch with"):
        Tiling(4, 64, 4, 2, 120).fetching()


def test_tma_reads_what_it_can_and_a_copy_of_the_rest() -> None:
    qkv = torch.empty(2, 16, 3, 4, 64, dtype=BF16)
    views = [qkv[:, :, i].transpose(1, 2) for i in range(3)]
    whole = torch.empty(2, 4, 16, 64, dtype=BF16)
    one_row = torch.empty(2, 4, 64, dtype=BF16).as_strided((2, 4, 1, 64), (256, 64, 3, 1))
    for x in (*views, whole, whole[:, :, ::2], one_row, whole[:, :, 1:]):
        assert launch.make_readable(x) is x
    odd_base = torch.empty(2 * 4 * 16 * 64 + 1, dtype=BF16)[1:].view(2, 4, 16, 64)
    odd_stride = torch.empty(2, 4, 16, 68, dtype=BF16)[..., :64]
    expanded = torch.empty(2, 4, 1, 64, dtype=BF16).expand(2, 4, 16, 64)
    for x in (odd_base, odd_stride, expanded, whole.transpose(2, 3).contiguous().transpose(2, 3)):
        made = launch.make_readable(x)
        assert made is not x
        assert made.is_contiguous()


def test_torch_compile_knows_the_gradients_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the inputs, of whose addresses it knows nothing; contiguous where TMA cannot write them."""
    for name in list(vars(launch)):
        if name.endswith("_kernel"):
            monkeypatch.setattr(launch, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "device_of", lambda _: contextlib.nullcontext())
    whole = torch.empty(2, 16, 4, 64, dtype=BF16).transpose(1, 2)
    odd_base = torch.empty(whole.numel() + 1, dtype=BF16)[1:].view(2, 16, 4, 64).transpose(1, 2)
    odd_stride = torch.empty(2, 16, 4, 68, dtype=BF16)[..., :64].transpose(1, 2)
    expanded, across = whole[:, :1].expand(2, 4, 16, 64), torch.empty(2, 4, 64, 16, dtype=BF16).transpose(2, 3)
    lse = torch.empty(2, 4, 16)
    for x in (whole, odd_base, odd_stride, expanded, across):
        made = launch.backward(whole, x, x, x, whole, lse, True, 0.125)
        with FakeTensorMode() as fake:
            faked, of, no_lse = (fake.from_tensor(t) for t in (x, whole, lse))
            known = torch.ops.te_bench.gluon_attention_backward(of, faked, faked, faked, of, no_lse, True, 0.125, False)
        assert [dx.stride() for dx in made] == [dx.stride() for dx in known]
        assert made[0].stride(3) == 1


def test_programs_share_a_pair_as_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "processors", lambda _: 132)
    for batch, shared in ((4, 33), (1, 32)):
        q = torch.empty(batch, 32, 2048, 128, dtype=BF16)
        assert launch.deal_tiles(launch.FUSED[128, True], q, q, of_keys=True)[1][6] == shared
        assert launch.deal_tiles(launch.FORWARD[128], q, q, of_keys=False)[1][6] == shared


@pytest.mark.parametrize(("causal", "deterministic"), list(itertools.product((False, True), repeat=2)))
def test_one_kernel_where_it_was_measured_to_be_faster_and_bits_may_differ(causal, deterministic, monkeypatch):
    ran: list[str] = []
    for name in list(vars(launch)):
        if name.endswith("_kernel"):
            kernel = MagicMock()
            kernel.__getitem__.return_value = lambda *_, name=name, **__: ran.append(name.split("_")[-2])
            monkeypatch.setattr(launch, name, kernel)
    monkeypatch.setattr(architecture, "processors", lambda _: 132)
    monkeypatch.setattr(torch.cuda, "device_of", lambda _: contextlib.nullcontext())
    one, two = ["delta", "fused", "sums"], ["rows", "keys"]
    of_64 = one if causal else two
    for keys, width, kernels in ((2047, 128, two), (2048, 128, one), (4095, 64, two), (4096, 64, of_64)):
        x = torch.empty(1, 1, keys, width, dtype=BF16)
        ran.clear()
        launch.backward(x, x, x, x, x, torch.empty(1, 1, keys), causal, 0.125, deterministic)
        assert ran == (two if deterministic else kernels)


def test_who_asks_torch_for_determinism_gets_it() -> None:
    asked: list[bool] = []
    forward = without_masks(lambda *_, deterministic, **__: (asked.append(deterministic), None), "no masks")  # type: ignore[func-returns-value, arg-type, return-value]
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for wanted in (False, True):
            torch.use_deterministic_algorithms(wanted)
            forward(*[torch.empty(1, 1, 1, 64)] * 3, causal=True, scale=1.0)
    finally:
        torch.use_deterministic_algorithms(before)
    assert asked == [False, True]


@pytest.mark.parametrize(
    ("pairs", "blocks", "near"),
    [(144, 8, 144), (128, 16, 128), (32, 64, 32), (64, 64, 64), (128, 16, 33), (128, 64, 33)],
)
def test_programs_are_dealt_alike_and_every_tile_once(pairs, blocks, near, monkeypatch):
    """Causal tiles of 128 rows, the last of which sees the most: no program has 4 % more than the mean."""
    seen, loads = list[tuple[int, int]](), list[float]()
    whole, rest = divmod(pairs * blocks, 132)
    for program in range(132):
        language = types.SimpleNamespace(program_id=lambda _, p=program: p, num_programs=lambda _: 132)
        monkeypatch.setattr(_gluon_parts, "gl", language)
        turns = range(_gluon_parts.count_tiles.fn(whole, rest))
        dealt = [_gluon_parts.pick_tile.fn(turn, blocks, pairs, near) for turn in turns]
        seen += dealt
        loads.append(sum(blocks - order + 0.5 for order, _ in dealt))  # in blocks of 128 x 128, and what a tile costs
        assert near < pairs or dealt == sorted(dealt), "what is heavy comes first"
    assert sorted(seen) == list(itertools.product(range(blocks), range(pairs)))
    assert max(loads) <= 1.04 * sum(loads) / 132


# On a GPU


@pytest.fixture(params=["64", "64 by one kernel", "128", "128 by one kernel"])
def head_dim(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """And by which kernels the gradients are made."""
    width, *by_one = request.param.split(" ", 1)
    monkeypatch.setattr(launch, "FUSED_FROM", {int(width): 1 if by_one else sys.maxsize})
    return int(width)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("rows", "keys"), [(1, 300), (65, 64), (700, 700), (129, 1000), (2048, 2048)])
def test_any_length(rows: int, keys: int, head_dim: int, causal: bool, dtype: str) -> None:
    problem = a_problem((2, 6, rows, head_dim), dtype, causal=causal, kv_length=keys, kv_heads=2)
    assert_as_good_as_manual(supported("gluon", problem), problem, draw(problem))


@pytest.mark.gpu
def test_more_tiles_than_programs_and_views_of_qkv() -> None:
    problem = a_problem((9, 12, 1000, 64))
    backend = supported("gluon", problem)
    tensors = draw(problem)
    packed = torch.stack(tensors[:3]).permute(1, 3, 0, 2, 4).contiguous()
    views = [packed[:, :, i].transpose(1, 2) for i in range(3)]
    for ours, theirs in zip(run(backend, problem, [*views, tensors[3]]), run(backend, problem, tensors), strict=True):
        assert torch.equal(ours, theirs)
    few = [x[:1] for x in tensors]
    of_one = dataclasses.replace(problem, batch=1)
    for ours, exact in zip(run(backend, problem, tensors), by_definition(of_one, few), strict=True):
        assert largest(ours[:1] - exact) <= 2e-2 * largest(exact)


@pytest.mark.gpu
def test_repeats_are_bitwise_the_same_and_nan_stays_in_its_block_and_head(head_dim: int) -> None:
    problem = a_problem((2, 3, 500, head_dim))
    backend, tensors = supported("gluon", problem), draw(problem)
    of_sums = run(backend, problem, tensors)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        first, second = run(backend, problem, tensors), run(backend, problem, tensors)
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    for ours, theirs in zip(of_sums, first, strict=True):
        assert largest(ours - theirs) <= 1e-2 * largest(theirs)
    # A value: of the rows from 300 on, and, as 0 x NaN, of those before it that meet its block of keys, which begins at 256.
    tensors[2][1, 1, 300] = math.nan
    out = run(backend, problem, tensors)[0]
    assert out[1, 1, 300:].isnan().all()
    assert torch.equal(out[1, 1, :256], first[0][1, 1, :256])
    assert torch.equal(out[0], first[0][0])
    assert torch.equal(out[1, 2], first[0][1, 2])


@pytest.mark.gpu
def test_what_is_no_number_reaches_the_gradients_of_its_head_and_of_no_other(head_dim: int) -> None:
    problem = a_problem((2, 3, 500, head_dim), causal=False)
    backend, tensors = supported("gluon", problem), draw(problem)
    clean = run(backend, problem, tensors)
    for which, bad in ((3, math.nan), (3, math.inf), (0, math.nan)):
        given = [x.clone() for x in tensors]
        given[which][1, 1, 300, 5] = bad
        _, dq, dk, dv = run(backend, problem, given)
        assert not dq[1, 1, 300].isfinite().all()
        assert not dk[1, 1].isfinite().any() if which == 0 else not dv[1, 1, :, 5].isfinite().any()
        for ours, theirs in zip((dq, dk, dv), clean[1:], strict=True):
            for b, h in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 2)):
                assert largest(ours[b, h] - theirs[b, h]) <= 1e-2 * largest(theirs[b, h])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", ["128", "128 by one kernel"], indirect=True)
def test_keys_that_are_none_weigh_nothing_where_all_scores_are_far_below_0(head_dim: int) -> None:
    """exp2(0 - level) would be infinite, and infinity times a key of zeros is NaN."""
    problem = a_problem((1, 2, 130, head_dim), causal=False, kv_length=70)
    backend, (q, k, v, dout) = supported("gluon", problem), draw(problem)
    grads = run(backend, problem, [q.abs() + 8, -k.abs() - 8, v, dout])
    assert all(x.isfinite().all() for x in grads)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("rows", "keys"), [(100, 100), (300, 600), (5, 128), (128, 128)])
def test_a_key_of_no_weight_has_gradients_of_0_whatever_it_holds(rows, keys, head_dim, causal):
    """Of every 7th key all scores are -inf, and those that no row sees are infinite too."""
    problem = a_problem((2, 4, rows, head_dim), causal=causal, kv_length=keys, kv_heads=2)
    backend, (q, k, v, dout) = supported("gluon", problem), draw(problem)
    q[..., 5], q[..., 9] = q[..., 5].abs() + 0.1, -q[..., 9].abs() - 0.1
    k[:, :, 3::14, 5], k[:, :, 10::14, 9] = -math.inf, math.inf
    if causal:
        k[:, :, rows:, 5] = math.inf
    tensors = [q, k, v, dout]
    for made, exact in list(zip(run(backend, problem, tensors), by_definition(problem, tensors), strict=True))[2:]:
        assert exact.isfinite().all()
        assert not made[:, :, 3::7].any()
        assert largest(made - exact) <= 2e-2 * largest(exact)


@pytest.mark.gpu
def test_lse_negative_scale_and_compiled() -> None:
    problem = a_problem((2, 3, 200, 64))
    supported("gluon", problem)
    q, k, v, dout = draw(problem)
    out, lse = gluon.attention(q, k, v, causal=True, scale=-0.125)
    scores = (-0.125 * q.double() @ k.double().mT).masked_fill(
        torch.ones(200, 200, device="cuda").bool().triu(1), -math.inf
    )
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=2e-3, rtol=0)
    whole = torch.compile(lambda q, k, v: gluon.BACKEND.forward(q, k, v, causal=True, scale=-0.125), fullgraph=True)
    assert torch.equal(whole(q, k, v), out)
    eager, graphs = (
        gradients(f, [q, k, v, dout])
        for f in (lambda q, k, v: gluon.BACKEND.forward(q, k, v, causal=True, scale=-0.125), whole)
    )
    assert all(torch.equal(x, y) for x, y in zip(eager, graphs, strict=True))


@pytest.mark.gpu
def test_of_nothing_it_makes_nothing() -> None:
    supported("gluon", a_problem((2, 3, 200, 64)))
    for rows, keys in ((0, 5), (5, 0)):
        q = torch.randn(2, 3, rows, 64, device="cuda", dtype=BF16, requires_grad=True)
        k = torch.randn(2, 3, keys, 64, device="cuda", dtype=BF16, requires_grad=True)
        out, lse = gluon.attention(q, k, k, scale=0.125)
        assert not out.any()
        assert (lse == -math.inf).all()
        grads = torch.autograd.grad(out.sum(), (q, k))
        assert not any(x.any() for x in grads)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("keys", [2048, 2100])
def test_of_several_tiles_a_program_each_head_is_as_alone(keys: int, causal: bool) -> None:
    """640 tiles and more for 132 programs, by one kernel; alone a head has 16 or 17."""
    problem = a_problem((2, 20, keys, 128), causal=causal)
    backend, tensors = supported("gluon", problem), draw(problem)
    whole = run(backend, problem, tensors)
    one = dataclasses.replace(problem, batch=1, heads=1)
    for b, h in ((0, 0), (0, 19), (1, 7), (1, 19)):
        parts = run(backend, one, [x[b : b + 1, h : h + 1].contiguous() for x in tensors])
        assert torch.equal(whole[0][b, h], parts[0][0, 0])
        for ours, theirs in zip(whole[1:], parts[1:], strict=True):  # dQ's sums have no order
            assert largest(ours[b, h] - theirs[0, 0]) <= 1e-2 * largest(theirs)


@pytest.mark.gpu
def test_deterministic_repeats_of_many_tiles_are_bitwise_the_same() -> None:
    problem = a_problem((4, 32, 2048, 128))
    supported("gluon", problem)
    q, k, v, dout = draw(problem)
    first, *others = (
        gradients(
            lambda q, k, v: gluon.attention(q, k, v, causal=True, scale=0.1, deterministic=True)[0], [q, k, v, dout]
        )
        for _ in range(4)
    )
    assert all(torch.equal(x, y) for again in others for x, y in zip(first, again, strict=True))


@pytest.mark.gpu
def test_of_one_row_the_value_is_the_output(head_dim: int) -> None:
    supported("gluon", a_problem((2, 3, 1, head_dim)))
    for batch in (0, 2):
        given = [torch.randn(batch, 3, 1, head_dim, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3)]
        out, _ = gluon.attention(*given, causal=True, scale=0.1)
        dq, dk, dv = torch.autograd.grad(out.sum(), given)
        assert torch.equal(out, given[2])
        assert torch.equal(dv, torch.ones_like(dv))
        assert all((x.abs() <= 1e-5).all() for x in (dq, dk)), "dP - delta is the rounding of a sum"


@pytest.mark.gpu
@pytest.mark.alone  # 50 GB of the device's memory
@pytest.mark.parametrize("length", [1024, 2048])
def test_beyond_2_31_elements(length: int) -> None:
    """The last head is as alone, forward and backward: by two kernels, and by one."""
    supported("gluon", a_problem((1, 1, length, 128)))
    batch = 2**31 // (16 * length * 128) + 1
    q, k, v, dout = (torch.randn(batch, 16, length, 128, device="cuda", dtype=BF16) for _ in range(4))
    assert q.numel() > 2**31
    attend = functools.partial(gluon.attention, causal=True, scale=128**-0.5)
    whole = gradients(lambda *given: attend(*given)[0], [q, k, v, dout])
    for at in ((batch - 1, 15), (0, 0)):
        few = [x[at][None, None].clone() for x in (q, k, v, dout)]
        for ours, theirs in zip(whole, gradients(lambda *given: attend(*given)[0], few), strict=True):
            assert largest(ours[at] - theirs[0, 0]) <= 1e-2 * largest(theirs)
