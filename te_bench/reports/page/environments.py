"""Show environments: settings, the state of devices during a run, packages, and the commands to repeat it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from te_bench.experiments.environment import OF_TIMES
from te_bench.reports.analysis.measures import numbers
from te_bench.reports.analysis.repeat import commands_of
from te_bench.reports.analysis.rows import Results, identity, printable
from te_bench.reports.page import text

#: nvml.h, nvmlClocksEventReasons*: why a clock was held down. 0x1, an idle GPU, is left out: it is not about the run.
_THROTTLING = {
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
_OF_A_HOST = ("os", "kernel", "memory_bytes", *OF_TIMES)
_FIRST = ("gpu", "cpu", "cores", "memory_bytes", "driver", "cuda", "cudnn", "torch", "triton", "python", "os", "code")
_UNIT = re.compile("_(bytes|w|hz)$")
_STATE = (
    ("SM clock, MHz", "sm_clock_hz", 1e-6),
    ("memory clock, MHz", "memory_clock_hz", 1e-6),
    ("temperature, °C", "temperature_c", 1.0),
    ("power, W", "power_w", 1.0),
    ("cores of the host", "host_cores", 1.0),
    ("load average", "load_average", 1.0),
    ("cores that other programs took", "cpu_others", 1.0),
    ("CPU time that the host took away, %", "cpu_stolen", 100.0),
)


def shown_environment(results: Results, key: str) -> dict[str, Any]:
    """Return an environment's settings, the state of its devices during the run, and its packages, for a page."""
    body = results.environments[key]
    details = body.get("details") or {}
    states = [row.record.device_state for row in results.rows if row.record and row.environment == key]
    several = not details.keys().isdisjoint(OF_TIMES)  # there may be several hosts; the details are of one
    hidden = ("packages", "gpus", *(_OF_A_HOST if several else ()))
    known = {**identity(body), **{k: v for k, v in details.items() if k not in hidden}}
    known |= {name: _listed(states, name) for name in OF_TIMES} if several else {}
    known = {k: known[k] for k in [*(k for k in _FIRST if k in known), *(k for k in known if k not in _FIRST)]}
    packages = details.get("packages") or {}
    groups = [group for group in results.groups if group.environment == key]
    return {
        "id": key,
        "name": groups[0].where,
        "settings": {
            printable(_UNIT.sub("", k).replace("_", " ")): printable(_setting(k, v))
            for k, v in known.items()
            if v is not None
        },
        "state": {name: seen for name, sample, scale in _STATE if (seen := _range(states, sample, scale))},
        "throttling": sorted({reason for state in states for reason in _throttling(state.get("throttle_reasons"))}),
        "packages": {printable(str(name)): printable(str(version)) for name, version in sorted(packages.items())},
    }


def _listed(states: Sequence[Mapping[str, Any]], name: str) -> str | None:
    """Return the values of the records' hosts, as a range for numbers; None if no record has one."""
    words = {str(state[name]) for state in states if state.get(name) is not None}
    return _range(states, name, 1e-6 if name.endswith("_hz") else 1.0) or "; ".join(sorted(words)) or None


def _range(states: Sequence[Mapping[str, Any]], sample: str, scale: float) -> str:
    seen = [value * scale for state in states for value in numbers([state.get(sample)])]
    if not seen:
        return ""
    return text.span(f"{min(seen):,.0f}", f"{max(seen):,.0f}")


def _throttling(reasons: object) -> list[str]:
    if isinstance(reasons, int):
        return [name for bit, name in _THROTTLING.items() if reasons & bit]
    return [printable(str(reasons))] if reasons else []


def _setting(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**30:.1f} GiB"
    if name.endswith(("_w", "_hz")):
        scale, unit = (1.0, "W") if name.endswith("_w") else (1e-6, "MHz")
        return f"{value * scale:g} {unit}" if isinstance(value, int | float) else f"{value} {unit}"
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def commands(results: Results) -> list[str]:
    """Return the commands that repeat the measurements, one for each suite, device and set of options."""
    lines = [line for group in results.groups for line in commands_of(group)]
    return list(dict.fromkeys(lines))
