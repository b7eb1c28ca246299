"""MultiheadAttention: projections around DotProductAttention, over heads that may share keys, values.

Shapes: s positions, b batch, h heads, g groups of heads that share a key and a value, d features of a head.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_bench.models.modules import arguments
from te_bench.models.modules.attention_mask import MaskTensor, Window, longest_of
from te_bench.models.modules.dot_product_attention import DotProductAttention, check_format, check_heads
from te_bench.models.modules.layernorm import LayerNorm, RMSNorm
from te_bench.models.modules.layernorm_linear import LayerNormLinear
from te_bench.models.modules.linear import Linear
from te_bench.models.modules.parameters import Tracker
from te_bench.models.modules.plain import are_plain
from te_bench.models.modules.rotary import (
    Rotation,
    angles_of,
    apply_rotary_pos_emb,
    are_constant,
    can_rotate_fused,
    check_angles,
    packed_angles,
    split_rotated,
)
from te_bench.models.modules.tensor_parallel import Parallelised, Ranks, require_set

Rotary = Tensor | tuple[Tensor, Tensor] | None  # angles of queries and keys, or one each

__all__ = ["DotProductAttention", "MultiheadAttention"]


class L2Normalization(nn.Module):
    """y = x / sqrt(sum(x^2) + eps) over the last dimension, computed in float32 at least."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)


