"""DotProductAttention against the definition in float64, on both layouts, with Transformer Engine's masks."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
import triton
from padded import LENGTHS, README
from torch import Tensor

from te_bench.kernels import attention
from te_bench.models import kernel_choice as kernels
from te_bench.models.modules.attention import DotProductAttention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYOUTS = ["sbhd", "bshd"]
#: Of one float32 (bf16) attention of a few keys with values of order 1, to float64.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


def draw(
    *sizes: tuple[int, ...], seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(device, dtype).requires_grad_() for size in sizes]


def plain(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None, scale: float | None = None) -> Tensor:
    """(T, H, D), (S, G, D), (S, G, E) -> (T, H E) in float64: one sequence; a row that sees nothing gives 0."""
    q, k, v = q.double(), k.double(), v.double()
    share = q.shape[1] // k.shape[1]
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(share, 1)) * (scale or q.shape[2] ** -0.5)
    if seen is not None:
        scores = scores.masked_fill(~seen.to(q.device), -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("hts,she->the", weights, v.repeat_interleave(share, 1)).flatten(1)


def by_sequence(q: Tensor, k: Tensor, v: Tensor, layout: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    axis = 1 if layout == "sbhd" else 0
    return list(zip(q.unbind(axis), k.unbind(axis), v.unbind(axis), strict=True))


def assert_close(value: Tensor, exact: Tensor, dtype: torch.dtype = torch.float32) -> None:
    torch.testing.assert_close(value.double(), exact.double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


# The README's three sequences.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", ["padding", "padding,causal", "causal,padding", "padding_causal_bottom_right"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_padded_batch_is_its_sequences(layout: str, kind: str, dtype: torch.dtype, device: str) -> None:
    size = (5, 3, 4, 16) if layout == "sbhd" else (3, 5, 4, 16)
    q, k, v, dout = draw(*[size] * 4, device=device, dtype=dtype)
    layer = DotProductAttention(4, 16, qkv_format=layout, attn_mask_type=kind)
    out = layer(q, k, v, attention_mask=README.to(device))
    assert out.shape == (*size[:2], 64)
    got = torch.autograd.grad(out, (q, k, v), dout.flatten(2))
    axis = 1 if layout == "sbhd" else 0
    for b, (length, sequence) in enumerate(zip(LENGTHS, by_sequence(q, k, v, layout), strict=True)):
        own = [x[:length].detach().double().requires_grad_() for x in sequence]
        seen = torch.ones(length, length, dtype=torch.bool)
        alone = plain(*own, seen.tril() if "causal" in kind else seen)
        assert_close(out.select(axis, b)[:length], alone, dtype)
        assert not out.select(axis, b)[length:].any()
        wanted = torch.autograd.grad(alone, own, dout.select(axis, b)[:length].flatten(1).double())
        for gradient, exact in zip(got, wanted, strict=True):
            assert_close(gradient.select(axis, b)[:length], exact, dtype)
            assert not gradient.select(axis, b)[length:].any()


# Masks that are no padding.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "rows", "keys"), [("causal", 6, 9), ("causal_bottom_right", 6, 9), ("no_mask", 9, 6)])
@pytest.mark.parametrize("window", [None, (2, 0), (1, 1)])
def test_types_and_windows(kind, rows, keys, layout, window, device):
    sizes = [(rows, 2, 4, 8), (keys, 2, 2, 8), (keys, 2, 2, 8)]
    q, k, v = draw(*sizes, device=device)
    layer = DotProductAttention(4, 8, 2, qkv_format=layout, attn_mask_type=kind)
    swapped = (x if layout == "sbhd" else x.transpose(0, 1) for x in (q, k, v))
    out = layer(*swapped, window_size=window)
    out = out if layout == "sbhd" else out.transpose(0, 1)
    centre = torch.arange(rows)[:, None] + (0 if kind == "causal" else keys - rows)
    ahead = torch.arange(keys) - centre
    left, right = window or (-1, -1)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    seen &= ahead >= -left if left >= 0 else True
    seen &= ahead <= (0 if "causal" in kind else right) if "causal" in kind or right >= 0 else True
    for b in range(2):
        assert_close(out[:, b], plain(q[:, b], k[:, b], v[:, b], seen))


def test_an_arbitrary_mask_with_dead_rows() -> None:
    q, k, v = draw(*[(6, 2, 2, 8)] * 3)
    mask = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[1, 0, 4] = True
    out = DotProductAttention(2, 8, attn_mask_type="arbitrary")(q, k, v, mask)
    for b in range(2):
        assert_close(out[:, b], plain(q[:, b], k[:, b], v[:, b], ~mask[b]))
    out.square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))
    assert q.grad is not None
    assert not q.grad[4, 1].any()


def test_what_forward_is_told_outranks_the_constructor() -> None:
    q, k, v = draw(*[(6, 2, 2, 8)] * 3)
    layer = DotProductAttention(2, 8, attn_mask_type="causal", window_size=(2, 0))
    other = DotProductAttention(2, 8, attn_mask_type="no_mask", window_size=(1, 2), qkv_format="bshd")
    told = layer(q, k, v, None, "bshd", attn_mask_type="no_mask", window_size=(1, 2))
    assert torch.equal(told, other(q, k, v))


# Heads, scales, dropout, precision.


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_heads_share_keys_and_values_in_groups(groups: int) -> None:
    q, k, v = draw((6, 2, 4, 8), (6, 2, groups, 8), (6, 2, groups, 12))
    out = DotProductAttention(4, (8, 12), groups)(q, k, v)
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    for b in range(2):
        assert_close(out[:, b], plain(q[:, b], k[:, b], v[:, b], seen))


def test_the_scale() -> None:
    q, k, v = draw(*[(6, 1, 2, 8)] * 3)
    out = DotProductAttention(2, 8, attn_mask_type="no_mask", softmax_scale=0.7)(q, k, v)
    assert_close(out[:, 0], plain(q[:, 0], k[:, 0], v[:, 0], scale=0.7))


def test_dropout_is_for_training_and_from_torchs_generator() -> None:
    q, k, v = draw(*[(16, 2, 4, 8)] * 3)
    layer = DotProductAttention(4, 8, attention_dropout=0.5)
    whole = DotProductAttention(4, 8)(q, k, v)
    torch.manual_seed(1)
    dropped = layer(q, k, v)
    assert not torch.allclose(dropped, whole)
    torch.manual_seed(1)
    assert torch.equal(layer(q, k, v), dropped)
    torch.testing.assert_close(layer.eval()(q, k, v), whole)


class Spy:
    """What a backend's forward was given beside its tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str):
        real = attention.load(name)

        def forward(*tensors: Tensor, **options: Any) -> Tensor:
            self.seen = options
            return real.forward(*tensors, **options)

        spied = dataclasses.replace(real, forward=forward)
        backend = kernels.backend
        monkeypatch.setattr(kernels, "backend", lambda asked: spied if asked == name else backend(asked))


