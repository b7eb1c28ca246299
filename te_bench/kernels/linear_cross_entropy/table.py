"""Linear cross-entropy in the table of measured times. Seconds are for the loss with both gradients.

These rows choose no head: heads also differ in memory and precision, so users name one. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShape:
    """x (N, D), W (padded, D), of whose rows `vocab` are classes."""

    n: int
    d: int
    vocab: int
    padded: int
    dtype: str  # of x and W: "fp32", "bf16", "fp16"

    def __post_init__(self) -> None:
        if min(self.n, self.d, self.vocab) < 1 or self.padded < self.vocab:
            raise ValueError(
                f"sizes must be at least 1, and {self.padded} rows of W no fewer than {self.vocab} classes"
            )


def read_problem(body: Mapping[str, Any]) -> HeadShape:
    """Read a shape from a row's JSON. Raises ValueError or TypeError if it is invalid."""
    return HeadShape(**body)
