"""Weights in the Hugging Face layout: a folder with config.json and safetensors, one file or shards under an index.

    weights.save(model, Path("mine"))
    model = weights.load(Path("mine"), attention="cudnn", padded_vocab_size=50304)

transformers' from_pretrained and save_pretrained read and write the same folder; te_bench.training.layouts says how each
family lies in it. Nothing is unpickled.
Source: transformers, modeling_utils.py; safetensors' format.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from te_bench.models import cost, decoder
from te_bench.models.configs import DecoderConfig
from te_bench.models.decoder import Decoder
from te_bench.training import layouts
from te_bench.training.durable import replacing
from te_bench.training.layouts import Layout, Piece, whole

Pieces = Callable[[DecoderConfig, str], list[Piece]]  # the pieces of a parameter, by its name

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


class Place(NamedTuple):
    """The rows of a parameter, without padding, that a tensor of a file fills. `shape` is the tensor's.

    again: it is a tied head, which repeats the token embedding.
    """

    parameter: str
    rows: slice
    shape: list[int]
    transposed: bool
    again: bool


def save(model: Decoder, folder: Path, *, shard_bytes: int = 5 * 10**9) -> None:
    """Write the unpadded model to `folder`, with zero biases where a GPT-2 has none, replacing a model that is there.

    It is one file or, above `shard_bytes` of tensors, shards of at most that size and an index (a larger tensor has its
    own). The folder never mixes a config.json with another model's weights, nor holds half of the new ones. Raises
    ValueError for a model that its family's layout cannot describe.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes is {shard_bytes}: give 1 or more")
    layout = layouts.load(model.config.family)
    texts = {CONFIG: _to_json(layout.describe(model.config))}
    shards = _deal(_export(model, layout), shard_bytes)
    if len(shards) > 1:
        texts[INDEX] = _to_json(_index(shards))
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:  # the configuration is replaced last
        new = {name: stack.enter_context(replacing(folder / name)) for name in (*texts, *shards)}
        for name, shard in shards.items():
            there = {key: tensor.cpu().contiguous() for key, tensor in shard.items()}
            save_file(there, new[name], metadata={"format": "pt"})
        for name, text in texts.items():
            new[name].write_text(text, encoding="utf-8")
        _retire(folder, list(new), texts[CONFIG])


def load(folder: Path, **options: Any) -> Decoder:
    """Return the model in `folder`, float32 on the CPU, padding rows zero; options as Decoder's: attention, recipe, ...

    Raises ValueError for a folder without safetensors, for an unknown kind of model, and for missing, unknown or
    misshapen tensors, naming them.
    """
    layout, config = _read_config(folder)
    model = make_empty(config, **options)
    parameters = dict(model.named_parameters())
    where = f"{folder} does not hold the model that its {CONFIG} describes"
    with torch.no_grad():
        for place, tensor in match_tensors(model, _name_tensors(folder, model, layout), where, layout.pieces):
            parameters[place.parameter][place.rows].copy_(tensor)
        for parameter in filter(model.has_padding, parameters.values()):
            parameter[config.vocab_size :].zero_()
    return model


def make_empty(config: DecoderConfig, **options: Any) -> Decoder:
    """Return the model on the CPU with uninitialised memory; draws no random numbers.

    Raises ValueError if there is not enough memory.
    """
    with torch.device("meta"):
        model = decoder.build(config, **options)
    try:
        model.to_empty(device="cpu")
    except RuntimeError as error:  # torch has no exception class for a CPU out of memory
        if "allocate memory" not in str(error):
            raise
        held = 4 * cost.parameters(config, len(model.tables().tokens.weight)) / 1e9
        raise ValueError(f"the model takes {held:,.0f} GB in float32, and this machine has not as much") from error
    model.tie()  # moving off the meta device unties it
    return model


