"""What the host's kernel says of the processes it ended."""

import re
from contextlib import suppress
from pathlib import Path


def oom_kills() -> int:
    """How many processes the kernel's out-of-memory killer has ended, on this host and in this control group."""
    total = 0
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        with suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", Path(path).read_text(), re.MULTILINE)
            total += int(found[1]) if found else 0
    return total
