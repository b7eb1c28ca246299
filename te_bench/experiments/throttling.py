"""Record what throttled the GPU while a trial was timed, by NVML readings around the timed blocks. Does not import torch."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from te_bench.experiments import environment


class Watch:
    """Reads the clocks of this process's GPU through NVML, before and after a timed block, never inside.

    uuid() names the GPU, or returns None while there is none. It is called at a reading and not before, because the workload
    touches CUDA only then.
    """

    def __init__(self, uuid: Callable[[], str | None]):
        self._uuid = uuid
        self._clocks: Callable[[], environment.Clocks] | None = None  # found once, because a reading must be fast
        self.seen: list[environment.Clocks] = []

    def look(self) -> None:
        """Record clock and throttle reasons; temperature and power, which are slower to read, wait for the trial's end."""
        if self._clocks is None:
            uuid = self._uuid()
            if uuid is None:
                return
            self._clocks = environment.clocks_of(uuid)
        self.seen.append(self._clocks())

    def state(self) -> dict[str, Any]:
        """Return the GPU's present state; throttle_reasons is the union over this moment and all readings.

        lowest_sm_clock_hz is the minimum over the readings, absent without readings. {} without a GPU or NVML.
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


def of_ranks(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the first rank's state, with the throttle reasons of all ranks and the lowest of their clocks."""
    reasons, clocks = (
        [state[name] for state in states if state.get(name) is not None]
        for name in ("throttle_reasons", "lowest_sm_clock_hz")
    )
    of_all = {"throttle_reasons": _union_of_bits(reasons), "lowest_sm_clock_hz": min(clocks, default=None)}
    return {**states[0], **{name: value for name, value in of_all.items() if value is not None}}


def _union_of_bits(reasons: list[int]) -> int | None:
    """Return the bits set at any time; None if none could be read, because 0 would mean no throttling."""
    return functools.reduce(operator.or_, reasons) if reasons else None
