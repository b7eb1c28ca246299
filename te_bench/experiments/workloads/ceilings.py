"""What this device reaches when nothing but the roof limits it: a copy's bandwidth and the rate of a large square GEMM.

samples: copy_s, gemm_bf16_s and, where the device has it, gemm_fp8_s (E4M3 x E4M3, one scale a tensor, fast accumulation)
of single calls. work: copy_bytes, read and written together, and gemm_flop. A floor is a kernel's bytes and FLOP at these.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_bench.experiments import timing, trial_model
from te_bench.experiments.checks import tolerances
from te_bench.experiments.checks.quantity import CHECKED_BEFORE, Quantity, judge
from te_bench.experiments.measurement import Context, Measurement
from te_bench.experiments.problems import CeilingsProblem
from te_bench.experiments.spec import Trial
from te_bench.kernels.gemm import Problem
from te_bench.kernels.gemm.backends import scaled_mm
from te_bench.kernels.quantize import TENSOR, Layout, Operand

CHECKED = 64  # rows and columns of the product that float64 computes, too
E4M3 = torch.float8_e4m3fn
PER_TENSOR = Layout(E4M3, TENSOR, torch.float32)


def run(trial: Trial, context: Context) -> Measurement:
    trial_model.require_device(trial.device)
    p = CeilingsProblem.of(trial)
    size, edge = p.copy_bytes, p.edge
    if size < 2 or size % 2 or edge < 16 or edge % 16:  # or cuBLASLt's time would have that of padding in it
        raise ValueError(f"ceilings: copy_bytes {size} must be even and edge {edge} a multiple of 16, both positive")
    torch.manual_seed(trial.seed)
    # The values matter: a GEMM of zeros draws less power, and so runs at a higher clock.
    a, b = (torch.randn(edge, edge, device=trial.device).bfloat16() for _ in range(2))
    found = {"bf16": _bf16(a, b)}
    if scaled_mm.unsupported(_fp8_problem(trial, edge)) is None:
        found["fp8"] = _fp8(a, b)
    check = judge("fp64 of the same operands", [_quantity(name, *found[name]) for name in found])
    samples = {f"gemm_{name}_s": timing.kernel(call, trial.device) for name, (call, *_) in found.items()}
    del a, b, found
    samples["copy_s"] = _copy(size, trial.device)
    work: dict[str, Any] = {"copy_bytes": 2 * size, "gemm_flop": 2 * edge**3}
    return Measurement(check=check if context.check else CHECKED_BEFORE, work=work, samples=samples)


Product = tuple[Callable[[], Tensor], Tensor, Tensor]
"""The call, and its operands as they are multiplied: (K, N) for the second."""


def _bf16(a: Tensor, b: Tensor) -> Product:
    out = torch.empty_like(a)
    return (lambda: torch.mm(a, b.t(), out=out)), a, b.t()


def _fp8_problem(trial: Trial, edge: int) -> Problem:
    return Problem(m=edge, n=edge, k=edge, a=PER_TENSOR, b=PER_TENSOR, **trial_model.machine_of(trial.device))


def _fp8(a: Tensor, b: Tensor) -> Product:
    one = torch.ones((), device=a.device)
    qa, qb = (Operand(x.to(E4M3), one, PER_TENSOR) for x in (a, b))

    def call() -> Tensor:
        return scaled_mm.forward(qa, qb, out_dtype=torch.bfloat16, fast_accum=True)

    return call, qa.data, qb.data.t()


def _quantity(name: str, call: Callable[[], Tensor], a: Tensor, b: Tensor) -> Quantity:
    """Relative to the largest: bf16 rounds the result once, and 14 bits of accumulator lose less than that."""
    truth = a[:CHECKED].double() @ b[:, :CHECKED].double()
    error = (call()[:CHECKED, :CHECKED].double() - truth).abs().max() / truth.abs().max()
    return Quantity(f"{name} GEMM", error.item(), tolerances.FACTOR * tolerances.EPSILON["bf16"])


def _copy(size: int, device: str) -> list[float]:
    """Seconds of copies by a kernel: the driver's own are slower in a captured graph (2.7 of 4.2 TB/s, H200)."""
    source = torch.randn(size // 2, device=device).bfloat16()
    target = torch.empty_like(source)
    return timing.kernel(lambda: torch.add(source, 0, out=target), device)