@pytest.mark.parametrize("kind", ["causal", "no_mask", "padding", "padding_causal", "padding_causal_bottom_right"])
def test_a_window_reaches_a_backend_that_takes_it_and_no_mask_of_queries_and_keys_is_made(kind, monkeypatch):
    q, k, v, dout = draw(*[(5, 3, 2, 16)] * 4)
    layer = DotProductAttention(2, 16, attn_mask_type=kind, window_size=(1, 0 if "causal" in kind else 2))
    results = []
    for name in ("math", "triton"):
        spy = Spy(monkeypatch, name)
        with kernels.attention_kernel(name):
            assert layer.backend_report(q, k, v, attention_mask=README).chosen in (name, None)
            if name == "triton" and not triton_interpreted():
                pytest.skip("needs TRITON_INTERPRET=1")
            out = layer(q, k, v, README)
        results.append([out, *torch.autograd.grad(out, (q, k, v), dout.flatten(2))])
        mask = spy.seen["mask"]
        if name == "math":
            assert mask.shape[-2:] == (5, 5)
        else:
            assert spy.seen["window"] == layer.window_size
            assert spy.seen["causal"] == ("causal" in kind)
            assert mask is None if "padding" not in kind else mask.shape == (3, 1, 1, 5)
    for ours, exact in zip(*reversed(results), strict=True):
        assert_close(ours, exact)


