"""The check of a training step: loss and every gradient against the same model in float64."""

import dataclasses
import gc
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from te_bench.experiments import trial_model
from te_bench.experiments.checks import adopted_step, attention_rows, large, seeds, tolerances, update
from te_bench.experiments.checks.fp8_emulation import emulate
from te_bench.experiments.checks.gradients import (
    HEAD_SCALE,
    HELD,
    SHARE,
    UNFUSED,
    Gradients,
    another_batch,
    compared,
    over_batches,
    settle,
)
from te_bench.experiments.checks.quantity import Quantity, judge
from te_bench.experiments.checks.tolerances import FACTOR, FORETOLD, FORETOLD_BY_FP8
from te_bench.experiments.instruments import memory
from te_bench.experiments.measurement import CheckFailed
from te_bench.experiments.problems import StepProblem
from te_bench.experiments.spec import Trial
from te_bench.kernels import attention
from te_bench.models import cost
from te_bench.models import recipe as recipes
from te_bench.models.configs import Shape
from te_bench.models.recipe import Float8CurrentScaling
from te_bench.training.evaluation import evaluate
from te_bench.training.parallel import SINGLE
from te_bench.training.step import Optim, TrainStep
from te_bench.training.undisturbed import undisturbed

#: Settings that make a step fast and nothing else. The references go without.
FAST = ("head", "optimizer", "blocks", "checkpointing", "rival", "linears")

#: Scores of a layer that the references hold at once: 128 MiB in float64, or those of one sequence.
TOGETHER = 2**24
#: The share of a GPU's memory that several sequences may take together, if that allows more.
ACTIVATIONS = 1 / 8


class Foretold(NamedTuple):
    """The losses that an evaluation finds by its own head, and by an FP8 head that trains; None without one."""

    loss: float
    by_trained_head: float | None


def begin(trial: Trial, tokens: Tensor, targets: Tensor) -> tuple[TrainStep, dict[str, Any]]:
    """Return the trial's step and its check, of fewer layers if the references of all do not fit on the GPU.

    The check then has a step of its own, which is gone before the trial's is built. A user's model is checked by
    adopted_step. Raises CheckFailed.
    """
    if StepProblem.of(trial).source is not None:
        return adopted_step.begin(trial, tokens, targets)
    checked = within_memory(trial)
    require_seed(checked)
    step = trial_model.step_of(checked)
    check = update.checked(check_step(checked, tokens, targets, step), step, tokens, targets)
    if trial_model.config_of(checked).dropout:
        torch._dynamo.reset()  # what the check's steps compiled is not the trial's
    if checked is not trial:
        del step
        torch._dynamo.reset()
        memory.reset(trial.device)
        step = trial_model.step_of(trial)
    if trial_model.config_of(trial).dropout and step.parallel is SINGLE:
        seeds.require_masks(step, trial.seed, tokens, targets)
    return step, check


def require_seed(trial: Trial) -> None:
    """Raise CheckFailed if another seed gives the same weights."""

    def first_rows(seed: int) -> list[Tensor]:
        model = trial_model.build(dataclasses.replace(trial.with_(layers=1), seed=seed))
        return [torch.cat([p.detach()[:1].flatten().float() for p in model.parameters() if p.dim() > 1])]

    seeds.require("weights", trial.seed, first_rows)


def foretold(
    trial: Trial, step: TrainStep, batch: Callable[[], tuple[Tensor, Tensor]], by: Callable[..., float] = evaluate
) -> Foretold | None:
    """Return the loss that a step on this batch should find, by an evaluation of the batch.

    None, without a call of `batch`, on devices outside tolerances.DEVICES, and with dropout, a planted fault, a rival or a
    user's model: their steps may find another loss.
    """
    p = StepProblem.of(trial)
    theirs = p.source is not None or p.fault is not None or p.against is not None
    if trial.device not in tolerances.DEVICES or theirs or trial_model.config_of(trial).dropout:
        return None
    parts = [x.to(trial.device).chunk(step.optim.accumulate) for x in batch()]

    def told(**how: bool) -> float:
        return by(step.model, zip(*parts, strict=True), trial.precision, **how)

    with undisturbed(step.model):
        return Foretold(told(), told(as_trained=True) if p.head == "fp8" else None)


def require_foretold(number: int, found: float, told: Foretold | None) -> None:
    """Raise CheckFailed if step `number` found another loss than was foretold."""
    if told is None:
        return
    bounds = [(told.loss, FORETOLD if told.by_trained_head is None else FORETOLD_BY_FP8)]
    bounds += [] if told.by_trained_head is None else [(told.by_trained_head, FORETOLD)]
    for loss, share in bounds:
        if not abs(found - loss) <= share * max(1.0, loss):  # a NaN is within nothing
            raise CheckFailed(f"step {number} found the loss {found:.6g}, and an evaluation of its batch {loss:.6g}")


