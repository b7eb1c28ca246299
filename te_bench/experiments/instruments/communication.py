"""Measure what collectives cost a step over several ranks: their time, their exposed time, and the link's bandwidth."""

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from te_bench.experiments import timing
from te_bench.experiments.instruments import profiling

COLLECTIVE = re.compile(r"nccl\w*Kernel")
#: Bytes of the all-reduce that measures the link, far above the size at which NVLink's bandwidth saturates; cpu: for gloo.
BYTES = {"cuda": 2**28, "cpu": 2**24}

Span = tuple[float, float]


def of_steps(next_step: Callable[[], None], device: str, of_all: Callable[[Any], list[Any]]) -> dict[str, float]:
    """Return {"compute_s", "collectives_s", "exposed_s", "waiting_s"} of a step from the GPU's kernel trace; {} on a CPU.

    compute_s: seconds in which this GPU runs anything but collectives. collectives_s: seconds in which a collective runs
    that every rank has begun. exposed_s: the part of these in which this GPU computes nothing. waiting_s: seconds in which a
    collective waits for another rank. of_all: gathers every rank's value; all ranks call it.
    """
    if device != "cuda":
        return {}
    spans = profiling.kernel_spans(next_step)
    of_nccl = [span for span in spans if COLLECTIVE.match(span[0])]
    others = [(begin, end) for name, begin, end in spans if not COLLECTIVE.match(name)]
    joint = since_all_began(of_nccl, of_all(durations(of_nccl)))
    whole, together = (_total(_union(each)) for each in ([span[1:] for span in of_nccl], joint))
    return {
        "compute_s": _total(_union(others)) / profiling.PROFILED,
        "collectives_s": together / profiling.PROFILED,
        "exposed_s": exposed(joint, others) / profiling.PROFILED,
        "waiting_s": (whole - together) / profiling.PROFILED,
    }


def durations(collectives: Iterable[tuple[str, float, float]]) -> dict[str, list[float]]:
    """Return {name: seconds of each collective, in their order}."""
    found: dict[str, list[float]] = {}
    for name, begin, end in sorted(collectives, key=lambda span: span[1]):
        found.setdefault(name, []).append(end - begin)
    return found


def since_all_began(
    collectives: Iterable[tuple[str, float, float]], of_ranks: Sequence[Mapping[str, Sequence[float]]]
) -> list[Span]:
    """Return the part of each span since its last rank began: as long as the shortest time of any rank.

    of_ranks: `durations` of every rank; all ranks are in each collective. If ranks ran a name unequally often, its spans are
    returned whole.
    """
    least = {
        name: [min(each) for each in zip(*(rank[name] for rank in of_ranks), strict=True)]
        for name in of_ranks[0]
        if len({len(rank.get(name, ())) for rank in of_ranks}) == 1
    }
    seen: Counter[str] = Counter()
    found = []
    for name, begin, end in sorted(collectives, key=lambda span: span[1]):
        found.append((end - least[name][seen[name]] if name in least else begin, end))
        seen[name] += 1
    return found


def exposed(collectives: Iterable[Span], others: Iterable[Span]) -> float:
    """Return the seconds in which a collective runs and nothing else; rounding is kept within the collectives' total."""
    collectives, others = list(collectives), list(others)
    running = _total(_union(collectives))
    return min(running, max(0.0, _total(_union([*collectives, *others])) - _total(_union(others))))


def _union(spans: Iterable[Span]) -> list[Span]:
    """Return the same seconds as disjoint spans."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _total(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def bandwidth(device: str, of_all: Callable[[Any], list[Any]]) -> dict[str, Any] | None:
    """Return {"collective", "bytes", "seconds", "busbw"} of a large all-reduce over all ranks, counted like nccl-tests.

    busbw is 2 (n - 1) / n of the buffer over the median time: the bandwidth of each link, whatever the number of ranks. None
    if a rank has no memory left for the buffer. of_all: gathers every rank's value.
    """
    try:
        buffer = torch.ones(BYTES[device] // 4, device=device)
    except torch.OutOfMemoryError:
        buffer = None
    if not all(of_all(buffer is not None)):
        return None
    assert buffer is not None
    seconds = statistics.median(timing.bench_py(lambda: dist.all_reduce(buffer, op=dist.ReduceOp.AVG), device))
    n = dist.get_world_size()
    return {
        "collective": "all_reduce",
        "bytes": buffer.nbytes,
        "seconds": seconds,
        "busbw": 2 * (n - 1) / n * buffer.nbytes / seconds,
    }
