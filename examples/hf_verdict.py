"""The Trainer of transformers trains a small Llama in bf16 and in FP8, some seeds each, and te-bench says if they end alike.

pip install transformers accelerate; python examples/hf_verdict.py [--seeds 4] [--steps 30] [--margin 0.03] [--out FOLDER]
"""

import argparse
import subprocess
import sys
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


def train(folder: Path, steps: int, seed: int, choice: recipe.Recipe | None) -> None:
    """Train one seed of one side; its trainer_state.json is the log that is judged."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes))
    settings = TrainingArguments(
        str(folder),
        seed=seed,  # the order of the texts
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",  # to 0: gaps before the end of a decay are of the moment
        warmup_steps=steps // 10,
        eval_strategy="steps",
        eval_steps=steps // 10,
        logging_steps=1,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    if choice is not None:
        te.convert(model, choice)  # the one line that makes it FP8
    trainer = Trainer(model, settings, train_dataset=texts(8 * steps, 1), eval_dataset=texts(64, 2))
    trainer.train()
    trainer.save_state()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--margin", default="0.03", help="the largest gap in loss that counts as none, stated beforehand"
    )
    parser.add_argument("--out", type=Path, help="where the logs stay; without it they are thrown away")
    asked = parser.parse_args(arguments)

    with tempfile.TemporaryDirectory() as thrown_away:
        out = asked.out or Path(thrown_away)
        for seed in range(asked.seeds):
            train(out / "bf16" / f"seed{seed}", asked.steps, seed, None)
            train(out / "fp8" / f"seed{seed}", asked.steps, seed, recipe.Float8CurrentScaling())
        sides = ["--baseline", str(out / "bf16"), "--candidate", str(out / "fp8"), "--margin", asked.margin]
        return subprocess.run([sys.executable, "-m", "te_bench.cli", "verdict", *sides], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
