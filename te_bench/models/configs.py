"""The shapes of the models by name. No torch, so that `te-bench list models` answers at once.

Source: Radford et al. 2019 (GPT-2); Karpathy, nanoGPT, for shakespeare_char.
"""

from dataclasses import dataclass

MOST, MOST_LAYERS = 2**20, 1024  # ten times what the largest published models have


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    n_layer: int
    n_head: int
    n_embd: int
    block_size: int = 1024
    vocab_size: int = 50257
    dropout: float = 0.0
    bias: bool = False  # nanoGPT trains without; OpenAI's GPT-2 has them
    gelu: str = "none"  # torch's `approximate`: "none" is exact, "tanh" is OpenAI's

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no model has, before anything is allocated."""
        for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size"):
            size, most = getattr(self, name), MOST_LAYERS if name == "n_layer" else MOST
            if type(size) is not int or not 1 <= size <= most:
                raise ValueError(f"{name} is {size!r}: give an integer from 1 to {most}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is no multiple of n_head {self.n_head}: heads are of equal width")


CONFIGS = {
    "gpt2": GPTConfig(n_layer=12, n_head=12, n_embd=768),  # 124M
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),  # 350M
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),  # 774M
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),  # 1558M
    "char": GPTConfig(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=65, dropout=0.2),  # shakespeare_char
    "tiny": GPTConfig(n_layer=2, n_head=4, n_embd=64, block_size=64, vocab_size=256),  # for a CPU
}
