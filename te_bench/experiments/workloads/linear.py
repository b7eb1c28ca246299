"""One Linear, forward and both gradients, as a training step computes it: by te.Linear, in half precision or under a recipe.

The weight is float32 and x is what autocast computes in, so that the casts of a step are part of it.
problem: tokens (M), in_features (K) and out_features (N). samples: kernel_s of single calls.
work: flop = 6 M N K; ran (checks.what_ran); on a GPU kernel_s, {kernel: seconds a call}, which tells products from casts.
check: y, dx and dW of as many rows as float64 has memory for, against it: at most twice the error of nn.Linear at the same
precision, FP8 emulated, and a floor.
"""

import contextlib
import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn

import te_bench.models as te
from te_bench.experiments import timing, trial_model
from te_bench.experiments.checks import gradients, seeds, what_ran
from te_bench.experiments.checks.fp8_emulation import emulate
from te_bench.experiments.checks.quantity import CHECKED_BEFORE, judge
from te_bench.experiments.checks.timed import Timed
from te_bench.experiments.instruments import profiling
from te_bench.experiments.measurement import Context, Measurement, require
from te_bench.experiments.problems import LinearProblem
from te_bench.experiments.spec import Trial
from te_bench.models import recipe as recipes
from te_bench.training.step import autocast

NAMES = ("y", "dx", "dW")
CHECKED = 2**27  # elements of x or of y that are checked, in float64 1 GiB: a vocabulary's head gets fewer rows
MULTIPLE = 128  # of rows, as FP8's scales of blocks go


def run(trial: Trial, context: Context) -> Measurement:
    trial_model.require_device(trial.device)
    recipe = recipes.load(trial.recipe) if trial.recipe else None
    if recipe is not None:
        require(trial.recipe or "", recipe.unsupported(trial.device, trial_model.capability(trial.device)))
    p = LinearProblem.of(trial)
    x, weight, dy = given = _drawn(trial, trial.seed)
    if context.check:
        seeds.require("inputs", trial.seed, functools.partial(_drawn, trial), given)
    torch.manual_seed(trial.seed)  # stochastic rounding draws the same whatever ran before
    trial_model.allow_tf32(trial.precision)
    layer = te.Linear(p.in_features, p.out_features, bias=False, device=trial.device)
    with torch.no_grad():
        layer.weight.copy_(weight)

    def call(rows: int = p.tokens) -> tuple[Tensor, ...]:
        in_fp8 = te.autocast(recipe=recipe) if recipe is not None else contextlib.nullcontext()
        return _passes(layer, x[:rows], dy[:rows], trial, in_fp8)

    check: dict[str, Any] = CHECKED_BEFORE
    if context.check:
        rows = min(p.tokens, max(MULTIPLE, CHECKED // max(p.in_features, p.out_features) // MULTIPLE * MULTIPLE))
        gradients.settle(trial.recipe, lambda: call(rows))
        check = _held_to_float64(trial, call(rows), x[:rows], weight, dy[:rows], recipe)
    gradients.settle(trial.recipe, call)
    timed = Timed(call)
    samples = {"kernel_s": timed.samples(timing.kernel, trial.device)}
    work: dict[str, Any] = {"flop": 6 * p.tokens * p.in_features * p.out_features}
    measurement = Measurement(check=check, work=work, samples=samples)
    if not context.check:
        return measurement
    asked = what_ran.expected_of_layer(trial, linears=1)
    measurement = what_ran.require(trial, timed.seen(trial.device), measurement, asked)
    profile = {"kernel_s": profiling.kernel_seconds(call, trial.device)} if trial.device == "cuda" else {}
    return dataclasses.replace(measurement, work={**measurement.work, **profile})


def _drawn(trial: Trial, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x (M, K), the weight (N, K) and dy (M, N): the weight in float32, the others in autocast's dtype."""
    p = LinearProblem.of(trial)
    generator = torch.Generator(trial.device).manual_seed(seed)
    dtype = trial_model.DTYPES[trial_model.kernel_dtype(trial)]
    sizes = (p.tokens, p.in_features), (p.out_features, p.in_features), (p.tokens, p.out_features)
    x, weight, dy = (torch.randn(size, generator=generator, device=trial.device) for size in sizes)
    return x.to(dtype).requires_grad_(), weight / p.in_features**0.5, dy.to(dtype)


def _passes(
    layer: nn.Module, x: Tensor, dy: Tensor, trial: Trial, in_fp8: contextlib.AbstractContextManager[Any]
) -> tuple[Tensor, ...]:
    with autocast(x.device, trial.precision), in_fp8:
        y = layer(x)
    return (y.detach(), *torch.autograd.grad(y, (x, layer.get_parameter("weight")), dy))


def _held_to_float64(
    trial: Trial, found: tuple[Tensor, ...], x: Tensor, weight: Tensor, dy: Tensor, recipe: recipes.Recipe | None
) -> dict[str, Any]:
    """Hold y, dx and dW to float64 as a step's gradients are. Raises CheckFailed, naming the worst."""
    wide = (x.detach().double(), weight.double(), dy.double())
    truth = (wide[0] @ wide[1].t(), wide[2] @ wide[1], wide[2].t() @ wide[0])
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device)
    with torch.no_grad():
        plain.weight.copy_(weight)
    if recipe is not None:
        emulate(plain, recipe, seed=trial.seed)
    known = _passes(plain, x, dy, trial, contextlib.nullcontext())
    ours, usual, exact = (dict(zip(NAMES, each, strict=True)) for each in (found, known, truth))
    quantities, ratios = gradients.beside(ours, usual, exact, trial.precision, typical=0.0)
    in_fp8 = [] if recipe is None else gradients.of_emulation(ratios.values(), above=True)
    return judge("fp64 of the same operands", quantities + in_fp8)