def within_memory(trial: Trial) -> Trial:
    """Return the trial, with as many layers as this GPU can check, at least one; a CPU counts as large enough."""
    if trial.device == "cpu":
        return trial
    config = trial_model.config_of(trial)
    spare = SHARE * torch.cuda.get_device_properties().total_memory
    spare -= HELD * cost.parameters(config, StepProblem.of(trial).padded_vocab)
    if spare >= 0:
        return trial
    too_many = math.ceil(-spare / (HELD * (config.shape.weights + config.shape.vectors)))
    return trial.with_(layers=max(1, config.shape.layers - too_many))


def check_step(trial: Trial, tokens: Tensor, targets: Tensor, step: TrainStep) -> dict[str, Any]:
    """Hold loss and every gradient of one step to the same model in float64 with manual attention and no padding.

    The yardstick is the same model at the trial's own precision, eager, with FP8 emulated and manual attention: rounded
    as fused kernels round if the trial's is one, by manual_fp8 if the trial's is in FP8. Each tensor, its scale and its
    rows may err FACTOR times as much, plus a floor. Attention is held apart (attention_rows). A model with dropout is
    compared without it, in the trial's mode, for random masks cannot be compared. Raises CheckFailed, naming the worst
    tensor.
    """
    if trial_model.config_of(trial).dropout:
        without = trial.with_(dropout=0.0)
        checked = check_step(without, tokens, targets, trial_model.step_of(without))
        torch._dynamo.reset()  # the trial's own step is then no recompile
        return checked
    quantities = over_batches(
        _quantities(trial, step, tokens, targets),
        step,
        lambda number: _quantities(trial, step, *another_batch(trial, number, len(tokens))),
    )
    p = StepProblem.of(trial)
    if p.against is None or not p.against.own_attention:  # we cannot look into theirs
        quantities += _check_attention(trial, tokens, targets, step)
    fewer = "" if p.layers is None else f", both with {p.layers} of the model's layers"
    return judge(f"manual attention, fp64, unpadded, same weights{fewer}", quantities)


def _quantities(trial: Trial, step: TrainStep, tokens: Tensor, targets: Tensor) -> list[Quantity]:
    """Compare loss and every gradient of one batch with float64's, by the limits that the yardstick's errors set."""
    settle(trial.recipe, lambda: step.gradients(tokens, targets, records=True))
    ours = Gradients.of_step(step, tokens, targets)
    p = StepProblem.of(trial)
    unpadded = {name: value for name, value in trial.problem.items() if name not in FAST} | {"padded_vocab": p.vocab}
    exact = dataclasses.replace(trial, attention="manual", precision="fp64", recipe=None, problem=unpadded)
    definition = attention.yardstick(trial_model.attention_of(trial))
    library = dataclasses.replace(trial, attention=definition, recipe=None, problem=unpadded)
    truth = reference(exact, step.optim, tokens, targets)
    recipe = recipes.load(trial.recipe) if trial.recipe else None
    fp8_head = p.head == "fp8"
    as_fused = definition == "manual" and trial.attention not in UNFUSED
    yardstick = reference(library, step.optim, tokens, targets, recipe, fp8_head, as_fused)
    step.parallel.of_all(None)  # wait for the slowest rank
    trial_model.allow_tf32(trial.precision)  # the references set it for themselves
    model: Any = step.model
    tables = [name for name, parameter in model.named_parameters() if model.has_padding(parameter)]
    padding = torch.cat([ours.of[name][p.vocab :].flatten() for name in tables])
    unpadded_ours = ours._replace(of=ours.of | {name: ours.of[name][: p.vocab] for name in tables})
    split = model.gradient_parts()
    found = [each._replace(of=_parts(each.of, split)) for each in (unpadded_ours, yardstick, truth)]
    slack = FACTOR if p.against is not None else 1.0  # a rival may round more coarsely than the recipe says
    floor = "fp8" if fp8_head else trial.precision
    quantities = compared(*found, precision=trial.precision, targets=targets.numel(), slack=slack, loss_floor=floor)
    quantities.append(Quantity("grad padding rows", padding.abs().max().item() if padding.numel() else 0.0, 0.0))
    return quantities


