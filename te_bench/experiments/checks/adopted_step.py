"""The check of a user's training step: loss and gradients against the same module in float64, by PyTorch's math attention.

te-bench knows nothing of the module: what it computes is what its own code does in float64, from the same weights, eager
and without dropout. The yardstick is the same at the trial's precision, FP8 emulated.
"""

import contextlib
import dataclasses
import gc
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from te_bench.experiments import trial_model
from te_bench.experiments.checks import large, routes, update
from te_bench.experiments.checks.fp8_emulation import emulate
from te_bench.experiments.checks.function_modes import AsFused, Doubled, Kinks
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
from te_bench.experiments.checks.quantity import Quantity, judge, relative_error
from te_bench.experiments.checks.tolerances import FACTOR, FLOOR, NOISE_FACTOR
from te_bench.experiments.instruments import memory
from te_bench.experiments.measurement import Unsupported
from te_bench.experiments.problems import StepProblem, world_of
from te_bench.experiments.spec import OWN_ATTENTION, Trial
from te_bench.models import adopted, grouped_gemm
from te_bench.models import recipe as recipes
from te_bench.models.adopted import Adopted
from te_bench.models.checkpointing import blocks_of
from te_bench.training.step import CannotCapture, TrainStep, autocast

CHANGES = ("parts", "rival", "checkpointing")  # what is done to the model: the references are without
#: Targets of a batch, at least, in FP8: with 2 images 5 of 12 right steps of a ViT failed, with 8 none of 16. Of few targets
#: one rounding moves every gradient that follows, and the check takes rows to err independently.
FEWEST_TARGETS = 8
#: Targets of a batch, at least, in half precision where a function has a kink, and how many are enough however few numbers
#: the function is given: of few, the one or two that rounding moves across decide over a gradient. Of right steps of T5 with
#: 128 features at a ReLU 6 of 16 failed with 8 targets, one of 40 with 32 and with 48, none with 64 and 96; with 2048
#: features 2 of 40 with 4 and one with 8. In float32, and with GELU for ReLU, none of 96 did (a CPU, 2026-11-27).
FEWEST_AT_KINK, ENOUGH_AT_KINK = 16, 64
#: Numbers that a function with a kink is given, at least, where targets are fewer than enough: none of 104 steps failed.
NUMBERS_AT_KINK = 2**13
SWITCHED = frozenset(("topk", "max_pool2d"))  # which of several counts, and not how large one is
#: Of a loss in float32: sums of another order differ by less. Noise of less is left to the gradients to show.
SAME = 1e-6
DRAWS = 16  # pairs of passes of a model that draws random numbers: they may decide over the experts of few tokens
NO_KERNEL = "No available kernel"  # what scaled_dot_product_attention says


def begin(trial: Trial, inputs: Tensor, targets: Tensor) -> tuple[TrainStep, dict[str, Any]]:
    """The trial's step and its check, of fewer sequences or layers where float64 does not fit. Raises CheckFailed.

    Raises Unsupported for a kernel that the model's attention cannot have, and for a model whose loss is random.
    """
    checked = within_memory(trial)
    accumulate = trial_model.optim_of(trial).accumulate
    rows = len(inputs) // accumulate
    while True:
        try:
            step, check, own = _checked(checked, inputs[: rows * accumulate], targets[: rows * accumulate], len(inputs))
            break
        except CannotCapture as error:
            raise Unsupported(str(error)) from None
        except torch.OutOfMemoryError:
            if world_of(trial) > 1:  # the other ranks may have had room, and go on
                raise
            if rows > 1:
                rows //= 2
            elif (fewer := _shallower(checked)) is not None:
                checked = fewer
            else:
                raise
        _forget(trial)
    if not own or checked is not trial or rows * accumulate < len(inputs):
        del step
        _forget(trial)
        step = trial_model.step_of(trial)
        first_pass(trial, step, inputs, targets)
    return step, check


