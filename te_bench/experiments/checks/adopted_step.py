"""The check of a user's training step: loss and gradients against the same module in float64, by PyTorch's math attention.

te-bench knows nothing of the module: what it computes is what its own code does in float64, from the same weights, eager
and without dropout. The yardstick is the same at the trial's precision, FP8 emulated.
"""

import contextlib
import gc
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from te_bench.experiments import trial_model
from te_bench.experiments.checks import constants, large, rounding, routes, seeds, update
from te_bench.experiments.checks.adopted_reference import counted, draws, model_of, reference, turned_of
from te_bench.experiments.checks.function_modes import Kinks
from te_bench.experiments.checks.gradients import (
    EMULATION,
    HELD,
    SHARE,
    Gradients,
    another_batch,
    compared,
    over_batches,
    settle,
)
from te_bench.experiments.checks.quantity import Quantity, judge, relative_error
from te_bench.experiments.checks.tolerances import FACTOR, FLOOR, NOISE_FACTOR
from te_bench.experiments.instruments import memory
from te_bench.experiments.measurement import CheckFailed, Unsupported
from te_bench.experiments.problems import StepProblem, world_of
from te_bench.experiments.spec import OWN_ATTENTION, Trial
from te_bench.models import adopted
from te_bench.models import recipe as recipes
from te_bench.models.adopted import PROBE_BATCH, Adopted
from te_bench.models.checkpointing import blocks_of
from te_bench.models.families import IGNORED
from te_bench.training import compiled_blocks
from te_bench.training.parallel import SINGLE
from te_bench.training.step import CannotCapture, TrainStep, autocast
from te_bench.training.undisturbed import buffers_kept

#: Fewest targets of a batch in FP8: with 2 images 5 of 12 right steps of a ViT failed, with 8 none of 16. With few targets
#: one rounding moves every gradient after it, and the check takes rows to err independently.
FEWEST_TARGETS = 8
#: Fewest targets of a batch in half precision if a function has a kink, and how many are enough however few numbers the
#: function gets: among few, the one or two that rounding moves across decide over a gradient. Of right steps of T5 with 128
#: features at a ReLU 6 of 16 failed with 8 targets, one of 40 with 32 and with 48, none with 64 and 96; with 2048 features
#: 2 of 40 with 4 and one with 8. In float32, and with GELU for ReLU, none of 96 failed (a CPU, 2026-11-27).
FEWEST_AT_KINK, ENOUGH_AT_KINK = 16, 64
#: Fewest numbers that a function with a kink gets if targets are fewer than enough: none of 104 steps failed.
NUMBERS_AT_KINK = 2**13
SWITCHED = frozenset(("topk", "max_pool2d"))  # they choose among values, and do not bend one
#: Passes of the yardstick if the first one does not excuse an error: of a gradient of one number, or of many that err as
#: one, a single pass says little about how far rounding moves it. Of 12 such errors the limit of rounding.limit is exceeded
#: by one more, if they are normal, twice in 10,000.
PASSES = 12
NARROW = 30.0  # times its limit: what errs by more, as a whole, is no rounding that one pass happened not to show
NO_KERNEL = "No available kernel"  # what scaled_dot_product_attention says


