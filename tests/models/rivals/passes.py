"""One pass of a small Llama, te-bench's own or a rival's."""

import dataclasses

import torch
from torch import Tensor

from te_bench.models import decoder, rivals
from te_bench.models.configs import CONFIGS, LlamaConfig

TINY = CONFIGS["llama-tiny"]
assert isinstance(TINY, LlamaConfig)
NORMED = dataclasses.replace(TINY, qk_norm=True, tie_word_embeddings=False)  # as Qwen 3
BIASED = dataclasses.replace(TINY, attention_bias=True)  # as Qwen 2


def a_model(config: LlamaConfig, rival: str | None, device: str = "cpu", **options: object) -> decoder.Decoder:
    torch.manual_seed(1)
    with torch.device(device):
        model = decoder.build(config, **options)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # which begin with 0, and would show no mistake
            torch.nn.init.normal_(parameter)
    if rival is not None:
        rivals.load(rival).build(model)
    return model


def a_pass(model: decoder.Decoder, length: int = 32) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients in the ambient autocast, on the model's device."""
    device = next(model.parameters()).device
    tokens, targets = torch.randint(0, 256, (2, 2, length), generator=torch.Generator().manual_seed(2)).to(device)
    model.zero_grad()
    with model.autocast():
        loss = model(tokens, targets)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == wanted.keys()
    return {name: ((found[name] - gradient).norm() / gradient.norm()).item() for name, gradient in wanted.items()}
