"""Lightning trains a small transformer in bf16 and in FP8, which also goes on from a checkpoint halfway.

pip install pytorch-lightning; python examples/lightning_fit.py [--steps 20]
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytorch_lightning as lightning  # or: import lightning.pytorch as lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import te_bench.models as te
from te_bench.models import recipe

VOCAB, LENGTH, MICRO = 64, 16, 2


class Counter(lightning.LightningModule):
    """Says the next of sequences that count from a random number, two at a time."""

    def __init__(self, choice: recipe.Recipe | None) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True, norm_first=True)
        blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.model = nn.Sequential(nn.Embedding(VOCAB, 64), blocks, nn.Linear(64, VOCAB))
        self.losses: list[Tensor] = []
        self.in_fp8 = choice is not None
        if self.in_fp8:
            te.convert(self.model, choice)  # what training_step calls enters FP8 by itself

    def training_step(self, batch: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(batch).flatten(0, 1).float(), (batch.flatten() + 2) % VOCAB)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        if self.in_fp8:
            te.cache_weights(self, optimizer)  # a weight is cast once for both micro-batches
        return optimizer


def train(
    epochs: int, steps: int, choice: recipe.Recipe | None, load: Path | None = None, save: Path | None = None
) -> float:
    """The mean loss of the last five steps; an epoch has `steps`."""
    torch.manual_seed(0)
    starts = torch.randint(VOCAB, (4 * MICRO * steps, 1), generator=torch.Generator().manual_seed(1))
    texts = (starts + 2 * torch.arange(LENGTH)) % VOCAB
    options = {"accumulate_grad_batches": MICRO, "gradient_clip_val": 1.0, "max_epochs": epochs}
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = lightning.Trainer(precision="bf16-mixed", **options, **quiet)
    module = Counter(choice)
    trainer.fit(module, DataLoader(texts, batch_size=4), ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    return torch.stack(module.losses[-5 * MICRO :]).mean().item()


def main(arguments: Sequence[str] | None = None) -> tuple[float, float, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args(arguments).steps

    choice = recipe.DelayedScaling(amax_history_len=16)
    bf16, fp8 = (train(2, steps // 2, each) for each in (None, choice))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "halfway.ckpt"
        train(1, steps // 2, choice, save=checkpoint)
        resumed = train(2, steps // 2, choice, load=checkpoint)
    print(f"loss after {steps} steps: bf16 {bf16:.4f}, FP8 {fp8:.4f}, FP8 loaded halfway {resumed:.4f}")
    return bf16, fp8, resumed


if __name__ == "__main__":
    main()
