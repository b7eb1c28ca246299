"""The forward pass of Gluon's attention: plans checked, then timed beside cuDNN.

    python benchmarks/attention_forward_plans.py [--json FILE]   all, at most 380 s; the tables are printed last
    python benchmarks/attention_forward_plans.py check NAME      one plan against float64, small shapes, then repeats
    python benchmarks/attention_forward_plans.py time [NAME...]  the tables alone, without these

On a Hopper GPU. Each compilation is checked in a process that is killed if it hangs.
"""

import math
from collections.abc import Collection
from functools import partial
from pathlib import Path

import torch
from _attention_plans import command, drawn, exact
from _race import Calls, keep, race, told
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from te_bench.kernels.attention.hopper import launch
from te_bench.kernels.attention.hopper.launch import Plan

SHAPES = {  # B, H, T, D, causal, the bar in TFLOP/s
    "B12 H12 T1024 D64 causal": (12, 12, 1024, 64, True, 300),
    "B64 H12 T1024 D64 causal": (64, 12, 1024, 64, True, 0),
    "B8 H25 T1024 D64 causal": (8, 25, 1024, 64, True, 0),
    "B4 H16 T8192 D64 causal": (4, 16, 8192, 64, True, 480),
    "B8 H32 T1024 D128 causal": (8, 32, 1024, 128, True, 0),
    "B4 H32 T2048 D128 causal": (4, 32, 2048, 128, True, 530),
    "B4 H32 T2048 D128 full": (4, 32, 2048, 128, False, 0),
    "B2 H16 T8192 D128 causal": (2, 16, 8192, 128, True, 620),
    "B4 H32 T8192 D128 causal": (4, 32, 8192, 128, True, 0),
    "B1 H16 T16384 D128 full": (1, 16, 16384, 128, False, 650),
}
_64, _2X128 = Plan(4, 64, 4, 2, 112), Plan(2, 128, 2, 2, 240, overlap=True)
PLANS = {
    64: {
        "64": _64, "64: sharing 4": _64._replace(sharing=4), "64: 3 stages": _64._replace(stages=3),
    },
    128: {
        "128": _2X128, "128: sharing 4": _2X128._replace(sharing=4), "128: sharing 12": _2X128._replace(sharing=12),
        "128: no overlap": _2X128._replace(overlap=False, sharing=4),
    },
}  # fmt: skip
#: One of each compilation that does not ship, with those that share it.
CHECKED: dict[str, list[str]] = {"64: 3 stages": [], "128: no overlap": []}
BF16, FP16 = torch.bfloat16, torch.float16
CASES = [  # B, H, Hkv, T, S, causal
    (1, 1, 1, 128, 128, False, BF16), (1, 2, 2, 256, 256, True, BF16), (2, 4, 2, 300, 200, True, BF16),
    (2, 4, 1, 130, 330, False, BF16), (1, 2, 2, 1, 300, True, FP16), (3, 60, 60, 1000, 1000, True, FP16),
    (20, 12, 12, 700, 700, True, BF16),
]  # fmt: skip


def plan_of(name: str) -> Plan:
    return next(plans[name] for plans in PLANS.values() if name in plans)


def check(name: str) -> None:
    """As near to float64 as the plan that ships, and 20 times the same bits."""
    width, plan = int(name.split(":")[0]), plan_of(name)
    scale = 1 / math.sqrt(width)
    for *sizes, causal, dtype in CASES:
        q, k, v, _ = drawn(*sizes, width, dtype)
        print(f"{name}: {(*sizes, causal, dtype)} ...", end=" ", flush=True)
        shipped = launch.forward(q, k, v, causal, scale)
        ours = launch.forward(q, k, v, causal, scale, plan)
        torch.cuda.synchronize()
        truths = exact(q.double(), k.double(), v.double(), causal, scale)
        for what, x, y, truth in zip(("out", "lse"), ours, shipped, truths, strict=True):
            error, theirs, most = (x - truth).abs().max(), (y - truth).abs().max(), truth.abs().max()
            print(f"{what} {error:.1e} ({theirs:.1e})", end=" ", flush=True)
            assert error <= 2 * theirs + 1e-3 * most, (name, what, float(error), float(theirs))
        for _ in range(20):
            again = launch.forward(q, k, v, causal, scale, plan)
            assert all(torch.equal(x, y) for x, y in zip(again, ours, strict=True)), f"{name}: other bits"
        print(flush=True)


def calls(shape: str) -> Calls:
    batch, heads, rows, width, causal, _ = SHAPES[shape]
    q, k, v, _ = drawn(batch, heads, heads, rows, rows, width)
    scale = 1 / math.sqrt(width)

    def theirs() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

    ours = {name: partial(launch.forward, q, k, v, causal, scale, plan) for name, plan in PLANS[width].items()}
    return {"cuDNN": theirs, **ours}


def measure(skip: Collection[str], file: Path | None) -> None:
    table = {}
    for shape, (batch, heads, rows, width, causal, bar) in SHAPES.items():
        flop = 4 * batch * heads * rows * rows * width * (0.5 if causal else 1)
        table[shape] = told(f"{shape}: bar {bar or '-'}", flop, race(partial(calls, shape), rounds=8, skip=skip))
        keep(table, file)


def main() -> None:
    command(__doc__, check, measure, CHECKED, first_s=120, measure_s=200)


if __name__ == "__main__":
    main()
