"""Other projects that train the same model, one file each: RIVAL in NAME.py. Imports no torch.

A rival changes a model in place, te-bench's own or, where it can, a user's, so that another project computes its
passes. Parameters keep the model's names and initial values: the check, the optimizer and the report need nothing else.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from te_bench import plugins
from te_bench.models.configs import DecoderConfig

if TYPE_CHECKING:
    from torch import nn

    from te_bench.kernels.linear_cross_entropy import Backend as Head
    from te_bench.models.decoder import Decoder

Capability = tuple[int, int] | None  # the GPU's compute capability, None on a CPU


@dataclass(frozen=True, kw_only=True, slots=True)
class Changed:
    """A rival's changes to a user's module.

    linears: names of the layers that it computes in FP8; multiple: they need rows that are a multiple of it. around:
    the context of a forward pass.
    """

    linears: tuple[str, ...] = ()
    multiple: int = 1
    around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


@dataclass(frozen=True, kw_only=True, slots=True)
class Adoption:
    """How a rival trains a user's model that te-bench does not know.

    unsupported(module, device, capability): why it cannot train that module on this machine, or None. build(module):
    change the module. code(vocab): the lines by which a user changes a `model` of that vocabulary. modes: the execution
    modes in which it is measured.
    """

    unsupported: "Callable[[nn.Module, str, Capability], str | None]"
    build: "Callable[[nn.Module], Changed]"
    code: Callable[[int], tuple[str, ...]]
    modes: tuple[str, ...] = ("eager",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """One rival and how it trains a te-bench model.

    title: its name in reports; rivals of one title have the same kernels. packages: the distributions whose versions an
    environment records. unsupported(config, device, capability): why it can't train that model on this machine, or
    None. build(model): change the model. recipe: te_bench's recipe of the same arithmetic; None: it trains in bf16.
    modes: the execution modes in which suites run it in one process. way: the file of training.ways that divides its
    steps over ranks; None: a single process only. ranks: {mode of parallelism of the way: execution modes} that suites
    run on GPUs. head(config): its own training loss, if it has one. own_blocks: it runs its own code from the first
    block to the last norm, and mode cudagraph captures that uncompiled; otherwise it has changed modules of the model.
    own_attention: it calls attention by its own operators, which torch's profiler cannot name. kernels: a regular
    expression for names of GPU kernels that prove it ran. adoption: how it trains a user's model; None: it can't.
    """

    title: str
    packages: tuple[str, ...]
    unsupported: Callable[[DecoderConfig, str, Capability], str | None]
    build: Callable[["Decoder"], None]
    recipe: str | None
    modes: tuple[str, ...]
    way: str | None = None
    ranks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    head: "Callable[[DecoderConfig], Head] | None" = None
    own_blocks: bool = False
    own_attention: bool = False
    kernels: str | None = None
    adoption: Adoption | None = None

    @property
    def precision(self) -> str:
        return "bf16" if self.recipe is None else "fp8"


_family = plugins.Family(__name__, "RIVAL", Rival)
names, load = _family.names, _family.load


def adopting() -> list[str]:
    """Return the names of rivals that can train a user's model."""
    return [name for name in names() if load(name).adoption is not None]


def missing(modules: Sequence[str], package: str, install: str) -> str | None:
    """Return that a package is needed, with its install command, if one of its modules is missing; else None."""
    if all(importlib.util.find_spec(module) is not None for module in modules):
        return None
    return f"needs {package}: pip install {install}"
