"""Format numbers for readers: sensible digits, the field's units, a dash for what was not measured."""

import math
import re
import textwrap
from collections.abc import Sequence
from decimal import Decimal

from te_bench.reports.analysis.measures import Ratio

MISSING = "—"
GIB = 2**30
TERA = 1e12


def plain(value: float | None) -> str:
    """Return three or four significant digits without an exponent: 0.0123, 1.23, 27.4, 103.8, 4,210."""
    if value is None:
        return MISSING
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1 or size == 0:
        return f"{value:.2f}"
    return f"{value:.{2 - math.floor(math.log10(size))}f}" if size >= 1e-3 else scientific(value)


def scientific(value: float | None) -> str:
    """Return two significant digits: 1.2e-3."""
    if value is None:
        return MISSING
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}" if value else "0"


def thousands(value: float | None) -> str:
    """Return a number in thousands or millions: 449 k, 1.20 M, 875."""
    if value is None:
        return MISSING
    if abs(value) >= 999_500:
        return f"{value / 1e6:.2f} M"
    return f"{value / 1e3:.0f} k" if abs(value) >= 10_000 else f"{value:,.0f}"


def count(value: float | None, *, or_more: bool = False) -> str:
    """Return a whole number; a dash for None."""
    return MISSING if value is None else f"{value:,.0f}{' or more' * or_more}"


def loss(value: float | None, deviation: float | None = None) -> str:
    """Return four decimals, as nanoGPT prints them, with the deviation over seeds if there is one."""
    if value is None:
        return MISSING
    return f"{value:.4f}" if deviation is None else f"{value:.4f} ± {deviation:.4f}"


def signed(value: float | None) -> str:
    """Return a gap in nat: +0.0012."""
    return MISSING if value is None else f"{value:+.4f}" if abs(value) < 1e4 else f"{value:+.3g}"


def probability(value: float | None) -> str:
    return MISSING if value is None else "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.1f} %"


def signed_percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:+.1f} %"


def speedup(ratio: Ratio | None) -> str:
    """Return 3.79× [3.70, 3.88], or only 3.79× if one pair gives no interval."""
    if ratio is None:
        return MISSING
    if ratio.low is None or ratio.high is None:
        return times(ratio.value)
    return f"{times(ratio.value)} [{_ratio(ratio.low)}, {_ratio(ratio.high)}]"


def times(value: float) -> str:
    return f"{_ratio(value)}×"


def _ratio(value: float) -> str:
    """Return two decimals, of less than 0.1 three significant digits."""
    return plain(value) if value < 0.1 else f"{value:.2f}"


def gib(size: float | None) -> str:
    """Return bytes as GiB."""
    return plain(None if size is None else size / GIB)


def tera(rate: float | None) -> str:
    """Return FLOP/s as TFLOP/s."""
    return plain(None if rate is None else rate / TERA)


def milliseconds(seconds: float | None) -> str:
    return plain(None if seconds is None else seconds * 1e3)


def hours(seconds: float) -> str:
    """Return hours with two digits or more, without an exponent: 0.15, 5.7, 59, 120."""
    value = seconds / 3600
    return f"{Decimal(f'{value:.2g}'):f}" if value < 99.5 else f"{value:,.0f}"


def span(low: str, high: str) -> str:
    """Return a range: 5 to 9; only 5 if both ends are 5."""
    return low if low == high else f"{low} to {high}"


def listed(names: Sequence[str], most: int) -> str:
    """Return a, b and c; for more than `most` names, the first ones and the number of the rest."""
    shown = list(names) if len(names) <= most else [*names[: most - 1], f"{len(names) - most + 1} more"]
    return " and ".join(part for part in (", ".join(shown[:-1]), shown[-1]) if part)


def shortened(text: str, limit: int) -> str:
    """Return the text; if it is longer than the limit, with its end replaced by an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def folded(name: str, width: int) -> list[str]:
    """Return the name in at most 4 lines of `width` characters; only the last is cut, as ends distinguish names."""
    lines = textwrap.wrap(name, width, break_on_hyphens=False) or [""]
    return lines if len(lines) <= 4 else [*lines[:3], shortened(" ".join(lines[3:]), width)]


def slug(name: str) -> str:
    """Return the name as a part of a file name."""
    return re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-")[:60] or "unnamed"