def begin(trial: Trial, inputs: Tensor, targets: Tensor) -> tuple[TrainStep, dict[str, Any]]:
    """Return the trial's step and its check, of fewer sequences or layers if float64 does not fit. Raises CheckFailed.

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
        if not own and step.parallel is SINGLE:
            _require_masks(trial, step, inputs, targets)
    return step, check


def _require_masks(trial: Trial, step: TrainStep, inputs: Tensor, targets: Tensor) -> None:
    """Raise CheckFailed for a step without the dropout that the module draws. It may have a rate that no pass uses."""
    try:
        seeds.require_masks(step, trial.seed, inputs, targets)
    except CheckFailed:
        if draws(trial, inputs, targets):
            raise


def _forget(trial: Trial) -> None:
    torch._dynamo.reset()
    memory.reset(trial.device)


def within_memory(trial: Trial) -> Trial:
    """Return the trial, with as many layers as this GPU can check if its model can have fewer."""
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
    """Return the trial with a quarter of its layers; None if it has one, or its model cannot have fewer."""
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
    if trial.recipe is not None and targets.numel() < FEWEST_TARGETS:
        few = f"a batch of {targets.numel()} targets is too small to tell rounding from a fault"
        raise Unsupported(f"fp8: {few}: take {FEWEST_TARGETS} or more")
    step = trial_model.step_of(trial)
    own = not model_of(step).has_dropout
    if not own:
        trial = trial.with_(dropout=0.0)
        step = trial_model.step_of(trial)
    kinks = Kinks()
    with kinks, buffers_kept(step.model):
        first_pass(trial, step, inputs, targets)
    _require_many_at_kinks(trial, kinks, targets.numel(), trial_model.optim_of(trial).accumulate)
    _settle(trial, step, inputs, targets)  # what is timed goes on with these scales
    with constants.moved(step, trial.seed, leave=turned_of(step)):
        quantities = over_batches(
            _quantities(trial, step, inputs, targets, kinks),
            step,
            lambda number: _quantities(trial, step, *another_batch(trial, number, len(inputs)), kinks),
        )
    p = StepProblem.of(trial)
    words = ["math attention", "fp64", "same weights"]
    words += ["without dropout"] if not own else []
    words += ["a quarter of the targets ignored"] if _partly_ignored(step, targets) is not targets else []
    words += [f"no row apart, for {' and '.join(sorted(kinks.found))} has a kink"] if kinks.found else []
    words += [] if p.layers is None else [f"both with {p.layers} of the model's layers"]
    words += [] if len(inputs) == rows else [f"both of {len(inputs)} of {rows} sequences"]
    check = update.checked(judge(", ".join(words), quantities), step, inputs, targets)
    return step, check, own


def _partly_ignored(step: TrainStep, targets: Tensor) -> Tensor:
    """Return the targets with a quarter of each sequence's ignored, where the model allows it and enough others are left.

    Not the same quarter of every sequence, but as many of each: micro-batches, which average their own, weigh the same.
    """
    length = targets.shape[-1]
    few = length // 4
    of_tokens = targets.dim() == 2 and not targets.is_floating_point()
    legal = model_of(step).made.ignores and of_tokens and step.parallel is SINGLE
    whole = counted(targets) == targets.numel()  # the user's --inputs may ignore some already
    if not legal or not whole or few == 0 or targets.numel() - few * len(targets) < ENOUGH_AT_KINK:
        return targets
    begins = few * torch.arange(len(targets), device=targets.device)[:, None]
    places = torch.arange(length, device=targets.device)
    return targets.masked_fill((places - begins) % length < few, IGNORED)


def _settle(trial: Trial, step: TrainStep, inputs: Tensor, targets: Tensor) -> None:
    """Settle the scales by passes that each begin with the buffers that the references have."""

    def once() -> None:
        with buffers_kept(step.model):
            step.gradients(inputs, targets, records=True)

    settle(trial.recipe, once)


def _quantities(trial: Trial, step: TrainStep, inputs: Tensor, targets: Tensor, kinks: Kinks) -> list[Quantity]:
    """Compare loss and gradients of one batch with float64's, by the limits that the yardstick's errors set."""
    targets = _partly_ignored(step, targets)
    _settle(trial, step, inputs, targets)
    ours, taken = _pass(trial, step, inputs, targets, chooses="topk" in kinks.found)
    parts = large.ByParts()
    truth = reference(trial, step, inputs, targets, "fp64", parts, taken)
    if parts.found:
        gc.collect()  # a model by parts refers to itself: its weights would stay beside the yardstick's
    library = reference(trial, step, inputs, targets, trial.precision, parts, taken)
    step.parallel.of_all(None)  # wait for the slowest rank
    found = _held(trial, counted(targets), ours, library, truth, kinks)
    wrong = [name for name in truth.of if any(q.wrong and q.name.split(", ")[0] == f"grad {name}" for q in found)]
    # A single pass tells no limit of one number's scale: the norm of the error says whether it may be rounding.
    norms = [q for q in found if q.wrong and not q.name.endswith((", scale", ", worst row"))]
    narrow = all(q.error < NARROW * q.limit for q in norms) and len(wrong) <= len(truth.of) / 2
    if narrow and any(q.wrong and q.name != EMULATION for q in found) and step.parallel is SINGLE:
        more = []
        for moved in range(1, PASSES):
            if parts.found or trial.recipe is not None:  # references by parts, or with FP8, refer to themselves
                gc.collect()
            rounded, exact = (
                reference(trial, step, inputs, targets, precision, parts, taken, moved)
                for precision in (trial.precision, "fp64")
            )
            more.append(truth.with_errors(rounded, exact, wrong))
        found = _held(trial, counted(targets), ours, library, truth, kinks, more)
    trial_model.allow_tf32(trial.precision)  # the references set it for themselves
    return found


def _held(
    trial: Trial,
    targets: int,
    ours: Gradients,
    library: Gradients,
    truth: Gradients,
    kinks: Kinks,
    more: Sequence[Gradients] = (),
) -> list[Quantity]:
    """Compare a batch's loss and gradients by one yardstick or by more, which need not have every gradient."""
    errors = {
        name: [relative_error(each.of[name], gradient) for each in (library, *more) if name in each.of]
        for name, gradient in truth.of.items()
    }
    # No two roundings agree on a gradient that is 0 but for rounding, such as a key's bias's.
    noise = [name for name in truth.of if rounding.root_mean_square(errors[name]) > 1]
    told = truth._replace(of={name: gradient for name, gradient in truth.of.items() if name not in noise})
    if not told.of:
        raise Unsupported("no gradient of its loss is more than rounding: te-bench has nothing to check")
    rival = StepProblem.of(trial).against is not None
    slack = FACTOR if rival else 1.0  # a rival may round more coarsely than the recipe says
    how: dict[str, Any] = {"precision": trial.precision, "targets": targets, "slack": slack}
    found = compared(ours, library, told, **how, rows=not kinks.found, more=more)
    for name in noise:
        error = relative_error(ours.of.get(name), truth.of[name])
        found.append(Quantity(f"grad {name}, rounding alone", error, _noise(name, errors[name], truth)))
    return found


