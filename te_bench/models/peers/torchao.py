"""nn.Linears converted by torchao.float8, which computes in FP8 under torch.compile.

Source: torchao 0.18.0, float8/float8_linear_utils.py and float8/config.py; for a user's model its float8/README.md,
whose filter skips the last module and sizes that are no multiple of 16.
"""

from collections.abc import Container
from typing import TYPE_CHECKING

from te_bench.models.rivals import Capability, missing

if TYPE_CHECKING:
    from torch import nn

INSTALL = "torchao==0.18.0"  # for its convert_to_float8_training and recipe names
MULTIPLE = 16  # its FP8 GEMMs need features and rows that are multiples of this


def lacks(device: str, capability: Capability) -> str | None:
    """Return why this machine cannot run it, or None."""
    if reason := missing(["torchao"], "torchao", INSTALL):
        return reason
    if device != "cuda" or capability is None or capability < (8, 9):
        return "needs an NVIDIA GPU of compute capability 8.9 or newer"
    return None


def convert(
    model: "nn.Module", recipe: str, leave: Container[str] = (), only: Container[str] | None = None
) -> "nn.Module":
    """Convert the model's Linears in place to FP8 by torchao's recipe of that name.

    leave: names of Linears that stay; only: names of those to convert, None for all others.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    converted: nn.Module = convert_to_float8_training(
        model,
        config=Float8LinearConfig.from_recipe_name(recipe),
        module_filter_fn=lambda module, path: path not in leave and (only is None or path in only),
    )
    return converted


def lacks_for(module: "nn.Module", device: str, capability: Capability) -> str | None:
    """Return why this machine cannot train a user's module with it, or None."""
    if reason := lacks(device, capability):
        return reason
    if not linears(module):
        return f"the model has no nn.Linear beside its head whose features are multiples of {MULTIPLE}"
    return None


def linears(module: "nn.Module") -> list[str]:
    """Return the names of a user's Linears that torchao shall compute; a shared one has several.

    It leaves out the head (as many features as the largest embedding has rows), Linears that share its weight, and
    those inside nn.MultiheadAttention, which reads their weights without calling them.
    """
    from torch import nn

    owners: dict[int, set[int]] = {}
    for part in module.modules():
        for parameter in part._parameters.values():
            owners.setdefault(id(parameter), set()).add(id(part))
    vocab = max((m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)), default=None)
    uncalled = {id(m.out_proj) for m in module.modules() if isinstance(m, nn.MultiheadAttention)}
    return [
        name
        for name, part in module.named_modules(remove_duplicate=False)
        if name and isinstance(part, nn.Linear) and id(part) not in uncalled
        if part.in_features % MULTIPLE == part.out_features % MULTIPLE == 0 and part.out_features != vocab
        if len(owners[id(part.weight)]) == 1
    ]


def adopt(module: "nn.Module", recipe: str) -> tuple[str, ...]:
    """Convert the `linears` of a user's module in place; return one name for each."""
    chosen = set(linears(module))
    convert(module, recipe, only=chosen)
    return tuple(name for name, _ in module.named_modules() if name in chosen)


def code(recipe: str, vocab: int) -> tuple[str, ...]:
    """Return the lines by which a user converts a `model` of that vocabulary likewise."""
    return (
        f"from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # pip install {INSTALL}",
        f'config = Float8LinearConfig.from_recipe_name("{recipe}")',
        f"takes = lambda m, _: m.in_features % {MULTIPLE} == m.out_features % {MULTIPLE} == 0 and m.out_features != {vocab}",
        "convert_to_float8_training(model, config=config, module_filter_fn=takes)",
    )
