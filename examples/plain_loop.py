"""A loop of one's own trains a model that knows nothing of te-bench, in bf16 and, converted by te.convert, in FP8.

python examples/plain_loop.py [--device cpu] [--steps 20]
"""

import argparse
import io
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import te_bench.models as te
from te_bench.models import recipe

VOCAB, LENGTH, WIDTH, MICRO = 32, 16, 64, 2


class Copier(nn.Module):
    """A causal transformer of PyTorch's own layers over a vocabulary of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device, dtype=x.dtype)
        return self.head(self.norm(self.blocks(x, mask=mask, is_causal=True)))


def make(device: str, in_fp8: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Copier().to(device)
    if in_fp8:
        print(te.convert(model, recipe.DelayedScaling(amax_history_len=16)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if in_fp8:
        te.cache_weights(model, optimizer)  # a weight is cast once for both micro-batches
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: str, steps: range) -> float:
    """The mean loss of the last five steps: say the token before last again, plus one."""
    losses = []
    for step in steps:
        tokens = torch.randint(VOCAB, (MICRO, 4, LENGTH), generator=torch.Generator().manual_seed(step)).to(device)
        for micro in tokens:
            with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
                logits = model(micro)[:, 1:].flatten(0, 1).float()
            loss = nn.functional.cross_entropy(logits, (micro[:, :-1].flatten() + 1) % VOCAB)
            (loss / MICRO).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses[-5 * MICRO :]).mean().item()


def main(arguments: Sequence[str] | None = None) -> tuple[float, float, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20)
    settings = parser.parse_args(arguments)

    device, halfway = settings.device, settings.steps // 2
    bf16 = train(*make(device, False), device, range(settings.steps))
    model, optimizer = make(device, True)
    train(model, optimizer, device, range(halfway))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)  # the scales are in the model's
    fp8 = train(model, optimizer, device, range(halfway, settings.steps))

    model, optimizer = make(device, True)
    for part, saved in zip((model, optimizer), torch.load(io.BytesIO(file.getvalue())), strict=True):
        part.load_state_dict(saved)
    resumed = train(model, optimizer, device, range(halfway, settings.steps))
    print(f"loss after {settings.steps} steps: bf16 {bf16:.4f}, FP8 {fp8:.4f}, FP8 loaded halfway {resumed:.4f}")
    return bf16, fp8, resumed


if __name__ == "__main__":
    main()
