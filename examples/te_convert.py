"""Train a model that knows nothing of te-bench in BF16 and, converted by te.convert, in FP8: the same seeds, both losses.

python examples/te_convert.py [--device cpu] [--steps 20]
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import te_bench.models as te
from te_bench.models import recipe

VOCAB, LENGTH, WIDTH = 32, 16, 64


class Copier(nn.Module):
    """A causal transformer of PyTorch's own layers over a vocabulary of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device, dtype=x.dtype)
        return self.head(self.norm(self.blocks(x, mask=mask, is_causal=True)))


def train(model: nn.Module, device: str, steps: int) -> float:
    """The mean loss of the last five steps: say the token before last again, plus one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    source = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(VOCAB, (8, LENGTH), generator=source).to(device)
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            logits = model(tokens)
        loss = nn.functional.cross_entropy(logits[:, 1:].flatten(0, 1).float(), (tokens[:, :-1].flatten() + 1) % VOCAB)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses[-5:]).mean().item()


def main(arguments: Sequence[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20)
    settings = parser.parse_args(arguments)

    losses = []
    for in_fp8 in (False, True):
        torch.manual_seed(0)
        model = Copier().to(settings.device)
        if in_fp8:
            print(te.convert(model, recipe.DelayedScaling(amax_history_len=16)))
        losses.append(train(model, settings.device, settings.steps))
    bf16, fp8 = losses
    print(f"loss after {settings.steps} steps: BF16 {bf16:.4f}, FP8 {fp8:.4f}")
    return bf16, fp8


if __name__ == "__main__":
    main()
