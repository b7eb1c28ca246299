"""The references of a user's step: the same module in float64, and at the trial's precision with FP8 emulated."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from te_bench.experiments import trial_model
from te_bench.experiments.checks import constants, large, routes
from te_bench.experiments.checks.fp8_emulation import emulate
from te_bench.experiments.checks.function_modes import AsFused, Doubled
from te_bench.experiments.checks.gradients import HEAD_SCALE, UNFUSED, Gradients
from te_bench.experiments.checks.tolerances import EPSILON
from te_bench.experiments.measurement import Unsupported
from te_bench.experiments.spec import OWN_ATTENTION, Trial
from te_bench.models import grouped_gemm
from te_bench.models import recipe as recipes
from te_bench.models.adopted import PROBE_BATCH, Adopted
from te_bench.models.families import IGNORED
from te_bench.training.parallel import SINGLE
from te_bench.training.step import TrainStep
from te_bench.training.undisturbed import buffers_kept

CHANGES = ("parts", "head", "rival", "checkpointing")  # changes of the model that the references go without
#: Relative difference of two float32 losses that are one: sums in another order differ by less; gradients show less noise.
SAME = 1e-6
#: Relative distance of neighbouring numbers in the format that GEMMs multiply.
STEP = EPSILON | {"fp8": 2.0**-3}
DRAWS = 16  # pairs of passes of a model that draws: the numbers may decide over the experts of few tokens


def model_of(step: TrainStep) -> Adopted:
    """Return the user's model of the step."""
    assert isinstance(step.model, Adopted)
    return step.model


def turned_of(step: TrainStep) -> list[str]:
    """Return the names of weights that lie the other way round: those of converted Conv1Ds."""
    return [f"{name}.weight" for name, before in model_of(step).converted.items() if before == "Conv1D"]


def reference(
    trial: Trial,
    step: TrainStep,
    inputs: Tensor,
    targets: Tensor,
    precision: str,
    parts: large.ByParts,
    taken: routes.Taken,
    moved: int = 0,
) -> Gradients:
    """Return loss and gradients of the same module from the same weights, in float64 or as the yardstick at `precision`.

    The step's weights that begin alike are moved (checks.constants), unless it is over several ranks.
    parts: computes what is large by parts. float64 comes first and finds out whether anything is. taken: what the step
    chose. moved: unless 0, every weight is moved by less than one step of the arithmetic, as this number draws, which
    rounds all afresh.
    """
    exact, model = precision == "fp64", _plain(trial)
    converted, turned = model_of(step).converted, turned_of(step)
    if step.parallel is SINGLE:
        constants.move(model, trial.seed, leave=turned)
    _require_same_weights(model, step, turned)
    if moved:
        _move(model, STEP[trial.precision], seed=trial.seed << 8 | moved)
    if exact:
        trial_model.allow_tf32("fp32")
        if not moved:
            _require_same_loss(model, inputs, targets, parts)
        model.double()
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        targets = targets.double() if targets.is_floating_point() else targets
    elif trial.recipe is not None:
        _emulate(model, converted, recipes.load(trial.recipe), trial.seed)
        for head in model_of(step).fp8_heads:
            scale = HEAD_SCALE * counted(targets)
            in_fp8 = recipes.Float8CurrentScaling()
            emulate(model.get_submodule(head), in_fp8, seed=trial.seed, gradient_scale=scale)
    if not exact:
        for name in model_of(step).norms:
            _in_half_precision(model.get_submodule(name))
    if parts.found:
        parts.recompute_blocks(model)
    arithmetic = "bf16" if precision == "fp8" else precision  # under FP8's autocast, with the rounding emulated
    rounded = not exact and trial.attention not in UNFUSED
    modes: list[TorchFunctionMode] = [routes.Again(taken)] if taken.calls else []
    modes += [grouped_gemm.Exact(), Doubled()] if exact else [AsFused()] if rounded else []
    modes += [grouped_gemm.InAutocast()] if not exact and model_of(step).converted_experts else []
    with parts.beside(*modes):
        try:
            found = Gradients.written_out(model, step.optim, arithmetic, inputs, targets)
        except RuntimeError as error:
            if not exact or "dtype" not in str(error):
                raise
            kept = "keep every tensor as a parameter or a buffer, and make others in the dtype of the input"
            raise Unsupported(f"its pass in float64, which the check needs, raised: {error}; {kept}") from None
    if exact or trial.recipe is None:  # a converted Conv1D's weight lies the other way round
        found = found._replace(of={n: g.t() if n in turned else g for n, g in found.of.items()})
    return found


