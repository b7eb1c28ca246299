"""Other projects that train the same model, one file each: RIVAL in NAME.py. Imports no torch.

A rival changes a model in place, te-bench's own or, where it can, a user's, so that its passes are another project's. The
parameters stay the model's, under its names, with the same initial values: the check, the optimizer and the report know
nothing else of a rival.
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
    """What a rival did to a user's module.

    linears: names of the layers that it computes in FP8; multiple: of the rows that they can be given. around: what a
    forward pass runs in.
    """

    linears: tuple[str, ...] = ()
    multiple: int = 1
    around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


@dataclass(frozen=True, kw_only=True, slots=True)
class Adoption:
    """How a rival trains a user's model, of which te-bench knows nothing.

    unsupported(module, device, capability): why it can't train that module on this machine, or None.
    build(module): change the module. code(vocab): the lines by which a user changes a `model` of that vocabulary.
    """

    unsupported: "Callable[[nn.Module, str, Capability], str | None]"
    build: "Callable[[nn.Module], Changed]"
    code: Callable[[int], tuple[str, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """One rival, and how those who use it train.

    title: what a report calls its steps; rivals of one title have the same kernels. packages: the distributions whose
    versions an environment notes.
    unsupported(config, device, capability): why it can't train that model on this machine, or None.
    build(model): change the model. recipe: te_bench's recipe of the same arithmetic; None: it trains in bf16.
    modes: in which execution modes suites run it in one process.
    way: the file of training.ways by which its steps are divided over ranks; None: it has one process alone. ranks: {mode of
    parallelism that the way has: execution modes}, as suites run it on GPUs.
    head(config): the loss that it trains with, where it has its own.
    own_blocks: its passes are its own from the first block to the last norm, and mode cudagraph captures them as they are;
    else it has changed modules of the model. own_attention: it calls attention by operators of its own, which torch's
    profiler has no names for. kernels: a regular expression over a GPU's kernels that tells one of each block's part.
    adoption: how it trains a user's model; None: it can't.
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


def called(name: str) -> str:
    """A rival by its title and what tells it from others of that title: Liger, torchao tensorwise. Others are themselves."""
    if name not in names():
        return name
    title = load(name).title
    return title + name.removeprefix(title.lower().replace(" ", "_")).replace("_", " ")


def adopting() -> list[str]:
    """The names of those that train a user's model."""
    return [name for name in names() if load(name).adoption is not None]


def missing(modules: Sequence[str], package: str, install: str) -> str | None:
    """That a package is needed, with the command that installs it, where one of its modules is not there; or None."""
    if all(importlib.util.find_spec(module) is not None for module in modules):
        return None
    return f"needs {package}: pip install {install}"
