"""A gate on the commands of a te-bench.toml: both revisions run each command in turn (A B, B A, ...), in fresh processes.

A command's record has the form of a trial's, with one sample per run, so the same rule judges its pairs. One command may
measure several trials: the benchmarks whose times it writes.
"""

import contextlib
import fnmatch
import json
import math
import os
import re
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from te_bench.experiments.host import oom_kills
from te_bench.experiments.spec import NO_ATTENTION, Record, Trial, matches, patterns
from te_bench.gate.config import JSON, ROOT, Command, Commands
from te_bench.gate.paired_sweep import GateProcesses, PairedPlan, Revision
from te_bench.gate.paired_trial import MOST_TURNS, PROTOCOL, TIMED_S, Unrunnable, as_known, how_ended
from te_bench.gate.revision_process import Lines
from te_bench.reports.analysis.naming import COMMAND
from te_bench.reports.analysis.rows import printable
from te_bench.reports.exchange import pytest_import

_LONGEST = 200  # characters kept of a line that a command printed
#: In pytest's output: a failed test's heading with the first line of its error; and a failed test's line in the summary.
_FAILURE = re.compile(
    r"^_+ (?:ERROR (?:at \w+ of|collecting) )?(?!_)(.+?) _+\n(?:(?!_+ \w).*\n)*?E +(.+)", re.MULTILINE
)
_SUMMARY = re.compile(r"^(?:FAILED|ERROR) (\S+(?:::|\.py).*)", re.MULTILINE)
_ENDED_S = 10.0  # within this time, a killed process and its children have ended


class Failed(Exception):
    """A run of a command gave no result; the message says how it ended."""

    def __init__(self, why: str, outcome: str = "crashed"):
        super().__init__(why)
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class CommandRun:
    """What one run of a command measured: seconds by benchmark ("": the whole process), and peak memory."""

    figures: Mapping[str, float]
    wall_s: float
    peak_rss_bytes: int