def _pair(rotary: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return (queries' angles, keys' angles). Raises ValueError for anything else."""
    pair = rotary if isinstance(rotary, tuple) else (rotary, rotary)
    if len(pair) != 2 or not all(isinstance(freqs, Tensor) for freqs in pair):
        given = f"a tuple of {len(pair)}" if isinstance(rotary, tuple) else type(rotary).__name__
        raise ValueError(
            f"rotary_pos_emb: {given}; give RotaryPositionEmbedding's angles, or a pair, of queries and keys"
        )
    return pair


def _of_core(name: str) -> Any:
    """Make a property that reads and sets core_attention's attribute, as Transformer Engine's users do."""
    return property(
        lambda self: getattr(self.core_attention, name), lambda self, value: setattr(self.core_attention, name, value)
    )


class MultiheadAttention(Parallelised, nn.Module):
    """Projections to query, key and value, attention over heads, projection back: (s, b, hidden) -> (s, b, hidden).

    With qkv_format "bshd" x is (b, s, hidden); with "thd" (rows, hidden), sequences packed by cu_seqlens.
    input_layernorm normalises the input first; attention_type "cross" takes keys and values from encoder_output.
    Without fuse_qkv_params query, key and value have separate weights; with it one weight, whose rows are grouped by
    head (qkv_weight_interleaved) or by query, key, value. set_parallel_mode divides the heads among tp_group: see
    tensor_parallel. Arguments, defaults and parameter names are Transformer Engine's; those after bottom_right_diagonal
    are keyword-only. Raises ValueError for what te_bench does not support.
    """

    attn_mask_type, window_size = _of_core("attn_mask_type"), _of_core("window_size")
    bottom_right_diagonal = _of_core("bottom_right_diagonal")

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        *,
        num_gqa_groups: int | None = None,
        get_rng_state_tracker: Tracker = None,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        set_parallel_mode: bool = False,
        sequence_parallel: bool | None = False,
        **others: Any,
    ):
        super().__init__()
        where = "MultiheadAttention"
        self.ranks = Ranks(where, tp_group, tp_size, sequence_parallel, others)
        require_set(self.ranks, set_parallel_mode)
        epsilons = {"layernorm_epsilon": layernorm_epsilon, "qk_norm_eps": qk_norm_eps}
        arguments.check(where, others, hidden_size=hidden_size, params_dtype=params_dtype, **epsilons)
        groups = check_heads(where, num_attention_heads, num_gqa_groups, attention_type, attention_dropout)
        self._set_heads(hidden_size, num_attention_heads, groups, kv_channels)
        self.qkv_format = check_format(where, qkv_format)
        self.attention_type, self.input_layernorm, self.name = attention_type, input_layernorm, name
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output and input_layernorm
        self.interleaved = fuse_qkv_params and qkv_weight_interleaved
        self.rotary_pos_interleaved, self.qk_norm_before_rope = rotary_pos_interleaved, qk_norm_before_rope
        shared: dict[str, Any] = {"tp_group": tp_group, "tp_size": tp_size, "sequence_parallel": sequence_parallel}
        common: dict[str, Any] = {"bias": bias, "params_dtype": params_dtype, "device": device, **shared}
        common["get_rng_state_tracker"] = get_rng_state_tracker
        norm: dict[str, Any] = {"eps": layernorm_epsilon, "normalization": normalization}
        norm |= {"zero_centered_gamma": zero_centered_gamma, "return_layernorm_output": return_layernorm_output}
        self._make_projections(hidden_size, not fuse_qkv_params, {**common, "init_method": init_method}, norm)
        self.q_norm, self.k_norm = self._make_qk_norms(qk_norm_type, qk_norm_eps, device, params_dtype)
        self.core_attention = DotProductAttention(
            num_attention_heads,
            self.channels,
            num_gqa_groups=groups,
            attention_dropout=attention_dropout,
            qkv_format=qkv_format,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            get_rng_state_tracker=get_rng_state_tracker,
            layer_number=layer_number,
            attention_type=attention_type,
            **shared,
        )
        common |= {"init_method": output_layer_init_method, "return_bias": return_bias}
        self.proj = Linear(self.channels * num_attention_heads, hidden_size, parallel_mode="row", **common)

    def _set_heads(self, hidden: int, heads: int, groups: int, kv_channels: int | None) -> None:
        if kv_channels is not None:
            arguments.check("MultiheadAttention", kv_channels=kv_channels)
        elif hidden % heads:
            raise ValueError(f"MultiheadAttention: hidden_size={hidden} is not a multiple of {heads} heads")
        self.num_attention_heads, self.num_gqa_groups = heads, groups
        self.num_attention_heads_per_partition = self.ranks.part("num_attention_heads", heads)
        self.num_gqa_groups_per_partition = self.ranks.part("num_gqa_groups", groups)
        self.channels = hidden // heads if kv_channels is None else kv_channels
        self.features_q = self.channels * self.num_attention_heads_per_partition  # this rank's
        self.features_kv = self.channels * self.num_gqa_groups_per_partition

    def _make_projections(self, hidden: int, split: bool, linear: dict[str, Any], norm: dict[str, Any]) -> None:
        """Make layernorm_qkv or qkv; for cross attention layernorm_query or query_layer, and key_value."""
        q, kv = self.channels * self.num_attention_heads, self.channels * self.num_gqa_groups
        linear["parallel_mode"] = "column"
        if self.attention_type == "self":
            parts: Any = {"query": q, "key": kv, "value": kv} if split else None
            if self.input_layernorm:
                self.layernorm_qkv = LayerNormLinear(hidden, q + 2 * kv, parameters_split=parts, **norm, **linear)
            else:
                self.qkv = Linear(hidden, q + 2 * kv, parameters_split=parts, **linear)
            return
        if self.input_layernorm:
            parts = ("query",) if split else None
            self.layernorm_query = LayerNormLinear(hidden, q, parameters_split=parts, **norm, **linear)
        else:
            self.query_layer = Linear(hidden, q, **linear)
        self.key_value = Linear(hidden, 2 * kv, parameters_split=("key", "value") if split else None, **linear)

    def _make_qk_norms(self, kind: str | None, eps: float, device: Any, dtype: Any) -> tuple[Any, Any]:
        if kind is None:
            return None, None
        if kind == "L2Normalization":
            shared = L2Normalization(eps)
            return shared, shared
        norms = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
        if kind not in norms:
            raise ValueError(f"qk_norm_type={kind!r} is not possible: None, L2Normalization, LayerNorm or RMSNorm")
        made = [norms[kind](self.channels, eps, device=device, params_dtype=dtype) for _ in range(2)]
        for norm in made:
            norm.ranks = self.ranks if self.ranks.size > 1 else None  # each rank norms its own heads
        return made[0], made[1]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: MaskTensor = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        *,
        rotary_pos_emb: Rotary = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        **others: Any,
    ) -> Any:
        """Return the output, then proj's bias with return_bias, then norm(input) with return_layernorm_output.

        rotary_pos_emb: RotaryPositionEmbedding's angles, or a pair for queries and keys; for "thd" those of one
        sequence's positions, max_seqlen_q and max_seqlen_kv of them, or as many as the longest sequence has.
        """
        if others:
            arguments.reject("MultiheadAttention.forward", others)
        core: dict[str, Any] = {
            "attention_mask": attention_mask,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_kv": cu_seqlens_kv,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_kv": max_seqlen_kv,
            "attn_mask_type": attn_mask_type,
            "window_size": window_size,
            "bottom_right_diagonal": bottom_right_diagonal,
            "checkpoint_core_attention": checkpoint_core_attention,
        }
        if self.qkv_format == "thd":
            return self._packed(hidden_states, encoder_output, is_first_microbatch, rotary_pos_emb, core)
        q, k, v, normed, rotary = self._project(hidden_states, encoder_output, is_first_microbatch, rotary_pos_emb)
        return self._finish(self.attend(q, k, v, rotary, core), normed, is_first_microbatch)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotary_pos_emb: Rotary,
        core: dict[str, Any],
    ) -> Tensor:
        """Compute attention of projected q, k and v, in hidden_states' layout; core: core_attention's arguments."""
        q, k = self._normalize_and_rotate(q, k, rotary_pos_emb)
        context: Tensor = self.core_attention(q, k, v, **core)
        return context

    def _normalize_and_rotate(self, q: Tensor, k: Tensor, rotary_pos_emb: Rotary) -> tuple[Tensor, Tensor]:
        """Normalise and rotate q and k (s, b, h, d) or (b, s, h, d), as configured and in the configured order."""
        if self.q_norm is not None and self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary_pos_emb is not None:
            layout = "bshd" if self.qkv_format == "bshd" else "sbhd"
            q, k = (
                apply_rotary_pos_emb(x, freqs, layout, interleaved=self.rotary_pos_interleaved)
                for x, freqs in zip((q, k), _pair(rotary_pos_emb), strict=True)
            )
        if self.q_norm is not None and not self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k

    def rotation(self, outer: tuple[int, int], rotary_pos_emb: Rotary) -> Rotation | None:
        """Return the rotation of a projection (*outer, F) if it comes first and by constant angles; else None.

        Raises ValueError as apply_rotary_pos_emb does.
        """
        if rotary_pos_emb is None or (self.q_norm is not None and self.qk_norm_before_rope):
            return None
        pair, batch_first = _pair(rotary_pos_emb), self.qkv_format == "bshd"
        if not are_constant(*pair):
            return None
        for freqs in pair:
            check_angles((*outer, self.num_attention_heads_per_partition, self.channels), freqs, batch_first)
        q, k = (angles_of(outer, freqs, batch_first) for freqs in pair)
        turns = self.num_gqa_groups_per_partition if self.interleaved else 1
        columns = self.features_q // turns, self.features_kv // turns, self.features_kv // turns
        return Rotation(q, k, turns, columns, self.channels, outer, batch_first, self.rotary_pos_interleaved)

    def _packed(
        self,
        x: Tensor,
        encoder_output: Tensor | None,
        is_first_microbatch: bool | None,
        rotary: Rotary,
        core: dict[str, Any],
    ) -> Any:
        """forward for "thd": (rows, hidden) is projected and rotated as a batch of one."""
        if x.dim() != 2:
            raise ValueError(f"MultiheadAttention: hidden_states must be (rows, hidden) for thd, got {tuple(x.shape)}")
        encoded = None if encoder_output is None else encoder_output[:, None]
        if rotary is not None:
            rotary = self._packed_angles(_pair(rotary), x, x if encoder_output is None else encoder_output, core)
        q, k, v, normed, rotary = self._project(x[:, None], encoded, is_first_microbatch, rotary)
        q, k = self._normalize_and_rotate(q, k, rotary)
        context = self.core_attention(q.squeeze(1), k.squeeze(1), v.squeeze(1), **core)
        return self._finish(context, None if normed is None else normed.squeeze(1), is_first_microbatch)

    def _packed_angles(
        self, pair: tuple[Tensor, Tensor], x: Tensor, memory: Tensor, core: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Return the angles of x's rows (queries) and memory's rows (keys), by their position in their sequence.

        The longest sequences are read for core attention anyway, so the host reads nothing more.
        """

        n = self.ranks.size if self.ranks.sequence else 1  # x is a rank's part of the rows that the projections have

        def angles(freqs: Tensor, name: str, rows: int) -> Tensor:
            starts = core[f"cu_seqlens_{name}"]
            longest = longest_of(f"cu_seqlens_{name}", starts, rows, core[f"max_seqlen_{name}"], x.device)
            return packed_angles(freqs, starts, rows, longest)

        q = angles(pair[0], "q", n * len(x))
        shared = pair[0] is pair[1] and memory is x and core["cu_seqlens_q"] is core["cu_seqlens_kv"]
        return q, q if shared else angles(pair[1], "kv", n * len(memory))

    def _finish(self, context: Tensor, normed: Tensor | None, is_first_microbatch: bool | None) -> Any:
        """Return proj of the context, and forward's further outputs."""
        out = self.proj(context, is_first_microbatch=is_first_microbatch)
        outputs = tuple(out) if self.return_bias else (out,)
        outputs += (normed,) if self.return_layernorm_output else ()
        return outputs if len(outputs) > 1 else outputs[0]

    def _project(
        self, x: Tensor, encoder_output: Tensor | None, is_first_microbatch: bool | None, rotary: Rotary
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Rotary]:
        """Return query, key, value with a head dimension, norm(x) if the layer returns it, rotary if still to apply."""
        if x.dim() != 3:
            raise ValueError(f"MultiheadAttention: hidden_states must have 3 dimensions, got {tuple(x.shape)}")
        crossed = self.attention_type == "cross"
        if crossed != (encoder_output is not None):
            raise ValueError("MultiheadAttention: encoder_output is for attention_type='cross', and needed there")
        first: Linear | LayerNormLinear
        if self.input_layernorm:
            first = self.layernorm_query if crossed else self.layernorm_qkv
        else:
            first = self.query_layer if crossed else self.qkv
        projected = first(x, is_first_microbatch=is_first_microbatch)
        mixed, normed = projected if self.return_layernorm_output else (projected, None)
        if not crossed:
            rotation = self.rotation(mixed.shape[:2], rotary) if can_rotate_fused(mixed) else None
            if rotation is not None:
                # Reuse the projection's memory, unless a hook or another kind of module may have kept it.
                own = type(first) in (Linear, LayerNormLinear) and are_plain((first,))
                return *split_rotated(mixed, rotation, own), normed, None
            q, k, v = self._split(mixed, self.num_attention_heads // self.num_gqa_groups)
            return q, k, v, normed, rotary
        kv = self.key_value(encoder_output, is_first_microbatch=is_first_microbatch)
        _, k, v = self._split(kv, 0)
        q = mixed.view(*mixed.shape[:2], self.num_attention_heads_per_partition, self.channels)
        return q, k, v, normed, rotary

    def _split(self, mixed: Tensor, queries: int) -> tuple[Tensor, Tensor, Tensor]:
        """Split into queries, keys and values, (.., heads, d): `queries` queries a key, by groups if interleaved."""
        groups, d = self.num_gqa_groups_per_partition, self.channels
        if self.interleaved:
            # Stay in four dimensions: torch's fast concatenation, its gradient, has no fifth (H200: 100, not 248 us).
            grouped = mixed.view(*mixed.shape[:2], groups, (queries + 2) * d)
            q, k, v = grouped.split((queries * d, d, d), dim=-1)
            return tuple(x.reshape(*mixed.shape[:2], groups * x.shape[-1] // d, d) for x in (q, k, v))
        q, k, v = mixed.split((queries * groups * d, groups * d, groups * d), dim=-1)
        return tuple(x.unflatten(-1, (-1, d)) for x in (q, k, v))
