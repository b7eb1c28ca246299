"""How a training step is divided over the ranks of a process group: one object that TrainStep asks.

    parallel = load("ddp")                       # in every rank, once torch.distributed has its process group
    step = TrainStep(model, optim, precision="bf16", mode="eager", parallel=parallel)
    loss = step(tokens, targets)                 # every rank gives the global batch, and gets the global batch's loss

A mode is a file with PARALLEL, a class of this interface. Each rank takes its rows of every micro-batch; losses are means
over rows, of which ranks have equally many, so that the mean over the ranks is the global batch's.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from te_bench import plugins

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class Indivisible(ValueError):
    """A model whose step cannot be divided so."""


class Parallel:
    """One process that does all of it; the base of the modes that divide the work."""

    name: ClassVar[str | None] = None
    world, rank = 1, 0

    def unsupported(self, *, precision: str, mode: str, optimizer: str | None, blocks: str | None) -> str | None:
        """Why a step of this kind cannot be divided so, or None."""
        return None

    def prepare(self, model: "nn.Module", multiplies_in: "torch.dtype | None") -> None:
        """Make the model one rank's part of it, in place, before anything else is made of its parameters.

        multiplies_in: the dtype to which autocast rounds what is multiplied; None where it does not.
        """

    def seed(self, seed: int) -> int:
        """What dropout's masks are drawn by: in each rank another, of each of a repetition's seeds."""
        return seed

    def rows(self, x: "Tensor") -> "Tensor":
        """This rank's rows of a micro-batch."""
        return x

    def compiled(self, model: "nn.Module") -> "Callable[..., Tensor]":
        """The model's forward pass as torch.compile makes it; the model itself stays as it is."""
        import torch

        forward: Callable[..., Tensor] = torch.compile(model, dynamic=False)
        return forward

    def meet(self) -> None:
        """Wait for every rank, after each did by itself what may take one longer than collectives wait."""

    def watch(self, holders: Iterable["nn.Parameter"]) -> None:
        """Note parameters whose gradient is whole as soon as a backward pass has brought it."""

    def reducing(self) -> contextlib.AbstractContextManager[None]:
        """Around the last backward pass of a step: what is watched may be sent while the pass goes on."""
        return contextlib.nullcontext()

    def reduce(self, holders: Iterable["nn.Parameter"]) -> None:
        """Make each holder's gradient of this rank's rows that of the global batch, in place; after the last backward pass.

        holders: the same at each call, whether or not they have gradients. Raises Indivisible.
        """

    def mean(self, loss: "Tensor") -> "Tensor":
        """The mean over the ranks."""
        return loss

    def clip(self, parameters: Iterable["nn.Parameter"], max_norm: float) -> "Tensor":
        """Scale the gradients to a norm of max_norm at most, that of all ranks' gradients; what it was."""
        from torch.nn.utils import clip_grad_norm_

        return clip_grad_norm_(parameters, max_norm, foreach=True)

    def whole(self, x: "Tensor") -> "Tensor":
        """A parameter or gradient as one process would have it; every rank asks for it at once."""
        return x


SINGLE = Parallel()


def names() -> list[str]:
    """The modes, sorted."""
    return plugins.names(__name__)


def load(name: str) -> Any:
    """The mode of that name over all ranks of the process group. Raises ValueError, with the near matches, when unknown."""
    plugins.check("mode of parallelism", name, names())
    return plugins.load(__name__, name, "PARALLEL")()