def _check_attention(trial: Trial, tokens: Tensor, targets: Tensor, step: TrainStep) -> list[Quantity]:
    """Compare attention row by row in an eager pass of a micro-batch, or of a few rows if memory may be short.

    `auto` gets the whole micro-batch, for which it has chosen.
    """
    rows = len(tokens) // step.optim.accumulate
    tokens, targets = (step.parallel.rows(x[:rows]) for x in (tokens, targets))
    if trial.mode != "eager" and attention.load(trial.attention).chosen is None:
        rows = min(rows, 4)
    name = trial_model.attention_of(trial)
    precision = "fp8" if attention.in_fp8(name) else trial_model.kernel_dtype(trial)
    return attention_rows.check(step, tokens[:rows], targets[:rows], name, precision)


def reference(
    trial: Trial,
    optim: Optim,
    tokens: Tensor,
    targets: Tensor,
    recipe: recipes.Recipe | None = None,
    fp8_head: bool = False,
    as_fused: bool = False,
) -> Gradients:
    """Compute loss and gradients by the eager model, a few sequences at a time, so that it fits wherever the trial does.

    Small problems go by micro-batches, and by ranks, as the trial's do, so that FP8's scales are of the same tensors.
    Long sequences and large vocabularies go by parts (checks.large). recipe: emulate its FP8. fp8_head: emulate the
    head `fp8`, one scale a tensor and a fixed one for the gradient. as_fused: round attention as fused kernels do.
    """
    rows = len(tokens) // optim.accumulate // StepProblem.of(trial).replicas
    memory_bytes = torch.cuda.get_device_properties().total_memory if trial.device == "cuda" else 0
    shape, length = trial_model.config_of(trial).shape, tokens.shape[1]
    together = rows_together(shape, length, rows, memory_bytes)
    while True:
        try:
            by = dataclasses.replace(optim, accumulate=len(tokens) // together)
            found = _reference(trial, by, tokens, targets, recipe, fp8_head, as_fused)
        except torch.OutOfMemoryError:  # a captured step keeps all of its memory
            if together == 1:
                raise
        else:
            if large.is_large(shape, length):
                gc.collect()  # a model by parts refers to itself: its weights would stay beside the next reference's
            return found
        together = max(count for count in range(1, together) if rows % count == 0)
        memory.reset(trial.device)


def _reference(
    trial: Trial,
    optim: Optim,
    tokens: Tensor,
    targets: Tensor,
    recipe: recipes.Recipe | None,
    fp8_head: bool,
    as_fused: bool,
) -> Gradients:
    model = trial_model.build(trial)
    if trial.precision == "fp64":  # after the initialisation: the weights are the trial's own, in float32
        model.double()
    if recipe is not None:
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        left = recipe.keeps(name for name in linears if name != model.head_name)
        emulate(model, recipe, leave=(model.head_name, *left), seed=trial.seed)
    if fp8_head:
        scale = HEAD_SCALE * targets.numel()
        emulate(model.tables().head, Float8CurrentScaling(), seed=trial.seed, gradient_scale=scale)
    if as_fused:
        for module in model.attentions():
            module.attention = attention_rows.as_fused
    if large.is_large(model.config.shape, tokens.shape[1]):
        large.by_parts(model)
    return Gradients.written_out(model, optim, trial.precision, tokens, targets)


def rows_together(shape: Shape, tokens: int, rows: int, memory_bytes: int) -> int:
    """Return how many sequences of a micro-batch of `rows` the references compute at a time: a divisor of it.

    memory_bytes: of the GPU; 0 on a CPU. Each pass over few sequences costs a pass's launches, which take longer than a
    large GPU computes: GPT-2 124M goes by 4 sequences of 1,024 on a GPU of 141 GB.
    """
    most = TOGETHER // (shape.heads * tokens**2)
    most = max(1, most, int(ACTIVATIONS * memory_bytes / _kept_bytes(shape, tokens)))
    return max(count for count in range(1, rows + 1) if rows % count == 0 and count <= most)


def _kept_bytes(shape: Shape, tokens: int) -> int:
    """Return what float64 keeps of a sequence for its backward pass: scores once, logits three times at the loss.

    For models.configs' models and 64 to 1,024 tokens it says 0.96 to 1.4 times what hooks on saved tensors count.
    """
    of_layer = shape.heads * tokens + 6 * shape.hidden + 3 * shape.qkv + (5 if shape.gated else 2) * shape.ffn
    return 8 * tokens * (shape.layers * of_layer + 3 * shape.vocab)


def _parts(gradients: dict[str, Tensor], split: dict[str, dict[str, int]]) -> dict[str, Tensor]:
    """Return the gradients with q's, k's and v's apart.

    v's is so much larger at first that a wrong scale of q k^T drowns in it.
    """
    parts: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        if name in split:
            rows = gradient.split(list(split[name].values()))
            parts |= {f"{name} {part}": own for part, own in zip(split[name], rows, strict=True)}
        else:
            parts[name] = gradient
    return parts
