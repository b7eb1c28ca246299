"""What a step gathered its weights and tokens in, held to what the trial asked for, by the collectives that were seen.

require(trial, step, collectives, measurement)    # CheckFailed where FP8 was asked for and something else was gathered

A project whose way says what it gathers is held to that; its tables may be gathered in half precision beside it. Sequence
parallelism asks for it in a recipe that casts by a given scale. A trial that asked for an overlap is held to operators of
symmetric memory that gathered and scattered as many numbers as its Linears take.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from te_bench.experiments.instruments.collectives import FUSED
from te_bench.experiments.measurement import CheckFailed, Measurement, Unsupported
from te_bench.experiments.problems import TrainStepProblem
from te_bench.experiments.spec import Trial
from te_bench.training.step import TrainStep

HALVES = ("bfloat16", "float16")
SEEN = ("eager", "compile")  # modes whose steps hand their collectives to the backend one by one


def require(
    trial: Trial, step: TrainStep, collectives: Sequence[dict[str, Any]] | None, measurement: Measurement
) -> None:
    """Nothing of te-bench's that gathers none in FP8, nor of a way that does not say what it gathers.

    Raises CheckFailed, without timings; Unsupported where none is seen.
    """
    p = TrainStepProblem.of(trial)
    if step.parallel.world == 1:
        return
    if p.overlap is not None:
        _require_overlapped(p, step, collectives, measurement)
    due = step.parallel.gathered(step.model, p.gather, p.batch // step.parallel.replicas * p.block)
    held = bool(due) if p.rival else p.gather is not None or "uint8" in due
    if not held or (collectives is None and trial.mode not in SEEN):
        return
    title = f"gather {p.gather}" if p.gather else f"rival {p.rival}" if p.rival else "sequence parallelism"
    if collectives is None:
        raise Unsupported(
            f"{title}: torch lets nobody look into a step with {trial.attention}: choose another attention"
        )
    seen: Counter[str] = Counter()
    for each in collectives:
        dtype = "uint8" if each["dtype"].startswith("float8") else each["dtype"]  # as a project may send it
        seen[dtype] += each["bytes"] if "gather" in each["name"] else 0
    for dtype in dict.fromkeys((*due, *(() if p.rival else HALVES))):
        least, most = (step.optim.accumulate * nbytes for nbytes in due.get(dtype, (0, 0)))
        if not least <= seen[dtype] <= most:
            found = ", ".join(f"{nbytes:,} bytes of {name}" for name, nbytes in sorted(seen.items()) if nbytes)
            asked = f"{least:,}" if least == most else f"{least:,} to {most:,}"
            reason = f"{title}: a step is to gather {asked} bytes of {dtype}; this one gathered {found or 'nothing'}"
            raise CheckFailed(reason, dataclasses.replace(measurement, samples={}))


def _require_overlapped(
    p: TrainStepProblem, step: TrainStep, collectives: Sequence[dict[str, Any]] | None, measurement: Measurement
) -> None:
    """Raise CheckFailed, without timings, for GEMMs apart from their collectives; Unsupported where none is seen."""
    title = f"overlap {p.overlap}"
    if collectives is None:
        raise Unsupported(f"{title}: torch lets nobody look into this step; choose another attention, or mode eager")
    due = step.optim.accumulate * step.parallel.overlapped(p.batch // step.parallel.replicas * p.block)
    seen = Counter({"gather": 0, "scatter": 0})
    for each in collectives:
        if FUSED.match(each["name"]):
            kind = "gather" if "gather" in each["name"] else "scatter"
            seen[kind] += each["bytes"] // _itemsize(each["dtype"])
    lacks = [f"{kind} {due:,} numbers; this one did {seen[kind]:,} so" for kind in seen if seen[kind] < due or not due]
    if lacks:
        reason = f"{title}: operators of symmetric memory are to {' and '.join(lacks)}"
        raise CheckFailed(reason, dataclasses.replace(measurement, samples={}))


def _itemsize(dtype: str) -> int:
    """Bytes of a number, by the first of the bits that a dtype's name says: float8_e4m3fn, bfloat16."""
    return int(re.findall(r"\d+", dtype)[0]) // 8
