"""te_bench's own modules in Transformer Engine's place: the same names, arguments and autocast, on a CPU."""

import dataclasses
import importlib
import sys
import types
from typing import Any

import te_bench.models as te
from te_bench.models import recipe, rivals


class TransformerLayer(te.TransformerLayer):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.self_attention.register_forward_hook(lambda *_: None)  # with which te_bench fuses no layer
        for norm in (self.self_attention.q_norm, self.self_attention.k_norm):
            if norm is not None:
                norm.ranks = None  # Transformer Engine leaves to its users to add up their gradients


def plant() -> None:
    """Have `import transformer_engine` find them, and its rivals run anywhere, for the rest of this process."""
    made = {name: types.ModuleType(f"transformer_engine{name}") for name in ("", ".pytorch", ".common")}
    vars(made[".pytorch"]).update(TransformerLayer=TransformerLayer, RMSNorm=te.RMSNorm, autocast=te.autocast)
    vars(made[".common"])["recipe"] = recipe
    sys.modules |= {module.__name__: module for module in made.values()}
    for name in rivals.names():
        if rivals.load(name).way == "transformer_engine":
            file: Any = importlib.import_module(f"{rivals.__name__}.{name}")
            file.RIVAL = dataclasses.replace(file.RIVAL, unsupported=lambda *_: None)
