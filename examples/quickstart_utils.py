"""What te_quickstart.py needs besides te: plain attention, a plain MLP, a clock, and the weights for its five layers."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import te_bench.models as te
from te_bench.models.sharing import (
    share_parameters_with_basic_te_model,
    share_parameters_with_fused_te_model,
    share_parameters_with_transformerlayer_te_model,
)

__all__ = [
    "BasicMLP",
    "DotProductAttention",
    "share_parameters_with_basic_te_model",
    "share_parameters_with_fused_te_model",
    "share_parameters_with_transformerlayer_te_model",
    "speedometer",
]


class DotProductAttention(torch.nn.Module):
    """softmax(q k^T / sqrt(d)) v, written out: (s, b, heads, d) each -> (s, b, heads d). True in a mask hides."""

    def __init__(self, num_attention_heads: int, kv_channels: int, attention_dropout: float):
        super().__init__()
        self.num_attention_heads, self.kv_channels = num_attention_heads, kv_channels
        self.dropout = torch.nn.Dropout(attention_dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.kv_channels)
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask, -torch.inf)
        context = self.dropout(scores.softmax(dim=-1)) @ v
        return context.permute(2, 0, 1, 3).flatten(2)


class BasicMLP(torch.nn.Module):
    """Two linear layers with a tanh GELU in between."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int):
        super().__init__()
        self.linear1 = torch.nn.Linear(hidden_size, ffn_hidden_size, bias=True)
        self.linear2 = torch.nn.Linear(ffn_hidden_size, hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(torch.nn.functional.gelu(self.linear1(x), approximate="tanh"))


def speedometer(
    module: torch.nn.Module,
    input: Tensor,
    output_grad: Tensor,
    forward_kwargs: dict[str, Any] | None = None,
    fp8_autocast_kwargs: dict[str, Any] | None = None,
    timing_iters: int | None = None,
    warmup_iters: int | None = None,
) -> float:
    """Print and return the mean time, in ms, of a forward and a backward pass; gradients accumulate.

    After warmup_iters passes, timing_iters are timed by one pair of CUDA events: 50 and 50 by default, on a CPU 2 and 3.
    """
    on_gpu = input.is_cuda
    timing_iters = timing_iters or (50 if on_gpu else 3)
    warmup_iters = warmup_iters or (50 if on_gpu else 2)
    fp8 = fp8_autocast_kwargs or {"enabled": False}

    def iterate() -> None:
        with te.fp8_autocast(**fp8):
            output = module(input, **(forward_kwargs or {}))
        output.backward(output_grad)

    for _ in range(warmup_iters):
        iterate()
    elapsed = _gpu_clock(iterate, timing_iters) if on_gpu else _cpu_clock(iterate, timing_iters)
    print(f"Mean time: {elapsed / timing_iters} ms")
    return elapsed / timing_iters


def _gpu_clock(iterate: Callable[[], None], times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        iterate()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def _cpu_clock(iterate: Callable[[], None], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        iterate()
    return (time.perf_counter() - start) * 1e3