def triton_interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


def test_a_window_that_its_alignment_moves_is_the_same_by_any_backend() -> None:
    """Four keys more than queries, at the bottom right: (6, 0) is (2, 4) of the row; (3, 0) ends before it: a mask."""
    q, k, v = draw((5, 2, 2, 16), (9, 2, 2, 16), (9, 2, 2, 16))
    for window in ((6, 0), (3, 0), (-1, 0)):
        layer = DotProductAttention(2, 16, attn_mask_type="causal_bottom_right", window_size=window)
        ahead = torch.arange(9) - torch.arange(5)[:, None] - 4
        seen = (ahead <= 0) & ((ahead >= -window[0]) if window[0] >= 0 else torch.ones(5, 9, dtype=torch.bool))
        for name in ("math", "manual", "triton"):
            if name == "triton" and not triton_interpreted():
                continue
            with kernels.attention_kernel(name):
                out = layer(q, k, v)
            for b, sequence in enumerate(by_sequence(q, k, v, "sbhd")):
                assert_close(out[:, b], plain(*sequence, seen))


@pytest.mark.gpu
def test_a_windowed_layer_on_a_gpu_makes_no_mask() -> None:
    q, k, v = (x.detach() for x in draw(*[(32768, 1, 2, 64)] * 3, device="cuda", dtype=torch.bfloat16))
    layer = DotProductAttention(2, 64, window_size=(255, 0))
    assert layer.backend_report(q, k, v).chosen == "triton"
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer(q, k, v)
    assert torch.cuda.max_memory_allocated() - before < 2**28  # a mask would take 2^30


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["causal", "padding"])
def test_checkpointed_attention_drops_the_same_again(kind: str, device: str) -> None:
    q, k, v = draw(*[(5, 3, 4, 8)] * 3, device=device)
    layer = DotProductAttention(4, 8, attention_dropout=0.3, attn_mask_type=kind)
    results = []
    for again in (False, True):
        torch.manual_seed(5)
        with kernels.attention_kernel("math"):
            out = layer(q, k, v, README.to(device), checkpoint_core_attention=again)
        # the context has ended: the recomputation keeps to its kernel
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second)


def test_checkpointed_attention_keeps_no_scores() -> None:
    q, k, v = draw(*[(16, 1, 2, 8)] * 3)
    layer = DotProductAttention(2, 8)

    def scores_kept(again: bool) -> int:
        kept: list[Tensor] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
        with kernels.attention_kernel("manual"), hooks:
            layer(q, k, v, checkpoint_core_attention=again)
        return sum(x.shape[-2:] == (16, 16) for x in kept)

    assert scores_kept(False) > 0
    assert scores_kept(True) == 0


