"""The collectives of a call, by name, dtype and bytes, as this rank asked for them: what was gathered is what is counted.

They are seen where PyTorch hands them to a backend, NCCL's as gloo's, those of the backward pass too, and where it calls an
operator of symmetric memory that multiplies and sends in one. Replays of a captured graph hand over nothing.
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
#: Such an operator of symmetric memory: fused_all_gather_matmul, fused_matmul_reduce_scatter, and both with FP8's scales.
FUSED = re.compile(r"fused_.*matmul")
#: What moves no data of the step's.
OTHER = ("barrier", "wait_tensor", "monitored_barrier_", "_wrap_tensor_autograd")


def of_call(call: Callable[[], object]) -> list[dict[str, Any]] | None:
    """[{"name", "dtype", "times", "bytes"}]; bytes: of all those, each by the larger of what goes in and what comes out.

    Of a group that is a part of all ranks also "ranks", this rank's fellows in it.
    None where something is within it that torch lets nobody look into.
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
        """That compiled code runs as it is; else torch would compute its functions one by one while this looks on."""
        return True

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor or another unwraps itself: what it then asks for comes by here
        result = operator(*args, **(kwargs or {}))
        name = operator.name().partition("::")[2].partition(".")[0]
        if operator.namespace in NAMESPACES and name not in OTHER:
            fellows = _fellows([*args, *(kwargs or {}).values()])
            if FUSED.match(name):  # a rank's part of what is sent: its factors are no part of it
                largest, ranks = [args[0] if "all_gather" in name else result], len(fellows) or dist.get_world_size()
            else:
                sides = [_tensors(argument) for argument in args]
                largest, ranks = max((side for side in (*sides, _tensors(result)) if side), key=_bytes), 1
            for dtype in dict.fromkeys(x.dtype for x in largest):  # of several in one, as FP8 and its scales
                key = name.strip("_"), str(dtype).removeprefix("torch."), fellows
                self.times[key] += 1
                self.bytes[key] += ranks * _bytes([x for x in largest if x.dtype is dtype])
        return result


def _fellows(arguments: list[Any]) -> tuple[int, ...]:
    """The ranks of the group among a collective's arguments, an object or the last of its names; () where it is all."""
    objects = [each for each in arguments if isinstance(each, torch.ScriptObject)]
    groups = [dist.ProcessGroup.unbox(each) for each in objects if "ProcessGroup" in str(each._type())]
    names = [each for each in arguments if isinstance(each, str)]
    c10d: Any = dist.distributed_c10d
    groups += [c10d._resolve_process_group(name) for name in names[-1:]]  # of functional ones
    ranks = dist.get_process_group_ranks(groups[0]) if groups else []
    return () if len(ranks) in (0, dist.get_world_size()) else tuple(ranks)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
