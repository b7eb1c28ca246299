"""The collectives of a call, by name, dtype and bytes, as this rank asked for them: what was gathered is what is counted.

They are seen where PyTorch hands them to a backend, NCCL's as gloo's, those of the backward pass too. Replays of a captured
graph hand over nothing.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional")
#: What moves no data of the step's.
OTHER = ("barrier", "wait_tensor", "monitored_barrier_")


def of_call(call: Callable[[], object]) -> list[dict[str, Any]] | None:
    """[{"name", "dtype", "times", "bytes"}]; bytes: of all those, each by the larger of what goes in and what comes out.

    None where torch.compile's code is within it, as in FlexAttention, which nothing that looks on can follow.
    """
    try:
        with _Seen() as seen:
            call()
    except NotImplementedError:
        return None
    return [
        {"name": name, "dtype": dtype, "times": times, "bytes": seen.bytes[name, dtype]}
        for (name, dtype), times in sorted(seen.times.items())
    ]


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.times: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        name = operator.name().partition("::")[2].partition(".")[0]
        if operator.namespace in NAMESPACES and name not in OTHER:
            sides = [_tensors(argument) for argument in args]
            largest = max((side for side in (*sides, _tensors(result)) if side), key=_bytes)
            key = name.strip("_"), str(largest[0].dtype).removeprefix("torch.")
            self.times[key] += 1
            self.bytes[key] += _bytes(largest)
        return result


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
