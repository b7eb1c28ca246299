"""GPT-2 as nanoGPT trains it, with a vocabulary that may be padded. Reads from top to bottom.

    model = GPT(CONFIGS["gpt2"], attention="flash", padded_vocab_size=50304)
    loss = model(tokens, targets)           # (B, T) int64 x2 -> () float32, in nats

te_bench.training.weights loads and saves its weights in the Hugging Face layout.

Source: Radford et al. 2019 (GPT-2); Karpathy, nanoGPT model.py, for initialisation and the tied head.
Shapes: B batch, T tokens, C = n_embd, H heads, D = C / H.
"""

import math
from typing import Any

from torch import Tensor, nn

from te_bench.models import fp8_attention
from te_bench.models.configs import CONFIGS as CONFIGS  # re-exported
from te_bench.models.configs import GPTConfig as GPTConfig
from te_bench.models.decoder import Decoder, MakeLinear, Tables
from te_bench.models.parts import AttentionPart, LinearPart, MLPPart, NormPart, Part


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, attention: str, linear: MakeLinear):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.attention = fp8_attention.ByRecipe(attention)
        self.c_attn = linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.c_attn(x)
        B, T, _ = qkv.shape  # a rank's x may have fewer tokens
        width = x.shape[2] // self.n_head  # of a head; a rank may have fewer heads
        heads = (t.view(B, T, -1, width).transpose(1, 2) for t in qkv.chunk(3, dim=2))
        q, k, v = heads  # (B, H, T, D) each
        dropout = self.dropout if self.training else 0.0
        y = self.attention(q, k, v, causal=True, scale=1 / math.sqrt(q.shape[-1]), dropout=dropout)
        y = y.transpose(1, 2).reshape(B, T, -1)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig, linear: MakeLinear):
        super().__init__()
        self.c_fc = linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU(approximate=config.gelu)
        self.c_proj = linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, attention: str, linear: MakeLinear):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config, attention, linear)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config, linear)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(Decoder):
    """GPT-2: pre-LN, learned positions, head tied to the token embedding. Arguments are Decoder's."""

    config: GPTConfig
    INTO_STREAM = ("c_proj.weight",)

    def build(self, config: GPTConfig, attention: str, padded: int, linear: MakeLinear) -> None:
        # The names are those of OpenAI's checkpoints.
        self.transformer: Any = nn.ModuleDict(
            {
                "wte": nn.Embedding(padded, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(Block(config, attention, linear) for _ in range(config.n_layer)),
                "ln_f": nn.LayerNorm(config.n_embd, bias=config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, padded, bias=False)

    def body(self, x: Tensor) -> Tensor:
        x = self.transformer.drop(x)
        for block in self.transformer.h:
            x = block(x)
        out: Tensor = self.transformer.ln_f(x)
        return out

    def parts(self) -> tuple[Part, ...]:
        heads, width, kind = self.config.n_head, self.config.n_embd // self.config.n_head, self.config.shape.activation
        found: list[Part] = []
        for block in self.transformer.h:
            attn, mlp = block.attn, block.mlp
            qkv, proj, fc, out = (LinearPart.of(m) for m in (attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj))
            found.append(AttentionPart(attn, NormPart.of(block.ln_1), qkv, proj, heads, heads, width))
            found.append(MLPPart(NormPart.of(block.ln_2), fc, out, kind))
        return tuple(found)

    def tables(self) -> Tables:
        t = self.transformer
        return Tables(t.wte, t.wpe, t.ln_f, self.lm_head)


MODEL = GPT
