"""How a training step is divided over the ranks of a process group: one object that TrainStep asks.

    parallel = load("ddp")                       # in every rank, once torch.distributed has its process group
    step = TrainStep(model, optim, precision="bf16", mode="eager", parallel=parallel)
    loss = step(tokens, targets)                 # every rank gives the global batch, and gets the global batch's loss

A mode is a file with PARALLEL, a class of this interface. Each rank takes its rows of every micro-batch; losses are means
over rows, of which ranks have equally many, so that the mean over the ranks is the global batch's. Under tensor parallelism
every rank takes all rows.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from te_bench import plugins

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


#: Modes with groups of ranks, of a size that is asked for as `shard`.
GROUPED = ("fsdp2+tp", "hsdp")
#: Modes that gather weights, which may be in FP8: gather.
GATHERING = ("fsdp2", "hsdp")
#: Modes with ranks that share layers, and may share the tokens between them: sequence_parallel.
SHARING = ("fsdp2+tp", "tp")
#: What overlaps the GEMMs of such ranks with their collectives: torch's symmetric memory.
OVERLAPS = ("symmetric",)


class Indivisible(ValueError):
    """A model whose step cannot be divided so."""


class Parallel:
    """One process that does all of it; the base of the modes that divide the work."""

    name: ClassVar[str | None] = None
    world, rank = 1, 0
    casts = False  # the model computes in the dtype of the weights that it is given, without autocast
    replicas, replica = 1, 0  # into how many parts a micro-batch is divided, and which is this rank's

    @property
    def draws(self) -> int:
        """Which of the sequences of random numbers is this rank's."""
        return self.replica

    @classmethod
    def refused(
        cls, *, precision: str, mode: str, optimizer: str | None, blocks: str | None, **gathers: "Any"
    ) -> str | None:
        """Why no step of this kind can be divided so, or None: known before there are ranks.

        gathers: of GATHERING, `gather`, and where it is known the `recipe` that casts.
        """
        return None

    def unsupported(self, **kind: "Any") -> str | None:
        """Why this rank's step of a kind that `refused` takes cannot be divided so, or None."""
        return self.refused(**kind)

    def prepare(self, model: "nn.Module", multiplies_in: "torch.dtype | None") -> None:
        """Make the model one rank's part of it, in place, before anything else is made of its parameters.

        multiplies_in: the dtype to which autocast rounds what is multiplied; None where it does not.
        """

    def seed(self, seed: int) -> int:
        """What dropout's masks are drawn by: in each rank another, of each of a repetition's seeds."""
        return seed

    def require_same_batch(self, *batch: "Tensor") -> None:
        """Raise ValueError where ranks were given different batches. Asks the others with the first batch of each shape."""

    def rows(self, x: "Tensor") -> "Tensor":
        """This rank's rows of a micro-batch."""
        return x

    def forward(self, model: "nn.Module") -> "Callable[..., Tensor]":
        """What an eager pass calls."""
        return model

    def compiled(self, model: "nn.Module") -> "Callable[..., Tensor]":
        """The model's forward pass as torch.compile makes it; the model itself stays as it is."""
        import torch

        forward: Callable[..., Tensor] = torch.compile(model, dynamic=False)
        return forward

    def of_all(self, value: "Any") -> "list[Any]":
        """Every rank's value, in their order; all ask for it at once."""
        return [value]

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

    def shared(self, optimizer: "torch.optim.Optimizer") -> "torch.optim.Optimizer":
        """The optimizer that updates all parameters as this new one would, of which each rank may keep a part."""
        return optimizer

    def own(self, optimizer: "torch.optim.Optimizer") -> "torch.optim.Optimizer":
        """Of what `shared` made the optimizer whose states are this rank's."""
        return optimizer

    def owners(self, parameters: "Sequence[nn.Parameter]") -> list[int] | None:
        """For an optimizer of te_bench's, the rank that updates each and keeps its moments; None: every rank does.

        It may move the parameters' memory. Raises Indivisible.
        """
        return None

    def updated(self) -> None:
        """After each rank has updated those that it owns: every rank has them all."""

    def of_parts(self, norm: "Tensor") -> "Tensor":
        """The norm of all gradients, by that of the gradients of this rank's own parameters."""
        return norm

    def gathered(self, model: "nn.Module", gather: str | None, tokens: int = 0) -> dict[str, tuple[int, int]]:
        """{dtype: (the least, the most) bytes} that the two passes of a micro-batch are to gather.

        Of the weights of the model's blocks, were it as `gather` asks; with sequence parallelism of so many tokens, those of
        the micro-batch's part that this rank computes. What is wider than half precision does not count.
        """
        return {}

    def overlapped(self, tokens: int) -> int:
        """How many numbers a micro-batch's two passes are to gather, and as many to scatter, while they multiply.

        At least, of so many tokens. 0 where GEMMs and collectives are apart.
        """
        return 0

    def largest(self, x: "Tensor") -> "Tensor":
        """Each element's maximum over the ranks, infinity where one has NaN."""
        return x

    def mean(self, loss: "Tensor") -> "Tensor":
        """The mean over the ranks."""
        return loss

    def clip(self, parameters: Iterable["nn.Parameter"], max_norm: float) -> "Tensor":
        """Scale the gradients to a norm of max_norm at most, that of all ranks' gradients; what it was."""
        from torch.nn.utils import clip_grad_norm_

        return clip_grad_norm_(parameters, max_norm, foreach=True)

    def whole(self, x: "Tensor", of: "nn.Parameter | None" = None) -> "Tensor":
        """A parameter or gradient, `of` which parameter, as one process would have it; every rank asks for it at once."""
        return x

    def plain(self, x: "Tensor", of: "nn.Parameter | None" = None) -> "Tensor":
        """The same memory, of a parameter or moment `of` it, as torch.distributed.checkpoint writes and reads it."""
        return x


SINGLE = Parallel()


def replicas(name: str, world: int, shard: int | None) -> int:
    """Into how many parts so many ranks divide a micro-batch: those that share layers take the same."""
    if name == "tp":
        return 1
    return world // shard if name == "fsdp2+tp" and shard is not None else world


def meet() -> None:
    """Wait for every rank of the process group, however long the slowest takes."""
    from te_bench.training.parallel import _group

    _group.meet()


def names() -> list[str]:
    """The modes, sorted."""
    return [name.replace("_", "+") for name in plugins.names(__name__)]  # fsdp2_tp.py is fsdp2+tp


def kind(name: str) -> Any:
    """The class of the mode of that name. Raises ValueError, with the near matches, when unknown."""
    plugins.check("mode of parallelism", name, names())
    return plugins.load(__name__, name.replace("+", "_"), "PARALLEL")


def load(name: str, **options: Any) -> Any:
    """The mode of that name over all ranks of the process group; options: of its own, as fsdp2's gather.

    Raises ValueError, with the near matches, when unknown.
    """
    return kind(name)(**options)