def _pass(
    trial: Trial, step: TrainStep, inputs: Tensor, targets: Tensor, chooses: bool
) -> tuple[Gradients, routes.Taken]:
    """Return the step's gradients, and what topk chose in its passes.

    A compiled step shows no functions, so eager passes show them. Nothing is looked at if the recipe counts passes, for
    another pass would change its scales.
    """
    taken, model = routes.Taken(), model_of(step)
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


def _noise(name: str, errors: list[float], truth: Gradients) -> float:
    """Return the largest relative error of a gradient that is 0 but for rounding.

    It is NOISE_FACTOR times the yardstick's, and a floor: a bias's gradient sums up in float32 what its weight's is
    made of, and fused attention leaves another remainder of that sum than attention written out.
    """
    gradient = truth.of[name]
    weight = truth.of.get(f"{name.removesuffix('bias')}weight") if name.endswith("bias") else None
    floor = 0.0 if weight is None else FLOOR["fp32"] * weight.norm().item() / max(gradient.norm().item(), 1e-30)
    return max(NOISE_FACTOR * rounding.root_mean_square(errors), rounding.limit(errors), floor)


def first_pass(trial: Trial, step: TrainStep, inputs: Tensor, targets: Tensor) -> None:
    """Run an eager forward pass of a micro-batch, which counts FP8 GEMMs.

    Raises Unsupported if the model's attention has no such kernel, if the pass calls none of the blocks that are
    checkpointed or compiled, and if a micro-batch has fewer sequences than the model can pass.
    """
    model, one = model_of(step), max(1, len(inputs) // step.optim.accumulate)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with (
                autocast(step.device, trial.precision),
                model.autocast(),
                model.counted(),
                _called_blocks(trial, model),
            ):
                model(inputs[:one], targets[:one])
        except RuntimeError as error:
            if NO_KERNEL not in str(error):
                _require_enough(trial, one, error)
                raise
            reasons = " ".join(filter(None, (_reason(str(warning.message)) for warning in said)))
            raise Unsupported(
                f"{trial.attention}: this model's attention cannot have that kernel: {reasons or 'PyTorch does not say why'}"
            ) from None
        except ValueError as error:  # a batch norm's
            _require_enough(trial, one, error)
            raise
    if model.changed is not None:
        _require_fp8_of_rival(trial, model)
    elif trial.recipe is not None and not model.gemms:
        kept = () if model.conversion is None else model.conversion.kept
        why = "; ".join(dict.fromkeys(layer.reason for layer in kept if layer.parameters)) or "it has none"
        raise Unsupported(f"fp8: te.convert finds no Linear of it that FP8 could compute: {why}")


def _require_enough(trial: Trial, rows: int, error: Exception) -> None:
    """Raise Unsupported if a pass of so few sequences failed, for planning has passed PROBE_BATCH."""
    if rows >= PROBE_BATCH:
        return
    p = StepProblem.of(trial)
    assert p.source is not None
    way = f"take --batch {PROBE_BATCH} or more"
    if p.batch != 1:
        way = "the check's float64 has memory for no more: take fewer --tokens or a smaller model"
    raise Unsupported(
        f"{p.source.model}: a pass of one sequence raised {type(error).__name__}: {error}; {way}"
    ) from error


@contextlib.contextmanager
def _called_blocks(trial: Trial, model: Adopted) -> Iterator[None]:
    """Raise Unsupported if a pass calls the parts of checkpointed or compiled blocks, and none of the blocks."""
    called: list[int] = []
    needs = "checkpointing" if StepProblem.of(trial).checkpointing is not None else None
    needs = trial.mode if trial.mode == compiled_blocks.MODE else needs
    blocks = blocks_of(model) if needs else []
    handles = [block.register_forward_pre_hook(lambda *_: called.append(1)) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if blocks and not called:
        raise Unsupported(f"{needs}: the model calls the parts of its blocks, and no block")


def _require_fp8_of_rival(trial: Trial, model: Adopted) -> None:
    """Raise Unsupported if the rival's FP8 GEMMs cannot take what the pass gave them, or there are none."""
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
    """Return what SDPA warns, without the place in its source; nothing for the heading of each kernel."""
    text = warning.partition(" (Triggered internally")[0].strip()
    return "" if text.endswith("because:") else text
