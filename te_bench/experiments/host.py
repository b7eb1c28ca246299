"""What the host's kernel says: of the processes it ended, and of the cores that this one may use."""

import os
import re
from contextlib import suppress
from pathlib import Path


def cores() -> int:
    """Those that this process may run on, and no more than its container's quota is worth (cgroup v2 or v1)."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(own, int(_quota())))


def _quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores' worth of time that a control group is given; 10^9 where nobody says."""
    with suppress(OSError, ValueError):  # v2: "max 100000" where there is none
        time, period = (root / "cpu.max").read_text().split()
        return int(time) / int(period)
    with suppress(OSError, ValueError):
        time, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(time) / int(period) if int(time) > 0 else 1e9
    return 1e9


def oom_kills() -> int:
    """How many processes the kernel's out-of-memory killer has ended, on this host and in this control group."""
    total = 0
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        with suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", Path(path).read_text(), re.MULTILINE)
            total += int(found[1]) if found else 0
    return total
