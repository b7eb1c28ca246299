"""Environments for reading: settings, the state of the devices during a run, packages, and how to run again."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from te_bench.experiments.spec import ADVICE
from te_bench.reports.analysis.measures import numbers
from te_bench.reports.analysis.rows import Results, identity, printable

#: nvml.h, nvmlClocksEventReasons*: why a clock was held down. 0x1, an idle GPU, says nothing of the run.
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
_FIRST = ("gpu", "cpu", "cores", "memory_bytes", "driver", "cuda", "cudnn", "torch", "triton", "python", "os", "code")
_STATE = (
    ("SM clock, MHz", "sm_clock_hz", 1e-6),
    ("memory clock, MHz", "memory_clock_hz", 1e-6),
    ("temperature, °C", "temperature_c", 1.0),
    ("power, W", "power_w", 1.0),
    ("load average", "load_average", 1.0),
    ("cores that other programs took", "cpu_others", 1.0),
    ("CPU time that the host took away, %", "cpu_stolen", 100.0),
)


def shown_environment(results: Results, key: str) -> dict[str, Any]:
    """An environment for reading: its settings, the state of its devices during the run, its packages."""
    body = results.environments[key]
    details = body.get("details") or {}
    known = {**identity(body), **{k: v for k, v in details.items() if k not in ("packages", "gpus")}}
    known = {k: known[k] for k in [*(k for k in _FIRST if k in known), *(k for k in known if k not in _FIRST)]}
    states = [row.record.device_state for row in results.rows if row.record and row.environment == key]
    packages = details.get("packages") or {}
    groups = [group for group in results.groups if group.environment == key]
    return {
        "id": key,
        "name": groups[0].where,
        "settings": {
            printable(k.removesuffix("_bytes").replace("_", " ")): printable(_setting(k, v))
            for k, v in known.items()
            if v is not None
        },
        "state": {name: seen for name, sample, scale in _STATE if (seen := _range(states, sample, scale))},
        "throttling": sorted({reason for state in states for reason in _throttling(state.get("throttle_reasons"))}),
        "packages": {printable(str(name)): printable(str(version)) for name, version in sorted(packages.items())},
    }


def _range(states: Sequence[Mapping[str, Any]], sample: str, scale: float) -> str:
    seen = [value * scale for state in states for value in numbers([state.get(sample)])]
    if not seen:
        return ""
    low, high = f"{min(seen):,.0f}", f"{max(seen):,.0f}"
    return low if low == high else f"{low} to {high}"


def _throttling(reasons: object) -> list[str]:
    if isinstance(reasons, int):
        return [name for bit, name in _THROTTLING.items() if reasons & bit]
    return [printable(str(reasons))] if reasons else []


def _setting(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**30:.1f} GiB"
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def commands(results: Results) -> list[str]:
    """The commands that measure the same again, one for each suite, device and set of options that were asked for."""
    lines = []
    for group in results.groups:
        trials = [row.trial for configuration in group.configurations for row in configuration.rows]
        command = [f"--device {device}" for device in sorted({trial.device for trial in trials})]
        seeds = {len({row.trial.seed for row in configuration.rows}) for configuration in group.configurations}
        command += [f"--seeds {min(seeds)}"] if len(seeds) == 1 else []  # else they are the suite's own numbers
        problems = [trial.problem for trial in trials]
        own = {(str(p["model"]), str(p["data"])) for p in problems if p.get("data") not in (None, "random", "stdlib")}
        command += [f"--data {shlex.quote(printable(f'{model}={data}'))}" for model, data in sorted(own)]
        budgets = {p["budget_s"] for p in problems if p.get("budget_s") is not None}
        command += [f"--budget {budget:g}s" for budget in budgets if len(budgets) == 1]
        for asked in group.asked:
            words = [shlex.quote(printable(word)) for word in (group.suite, *asked)]
            verb = ["run", *words, *command] if group.suite != ADVICE else [*words, command[0]]
            lines.append(" ".join(["te-bench", *verb]))
    return list(dict.fromkeys(lines))
