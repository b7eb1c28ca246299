"""Find how close each configuration came to the limits of its check."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from te_bench.reports.analysis.measures import finite
from te_bench.reports.analysis.rows import Configuration, Group


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstError:
    """The checked quantity with the largest error over its limit, among all repetitions of a configuration."""

    configuration: Configuration
    quantity: str | None = None
    error: float | None = None
    limit: float | None = None
    ratio: float | None = None  # error / limit: above 1 fails
    reference: str | None = None


def worst_errors(group: Group) -> tuple[WorstError, ...]:
    """Return the worst error of every checked configuration, closest to its limit first. Failed checks count too."""
    found = [_worst(configuration) for configuration in group.configurations]
    known = [error for error in found if error is not None]
    return tuple(sorted(known, key=lambda error: -math.inf if error.ratio is None else -error.ratio))


def _worst(configuration: Configuration) -> WorstError | None:
    records = [row.record for row in configuration.rows if row.record and row.record.check]
    found = [worst_quantity(configuration, record.check) for record in records]
    return max((e for e in found if e), key=lambda e: math.inf if e.ratio is None else e.ratio, default=None)


def worst_quantity(configuration: Configuration, check: Mapping[str, Any]) -> WorstError | None:
    """Return the quantity of one check with the largest error / limit; an unknown error counts as the worst."""
    found = []
    for quantity in check.get("quantities") or []:
        error, limit = finite(quantity.get("error")), finite(quantity.get("limit"))
        known = error is not None and limit is not None
        ratio = None if not known or (limit == 0 and error) else 0.0 if not error else error / (limit or math.nan)
        found.append(
            WorstError(
                configuration=configuration,
                quantity=str(quantity.get("name")),
                error=error,
                limit=limit,
                ratio=ratio,
                reference=check.get("reference"),
            )
        )
    return max(found, key=lambda e: math.inf if e.ratio is None else e.ratio, default=None)
