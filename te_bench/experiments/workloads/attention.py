"""One attention call, forward and backward apart, after its output and gradients were held to float64.

precision is the dtype of q, k and v.
samples: forward_s, backward_s; peak_*_bytes of both, with the buffer that overwrites the L2.
work: forward_flop = 4 B H T^2 D, halved when causal, and for a window 4 B H D for each key that a row sees; backward_flop =
2.5 times that; on a GPU launches, the kernels of a forward and a backward pass; of `auto` chosen, the backend that it chose,
which is the one that was checked and whose kernels had to run; in a mode that compiles graph_breaks and recompiles,
one of them the check's where that had to be smaller.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

from te_bench.experiments import timing, trial_model
from te_bench.experiments.checks import rounding, what_ran
from te_bench.experiments.checks.quantity import CHECKED_BEFORE, Quantity, judge
from te_bench.experiments.checks.tolerances import ACCUMULATED, FACTOR
from te_bench.experiments.instruments import compilation, memory, profiling
from te_bench.experiments.measurement import Context, Measurement, require
from te_bench.experiments.problems import AttentionProblem
from te_bench.experiments.spec import Trial
from te_bench.kernels import attention

CHECK_SCORES = 2**26  # at most so many float64 scores (0.5 GiB) are held by the reference: it gets fewer heads


def run(trial: Trial, context: Context) -> Measurement:
    # The backward pass is timed again and again on one graph, whose buffers a compiled one must not give away.
    with torch._functorch.config.patch(donated_buffer=False):
        return _run(trial, context)


def _run(trial: Trial, context: Context) -> Measurement:
    p = problem_of(trial)
    backend, chosen = attention.load(trial.attention), attention.rival(trial.attention, p)
    require(trial.attention, backend.unsupported(attention.posed(backend, p)))
    compilation.begin(trial)
    forward = _bind(trial, backend)
    # At the check's size, where that is smaller, `auto` might choose another.
    checked = forward if chosen == trial.attention else _bind(trial, attention.load(chosen))
    if trial.mode == "compile":
        forward = torch.compile(forward, dynamic=False)
        checked = forward if chosen == trial.attention else torch.compile(checked, dynamic=False)
    check = check_attention(trial, checked) if context.check else CHECKED_BEFORE
    q, k, v, dout = inputs(trial, p.batch, p.heads)
    out = forward(q, k, v)
    flop = 4 * p.batch * p.heads * p.head_dim * seen_pairs(p)
    work: dict[str, Any] = {"forward_flop": flop, "backward_flop": 5 * flop // 2}
    if chosen != trial.attention:
        work["chosen"] = chosen

    def backward() -> None:
        torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    memory.reset(trial.device)
    samples = {
        "forward_s": timing.kernel(lambda: forward(q, k, v), trial.device),
        "backward_s": timing.kernel(backward, trial.device),
    }
    samples |= memory.peak(trial.device)
    work |= compilation.counts(trial)

    measurement = Measurement(check=check, work=work, samples=samples)
    if not context.check:  # a gate's later rounds need times and memory alone
        return measurement

    def both() -> None:
        torch.autograd.grad(forward(q, k, v), (q, k, v), dout)

    return what_ran.require_attention(trial, profiling.kernels_seen(both, trial.device), measurement)


def problem_of(trial: Trial) -> attention.Problem:
    p = AttentionProblem.of(trial)
    trial_model.require_device(trial.device)
    return attention.Problem(
        batch=p.batch,
        heads=p.heads,
        length=p.length,
        head_dim=p.head_dim,
        dtype=trial.precision,
        causal=p.causal,
        dropout=0.0,
        device=trial.device,
        capability=trial_model.capability(trial.device),
        kv_heads=p.kv_heads,
        window=p.window,
    )


def seen_pairs(p: attention.Problem) -> int:
    """How many keys all rows of one head see; the half of T^2 where causal, as everybody counts it."""
    if p.window is None:
        return p.length**2 // (2 if p.causal else 1)
    left, right = (p.length if side < 0 else side for side in p.window)
    right = 0 if p.causal else right
    return sum(min(i + right, p.length - 1) - max(i - left, 0) + 1 for i in range(p.length))


def inputs(trial: Trial, batch: int, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout: standard normal, (batch, heads, T, D) in the trial's dtype; k and v of their share of the heads."""
    p = AttentionProblem.of(trial)
    generator = torch.Generator(trial.device).manual_seed(trial.seed)
    shared = p.heads // p.kv_heads if p.kv_heads else 1
    size = p.length, p.head_dim
    dtype = trial_model.DTYPES[trial.precision]
    counts = heads, max(1, heads // shared), max(1, heads // shared), heads
    draw = [torch.randn((batch, n, *size), generator=generator, device=trial.device).to(dtype) for n in counts]
    return draw[0].requires_grad_(), draw[1].requires_grad_(), draw[2].requires_grad_(), draw[3]


def check_attention(trial: Trial, forward: Callable[[Tensor, Tensor, Tensor], Tensor]) -> dict[str, Any]:
    """FlashAttention's rule for out, dq, dk and dv: max error <= 2 x manual attention's at the same dtype + floor.

    Of a backend that computes in FP8, manual_fp8's. The floor is twice what rounding the exact result to the dtype costs,
    and 16 units of float32's accumulation: in fp32 manual's own error is by chance as small as 0.7 of that (CPU flash and
    math, 1.3 x the rule). And for the scale of each, which one large element does not decide over (checks.rounding). Raises
    CheckFailed.
    """
    p = AttentionProblem.of(trial)
    whole = p.length**2 * p.batch * p.heads <= CHECK_SCORES
    batch, heads = (p.batch, p.heads) if whole else (1, 1)
    exact_inputs = [t.detach().double().requires_grad_() for t in inputs(trial, batch, heads)]
    manual = _bind(trial, attention.load("manual"))
    truth = _gradients(manual, exact_inputs)
    definition = _bind(trial, attention.load(attention.yardstick(trial.attention)))
    library = _gradients(definition, inputs(trial, batch, heads))
    ours = _gradients(forward, inputs(trial, batch, heads))
    precision = "fp8" if attention.in_fp8(trial.attention) else trial.precision
    quantities, scales = [], []
    for name, exact, yardstick, value in zip(("out", "dq", "dk", "dv"), truth, library, ours, strict=True):
        floor = FACTOR * _max_error(exact.to(value.dtype), exact) + ACCUMULATED * exact.abs().max().item()
        quantities.append(Quantity(name, _max_error(value, exact), FACTOR * _max_error(yardstick, exact) + floor))
        scales.append(rounding.quantities(name, value, exact, yardstick, precision)[0])
    return judge("manual attention, fp64", quantities + scales)


def _bind(trial: Trial, backend: attention.Backend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The backend with the trial's masks and the usual scale, 1 / sqrt(D)."""
    p = AttentionProblem.of(trial)
    causal, window, scale = p.causal, p.window, 1 / math.sqrt(p.head_dim)
    if window is None:
        return lambda q, k, v: backend.forward(q, k, v, causal=causal, scale=scale)
    return lambda q, k, v: attention.attend(backend, q, k, v, causal=causal, scale=scale, window=window)


def _gradients(forward: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: Any) -> list[Tensor]:
    q, k, v, dout = tensors
    out = forward(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def _max_error(x: Tensor, truth: Tensor) -> float:
    return (x.double() - truth.double()).abs().max().item()