class CommandRunner:
    """The gate's end of the process that runs commands."""

    def __init__(self, log: Path):
        ours, theirs = socket.socketpair()
        own = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([own, *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "te_bench.gate.command_process",
                    str(theirs.fileno()),
                    str(os.getpid()),
                    log,
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )
        self.lines, self.log, self._oom_kills = Lines(ours), log, oom_kills()

    def run(self, commands: Commands, words: Sequence[str], root: Path, timeout_s: float, *, timed: bool) -> CommandRun:
        """Run a command in a revision's files. Raise Failed if it fails, Unrunnable if the process that runs it is gone."""
        self._oom_kills = oom_kills()
        figures, output = root.with_suffix(".json"), root.with_suffix(".output")
        figures.unlink(missing_ok=True)
        places = {JSON: str(figures), ROOT: str(root)}
        message: dict[str, Any] = {
            "words": [_placed(word, places) for word in words],
            "directory": str(root / commands.directory),
            "env": {**os.environ, **{name: _placed(value, places) for name, value in commands.env.items()}},
        }
        found: dict[str, Any] = {}
        try:
            self.lines.send(**message, timeout_s=timeout_s, output=str(output), timed=timed)
            while "ended" not in (message := self.lines.receive()):
                found = message["result"]
        except (EOFError, OSError):
            raise Unrunnable(f"the process that runs commands {self._how_ended()}") from None
        found = found or {"failed": f"ended by {message['ended']}"}
        why, outcome = found.get("failed"), "crashed"
        if found.get("late"):
            why, outcome = f"stopped after {timeout_s:g} s (timeout)", "timeout"
        elif why is None and found["code"]:
            why = how_ended(found["code"], self._oom_kills)
        if why:
            raise Failed(": ".join(filter(None, [why, self._last_words(output)])), outcome)
        return CommandRun(
            figures={"": found["seconds"]}, wall_s=found["seconds"], peak_rss_bytes=found["peak_rss_bytes"]
        )

    def _last_words(self, output: Path) -> str:
        """Return the command's last printed line, after pytest's first failed test. Append the whole output to the log."""
        text = output.read_text(encoding="utf-8", errors="replace") if output.is_file() else ""
        with self.log.open("a", encoding="utf-8") as log:
            log.write(text)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return printable("; ".join(filter(None, [_failed_test(text), *(line[:_LONGEST] for line in lines[-1:])])))

    def _how_ended(self) -> str:
        """Say how the process that runs commands ended, and where it may have said why."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(_ENDED_S)
        said = self.log.exists() and self.log.stat().st_size
        return how_ended(code, self._oom_kills) + (f"; {self.log} may say why" if said else "")

    def close(self) -> None:
        """End the process and the command that it runs."""
        self.process.kill()
        self.process.wait()
        self.lines.close(_ENDED_S)  # the command's supervisor holds the other end of the socket


def _placed(text: str, places: Mapping[str, str]) -> str:
    for name, path in places.items():
        text = text.replace(name, path)
    return text


def _failed_test(text: str) -> str:
    """Return the first failed test in pytest's output with the first line of its error; "" if there is none."""
    listed = [found[1] for found in _SUMMARY.finditer(text)]
    if (found := _FAILURE.search(text)) is None:
        return listed[0][:_LONGEST] if listed else ""
    name, bracket, case = found[1].partition("[")
    # the heading of a test is its dotted name, that of a file that fails to import is its path
    name = name.replace(".", "::") + bracket + case if "::" in "".join(listed) else found[1]
    full = next((line[: line.index(name) + len(name)] for line in listed if name in line), found[1])
    return f"{full}: {found[2][:_LONGEST]}"


def read_figures(file: Path, statistic: str) -> dict[str, float]:
    """Return seconds by benchmark from the JSON that a command wrote.

    The JSON is pytest-benchmark's, a number or list of seconds (named ""), or a mapping of these by name. `statistic`,
    "min" or "median", reduces a list. Raise ValueError for anything else.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"wrote nothing to {JSON}") from None
    except ValueError as error:
        raise ValueError(f"wrote no JSON to {JSON}: {error}") from None
    if isinstance(value, dict) and "benchmarks" in value:
        found = {one["fullname"]: one["stats"].get(statistic) for one in pytest_import.read(file)["benchmarks"]}
    else:
        found = {str(name): one for name, one in value.items()} if isinstance(value, dict) else {"": value}
    seconds = {name: _seconds(one, statistic) for name, one in found.items()}
    if not seconds or None in seconds.values():
        raise ValueError(
            f"wrote {json.dumps(value)[:_LONGEST]} to {JSON}: write a positive number of seconds, a list of "
            "such numbers, either by name, or pytest-benchmark's JSON"
        )
    return {name: one for name, one in seconds.items() if one is not None}


def _seconds(value: Any, statistic: str) -> float | None:
    values = value if isinstance(value, list) else [value]
    sound = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < math.inf]
    if not sound or len(sound) < len(values):
        return None
    return float(min(sound) if statistic == "min" else statistics.median(sound))


@dataclass(slots=True, kw_only=True)
class CommandProcesses(GateProcesses):
    """The commands of a gate on any repository; they take the place of a suite's trials."""

    _runner: CommandRunner | None = None

    @property
    def commands(self) -> Commands:
        assert self.question.commands is not None
        return self.question.commands

    def start(self) -> PairedPlan:
        """Return the plan, made from the first run of each command; later calls return the same plan.

        Raise Unrunnable if one revision cannot be set up, ValueError if both fail or the question's glob matches nothing.
        """
        began = time.monotonic()
        if self.planned is None:
            chosen = [one for one in self.commands.commands if _may_match(one, self.question.only)]
            if not chosen:
                raise self._nothing_matches()
            self._runner = CommandRunner(self.log)
            self._set_up()
            self.planned = self._plan(chosen)
        self.starting_s = time.monotonic() - began
        return self.planned

    def _set_up(self) -> None:
        failed: dict[str, str] = {}
        for number, words in enumerate(self.commands.setup):
            for one in self.revisions:
                self.say(f"  setup of {one.name}: {printable(shlex.join(words))}")
                try:
                    self._run(words, one, timed=False)
                except Failed as error:
                    failed[one.name] = f"{self.commands.file}: setup[{number}] {error}"
            if len(failed) == len(self.revisions):
                raise ValueError(f"{failed[self.revisions[-1].name]} (in both revisions)")
            if failed:
                raise Unrunnable("; ".join(f"{name}: {why}" for name, why in failed.items()))

    def _plan(self, chosen: Sequence[Command]) -> PairedPlan:
        """Plan each command's trials by what it measures of each revision; a revision that fails gets the other's trials."""
        trials: dict[str, dict[str, Mapping[str, Any]]] = {one.name: {} for one in self.revisions}
        together: dict[str, str] = {}
        for command in chosen:
            found: dict[str, Sequence[str]] = {}
            for one in self.revisions:
                try:
                    runs = [self.run(command, one, timed=False) for _ in range(self.commands.warmup)]
                    found[one.name] = list(runs[-1].figures)
                except Failed as error:
                    failed = error
            if not found:
                key = f"bench.{command.name}"
                raise ValueError(f"{self.commands.file}: {key}: in both revisions the command {failed}")
            for one in self.revisions:
                for figure in found.get(one.name, next(iter(found.values()))):
                    trial = self._trial(command, figure)
                    if self.question.only is None or matches(str(trial.problem["variant"]), self.question.only):
                        trials[one.name][trial.cell] = trial.to_json()
                        together[trial.cell] = command.name
        if not together:
            raise self._nothing_matches()
        return PairedPlan(title=f"Commands of {self.commands.file}", baseline=None, trials=trials, together=together)

    def _nothing_matches(self) -> ValueError:
        names = ", ".join(command.name for command in self.commands.commands)
        return ValueError(
            f"--only {self.question.only!r} matches nothing that {self.commands.file} measures; its benches: {names}"
        )

    def _trial(self, command: Command, figure: str) -> Trial:
        problem = {
            "variant": f"{command.name}: {figure}" if figure else command.name,
            "command": " ".join(command.words),
            "bench": command.name,
            "figure": figure,
            **({"statistic": command.statistic} if command.writes else {}),
            "directory": self.commands.directory,
            **{f"env:{name}": value for name, value in self.commands.env.items()},
        }
        known = Trial(workload=COMMAND, device="cpu", problem=problem, attention=NO_ATTENTION)
        return replace(known, precision="none", protocol=PROTOCOL)

    def _run(self, words: Sequence[str], one: Revision, *, timed: bool) -> CommandRun:
        assert self._runner is not None
        return self._runner.run(self.commands, words, one.root, self.question.timeout_s, timed=timed)

    def run(self, command: Command, one: Revision, *, timed: bool = True) -> CommandRun:
        """Run a command. Raise Failed if it fails or does not write its JSON."""
        done = self._run(command.words, one, timed=timed)
        if not command.writes:
            return done
        try:
            return replace(done, figures=read_figures(one.root.with_suffix(".json"), command.statistic))
        except ValueError as error:
            raise Failed(printable(str(error))) from None

    def measure(
        self, revisions: Sequence[Revision], trials: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> list[tuple[Revision, Record]]:
        """Return a record of each trial of one command for each revision, from equally many runs of both.

        `revisions` is the order of the first round. There are as many runs as fill TIMED_S, at most MOST_TURNS. When a run
        fails, its revision runs no more and all its trials fail.
        """
        name = as_known(next(iter(trials[revisions[0].name]))).problem["bench"]
        command = next(one for one in self.commands.commands if one.name == name)
        runs: dict[str, list[CommandRun]] = {one.name: [] for one in revisions}
        failed: dict[str, Failed] = {}
        started, number, turns = datetime.now(UTC).isoformat(timespec="milliseconds"), 0, 1
        while number < turns:
            for one in revisions if number % 2 == 0 else revisions[::-1]:
                if one.name not in failed:
                    try:
                        runs[one.name].append(self.run(command, one))
                    except Failed as error:
                        failed[one.name] = error
            longest = max((run.wall_s for found in runs.values() for run in found[:1]), default=math.inf)
            number, turns = number + 1, min(MOST_TURNS, max(1, round(TIMED_S / longest)))
        each = ((one, as_known(trial)) for one in revisions for trial in trials[one.name])
        return [(one, _record(trial, one, started, runs[one.name], failed.get(one.name))) for one, trial in each]

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._runner = self.planned = None


def _may_match(command: Command, only: str | None) -> bool:
    """Return whether a pattern may match a trial of the command; a command's benchmarks are unknown before it has run."""
    if matches(command.name, only) or only is None:
        return True
    written = f"{command.name}: "  # a part from the pattern's beginning that matches this may go on to match more
    begun = (pattern[:end] for pattern in patterns(only) for end in range(len(pattern) + 1))
    return command.writes and any(fnmatch.fnmatchcase(written, part) for part in begun)


def _record(trial: Trial, one: Revision, started_at: str, runs: Sequence[CommandRun], failed: Failed | None) -> Record:
    figure = str(trial.problem["figure"])
    if failed is None and any(figure not in run.figures for run in runs):
        failed = Failed(f"one of {len(runs)} runs wrote no {figure!r} to {JSON}")
    more: dict[str, Any] = {"outcome": "ok"}
    if failed is not None:
        more = {"outcome": failed.outcome, "reason": str(failed)}
    else:
        more["samples"] = {"latency_s": [run.figures[figure] for run in runs]}
        if not figure:  # the trial is the whole process
            more["samples"]["peak_rss_bytes"] = [max(run.peak_rss_bytes for run in runs)]
    wall_s = math.fsum(run.wall_s for run in runs)
    return Record(trial=trial, environment=one.environment, started_at=started_at, wall_s=wall_s, **more)
