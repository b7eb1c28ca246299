"""A decoder that nobody has heard of: an MLP before each attention, other names, rotary positions, grouped queries."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from te_bench.models import fp8_attention
from te_bench.models.configs import DecoderConfig, Shape
from te_bench.models.decoder import Decoder, MakeLinear, Tables
from te_bench.models.modules.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb
from te_bench.models.parts import AttentionPart, LinearPart, MLPPart, NormPart, Part


@dataclass(frozen=True, kw_only=True, slots=True)
class SandwichConfig(DecoderConfig):
    family: ClassVar[str] = "sandwich"
    LAYERS: ClassVar[str] = "slices"
    SIZES: ClassVar[tuple[str, ...]] = ("width",)

    slices: int = 2
    width: int = 64

    @property
    def shape(self) -> Shape:
        return Shape(
            layers=self.slices,
            hidden=self.width,
            ffn=2 * self.width,
            heads=4,
            groups=2,
            head_dim=self.width // 4,
            vocab=self.vocab_size,
            length=self.block_size,
            activation="gelu",
            norm="layernorm",
            tied=False,
            learned_positions=False,
            vectors=4 * self.width + 2 * self.width + self.width,
            last_vectors=2 * self.width,
        )


class Slice(nn.Module):
    def __init__(self, config: SandwichConfig, attention: str, linear: MakeLinear):
        super().__init__()
        shape = config.shape
        self.bread, self.cheese = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.wide = linear(shape.hidden, shape.ffn, bias=True)
        self.narrow = linear(shape.ffn, shape.hidden, bias=True)
        self.mixed = linear(shape.hidden, shape.qkv, bias=False)
        self.back = linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.attention = fp8_attention.ByRecipe(attention)
        self.split = [heads * shape.head_dim for heads in (shape.heads, shape.groups, shape.groups)]
        self.head_dim = shape.head_dim

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.narrow(nn.functional.gelu(self.wide(self.bread(x)), approximate="tanh"))
        parts = self.mixed(self.cheese(x)).split(self.split, dim=2)
        q, k, v = (part.unflatten(2, (-1, self.head_dim)) for part in parts)
        q, k = (apply_rotary_pos_emb(t, angles[:, None, None], "bshd") for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = self.attention(q, k, v, causal=True, scale=self.head_dim**-0.5, dropout=0.0)
        return x + self.back(y.transpose(1, 2).flatten(2))


class Sandwich(Decoder):
    def build(self, config: SandwichConfig, attention: str, padded: int, linear: MakeLinear) -> None:
        self.words, self.answer = nn.Embedding(padded, config.width), nn.Linear(config.width, padded, bias=False)
        self.slices = nn.ModuleList(Slice(config, attention, linear) for _ in range(config.slices))
        self.plate = nn.LayerNorm(config.width)

    def body(self, x: Tensor) -> Tensor:
        angles = self.angles(x.shape[1])
        for each in self.slices:
            x = each(x, angles)
        out: Tensor = self.plate(x)
        return out

    def angles(self, length: int) -> Tensor:
        with torch.device(self.words.weight.device):
            turns = RotaryPositionEmbedding(self.config.shape.head_dim)(length)
        return turns[:, 0, 0]

    def parts(self) -> tuple[Part, ...]:
        found: list[Part] = []
        for each in self.slices:
            wide, narrow, mixed, back = (LinearPart.of(m) for m in (each.wide, each.narrow, each.mixed, each.back))
            found.append(MLPPart(NormPart.of(each.bread), wide, narrow, "gelu"))
            found.append(AttentionPart(each, NormPart.of(each.cheese), mixed, back, 4, 2, each.head_dim))
        return tuple(found)

    def tables(self) -> Tables:
        return Tables(self.words, None, self.plate, self.answer)


MODEL = Sandwich
CONFIGS = {"sandwich": SandwichConfig(block_size=64, vocab_size=256)}
