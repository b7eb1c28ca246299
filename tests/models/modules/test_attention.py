"""MultiheadAttention against its own formula in float64, and against torch.nn.MultiheadAttention."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_bench.models.modules.attention import MultiheadAttention
from te_bench.models.modules.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb

S, B, HIDDEN, HEADS, D = 7, 3, 32, 4, 8
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = torch.tensor([3, 2, 7])
PADDING = (torch.arange(S) >= LENGTHS[:, None])[:, None, None]


def layer(device: str = "cpu", **options: Any) -> MultiheadAttention:
    """With weights of order 1 / sqrt(hidden), so that a wrong head is not lost in a flat softmax."""
    torch.manual_seed(0)
    made = MultiheadAttention(HIDDEN, HEADS, **{"attention_dropout": 0.0, "device": device, **options})
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.4)
    return made


def draw(*size: int, device: str = "cpu", seed: int = 1) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(device).requires_grad_()


def rows(module: nn.Module, names: list[str], kind: str) -> Tensor:
    """Parameters of `kind` (weight or bias) joined, in float64."""
    return torch.cat([getattr(module, f"{name}{kind}").double() for name in names])


def projected(mha: MultiheadAttention, x: Tensor, memory: Tensor | None, groups: int) -> tuple[Tensor, ...]:
    """q (s, b, h, d), k and v (t, b, g, d), head by head from the parameters that are there."""
    fused = mha.attention_type == "self" and "weight" in dict(first_of(mha).named_parameters())
    norm = first_of(mha)
    if mha.input_layernorm:
        x = F.layer_norm(x, (HIDDEN,), norm.layer_norm_weight.double(), norm.layer_norm_bias.double())
    if memory is None:
        names = [""] if fused else ["query_", "key_", "value_"]
        weight, bias = rows(norm, names, "weight"), rows(norm, names, "bias")
        each = HEADS // groups
        if mha.interleaved:
            order = weight.view(groups, each + 2, D, HIDDEN), bias.view(groups, each + 2, D)
            parts = [
                (w.flatten(0, 2), b.flatten()) for w, b in zip(*(t.split((each, 1, 1), 1) for t in order), strict=True)
            ]
        else:
            sizes = (HEADS * D, groups * D, groups * D)
            parts = list(zip(weight.split(sizes), bias.split(sizes), strict=True))
        q, k, v = (F.linear(x, w, b).unflatten(-1, (-1, D)) for w, b in parts)
        return q, k, v
    split = "key_weight" in dict(mha.key_value.named_parameters())
    query = ["query_"] if mha.input_layernorm and split else [""]
    q = F.linear(x, rows(norm, query, "weight"), rows(norm, query, "bias")).unflatten(-1, (-1, D))
    names = ["key_", "value_"] if split else [""]
    kv = F.linear(memory, rows(mha.key_value, names, "weight"), rows(mha.key_value, names, "bias"))
    if mha.interleaved:
        k, v = kv.unflatten(-1, (groups, 2, D)).unbind(-2)
        return q, k, v
    k, v = kv.unflatten(-1, (2, groups, D)).unbind(-3)
    return q, k, v


def first_of(mha: MultiheadAttention) -> Any:
    names = ("layernorm_qkv", "qkv", "layernorm_query", "query_layer")
    return next(getattr(mha, name) for name in names if hasattr(mha, name))


def by_formula(
    mha: MultiheadAttention, x: Tensor, memory: Tensor | None = None, *, groups: int = HEADS, seen: Tensor | None = None
) -> Tensor:
    """(s, b, hidden) in float64; seen: what broadcasts to (b, h, s, t)."""
    x, memory = x.double(), None if memory is None else memory.double()
    q, k, v = projected(mha, x, memory, groups)
    each = HEADS // groups
    out = torch.zeros_like(q)
    for h in range(HEADS):
        scores = torch.einsum("sbd,tbd->bst", q[:, :, h], k[:, :, h // each]) / D**0.5
        if seen is not None:
            scores = scores.masked_fill(~seen[:, min(h, seen.shape[1] - 1)].to(x.device), -1e300)
        out[:, :, h] = torch.einsum("bst,tbd->sbd", scores.softmax(-1), v[:, :, h // each])
    return F.linear(out.flatten(2), mha.proj.weight.double(), mha.proj.bias.double())


def assert_same(mha: MultiheadAttention, out: Tensor, exact: Tensor, inputs: list[Tensor]) -> None:
    """Output, gradients of the inputs and of every parameter."""
    torch.testing.assert_close(out.double(), exact, atol=1e-4, rtol=1e-4)
    weights = draw(*exact.shape, device=str(exact.device), seed=9)
    wanted = inputs + list(mha.parameters())
    got = torch.autograd.grad((out * weights).sum(), wanted)
    true = torch.autograd.grad((exact * weights.double()).sum(), wanted)
    for value, truth in zip(got, true, strict=True):
        torch.testing.assert_close(value, truth.to(value.dtype), atol=3e-4, rtol=3e-4)


CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()[None, None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize(
    "fused", [{}, {"fuse_qkv_params": True}, {"fuse_qkv_params": True, "qkv_weight_interleaved": False}]
)
@pytest.mark.parametrize("norm", [False, True])
def test_self_attention(norm: bool, fused: dict[str, bool], groups: int, layout: str, device: str) -> None:
    mha = layer(device, input_layernorm=norm, num_gqa_groups=groups, qkv_format=layout, **fused)
    x = draw(S, B, HIDDEN, device=device)
    out = mha(x if layout == "sbhd" else x.transpose(0, 1))
    out = out if layout == "sbhd" else out.transpose(0, 1)
    assert_same(mha, out, by_formula(mha, x, groups=groups, seen=CAUSAL), [x])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize(
    "fused", [{}, {"fuse_qkv_params": True}, {"fuse_qkv_params": True, "qkv_weight_interleaved": False}]
)
@pytest.mark.parametrize("norm", [False, True])
def test_cross_attention(norm: bool, fused: dict[str, bool], groups: int, device: str) -> None:
    options = {"attention_type": "cross", "attn_mask_type": "no_mask", "num_gqa_groups": groups}
    mha = layer(device, input_layernorm=norm, **options, **fused)
    x, memory = draw(S, B, HIDDEN, device=device), draw(9, B, HIDDEN, device=device, seed=2)
    assert_same(mha, mha(x, encoder_output=memory), by_formula(mha, x, memory, groups=groups), [x, memory])


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, "qkv.query_weight qkv.query_bias qkv.key_weight qkv.key_bias qkv.value_weight qkv.value_bias"),
        ({"fuse_qkv_params": True}, "qkv.weight qkv.bias"),
        (
            {"input_layernorm": True, "fuse_qkv_params": True},
            "layernorm_qkv.layer_norm_weight layernorm_qkv.layer_norm_bias layernorm_qkv.weight layernorm_qkv.bias",
        ),
        (
            {"input_layernorm": True, "normalization": "RMSNorm", "bias": False},
            "layernorm_qkv.layer_norm_weight layernorm_qkv.query_weight layernorm_qkv.key_weight layernorm_qkv.value_weight",
        ),
        (
            {"attention_type": "cross"},
            "query_layer.weight query_layer.bias "
            "key_value.key_weight key_value.key_bias key_value.value_weight key_value.value_bias",
        ),
        (
            {"attention_type": "cross", "input_layernorm": True, "bias": False},
            "layernorm_query.layer_norm_weight layernorm_query.layer_norm_bias layernorm_query.query_weight "
            "key_value.key_weight key_value.value_weight",
        ),
        (
            {"attention_type": "cross", "fuse_qkv_params": True, "input_layernorm": True, "bias": False},
            "layernorm_query.layer_norm_weight layernorm_query.layer_norm_bias layernorm_query.weight key_value.weight",
        ),
        ({"fuse_qkv_params": True, "bias": False, "qk_norm_type": "RMSNorm"}, "qkv.weight q_norm.weight k_norm.weight"),
    ],
)
def test_parameters_are_called_as_in_transformer_engine(options: dict[str, Any], names: str) -> None:
    expected = {*names.split(), "proj.weight", *(["proj.bias"] if options.get("bias", True) else [])}
    assert {name for name, _ in layer(**options).named_parameters()} == expected
    assert set(layer(**options).state_dict()) == expected


def test_it_is_torchs_multihead_attention() -> None:
    mha = layer(fuse_qkv_params=True, qkv_weight_interleaved=False, attn_mask_type="padding")
    theirs = nn.MultiheadAttention(HIDDEN, HEADS)
    theirs.load_state_dict(
        {
            "in_proj_weight": mha.qkv.weight,
            "in_proj_bias": mha.qkv.bias,
            "out_proj.weight": mha.proj.weight,
            "out_proj.bias": mha.proj.bias,
        }
    )
    x = draw(S, B, HIDDEN)
    expected, _ = theirs(x, x, x, key_padding_mask=PADDING[:, 0, 0], need_weights=False)
    out = mha(x, PADDING)
    for b, length in enumerate(LENGTHS.tolist()):
        torch.testing.assert_close(out[:length, b], expected[:length, b], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(out[length:, b], mha.proj.bias.expand(S - length, -1))  # of a context of 0


def test_masks_and_windows_reach_the_attention() -> None:
    mha, x = layer(window_size=(2, 0)), draw(S, B, HIDDEN)
    ahead = torch.arange(S) - torch.arange(S)[:, None]
    near = ((ahead <= 0) & (ahead >= -2))[None, None]
    torch.testing.assert_close(mha(x).double(), by_formula(mha, x, seen=near), atol=3e-5, rtol=3e-5)
    nearer = ((ahead <= 0) & (ahead >= -1))[None, None]
    torch.testing.assert_close(
        mha(x, window_size=(1, 0)).double(), by_formula(mha, x, seen=nearer), atol=3e-5, rtol=3e-5
    )
    mask = torch.rand(B, HEADS, S, S, generator=torch.Generator().manual_seed(4)) < 0.3
    mask[..., 0] = False
    out = mha(x, mask, attn_mask_type="arbitrary", window_size=(-1, -1))
    torch.testing.assert_close(out.double(), by_formula(mha, x, seen=~mask), atol=3e-5, rtol=3e-5)


def test_cross_attention_takes_a_pair_of_padding_masks() -> None:
    mha = layer(attention_type="cross", attn_mask_type="padding")
    x, memory = draw(S, B, HIDDEN), draw(9, B, HIDDEN, seed=2)
    keys = torch.tensor([9, 4, 1])
    key_padding = (torch.arange(9) >= keys[:, None])[:, None, None]
    out = mha(x, (PADDING, key_padding), encoder_output=memory)
    exact = by_formula(mha, x, memory, seen=~key_padding)
    for b, length in enumerate(LENGTHS.tolist()):
        torch.testing.assert_close(out[:length, b].double(), exact[:length, b], atol=3e-5, rtol=3e-5)
        torch.testing.assert_close(out[length:, b], mha.proj.bias.expand(S - length, -1))  # of a context of 0


def by_sdpa(mha: MultiheadAttention, x: Tensor, change: Callable[[Tensor, Any], Tensor]) -> Tensor:
    """Causal attention of queries and keys that were changed: change(q, q_norm), change(k, k_norm)."""
    q, k, v = (
        F.linear(x, getattr(mha.qkv, f"{n}_weight"), getattr(mha.qkv, f"{n}_bias")).unflatten(-1, (HEADS, D))
        for n in ("query", "key", "value")
    )
    heads = [t.permute(1, 2, 0, 3) for t in (change(q, mha.q_norm), change(k, mha.k_norm), v)]
    context = F.scaled_dot_product_attention(*heads, is_causal=True).permute(2, 0, 1, 3).flatten(2)
    return F.linear(context, mha.proj.weight, mha.proj.bias)


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embeddings_turn_queries_and_keys(interleaved: bool, layout: str) -> None:
    mha = layer(rotary_pos_interleaved=interleaved, qkv_format=layout)
    freqs = RotaryPositionEmbedding(D, interleaved=interleaved).to("cpu")(S)
    x = draw(S, B, HIDDEN)
    expected = by_sdpa(mha, x, lambda t, _: apply_rotary_pos_emb(t, freqs, interleaved=interleaved))
    given = x if layout == "sbhd" else x.transpose(0, 1)
    out = mha(given, rotary_pos_emb=freqs)
    torch.testing.assert_close(out if layout == "sbhd" else out.transpose(0, 1), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(mha(given, rotary_pos_emb=(freqs, freqs * 0)), out)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", ["L2Normalization", "RMSNorm", "LayerNorm"])
def test_queries_and_keys_are_normalised(kind: str, before: bool) -> None:
    mha = layer(qk_norm_type=kind, qk_norm_before_rope=before, qk_norm_eps=1e-3)
    freqs = RotaryPositionEmbedding(D).to("cpu")(S)

    def norm(t: Tensor, module: Any) -> Tensor:
        if kind == "L2Normalization":
            return t / (t.square().sum(-1, keepdim=True) + 1e-3).sqrt()
        t = t if kind == "RMSNorm" else t - t.mean(-1, keepdim=True)
        bias = 0.0 if kind == "RMSNorm" else module.bias
        return t / (t.square().mean(-1, keepdim=True) + 1e-3).sqrt() * module.weight + bias

    def change(t: Tensor, module: Any) -> Tensor:
        if before:
            return apply_rotary_pos_emb(norm(t, module), freqs)
        return norm(apply_rotary_pos_emb(t, freqs), module)

    x = draw(S, B, HIDDEN)
    torch.testing.assert_close(mha(x, rotary_pos_emb=freqs), by_sdpa(mha, x, change), atol=1e-5, rtol=1e-5)


def test_what_comes_back() -> None:
    x = draw(S, B, HIDDEN)
    whole = layer(input_layernorm=True)
    normed = F.layer_norm(x, (HIDDEN,), whole.layernorm_qkv.layer_norm_weight, whole.layernorm_qkv.layer_norm_bias)
    out, bias = layer(input_layernorm=True, return_bias=True)(x)
    torch.testing.assert_close(out + bias, whole(x))
    out, kept = layer(input_layernorm=True, return_layernorm_output=True)(x)
    torch.testing.assert_close(out, whole(x))
    torch.testing.assert_close(kept, normed)
    three = layer(input_layernorm=True, return_layernorm_output=True, return_bias=True)(x)
    assert len(three) == 3
    assert isinstance(layer(return_layernorm_output=True)(x), Tensor)  # without a norm there is none to return


def test_dropout_defaults_to_a_tenth_and_is_for_training() -> None:
    mha = layer(attention_dropout=0.1)
    assert MultiheadAttention(HIDDEN, HEADS, device="cpu").core_attention.attention_dropout == 0.1
    x = draw(S, B, HIDDEN)
    assert not torch.equal(mha(x), mha(x))
    mha.eval()
    torch.testing.assert_close(mha(x), layer()(x))


def test_channels_that_are_not_a_part_of_the_hidden_size() -> None:
    mha = layer(kv_channels=12)
    assert mha.qkv.query_weight.shape == (HEADS * 12, HIDDEN)
    assert mha.proj.weight.shape == (HIDDEN, HEADS * 12)
    assert mha(draw(S, B, HIDDEN)).shape == (S, B, HIDDEN)


def test_it_compiles_without_breaks() -> None:
    mha, x = layer(input_layernorm=True, num_gqa_groups=2), draw(S, B, HIDDEN)
    freqs = RotaryPositionEmbedding(D).to("cpu")(S)
    compiled = torch.compile(mha, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, rotary_pos_emb=freqs), mha(x, rotary_pos_emb=freqs))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_gqa_groups": 3}, "num_gqa_groups=3"),
        ({"num_attention_heads": 5}, "hidden_size=32 is not a multiple of 5 heads"),
        ({"qk_norm_type": "BatchNorm"}, "BatchNorm"),
        ({"normalization": "BatchNorm", "input_layernorm": True}, "BatchNorm"),
    ],
)
def test_an_impossible_layer(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        MultiheadAttention(**{"hidden_size": HIDDEN, "num_attention_heads": HEADS, "device": "cpu", **options})


def test_an_impossible_call() -> None:
    x = draw(S, B, HIDDEN)
    with pytest.raises(ValueError, match="needed there"):
        layer(attention_type="cross")(x)
    with pytest.raises(ValueError, match="encoder_output is for"):
        layer()(x, encoder_output=x)
    with pytest.raises(ValueError, match="3 dimensions"):
        layer()(x[0])


def test_the_mask_s_settings_are_read_and_set_on_the_layer_as_on_its_core() -> None:
    attention = MultiheadAttention(32, 4, attn_mask_type="no_mask")
    assert (attention.attn_mask_type, attention.window_size) == ("no_mask", attention.core_attention.window_size)
    attention.attn_mask_type = "causal"
    assert attention.core_attention.attn_mask_type == "causal"
