"""MultiheadAttention by the fused rotary kernel is that by plain operators; whose memory is turned, and who is told."""

import dataclasses
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_attention import layer
from test_packed_sequences import PACKED, starts_of
from torch import Tensor, nn

from te_bench.kernels.rotary.backends import triton as rotary_triton
from te_bench.models.modules import attention, rotary
from te_bench.models.modules.attention import MultiheadAttention
from te_bench.models.modules.rotary import (
    RotaryPositionEmbedding,
    Rotation,
    apply_rotary_pos_emb,
    packed_angles,
    split_rotated,
)

S, B, HIDDEN, HEADS, D = 7, 3, 32, 4, 8
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FUSED = {"fuse_qkv_params": True}
DEALT: dict[str, dict[str, Any]] = {
    "one after the other": {},
    "by heads": FUSED,
    "groups": {"num_gqa_groups": 2},
    "by groups": {**FUSED, "num_gqa_groups": 2},
    "normed before": {"qk_norm_type": "RMSNorm", "qk_norm_before_rope": True},
    "normed after, from a norm": {"qk_norm_type": "RMSNorm", "input_layernorm": True},
}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the kernel runs: a GPU, or Triton's interpreter in place of the plain operators of a CPU."""
    if request.param == "cpu":
        monkeypatch.setattr(rotary, "backend", lambda x: rotary_triton.BACKEND)
        for module in (rotary, attention):
            monkeypatch.setattr(module, "can_rotate_fused", lambda x, *freqs: rotary.are_constant(*freqs))
    return request.param


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the fused kernel was asked for."""
    seen: list[str] = []

    def rotate(parts: list[Any], *, interleaved: bool, transposed: bool = False, tables: bool = False) -> None:
        there = all(part.x.data_ptr() == part.out.data_ptr() for part in parts)
        seen.append(f"{len(parts)} {'back' if transposed else 'in place' if there else 'beside'}")
        run(parts, interleaved=interleaved, transposed=transposed, tables=tables)

    run = rotary_triton.BACKEND.rotate
    monkeypatch.setattr(rotary_triton, "BACKEND", dataclasses.replace(rotary_triton.BACKEND, rotate=rotate))
    return seen


def draw(device: str, *size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1)).to(device)


def angles(device: str, percent: float = 1.0, interleaved: bool = False) -> Tensor:
    return RotaryPositionEmbedding(D, percent, interleaved=interleaved).to(device)(S + 2)


def learned(freqs: Tensor) -> Tensor:
    return freqs.clone().requires_grad_()


def passed(mha: MultiheadAttention, freqs: Any, *size: int, plain: bool = False, **given: Any) -> list[Tensor]:
    """Output and gradients; plain: by operators that autograd records, for the angles are learned."""
    x = draw(next(mha.parameters()).device.type, *size).requires_grad_()
    mha.zero_grad()
    if plain:
        freqs = tuple(map(learned, freqs)) if isinstance(freqs, tuple) else learned(freqs)
    y = mha(x, rotary_pos_emb=freqs, **given)
    y.backward(draw(x.device.type, *y.shape).roll(1, 0))
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad.clone() for p in mha.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("dealt", "layout", "interleaved"),
    [
        (dealt, layout, (i + j) % 2 == 1)
        for i, dealt in enumerate(DEALT)
        for j, layout in enumerate(("sbhd", "bshd", "thd"))
    ],
)
def test_it_is_what_plain_operators_make(dealt, layout, interleaved, device, calls):
    """Packed sequences with keys' lengths of their own, and rows after the last sequence."""
    options, given, size = dict(DEALT[dealt]), {}, (B, S, HIDDEN) if layout == "bshd" else (S, B, HIDDEN)
    if layout == "thd":
        options["attn_mask_type"], size = "padding", (15, HIDDEN)
        given = {"cu_seqlens_q": starts_of(PACKED).to(device), "cu_seqlens_kv": starts_of((3, 4, 6, 1)).to(device)}
    mha = layer(device, qkv_format=layout, rotary_pos_interleaved=interleaved, **options)
    pair = angles(device, 0.5, interleaved), angles(device, 0.5, interleaved) * 0.7
    found = passed(mha, pair, *size, **given)
    if dealt == "normed before":
        assert sorted(calls) == ["1 back", "1 back", "1 beside", "1 beside"]
    else:
        assert calls == ["2 beside" if dealt == "by groups" else "2 in place", "3 back"]
    calls.clear()
    wanted = passed(mha, pair, *size, plain=True, **given)
    assert calls == []
    for mine, theirs in zip(found, wanted, strict=True):
        # Sums in float32 of terms as large: plain weight gradients are 1.0e-4 off float64's where the largest is 94.
        largest = float(theirs.abs().max())
        torch.testing.assert_close(mine, theirs, atol=max(3e-5, 2e-6 * largest), rtol=3e-5)
    assert not torch.allclose(found[0], mha(draw(device, *size), **given), atol=1e-2)


