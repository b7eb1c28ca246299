"""The shapes of the models by name. No torch, so that `te-bench list models` answers at once.

Source: Radford et al. 2019 (GPT-2); Karpathy, nanoGPT, for shakespeare_char; config.json of meta-llama/Llama-3.2-1B,
Llama-3.2-3B and Llama-3.1-8B and of Qwen/Qwen3-0.6B, but for the longest sequence.
"""

import importlib
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from te_bench import plugins
from te_bench.kernels.activation import KINDS

MOST, MOST_LAYERS = 2**20, 1024  # ten times the largest published models
ZOO = "te_bench.models.zoo"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes of a decoder under names that all families share."""

    layers: int
    hidden: int
    ffn: int  # an MLP's inner features
    heads: int
    groups: int  # key/value heads
    head_dim: int
    vocab: int
    length: int  # the longest sequence, in tokens
    activation: str  # one of kernels.activation.KINDS
    norm: str  # one of kernels.norm.KINDS
    tied: bool  # the head is the token embedding
    learned_positions: bool
    vectors: int  # elements of a layer's gains and biases
    last_vectors: int  # elements of the last norm's
    head_norms: bool = False  # queries and keys have norms over head_dim
    linears: int = 4  # GEMMs of a layer: qkv, proj, up (with gate), down
    dropout: float = 0.0

    @property
    def gated(self) -> bool:
        """Whether `up` computes 2 ffn features, one half of which gates the other."""
        return KINDS[self.activation][1]

    @property
    def qkv(self) -> int:
        """Output features of the qkv GEMM."""
        return (self.heads + 2 * self.groups) * self.head_dim

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """Features into and out of a layer's GEMMs: qkv, proj, up (with gate), down."""
        up = self.ffn * (2 if self.gated else 1)
        return (
            (self.hidden, self.qkv),
            (self.heads * self.head_dim, self.hidden),
            (self.hidden, up),
            (self.ffn, self.hidden),
        )

    @property
    def weights(self) -> int:
        """Elements of a layer's matrices."""
        attention = self.hidden * (self.qkv + self.heads * self.head_dim)
        return attention + self.hidden * self.ffn * (3 if self.gated else 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """The fields of every family's configuration; `family` names its file in models.zoo.

    Raises ValueError for impossible sizes, before anything is allocated.
    """

    family: ClassVar[str]
    LAYERS: ClassVar[str]  # the field with the number of layers
    SIZES: ClassVar[tuple[str, ...]]  # other fields that are sizes
    MEASURED_VOCAB: ClassVar[int | None] = None  # vocabulary of random tokens in suites; None: vocab_size

    block_size: int  # the longest sequence
    vocab_size: int
    dropout: float = 0.0

    @property
    def shape(self) -> Shape:
        raise NotImplementedError

    def __post_init__(self) -> None:
        for name in (self.LAYERS, *self.SIZES, "block_size", "vocab_size"):
            size, most = getattr(self, name), MOST_LAYERS if name == self.LAYERS else MOST
            if type(size) is not int or not 1 <= size <= most:
                raise ValueError(f"{name} is {size!r}: give an integer from 1 to {most}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout!r}: give a number from 0 to 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig(DecoderConfig):
    family: ClassVar[str] = "gpt"
    LAYERS: ClassVar[str] = "n_layer"
    SIZES: ClassVar[tuple[str, ...]] = ("n_head", "n_embd")
    MEASURED_VOCAB: ClassVar[int | None] = 50257  # GPT-2's, also for small models on characters or bytes

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int = 1024
    vocab_size: int = 50257
    bias: bool = False  # nanoGPT trains without biases; OpenAI's GPT-2 has them
    gelu: str = "none"  # torch's `approximate`: "none" is exact, "tanh" is OpenAI's

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)  # a class with slots has no super() of its own in Python 3.11
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is no multiple of n_head {self.n_head}: heads are of equal width")
        if self.gelu not in ("none", "tanh"):
            raise ValueError(f"gelu is {self.gelu!r}: give none or tanh")

    @property
    def shape(self) -> Shape:
        c = self.n_embd
        return Shape(
            layers=self.n_layer,
            hidden=c,
            ffn=4 * c,
            heads=self.n_head,
            groups=self.n_head,
            head_dim=c // self.n_head,
            vocab=self.vocab_size,
            length=self.block_size,
            activation={"none": "gelu_erf", "tanh": "gelu"}[self.gelu],
            norm="layernorm",
            tied=True,
            learned_positions=True,
            vectors=2 * c + (11 * c if self.bias else 0),  # gains; 3C + C + 4C + C, and C for each of two norms
            last_vectors=c * (1 + self.bias),
            dropout=self.dropout,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Llama 3.1's scaling of rotary positions: long waves get `factor` times longer.

    Waves that fit the original context less than low_freq_factor times are stretched; above high_freq_factor they stay.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        _require_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} must be greater than low_freq_factor {self.low_freq_factor}"
            )


