"""A loop by Accelerate trains a small Llama in bf16 and in FP8, whose state is also saved and loaded halfway.

pip install transformers accelerate; python examples/accelerate_loop.py [--steps 20]
"""

import argparse
import tempfile
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import te_bench.models as te
from te_bench.models import recipe

VOCAB, LENGTH, MICRO = 64, 16, 2


def train(steps: range, choice: recipe.Recipe | None, load: str | None = None, save: str | None = None) -> float:
    """The mean loss of the last five steps: sequences that count from a random number, two at a time."""
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=MICRO)  # "fp8" wants another package
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes))
    if choice is not None:
        te.convert(model, choice)  # before the optimizer; the model enters FP8 by itself
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if choice is not None:
        te.cache_weights(model, optimizer)  # a weight is cast once for both micro-batches
    starts = torch.randint(VOCAB, (1000, 1), generator=torch.Generator().manual_seed(1))
    texts = ((starts + 2 * torch.arange(LENGTH)) % VOCAB)[4 * MICRO * steps.start : 4 * MICRO * steps.stop]
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(texts, batch_size=4))
    if load is not None:
        accelerator.load_state(load)

    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    if save is not None:
        accelerator.save_state(save)
    return torch.stack(losses[-5 * MICRO :]).mean().item()


def main(arguments: Sequence[str] | None = None) -> tuple[float, float, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args(arguments).steps

    choice = recipe.DelayedScaling(amax_history_len=16)
    bf16, fp8 = (train(range(steps), each) for each in (None, choice))
    with tempfile.TemporaryDirectory() as folder:
        train(range(steps // 2), choice, save=folder)
        loaded = train(range(steps // 2, steps), choice, load=folder)
    print(f"loss after {steps} steps: bf16 {bf16:.4f}, FP8 {fp8:.4f}, FP8 loaded halfway {loaded:.4f}")
    return bf16, fp8, loaded


if __name__ == "__main__":
    main()
