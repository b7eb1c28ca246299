"""A call that is timed, so that a check sees what the timed ones left and a profiler looks at no other."""

from collections.abc import Callable
from typing import Any

from te_bench.experiments.instruments import profiling
from te_bench.experiments.measurement import CheckFailed


class Timed:
    """call(), whose last result is kept: the one before is let go first, so that no more memory is held than in a call."""

    def __init__(self, call: Callable[[], Any]):
        self._call, self._last, self.calls = call, list[Any](), 0

    def __call__(self) -> Any:
        self._last.clear()
        self._last.append(self._call())
        self.calls += 1
        return self._last[0]

    def samples(self, protocol: Callable[[Callable[[], object], str], list[float]], device: str) -> list[float]:
        """Its seconds by a protocol of `timing`. Raises CheckFailed where there are more of them than calls."""
        before = self.calls
        found = protocol(self, device)
        if self.calls - before < len(found):
            raise CheckFailed(f"{len(found)} calls were timed, {self.calls - before} of them of what was checked")
        return found

    def take(self) -> Any:
        """The last call's result, which is kept no longer."""
        return self._last.pop()

    def seen(self, device: str) -> profiling.Seen:
        """What a profiler sees of it. Raises CheckFailed where that was of another call."""
        before = self.calls
        found = profiling.kernels_seen(self, device)
        if self.calls - before != profiling.LOOKS[device]:
            raise CheckFailed("the kernels that were seen are not of the call that was timed")
        return found
