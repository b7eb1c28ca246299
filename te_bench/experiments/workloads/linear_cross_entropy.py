"""A head's loss with both gradients: mean_i CE(x_i W^T, t_i) over a padded vocabulary.

problem: n, d, vocab and padded, as kernels.linear_cross_entropy.table.HeadShape has them, and head, the backend; precision
is the dtype of x and W. samples: kernel_s of single calls, forward and backward; peak_*_bytes of one; on a GPU that counts
it energy_j (1). work: flop = 6 N D padded; on a GPU held_bytes, allocated before a call: x, W, targets.
In mode compile the head is compiled with its gradients, as it is in a compiled step; work has graph_breaks and recompiles.
check: the loss and both gradients against float64, by the rule of attention's; of the head `fp8`, whose operands and
gradient are in FP8, by the error of an emulation.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_bench.experiments import trial_model
from te_bench.experiments.checks import held, rounding, seeds, what_ran
from te_bench.experiments.checks.gradients import HEAD_SCALE
from te_bench.experiments.checks.quantity import CHECKED_BEFORE, judge, of_largest
from te_bench.experiments.checks.timed import Timed
from te_bench.experiments.checks.tolerances import ACCUMULATED, EPSILON, HEAD_GRADIENT_UNITS, HEAD_LOSS_SIGMAS
from te_bench.experiments.instruments import compilation, memory
from te_bench.experiments.measurement import Context, Measurement, require
from te_bench.experiments.problems import HeadProblem
from te_bench.experiments.spec import Trial
from te_bench.kernels import linear_cross_entropy, quantize
from te_bench.kernels.linear_cross_entropy import Problem

CHECKED_TOGETHER = 2**24  # logits that float64 holds at a time
NAMES = ("loss", "dx", "dW")
FP8 = "fp8"  # the head

Result = tuple[Tensor, Tensor, Tensor]


def run(trial: Trial, context: Context) -> Measurement:
    trial_model.require_device(trial.device)
    p = HeadProblem.of(trial)
    backend = linear_cross_entropy.load(p.head)
    problem = Problem(
        d=p.d, vocab=p.vocab, padded=p.padded, dtype=trial.precision, **trial_model.machine_of(trial.device)
    )
    require(p.head, backend.unsupported(problem))
    compilation.begin(trial)
    forward = torch.compile(backend.forward, dynamic=False) if trial.mode == "compile" else backend.forward
    x, weight, targets = given = _drawn(trial, trial.seed)
    if context.check:
        seeds.require("inputs", trial.seed, functools.partial(_drawn, trial), given)
    call = functools.partial(_result, forward, x, weight, targets, p.vocab)
    right = functools.partial(_held_to_float64, trial, given)
    check = right(call()) if context.check else CHECKED_BEFORE
    memory.reset(trial.device)
    before = {"held_bytes": torch.cuda.memory_allocated()} if trial.device == "cuda" else {}
    results = call()
    samples = memory.peak(trial.device)  # before the timer's buffer, which overwrites the L2, is there
    held.require(samples, held.of_tensors([*given, *results]))
    del results
    measurement = Measurement(check=check, work={"flop": 6 * p.n * p.d * p.padded, **before}, samples=samples)
    ran = functools.partial(what_ran.require, trial, expected=what_ran.expected_of_head(trial, p.head))
    return Timed(call).measured(trial, context, measurement, right, ran)


def _drawn(trial: Trial, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x (N, D) and weight (padded, D) in the trial's dtype, and targets (N,) int64."""
    p = HeadProblem.of(trial)
    generator = torch.Generator(trial.device).manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator, device=trial.device)
    x = draw(p.n, p.d).to(trial_model.DTYPES[trial.precision]).requires_grad_()
    weight = (draw(p.padded, p.d) / p.d**0.5).to(x.dtype).requires_grad_()
    return x, weight, torch.randint(p.vocab, (p.n,), generator=generator, device=trial.device)


def _result(forward: Callable[..., Tensor], x: Tensor, weight: Tensor, targets: Tensor, vocab: int) -> Result:
    loss = forward(x, weight, targets, vocab=vocab)
    dx, dw = torch.autograd.grad(loss, (x, weight))
    return loss.detach(), dx, dw


def _held_to_float64(trial: Trial, given: Result, found: Result) -> dict[str, Any]:
    """Hold the loss and both gradients to FlashAttention's rule, and each gradient's scale and rows. Raises CheckFailed."""
    (x, weight, targets), p = given, HeadProblem.of(trial)
    precision, unit, vocab = trial.precision, EPSILON[trial.precision], p.vocab
    exact = _in_float64(x.detach().double(), weight.detach().double(), targets, vocab)
    if p.head == FP8:
        precision, unit = FP8, EPSILON["bf16"]
        known = _in_float64(_dequantized(x), _dequantized(weight), targets, vocab, as_fp8=True)
    else:
        known = _result(linear_cross_entropy.load("reference").forward, x, weight, targets, vocab)
    floors = [HEAD_LOSS_SIGMAS * unit * len(x) ** -0.5 + ACCUMULATED * exact[0].item()]
    floors += [HEAD_GRADIENT_UNITS * unit * truth.abs().max().item() for truth in exact[1:]]
    quantities = []
    for quantity, value, truth, yardstick, floor in zip(NAMES, found, exact, known, floors, strict=True):
        quantities.append(of_largest(quantity, value, truth, yardstick, floor))
        if value.dim():
            quantities += rounding.quantities(quantity, value, truth, yardstick, precision)
    return judge("reference, fp64", quantities)


def _in_float64(x: Tensor, weight: Tensor, targets: Tensor, vocab: int, *, as_fp8: bool = False) -> Result:
    """Return loss, dx and dW of float64 operands, some rows at a time. as_fp8: logits in bf16, their gradient in E5M2."""
    each = max(1, CHECKED_TOGETHER // len(weight))
    loss, dx, dw = x.new_zeros(()), torch.empty_like(x), torch.zeros_like(weight)
    for start in range(0, len(x), each):
        rows = slice(start, start + each)
        logits = x[rows] @ weight[:vocab].t()
        logits = logits.bfloat16().double() if as_fp8 else logits
        log_p = logits.log_softmax(1)
        index = targets[rows, None]
        loss -= log_p.gather(1, index).sum()
        g = log_p.exp().scatter_add_(1, index, torch.full_like(log_p[:, :1], -1.0))
        if as_fp8:
            g = (g.float() * HEAD_SCALE).to(torch.float8_e5m2).double() / HEAD_SCALE
        dx[rows] = g @ weight[:vocab]
        dw[:vocab] += g.t() @ x[rows]
    return loss / len(x), dx / len(x), dw / len(x)


def _dequantized(x: Tensor) -> Tensor:
    cast = quantize.load("reference").quantize
    packed = cast(x.detach().bfloat16(), torch.float8_e4m3fn, rowwise=True, columnwise=False)
    return packed.data.double() * packed.scale_inv.double()
