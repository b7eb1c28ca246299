"""What a step's weights were gathered in, held to what the trial asked for, by the collectives that were seen.

require(trial, step, collectives, measurement)    # CheckFailed where FP8 was asked for and something else was gathered

A project whose way gathers blocks in FP8 asks for it too; its tables are gathered in half precision beside them.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from te_bench.experiments.measurement import CheckFailed, Measurement, Unsupported
from te_bench.experiments.problems import TrainStepProblem
from te_bench.experiments.spec import Trial
from te_bench.training.step import TrainStep

PASSES = 2  # a block is gathered for its forward pass and again for its backward pass
HALVES = ("bfloat16", "float16")


def require(
    trial: Trial, step: TrainStep, collectives: Sequence[dict[str, Any]] | None, measurement: Measurement
) -> None:
    """Nothing of a trial that gathers none in FP8. Raises CheckFailed, without timings; Unsupported where none is seen."""
    p = TrainStepProblem.of(trial)
    if (p.gather or p.rival) is None or step.parallel.world == 1:
        return
    due = step.parallel.gathered(step.model, p.gather)
    if p.gather is None and "uint8" not in due:
        return
    title = f"gather {p.gather}" if p.gather else f"rival {p.rival}"
    if collectives is None:
        raise Unsupported(
            f"{title}: torch lets nobody look into a step with {trial.attention}: choose another attention"
        )
    seen: Counter[str] = Counter()
    for each in collectives:
        seen[each["dtype"]] += each["bytes"] if "gather" in each["name"] else 0
    times = PASSES * step.optim.accumulate
    asked = {dtype: times * nbytes for dtype, nbytes in due.items()}
    for dtype in dict.fromkeys((*asked, *(HALVES if p.gather else ()))):
        if seen[dtype] != asked.get(dtype, 0):
            found = ", ".join(f"{nbytes:,} bytes of {name}" for name, nbytes in sorted(seen.items()) if nbytes)
            reason = f"{title}: a step is to gather {asked.get(dtype, 0):,} bytes of {dtype}; this one gathered {found}"
            raise CheckFailed(reason, dataclasses.replace(measurement, samples={}))
