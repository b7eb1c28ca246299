"""Count the collectives of a call by name, dtype and bytes, as this rank requests them.

A collective is counted when PyTorch hands it to a backend (NCCL or gloo), in the backward pass too, and when PyTorch calls a
symmetric-memory operator that multiplies and communicates in one. Replays of a captured graph are not seen.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional", "symm_mem")
#: Symmetric-memory operators: fused_all_gather_matmul, fused_matmul_reduce_scatter, and both with FP8 scales.
FUSED = re.compile(r"fused_.*matmul")
#: Operators that move no data of the step.
OTHER = ("barrier", "wait_tensor", "monitored_barrier_", "_wrap_tensor_autograd")


def of_call(call: Callable[[], object]) -> list[dict[str, Any]] | None:
    """Return [{"name", "dtype", "times", "bytes"}]; bytes: the sum of each collective's larger side, input or output.

    A collective over a part of the ranks also has "ranks", the ranks of its group. None: the call contains something that
    torch does not let a dispatch mode see into.
    """
    try:
        with _Seen() as seen:
            call()
    except NotImplementedError:
        return None
    return [
        {
            **{"name": name, "dtype": dtype, "times": times, "bytes": seen.bytes[name, dtype, ranks]},
            **({"ranks": list(ranks)} if ranks else {}),
        }
        for (name, dtype, ranks), times in sorted(seen.times.items())
    ]


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.times: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
        self.bytes: Counter[tuple[str, str, tuple[int, ...]]] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled code runs unchanged; else torch would run its functions one by one."""
        return True

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor unwraps itself; its inner operators arrive here
        result = operator(*args, **(kwargs or {}))
        name = operator.name().partition("::")[2].partition(".")[0]
        if operator.namespace in NAMESPACES and name not in OTHER:
            fellows = _fellows([*args, *(kwargs or {}).values()])
            if FUSED.match(name):  # the gathered input or the scattered result; the other factor is not sent
                largest, ranks = [args[0] if "all_gather" in name else result], len(fellows) or dist.get_world_size()
            else:
                sides = [_tensors(argument) for argument in args]
                largest, ranks = max((side for side in (*sides, _tensors(result)) if side), key=_bytes), 1
            for dtype in dict.fromkeys(x.dtype for x in largest):  # such as FP8 data and its scales
                key = name.strip("_"), str(dtype).removeprefix("torch."), fellows
                self.times[key] += 1
                self.bytes[key] += ranks * _bytes([x for x in largest if x.dtype is dtype])
        return result


def _fellows(arguments: list[Any]) -> tuple[int, ...]:
    """Return the ranks of a collective's group, from its arguments (an object, or the last string); () for all ranks."""
    objects = [each for each in arguments if isinstance(each, torch.ScriptObject)]
    groups = [dist.ProcessGroup.unbox(each) for each in objects if "ProcessGroup" in str(each._type())]
    names = [each for each in arguments if isinstance(each, str)]
    c10d: Any = dist.distributed_c10d
    groups += [c10d._resolve_process_group(name) for name in names[-1:]]  # functional collectives name their group
    ranks = dist.get_process_group_ranks(groups[0]) if groups else []
    return () if len(ranks) in (0, dist.get_world_size()) else tuple(ranks)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
