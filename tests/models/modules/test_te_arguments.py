"""The arguments of te's modules are Transformer Engine's: the same names, order and defaults, and what asks for nothing.

THEIRS holds the names and defaults of Transformer Engine 2.20 (commit d0067d0), read from its sources by Python's ast.
"""

import ast
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import te_bench.models as te

MUST = object()


def signature(text: str) -> dict[str, Any]:
    """Arguments in their order with their defaults, MUST for those that must be given."""
    own = ast.parse(f"def f({text}): ...").body[0].args  # type: ignore[attr-defined]
    must = [MUST] * (len(own.args) - len(own.defaults))
    values = [*must, *(ast.literal_eval(value) for value in own.defaults)]
    return {argument.arg: value for argument, value in zip(own.args, values, strict=True)}


THEIRS: dict[str, dict[str, Any]] = {
    "Linear.__init__": signature(
        "in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None, "
        "tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True, "
        "return_bias=False, params_dtype=None, parallel_mode=None, parameters_split=None, device='cuda', "
        "ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, "
        "ub_bulk_wgrad=False, ub_name=None, delay_wgrad_compute=False, symmetric_ar_type=None, "
        "save_original_input=False, name=None"
    ),
    "Linear.forward": signature("inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False"),
    "LayerNorm.__init__": signature(
        "normalized_shape=None, eps=1e-05, sequence_parallel=None, params_dtype=None, zero_centered_gamma=False, "
        "hidden_size=None"
    ),
    "LayerNorm.forward": signature("input"),
    "RMSNorm.__init__": signature(
        "normalized_shape=None, eps=1e-05, sequence_parallel=None, params_dtype=None, zero_centered_gamma=False, "
        "hidden_size=None"
    ),
    "RMSNorm.forward": signature("input"),
    "LayerNormLinear.__init__": signature(
        "in_features, out_features, eps=1e-05, sequence_parallel=False, fuse_wgrad_accumulation=False, "
        "tp_group=None, tp_size=1, get_rng_state_tracker=None, init_method=None, bias=True, "
        "normalization='LayerNorm', return_bias=False, params_dtype=None, parallel_mode=None, "
        "return_layernorm_output=False, return_layernorm_output_gathered=False, parameters_split=None, "
        "zero_centered_gamma=False, device='cuda', ub_overlap_ag=False, ub_overlap_rs=False, "
        "ub_overlap_rs_dgrad=False, ub_bulk_wgrad=False, ub_bulk_dgrad=False, ub_name=None, "
        "delay_wgrad_compute=False, symmetric_ar_type=None, name=None"
    ),
    "LayerNormLinear.forward": signature("inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False"),
    "LayerNormMLP.__init__": signature(
        "hidden_size, ffn_hidden_size, eps=1e-05, sequence_parallel=False, return_bias=False, "
        "get_rng_state_tracker=None, tp_group=None, tp_size=1, init_method=None, bias=True, "
        "normalization='LayerNorm', activation='gelu', activation_params=None, output_layer_init_method=None, "
        "fuse_wgrad_accumulation=False, params_dtype=None, return_layernorm_output=False, "
        "return_layernorm_output_gathered=False, seq_length=None, micro_batch_size=None, set_parallel_mode=False, "
        "zero_centered_gamma=False, device='cuda', ub_overlap_ag=False, name=None, ub_overlap_rs=False, "
        "ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False, delay_wgrad_compute=False, "
        "symmetric_ar_type=None, checkpoint=False"
    ),
    "LayerNormMLP.forward": signature("inp, is_first_microbatch=None"),
    "DotProductAttention.__init__": signature(
        "num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format='sbhd', "
        "attn_mask_type='causal', window_size=None, bottom_right_diagonal=None, sequence_parallel=False, "
        "tp_size=1, get_rng_state_tracker=None, tp_group=None, layer_number=None, attention_type='self', "
        "cp_group=None, cp_global_ranks=None, cp_stream=None, cp_comm_type='p2p', softmax_scale=None, "
        "softmax_type='vanilla', return_max_logit=False, name=None"
    ),
    "DotProductAttention.forward": signature(
        "query_layer=None, key_layer=None, value_layer=None, attention_mask=None, qkv_format=None, "
        "cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, "
        "max_seqlen_q=None, max_seqlen_kv=None, attn_mask_type=None, window_size=None, bottom_right_diagonal=None, "
        "checkpoint_core_attention=False, core_attention_bias_type='no_bias', core_attention_bias=None, "
        "alibi_slopes=None, fast_zero_fill=True, inference_params=None, pad_between_seqs=None, fp8_output=False, "
        "bf16_backward=False, num_splits=1, score_mod=None, score_mod_bprop=None, score_mod_tensors=None, "
        "score_mod_bprop_tensors=None, qkv_layer=None, kv_layer=None, qkv_interleave_dim=-3"
    ),
    "MultiheadAttention.__init__": signature(
        "hidden_size, num_attention_heads, kv_channels=None, attention_dropout=0.1, layernorm_epsilon=1e-05, "
        "init_method=None, output_layer_init_method=None, layer_number=None, attn_mask_type='causal', "
        "window_size=None, bottom_right_diagonal=None, tp_group=None, tp_size=1, num_gqa_groups=None, "
        "fuse_wgrad_accumulation=False, get_rng_state_tracker=None, sequence_parallel=False, params_dtype=None, "
        "return_bias=False, return_layernorm_output=False, input_layernorm=False, attention_type='self', "
        "set_parallel_mode=False, fuse_qkv_params=False, zero_centered_gamma=False, qkv_weight_interleaved=True, "
        "rotary_pos_interleaved=False, ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, "
        "ub_bulk_dgrad=False, ub_bulk_wgrad=False, bias=True, normalization='LayerNorm', device='cuda', "
        "qkv_format='sbhd', name=None, qk_norm_type=None, qk_norm_eps=1e-06, qk_norm_before_rope=False, "
        "seq_length=None, micro_batch_size=None, softmax_type='vanilla'"
    ),
    "MultiheadAttention.forward": signature(
        "hidden_states, attention_mask=None, encoder_output=None, attn_mask_type=None, window_size=None, "
        "bottom_right_diagonal=None, is_first_microbatch=None, checkpoint_core_attention=False, "
        "inference_params=None, rotary_pos_emb=None, core_attention_bias_type='no_bias', core_attention_bias=None, "
        "alibi_slopes=None, cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None, "
        "cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None, fast_zero_fill=True, "
        "pad_between_seqs=None"
    ),
    "TransformerLayer.__init__": signature(
        "hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups=None, layernorm_epsilon=1e-05, "
        "hidden_dropout=0.1, attention_dropout=0.1, init_method=None, output_layer_init_method=None, "
        "layer_number=None, kv_channels=None, self_attn_mask_type='causal', window_size=None, "
        "bottom_right_diagonal=None, enc_dec_attn_mask_type='no_mask', enc_dec_bottom_right_diagonal=None, "
        "enc_dec_window_size=None, tp_group=None, tp_size=1, params_dtype=None, get_rng_state_tracker=None, "
        "fuse_wgrad_accumulation=False, seq_length=None, micro_batch_size=None, sequence_parallel=False, "
        "apply_residual_connection_post_layernorm=False, output_layernorm=False, parallel_attention_mlp=False, "
        "layer_type='encoder', drop_path_rate=0.0, set_parallel_mode=False, fuse_qkv_params=False, "
        "rotary_pos_interleaved=False, zero_centered_gamma=False, qkv_weight_interleaved=True, "
        "ub_tp_comm_overlap=False, ub_overlap_ag=True, ub_overlap_rs=True, ub_overlap_rs_dgrad=False, "
        "ub_bulk_dgrad=True, ub_bulk_wgrad=True, bias=True, activation='gelu', activation_params=None, "
        "normalization='LayerNorm', device='cuda', attn_input_format='sbhd', name=None, qk_norm_type=None, "
        "qk_norm_eps=1e-06, qk_norm_before_rope=False, softmax_type='vanilla'"
    ),
    "TransformerLayer.forward": signature(
        "hidden_states, attention_mask=None, self_attn_mask_type=None, window_size=None, "
        "bottom_right_diagonal=None, encoder_output=None, enc_dec_attn_mask=None, enc_dec_attn_mask_type=None, "
        "enc_dec_window_size=None, enc_dec_bottom_right_diagonal=None, is_first_microbatch=None, "
        "checkpoint_core_attention=False, inference_params=None, rotary_pos_emb=None, "
        "core_attention_bias_type='no_bias', core_attention_bias=None, alibi_slopes=None, cu_seqlens_q=None, "
        "cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None, "
        "max_seqlen_kv=None, fast_zero_fill=True, pad_between_seqs=None"
    ),
    "RotaryPositionEmbedding.__init__": signature(
        "dim, rotary_percent=1.0, seq_len_interpolation_factor=None, pretrained_max_position_embeddings=None, "
        "rotary_base=10000.0, interleaved=False"
    ),
    "RotaryPositionEmbedding.forward": signature("max_seq_len, offset=0"),
}

