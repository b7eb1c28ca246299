"""Wrap a call that is timed: checks see the result that its last call left, and the profiler looks at the same call."""

from collections.abc import Callable
from typing import Any

from te_bench.experiments.instruments import profiling
from te_bench.experiments.measurement import CheckFailed


class Timed:
    """Run `call` and keep its last result; the one before is freed first, so that no more memory is held than in a call."""

    def __init__(self, call: Callable[[], Any]):
        self._call, self._last, self.calls = call, list[Any](), 0

    def __call__(self) -> Any:
        self._last.clear()
        self._last.append(self._call())
        self.calls += 1
        return self._last[0]

    def samples(self, protocol: Callable[[Callable[[], object], str], list[float]], device: str) -> list[float]:
        """Return the seconds of its calls by a protocol of `timing`. Raises CheckFailed if they are more than the calls."""
        before = self.calls
        found = protocol(self, device)
        if self.calls - before < len(found):
            raise CheckFailed(f"{len(found)} calls were timed, {self.calls - before} of them of what was checked")
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