def test_crossed_heads_turn_one_by_one(device: str, calls: list[str]) -> None:
    mha, x, memory = layer(device, attention_type="cross"), draw(device, S, B, HIDDEN), draw(device, S - 2, B, HIDDEN)
    out = mha(x, encoder_output=memory, rotary_pos_emb=angles(device))
    assert calls == ["1 beside"] * 2
    plain = mha(x, encoder_output=memory, rotary_pos_emb=learned(angles(device)))
    torch.testing.assert_close(out, plain, atol=1e-5, rtol=1e-5)


def test_the_function_alone(device: str, calls: list[str]) -> None:
    for layout in ("sbhd", "bshd"):
        t = (
            draw(device, S, B, HEADS, D).transpose(0, 3).contiguous().transpose(0, 3).requires_grad_()
        )  # strange strides
        out = apply_rotary_pos_emb(t, angles(device, 0.5), layout)
        plain = apply_rotary_pos_emb(t, angles(device, 0.5).requires_grad_(), layout)
        assert calls == ["1 beside"]
        torch.testing.assert_close(out, plain, atol=1e-6, rtol=1e-6)
        dy = draw(device, *t.shape).roll(1, 0)
        (mine,), (theirs,) = (torch.autograd.grad(y, t, dy) for y in (out, plain))
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)
        assert calls == ["1 beside", "1 back"]
        calls.clear()


