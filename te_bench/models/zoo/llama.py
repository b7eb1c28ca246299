"""Llama 2 and 3, and by configuration Mistral, Qwen 2 and Qwen 3. Reads from top to bottom.

    model = Llama(CONFIGS["llama3-1b"], attention="flash", recipe=recipes.load("delayed_scaling"), blocks="fused")
    loss = model(tokens, targets)           # (B, T) int64 x2 -> () float32, in nats

te_bench.training.weights loads and saves its weights in the Hugging Face layout.

Source: Touvron et al., arXiv:2302.13971 and arXiv:2307.09288; Grattafiori et al., arXiv:2407.21783 (Llama 3);
transformers, models/llama, qwen2, qwen3 and modeling_rope_utils.py.
Shapes: B batch, T tokens, C hidden_size, H heads, G heads of keys and values, D = head_dim, F = intermediate_size.
"""

import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from te_bench.models import fp8_attention
from te_bench.models.configs import CONFIGS as CONFIGS  # re-exported
from te_bench.models.configs import LlamaConfig as LlamaConfig
from te_bench.models.configs import RopeScaling as RopeScaling
from te_bench.models.decoder import Decoder, MakeLinear, Tables
from te_bench.models.modules.layernorm import RMSNorm
from te_bench.models.modules.layernorm_mlp import activate
from te_bench.models.modules.rotary import apply_rotary_pos_emb
from te_bench.models.parts import AttentionPart, LinearPart, MLPPart, NormPart, Part


def inverse_frequencies(config: LlamaConfig) -> Tensor:
    """Return theta^(-2 i / D), (D / 2,) float32 on the CPU; Llama 3.1 divides those of long waves by a factor.

    Between its two limits the factor changes smoothly. Every CPU gives the same bits.
    """
    d = config.head_dim
    exponents = torch.arange(0, d, 2, dtype=torch.float64, device="cpu") / d
    # A float32 power depends on the CPU's vector instructions; the operations below round once each, as IEEE 754 says.
    frequencies = 1.0 / (config.rope_theta**exponents).float()
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    waves = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # how often they fit the pretraining
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((waves - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, attention: str, linear: MakeLinear):
        super().__init__()
        shape = config.shape
        self.head_dim = config.head_dim
        self.shares = [shape.heads, shape.groups, shape.groups]
        self.attention = fp8_attention.ByRecipe(attention)
        self.qkv_proj = linear(config.hidden_size, shape.qkv, bias=config.attention_bias)  # rows of q, of k, of v
        self.o_proj = linear(shape.heads * shape.head_dim, config.hidden_size, bias=False)

        def norm() -> RMSNorm | None:
            """Make te's norm: even under autocast it normalises a bf16 head in float32 and rounds once."""
            return RMSNorm(config.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None

        self.q_norm, self.k_norm = norm(), norm()

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        qkv = self.qkv_proj(x)
        B, T, _ = qkv.shape  # a rank's x may have fewer tokens
        sizes = [qkv.shape[2] * share // sum(self.shares) for share in self.shares]  # a rank may have fewer heads
        q, k, v = (t.view(B, T, -1, self.head_dim) for t in qkv.split(sizes, dim=2))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (apply_rotary_pos_emb(t, angles[:, None, None], tensor_format="bshd") for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D), and (B, G, T, D) twice
        y = self.attention(q, k, v, causal=True, scale=1 / math.sqrt(self.head_dim))
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(B, T, -1))
        return out


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig, linear: MakeLinear):
        super().__init__()
        self.gate_up_proj = linear(config.hidden_size, 2 * config.intermediate_size, bias=False)  # rows of gate, of up
        self.down_proj = linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(activate(self.gate_up_proj(x), "swiglu"))  # silu(gate) * up, (B, T, F)
        return out


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, attention: str, linear: MakeLinear):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, attention, linear)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config, linear)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(Decoder):
    """Llama: pre-RMSNorm, rotary positions, grouped queries, SwiGLU. Arguments are Decoder's.

    `rotary`, (block_size, D), has the angles, in float32 at least whatever the model is cast to. It is in no state
    dict: moving the model recomputes it, so that no way of building one loses it.
    """

    config: LlamaConfig
    rotary: Tensor
    INTO_STREAM = ("o_proj.weight", "down_proj.weight")

    def build(self, config: LlamaConfig, attention: str, padded: int, linear: MakeLinear) -> None:
        # The names are Hugging Face's, except for the two stacked weights.
        self.model: Any = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(padded, config.hidden_size),
                "layers": nn.ModuleList(Block(config, attention, linear) for _ in range(config.num_hidden_layers)),
                "norm": nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
            }
        )
        self.lm_head = nn.Linear(config.hidden_size, padded, bias=False)
        self.register_buffer("rotary", torch.empty(config.block_size, config.head_dim), persistent=False)
        self.register_load_state_dict_post_hook(Llama.make_angles)  # loading may replace parameters

    def body(self, x: Tensor) -> Tensor:
        angles = self.angles(x.shape[1])
        for block in self.model.layers:
            x = block(x, angles)
        out: Tensor = self.model.norm(x)
        return out

    def parts(self) -> tuple[Part, ...]:
        shape = self.config.shape
        found: list[Part] = []
        for block in self.model.layers:
            attn, mlp = block.self_attn, block.mlp
            qkv, proj, up, down = (
                LinearPart.of(m) for m in (attn.qkv_proj, attn.o_proj, mlp.gate_up_proj, mlp.down_proj)
            )
            norms = [m and NormPart.of(m) for m in (attn.q_norm, attn.k_norm)]
            heads = (shape.heads, shape.groups, shape.head_dim, 1)
            found.append(AttentionPart(attn, NormPart.of(block.input_layernorm), qkv, proj, *heads, *norms))
            found.append(MLPPart(NormPart.of(block.post_attention_layernorm), up, down, shape.activation))
        return tuple(found)

    def tables(self) -> Tables:
        return Tables(self.model.embed_tokens, None, self.model.norm, self.lm_head)

    def angles(self, length: int) -> Tensor:
        return self.rotary[:length]

    def make_angles(self, *_: Any) -> None:
        head = self.lm_head.weight
        places = torch.arange(self.config.block_size, dtype=torch.float32, device=head.device)
        half = places[:, None] * inverse_frequencies(self.config).to(head.device)
        # In bf16, neighbouring positions beyond 256 would be equal.
        self.rotary = torch.cat((half, half), 1).to(torch.promote_types(head.dtype, torch.float32))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Recompute the angles whenever .to(), .double() or to_empty() changes the tensors."""
        super()._apply(fn, recurse)
        self.make_angles()
        return self


MODEL = Llama
