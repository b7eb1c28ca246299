"""What the sweeps beside it share: candidates by turns, ten calls a captured graph; pieces that are killed if they hang."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from te_bench.experiments import timing

EACH = 10  # calls a graph: one by itself may be shorter than what launches it
Calls = Mapping[str, Callable[[], object]]
T = TypeVar("T")


def apart(seconds: float, *arguments: str) -> bool:
    """Run this script with these arguments in a process of its own; whether it succeeded in so many seconds.

    A wrong plan waits on the GPU for ever and hears no other signal than SIGKILL, which its compilers get too.
    """
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, sys.argv[0], *arguments], start_new_session=True)
    try:
        ended = str(process.wait(seconds))
    except subprocess.TimeoutExpired:
        ended = "killed, for it hung"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    print(f"--- {' '.join(arguments)}: {ended}, {time.monotonic() - began:.0f} s", flush=True)
    return process.returncode == 0


def captured(call: Callable[[], object], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    for _ in range(2):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(EACH):
            call()
    graph.replay()
    stream.synchronize()
    return graph


def seconds_of(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    graph.replay()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) / EACH / 1e3


def by_turns(rivals: Mapping[str, T], rounds: int, clock: Callable[[T], float]) -> dict[str, float]:
    """Medians of what the clock says of each, in turns backwards and forwards."""
    found: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(rounds):
        for name in list(found) if turn % 2 else reversed(list(found)):
            found[name].append(clock(rivals[name]))
    return {name: statistics.median(times) for name, times in found.items()}


def race(
    made: Callable[[], Calls], rounds: int, *, skip: Collection[str] = (), forgiving: bool = False
) -> dict[str, float]:
    """Median seconds of a call, of all that `made` gives but `skip`; forgiving: who raises is named and left out.

    `made` is called in the stream that captures, where autograd then runs a backward pass: that of its forward pass.
    """
    torch.cuda.empty_cache()  # of the race before
    stream = torch.cuda.Stream()
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    with torch.cuda.stream(stream):
        calls = made()
        for name in [name for name in calls if name not in skip]:
            try:
                graphs[name] = captured(calls[name], stream)
            except Exception as error:
                if not forgiving:
                    raise
                print(f"{name}: {type(error).__name__} {str(error)[:150]}", flush=True)
        return by_turns(graphs, rounds, lambda graph: seconds_of(graph, stream))


def alone(call: Callable[[], object], device: str) -> float | str:
    """Median us of a call by itself, the L2 cold; 0 on a CPU, which is not timed; an exception's name where it raises."""
    try:
        if device != "cuda":
            call()
            return 0
        return round(1e6 * statistics.median(timing.kernel(call, device)), 1)
    except Exception as error:
        return type(error).__name__


def told(title: str, flop: float, medians: Mapping[str, float]) -> dict[str, float]:
    """TFLOP/s, printed with the fastest first."""
    print(f"\n{title}, TFLOP/s (median ms)", flush=True)
    for name, seconds in sorted(medians.items(), key=lambda item: item[1]):
        print(f"  {flop / seconds / 1e12:6.1f}  {1e3 * seconds:7.3f} ms  {name}", flush=True)
    return {name: flop / seconds / 1e12 for name, seconds in medians.items()}


def keep(table: object, file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
