"""Read from the host's kernel: processes killed for memory, usable cores, and other programs' load."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUSY = 0.1  # share of the machine's CPU time; others' load disturbs timing if it is above, and idle time below, this
STOLEN = 0.02  # share of the machine's CPU time
PROC = Path("/proc")


def cores() -> int:
    """Return the number of cores that this process may use, limited by its container's quota (cgroup v2 or v1)."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(own, int(quota())))


def quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the cores' worth of time that the control group allows; 10^9 without a limit."""
    with suppress(OSError, ValueError):  # v2: "max 100000" means no limit
        time, period = (root / "cpu.max").read_text().split()
        return int(time) / int(period)
    with suppress(OSError, ValueError):
        time, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(time) / int(period) if int(time) > 0 else 1e9
    return 1e9


def memory_bytes() -> int:
    """Return this machine's memory in bytes, without swap."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def oom_kills() -> int:
    """Return how many processes the kernel's out-of-memory killer has ended, on this host and in this control group."""
    total = 0
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        with suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", Path(path).read_text(), re.MULTILINE)
            total += int(found[1]) if found else 0
    return total


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Seconds of CPU time over all cores since the machine started; `own` is that of this session's processes."""

    total: float
    idle: float
    stolen: float
    own: float


def cpu_time(proc: Path = PROC) -> CpuTime | None:
    """Return the present values of /proc (proc(5)); None without /proc."""
    try:
        first, *_ = (proc / "stat").read_text().splitlines()
        user, nice, system, idle, wait, irq, softirq, stolen = map(int, first.split()[1:9])
    except (OSError, ValueError):
        return None
    tick = 1 / os.sysconf("SC_CLK_TCK")
    total = user + nice + system + idle + wait + irq + softirq + stolen
    return CpuTime(total=total * tick, idle=(idle + wait) * tick, stolen=stolen * tick, own=_own_ticks(proc) * tick)


def _own_ticks(proc: Path) -> int:
    """Return ticks of CPU time of this session's processes and of the children that they have waited for."""
    session, total = os.getsid(0), 0
    for stat in proc.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # the process has just ended
            fields = stat.read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) if int(fields[3]) == session else 0
    return total


def load_since(before: CpuTime | None, proc: Path = PROC) -> dict[str, Any]:
    """Return the load average of the last minute and the use of CPU time since `before`; unknown values are left out.

    host_cores: of the machine, whatever this process's quota. cpu_idle, cpu_stolen: shares of the machine's CPU time; stolen
    is what the hypervisor gave to others. cpu_others: cores used by other sessions.
    """
    state: dict[str, Any] = {"host_cores": os.cpu_count()}
    with suppress(OSError, AttributeError):
        state["load_average"] = os.getloadavg()[0]
    after = cpu_time(proc)
    if before is None or after is None or after.total <= before.total:
        return state
    total, idle, stolen = after.total - before.total, after.idle - before.idle, after.stolen - before.stolen
    others = max(total - idle - stolen - (after.own - before.own), 0.0)
    cores = float(state["host_cores"] or 1)
    return {**state, "cpu_idle": idle / total, "cpu_stolen": stolen / total, "cpu_others": others / total * cores}


def disturbance(state: Mapping[str, Any]) -> str | None:
    """Return in words which other load kept the machine busy, by a record's `device_state`; None if none did."""
    cores, others, idle, stolen = map(state.get, ("host_cores", "cpu_others", "cpu_idle", "cpu_stolen"))
    said = []
    if cores and others is not None and idle is not None and idle < BUSY and others > BUSY * cores:
        load = state.get("load_average")
        said.append(
            f"other programs took {others:.1f} of {cores} cores" + ("" if load is None else f" (load {load:.1f})")
        )
    if stolen is not None and stolen > STOLEN:
        said.append(f"its host took {100 * stolen:.0f} % of the CPU time away")
    return " and ".join(said) or None
