"""Wrap a call that is timed: checks see the result that its last call left, and the profiler looks at the same call."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from te_bench.experiments import timing
from te_bench.experiments.instruments import compilation, energy, profiling
from te_bench.experiments.measurement import CheckFailed, Context, Measurement
from te_bench.experiments.spec import Trial


class Timed:
    """Run `call` and keep its last result; the one before is freed first, so that no more memory is held than in a call."""

    def __init__(self, call: Callable[[], Any]):
        self._call, self._last, self.calls = call, list[Any](), 0
        self._busy: list[float] | None = None  # on a CPU, seconds that this thread computed in each call of a protocol

    def __call__(self) -> Any:
        began = 0.0 if self._busy is None else time.thread_time()
        self._last.clear()
        self._last.append(self._call())
        self.calls += 1
        if self._busy is not None:
            self._busy.append(time.thread_time() - began)
        return self._last[0]

    def samples(self, protocol: Callable[[Callable[[], object], str], list[float]], device: str) -> list[float]:
        """Return the seconds of its calls by a protocol of `timing`.

        Raises CheckFailed if the samples are more than the calls, or longer together than the protocol took; on a CPU also
        if they are shorter than the CPU time of as many calls. A gate's protocol keeps some of its calls, and subtracts
        the time in which the thread waited for a core.
        """
        busy = self._busy = [] if device == "cpu" else None
        before, began = self.calls, time.perf_counter()
        found = protocol(self, device)
        elapsed, self._busy = time.perf_counter() - began, None
        if self.calls - before < len(found):
            raise CheckFailed(f"{len(found)} calls were timed, {self.calls - before} of them of what was checked")
        least = sum(sorted(busy)[: len(found)]) if busy else 0.0
        if not least <= sum(found) <= elapsed:
            bounds = f"{least:.6g} to {elapsed:.6g} s by another clock"
            raise CheckFailed(f"the {len(found)} samples are {sum(found):.6g} s together, and {bounds}")
        return found

    def take(self) -> Any:
        """Return the last call's result and forget it."""
        return self._last.pop()

    def seen(self, device: str) -> profiling.Seen:
        """Return what the profiler sees of this call. Raises CheckFailed if it saw another one."""
        before = self.calls
        found = profiling.kernels_seen(self, device)
        if self.calls - before != profiling.LOOKS[device]:
            raise CheckFailed("the kernels that were seen are not of the call that was timed")
        return found

    def measured(
        self,
        trial: Trial,
        context: Context,
        measurement: Measurement,
        require_right: Callable[[Any], object],
        require_ran: Callable[[profiling.Seen, Measurement], Measurement],
    ) -> Measurement:
        """Return the measurement with kernel_s and energy_j, once the last timed result and what ran have been checked.

        require_right gets the result. Both raise CheckFailed. Later rounds of a gate time alone.
        """
        seconds = self.samples(timing.kernel, trial.device)
        work = {**measurement.work, **compilation.counts(trial)}
        measurement = dataclasses.replace(measurement, work=work, samples={**measurement.samples, "kernel_s": seconds})
        if not context.check:
            return measurement
        require_right(self.take())
        measurement = require_ran(self.seen(trial.device), measurement)
        joules = energy.sample(self, trial.device, seconds)
        return dataclasses.replace(measurement, samples={**measurement.samples, **joules})
