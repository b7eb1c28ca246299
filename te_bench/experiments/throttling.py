"""What held the GPU's clocks down while a trial was timed: looks at NVML around the timed blocks. Reads no torch."""

import functools
import operator
from collections.abc import Callable
from typing import Any

from te_bench.experiments import environment


class Watch:
    """Looks at the GPU that this process uses, through NVML: before a timed block and after it, never inside.

    uuid() names the GPU, or answers None while there is none to look at. It is asked at a look and not before, for only
    then has the workload touched CUDA.
    """

    def __init__(self, uuid: Callable[[], str | None]):
        self._uuid = uuid
        self._clocks: Callable[[], environment.Clocks] | None = None  # found once: a look must be cheap
        self.seen: list[environment.Clocks] = []

    def look(self) -> None:
        """Note clock and reasons now; temperature and power, which take longer to read, are for the end of a trial."""
        if self._clocks is None:
            uuid = self._uuid()
            if uuid is None:
                return
            self._clocks = environment.clocks_of(uuid)
        self.seen.append(self._clocks())

    def state(self) -> dict[str, Any]:
        """The GPU's state at this moment, with throttle_reasons the union over this moment and every look, and
        lowest_sm_clock_hz over the looks, absent where nobody looked. {} where there is no GPU or NVML cannot be read.
        """
        uuid = self._uuid()
        found = environment.gpu_state(uuid) if uuid else {}
        if not found or not self.seen:
            return found
        reasons = [seen.throttle_reasons for seen in self.seen] + [found["throttle_reasons"]]
        clocks = [seen.sm_clock_hz for seen in self.seen if seen.sm_clock_hz is not None]
        return {
            **found,
            "throttle_reasons": _union_of_bits([reason for reason in reasons if reason is not None]),
            "lowest_sm_clock_hz": min(clocks, default=None),
        }


def _union_of_bits(reasons: list[int]) -> int | None:
    """The bits that were set at any time; None where none could be read, for 0 would say that nothing throttled."""
    return functools.reduce(operator.or_, reasons) if reasons else None
