"""Check modules' arguments: their legal values, and Transformer Engine's arguments that te_bench does not support.

Of the latter, values that request nothing are accepted, all others refused. At tp_size=1 Transformer Engine itself
turns Userbuffers off, whatever their other arguments say; at more ranks tensor_parallel refuses them.
"""

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

import torch

PARAMETERS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _size(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _dtype(value: Any) -> bool:
    return value is None or (isinstance(value, torch.dtype) and value in PARAMETERS)


_SIZES = ("in_features", "out_features", "hidden_size", "ffn_hidden_size", "normalized_shape", "dim")
_COUNTS = ("num_attention_heads", "num_gqa_groups", "kv_channels", "tp_size")

#: {argument: (test of its legal values, the legal values in words)}.
LEGAL: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys((*_SIZES, *_COUNTS), (_size, "a whole number of at least 1")),
    **dict.fromkeys(
        ("eps", "layernorm_epsilon", "qk_norm_eps", "rotary_base"),
        (lambda value: _number(value) and value > 0, "a number greater than 0"),
    ),
    "rotary_percent": (lambda value: _number(value) and 0 < value <= 1, "a share: greater than 0, up to 1"),
    "hidden_dropout": (lambda value: _number(value) and 0 <= value <= 1, "a probability: from 0 to 1"),
    # Attention divides what it keeps by 1 - dropout.
    "attention_dropout": (lambda value: _number(value) and 0 <= value < 1, "a probability: at least 0 and less than 1"),
    "params_dtype": (
        _dtype,
        f"a dtype of parameters: {', '.join(map(str, PARAMETERS))} or None (for FP8, call the module under te.autocast)",
    ),
}


def _alone(group: Any) -> bool:
    """Return whether there is no process group, or only groups of one rank."""
    if isinstance(group, list | tuple):
        return all(map(_alone, group))
    return group is None or (isinstance(group, torch.distributed.ProcessGroup) and group.size() == 1)


def _whatever(value: Any) -> bool:
    return True


def _one_of(*harmless: Any) -> Callable[[Any], bool]:
    return lambda value: any(value is one or (type(value) is type(one) and value == one) for one in harmless)


def _zero(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) and value in (0, None)


#: Transformer Engine's switches to hide collectives: without effect at tp_size=1, refused by tensor_parallel at more.
SWITCHES = (
    *(
        "return_layernorm_output_gathered",
        "ub_tp_comm_overlap",
        "ub_overlap_ag",
        "ub_overlap_rs",
        "ub_overlap_rs_dgrad",
    ),
    *("ub_bulk_dgrad", "ub_bulk_wgrad"),
)
#: Details of collectives, of context parallelism, and of warming up features that te_bench lacks.
_DETAILS = ("symmetric_ar_type", "ub_name", "cp_global_ranks", "cp_stream", "seq_length", "micro_batch_size")
#: Features that te_bench lacks; False or None means not requested.
_FEATURES = (
    *("fuse_wgrad_accumulation", "delay_wgrad_compute", "save_original_input", "checkpoint"),
    *("fp8_output", "fp8_grad", "return_max_logit", "bf16_backward"),
)
_VALUES = (
    *("inference_params", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "core_attention_bias", "alibi_slopes"),
    *("score_mod", "score_mod_bprop", "score_mod_tensors", "score_mod_bprop_tensors", "qkv_layer", "kv_layer"),
)

#: {argument that te_bench does not support: (its default, whether a value requests nothing)}.
ABSENT: Mapping[str, tuple[Any, Callable[[Any], bool]]] = {
    **dict.fromkeys(SWITCHES, (False, _whatever)),
    **dict.fromkeys(_DETAILS, (None, _whatever)),
    **dict.fromkeys(_FEATURES, (False, _one_of(False, None))),
    **dict.fromkeys(_VALUES, (None, _one_of(None))),
    "cp_group": (None, _alone),
    "cp_comm_type": ("p2p", _one_of("p2p", "all_gather", "a2a", "a2a+p2p")),
    "sm_margin": (0, _zero),
    "activation_params": (None, _one_of(None, {})),
    "drop_path_rate": (0.0, _zero),
    "softmax_type": ("vanilla", _one_of("vanilla")),
    "core_attention_bias_type": ("no_bias", _one_of("no_bias")),
    "fast_zero_fill": (True, _one_of(True, False)),
    "pad_between_seqs": (None, _one_of(None, False)),
    "num_splits": (1, _one_of(1, None)),
    "qkv_interleave_dim": (-3, _whatever),  # of qkv_layer and kv_layer
}


def check(where: str, others: Mapping[str, Any] | None = None, /, **given: Any) -> None:
    """Raise as `reject` does for others, and ValueError, with the legal values, for an illegal value in `given`."""
    reject(where, others or {})
    for name, value in given.items():
        legal, words = LEGAL[name]
        if not legal(value):
            raise ValueError(f"{where}: {name}={value!r} is not {words}")


def reject(where: str, given: Mapping[str, Any]) -> None:
    """Raise TypeError for an unknown argument, ValueError for one of Transformer Engine's that we do not support."""
    for name, value in given.items():
        if name not in ABSENT:
            raise TypeError(f"{where} got an unexpected argument {name!r}")
        default, harmless = ABSENT[name]
        if not harmless(value):
            raise ValueError(f"{where}: te_bench has no {name}; leave it at {default!r}, got {value!r}")