def _plain(trial: Trial) -> Adopted:
    """Return the module as the user's code makes it."""
    as_it_is = {name: value for name, value in trial.problem.items() if name not in CHANGES}
    plain = dataclasses.replace(trial, attention=OWN_ATTENTION, recipe=None, problem=as_it_is)
    return trial_model.adopted_of(plain, kernel="math")


def counted(targets: Tensor) -> int:
    """Return how many targets count."""
    return int((targets != IGNORED).sum())


def draws(trial: Trial, inputs: Tensor, targets: Tensor) -> bool:
    """Whether a forward pass of the module finds another loss by another seed."""
    model, losses = _plain(trial), list[float]()
    with torch.no_grad(), model.autocast():
        for seed in (1, 2):
            torch.manual_seed(seed)
            with buffers_kept(model):
                losses.append(model(inputs[:PROBE_BATCH], targets[:PROBE_BATCH]).item())
    return not _same(*losses)


def _in_half_precision(norm: nn.Module) -> None:
    """Round a norm's input and output as te's norms do under autocast, where the model's own are float32."""

    def rounded(x: Any) -> Any:
        device = x.device.type
        return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x

    norm.register_forward_pre_hook(lambda _, arguments: tuple(map(rounded, arguments)))
    norm.register_forward_hook(lambda _, arguments, y: rounded(y))


@torch.no_grad()
def _move(model: nn.Module, share: float, seed: int) -> None:
    """Move every weight by up to that share of it."""
    for number, weight in enumerate(model.parameters()):
        generator = torch.Generator(weight.device).manual_seed(seed << 16 | number)
        weight.mul_(1 + share * (2 * torch.rand(weight.shape, generator=generator, device=weight.device) - 1))


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
        first = attempt % max(1, len(inputs) - PROBE_BATCH + 1)
        found, few = [], slice(first, first + PROBE_BATCH)
        for seed in (2 * attempt, 2 * attempt + 1):
            torch.manual_seed(seed)
            with buffers_kept(model):
                found.append(model(inputs[few], targets[few]).item())
        return found

    with (
        torch.no_grad(),
        parts.beside(),
        model.autocast(),
    ):  # in the model's own precision, which takes half of float64's time
        torch.manual_seed(1)
        unused = generator.get_state()
        losses, attempt = losses_of(0), 1
        drawn = not torch.equal(generator.get_state(), unused)
        while drawn and _same(*losses) and attempt < DRAWS:
            losses, attempt = losses_of(attempt), attempt + 1
    if not _same(*losses):
        random = (
            "the model has something random that te-bench cannot turn off (dropout with a rate in the code, noise), "
            "which no check can follow; take it out"
        )
        changing = (
            "a pass changes what the next one computes (a counter, a list), or draws by a generator that is not torch's; "
            "keep it in a buffer, or take it out"
        )
        said = f"one batch has the loss {losses[0]:.6g} and then {losses[1]:.6g}"
        raise Unsupported(f"{said}: {random if drawn else changing}")


def _same(a: float, b: float) -> bool:
    return not abs(a - b) > SAME * abs(a)


def _emulate(model: Adopted, converted: dict[str, str], recipe: recipes.Recipe, seed: int) -> None:
    """Emulate FP8 in the layers that te.convert takes; a Conv1D becomes a Linear."""
    for name, before in converted.items():
        if before == "Conv1D":
            old: Any = model.get_submodule(name)
            new = nn.Linear(old.weight.shape[0], old.weight.shape[1], device=old.weight.device)
            new.weight, new.bias = nn.Parameter(old.weight.detach().t().contiguous()), old.bias
            model.set_submodule(name, new)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    emulate(model, recipe, leave=[name for name in linears if name not in converted], seed=seed)
