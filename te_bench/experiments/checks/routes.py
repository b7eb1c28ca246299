"""The choices of torch.topk, as of a token's experts, that a step made, made again by its references.

Rounding moves a token whose scores are near to each other to another expert. That token's gradients are then others, and no
fault: of right bf16 steps of a Mixtral 3 of 16 failed with 256 targets, and 2 of 16 with 1,024. So the references send each
token where the step sent it, where their scores are near to the step's.
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from te_bench.training.parallel import Parallel

#: Distance of a reference's scores to the step's, at most, relative to what those differ by: scores of another layer or
#: batch are as far as they are large. A step whose scores are wrong by more keeps its choices to itself, and fails by its
#: gradients.
NEAR = 0.25


class Asked(NamedTuple):
    """What a call of topk was given that decides over its choice."""

    scores: Tensor
    dim: int
    largest: bool
    out: Any

    @classmethod
    def of(
        cls, input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *, out: Any = None
    ) -> Self:
        """By topk's own arguments."""
        return cls(input, dim % max(input.dim(), 1), largest, out)


class Taken(TorchFunctionMode):
    """Notes the scores and the choices of every call of topk."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Asked, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            asked = Asked.of(*args, **(kwargs or {}))
            scores = asked.scores.detach().clone()  # a model may go on to write into them
            self.calls.append((asked._replace(scores=scores, out=None), result[1].clone()))
        return result

    def join(self, parallel: Parallel) -> None:
        """Of ranks that have rows of a micro-batch each: what all of them chose, as one pass would. All ask at once."""
        if parallel.replicas == 1 or not self.calls:
            return
        device = self.calls[0][1].device
        sent = [(asked._replace(scores=asked.scores.cpu()), chosen.cpu()) for asked, chosen in self.calls]
        found = dict(parallel.of_all((parallel.replica, sent)))
        self.calls = []
        for calls in zip(*(found[replica] for replica in range(parallel.replicas)), strict=True):
            scores, chosen = (
                torch.cat(each).to(device) for each in zip(*((a.scores, c) for a, c in calls), strict=True)
            )
            self.calls.append((calls[0][0]._replace(scores=scores), chosen))


class Again(TorchFunctionMode):
    """topk chooses as it did in the call of `taken` whose scores are nearest, if they are NEAR; else by itself."""

    def __init__(self, taken: Taken) -> None:
        super().__init__()
        self.taken = taken

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        asked = Asked.of(*args, **(kwargs or {}))
        found = [
            (_distance(asked.scores, theirs.scores, asked.dim), i)
            for i, (theirs, chosen) in enumerate(self.taken.calls)
            if theirs.scores.shape == asked.scores.shape
            and chosen.shape == result[1].shape
            and theirs[1:3] == asked[1:3]
        ]
        distance, nearest = min(found, default=(NEAR, 0))
        if distance >= NEAR:
            return result
        chosen = self.taken.calls[nearest][1]
        given = asked.scores.gather(asked.dim, chosen)
        if asked.out is not None:
            given, chosen = (ours.copy_(again) for ours, again in zip(asked.out, (given, chosen), strict=True))
        return torch.return_types.topk((given, chosen))


def _distance(scores: Tensor, theirs: Tensor, dim: int) -> float:
    """Beside what theirs differ by along dim: a constant that all have, as a sigmoid's 1/2, chooses nothing."""
    finite = scores.isfinite() & theirs.isfinite()  # groups that are ruled out have -inf
    a, b = (x.detach().double().masked_fill(~finite, 0.0) for x in (scores, theirs))
    mean = b.sum(dim, keepdim=True) / finite.sum(dim, keepdim=True).clamp(min=1)
    spread = (b - mean).masked_fill(~finite, 0.0)
    return ((a - b).norm() / spread.norm().clamp(min=1e-30)).item()