def _forget(trial: Trial) -> None:
    torch._dynamo.reset()
    memory.reset(trial.device)


def within_memory(trial: Trial) -> Trial:
    """The trial, or with as many layers as this GPU can check, where its model can have fewer."""
    source = StepProblem.of(trial).source
    assert source is not None
    if trial.device == "cpu" or (depth := adopted.depth_of(source)) is None or depth < 2:
        return trial
    spare = SHARE * torch.cuda.get_device_properties().total_memory
    most, least = (_parameters(source, layers) for layers in (depth, 1))
    if HELD * most <= spare or most == least:
        return trial
    layers = 1 + math.floor(max(0.0, spare / HELD - least) / ((most - least) / (depth - 1)))
    return trial.with_(layers=min(layers, depth))


def _shallower(trial: Trial) -> Trial | None:
    """The trial with a quarter of its layers; None where it has one, or its model cannot have fewer."""
    p = StepProblem.of(trial)
    assert p.source is not None
    layers = p.layers or adopted.depth_of(p.source) or 1
    return trial.with_(layers=layers // 4 or 1) if layers > 1 else None


def _parameters(source: Any, layers: int) -> int:
    try:
        with adopted.imagined(source):
            made = adopted.make(source, attention=OWN_ATTENTION, device="cpu", layers=layers)
    except adopted.UNIMAGINABLE:
        return 0
    return sum(p.numel() for p in made.module.parameters())


def _checked(trial: Trial, inputs: Tensor, targets: Tensor, rows: int) -> tuple[TrainStep, dict[str, Any], bool]:
    """(step, check, whether the step is the trial's own)."""
    if trial.recipe is not None and targets.numel() < FEWEST_TARGETS:
        few = f"a batch of {targets.numel()} targets is too small to tell rounding from a fault"
        raise Unsupported(f"fp8: {few}: take {FEWEST_TARGETS} or more")
    step = trial_model.step_of(trial)
    own = not _model(step).has_dropout
    if not own:
        trial = trial.with_(dropout=0.0)
        step = trial_model.step_of(trial)
    kinks = Kinks()
    with kinks:
        first_pass(trial, step, inputs, targets)
    _require_many_at_kinks(trial, kinks, targets.numel(), trial_model.optim_of(trial).accumulate)
    quantities = over_batches(
        _quantities(trial, step, inputs, targets, kinks),
        step,
        lambda number: _quantities(trial, step, *another_batch(trial, number, len(inputs)), kinks),
    )
    p = StepProblem.of(trial)
    words = ["math attention", "fp64", "same weights"]
    words += ["without dropout"] if not own else []
    words += [f"no row apart, for {' and '.join(sorted(kinks.found))} has a kink"] if kinks.found else []
    words += [] if p.layers is None else [f"both with {p.layers} of the model's layers"]
    words += [] if len(inputs) == rows else [f"both of {len(inputs)} of {rows} sequences"]
    check = update.checked(judge(", ".join(words), quantities), step, inputs, targets)
    return step, check, own


def _quantities(trial: Trial, step: TrainStep, inputs: Tensor, targets: Tensor, kinks: Kinks) -> list[Quantity]:
    """Loss and gradients of one batch beside float64's and the yardstick's."""
    settle(trial.recipe, lambda: step.gradients(inputs, targets, records=True))
    ours, taken = _pass(trial, step, inputs, targets, chooses="topk" in kinks.found)
    parts = large.ByParts()
    truth = _reference(trial, step, inputs, targets, "fp64", parts, taken)
    if parts.found:
        gc.collect()  # by parts, it refers to itself: its weights would stay beside the yardstick's
    library = _reference(trial, step, inputs, targets, trial.precision, parts, taken)
    step.parallel.of_all(None)  # wait for the slowest rank
    trial_model.allow_tf32(trial.precision)  # building the references set it for theirs
    # Of a gradient that is 0 but for rounding, as a key's bias has one, no two roundings agree.
    noise = [name for name, gradient in truth.of.items() if relative_error(library.of[name], gradient) > 1]
    told = truth._replace(of={name: gradient for name, gradient in truth.of.items() if name not in noise})
    if not told.of:
        raise Unsupported("no gradient of its loss is more than rounding: te-bench has nothing to check")
    rival = StepProblem.of(trial).against is not None
    slack = FACTOR if rival else 1.0  # a rival may round more coarsely than the recipe says
    how: dict[str, Any] = {"precision": trial.precision, "targets": targets.numel(), "slack": slack}
    found = compared(ours, library, told, **how, rows=not kinks.found)
    for name in noise:
        error = relative_error(ours.of.get(name), truth.of[name])
        found.append(Quantity(f"grad {name}, rounding alone", error, _noise(name, library, truth)))
    return found


def _pass(
    trial: Trial, step: TrainStep, inputs: Tensor, targets: Tensor, chooses: bool
) -> tuple[Gradients, routes.Taken]:
    """The step's gradients, and what topk chose in its passes: of a compiled step, which shows no functions, in eager ones.

    Nothing of a compiled step whose recipe counts passes: what its scales are would change.
    """
    taken, model = routes.Taken(), _model(step)
    with taken if chooses and trial.mode == "eager" else contextlib.nullcontext():
        ours = Gradients.of_step(step, inputs, targets)
    if chooses and trial.mode != "eager" and not _counts_passes(trial, step):
        batches = zip(inputs.chunk(step.optim.accumulate), targets.chunk(step.optim.accumulate), strict=True)
        with torch.no_grad(), taken, autocast(step.device, trial.precision), model.autocast():
            for batch in batches:
                model(*map(step.parallel.rows, batch))
    if chooses:
        taken.join(step.parallel)
    return ours, taken


def _counts_passes(trial: Trial, step: TrainStep) -> bool:
    return trial.recipe is not None and recipes.load(trial.recipe).make_state(1, step.device) is not None


def _require_many_at_kinks(trial: Trial, kinks: Kinks, targets: int, accumulate: int) -> None:
    """Raise Unsupported for a batch of which too few numbers meet a kink in half precision."""
    least = min((count for name, count in kinks.found.items() if name not in SWITCHED), default=None)
    if least is None or trial.precision not in ("bf16", "fp16"):
        return
    wanted = math.ceil(targets * NUMBERS_AT_KINK / max(1, least * accumulate))
    fewest = min(max(wanted, FEWEST_AT_KINK), ENOUGH_AT_KINK)
    if targets < fewest:
        where = " and ".join(sorted(kinks.found))
        raise Unsupported(
            f"{trial.precision}: a batch of {targets} targets is too small to tell rounding from a fault, for {where} has a "
            f"kink: take {fewest} or more, or fp32"
        )


def _noise(name: str, library: Gradients, truth: Gradients) -> float:
    """The largest relative error of a gradient that is 0 but for rounding.

    NOISE_FACTOR times the yardstick's, and a floor: a bias's gradient sums up what its weight's is made of, in float32, and
    fused attention leaves another remainder of that sum than attention written out.
    """
    gradient = truth.of[name]
    weight = truth.of.get(f"{name.removesuffix('bias')}weight") if name.endswith("bias") else None
    floor = 0.0 if weight is None else FLOOR["fp32"] * weight.norm().item() / max(gradient.norm().item(), 1e-30)
    return max(NOISE_FACTOR * relative_error(library.of[name], gradient), floor)


def _model(step: TrainStep) -> Adopted:
    assert isinstance(step.model, Adopted)
    return step.model


def first_pass(trial: Trial, step: TrainStep, inputs: Tensor, targets: Tensor) -> None:
    """An eager forward pass of a micro-batch, which counts FP8 GEMMs.

    Raises Unsupported where the model's attention has no such kernel, and where it calls none of its checkpointed blocks.
    """
    model, one = _model(step), max(1, len(inputs) // step.optim.accumulate)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with (
                autocast(step.device, trial.precision),
                model.autocast(),
                model.counted(),
                _checkpointing(trial, model),
            ):
                model(inputs[:one], targets[:one])
        except RuntimeError as error:
            if NO_KERNEL not in str(error):
                raise
            reasons = " ".join(filter(None, (_reason(str(warning.message)) for warning in said)))
            raise Unsupported(
                f"{trial.attention}: this model's attention cannot have that kernel: {reasons or 'PyTorch does not say why'}"
            ) from None
    if model.changed is not None:
        _require_fp8_of_rival(trial, model)
    elif trial.recipe is not None and not model.gemms:
        kept = () if model.conversion is None else model.conversion.kept
        why = "; ".join(dict.fromkeys(layer.reason for layer in kept if layer.parameters)) or "it has none"
        raise Unsupported(f"fp8: te.convert finds no Linear of it that FP8 could compute: {why}")


@contextlib.contextmanager
def _checkpointing(trial: Trial, model: Adopted) -> Iterator[None]:
    """Raise Unsupported where a pass goes by the parts of blocks that are checkpointed, and calls none of them."""
    p, called = StepProblem.of(trial), []
    blocks = [] if p.checkpointing is None else blocks_of(model)
    handles = [block.register_forward_pre_hook(lambda *_: called.append(1)) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if blocks and not called:
        raise Unsupported("checkpointing: the model calls the parts of its blocks, and no block, so that all is kept")


def _require_fp8_of_rival(trial: Trial, model: Adopted) -> None:
    """Raise Unsupported where the rival's FP8 GEMMs cannot take what the pass gave them, or there are none."""
    name, changed = StepProblem.of(trial).rival, model.changed
    assert changed is not None
    odd = [rows for rows in sorted(model.rows) if rows % changed.multiple]
    if odd:
        raise Unsupported(
            f"rival {name}: a Linear gets {odd[0]} rows, no multiple of {changed.multiple}; choose another --batch"
        )
    if trial.recipe is not None and not model.gemms:
        raise Unsupported(f"rival {name}: the model calls none of the Linears that it converts")


def _reason(warning: str) -> str:
    """What SDPA warns, without where in its source; nothing of its headings, one a kernel."""
    text = warning.partition(" (Triggered internally")[0].strip()
    return "" if text.endswith("because:") else text


def _reference(
    trial: Trial,
    step: TrainStep,
    inputs: Tensor,
    targets: Tensor,
    precision: str,
    parts: large.ByParts,
    taken: routes.Taken,
) -> Gradients:
    """Loss and gradients of the same module from the same weights: float64's, or the yardstick's at that precision.

    parts: computes what is large by parts; float64's, which comes first, finds out whether anything is. taken: what the
    step chose.
    """
    exact = precision == "fp64"
    as_it_is = {name: value for name, value in trial.problem.items() if name not in CHANGES}
    plain = dataclasses.replace(trial, attention=OWN_ATTENTION, recipe=None, precision="fp32" if exact else precision)
    plain = dataclasses.replace(plain, problem=as_it_is)
    model = trial_model.adopted_of(plain, kernel="math")
    converted = _model(step).converted
    turned = [f"{name}.weight" for name, before in converted.items() if before == "Conv1D"]
    _require_same_weights(model, step, turned)
    if exact:
        trial_model.allow_tf32("fp32")
        _require_same_loss(model, inputs, targets, parts)
        model.double()
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        targets = targets.double() if targets.is_floating_point() else targets
    elif trial.recipe is not None:
        _emulate(model, converted, recipes.load(trial.recipe))
        for head in _model(step).fp8_heads:
            scale = HEAD_SCALE * targets.numel()
            emulate(model.get_submodule(head), recipes.Float8CurrentScaling(), gradient_scale=scale)
    if not exact:
        for name in _model(step).norms:
            _in_half_precision(model.get_submodule(name))
    if parts.found:
        parts.recompute_blocks(model)
    arithmetic = "bf16" if precision == "fp8" else precision  # what FP8 rounds is emulated, under the same autocast
    rounded = not exact and trial.attention not in UNFUSED
    modes: list[TorchFunctionMode] = [routes.Again(taken)] if taken.calls else []
    modes += [grouped_gemm.Exact(), Doubled()] if exact else [AsFused()] if rounded else []
    modes += [grouped_gemm.InAutocast()] if not exact and _model(step).converted_experts else []
    with parts.beside(*modes):
        try:
            found = Gradients.written_out(model, step.optim, arithmetic, inputs, targets)
        except RuntimeError as error:
            if not exact or "dtype" not in str(error):
                raise
            kept = "keep every tensor as a parameter or a buffer, and make others in the dtype of the input"
            raise Unsupported(f"its pass in float64, which the check needs, raised: {error}; {kept}") from None
    if exact or trial.recipe is None:  # a Conv1D's weight lies the other way round, once it is converted
        found = found._replace(of={n: g.t() if n in turned else g for n, g in found.of.items()})
    return found


def _in_half_precision(norm: nn.Module) -> None:
    """Round what a norm reads and gives as te's does under autocast, where the model's own reads and gives float32."""

    def rounded(x: Any) -> Any:
        device = x.device.type
        return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x

    norm.register_forward_pre_hook(lambda _, arguments: tuple(map(rounded, arguments)))
    norm.register_forward_hook(lambda _, arguments, y: rounded(y))


def _require_same_weights(model: Adopted, step: TrainStep, turned: list[str]) -> None:
    weights = {
        name: step.parallel.whole(parameter.detach(), parameter) for name, parameter in step.model.named_parameters()
    }
    for name, parameter in model.named_parameters():
        other = weights[name].t() if name in turned else weights[name]
        if parameter.shape != other.shape or not torch.allclose(parameter, other, rtol=0, atol=0, equal_nan=True):
            raise Unsupported(
                f"{model.made.source.model} makes other weights each time ({name}): let torch.manual_seed decide over them"
            )


def _require_same_loss(model: Adopted, inputs: Tensor, targets: Tensor, parts: large.ByParts) -> None:
    device = inputs.device
    generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]

    def losses_of(attempt: int) -> list[float]:
        found, one = [], slice(attempt % len(inputs), attempt % len(inputs) + 1)
        for seed in (2 * attempt, 2 * attempt + 1):
            torch.manual_seed(seed)
            found.append(model(inputs[one], targets[one]).item())
        return found

    with torch.no_grad(), parts.beside(), model.autocast():  # in the model's own precision: half of float64's time
        torch.manual_seed(1)
        unused = generator.get_state()
        losses, attempt = losses_of(0), 1
        drawn = not torch.equal(generator.get_state(), unused)
        while drawn and _same(*losses) and attempt < DRAWS:
            losses, attempt = losses_of(attempt), attempt + 1
    if not _same(*losses):
        raise Unsupported(
            f"one batch has the loss {losses[0]:.6g} and then {losses[1]:.6g}: the model has something random that te-bench "
            "cannot turn off (dropout with a rate in the code, noise), which no check can follow; take it out"
        )


def _same(a: float, b: float) -> bool:
    return not abs(a - b) > SAME * abs(a)


def _emulate(model: Adopted, converted: dict[str, str], recipe: recipes.Recipe) -> None:
    """Emulate FP8 in what te.convert takes; a Conv1D becomes the Linear that it is."""
    for name, before in converted.items():
        if before == "Conv1D":
            old: Any = model.get_submodule(name)
            new = nn.Linear(old.weight.shape[0], old.weight.shape[1], device=old.weight.device)
            new.weight, new.bias = nn.Parameter(old.weight.detach().t().contiguous()), old.bias
            model.set_submodule(name, new)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    emulate(model, recipe, leave=[name for name in linears if name not in converted])
