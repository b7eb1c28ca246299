"""Transformer Engine's quickstart: one GPT layer five ways, from plain PyTorch to FP8, with the same weights.

python examples/te_quickstart.py [--device cpu] [--hidden 128] [--length 64] [--batch 2] [--heads 4] [--dtype float32]

The layers are the quickstart's own, with dropout and all; only the imports are changed. The plain layer and its first two
versions attend to all positions, te.TransformerLayer to those before (its default mask is causal).
"""

import argparse
from collections.abc import Sequence

import quickstart_utils as utils
import torch

import te_bench.models as te  # was: import transformer_engine.pytorch as te
from te_bench.models.recipe import DelayedScaling, Format  # was: from transformer_engine.common.recipe import ...


class BasicTransformerLayer(torch.nn.Module):
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        layernorm_eps: float = 1e-5,
        attention_dropout: float = 0.1,
        hidden_dropout: float = 0.1,
    ):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.kv_channels = hidden_size // num_attention_heads
        self.ln1 = torch.nn.LayerNorm(hidden_size, eps=layernorm_eps)
        self.qkv_projection = torch.nn.Linear(hidden_size, 3 * hidden_size, bias=True)
        self.attention = utils.DotProductAttention(
            num_attention_heads=num_attention_heads,
            kv_channels=self.kv_channels,
            attention_dropout=attention_dropout,
        )
        self.projection = torch.nn.Linear(hidden_size, hidden_size, bias=True)
        self.dropout = torch.nn.Dropout(hidden_dropout)
        self.ln2 = torch.nn.LayerNorm(hidden_size, eps=layernorm_eps)
        self.mlp = utils.BasicMLP(hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        res = x
        x = self.ln1(x)

        # Fused QKV projection
        qkv = self.qkv_projection(x)
        qkv = qkv.view(qkv.size(0), qkv.size(1), self.num_attention_heads, 3 * self.kv_channels)
        q, k, v = torch.split(qkv, qkv.size(3) // 3, dim=3)

        x = self.attention(q, k, v, attention_mask)
        x = self.projection(x)
        x = self.dropout(x)
        x = res + x
        res = x
        x = self.ln2(x)
        x = self.mlp(x)

        return x + res


class BasicTEMLP(torch.nn.Module):
    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.linear1 = te.Linear(hidden_size, ffn_hidden_size, bias=True)
        self.linear2 = te.Linear(ffn_hidden_size, hidden_size, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear1(x)
        x = torch.nn.functional.gelu(x, approximate="tanh")
        x = self.linear2(x)
        return x


class BasicTETransformerLayer(torch.nn.Module):
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        layernorm_eps: float = 1e-5,
        attention_dropout: float = 0.1,
        hidden_dropout: float = 0.1,
    ):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.kv_channels = hidden_size // num_attention_heads
        self.ln1 = te.LayerNorm(hidden_size, eps=layernorm_eps)
        self.qkv_projection = te.Linear(hidden_size, 3 * hidden_size, bias=True)
        self.attention = utils.DotProductAttention(
            num_attention_heads=num_attention_heads,
            kv_channels=self.kv_channels,
            attention_dropout=attention_dropout,
        )
        self.projection = te.Linear(hidden_size, hidden_size, bias=True)
        self.dropout = torch.nn.Dropout(hidden_dropout)
        self.ln2 = te.LayerNorm(hidden_size, eps=layernorm_eps)
        self.mlp = BasicTEMLP(hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        res = x
        x = self.ln1(x)

        # Fused QKV projection
        qkv = self.qkv_projection(x)
        qkv = qkv.view(qkv.size(0), qkv.size(1), self.num_attention_heads, 3 * self.kv_channels)
        q, k, v = torch.split(qkv, qkv.size(3) // 3, dim=3)

        x = self.attention(q, k, v, attention_mask)
        x = self.projection(x)
        x = self.dropout(x)
        x = res + x
        res = x
        x = self.ln2(x)
        x = self.mlp(x)

        return x + res


class FusedTETransformerLayer(torch.nn.Module):
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        layernorm_eps: float = 1e-5,
        attention_dropout: float = 0.1,
        hidden_dropout: float = 0.1,
    ):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.kv_channels = hidden_size // num_attention_heads
        self.ln_qkv = te.LayerNormLinear(hidden_size, 3 * hidden_size, eps=layernorm_eps, bias=True)
        self.attention = utils.DotProductAttention(
            num_attention_heads=num_attention_heads,
            kv_channels=self.kv_channels,
            attention_dropout=attention_dropout,
        )
        self.projection = te.Linear(hidden_size, hidden_size, bias=True)
        self.dropout = torch.nn.Dropout(hidden_dropout)
        self.ln_mlp = te.LayerNormMLP(hidden_size, ffn_hidden_size, eps=layernorm_eps, bias=True)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        res = x
        qkv = self.ln_qkv(x)

        # Split qkv into query, key and value
        qkv = qkv.view(qkv.size(0), qkv.size(1), self.num_attention_heads, 3 * self.kv_channels)
        q, k, v = torch.split(qkv, qkv.size(3) // 3, dim=3)

        x = self.attention(q, k, v, attention_mask)
        x = self.projection(x)
        x = self.dropout(x)
        x = res + x
        res = x
        x = self.ln_mlp(x)

        return x + res


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """The mean time of each variant, ms."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", default="float16" if gpu else "float32", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--hidden", type=int, default=4096 if gpu else 128)
    parser.add_argument("--length", type=int, default=2048 if gpu else 64)
    parser.add_argument("--batch", type=int, default=4 if gpu else 2)
    parser.add_argument("--heads", type=int, default=32 if gpu else 4)
    settings = parser.parse_args(arguments)
    device, dtype = settings.device, getattr(torch, settings.dtype)

    # Layer configuration
    hidden_size = settings.hidden
    sequence_length = settings.length
    batch_size = settings.batch
    ffn_hidden_size = 4 * hidden_size
    num_attention_heads = settings.heads
    sizes = (hidden_size, ffn_hidden_size, num_attention_heads)

    # Synthetic data
    x = torch.rand(sequence_length, batch_size, hidden_size).to(device, dtype=dtype)
    dy = torch.rand(sequence_length, batch_size, hidden_size).to(device, dtype=dtype)

    basic_transformer = BasicTransformerLayer(*sizes).to(device, dtype=dtype)
    basic_te_transformer = BasicTETransformerLayer(*sizes).to(device, dtype=dtype)
    utils.share_parameters_with_basic_te_model(basic_te_transformer, basic_transformer)
    fused_te_transformer = FusedTETransformerLayer(*sizes).to(device, dtype=dtype)
    utils.share_parameters_with_fused_te_model(fused_te_transformer, basic_transformer)
    te_transformer = te.TransformerLayer(*sizes).to(device, dtype=dtype)
    utils.share_parameters_with_transformerlayer_te_model(te_transformer, basic_transformer)
    fp8_transformer = te.TransformerLayer(*sizes).to(device, dtype=dtype)
    utils.share_parameters_with_transformerlayer_te_model(fp8_transformer, basic_transformer)

    fp8_recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    fp8 = {"enabled": True, "fp8_recipe": fp8_recipe}

    print(f"{sequence_length} x {batch_size} x {hidden_size}, {settings.dtype} on {device}: forward and backward")
    times = {}
    for name, layer, fp8_autocast_kwargs in (
        ("plain PyTorch", basic_transformer, {"enabled": False}),
        ("te.LayerNorm and te.Linear", basic_te_transformer, {"enabled": False}),
        ("te.LayerNormLinear and te.LayerNormMLP", fused_te_transformer, {"enabled": False}),
        ("te.TransformerLayer", te_transformer, {"enabled": False}),
        ("te.TransformerLayer in FP8", fp8_transformer, fp8),
    ):
        torch.manual_seed(1234)
        with te.fp8_autocast(**fp8_autocast_kwargs):
            y = layer(x, attention_mask=None)
        print(f"{name}: y has mean {y.float().mean().item():.3f}. ", end="")
        times[name] = utils.speedometer(
            layer, x, dy, forward_kwargs={"attention_mask": None}, fp8_autocast_kwargs=fp8_autocast_kwargs
        )
    return times


if __name__ == "__main__":
    main()
