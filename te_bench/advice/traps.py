"""What costs users most and no tool tells them, found in the records of a model as it is. Pure; no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from te_bench.experiments.spec import Record
from te_bench.reports.analysis.measures import of_process
from te_bench.reports.page import text

MULTIPLE = 64  # of a vocabulary that GEMMs like
SMALL = 2**20  # elements of logits that cost nothing in any dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A trap: what was found, why it costs, what it costs where that was measured, and the line that mends it.

    records: trial ids that show it. seconds: a step's, where they were measured.
    """

    name: str
    what: str
    why: str
    mend: str
    records: tuple[str, ...]
    seconds: float | None = None

    @property
    def cost(self) -> str:
        return "" if self.seconds is None else f"{text.milliseconds(self.seconds)} ms a step"

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"records": list(self.records)}
