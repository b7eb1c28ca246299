"""Train a small Llama of Hugging Face in BF16 and, with te-bench's kernels in it, in FP8: the same seeds, both losses.

python examples/hf_llama.py [--device cpu] [--steps 20]
"""

import argparse
from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import te_bench.models as te
from te_bench.models import recipe

VOCAB, LENGTH = 32, 16


def train(model: LlamaForCausalLM, device: str, steps: int) -> float:
    """The mean loss of the last five steps: from the second token on, say the one before plus one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    source = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        first = torch.randint(VOCAB, (16, 1), generator=source)
        tokens = ((first + torch.arange(LENGTH)) % VOCAB).to(device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
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

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=VOCAB, bos_token_id=0, eos_token_id=1)
    losses = []
    for in_fp8 in (False, True):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(settings.device, torch.bfloat16)
        if in_fp8:
            print(te.convert(model, recipe.DelayedScaling(amax_history_len=16), parts="all"))
        losses.append(train(model, settings.device, settings.steps))
    bf16, fp8 = losses
    print(f"loss after {settings.steps} steps: BF16 {bf16:.4f}, FP8 {fp8:.4f}")
    return bf16, fp8


if __name__ == "__main__":
    main()
