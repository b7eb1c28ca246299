"""A decoder whose parts nobody can say: attention beside the MLP, queries, keys and values by a Linear each."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from te_bench.models import fp8_attention
from te_bench.models.configs import DecoderConfig, Shape
from te_bench.models.decoder import Decoder, MakeLinear, Tables

HEADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class BesideConfig(DecoderConfig):
    family: ClassVar[str] = "beside"
    LAYERS: ClassVar[str] = "depth"
    SIZES: ClassVar[tuple[str, ...]] = ("width",)

    depth: int = 2
    width: int = 64

    @property
    def shape(self) -> Shape:
        return Shape(
            layers=self.depth,
            hidden=self.width,
            ffn=4 * self.width,
            heads=HEADS,
            groups=HEADS,
            head_dim=self.width // HEADS,
            vocab=self.vocab_size,
            length=self.block_size,
            activation="gelu",
            norm="layernorm",
            tied=False,
            learned_positions=True,
            vectors=2 * self.width,
            last_vectors=2 * self.width,
        )


class Block(nn.Module):
    def __init__(self, width: int, attention: str, linear: MakeLinear):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = linear(width, 4 * width, bias=False), linear(4 * width, width, bias=False)
        self.attention = fp8_attention.ByRecipe(attention)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (m(normed).unflatten(2, (HEADS, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = self.attention(q, k, v, causal=True, scale=q.shape[-1] ** -0.5)
        wide = nn.functional.gelu(self.up(normed), approximate="tanh")
        out: Tensor = x + self.o(y.transpose(1, 2).flatten(2)) + self.down(wide)
        return out


class Beside(Decoder):
    def build(self, config: BesideConfig, attention: str, padded: int, linear: MakeLinear) -> None:
        self.words, self.places = nn.Embedding(padded, config.width), nn.Embedding(config.block_size, config.width)
        self.blocks_of_both = nn.ModuleList(Block(config.width, attention, linear) for _ in range(config.depth))
        self.last, self.answer = nn.LayerNorm(config.width), nn.Linear(config.width, padded, bias=False)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks_of_both:
            x = block(x)
        out: Tensor = self.last(x)
        return out

    def tables(self) -> Tables:
        return Tables(self.words, self.places, self.last, self.answer)


MODEL = Beside
CONFIGS = {"beside": BesideConfig(block_size=64, vocab_size=256)}
