"""Loss and gradients of one pass beside float64's, by the limits that every check of a training step shares."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from te_bench.experiments import trial_model
from te_bench.experiments.checks import rounding
from te_bench.experiments.checks.quantity import Quantity, geometric_mean, relative_error
from te_bench.experiments.checks.tolerances import (
    ACCUMULATED,
    FLOOR,
    FP8_LEAST,
    FP8_OVERALL,
    LOSS_FLOOR,
)
from te_bench.experiments.instruments import memory
from te_bench.experiments.spec import Trial
from te_bench.models import recipe as recipes
from te_bench.training.parallel import SINGLE
from te_bench.training.step import Optim, TrainStep, autocast, fp8_autocast
from te_bench.training.undisturbed import undisturbed

#: Passes before the check of a step whose recipe keeps its scales. Delayed scaling begins with scale 1, at which small
#: gradients vanish, and all that flows through their GEMM. Each pass brings one more GEMM to its scale.
SETTLE = 4

#: Backends that keep the scores, so that dS does not come from a rounded output.
UNFUSED = ("manual", "math")

#: Bytes a parameter beside the references: the step's weight, gradient, moments and copy for GEMMs (18), the gradient that
#: it found (4), float64's weight and gradient (16). They may take SHARE of a GPU's memory; activations have the rest.
HELD = 18 + 4 + 16
SHARE = 0.45

#: Name of the ratio of all errors to those of FP8's emulation, and how many batches' mean decides if one exceeds its limit.
EMULATION, BATCHES = "grad, ratio to FP8 emulation", 3

#: The head `fp8` multiplies softmax - onehot, at most 1, by this. The mean over the targets comes after it.
HEAD_SCALE = 2.0**15


class Gradients(NamedTuple):
    """Loss and gradients of one pass; with clipping the clipped ones, and their norm before."""

    loss: float
    of: dict[str, Tensor]
    norm: float | None = None

    def with_errors(self, found: Self, exact: Self, names: Iterable[str]) -> Self:
        """Return this and what `found` errs beside `exact`, of the gradients that are named."""
        norm = None
        if self.norm is not None and found.norm is not None and exact.norm is not None:
            norm = self.norm + found.norm - exact.norm
        of = {name: self.of[name] + (found.of[name] - exact.of[name]) for name in names}
        return self._replace(loss=self.loss + found.loss - exact.loss, of=of, norm=norm)

    @classmethod
    def of_step(cls, step: TrainStep, inputs: Tensor, targets: Tensor) -> Self:
        loss, found = step.gradients(inputs, targets)
        return cls(loss, found, None if step.grad_norm is None else step.grad_norm.item())

    @classmethod
    def written_out(cls, model: nn.Module, optim: Optim, precision: str, inputs: Tensor, targets: Tensor) -> Self:
        """Compute them by an eager model, with micro-batches and clipping written out apart from the step's."""
        scale = 2.0**16 if precision == "fp16" else 1.0
        losses = []
        for x, y in zip(inputs.chunk(optim.accumulate), targets.chunk(optim.accumulate), strict=True):
            with autocast(x.device, precision), fp8_autocast(model):
                loss = model(x, y) / optim.accumulate
            (loss * scale).backward()
            losses.append(loss.detach())
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for parameter in model.parameters():
            parameter.grad = None
        multiplier, norm = 1 / scale, None
        if optim.grad_clip:
            norms = [torch.linalg.vector_norm(g).double() for g in found.values()]  # summed in its own precision
            norm = torch.linalg.vector_norm(torch.stack(norms)).item() / scale
            multiplier *= min(1.0, optim.grad_clip / (norm + 1e-6))
        if multiplier != 1.0:
            torch._foreach_mul_(list(found.values()), multiplier)
        return cls(torch.stack(losses).sum().item(), found, norm)


def compared(
    ours: Gradients,
    library: Gradients,
    truth: Gradients,
    *,
    precision: str,
    targets: int,
    slack: float = 1.0,
    loss_floor: str | None = None,
    rows: bool = True,
    more: Sequence[Gradients] = (),
) -> list[Quantity]:
    """Compare loss and gradients with float64's, each by the yardstick's error; in FP8 all gradients together, too.

    slack: above 1 for what may round more coarsely than the recipe says. loss_floor: a key of LOSS_FLOOR. rows: whether
    each row is held apart. A kink forbids that: rounding moves a value across it here and not there, and a row of few
    changes. more: further yardsticks, of all tensors or of some.
    """
    # Half-precision log-probabilities are rounded one by one (autocast on a GPU): four sigma of their mean's rounding.
    rounded_mean = FLOOR[precision] / math.sqrt(12 * targets)
    loss_limit = rounding.limit([abs(each.loss - truth.loss) for each in (library, *more)])
    loss_limit += (LOSS_FLOOR[loss_floor or precision] + rounded_mean) * abs(truth.loss)
    quantities = [Quantity("loss", abs(ours.loss - truth.loss), loss_limit)]
    quantities += _norm(ours, [library, *more], truth, precision)
    every = (ours, library, truth, *more)
    found, known, exact, *further = ({f"grad {name}": x for name, x in each.of.items()} for each in every)
    gradients, ratios = beside(found, known, exact, precision, slack=slack, rows=rows, more=further)
    in_fp8 = of_emulation(ratios.values(), above=slack == 1.0) if precision == "fp8" else []
    return quantities + gradients + in_fp8


