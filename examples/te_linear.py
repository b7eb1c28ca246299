"""One linear layer in FP8: the program of Transformer Engine's README with its two imports changed.

python examples/te_linear.py [--device cpu] [--tokens 2048]
"""

import argparse
from collections.abc import Sequence

import torch

import te_bench.models as te  # was: import transformer_engine.pytorch as te
from te_bench.models import recipe  # was: from transformer_engine.common import recipe


def main(arguments: Sequence[str] | None = None) -> float:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--tokens", type=int, default=2048 if gpu else 64, help="rows of the input")
    settings = parser.parse_args(arguments)

    # Set dimensions.
    in_features = 768
    out_features = 3072
    hidden_size = settings.tokens

    # Initialize model and inputs.
    torch.manual_seed(0)
    model = te.Linear(in_features, out_features, bias=True).to(settings.device)
    inp = torch.randn(hidden_size, in_features, device=settings.device)

    # Create an FP8 recipe. Note: All input args are optional.
    fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.E4M3)

    # Enable autocasting for the forward pass
    with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
        out = model(inp)

    loss = out.sum()
    loss.backward()

    exact = torch.nn.functional.linear(inp, model.weight, model.bias)
    error = ((out - exact).norm() / exact.norm()).item()
    print(f"{tuple(inp.shape)} -> {tuple(out.shape)} on {settings.device}, loss {loss.item():.2f}")
    print(f"the weight's gradient has norm {model.weight.grad.norm().item():.1f}")
    print(f"FP8 differs from {inp.dtype} by {error:.2%}")
    return error


if __name__ == "__main__":
    main()
