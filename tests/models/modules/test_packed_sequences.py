"""Sequences of many lengths, one after the other ("thd"): each by itself, whatever the backend; and what they cannot be."""

import contextlib
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from test_dot_product_attention import DEVICES, assert_close, draw, plain, triton_interpreted
from torch import Tensor

import te_bench.models as te
from te_bench.kernels import attention
from te_bench.models import kernel_choice as kernels
from te_bench.models.modules import attention_mask
from te_bench.models.modules.attention import DotProductAttention, MultiheadAttention
from te_bench.models.modules.rotary import RotaryPositionEmbedding

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
def test_packed_sequences_are_each_by_itself(kind, window, lengths_kv, name, device):
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
    monkeypatch.setattr(kernels, "backend", {"triton": spied}.__getitem__)
    if not triton_interpreted():
        pytest.skip("needs TRITON_INTERPRET=1")
    q, k, v = draw(*[(13, 2, 16)] * 3)
    layer = DotProductAttention(2, 16, attn_mask_type=kind, qkv_format="thd")
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


def a_layer(make: Any, kind: str, form: str, **options: Any) -> Any:
    """MultiheadAttention or a TransformerLayer, whose names for mask and format differ, without dropout."""
    options |= {"attention_dropout": 0.0}
    if make is te.TransformerLayer:
        return make(32, 64, 4, hidden_dropout=0.0, self_attn_mask_type=kind, attn_input_format=form, **options)
    return make(32, 4, attn_mask_type=kind, qkv_format=form, **options)


@pytest.mark.parametrize("make", [MultiheadAttention, te.TransformerLayer])
def test_a_layer_of_packed_sequences_is_that_of_padded_ones(make: Any) -> None:
    lengths = (5, 7, 1)
    torch.manual_seed(0)
    packed, padded = (a_layer(make, "padding_causal", form, window_size=(3, 0)) for form in ("thd", "bshd"))
    padded.load_state_dict(packed.state_dict())
    x = torch.randn(13, 32)
    starts = starts_of(lengths)
    out = packed(x, cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=7, max_seqlen_kv=7)
    wide, padding = packed_and_padded(x, lengths)
    torch.testing.assert_close(out, padded(wide, padding)[~padding[:, 0, 0]], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="thd" if make is MultiheadAttention else r"3 dimensions|thd"):
        packed(wide, cu_seqlens_q=starts, cu_seqlens_kv=starts)


def sharpened(layer: Any) -> Any:
    """The layer with weights that make scores of order 1: else every row sees its keys alike, wherever they are."""
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return layer


def by_angles(positions: int = 7, **options: Any) -> Tensor:
    return RotaryPositionEmbedding(8, **options).to("cpu")(positions)


@pytest.mark.parametrize(
    ("options", "freqs"),
    [
        ({}, by_angles()),
        ({"num_gqa_groups": 2}, (by_angles(), by_angles(9, rotary_percent=0.5))),
        ({"num_gqa_groups": 2, "fuse_qkv_params": True, "rotary_pos_interleaved": True}, by_angles(interleaved=True)),
        ({"qk_norm_type": "RMSNorm"}, by_angles()),
        ({"qk_norm_type": "LayerNorm", "qk_norm_before_rope": True}, by_angles()),
    ],
    ids=["one for both", "a pair, by groups", "interleaved", "normed after", "normed before"],
)
@pytest.mark.parametrize("make", [MultiheadAttention, te.TransformerLayer])
def test_a_layer_turns_packed_sequences_as_it_does_each_alone(make: Any, options: dict[str, Any], freqs: Any) -> None:
    """Output and gradients; rows of no sequence see nothing and have gradient 0."""
    torch.manual_seed(0)
    packed = sharpened(a_layer(make, "padding_causal", "thd", **options))
    alone = a_layer(make, "causal", "sbhd", **options)
    alone.load_state_dict(packed.state_dict())
    x, dy, starts = torch.randn(15, 32, requires_grad=True), torch.randn(15, 32), starts_of(PACKED)
    given = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 7, "max_seqlen_kv": 7}
    out = packed(x, rotary_pos_emb=freqs, **given)
    grads = torch.autograd.grad(out[:13], (x, *packed.parameters()), dy[:13], retain_graph=True)
    parts = [alone(x[i:j, None], rotary_pos_emb=freqs)[:, 0] for i, j in itertools.pairwise(starts.tolist()) if j > i]
    torch.testing.assert_close(out[:13], torch.cat(parts), atol=1e-5, rtol=1e-5)
    wanted = torch.autograd.grad(torch.cat(parts), (x, *alone.parameters()), dy[:13])
    for mine, theirs in zip(grads, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=3e-5, rtol=3e-5)
    unturned = packed(x, **given)
    assert (out[1:5] - unturned[1:5]).abs().amax(1).min() > 1e-2
    torch.testing.assert_close(out[13:], unturned[13:], atol=0, rtol=0)