def beside(
    ours: Mapping[str, Tensor | None],
    library: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    precision: str,
    *,
    typical: float | None = None,
    slack: float = 1.0,
    rows: bool = True,
    more: Sequence[Mapping[str, Tensor]] = (),
) -> tuple[list[Quantity], dict[str, float]]:
    """Return each tensor's error, scale and, with `rows`, worst row, and {name: its error over the yardstick's}.

    A tensor with further yardsticks is also held to them but for its scale.

    typical: the least that counts as the yardstick's relative error; None is the median of all tensors, for one that the
    library happened to round well is no yardstick. more: further yardsticks, of all tensors or of some.
    """
    each_of = {name: [each[name] for each in (library, *more) if name in each] for name in truth}
    errors = {name: [relative_error(each, value) for each in each_of[name]] for name, value in truth.items()}
    typical = statistics.median(error for error, *_ in errors.values()) if typical is None else typical
    found, ratios = list[Quantity](), dict[str, float]()
    for name, value in truth.items():
        error, limit = relative_error(ours.get(name), value), rounding.limit(errors[name], typical) + FLOOR[precision]
        rounded: dict[str, Any] = {"typical": typical, "slack": slack, "more": each_of[name][1:]}
        scale, *row = rounding.quantities(name, ours.get(name), value, library[name], precision, **rounded)
        found += [Quantity(name, error, limit), scale, *(row if rows else ())]
        if len(each_of[name]) > 1:  # where the scale may be anything, the rest may not
            aside, *known = (rounding.aside(x, value) for x in (ours.get(name), *each_of[name]))
            found.append(Quantity(f"{name}, but for its scale", aside, rounding.limit(known) + FLOOR[precision]))
        if error or any(errors[name]):  # of a gradient that is 0 in both, rounding cannot be told
            ratios[name] = error / geometric_mean(errors[name])
    return found, ratios


def of_emulation(ratios: Iterable[float], *, above: bool) -> list[Quantity]:
    """Return the geometric mean of error / emulation's error, held from below, and with `above` from above.

    A wrong format is within FACTOR in any one tensor. A step that rounds much less did not compute in FP8.
    """
    overall = geometric_mean(list(ratios))
    coarser = [Quantity(EMULATION, overall, FP8_OVERALL)] if above else []
    return [*coarser, Quantity("grad, ratio of FP8 emulation to it", 1 / max(overall, 1e-30), 1 / FP8_LEAST)]


def over_batches(first: list[Quantity], step: TrainStep, of_batch: Callable[[int], list[Quantity]]) -> list[Quantity]:
    """Return `first`; where EMULATION alone is wrong, by chance perhaps, the mean of BATCHES batches decides in its place.

    A ratio above the square of its limit is no chance. of_batch(k): the quantities of another batch; over ranks none is
    asked. A small model has few numbers to round, and its ratio strays by 6 % from batch to batch (one standard
    deviation; a T5 of 32 features, 60 seeds; correlation 0.0). A wrong format is wrong in every batch. A further batch
    fails the check by anything else that is wrong in it, and by a ratio above the square. The step is left as it was.
    """
    wrong = [q for q in first if q.wrong]
    alone = [q.name for q in wrong] == [EMULATION] and wrong[0].error < FP8_OVERALL**2
    if not alone or step.parallel is not SINGLE:
        return first
    ratios, found = [wrong[0].error], [q for q in first if not q.wrong]
    with undisturbed(step.model):
        for number in range(1, BATCHES):
            # References refer to themselves, so the last batch's would stay beside this one's.
            memory.reset(step.device.type)
            for quantity in of_batch(number):
                if quantity.name == EMULATION and quantity.error < FP8_OVERALL**2:
                    ratios.append(quantity.error)
                elif quantity.wrong:
                    found.append(quantity)
    return [*found, Quantity(f"{EMULATION}, of {BATCHES} batches", geometric_mean(ratios), FP8_OVERALL)]


def another_batch(trial: Trial, number: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return the first `rows` of the trial's inputs and targets for step `number`."""
    inputs, targets = trial_model.batches_of(trial)(number)
    return inputs[:rows], targets[:rows]


def _norm(ours: Gradients, yardsticks: Sequence[Gradients], truth: Gradients, precision: str) -> list[Quantity]:
    """Compare the norm before clipping: after it gradients that are all twice as large are the same."""
    if truth.norm is None:
        return []
    error = math.nan if ours.norm is None else abs(ours.norm - truth.norm)
    errors = [abs(each.norm - truth.norm) for each in yardsticks if each.norm is not None]  # they clip, too
    limit = rounding.limit(errors) + (FLOOR[precision] + ACCUMULATED) * truth.norm
    return [Quantity("norm of all gradients before clipping", error, limit)]


def settle(recipe: str | None, once: Callable[[], object]) -> None:
    """Pass until the scales have settled, if the recipe keeps any."""
    if recipe is not None and recipes.load(recipe).make_state(1, torch.device("cpu")) is not None:
        for _ in range(SETTLE):
            once()
