"""The choices of torch.topk, as of a token's experts, that a step made, made again by its references.

Rounding moves a token whose scores are near to each other to another expert. That token's gradients are then others, and no
fault: of right bf16 steps of a Mixtral 3 of 16 failed with 256 targets, and 2 of 16 with 1,024. So the references send each
token where the step sent it, where their scores are near to the step's.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

#: Relative distance of a reference's scores to the step's, at most: those of another layer or batch are as far as they are
#: large. A step whose scores are wrong by more keeps its choices to itself, and fails by its gradients.
NEAR = 0.25


class Taken(TorchFunctionMode):
    """Notes the scores and the choices of every call of topk."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            scores = args[0] if args else kwargs["input"]
            self.calls.append((scores.detach(), result[1]))
        return result


class Again(TorchFunctionMode):
    """topk chooses as it did in the call of `taken` whose scores are nearest, if they are NEAR; else by itself."""

    def __init__(self, taken: Taken) -> None:
        super().__init__()
        self.taken = taken

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        found = [
            (_distance(scores, theirs), i)
            for i, (theirs, chosen) in enumerate(self.taken.calls)
            if _fits(theirs, chosen, scores, result[1])
        ]
        distance, nearest = min(found, default=(NEAR, 0))
        if distance >= NEAR:
            return result
        chosen = self.taken.calls[nearest][1]
        dim = kwargs.get("dim", -1) if len(args) < 3 else args[2]
        return torch.return_types.topk((scores.gather(dim, chosen), chosen))


def _fits(theirs: Tensor, chosen: Tensor, scores: Tensor, mine: Tensor) -> bool:
    return theirs.shape == scores.shape and chosen.shape == mine.shape


def _distance(scores: Tensor, theirs: Tensor) -> float:
    finite = scores.isfinite() & theirs.isfinite()  # groups that are ruled out have -inf
    a, b = (x.detach().double().masked_fill(~finite, 0.0) for x in (scores, theirs))
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item()