def test_crossed_packed_sequences_have_places_of_their_own() -> None:
    """Queries by cu_seqlens_q, keys by cu_seqlens_kv, of other lengths."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"attention_type": "cross", "num_gqa_groups": 2}
    packed = sharpened(a_layer(MultiheadAttention, "padding", "thd", **options))
    alone = a_layer(MultiheadAttention, "no_mask", "sbhd", **options)
    alone.load_state_dict(packed.state_dict())
    x, memory = torch.randn(13, 32), torch.randn(19, 32)
    lengths, lengths_kv = (5, 7, 1), (3, 6, 9)
    starts = {"cu_seqlens_q": starts_of(lengths), "cu_seqlens_kv": starts_of(lengths_kv)}
    pair = by_angles(7), by_angles(9)
    out = packed(x, encoder_output=memory, rotary_pos_emb=pair, **starts)
    queries, keys = x.split(lengths), memory[:18].split(lengths_kv)
    for own, seen, mine in zip(queries, keys, out.split(lengths), strict=True):
        theirs = alone(own[:, None], encoder_output=seen[:, None], rotary_pos_emb=pair)[:, 0]
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    same = {"cu_seqlens_q": starts["cu_seqlens_q"], "cu_seqlens_kv": starts["cu_seqlens_q"]}
    out = packed(x, encoder_output=memory, rotary_pos_emb=pair[0], **same)  # keys of more rows, the last of no sequence
    own = alone(x[5:12, None], encoder_output=memory[5:12, None], rotary_pos_emb=pair[0])[:, 0]
    torch.testing.assert_close(out[5:12], own, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="S at least the longest sequence's rows, 9"):
        packed(x, encoder_output=memory, rotary_pos_emb=by_angles(7), **starts)


def test_packed_angles_reach_for_the_longest_that_is_given_and_compile() -> None:
    layer = a_layer(MultiheadAttention, "padding_causal", "thd")
    x, starts = torch.randn(13, 32), starts_of(PACKED)
    told = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 9, "max_seqlen_kv": 9}
    for given in ({**told, "max_seqlen_q": 10}, {**told, "cu_seqlens_kv": starts.clone(), "max_seqlen_kv": 10}):
        with pytest.raises(ValueError, match="S at least the longest sequence's rows, 10"):
            layer(x, rotary_pos_emb=by_angles(9), **given)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = layer(x, rotary_pos_emb=by_angles(9), **told)
    torch.testing.assert_close(compiled(x, rotary_pos_emb=by_angles(9), **told), out)
    torch._dynamo.reset()


@pytest.mark.parametrize("given", [{}, {"max_seqlen_q": 7, "max_seqlen_kv": 7}], ids=["read", "given"])
def test_turning_packed_sequences_reads_nothing_more_of_the_device(given, monkeypatch):
    layer = a_layer(MultiheadAttention, "padding_causal", "thd")
    reads: list[str] = []
    for name in ("tolist", "item", "__int__", "__bool__", "__float__"):
        read = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda x, name=name, read=read: reads.append(name) or read(x))
    x, counts = torch.randn(13, 32, requires_grad=True), []
    for freqs in (None, by_angles(7), (by_angles(7), by_angles(8))):
        starts = starts_of(PACKED)
        for _ in range(2):
            reads.clear()
            layer(x, rotary_pos_emb=freqs, cu_seqlens_q=starts, cu_seqlens_kv=starts, **given).sum().backward()
            counts.append([*reads])
    assert counts == counts[:2] * 3
    assert "tolist" in counts[0]
    assert "tolist" not in counts[1]


@pytest.mark.gpu
def test_a_cuda_graph_turns_packed_sequences_of_other_lengths() -> None:
    layer = MultiheadAttention(
        64, 4, attention_dropout=0.0, attn_mask_type="padding_causal", qkv_format="thd", num_gqa_groups=2, device="cuda"
    ).bfloat16()
    x, dy = (t.detach().requires_grad_() for t in draw((13, 64), (13, 64), device="cuda", dtype=torch.bfloat16))
    starts, freqs = starts_of(PACKED).cuda(), RotaryPositionEmbedding(16).to("cuda")(9)
    given = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 9, "max_seqlen_kv": 9}

    def turned() -> tuple[Tensor, ...]:
        out = layer(x, rotary_pos_emb=freqs, **given)
        return out, *torch.autograd.grad(out, x, dy)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            turned()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = turned()
    for lengths in (PACKED, (2, 9, 0, 2)):
        starts.copy_(starts_of(lengths))
        graph.replay()
        for mine, theirs in zip(made, turned(), strict=True):
            assert_close(mine, theirs, torch.bfloat16)


def test_the_longest_is_read_once_for_all_layers_and_again_when_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    maximum = Tensor.max
    monkeypatch.setattr(Tensor, "max", lambda x, *arguments: reads.append(1) or maximum(x, *arguments))
    starts = starts_of((3, 5))
    for _ in range(2):
        assert attention_mask.longest_of("cu_seqlens_q", starts, 8, None, starts.device) == 5
    assert len(reads) == 1
    starts[1] = 2
    assert attention_mask.longest_of("cu_seqlens_q", starts, 8, None, starts.device) == 6
    assert len(reads) == 2
