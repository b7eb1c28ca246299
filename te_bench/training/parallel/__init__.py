"""Modes of dividing a training step over the ranks of a process group: one object that TrainStep uses.

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


#: Modes with groups of ranks, whose size is the option `shard`.
GROUPED = ("fsdp2+tp", "hsdp")
#: Modes that gather weights; the option gather does so in FP8.
GATHERING = ("fsdp2", "hsdp")
#: Modes whose ranks share layers (tensor parallelism); they allow sequence_parallel.
SHARING = ("fsdp2+tp", "tp")
#: Ways to overlap such ranks' GEMMs with their collectives: torch's symmetric memory.
OVERLAPS = ("symmetric",)


class Indivisible(ValueError):
    """Raised for a model whose step this mode cannot divide."""


class Parallel:
    """A single process that does the whole step; the base class of the modes that divide it."""

    name: ClassVar[str | None] = None
    world, rank = 1, 0
    casts = False  # True: the model computes in the dtype of its weights, without autocast
    replicas, replica = 1, 0  # a micro-batch is divided into `replicas` parts; this rank has part `replica`

    @property
    def draws(self) -> int:
        """The index of this rank's random number sequence."""
        return self.replica

    @classmethod
    def refused(
        cls, *, precision: str, mode: str, optimizer: str | None, blocks: str | None, **gathers: "Any"
    ) -> str | None:
        """Return why this mode can divide no such step, or None, without ranks.

        gathers: of GATHERING, the option `gather` and, if known, the `recipe` that casts.
        """
        return None

    def unsupported(self, **kind: "Any") -> str | None:
        """Return why this rank's step cannot be divided in this mode, or None; also checks what only a rank knows."""
        return self.refused(**kind)

    def prepare(self, model: "nn.Module", multiplies_in: "torch.dtype | None") -> None:
        """Turn the model into this rank's part, in place; call before anything else uses its parameters.

        multiplies_in: the dtype to which autocast rounds GEMM operands; None without autocast.
        """

    def seed(self, seed: int) -> int:
        """Return this rank's seed for dropout masks, different in each rank."""
        return seed

    def require_same_batch(self, *batch: "Tensor") -> None:
        """Raise ValueError if ranks got different batches. Communicates only for the first batch of each shape."""

    def rows(self, x: "Tensor") -> "Tensor":
        """Return this rank's rows of a micro-batch."""
        return x

    def forward(self, model: "nn.Module", compiled: bool) -> "Callable[..., Tensor]":
        """Return the callable of a forward pass, eager or by torch.compile; the model itself is unchanged."""
        import torch

        return torch.compile(model, dynamic=False) if compiled else model

    def of_all(self, value: "Any") -> "list[Any]":
        """Return every rank's value, in rank order. Every rank must call it, and the slowest may take an hour."""
        return [value]

    def watch(self, holders: Iterable["nn.Parameter"]) -> None:
        """Register parameters whose gradient is whole as soon as the backward pass has written it."""

    def reducing(self) -> contextlib.AbstractContextManager[None]:
        """Enclose the last backward pass of a step: gradients of watched parameters may be sent while it runs."""
        return contextlib.nullcontext()

    def reduce(self, holders: Iterable["nn.Parameter"]) -> None:
        """Average each holder's gradient over the global batch, in place; call after the last backward pass.

        holders: the same at each call, with or without gradients. Raises Indivisible.
        """

    def shared(self, optimizer: "torch.optim.Optimizer") -> "torch.optim.Optimizer":
        """Return an optimizer equivalent to this new one, of whose states each rank may keep only a part."""
        return optimizer

    def owners(self, parameters: "Sequence[nn.Parameter]") -> list[int] | None:
        """Return, for te_bench's optimizers, which rank updates each parameter and keeps its moments; None: every rank.

        It may move the parameters' memory. Raises Indivisible.
        """
        return None

    def updated(self) -> None:
        """Send every parameter from the rank that updated it to all others."""

    def of_parts(self, norm: "Tensor") -> "Tensor":
        """Return the norm of all gradients, given the norm of those that this rank owns."""
        return norm

    def gathered(self, model: "nn.Module", gather: str | None, tokens: int = 0) -> dict[str, tuple[int, int]]:
        """Return {dtype: (least, most) bytes} that the two passes of a micro-batch must gather.

        Counts the blocks' weights as `gather` sends them and, with sequence parallelism, activations of `tokens`, this
        rank's part of the micro-batch. Anything wider than half precision is left out.
        """
        return {}

    def overlapped(self, tokens: int) -> int:
        """Return how many numbers a micro-batch's two passes must gather, and scatter, overlapped with GEMMs.

        It is a lower bound for `tokens` tokens; 0 if GEMMs and collectives do not overlap.
        """
        return 0

    def largest(self, x: "Tensor") -> "Tensor":
        """Return each element's maximum over the ranks; infinity where a rank has NaN."""
        return x

    def mean(self, loss: "Tensor") -> "Tensor":
        """Return the mean over the ranks."""
        return loss

    def clip(self, parameters: Iterable["nn.Parameter"], max_norm: float) -> "Tensor":
        """Scale the gradients so that their norm over all ranks is at most max_norm; return the norm before."""
        from torch.nn.utils import clip_grad_norm_

        return clip_grad_norm_(parameters, max_norm, foreach=True)

    def whole(self, x: "Tensor", of: "nn.Parameter | None" = None) -> "Tensor":
        """Return the whole tensor of a parameter or gradient (`of`: its parameter). Every rank must call it."""
        return x

    def plain(self, x: "Tensor", of: "nn.Parameter | None" = None) -> "Tensor":
        """Return the same memory as torch.distributed.checkpoint writes and reads it; `of` is its parameter."""
        return x


SINGLE = Parallel()


def replicas(name: str, world: int, shard: int | None) -> int:
    """Return into how many parts `world` ranks divide a micro-batch; ranks that share layers count as one."""
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
    """Return the class of the mode called `name`. Raises ValueError, with near matches, if unknown."""
    plugins.check("mode of parallelism", name, names())
    return plugins.load(__name__, name.replace("+", "_"), "PARALLEL")


def load(name: str, **options: Any) -> Any:
    """Return the mode called `name` over all ranks of the process group; options are its own, such as fsdp2's gather.

    Raises ValueError, with near matches, if unknown.
    """
    return kind(name)(**options)
