"""Sequences of many lengths, one after the other ("thd"): each by itself, whatever the backend; and what they cannot be."""

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from test_dot_product_attention import DEVICES, assert_close, draw, plain, triton_interpreted
from torch import Tensor

import te_bench.models as te
from te_bench.kernels import attention
from te_bench.models.modules import attention_kernel as kernels
from te_bench.models.modules import attention_mask
from te_bench.models.modules.attention import DotProductAttention, MultiheadAttention

PACKED = (5, 0, 7, 1)


def starts_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [None, "manual", "triton", "auto"])
@pytest.mark.parametrize(
    ("kind", "window", "lengths_kv"),
    [
        ("padding", None, PACKED),
        ("padding_causal", None, PACKED),
        ("padding_causal_bottom_right", (2, 0), PACKED),
        ("padding", (1, 2), PACKED),
        ("padding", None, (3, 4, 9, 0)),
        ("padding_causal", (2, 0), (3, 4, 9, 0)),
        ("padding_causal", None, (2, 1, 3, 2)),
    ],
)
def test_packed_sequences_are_each_by_itself(
    kind: str, window: tuple[int, int] | None, lengths_kv: tuple[int, ...], name: str | None, device: str
) -> None:
    """Rows after the last sequence give 0, and have gradient 0."""
    if device == "cpu" and name == "triton" and not triton_interpreted():
        pytest.skip("needs TRITON_INTERPRET=1")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    rows, keys = sum(PACKED) + 2, sum(lengths_kv) + 1
    q, k, v = draw((rows, 4, 16), (keys, 2, 16), (keys, 2, 16), device=device, dtype=dtype)
    (dout,) = draw((rows, 64), seed=1, device=device, dtype=dtype)
    layer = DotProductAttention(4, 16, 2, attn_mask_type=kind, qkv_format="thd", window_size=window)
    starts_q = starts_of(PACKED).to(device)
    starts_kv = starts_q if lengths_kv == PACKED else starts_of(lengths_kv).to(device)
    with kernels.attention_kernel(name) if name else contextlib.nullcontext():
        out = layer(q, k, v, cu_seqlens_q=starts_q, cu_seqlens_kv=starts_kv)
    got = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = torch.zeros(rows, 64, dtype=torch.float64, device=device)
    for b, (length, length_kv) in enumerate(zip(PACKED, lengths_kv, strict=True)):
        begin, begin_kv = int(starts_q[b]), int(starts_kv[b])
        ahead = torch.arange(length_kv) - torch.arange(length)[:, None]
        left, right = window or (-1, -1)
        right = 0 if "causal" in kind else right
        seen = torch.ones(length, length_kv, dtype=torch.bool)
        seen &= (ahead <= right) if right >= 0 else seen
        seen &= (ahead >= -left) if left >= 0 else seen
        if length and length_kv:
            own = wide[0][begin : begin + length], *(x[begin_kv : begin_kv + length_kv] for x in wide[1:])
            exact[begin : begin + length] = plain(*own, seen)
    truth = [exact, *torch.autograd.grad(exact, wide, dout.double())]
    for value, true in zip(got, truth, strict=True):
        assert_close(value, true, dtype)
    assert not out[sum(PACKED) :].any()
    assert not got[1][sum(PACKED) :].any()


def test_packed_sequences_by_the_longest_that_is_given_and_compiled_without_breaks() -> None:
    q, k, v = draw(*[(13, 2, 8)] * 3)
    starts = starts_of(PACKED)
    layer = DotProductAttention(2, 8, attn_mask_type="padding_causal", qkv_format="thd")
    out = layer(q, k, v, cu_seqlens_q=starts, cu_seqlens_kv=starts)
    told = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 9, "max_seqlen_kv": 7}
    torch.testing.assert_close(layer(q, k, v, **told), out)
    torch.testing.assert_close(layer(q, k, v, **told, checkpoint_core_attention=True), out)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, **told), out)
    torch._dynamo.reset()
    assert layer.backend_report(q, k, v, **told).chosen == "flash"


