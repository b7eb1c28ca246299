"""Rivals that build a layer, the GPT layer of Transformer Engine's quickstart or a decoder's own, one file each.

LAYER in NAME.py. Shapes: x (s, b, h) -> (s, b, h), s positions, b batch, h hidden. All load plain.py's weights by its
names, so that outputs and gradients can be compared.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from te_bench import plugins
from te_bench.kernels.activation import KINDS
from te_bench.kernels.attention import Problem
from te_bench.models import recipe as recipes

PARTS = ("layer", "mlp")
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """The layer that a rival builds, and its precision. precision "fp8": bf16 parameters, GEMMs by `recipe`.

    mask: "full" or "causal". settings: fields of the recipe that differ from its defaults. part: one of PARTS; "mlp" is
    the second norm and the MLP, without attention and residual.
    The rest defaults to the quickstart's layer; models.decoder_layer sets it for a model's. groups: key/value heads,
    None: as many as query heads; head_dim None: hidden / heads. by_head: the QKV weight's rows go by head or group,
    instead of all q, then k, then v. model: the decoder whose rotary angles apply; None: no rotation.
    """

    hidden: int
    ffn: int
    heads: int
    sequence: int
    batch: int
    dropout: float
    mask: str
    attention: str
    precision: str
    device: str
    recipe: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    part: str = "layer"
    groups: int | None = None
    head_dim: int | None = None
    by_head: bool = True
    norm: str = "LayerNorm"  # or "RMSNorm"
    eps: float = 1e-5
    bias: bool = True  # of the Linears
    activation: str = "gelu"  # one of kernels.activation.KINDS
    qk_norm: bool = False  # norms over head_dim before the rotation
    model: str | None = None

    @property
    def columns(self) -> tuple[int, int, int]:
        """The numbers of the QKV projection's columns for q, k and v."""
        d, groups = self.features, self.groups or self.heads
        return self.heads * d, groups * d, groups * d

    @property
    def turns(self) -> int:
        """The number of turns in which the QKV projection's columns go to q, k and v."""
        return (self.groups or self.heads) if self.by_head else 1

    @property
    def features(self) -> int:
        """Features of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def up(self) -> int:
        """Output features of the MLP's first GEMM."""
        return self.ffn * (2 if KINDS[self.activation][1] else 1)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of parameters and activations."""
        return DTYPES[{"fp8": "bf16"}.get(self.precision, self.precision)]

    @property
    def causal(self) -> bool:
        return self.mask == "causal"

    @property
    def capability(self) -> tuple[int, int] | None:
        return torch.cuda.get_device_capability() if self.device == "cuda" else None

    @property
    def attention_problem(self) -> Problem:
        return Problem(
            batch=self.batch,
            heads=self.heads,
            length=self.sequence,
            head_dim=self.features,
            kv_heads=self.groups,
            dtype=next(name for name, dtype in DTYPES.items() if dtype is self.dtype),
            causal=self.causal,
            dropout=self.dropout,
            device=self.device,
            capability=self.capability,
        )


def recipe_of(p: LayerConfig) -> recipes.Recipe | None:
    """Return the recipe with the requested settings. Raises ValueError for an unknown setting."""
    if p.recipe is None:
        return None
    recipe = recipes.load(p.recipe)
    legal = [f.name for f in fields(recipe)]
    for name in p.settings:
        if name not in legal:
            raise ValueError(f"the recipe {p.recipe} has no setting {name!r}. Its settings: {', '.join(legal)}.")
    return replace(recipe, **p.settings)


Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A rival of a layer.

    build(p) returns the layer on torch's default device, in p.dtype; its forward takes x alone. unsupported(p): why it
    cannot, or None; attention's reasons are checked elsewhere. context(p)(): the context of each forward pass, without
    its backward pass. names: {plain.py's parameter: this layer's}, where they differ. numerics: te.numerics supports
    it. own_attention: it calls attention kernels by its own operators, which torch's profiler cannot name. parts: those
    of PARTS that it can build.
    """

    build: Callable[[LayerConfig], nn.Module]
    unsupported: Callable[[LayerConfig], str | None]
    context: Callable[[LayerConfig], Context] = lambda p: contextlib.nullcontext
    names: Mapping[str, str] = field(default_factory=dict)
    numerics: bool = False
    own_attention: bool = False
    parts: tuple[str, ...] = ("layer",)


def named(beginnings: Mapping[str, str]) -> dict[str, str]:
    """Return Layer.names of weights and biases, from {prefix in plain.py: prefix in the layer}."""
    kinds = ("weight", "bias")
    return {f"{plain}.{kind}": f"{own}{kind}" for plain, own in beginnings.items() for kind in kinds}


_family = plugins.Family(__name__, "LAYER", Layer)
names, load = _family.names, _family.load


@torch.no_grad()
def load_weights(layer: Layer, module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy the plain layer's weights into a rival's parameters; every parameter must be named."""
    own = dict(module.named_parameters())
    renamed = {layer.names.get(name, name): value for name, value in weights.items()}
    assert own.keys() == renamed.keys(), f"parameters without a name in plain.py: {sorted(own.keys() ^ renamed.keys())}"
    for name, value in renamed.items():
        own[name].copy_(value)


def plain_gradients(layer: Layer, module: nn.Module, plain: Iterable[str]) -> dict[str, Tensor | None]:
    """Return the gradients of a rival's parameters under the plain layer's names, listed by `plain`."""
    own = dict(module.named_parameters())
    return {name: own[layer.names.get(name, name)].grad for name in plain}
