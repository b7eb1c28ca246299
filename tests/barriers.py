"""Python threads in the place of a program's warps, on barriers as sm_90's are, which show one bit of their phase."""

import threading
from collections.abc import Callable

PATIENCE = 30.0  # seconds without what a thread waits for; on a busy machine all of them may stand still for some


class Barrier:
    pending = phase = bytes = count = 0

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


class Threads:
    """What threads do to barriers; the one whose name is `slow` acts when the others can go no further."""

    def __init__(self, slow: str) -> None:
        self.slow, self.changed, self.failed = slow, threading.Condition(), list[BaseException]()
        self.awaited = dict[str, Callable[[], bool]]()  # by each thread that waits
        self.others = set[str]()  # who has not ended, but the slow one

    def do(self, action: Callable[[], None]) -> None:
        with self.changed:
            if threading.current_thread().name == self.slow:
                self.changed.wait_for(self._is_alone, PATIENCE)
            action()
            self.changed.notify_all()

    def _is_alone(self) -> bool:
        return bool(self.failed) or all(name in self.awaited and not self.awaited[name]() for name in self.others)

    def fail(self, error: BaseException) -> None:
        self.do(lambda: self.failed.append(error))

    def wait(self, barrier: Barrier, parity: int, *, pred: bool = True) -> None:
        if not pred:
            return
        self.do(lambda: None)
        name = threading.current_thread().name
        with self.changed:
            self.awaited[name] = lambda: barrier.phase & 1 != parity
            if not self.awaited[name]():
                self.changed.notify_all()  # the slow one may be alone
            there = self.changed.wait_for(lambda: self.failed or self.awaited[name](), PATIENCE)
            del self.awaited[name]
        assert not self.failed
        assert there, "hangs"

    def arrive(self, barrier: Barrier, *, count: int = 1, pred: bool = True) -> None:
        def there() -> None:
            assert barrier.pending >= count, "arrived once too often"
            barrier.pending -= count
            barrier.settle()

        if pred:
            self.do(there)

    def expect(self, barrier: Barrier, size: int) -> None:
        barrier.bytes += size
        self.arrive(barrier)


def ran(machine: Threads, calls: dict[str, Callable[[], None]]) -> None:
    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            machine.fail(error)
        finally:
            with machine.changed:
                machine.others.discard(threading.current_thread().name)
                machine.changed.notify_all()

    machine.others = calls.keys() - {machine.slow}
    threads = [threading.Thread(target=guarded, args=(call,), name=name) for name, call in calls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if machine.failed:
        raise machine.failed[0]
