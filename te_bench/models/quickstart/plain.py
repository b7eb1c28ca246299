"""nn.LayerNorm and nn.Linear with attention written out as bmm, softmax, bmm: the quickstart's baseline.

Source: Transformer Engine, docs/examples/quickstart.ipynb (2022): one QKV projection whose rows go by head, then by
query, key and value; dropout after softmax and after the projection, none after the MLP; GELU by its tanh
approximation. LayerConfig changes that for a model's layer: nn.RMSNorm, grouped queries, rotary, SwiGLU, no biases.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_bench.kernels import attention
from te_bench.models import decoder_layer
from te_bench.models.quickstart import PARTS, Layer, LayerConfig

Make = Callable[..., nn.Module]


def swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda h: F.gelu(h, approximate="tanh"),
    "swiglu": swiglu,
}


class ExplicitAttention(nn.Module):
    """softmax(Q K^T / sqrt(d)) V by separate operators over (s, b, heads, d) -> (s, b, heads d); grouped K and V."""

    def __init__(self, causal: bool, dropout: float):
        super().__init__()
        self.causal = causal
        self.dropout = nn.Dropout(dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length, batch = q.shape[:2]
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) if x.shape[2] < q.shape[2] else x for x in (k, v))
        q, k, v = (x.flatten(1, 2).transpose(0, 1) for x in (q, k, v))  # (b heads, s, d)
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.shape[-1])
        if self.causal:
            future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        context = torch.bmm(self.dropout(F.softmax(scores, dim=-1)), v)
        return context.transpose(0, 1).reshape(length, batch, -1)


class KernelAttention(nn.Module):
    """ExplicitAttention's function by one kernel with the interface of te_bench.kernels.attention."""

    def __init__(self, kernel: Callable[..., Tensor], causal: bool, dropout: float = 0.0):
        super().__init__()
        self.kernel = kernel
        self.causal, self.dropout = causal, dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # (b, heads, s, d)
        dropout = self.dropout if self.training else 0.0
        context = self.kernel(q, k, v, causal=self.causal, scale=1 / math.sqrt(q.shape[-1]), dropout=dropout)
        return context.permute(2, 0, 1, 3).flatten(2)


def attention_of(p: LayerConfig) -> nn.Module:
    """Return the quickstart's own attention for "manual", else the kernel of that name."""
    if p.attention == "manual":
        return ExplicitAttention(p.causal, p.dropout)
    return KernelAttention(attention.load(p.attention).forward, p.causal, p.dropout)


class Heads(nn.Module):
    """Split the QKV projection (s, b, F) into query, key, value (s, b, heads, d); normed and rotated as p says."""

    def __init__(self, p: LayerConfig, norm: Make):
        super().__init__()
        self.turns, self.features = p.turns, p.features
        self.columns = [n // p.turns for n in p.columns]
        self.q_norm, self.k_norm = (norm(p.features, eps=p.eps) if p.qk_norm else None for _ in "qk")
        self.angles = decoder_layer.angles(p.model, p.sequence)  # no buffer: it stays in float32

    def forward(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = qkv.unflatten(2, (self.turns, -1)).split(self.columns, dim=3)
        q, k, v = (part.reshape(*qkv.shape[:2], -1, self.features) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.angles is not None:
            q, k = turned(q, self.angles), turned(k, self.angles)
        return q, k, v


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate x (s, b, heads, d) by angles (s, d); its two halves are real and imaginary parts."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    angles = angles[:, None, None].to(wide.dtype)
    first, second = wide.chunk(2, dim=3)
    return (wide * angles.cos() + torch.cat((-second, first), dim=3) * angles.sin()).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, p: LayerConfig, linear: Make):
        super().__init__()
        self.linear1 = linear(p.hidden, p.up, bias=p.bias)
        self.linear2 = linear(p.ffn, p.hidden, bias=p.bias)
        self.activation = ACTIVATIONS[p.activation]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear2(self.activation(self.linear1(x)))
        return out


class PlainLayer(nn.Module):
    """Compute h = x + dropout(proj(attention(ln1(x)))), then h + mlp(ln2(h)); x (s, b, h)."""

    def __init__(self, p: LayerConfig, linear: Make = nn.Linear, norm: Make | None = None):
        super().__init__()
        norm = norm or norm_of(p)
        self.ln1 = norm(p.hidden, eps=p.eps)
        self.qkv_projection = linear(p.hidden, sum(p.columns), bias=p.bias)
        self.heads = Heads(p, norm)
        self.attention = attention_of(p)
        self.projection = linear(p.columns[0], p.hidden, bias=p.bias)
        self.dropout = nn.Dropout(p.dropout)
        self.ln2 = norm(p.hidden, eps=p.eps)
        self.mlp = MLP(p, linear)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(*self.heads(self.qkv_projection(self.ln1(x))))
        x = x + self.dropout(self.projection(attended))
        return x + self.mlp(self.ln2(x))


class PlainMLP(nn.Module):
    """Compute mlp(ln2(x)) under the layer's names; x (s, b, h)."""

    def __init__(self, p: LayerConfig):
        super().__init__()
        self.ln2 = norm_of(p)(p.hidden, eps=p.eps)
        self.mlp = MLP(p, nn.Linear)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(self.ln2(x))
        return y


def norm_of(p: LayerConfig, library: Any = nn) -> Make:
    """Return nn.LayerNorm or nn.RMSNorm, or a library's class of that name."""
    made: Make = getattr(library, p.norm)
    return made


def build(p: LayerConfig) -> nn.Module:
    return (PlainMLP if p.part == "mlp" else PlainLayer)(p).to(p.dtype)


def no_fp8(p: LayerConfig) -> str | None:
    return "nn.Linear has no FP8: choose a te_ or torchao_ layer, or another precision" if p.recipe else None


def unsupported(p: LayerConfig) -> str | None:
    if p.part == "layer" and p.attention != "manual":
        return f"attention {p.attention}: plain writes attention out (manual); plain_sdpa calls a kernel"
    return no_fp8(p)


LAYER = Layer(build=build, unsupported=unsupported, parts=PARTS)