def test_one_gather_of_angles_serves_queries_and_keys_of_the_same_sequences(device, monkeypatch):
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(attention, "packed_angles", lambda *a: seen.append(a[0].shape) or packed_angles(*a))
    mha = layer(device, qkv_format="thd", attn_mask_type="padding")
    starts, freqs = starts_of(PACKED).to(device), angles(device)
    for other, pair in (
        (starts, freqs),
        (starts, (freqs, freqs)),
        (starts.clone(), freqs),
        (starts, (freqs, freqs * 1)),
    ):
        mha(draw(device, 13, HIDDEN), rotary_pos_emb=pair, cu_seqlens_q=starts, cu_seqlens_kv=other)
    assert len(seen) == 1 + 1 + 2 + 2


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_a_packed_sequence_alone_gives_the_same_bits(interleaved: bool, device: str, calls: list[str]) -> None:
    t, dy, starts = draw(device, 15, HEADS, D), draw(device, 15, HEADS, D).roll(1, 0), starts_of(PACKED).to(device)
    freqs = angles(device, 0.5, interleaved)
    t.requires_grad_()
    out = apply_rotary_pos_emb(t, freqs, "thd", cu_seqlens=starts, interleaved=interleaved)
    (grad,) = torch.autograd.grad(out, t, dy)
    assert calls == ["1 beside", "1 back"]
    for i, j in itertools.pairwise(starts.tolist()):
        one = t[i:j, None].detach().requires_grad_()
        alone = apply_rotary_pos_emb(one, freqs, interleaved=interleaved)
        assert torch.equal(out[i:j, None], alone)
        assert torch.equal(grad[i:j, None], torch.autograd.grad(alone, one, dy[i:j, None])[0])
    short = apply_rotary_pos_emb(t[:, None], packed_angles(freqs[:5], starts, 15, 1), interleaved=interleaved)[:, 0]
    assert short[10:12, :, : D // 2].isnan().all()  # places 5 and 6, of 5 angles
    assert torch.equal(short[10:12, :, D // 2 :], t[10:12, :, D // 2 :])
    assert torch.equal(short[[*range(10), 12]], out[[*range(10), 12]])
    assert short[13:].isfinite().all()


def test_queries_and_keys_stay_in_the_projections_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mha, seen = layer(device), []
    monkeypatch.setattr(mha.core_attention, "forward", lambda q, k, v, **_: seen.append((q, k, v)) or q.flatten(2))
    mha(draw(device, S, B, HIDDEN), rotary_pos_emb=angles(device))
    q, k, v = seen.pop()
    assert len({t.untyped_storage().data_ptr() for t in (q, k, v)}) == 1
    assert k.storage_offset() - q.storage_offset() == v.storage_offset() - k.storage_offset() == HEADS * D


def test_who_looks_at_the_projection_sees_it_as_it_was(device: str, calls: list[str]) -> None:
    mha, x, seen = layer(device), draw(device, S, B, HIDDEN), []
    mha.qkv.register_forward_hook(lambda module, args, out: seen.append(out))
    mha(x, rotary_pos_emb=angles(device))
    assert calls == ["2 beside"]
    assert torch.equal(seen[0], mha.qkv(x))


class Kept(nn.Module):
    """A projection that keeps its output for the backward pass."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return self.inner(x).tanh()


def test_another_projection_may_keep_its_output(device: str, calls: list[str]) -> None:
    mha = layer(device)
    mha.qkv = Kept(mha.qkv)
    found = passed(mha, angles(device), S, B, HIDDEN)
    assert calls == ["2 beside", "3 back"]
    for mine, theirs in zip(found, passed(mha, angles(device), S, B, HIDDEN, plain=True), strict=True):
        torch.testing.assert_close(mine, theirs, atol=3e-5, rtol=3e-5)


def a_rotation(freqs: Tensor) -> Rotation:
    return Rotation(freqs[:S, 0, 0], freqs[:S, 0, 0], 1, (HEADS * D,) * 3, D, (S, B), False, False)


def test_what_was_overwritten_is_told(device: str) -> None:
    """The projection where it was kept after all, the angles, and the turned views."""
    mixed, freqs = draw(device, S, B, 3 * HEADS * D).requires_grad_(), angles(device)
    kept = mixed.tanh()
    q, k, v = split_rotated(kept, a_rotation(freqs), own=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (q + k + v).sum().backward()
    q, k, v = split_rotated(mixed * 1.0, a_rotation(freqs), own=True)
    with pytest.raises(RuntimeError, match="modified inplace"):
        q.mul_(2.0)
    freqs.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (q + k + v).sum().backward()


def test_one_position_an_empty_batch_and_no_gradients(device: str, calls: list[str]) -> None:
    mha = layer(device)
    for size in ((1, B, HIDDEN), (S, 0, HIDDEN)):
        found, wanted = (passed(mha, angles(device), *size, plain=plain) for plain in (False, True))
        assert calls == ["2 in place", "3 back"]
        calls.clear()
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, atol=3e-5, rtol=3e-5)
    x = draw(device, S, B, HIDDEN)
    wanted_out = mha(x, rotary_pos_emb=angles(device)).detach()
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            assert torch.equal(mha(x, rotary_pos_emb=angles(device)), wanted_out)
    again = torch.utils.checkpoint.checkpoint(mha, x, rotary_pos_emb=angles(device), use_reentrant=False)
    assert torch.equal(again, wanted_out)
    again.sum().backward()


def test_angles_that_do_not_reach_are_named(device: str) -> None:
    with pytest.raises(ValueError, match="too short"):
        layer(device)(draw(device, S + 3, B, HIDDEN), rotary_pos_emb=angles(device))
    with pytest.raises(ValueError, match="too wide"):
        layer(device)(draw(device, S, B, HIDDEN), rotary_pos_emb=torch.zeros(S, 1, 1, D + 2, device=device))


@pytest.mark.parametrize("size", [(S, D), (S, 1, 1, D - 1), (S, 1, 1, D, 1), ()], ids=str)
def test_angles_of_another_shape_are_named(size: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two dimensions would be the heads' angles where there are as many heads as positions, and an odd width no pairs'."""
    mha, t, freqs = layer(device), draw(device, HEADS, B, HEADS, D), torch.zeros(size, device=device)
    for _ in ("by the kernel", "by plain operators"):
        with pytest.raises(ValueError, match="d2 even"):
            mha(draw(device, S, B, HIDDEN), rotary_pos_emb=freqs)
        with pytest.raises(ValueError, match="d2 even"):
            apply_rotary_pos_emb(t, freqs)
        monkeypatch.undo()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype, device: str) -> None:
    mixed = draw(device, S, B, 3 * HEADS * D).to(dtype)
    freqs = angles(device)
    plain = [
        apply_rotary_pos_emb(t, freqs.clone().requires_grad_())
        for t in mixed.view(S, B, 3 * HEADS, D).split(HEADS, 2)[:2]
    ]
    q, k, v = split_rotated(mixed.clone(), a_rotation(freqs), own=True)
    assert torch.equal(v.flatten(2), mixed[..., 2 * HEADS * D :])
    for mine, theirs in zip((q, k), plain, strict=True):
        assert mine.dtype is dtype
        assert (mine != theirs).sum() <= mine.numel() // 100  # float32's own last bits at a rounding midpoint
        torch.testing.assert_close(mine, theirs.detach(), atol=0.02, rtol=0)


@pytest.mark.parametrize("dealt", ["one after the other", "by heads", "by groups"])
def test_from_the_projection_to_attention_and_back_nothing_is_copied(dealt, device, monkeypatch):
    """But by the kernel, which is called once forward and once back, and whose own operators are left out here."""
    options = {**FUSED, "qkv_weight_interleaved": dealt != "one after the other", **DEALT[dealt]}
    mha = layer(device, params_dtype=torch.bfloat16, bias=False, **options)
    x = draw(device, S, B, HIDDEN).bfloat16().requires_grad_()
    freqs, dy, launches = angles(device), draw(device, S, B, HIDDEN).bfloat16(), []
    idle = SimpleNamespace(rotate=lambda parts, **how: launches.append(len(parts)))
    monkeypatch.setattr(rotary, "backend", lambda x: idle)
    monkeypatch.setattr(mha.core_attention, "forward", lambda q, k, v, **_: _Attended.apply(q, k, v))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.autograd.grad(mha(x, rotary_pos_emb=freqs), x, dy)
    names = {event.name for event in profile.events()}
    assert launches == [2, 3]
    assert "aten::mm" in names
    assert not names & {"aten::copy_", "aten::cat", "aten::clone"}


class _Attended(torch.autograd.Function):
    """In attention's place something that copies nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.like = q, k, v
        return q.new_zeros(*q.shape[:2], q.shape[2] * q.shape[3])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in ctx.like)
