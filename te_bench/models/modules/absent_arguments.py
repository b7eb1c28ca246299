"""Transformer Engine's arguments that te_bench has no machinery for: what asks for nothing is taken, all else refused.

One GPU a model: at tp_size=1 Transformer Engine itself turns tensor and sequence parallelism and Userbuffers off, whatever
their other arguments say.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def _alone(group: Any) -> bool:
    """No process group, or groups of one rank."""
    if isinstance(group, list | tuple):
        return all(map(_alone, group))
    return group is None or (isinstance(group, torch.distributed.ProcessGroup) and group.size() == 1)


def _whatever(value: Any) -> bool:
    return True


def _one_of(*harmless: Any) -> Callable[[Any], bool]:
    return lambda value: any(value is one or (type(value) is type(one) and value == one) for one in harmless)


def _zero(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) and value in (0, None)


#: By an argument's name: its default, and whether a value asks for nothing.
ABSENT: Mapping[str, tuple[Any, Callable[[Any], bool]]] = {
    "tp_size": (1, _one_of(1)),
    "tp_group": (None, _alone),
    "cp_group": (None, _alone),
    # Details of what tp_size=1 and a cp_group of one rank leave out.
    "sequence_parallel": (False, _whatever),
    "parallel_mode": (None, _one_of(None, "column", "row")),
    "set_parallel_mode": (False, _whatever),
    "return_layernorm_output_gathered": (False, _whatever),
    "symmetric_ar_type": (None, _whatever),
    "ub_tp_comm_overlap": (False, _whatever),
    "ub_overlap_ag": (False, _whatever),
    "ub_overlap_rs": (False, _whatever),
    "ub_overlap_rs_dgrad": (False, _whatever),
    "ub_bulk_dgrad": (False, _whatever),
    "ub_bulk_wgrad": (False, _whatever),
    "ub_name": (None, _whatever),
    "cp_global_ranks": (None, _whatever),
    "cp_stream": (None, _whatever),
    "cp_comm_type": ("p2p", _one_of("p2p", "all_gather", "a2a", "a2a+p2p")),
    # For warming up what te_bench has not.
    "seq_length": (None, _whatever),
    "micro_batch_size": (None, _whatever),
    "sm_margin": (0, _zero),
    "fuse_wgrad_accumulation": (False, _one_of(False, None)),
    "delay_wgrad_compute": (False, _one_of(False, None)),
    "save_original_input": (False, _one_of(False, None)),
    "checkpoint": (False, _one_of(False, None)),
    "activation_params": (None, _one_of(None, {})),
    "drop_path_rate": (0.0, _zero),
    "fp8_output": (False, _one_of(False, None)),
    "fp8_grad": (False, _one_of(False, None)),
    "inference_params": (None, _one_of(None)),
    "softmax_type": ("vanilla", _one_of("vanilla")),
    "return_max_logit": (False, _one_of(False, None)),
    "cu_seqlens_q_padded": (None, _one_of(None)),
    "cu_seqlens_kv_padded": (None, _one_of(None)),
    "core_attention_bias_type": ("no_bias", _one_of("no_bias")),
    "core_attention_bias": (None, _one_of(None)),
    "alibi_slopes": (None, _one_of(None)),
    "fast_zero_fill": (True, _one_of(True, False)),
    "pad_between_seqs": (None, _one_of(None, False)),
    "bf16_backward": (False, _one_of(False, None)),
    "num_splits": (1, _one_of(1, None)),
    "score_mod": (None, _one_of(None)),
    "score_mod_bprop": (None, _one_of(None)),
    "score_mod_tensors": (None, _one_of(None)),
    "score_mod_bprop_tensors": (None, _one_of(None)),
    "qkv_layer": (None, _one_of(None)),
    "kv_layer": (None, _one_of(None)),
    "qkv_interleave_dim": (-3, _whatever),  # of qkv_layer and kv_layer
}


def reject(where: str, given: Mapping[str, Any]) -> None:
    """Raise TypeError for an unknown argument, ValueError for one of Transformer Engine's that asks for what we lack."""
    for name, value in given.items():
        if name not in ABSENT:
            raise TypeError(f"{where} got an unexpected argument {name!r}")
        default, harmless = ABSENT[name]
        if not harmless(value):
            raise ValueError(f"{where}: te_bench has no {name}; leave it at {default!r}, got {value!r}")


class OneRank:
    """A module whose weights and sequences lie on one rank: it takes the process groups of Transformer Engine's users."""

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """None, or a group of one rank; raises ValueError for another."""
        reject(type(self).__name__, {"tp_group": tp_group})

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Sequence[int] | None, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """None, or a group of one rank; raises ValueError for another."""
        reject(type(self).__name__, {"cp_group": cp_group, "cp_comm_type": cp_comm_type})
