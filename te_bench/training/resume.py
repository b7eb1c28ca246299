"""Checkpoints that a training goes on from, over as many ranks as it then has: torch.distributed.checkpoint of a TrainStep.

    resume.save(step, Path("step-100"), number=100)    # every rank calls, and writes its part
    number = resume.load(step, Path("step-100"))       # in any number of ranks, under any mode of parallelism

It holds weights, moments, the state of FP8 recipes (scales and amax histories), the learning rate, fp16's gradient
scaler, the number of steps and every rank's random state, all as tensors by the model's own names.
te_bench.training.checkpoints writes the weights alone.
"""

import contextlib
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from te_bench.models.modules.fp8_module import PREFIX, Fp8Module
from te_bench.training.step import TrainStep

#: Exceptions of pickle for a truncated or damaged metadata file.
UNREADABLE = (
    *(pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, ImportError, LookupError, MemoryError),
    *(RuntimeError, TypeError, ValueError),
)
METADATA = ".metadata"  # torch.distributed.checkpoint writes it last, so a folder that has it is complete
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
MODEL, OPTIMIZER, SCALER, RANDOM = "model.", "optimizer.", "scaler.", "random."


def save(step: TrainStep, folder: Path, number: int) -> None:
    """Write the state of `step` after `number` steps to a folder that all ranks see.

    Raises ValueError if the folder has a checkpoint: a training killed while writing must not lose the one before.
    Raises OSError if a file cannot be written.
    """
    if (folder / METADATA).exists():
        raise ValueError(f"{folder} has a checkpoint already: give each a folder of its own, as step-{number}")
    state = _state(step)
    state["number"].fill_(number)
    # A backward pass's amaxes differ between ranks until the next forward pass ends; the checkpoint keeps one rank's.
    gathered = [name for name in state if _is_fp8(name) and "amax" in name]
    if gathered:
        largest = step.parallel.largest(torch.cat([state[name].flatten() for name in gathered]))
        for name, part in zip(gathered, largest.split([state[name].numel() for name in gathered]), strict=True):
            state[name] = part.view_as(state[name])
    if step.parallel.rank == 0:
        state["seed"] = torch.tensor(torch.initial_seed() % 2**40)
    with _of_files(f"cannot write the checkpoint {folder}"):
        state_dict_saver.save(state, checkpoint_id=folder, no_dist=step.parallel.world == 1)


def load(step: TrainStep, folder: Path, *, begin_fp8: bool = False) -> int:
    """Load a checkpoint into `step`, in place, and return the number of steps it had made.

    begin_fp8: FP8 training begins here. The checkpoint may come from a bf16 step, and scales begin as in a new model.
    Otherwise a checkpoint without scales is refused if the step's recipe keeps some, unless it is of zero steps.

    The step must have the saved one's model, recipe and optimizer. The number of ranks and `parallel` may differ. A
    rank with a saved random state continues it; any other begins a new one. Load only what you trust: torch unpickles
    the metadata. Raises ValueError, before anything changes, for a folder without a checkpoint and for another model or
    optimizer. Raises OSError for damaged or missing files.
    """
    saved = _contents(folder)
    state = _state(step, saved)
    if begin_fp8:
        saved, state = ({name: of[name] for name in of if not _is_fp8(name)} for of in (saved, state))
    elif _keeps_scales(step) and not any(map(_is_fp8, saved)):
        made = {"number": state["number"]}
        with _of_files(f"cannot read the checkpoint {folder}, which may be damaged"):
            state_dict_loader.load(made, checkpoint_id=folder, no_dist=step.parallel.world == 1)
        if made["number"].item():
            raise ValueError(
                f"{folder} has no scales of FP8, as one of a step in bf16, and this step's recipe keeps some: for FP8 to "
                "begin here, with scales as those of a new model, give begin_fp8=True"
            )
    state["seed"] = torch.zeros((), dtype=torch.int64)
    mine = {name: state.pop(name) for name in [name for name in state if name.startswith(RANDOM)]}
    _require_same(state, saved, folder)
    goes_on = mine.keys() <= saved.keys()
    state |= mine if goes_on else {}
    scales = {
        name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in saved.items() if _is_fp8(name)
    }
    state |= scales
    with _of_files(f"cannot read the checkpoint {folder}, which may be damaged"):
        state_dict_loader.load(state, checkpoint_id=folder, no_dist=step.parallel.world == 1)
    # Weights and moments are loaded in place, as a captured graph needs. The rest are copies, handed over below.
    step.model.load_state_dict({name.removeprefix(MODEL): scale for name, scale in scales.items()}, strict=False)
    if begin_fp8:
        for module in step.model.modules():
            if isinstance(module, Fp8Module):
                module.begin_recipe_state()
    if step.scaler.is_enabled():
        form = step.scaler.state_dict()
        step.scaler.load_state_dict({name: type(form[name])(state[f"{SCALER}{name}"].item()) for name in form})
    step.set_rate(state["rate"].item())
    number = int(state["number"].item())
    if goes_on:
        torch.set_rng_state(mine[_random(step, "cpu")])
        if step.device.type == "cuda":
            torch.cuda.set_rng_state(mine[_random(step, "cuda")], step.device)
    else:
        torch.manual_seed(step.parallel.seed((int(state["seed"].item()) + number) % 2**40))
    return number


