"""What a step's weights were gathered in, held to what the trial asked for, by the collectives that were seen.

require(trial, step, collectives, measurement)    # CheckFailed where FP8 was asked for and something else was gathered
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
    """Nothing of a trial without a gather. Raises CheckFailed, without timings, and Unsupported where nothing is seen."""
    gather = TrainStepProblem.of(trial).gather
    if gather is None:
        return
    if collectives is None:
        raise Unsupported(
            f"gather {gather}: {trial.attention} compiles within the step, and no one sees what is gathered"
        )
    seen: Counter[str] = Counter()
    for each in collectives:
        seen[each["dtype"]] += each["bytes"] if "gather" in each["name"] else 0
    times = PASSES * step.optim.accumulate
    asked = {dtype: times * nbytes for dtype, nbytes in step.parallel.gathered(step.model, gather).items()}
    for dtype in dict.fromkeys((*asked, *HALVES)):
        if seen[dtype] != asked.get(dtype, 0):
            found = ", ".join(f"{nbytes:,} bytes of {name}" for name, nbytes in sorted(seen.items()) if nbytes)
            due = f"a step is to gather {asked.get(dtype, 0):,} bytes of {dtype}"
            reason = f"gather {gather}: {due}; this one gathered {found}"
            raise CheckFailed(reason, dataclasses.replace(measurement, samples={}))
