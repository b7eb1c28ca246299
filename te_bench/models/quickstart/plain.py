"""nn.LayerNorm and nn.Linear with attention written out as bmm, softmax, bmm: the quickstart's baseline.

Source: Transformer Engine, docs/examples/quickstart.ipynb (2022): one QKV projection whose rows go by head, then by query,
key and value; dropout after softmax and after the projection, none after the MLP; GELU by its tanh approximation.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_bench.kernels import attention
from te_bench.models.quickstart import PARTS, Layer, LayerConfig

EPS = 1e-5


class ExplicitAttention(nn.Module):
    """softmax(Q K^T / sqrt(d)) V by separate operators over (s, b, heads, d) each -> (s, b, heads d)."""

    def __init__(self, causal: bool, dropout: float):
        super().__init__()
        self.causal = causal
        self.dropout = nn.Dropout(dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length, batch = q.shape[:2]
        q, k, v = (x.flatten(1, 2).transpose(0, 1) for x in (q, k, v))  # (b heads, s, d)
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.shape[-1])
        if self.causal:
            future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        context = torch.bmm(self.dropout(F.softmax(scores, dim=-1)), v)
        return context.transpose(0, 1).reshape(length, batch, -1)


class KernelAttention(nn.Module):
    """The same by one kernel of te_bench.kernels.attention."""

    def __init__(self, name: str, causal: bool, dropout: float):
        super().__init__()
        self.kernel = attention.load(name).forward
        self.causal, self.dropout = causal, dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # (b, heads, s, d)
        dropout = self.dropout if self.training else 0.0
        context = self.kernel(q, k, v, causal=self.causal, scale=1 / math.sqrt(q.shape[-1]), dropout=dropout)
        return context.permute(2, 0, 1, 3).flatten(2)


def attention_of(p: LayerConfig) -> nn.Module:
    """The quickstart's own attention for "manual", else the kernel of that name."""
    if p.attention == "manual":
        return ExplicitAttention(p.causal, p.dropout)
    return KernelAttention(p.attention, p.causal, p.dropout)


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """(s, b, 3 h) -> query, key and value, (s, b, heads, d) each."""
    return qkv.view(*qkv.shape[:2], heads, -1).chunk(3, dim=-1)


class MLP(nn.Module):
    def __init__(self, p: LayerConfig, linear: Callable[[int, int], nn.Module]):
        super().__init__()
        self.linear1 = linear(p.hidden, p.ffn)
        self.linear2 = linear(p.ffn, p.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(F.gelu(self.linear1(x), approximate="tanh"))


class PlainLayer(nn.Module):
    """x + dropout(proj(attention(ln1(x)))), and then + mlp(ln2(..)); x (s, b, h)."""

    def __init__(
        self,
        p: LayerConfig,
        linear: Callable[[int, int], nn.Module] = nn.Linear,
        norm: Callable[..., nn.Module] = nn.LayerNorm,
    ):
        super().__init__()
        self.heads = p.heads
        self.ln1 = norm(p.hidden, eps=EPS)
        self.qkv_projection = linear(p.hidden, 3 * p.hidden)
        self.attention = attention_of(p)
        self.projection = linear(p.hidden, p.hidden)
        self.dropout = nn.Dropout(p.dropout)
        self.ln2 = norm(p.hidden, eps=EPS)
        self.mlp = MLP(p, linear)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(*split_heads(self.qkv_projection(self.ln1(x)), self.heads))
        x = x + self.dropout(self.projection(attended))
        return x + self.mlp(self.ln2(x))


class PlainMLP(nn.Module):
    """mlp(ln2(x)) by the layer's names; x (s, b, h)."""

    def __init__(self, p: LayerConfig):
        super().__init__()
        self.ln2 = nn.LayerNorm(p.hidden, eps=EPS)
        self.mlp = MLP(p, nn.Linear)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(self.ln2(x))
        return y


def build(p: LayerConfig) -> nn.Module:
    return (PlainMLP if p.part == "mlp" else PlainLayer)(p).to(p.dtype)


def no_fp8(p: LayerConfig) -> str | None:
    return "nn.Linear has no FP8: choose a te_ or torchao_ layer, or another precision" if p.recipe else None


def unsupported(p: LayerConfig) -> str | None:
    if p.part == "layer" and p.attention != "manual":
        return f"attention {p.attention}: plain writes attention out (manual); plain_sdpa calls a kernel"
    return no_fp8(p)


LAYER = Layer(build=build, unsupported=unsupported, parts=PARTS)