@contextlib.contextmanager
def _of_files(what: str) -> Iterator[None]:
    """Turn torch's CheckpointException into OSError: it is no Exception, so `except Exception` would not catch it."""
    try:
        yield
    except CheckpointException as error:
        causes = [f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()]
        raise OSError(f"{what}: {causes[0]}") from error


def _state(step: TrainStep, saved: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return {name: tensor}, this rank's part of a checkpoint; weights and moments are the step's own memory.

    saved: the checkpoint's contents. It has no moments of a parameter that never had a gradient.
    """
    model: dict[str, Any] = get_model_state_dict(step.model)
    plain, parameters = step.parallel.plain, dict(step.model.named_parameters(remove_duplicate=False))
    state: dict[str, Any] = {f"{MODEL}{name}": plain(tensor, parameters.get(name)) for name, tensor in model.items()}
    for name, tensor in _moments(step, saved).items():
        of = parameters.get(name.removeprefix("state.").rpartition(".")[0])
        state[f"{OPTIMIZER}{name}"] = plain(tensor, of)
    state["rate"] = torch.tensor(float(step.optimizer.param_groups[0]["lr"]), dtype=torch.float64)
    state["number"] = torch.zeros((), dtype=torch.int64)
    if step.scaler.is_enabled():
        values = step.scaler.state_dict().items()
        state |= {f"{SCALER}{name}": torch.tensor(value, dtype=torch.float64) for name, value in values}
    state[_random(step, "cpu")] = torch.get_rng_state()
    if step.device.type == "cuda":
        state[_random(step, "cuda")] = torch.cuda.get_rng_state(step.device)
    return state


def _random(step: TrainStep, device: str) -> str:
    return f"{RANDOM}{step.parallel.draws}.{device}"


def _moments(step: TrainStep, saved: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """Return {"state.PARAMETER.exp_avg": tensor, ...}. Settings such as the rate are left to whoever makes the step."""
    if step.table is None:
        own = step.own_optimizer
        begun = bool(own.state)
        flat: Any = get_optimizer_state_dict(step.model, own, options=FLAT)
        if not begun:  # torch then creates moments by an empty update, which must count as none
            for state in own.state.values():
                state["step"].zero_()
            if saved is not None:
                flat = _without_moments(step, own, flat, saved)
        return {name: value for name, value in flat.items() if name.startswith("state.")}
    names = {parameter: name for name, parameter in step.model.named_parameters()}
    return {
        f"state.{names.get(of, of)}.{kind}": value
        for of, values in step.table.state.items()
        for kind, value in values.items()
    }


def _without_moments(
    step: TrainStep, optimizer: torch.optim.Optimizer, flat: dict[str, Any], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `flat` without parameters that have no moments in `saved`; also drops their states from `optimizer`."""
    there = {name.rpartition(".")[0] for name in saved}
    for name, parameter in step.model.named_parameters():
        if f"{OPTIMIZER}state.{name}" not in there:
            optimizer.state.pop(parameter, None)
            flat = {key: value for key, value in flat.items() if key.rpartition(".")[0] != f"state.{name}"}
    return flat


def _contents(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return a checkpoint's contents. Raises ValueError if there is none, OSError if its metadata is damaged."""
    if not (folder / METADATA).exists():
        raise ValueError(
            f"{folder} has no checkpoint of te_bench.training.resume, or one that was not written to its end"
        )
    try:
        stored: Any = FileSystemReader(folder).read_metadata().state_dict_metadata
    except UNREADABLE as error:
        raise OSError(f"cannot read the checkpoint {folder}, which may be damaged: {METADATA}: {error}") from error
    if "seed" not in stored or not all(isinstance(each, TensorStorageMetadata) for each in stored.values()):
        raise ValueError(f"{folder} is a checkpoint of another program: load it by torch.distributed.checkpoint")
    return dict(stored)


def _require_same(state: dict[str, Any], saved: dict[str, TensorStorageMetadata], folder: Path) -> None:
    """Raise ValueError for a checkpoint of another step. A step that has not run may lack scales."""
    lacking = sorted(state.keys() - saved.keys())
    others = sorted(n for n in saved.keys() - state.keys() if n.startswith((MODEL, SCALER)) and not _is_fp8(n))
    if lacking or others:
        name, whose = (lacking[0], "no") if lacking else (others[0], "a")
        raise ValueError(f"{folder} has {whose} {name}: it is of another model, precision or optimizer than this step")
    for name, tensor in state.items():
        if tensor.size() != saved[name].size:
            sizes = f"{tuple(saved[name].size)}, this step's {tuple(tensor.size())}"
            raise ValueError(f"{folder}: its {name} is {sizes}: it is of another model, or another history's length")
        if tensor.dtype != saved[name].properties.dtype:
            dtypes = f"{saved[name].properties.dtype}, this step's {tensor.dtype}"
            raise ValueError(f"{folder}: its {name} is {dtypes}: make the step with those weights and states")


def _keeps_scales(step: TrainStep) -> bool:
    recipe = getattr(step.model, "recipe", None)
    modules: Any = step.model.modules()
    return (
        step.precision == "fp8"
        and recipe is not None
        and any(isinstance(module, Fp8Module) for module in modules)
        and recipe.make_state(1, torch.device("cpu")) is not None
    )


def _is_fp8(name: str) -> bool:
    return name.startswith(MODEL) and name.rpartition(".")[2].startswith(PREFIX)
