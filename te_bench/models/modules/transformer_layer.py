"""A transformer layer: attention and MLP with their norms, dropouts and residual connections."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_bench.models.fused import te_layer
from te_bench.models.modules import arguments
from te_bench.models.modules.activations import compute_dtype
from te_bench.models.modules.attention import MultiheadAttention
from te_bench.models.modules.layernorm import LayerNorm, RMSNorm, check_normalization
from te_bench.models.modules.layernorm_mlp import LayerNormMLP
from te_bench.models.modules.parameters import Tracker
from te_bench.models.modules.tensor_parallel import Parallelised, Ranks, require_set

#: Arguments passed unchanged to the attention modules.
ATTENTION = ("rotary_pos_interleaved", "qk_norm_type", "qk_norm_eps", "qk_norm_before_rope")

_Options = dict[str, Any]


class TransformerLayer(Parallelised, nn.Module):
    """h = x + dropout(attention(norm(x))), y = h + dropout(MLP(norm(h))); x (s, b, hidden), or (b, s, hidden) for "bshd".

    For "thd" x is (rows, hidden), sequences packed one after the other, where cu_seqlens_q and cu_seqlens_kv say.
    layer_type "decoder" attends to encoder_output in between. apply_residual_connection_post_layernorm takes the
    residuals after the norms; output_layernorm moves the attention's norm to the layer's end; parallel_attention_mlp
    feeds both from x. set_parallel_mode divides the weights among tp_group; with sequence_parallel x is a rank's part
    of the sequence, while angles and masks are for all of it: see tensor_parallel. Dropouts default to 0.1, the mask to
    causal: Transformer Engine's arguments, defaults and parameter names. Raises ValueError for unsupported arguments.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        *,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Tracker = None,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        set_parallel_mode: bool = False,
        sequence_parallel: bool | None = False,
        **others: Any,
    ):
        super().__init__()
        self.ranks = Ranks("TransformerLayer", tp_group, tp_size, sequence_parallel, others)
        require_set(self.ranks, set_parallel_mode)
        own: _Options = {name: others.pop(name) for name in ATTENTION if name in others}
        sizes: _Options = {"hidden_size": hidden_size, "ffn_hidden_size": ffn_hidden_size}
        sizes |= {"layernorm_epsilon": layernorm_epsilon, "hidden_dropout": hidden_dropout}
        arguments.check("TransformerLayer", others, **sizes, params_dtype=params_dtype)
        _check_kind(layer_type, parallel_attention_mlp)
        check_normalization(normalization)
        self.layer_type, self.hidden_dropout, self.name = layer_type, hidden_dropout, name
        self.residual_after_norm = apply_residual_connection_post_layernorm
        self.parallel = parallel_attention_mlp
        norm: _Options = {"zero_centered_gamma": zero_centered_gamma, "params_dtype": params_dtype, "device": device}
        inits: _Options = {"init_method": init_method, "output_layer_init_method": output_layer_init_method}
        inits["get_rng_state_tracker"] = get_rng_state_tracker
        shared: _Options = {"tp_group": tp_group, "tp_size": tp_size, "sequence_parallel": sequence_parallel}
        shared["set_parallel_mode"] = set_parallel_mode
        common: _Options = {**norm, **inits, **shared, "bias": bias, "normalization": normalization}
        heads: _Options = {"num_gqa_groups": num_gqa_groups, "kv_channels": kv_channels}
        qkv: _Options = {"fuse_qkv_params": fuse_qkv_params, "qkv_weight_interleaved": qkv_weight_interleaved}
        own |= {"layernorm_epsilon": layernorm_epsilon, "attention_dropout": attention_dropout}
        own |= {**common, **heads, **qkv, "layer_number": layer_number, "qkv_format": attn_input_format}
        attention = partial(MultiheadAttention, hidden_size, num_attention_heads, **own)
        self.self_attention = self._make_attention(
            attention, not output_layernorm, self_attn_mask_type, window_size, bottom_right_diagonal
        )
        if layer_type == "decoder":
            attention = partial(attention, attention_type="cross")
            self.inter_attention = self._make_attention(
                attention, True, enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal
            )
        mlp = partial(LayerNormMLP, hidden_size, ffn_hidden_size, layernorm_epsilon, **common)
        self.layernorm_mlp = mlp(activation=activation, return_layernorm_output=self.residual_after_norm)
        last = LayerNorm if normalization == "LayerNorm" else RMSNorm
        mark_of_norm = self.ranks.sequence if self.ranks.size > 1 else None
        self.layernorm = last(hidden_size, layernorm_epsilon, mark_of_norm, **norm) if output_layernorm else None

    def _make_attention(
        self,
        make: Callable[..., MultiheadAttention],
        normed: bool,
        kind: str,
        window: tuple[int, int] | None,
        bottom_right: bool | None,
    ) -> MultiheadAttention:
        """Make attention with its mask settings, with or without its own norm."""
        kept = self.residual_after_norm and normed
        masks = {"attn_mask_type": kind, "window_size": window, "bottom_right_diagonal": bottom_right}
        return make(**masks, input_layernorm=normed, return_layernorm_output=kept)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Any = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        *,
        rotary_pos_emb: Any = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        **others: Any,
    ) -> Tensor:
        """Return the layer's output, with hidden_states' shape, in torch.autocast's dtype or theirs.

        Masks are bool, True = masked out; see DotProductAttention.
        """
        if others:
            arguments.reject("TransformerLayer.forward", others)
        if self.layer_type == "encoder" and encoder_output is not None:
            raise ValueError("encoder_output is for layer_type='decoder'; this layer is an encoder")
        if self.layer_type == "decoder" and encoder_output is None:
            raise ValueError("a decoder layer needs encoder_output")
        x = hidden_states
        if x.dtype in arguments.PARAMETERS:
            x = x.to(compute_dtype(x))  # the residual stream uses torch.autocast's dtype, too, as in Transformer Engine
        core: _Options = {
            "attention_mask": attention_mask,
            "attn_mask_type": self_attn_mask_type,
            "window_size": window_size,
            "bottom_right_diagonal": bottom_right_diagonal,
            "checkpoint_core_attention": checkpoint_core_attention,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_kv": cu_seqlens_kv,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_kv": max_seqlen_kv,
        }
        if te_layer.can_fuse(self, x):
            return te_layer.run(self, x, is_first_microbatch, rotary_pos_emb, core)
        attended = self.self_attention(
            x, is_first_microbatch=is_first_microbatch, rotary_pos_emb=rotary_pos_emb, **core
        )
        attended, residual = _split(attended, x)
        if self.parallel:
            mlp, _ = _split(self.layernorm_mlp(x, is_first_microbatch=is_first_microbatch), x)
            y = residual + self._dropout(attended + mlp)
        else:
            h = residual + self._dropout(attended)
            if self.layer_type == "decoder":
                attended = self.inter_attention(
                    h,
                    enc_dec_attn_mask,
                    encoder_output=encoder_output,
                    attn_mask_type=enc_dec_attn_mask_type,
                    window_size=enc_dec_window_size,
                    bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                    is_first_microbatch=is_first_microbatch,
                    checkpoint_core_attention=checkpoint_core_attention,
                )
                attended, residual = _split(attended, h)
                h = residual + self._dropout(attended)
            mlp, residual = _split(self.layernorm_mlp(h, is_first_microbatch=is_first_microbatch), h)
            y = residual + self._dropout(mlp)
        return y if self.layernorm is None else self.layernorm(y)

    def _dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.hidden_dropout, self.training) if self.hidden_dropout else x


def _check_kind(layer_type: str, parallel: bool) -> None:
    if layer_type not in ("encoder", "decoder"):
        raise ValueError(f"layer_type={layer_type!r} is not possible: encoder or decoder")
    if parallel and layer_type == "decoder":
        raise ValueError(
            "parallel_attention_mlp is for layer_type='encoder': a decoder's second attention is in between"
        )


def _split(out: Any, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return (output, residual); the residual is the norm's output if the module returned it."""
    return out if isinstance(out, tuple) else (out, residual)