@pytest.mark.parametrize("kind", ["padding", "padding_causal"])
def test_packed_sequences_reach_a_backend_that_takes_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, ...]] = []
    real = attention.load("triton")
    assert real.packed is not None

    def packed(q: Tensor, *others: Any, **options: Any) -> Tensor:
        given.append(tuple(q.shape))
        assert real.packed is not None
        return real.packed(q, *others, **options)

    spied = dataclasses.replace(real, packed=packed, forward=lambda *_, **__: pytest.fail("padded"))
    monkeypatch.setattr(
        attention, "load", lambda asked, load=attention.load: spied if asked == "triton" else load(asked)
    )
    if not triton_interpreted():
        pytest.skip("needs TRITON_INTERPRET=1")
    q, k, v = draw(*[(13, 2, 16)] * 3)
    layer = DotProductAttention(2, 16, attn_mask_type=kind, qkv_format="thd")
    monkeypatch.setattr(kernels, "_backends", dict(kernels._backends))
    with kernels.attention_kernel("triton"):
        layer(q, k, v, cu_seqlens_q=starts_of(PACKED), cu_seqlens_kv=starts_of(PACKED))
    assert given == [(13, 2, 16)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attn_mask_type": "causal"}, "attn_mask_type='causal' with thd: one of padding, padding_causal"),
        ({"cu_seqlens_kv": None}, "needs cu_seqlens_q and cu_seqlens_kv"),
        ({"cu_seqlens_q": torch.tensor([0, 4])}, "cu_seqlens_q is of 1 sequences, cu_seqlens_kv of 4"),
        ({"cu_seqlens_q": torch.tensor([0, 4, 9, 12, 20])}, r"they end at 20 of 13 positions"),
        ({"cu_seqlens_q": torch.tensor([0, 4, 3, 12, 13])}, r"sequence 1 would end at 3"),
        ({"cu_seqlens_q": torch.zeros(5)}, "torch.int32 or torch.int64"),
        ({"max_seqlen_q": 3}, r"sequence 0 would have 5 of 3 positions"),
        ({"max_seqlen_kv": 0}, "max_seqlen_kv=0: must be at least 1"),
        ({"attention_mask": torch.zeros(1, dtype=torch.bool)}, "leave attention_mask out"),
        ({"window_size": (2, 1), "cu_seqlens_kv": starts_of((1, 1, 1, 1))}, "give one tensor as cu_seqlens_q"),
    ],
)
def test_impossible_packed_sequences(options: dict[str, Any], reason: str) -> None:
    x, starts = torch.zeros(13, 2, 8), starts_of(PACKED)
    layer = DotProductAttention(2, 8, attn_mask_type="padding", qkv_format="thd")
    with pytest.raises(ValueError, match=reason):
        layer(x, x, x, **{"cu_seqlens_q": starts, "cu_seqlens_kv": starts, **options})


# Modules around it


def packed_and_padded(x: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(batch, longest, hidden) with zeros at the ends, and its padding (batch, 1, 1, longest), of (rows, hidden)."""
    longest = max(lengths)
    padding = torch.arange(longest) >= torch.tensor(lengths)[:, None]
    padded = x.new_zeros(len(lengths), longest, x.shape[1])
    padded[~padding] = x
    return padded, padding[:, None, None]


@pytest.mark.parametrize("make", [MultiheadAttention, te.TransformerLayer])
def test_a_layer_of_packed_sequences_is_that_of_padded_ones(make: Any) -> None:
    lengths = (5, 7, 1)
    torch.manual_seed(0)
    sizes = (32, 4) if make is MultiheadAttention else (32, 64, 4)
    options: dict[str, Any] = {"attention_dropout": 0.0, "window_size": (3, 0)}
    options |= {"attn_mask_type": "padding_causal"} if make is MultiheadAttention else {"hidden_dropout": 0.0}
    options |= {} if make is MultiheadAttention else {"self_attn_mask_type": "padding_causal"}
    format_name = "qkv_format" if make is MultiheadAttention else "attn_input_format"
    packed, padded = make(*sizes, **options, **{format_name: "thd"}), make(*sizes, **options, **{format_name: "bshd"})
    padded.load_state_dict(packed.state_dict())
    x = torch.randn(13, 32)
    starts = starts_of(lengths)
    out = packed(x, cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=7, max_seqlen_kv=7)
    wide, padding = packed_and_padded(x, lengths)
    torch.testing.assert_close(out, padded(wide, padding)[~padding[:, 0, 0]], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="thd" if make is MultiheadAttention else r"3 dimensions|thd"):
        packed(wide, cu_seqlens_q=starts, cu_seqlens_kv=starts)


def test_no_rotary_embedding_of_packed_sequences() -> None:
    layer, starts = MultiheadAttention(32, 4, attn_mask_type="padding", qkv_format="thd"), starts_of((5, 8))
    with pytest.raises(ValueError, match="no rotary_pos_emb for qkv_format='thd'"):
        layer(torch.zeros(13, 32), rotary_pos_emb=torch.zeros(13, 1, 1, 8), cu_seqlens_q=starts, cu_seqlens_kv=starts)


def test_the_longest_is_read_once_for_all_layers_and_again_when_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    maximum = Tensor.max
    monkeypatch.setattr(Tensor, "max", lambda x, *arguments: reads.append(1) or maximum(x, *arguments))
    starts = starts_of((3, 5))
    for _ in range(2):
        assert attention_mask._longest("q", starts, 8, None, starts.device) == 5
    assert len(reads) == 1
    starts[1] = 2
    assert attention_mask._longest("q", starts, 8, None, starts.device) == 6
    assert len(reads) == 2