def find_places(model: Decoder, pieces: Pieces = whole) -> dict[str, Place]:
    """Return {key in a file: its place} for every parameter and a tied head."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    places = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, start = first[id(parameter)], 0
        end = model.config.vocab_size if model.has_padding(parameter) else len(parameter)
        for key, rows, transposed in pieces(model.config, name):
            stop = end if rows is None else start + rows
            shape = [stop - start, *parameter.shape[1:]]
            turned = shape[::-1] if transposed else shape
            places[key] = Place(owner, slice(start, stop), turned, transposed, again=owner != name)
            start = stop
    return places


def match_tensors(
    model: Decoder, tensors: Iterable[tuple[str, str, Any]], where: str, pieces: Pieces = whole
) -> Iterator[tuple[Place, Tensor]]:
    """Yield (place, tensor in our layout) of (key in the file, full name, value); a tied head is checked and skipped.

    Raises ValueError at the end, beginning with `where`, naming every tensor that does not fit.
    """
    missing, wrong = find_places(model, pieces), []
    tables: dict[str, Tensor] = {}
    tied = {place.parameter for place in missing.values() if place.again}
    for key, name, tensor in tensors:
        place = missing.pop(name, None)
        if place is None:
            wrong.append(f"{key} is unknown or there twice")
            continue
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or list(tensor.shape) != place.shape:
            there = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            wrong.append(f"{key} is {there}, not floating point {place.shape}")
            continue
        if place.parameter in tied and not _are_same(tables.setdefault(place.parameter, tensor), tensor):
            wrong.append(f"{key} differs, but head and token embedding are tied: another model")
        if not place.again:
            yield place, tensor.t() if place.transposed else tensor
    wrong += [f"{name} is missing" for name, place in missing.items() if not place.again]
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(f"{where}: {'; '.join(wrong[:5])}{more}")


def _are_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tables hold the same numbers, NaN for NaN, whatever their dtypes."""
    return a is b or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _read_config(folder: Path) -> tuple[Layout, DecoderConfig]:
    """Read config.json as a configuration of ours. Raises ValueError naming settings that we cannot express."""
    path = folder / CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {CONFIG}: give a folder in the Hugging Face layout") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object")
    try:
        layout = layouts.of_model_type(found.get("model_type"))
        return layout, layout.read(found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _export(model: Decoder, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yield (key, view) as transformers has them: no padding rows or tied head, zeros for vectors the model lacks."""
    parameters = dict(model.named_parameters())
    for key, place in find_places(model, layout.pieces).items():
        if not place.again:
            tensor = parameters[place.parameter].detach()[place.rows]
            yield key, tensor.t() if place.transposed else tensor
    for key, size in layout.zeros(model.config).items():
        yield key, torch.zeros(size, dtype=next(model.parameters()).dtype, device="cpu")


def _deal(tensors: Iterable[tuple[str, Tensor]], most: int) -> dict[str, dict[str, Tensor]]:
    """Distribute the tensors over files of at most `most` bytes: {file name: {key: tensor}}."""
    shards, size = [dict[str, Tensor]()], 0
    for key, tensor in tensors:
        if shards[-1] and size + tensor.nbytes > most:
            shards.append({})
            size = 0
        shards[-1][key] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _index(shards: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    size = sum(tensor.nbytes for shard in shards.values() for tensor in shard.values())
    return {
        "metadata": {"total_size": size},
        "weight_map": {key: name for name, shard in shards.items() for key in shard},
    }


def _to_json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"


def _retire(folder: Path, new: list[str], config: str) -> None:
    """Delete the files of another model before the `new` ones are put in place: config.json first.

    A single weight file under the same configuration is replaced at once, and nothing is deleted.
    """
    stale = [path for path in folder.iterdir() if OURS.fullmatch(path.name) and path.name not in new]
    old = folder / CONFIG
    if stale or INDEX in new or not old.exists() or old.read_bytes() != config.encode():
        old.unlink(missing_ok=True)
    for path in stale:
        path.unlink()


def _name_tensors(folder: Path, model: Decoder, layout: Layout) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (key, full name, tensor) of the folder's parameters."""
    known = find_places(model, layout.pieces)
    for key, tensor in _read_tensors(folder):
        name = key if key in known or key.startswith(layout.prefix) else f"{layout.prefix}{key}"
        if not layout.ignored.search(name):
            yield key, name, tensor


def _read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (key, tensor) of the folder's safetensors, one file or several under an index."""
    names = [WEIGHTS]
    if not (folder / WEIGHTS).exists():
        if not (folder / INDEX).exists():
            pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
            hint = f"{pickled[0]} is a pickle, which can run code: convert it to safetensors first" if pickled else ""
            raise ValueError(f"{folder} has no {WEIGHTS}" + (f"; {hint}" if hint else ""))
        names = _read_shards(folder / INDEX)
    for name in names:
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a mapping)
                    yield key, file.get_tensor(key)
        except FileNotFoundError as error:
            raise ValueError(f"{folder} has no {name}, which {INDEX} names: fetch the whole folder") from error
        except (SafetensorError, OSError) as error:
            raise ValueError(f"cannot read {folder / name}: {error}; fetch it again") from error


def _read_shards(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise ValueError(f"{index} is not an index of safetensors files") from error
    if not all(isinstance(name, str) and re.fullmatch(r"[\w.-]+\.safetensors", name) for name in names):
        raise ValueError(f"{index} names files that are not safetensors beside it")
    return names
