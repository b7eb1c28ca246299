"""D128's backward pass of Gluon's attention by one kernel: plans checked, then timed beside two kernels and cuDNN.

    python benchmarks/attention_backward_plans.py [--json FILE]  all but the last, at most 570 s; the table is printed last
    python benchmarks/attention_backward_plans.py check NAME     one plan against float64, small shapes, then repeats
    python benchmarks/attention_backward_plans.py time [NAME...] the table alone, without these; at most 3 minutes
    python benchmarks/attention_backward_plans.py profile        what of the time is delta, fused, sums; a minute

On a Hopper GPU. Each compilation is checked in a process that is killed if it hangs.
"""

import math
from collections.abc import Collection
from functools import partial
from pathlib import Path

import torch
from _attention_plans import command, drawn, exact
from _race import Calls, keep, race, told
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity

from te_bench.kernels.attention.hopper import launch
from te_bench.kernels.attention.hopper.launch import Plan

SHAPES = {  # B, H, T, causal, the bar in TFLOP/s
    "B4 H32 T2048 causal": (4, 32, 2048, True, 430),
    "B4 H32 T2048 full": (4, 32, 2048, False, 0),
    "B2 H16 T8192 causal": (2, 16, 8192, True, 500),
    "B1 H16 T16384 causal": (1, 16, 16384, True, 0),
    "B1 H16 T16384 full": (1, 16, 16384, False, 540),
}
BASE = Plan(2, 64, 3, 1, 240, sharing=4)
AHEAD = BASE._replace(ahead=True)
PLANS = {
    "ahead, sharing 4": AHEAD,
    "ahead, sharing 2": AHEAD._replace(sharing=2),
    "ahead, sharing 8": AHEAD._replace(sharing=8),
    "ahead, all sharing": AHEAD._replace(sharing=launch.ALL),
    "ahead, 2 places": AHEAD._replace(stages=2),
    "sharing 4": BASE,
    "all sharing": BASE._replace(sharing=launch.ALL),
}
#: One of each compilation, with those that share it.
CHECKED = {
    "ahead, sharing 4": ["ahead, sharing 2", "ahead, sharing 8", "ahead, all sharing"],
    "ahead, 2 places": [],
    "sharing 4": ["all sharing"],
}
BF16, FP16 = torch.bfloat16, torch.float16
CASES = [  # B, H, Hkv, T, S, causal
    (1, 1, 1, 128, 128, False, BF16), (1, 2, 2, 256, 256, True, BF16), (2, 4, 2, 300, 200, True, BF16),
    (2, 4, 1, 130, 330, False, BF16), (1, 2, 2, 1, 300, True, FP16), (3, 6, 6, 1000, 1000, True, FP16),
]  # fmt: skip
REPEATED = [(2, 40, 1024, True), (4, 32, 2048, True), (1, 16, 4096, False)]  # B, H, T, causal
SCALE = 1 / math.sqrt(128)


def check(name: str) -> None:
    for batch, heads, kv_heads, rows, keys, causal, dtype in CASES:
        q, k, v, dout = drawn(batch, heads, kv_heads, rows, keys, 128, dtype)
        out, lse = launch.forward(q, k, v, causal, SCALE)
        print(f"{name}: {(batch, heads, kv_heads, rows, keys, causal, dtype)} ...", end=" ", flush=True)
        by_two = launch.backward(dout, q, k, v, out, lse, causal, SCALE, deterministic=True)
        ours = launch.backward(dout, q, k, v, out, lse, causal, SCALE, fused=PLANS[name])
        torch.cuda.synchronize()
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        truths = torch.autograd.grad(exact(*leaves, causal, SCALE)[0], leaves, dout.double())
        for what, x, y, truth in zip(("dq", "dk", "dv"), ours, by_two, truths, strict=True):
            error, theirs, most = ((x - truth).abs().max(), (y - truth).abs().max(), truth.abs().max())
            print(f"{what} {error / most:.1e} ({theirs / most:.1e})", end=" ", flush=True)
            assert error <= 2 * theirs + 2e-3 * most + 1e-5, (name, what, float(error), float(theirs), float(most))
        print(flush=True)
    for batch, heads, rows, causal in REPEATED:
        q, k, v, dout = drawn(batch, heads, heads, rows, rows, 128)
        out, lse = launch.forward(q, k, v, causal, SCALE)
        by_two = launch.backward(dout, q, k, v, out, lse, causal, SCALE, deterministic=True)
        fused = partial(launch.backward, dout, q, k, v, out, lse, causal, SCALE, fused=PLANS[name])
        first = fused()
        for x, y in zip(first, by_two, strict=True):
            assert (x - y).abs().max() <= 2e-2 * y.abs().max()
        for _ in range(20):  # dk and dv are added in order: another bit is a race
            again = fused()
            assert torch.equal(again[1], first[1])
            assert torch.equal(again[2], first[2])
            assert (again[0] - first[0]).abs().max() <= 1e-2 * first[0].abs().max()
        print(f"{name}: {(batch, heads, rows, causal)} 20 times the same dk and dv", flush=True)


def calls(shape: str) -> Calls:
    batch, heads, rows, causal, _ = SHAPES[shape]
    q, k, v, dout = drawn(batch, heads, heads, rows, rows, 128)
    out, lse = launch.forward(q, k, v, causal, SCALE)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        theirs = torch.nn.functional.scaled_dot_product_attention(
            leaves[0], leaves[1], leaves[2], is_causal=causal, scale=SCALE
        )
    ours = partial(launch.backward, dout, q, k, v, out, lse, causal, SCALE)
    return {
        "cuDNN": partial(torch.autograd.grad, theirs, leaves, dout, retain_graph=True),
        "two kernels": partial(ours, deterministic=True),
        **{name: partial(ours, fused=plan) for name, plan in PLANS.items()},
    }


def measure(skip: Collection[str], file: Path | None) -> None:
    table = {}
    for shape, (batch, heads, rows, causal, bar) in SHAPES.items():
        flop = 10 * batch * heads * rows * rows * 128 * (0.5 if causal else 1)
        medians = race(partial(calls, shape), rounds=8, skip=skip)
        table[shape] = told(f"{shape}: bar {bar or '-'}", flop, medians)
        keep(table, file)


def profile() -> None:
    for shape in SHAPES:
        made = calls(shape)
        for name in ("cuDNN", "two kernels", "ahead, sharing 4"):
            made[name]()
            with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as seen:
                for _ in range(5):
                    made[name]()
                torch.cuda.synchronize()
            events = [event for event in seen.key_averages() if event.self_device_time_total]
            found = {event.key[:60]: round(event.self_device_time_total / 5) for event in events}
            print(shape, "|", name, "| us:", found, flush=True)


def main() -> None:
    command(__doc__, check, measure, CHECKED, first_s=150, measure_s=180, more={"profile": profile})


if __name__ == "__main__":
    main()