def test_autocast_decides_the_precision() -> None:
    q, k, v = draw(*[(6, 2, 2, 8)] * 3)
    layer = DotProductAttention(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(q, k, v)
    assert out.dtype == torch.bfloat16
    assert_close(out, layer(q, k, v), torch.bfloat16)
    assert layer(*(x.double() for x in (q, k, v))).dtype == torch.float64


@pytest.mark.parametrize("sizes", [((0, 2), (0, 2)), ((5, 0), (5, 0)), ((5, 2), (0, 2))], ids=str)
def test_nothing_in_nothing_out(sizes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    q, k, v = draw((*sizes[0], 2, 8), (*sizes[1], 2, 8), (*sizes[1], 2, 8))
    out = DotProductAttention(2, 8, attn_mask_type="no_mask")(q, k, v)
    assert out.shape == (*sizes[0], 16)
    assert not out.any()
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape


def test_views_of_one_projection_are_fine() -> None:
    (mixed,) = draw((6, 2, 2, 3, 8))
    q, k, v = mixed.unbind(3)
    layer = DotProductAttention(2, 8)
    torch.testing.assert_close(layer(q, k, v), layer(q.contiguous(), k.contiguous(), v.contiguous()))


def test_a_report_tells_what_would_run() -> None:
    q, k, v = draw(*[(5, 3, 2, 8)] * 3)
    layer = DotProductAttention(2, 8, attention_dropout=0.1, attn_mask_type="padding")
    said = layer.backend_report(q, k, v, attention_mask=README)
    assert said.chosen == "math"
    assert "dropout" in said.reasons["flash"]
    assert layer.eval().backend_report(q, k, v, attention_mask=README).chosen == "flash"


def test_cumulative_lengths_compile_without_breaks() -> None:
    """Their values go unread there: that would be a break, and on a GPU a wait."""
    q, k, v = draw(*[(5, 3, 2, 8)] * 3)
    layer = DotProductAttention(2, 8, attn_mask_type="padding")
    starts = torch.tensor([0, 3, 5, 9], dtype=torch.int32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    given = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 5, "max_seqlen_kv": 5}
    torch.testing.assert_close(compiled(q, k, v, **given), layer(q, k, v, README))
    assert torch.equal(layer(q, k, v, **given), layer(q, k, v, README))
    torch._dynamo.reset()


@pytest.mark.gpu
def test_cumulative_lengths_are_captured_in_a_graph() -> None:
    q, k, v = (x.detach() for x in draw(*[(5, 3, 2, 8)] * 3, device="cuda"))
    layer = DotProductAttention(2, 8, attn_mask_type="padding")
    starts = torch.tensor([0, 3, 5, 9], dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(q, k, v, cu_seqlens_q=starts, cu_seqlens_kv=starts)
    graph.replay()
    torch.testing.assert_close(out, layer(q, k, v, README.cuda()))


@pytest.mark.parametrize(
    ("kind", "dynamic"),
    [
        *itertools.product(("no_mask", "padding_causal", "arbitrary"), (False,)),
        *itertools.product(("causal_bottom_right", "padding"), (True,)),
    ],
)
def test_it_compiles_without_breaks(kind: str, dynamic: bool) -> None:
    q, k, v = draw(*[(5, 3, 2, 8)] * 3)
    layer = DotProductAttention(2, 8, attn_mask_type=kind)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    out = compiled(q, k, v, README)
    torch.testing.assert_close(out, layer(q, k, v, README))
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), q), torch.autograd.grad(layer(q, k, v, README).square().sum(), q)
    )
    torch._dynamo.reset()


# What is wrong is named.


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_gqa_groups": 3}, "num_attention_heads=4 must be a multiple of num_gqa_groups=3"),
        ({"qkv_format": "hdt"}, "'hdt' is not possible: sbhd, bshd or thd"),
        ({"attn_mask_type": "casual"}, "casual"),
        ({"attention_type": "crossed"}, "crossed"),
        ({"window_size": (-2, 0)}, r"\(-2, 0\)"),
        ({"cp_group": object()}, "no cp_group"),
    ],
)
def test_an_impossible_layer(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        DotProductAttention(4, 8, **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"qkv_format": "thd"}, r"query_layer must be thd, \(rows, heads, features\), got \(5, 3, 2, 8\)"),
        ({"max_seqlen_q": 3}, "max_seqlen_q=3"),
        ({"attn_mask_type": "padding"}, "needs attention_mask"),
        ({"attn_mask_type": "padding", "attention_mask": (README, README, README)}, "got 3 of them"),
        ({"query_layer": torch.zeros(5, 3, 3, 8)}, "query_layer must be sbhd with 2 heads of 8"),
        ({"value_layer": torch.zeros(5, 3, 2, 9)}, "value_layer must be sbhd with 2 heads of 8"),
        ({"key_layer": torch.zeros(5, 3, 2, 8).half()}, "float16"),
        ({"key_layer": torch.zeros(5, 2, 2, 8)}, "differ in batch or keys"),
        ({"value_layer": torch.zeros(4, 3, 2, 8)}, "differ in batch or keys"),
        ({"query_layer": torch.zeros(5, 3, 2, 8, dtype=torch.int64)}, "int64"),
    ],
)
def test_an_impossible_call(options: dict[str, Any], reason: str) -> None:
    x = torch.zeros(5, 3, 2, 8)
    with pytest.raises(ValueError, match=reason):
        DotProductAttention(2, 8)(**{"query_layer": x, "key_layer": x, "value_layer": x, **options})
