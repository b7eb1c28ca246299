"""Measures the FP8 GEMMs of the policy's table, by turns, and prints te_bench/kernels/gemm/measured.py anew.

    python benchmarks/gemm_policy.py > measured.py && mv measured.py te_bench/kernels/gemm/measured.py

On an NVIDIA GPU that every backend runs on; half a minute. More shapes: add rows there, with any figures.
"""

import statistics
import sys
from collections.abc import Callable

import torch
from _race import here, measured_table

from te_bench.kernels.gemm import Problem, load
from te_bench.kernels.gemm import measured as _measured
from te_bench.kernels.gemm.measured import Row

ROUNDS, BACKENDS = 24, ("scaled_mm", "triton", "gluon")


def operand(rows: int, k: int, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal data in E4M3, for a tensor core's power and clock depend on them, and scales."""
    x = torch.randn(rows, k, device="cuda")
    scale_inv = (x.abs().amax(1) if granularity == "row" else x.abs().amax()) / 448
    return (x / (scale_inv[:, None] if granularity == "row" else scale_inv)).to(torch.float8_e4m3fn), scale_inv


def graphed(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def seconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Medians, in turns forwards and backwards, the L2 flushed before each."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    graphs = {name: graphed(call) for name, call in calls.items()}
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for number in range(ROUNDS):
        for name in list(graphs) if number % 2 else reversed(list(graphs)):
            flush.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[name].replay()
            stop.record()
            events[name].append((start, stop))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) / 1e3 for name, pairs in events.items()}


def measured(row: Row) -> Row:
    """The row with this GPU's figures, of the backends that can."""
    m, n, k, granularity, fast, _ = row
    (a, a_inv), (b, b_inv) = operand(m, k, granularity), operand(n, k, granularity)
    options = {"out_dtype": torch.bfloat16, "fast_accum": fast}
    problem = Problem(
        m=m, n=n, k=k, a_dtype="e4m3", b_dtype="e4m3", device="cuda", capability=torch.cuda.get_device_capability(),
        a_granularity=granularity, b_granularity=granularity,
    )  # fmt: skip
    able = {name: load(name) for name in BACKENDS if load(name).unsupported(problem) is None}
    calls = {name: lambda f=rival.forward: f(a, b, a_inv, b_inv, **options) for name, rival in able.items()}
    made = Row(*row[:5], {name: round(2 * m * n * k / s / 1e12) for name, s in seconds(calls).items()})
    print(made, file=sys.stderr, flush=True)
    return made


def source(rows: list[Row], gpu: str, versions: str) -> str:
    """_measured.py with these rows, all above them as it is."""
    lines = [
        f'    Row({r.m}, {r.n}, {r.k}, "{r.granularity}", {r.fast}, '
        + "{" + ", ".join(f'"{name}": {speed}' for name, speed in r.tflops.items()) + "}),"
        for r in rows
    ]  # fmt: skip
    return measured_table(_measured, lines, gpu, versions)


def main() -> None:
    torch.manual_seed(0)
    rows = [measured(row) for row in _measured.ROWS]
    print(source(rows, *here()), end="")


if __name__ == "__main__":
    main()
