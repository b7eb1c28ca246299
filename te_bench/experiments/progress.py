"""Show a sweep's progress: a line for each ended trial with its result and the time left, and a bar on a terminal.

Warn once of other load on the machine, if the sweep runs one trial at a time; otherwise the load may be the sweep's own.
"""

import sys
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from te_bench.experiments import host
from te_bench.experiments.spec import Record, Trial


class Progress:
    """A context manager; call it with (a record just written, a trial just started), either of them None.

    called: returns a trial's name. found: returns a record's result in words, or "". warned: the warning has been given.
    """

    def __init__(
        self,
        total: int,
        done: int,
        slots: int,
        called: Callable[[Trial], str],
        found: Callable[[Record], str],
        *,
        warned: bool = False,
    ):
        self.total, self.done, self.slots = total, done, slots
        self.called, self.found = called, found
        self.walls: list[float] = []
        self.warned = warned or slots > 1
        self.console = Console(file=getattr(sys.stderr, "raw", sys.stderr))  # cli's stderr filters escapes
        name, left = (TextColumn(f"{{task.{field}}}", markup=False) for field in ("description", "fields[left]"))
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left, name)
        self.bar = Bar(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("", total=total, completed=done, left="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def __call__(self, record: Record | None, trial: Trial | None) -> None:
        if trial is not None:
            self.bar.update(self.task, description=self.called(trial))
        if record is not None:
            name = self.called(record.trial)
            self.done += 1
            self.walls.append(record.wall_s)
            self.bar.update(self.task, completed=self.done, left=self._time_left())
            if not self.warned and (busy := host.disturbance(record.device_state)):
                self.warned = True
                self._say(f"warning: the machine is busy: {busy} during {name}. Timings will be noisy.")
            ended = (self.found(record) or "ok") if record.outcome == "ok" else record.outcome
            left = f", {self._time_left()}" if self.done < self.total and not self.console.is_terminal else ""
            self._say(f"[{self.done}/{self.total}] {name}: {ended} ({record.wall_s:.1f} s{left})")

    def _say(self, line: str) -> None:
        """Print a line on standard error, above the bar if there is one."""
        if self.console.is_terminal:
            self.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=self.console.file, flush=True)

    def _time_left(self) -> str:
        """Return the time for the remaining trials at the mean time of those that ended."""
        seconds = round(sum(self.walls) / len(self.walls) * (self.total - self.done) / self.slots)
        return f"{seconds // 60}:{seconds % 60:02d} left"
