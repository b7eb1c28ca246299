"""A check: errors beside what they may be; one that is wrong ends the trial before anything is timed."""

import dataclasses
import math
import statistics
from typing import Any

import torch
from torch import Tensor

from te_bench.experiments.checks.tolerances import FACTOR
from te_bench.experiments.measurement import CheckFailed, Measurement

#: The check of a record whose trial an earlier round of the same gate has checked.
CHECKED_BEFORE = {"skipped": "checked in the first round"}


@dataclasses.dataclass(frozen=True, slots=True)
class Quantity:
    """One comparison: its error against the reference, and the limit."""

    name: str
    error: float
    limit: float

    @property
    def wrong(self) -> bool:
        return not self.error <= self.limit  # NaN is not <=

    def to_json(self) -> dict[str, Any]:
        """Return it with null for what is not a finite number: JSON has no NaN."""
        error, limit = (x if math.isfinite(x) else None for x in (self.error, self.limit))
        return {"name": self.name, "error": error, "limit": limit}


def judge(reference: str, quantities: list[Quantity]) -> dict[str, Any]:
    """Return the check of a record. Raises CheckFailed, naming the worst quantity, if one exceeds its limit."""
    check = {"reference": reference, "quantities": [q.to_json() for q in quantities]}
    wrong = [q for q in quantities if q.wrong]
    if wrong:
        worst = max(wrong, key=lambda q: q.error / (q.limit or 1e-30) if math.isfinite(q.error) else math.inf)
        reason = f"{worst.name}: error {worst.error:.3g} > {worst.limit:.3g}"
        if math.isnan(worst.limit):
            reason = (
                f"{worst.name}: no number, nor is what it is compared with: look at the model itself and its inputs"
            )
        others = f" ({len(wrong)} of {len(quantities)} quantities are wrong)"
        raise CheckFailed(reason + others, Measurement(check=check))
    return check


def of_largest(name: str, x: Tensor, truth: Tensor, yardstick: Tensor, floor: float) -> Quantity:
    """Return FlashAttention's rule: max |x - truth| <= FACTOR max |yardstick - truth| + floor."""
    error, usual = ((each.double() - truth.double()).abs().max().item() for each in (x, yardstick))
    return Quantity(name, error, FACTOR * usual + floor)


def relative_error(x: Tensor | None, truth: Tensor) -> float:
    """Return ||x - truth|| / ||truth|| in float64 accumulation; NaN for a missing gradient."""
    if x is None:
        return math.nan
    difference = torch.linalg.vector_norm((x - truth).double())
    return (difference / torch.linalg.vector_norm(truth.double()).clamp(min=1e-30)).item()


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(max(ratio, 1e-30)) for ratio in ratios))
