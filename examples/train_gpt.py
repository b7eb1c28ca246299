"""Train a tiny GPT on Python's own sources and print its validation loss: the library without the command line.

python examples/train_gpt.py
"""

import torch

from te_bench.models.zoo.gpt import CONFIGS, GPT
from te_bench.training import corpus, data
from te_bench.training.evaluation import evaluate
from te_bench.training.step import Optim, TrainStep, train

STEPS, BATCH = 60, 8


def main() -> float:
    torch.manual_seed(0)
    config = CONFIGS["tiny"]
    text = corpus.prepare("stdlib", "bytes")
    sizes = {"block": config.block_size, "batch": BATCH, "vocab": config.vocab_size}
    batches = data.Batches(text, **sizes, seed=0)
    model = GPT(config, attention="flash")
    step = TrainStep(
        model, Optim(learning_rate=3e-3, min_learning_rate=3e-4, warmup=10), precision="fp32", mode="eager"
    )
    for number, loss in train(step, batches.at, lambda n: n / STEPS if n < STEPS else None):
        if number % 20 == 0:
            print(f"step {number:3d}: loss {loss.item():.3f}")
    loss = evaluate(model, data.validation(text, **sizes, max_tokens=8192), "fp32")
    print(f"validation loss {loss:.3f} nats a byte")
    return loss


if __name__ == "__main__":
    main()