#: What a module is made with here, and what forward takes.
REQUIRED: dict[str, dict[str, Any]] = {
    "Linear": {"in_features": 32, "out_features": 48},
    "LayerNorm": {"normalized_shape": 32},
    "RMSNorm": {"normalized_shape": 32},
    "LayerNormLinear": {"in_features": 32, "out_features": 48},
    "LayerNormMLP": {"hidden_size": 32, "ffn_hidden_size": 48},
    "DotProductAttention": {"num_attention_heads": 2, "kv_channels": 16},
    "MultiheadAttention": {"hidden_size": 32, "num_attention_heads": 2},
    "TransformerLayer": {"hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 2},
    "RotaryPositionEmbedding": {"dim": 16},
}
#: Of one rank, Transformer Engine does nothing else for these.
NOTHING: dict[str, tuple[Any, ...]] = {
    "tp_size": (1,),
    "sequence_parallel": (True, None),
    "parallel_mode": ("column", "row"),
    "set_parallel_mode": (True,),
    "return_layernorm_output_gathered": (True,),
    "symmetric_ar_type": ("two_shot",),
    "ub_tp_comm_overlap": (True,),
    "ub_overlap_ag": (True,),
    "ub_overlap_rs": (True,),
    "ub_overlap_rs_dgrad": (True,),
    "ub_bulk_dgrad": (True,),
    "ub_bulk_wgrad": (True,),
    "ub_name": ("qkv",),
    "cp_comm_type": ("all_gather", "a2a"),
    "seq_length": (512,),
    "micro_batch_size": (4,),
    "activation_params": ({},),
    "qkv_interleave_dim": (-2,),
    "fast_zero_fill": (False,),
    "pad_between_seqs": (False,),
}
#: What te_bench has not, by a value that asks for it.
ASKED: dict[str, Any] = {
    "fuse_wgrad_accumulation": True,
    "delay_wgrad_compute": True,
    "save_original_input": True,
    "checkpoint": True,
    "activation_params": {"limit": 7.0},
    "drop_path_rate": 0.1,
    "softmax_type": "learnable",
    "return_max_logit": True,
    "cp_comm_type": "carrier pigeon",
    "fp8_output": True,
    "fp8_grad": True,
    "core_attention_bias_type": "alibi",
    "core_attention_bias": torch.zeros(1),
    "alibi_slopes": torch.zeros(2),
    "pad_between_seqs": True,
    "inference_params": object(),
    "num_splits": 2,
    "bf16_backward": True,
    "score_mod": lambda score: score,
    "qkv_layer": torch.zeros(1),
    "kv_layer": torch.zeros(1),
}


def arguments(module: str, method: str) -> dict[str, inspect.Parameter]:
    """Those that the signature names."""
    found = inspect.signature(getattr(getattr(te, module), method)).parameters
    return {name: p for name, p in found.items() if name != "self" and p.kind is not p.VAR_KEYWORD}


def inputs(module: str) -> dict[str, Any]:
    """What forward must be given."""
    x = torch.randn(8, 2, 32)
    if module == "RotaryPositionEmbedding":
        return {"max_seq_len": 8}
    if module == "DotProductAttention":
        return dict.fromkeys(("query_layer", "key_layer", "value_layer"), x.view(8, 2, 2, 16))
    return dict.fromkeys((name for name, value in THEIRS[f"{module}.forward"].items() if value is MUST), x)


def defaults(called: str) -> dict[str, Any]:
    return {name: value for name, value in THEIRS[called].items() if value is not MUST}


def call(called: str, **options: Any) -> Any:
    """A module made with the options, or called with them."""
    module, method = called.split(".")
    if method == "__init__":
        return getattr(te, module)(**{**REQUIRED[module], **options})
    return getattr(te, module)(**REQUIRED[module])(**{**inputs(module), **options})


def spoken(called: str) -> str:
    """How messages call it: "Linear", "Linear.forward"."""
    return called.removesuffix(".__init__")


def named(values: dict[str, Any]) -> list[tuple[str, str]]:
    return [(called, name) for called in THEIRS for name in THEIRS[called] if name in values]


@pytest.mark.parametrize("module", REQUIRED)
def test_their_defaults_are_taken_by_name(module: str) -> None:
    options = defaults(f"{module}.__init__")
    made = getattr(te, module)(**{**options, **REQUIRED[module], **({"device": None} if "device" in options else {})})
    out = made(**{**defaults(f"{module}.forward"), **inputs(module)})
    assert isinstance(out, Tensor)


@pytest.mark.parametrize("called", THEIRS)
def test_what_a_signature_names_has_their_place_and_default(called: str) -> None:
    theirs, own = THEIRS[called], arguments(*called.split("."))
    for place, (name, parameter) in enumerate(own.items()):
        if "Norm.__init__" in called and name in ("dtype", "device"):
            continue  # of the class below theirs
        if parameter.default is parameter.empty:
            # Their query, key and value are optional where one tensor holds them.
            assert theirs[name] is MUST or (called == "DotProductAttention.forward" and name.endswith("_layer"))
        elif name != "device":  # "cuda": here the GPU where there is one
            assert parameter.default == theirs[name], name
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            assert list(theirs)[place] == name
    assert {name for name, value in theirs.items() if value is MUST} <= set(own)


@pytest.mark.parametrize(("called", "name"), named(NOTHING))
def test_what_asks_for_nothing_on_one_rank_is_taken(called: str, name: str) -> None:
    for value in NOTHING[name]:
        call(called, **{name: value})


@pytest.mark.parametrize(("called", "name"), named(ASKED))
def test_what_te_bench_has_not_is_named(called: str, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{spoken(called)}: te_bench has no {name}; leave it at .*, got "):
        call(called, **{name: ASKED[name]})


@pytest.mark.parametrize(
    "called", [called for called in THEIRS if not called.startswith(("Rotary", "LayerNorm.f", "RMSNorm.f"))]
)
def test_what_nobody_has_is_unexpected(called: str) -> None:
    with pytest.raises(TypeError, match=f"^{spoken(called)} got an unexpected argument 'no_such_argument'"):
        call(called, no_such_argument=1)


@pytest.fixture
def alone() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_groups_of_one_rank_ask_for_nothing(alone: Any) -> None:
    layer = te.TransformerLayer(32, 48, 2, tp_group=alone, set_parallel_mode=True, sequence_parallel=True)
    for module in layer.modules():
        if hasattr(module, "set_tensor_parallel_group"):
            module.set_tensor_parallel_group(alone)
    layer.set_tensor_parallel_group(None)
    layer.set_context_parallel_group(alone, [0], None)
    layer.self_attention.core_attention.set_context_parallel_group([alone, alone], [0], None, "a2a+p2p")
    with pytest.raises(ValueError, match=r"TransformerLayer: tp_group=<object .* is no process group of torch"):
        layer.set_tensor_parallel_group(object())
    with pytest.raises(ValueError, match=r"te_bench has no cp_group"):
        layer.set_context_parallel_group([alone, 2], [0], None)


def test_two_names_of_one_argument() -> None:
    norm = te.LayerNorm(hidden_size=32, dtype=torch.bfloat16, sequence_parallel=True)
    assert norm.weight.shape == (32,)
    assert norm.weight.dtype is torch.bfloat16
    assert all(p.sequence_parallel for p in norm.parameters())
    with pytest.raises(ValueError, match="normalized_shape and hidden_size are two names"):
        te.RMSNorm(32, hidden_size=32)
    with pytest.raises(ValueError, match="dtype and params_dtype are two names"):
        te.RMSNorm(32, dtype=torch.bfloat16, params_dtype=torch.bfloat16)


def test_a_window_is_aligned_as_the_layer_was_told_or_as_its_forward_is() -> None:
    torch.manual_seed(0)
    options = {"enc_dec_window_size": (1, 1), "layer_type": "decoder", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    x, memory = torch.randn(4, 2, 32), torch.randn(8, 2, 32)
    found: list[Tensor] = []
    layers: list[nn.Module] = [
        te.TransformerLayer(32, 48, 2, enc_dec_bottom_right_diagonal=told, **options) for told in (True, False)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer in layers:
        found += [
            layer(x, encoder_output=memory, enc_dec_bottom_right_diagonal=told).detach() for told in (None, True, False)
        ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[3], found[2])
    assert torch.equal(found[1], found[4])
    assert not torch.allclose(found[1], found[2])


def test_padded_starts_that_are_the_sequences_own_ask_for_nothing() -> None:
    attention = te.DotProductAttention(2, 16, qkv_format="thd", attn_mask_type="padding_causal")
    x, starts = torch.randn(8, 2, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
    own = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 5, "max_seqlen_kv": 5}
    expected = attention(x, x, x, **own)
    found = attention(x, x, x, **own, cu_seqlens_q_padded=starts, cu_seqlens_kv_padded=starts.clone())
    assert torch.equal(found, expected)
    for name in ("cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        with pytest.raises(ValueError, match=f"te_bench has no {name}"):
            attention(x, x, x, **own, **{name: torch.tensor([0, 4, 9], dtype=torch.int32)})
    batched = te.DotProductAttention(2, 16)
    assert batched(x[:, None], x[:, None], x[:, None], cu_seqlens_q_padded=starts).shape == (8, 1, 32)