def _require_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(f"{name} is {value!r}: give a positive number")


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig(DecoderConfig):
    """Llama 2 and 3, Mistral, Qwen 2 and 3, under transformers' names; block_size is max_position_embeddings."""

    family: ClassVar[str] = "llama"
    LAYERS: ClassVar[str] = "num_hidden_layers"
    SIZES: ClassVar[tuple[str, ...]] = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # Qwen 3's differs from hidden_size / num_attention_heads
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # of q, k and v, as in Qwen 2
    qk_norm: bool = False  # over head_dim, before the rotation, as in Qwen 3

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)  # a class with slots has no super() of its own in Python 3.11
        _require_positive(self, "rope_theta", "rms_norm_eps")
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads % groups:
            raise ValueError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {groups}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary positions turn pairs of features")
        if self.dropout:
            raise ValueError(f"dropout is {self.dropout!r}: a Llama has none, set 0")

    @property
    def shape(self) -> Shape:
        qkv = (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
        return Shape(
            layers=self.num_hidden_layers,
            hidden=self.hidden_size,
            ffn=self.intermediate_size,
            heads=self.num_attention_heads,
            groups=self.num_key_value_heads,
            head_dim=self.head_dim,
            vocab=self.vocab_size,
            length=self.block_size,
            activation="swiglu",
            norm="rmsnorm",
            tied=self.tie_word_embeddings,
            learned_positions=False,
            vectors=2 * self.hidden_size + qkv * self.attention_bias + 2 * self.head_dim * self.qk_norm,
            last_vectors=self.hidden_size,
            head_norms=self.qk_norm,
        )


#: Fields that Llama 3's sizes share; block_size is the length of most of the pretraining.
LLAMA_3: dict[str, Any] = {"num_key_value_heads": 8, "block_size": 8192, "vocab_size": 128256, "rope_theta": 500000.0}
SCALED_8, SCALED_32 = RopeScaling(factor=8.0), RopeScaling(factor=32.0)

CONFIGS: dict[str, DecoderConfig] = {
    "gpt2": GPTConfig(n_layer=12, n_head=12, n_embd=768),  # 124M
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),  # 350M
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),  # 774M
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),  # 1558M
    "char": GPTConfig(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=65, dropout=0.2),  # shakespeare_char
    "tiny": GPTConfig(n_layer=2, n_head=4, n_embd=64, block_size=64, vocab_size=256),  # for a CPU
    "llama3-1b": LlamaConfig(  # Llama 3.2: 1.24 B parameters
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, head_dim=64,
        rope_scaling=SCALED_32, tie_word_embeddings=True, **LLAMA_3,
    ),
    "llama3-3b": LlamaConfig(  # Llama 3.2: 3.21 B
        hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24, head_dim=128,
        rope_scaling=SCALED_32, tie_word_embeddings=True, **LLAMA_3,
    ),
    "llama3-8b": LlamaConfig(  # Llama 3.1: 8.03 B
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, head_dim=128,
        rope_scaling=SCALED_8, **LLAMA_3,
    ),
    "qwen3-0.6b": LlamaConfig(  # 0.60 B
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, block_size=8192, vocab_size=151936, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=True,
        qk_norm=True,
    ),
    "llama-114m": LlamaConfig(  # GPT-2 124M's width, depth and vocabulary, small enough to train many
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
        head_dim=64, block_size=1024, vocab_size=50257, tie_word_embeddings=True,
    ),
    "llama-tiny": LlamaConfig(  # for a CPU
        hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, block_size=64, vocab_size=256, tie_word_embeddings=True,
    ),
}  # fmt: skip


def _of_other_files() -> dict[str, DecoderConfig]:
    """Return the CONFIGS of further files in models/zoo. Raises ValueError for a file without or a duplicate name."""
    known = {config.family for config in CONFIGS.values()}
    found: dict[str, DecoderConfig] = {}
    for name in plugins.names(ZOO):
        if name in known:
            continue
        own = getattr(importlib.import_module(f"{ZOO}.{name}"), "CONFIGS", None)
        if not isinstance(own, dict):
            raise ValueError(f"{name}.py of models/zoo has no CONFIGS: give it its configurations by name")
        taken = sorted(own.keys() & (CONFIGS.keys() | found.keys()))
        if taken:
            raise ValueError(f"{name}.py of models/zoo calls a model {taken[0]!r}, as another is called: rename it")
        found |= own
    return found


def configs() -> dict[str, DecoderConfig]:
    """Return every known model's configuration by name, with the CONFIGS of files added to models/zoo."""
    return {**CONFIGS, **_of_other_files()}
