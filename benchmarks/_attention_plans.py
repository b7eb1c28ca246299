"""What the sweeps of Gluon's attention share: inputs, the truth, and a command whose checks are killed if they hang."""

import argparse
import math
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from _race import apart
from torch import Tensor


def drawn(
    batch: int, heads: int, kv_heads: int, rows: int, keys: int, width: int, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """q, k, v, dout."""
    torch.manual_seed(0)
    sizes = ((heads, rows), (kv_heads, keys), (kv_heads, keys), (heads, rows))
    return [torch.randn(batch, h, n, width, device="cuda", dtype=dtype) for h, n in sizes]


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse, in their dtype."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * scale
    if causal:
        hide = torch.arange(k.shape[2], device="cuda") > torch.arange(q.shape[2], device="cuda")[:, None]
        scores = scores.masked_fill(hide, -math.inf)
    return scores.softmax(-1) @ v.repeat_interleave(group, 1), scores.logsumexp(-1)


def command(
    about: str | None,
    check: Callable[[str], None],
    measure: Callable[[Collection[str], Path | None], None],
    checked: Mapping[str, Collection[str]],
    *,
    first_s: float,
    measure_s: float,
    more: Mapping[str, Callable[[], None]] | None = None,
) -> None:
    """`check NAME...`, `time [NAME...]` without these, what there is `more`; or all of the former two, each in a process.

    checked: by what is checked, which other plans share its compilation. The first is given first_s seconds, for it compiles
    what all are held to, the others 60. What fails is not timed, nor what shares its compilation; the exit code is 1 then.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=("all", "check", "time", *(more or {})))
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    if asked.what == "check":
        for name in asked.names:
            check(name)
    elif asked.what == "time":
        measure(asked.names, asked.json)
    elif more and asked.what in more:
        more[asked.what]()
    else:
        bad = [name for i, name in enumerate(checked) if not apart(60 if i else first_s, "check", name)]
        print("FAILED OR HUNG:", bad or "none", flush=True)
        skip = [plan for name in bad for plan in (name, *checked[name])]
        if not apart(measure_s, "time", *skip, *(["--json", str(asked.json)] if asked.json else [])) or bad:
            sys.exit(1)
