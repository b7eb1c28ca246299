"""The Trainer of transformers trains a small Llama in bf16 and in FP8, which also resumes from a checkpoint halfway.

pip install transformers accelerate; python examples/hf_trainer.py [--steps 20]
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import te_bench.models as te
from te_bench.models import recipe

VOCAB, LENGTH = 64, 16


def texts(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Sequences that count from a random number, two at a time."""
    starts = torch.randint(VOCAB, (count, 1), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": text, "labels": text} for text in (starts + 2 * torch.arange(LENGTH)) % VOCAB]


def train(folder: str, steps: int, choice: recipe.Recipe | None, resume: Path | None = None) -> float:
    """The loss of texts that were not trained on."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes))
    batches = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": steps}
    rates = {"learning_rate": 3e-3, "lr_scheduler_type": "constant", "max_grad_norm": 1.0}
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}
    where = {"bf16": True, "use_cpu": not torch.cuda.is_available()}
    settings = TrainingArguments(folder, save_steps=steps // 2, **where, **batches, **rates, **quiet)
    if choice is not None:
        te.convert(model, choice)  # the model enters FP8 by itself
    trainer = Trainer(model, settings, train_dataset=texts(16 * steps, 1), eval_dataset=texts(64, 2))
    if choice is not None:
        te.cache_weights(model, trainer.create_optimizer())  # a weight is cast once for both micro-batches
    trainer.train(resume_from_checkpoint=resume)
    return trainer.evaluate()["eval_loss"]


def main(arguments: Sequence[str] | None = None) -> tuple[float, float, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args(arguments).steps

    choice = recipe.DelayedScaling(amax_history_len=16)
    with tempfile.TemporaryDirectory() as folder:
        bf16 = train(f"{folder}/bf16", steps, None)
        fp8 = train(f"{folder}/fp8", steps, choice)
        resumed = train(f"{folder}/again", steps, choice, Path(folder, "fp8", f"checkpoint-{steps // 2}"))
    print(f"loss after {steps} steps: bf16 {bf16:.4f}, FP8 {fp8:.4f}, FP8 loaded halfway {resumed:.4f}")
    return bf16, fp8, resumed


if __name__ == "__main__":
    main()
